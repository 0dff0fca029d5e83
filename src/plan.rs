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

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::{BlockScale, Cast, DeviceLimits, MAX_PIECES, Piece};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::extent::{Extent, ShardIndex, Strided, align_down, align_up, congruent_up};
use crate::memory;
use crate::setting::Setting;
use crate::storage::{Limits, Residency, Route};

/// Above this share of resident bytes a read goes through the page cache. Break-even on the machines measured: reading a
/// cold page buffered costs twice what it costs direct, a warm one a sixth.
const WARM_SHARE: f64 = 0.6;

/// Segments below this many bytes are not worth a read of their own: they ride in a staging buffer.
const SMALL_SEGMENT_BYTES: u64 = 128 << 10;

/// Unselected bytes between two tensors of a segment, at most: they cost memory as well as reading.
const SEGMENT_GAP_BYTES: u64 = 4 << 10;

/// The arena keeps the residues of file offsets modulo this, at least.
const PAGE_BYTES: u64 = 4 << 10;

/// Tensors that cannot keep their residue start on multiples of this: a cache line, the widest vector.
const SHIFTED_ALIGN: u64 = 64;

/// Staged reads of tensors to be converted are cut at multiples of this: no element type is wider.
const WIDEST_ELEMENT_BYTES: u64 = 8;

/// In-place reads end on multiples of this in the arena, so that two readers do not fault the same huge page.
const HUGE_PAGE_BYTES: u64 = memory::HUGE_PAGE_BYTES as u64;

/// One tensor to load: its bytes come from `runs`.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Name under which it is handed out.
    pub name: Arc<str>,
    /// Further names of the same memory.
    pub aliases: Vec<Arc<str>>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape after slicing.
    pub shape: Arc<[u64]>,
    /// Bytes after slicing and converting.
    pub bytes: u64,
    /// Where the bytes are; together they give each byte of the tensor once. `at` counts bytes as stored.
    pub runs: Vec<Strided>,
    /// How the elements are converted, if they are.
    pub cast: Option<WantedCast>,
    /// Where the tensor goes, in an arena that the caller has; for all tensors of a plan or for none.
    pub place: Option<u64>,
}

/// How the elements of a tensor are converted while they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WantedCast {
    /// From what to what, and by which scales (their `first` is the plan's to set).
    pub cast: Cast,
    /// Where in its file the first element of the tensor as stored lies.
    pub origin: u64,
}

/// What the plan must know of one file.
#[derive(Debug, Clone)]
pub struct ShardFacts {
    /// Length in bytes.
    pub bytes: u64,
    /// What is in the page cache.
    pub residency: Residency,
    /// Limits of direct reads; `None` where the file cannot be read so.
    pub direct: Option<Limits>,
    /// Limits of reads that the device makes itself; `None` where it does not, or where that does not pay.
    pub gpu_direct: Option<Limits>,
    /// Limits of reads through the page cache.
    pub cached: Limits,
    /// Whether the file may be mapped.
    pub mappable: bool,
}

impl ShardFacts {
    /// A file that nothing is read from.
    pub fn untouched(bytes: u64) -> ShardFacts {
        let cached = Limits { align: 1, memory_align: 1, max_read: 1, gap: 0, depth: 1 };
        ShardFacts { bytes, residency: Residency::none(bytes), direct: None, gpu_direct: None, cached, mappable: false }
    }

    /// Whether anything may be read from the file.
    pub fn is_used(&self) -> bool {
        self.cached.max_read > 1
    }
}

/// Which way the bytes shall go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouteChoice {
    /// By what is in the page cache, read by read.
    #[default]
    Auto,
    /// Past the page cache wherever the file system allows it.
    Direct,
    /// Through the page cache, by `read`.
    Buffered,
    /// Through the page cache, out of a mapping.
    Mapped,
    /// By the device itself, past the host, wherever it can; the rest by what is in the page cache.
    GpuDirect,
}

