//! What stops a load, and what watches it: a [`Cancel`] from another thread, an [`Observer`] on the loading thread.
//!
//! Nothing here reads, waits or decides when to look.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::trace::TraceEvent;
use crate::plan::LoadPlan;

/// A switch that stops a load: everything in flight is drained, then the load returns [`Error::Cancelled`](crate::Error::Cancelled).
#[derive(Debug, Clone, Default)]
pub struct Cancel {
    flag: Arc<AtomicBool>,
}

impl Cancel {
    /// A switch that is not thrown.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Throws the switch.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Whether it was thrown.
    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }
}

/// Observes the progress of a load. The loading thread calls it, so each call must return soon.
pub trait Observer: Send + Sync {
    /// The plan stands; nothing has been read yet.
    fn planned(&self, plan: &LoadPlan);

    /// `done` bytes of the plan's reads have arrived.
    fn advanced(&self, done: u64);

    /// Something that took time is over. Called some three times for each read, so it should do little.
    fn event(&self, _event: &TraceEvent) {}
}
