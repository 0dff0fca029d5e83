//! Uploads: staging buffers to an arena in VRAM, by copies that the GPU makes itself, several streams in turn.
//!
//! Large pieces are copied to their place at once, rows as one strided copy. What is to be converted, and small_pieces where there
//! are very many, is copied to a scratch area first and moved from there by kernels. An upload owns its buffer and its regions
//! until its event has passed; one that is dropped, or that the driver refuses half-way, is waited for. The scratch area
//! belongs to one stream, whose order keeps uploads apart; what the host writes or reads of an upload (its *notes*) is
//! the upload's alone until it is over. Nothing here decides what is copied.
#![allow(unsafe_code)] // starts copies between memory that this file's objects own

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::download::CudaDownload;
use super::driver::Refusal;
use super::gpu::{Bound, Gpu};
use super::handles::{Event, PinnedBlock, StreamHandle};
use super::kernels::{CastLaunch, GatherEntry, Kernels, TableAt};
use super::memory::{DeviceMemory, target};
use crate::convert::{Float, Meaning, Table as Scales};
use crate::device::{
    BlockScale, Cast, Download, InFlight, MAX_PIECES, Memory, Piece, Region, Stream, StreamNeeds, Upload, Uploaded,
    View,
};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::StagingBuffer;
use crate::os;

/// Crumbs in a load from which on collecting them by a kernel pays for compiling it: each saves a few microseconds.
const MANY_CRUMBS: u64 = 20_000;

/// Bytes between two scratch pieces that are rather copied too than skipped.
const SCRATCH_GAP_BYTES: u64 = 64 << 10;

/// Bytes of the table of an upload's small_pieces.
const TABLE_BYTES: usize = MAX_PIECES * size_of::<GatherEntry>();

/// Bytes of an upload's notes: its table, and a counter for each piece.
const NOTE_BYTES: usize = TABLE_BYTES + MAX_PIECES * 8;

/// Streams that uploads and downloads go to in turn.
pub(super) struct CudaStream {
    gpu: Arc<Gpu>,
    lanes: Vec<Arc<StreamHandle>>,
    next: usize,
    fallbacks: Fallbacks,
    /// What the current load needs on the GPU.
    buffers: Arc<StreamBuffers>,
    /// Whether small_pieces are collected by a kernel.
    collects: bool,
}

/// What conversions and small_pieces of a load need.
#[derive(Default)]
struct StreamBuffers {
    /// For each lane: room for a staging buffer, then for its notes.
    scratch: Vec<DeviceMemory>,
    /// Bytes of each scratch area before its notes.
    buffer_bytes: u64,
    /// As many as there are staging buffers: what the host writes and reads of an upload.
    notes: Option<Notes>,
    /// The tables of scales, and the one allocation that they lie in.
    tables: Vec<Table>,
    _scales: Option<DeviceMemory>,
}

/// A table of scales on the GPU.
#[derive(Clone, Copy)]
struct Table {
    at: TableAt,
    /// Number of its values.
    values: u64,
}

/// Host memory for the notes of all uploads in flight.
struct Notes {
    block: PinnedBlock,
    /// Those that no upload has.
    free: Mutex<Vec<usize>>,
}

impl CudaStream {
    pub(super) fn new(gpu: &Arc<Gpu>, count: usize, fallbacks: &Fallbacks) -> Result<CudaStream> {
        let bound = gpu.bind()?;
        let lane = |_| StreamHandle::new(gpu, &bound).map(Arc::new);
        let lanes: Result<_, Refusal> = (0..count.max(1)).map(lane).collect();
        let lanes = lanes.map_err(|refusal| gpu.error("make a stream", refusal))?;
        let (gpu, fallbacks) = (Arc::clone(gpu), fallbacks.clone());
        drop(bound);
        Ok(CudaStream { gpu, lanes, next: 0, fallbacks, buffers: Arc::default(), collects: false })
    }
}

