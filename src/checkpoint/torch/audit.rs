//! Audits of files: the crate `vramp-pickle` looks at the bytes, here the file is opened, and what of its folder belongs to it.
//!
//! It reads through the port to a storage. It never executes anything.

use std::path::Path;
use std::sync::Arc;

use vramp_pickle::audit::audit_file;
pub use vramp_pickle::audit::{
    Audit, FOREIGN, Items, NamedGlobal, OfType, Verdict, WEIGHTS, audit_bytes, end_of_name, special,
};

use super::{Opened, dcp};
use crate::checkpoint::safetensors::MAX_HEADER_BYTES;
use crate::checkpoint::shard;
use crate::durable::folder_of;
use crate::error::{Error, Result};
use crate::storage::{LocalStorage, Storage};

/// What in the files of a folder is read for itself, as its `.metadata` says. None where it has no `.metadata`, or one that is
/// refused: an audit of that file says why.
pub fn items_of(folder: &Path, storage: &Arc<dyn Storage>) -> Items {
    Items::described(dcp::descriptions(folder, storage))
}

/// Audits one file, and what the `.metadata` beside it says to be an item in it.
///
/// # Errors
/// When the file is not there or cannot be read. Whatever is wrong with its content is a finding.
pub fn audit(path: impl AsRef<Path>) -> Result<Audit> {
    audit_in(path, &(Arc::new(LocalStorage) as Arc<dyn Storage>))
}

/// Audits one file of a storage.
///
/// # Errors
/// Those of [`audit`].
pub fn audit_in(path: impl AsRef<Path>, storage: &Arc<dyn Storage>) -> Result<Audit> {
    let path = path.as_ref();
    audit_with(path, &items_of(folder_of(path), storage), &**storage)
}

/// Audits one file of a folder whose items are known.
///
/// # Errors
/// Those of [`audit`].
pub fn audit_with(path: &Path, items: &Items, storage: &dyn Storage) -> Result<Audit> {
    let file = shard::open(storage, path)?;
    let header = || shard::head_of(&*file, MAX_HEADER_BYTES).err().map(|error| error.to_string());
    audit_file(path, &Opened::from(&*file), items, &header).map_err(|error| Error::io("read", path, error))
}
