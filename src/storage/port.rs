//! The read port: what a [`Storage`], an [`OpenFile`] and a [`Source`] promise. It does nothing.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use super::location::Location;
use super::mmap::MappedFile;
use super::residency::Residency;
use super::route::Route;
use super::version::Version;
use crate::device::Region;
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;

/// A place that holds files. [`LocalStorage`](super::LocalStorage) is the machine's own file systems.
///
/// Everything that is read of a checkpoint is read through it: headers, indexes, configurations, weights.
pub trait Storage: fmt::Debug + Send + Sync {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// When it is not there, may not be read, or cannot be read by position. [`Error::kind`] of a file that is not there is
    /// [`NotFound`](crate::ErrorKind::NotFound).
    fn open(&self, at: &Location, fallbacks: &Fallbacks) -> Result<Arc<dyn OpenFile>>;

    /// What lies at a location.
    ///
    /// # Errors
    /// As [`Storage::open`].
    fn head(&self, at: &Location) -> Result<Head>;

    /// What a folder holds, in any order, and nothing of its sub-folders.
    ///
    /// # Errors
    /// When it is not there, is no folder, or may not be listed.
    fn list(&self, at: &Location) -> Result<Vec<Entry>>;

    /// Why nothing is found at a location where something is named: a link that leads nowhere. In words that go on from
    /// "it is".
    fn dangling(&self, _at: &Location) -> Option<String> {
        None
    }
}

/// What lies at a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// What it is.
    pub kind: EntryKind,
    /// Length in bytes, of a file.
    pub bytes: u64,
}

/// What a folder holds under one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name within the folder.
    pub name: String,
    /// What it is; what a link leads to.
    pub kind: EntryKind,
}

/// What lies at a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A file that can be read by position.
    File,
    /// A folder.
    Folder,
    /// A pipe, a socket, a device.
    Other,
}

/// One open file.
pub trait OpenFile: Send + Sync {
    /// The path it was opened by.
    fn path(&self) -> &Path;

    /// What the file was when it was opened.
    fn version(&self) -> Version;

    /// The number of the volume that the file lies on, as the system shows it (`259:1`); empty where there is none.
    fn volume(&self) -> String {
        String::new()
    }

    /// Where the file lies.
    fn file_system(&self) -> &FileSystem;

    /// Which parts are in the page cache now.
    fn residency(&self) -> Residency;

    /// An estimate from a few pages: good enough to choose routes, and cheap however much of a large file is cached.
    fn residency_glance(&self) -> Residency {
        self.residency()
    }

    /// The file by one route. Cheap; the same source each time. A route that the file does not have (no `O_DIRECT`, no
    /// mapping) gives the buffered one, with an entry in the fallbacks. A file by itself has no [`Route::GpuDirect`]: it is
    /// a device that reads so, and [`GpuDirect::source`](super::GpuDirect::source) makes that source; asked here, it gives the direct one.
    fn source(&self, route: Route) -> Arc<dyn Source>;

    /// The descriptor by which a device may read the file itself, past the page cache if it has one for that.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Demands that the file still is what it was: length, modification time, and the path still leads to it.
    ///
    /// What another process writes through a shared writable mapping is not seen: the kernel sets the modification time only when
    /// such a page is first written after it was last written back, or at `msync` and `munmap`. This holds for every route.
    ///
    /// # Errors
    /// [`Error::Changed`] with both values. A path that leads nowhere any more is no error: the
    /// open file keeps its bytes.
    fn check_unchanged(&self) -> Result<()>;

    /// The whole file as one read-only mapping, the same each time: for tensors that borrow it instead of owning a copy.
    ///
    /// # Errors
    /// When the file cannot be mapped, or its storage has no mappings.
    fn map(&self) -> Result<Arc<MappedFile>> {
        let what = "cannot be mapped: its storage has no mappings".to_owned();
        Err(Error::Unsupported { path: self.path().to_owned(), tensor: None, what })
    }
}

/// The file system that a file lies on.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize)]
pub struct FileSystem {
    /// Its name: `ext4`, `xfs`, `nfs`, `tmpfs`, ….
    pub name: String,
    /// Whether reads go over a network or through a user-space server: big sequential reads, no mapping, no `O_DIRECT`.
    pub network: bool,
    /// Whether the files live in memory.
    pub memory: bool,
}

/// What a source wants of the reads it is given. Sizes are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// File offsets and lengths that are multiples of this (a power of two) can be read without a bounce; 1 if all can.
    pub align: u64,
    /// Memory addresses that are multiples of this (a power of two) can be read into without a bounce; 1 if all can.
    pub memory_align: u64,
    /// The longest read that is worth making.
    pub max_read: u64,
    /// A gap up to this length is cheaper to read than to skip.
    pub gap: u64,
    /// Reads in flight that are worth having.
    pub depth: usize,
}

/// One open file, read by position by one route.
pub trait Source: Send + Sync {
    /// Length in bytes when the file was opened.
    fn len(&self) -> u64;

    /// Whether the file has no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The way this source goes.
    fn route(&self) -> Route;

    /// What this route wants.
    fn limits(&self) -> Limits;

    /// The descriptor that a ring may read from past the page cache, if this source has one; [`Limits`] say how.
    fn ring_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Fills `target` exactly with the bytes from `offset` on, and says by which route most of them came (a refused route
    /// falls back, once, with an entry in the [`Fallbacks`]).
    ///
    /// # Errors
    /// Whatever the operating system says, and a file that ends too early: never a short read, never a signal.
    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route>;

    /// The same source as one that fills memory of a device itself, past the host, if it is one.
    fn as_device_source(&self) -> Option<&dyn DeviceSource> {
        None
    }
}

/// A source of [`Route::GpuDirect`]: reads go straight into memory that the host may be unable to address.
pub trait DeviceSource: Source {
    /// Fills the first `len` bytes of a region, and says by which route they came.
    ///
    /// # Errors
    /// As [`Source::read_at`].
    fn read_region(&self, offset: u64, len: u64, region: &mut Region) -> Result<Route>;
}
