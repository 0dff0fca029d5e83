//! A tensor to be saved: what it is, and where its elements are. It copies nothing.

use super::layout::Outline;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// A tensor to be saved.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Input<'a> {
    /// What it is.
    pub outline: Outline,
    /// Where its elements are.
    pub bytes: Bytes<'a>,
}

impl<'a> Input<'a> {
    /// A tensor to be saved, and its elements: as many bytes as type and shape say.
    pub fn new(outline: Outline, bytes: Bytes<'a>) -> Input<'a> {
        Input { outline, bytes }
    }
}

/// The elements of a tensor to be saved: row-major, little-endian.
#[derive(Debug, Clone, Copy)]
pub enum Bytes<'a> {
    /// In host memory.
    Host(&'a [u8]),
    /// Wherever a loaded tensor is.
    Tensor(&'a Tensor),
}

impl<'a> From<&'a Tensor> for Input<'a> {
    fn from(tensor: &'a Tensor) -> Input<'a> {
        let (name, dtype, shape) = (tensor.name().into(), tensor.dtype(), tensor.shape().into());
        Input { outline: Outline { name, dtype, shape }, bytes: Bytes::Tensor(tensor) }
    }
}

impl Bytes<'_> {
    fn len(&self) -> u64 {
        match self {
            Bytes::Host(bytes) => bytes.len() as u64,
            Bytes::Tensor(tensor) => tensor.byte_len(),
        }
    }
}

pub(super) fn demand_lengths(tensors: &[Input<'_>]) -> Result<()> {
    for Input { outline, bytes } in tensors {
        let (needed, found) = (outline.bytes().unwrap_or(0), bytes.len());
        if needed != found {
            let Outline { name, dtype, shape } = outline;
            let what =
                format!("tensor {name:?} of shape {shape:?} and {dtype} takes {needed} bytes, and {found} were given");
            return Err(Error::Request { what, hint: None });
        }
    }
    Ok(())
}
