//! The tensors of a conversion on their way: loaded batch by batch, in the order in which they are written, while another thread
//! writes the batch before.
//!
//! A batch has at most [`BATCH_BYTES`] bytes; a larger tensor is loaded and written in parts. Memory is therefore bounded by two
//! batches, whatever the size of a tensor. One exception: a tensor whose bytes do not lie in its file as they are loaded (deflated or
//! strided, `checkpoint/derived.rs`) is a batch of its own, since each part of it would be made of the whole storage again.
//! Nothing here decides what is converted, and names no file.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::saving::Saving;
use super::work::{Output, Work};
use crate::checkpoint::{Checkpoint, Selected, Selection, TensorData, TensorInfo};
use crate::device::{Cast, CpuDevice};
use crate::digest::checksum;
use crate::error::{Error, Listed, Result};
use crate::fault::quoted;
use crate::load::{Loaded, Loader, TransferOptions, overflow_warning};
use crate::plan::RouteChoice;

/// Bytes of a batch: enough that reading and writing are not interrupted all the time, and no more.
pub(super) const BATCH_BYTES: u64 = 64 << 20;

/// The parts of a tensor begin on multiples of so many bytes as stored: no element is wider.
const PART_ALIGN: u64 = 16;

/// Tensors that are loaded together, by their numbers among the outputs, in the order in which they are written.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Batch {
    Whole(Vec<usize>),
    Part(usize, Part),
}

/// A part of a tensor: where it lies among the tensor's bytes as stored, and as written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    stored: Range<u64>,
    written: Range<u64>,
}

/// The checksums of the parts of each output, for the comparison at the end.
type Sums = Vec<Vec<u64>>;

impl Batch {
    fn outputs(&self) -> &[usize] {
        match self {
            Batch::Whole(outputs) => outputs,
            Batch::Part(output, _) => std::slice::from_ref(output),
        }
    }
}

impl Output {
    fn bytes(&self) -> u64 {
        self.outline.bytes().unwrap_or(0)
    }
}

