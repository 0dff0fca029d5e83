//! Files of the machine's own file systems: positional reads, buffered and direct.

use std::path::Path;
use std::sync::Arc;

use super::{Fallbacks, OpenFile, Storage};
use crate::error::Result;

/// The machine's own file systems.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalStorage;

impl Storage for LocalStorage {
    fn open(&self, path: &Path, _fallbacks: &Fallbacks) -> Result<Arc<dyn OpenFile>> {
        Err(crate::Error::io("open", path, std::io::ErrorKind::Unsupported.into()))
    }
}