/// What the caller of [`plan`] chooses.
#[derive(Debug, Clone, Copy)]
pub struct PlanOptions {
    /// Which way the bytes shall go.
    pub route: RouteChoice,
    /// Bytes of a staging buffer.
    pub buffer_bytes: u64,
}

/// A complete plan. Offsets and lengths are bytes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LoadPlan {
    /// Size of the arena.
    pub arena_bytes: u64,
    /// The size that staging buffers must have, at most what was allowed; 0 if no transfer needs one.
    pub buffer_bytes: u64,
    /// Where each tensor lies, in the order of the selection.
    pub placements: Vec<Placement>,
    /// The reads, by file and offset.
    pub transfers: Vec<Transfer>,
    /// The tables of scales that converting needs, read before everything else.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<ScaleTable>,
}

/// A tensor that holds the scales of quantised ones.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ScaleTable {
    /// Its name as stored.
    pub name: Arc<str>,
    /// The tensors that it scales, by the names they are handed out under.
    pub scales: Vec<Arc<str>>,
    /// Its element type.
    pub dtype: Dtype,
    /// Where its bytes are.
    #[serde(skip)]
    pub runs: Vec<Strided>,
    /// The one number that all of its scales are multiplied by or divided by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global: Option<GlobalScale>,
}

/// The upper level of scales on two levels: one F32 number.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct GlobalScale {
    /// The tensor that holds it, as stored.
    pub name: Arc<str>,
    /// Whether scales are divided by it.
    pub divides: bool,
    /// Where its bytes are.
    #[serde(skip)]
    pub runs: Vec<Strided>,
}

/// Where a tensor lies in the arena.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Placement {
    /// Name under which it is handed out.
    pub name: Arc<str>,
    /// Further names of the same memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<Arc<str>>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape after slicing.
    pub shape: Arc<[u64]>,
    /// First byte in the arena.
    pub arena: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// The tensor that these bytes are placed for, where it is another one: tied weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_as: Option<Arc<str>>,
}

/// One read and what it feeds.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Transfer {
    /// Which file.
    pub shard: ShardIndex,
    /// First byte in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The way to take.
    pub route: Route,
    /// Where the bytes go.
    pub landing: Landing,
}

/// Where the bytes of a read go.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Landing {
    /// Straight to their place, from this byte of the arena on.
    InPlace {
        /// First byte in the arena.
        arena: u64,
    },
    /// Into a staging buffer, and from there piece by piece.
    Staged {
        /// What to copy.
        pieces: Vec<PlacedPiece>,
    },
}

/// A piece of a staging buffer and its place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct PlacedPiece {
    /// The bytes of the buffer.
    pub piece: Piece,
    /// First byte in the arena.
    pub arena: u64,
    /// The tensor, as an index of the placements, if the piece is converted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<usize>,
}

impl Placement {
    /// The bytes as a range of the arena.
    pub fn range(&self) -> Range<u64> {
        self.arena..self.arena + self.bytes
    }
}

impl Transfer {
    /// The bytes as a range of the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// The arena ranges it writes.
    pub fn writes(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let in_place = match &self.landing {
            Landing::InPlace { arena } => Some(*arena..*arena + self.len),
            Landing::Staged { .. } => None,
        };
        let pieces: &[PlacedPiece] = match &self.landing {
            Landing::InPlace { .. } => &[],
            Landing::Staged { pieces } => pieces,
        };
        in_place.into_iter().chain(pieces.iter().map(|p| p.arena..p.arena + p.piece.len()))
    }
}

impl LoadPlan {
    /// Number of tensors, those that share their bytes counted once.
    pub fn tensors(&self) -> usize {
        self.distinct().count()
    }

    /// Number of names that tensors are handed out under.
    pub fn names(&self) -> usize {
        self.placements.iter().map(|placement| 1 + placement.aliases.len()).sum()
    }

