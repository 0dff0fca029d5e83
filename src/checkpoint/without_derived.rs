//! Stands in for `derived` in a build without the feature `torch`: every shard lies in its file.

use std::sync::Arc;

use crate::storage::OpenFile;

/// How the bytes of a shard are made. In this build none are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recipe {}

pub(crate) fn open(_file: Arc<dyn OpenFile>, recipe: Arc<Recipe>) -> Arc<dyn OpenFile> {
    match *recipe {}
}
