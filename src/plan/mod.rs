//! The plan of a load: where each selected tensor lies in the arena, and which reads bring its bytes there.
//!
//! [`plan`] is a pure function of data (what is selected, what the files and the device want, what is in the page cache)
//! to data ([`LoadPlan`]) that one can print, compare and test. It opens nothing, starts nothing and knows no device by name.
//!
//! How it decides:
//! 1. *Placement.* Where reads may land in the arena, neighbouring tensors of a file keep their distance (a *segment*), and
//!    a segment keeps the file's residue modulo the direct-I/O block, so that `O_DIRECT` writes it in place. Elsewhere
//!    tensors are packed at the device's alignment, unless the device reads the file itself: then segments keep the file's
//!    residue where the alignment allows it.
//!    A caller may also say where each tensor goes: in memory that it has already. Tensors that are made of the same bytes in the
//!    same way lie in one place, whatever they are called and shaped.
//! 2. *Transfers.* A segment is cut into reads that land in place. What cannot (column slices, tensors that would lie
//!    misaligned, tensors to be converted, small pieces) is read into staging buffers, near extents merged, and copied or
//!    converted piece by piece. Of a segment that the device reads itself the whole blocks go so; the rest is staged.
//! 3. *Route.* Each read goes past the page cache or through it by what is resident in its range.
//!
//! `data` is what goes in and comes out, `place` decides 1, `cut` and `batch` 2, `cut` 3.

mod batch;
mod cut;
mod data;
mod place;
mod route;
mod staged;

use std::sync::Arc;

pub use data::{GlobalScale, Landing, LoadPlan, PlacedPiece, Placement, RouteChoice, ScaleTable, Transfer};
#[doc(hidden)]
pub use data::{PlanOptions, ShardFacts, Wanted, WantedCast};

use batch::Batches;
use cut::{cut_past_the_host, cut_segment};
use place::{
    PAGE_BYTES, facts, firsts, landing_limits, place_as_told, place_in_segments, place_packed, placement, without_twins,
};

use crate::device::DeviceLimits;
use crate::error::Result;
use crate::extent::align_up;

/// Lays the tensors out and decides the reads.
///
/// # Errors
/// When sizes do not fit 64 bits, or a staging buffer is too small for a block of direct I/O.
#[doc(hidden)]
pub fn plan(wanted: &[Wanted], shards: &[ShardFacts], device: DeviceLimits, options: PlanOptions) -> Result<LoadPlan> {
    let (all, firsts) = (wanted, firsts(wanted));
    let bare = without_twins(wanted, &firsts);
    let wanted = bare.as_ref();
    let layout = match device.host_visible {
        _ if wanted.iter().any(|tensor| tensor.place.is_some()) => place_as_told(wanted)?,
        false if !shards.iter().any(|facts| landing_limits(facts, device, options).is_some()) => {
            place_packed(wanted, device)?
        }
        _ => place_in_segments(wanted, shards, device, options)?,
    };
    let (mut transfers, mut loose) = (Vec::new(), layout.loose);
    for segment in &layout.segments {
        let facts = facts(shards, segment.shard)?;
        match landing_limits(facts, device, options) {
            Some(limits) if !device.host_visible => {
                cut_past_the_host(segment, facts, limits, options, &mut transfers, &mut loose);
            }
            _ => cut_segment(segment, facts, options, &mut transfers),
        }
    }
    loose.sort_by_key(|item| (item.runs.shard, item.runs.offset)); // nearly sorted already
    let mut batches = Batches { shards, options, transfers, open: None };
    for item in loose {
        batches.add(item)?;
    }
    let mut transfers = batches.finish();
    transfers.sort_unstable_by_key(|transfer| (transfer.shard, transfer.offset, transfer.len));
    let placements = all.iter().enumerate().zip(firsts).map(|((index, tensor), first)| {
        let same_as = all.get(first).filter(|_| first != index).map(|first| Arc::clone(&first.name));
        placement(tensor, layout.places[first], same_as)
    });
    let placements = placements.collect();
    let mut plan =
        LoadPlan { arena_bytes: layout.arena_bytes, buffer_bytes: 0, placements, transfers, scales: Vec::new() };
    let staged = plan.transfers.iter().filter(|transfer| matches!(transfer.landing, Landing::Staged { .. }));
    let longest = staged.map(|transfer| transfer.len).max().unwrap_or(0);
    plan.buffer_bytes = align_up(longest, PAGE_BYTES).min(options.buffer_bytes);
    Ok(plan)
}
