//! What is loaded: the whole checkpoint, or the part of it that fits the effort and the memory, and where its bytes lie.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::cache::Stretch;
use super::data::Subject;
use super::reads::Part;
use super::{Options, budget, part};
use vramp::checkpoint::{Checkpoint, Selected, Selection, Slice};
use vramp::device::Device;
use vramp::error::Result;
use vramp::extent::{ShardIndex, align_down};
use vramp::os;
use vramp::plan::LoadPlan;
use vramp::storage::{Fallbacks, Storage};

/// Stretches begin on multiples of this, so that reads past the page cache are whole blocks.
const BLOCK_BYTES: u64 = 1 << 20;

/// A checkpoint, what is taken of it, and the files behind that.
pub(super) struct Workload<'a> {
    pub(super) checkpoint: &'a Arc<Checkpoint>,
    pub(super) selected: Vec<Selected>,
    /// Bytes of the selected tensors as stored.
    pub(super) bytes: u64,
    pub(super) file_system: String,
    /// The device number of the file system.
    pub(super) volume: String,
    /// Whether the files lie in memory, where nothing can be cold.
    pub(super) in_memory: bool,
    part: Option<String>,
    /// Runs of neighbouring tensors that were taken, and how unlike the whole their sizes are.
    runs: usize,
    unlike: f64,
}

/// A part whose sizes differ by more than this from those of the whole says little about it.
const UNLIKE: f64 = 0.15;

/// Reads that lie nearer to each other than this are of one stretch.
const NEAR: u64 = 4 << 20;

impl<'a> Workload<'a> {
    pub(super) fn of(checkpoint: &'a Arc<Checkpoint>, device: &dyn Device, options: &Options) -> Result<Workload<'a>> {
        let all = checkpoint.select(&Selection::default())?;
        let (most, why) = most_bytes(checkpoint, device, options)?;
        let Taken { selected, runs, unlike } = part_of(checkpoint, all, most);
        let bytes: u64 = selected.iter().map(|one| bytes_of(checkpoint, one)).sum();
        let part = (bytes < checkpoint.total_bytes()).then_some(why);
        let (file_system, volume, in_memory) = file_system(checkpoint)?;
        Ok(Workload { checkpoint, selected, bytes, file_system, volume, in_memory, part, runs, unlike })
    }

    /// The same checkpoint, about this share of what is loaded of it.
    pub(super) fn first(&self, share: f64) -> Workload<'a> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let most = (self.bytes as f64 * share) as u64;
        let Taken { selected, runs, unlike } = part_of(self.checkpoint, self.selected.clone(), most);
        let bytes = selected.iter().map(|one| bytes_of(self.checkpoint, one)).sum();
        let (file_system, volume) = (self.file_system.clone(), self.volume.clone());
        Workload { selected, bytes, file_system, volume, part: self.part.clone(), runs, unlike, ..*self }
    }

    /// The parts of files that a plan reads: all of a file that a shard is made of.
    pub(super) fn stretches(&self, plan: &LoadPlan) -> Vec<Stretch> {
        let mut stretches: Vec<Stretch> = Vec::new();
        for (shard, index) in self.checkpoint.shards().iter().zip(0..) {
            let mut ranges = ranges_of(index, plan);
            if shard.derived.is_some() {
                ranges.truncate(1); // made of all of its file
                ranges.iter_mut().for_each(|range| *range = 0..shard.version.len());
            }
            stretches.extend(ranges.into_iter().map(|range| Stretch { path: shard.path.clone(), range }));
        }
        merged(stretches) // several shards may be made of one file
    }

    /// The parts of shards that a plan reads, as a load reads them: what is made on the host is made.
    pub(super) fn parts(&self, plan: &LoadPlan, storage: &dyn Storage, fallbacks: &Fallbacks) -> Result<Vec<Part>> {
        let shards = self.checkpoint.shards().iter().zip(0..);
        let mut parts = Vec::new();
        for (shard, ranges) in shards.map(|(shard, index)| (shard, ranges_of(index, plan))) {
            if !ranges.is_empty() {
                let file = shard.open(storage, fallbacks)?;
                parts.extend(ranges.into_iter().map(|range| (Arc::clone(&file), range)));
            }
        }
        Ok(parts)
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
            runs: self.runs,
            unlike: self.unlike,
        }
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let unlike = self.part.is_some() && self.unlike > UNLIKE;
        let unlike = unlike.then(|| {
            let share = self.unlike * 100.0;
            format!("the tensors of the part that was loaded have other sizes than those of the whole (by {share:.0} %): benchmark more of it before changing anything")
        });
        self.checkpoint.warnings().iter().cloned().chain(unlike).collect()
    }
}

