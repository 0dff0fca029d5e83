//! Files of the machine's own file systems: positional reads, buffered, direct and mapped.
//!
//! A direct read has three parts: a buffered head up to the first block, the direct middle, a buffered tail after the last
//! whole block; `O_DIRECT` never gets an address, offset or length that is not aligned. A route that the file system
//! refuses falls back to buffered reads and says so once. Nothing here starts a thread or touches a raw pointer;
//! `mmap` holds the mapping, `queue` and `uring` keep many reads in flight.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::file_system;
use super::mmap::MappedFile;
use super::paths::{cannot_open, demand_regular, reopen};
use super::port::{FileSystem, Limits, OpenFile, Source};
use super::residency::{self, Residency};
use super::route::Route;
use super::version::Version;
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::os::{self, DirectSupport};

/// The longest read worth making of a local file: large enough for any disk, small enough to spread over readers.
const MAX_READ_BYTES: u64 = 4 << 20;
/// A gap that a local disk reads faster than it answers a second request.
const GAP_BYTES: u64 = 64 << 10;
/// A round trip to a server is dear, so fewer and bigger reads.
const NETWORK_MAX_READ_BYTES: u64 = 16 << 20;
const NETWORK_GAP_BYTES: u64 = 1 << 20;
const NETWORK_DEPTH: usize = 16;
/// Direct reads in flight that saturate a local disk: four did in measurements, the rest is for faster ones.
const DIRECT_DEPTH: usize = 8;
/// The kernel cuts reads just below 2 GiB; cutting them here keeps the arithmetic ours.
const MAX_SYSCALL_BYTES: usize = 1 << 30;

/// One open file of the machine's own file systems.
pub struct LocalFile {
    opened: Arc<Opened>,
    buffered: Arc<dyn Source>,
    direct: OnceLock<Arc<dyn Source>>,
    /// The descriptor for reads past the page cache, once there is one.
    direct_file: OnceLock<Arc<File>>,
    mapped: OnceLock<Arc<dyn Source>>,
    mapping: OnceLock<Arc<MappedFile>>,
}

/// What all routes of one file share.
#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: Arc<File>,
    version: Version,
    file_system: FileSystem,
    fallbacks: Fallbacks,
}

impl LocalFile {
    /// Opens a regular file for reading. Never waits for a writer, as opening a FIFO would.
    ///
    /// # Errors
    /// When it is not there, may not be read, or is no regular file.
    pub fn open(path: &Path, fallbacks: &Fallbacks) -> Result<LocalFile> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
        let before = std::fs::metadata(path).map_err(|error| cannot_open(path, error))?;
        demand_regular(path, before.file_type())?;
        let open = || OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = open().map_err(|error| cannot_open(path, error))?;
        let meta = file.metadata().map_err(|error| Error::io("inspect", path, error))?;
        demand_regular(path, meta.file_type())?;
        // A ring gives up on reads of non-blocking files instead of waiting for the disk.
        os::make_blocking(file.as_fd()).map_err(|error| Error::io("open", path, error))?;
        let file_system = file_system::of(&file, meta.dev());
        let (path, version) = (path.to_owned(), Version::of_file(&meta));
        let file = Arc::new(file);
        let opened = Arc::new(Opened { path, file, version, file_system, fallbacks: fallbacks.clone() });
        let buffered = Arc::new(BufferedSource { opened: Arc::clone(&opened) });
        let (direct, direct_file) = (OnceLock::new(), OnceLock::new());
        let (mapped, mapping) = (OnceLock::new(), OnceLock::new());
        Ok(LocalFile { opened, buffered, direct, direct_file, mapped, mapping })
    }

    fn open_direct(&self) -> Arc<dyn Source> {
        match DirectSource::new(&self.opened) {
            Ok(source) => {
                let _ = self.direct_file.set(Arc::clone(&source.file));
                Arc::new(source)
            }
            Err(why) => {
                self.opened.note_no_direct(&why);
                Arc::clone(&self.buffered)
            }
        }
    }

    fn open_mapped(&self) -> Arc<dyn Source> {
        match self.map() {
            Ok(map) if !self.opened.file_system.network => {
                Arc::new(MappedSource { opened: Arc::clone(&self.opened), map })
            }
            Ok(_) => {
                self.opened.note("mmap", "is served over a network or by a program");
                Arc::clone(&self.buffered)
            }
            Err(error) => {
                self.opened.note("mmap", &format!("cannot be mapped: {}", cause(&error)));
                Arc::clone(&self.buffered)
            }
        }
    }
}

