//! A load on a thread of its own, and the tensors that are there already. It moves no bytes: `run` does, and tells it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::bounded;

use super::loaded::not_loaded;
use super::{Cancel, Loaded, Loader};
use crate::device::Written;
use crate::error::{Error, Result};
use crate::plan::{LoadPlan, Placement};
use crate::tensor::Tensor;

/// A load under way. Dropping it cancels the load and waits for it to end.
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

/// Which tensors are there, for threads that wait for them.
pub(super) struct Readiness {
    names: BTreeMap<Arc<str>, usize>,
    placements: Vec<Placement>,
    written: OnceLock<Written>,
    ended: Mutex<bool>,
    changed: Condvar,
    /// Stops this load alone: the switch in the options may be another load's too.
    pub(super) abandoned: Cancel,
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
        let readiness = &self.readiness;
        let mut ended = readiness.ended.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(tensor) = readiness.tensor(name)? {
                return Ok(tensor);
            }
            if *ended {
                return Err(Error::Cancelled);
            }
            ended = readiness.changed.wait(ended).unwrap_or_else(PoisonError::into_inner);
        }
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

/// Tells those who wait that the load has ended, by whatever way it ends.
pub(super) struct Ending<'a>(pub(super) &'a Readiness);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end();
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

impl Readiness {
    pub(super) fn new(plan: &LoadPlan) -> Readiness {
        let names = plan.placements.iter().enumerate().flat_map(|(index, placement)| {
            std::iter::once(&placement.name).chain(&placement.aliases).map(move |name| (Arc::clone(name), index))
        });
        Readiness {
            names: names.collect(),
            placements: plan.placements.clone(),
            written: OnceLock::new(),
            ended: Mutex::new(false),
            changed: Condvar::new(),
            abandoned: Cancel::new(),
        }
    }

    pub(super) fn begin(&self, written: Written) {
        let _ = self.written.set(written);
    }

    pub(super) fn notify(&self) {
        // The lock makes sure that a waiter that has just found nothing is already waiting.
        drop(self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let (name, &index) =
            self.names.get_key_value(name).ok_or_else(|| not_loaded(name, self.names.keys().map(Arc::as_ref)))?;
        let placement = self.placements.get(index).ok_or(Error::Poisoned { what: "the index of names" })?;
        let view = self.written.get().and_then(|written| written.view(placement.range()));
        let shape = || Arc::clone(&placement.shape);
        Ok(view.map(|view| Tensor::new(Arc::clone(name), placement.dtype, shape(), view)))
    }
}

impl fmt::Debug for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.readiness.names.len();
        f.debug_struct("Loading").field("names", &names).finish_non_exhaustive()
    }
}
