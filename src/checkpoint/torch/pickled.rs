//! One pickle of a file as findings: which globals it names, which calls it would make, and whether it is whole.
//!
//! It knows names and arguments, no tensors. Nothing is executed, and nothing that was popped is forgotten.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::checkpoint::finding::{Finding, Severity, Spot};
use crate::checkpoint::pickle::{self, Broken, Danger, Global, Id, Ran, Walk, globals};

/// Findings of one pickle that are kept.
const MOST_FINDINGS: usize = 1000;

/// One name that a file's pickles hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NamedGlobal {
    /// The module, as it is written.
    pub module: String,
    /// The name in it.
    pub name: String,
    /// What is known of it.
    pub danger: Danger,
    /// Offset in bytes of the first opcode that names it.
    pub position: u64,
    /// How often it is named.
    pub count: u64,
    /// The member of the archive, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
}

/// A pickle that was run, and what its result reaches.
pub(crate) struct Pickled {
    pub(crate) ran: Ran,
    pub(crate) walk: Walk,
    pub(crate) globals: Vec<NamedGlobal>,
    pub(crate) findings: Vec<Finding>,
}

impl Pickled {
    /// Runs the pickle that begins at byte `at` of `bytes`.
    pub(crate) fn run(bytes: Vec<u8>, at: usize, member: Option<&str>) -> Pickled {
        let ran = pickle::run(bytes, at);
        let walk = ran.result.map(|root| pickle::walk(&ran.arena, root)).unwrap_or_default();
        let mut pickled = Pickled { ran, walk, globals: Vec::new(), findings: Vec::new() };
        pickled.grade(member);
        pickled.check_calls();
        let broken = pickled.ran.broken.iter().chain(&pickled.walk.broken);
        let broken: Vec<Finding> = broken.map(|broken| of_broken(broken, at as u64)).collect();
        pickled.findings.extend(broken);
        if !matches!(pickled.ran.protocol, 2 | 0) {
            let what =
                format!("pickle protocol {}; torch itself reads only 2 under weights_only", pickled.ran.protocol);
            pickled.findings.push(Finding::notice("pickle-protocol", what));
        }
        if let Some(member) = member {
            pickled.findings.iter_mut().for_each(|finding| finding.member = Some(member.to_owned()));
        }
        pickled
    }

    /// What follows the pickle, where nothing may.
    pub(crate) fn check_end(&mut self, len: usize, member: &str) {
        if self.ran.broken.is_none() && self.ran.end < len {
            let what = format!("{} bytes follow the pickle's end", len - self.ran.end);
            self.findings.push(Finding::suspicious("trailing-pickle", what).within(member));
        }
    }

    /// Lists every name that was pushed, and what is to be said of it.
    fn grade(&mut self, member: Option<&str>) {
        let (mut globals, mut findings) = (Vec::new(), Vec::new());
        for (names, seen) in self.seen() {
            let global = seen.named(names, member);
            // Many unknown names must not leave out what is known to run code.
            let most = if global.danger == Danger::Dangerous { 2 * MOST_FINDINGS } else { MOST_FINDINGS };
            if findings.len() < most
                && let Some(finding) = of_global(&global)
            {
                findings.push(finding.at(Spot {
                    position: global.position,
                    opcode: Some(seen.first.opcode),
                    global: Some(format!("{}.{}", global.module, global.name)),
                    arguments: seen.arguments.map(|arguments| self.ran.arena.preview(arguments)),
                    reached: Some(seen.reached),
                }));
            }
            globals.push(global);
        }
        (self.globals, self.findings) = (globals, findings);
    }

    /// Every name with where it was seen.
    fn seen(&self) -> BTreeMap<(&str, &str), Seen> {
        let arena = &self.ran.arena;
        let mut calls: HashMap<Id, Id> = HashMap::new();
        for call in &arena.calls {
            calls.entry(call.function).or_insert(call.arguments);
        }
        let mut named: BTreeMap<(&str, &str), Seen> = BTreeMap::new();
        for global in &arena.globals {
            let new = || Seen { first: *global, count: 0, arguments: None, reached: false };
            let seen = named.entry(arena.names(global)).or_insert_with(new);
            seen.count += 1;
            seen.arguments = seen.arguments.or(calls.get(&global.id).copied());
            seen.reached |= self.walk.reaches(global.id);
        }
        named
    }

    /// Calls of allowed names whose arguments would nonetheless do something, and calls of what a call made.
    fn check_calls(&mut self) {
        let arena = &self.ran.arena;
        let mut found = Vec::new();
        for call in arena.calls.iter().take_while(|_| self.findings.len() < MOST_FINDINGS) {
            let (rule, what) = match arena.as_global(call.function) {
                Some(("_codecs", "encode")) if !self.is_latin1(call.arguments) => {
                    ("argument-denied", "an encoding other than Latin-1")
                }
                // Protocols 0 and 1 name it as the base of a class; made itself it is nothing that is known.
                Some(("builtins" | "__builtin__", "object")) => {
                    ("global-not-allowed", "calls builtins.object, which is no data")
                }
                Some(_) => continue,
                None => ("argument-denied", "the result of a call is called"),
            };
            let finding = Finding::suspicious(rule, what);
            found.push(finding.at(Spot {
                position: call.offset.into(),
                opcode: Some(call.opcode),
                global: None,
                arguments: Some(arena.preview(call.arguments)),
                reached: Some(self.walk.reaches(call.id)),
            }));
            if found.len() >= MOST_FINDINGS {
                break;
            }
        }
        self.findings.append(&mut found);
    }

    fn is_latin1(&self, arguments: Id) -> bool {
        let arena = &self.ran.arena;
        let Some([text, encoding]) = arena.as_tuple(arguments) else { return false };
        arena.as_text(*text).is_some() && matches!(arena.as_text(*encoding), Some("latin1" | "latin-1"))
    }
}

/// Where a name was seen.
struct Seen {
    first: Global,
    count: u64,
    /// Those of a call of it.
    arguments: Option<Id>,
    reached: bool,
}

impl Seen {
    fn named(&self, (module, name): (&str, &str), member: Option<&str>) -> NamedGlobal {
        let danger = globals::danger(module, name);
        let (module, name, member) = (module.to_owned(), name.to_owned(), member.map(str::to_owned));
        NamedGlobal { module, name, danger, position: self.first.offset.into(), count: self.count, member }
    }
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

fn of_broken(broken: &Broken, start: u64) -> Finding {
    let notice = broken.rule == "integer-limit" && !broken.suspicious;
    let severity = match broken.suspicious {
        true => Severity::Suspicious,
        false if notice => Severity::Notice,
        false => Severity::Malformed,
    };
    let position = broken.offset.saturating_sub(start);
    Finding::new(broken.rule, severity, broken.what.clone()).at(Spot { position, ..Spot::default() })
}