impl OpenFile for LocalFile {
    fn path(&self) -> &Path {
        &self.opened.path
    }

    fn version(&self) -> Version {
        self.opened.version.clone()
    }

    fn volume(&self) -> String {
        os::device_number(self.opened.version.device())
    }

    fn file_system(&self) -> &FileSystem {
        &self.opened.file_system
    }

    fn residency(&self) -> Residency {
        let opened = &self.opened;
        if opened.file_system.memory {
            return Residency::all(opened.version.len());
        }
        residency::ask(&opened.file, opened.version.len(), &opened.fallbacks)
    }

    fn residency_glance(&self) -> Residency {
        let opened = &self.opened;
        if opened.file_system.memory {
            return Residency::all(opened.version.len());
        }
        residency::glance(&opened.file, opened.version.len(), &opened.fallbacks)
    }

    fn source(&self, route: Route) -> Arc<dyn Source> {
        Arc::clone(match route {
            Route::Buffered => &self.buffered,
            Route::Direct | Route::GpuDirect => self.direct.get_or_init(|| self.open_direct()),
            Route::Mapped => self.mapped.get_or_init(|| self.open_mapped()),
        })
    }

    fn map(&self) -> Result<Arc<MappedFile>> {
        if let Some(map) = self.mapping.get() {
            return Ok(Arc::clone(map));
        }
        let opened = &self.opened;
        let map = MappedFile::new(Arc::clone(&opened.file), &opened.path, opened.version.clone())?;
        Ok(Arc::clone(self.mapping.get_or_init(|| Arc::new(map))))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.source(Route::Direct); // opens it so, where the file system can
        Some(self.direct_file.get().unwrap_or(&self.opened.file).as_fd())
    }

    fn check_unchanged(&self) -> Result<()> {
        self.opened.check_unchanged()
    }
}

impl Opened {
    /// Demands that a read lies inside the file as it was when it was opened.
    fn demand_inside(&self, offset: u64, len: usize) -> Result<()> {
        let end = offset.checked_add(len as u64);
        if end.is_some_and(|end| end <= self.version.len()) {
            return Ok(());
        }
        let message = format!("the file has {} bytes", self.version.len());
        Err(self.read_error(offset, len, io::Error::new(io::ErrorKind::UnexpectedEof, message)))
    }

    /// Reads through the page cache until `target` is full.
    fn read_buffered(&self, offset: u64, target: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < target.len() {
            let end = target.len().min(done + MAX_SYSCALL_BYTES);
            match self.file.read_at(&mut target[done..end], offset + done as u64) {
                Ok(0) => return Err(self.ended_early(offset, target.len())),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.read_error(offset, target.len(), error)),
            }
        }
        Ok(())
    }

    /// The error of a file that gave no more bytes inside its length.
    fn ended_early(&self, offset: u64, len: usize) -> Error {
        let before = self.version.len();
        match self.file.metadata() {
            Ok(now) if now.len() != before => {
                let range = format!("bytes {}..{}", offset, offset + len as u64);
                let what = format!("size {before} bytes before, {} now, while {range} were read", now.len());
                Error::Changed { path: self.path.clone(), what }
            }
            _ => {
                let message = format!("the file ended early, though it still says {before} bytes");
                self.read_error(offset, len, io::Error::new(io::ErrorKind::UnexpectedEof, message))
            }
        }
    }

    fn read_error(&self, offset: u64, len: usize, source: io::Error) -> Error {
        let range = Some(offset..offset.saturating_add(len as u64));
        Error::Io { op: "read", path: self.path.clone(), range, source }
    }

    fn check_unchanged(&self) -> Result<()> {
        let inspect = |error| Error::io("inspect", &self.path, error);
        let open = Version::of_file(&self.file.metadata().map_err(inspect)?);
        // A path that leads nowhere, or nowhere we may look, is no change; the open file keeps its bytes.
        let at_path = std::fs::metadata(&self.path).ok().map(|meta| Version::of_file(&meta));
        let replaced = at_path.filter(|now| !now.is_same_file(&self.version));
        let replaced = replaced.and_then(|now| self.version.difference(&now));
        match self.version.difference(&open).or(replaced) {
            Some(what) => Err(Error::Changed { path: self.path.clone(), what }),
            None => Ok(()),
        }
    }

    /// Notes a route that was not taken, in words that are the same for every file of the file system.
    fn note(&self, what: &str, why: &str) {
        self.fallbacks.note(what, format!("{} {why}; read through the page cache", self.file_system.name));
    }

    fn note_no_direct(&self, why: &NoDirect) {
        self.note("O_DIRECT", &why.to_string());
    }

    fn limits(&self) -> Limits {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let (max_read, gap, depth) = if self.file_system.network {
            (NETWORK_MAX_READ_BYTES, NETWORK_GAP_BYTES, NETWORK_DEPTH)
        } else {
            (MAX_READ_BYTES, GAP_BYTES, cores)
        };
        Limits { align: 1, memory_align: 1, max_read, gap, depth }
    }
}

