//! One pickle of a file as findings: which globals it names, which calls it would make, and whether it is whole.
//!
//! It knows names and arguments, no tensors. Nothing is executed, and nothing that was popped is forgotten.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use crate::calls::Judge;
use crate::finding::{self, Finding, Severity, Spot};
use crate::nested;
use crate::pickle::{self, Arena, Broken, Call, Danger, Global, Id, Ran, Span, Walk, globals};

/// Findings of one pickle that are kept, of each severity, and those about calls, of each kind.
const MOST_FINDINGS: usize = 1000;
const MOST_CALLS: usize = 100;
/// Different names of one pickle that are listed; of those that are known to run code as many again.
pub(crate) const MOST_NAMES: usize = 100_000;

/// One name that a file's pickles hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NamedGlobal {
    /// The module, as it is written; cut where it is absurdly long.
    pub module: String,
    /// The name in it.
    pub name: String,
    /// What is known of it.
    pub danger: Danger,
    /// Offset in bytes of the first opcode that names it, within the member or the file.
    pub position: u64,
    /// How often it is named.
    pub count: u64,
    /// The member of the archive, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
}

impl NamedGlobal {
    pub(crate) fn key(&self) -> (String, String) {
        (self.module.clone(), self.name.clone())
    }
}

/// A pickle that was run, and what its result reaches.
pub(crate) struct Pickled {
    pub(crate) ran: Ran,
    pub(crate) walk: Walk,
    pub(crate) globals: Vec<NamedGlobal>,
    pub(crate) findings: Vec<Finding>,
    /// The worst of those names that could be ones of Python.
    worst: Option<Danger>,
    /// Bytes that were read for it.
    pub(crate) read: usize,
    /// Where it ends to an unpickler to which its frames end elsewhere.
    pub(crate) other_end: Option<usize>,
    /// Where it begins in its member or file, and the member's name.
    place: (u64, Option<String>),
}

impl Pickled {
    /// Runs the pickle that `bytes` begin with. They stand at byte `at` of their member or file.
    pub(crate) fn run(bytes: Vec<u8>, at: u64, member: Option<&str>) -> Pickled {
        let whole = bytes.len() as u64;
        Pickled::run_part(bytes, whole, at, member)
    }

    /// The same, where `bytes` are only the beginning of the `whole` that there are.
    pub(crate) fn run_part(bytes: Vec<u8>, whole: u64, at: u64, member: Option<&str>) -> Pickled {
        let mut pickled = Pickled::of(pickle::run(bytes, whole));
        if pickled.ran.faults.iter().any(|fault| fault.rule == "frame") {
            pickled.merge(Pickled::of(pickle::run_skipping(pickled.ran.arena.bytes.clone(), whole)));
        }
        pickled.placed(at, member.map(finding::name).as_deref());
        pickled
    }

    fn of(ran: Ran) -> Pickled {
        let read = ran.arena.bytes.len();
        let walk = ran.result.map(|root| pickle::walk(&ran.arena, root)).unwrap_or_default();
        let mut pickled = Pickled {
            ran,
            walk,
            globals: Vec::new(),
            findings: Vec::new(),
            worst: None,
            read,
            other_end: None,
            place: (0, None),
        };
        pickled.grade();
        pickled.check_calls();
        let broken = pickled.ran.faults.iter().chain(&pickled.walk.broken);
        let broken: Vec<Finding> = broken.map(of_broken).collect();
        pickled.findings.extend(broken);
        if !matches!(pickled.ran.protocol, 2 | 0) {
            let what =
                format!("pickle protocol {}; torch itself reads only 2 under weights_only", pickled.ran.protocol);
            pickled.findings.push(Finding::notice("pickle-protocol", what));
        }
        pickled
    }