impl Stream for CudaStream {
    fn prepare(&mut self, needs: &StreamNeeds) -> Result<()> {
        let gpu = Arc::clone(&self.gpu);
        let bound = gpu.bind()?;
        self.collects = needs.small_pieces >= MANY_CRUMBS && self.can_collect(&bound);
        self.buffers = Arc::default(); // the former load's goes first: its memory may be needed
        for &(from, to) in &needs.casts {
            let compiled = gpu.kernels().require_cast(&bound, from, to);
            compiled.map_err(|refusal| gpu.error("compile the kernels", refusal))?;
        }
        if !needs.casts.is_empty() || self.collects {
            self.buffers = Arc::new(StreamBuffers::new(&gpu, &bound, self.lanes.len(), needs)?);
        }
        Ok(())
    }

    fn upload(&mut self, buffer: StagingBuffer, pieces: Vec<(Piece, Region)>) -> Result<InFlight> {
        let gpu = Arc::clone(&self.gpu);
        let jobs = self.sort(&buffer, &pieces)?;
        let bound = gpu.bind()?;
        buffer.wait_prepared();
        let (turn, stream) = self.take_turn()?;
        let regions = pieces.into_iter().map(|(_, region)| region).collect();
        let buffers = Arc::clone(&self.buffers);
        let slot = if jobs.needs_scratch() { Some(buffers.free_notes()?) } else { None };
        let payload = Some((buffer, regions));
        let mut upload = CudaUpload {
            gpu: Arc::clone(&gpu),
            stream,
            buffers,
            slot,
            payload,
            end: None,
            casts: None,
            fallbacks: self.fallbacks.clone(),
        };
        // An error drops the upload, which waits for what it has started.
        let started = upload.start(&bound, turn, jobs);
        started.map_err(|refusal| gpu.error("start a copy", refusal))?;
        Ok(Box::new(upload))
    }

    fn download(&mut self, buffer: StagingBuffer, views: Vec<(u64, View)>) -> Result<Box<dyn Download>> {
        let (_, stream) = self.take_turn()?;
        Ok(Box::new(CudaDownload::start(&self.gpu, stream, buffer, views, &self.fallbacks)?))
    }
}

impl CudaStream {
    /// The lane whose turn it is, and its number.
    fn take_turn(&mut self) -> Result<(usize, Arc<StreamHandle>)> {
        let turn = self.next % self.lanes.len();
        self.next = turn + 1;
        let stream = self.lanes.get(turn).map(Arc::clone).ok_or(Error::Poisoned { what: "a stream without lanes" })?;
        Ok((turn, stream))
    }

    /// Whether the kernel that collects small_pieces can be had; if not, small_pieces are copied one by one.
    fn can_collect(&self, bound: &Bound<'_>) -> bool {
        let compiled = self.gpu.kernels().require_gather(bound);
        if let Err(refusal) = &compiled {
            self.fallbacks.note("collecting small tensors on the GPU", format!("{refusal}; each is copied by itself"));
        }
        compiled.is_ok()
    }

    /// What is said of a region in memory that this GPU did not make.
    fn foreign(&self) -> Error {
        let what = format!("the memory to write is not memory of {}, or was not made by this library", self.gpu.name());
        Error::Request { what, hint: None }
    }

    /// What is to be done with each piece, checked: every byte that is read lies in the buffer (and in its copy, where it goes
    /// by that), and every byte that is written in the piece's own region.
    fn sort(&self, buffer: &StagingBuffer, pieces: &[(Piece, Region)]) -> Result<Jobs> {
        let misfit = || Error::Poisoned { what: "a piece leaves its staging buffer or its region" };
        let mut jobs = Jobs::default();
        if pieces.len() > MAX_PIECES {
            return Err(misfit());
        }
        for (index, (piece, region)) in pieces.iter().enumerate() {
            if piece.is_empty() {
                continue;
            }
            let overlapping = piece.count > 1 && piece.stride < piece.run;
            if piece.end() > buffer.len() as u64 || region.len() != piece.len() || overlapping {
                return Err(misfit());
            }
            let to = target(&self.gpu, region).ok_or_else(|| self.foreign())?;
            match piece.cast {
                Some(cast) if !self.buffers.converts(piece, &cast, to) => return Err(misfit()),
                Some(cast) => jobs.casts.push(CastJob { index, piece: *piece, cast, to }),
                None if piece.is_small() && self.collects => jobs.small_pieces.push((*piece, to)),
                None => jobs.copies.push((*piece, to)),
            }
        }
        let unprepared = self.buffers.scratch.is_empty() || jobs.scratch_end() > self.buffers.buffer_bytes;
        if jobs.needs_scratch() && unprepared {
            return Err(Error::Poisoned { what: "an upload that was not prepared for" });
        }
        Ok(jobs)
    }
}