/// The parts that a plan reads of a shard, in order.
fn ranges_of(index: ShardIndex, plan: &LoadPlan) -> Vec<Range<u64>> {
    let transfers = plan.transfers.iter().filter(|transfer| transfer.shard == index);
    let ranges = transfers.map(|transfer| align_down(transfer.offset, BLOCK_BYTES)..transfer.range().end);
    joined(ranges.collect())
}

/// The same ranges in order, those near each other as one.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut found: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match found.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(NEAR) => last.end = last.end.max(range.end),
            _ => found.push(range),
        }
    }
    found
}

/// The same stretches, each byte once.
fn merged(stretches: Vec<Stretch>) -> Vec<Stretch> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for stretch in &stretches {
        if !paths.contains(&stretch.path) {
            paths.push(stretch.path.clone());
        }
    }
    let of = |path: PathBuf| {
        let ranges = stretches.iter().filter(|stretch| stretch.path == path).map(|stretch| stretch.range.clone());
        joined(ranges.collect()).into_iter().map(move |range| Stretch { path: path.clone(), range })
    };
    paths.into_iter().flat_map(of).collect()
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

/// What is taken of a checkpoint.
struct Taken {
    selected: Vec<Selected>,
    runs: usize,
    unlike: f64,
}

/// All tensors if they have at most `most` bytes, else a part that stands for them; if nothing fits, the first rows of the smallest.
fn part_of(checkpoint: &Checkpoint, mut selected: Vec<Selected>, most: u64) -> Taken {
    let size = |one: &Selected| bytes_of(checkpoint, one);
    if selected.iter().map(size).fold(0, u64::saturating_add) <= most {
        return Taken { selected, runs: 1, unlike: 0.0 };
    }
    selected.sort_by_key(|one| checkpoint.tensors().get(one.tensor).map(|info| (info.shard(), info.first_offset())));
    let sizes: Vec<u64> = selected.iter().map(size).collect();
    let cut = |at: usize, most: u64| {
        let cut = first_rows(selected.get(at)?, *sizes.get(at)?, most);
        cut.slice.is_some().then(|| size(&cut)).filter(|bytes| *bytes <= most)
    };
    let part = part::choose(&sizes, most, cut);
    let take = |&(at, cut): &(usize, Option<u64>)| {
        let one = selected.get(at)?;
        Some(cut.map_or_else(|| one.clone(), |bytes| first_rows(one, sizes.get(at).copied().unwrap_or(0), bytes)))
    };
    let mut taken: Vec<Selected> = part.taken.iter().filter_map(take).collect();
    if taken.iter().all(|one| size(one) == 0) {
        let smallest = selected.iter().filter(|one| size(one) > 0).min_by_key(|one| size(one));
        taken = smallest.map(|one| first_rows(one, size(one), most)).into_iter().collect();
    }
    taken.sort_by(|a, b| a.name.cmp(&b.name));
    Taken { selected: taken, runs: part.runs.max(1), unlike: part.unlike }
}

/// As many of the first rows of a tensor of `bytes` bytes as fit `most`, and at least eight; rows along the first dimension that has
/// many. What is cut already stays as it is.
fn first_rows(of: &Selected, bytes: u64, most: u64) -> Selected {
    let long = of.shape.iter().enumerate().find(|(_, rows)| **rows >= 16).filter(|_| of.slice.is_none());
    let Some((dim, &rows)) = long else { return of.clone() };
    let fitting = usize::try_from(most / (bytes / rows as u64).max(1)).unwrap_or(usize::MAX);
    let end = (fitting - fitting % 8).clamp(8, rows); // elements that are narrower than a byte fill bytes
    let shape = of.shape.iter().enumerate().map(|(at, &rows)| if at == dim { end } else { rows }).collect();
    Selected { slice: Some(Slice { dim, start: 0, end }), shape, ..of.clone() }
}

fn file_system(checkpoint: &Checkpoint) -> Result<(String, String, bool)> {
    let Some(shard) = checkpoint.shards().first() else { return Ok((String::new(), String::new(), false)) };
    let file = shard.open(&**checkpoint.storage(), &Fallbacks::default())?;
    let (system, volume) = (file.file_system(), file.volume());
    Ok((system.name.clone(), volume, system.memory))
}