    /// Adds what another unpickler would see in the same bytes.
    fn merge(&mut self, other: Pickled) {
        let known: HashSet<(String, String)> = self.globals.iter().map(NamedGlobal::key).collect();
        self.globals.extend(other.globals.into_iter().filter(|global| !known.contains(&global.key())));
        self.findings.extend(other.findings);
        self.worst = self.worst.max(other.worst);
        self.ran.wants = self.ran.wants.max(other.ran.wants);
        self.other_end = Some(other.ran.end).filter(|end| other.ran.stopped && *end != self.ran.end);
    }

    fn placed(&mut self, at: u64, member: Option<&str>) {
        self.place = (at, member.map(str::to_owned));
        let mut findings = std::mem::take(&mut self.findings);
        findings.iter_mut().for_each(|finding| self.place(finding));
        self.findings = findings;
        for global in &mut self.globals {
            global.member = member.map(str::to_owned);
            global.position = global.position.saturating_add(at);
        }
    }

    /// Says of a finding about the pickle where in the file it is.
    pub(crate) fn place(&self, finding: &mut Finding) {
        let (at, member) = &self.place;
        finding.member.clone_from(member);
        if let Some(position) = finding.spot.as_mut().and_then(|spot| spot.position.as_mut()) {
            *position = position.saturating_add(*at);
        }
    }

    /// Whether it is worth telling of where other data would be no surprise.
    pub(crate) fn tells(&self) -> bool {
        self.ran.result.is_some() || !self.globals.is_empty()
    }

    /// Whether it is one: it runs to its end, or names what could be imported.
    pub(crate) fn is_pickle(&self) -> bool {
        self.ran.result.is_some() || self.names_something()
    }

    /// Whether a name in it could be one of Python: other data hold lines too.
    pub(crate) fn names_something(&self) -> bool {
        self.worst.is_some()
    }

    /// Whether it does more than naming something: text that begins with a certain letter does that.
    pub(crate) fn acts(&self) -> bool {
        self.ran.stopped || self.worst == Some(Danger::Dangerous) || !self.ran.arena.calls.is_empty()
    }

    /// Says that a limit was met.
    pub(crate) fn limited(&mut self, what: String, member: Option<&str>) {
        let finding = Finding::suspicious("resource-limit", what);
        self.findings.push(member.map_or(finding.clone(), |member| finding.within(member)));
    }

    /// What follows the pickle, where nothing may.
    pub(crate) fn check_end(&mut self, len: usize, member: &str) {
        if self.ran.stopped && self.ran.end < len {
            let what = format!("{} bytes follow the pickle's end", len - self.ran.end);
            self.findings.push(Finding::suspicious("trailing-pickle", what).within(member));
        }
    }

    /// Lists every name that was pushed, and what is to be said of it.
    fn grade(&mut self) {
        let (mut globals, mut findings) = (Vec::new(), Vec::new());
        let (mut names, mut told, mut worst) = ([0; 2], [0; 2], None);
        let only_names = nested::only_names(&self.ran.arena);
        for seen in seen(&self.ran.arena) {
            let (mut global, short) = seen.named(&self.ran.arena);
            let is_name_only = global.danger == Danger::Dangerous && seen.ids.iter().all(|id| only_names.contains(id));
            if is_name_only {
                global.danger = Danger::Unknown; // what it names is listed for itself
            }
            let (module, name) = self.ran.arena.names(&seen.first);
            if is_name(module) && is_name(name) {
                worst = worst.max(Some(global.danger));
            }
            // Many unknown names must not leave out what is known to run code.
            let kind = usize::from(global.danger == Danger::Dangerous);
            let [names, told] = [&mut names, &mut told].map(|counts| counts.get_mut(kind));
            let (Some(names), Some(told)) = (names, told) else { continue };
            *names += 1;
            if *names > MOST_NAMES {
                continue;
            }
            if *told < MOST_FINDINGS
                && !is_name_only
                && let Some(finding) = of_global(&global)
            {
                *told += 1;
                findings.push(finding.at(self.spot(&seen, short)));
            }
            globals.push(global);
        }
        self.grade_nested(&mut globals, &mut findings);
        if names.iter().any(|names| *names > MOST_NAMES) {
            let what = format!("{} different names; {} are listed", names.iter().sum::<usize>(), globals.len());
            findings.push(Finding::suspicious("resource-limit", what));
        }
        (self.globals, self.findings, self.worst) = (globals, findings, worst);
    }

