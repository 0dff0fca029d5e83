//! An open file of a storage as the bytes that the readers of `vramp-pickle` take. It reads through the page cache, and opens nothing
//! itself.

use std::io;
use std::path::Path;
use std::sync::Arc;

use vramp_pickle::bytes::Bytes;

use crate::checkpoint::shard;
use crate::error::{Error, Result};
use crate::storage::{OpenFile, Route, Source, Storage, Version};

/// An open file.
pub(crate) struct Opened {
    source: Arc<dyn Source>,
    version: Version,
}

impl Opened {
    /// Opens a file of a storage.
    pub(crate) fn of(storage: &dyn Storage, path: &Path) -> Result<Opened> {
        Ok(Opened::from(&*shard::open(storage, path)?))
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> u64 {
        self.version.len()
    }

    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    /// All of it.
    pub(crate) fn whole(&self) -> Window<'_> {
        self.part(0, self.len())
    }

    /// The `len` bytes from `start` on.
    pub(crate) fn part(&self, start: u64, len: u64) -> Window<'_> {
        Window { source: &*self.source, start, len }
    }
}

impl From<&dyn OpenFile> for Opened {
    fn from(file: &dyn OpenFile) -> Opened {
        Opened { source: file.source(Route::Buffered), version: file.version() }
    }
}

/// A part of an open file. Reads are bounded by it.
#[derive(Clone, Copy)]
pub(crate) struct Window<'a> {
    source: &'a dyn Source,
    start: u64,
    len: u64,
}

impl Bytes for Window<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(target.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match self.source.read_at(self.start.saturating_add(offset), target) {
            Ok(_) => Ok(()),
            Err(Error::Io { source, .. }) => Err(source),
            Err(error @ Error::Changed { .. }) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, error)),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}