/// The pieces of an upload by what is done with them.
#[derive(Default)]
struct Jobs {
    copies: Vec<(Piece, u64)>,
    small_pieces: Vec<(Piece, u64)>,
    casts: Vec<CastJob>,
}

struct CastJob {
    /// Which piece of the upload.
    index: usize,
    piece: Piece,
    cast: Cast,
    to: u64,
}

impl Jobs {
    fn needs_scratch(&self) -> bool {
        !self.small_pieces.is_empty() || !self.casts.is_empty()
    }

    /// One past the last byte of the buffer that goes to the scratch area.
    fn scratch_end(&self) -> u64 {
        let small_pieces = self.small_pieces.iter().map(|(piece, _)| piece.end());
        small_pieces.chain(self.casts.iter().map(|job| job.piece.end())).max().unwrap_or(0)
    }

    /// The bytes of the buffer that go to the scratch area, near ranges joined.
    fn scratch_ranges(&self) -> Vec<Range<u64>> {
        let small_pieces = self.small_pieces.iter().map(|(piece, _)| piece.at..piece.end());
        let mut ranges: Vec<_> =
            small_pieces.chain(self.casts.iter().map(|job| job.piece.at..job.piece.end())).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some(last) if range.start <= last.end + SCRATCH_GAP_BYTES => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        joined
    }
}

impl StreamBuffers {
    fn new(gpu: &Arc<Gpu>, bound: &Bound<'_>, lanes: usize, needs: &StreamNeeds) -> Result<StreamBuffers> {
        let scratch_bytes = (needs.buffer_bytes as u64).next_multiple_of(256) + NOTE_BYTES as u64;
        let scratch = (0..lanes).map(|_| DeviceMemory::own(gpu, bound, scratch_bytes)).collect::<Result<_>>()?;
        let notes =
            PinnedBlock::new(gpu, bound, needs.buffers.saturating_mul(NOTE_BYTES)).map_err(|_| out_of_host(needs))?;
        let (scales, tables) = upload_tables(gpu, bound, &needs.scales)?;
        let buffer_bytes = scratch_bytes - NOTE_BYTES as u64;
        Ok(StreamBuffers { scratch, buffer_bytes, notes: Some(Notes::new(notes)), tables, _scales: Some(scales) })
    }

    /// The number of notes that no upload has.
    fn free_notes(&self) -> Result<usize> {
        let free = self.notes.as_ref().and_then(|notes| notes.free().pop());
        free.ok_or(Error::Poisoned { what: "more uploads in flight than were prepared for" })
    }

    /// Whether a kernel that converts `piece` to the address `to` meets whole and aligned elements, each with a scale if any.
    fn converts(&self, piece: &Piece, cast: &Cast, to: u64) -> bool {
        let reach = (piece.end() - piece.at) / cast.from.bytes();
        let scaled = cast.scale.is_none_or(|scale| {
            let values = self.tables.get(scale.table).map_or(0, |table| table.values);
            let kernel_exists = match self.tables.get(scale.table).map(|table| table.at) {
                Some(TableAt::Single(_)) => cast.from != Float::F64 && cast.from != Float::E2M1x2,
                Some(TableAt::Wide { .. }) => cast.from.bytes() == 1,
                None => false,
            };
            kernel_exists && scale.is_covered_by(values, reach)
        });
        let scaled = scaled && (cast.from != Float::E2M1x2 || cast.scale.is_some());
        piece.holds_elements_of(cast) && to.is_multiple_of(cast.to.bytes()) && scaled
    }
}

fn out_of_host(needs: &StreamNeeds) -> Error {
    let needed = (needs.buffers.saturating_mul(NOTE_BYTES)) as u64;
    os::out_of_memory("cpu", needed)
}

