//! An opened checkpoint as data: shards, tensors, where each tensor's bytes lie, and what was passed over. It opens nothing.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::derived::Recipe;
use super::nearest::no_tensor;
use super::skipped::Skipped;
use crate::dtype::StoredDtype;
use crate::extent::{Extent, ShardIndex};
use crate::fault::counted;
use crate::storage::{Storage, Version};

/// One weight file.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Shard {
    /// Path to open.
    pub path: PathBuf,
    /// Length in bytes.
    pub bytes: u64,
    /// What the file was when its header was read; a load refuses a file that is no longer the same.
    pub version: Version,
    /// How the shard's bytes are made of the file's, where they do not lie in it as they are loaded; `bytes` counts what is made.
    pub derived: Option<Arc<Recipe>>,
}

/// The format of a checkpoint's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Format {
    /// safetensors.
    #[default]
    Safetensors,
    /// Zip archives of `torch.save`.
    TorchZip,
    /// Stacks of pickles, as `torch.save` wrote before 1.6.
    TorchLegacy,
    /// A folder of PyTorch's distributed checkpoint.
    TorchDcp,
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Name, exactly as stored.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: StoredDtype,
    /// Elements along each dimension, outermost first; empty for a scalar.
    pub shape: Arc<[usize]>,
    /// Where the bytes lie.
    pub data: TensorData,
}

/// Where the bytes of a tensor lie. Two tensors of a PyTorch file may lie over the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum TensorData {
    /// In one piece, row-major.
    Whole(Extent),
    /// Cut over several places (PyTorch DCP): boxes that cover the tensor exactly once.
    Parts(Vec<Part>),
}

/// A box of a tensor that lies row-major in one extent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Part {
    /// The bytes.
    pub extent: Extent,
    /// First element along each dimension.
    pub start: Vec<usize>,
    /// Elements along each dimension.
    pub shape: Vec<usize>,
}

/// An opened checkpoint: headers only.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) shards: Vec<Shard>,
    pub(crate) tensors: Vec<TensorInfo>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) warnings: Vec<String>,
    pub(crate) format: Format,
    pub(crate) skipped: Vec<Skipped>,
    pub(crate) shared: Vec<Vec<Arc<str>>>,
    /// Where the files are.
    pub(crate) storage: Arc<dyn Storage>,
}

impl Shard {
    /// A weight file whose bytes are loaded as they lie in it.
    pub fn new(path: impl Into<PathBuf>, bytes: u64, version: Version) -> Shard {
        Shard { path: path.into(), bytes, version, derived: None }
    }
}

impl TensorInfo {
    /// A tensor of that name, element type and shape, with its bytes at `data`.
    pub fn new(
        name: impl Into<Arc<str>>,
        dtype: impl Into<StoredDtype>,
        shape: impl Into<Arc<[usize]>>,
        data: TensorData,
    ) -> TensorInfo {
        TensorInfo { name: name.into(), dtype: dtype.into(), shape: shape.into(), data }
    }

    /// Bytes of the tensor's elements.
    pub fn bytes(&self) -> u64 {
        match &self.data {
            TensorData::Whole(extent) => extent.len,
            TensorData::Parts(parts) => parts.iter().map(|part| part.extent.len).sum(),
        }
    }

    /// The first byte in that shard.
    pub fn first_offset(&self) -> u64 {
        match &self.data {
            TensorData::Whole(extent) => extent.offset,
            TensorData::Parts(parts) => parts.first().map_or(0, |part| part.extent.offset),
        }
    }

    /// The shard that holds the first byte.
    pub fn shard(&self) -> ShardIndex {
        match &self.data {
            TensorData::Whole(extent) => extent.shard,
            TensorData::Parts(parts) => parts.first().map_or(0, |part| part.extent.shard),
        }
    }
}

