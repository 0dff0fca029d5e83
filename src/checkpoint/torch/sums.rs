//! The CRCs of all members of a checkpoint's archives, compared with their bytes: what opening leaves out where there are many bytes.
//!
//! It reads every byte once, a little at a time, and keeps none. Files of other formats state no sums and are passed over.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::archive::Archive;
use super::bytes::{self, Opened};
use super::{BEGINNING, Kind, Reader, dcp, members, recognise};
use crate::checkpoint::open::OpenOptions;
use crate::checkpoint::{Checkpoint, Format};
use crate::error::{Error, Result};

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sums {
    /// Members whose bytes have the CRC-32 that is stated.
    pub same: u64,
    /// Members without one, or that would inflate absurdly: damage to them cannot be noticed.
    pub absent: u64,
}

impl Checkpoint {
    /// Compares the bytes of every member of the archives of a PyTorch checkpoint with the CRC-32 that is stated. `go_on` is asked
    /// between members, and its error ends it. Reads all files that have such sums, 256 KiB at a time.
    ///
    /// # Errors
    /// [`Error::Malformed`] naming all damaged members of the first file that has some; [`Error::Changed`] when a file is no
    /// longer the one that was opened; I/O errors.
    pub fn check_sums(&self, go_on: &dyn Fn() -> Result<()>) -> Result<Sums> {
        let mut sums = Sums::default();
        if self.format == Format::Safetensors {
            return Ok(sums);
        }
        for (path, windows) in self.archives()? {
            let known = self.shards.iter().find(|shard| shard.path == path);
            let known = known.ok_or(Error::Poisoned { what: "a file that the checkpoint does not have" })?;
            let file = Opened::of(&*self.storage, &path)?;
            if let Some(what) = known.version.difference(file.version()) {
                return Err(Error::Changed { path, what });
            }
            let reader = Reader { path: &path, options: &OpenOptions::default(), rank: None };
            let windows = windows.unwrap_or_else(|| [(0, file.len())].into());
            for (start, len) in windows {
                let window = file.part(start, len);
                let beginning = bytes::read_vec(&window, 0, len.min(BEGINNING)).map_err(|error| reader.io(error))?;
                if recognise(&beginning, len) != Some(Kind::Zip) {
                    continue;
                }
                let archive = Archive::open(&window, start).map_err(|error| reader.io(error))?;
                let mut damaged = archive.directory.findings.clone();
                for entry in archive.directory.entries.iter().filter(|entry| entry.len > 0) {
                    go_on()?;
                    let wrong = archive.wrong_crc(entry).map_err(|error| reader.io(error))?;
                    match wrong {
                        Some(finding) if damaged.contains(&finding) => {} // found when it was opened
                        Some(finding) => damaged.push(finding),
                        None if entry.crc == 0 || members::is_bomb(entry) => sums.absent += 1,
                        None => sums.same += 1,
                    }
                }
                reader.demand(&damaged)?;
            }
        }
        Ok(sums)
    }

    /// The files, and where in them archives lie, unless each is one.
    #[allow(clippy::type_complexity)]
    fn archives(&self) -> Result<Vec<(PathBuf, Option<BTreeSet<(u64, u64)>>)>> {
        if self.format == Format::TorchDcp {
            let items = dcp::items(&self.path, &self.storage)?;
            return Ok(items.into_iter().map(|(name, items)| (self.path.join(name), Some(items))).collect());
        }
        let paths: BTreeSet<&PathBuf> = self.shards.iter().map(|shard| &shard.path).collect();
        Ok(paths.into_iter().map(|path| (path.clone(), None)).collect())
    }
}
