//! Which files of a folder are the checkpoint, judged by their names alone.
//!
//! An index decides. Without one: `model.safetensors`; else a complete numbered set; else every `*.safetensors`. Never
//! consolidated copies, adapters, optimizer or training state, precision variants that were not asked for, or leftovers of
//! downloads. This file opens nothing: names in, names out.

use std::collections::{BTreeMap, BTreeSet};

/// The files of one format.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// The end of their names.
    end: &'static str,
    /// What the whole model is usually called, without that end.
    usual: &'static str,
}

/// safetensors, as Hugging Face lays it out.
pub(crate) const SAFETENSORS: &Family = &Family { end: ".safetensors", usual: "model" };

/// PyTorch's files, as Hugging Face lays them out.
pub(crate) const PYTORCH: &Family = &Family { end: ".bin", usual: "pytorch_model" };

/// Beginnings of names (in lower case) that are no part of the model's weights.
const IGNORED: &[&str] =
    &["consolidated", "adapter_", "optimizer", "training_", "scheduler", "rng_state", "random_states"];

/// Words between dots that mark a copy in another precision or of another kind.
const VARIANTS: &[&str] = &[
    "fp16", "bf16", "fp32", "fp8", "fp4", "f16", "f32", "f8", "int8", "int4", "8bit", "4bit", "ema", "non_ema",
    "no_ema", "flax",
];

/// The names that were looked for, for an error that says so.
pub(crate) const LOOKED_FOR: &str = "model.safetensors.index.json, model.safetensors, model-00001-of-0000N.safetensors, \
                                     *.safetensors, the same of pytorch_model.bin, .metadata, model_world_size_N_rank_R.pt, a single .pt or .pth";

/// What to read, and what is left alone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) files: Files,
    /// Weight files beside the chosen ones. For an index: all weight files; it is not known yet which ones it names.
    pub(crate) others: Vec<String>,
}

/// The files to read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Files {
    Index(String),
    Weights(Vec<String>),
}

/// Why no files were chosen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoChoice {
    /// There is no weight file that counts. `ignored` are those that do not count, `variants` the copies.
    Nothing { ignored: Vec<String>, variants: Vec<String> },
    /// A numbered set lacks files: how many of how many, and the first few names.
    Incomplete { missing: u64, total: u64, names: Vec<String> },
    /// Several indexes, none of them the usual one.
    Ambiguous(Vec<String>),
}

/// Chooses among `names` (files of one folder, sorted).
pub(crate) fn choose(names: &[String], variant: Option<&str>, family: &Family) -> Result<Choice, NoChoice> {
    let all: Vec<Name> = names.iter().filter_map(|name| Name::of(name, variant, family)).collect();
    let (wanted, rest): (Vec<_>, Vec<_>) = all.iter().partition(|name| name.is_wanted(variant));
    if let Some(index) = index(names, variant, family)? {
        return Ok(Choice { files: Files::Index(index), others: owned(wanted.iter().chain(&rest).copied()) });
    }
    if wanted.is_empty() {
        let (variants, ignored): (Vec<_>, Vec<_>) = rest.iter().partition(|name| !name.ignored);
        return Err(NoChoice::Nothing { ignored: owned(ignored), variants: owned(variants) });
    }
    let chosen = weights(&wanted, variant, family)?;
    let others = owned(all.iter().filter(|name| !chosen.iter().any(|chosen| chosen == name.text)));
    Ok(Choice { files: Files::Weights(chosen), others })
}

/// The files of a folder's checkpoint, for a save that replaces it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FolderChoice {
    /// An index of that name, which is one of several perhaps.
    Index(String),
    /// These files.
    Weights(Vec<String>),
    /// Nothing that could be read as one.
    Nothing,
}

/// Chooses among `names` (files of one folder, sorted) as a reader would who asks for no variant. A numbered set that lacks
/// files is nothing.
pub(crate) fn choose_in_folder(names: &[String]) -> FolderChoice {
    match choose(names, None, SAFETENSORS) {
        Ok(Choice { files: Files::Index(name), .. }) => FolderChoice::Index(name),
        Ok(Choice { files: Files::Weights(names), .. }) => FolderChoice::Weights(names),
        Err(NoChoice::Ambiguous(names)) => FolderChoice::Index(names.into_iter().next().unwrap_or_default()),
        Err(NoChoice::Nothing { .. } | NoChoice::Incomplete { .. }) => FolderChoice::Nothing,
    }
}

/// What a reader of a folder without safetensors takes of PyTorch's files: an index, weight files, a distributed checkpoint, or the
/// one file that there is.
pub(crate) fn pytorch_in_folder(names: &[String]) -> FolderChoice {
    match choose(names, None, PYTORCH) {
        Ok(Choice { files: Files::Index(name), .. }) => return FolderChoice::Index(name),
        Ok(Choice { files: Files::Weights(names), .. }) => return FolderChoice::Weights(names),
        Err(NoChoice::Ambiguous(names)) => return FolderChoice::Index(names.into_iter().next().unwrap_or_default()),
        Err(NoChoice::Nothing { .. } | NoChoice::Incomplete { .. }) => {}
    }
    let ending = |ends: &[&str]| -> Vec<String> {
        let is_one = |name: &&String| !is_ignored(name) && ends.iter().any(|end| name.ends_with(end));
        names.iter().filter(is_one).cloned().collect()
    };
    match (ending(&[".distcp"]), ending(&[".pt", ".pth"])) {
        (pieces, _) if !pieces.is_empty() && names.iter().any(|name| name == ".metadata") => {
            FolderChoice::Weights(pieces)
        }
        (_, files) if files.len() == 1 => FolderChoice::Weights(files),
        _ => FolderChoice::Nothing,
    }
}