/// Reads through the page cache.
struct BufferedSource {
    opened: Arc<Opened>,
}

impl Source for BufferedSource {
    fn len(&self) -> u64 {
        self.opened.version.len()
    }

    fn route(&self) -> Route {
        Route::Buffered
    }

    fn limits(&self) -> Limits {
        self.opened.limits()
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        self.opened.demand_inside(offset, target.len())?;
        self.opened.read_buffered(offset, target)?;
        Ok(Route::Buffered)
    }
}

/// Copies out of a mapping.
struct MappedSource {
    opened: Arc<Opened>,
    map: Arc<MappedFile>,
}

impl Source for MappedSource {
    fn len(&self) -> u64 {
        self.opened.version.len()
    }

    fn route(&self) -> Route {
        Route::Mapped
    }

    fn limits(&self) -> Limits {
        self.opened.limits()
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        self.opened.demand_inside(offset, target.len())?;
        self.map.copy_to(offset, target)?;
        Ok(Route::Mapped)
    }
}

/// Reads past the page cache.
struct DirectSource {
    opened: Arc<Opened>,
    file: Arc<File>,
    align: u64,
    memory_align: u64,
    /// The file system opened the file for direct reads and then refused one: never again.
    refused: AtomicBool,
}

/// Why a file has no direct route.
#[derive(Debug, thiserror::Error)]
enum NoDirect {
    #[error("is served over a network or by a program")]
    Network,
    #[error("keeps its files in memory")]
    Memory,
    #[error("says that it has no direct reads")]
    SaysNo,
    #[error("refuses to open for direct reads: {0}")]
    Open(io::Error),
    #[error("refuses direct reads of every block size: {0}")]
    Probe(io::Error),
}

impl DirectSource {
    fn new(opened: &Arc<Opened>) -> Result<DirectSource, NoDirect> {
        if opened.file_system.network {
            return Err(NoDirect::Network);
        }
        if opened.file_system.memory {
            return Err(NoDirect::Memory);
        }
        let said = os::direct_support(opened.file.as_fd()).unwrap_or(DirectSupport::Unknown);
        if said == DirectSupport::Refused {
            return Err(NoDirect::SaysNo);
        }
        let file = reopen(&opened.file, libc::O_DIRECT).map_err(NoDirect::Open)?;
        let (align, memory_align) = match said {
            DirectSupport::Aligned { memory, offset } => (offset, memory),
            _ => probe(&file).map_err(NoDirect::Probe)?,
        };
        let file = Arc::new(file);
        Ok(DirectSource { opened: Arc::clone(opened), file, align, memory_align, refused: AtomicBool::new(false) })
    }

    /// Reads a range whose offset, length and address are aligned.
    fn read_middle(&self, offset: u64, target: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < target.len() {
            let end = target.len().min(done + MAX_SYSCALL_BYTES);
            match self.file.read_at(&mut target[done..end], offset + done as u64) {
                Ok(count) if count > 0 && (count as u64).is_multiple_of(self.align) => done += count,
                // The end of the file inside a block: the buffered read finds out what is left of it.
                Ok(count) => {
                    return self.opened.read_buffered(offset + (done + count) as u64, &mut target[done + count..]);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_refusal(&error) => {
                    self.refuse(&error);
                    return self.opened.read_buffered(offset + done as u64, &mut target[done..]);
                }
                Err(error) => return Err(self.opened.read_error(offset, target.len(), error)),
            }
        }
        Ok(())
    }

    fn refuse(&self, error: &io::Error) {
        if !self.refused.swap(true, Ordering::Relaxed) {
            self.opened.note("O_DIRECT", &format!("opens for direct reads and then refuses them: {error}"));
        }
    }

    fn note_unaligned(&self) {
        let why = format!("was asked to read to an address that is no multiple of {} bytes", self.memory_align);
        self.opened.note("O_DIRECT", &why);
    }
}

impl Source for DirectSource {
    fn len(&self) -> u64 {
        self.opened.version.len()
    }

