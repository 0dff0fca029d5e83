//! Tensors that are in memory, to all files of a save: blocks are filled for several files at a time.
//!
//! The oldest file gets the next block as long as its thread keeps up with hashing; else the next file gets one too, so that more
//! cores hash and the storage always has blocks to write. Downloads from devices are under way in all blocks that are free. Blocks
//! of one file come in order, and memory is bounded by the pool. Nothing here hashes, writes or publishes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::files::Files;
use super::input::{Bytes, Input};
use super::snapshot::{Filling, Snapshot, Streams};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::load::Cancel;

/// Blocks of one file that wait to be hashed while there is another file to go on with.
const AHEAD: u64 = 2;

/// A block on its way to the file `shard`.
struct Pending {
    shard: usize,
    filling: Filling,
    /// Whether it is the file's last.
    last: bool,
}

/// Writes all files, complete and durable when this returns.
pub(super) fn feed(files: &mut Files<'_>, tensors: &[Input<'_>], cancel: &Cancel) -> Result<()> {
    let (layout, fallbacks) = (Arc::clone(&files.layout), Fallbacks::default());
    let device = tensors.iter().find_map(|input| match input.bytes {
        Bytes::Tensor(tensor) => tensor.view().device(),
        Bytes::Host(_) => None,
    });
    let pool = files.blocks(device.as_deref(), &fallbacks)?;
    let mut streams = Streams::new(&fallbacks);
    let mut sources: Vec<(usize, Snapshot<'_>)> = Vec::new();
    let mut pending: VecDeque<Pending> = VecDeque::new();
    let mut next = 0;
    while next < layout.shards.len() || !sources.is_empty() {
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        files.check()?;
        while pending.front_mut().is_some_and(|block| block.filling.is_done()) {
            deliver(files, pending.pop_front())?;
        }
        let buffer = match (pool.acquire(), pending.is_empty()) {
            (Some(buffer), _) => buffer,
            (None, false) => {
                deliver(files, pending.pop_front())?;
                continue;
            }
            (None, true) => pool.acquire_waiting().ok_or(Error::Poisoned { what: "a save without blocks" })?,
        };
        let keeps_up = sources.iter().position(|(shard, _)| files.waiting(*shard) < AHEAD);
        let opens = keeps_up.is_none() && sources.len() < files.bounds.files && next < layout.shards.len();
        if opens || sources.is_empty() {
            while files.is_full() && !files.complete_one()? {
                deliver(files, pending.pop_front())?;
            }
            files.open(next)?;
            let unknown = Error::Poisoned { what: "a layout of other tensors" };
            let shard = layout.shards.get(next).ok_or(unknown)?;
            let inputs = shard.tensors.iter().filter_map(|&at| tensors.get(at));
            sources.push((next, Snapshot::of(&shard.header, inputs, &mut streams)?));
            next += 1;
        }
        let least = || (0..sources.len()).min_by_key(|&at| files.waiting(sources[at].0)).unwrap_or(0);
        let at = if opens { sources.len() - 1 } else { keeps_up.unwrap_or_else(least) };
        let (shard, source) = &mut sources[at];
        let (shard, filling) = (*shard, source.fill(buffer, &mut streams)?);
        let last = source.is_over();
        if last {
            sources.remove(at);
        }
        pending.push_back(Pending { shard, filling, last });
    }
    while !pending.is_empty() {
        deliver(files, pending.pop_front())?;
    }
    files.warnings.extend(fallbacks.list().into_iter().map(|fallback| format!("{}: {}", fallback.what, fallback.why)));
    files.complete()
}

/// Waits until a block is filled and hands it to its file.
fn deliver(files: &mut Files<'_>, block: Option<Pending>) -> Result<()> {
    let Some(Pending { shard, filling, last }) = block else { return Ok(()) };
    files.give(shard, filling.finish()?)?;
    if last { files.end(shard) } else { Ok(()) }
}
