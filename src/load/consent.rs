//! Whether the device reads files itself, and of which file systems that was found worth while. It makes no trial.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::{Device, DirectReads};
use crate::storage::Fallbacks;

/// What the word is in the list of fallbacks.
pub(super) const WHAT: &str = "gpu-direct";

/// What the device and the file systems have said so far.
#[derive(Default)]
pub(super) struct Consent {
    reads: OnceCell<Option<Arc<dyn DirectReads>>>,
    /// By the device number of the file system: whether its files are read so.
    file_systems: RefCell<BTreeMap<u64, bool>>,
}

impl Consent {
    /// The device's own way to read files. That there is none is noted, unless nobody asked for it (`native_only`).
    pub(super) fn reads(
        &self,
        device: &dyn Device,
        native_only: bool,
        fallbacks: &Fallbacks,
    ) -> Option<Arc<dyn DirectReads>> {
        if let Some(known) = self.reads.get() {
            return known.clone();
        }
        let reads = match device.direct_reads(native_only) {
            Some(Ok(reads)) => Some(reads),
            Some(Err(why)) => {
                fallbacks.note(WHAT, format!("{why}; read by way of the host"));
                None
            }
            None if native_only => return None,
            None => {
                let why = format!("device {} does not read files itself; read by way of the host", device.name());
                fallbacks.note(WHAT, why);
                None
            }
        };
        if let Some(detour) = reads.as_ref().and_then(|reads| reads.detour()) {
            fallbacks.note(WHAT, detour);
        }
        self.reads.get_or_init(|| reads).clone()
    }

    pub(super) fn known(&self, file_system: u64) -> Option<bool> {
        self.file_systems.borrow().get(&file_system).copied()
    }

    pub(super) fn settle(&self, file_system: u64, answer: bool) -> bool {
        self.file_systems.borrow_mut().insert(file_system, answer);
        answer
    }
}
