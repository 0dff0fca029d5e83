//! A new local file that is written past the page cache: blocks are filled here while threads write those before.
//!
//! Saved weights are read next by something that reads files of many gigabytes, if at all: keeping them in the page cache would
//! push out what is in use, and memory that the kernel has to find first makes writing slow (`docs/benchmarking.md`). A file of
//! less than one block is written the ordinary way, and so is one that the file system will not have written past its
//! cache; the kernel is then told to begin storing each block at once. It renames and removes nothing.

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

use super::NewFile;
use crate::error::{Error, Result};
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::os::{self, DirectSupport};

/// Bytes of one write: large enough that a disk does not wait for the next.
pub(super) const BLOCK_BYTES: usize = 8 << 20;

/// Blocks that are written at the same time, and one that is filled meanwhile.
const WRITERS: usize = 2;
const BLOCKS: usize = WRITERS + 1;

/// A new local file.
pub(super) struct Growing {
    file: Arc<Growable>,
    /// Bytes that were handed over.
    len: u64,
    way: Way,
    warning: Option<String>,
}

/// The file as the writing threads see it.
struct Growable {
    file: File,
    path: PathBuf,
    /// Whether writes go past the page cache.
    direct: AtomicBool,
}

enum Way {
    /// Less than a block so far, all of it.
    Small(Vec<u8>),
    /// Blocks are being written; the last is not full.
    Blocks(Blocks),
}

impl Growing {
    pub(super) fn new(file: File, path: &Path, warning: Option<String>) -> Growing {
        let file = Growable { file, path: path.to_owned(), direct: AtomicBool::new(false) };
        Growing { file: Arc::new(file), len: 0, way: Way::Small(Vec::new()), warning }
    }

    /// The first block is full.
    fn grow_up(&mut self) -> Result<()> {
        let Way::Small(first) = &mut self.way else { return Ok(()) };
        let mut blocks = Blocks::start(&self.file)?;
        blocks.append(&std::mem::take(first))?;
        self.way = Way::Blocks(blocks);
        Ok(())
    }
}

impl NewFile for Growing {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.len = self.len.saturating_add(bytes.len() as u64);
        match &mut self.way {
            Way::Small(waiting) if waiting.len() + bytes.len() < BLOCK_BYTES => waiting.extend_from_slice(bytes),
            Way::Small(_) => self.grow_up()?,
            Way::Blocks(blocks) => return blocks.append(bytes),
        }
        match &mut self.way {
            Way::Blocks(blocks) => blocks.append(bytes),
            Way::Small(_) => Ok(()),
        }
    }

    fn warning(&self) -> Option<String> {
        self.warning.clone()
    }

    fn sync(self: Box<Self>) -> Result<Box<dyn Send>> {
        let Growing { file, len, way, .. } = *self;
        match way {
            Way::Small(waiting) => file.write(&waiting, 0)?,
            Way::Blocks(blocks) => blocks.finish()?,
        }
        file.sync(len)?;
        Ok(Box::new(file)) // open, and so locked
    }
}