/// All tables of scales, one after the other in one allocation, and there when this returns: a checkpoint of many experts has
/// tens of thousands, most of them a few values long.
fn upload_tables(gpu: &Arc<Gpu>, bound: &Bound<'_>, scales: &[Scales]) -> Result<(DeviceMemory, Vec<Table>)> {
    let mut packed = Packed::default();
    let offsets: Vec<(TableAt, u64)> = scales.iter().map(|table| (packed.add(table), table.len() as u64)).collect();
    let memory = DeviceMemory::own(gpu, bound, packed.bytes.len() as u64)?;
    memory.upload(0, &packed.bytes)?;
    let base = memory.at(0);
    let table = |(at, values): (TableAt, u64)| match at {
        TableAt::Single(offset) => Table { at: TableAt::Single(base + offset), values },
        TableAt::Wide { codes, values: meaning } => {
            let codes = if codes == NO_CODES { 0 } else { base + codes };
            Table { at: TableAt::Wide { codes, values: base + meaning }, values }
        }
    };
    let tables = offsets.into_iter().map(table).collect();
    Ok((memory, tables))
}

/// The offset of codes that there are not.
const NO_CODES: u64 = u64::MAX;

/// Tables one after the other, each part aligned for its values.
#[derive(Default)]
struct Packed {
    bytes: Vec<u8>,
    /// Where the meaning of exponents is, which all tables of these share.
    exponents: Option<u64>,
}

impl Packed {
    /// Appends a table. Addresses in the answer are offsets.
    fn add(&mut self, table: &Scales) -> TableAt {
        match table {
            Scales::Single(values) => TableAt::Single(self.append(bytemuck::cast_slice(values))),
            Scales::Wide(values) => {
                TableAt::Wide { codes: NO_CODES, values: self.append(bytemuck::cast_slice(values)) }
            }
            Scales::Coded { codes, meaning } => {
                let known = self.exponents.filter(|_| *meaning == Meaning::Exponents);
                let values = known.unwrap_or_else(|| self.append(bytemuck::cast_slice(&meaning.values())));
                if *meaning == Meaning::Exponents {
                    self.exponents = Some(values);
                }
                TableAt::Wide { codes: self.append(codes), values }
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let offset = self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytes);
        offset
    }
}

impl Notes {
    fn new(block: PinnedBlock) -> Notes {
        let free = (0..block.len() / NOTE_BYTES).collect();
        Notes { block, free: Mutex::new(free) }
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The notes number `slot`, which [`Notes::free`] has given out.
    fn of(&self, slot: usize) -> *mut u8 {
        self.block.start().wrapping_add(slot * NOTE_BYTES)
    }
}

/// An upload on its way.
struct CudaUpload {
    gpu: Arc<Gpu>,
    stream: Arc<StreamHandle>,
    buffers: Arc<StreamBuffers>,
    /// The notes it has, if it needs some.
    slot: Option<usize>,
    /// What the GPU may be reading and writing; taken when that is over.
    payload: Option<(StagingBuffer, Vec<Region>)>,
    /// Recorded when everything had been started.
    end: Option<Event>,
    casts: Option<CastNotes>,
    fallbacks: Fallbacks,
}

/// What is to be learned of an upload's conversions when it is over.
struct CastNotes {
    /// Before the first and after the last.
    from: Event,
    to: Event,
    /// Which piece each counter is of.
    pieces: Vec<usize>,
}

impl CudaUpload {
    /// Starts everything, and records the end.
    fn start(&mut self, bound: &Bound<'_>, turn: usize, jobs: Jobs) -> Result<(), Refusal> {
        let Some((buffer, _)) = &self.payload else { return Ok(()) };
        let source = buffer.bytes().as_ptr();
        if jobs.needs_scratch() {
            self.start_scratch(bound, source, turn, &jobs)?;
        }
        for &(piece, to) in &jobs.copies {
            let from = source.wrapping_add(size(piece.at));
            if piece.count == 1 || piece.run == piece.stride {
                // SAFETY: `sort` has checked that the piece lies in the buffer and fills its region; both are this upload's
                // until the stream has passed (`Drop` and `finish` wait).
                unsafe { self.stream.copy_in(bound, to, from, size(piece.len())) }?;
            } else {
                let rows = [piece.run, piece.stride, piece.count].map(size);
                // SAFETY: as above, for all rows.
                unsafe { self.stream.copy_rows_in(bound, to, from, rows) }?;
            }
        }
        self.end = Some(Event::record(&self.gpu, bound, &self.stream, false)?);
        Ok(())
    }

