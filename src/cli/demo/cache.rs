//! Makes files cold or warm, and asks the kernel whether they are.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use vramp::Error;
use vramp::os::{self, Advice};
use vramp::source::{Fallbacks, LocalStorage, Route, Storage};

use super::super::interrupt::Interrupt;
use super::super::output::Failure;
use super::super::text;

const READ_BYTES: usize = 4 << 20;

/// Asks the kernel to drop the files from the page cache. They must be synced.
pub(crate) fn drop_from_cache(files: &[PathBuf]) -> Result<(), Failure> {
    for path in files {
        let dropped = File::open(path).and_then(|file| os::advise(file.as_fd(), 0, 0, Advice::DontNeed));
        dropped.map_err(|source| Error::io("drop from the page cache", path, source))?;
    }
    Ok(())
}

/// Reads the files through the page cache, so that they are in it.
pub(crate) fn warm(files: &[PathBuf], interrupt: &Interrupt) -> Result<(), Failure> {
    let mut buffer = vec![0; READ_BYTES];
    for path in files {
        let source = LocalStorage.open(path, &Fallbacks::default())?.source(Route::Buffered);
        let mut offset = 0;
        while offset < source.len() {
            interrupt.check()?;
            let len = usize::try_from(source.len() - offset).map_or(READ_BYTES, |left| left.min(READ_BYTES));
            source.read_at(offset, &mut buffer[..len])?;
            offset += len as u64;
        }
    }
    Ok(())
}

/// The share of the files' bytes that is in the page cache, as the kernel says.
pub(crate) fn resident_share(files: &[PathBuf]) -> Result<f64, Failure> {
    let (mut resident, mut all) = (0, 0);
    for path in files {
        let file = LocalStorage.open(path, &Fallbacks::default())?;
        resident += file.residency().resident_bytes();
        all += file.identity().len;
    }
    Ok(text::as_f64(resident) / text::as_f64(all).max(1.0))
}

/// The file system that a file lies on: its name, and whether it is memory.
pub(crate) fn file_system(path: &Path) -> Result<(String, bool), Failure> {
    let file = LocalStorage.open(path, &Fallbacks::default())?;
    let system = file.file_system();
    Ok((system.name.clone(), system.memory))
}
