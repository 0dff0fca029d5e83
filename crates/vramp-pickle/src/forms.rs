//! Which functions and classes of PyTorch make a tensor, and a dense tensor as a pickle describes it. Plain data and tables of names.

use crate::declared::Declared;
use crate::finding::{Checked, fault};
use crate::kinds::Kind;
use crate::pickle::Id;

/// A dense tensor: numbers of elements, unless they say bytes.
#[derive(Debug, Clone)]
pub(crate) struct Dense {
    /// The value that is its storage.
    pub(crate) storage: Id,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    pub(crate) offset: u64,
    pub(crate) conj: bool,
    pub(crate) neg: bool,
}

/// What a function of PyTorch makes a tensor of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rebuilt {
    /// A storage and numbers.
    Dense(Form),
    /// The tensor that is its first argument.
    Wrapped,
    /// A function, a class, arguments and a state.
    Typed,
    /// Something that is named and not converted.
    Other(Other),
}

/// A tensor that is not converted: what it is in one word, and why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) word: &'static str,
    pub(crate) why: &'static str,
}

const fn other(word: &'static str, why: &'static str) -> Rebuilt {
    Rebuilt::Other(Other { word, why })
}

/// Tensors of which a file holds only what one rank has.
const DTENSOR: Other =
    Other { word: "DTensor", why: "a distributed tensor (DTensor): this file holds one rank's part" };

/// A class of its own, whatever it does with what it is made of.
pub(crate) const SUBCLASS: Other = Other { word: "tensor subclass instance", why: "a tensor of the subclass" };

const SHARDED: Other =
    Other { word: "ShardedTensor", why: "a sharded tensor (ShardedTensor): this file holds one rank's part" };

/// What a function makes, if that is a tensor.
pub(crate) fn rebuilt(module: &str, name: &str) -> Option<Rebuilt> {
    Some(match (module, name) {
        ("torch._utils", "_rebuild_tensor") => Rebuilt::Dense(Form::V1),
        ("torch._utils", "_rebuild_tensor_v2") => Rebuilt::Dense(Form::V2),
        ("torch._utils", "_rebuild_tensor_v3") => Rebuilt::Dense(Form::V3),
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Rebuilt::Wrapped,
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor") => Rebuilt::Wrapped,
        ("torch.nn.parameter", "Parameter" | "Buffer") => Rebuilt::Wrapped,
        ("torch._tensor" | "torch.tensor", "_rebuild_from_type_v2" | "_rebuild_from_type") => Rebuilt::Typed,
        ("torch._utils", "_rebuild_qtensor") => other("quantised tensor", "a quantised tensor"),
        ("torch._utils", "_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor") => {
            other("sparse tensor", "a sparse tensor")
        }
        ("torch._utils", "_rebuild_meta_tensor_no_storage") => {
            other("meta tensor", "a meta tensor: it has a shape and no data")
        }
        ("torch._utils", "_rebuild_nested_tensor") => other("nested tensor", "a nested tensor"),
        ("torch.nested._internal.nested_tensor", "_rebuild_njt") => other("nested tensor", "a jagged nested tensor"),
        ("torch._utils", "_rebuild_wrapper_subclass") => {
            other("tensor subclass instance", "a tensor of a wrapper subclass")
        }
        ("torch._utils", "_rebuild_device_tensor_from_numpy" | "_rebuild_xla_tensor") => {
            other("device tensor", "a tensor that a device wrote by way of NumPy")
        }
        (module, name) => return in_ranks(module, name).map(Rebuilt::Other),
    })
}

/// What an instance of a class of tensors is, unless it is a plain one.
pub(crate) fn subclass(module: &str, name: &str) -> Option<Other> {
    match (module, name) {
        ("torch" | "torch._tensor", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer") => None,
        _ => Some(in_ranks(module, name).unwrap_or(SUBCLASS)),
    }
}

/// The tensor of such a class, of which a file holds one rank's part.
fn in_ranks(module: &str, name: &str) -> Option<Other> {
    match name {
        "DTensor" if module.starts_with("torch.") => Some(DTENSOR),
        "ShardedTensor" if module.starts_with("torch.") => Some(SHARDED),
        _ => None,
    }
}

/// The generations of the function that makes a dense tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    V1,
    V2,
    V3,
}

impl Form {
    /// Arguments without the last, optional one, and with it.
    pub(crate) fn arguments(self) -> (usize, usize) {
        match self {
            Form::V1 => (4, 4),
            Form::V2 => (6, 7),
            Form::V3 => (7, 8),
        }
    }
}

impl Dense {
    /// Number of elements.
    pub(crate) fn elements(&self) -> u64 {
        if self.shape.contains(&0) { 0 } else { self.shape.iter().product() }
    }

    pub(crate) fn check(&self, storage: &Declared) -> Checked<()> {
        if self.shape.len() != self.strides.len() {
            let (dims, strides) = (self.shape.len(), self.strides.len());
            return fault("argument-shape", format!("{dims} dimensions and {strides} strides"));
        }
        let elements = self.shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
        let empty = self.shape.contains(&0);
        if !empty && elements.and_then(|elements| elements.checked_mul(self.kind.bytes)).is_none() {
            return fault("overflow", format!("its shape {:?} has more than 2^64 bytes", self.shape));
        }
        if empty {
            return Ok(());
        }
        let reach = |(dim, stride): (&u64, &u64)| (dim - 1).checked_mul(*stride);
        let last =
            self.shape.iter().zip(&self.strides).map(reach).try_fold(self.offset, |sum, reach| sum.checked_add(reach?));
        let end = last.and_then(|last| last.checked_add(1)?.checked_mul(self.kind.bytes));
        let has = storage.view.map_or(storage.count, |(_, count)| count).saturating_mul(storage.kind.bytes);
        match end {
            Some(end) if end <= has => Ok(()),
            Some(end) => fault("bounds", format!("it ends at byte {end} of a storage of {has}")),
            None => fault("overflow", "its last element lies beyond 64 bits"),
        }
    }

    /// Dimensions as (elements, bytes from one to the next), with those that are one run joined; empty for a scalar.
    pub(crate) fn dims(&self) -> Vec<(u64, u64)> {
        let mut dims: Vec<(u64, u64)> = Vec::new();
        for (dim, stride) in self.shape.iter().zip(&self.strides).filter(|(dim, _)| **dim != 1) {
            let stride = stride.saturating_mul(self.kind.bytes);
            match dims.last_mut() {
                Some(outer) if outer.1 == stride.saturating_mul(*dim) => {
                    *outer = (outer.0.saturating_mul(*dim), stride)
                }
                _ => dims.push((*dim, stride)),
            }
        }
        dims
    }

    /// Whether the elements lie row-major without a gap.
    pub(crate) fn is_contiguous(&self) -> bool {
        match self.dims().as_slice() {
            [] => true,
            [(_, stride)] => *stride == self.kind.bytes,
            _ => self.elements() == 0,
        }
    }
}