    /// Bytes of the tensors, shared ones counted once.
    pub fn tensor_bytes(&self) -> u64 {
        self.distinct().map(|placement| placement.bytes).sum()
    }

    fn distinct(&self) -> impl Iterator<Item = &Placement> {
        self.placements.iter().filter(|placement| placement.same_as.is_none())
    }

    /// Bytes that are read, gaps and block padding included.
    pub fn read_bytes(&self) -> u64 {
        self.transfers.iter().map(|transfer| transfer.len).sum()
    }

    /// Bytes read by `route`.
    pub fn route_bytes(&self, route: Route) -> u64 {
        self.transfers.iter().filter(|transfer| transfer.route == route).map(|transfer| transfer.len).sum()
    }

    /// Number of reads that need a staging buffer.
    pub fn staged(&self) -> usize {
        self.transfers.iter().filter(|transfer| matches!(transfer.landing, Landing::Staged { .. })).count()
    }

    /// Which tensor of scales each quantised weight is multiplied by.
    pub fn scaled(&self) -> BTreeMap<&str, &str> {
        let pairs = self.scales.iter().flat_map(|table| table.scales.iter().map(move |weight| (weight, &table.name)));
        pairs.map(|(weight, scales)| (weight.as_ref(), scales.as_ref())).collect()
    }
}

/// Lays the tensors out and decides the reads.
///
/// # Errors
/// When sizes do not fit 64 bits, or a staging buffer is too small for a block of direct I/O.
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

/// Neighbouring tensors of a file that keep their distance in the arena.
#[derive(Debug, Clone)]
struct Segment {
    shard: ShardIndex,
    file: Range<u64>,
    arena: u64,
    /// Whether direct reads can land in it.
    direct: bool,
}

impl Segment {
    /// A range of its file, to be read through a staging buffer.
    fn item(&self, range: Range<u64>) -> Option<Item> {
        let extent = Extent { shard: self.shard, offset: range.start, len: range.end - range.start };
        // Nothing is converted here, so no tensor has to be known.
        let to = Destination { tensor: 0, arena: self.arena + (range.start - self.file.start), cast: None };
        (!range.is_empty()).then(|| Item { runs: Strided::contiguous(extent, 0), to })
    }
}

/// Runs of a tensor that are read through a staging buffer.
#[derive(Debug, Clone, Copy)]
struct Item {
    runs: Strided,
    to: Destination,
}

/// The tensor that bytes belong to.
#[derive(Debug, Clone, Copy)]
struct Destination {
    /// Index in the order of the selection.
    tensor: usize,
    /// Its first byte in the arena.
    arena: u64,
    cast: Option<WantedCast>,
}

impl Destination {
    /// Where the byte number `at` of the tensor as stored goes.
    fn place(&self, at: u64) -> u64 {
        self.arena + self.cast.map_or(at, |wanted| wanted.cast.converted(at))
    }

    /// The conversion of a piece that begins at `offset` of the file.
    fn cast_at(&self, offset: u64) -> Option<Cast> {
        self.cast.map(|WantedCast { cast, origin }| {
            let first = offset.saturating_sub(origin) / cast.from.bytes();
            Cast { scale: cast.scale.map(|scale| BlockScale { first, ..scale }), ..cast }
        })
    }
}

/// All runs of a tensor that lies at `arena`.
fn items(tensor: usize, wanted: &Wanted, arena: u64) -> impl Iterator<Item = Item> + '_ {
    let to = Destination { tensor, arena, cast: wanted.cast };
    wanted.runs.iter().map(move |&runs| Item { runs, to })
}

struct Layout {
    arena_bytes: u64,
    /// The first byte of each tensor, in the order of the selection.
    places: Vec<u64>,
    segments: Vec<Segment>,
    loose: Vec<Item>,
}

