//! A plan together with the checkpoint that it loads. It opens nothing.

use std::sync::Arc;

use crate::checkpoint::Checkpoint;
use crate::plan::LoadPlan;
use crate::report::Cache;

/// A plan, the checkpoint that it loads, and what was learned while making it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Prepared {
    /// What is loaded. A plan fits no other checkpoint, so it keeps its own.
    pub(super) checkpoint: Arc<Checkpoint>,
    /// The plan.
    pub plan: LoadPlan,
    /// Warnings about the conversion.
    pub warnings: Vec<String>,
    /// What of the files was in the page cache.
    pub cache: Cache,
    /// The file system of the first file.
    pub file_system: String,
    /// Its device number, as `259:1`.
    pub volume: String,
    /// Seconds that opening the checkpoint took; the caller may set it, so that the report counts it.
    pub open_seconds: f64,
    /// Seconds that selecting and planning took.
    pub plan_seconds: f64,
}

impl Prepared {
    /// The checkpoint that is loaded.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }
}
