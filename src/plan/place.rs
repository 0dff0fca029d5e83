//! Where each tensor lies in the arena: packed, in segments that keep the residues of their file, or where the caller says.
//!
//! It decides no read.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::device::{BlockScale, Cast, DeviceLimits};
use crate::error::{Error, Result};
use crate::extent::{Extent, ShardIndex, Strided, align_up, congruent_up};
use crate::storage::Limits;

use super::data::{Placement, PlanOptions, RouteChoice, ShardFacts, Wanted, WantedCast};

/// Segments below this many bytes are not worth a read of their own: they ride in a staging buffer.
pub(super) const SMALL_SEGMENT_BYTES: u64 = 128 << 10;

/// The arena keeps the residues of file offsets modulo this, at least.
pub(super) const PAGE_BYTES: u64 = 4 << 10;

/// Unselected bytes between two tensors of a segment, at most: they cost memory as well as reading.
const SEGMENT_GAP_BYTES: u64 = 4 << 10;

/// Tensors that cannot keep their residue start on multiples of this: a cache line, the widest vector.
const SHIFTED_ALIGN: u64 = 64;

/// Neighbouring tensors of a file that keep their distance in the arena.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    pub(super) shard: ShardIndex,
    pub(super) file: Range<u64>,
    pub(super) arena: u64,
    /// Whether direct reads can land in it.
    pub(super) direct: bool,
}

impl Segment {
    /// A range of its file, to be read through a staging buffer.
    pub(super) fn item(&self, range: Range<u64>) -> Option<Item> {
        let extent = Extent { shard: self.shard, offset: range.start, len: range.end - range.start };
        // Nothing is converted here, so no tensor has to be known.
        let to = Destination { tensor: 0, arena: self.arena + (range.start - self.file.start), cast: None };
        (!range.is_empty()).then(|| Item { runs: Strided::contiguous(extent, 0), to })
    }
}

/// Runs of a tensor that are read through a staging buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    pub(super) runs: Strided,
    pub(super) to: Destination,
}

/// The tensor that bytes belong to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    /// Index in the order of the selection.
    pub(super) tensor: usize,
    /// Its first byte in the arena.
    pub(super) arena: u64,
    pub(super) cast: Option<WantedCast>,
}

impl Destination {
    /// Where the byte number `at` of the tensor as stored goes.
    pub(super) fn place(&self, at: u64) -> u64 {
        self.arena + self.cast.map_or(at, |wanted| wanted.cast.converted(at))
    }

    /// The conversion of a piece that begins at `offset` of the file.
    pub(super) fn cast_at(&self, offset: u64) -> Option<Cast> {
        self.cast.map(|WantedCast { cast, origin }| {
            let first = offset.saturating_sub(origin) / cast.from.bytes();
            Cast { scale: cast.scale.map(|scale| BlockScale { first, ..scale }), ..cast }
        })
    }
}

/// All runs of a tensor that lies at `arena`.
pub(super) fn items(tensor: usize, wanted: &Wanted, arena: u64) -> impl Iterator<Item = Item> + '_ {
    let to = Destination { tensor, arena, cast: wanted.cast };
    wanted.runs.iter().map(move |&runs| Item { runs, to })
}

pub(super) struct Layout {
    pub(super) arena_bytes: u64,
    /// The first byte of each tensor, in the order of the selection.
    pub(super) places: Vec<u64>,
    pub(super) segments: Vec<Segment>,
    pub(super) loose: Vec<Item>,
}

/// What reads of the file that land in the arena itself want: the direct ones of the host where it can address the arena, else
/// those that the device makes.
pub(super) fn landing_limits(facts: &ShardFacts, device: DeviceLimits, options: PlanOptions) -> Option<Limits> {
    match options.route {
        _ if device.host_visible => facts.direct,
        RouteChoice::Auto | RouteChoice::GpuDirect => facts.gpu_direct,
        RouteChoice::Direct | RouteChoice::Buffered | RouteChoice::Mapped => None,
    }
}

pub(super) fn facts(shards: &[ShardFacts], shard: ShardIndex) -> Result<&ShardFacts> {
    shards.get(shard as usize).ok_or(Error::Poisoned { what: "a tensor of a shard that the checkpoint does not have" })
}

pub(super) fn too_large() -> Error {
    Error::Request { what: "the selected tensors take more than 2^64 bytes".to_owned(), hint: None }
}

pub(super) fn placement(wanted: &Wanted, arena: u64, same_as: Option<Arc<str>>) -> Placement {
    Placement {
        name: Arc::clone(&wanted.name),
        aliases: wanted.aliases.clone(),
        dtype: wanted.dtype,
        shape: Arc::clone(&wanted.shape),
        arena,
        bytes: wanted.bytes,
        same_as,
    }
}

