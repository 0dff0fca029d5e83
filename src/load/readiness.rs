//! Which tensors of a running load are complete, for threads that wait for them. It moves no bytes: the loop calls `notify`.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use super::control::Cancel;
use super::loaded::not_loaded;
use crate::device::Written;
use crate::error::{Error, Result};
use crate::plan::{LoadPlan, Placement};
use crate::tensor::Tensor;

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

    /// Waits until the bytes of that tensor are there, or the load has ended.
    pub(super) fn wait(&self, name: &str) -> Result<Tensor> {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(tensor) = self.tensor(name)? {
                return Ok(tensor);
            }
            if *ended {
                return Err(Error::Cancelled);
            }
            ended = self.changed.wait(ended).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// How many names the tensors have.
    pub(super) fn names(&self) -> usize {
        self.names.len()
    }

    fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(super) fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let (name, &index) =
            self.names.get_key_value(name).ok_or_else(|| not_loaded(name, self.names.keys().map(Arc::as_ref)))?;
        let placement = self.placements.get(index).ok_or(Error::Poisoned { what: "the index of names" })?;
        let view = self.written.get().and_then(|written| written.view(placement.range()));
        let shape = || Arc::clone(&placement.shape);
        Ok(view.map(|view| Tensor::new(Arc::clone(name), placement.dtype, shape(), view)))
    }
}

/// Tells those who wait that the load has ended, by whatever way it ends.
pub(super) struct Ending<'a>(pub(super) &'a Readiness);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
