//! What a [`Device`], a [`Stream`] and an [`Upload`] promise, and the data that they take. It does nothing.

use std::sync::Arc;

use super::direct::DirectReads;
use super::download::{self, Download};
use super::region::{Arena, Region, View};
use crate::convert::{Float, Scales, Table};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::{StagingBuffer, StagingPool};

/// Where tensors end up.
pub trait Device: Send + Sync {
    /// The name a user types: `cpu`, `null`, `cuda:0`.
    fn name(&self) -> String;

    /// What it is, where that says more than its name: the product's name of a GPU.
    fn product(&self) -> Option<String> {
        None
    }

    /// What the device can do and how it wants tensors laid out.
    fn limits(&self) -> DeviceLimits;

    /// Makes the staging buffers of a load, once. What could not be had as wanted (memory that the device will not lock) is
    /// noted in `fallbacks`.
    ///
    /// # Errors
    /// When the memory cannot be had.
    fn staging(&self, count: usize, buffer_bytes: usize, fallbacks: &Fallbacks) -> Result<StagingPool>;

    /// Allocates one arena of `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with what is needed and what is free.
    fn alloc(&self, bytes: u64) -> Result<Arena>;

    /// Opens a stream of uploads. `lanes` is how many of them may be worked on side by side (streams of a GPU, copy threads
    /// of the host); `None` leaves that to the device. What it has to do without, now or later, is noted in `fallbacks`.
    ///
    /// # Errors
    /// When the device refuses.
    fn stream(&self, lanes: Option<usize>, fallbacks: &Fallbacks) -> Result<Box<dyn Stream>>;

    /// The device's own way to read files, past the host: `None` where it has none, an error that says why where it cannot
    /// be had here. With `native_only`, `None` as well where it is cheap to see that the bytes would pass through the host
    /// after all. May take seconds the first time.
    fn direct_reads(&self, _native_only: bool) -> Option<Result<Arc<dyn DirectReads>, String>> {
        None
    }
}

/// What a device can do and how it wants tensors laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Whether reads may land in the arena itself.
    pub host_visible: bool,
    /// Whether the device keeps what it is given (the null device does not, and needs no arena).
    pub keeps: bool,
    /// The alignment, in bytes, that every tensor gets at least; a power of two.
    pub align: u64,
    /// The staging buffers that keep the device and the readers busy: their number, and the bytes of each.
    pub staging: (usize, usize),
}

/// Staging for devices that take bytes as fast as a core copies them: all buffers together fit in a processor's cache, so
/// that bytes out of the page cache need not travel to memory and back (measured 34 against 21 GB/s with 64 MiB).
pub(super) const CACHED_STAGING: (usize, usize) = (8, 2 << 20);

/// The most lanes of a stream.
pub const MAX_LANES: usize = 16;

/// Pieces of one upload, at most: what a device must keep for an upload in flight is bounded by it.
pub const MAX_PIECES: usize = 1024;

/// One run of equal pieces inside a staging buffer, packed one after the other into a region:
/// `count` runs of `run` bytes, the first at `at`, each `stride` bytes after the one before it; converted on the way if the
/// piece has a [`Cast`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Piece {
    /// First byte inside the staging buffer.
    pub at: u64,
    /// Bytes of each run.
    pub run: u64,
    /// Distance in bytes from the start of one run to the next.
    pub stride: u64,
    /// Number of runs.
    pub count: u64,
    /// How the elements are converted; `None`: the bytes are copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cast: Option<Cast>,
}

/// A conversion of floating-point elements, from what the file holds to what the region gets. An element of
/// [`Float::E2M1x2`] becomes two: everything that counts elements of the tensor as stored counts bytes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Cast {
    /// What the elements are.
    pub from: Float,
    /// What they become.
    pub to: Float,
    /// The scales that they are multiplied by, for quantised weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<BlockScale>,
}

/// Where the scales of a piece's elements are: the tensor is cut into blocks of `block_rows` by `block_columns` elements
/// (all dimensions but the last count as rows), and each block has one entry of the table, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct BlockScale {
    /// Which of the load's tables ([`StreamNeeds::scales`]).
    pub table: usize,
    /// The index, in the whole tensor as stored, of the piece's first element.
    pub first: u64,
    /// Elements of a row.
    pub columns: u64,
    /// Rows of a block.
    pub block_rows: u64,
    /// Columns of a block.
    pub block_columns: u64,
}

/// A copy engine starts a copy in the time in which it moves about this many bytes.
const SMALL_BYTES: u64 = 32 << 10;

/// Rows of a strided copy below this many bytes do not fill what the link carries at a time.
const SHORT_ROW_BYTES: u64 = 512;

impl Piece {
    /// A piece of one run.
    pub fn contiguous(at: u64, len: u64) -> Piece {
        Piece { at, run: len, stride: len, count: 1, cast: None }
    }

    /// Bytes it puts into the region.
    pub fn len(&self) -> u64 {
        let taken = self.taken();
        self.cast.map_or(taken, |cast| cast.converted(taken))
    }

    /// Bytes it takes from the buffer.
    pub fn taken(&self) -> u64 {
        self.run.saturating_mul(self.count)
    }

