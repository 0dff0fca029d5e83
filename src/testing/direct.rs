//! A device that reads files itself, into memory that the host cannot address, with troubles as planned.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Gate, LazyDevice};
use crate::device::{Arena, Device, DeviceLimits, DirectFile, DirectReads, Region, Stream};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::StagingPool;

/// A [`LazyDevice`] that reads files itself. Files need a descriptor
/// ([`MemoryFile::with_descriptor`](super::MemoryFile::with_descriptor)).
#[derive(Clone)]
pub struct DirectDevice {
    lazy: LazyDevice,
    shared: Arc<Shared>,
}

/// What a [`DirectDevice`] does wrong.
#[derive(Clone)]
pub enum DirectTrouble {
    /// The way cannot be had, for this reason.
    Absent(String),
    /// The bytes pass through the host after all, for this reason.
    Detour(String),
    /// No file is taken, for this reason.
    RefuseFiles(String),
    /// Every file from the `n`th on (from 0) is refused.
    RefuseFilesFrom(u64),
    /// Every read from the `n`th on (from 0) writes half of its bytes, and rubbish, and fails.
    FailFrom(u64),
    /// Every read from the `n`th on meets the end of the file.
    EndFrom(u64),
    /// The `n`th read panics.
    PanicAt(u64),
    /// Every read waits at the gate first.
    Slow(Gate),
}

struct Shared {
    lazy: LazyDevice,
    troubles: Vec<DirectTrouble>,
    reads: AtomicU64,
    registered: AtomicU64,
    open_files: AtomicU64,
}

impl DirectDevice {
    /// A device whose polls follow `seed`, with these troubles.
    pub fn new(seed: u64, troubles: Vec<DirectTrouble>) -> DirectDevice {
        let lazy = LazyDevice::new(seed);
        let (reads, registered, open_files) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let shared = Shared { lazy: lazy.clone(), troubles, reads, registered, open_files };
        DirectDevice { lazy, shared: Arc::new(shared) }
    }

    /// Reads that it was asked for so far.
    pub fn reads(&self) -> u64 {
        self.shared.reads.load(Ordering::SeqCst)
    }

    /// Files that it holds now.
    pub fn open_files(&self) -> u64 {
        self.shared.open_files.load(Ordering::SeqCst)
    }

    /// Bytes that are allocated now.
    pub fn live_bytes(&self) -> u64 {
        self.lazy.live_bytes()
    }
}

impl Device for DirectDevice {
    fn name(&self) -> String {
        "direct".to_owned()
    }

    fn limits(&self) -> DeviceLimits {
        self.lazy.limits()
    }

    fn staging(&self, count: usize, buffer_bytes: usize, fallbacks: &Fallbacks) -> Result<StagingPool> {
        self.lazy.staging(count, buffer_bytes, fallbacks)
    }

    fn alloc(&self, bytes: u64) -> Result<Arena> {
        self.lazy.alloc(bytes)
    }

    fn stream(&self, lanes: Option<usize>, fallbacks: &Fallbacks) -> Result<Box<dyn Stream>> {
        self.lazy.stream(lanes, fallbacks)
    }

    fn direct_reads(&self, native_only: bool) -> Option<Result<Arc<dyn DirectReads>, String>> {
        for trouble in &self.shared.troubles {
            match trouble {
                DirectTrouble::Absent(why) => return Some(Err(why.clone())),
                DirectTrouble::Detour(_) if native_only => return None,
                _ => {}
            }
        }
        Some(Ok(Arc::new(FakeReads(Arc::clone(&self.shared)))))
    }
}

struct FakeReads(Arc<Shared>);

struct FakeFile {
    shared: Arc<Shared>,
    file: File,
    path: PathBuf,
}

impl DirectReads for FakeReads {
    fn register(&self, file: BorrowedFd<'_>, path: &Path) -> Result<Arc<dyn DirectFile>, String> {
        let number = self.0.registered.fetch_add(1, Ordering::SeqCst);
        for trouble in &self.0.troubles {
            match trouble {
                DirectTrouble::RefuseFiles(why) => return Err(format!("{}: {why}", path.display())),
                DirectTrouble::RefuseFilesFrom(first) if number >= *first => {
                    return Err(format!("{}: file {number} is refused as planned", path.display()));
                }
                _ => {}
            }
        }
        let file = File::from(file.try_clone_to_owned().unwrap());
        self.0.open_files.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::new(FakeFile { shared: Arc::clone(&self.0), file, path: path.to_owned() }))
    }

    fn detour(&self) -> Option<String> {
        self.0.troubles.iter().find_map(|trouble| match trouble {
            DirectTrouble::Detour(why) => Some(why.clone()),
            _ => None,
        })
    }
}

impl DirectFile for FakeFile {
    fn read(&self, offset: u64, len: u64, region: &mut Region) -> Result<()> {
        assert!(len <= region.len(), "a read that leaves its region");
        let shared = &self.shared;
        let number = shared.reads.fetch_add(1, Ordering::SeqCst);
        let address = super::device::address(region);
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        self.file.read_exact_at(&mut bytes, offset).map_err(|error| self.failure(offset, len, error))?;
        for trouble in &shared.troubles {
            match trouble {
                DirectTrouble::FailFrom(first) if number >= *first => {
                    bytes.truncate(bytes.len() / 2);
                    bytes.iter_mut().step_by(7).for_each(|byte| *byte ^= 0x55);
                    shared.lazy.write(address, &bytes);
                    let message = format!("{}: read {number} fails as planned", self.path.display());
                    return Err(Error::Device { device: "direct".to_owned(), op: "read", message });
                }
                DirectTrouble::EndFrom(first) if number >= *first => {
                    return Err(self.failure(offset, len, io::ErrorKind::UnexpectedEof.into()));
                }
                DirectTrouble::PanicAt(which) if number == *which => panic!("a device panics, as asked"),
                DirectTrouble::Slow(gate) => gate.pass(),
                _ => {}
            }
        }
        shared.lazy.write(address, &bytes);
        Ok(())
    }
}

impl FakeFile {
    fn failure(&self, offset: u64, len: u64, source: io::Error) -> Error {
        Error::Io { op: "read", path: self.path.clone(), range: Some(offset..offset + len), source }
    }
}

impl Drop for FakeFile {
    fn drop(&mut self) {
        self.shared.open_files.fetch_sub(1, Ordering::SeqCst);
    }
}