/// What reads of the file that land in the arena itself want: the direct ones of the host where it can address the arena, else
/// those that the device makes.
fn landing_limits(facts: &ShardFacts, device: DeviceLimits, options: PlanOptions) -> Option<Limits> {
    match options.route {
        _ if device.host_visible => facts.direct,
        RouteChoice::Auto | RouteChoice::GpuDirect => facts.gpu_direct,
        RouteChoice::Direct | RouteChoice::Buffered | RouteChoice::Mapped => None,
    }
}

fn facts(shards: &[ShardFacts], shard: ShardIndex) -> Result<&ShardFacts> {
    shards.get(shard as usize).ok_or(Error::Poisoned { what: "a tensor of a shard that the checkpoint does not have" })
}

fn too_large() -> Error {
    Error::Request { what: "the selected tensors take more than 2^64 bytes".to_owned(), hint: None }
}

fn placement(wanted: &Wanted, arena: u64, same_as: Option<Arc<str>>) -> Placement {
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
fn firsts(wanted: &[Wanted]) -> Vec<usize> {
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
fn made_of(tensor: &Wanted) -> (&[Strided], Option<WantedCast>, Option<u64>) {
    (&tensor.runs, tensor.cast, tensor.place)
}

/// The tensors to lay out: those that get the place of another one have no bytes of their own.
fn without_twins<'w>(wanted: &'w [Wanted], firsts: &[usize]) -> Cow<'w, [Wanted]> {
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
fn end_of(arena: u64, wanted: &Wanted) -> Result<u64> {
    arena.checked_add(wanted.bytes).ok_or_else(too_large)
}

/// All tensors one after the other, in the order of their files, each at the device's alignment.
fn place_packed(wanted: &[Wanted], device: DeviceLimits) -> Result<Layout> {
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
fn place_as_told(wanted: &[Wanted]) -> Result<Layout> {
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
fn in_file_order(wanted: &[Wanted]) -> Vec<usize> {
    let place = |(index, tensor): (usize, &Wanted)| {
        let (shard, offset) = tensor.runs.first().map_or((0, 0), |run| (run.shard, run.offset));
        (shard, offset, index)
    };
    let mut order: Vec<(ShardIndex, u64, usize)> = wanted.iter().enumerate().map(place).collect();
    order.sort(); // the stable sort makes use of the order that names and files share
    order.into_iter().map(|(_, _, index)| index).collect()
}

/// Tensors that are one run each, grouped so that each group can keep the file's distances; the rest apart.
fn place_in_segments(
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
struct Member {
    index: usize,
    shard: ShardIndex,
    offset: u64,
    len: u64,
    align: u64,
}

impl Member {
    fn of(index: usize, tensor: &Wanted, device: DeviceLimits) -> Option<Member> {
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

    fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Members in file order whose distances can be kept: with the first at an address that is `residue` modulo `modulus`,
/// every member is aligned.
struct Group {
    members: Vec<Member>,
    residue: u64,
    modulus: u64,
    direct: bool,
    end: u64,
}

impl Group {
    /// Chooses the residue of the first member: the file's own, where every alignment that is asked for allows it. A copy
    /// out of the page cache is then as fast as it can be (source and target lie alike in their pages), and a direct read
    /// can land in place. Else the address that the alignment wants, which direct reads cannot use if they want more.
    fn start(first: Member, limits: Option<Limits>) -> Group {
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

    fn takes(&self, member: &Member) -> bool {
        let first = &self.members[0];
        member.shard == first.shard
            && member.offset >= self.end
            && member.offset - self.end <= SEGMENT_GAP_BYTES
            && member.align <= self.modulus
            && (self.residue + (member.offset - first.offset)).is_multiple_of(member.align)
    }

    fn push(&mut self, member: Member) {
        self.end = member.end();
        self.members.push(member);
    }

    /// Gives the members their places. A group too small for reads of its own becomes loose items.
    fn settle(self, wanted: &[Wanted], layout: &mut Layout) -> Result<()> {
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

/// The way for the reads of a range, by choice or by residency.
fn route_of(range: Range<u64>, facts: &ShardFacts, choice: RouteChoice) -> Route {
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

fn is_warm(range: Range<u64>, facts: &ShardFacts) -> bool {
    facts.residency.share(range) >= WARM_SHARE
}

fn limits_of(route: Route, facts: &ShardFacts) -> Limits {
    match route {
        Route::Direct => facts.direct.unwrap_or(facts.cached),
        _ => facts.cached,
    }
}

/// Cuts a segment into reads at huge-page boundaries of the arena, rounded to blocks of the file. What would have to be
/// read directly but cannot land in place goes through staging.
fn cut_segment(segment: &Segment, facts: &ShardFacts, options: PlanOptions, transfers: &mut Vec<Transfer>) {
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
fn cut_past_the_host(
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
fn staged_max(facts: &ShardFacts, options: PlanOptions) -> u64 {
    let block = facts.direct.map_or(1, |limits| limits.align);
    options.buffer_bytes.saturating_sub(2 * (block - 1))
}

/// A staged read of `range`, widened to whole blocks for direct I/O.
fn staged_transfer(
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

/// Collects loose items into staged reads, in file order.
struct Batches<'a> {
    shards: &'a [ShardFacts],
    options: PlanOptions,
    transfers: Vec<Transfer>,
    open: Option<Batch>,
}

/// A piece of a staged read in the making.
struct Loose {
    /// Where it begins in the file; `at` of the piece is still to be set.
    offset: u64,
    piece: Piece,
    arena: u64,
    tensor: Option<usize>,
}

impl Loose {
    /// Takes `next` in, if it goes on where this one ends, in the file and in the arena: one copy instead of two.
    fn join(&mut self, next: &Loose) -> bool {
        let plain = |piece: &Piece| piece.count == 1 && piece.cast.is_none();
        let follows = self.offset + self.piece.run == next.offset && self.arena + self.piece.run == next.arena;
        let joins = plain(&self.piece) && plain(&next.piece) && follows;
        if joins {
            self.piece = Piece::contiguous(0, self.piece.run + next.piece.run);
        }
        joins
    }
}

/// A staged read in the making.
struct Batch {
    shard: ShardIndex,
    file: Range<u64>,
    pieces: Vec<Loose>,
}

/// What a batch may become: bytes in all, and bytes between two pieces.
#[derive(Clone, Copy)]
struct Room {
    max: u64,
    gap: u64,
}

impl Batches<'_> {
    /// Adds an item: rows that lie close together as they are, others run by run, long runs cut.
    fn add(&mut self, item: Item) -> Result<()> {
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
    fn add_run(&mut self, run: Strided, to: Destination, room: Room) {
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
    fn add_rows(&mut self, rows: Strided, to: Destination, room: Room) {
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
    fn push(&mut self, part: Strided, to: Destination, room: Room) {
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

    fn close(&mut self) {
        if let Some(batch) = self.open.take()
            && let Some(facts) = self.shards.get(batch.shard as usize)
        {
            let route = route_of(batch.file.clone(), facts, self.options.route);
            self.transfers.push(staged_transfer(batch.shard, batch.file, route, facts, batch.pieces));
        }
    }

    fn finish(mut self) -> Vec<Transfer> {
        self.close();
        self.transfers
    }
}

impl fmt::Display for LoadPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (staged, total) = (self.staged(), self.transfers.len());
        writeln!(
            f,
            "{} tensors, {} bytes, in an arena of {} bytes",
            self.tensors(),
            self.tensor_bytes(),
            self.arena_bytes
        )?;
        writeln!(f, "{total} reads of {} bytes: {} in place, {staged} staged", self.read_bytes(), total - staged)?;
        for route in [Route::Direct, Route::Buffered, Route::Mapped, Route::GpuDirect] {
            let bytes = self.route_bytes(route);
            if bytes > 0 {
                writeln!(f, "  {route:?}: {bytes} bytes")?;
            }
        }
        Ok(())
    }
}
