//! Pieces that are read into staging buffers, near ones together. It places nothing.

use std::ops::Range;

use crate::device::{MAX_PIECES, Piece};
use crate::error::{Error, Result};
use crate::extent::{ShardIndex, Strided, align_down};
use crate::setting::Setting;
use crate::storage::Route;

use super::data::{PlanOptions, ShardFacts, Transfer};
use super::place::{Destination, Item, facts};
use super::route::{limits_of, route_of, staged_max};
use super::staged::{Loose, staged_transfer};

/// Staged reads of tensors to be converted are cut at multiples of this: no element type is wider.
const WIDEST_ELEMENT_BYTES: u64 = 8;

/// Collects loose items into staged reads, in file order.
pub(super) struct Batches<'a> {
    pub(super) shards: &'a [ShardFacts],
    pub(super) options: PlanOptions,
    pub(super) transfers: Vec<Transfer>,
    pub(super) open: Option<Batch>,
}

/// A staged read in the making.
pub(super) struct Batch {
    pub(super) shard: ShardIndex,
    pub(super) file: Range<u64>,
    pub(super) pieces: Vec<Loose>,
}

/// What a batch may become: bytes in all, and bytes between two pieces.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) max: u64,
    pub(super) gap: u64,
}

impl Batches<'_> {
    /// Adds an item: rows that lie close together as they are, others run by run, long runs cut.
    pub(super) fn add(&mut self, item: Item) -> Result<()> {
        let Item { runs, to } = item;
        let facts = facts(self.shards, runs.shard)?;
        let room = Room { max: staged_max(facts, self.options), gap: limits_of(Route::Direct, facts).gap };
        if room.max == 0 || to.cast.is_some() && room.max < WIDEST_ELEMENT_BYTES {
            let (limit, found) = (self.options.buffer_bytes, facts.direct.map_or(1, |limits| limits.align) * 2);
            let what = "the space that one block of direct I/O needs in a staging buffer".to_owned();
            return Err(Error::Limit {
                what,
                limit,
                found,
                hint: Some(format!("use larger buffers: {}", Setting::Staging)),
            });
        }
        if runs.run == 0 || runs.count == 0 {
            return Ok(());
        }
        let sparse = runs.count > 1 && runs.stride.saturating_sub(runs.run) > room.gap;
        let scattered = runs.count > 1 && runs.at_stride != runs.run;
        if sparse || scattered || runs.run > room.max {
            (0..runs.count).for_each(|index| self.add_run(runs.nth(index), to, room));
        } else {
            self.add_rows(runs, to, room);
        }
        Ok(())
    }

    /// Adds one run, cut where it is longer than a buffer.
    pub(super) fn add_run(&mut self, run: Strided, to: Destination, room: Room) {
        let longest = if to.cast.is_some() { align_down(room.max, WIDEST_ELEMENT_BYTES) } else { room.max };
        let mut done = 0;
        while done < run.run {
            let len = (run.run - done).min(longest);
            let part = Strided { offset: run.offset + done, run: len, stride: len, at: run.at + done, ..run };
            self.push(part, to, room);
            done += len;
        }
    }

    /// Adds rows, as many in one read as fit.
    pub(super) fn add_rows(&mut self, rows: Strided, to: Destination, room: Room) {
        let fitting = (room.max - rows.run) / rows.stride.max(1) + 1;
        let mut row = 0;
        while row < rows.count {
            let count = fitting.min(rows.count - row);
            let part = Strided { count, stride: rows.stride, at_stride: rows.at_stride, ..rows.nth(row) };
            self.push(part, to, room);
            row += count;
        }
    }

    /// Adds a piece to the open batch if it is near and fits, else to a new one.
    pub(super) fn push(&mut self, part: Strided, to: Destination, room: Room) {
        let Strided { shard, offset, run, stride, count, .. } = part;
        let file = offset..part.end();
        let piece = Piece { at: 0, run, stride, count, cast: to.cast_at(offset) };
        let next = Loose { offset, piece, arena: to.place(part.at), tensor: to.cast.map(|_| to.tensor) };
        let fits = self.open.as_ref().is_some_and(|batch| {
            batch.shard == shard
                && file.start >= batch.file.start
                && file.start <= batch.file.end.saturating_add(room.gap)
                && file.end.max(batch.file.end) - batch.file.start <= room.max
                && batch.pieces.len() < MAX_PIECES
        });
        if !fits {
            self.close();
        }
        // There may be a hundred thousand batches of one piece each; an empty list would make room for four.
        let one = || Batch { shard, file: file.clone(), pieces: Vec::with_capacity(1) };
        let batch = self.open.get_or_insert_with(one);
        batch.file.end = batch.file.end.max(file.end);
        if !batch.pieces.last_mut().is_some_and(|last| last.join(&next)) {
            batch.pieces.push(next);
        }
    }

    pub(super) fn close(&mut self) {
        if let Some(batch) = self.open.take()
            && let Some(facts) = self.shards.get(batch.shard as usize)
        {
            let route = route_of(batch.file.clone(), facts, self.options.route);
            self.transfers.push(staged_transfer(batch.shard, batch.file, route, facts, batch.pieces));
        }
    }

    pub(super) fn finish(mut self) -> Vec<Transfer> {
        self.close();
        self.transfers
    }
}
