//! Puts the page cache into a wanted state, and asks the kernel whether it is so. It never believes: the share that is resident
//! is read before and after.

use std::fs;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use vramp::error::{Error, Result};
use vramp::load::Cancel;
use vramp::os::{self, Advice};
use vramp::storage::{Fallbacks, LocalStorage, Location, Route, Storage};

/// Bytes of a read that fills the page cache.
const READ_BYTES: usize = 4 << 20;

/// The file by which a privileged process has the kernel drop what is clean.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

/// Above this share of resident bytes a state is not cold; below one minus it, not warm.
pub const TOLERANCE: f64 = 0.01;

/// A part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// The file.
    pub path: PathBuf,
    /// The bytes.
    pub range: Range<u64>,
}

/// What can be done to the page cache.
pub trait PageCache: Send + Sync {
    /// Drops these parts of files from the page cache as far as it can; says how.
    ///
    /// # Errors
    /// When a file cannot be opened.
    fn drop_files(&self, files: &[Stretch]) -> Result<String>;

    /// Reads these parts of files, so that they are in the page cache; says how.
    ///
    /// # Errors
    /// When a file cannot be read, or on cancellation.
    fn fill(&self, files: &[Stretch], cancel: &Cancel) -> Result<String>;
}

/// The machine's own page cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemCache;

impl PageCache for SystemCache {
    /// By `POSIX_FADV_DONTNEED`; what stays after that (dirty or mapped pages) by syncing and `drop_caches`, if this process may.
    fn drop_files(&self, files: &[Stretch]) -> Result<String> {
        files.iter().try_for_each(|stretch| advise_drop(&stretch.path, false))?;
        if resident_share(&LocalStorage, files)? <= TOLERANCE {
            return Ok("POSIX_FADV_DONTNEED".to_owned());
        }
        files.iter().try_for_each(|stretch| advise_drop(&stretch.path, true))?;
        if resident_share(&LocalStorage, files)? <= TOLERANCE {
            return Ok("fsync and POSIX_FADV_DONTNEED".to_owned());
        }
        match fs::write(DROP_CACHES, "1") {
            Ok(()) => Ok("POSIX_FADV_DONTNEED and drop_caches".to_owned()),
            Err(error) => Ok(format!("POSIX_FADV_DONTNEED (drop_caches: {error})")),
        }
    }

    fn fill(&self, files: &[Stretch], cancel: &Cancel) -> Result<String> {
        let mut buffer = vec![0; READ_BYTES];
        files.iter().try_for_each(|stretch| read_through(stretch, &mut buffer, cancel))?;
        Ok("read just before".to_owned())
    }
}

fn advise_drop(path: &Path, synced: bool) -> Result<()> {
    let failed = |source| Error::io("drop from the page cache", path, source);
    let file = fs::File::open(path).map_err(failed)?;
    if synced {
        // Only what is written can be dropped. A file that may not be synced stays as it is, which the proof will show.
        let _ = file.sync_all();
    }
    os::advise(file.as_fd(), 0, 0, Advice::DontNeed).map_err(failed)
}

fn read_through(stretch: &Stretch, buffer: &mut [u8], cancel: &Cancel) -> Result<()> {
    let source = LocalStorage.open(&Location::from(&stretch.path), &Fallbacks::default())?.source(Route::Buffered);
    let mut offset = stretch.range.start;
    while offset < stretch.range.end {
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let len = usize::try_from(stretch.range.end - offset).map_or(READ_BYTES, |left| left.min(READ_BYTES));
        source.read_at(offset, &mut buffer[..len])?;
        offset += len as u64;
    }
    Ok(())
}

/// The share of these bytes that is in the page cache, counted, not glanced at.
///
/// # Errors
/// When a file cannot be opened.
#[allow(clippy::cast_precision_loss)] // a share has no use for the 54th bit
pub fn resident_share(storage: &dyn Storage, files: &[Stretch]) -> Result<f64> {
    let (mut resident, mut all) = (0, 0);
    for stretch in files {
        let file = storage.open(&Location::from(&stretch.path), &Fallbacks::default())?;
        resident += file.residency().resident_in(stretch.range.clone());
        all += stretch.range.end - stretch.range.start;
    }
    Ok(resident as f64 / (all as f64).max(1.0))
}
