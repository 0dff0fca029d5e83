//! A new local file that is written past the page cache: several of its blocks at once, by threads, while the next is filled.
//!
//! Saved weights are read next by something that reads files of many gigabytes, if at all: keeping them in the page cache would
//! push out what is in use, and memory that the kernel has to find first makes writing slow (`docs/benchmarking.md`). A file of
//! less than one block is written the ordinary way, and so is one that the file system will not have written past its
//! cache; the kernel is then told to begin storing at once. It allocates no block itself, and renames and removes nothing.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::port::NewFile;
use crate::error::{Error, Result};
use crate::memory::Filled;
use crate::os::{self, DirectSupport};

/// Bytes of one write: large enough that a disk does not wait for the next.
pub const BLOCK_BYTES: usize = 8 << 20;

/// Blocks of one file that are written at the same time.
const WRITERS: usize = 4;

/// Direct writes begin and end on multiples of so many bytes: no file system that writes directly demands more than a page.
fn direct_align() -> usize {
    os::page_bytes()
}

/// A new local file.
pub(super) struct Growing {
    file: Arc<Growable>,
    /// Bytes that were handed over.
    len: u64,
    /// Bytes that disk was reserved for.
    reserved: u64,
    /// The last bytes that were handed over, which no block holds.
    rest: Vec<u8>,
    /// Once there was a whole block.
    writers: Option<Writers>,
    warning: Option<String>,
}

/// The file as the writing threads see it.
struct Growable {
    file: File,
    path: PathBuf,
    /// Whether writes go past the page cache.
    direct: AtomicBool,
}

impl Growing {
    pub(super) fn new(file: File, path: &Path, warning: Option<String>) -> Growing {
        let file = Growable { file, path: path.to_owned(), direct: AtomicBool::new(false) };
        Growing { file: Arc::new(file), len: 0, reserved: 0, rest: Vec::new(), writers: None, warning }
    }

    /// Writes what no block holds, by the page cache and after all blocks: its end is not aligned.
    fn write_rest(&mut self) -> Result<()> {
        if let Some(writers) = &mut self.writers {
            writers.wait_for_all()?;
        }
        self.file.go_buffered().map_err(|e| Error::io("write", &self.file.path, e))?;
        let rest = std::mem::take(&mut self.rest);
        self.file.write(&rest, self.len.saturating_sub(rest.len() as u64))
    }
}

impl NewFile for Growing {
    fn reserve(&mut self, bytes: u64) -> Result<()> {
        if bytes < BLOCK_BYTES as u64 {
            return Ok(());
        }
        match os::reserve_space(self.file.file.as_fd(), bytes).map_err(beyond_limit) {
            Ok(()) => self.reserved = bytes,
            Err(source) if is_full(&source) => {
                let (path, range) = (self.file.path.clone(), Some(0..bytes));
                return Err(Error::Io { op: "reserve disk space for", path, range, source });
            }
            Err(_) => {} // the file grows as it is written
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        for chunk in bytes.chunks(BLOCK_BYTES) {
            self.len = self.len.saturating_add(chunk.len() as u64);
            self.rest.extend_from_slice(chunk);
            if self.rest.len() >= BLOCK_BYTES {
                self.write_rest()?;
            }
        }
        Ok(())
    }

    fn append_filled(&mut self, block: Filled) -> Result<()> {
        let (align, bytes) = (direct_align(), block.bytes().len());
        let is_aligned = self.rest.is_empty() && self.len.is_multiple_of(align as u64);
        if !is_aligned || (bytes < BLOCK_BYTES && self.writers.is_none()) {
            return self.append(block.bytes());
        }
        let (at, len) = (self.len, bytes / align * align);
        self.len = at.saturating_add(bytes as u64);
        self.rest.extend_from_slice(block.bytes().get(len..).unwrap_or_default());
        let writers = self.writers.get_or_insert_with(|| Writers::start(&self.file));
        writers.submit(Job { block, len, at })
    }

    fn warning(&self) -> Option<String> {
        self.warning.clone()
    }

    fn sync(mut self: Box<Self>) -> Result<Box<dyn Send>> {
        self.write_rest()?;
        if self.reserved > self.len {
            self.file.file.set_len(self.len).map_err(|e| Error::io("shorten", &self.file.path, e))?;
        }
        self.file.sync(self.len)?;
        Ok(Box::new(Arc::clone(&self.file))) // open, and so locked
    }
}

impl Growable {
    /// Has the file written past the page cache, where the file system can.
    fn go_direct(&self) {
        let fits = |memory: u64, offset: u64| memory.max(offset) <= direct_align() as u64;
        let can = match os::direct_support(self.file.as_fd()) {
            Ok(DirectSupport::Aligned { memory, offset }) => fits(memory, offset),
            Ok(DirectSupport::Unknown) => true, // a write that is refused tells
            Ok(DirectSupport::Refused) | Err(_) => false,
        };
        self.direct.store(can && os::set_direct(self.file.as_fd(), true).is_ok(), Ordering::Relaxed);
    }

