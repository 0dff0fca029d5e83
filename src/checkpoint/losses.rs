//! Which tensors a load or a conversion would lose: a selection that covers one is refused, unless the user asked for less.

use std::collections::BTreeMap;

use super::data::Checkpoint;
use super::skipped::Loss;
use crate::error::{Error, Result};
use crate::fault::{Listed, counted, quoted};

impl Checkpoint {
    /// The same checkpoint, of which less than the whole may be loaded: what it holds and cannot be loaded is passed over, as with
    /// [`skip_unknown`](super::OpenOptions::skip_unknown). It stays listed in [`Checkpoint::skipped`].
    #[must_use]
    pub fn passing_over(mut self) -> Checkpoint {
        self.skipped.iter_mut().for_each(|skipped| skipped.loss = Loss::None);
        self
    }

    /// How many tensors the files hold that cannot be loaded.
    pub fn tensors_left_out(&self) -> u64 {
        self.skipped.iter().fold(0, |sum, skipped| sum.saturating_add(skipped.tensors))
    }

    /// Demands that no tensor is lost among those that are wanted by name: by a load, or by a conversion.
    pub(crate) fn demand_no_loss(&self, converts: bool, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
        let mut kinds: BTreeMap<&str, (u64, Listed)> = BTreeMap::new();
        let (mut lost, mut first) = (0u64, None);
        for skipped in &self.skipped {
            let Some(word) = skipped.lost(converts).filter(|_| is_wanted(&skipped.name)) else { continue };
            let (tensors, names) = kinds.entry(word).or_default();
            *tensors = tensors.saturating_add(skipped.tensors);
            names.push(|| quoted(&skipped.name));
            lost = lost.saturating_add(skipped.tensors);
            first = first.or(Some(&skipped.name));
        }
        if kinds.is_empty() {
            return self.demand_something();
        }
        let all = (self.tensors.len() as u64).saturating_add(self.tensors_left_out());
        let (what, advice) = (words(&kinds), advice(&kinds, converts));
        Err(Error::Unsupported {
            path: self.path.clone(),
            tensor: first.filter(|_| lost == 1).cloned(),
            what: format!(
                "{}{lost} of {all} tensors cannot be loaded and would be missing: {what}; {advice}",
                self.rank(&kinds)
            ),
        })
    }

    /// Which rank's file it is, where it holds one rank's part of tensors.
    fn rank(&self, kinds: &BTreeMap<&str, (u64, Listed)>) -> String {
        if !["DTensor", "ShardedTensor"].iter().any(|word| kinds.contains_key(word)) {
            return String::new();
        }
        // What FSDP's users call such files: model_world_size_8_rank_0.pt.
        let named = || {
            let (world, rank) = self.path.file_stem()?.to_str()?.split_once("world_size_")?.1.split_once("_rank_")?;
            Some((world.parse::<u64>().ok()?, rank.parse::<u64>().ok()?))
        };
        match named() {
            Some((world, rank)) => format!("rank {rank} of {world} of a sharded save (FSDP): "),
            None => "one rank of a sharded save (FSDP): ".to_owned(),
        }
    }

    /// Where the user agreed to less, nothing at all is still no result.
    fn demand_something(&self) -> Result<()> {
        let lost = self.tensors_left_out();
        if !self.tensors.is_empty() || lost == 0 {
            return Ok(());
        }
        let holding = self.skipped.iter().filter(|skipped| skipped.tensors > 0);
        let list: Listed =
            holding.clone().map(|skipped| format!("{} ({})", quoted(&skipped.name), skipped.why)).collect();
        let model = holding.into_iter().find(|skipped| skipped.is_whole_model);
        let advice = match model {
            Some(model) => format!("; choose the key {} to read its parameters and buffers", quoted(&model.name)),
            None => String::new(),
        };
        let lost = counted(usize::try_from(lost).unwrap_or(usize::MAX), "tensor");
        let what = format!("nothing in it can be loaded; {lost} would be left out: {list}{advice}");
        Err(Error::Unsupported { path: self.path.clone(), tensor: None, what })
    }
}

fn words(kinds: &BTreeMap<&str, (u64, Listed)>) -> String {
    let group = |(word, (tensors, names)): (&&str, &(u64, Listed))| {
        format!("{tensors} {} ({names})", if *tensors == 1 { (*word).to_owned() } else { plural(word) })
    };
    kinds.iter().map(group).collect::<Vec<_>>().join("; ")
}

/// Several of what a word means: "tensors of …".
fn plural(word: &str) -> String {
    let ends = [" of ", " in ", " that "].iter().filter_map(|part| word.find(part)).min();
    let (one, rest) = word.split_at(ends.unwrap_or(word.len()));
    format!("{one}s{rest}")
}

/// What to do about each kind, and about all of them.
fn advice(kinds: &BTreeMap<&str, (u64, Listed)>, converts: bool) -> String {
    let has = |part: &str| kinds.keys().any(|word| word.contains(part));
    let mut ways = Vec::new();
    for (part, way) in [
        ("quantised", "save dequantised tensors (tensor.dequantize())"),
        ("sparse", "save dense tensors (tensor.to_dense())"),
        ("DTensor", "open the folder with the files of all ranks, or save whole tensors (tensor.full_tensor())"),
        ("ShardedTensor", "save a full state dict (FullStateDictConfig), or gather the ranks first"),
        ("meta", "save the model after its weights are loaded"),
        ("NumPy", "save the arrays as tensors (torch.from_numpy)"),
    ] {
        if has(part) {
            ways.push(way.to_owned());
        }
    }
    let verb = if converts { "convert" } else { "load" };
    ways.push(format!(
        "to {verb} the rest, exclude their names, choose another key, or pass over what cannot be loaded"
    ));
    ways.join("; ")
}
