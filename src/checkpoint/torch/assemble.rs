//! Dense tensors over storages become tensors of a checkpoint: as they lie in the file where that can be loaded as it is, else as
//! parts of a shard that is made.
//!
//! Tensors over the very same elements get the same extent, in the file or in what is made: a plan gives them one place. It opens
//! nothing and reads nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::dense::Dense;
use super::kinds::Numbers;
use super::objects::Found;
use crate::checkpoint::derived::{Change, Negate, Piece, Recipe, TorchStorage};
use crate::checkpoint::finding::Finding;
use crate::checkpoint::{TensorData, TensorInfo};
use crate::dtype::{Dtype, StoredDtype};
use crate::extent::{Extent, ShardIndex};

/// What may be made of a file beyond a multiple of its own size, in bytes, and that multiple.
const MOST_MADE: u64 = 64 << 20;
const MOST_TIMES: u64 = 16;

/// The tensors of one file, on their way into a checkpoint.
pub(crate) struct Assembly {
    /// The shard that is the file; the made one has the next number.
    shard: ShardIndex,
    file_bytes: u64,
    swap: bool,
    waiting: Vec<Waiting>,
}

/// A tensor whose place is still to be decided.
struct Waiting {
    found: Found,
    storage: TorchStorage,
    /// First byte of the first element, in the inflated storage.
    first: u64,
}

/// What came of it.
#[derive(Default)]
pub(crate) struct Assembled {
    pub(crate) tensors: Vec<TensorInfo>,
    pub(crate) recipe: Recipe,
    /// Names that lie over the same storage.
    pub(crate) shared: Vec<Vec<Arc<str>>>,
    pub(crate) findings: Vec<Finding>,
}

impl Assembly {
    pub(crate) fn new(shard: ShardIndex, file_bytes: u64) -> Assembly {
        Assembly { shard, file_bytes, swap: false, waiting: Vec::new() }
    }

    /// Whether numbers have their bytes in the other order.
    pub(crate) fn swapped(self, swap: bool) -> Assembly {
        Assembly { swap, ..self }
    }

    /// Adds a tensor over a storage; `view` is the part of the storage that is meant, in bytes.
    pub(crate) fn add(&mut self, found: Found, storage: TorchStorage, view: u64) {
        let first = view.saturating_add(found.dense.offset.saturating_mul(found.dense.kind.bytes));
        self.waiting.push(Waiting { found, storage, first });
    }

    /// Decides where each tensor lies.
    pub(crate) fn finish(self) -> Assembled {
        let mut out = Assembled::default();
        self.refuse_collisions(&mut out.findings);
        self.refuse_excess(&mut out.findings);
        if !out.findings.is_empty() {
            return out;
        }
        let mut making = Making::default();
        let mut groups: BTreeMap<(u64, u64), Vec<Arc<str>>> = BTreeMap::new();
        for waiting in &self.waiting {
            let name: Arc<str> = waiting.found.name.as_str().into();
            let (len, storage) = (waiting.bytes(), &waiting.storage);
            let extent = match len {
                0 => Extent { shard: self.shard, offset: storage.offset, len },
                _ if self.is_plain(waiting) => {
                    Extent { shard: self.shard, offset: storage.offset.saturating_add(waiting.first), len }
                }
                _ => Extent { shard: self.shard + 1, offset: making.place(self.piece(waiting), *storage), len },
            };
            if len > 0 {
                groups.entry((storage.offset, storage.len)).or_default().push(Arc::clone(&name));
            }
            let dense = &waiting.found.dense;
            let dtype =
                dense.kind.dtype.map_or_else(|| StoredDtype::Unknown(dense.kind.name.into()), StoredDtype::Known);
            let shape = waiting.shape().into();
            out.tensors.push(TensorInfo { name, dtype, shape, data: TensorData::Whole(extent) });
        }
        out.recipe = making.recipe;
        out.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        out.shared = groups.into_values().filter(|group| group.len() > 1).collect();
        out
    }

