//! What a user reads of a file that is refused: what was found, how many tensors an unknown object would take along, what to do.
//!
//! Few findings stand for themselves; many unknown names are grouped by package, behind the next step. It decides nothing.

use std::collections::BTreeMap;

use super::Reader;
use super::aside::Aside;
use super::inert::Used;
use super::objects::Objects;
use super::pickled::Pickled;
use crate::checkpoint::finding::{Finding, Severity};
use crate::checkpoint::pickle::Id;
use crate::checkpoint::skipped::WHOLE_MODEL;
use crate::error::{Error, Result};
use crate::fault::{Fault, Listed, counted, quoted};
use crate::setting::Setting;

/// Unknown names that are told one by one.
const MOST_SINGLE: usize = 3;
/// Names of one package that are told.
const MOST_OF_PACKAGE: usize = 6;

const RUNS: &str = "; nothing was executed: do not open this file with a program that unpickles";

impl Reader<'_> {
    /// Refuses the file for findings that block, all of them named.
    pub(super) fn demand(&self, findings: &[Finding]) -> Result<()> {
        let blocking = self.blocking(findings);
        if blocking.is_empty() { Ok(()) } else { Err(self.refused(&blocking)) }
    }

    /// The same for findings about a pickle whose object is `root`, or what was asked for of it.
    pub(super) fn demand_of(&self, pickled: &Pickled, root: Option<Id>, findings: &[Finding]) -> Result<()> {
        let blocking = self.blocking(findings);
        if blocking.is_empty() {
            return Ok(());
        }
        let inside = root.map(|root| unread(pickled, root)).unwrap_or_default();
        Err(self.refused_with(&blocking, &inside))
    }

    fn blocking(&self, findings: &[Finding]) -> Vec<Finding> {
        findings.iter().filter(|finding| blocks(finding, self.options.skip_unknown)).cloned().collect()
    }

    pub(super) fn refused(&self, findings: &[Finding]) -> Error {
        self.refused_with(findings, &Unread::default())
    }

    fn refused_with(&self, findings: &[Finding], inside: &Unread) -> Error {
        let is_unknown = |finding: &&Finding| finding.rule == "global-not-allowed";
        let unknown = findings.iter().filter(is_unknown).count();
        let code = findings.iter().filter_map(|finding| finding.spot.as_ref()).any(|spot| spot.global.is_some());
        let advice = match (unknown > 0, code) {
            (true, _) => self.next_step(inside),
            (false, true) => RUNS.to_owned(),
            (false, false) => String::new(),
        };
        let fault = if unknown > MOST_SINGLE {
            let others = counted_kinds(findings.iter().filter(|finding| !is_unknown(finding)));
            let next_step = advice.trim_start_matches("; ").to_owned();
            let list = std::iter::once(next_step).chain(by_package(findings.iter().filter(is_unknown))).chain(others);
            Fault::Refused { list: list.collect(), advice: String::new() }
        } else {
            Fault::Refused { list: findings.iter().map(Finding::to_string).collect(), advice }
        };
        Error::malformed(self.path, fault)
    }

    /// What to do about unknown names, by what their objects hold.
    fn next_step(&self, Unread { inside, keys }: &Unread) -> String {
        let tensors = |all: &mut dyn Iterator<Item = &Aside>| {
            let sum = all.fold(0u64, |sum, aside| sum.saturating_add(aside.tensors));
            counted(usize::try_from(sum).unwrap_or(usize::MAX), "tensor")
        };
        let is_model = |aside: &&Aside| aside.why.starts_with(WHOLE_MODEL);
        if let Some(model) = inside.iter().find(is_model) {
            let several = inside.iter().filter(is_model).count() > 1;
            let count = tensors(&mut inside.iter().filter(is_model));
            let (at, choose) = match (model.is_root(), self.options.key.is_some()) {
                (true, _) => (String::new(), String::new()),
                (false, _) => {
                    let names: Listed = inside.iter().filter(is_model).map(|model| quoted(&model.name)).collect();
                    (format!(" at {names}"), format!(" and choose the key {}", quoted(&model.name)))
                }
            };
            let whole = if several { "whole models, torch.save(model)" } else { WHOLE_MODEL };
            return format!(
                "; {whole}: {count} inside{at}; nothing was executed: save model.state_dict() instead, or pass over unknown objects \
                 with {}{choose} to read the parameters and buffers",
                Setting::SkipUnknown
            );
        }
        let save = "; nothing was executed: save a state_dict (tensors and plain data only)";
        if inside.is_empty() {
            return format!("{save}, or pass over unknown objects with {}", Setting::SkipUnknown);
        }
        let names: Listed = inside.iter().map(|aside| format!("{} ({})", quoted(&aside.name), aside.why)).collect();
        let count = tensors(&mut inside.iter());
        let keys: Listed = keys.iter().map(|key| quoted(key)).collect();
        let other = match keys.len() {
            0 => String::new(),
            1 => format!(", or choose the key {keys}, which holds none of them"),
            _ => format!(", or choose one of the keys that hold none of them: {keys}"),
        };
        format!("{save}{other}; passing over unknown objects would lose {count}: {names}")
    }
}