    /// Lists the names that calls of `getattr` mean.
    fn grade_nested(&self, globals: &mut Vec<NamedGlobal>, findings: &mut Vec<Finding>) {
        let arena = &self.ran.arena;
        let mut known: HashMap<(String, String), usize> = HashMap::new();
        for call in &arena.calls {
            let Some((module, name, danger)) = nested::named(arena, call) else { continue };
            let key = (finding::name(module), finding::name(&name));
            if let Some(global) = known.get(&key).and_then(|at| globals.get_mut(*at)) {
                global.count += 1;
                continue;
            }
            if known.len() >= MOST_FINDINGS {
                return;
            }
            known.insert(key.clone(), globals.len());
            let (module, name) = key;
            let global = NamedGlobal { module, name, danger, position: call.offset.into(), count: 1, member: None };
            findings.extend(of_global(&global).map(|finding| {
                finding.at(Spot {
                    position: Some(call.offset.into()),
                    opcode: Some(call.opcode),
                    global: Some(format!("{}.{}", global.module, global.name)),
                    arguments: Some(arena.preview(call.arguments)),
                    reached: self.ran.result.map(|_| self.walk.reaches(call.id)),
                })
            }));
            globals.push(global);
        }
    }

    fn spot(&self, seen: &Seen, global: String) -> Spot {
        // Above a limit numbers of values are used again.
        let limited = self.ran.faults.iter().any(|fault| fault.rule == "resource-limit");
        let arguments = seen.arguments.filter(|_| !limited);
        Spot {
            position: Some(seen.first.offset.into()),
            opcode: Some(seen.first.opcode),
            global: Some(global),
            arguments: arguments.map(|arguments| self.ran.arena.preview(arguments)),
            reached: self.ran.result.map(|_| seen.ids.iter().any(|id| self.walk.reaches(*id))),
        }
    }

    /// Calls of allowed names that would nonetheless do something, and calls of what a call made.
    fn check_calls(&mut self) {
        let arena = &self.ran.arena;
        let (mut told, mut judge): (HashMap<&str, usize>, _) = (HashMap::new(), Judge::new(arena));
        let mut found = Vec::new();
        for call in &arena.calls {
            let Some(objection) = judge.objection(call) else { continue };
            let told = told.entry(objection.1).or_default();
            *told += 1;
            if *told <= MOST_CALLS {
                found.push(of_objection(self, call, objection));
            }
        }
        self.findings.append(&mut found);
    }

    /// Findings about those unknown names of which one value counts.
    pub(crate) fn unknown_names(&self, counts: impl Fn(&Id) -> bool) -> Vec<Finding> {
        let arena = &self.ran.arena;
        let only_names = nested::only_names(arena);
        let mut found = Vec::new();
        for seen in seen(arena) {
            let (global, short) = seen.named(arena);
            let is_name_only = seen.ids.iter().all(|id| only_names.contains(id));
            if global.danger == Danger::Unknown && !is_name_only && seen.ids.iter().any(&counts) {
                found.extend(of_global(&global).map(|finding| finding.at(self.spot(&seen, short))));
            }
        }
        let calls: HashMap<u64, Id> = arena.calls.iter().map(|call| (u64::from(call.offset), call.id)).collect();
        let (mut globals, mut nested) = (Vec::new(), Vec::new());
        self.grade_nested(&mut globals, &mut nested);
        let position = |finding: &Finding| finding.spot.as_ref().and_then(|spot| spot.position);
        nested.retain(|finding| position(finding).and_then(|at| calls.get(&at)).is_some_and(&counts));
        found.append(&mut nested);
        found
    }
}

/// Where a name was seen.
struct Seen {
    first: Global,
    /// The values that mean it.
    ids: Vec<Id>,
    /// Those of a call of it.
    arguments: Option<Id>,
}