    /// Two paths with the same name: neither may be lost.
    fn refuse_collisions(&self, findings: &mut Vec<Finding>) {
        let mut seen: HashMap<&str, &str> = HashMap::new();
        for Waiting { found, .. } in &self.waiting {
            if let Some(first) = seen.insert(&found.name, &found.typed) {
                let what = format!("{first} and {} would both be called {:?}", found.typed, found.name);
                findings.push(Finding::malformed("typed-path", what));
            }
        }
    }

    /// A few bytes may not become an absurd number of them.
    fn refuse_excess(&self, findings: &mut Vec<Finding>) {
        let storages: HashSet<TorchStorage> = self.waiting.iter().map(|waiting| waiting.storage).collect();
        let inflated: u64 = storages.iter().fold(0, |sum, storage| sum.saturating_add(storage.len));
        let most = self.file_bytes.max(inflated).saturating_mul(MOST_TIMES).saturating_add(MOST_MADE);
        let mut sum = 0u64;
        for waiting in &self.waiting {
            sum = sum.saturating_add(waiting.bytes());
            if sum > most {
                let (name, bytes) = (&waiting.found.name, waiting.bytes());
                let what = format!(
                    "tensor {name:?}: its {bytes} bytes, repeated from {} in the file, make {sum} in all; at most {most} are made",
                    waiting.storage.len
                );
                return findings.push(Finding::malformed("materialise-limit", what));
            }
        }
    }

    fn is_plain(&self, waiting: &Waiting) -> bool {
        let dense = &waiting.found.dense;
        !waiting.storage.deflated && dense.is_contiguous() && self.change(dense) == Change::default()
    }

    fn change(&self, dense: &Dense) -> Change {
        let width = dense.kind.number_bytes();
        let negate = match dense.kind.numbers {
            Numbers::Complex => match (dense.neg, dense.conj) {
                (false, false) => Negate::Nothing,
                (false, true) => Negate::Imaginary(width),
                (true, false) => Negate::Floats(width),
                (true, true) => Negate::Real(width),
            },
            _ if !dense.neg => Negate::Nothing,
            Numbers::Float => Negate::Floats(width),
            Numbers::Integer => Negate::Integers(width),
        };
        Change { swap: if self.swap && width > 1 { width } else { 0 }, negate }
    }

    /// Its place, and the number of its storage, are still to be set.
    fn piece(&self, waiting: &Waiting) -> Piece {
        let dense = &waiting.found.dense;
        Piece {
            at: 0,
            len: waiting.bytes(),
            storage: 0,
            first: waiting.first,
            dims: dense.dims(),
            element: dense.kind.bytes,
            change: self.change(dense),
        }
    }
}

/// A recipe in the making: each storage once, and each piece.
#[derive(Default)]
struct Making {
    recipe: Recipe,
    storages: HashMap<TorchStorage, usize>,
    places: HashMap<Piece, u64>,
}

impl Making {
    /// Where the piece begins in the image.
    fn place(&mut self, piece: Piece, storage: TorchStorage) -> u64 {
        let recipe = &mut self.recipe;
        let storage = *self.storages.entry(storage).or_insert_with(|| recipe.push_storage(storage));
        let piece = Piece { storage, ..piece };
        *self.places.entry(piece.clone()).or_insert_with(|| recipe.add(piece))
    }
}

impl Waiting {
    fn bytes(&self) -> u64 {
        self.found.dense.elements().saturating_mul(self.found.dense.kind.bytes)
    }

    /// The shape in safetensors' words: PyTorch counts a byte of two F4 as one element.
    fn shape(&self) -> Vec<u64> {
        let mut shape = self.found.dense.shape.clone();
        if self.found.dense.kind.dtype == Some(Dtype::F4) {
            match shape.last_mut() {
                Some(last) => *last = last.saturating_mul(2),
                None => shape.push(2),
            }
        }
        shape
    }
}
