//! Where the bytes of dense tensors over storages lie: in the file where they can be loaded as they are, else in an image that is
//! made by a recipe.
//!
//! Tensors over the very same elements get the same place, in the file or in what is made: a plan gives them one place. It opens
//! nothing and reads nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::finding::Finding;
use crate::forms::Dense;
use crate::kinds::Numbers;
use crate::objects::Found;
use crate::recipe::{Change, Negate, Piece, Recipe, Storage};

/// What may be made of a file beyond a multiple of its own size, in bytes, and that multiple.
const MOST_MADE: u64 = 64 << 20;
const MOST_TIMES: u64 = 16;

/// The tensors of one file, on their way into a checkpoint.
pub(crate) struct Assembly {
    file_bytes: u64,
    swap: bool,
    waiting: Vec<Waiting>,
}

/// A tensor whose place is still to be decided.
struct Waiting {
    found: Found,
    storage: Storage,
    /// First byte of the first element, in the inflated storage.
    first: u64,
}

/// A tensor, and where its bytes lie row-major and little-endian.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The keys that lead to it, joined by full stops.
    pub name: Arc<str>,
    /// Its element type, as safetensors calls it (`BF16`); PyTorch's name where safetensors lacks it.
    pub element: &'static str,
    /// Elements along each dimension, as safetensors counts them.
    pub shape: Vec<u64>,
    /// Whether its bytes lie in what the recipe makes; if not, in the file.
    pub made: bool,
    /// Its first byte there.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The tensors of one file.
#[derive(Debug, Clone, Default)]
pub struct Assembled {
    /// By name.
    pub tensors: Vec<Tensor>,
    /// How the bytes are made of those that do not lie in the file.
    pub recipe: Recipe,
    /// Names that lie over the same storage.
    pub shared: Vec<Vec<Arc<str>>>,
    /// Why there is no tensor.
    pub(crate) findings: Vec<Finding>,
}

impl Assembly {
    pub(crate) fn new(file_bytes: u64) -> Assembly {
        Assembly { file_bytes, swap: false, waiting: Vec::new() }
    }

    /// Whether numbers have their bytes in the other order.
    pub(crate) fn swapped(self, swap: bool) -> Assembly {
        Assembly { swap, ..self }
    }

    /// Adds a tensor over a storage; `view` is the part of the storage that is meant, in bytes.
    pub(crate) fn add(&mut self, found: Found, storage: Storage, view: u64) {
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
            let (made, offset) = match len {
                0 => (false, storage.offset),
                _ if self.is_plain(waiting) => (false, storage.offset.saturating_add(waiting.first)),
                _ => (true, making.place(self.piece(waiting), *storage)),
            };
            if len > 0 {
                groups.entry((storage.offset, storage.len)).or_default().push(Arc::clone(&name));
            }
            let dense = &waiting.found.dense;
            let element = dense.kind.dtype.unwrap_or(dense.kind.name);
            out.tensors.push(Tensor { name, element, shape: waiting.shape(), made, offset, len });
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
        let storages: HashSet<Storage> = self.waiting.iter().map(|waiting| waiting.storage).collect();
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
    storages: HashMap<Storage, usize>,
    places: HashMap<Piece, u64>,
}

impl Making {
    /// Where the piece begins in the image.
    fn place(&mut self, piece: Piece, storage: Storage) -> u64 {
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
        if self.found.dense.kind.dtype == Some("F4") {
            match shape.last_mut() {
                Some(last) => *last = last.saturating_mul(2),
                None => shape.push(2),
            }
        }
        shape
    }
}