fn owned<'a, 'n: 'a>(names: impl IntoIterator<Item = &'a Name<'n>>) -> Vec<String> {
    names.into_iter().map(|name| name.text.to_owned()).collect()
}

fn index(names: &[String], variant: Option<&str>, family: &Family) -> Result<Option<String>, NoChoice> {
    let end = family.end;
    let ends: Vec<String> = match variant {
        None => vec![format!("{end}.index.json")],
        Some(word) => vec![format!("{end}.index.{word}.json"), format!(".{word}{end}.index.json")],
    };
    let is_index = |name: &&String| {
        let stem = ends.iter().find_map(|end| name.strip_suffix(end.as_str()));
        stem.is_some_and(|stem| !is_ignored(name) && (variant.is_some() || variant_in(stem, None).is_none()))
    };
    let found: Vec<&String> = names.iter().filter(is_index).collect();
    match found[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        _ => match found.iter().find(|name| name.split('.').next() == Some(family.usual)) {
            Some(usual) => Ok(Some((*usual).clone())),
            None => Err(NoChoice::Ambiguous(found.into_iter().cloned().collect())),
        },
    }
}

fn weights(wanted: &[&Name], variant: Option<&str>, family: &Family) -> Result<Vec<String>, NoChoice> {
    let Family { end, usual } = family;
    let whole = variant.map_or(format!("{usual}{end}"), |word| format!("{usual}.{word}{end}"));
    if wanted.iter().any(|name| name.text == whole) {
        return Ok(vec![whole]);
    }
    let sets = sets(wanted, family);
    match &usual_sets(&sets, usual)[..] {
        [] => Ok(owned(wanted.iter().copied())),
        [one] => one.complete(),
        several => match without_leftovers(several) {
            Some(files) => Ok(files),
            // Pieces that each rank numbered for itself: all of them, each complete.
            None => several.iter().try_for_each(|set| set.complete().map(drop)).map(|()| owned(wanted.iter().copied())),
        },
    }
}

/// The one complete set among sets that differ in their totals only: the others are left from an older cut.
fn without_leftovers(sets: &[&Set]) -> Option<Vec<String>> {
    let same = sets.windows(2).all(|pair| (pair[0].prefix, pair[0].suffix) == (pair[1].prefix, pair[1].suffix));
    let mut complete = sets.iter().filter_map(|set| set.complete().ok());
    let first = complete.next().filter(|_| same)?;
    complete.next().is_none().then_some(first)
}

/// The sets that are called `model`, or all of them where none is.
fn usual_sets<'s, 'n>(sets: &'s [Set<'n>], usual: &str) -> Vec<&'s Set<'n>> {
    let named: Vec<_> = sets.iter().filter(|set| set.prefix.split('.').next() == Some(usual)).collect();
    if named.is_empty() { sets.iter().collect() } else { named }
}

fn sets<'n>(wanted: &[&Name<'n>], family: &Family) -> Vec<Set<'n>> {
    let end = family.end;
    let mut sets = BTreeMap::<_, BTreeSet<u64>>::new();
    for number in wanted.iter().filter_map(|name| name.number) {
        sets.entry((number.prefix, number.suffix, number.total, number.digits)).or_default().insert(number.at);
    }
    let set = |((prefix, suffix, total, digits), present)| Set { prefix, suffix, total, digits, present, end };
    sets.into_iter().map(set).collect()
}

/// Files `prefix-NNNNN-of-MMMMM.suffix` with the same prefix, total and suffix.
struct Set<'n> {
    prefix: &'n str,
    suffix: &'n str,
    total: u64,
    digits: usize,
    present: BTreeSet<u64>,
    end: &'static str,
}

impl Set<'_> {
    /// The names of the whole set, or what is missing.
    fn complete(&self) -> Result<Vec<String>, NoChoice> {
        let first = u64::from(!self.present.contains(&0));
        let numbers = first..self.total.saturating_add(first);
        let present = self.present.iter().filter(|number| numbers.contains(number)).count() as u64;
        if present == self.total && self.total > 0 {
            return Ok(numbers.map(|number| self.name(number)).collect());
        }
        let missing = numbers.filter(|number| !self.present.contains(number)).take(20);
        let names = missing.map(|number| self.name(number)).collect();
        Err(NoChoice::Incomplete { missing: self.total - present, total: self.total, names })
    }

    fn name(&self, number: u64) -> String {
        let Set { prefix, suffix, total, digits, end, .. } = self;
        format!("{prefix}-{number:0digits$}-of-{total:0digits$}{suffix}{end}")
    }
}

