//! One file of a save on its way: its blocks are handed to the storage and hashed here, on a thread of its own.
//!
//! The thread that fills blocks is another, and so are those that write them: a block is written and hashed at the same time, and
//! its buffer is free when both are done with it. At the end the file is made durable here too, so that the files after it go on
//! meanwhile. A file of one block, and every file where the machine gives no thread, is written by the thread that fills it.
//! Nothing here knows a tensor's place, publishes or removes anything.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::sums::Sums;
use crate::digest::Digest;
use crate::durable::NewFile;
use crate::error::{Error, Result};
use crate::memory::Filled;

/// The writer of one file.
pub(super) struct FileWriter {
    /// Under which name it is made.
    pub(super) path: PathBuf,
    way: Way,
    /// Blocks that were given, and those that were hashed.
    given: u64,
    hashed: Arc<AtomicU64>,
}

enum Way {
    Here(Option<Work>),
    Thread {
        blocks: Option<Sender<Step>>,
        thread: Option<JoinHandle<Result<Complete>>>,
    },
    /// It has failed, and said so.
    Failed,
}

/// The file and its digests.
pub(super) struct Work {
    pub(super) file: Box<dyn NewFile>,
    pub(super) sums: Option<Sums>,
}

enum Step {
    Block(Filled),
    End,
}

/// A file that is durable.
pub(super) struct Complete {
    /// What keeps it locked.
    pub(super) lock: Box<dyn Send>,
    pub(super) digests: Vec<(Arc<str>, Digest)>,
}

impl FileWriter {
    /// Starts a file. Its blocks are worked on beside the caller if `beside` says so.
    pub(super) fn start(path: PathBuf, work: Work, beside: bool) -> FileWriter {
        let hashed = Arc::new(AtomicU64::new(0));
        let way = if beside { Way::thread(work, &hashed) } else { Way::Here(Some(work)) };
        FileWriter { path, way, given: 0, hashed }
    }

    /// Whether its blocks are worked on beside the caller.
    pub(super) fn is_beside(&self) -> bool {
        matches!(self.way, Way::Thread { .. })
    }

    /// Blocks that were given and not hashed yet.
    pub(super) fn waiting(&self) -> u64 {
        self.given.saturating_sub(self.hashed.load(Ordering::Relaxed))
    }

    /// Whether its thread has ended before the file has all of its bytes.
    pub(super) fn has_failed(&self) -> bool {
        matches!(&self.way, Way::Thread { blocks: Some(_), thread: Some(thread) } if thread.is_finished())
    }

    /// Why the thread has ended.
    pub(super) fn reason(&mut self) -> Error {
        let Way::Thread { thread, .. } = &mut self.way else { return ended() };
        let outcome = thread.take().map(|thread| thread.join().unwrap_or_else(|_| Err(ended())));
        self.way = Way::Failed;
        outcome.and_then(Result::err).unwrap_or_else(ended)
    }

    /// Hands over the next block of the file.
    ///
    /// # Errors
    /// When it cannot be written, or a block before it could not be.
    pub(super) fn give(&mut self, block: Filled) -> Result<()> {
        self.given += 1;
        match &mut self.way {
            Way::Here(Some(work)) => {
                self.hashed.fetch_add(1, Ordering::Relaxed);
                work.take(block)
            }
            Way::Thread { blocks: Some(blocks), .. } if blocks.send(Step::Block(block)).is_ok() => Ok(()),
            Way::Thread { .. } => Err(self.reason()),
            Way::Here(None) | Way::Failed => Err(ended()),
        }
    }

    /// All blocks have been given: makes the file durable, in the background where there is one.
    pub(super) fn end(&mut self) {
        if let Way::Thread { blocks, .. } = &mut self.way
            && let Some(blocks) = blocks.take()
        {
            let _ = blocks.send(Step::End); // a thread that has ended has a reason, which `complete` gives
        }
    }

    /// Waits until the file is durable.
    pub(super) fn complete(mut self) -> Result<Complete> {
        self.end();
        match &mut self.way {
            Way::Here(work) => work.take().ok_or_else(ended)?.complete(),
            Way::Thread { thread, .. } => thread.take().ok_or_else(ended)?.join().unwrap_or_else(|_| Err(ended())),
            Way::Failed => Err(ended()),
        }
    }
}

impl Way {
    fn thread(work: Work, hashed: &Arc<AtomicU64>) -> Way {
        let (blocks, queue) = unbounded();
        let (give_work, take_work) = crossbeam_channel::bounded::<Work>(1);
        let hashed = Arc::clone(hashed);
        let run = move || take_work.recv().map_err(|_| ended()).and_then(|work| work.run(&queue, &hashed));
        match thread::Builder::new().name("vramp-file".to_owned()).spawn(run) {
            Ok(thread) => match give_work.send(work) {
                Ok(()) => Way::Thread { blocks: Some(blocks), thread: Some(thread) },
                Err(refused) => Way::Here(Some(refused.into_inner())),
            },
            Err(_) => Way::Here(Some(work)),
        }
    }
}

impl Work {
    fn take(&mut self, block: Filled) -> Result<()> {
        match &mut self.sums {
            None => self.file.append_filled(block),
            Some(sums) => {
                self.file.append_filled(block.clone())?; // from here on it is written while it is hashed
                sums.update(block.bytes());
                Ok(())
            }
        }
    }

    /// Takes blocks until the last.
    fn run(mut self, queue: &Receiver<Step>, hashed: &AtomicU64) -> Result<Complete> {
        loop {
            match queue.recv() {
                Ok(Step::Block(block)) => self.take(block)?,
                Ok(Step::End) => return self.complete(),
                Err(_) => return Err(Error::Cancelled), // the save was given up
            }
            hashed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn complete(self) -> Result<Complete> {
        let lock = self.file.sync()?;
        Ok(Complete { lock, digests: self.sums.map(Sums::finish).unwrap_or_default() })
    }
}

impl Drop for FileWriter {
    /// A file that is given up is let go before anything is removed.
    fn drop(&mut self) {
        if let Way::Thread { blocks, thread } = &mut self.way {
            *blocks = None;
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}

fn ended() -> Error {
    Error::Poisoned { what: "a thread that writes a file" }
}
