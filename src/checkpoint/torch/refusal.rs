//! What a user reads of a file that is refused: what was found, how many tensors an unknown object would take along, what to do.
//!
//! Few findings stand for themselves; many unknown names are grouped by package, behind the next step. It decides nothing.

use std::collections::BTreeMap;

use vramp_pickle::finding::Finding;
use vramp_pickle::read::Refused;
use vramp_pickle::{Aside, WHOLE_MODEL};

use super::Reader;
use crate::error::Error;
use crate::fault::{Fault, Listed, counted, quoted};
use crate::setting::Setting;

/// Unknown names that are told one by one.
const MOST_SINGLE: usize = 3;
/// Names of one package that are told.
const MOST_OF_PACKAGE: usize = 6;

const RUNS: &str = "; nothing was executed: do not open this file with a program that unpickles";

impl Reader<'_> {
    /// The error of a file that is refused, all findings named.
    pub(super) fn refused(&self, Refused { findings, inside, keys }: &Refused) -> Error {
        let is_unknown = |finding: &&Finding| finding.rule == "global-not-allowed";
        let unknown = findings.iter().filter(is_unknown).count();
        let code = findings.iter().filter_map(|finding| finding.spot.as_ref()).any(|spot| spot.global.is_some());
        let advice = match (unknown > 0, code) {
            (true, _) => self.next_step(inside, keys),
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
    fn next_step(&self, inside: &[Aside], keys: &[String]) -> String {
        let tensors = |all: &mut dyn Iterator<Item = &Aside>| {
            let sum = all.fold(0u64, |sum, aside| sum.saturating_add(aside.tensors));
            counted(usize::try_from(sum).unwrap_or(usize::MAX), "tensor")
        };
        let is_model = |aside: &&Aside| aside.is_whole_model();
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