/// The name of a weight file, taken apart.
#[derive(Debug)]
struct Name<'n> {
    text: &'n str,
    ignored: bool,
    variant: Option<&'n str>,
    number: Option<Number<'n>>,
}

#[derive(Debug, Clone, Copy)]
struct Number<'n> {
    prefix: &'n str,
    suffix: &'n str,
    at: u64,
    total: u64,
    digits: usize,
}

impl<'n> Name<'n> {
    /// The parts, unless it is no weight file: hidden files are leftovers of downloads.
    fn of(text: &'n str, wanted: Option<&str>, family: &Family) -> Option<Name<'n>> {
        let stem = text.strip_suffix(family.end).filter(|stem| !stem.starts_with('.'))?;
        let number = number(stem);
        let variant = match number {
            Some(number) => variant_in(number.prefix, wanted).or_else(|| variant_in(number.suffix, wanted)),
            None => variant_in(stem, wanted),
        };
        Some(Name { text, ignored: is_ignored(text), variant, number })
    }

    fn is_wanted(&self, variant: Option<&str>) -> bool {
        !self.ignored && self.variant == variant
    }
}

pub(crate) fn is_ignored(name: &str) -> bool {
    let lower = name.to_lowercase();
    lower.starts_with('.') || IGNORED.iter().any(|beginning| lower.starts_with(beginning))
}

/// The word after a dot that marks a variant: the one asked for, or a known one.
fn variant_in<'n>(stem: &'n str, wanted: Option<&str>) -> Option<&'n str> {
    let is_variant = |word: &&str| wanted == Some(word) || VARIANTS.contains(&word.to_lowercase().as_str());
    stem.split('.').skip(1).find(is_variant)
}

/// `prefix-00001-of-00002suffix`.
fn number(stem: &str) -> Option<Number<'_>> {
    let (before, after) = stem.rsplit_once("-of-")?;
    let (prefix, at) = before.rsplit_once('-')?;
    let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    let (total, suffix) = after.split_at(digits);
    let fits = |text: &str| (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    if at.len() != digits || !fits(at) || !fits(total) {
        return None;
    }
    Some(Number { prefix, suffix, at: at.parse().ok()?, total: total.parse().ok()?, digits })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], variant: Option<&str>) -> Vec<String> {
        let mut names: Vec<String> = names.iter().map(|&name| name.into()).collect();
        names.sort();
        match choose(&names, variant, SAFETENSORS) {
            Ok(Choice { files: Files::Weights(files), .. }) => files,
            Ok(Choice { files: Files::Index(index), .. }) => vec![index],
            Err(why) => vec![format!("{why:?}")],
        }
    }

    #[test]
    fn an_index_decides_before_anything_else() {
        let names = ["model.safetensors", "model.safetensors.index.json", "consolidated.safetensors.index.json"];
        assert_eq!(chosen(&names, None), ["model.safetensors.index.json"]);
        let two = ["unet.safetensors.index.json", "vae.safetensors.index.json"];
        assert!(chosen(&two, None)[0].starts_with("Ambiguous"));
    }

    #[test]
    fn what_does_not_count_is_never_chosen() {
        let names = [
            "model.safetensors",
            "consolidated.safetensors",
            "adapter_model.safetensors",
            "optimizer.safetensors",
            "model.fp16.safetensors",
            ".model.safetensors",
            "model.safetensors.incomplete",
            "model.safetensors~",
        ];
        assert_eq!(chosen(&names, None), ["model.safetensors"]);
        assert_eq!(chosen(&names[1..], None)[0].split(' ').next(), Some("Nothing"));
        assert_eq!(chosen(&names, Some("fp16")), ["model.fp16.safetensors"]);
    }

    #[test]
    fn a_numbered_set_must_be_complete() {
        let names = ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", "x.safetensors"];
        let said = chosen(&names, None);
        assert!(said[0].contains("missing: 1") && said[0].contains("model-00002-of-00003.safetensors"), "{said:?}");
        let from_zero = ["w-0-of-2.safetensors", "w-1-of-2.safetensors", "extra.safetensors"];
        assert_eq!(chosen(&from_zero, None), from_zero[..2]);
    }

    #[test]
    fn leftovers_of_an_older_set_are_left_alone() {
        let names = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model-00003-of-00003.safetensors",
        ];
        assert_eq!(chosen(&names, None), names[..2]);
    }

    #[test]
    fn sets_that_each_rank_numbered_for_itself_are_taken_together() {
        let names = ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"];
        assert_eq!(chosen(&names, None), names);
    }

    #[test]
    fn both_spellings_of_a_numbered_variant_are_known() {
        let new = ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"];
        let old = ["model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"];
        for names in [new, old] {
            assert_eq!(chosen(&names, Some("fp16")), names);
            assert!(chosen(&names, None)[0].starts_with("Nothing"));
        }
    }

    #[test]
    fn a_hostile_total_costs_nothing() {
        assert!(chosen(&["m-000000001-of-999999999.safetensors"], None)[0].contains("missing: 999999998"));
    }
}