impl Work<'_> {
    /// Loads and writes everything, each on a thread of its own, and compares where asked.
    pub(super) fn carry_out<'s>(&self, mut saving: Saving<'s>) -> Result<(Saving<'s>, Vec<String>)> {
        let order: Vec<usize> = saving.layout().shards.iter().flat_map(|shard| shard.tensors.iter().copied()).collect();
        let total = saving.layout().bytes;
        let tell = |done: u64| {
            if let Some(progress) = &self.options.progress {
                progress(done, total);
            }
        };
        tell(0);
        let (give, take) = bounded(0);
        let (loaded, written) = thread::scope(|scope| {
            let (saving, tell) = (&mut saving, &tell);
            // The writer owns the receiver: when it ends early, the loader's next send fails instead of waiting for ever.
            let write = move || self.write_all(take, saving, tell);
            let writer = thread::Builder::new().name("vramp-write".to_owned()).spawn_scoped(scope, write);
            let writer = match writer {
                Ok(writer) => writer,
                Err(e) => {
                    return (Err(Error::io("start a thread to write", self.checkpoint.path(), e)), Ok(Sums::new()));
                }
            };
            let loaded = self.load_all(&order, give);
            (loaded, writer.join().unwrap_or(Err(Error::Poisoned { what: "the thread that writes" })))
        });
        // A writer that ended early has the better reason than a loader that nobody took a batch from.
        let sums = written?;
        let warnings = loaded?;
        if self.options.check {
            self.compare(&saving, &order, &sums)?;
        }
        Ok((saving, warnings))
    }

    // ---- loading

    /// Loads batch after batch and gives them away; returns what the loads warned of. Overflows are gathered from all.
    fn load_all(&self, order: &[usize], give: Sender<(Batch, Loaded)>) -> Result<Vec<String>> {
        let mut loader = Loader::new(Arc::new(CpuDevice::new()), self.options.transfer.clone());
        let (mut warnings, mut overflows, mut failed) = (Vec::new(), Vec::new(), None);
        for batch in self.batches(order) {
            if failed.is_some() && !self.is_cast(&batch) {
                continue;
            }
            match self.load(&mut loader, &batch) {
                Ok(loaded) if failed.is_none() => {
                    warnings.extend(self.new_warnings(&loaded));
                    add_overflows(&mut overflows, loaded.overflows.clone());
                    give.send((batch, loaded)).map_err(|_| Error::Cancelled)?;
                }
                Ok(_) => {}
                Err(error) => failed = Some(added_overflow(failed, error)?),
            }
        }
        let overflowed = self.options.transfer.convert.and_then(|convert| overflow_warning(convert.to, &overflows));
        failed.map_or_else(|| Ok(warnings.into_iter().chain(overflowed).collect()), Err)
    }

    /// What a load warned of, without what is known of the checkpoint, and without overflows: those of a tensor that is loaded in
    /// parts are told once.
    fn new_warnings(&self, loaded: &Loaded) -> Vec<String> {
        let known = self.checkpoint.warnings().len();
        let end = loaded.warnings.len() - usize::from(!loaded.overflows.is_empty()).min(loaded.warnings.len());
        loaded.warnings.get(known..end).unwrap_or_default().to_vec()
    }

    fn is_cast(&self, batch: &Batch) -> bool {
        batch.outputs().iter().any(|&at| self.outputs.get(at).is_some_and(|output| output.cast.is_some()))
    }

    fn load(&self, loader: &mut Loader, batch: &Batch) -> Result<Loaded> {
        let outputs = batch.outputs().iter().filter_map(|&at| self.outputs.get(at));
        let mut sources: Vec<Selected> = outputs.map(|output| output.source.clone()).collect();
        sources.sort_by(|a, b| a.name.cmp(&b.name));
        sources.dedup_by(|a, b| a.name == b.name);
        let mut prepared = match (batch, sources.as_slice()) {
            (Batch::Part(_, part), [source]) => loader.prepare_part(self.checkpoint, source, &part.stored)?,
            _ => loader.prepare(Arc::clone(self.checkpoint), &sources)?,
        };
        prepared.warnings.clear(); // what there is to know of casts is in the warnings of the whole conversion
        loader.load(&prepared)
    }

    /// All outputs in their order, in batches.
    fn batches(&self, order: &[usize]) -> Vec<Batch> {
        let parts = |at: usize| {
            let Some(output) = self.outputs.get(at) else { return Vec::new() };
            let info = self.checkpoint.tensors().get(output.source.tensor);
            match info.is_some_and(|info| lies_as_loaded(self.checkpoint, info)) {
                true => parts(output.bytes(), output.cast, self.batch_bytes),
                false => Vec::new(),
            }
        };
        batches(order, |at| self.outputs.get(at).map_or(0, Output::bytes), parts, self.batch_bytes)
    }

    // ---- writing

    /// Writes what comes; returns checksums of each output where they are to be compared.
    fn write_all(
        &self,
        take: Receiver<(Batch, Loaded)>,
        saving: &mut Saving<'_>,
        tell: &(dyn Fn(u64) + Sync),
    ) -> Result<Sums> {
        let mut sums = vec![Vec::new(); if self.options.check { self.outputs.len() } else { 0 }];
        let mut done = 0;
        for (batch, loaded) in take {
            for &at in batch.outputs() {
                let output = self.outputs.get(at).ok_or(Error::Poisoned { what: "a batch of other tensors" })?;
                let bytes = loaded.tensor(&output.outline.name)?.bytes()?;
                if let Some(sums) = sums.get_mut(at) {
                    sums.push(checksum(bytes));
                }
                if saving.next() != Some(at) && !bytes.is_empty() {
                    return Err(Error::Poisoned { what: "tensors came in another order than they are written in" });
                }
                saving.write(bytes)?;
                done += bytes.len() as u64;
                tell(done);
            }
        }
        Ok(sums)
    }

    // ---- the check

    /// Reads the written files back and compares names, types, shapes and bytes with what was loaded.
    fn compare(&self, saving: &Saving<'_>, order: &[usize], sums: &Sums) -> Result<()> {
        let mut differ = Listed::new();
        for (path, shard) in saving.files()?.iter().zip(&saving.layout().shards) {
            let found = Arc::new(Checkpoint::open(path)?);
            let name = |at: usize| Some((self.outputs.get(at)?.outline.name.as_ref(), at));
            let wanted: BTreeMap<&str, usize> = shard.tensors.iter().filter_map(|&at| name(at)).collect();
            if found.tensors().len() != wanted.len() {
                differ.push(|| format!("{} tensors instead of {}", found.tensors().len(), wanted.len()));
            }
            self.compare_shard(&found, &wanted, sums, &mut differ)?;
        }
        if differ.is_empty() && sums.len() == order.len() {
            return Ok(());
        }
        let report = format!("what was read back is not what was written, and nothing was put in place: {differ}");
        Err(Error::Mismatch { path: self.checkpoint.path().to_owned(), report })
    }

    fn compare_shard(
        &self,
        found: &Arc<Checkpoint>,
        wanted: &BTreeMap<&str, usize>,
        sums: &Sums,
        differ: &mut Listed,
    ) -> Result<()> {
        let all = found.select(&Selection::default())?;
        let output_of = |chosen: &Selected| {
            let &at = wanted.get(chosen.name.as_ref())?;
            let (output, info) = (self.outputs.get(at)?, found.tensors().get(chosen.tensor)?);
            let is_same = info.dtype == output.outline.dtype && output.outline.shape == info.shape;
            is_same.then_some((at, output))
        };
        // The parts are those that the checksums were made of.
        let parts = |at: usize| {
            let output = all.get(at).and_then(output_of).map(|(_, output)| output);
            let written = output.map(|output| parts(output.bytes(), output.cast, self.batch_bytes)).unwrap_or_default();
            let as_found = |part: Part| Part { stored: part.written.clone(), written: part.written };
            let many = all.get(at).and_then(output_of).and_then(|(at, _)| sums.get(at)).is_some_and(|it| it.len() > 1);
            if many { written.into_iter().map(as_found).collect() } else { Vec::new() }
        };
        let bytes = |at: usize| {
            let info = all.get(at).and_then(|chosen| found.tensors().get(chosen.tensor));
            info.map_or(0, TensorInfo::bytes)
        };
        let transfer = TransferOptions {
            route: RouteChoice::Direct,
            cancel: self.options.transfer.cancel.clone(),
            ..TransferOptions::default()
        };
        let mut loader = Loader::new(Arc::new(CpuDevice::new()), transfer);
        let order: Vec<usize> = (0..all.len()).collect();
        let mut again: Sums = vec![Vec::new(); all.len()];
        for batch in batches(&order, bytes, parts, self.batch_bytes) {
            let selected: Vec<Selected> = batch.outputs().iter().filter_map(|&at| all.get(at).cloned()).collect();
            let prepared = match (&batch, selected.as_slice()) {
                (Batch::Part(_, part), [chosen]) => loader.prepare_part(found, chosen, &part.stored)?,
                _ => loader.prepare(Arc::clone(found), &selected)?,
            };
            let loaded = loader.load(&prepared)?;
            for (&at, chosen) in batch.outputs().iter().zip(&selected) {
                if let Some(sums) = again.get_mut(at) {
                    sums.push(checksum(loaded.tensor(&chosen.name)?.bytes()?));
                }
            }
        }
        for (chosen, again) in all.iter().zip(again) {
            let before = output_of(chosen).and_then(|(at, _)| sums.get(at));
            if before != Some(&again) {
                differ.push(|| quoted(&chosen.name));
            }
        }
        Ok(())
    }
}

