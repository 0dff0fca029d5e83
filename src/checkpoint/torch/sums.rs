//! The CRCs of all members of a checkpoint's archives, compared with their bytes: what opening leaves out where there are many bytes.
//!
//! It reads every byte once, a little at a time, and keeps none. Files of other formats state no sums and are passed over.

use std::collections::BTreeSet;
use std::path::PathBuf;

use vramp_pickle::bytes::Bytes;
use vramp_pickle::read::demand;
use vramp_pickle::sums;
pub use vramp_pickle::sums::Sums;

use super::{Opened, Reader, dcp};
use crate::checkpoint::options::OpenOptions;
use crate::checkpoint::{Checkpoint, Format};
use crate::error::{Error, Result};

impl Checkpoint {
    /// Compares the bytes of every member of the archives of a PyTorch checkpoint with the CRC-32 that is stated. `go_on` is asked
    /// between members, and its error ends it. Reads all files that have such sums, 256 KiB at a time.
    ///
    /// # Errors
    /// [`Error::Malformed`] naming all damaged members of the first file that has some; [`Error::Changed`] when a file is no
    /// longer the one that was opened; I/O errors.
    pub fn check_sums(&self, go_on: &dyn Fn() -> Result<()>) -> Result<Sums> {
        let mut all = Sums::default();
        if self.format == Format::Safetensors {
            return Ok(all);
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
                let damaged = sums::check(&window, start, &mut all, go_on)?.map_err(|error| reader.io(error))?;
                demand(&damaged, false).map_err(|refused| reader.refused(&refused))?;
            }
        }
        Ok(all)
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