impl Growable {
    /// Has the file written past the page cache, where the file system can.
    fn go_direct(&self) {
        let fits = |memory: u64, offset: u64| memory.max(offset) <= os::page_bytes() as u64;
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
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && self.direct.load(Ordering::Relaxed) => {
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

/// Full blocks on their way to the file, and the one that is being filled.
struct Blocks {
    file: Arc<Growable>,
    pool: StagingPool,
    current: Option<StagingBuffer>,
    filled: usize,
    /// Where the current block goes.
    at: u64,
    under_way: usize,
    /// `None` once no further block comes.
    jobs: Option<Sender<Job>>,
    done: Receiver<Result<()>>,
    threads: Vec<thread::JoinHandle<()>>,
}

struct Job {
    block: StagingBuffer,
    at: u64,
}

impl Blocks {
    fn start(file: &Arc<Growable>) -> Result<Blocks> {
        let pool =
            StagingPool::new(BLOCKS, BLOCK_BYTES).map_err(|e| Error::io("find memory to write", &file.path, e))?;
        file.go_direct();
        let ((jobs, queue), (finished, done)) = (unbounded::<Job>(), unbounded());
        let work = || {
            let (file, queue, finished) = (Arc::clone(file), queue.clone(), finished.clone());
            move || {
                for Job { block, at } in queue {
                    // Every block is answered, also after a panic: the other thread keeps the channel open.
                    let write = AssertUnwindSafe(|| file.write(block.bytes(), at));
                    let written = catch_unwind(write).unwrap_or_else(|_| Err(ended()));
                    drop(block); // free before whoever waits hears of it
                    let _ = finished.send(written);
                }
            }
        };
        let start = |_| thread::Builder::new().name("vramp-store".to_owned()).spawn(work()).ok();
        let threads: Vec<_> = (0..WRITERS).filter_map(start).collect();
        let current = pool.acquire();
        // Without any thread the blocks are written here.
        let jobs = (!threads.is_empty()).then_some(jobs);
        Ok(Blocks { file: Arc::clone(file), pool, current, filled: 0, at: 0, under_way: 0, jobs, done, threads })
    }

    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let lost = Error::Poisoned { what: "no block to write to" };
            let block = self.current.as_mut().ok_or(lost)?.bytes_mut();
            let room = block.get_mut(self.filled..).unwrap_or_default();
            let len = room.len().min(bytes.len());
            let (now, later) = bytes.split_at(len);
            room[..len].copy_from_slice(now);
            self.filled += len;
            if self.filled == BLOCK_BYTES {
                self.send()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Hands a full block over and takes the next free one.
    fn send(&mut self) -> Result<()> {
        let (Some(block), at) = (self.current.take(), self.at) else { return Ok(()) };
        (self.at, self.filled) = (self.at.saturating_add(BLOCK_BYTES as u64), 0);
        match &self.jobs {
            Some(jobs) => {
                jobs.send(Job { block, at }).map_err(|_| ended())?;
                self.under_way += 1;
            }
            None => {
                self.file.write(block.bytes(), at)?;
                drop(block);
            }
        }
        self.current = self.pool.acquire();
        while self.current.is_none() {
            self.wait_for_one()?;
            self.current = self.pool.acquire();
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<()> {
        self.under_way = self.under_way.saturating_sub(1);
        self.done.recv().unwrap_or(Err(ended()))
    }

    /// Waits for all blocks and writes the rest.
    fn finish(mut self) -> Result<()> {
        self.jobs = None;
        while self.under_way > 0 {
            self.wait_for_one()?;
        }
        self.file.go_buffered().map_err(|e| Error::io("write", &self.file.path, e))?;
        let rest = self.current.as_ref().and_then(|block| block.bytes().get(..self.filled));
        self.file.write(rest.unwrap_or_default(), self.at)
    }
}

impl Drop for Blocks {
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
    use crate::testing::{Random, watched};

    /// A file of `bytes`, handed over in pieces of growing size.
    fn write(path: &Path, bytes: &[u8]) -> Result<()> {
        let mut file: Box<dyn NewFile> = Box::new(Growing::new(File::create(path).unwrap(), path, None));
        let (mut rest, mut step) = (bytes, 1);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(step));
            file.append(now)?;
            (rest, step) = (later, step * 7 + 1);
        }
        file.sync().map(drop)
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
                    write(&path, &bytes).unwrap();
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
            if os::refuse(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN) {
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
            if os::refuse(&[libc::SYS_pwrite64], libc::ENOSPC) {
                for blocks in [0, 1, 9] {
                    let error = write(&path, &vec![7; blocks * BLOCK_BYTES + 9]).unwrap_err();
                    assert!(matches!(&error, Error::Io { op: "write", .. }), "{error:?}");
                    assert_eq!(error.exit_code(), 4);
                }
            }
        });
    }
}