    fn route(&self) -> Route {
        Route::Direct
    }

    fn limits(&self) -> Limits {
        let (align, memory_align) = (self.align, self.memory_align);
        Limits { align, memory_align, max_read: MAX_READ_BYTES, gap: GAP_BYTES, depth: DIRECT_DEPTH }
    }

    fn ring_descriptor(&self) -> Option<BorrowedFd<'_>> {
        (!self.refused.load(Ordering::Relaxed)).then(|| self.file.as_fd())
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        self.opened.demand_inside(offset, target.len())?;
        let parts = Parts::of(offset, target.len(), self.align);
        let aligned = ((target.as_ptr() as usize + parts.head) as u64).is_multiple_of(self.memory_align);
        if !parts.middle.is_empty() && !aligned {
            self.note_unaligned();
        }
        if parts.middle.is_empty() || !aligned || self.refused.load(Ordering::Relaxed) {
            self.opened.read_buffered(offset, target)?;
            return Ok(Route::Buffered);
        }
        let middle = parts.middle;
        self.read_middle(offset + middle.start as u64, &mut target[middle.clone()])?;
        self.opened.read_buffered(offset, &mut target[..middle.start])?;
        self.opened.read_buffered(offset + middle.end as u64, &mut target[middle.end..])?;
        let direct = !self.refused.load(Ordering::Relaxed) && middle.len() * 2 >= target.len();
        Ok(if direct { Route::Direct } else { Route::Buffered })
    }
}

/// A read cut at block boundaries: bytes `..head` lie before the first, `middle` is whole blocks, the rest after the last.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Bytes before the first block boundary.
    pub(super) head: usize,
    /// The whole blocks, as a range of the target; empty when the read covers none.
    pub(super) middle: std::ops::Range<usize>,
}

impl Parts {
    /// Cuts a read of `len` bytes at `offset` (whose end fits 64 bits) at multiples of `align`, a power of two.
    pub(super) fn of(offset: u64, len: usize, align: u64) -> Parts {
        let start = crate::extent::align_up(offset, align).saturating_sub(offset);
        let head = usize::try_from(start).map_or(len, |start| start.min(len));
        let whole = (len - head) as u64 / align * align;
        // Not above `len`, so it fits.
        let middle = head..head + usize::try_from(whole).unwrap_or(0);
        Parts { head, middle }
    }
}

/// Finds the block size of direct reads by trying: 512, then 4096. The address is as aligned as the offset and no more.
fn probe(file: &File) -> io::Result<(u64, u64)> {
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for block in [512usize, 4096] {
        match probe_read(file, block) {
            Ok(()) => return Ok((block as u64, block as u64)),
            Err(error) if is_refusal(&error) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn probe_read(file: &File, block: usize) -> io::Result<()> {
    let pool = crate::memory::staging::StagingPool::new(3, block)?;
    // The second buffer lies at one block past a huge page's start: not better aligned than asked.
    let mut held: Vec<_> = std::iter::from_fn(|| pool.acquire()).collect();
    let target = held.iter_mut().find(|buffer| buffer.index() == 1).ok_or(io::ErrorKind::Other)?;
    loop {
        match file.read_at(target.bytes_mut(), block as u64) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|_| ()),
        }
    }
}

/// Whether an error means "not this way" rather than "not these bytes".
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS))
}

/// The operating system's words of an error, without the path: the same for each of many shards.
fn cause(error: &Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.kind().to_string(), ToString::to_string)
}

