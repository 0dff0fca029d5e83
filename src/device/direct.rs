//! The port to a device's own way of reading files: from the storage device into its memory, past the host.
//!
//! A device that has such a way says so in [`Device::direct_reads`](super::Device::direct_reads). It is asked file by file
//! ([`DirectReads::register`]), because file systems differ, and it may refuse at any time: whoever uses it must be able to read
//! the same bytes by way of the host. Nothing here decides what is read, or whether this way is worth taking.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use super::Region;
use crate::error::Result;

/// A device's own way to read files.
pub trait DirectReads: Send + Sync {
    /// Makes an open file known to the device, which keeps a descriptor of its own of it. `path` is for messages.
    ///
    /// # Errors
    /// Why the device does not read this file.
    fn register(&self, file: BorrowedFd<'_>, path: &Path) -> Result<Arc<dyn DirectFile>, String>;

    /// Why the bytes pass through the host after all, where they do: the way works then, and gains nothing.
    fn detour(&self) -> Option<String> {
        None
    }
}

/// A file that the device reads by itself.
pub trait DirectFile: Send + Sync {
    /// Fills the first `len` bytes of `region` with those of the file from `offset` on, and returns when they are there: all of
    /// them, or an error.
    ///
    /// # Errors
    /// Whatever the device or the operating system says, and a file that ends too early.
    fn read(&self, offset: u64, len: u64, region: &mut Region) -> Result<()>;
}
