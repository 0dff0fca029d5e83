//! What is loaded: the whole checkpoint, or the part of it that fits the effort and the memory, and where its bytes lie.

use std::collections::BTreeSet;
use std::ops::Range;

use super::cache::Stretch;
use super::data::Subject;
use super::reads::Part;
use super::{Options, budget};
use crate::checkpoint::{Checkpoint, Selected, Selection, Slice};
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
    /// The device number of the file system.
    pub(super) volume: String,
    /// Whether the files lie in memory, where nothing can be cold.
    pub(super) in_memory: bool,
    part: Option<String>,
}

impl<'a> Loadable<'a> {
    pub(super) fn of(checkpoint: &'a Checkpoint, device: &dyn Device, options: &Options) -> Result<Loadable<'a>> {
        let all = checkpoint.select(&Selection::default())?;
        let (most, why) = most_bytes(checkpoint, device, options)?;
        let selected = first_of(checkpoint, all, most);
        let bytes: u64 = selected.iter().map(|one| bytes_of(checkpoint, one)).sum();
        let part = (bytes < checkpoint.total_bytes()).then_some(why);
        let (file_system, volume, in_memory) = file_system(checkpoint, options)?;
        Ok(Loadable { checkpoint, selected, bytes, file_system, volume, in_memory, part })
    }

    /// The same checkpoint, about this share of what is loaded of it.
    pub(super) fn first(&self, share: f64) -> Loadable<'a> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let most = (self.bytes as f64 * share) as u64;
        let selected = first_of(self.checkpoint, self.selected.clone(), most);
        let bytes = selected.iter().map(|one| bytes_of(self.checkpoint, one)).sum();
        let (file_system, volume) = (self.file_system.clone(), self.volume.clone());
        Loadable { selected, bytes, file_system, volume, part: self.part.clone(), ..*self }
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
            shards: files(checkpoint),
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
    let info = checkpoint.tensors().get(selected.tensor);
    info.and_then(|info| info.dtype.tensor_bytes(&selected.shape)).unwrap_or(0)
}

/// Number of files: several shards may be made of one.
fn files(checkpoint: &Checkpoint) -> usize {
    checkpoint.shards().iter().map(|shard| &shard.path).collect::<BTreeSet<_>>().len()
}

/// How much may be loaded, and what says so.
fn most_bytes(checkpoint: &Checkpoint, device: &dyn Device, options: &Options) -> Result<(u64, String)> {
    let usual = (options.effort.most_bytes, "more would take too long".to_owned());
    let in_time = budget::most_bytes(checkpoint, device, options)?;
    let limits = device.limits();
    // Once as loaded (four times wider at most, where converted), once in the page cache.
    let share = if options.transfer.convert.is_some() { 6 } else { 3 };
    let memory = os::available_memory_bytes().filter(|_| limits.host_visible && limits.keeps);
    let in_memory = memory.map(|bytes| (bytes / share, "more would not fit this machine's memory, twice".to_owned()));
    let least = |least: (u64, String), other: (u64, String)| if other.0 < least.0 { other } else { least };
    Ok([in_time, in_memory].into_iter().flatten().fold(usual, least))
}

/// The tensors that lie first in the files, up to `most` bytes; if each is larger, the first rows of the smallest.
fn first_of(checkpoint: &Checkpoint, mut selected: Vec<Selected>, most: u64) -> Vec<Selected> {
    let size = |one: &Selected| bytes_of(checkpoint, one);
    if selected.iter().map(size).fold(0, u64::saturating_add) <= most {
        return selected;
    }
    let smallest = selected.iter().filter(|one| size(one) > 0).min_by_key(|one| size(one)).cloned();
    let place = |one: &Selected| checkpoint.tensors().get(one.tensor).map(|info| (info.shard(), info.first_offset()));
    selected.sort_by_key(place);
    let mut taken = 0u64;
    selected.retain(|one| {
        let fits = taken.saturating_add(size(one)) <= most;
        taken += if fits { size(one) } else { 0 };
        fits
    });
    if taken == 0 {
        selected = smallest.map(|one| first_rows(&one, size(&one), most)).into_iter().collect();
    }
    selected.sort_by(|a, b| a.name.cmp(&b.name));
    selected
}

/// As many of the first rows of a tensor of `bytes` bytes as fit `most`, and at least eight; rows along the first dimension that has
/// many. What is cut already stays as it is.
fn first_rows(of: &Selected, bytes: u64, most: u64) -> Selected {
    let long = of.shape.iter().enumerate().find(|(_, rows)| **rows >= 16).filter(|_| of.slice.is_none());
    let Some((dim, &rows)) = long else { return of.clone() };
    let fitting = most / (bytes / rows).max(1);
    let end = (fitting - fitting % 8).clamp(8, rows); // elements that are narrower than a byte fill bytes
    let shape = of.shape.iter().enumerate().map(|(at, &rows)| if at == dim { end } else { rows }).collect();
    Selected { slice: Some(Slice { dim, start: 0, end }), shape, ..of.clone() }
}

fn file_system(checkpoint: &Checkpoint, options: &Options) -> Result<(String, String, bool)> {
    let Some(shard) = checkpoint.shards().first() else { return Ok((String::new(), String::new(), false)) };
    let file = options.storage.open(&shard.path, &Fallbacks::default())?;
    let (system, volume) = (file.file_system(), os::device_number(file.identity().device));
    Ok((system.name.clone(), volume, system.memory))
}
