//! A load on a thread of its own, and the tensors that are there already. It moves no bytes: `run` does, and tells it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use super::{Cancel, Loaded, Loader, not_loaded};
use crate::device::Written;
use crate::error::{Error, Result};
use crate::plan::{LoadPlan, Placement};
use crate::tensor::Tensor;

/// A load under way. Dropping it cancels the load and waits for it to end.
pub struct Loading {
    pub(super) readiness: Arc<Readiness>,
    pub(super) cancel: Cancel,
    pub(super) thread: Option<JoinHandle<Result<(Loader, Loaded)>>>,
}

/// Which tensors are there, for threads that wait for them.
pub(super) struct Readiness {
    names: BTreeMap<Arc<str>, usize>,
    placements: Vec<Placement>,
    written: OnceLock<Written>,
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Loading {
    /// Waits until the bytes of one tensor are there. The rest of the load goes on.
    ///
    /// The tensor is provisional until [`Loading::finish`] succeeds: a file that changed is found out at the end of its shard.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a name that is not loaded, [`Error::Cancelled`] when the load ended without it.
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
    /// [`Error::NotFound`] for a name that is not loaded.
    pub fn ready(&self, name: &str) -> Result<Option<Tensor>> {
        self.readiness.tensor(name)
    }

    /// Waits for the whole load; gives the loader back for the next one.
    ///
    /// # Errors
    /// Whatever ended the load.
    pub fn finish(mut self) -> Result<(Loader, Loaded)> {
        let thread = self.thread.take().ok_or(Error::Poisoned { what: "a load was finished twice" })?;
        thread.join().unwrap_or(Err(Error::Poisoned { what: "the loading thread" }))
    }
}

/// Wakes those who wait when the loading thread ends, however it ends.
pub(super) struct Ending(pub(super) Arc<Readiness>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.cancel.cancel();
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
        let (name, &index) = self.names.get_key_value(name).ok_or_else(|| not_loaded(name))?;
        let placement = self.placements.get(index).ok_or(Error::Poisoned { what: "the index of names" })?;
        let view = self.written.get().and_then(|written| written.view(placement.range()));
        let shape = || Arc::clone(&placement.shape);
        Ok(view.map(|view| Tensor::new(Arc::clone(name), placement.dtype.clone(), shape(), view)))
    }
}
