//! stub
use super::{Checkpoint, TensorInfo};
use crate::error::Result;
use crate::extent::Strided;
use std::sync::Arc;
/// stub
#[derive(Debug, Clone, Default)]
pub struct Selection {}
/// stub
#[derive(Debug, Clone)]
pub struct Slice {}
/// stub
#[derive(Debug, Clone)]
pub struct Selected {
    /// n
    pub name: Arc<str>,
    /// n
    pub tensor: usize,
    /// n
    pub slice: Option<Slice>,
    /// n
    pub shape: Vec<u64>,
    /// n
    pub aliases: Vec<Arc<str>>,
}
impl Checkpoint {
    /// stub
    pub fn select(&self, _selection: &Selection) -> Result<Vec<Selected>> {
        Ok(Vec::new())
    }
    /// stub
    pub fn open_with(_path: impl AsRef<std::path::Path>, _options: &OpenOptions) -> Result<Checkpoint> {
        Err(crate::Error::Cancelled)
    }
}
impl TensorInfo {
    /// stub
    pub fn runs(&self, _slice: Option<&Slice>) -> Vec<Strided> {
        Vec::new()
    }
}
/// stub
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {}
