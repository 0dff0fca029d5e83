//! An open file of a storage as the bytes that the readers of `vramp-pickle` take. It reads through the page cache, and opens nothing
//! itself.

use std::io;
use std::path::Path;
use std::sync::Arc;

use vramp_pickle::bytes::{Bytes, Section};

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

    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    /// The `len` bytes from `start` on.
    pub(crate) fn part(&self, start: u64, len: u64) -> Section<'_, Opened> {
        Section { whole: self, start, len }
    }
}

impl From<&dyn OpenFile> for Opened {
    fn from(file: &dyn OpenFile) -> Opened {
        Opened { source: file.source(Route::Buffered), version: file.version() }
    }
}

impl Bytes for Opened {
    fn len(&self) -> u64 {
        self.version.len()
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        match self.source.read_at(offset, target) {
            Ok(_) => Ok(()),
            Err(Error::Io { source, .. }) => Err(source),
            Err(error @ Error::Changed { .. }) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, error)),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}