    /// One past the last byte of the buffer that it takes, saturating.
    pub fn end(&self) -> u64 {
        let gaps = self.count.saturating_sub(1).saturating_mul(self.stride);
        self.at.saturating_add(gaps).saturating_add(if self.count == 0 { 0 } else { self.run })
    }

    /// Whether it puts nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether its runs hold whole elements of the type that `cast` converts from.
    pub(crate) fn holds_elements_of(&self, cast: &Cast) -> bool {
        let width = cast.from.bytes();
        self.run.is_multiple_of(width) && (self.count < 2 || self.stride.is_multiple_of(width))
    }

    /// Whether starting a copy of its own costs more than the copy: a few bytes, or many short rows.
    pub fn is_small(&self) -> bool {
        self.cast.is_none() && if self.count > 1 { self.run < SHORT_ROW_BYTES } else { self.run < SMALL_BYTES }
    }
}

impl BlockScale {
    /// Whether a table of `values` scales has one for each of the `elements` elements from the first on.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_covered_by(&self, values: u64, elements: u64) -> bool {
        let BlockScale { first, columns, block_rows, block_columns, .. } = *self;
        let Some(last) = elements.checked_sub(1) else { return true };
        let needed = || {
            let row = first.checked_add(last)?.checked_div(columns)?;
            let rows = row.checked_div(block_rows)?.checked_add(1)?;
            rows.checked_mul(if block_columns == 0 { None } else { Some(columns.div_ceil(block_columns)) }?)
        };
        needed().is_some_and(|needed| needed <= values)
    }

    /// The scales of the elements from number `skipped` of the piece on.
    ///
    /// # Errors
    /// When there is no such table.
    pub fn table_in<'a>(&self, scales: &'a [Table], skipped: u64) -> Result<Scales<'a>> {
        let table = scales.get(self.table).ok_or(Error::Poisoned { what: "a table of scales that nobody loaded" })?;
        let values = table.values();
        let BlockScale { first, columns, block_rows, block_columns, .. } = *self;
        Ok(Scales { values, first: first.saturating_add(skipped), columns, block_rows, block_columns })
    }
}

impl Cast {
    /// The bytes that `bytes` bytes of elements become.
    pub fn converted(&self, bytes: u64) -> u64 {
        (bytes / self.from.bytes()).saturating_mul(self.from.numbers() * self.to.bytes())
    }
}

/// What the uploads of a load will ask of a stream beyond plain copies.
#[derive(Debug, Clone, Default)]
pub struct StreamNeeds {
    /// Number of staging buffers: uploads in flight are never more.
    pub buffers: usize,
    /// Bytes of a staging buffer.
    pub buffer_bytes: usize,
    /// The conversions that pieces have, each once.
    pub casts: Vec<(Float, Float)>,
    /// Small pieces and short runs, in all uploads together: worth collecting on the device where they are many.
    pub small_pieces: u64,
    /// The tables that [`BlockScale`] counts.
    pub scales: Vec<Table>,
}

/// Queues of copies to one device and back.
pub trait Stream: Send {
    /// Prepares for the uploads of a load, before the first one.
    ///
    /// # Errors
    /// When the device cannot have it.
    fn prepare(&mut self, needs: &StreamNeeds) -> Result<()>;

    /// Starts copying the pieces of `buffer` into their regions (each region has its piece's length) and returns at once.
    /// The buffer and the regions belong to the upload until it is over.
    ///
    /// # Errors
    /// When the device refuses; the buffer is then back in its pool and the regions are given up unfinished.
    fn upload(&mut self, buffer: StagingBuffer, pieces: Vec<(Piece, Region)>) -> Result<InFlight>;

    /// Starts copying each view into `buffer`, from the byte that stands before it on, and returns at once where the device can.
    /// Copies are in no order; the rest of the buffer stays as it is. Buffer and views belong to the download until it is over.
    /// Downloads need no [`Stream::prepare`].
    ///
    /// # Errors
    /// When a view leaves the buffer or is no memory of the device, or the device refuses; the buffer is then back in its pool.
    fn download(&mut self, buffer: StagingBuffer, views: Vec<(u64, View)>) -> Result<Box<dyn Download>> {
        download::at_once(buffer, views)
    }
}

/// An upload on its way. Dropping it waits until the device no longer touches the buffer.
pub type InFlight = Box<dyn Upload>;

/// The answer to one [`Stream::upload`].
pub trait Upload: Send {
    /// Whether [`Upload::finish`] would return without waiting.
    fn is_done(&mut self) -> bool;

    /// Waits for the copies and gives the buffer and the regions back.
    ///
    /// # Errors
    /// When a copy failed.
    fn finish(self: Box<Self>) -> Result<Uploaded>;
}

/// An upload that is over.
#[derive(Debug)]
pub struct Uploaded {
    /// The buffer, free again.
    pub buffer: StagingBuffer,
    /// The regions, written.
    pub regions: Vec<Region>,
    /// Finite values that became infinite: the piece's index and their number, where there were any.
    pub overflows: Vec<(usize, u64)>,
    /// Seconds that converting took on the device or on the thread that did it.
    pub convert_seconds: f64,
}

impl Uploaded {
    /// An upload of plain copies.
    pub fn copied(buffer: StagingBuffer, regions: Vec<Region>) -> Uploaded {
        Uploaded { buffer, regions, overflows: Vec::new(), convert_seconds: 0.0 }
    }
}
