//! The read port. A [`Storage`] says what lies at a [`Location`], lists folders and opens files. An [`OpenFile`] knows its
//! [`Version`] and which of its parts are in the page cache, and has one [`Source`] for each [`Route`]; a source reads bytes by
//! position.
//!
//! The routes of a local file: [`Route::Buffered`] (through the page cache), [`Route::Direct`] (past it) and
//! [`Route::Mapped`] (copied out of a mapping; no slice is ever lent); where the device reads files itself, [`GpuDirect`] makes
//! sources of [`Route::GpuDirect`]. Nothing here knows a format.

mod file;
mod file_system;
mod gpu_direct;
mod local;
mod location;
mod mmap;
mod paths;
mod port;
mod queue;
mod read;
mod residency;
mod route;
mod uring;
mod version;
mod workers;

pub use crate::fallback::{Fallback, Fallbacks};
pub use file::LocalFile;
#[doc(hidden)]
pub use gpu_direct::{GPU_DIRECT, GpuDirect};
pub use local::LocalStorage;
pub use location::Location;
pub use mmap::MappedFile;
pub use port::{DeviceSource, Entry, EntryKind, FileSystem, Head, Limits, OpenFile, Source, Storage};
pub use queue::{Engine, QueueOptions};
#[doc(hidden)]
pub use queue::{ThreadQueue, queue};
#[doc(hidden)]
pub use read::{Completed, Read, ReadQueue, ReadTarget};
pub use residency::Residency;
pub use route::{Lane, Route};
pub use version::Version;
