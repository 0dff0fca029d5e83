//! The port to reads in flight: a [`ReadQueue`] takes a read and its target and gives the target back, filled.
//!
//! [`ThreadQueue`] serves any [`Source`] with threads; `uring` adds a ring for direct reads. [`queue`] picks and says why.
//! A queue never decides what is read, and never drops a target without giving it back.

use std::sync::Arc;
use std::time::Duration;

use super::{Route, Source};
use crate::device::Region;
use crate::error::Result;
use crate::staging::StagingBuffer;

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
pub enum Target {
    /// A staging buffer, to be uploaded.
    Staging(StagingBuffer),
    /// The right place in a host-visible arena.
    InPlace(Region),
}

/// A read that is over.
#[derive(Debug)]
pub struct Completed {
    /// The number that the read was given.
    pub id: usize,
    /// The target, whatever happened.
    pub target: Target,
    /// The route that was taken, or why there are no bytes.
    pub outcome: Result<Route>,
    /// Time that a reader or the ring spent on it, waiting in line excluded.
    pub busy: Duration,
}

/// Reads in flight.
pub trait ReadQueue: Send {
    /// Starts a read. Never blocks on the read itself.
    fn submit(&mut self, read: Read, target: Target);

    /// Waits for the next read to be over, in any order. `None` when none is in flight.
    fn complete(&mut self) -> Option<Completed>;

    /// Reads in flight that keep this queue busy.
    fn depth(&self) -> usize;

    /// Which engine this is, for the report: `threads` or `io_uring`.
    fn engine(&self) -> &'static str;
}

/// stub
#[derive(Debug, Clone, Default)]
pub struct QueueOptions {}

/// stub
pub fn queue(
    _options: &QueueOptions,
    _pool: Option<&crate::staging::StagingPool>,
    _fallbacks: &super::Fallbacks,
) -> Box<dyn ReadQueue> {
    struct Never;
    impl ReadQueue for Never {
        fn submit(&mut self, _: Read, _: Target) {}
        fn complete(&mut self) -> Option<Completed> {
            None
        }
        fn depth(&self) -> usize {
            1
        }
        fn engine(&self) -> &'static str {
            ""
        }
    }
    Box::new(Never)
}
