//! The port to where tensors end up: a [`Device`] allocates arenas, makes staging buffers and opens streams.
//!
//! A device whose memory the host can address says so ([`DeviceLimits::host_visible`]); reads then land in place and no
//! stream is used for them. Everything else goes through staging buffers that [`Stream::upload`] takes and gives back.
//! Nothing here reads files or knows a format.

mod cpu;
mod null;
mod region;

use std::sync::Arc;

pub use cpu::CpuDevice;
pub use null::NullDevice;
pub use region::{Arena, Memory, Region, View, Written};

use crate::error::{Error, Result};
use crate::staging::{StagingBuffer, StagingPool};

/// Where tensors end up.
pub trait Device: Send + Sync {
    /// The name a user types: `cpu`, `null`, `cuda:0`.
    fn name(&self) -> String;

    /// What the device can do and how it wants tensors laid out.
    fn limits(&self) -> DeviceLimits;

    /// Makes the staging buffers of a load, once.
    ///
    /// # Errors
    /// When the memory cannot be had.
    fn staging(&self, count: usize, buffer_bytes: usize) -> Result<StagingPool>;

    /// Allocates one arena of `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with what is needed and what is free.
    fn alloc(&self, bytes: u64) -> Result<Arena>;

    /// Opens a stream of uploads.
    ///
    /// # Errors
    /// When the device refuses.
    fn stream(&self) -> Result<Box<dyn Stream>>;
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
const CACHED_STAGING: (usize, usize) = (8, 2 << 20);

/// One run of equal pieces inside a staging buffer, packed one after the other into a region:
/// `count` runs of `run` bytes, the first at `at`, each `stride` bytes after the one before it.
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
}

impl Piece {
    /// A piece of one run.
    pub fn contiguous(at: u64, len: u64) -> Piece {
        Piece { at, run: len, stride: len, count: 1 }
    }

    /// Bytes it puts into the region.
    pub fn len(&self) -> u64 {
        self.run.saturating_mul(self.count)
    }

    /// Whether it puts nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An ordered queue of uploads to one device.
pub trait Stream: Send {
    /// Starts copying the pieces of `buffer` into their regions (each region has its piece's length) and returns at once.
    /// The buffer and the regions belong to the upload until it is over.
    ///
    /// # Errors
    /// When the device refuses; the buffer is then back in its pool and the regions are given up unfinished.
    fn upload(&mut self, buffer: StagingBuffer, pieces: Vec<(Piece, Region)>) -> Result<InFlight>;
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
    fn finish(self: Box<Self>) -> Result<(StagingBuffer, Vec<Region>)>;
}

/// Picks a device by the name a user types. `cpu` and `null` exist everywhere.
///
/// # Errors
/// When there is no such device in this build or on this machine.
pub fn open(name: &str) -> Result<Arc<dyn Device>> {
    match name {
        "cpu" => Ok(Arc::new(CpuDevice::new())),
        "null" => Ok(Arc::new(NullDevice::new())),
        _ => Err(Error::Device {
            device: name.to_owned(),
            op: "open",
            message: "this build knows the devices `cpu` and `null`".to_owned(),
        }),
    }
}