/// Every name with where it was seen, in the order of the pickle. Long names that many globals share are read once.
fn seen(arena: &Arena) -> Vec<Seen> {
    let mut calls: HashMap<Id, Id> = HashMap::new();
    for call in &arena.calls {
        calls.entry(call.function).or_insert(call.arguments);
    }
    let mut names = Names { arena, by_span: HashMap::new(), by_text: HashMap::new() };
    let mut known: HashMap<[usize; 2], usize> = HashMap::new();
    let mut all: Vec<Seen> = Vec::new();
    for global in &arena.globals {
        let at = *known.entry([names.number(global.module), names.number(global.name)]).or_insert(all.len());
        if at == all.len() {
            all.push(Seen { first: *global, ids: Vec::new(), arguments: None });
        }
        if let Some(seen) = all.get_mut(at) {
            seen.ids.push(global.id);
            seen.arguments = seen.arguments.or(calls.get(&global.id).copied());
        }
    }
    all
}

/// Numbers for texts, the same for the same.
struct Names<'a> {
    arena: &'a Arena,
    by_span: HashMap<Span, usize>,
    by_text: HashMap<&'a [u8], usize>,
}

impl Names<'_> {
    fn number(&mut self, span: Span) -> usize {
        *self.by_span.entry(span).or_insert_with(|| {
            let next = self.by_text.len();
            *self.by_text.entry(self.arena.bytes(span)).or_insert(next)
        })
    }
}

impl Seen {
    /// The name, and in short.
    fn named(&self, arena: &Arena) -> (NamedGlobal, String) {
        let (module, name) = arena.names(&self.first);
        let danger = globals::danger(module, name);
        let (module, name) = (finding::name(module), finding::name(name));
        let short = format!("{module}.{name}");
        let (position, count) = (self.first.offset.into(), self.ids.len() as u64);
        (NamedGlobal { module, name, danger, position, count, member: None }, short)
    }
}

/// Whether Python could import it, or find it in what it has imported: names with dots between.
fn is_name(name: &str) -> bool {
    // Thousands of globals may share a name of megabytes.
    const LONGEST_READ: usize = 4 << 10;
    name.len() > LONGEST_READ
        || name.split('.').all(|part| {
            let digit = part.chars().next().is_none_or(|first| first.is_ascii_digit());
            !digit && part.chars().all(|c| c == '_' || c.is_alphanumeric())
        })
}

fn of_global(global: &NamedGlobal) -> Option<Finding> {
    let dotted = format!("{}.{}", global.module, global.name);
    match global.danger {
        Danger::Allowed if global.module.starts_with("numpy") || global.module == "ndarray" => {
            Some(Finding::notice("numpy-global", format!("names {dotted}")))
        }
        Danger::Allowed => None,
        Danger::Script => Some(Finding::notice("torchscript", format!("names {dotted}, a class of TorchScript"))),
        Danger::Unknown => {
            Some(Finding::suspicious("global-not-allowed", format!("names {dotted}, which is not on the allow-list")))
        }
        Danger::Dangerous => {
            Some(Finding::new("global-denied", Severity::Dangerous, format!("names {dotted}, which can run code")))
        }
    }
}

/// A finding about a call, by what the judge says of it.
pub(crate) fn of_objection(pickled: &Pickled, call: &Call, (rule, what): (&'static str, &'static str)) -> Finding {
    Finding::suspicious(rule, what).at(Spot {
        position: Some(call.offset.into()),
        opcode: Some(call.opcode),
        global: None,
        arguments: Some(pickled.ran.arena.preview(call.arguments)),
        reached: pickled.ran.result.map(|_| pickled.walk.reaches(call.id)),
    })
}

pub(crate) fn of_broken(broken: &Broken) -> Finding {
    let finding = Finding::new(broken.rule, broken.severity, broken.what.clone());
    match broken.offset {
        Some(offset) => finding.at(Spot { position: Some(offset), ..Spot::default() }),
        None => finding,
    }
}