    /// Starts what goes by way of the scratch area.
    fn start_scratch(&mut self, bound: &Bound<'_>, source: *const u8, turn: usize, jobs: &Jobs) -> Result<(), Refusal> {
        const UNPREPARED: Refusal = Refusal { call: "vramp", code: 1 };
        let buffers = Arc::clone(&self.buffers);
        let notes = buffers.notes.as_ref().zip(self.slot).map(|(notes, slot)| notes.of(slot)).ok_or(UNPREPARED)?;
        let scratch = buffers.scratch.get(turn).ok_or(UNPREPARED)?;
        let stream = &*self.stream;
        for range in jobs.scratch_ranges() {
            let (from, bytes) = (source.wrapping_add(size(range.start)), size(range.end - range.start));
            // SAFETY: `sort` has checked that the range lies in the buffer, and that the scratch area is as long as that; the
            // stream's order keeps it from the upload before.
            unsafe { stream.copy_in(bound, scratch.at(range.start), from, bytes) }?;
        }
        let kernels = self.gpu.kernels();
        let area =
            Area { bound, kernels, stream, base: scratch.at(0), notes, remote: scratch.at(buffers.buffer_bytes) };
        if !jobs.small_pieces.is_empty() {
            area.gather(&jobs.small_pieces)?;
        }
        if !jobs.casts.is_empty() {
            let from = Event::record(&self.gpu, bound, stream, true)?;
            area.cast(&jobs.casts, &buffers.tables)?;
            let to = Event::record(&self.gpu, bound, stream, true)?;
            area.fetch_counters(jobs.casts.len())?;
            let pieces = jobs.casts.iter().map(|job| job.index).collect();
            self.casts = Some(CastNotes { from, to, pieces });
        }
        Ok(())
    }