impl fmt::Debug for LocalFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalFile({})", self.opened.path.display())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::storage::Fallback;
    use crate::testing::file_conformance;
    use crate::testing::{Feature, Random, required, required_if, watched};

    fn write(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    fn open(path: &Path) -> (LocalFile, Fallbacks) {
        let notes = Fallbacks::default();
        (LocalFile::open(path, &notes).unwrap(), notes)
    }

    #[test]
    fn every_route_passes_the_suite() {
        watched(|| {
            for (seed, len) in [0, 1, 511, 512, 513, 4095, 4096, 4097, 70_001].into_iter().enumerate() {
                let bytes = Random::new(seed as u64).bytes(len);
                let (_folder, path) = write(&bytes);
                let file = LocalFile::open(&path, &Fallbacks::default()).unwrap();
                file_conformance(&file, &bytes, seed as u64);
            }
        });
    }

    #[test]
    fn a_file_system_in_memory_passes_the_suite_and_says_why_it_has_no_direct_reads() {
        let Some(folder) = required(Feature::Tmpfs, tempfile::tempdir_in("/dev/shm")) else { return };
        let bytes = Random::new(4).bytes(70_001);
        let path = folder.path().join("a");
        std::fs::write(&path, &bytes).unwrap();
        let (file, notes) = open(&path);
        file_conformance(&file, &bytes, 5);
        if required_if(Feature::Tmpfs, file.file_system().memory, "/dev/shm does not lie in memory") {
            assert_eq!(file.residency(), Residency::all(bytes.len() as u64));
            assert_eq!(file.source(Route::Direct).route(), Route::Buffered);
            assert_eq!(notes.list().len(), 1, "{:?}", notes.list());
        }
    }

    #[test]
    fn parts_cover_every_read_once() {
        for align in [1u64, 512, 4096] {
            for offset in [0u64, 1, 511, 512, 513, 4095, 4096, 4097, u64::MAX - 9000] {
                for len in [0usize, 1, 511, 512, 513, 4096, 4097, 9000] {
                    let Parts { head, middle } = Parts::of(offset, len, align);
                    assert!(head == middle.start && middle.end <= len);
                    assert!((middle.len() as u64).is_multiple_of(align));
                    assert!(middle.is_empty() || (offset + head as u64).is_multiple_of(align));
                    assert!(middle.is_empty() || ((len - middle.end) as u64) < align);
                }
            }
        }
        assert_eq!(Parts::of(100, 2000, 512), Parts { head: 412, middle: 412..1948 });
        assert_eq!(Parts::of(100, 300, 512), Parts { head: 300, middle: 300..300 });
    }

    #[test]
    fn a_fifo_a_folder_and_a_device_are_refused_without_a_wait() {
        watched(|| {
            let (folder, path) = write(b"x");
            let fifo = folder.path().join("fifo");
            let made = std::process::Command::new("mkfifo").arg(&fifo).status();
            let notes = Fallbacks::default();
            if made.is_ok_and(|status| status.success()) {
                let error = LocalFile::open(&fifo, &notes).err().unwrap();
                assert!(error.to_string().contains("a named pipe"), "{error}");
            }
            assert_eq!(LocalFile::open(folder.path(), &notes).err().unwrap().kind().as_str(), "unsupported");
            assert_eq!(LocalFile::open(Path::new("/dev/null"), &notes).err().unwrap().kind().as_str(), "unsupported");
            assert_eq!(LocalFile::open(&path.join("no"), &notes).err().unwrap().exit_code(), 4);
            assert_eq!(LocalFile::open(&folder.path().join("no"), &notes).err().unwrap().kind().as_str(), "not_found");
        });
    }

    #[test]
    fn a_file_that_shrank_is_an_error_with_both_sizes_on_every_route() {
        let bytes = Random::new(6).bytes(100_000);
        for route in [Route::Buffered, Route::Direct, Route::Mapped] {
            let (_folder, path) = write(&bytes);
            let (file, _) = open(&path);
            let source = file.source(route);
            OpenOptions::new().write(true).open(&path).unwrap().set_len(50_000).unwrap();
            let mut target = vec![0; 100_000];
            let error = source.read_at(0, &mut target).unwrap_err();
            assert!(matches!(error, Error::Changed { .. }), "{route:?}: {error}");
            let text = error.to_string();
            assert!(text.contains("100000") && text.contains("50000") && text.contains("a.safetensors"), "{text}");
            assert!(matches!(file.check_unchanged(), Err(Error::Changed { .. })));
        }
    }

    #[test]
    fn what_changed_is_named() {
        let (folder, path) = write(&[1; 1000]);
        let (file, _) = open(&path);
        file.check_unchanged().unwrap();

        let other = folder.path().join("b");
        std::fs::write(&other, [2; 1000]).unwrap();
        std::fs::rename(&path, folder.path().join("old")).unwrap();
        file.check_unchanged().unwrap(); // the path leads nowhere: the open file keeps its bytes
        std::fs::rename(&other, &path).unwrap();
        assert!(file.check_unchanged().unwrap_err().to_string().contains("replaced"));

        let (file, _) = open(&path);
        let later = SystemTime::now() + Duration::from_secs(5);
        OpenOptions::new().write(true).open(&path).unwrap().set_modified(later).unwrap();
        assert!(file.check_unchanged().unwrap_err().to_string().contains("modified"));

        let (file, _) = open(&path);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(1001).unwrap();
        assert!(file.check_unchanged().unwrap_err().to_string().contains("1001"));
    }

    /// The first read of a file system that opens for direct reads and then refuses them: an alignment that no disk has.
    #[test]
    fn a_refusal_at_the_first_read_falls_back_for_good_and_is_noted_once() {
        let bytes = Random::new(8).bytes(20_000);
        let notes = Fallbacks::default();
        for _shard in 0..3 {
            let (_folder, path) = write(&bytes);
            let file = LocalFile::open(&path, &notes).unwrap();
            let Some(direct) = required(Feature::Direct, DirectSource::new(&file.opened)) else { return };
            if !required_if(Feature::Direct, direct.align >= 512, "direct reads have no alignment here") {
                return;
            }
            let source = DirectSource { align: 1, memory_align: 1, ..direct };
            let mut target = vec![0; 10_001];
            assert_eq!(source.read_at(3, &mut target).unwrap(), Route::Buffered);
            assert_eq!(target, bytes[3..10_004]);
            assert!(source.ring_descriptor().is_none());
            assert_eq!(source.read_at(3, &mut target).unwrap(), Route::Buffered);
        }
        let [Fallback { what, why }] = &notes.list()[..] else { panic!("{:?}", notes.list()) };
        assert!(what == "O_DIRECT" && why.contains("Invalid argument"), "{why}");
    }

    #[test]
    fn an_address_that_is_not_aligned_is_read_buffered_and_noted() {
        let bytes = Random::new(9).bytes(20_000);
        let (_folder, path) = write(&bytes);
        let (file, notes) = open(&path);
        let Some(source) = required(Feature::Direct, DirectSource::new(&file.opened)) else { return };
        if !required_if(Feature::Direct, source.memory_align > 1, "direct reads go to any address here") {
            return;
        }
        let pool = crate::memory::staging::StagingPool::new(1, 20_000).unwrap();
        let mut buffer = pool.acquire().unwrap();
        assert_eq!(source.read_at(0, &mut buffer.bytes_mut()[..16_384]).unwrap(), Route::Direct);
        assert!(notes.list().is_empty());
        assert_eq!(source.read_at(0, &mut buffer.bytes_mut()[1..16_385]).unwrap(), Route::Buffered);
        assert_eq!(buffer.bytes()[1..16_385], bytes[..16_384]);
        assert_eq!(notes.list().len(), 1);
    }

    #[test]
    fn probing_agrees_with_what_the_kernel_says() {
        let (_folder, path) = write(&[0; 20_000]);
        let (file, _) = open(&path);
        let Some(direct) = required(Feature::Direct, DirectSource::new(&file.opened)) else { return };
        let (align, memory_align) = probe(&direct.file).unwrap();
        assert!(align >= direct.align && memory_align >= direct.memory_align);
    }

    #[test]
    fn a_network_file_system_is_read_big_and_buffered() {
        let bytes = Random::new(10).bytes(5000);
        let (_folder, path) = write(&bytes);
        let (mut file, notes) = open(&path);
        let file_system = FileSystem { name: "nfs".to_owned(), network: true, memory: false };
        let (file_handle, version) = (Arc::new(File::open(&path).unwrap()), file.version());
        let opened = Opened { path, file: file_handle, version, file_system, fallbacks: notes.clone() };
        let opened = Arc::new(opened);
        file.buffered = Arc::new(BufferedSource { opened: Arc::clone(&opened) });
        file.opened = opened;
        file_conformance(&file, &bytes, 11);
        for route in [Route::Direct, Route::Mapped] {
            let source = file.source(route);
            assert_eq!((source.route(), source.limits().max_read), (Route::Buffered, 16 << 20));
        }
        assert_eq!(notes.list().len(), 2, "{:?}", notes.list());
    }
}
