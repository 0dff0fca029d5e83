//! The port to reads in flight: a [`ReadQueue`] takes a read and its target and gives the target back, filled.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::port::Source;
use super::route::Route;
use crate::device::Region;
use crate::error::{Error, Result};
use crate::memory::staging::StagingBuffer;

/// One read of a file.
#[derive(Clone)]
pub struct Read {
    /// The caller's number of this read; it comes back with the [`Completed`].
    pub id: usize,
    /// The file, by the way to take.
    pub source: Arc<dyn Source>,
    /// First byte in the file.
    pub offset: u64,
    /// Number of bytes: not above the length of the target.
    pub len: usize,
}

/// Where the bytes of a read go: the first `len` bytes of the target.
#[derive(Debug)]
pub enum ReadTarget {
    /// A staging buffer, to be uploaded.
    Staging(StagingBuffer),
    /// The right place in the arena: one that the host can address, or that the source fills itself ([`Route::GpuDirect`]).
    InPlace(Region),
    /// Memory that the kernel may still write, and that therefore nobody gets back: only of a read that failed.
    Lost,
}

impl Read {
    /// Makes the read, here and now: the source fills host memory, or the region itself where that is its way.
    ///
    /// # Errors
    /// As [`Source::read_at`]; and when the target is too short or out of the source's reach.
    pub fn fill(&self, target: &mut ReadTarget) -> Result<Route> {
        match (self.source.as_device_source(), target) {
            (Some(device), ReadTarget::InPlace(region)) => device.read_region(self.offset, self.len as u64, region),
            (_, target) => self.source.read_at(self.offset, target.bytes_mut(self.len)?),
        }
    }
}

impl ReadTarget {
    /// The first `len` bytes.
    pub(super) fn bytes_mut(&mut self, len: usize) -> Result<&mut [u8]> {
        let whole = match self {
            ReadTarget::Staging(buffer) => Some(buffer.bytes_mut()),
            ReadTarget::InPlace(region) => region.bytes_mut(),
            ReadTarget::Lost => None,
        };
        let bytes = whole.and_then(|bytes| bytes.get_mut(..len));
        bytes.ok_or(Error::Poisoned { what: "a read's target is too short or out of the host's reach" })
    }
}

/// A read that is over.
#[derive(Debug)]
pub struct Completed {
    /// The number that the read was given.
    pub id: usize,
    /// The target, whatever happened.
    pub target: ReadTarget,
    /// The route that was taken, or why there are no bytes.
    pub outcome: Result<Route>,
    /// When a reader or the ring took it up.
    pub started: Instant,
    /// Time that it spent on it, waiting in line excluded.
    pub busy: Duration,
}

/// Reads in flight.
pub trait ReadQueue: Send {
    /// Starts a read. Never blocks on the read itself.
    fn submit(&mut self, read: Read, target: ReadTarget);

    /// Waits for the next read to be over, in any order. `None` when none is in flight.
    fn complete(&mut self) -> Option<Completed>;

    /// Reads in flight that keep this queue busy.
    fn depth(&self) -> usize;

    /// Which engine this is, for the report: `threads` or `io_uring`.
    fn engine(&self) -> &'static str;
}

impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Read { id, offset, len, .. } = self;
        f.debug_struct("Read").field("id", id).field("offset", offset).field("len", len).finish_non_exhaustive()
    }
}