    /// How long converting took, and which pieces had finite numbers become infinite. Only after the end.
    fn read_notes(&self, bound: &Bound<'_>) -> Result<(f64, Vec<(usize, u64)>), Refusal> {
        let Some(casts) = &self.casts else { return Ok((0.0, Vec::new())) };
        let seconds = casts.to.seconds_since(bound, &casts.from)?;
        let notes = self.buffers.notes.as_ref().zip(self.slot);
        let counters = notes.map_or(&[][..], |(notes, slot)| {
            let start = notes.of(slot).wrapping_add(TABLE_BYTES).cast::<u64>();
            // SAFETY: the counters lie in the notes, aligned (both sizes before them are multiples of 8), and the copy that
            // filled them is over; nobody writes them before this upload's buffer is free again.
            unsafe { std::slice::from_raw_parts(start, casts.pieces.len()) }
        });
        let counted = casts.pieces.iter().copied().zip(counters.iter().copied());
        Ok((seconds, counted.filter(|&(_, count)| count > 0).collect()))
    }
}

/// Where an upload's scratch work happens.
struct Area<'a> {
    bound: &'a Bound<'a>,
    kernels: &'a Kernels,
    stream: &'a StreamHandle,
    /// Address of the copy of the staging buffer.
    base: u64,
    /// The notes on the host.
    notes: *mut u8,
    /// Their counterpart's address.
    remote: u64,
}

impl Area<'_> {
    /// Moves small_pieces to their places by one launch.
    fn gather(&self, small_pieces: &[(Piece, u64)]) -> Result<(), Refusal> {
        let entry = |&(piece, target): &(Piece, u64)| GatherEntry {
            source: piece.at,
            target,
            run: piece.run,
            stride: piece.stride,
            runs: piece.count,
        };
        let table: Vec<GatherEntry> = small_pieces.iter().take(MAX_PIECES).map(entry).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&table);
        // SAFETY: the notes have room for MAX_PIECES entries and are this upload's alone.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.notes, bytes.len()) };
        // SAFETY: as above; the notes and their counterpart stay until the upload is over.
        unsafe { self.stream.copy_in(self.bound, self.remote, self.notes, bytes.len()) }?;
        let count = u32::try_from(table.len()).unwrap_or(0);
        // SAFETY: `sort` has checked every piece against the buffer, whose copy is at `base`, and against its region.
        unsafe { self.kernels.gather(self.bound, self.stream, [self.base, self.remote], count) }
    }

    /// Converts pieces to their places, one launch each.
    fn cast(&self, jobs: &[CastJob], tables: &[Table]) -> Result<(), Refusal> {
        let counters = self.remote + TABLE_BYTES as u64;
        // SAFETY: room for MAX_PIECES counters of this upload's own.
        unsafe { self.stream.zero(self.bound, counters, jobs.len() * 8) }?;
        for (counter, CastJob { piece, cast, to, .. }) in (0u64..).zip(jobs) {
            let element = cast.from.bytes();
            let at = |scale: BlockScale| tables.get(scale.table).map_or(TableAt::Single(0), |table| table.at);
            let table = |scale: BlockScale| (scale, at(scale));
            let launch = CastLaunch {
                from: cast.from,
                to: cast.to,
                source: self.base + piece.at,
                target: *to,
                elements: piece.taken() / element,
                run: piece.run / element,
                stride: piece.stride / element,
                scale: cast.scale.map(table),
                overflowed: counters + counter * 8,
            };
            // SAFETY: `sort` has checked the piece against the buffer, the region and the table of scales.
            unsafe { self.kernels.cast(self.bound, self.stream, &launch) }?;
        }
        Ok(())
    }

    /// Starts copying the counters to the host.
    fn fetch_counters(&self, count: usize) -> Result<(), Refusal> {
        let (to, from) = (self.notes.wrapping_add(TABLE_BYTES), self.remote + TABLE_BYTES as u64);
        // SAFETY: both lie in the notes and their counterpart, which stay until the upload is over.
        unsafe { self.stream.copy_out(self.bound, to, from, count * 8) }
    }
}

impl Upload for CudaUpload {
    fn is_done(&mut self) -> bool {
        let (Some(end), Ok(bound)) = (&self.end, self.gpu.bind()) else { return true };
        end.has_passed(&bound)
    }

    fn finish(mut self: Box<Self>) -> Result<Uploaded> {
        let lost = Error::Poisoned { what: "an upload without its end" };
        let gpu = Arc::clone(&self.gpu);
        let refused = |refusal| gpu.error("copy to the GPU", refusal);
        let bound = gpu.bind()?;
        let Some(end) = &self.end else { return Err(lost) };
        end.wait(&bound).map_err(refused)?;
        let Some((buffer, regions)) = self.payload.take() else { return Err(lost) };
        let (convert_seconds, overflows) = self.read_notes(&bound).map_err(refused)?;
        Ok(Uploaded { buffer, regions, overflows, convert_seconds })
    }
}

impl Drop for CudaUpload {
    /// The buffer, the regions and the notes are released after the GPU's last use of them. Where that cannot be waited for (no
    /// context, or a wait that fails twice) they are leaked: the GPU may still read or write them.
    fn drop(&mut self) {
        if let Some(payload) = self.payload.take() {
            let drained = self.gpu.bind_to_release().is_some_and(|bound| self.stream.drain(&bound));
            if !drained {
                let (buffer, regions) = &payload;
                let bytes = buffer.len() as u64 + regions.iter().map(Region::len).sum::<u64>();
                let why = format!("the GPU could not be waited for: {bytes} bytes and their arena stay allocated");
                self.fallbacks.note("freeing an upload", why);
                std::mem::forget(payload);
                std::mem::forget(Arc::clone(&self.buffers));
                return;
            }
        }
        if let Some((notes, slot)) = self.buffers.notes.as_ref().zip(self.slot) {
            notes.free().push(slot);
        }
    }
}

/// Sizes inside a staging buffer fit the machine's words: `sort` has checked them against one.
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