/// For each tensor the one whose place it gets: itself, or one that is made of the same bytes in the same way, and is aligned no
/// less strictly.
pub(super) fn firsts(wanted: &[Wanted]) -> Vec<usize> {
    let begin = |tensor: &Wanted| tensor.runs.first().map(|run| (run.shard, run.offset));
    let mut order: Vec<(_, usize)> = wanted.iter().map(begin).zip(0..).collect();
    order.sort_unstable(); // nearly sorted already
    let mut firsts: Vec<usize> = (0..wanted.len()).collect();
    for group in order.chunk_by(|a, b| a.0 == b.0).filter(|group| group.len() > 1) {
        let mut known = HashMap::new();
        let group = || group.iter().map(|(_, index)| (*index, &wanted[*index])).filter(|(_, tensor)| tensor.bytes > 0);
        for (index, tensor) in group() {
            let first = known.entry(made_of(tensor)).or_insert(index);
            if wanted[*first].dtype.alignment() < tensor.dtype.alignment() {
                *first = index;
            }
        }
        group().for_each(|(index, tensor)| firsts[index] = known[&made_of(tensor)]);
    }
    firsts
}

/// What makes the bytes of a tensor what they are, and where they go.
pub(super) fn made_of(tensor: &Wanted) -> (&[Strided], Option<WantedCast>, Option<u64>) {
    (&tensor.runs, tensor.cast, tensor.place)
}

/// The tensors to lay out: those that get the place of another one have no bytes of their own.
pub(super) fn without_twins<'w>(wanted: &'w [Wanted], firsts: &[usize]) -> Cow<'w, [Wanted]> {
    let own = |(index, first): (usize, &usize)| index == *first;
    if firsts.iter().enumerate().all(own) {
        return Cow::Borrowed(wanted);
    }
    let bare = |(tensor, is_own): (&Wanted, bool)| match is_own {
        true => tensor.clone(),
        false => Wanted { runs: Vec::new(), bytes: 0, ..tensor.clone() },
    };
    wanted.iter().zip(firsts.iter().enumerate().map(own)).map(bare).collect()
}

/// One past the tensor's last byte, when it starts at `arena`.
pub(super) fn end_of(arena: u64, wanted: &Wanted) -> Result<u64> {
    arena.checked_add(wanted.bytes).ok_or_else(too_large)
}

/// All tensors one after the other, in the order of their files, each at the device's alignment.
pub(super) fn place_packed(wanted: &[Wanted], device: DeviceLimits) -> Result<Layout> {
    let mut cursor = 0;
    let mut places = vec![0; wanted.len()];
    let mut loose = Vec::new();
    for index in in_file_order(wanted) {
        let tensor = &wanted[index];
        let arena = align_up(cursor, device.align.max(tensor.dtype.alignment()));
        cursor = end_of(arena, tensor)?;
        loose.extend(items(index, tensor, arena));
        places[index] = arena;
    }
    Ok(Layout { arena_bytes: cursor, places, segments: Vec::new(), loose })
}

/// Each tensor where the caller wants it.
pub(super) fn place_as_told(wanted: &[Wanted]) -> Result<Layout> {
    let refuse = |what: String| Err(Error::Request { what, hint: None });
    let mut order: Vec<(u64, usize)> = Vec::with_capacity(wanted.len());
    for (index, tensor) in wanted.iter().enumerate() {
        let Some(place) = tensor.place else {
            return refuse(format!("tensor {:?} has been given no place in the memory to load into", tensor.name));
        };
        let align = tensor.dtype.alignment();
        if !place.is_multiple_of(align) {
            return refuse(format!("tensor {:?} cannot lie at byte {place}: {align}-byte elements", tensor.name));
        }
        order.push((place, index));
    }
    order.sort_unstable();
    let mut end = 0;
    order.retain(|&(_, index)| wanted[index].bytes > 0); // nothing lies over nothing
    for (at, &(place, index)) in order.iter().enumerate() {
        if place < end {
            let (before, tensor) = (&wanted[order[at - 1].1].name, &wanted[index].name);
            return refuse(format!("tensor {tensor:?} would lie at byte {place}, but {before:?} ends at byte {end}"));
        }
        end = end_of(place, &wanted[index])?;
    }
    let place = |tensor: &Wanted| tensor.place.map_or(0, |place| if tensor.bytes > 0 { place } else { place.min(end) });
    let places: Vec<u64> = wanted.iter().map(place).collect();
    let all = wanted.iter().zip(&places).enumerate();
    let mut loose: Vec<Item> = all.flat_map(|(index, (tensor, &place))| items(index, tensor, place)).collect();
    loose.sort_unstable_by_key(|item| (item.runs.shard, item.runs.offset));
    Ok(Layout { arena_bytes: end, places, segments: Vec::new(), loose })
}

/// Indices of the tensors by file and by the offset of their first byte.
pub(super) fn in_file_order(wanted: &[Wanted]) -> Vec<usize> {
    let place = |(index, tensor): (usize, &Wanted)| {
        let (shard, offset) = tensor.runs.first().map_or((0, 0), |run| (run.shard, run.offset));
        (shard, offset, index)
    };
    let mut order: Vec<(ShardIndex, u64, usize)> = wanted.iter().enumerate().map(place).collect();
    order.sort(); // the stable sort makes use of the order that names and files share
    order.into_iter().map(|(_, _, index)| index).collect()
}

