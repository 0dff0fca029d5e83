//! Ways that were not taken, and why, collected for the report. It decides nothing.

use std::sync::{Arc, Mutex, PoisonError};

/// A way that was not taken, and why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Fallback {
    /// What was tried: `O_DIRECT`, `io_uring`, `cachestat`, ….
    pub what: String,
    /// Why it was not used, in the operating system's words, with the file or mount where that matters.
    pub why: String,
}

/// The fallbacks of one load, each kind once. Cloning shares the list.
#[derive(Debug, Clone, Default)]
pub struct Fallbacks {
    list: Arc<Mutex<Vec<Fallback>>>,
}

impl Fallbacks {
    /// Notes a fallback, unless the same one is noted already.
    pub fn note(&self, what: impl Into<String>, why: impl Into<String>) {
        let fallback = Fallback { what: what.into(), why: why.into() };
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if !list.contains(&fallback) {
            list.push(fallback);
        }
    }

    /// What was noted so far.
    pub fn list(&self) -> Vec<Fallback> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