    /// From now on by the page cache: the file system refuses the other way, or what is left is no whole block.
    fn go_buffered(&self) -> io::Result<()> {
        self.direct.store(false, Ordering::Relaxed);
        os::set_direct(self.file.as_fd(), false)
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        let written = match self.file.write_all_at(bytes, at) {
            // The file system writes nothing directly. Several threads may meet this at once, and each of them goes on.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                self.go_buffered().and_then(|()| self.file.write_all_at(bytes, at))
            }
            written => written,
        };
        let range = at..at.saturating_add(bytes.len() as u64);
        if !self.direct.load(Ordering::Relaxed) {
            // A hint: the sync at the end makes the promise, and reports what this could not write.
            let _ = os::start_writeback(self.file.as_fd(), at, bytes.len() as u64);
        }
        written.map_err(beyond_limit).map_err(|source| Error::Io {
            op: "write",
            path: self.path.clone(),
            range: Some(range),
            source,
        })
    }

    fn sync(&self, len: u64) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("sync", &self.path, e))?;
        let found = self.file.metadata().map_err(|e| Error::io("examine", &self.path, e))?.len();
        if found == len {
            return Ok(());
        }
        let what = format!("{len} bytes were written, and the file has {found}");
        Err(Error::io("write", &self.path, io::Error::new(io::ErrorKind::WriteZero, what)))
    }
}

/// Whether there is no room, now or ever; anything else that `fallocate` says is that it cannot.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), FileTooLarge | QuotaExceeded | StorageFull)
}

/// Says of a file that may not grow any more which limits there are.
fn beyond_limit(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::FileTooLarge => {
            let what =
                "the file would be larger than the limit of this process (ulimit -f) or of the file system allows";
            io::Error::new(io::ErrorKind::FileTooLarge, what)
        }
        _ => error,
    }
}

/// Threads that write blocks of one file.
struct Writers {
    file: Arc<Growable>,
    under_way: usize,
    /// `None` once no further block comes, and where the machine gave no thread: blocks are then written by [`Writers::submit`].
    jobs: Option<Sender<Job>>,
    done: Receiver<Result<()>>,
    threads: Vec<thread::JoinHandle<()>>,
}

/// The first `len` bytes of a block, and where they go.
struct Job {
    block: Filled,
    len: usize,
    at: u64,
}

impl Job {
    fn write(&self, file: &Growable) -> Result<()> {
        file.write(self.block.bytes().get(..self.len).unwrap_or_default(), self.at)
    }
}

impl Writers {
    fn start(file: &Arc<Growable>) -> Writers {
        file.go_direct();
        let ((jobs, queue), (finished, done)) = (unbounded::<Job>(), unbounded());
        let work = || {
            let (file, queue, finished) = (Arc::clone(file), queue.clone(), finished.clone());
            move || {
                for job in queue {
                    // Every block is answered, also after a panic: the other threads keep the channel open.
                    let written = catch_unwind(AssertUnwindSafe(|| job.write(&file))).unwrap_or_else(|_| Err(ended()));
                    drop(job); // free before the answer is seen
                    let _ = finished.send(written);
                }
            }
        };
        let start = |_| thread::Builder::new().name("vramp-store".to_owned()).spawn(work()).ok();
        let threads: Vec<_> = (0..WRITERS).filter_map(start).collect();
        let jobs = (!threads.is_empty()).then_some(jobs);
        Writers { file: Arc::clone(file), under_way: 0, jobs, done, threads }
    }

    /// Hands a block over. An error may be that of a block before it.
    fn submit(&mut self, job: Job) -> Result<()> {
        while let Ok(written) = self.done.try_recv() {
            self.under_way = self.under_way.saturating_sub(1);
            written?;
        }
        match &self.jobs {
            Some(jobs) => jobs.send(job).map_err(|_| ended())?,
            None => return job.write(&self.file),
        }
        self.under_way += 1;
        Ok(())
    }

