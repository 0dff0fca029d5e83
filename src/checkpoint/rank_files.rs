//! Files that the ranks of a parallel program wrote, one each: which names of a folder are such a set.
//!
//! Names in, names out; it opens nothing. `model_world_size_4_rank_2.pt` states its number of ranks; `checkpoint-rank2.pt` leaves it to
//! what is in the file. What a set means, and whether its tensors are pieces at all, `torch::ranks` finds out.

use std::collections::{BTreeMap, BTreeSet};

use super::folder;

/// Ends of such names.
const ENDS: &[&str] = &[".pt", ".pth", ".ckpt"];

/// Beginnings of names (in lower case) that are state of a training and no model.
const STATE: &[&str] = &["optim", "extra_state", "dataloader", "lr_scheduler"];

/// The files of one set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankSet {
    /// The number of ranks, where the names state it.
    pub(crate) world: Option<u64>,
    /// File names by rank.
    pub(crate) files: BTreeMap<u64, String>,
    /// What the names begin with.
    prefix: String,
    between: String,
    end: &'static str,
}

/// The sets among `names` that may be a model, the likeliest first, and all other such files.
pub(crate) fn sets(names: &[String]) -> Vec<RankSet> {
    let mut sets: BTreeMap<(String, String, &str), RankSet> = BTreeMap::new();
    for name in names.iter().filter(|name| !folder::is_ignored(name) && !is_state(name)) {
        let Some((prefix, between, rank, end)) = parse(name) else { continue };
        let new = || RankSet {
            world: world(prefix),
            files: BTreeMap::new(),
            prefix: prefix.to_owned(),
            between: between.to_owned(),
            end,
        };
        let key = (prefix.to_owned(), between.to_owned(), end);
        sets.entry(key).or_insert_with(new).files.insert(rank, name.clone());
    }
    let mut sets: Vec<RankSet> = sets.into_values().filter(|set| set.world.is_some() || set.files.len() > 1).collect();
    sets.sort_by_key(|set| (set.world.is_none(), !set.prefix.starts_with("model")));
    sets
}

impl RankSet {
    /// The names that are missing of so many ranks, and those that are of none of them.
    pub(crate) fn differs(&self, world: u64) -> (u64, Vec<String>, Vec<&String>) {
        const SHOWN: usize = 20;
        let present: BTreeSet<u64> = self.files.keys().copied().filter(|rank| *rank < world).collect();
        let missing =
            (0..world).filter(|rank| !present.contains(rank)).take(SHOWN).map(|rank| self.name(rank)).collect();
        let beyond = self.files.iter().filter(|(rank, _)| **rank >= world).map(|(_, name)| name).collect();
        (world - present.len() as u64, missing, beyond)
    }

    fn name(&self, rank: u64) -> String {
        format!("{}{}{rank}{}", self.prefix, self.between, self.end)
    }

    /// Whether another set is the same model, saved by another number of ranks.
    pub(crate) fn rivals(&self, other: &RankSet) -> bool {
        self.prefix.starts_with("model") == other.prefix.starts_with("model")
            && self.world.is_some() == other.world.is_some()
    }

    /// The set in words: the first name.
    pub(crate) fn example(&self) -> String {
        self.files.values().next().cloned().unwrap_or_default()
    }
}

fn is_state(name: &str) -> bool {
    let lower = name.to_lowercase();
    STATE.iter().any(|beginning| lower.starts_with(beginning))
}

/// What stands before the word `rank`, the word and what joins it to the number, the number, the end.
fn parse(name: &str) -> Option<(&str, &str, u64, &'static str)> {
    let (stem, end) = ENDS.iter().find_map(|end| Some((name.strip_suffix(end)?, *end)))?;
    let before = stem.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = stem.get(before.len()..).filter(|digits| (1..=9).contains(&digits.len()))?;
    let word = before.strip_suffix(['_', '-', '.']).unwrap_or(before);
    let at = word.len().checked_sub("rank".len())?;
    let is_word = word.get(at..).is_some_and(|word| word.eq_ignore_ascii_case("rank"));
    let prefix = word.get(..at).filter(|prefix| is_word && !prefix.ends_with(|c: char| c.is_alphanumeric()))?;
    // `rank_00` and `rank_0` are no set that can be named again.
    let plain = digits == "0" || !digits.starts_with('0');
    Some((prefix, before.get(at..)?, digits.parse().ok().filter(|_| plain)?, end))
}

/// The number in `…world_size_4_`.
fn world(prefix: &str) -> Option<u64> {
    let (_, after) = prefix.split_once("world_size")?;
    let after = after.trim_start_matches(['_', '-']);
    let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    after.get(..digits)?.parse().ok().filter(|world| (1..=1_000_000).contains(world))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(names: &[&str]) -> Vec<(Option<u64>, Vec<u64>)> {
        let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
        sets(&names).into_iter().map(|set| (set.world, set.files.into_keys().collect())).collect()
    }

    #[test]
    fn names_with_a_rank_are_sets_by_what_stands_before_it() {
        let verl = [
            "extra_state_world_size_2_rank_0.pt",
            "model_world_size_2_rank_0.pt",
            "model_world_size_2_rank_1.pt",
            "optim_world_size_2_rank_0.pt",
            "optim_world_size_2_rank_1.pt",
        ];
        assert_eq!(found(&verl), [(Some(2), vec![0, 1])]);
        assert_eq!(found(&["ep0-rank0.pt", "ep0-rank1.pt", "ep1-rank0.pt"]), [(None, vec![0, 1])]);
        assert_eq!(found(&["model_world_size_4_rank_3.pt"]), [(Some(4), vec![3])]);
        let two = ["a_world_size_2_rank_0.pt", "model_world_size_4_rank_0.pt"];
        assert_eq!(found(&two), [(Some(4), vec![0]), (Some(2), vec![0])]);
    }

    #[test]
    fn what_only_looks_like_it_is_none() {
        for name in
            ["frank0.pt", "rank.pt", "rank_0.bin", "mp_rank_00_model_states.pt", "mp_rank_00.pt", "rank0.pt", "0.pt"]
        {
            assert_eq!(found(&[name]), [], "{name}");
        }
    }

    #[test]
    fn missing_ranks_are_named_and_a_hostile_number_costs_nothing() {
        let set = sets(&["model_world_size_3_rank_1.pt".into(), "model_world_size_3_rank_7.pt".into()]).remove(0);
        let (missing, names, beyond) = set.differs(3);
        assert_eq!(
            (missing, names.as_slice()),
            (2, &["model_world_size_3_rank_0.pt", "model_world_size_3_rank_2.pt"].map(String::from)[..])
        );
        assert_eq!(beyond, ["model_world_size_3_rank_7.pt"]);
        assert_eq!(sets(&["model_world_size_999999999_rank_1.pt".into()]), []);
    }
}