/// What of an object a load would leave out that passes over unknown objects.
#[derive(Default)]
struct Unread {
    /// Those with tensors in them.
    inside: Vec<Aside>,
    /// Keys that lead to tensors and to none of these.
    keys: Vec<String>,
}

fn unread(pickled: &Pickled, root: Id) -> Unread {
    let mut objects = Objects::new(&pickled.ran.arena);
    let used = Used::of(&objects, root, false, true);
    if !used.is_whole() {
        return Unread::default();
    }
    objects.declare(|id| used.reaches(id));
    objects.gather(root);
    let mut keys = objects.top_keys(root);
    let is_below =
        |name: &str, key: &str| name.strip_prefix(key).is_some_and(|rest| rest.starts_with('.') || rest.is_empty());
    keys.retain(|key| {
        objects.tensors.iter().any(|found| is_below(&found.name, key))
            && !objects.aside.iter().any(|aside| is_below(&aside.name, key) && aside.tensors > 0)
    });
    let inside = objects.aside.into_iter().filter(|aside| aside.tensors > 0).collect();
    Unread { inside, keys }
}

/// Other findings, each kind once.
fn counted_kinds<'a>(findings: impl Iterator<Item = &'a Finding>) -> Vec<String> {
    let mut kinds: Vec<(&Finding, usize)> = Vec::new();
    for finding in findings {
        match kinds.iter_mut().find(|(first, _)| (first.rule, &first.what) == (finding.rule, &finding.what)) {
            Some((_, count)) => *count += 1,
            None => kinds.push((finding, 1)),
        }
    }
    let line = |(first, count): (&Finding, usize)| match count {
        1 => first.to_string(),
        _ => format!("{first}, and {} more of the same", count - 1),
    };
    kinds.into_iter().map(line).collect()
}

/// Unknown names, a line for each package.
fn by_package<'a>(findings: impl Iterator<Item = &'a Finding>) -> Vec<String> {
    let mut packages: BTreeMap<String, (usize, Vec<String>)> = BTreeMap::new();
    for finding in findings {
        let global = finding.spot.as_ref().and_then(|spot| spot.global.clone()).unwrap_or_else(|| finding.what.clone());
        // PyTorch is many packages in one.
        let parts = if global.starts_with("torch.") { 2 } else { 1 };
        let package: Vec<&str> = global.split('.').take(parts).collect();
        let (count, names) = packages.entry(package.join(".")).or_default();
        *count += 1;
        if names.len() < MOST_OF_PACKAGE {
            names.push(global);
        }
    }
    let line = |(package, (count, names)): (String, (usize, Vec<String>))| {
        let more = count - names.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let names = Finding::suspicious("global-not-allowed", names.join(", ") + &more);
        format!("{} of {package} not on the allow-list: {names}", counted(count, "name"))
    };
    packages.into_iter().map(line).collect()
}

/// Whether a finding refuses the file.
fn blocks(finding: &Finding, skip_unknown: bool) -> bool {
    let passed_over = skip_unknown && finding.rule == "global-not-allowed" && finding.severity == Severity::Suspicious;
    let too_wide = finding.rule == "integer-limit";
    (finding.severity.blocks() || too_wide) && !passed_over
}