/// Whether a file has the bytes of a tensor as they are loaded, so that a part of them can be read alone.
fn lies_as_loaded(checkpoint: &Checkpoint, info: &TensorInfo) -> bool {
    let lies = |shard: u32| checkpoint.shards().get(shard as usize).is_some_and(|shard| shard.derived.is_none());
    match &info.data {
        TensorData::Whole(extent) => lies(extent.shard),
        TensorData::Parts(parts) => parts.iter().all(|part| lies(part.extent.shard)),
    }
}

/// The parts of a tensor of `bytes` bytes as written, each of at most `most` bytes.
fn parts(bytes: u64, cast: Option<Cast>, most: u64) -> Vec<Part> {
    let written = |stored: u64| cast.map_or(stored, |cast| cast.converted(stored));
    let unit = written(PART_ALIGN).max(1);
    // Bytes as stored and as written, of a part and of the whole.
    let (units, written_part) = ((most / unit).max(1), (most / unit).max(1).saturating_mul(unit));
    let starts = (0..bytes.div_ceil(written_part)).map(|part| part * written_part);
    let stored = |written: u64| match cast {
        None => written,
        Some(cast) => written / (cast.from.numbers() * cast.to.bytes()) * cast.from.bytes(),
    };
    let part = |start: u64| {
        let end = start.saturating_add(written_part).min(bytes);
        Part { stored: stored(start)..stored(end), written: start..end }
    };
    debug_assert_eq!(stored(written_part), units * PART_ALIGN);
    starts.map(part).collect()
}

/// Divides `order` into batches of at most `most` bytes. A larger tensor is divided into its parts; one that has none is a batch of
/// its own.
fn batches(
    order: &[usize],
    bytes_of: impl Fn(usize) -> u64,
    parts_of: impl Fn(usize) -> Vec<Part>,
    most: u64,
) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    let mut filled = u64::MAX;
    for &at in order {
        let bytes = bytes_of(at);
        let parts = if bytes > most { parts_of(at) } else { Vec::new() };
        if !parts.is_empty() {
            batches.extend(parts.into_iter().map(|part| Batch::Part(at, part)));
            filled = u64::MAX;
            continue;
        }
        match batches.last_mut() {
            Some(Batch::Whole(batch)) if filled.saturating_add(bytes) <= most => batch.push(at),
            _ => {
                batches.push(Batch::Whole(vec![at]));
                filled = 0;
            }
        }
        filled = filled.saturating_add(bytes);
    }
    batches
}

/// One error of all tensors that overflowed; any other error as it is.
fn added_overflow(before: Option<Error>, error: Error) -> Result<Error> {
    match (before, error) {
        (None, error @ Error::Overflow { .. }) => Ok(error),
        (Some(Error::Overflow { to, reach, mut tensors }), Error::Overflow { tensors: more, .. }) => {
            add_overflows(&mut tensors, more);
            Ok(Error::Overflow { to, reach, tensors })
        }
        (_, error) => Err(error),
    }
}

/// Adds tensors and their numbers: what is loaded in parts is listed once.
fn add_overflows(all: &mut Vec<(String, u64)>, more: Vec<(String, u64)>) {
    for (name, count) in more {
        match all.last_mut().filter(|(last, _)| *last == name) {
            Some((_, before)) => *before += count,
            None => all.push((name, count)),
        }
    }
}
