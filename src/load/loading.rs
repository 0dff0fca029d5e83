//! A load on a thread of its own, and the tensors that are there already. It moves no bytes: `run` does, and tells it.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::bounded;

use super::loaded::Loaded;
use super::loader::Loader;
use super::prepared::Prepared;
use super::readiness::{Ending, Readiness};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// A load in progress. Dropping it cancels the load and waits for its end.
pub struct Loading {
    readiness: Arc<Readiness>,
    course: Option<Course>,
}

type Outcome = Result<(Loader, Loaded)>;

/// Where a load that was started is.
enum Course {
    Running(JoinHandle<Outcome>),
    Over(Box<Outcome>),
}

impl Course {
    /// Does the work on a thread of its own, or here if there is none to be had.
    fn begin<W: FnOnce() -> Outcome + Send + 'static>(work: W) -> Course {
        // By a channel, so that the work is still here when the thread does not start.
        let (hand_over, taken) = bounded::<W>(1);
        let run = move || taken.recv().map_or(Err(Error::Poisoned { what: "a load without work" }), |work| work());
        match std::thread::Builder::new().name("vramp-load".to_owned()).spawn(run) {
            Ok(thread) => {
                let _ = hand_over.send(work); // the thread waits for it
                Course::Running(thread)
            }
            Err(_) => Course::Over(Box::new(work())),
        }
    }
}

impl Loading {
    /// A load that does `work`, now.
    pub(super) fn begin(
        readiness: Arc<Readiness>,
        work: impl FnOnce() -> Result<(Loader, Loaded)> + Send + 'static,
    ) -> Loading {
        Loading { readiness, course: Some(Course::begin(work)) }
    }

    /// Waits until the bytes of one tensor are there. The rest of the load goes on.
    ///
    /// The tensor is provisional until [`Loading::finish`] succeeds: a file that changed is found out at the end of its shard.
    ///
    /// # Errors
    /// [`Error::NoTensor`] for a name that is not loaded, [`Error::Cancelled`] when the load ended without it.
    pub fn wait(&self, name: &str) -> Result<Tensor> {
        self.readiness.wait(name)
    }

    /// The tensor, if its bytes are there already.
    ///
    /// # Errors
    /// [`Error::NoTensor`] for a name that is not loaded.
    pub fn ready(&self, name: &str) -> Result<Option<Tensor>> {
        self.readiness.tensor(name)
    }

    /// Waits for the whole load; gives the loader back for the next one.
    ///
    /// # Errors
    /// Whatever ended the load.
    pub fn finish(mut self) -> Result<(Loader, Loaded)> {
        match self.course.take().ok_or(Error::Poisoned { what: "a load was finished twice" })? {
            Course::Running(thread) => thread.join().unwrap_or(Err(Error::Poisoned { what: "the loading thread" })),
            Course::Over(outcome) => *outcome,
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(Course::Running(thread)) = self.course.take() {
            self.readiness.abandoned.cancel();
            let _ = thread.join();
        }
    }
}

impl Loader {
    /// Carries a plan out on a thread of its own, and hands out each tensor as soon as its bytes are there. Where the
    /// machine gives no thread, the load is over when this returns.
    pub fn start(self, prepared: Prepared) -> Loading {
        let readiness = Arc::new(Readiness::new(&prepared.plan));
        let shared = Arc::clone(&readiness);
        let work = move || {
            let _ending = Ending(&shared);
            let mut loader = self;
            let loaded = loader.carry_out(&prepared, None, Some(&shared))?;
            Ok((loader, loaded))
        };
        Loading::begin(readiness, work)
    }
}

impl fmt::Debug for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.readiness.names();
        f.debug_struct("Loading").field("names", &names).finish_non_exhaustive()
    }
}
