//! One pickle of a file as findings: which globals it names, which calls it would make, and whether it is whole.
//!
//! It knows names and arguments, no tensors. Nothing is executed, and nothing that was popped is forgotten.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::checkpoint::finding::{Finding, Severity};
use crate::checkpoint::pickle::{self, Broken, Danger, Id, Ran, Walk, globals};

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

    fn grade(&mut self, member: Option<&str>) {
        let arena = &self.ran.arena;
        let mut calls: HashMap<Id, Id> = HashMap::new();
        for call in &arena.calls {
            calls.entry(call.function).or_insert(call.arguments);
        }
        let mut named: BTreeMap<(&str, &str), (NamedGlobal, Id, Option<Id>, bool)> = BTreeMap::new();
        for global in &arena.globals {
            let names = arena.names(global);
            let (call, reached) = (calls.get(&global.id).copied(), self.walk.reaches(global.id));
            let known = named.entry(names).or_insert_with(|| {
                let (module, name) = (names.0.to_owned(), names.1.to_owned());
                let (danger, position) = (globals::danger(names.0, names.1), u64::from(global.offset));
                let member = member.map(str::to_owned);
                (NamedGlobal { module, name, danger, position, count: 0, member }, global.id, call, reached)
            });
            known.0.count += 1;
            known.2 = known.2.or(call);
            known.3 |= reached;
        }
        for (global, id, call, reached) in named.into_values() {
            let finding = of_global(&global).filter(|_| self.findings.len() < MOST_FINDINGS);
            let opcode = arena.globals.iter().find(|known| known.id == id).map(|known| known.opcode);
            let arguments = call.map(|arguments| arena.preview(arguments));
            self.findings.extend(finding.map(|finding| Finding {
                position: Some(global.position),
                opcode,
                global: Some(format!("{}.{}", global.module, global.name)),
                arguments,
                reached: Some(reached),
                ..finding
            }));
            self.globals.push(global);
        }
    }

    /// Calls of allowed names whose arguments would nonetheless do something, and calls of what a call made.
    fn check_calls(&mut self) {
        let arena = &self.ran.arena;
        let mut found = Vec::new();
        for call in arena.calls.iter().take_while(|_| self.findings.len() < MOST_FINDINGS) {
            let what = match arena.as_global(call.function) {
                Some(("_codecs", "encode")) if !self.is_latin1(call.arguments) => "an encoding other than Latin-1",
                Some(_) => continue,
                None => "the result of a call is called",
            };
            let finding = Finding::suspicious("argument-denied", what);
            found.push(Finding {
                position: Some(call.offset.into()),
                opcode: Some(call.opcode),
                arguments: Some(arena.preview(call.arguments)),
                reached: Some(self.walk.reaches(call.id)),
                ..finding
            });
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
    let position = Some(broken.offset.saturating_sub(start));
    Finding { position, ..Finding::new(broken.rule, severity, broken.what.clone()) }
}