    fn wait_for_all(&mut self) -> Result<()> {
        while self.under_way > 0 {
            self.under_way -= 1;
            self.done.recv().unwrap_or(Err(ended()))?;
        }
        Ok(())
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn ended() -> Error {
    Error::Poisoned { what: "a thread that writes" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::staging::StagingPool;
    use crate::testing::{Random, refused, watched};

    fn create(path: &Path) -> Box<dyn NewFile> {
        Box::new(Growing::new(File::create(path).unwrap(), path, None))
    }

    /// A file of `bytes`, handed over in pieces of growing size.
    fn append(path: &Path, bytes: &[u8]) -> Result<()> {
        let mut file = create(path);
        let (mut rest, mut step) = (bytes, 1);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(step));
            file.append(now)?;
            (rest, step) = (later, step * 7 + 1);
        }
        file.sync().map(drop)
    }

    /// A file of `bytes`, handed over in blocks of three buffers that are used in turn; `odd` bytes come before them.
    fn write_after(path: &Path, odd: usize, bytes: &[u8]) -> Result<()> {
        let pool = StagingPool::new(3, BLOCK_BYTES).unwrap();
        let mut file = create(path);
        file.reserve(bytes.len() as u64)?;
        file.append(&bytes[..odd])?;
        for chunk in bytes[odd..].chunks(BLOCK_BYTES) {
            let mut buffer = pool.acquire_waiting().unwrap();
            buffer.bytes_mut()[..chunk.len()].copy_from_slice(chunk);
            file.append_filled(Filled::new(buffer, chunk.len()))?;
        }
        file.sync().map(drop)
    }

    fn write(path: &Path, bytes: &[u8]) -> Result<()> {
        write_after(path, 0, bytes)
    }

    #[test]
    fn blocks_and_small_pieces_arrive_in_their_order() {
        watched(|| {
            // Memory, where the usual temporary folder is one, and the disk that the build is on.
            let build = std::env::current_exe().unwrap().parent().unwrap().to_owned();
            for folder in [tempfile::tempdir().unwrap(), tempfile::tempdir_in(build).unwrap()] {
                let path = folder.path().join("f");
                for len in [0, 5, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 12_345] {
                    let bytes = Random::new(len as u64).bytes(len);
                    for odd in [0, 1, 4096].into_iter().filter(|&odd| odd <= len) {
                        write_after(&path, odd, &bytes).unwrap();
                        assert!(std::fs::read(&path).unwrap() == bytes, "{len}, {odd} before");
                    }
                    append(&path, &bytes).unwrap();
                    assert!(std::fs::read(&path).unwrap() == bytes, "{len}");
                }
            }
        });
    }

    #[test]
    fn a_machine_that_gives_no_thread_writes_all_the_same() {
        watched(|| {
            let folder = tempfile::tempdir().unwrap();
            let bytes = Random::new(1).bytes(4 * BLOCK_BYTES + 7);
            if refused(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN) {
                write(&folder.path().join("f"), &bytes).unwrap();
                assert!(std::fs::read(folder.path().join("f")).unwrap() == bytes);
            }
        });
    }

    #[test]
    fn a_disk_that_takes_no_more_is_an_error_and_no_hang() {
        watched(|| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("f");
            if refused(&[libc::SYS_pwrite64], libc::ENOSPC) {
                for blocks in [0, 1, 9] {
                    let error = write(&path, &vec![7; blocks * BLOCK_BYTES + 9]).unwrap_err();
                    assert!(matches!(&error, Error::Io { op: "write", .. }), "{error:?}");
                    assert_eq!(error.exit_code(), 4);
                }
            }
        });
    }

    #[test]
    fn a_file_that_ends_before_what_was_reserved_has_its_own_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let mut file = create(&path);
        file.reserve(3 * BLOCK_BYTES as u64).unwrap();
        file.append(b"short").unwrap();
        file.sync().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
    }

    #[test]
    fn a_disk_without_room_refuses_before_anything_is_written() {
        watched(|| {
            let folder = tempfile::tempdir().unwrap();
            if refused(&[libc::SYS_fallocate], libc::ENOSPC) {
                let error = create(&folder.path().join("f")).reserve(BLOCK_BYTES as u64).unwrap_err();
                assert!(matches!(&error, Error::Io { op: "reserve disk space for", .. }), "{error:?}");
            }
        });
    }

    #[test]
    fn a_file_system_that_reserves_nothing_is_written_all_the_same() {
        watched(|| {
            let folder = tempfile::tempdir().unwrap();
            let bytes = Random::new(1).bytes(2 * BLOCK_BYTES + 7);
            if refused(&[libc::SYS_fallocate], libc::EOPNOTSUPP) {
                write(&folder.path().join("f"), &bytes).unwrap();
                assert!(std::fs::read(folder.path().join("f")).unwrap() == bytes);
            }
        });
    }
}
