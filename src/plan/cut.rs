//! The reads of a segment: by which route, how long, in place or staged. It places nothing.

use std::ops::Range;

use crate::device::Piece;
use crate::extent::{align_down, align_up};
use crate::memory;
use crate::storage::{Limits, Route};

use super::data::{Landing, PlanOptions, RouteChoice, ShardFacts, Transfer};
use super::place::{Item, SMALL_SEGMENT_BYTES, Segment};
use super::route::{is_warm, limits_of, route_of, staged_max};
use super::staged::{Loose, staged_transfer};

/// In-place reads end on multiples of this in the arena, so that two readers do not fault the same huge page.
const HUGE_PAGE_BYTES: u64 = memory::HUGE_PAGE_BYTES as u64;

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