/// Tensors that are one run each, grouped so that each group can keep the file's distances; the rest apart.
pub(super) fn place_in_segments(
    wanted: &[Wanted],
    shards: &[ShardFacts],
    device: DeviceLimits,
    options: PlanOptions,
) -> Result<Layout> {
    let places = vec![0; wanted.len()];
    let mut layout = Layout { arena_bytes: 0, places, segments: Vec::new(), loose: Vec::new() };
    let mut group: Option<Group> = None;
    let mut apart = Vec::new();
    for index in in_file_order(wanted) {
        let tensor = &wanted[index];
        let member = Member::of(index, tensor, device);
        let limits = match &member {
            Some(member) => landing_limits(facts(shards, member.shard)?, device, options),
            None => None,
        };
        let Some(member) = member.filter(|_| device.host_visible || limits.is_some()) else {
            apart.push(index);
            continue;
        };
        match &mut group {
            Some(open) if open.takes(&member) => open.push(member),
            open => {
                let fresh = Group::start(member, limits);
                if let Some(full) = open.replace(fresh) {
                    full.settle(wanted, &mut layout)?;
                }
            }
        }
    }
    if let Some(full) = group {
        full.settle(wanted, &mut layout)?;
    }
    for index in apart {
        let tensor = &wanted[index];
        let arena = align_up(layout.arena_bytes, device.align.max(tensor.dtype.alignment()).max(SHIFTED_ALIGN));
        layout.arena_bytes = end_of(arena, tensor)?;
        layout.loose.extend(items(index, tensor, arena));
        layout.places[index] = arena;
    }
    layout.loose.sort_unstable_by_key(|item| (item.runs.shard, item.runs.offset));
    Ok(layout)
}

/// A tensor that is one run of one file.
pub(super) struct Member {
    pub(super) index: usize,
    pub(super) shard: ShardIndex,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) align: u64,
}

impl Member {
    pub(super) fn of(index: usize, tensor: &Wanted, device: DeviceLimits) -> Option<Member> {
        match tensor.runs.as_slice() {
            [run] if run.count == 1 && run.run > 0 && tensor.cast.is_none() => Some(Member {
                index,
                shard: run.shard,
                offset: run.offset,
                len: run.run,
                align: device.align.max(tensor.dtype.alignment()),
            }),
            _ => None,
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Members in file order whose distances can be kept: with the first at an address that is `residue` modulo `modulus`,
/// every member is aligned.
pub(super) struct Group {
    pub(super) members: Vec<Member>,
    pub(super) residue: u64,
    pub(super) modulus: u64,
    pub(super) direct: bool,
    pub(super) end: u64,
}

impl Group {
    /// Chooses the residue of the first member: the file's own, where every alignment that is asked for allows it. A copy
    /// out of the page cache is then as fast as it can be (source and target lie alike in their pages), and a direct read
    /// can land in place. Else the address that the alignment wants, which direct reads cannot use if they want more.
    pub(super) fn start(first: Member, limits: Option<Limits>) -> Group {
        let (offset, end) = (first.offset, first.end());
        let congruence = limits.map_or(PAGE_BYTES, |limits| limits.memory_align.max(PAGE_BYTES));
        let keeps_residue = offset.is_multiple_of(first.align.min(congruence));
        let (residue, modulus) = match keeps_residue {
            true if first.align > congruence => (0, first.align),
            true => (offset % congruence, congruence),
            false => (0, first.align.max(SHIFTED_ALIGN)),
        };
        Group { members: vec![first], residue, modulus, direct: keeps_residue && limits.is_some(), end }
    }

    pub(super) fn takes(&self, member: &Member) -> bool {
        let first = &self.members[0];
        member.shard == first.shard
            && member.offset >= self.end
            && member.offset - self.end <= SEGMENT_GAP_BYTES
            && member.align <= self.modulus
            && (self.residue + (member.offset - first.offset)).is_multiple_of(member.align)
    }

    pub(super) fn push(&mut self, member: Member) {
        self.end = member.end();
        self.members.push(member);
    }

    /// Gives the members their places. A group too small for reads of its own becomes loose items.
    pub(super) fn settle(self, wanted: &[Wanted], layout: &mut Layout) -> Result<()> {
        let first = &self.members[0];
        let small = self.end - first.offset < SMALL_SEGMENT_BYTES;
        let strictest = self.members.iter().map(|member| member.align).max().unwrap_or(1);
        let modulus = if small { self.modulus.min(strictest.max(SHIFTED_ALIGN)) } else { self.modulus };
        let arena = congruent_up(layout.arena_bytes, self.residue % modulus, modulus);
        let place = |member: &Member| arena + (member.offset - first.offset);
        layout.arena_bytes = arena.checked_add(self.end - first.offset).ok_or_else(too_large)?;
        for member in &self.members {
            layout.places[member.index] = place(member);
            if small {
                layout.loose.extend(items(member.index, &wanted[member.index], place(member)));
            }
        }
        if !small {
            let (shard, file) = (first.shard, first.offset..self.end);
            layout.segments.push(Segment { shard, file, arena, direct: self.direct });
        }
        Ok(())
    }
}
