//! The reads of a segment: by which route, how long, in place or staged. It places nothing.

use std::ops::Range;

use crate::device::Piece;
use crate::extent::{ShardIndex, align_down, align_up};
use crate::memory;
use crate::storage::{Limits, Route};

use super::SMALL_SEGMENT_BYTES;
use super::batch::Loose;
use super::place::{Item, Segment};
use super::{Landing, PlacedPiece, PlanOptions, RouteChoice, ShardFacts, Transfer};

/// Above this share of resident bytes a read goes through the page cache. Break-even on the machines measured: reading a
/// cold page buffered costs twice what it costs direct, a warm one a sixth.
const WARM_SHARE: f64 = 0.6;

/// In-place reads end on multiples of this in the arena, so that two readers do not fault the same huge page.
const HUGE_PAGE_BYTES: u64 = memory::HUGE_PAGE_BYTES as u64;

/// The way for the reads of a range, by choice or by residency.
pub(super) fn route_of(range: Range<u64>, facts: &ShardFacts, choice: RouteChoice) -> Route {
    let through_cache = || Route::Buffered;
    match choice {
        RouteChoice::Buffered => Route::Buffered,
        RouteChoice::Mapped if facts.mappable => Route::Mapped,
        RouteChoice::Mapped => Route::Buffered,
        RouteChoice::Direct => facts.direct.map_or_else(through_cache, |_| Route::Direct),
        RouteChoice::Auto | RouteChoice::GpuDirect => match facts.direct {
            Some(_) if !is_warm(range, facts) => Route::Direct,
            _ => through_cache(),
        },
    }
}

pub(super) fn is_warm(range: Range<u64>, facts: &ShardFacts) -> bool {
    facts.residency.share(range) >= WARM_SHARE
}

pub(super) fn limits_of(route: Route, facts: &ShardFacts) -> Limits {
    match route {
        Route::Direct => facts.direct.unwrap_or(facts.cached),
        _ => facts.cached,
    }
}

/// Cuts a segment into reads at huge-page boundaries of the arena, rounded to blocks of the file. What would have to be
/// read directly but cannot land in place goes through staging.
pub(super) fn cut_segment(segment: &Segment, facts: &ShardFacts, options: PlanOptions, transfers: &mut Vec<Transfer>) {
    let block = facts.direct.map_or(1, |limits| limits.align);
    let staged_max = staged_max(facts, options).max(1);
    let mut offset = segment.file.start;
    while offset < segment.file.end {
        let arena = segment.arena + (offset - segment.file.start);
        let longest = limits_of(Route::Direct, facts).max_read.max(facts.cached.max_read).max(HUGE_PAGE_BYTES);
        let boundary = align_up(arena + 1, align_down(longest, HUGE_PAGE_BYTES)) - arena;
        let aligned = align_down(offset + boundary, block);
        let mut end = if aligned > offset { aligned } else { offset + boundary }.min(segment.file.end);
        let route = route_of(offset..end, facts, options.route);
        let in_place = route != Route::Direct || segment.direct;
        if !in_place {
            end = end.min(offset + staged_max);
        }
        let (shard, len) = (segment.shard, end - offset);
        transfers.push(if in_place {
            Transfer { shard, offset, len, route, landing: Landing::InPlace { arena } }
        } else {
            staged_transfer(
                shard,
                offset..end,
                route,
                facts,
                vec![Loose { offset, piece: Piece::contiguous(0, len), arena, tensor: None }],
            )
        });
        offset = end;
    }
}

/// Cuts a segment that the device reads itself: whole blocks of the file land in place; what is before the first and after the
/// last, and, where the choice is ours, what is in the page cache already, goes through staging.
pub(super) fn cut_past_the_host(
    segment: &Segment,
    facts: &ShardFacts,
    limits: Limits,
    options: PlanOptions,
    transfers: &mut Vec<Transfer>,
    loose: &mut Vec<Item>,
) {
    let (shard, file) = (segment.shard, segment.file.clone());
    let mut stage = |range: Range<u64>| loose.extend(segment.item(range));
    let middle = align_up(file.start, limits.align)..align_down(file.end, limits.align);
    let lands = segment.arena.abs_diff(file.start).is_multiple_of(limits.memory_align);
    if !lands || middle.end < middle.start.saturating_add(SMALL_SEGMENT_BYTES) {
        return stage(file);
    }
    stage(file.start..middle.start);
    let longest = align_down(limits.max_read, limits.align).max(limits.align);
    let mut offset = middle.start;
    while offset < middle.end {
        let end = offset.saturating_add(longest).min(middle.end);
        if options.route == RouteChoice::Auto && is_warm(offset..end, facts) {
            stage(offset..end);
        } else {
            let landing = Landing::InPlace { arena: segment.arena + (offset - file.start) };
            transfers.push(Transfer { shard, offset, len: end - offset, route: Route::GpuDirect, landing });
        }
        offset = end;
    }
    stage(middle.end..file.end);
}

/// The longest range of a file that one staging buffer takes, whatever its alignment.
pub(super) fn staged_max(facts: &ShardFacts, options: PlanOptions) -> u64 {
    let block = facts.direct.map_or(1, |limits| limits.align);
    options.buffer_bytes.saturating_sub(2 * (block - 1))
}

/// A staged read of `range`, widened to whole blocks for direct I/O.
pub(super) fn staged_transfer(
    shard: ShardIndex,
    range: Range<u64>,
    route: Route,
    facts: &ShardFacts,
    pieces: Vec<Loose>,
) -> Transfer {
    let block = limits_of(route, facts).align;
    let offset = align_down(range.start, block);
    let end = align_up(range.end, block).min(facts.bytes.max(range.end));
    let pieces = pieces
        .into_iter()
        .map(|Loose { offset: from, piece, arena, tensor }| PlacedPiece {
            piece: Piece { at: from - offset, ..piece },
            arena,
            tensor,
        })
        .collect();
    Transfer { shard, offset, len: end - offset, route, landing: Landing::Staged { pieces } }
}
