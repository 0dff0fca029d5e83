//! What a finished load hands out: tensors by name, the report, warnings. It never waits: what it holds is complete.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checkpoint::no_tensor;
use crate::convert::Float;
use crate::device::{Arena, View, Written};
use crate::error::{Error, Overflowed, Result};
use crate::plan::LoadPlan;
use crate::report::Report;
use crate::tensor::Tensor;

/// A finished load.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Loaded {
    /// Sorted by name.
    pub(super) tensors: Vec<Tensor>,
    /// What the load did and what limited it.
    pub report: Report,
    /// Warnings about the checkpoint.
    pub warnings: Vec<String>,
    /// Tensors whose finite numbers became infinite, and how many of them, where that was allowed. `warnings` ends with them.
    pub(crate) overflows: Vec<(String, u64)>,
}

impl Loaded {
    /// The tensor of that name.
    ///
    /// # Errors
    /// [`Error::NoTensor`], with the nearest names, when the load did not have it.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        let at = self.tensors.binary_search_by(|tensor| tensor.name().cmp(name)).ok();
        let names = || self.tensors.iter().map(Tensor::name);
        at.and_then(|at| self.tensors.get(at)).ok_or_else(|| not_loaded(name, names()))
    }

    /// All tensors, aliases included, sorted by name.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The first byte of each tensor in the memory that they lie in, for [`Loader::prepare_into`](super::Loader::prepare_into).
    pub fn places(&self) -> BTreeMap<Arc<str>, u64> {
        self.tensors.iter().map(|tensor| (tensor.name().into(), tensor.view().range().start)).collect()
    }

    /// The memory that the tensors lie in, so that [`Loader::load_into`](super::Loader::load_into) can load others over them.
    ///
    /// # Errors
    /// The load as it was, where a tensor or view of it still exists elsewhere, or it has no tensor.
    pub fn into_arena(mut self) -> Result<Arena, Box<Loaded>> {
        let tensors = std::mem::take(&mut self.tensors);
        let (described, mut views): (Vec<_>, Vec<_>) = tensors.into_iter().map(Tensor::into_parts).unzip();
        View::into_arena(&mut views).ok_or_else(|| {
            let parts = described.into_iter().zip(views);
            self.tensors = parts.map(|((name, dtype, shape), view)| Tensor::new(name, dtype, shape, view)).collect();
            Box::new(self)
        })
    }
}

pub(super) fn not_loaded<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Error {
    no_tensor(name, "was not loaded", names)
}

/// The warning about tensors whose finite numbers became infinite.
pub(crate) fn overflow_warning(to: Float, overflows: &[(String, u64)]) -> Option<String> {
    let what = || format!("finite numbers became infinite in {}: {}", to.dtype(), Overflowed(overflows));
    (!overflows.is_empty()).then(what)
}

/// All tensors of a finished plan, under all their names, sorted.
pub(super) fn tensors(plan: &LoadPlan, written: &Written) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::with_capacity(plan.placements.len());
    for placement in &plan.placements {
        let view = written.view(placement.range()).ok_or(Error::Poisoned { what: "a tensor was not written whole" })?;
        for name in std::iter::once(&placement.name).chain(&placement.aliases) {
            let shape = Arc::clone(&placement.shape);
            tensors.push(Tensor::new(Arc::clone(name), placement.dtype, shape, view.clone()));
        }
    }
    tensors.sort_by(|a, b| a.name().cmp(b.name())); // nearly sorted already: the selection is
    Ok(tensors)
}
