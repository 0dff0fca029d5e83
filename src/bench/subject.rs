//! What is loaded: the whole checkpoint, or the part of it that fits the effort and the memory, and where its bytes lie.

use std::ops::Range;

use super::Options;
use super::cache::Stretch;
use super::data::Subject;
use super::reads::Part;
use crate::checkpoint::{Checkpoint, Selected, Selection};
use crate::device::Device;
use crate::error::Result;
use crate::extent::{ShardIndex, align_down};
use crate::load::open_same;
use crate::os;
use crate::plan::LoadPlan;
use crate::source::{Fallbacks, Storage};

/// Stretches begin on multiples of this, so that reads past the page cache are whole blocks.
const BLOCK_BYTES: u64 = 1 << 20;

/// A checkpoint, what is taken of it, and the files behind that.
pub(super) struct Loadable<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) selected: Vec<Selected>,
    /// Bytes of the selected tensors as stored.
    pub(super) bytes: u64,
    pub(super) file_system: String,
    /// Whether the files lie in memory, where nothing can be cold.
    pub(super) in_memory: bool,
    part: Option<String>,
}

impl<'a> Loadable<'a> {
    pub(super) fn of(checkpoint: &'a Checkpoint, device: &dyn Device, options: &Options) -> Result<Loadable<'a>> {
        let all = checkpoint.select(&Selection::default())?;
        let (most, why) = most_bytes(device, options);
        let selected = first_of(checkpoint, all, most);
        let bytes: u64 = selected.iter().map(|one| bytes_of(checkpoint, one)).sum();
        let part = (bytes < checkpoint.total_bytes()).then_some(why);
        let (file_system, in_memory) = file_system(checkpoint, options)?;
        Ok(Loadable { checkpoint, selected, bytes, file_system, in_memory, part })
    }

    /// The parts of files that a plan reads: all of a file that a shard is made of.
    pub(super) fn stretches(&self, plan: &LoadPlan) -> Vec<Stretch> {
        let mut stretches: Vec<Stretch> = Vec::new();
        for (shard, index) in self.checkpoint.shards().iter().zip(0..) {
            let Some(range) = range_of(index, plan) else { continue };
            let range = if shard.made.is_some() { 0..shard.identity.len } else { range };
            // Several shards may be made of one file.
            match stretches.iter_mut().find(|known| known.path == shard.path) {
                Some(known) => known.range = known.range.start.min(range.start)..known.range.end.max(range.end),
                None => stretches.push(Stretch { path: shard.path.clone(), range }),
            }
        }
        stretches
    }

    /// The parts of shards that a plan reads, as a load reads them: what is made on the host is made.
    pub(super) fn parts(&self, plan: &LoadPlan, storage: &dyn Storage, fallbacks: &Fallbacks) -> Result<Vec<Part>> {
        let shards = self.checkpoint.shards().iter().zip(0..);
        let parts = shards.filter_map(|(shard, index)| Some((shard, range_of(index, plan)?)));
        parts.map(|(shard, range)| Ok((open_same(storage, shard, fallbacks)?, range))).collect()
    }

    pub(super) fn describe(&self) -> Subject {
        let checkpoint = self.checkpoint;
        Subject {
            path: checkpoint.path().to_owned(),
            bytes: checkpoint.total_bytes(),
            tensors: checkpoint.tensors().len(),
            shards: checkpoint.shards().len(),
            loaded_bytes: self.bytes,
            loaded_tensors: self.selected.len(),
            part: self.part.clone(),
        }
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        self.checkpoint.warnings().to_vec()
    }
}

/// The part that a plan reads of a shard.
fn range_of(index: ShardIndex, plan: &LoadPlan) -> Option<Range<u64>> {
    let transfers = || plan.transfers.iter().filter(|transfer| transfer.shard == index);
    let start = transfers().map(|transfer| transfer.offset).min()?;
    let end = transfers().map(|transfer| transfer.range().end).max()?;
    Some(align_down(start, BLOCK_BYTES)..end)
}

fn bytes_of(checkpoint: &Checkpoint, selected: &Selected) -> u64 {
    checkpoint.tensors().get(selected.tensor).map_or(0, |info| info.bytes())
}

/// How much may be loaded, and what says so.
fn most_bytes(device: &dyn Device, options: &Options) -> (u64, String) {
    let effort = options.effort.most_bytes;
    let limits = device.limits();
    if !(limits.host_visible && limits.keeps) {
        return (effort, "more would take too long".to_owned());
    }
    // Once as loaded (four times wider at most, where converted), once in the page cache.
    let share = if options.transfer.convert.is_some() { 6 } else { 3 };
    match os::available_memory_bytes().map(|available| available / share) {
        Some(memory) if memory < effort => (memory, "more would not fit this machine's memory, twice".to_owned()),
        _ => (effort, "more would take too long".to_owned()),
    }
}

/// The tensors that lie first in the files, up to `most` bytes, and at least one with bytes.
fn first_of(checkpoint: &Checkpoint, mut selected: Vec<Selected>, most: u64) -> Vec<Selected> {
    if checkpoint.total_bytes() <= most {
        return selected;
    }
    let place = |one: &Selected| checkpoint.tensors().get(one.tensor).map(|info| (info.shard(), info.first_offset()));
    selected.sort_by_key(place);
    let mut taken = 0u64;
    selected.retain(|one| {
        let fits = taken == 0 || taken.saturating_add(bytes_of(checkpoint, one)) <= most;
        taken += if fits { bytes_of(checkpoint, one) } else { 0 };
        fits
    });
    selected.sort_by(|a, b| a.name.cmp(&b.name));
    selected
}

fn file_system(checkpoint: &Checkpoint, options: &Options) -> Result<(String, bool)> {
    let Some(shard) = checkpoint.shards().first() else { return Ok((String::new(), false)) };
    let file = options.storage.open(&shard.path, &Fallbacks::default())?;
    Ok((file.file_system().name.clone(), file.file_system().memory))
}
