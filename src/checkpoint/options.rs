//! How a checkpoint is opened: plain data. It opens nothing.

use std::path::PathBuf;
use std::sync::Arc;

use super::safetensors::MAX_HEADER_BYTES;
use crate::storage::{LocalStorage, Storage};

/// How to open a checkpoint.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Where the files are: the machine's own file systems, unless told otherwise.
    pub storage: Arc<dyn Storage>,
    /// The longest header, and the longest index, that is read, in bytes.
    pub max_header_bytes: u64,
    /// Which copy of the weights to take from a folder that holds several: `fp16` takes `model.fp16.safetensors`.
    pub variant: Option<String>,
    /// The Hugging Face cache (`…/huggingface/hub`), to find `org/name` in; without it such names are not found.
    pub hub_cache: Option<PathBuf>,
    /// Only what lies below this key of a PyTorch file's object, named from there on: `state_dict`, or `ema.model`.
    pub key: Option<String>,
    /// Whether unknown objects of a PyTorch file are passed over, unread, instead of refusing the file. What is known to run
    /// code is refused even then.
    pub skip_unknown: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            storage: Arc::new(LocalStorage),
            max_header_bytes: MAX_HEADER_BYTES,
            variant: None,
            hub_cache: None,
            key: None,
            skip_unknown: false,
        }
    }
}

setters!(OpenOptions {
    /// Sets the storage that the files are read from.
    storage: Arc<dyn Storage>,
    /// Sets the longest header, and the longest index, that is read, in bytes.
    max_header_bytes: u64,
    /// Sets which copy of the weights to take from a folder that holds several.
    variant: Some(into String),
    /// Sets the Hugging Face cache to find `org/name` in.
    hub_cache: Some(into PathBuf),
    /// Sets the key of a PyTorch file's object to take the tensors from.
    key: Some(into String),
    /// Sets whether unknown objects of a PyTorch file are passed over.
    skip_unknown: bool,
});