impl Checkpoint {
    /// The path that was opened.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Where the files are.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The weight files.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The tensors, sorted by name.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The `__metadata__` of the files, merged (the first file wins).
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Warnings: files and entries that were ignored.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The format of the files.
    pub fn format(&self) -> Format {
        self.format
    }

    /// What the files hold and was passed over: objects that are no dense tensors, unknown objects where that was allowed.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// Groups of tensors that lie over the same storage of a PyTorch file: tied weights, views of one another.
    pub fn shared(&self) -> &[Vec<Arc<str>>] {
        &self.shared
    }

    /// Further names of tensors: those that lie over the very bytes of another one, with the first name of these, and those that
    /// the metadata record. A load gives them one place.
    pub fn ties(&self) -> Vec<Tie> {
        let mut first: HashMap<&TensorData, &TensorInfo> = HashMap::new();
        let mut ties = self.recorded_ties();
        for tensor in self.tensors.iter().filter(|tensor| tensor.bytes() > 0) {
            match first.entry(&tensor.data) {
                Entry::Vacant(new) => drop(new.insert(tensor)),
                Entry::Occupied(first) => {
                    ties.push(Tie { alias: tensor.name.to_string(), target: first.get().name.to_string() });
                }
            }
        }
        ties
    }

    /// What is wrong with a checkpoint that holds no weights: no tensor, or none that has any bytes.
    pub(crate) fn emptiness(&self) -> Option<String> {
        let count = self.tensors.len();
        let (first, is_empty) = (self.tensors.first(), self.tensors.iter().all(|tensor| tensor.bytes() == 0));
        match first {
            None => {
                let others = match self.skipped.len() {
                    0 => String::new(),
                    others => format!("; {} passed over", counted(others, "other object")),
                };
                Some(format!("it holds no tensor{others}"))
            }
            Some(first) if is_empty => Some(format!(
                "none of its {} has any bytes ({:?} has the shape {:?}): it was probably saved without gathering partitioned \
                 parameters (DeepSpeed ZeRO-3); the weights are in the files of the ranks, which DeepSpeed's zero_to_fp32.py puts \
                 together",
                counted(count, "tensor"),
                first.name,
                first.shape,
            )),
            Some(_) => None,
        }
    }

    /// Bytes of all tensors, those that have several names counted once.
    pub fn total_bytes(&self) -> u64 {
        let mut seen = HashSet::new();
        let distinct = self.tensors.iter().filter(|tensor| seen.insert(&tensor.data));
        distinct.fold(0, |sum, tensor| sum.saturating_add(tensor.bytes()))
    }

    /// The tensor of that name, or which names are near.
    ///
    /// # Errors
    /// [`Error::NoTensor`](crate::Error::NoTensor).
    pub fn find(&self, name: &str) -> crate::error::Result<&TensorInfo> {
        let names = || self.tensors.iter().map(|tensor| tensor.name.as_ref());
        self.tensor(name).ok_or_else(|| no_tensor(name, "is not in the checkpoint", names()))
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let at = self.tensors.binary_search_by(|tensor| tensor.name.as_ref().cmp(name)).ok()?;
        self.tensors.get(at)
    }
}

/// A second name for a tensor: one allocation, two names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tie {
    /// The further name, as the model calls it.
    pub alias: String,
    /// The tensor it means, by its name after stripping or as stored.
    pub target: String,
}

impl Checkpoint {
    /// Names that the checkpoint itself records for stored tensors: what `safetensors.torch.save_model` writes into
    /// `__metadata__` for tensors that share memory, `{"further name": "stored name"}`.
    pub fn recorded_ties(&self) -> Vec<Tie> {
        // `format: pt` is in almost every file and is no tie, whatever a tensor may be called.
        let is_tie = |(key, value): &(&String, &String)| {
            *key != "format" && self.tensor(key).is_none() && self.tensor(value).is_some()
        };
        let tie = |(alias, target): (&String, &String)| Tie { alias: alias.clone(), target: target.clone() };
        self.metadata.iter().filter(is_tie).map(tie).collect()
    }
}
