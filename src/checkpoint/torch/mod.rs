//! PyTorch's own files as checkpoints: what the crate `vramp-pickle` read of them, in the words of this one.
//!
//! It parses nothing and executes nothing. A load refuses for the first kind of finding that blocks, all of its kind named; [`audit`]
//! lists all of them. No other file is ever opened than the one it was given, a distributed checkpoint's own files apart.

pub mod audit;
pub(crate) mod dcp;
mod opened;
pub(crate) mod ranks;
mod refusal;
mod sums;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;

use vramp_pickle::bytes::Bytes;
use vramp_pickle::finding::Finding;
use vramp_pickle::read::{self, Refusal, Refused, Wanted};
use vramp_pickle::recipe::Recipe;
use vramp_pickle::{Aside, CutFound, Tensor};
pub(crate) use vramp_pickle::{BEGINNING, Kind, hides_archive, is_safetensors, recognise};
pub use vramp_pickle::{bytes, zip};

pub(crate) use self::opened::Opened;
pub use self::sums::Sums;
use super::options::OpenOptions;
use super::safetensors::RESERVED;
use super::{Checkpoint, Format, Loss, Shard, Skipped, TensorData, TensorInfo};
use crate::dtype::{StoredDtype, dims};
use crate::error::{Error, Result};
use crate::extent::{Extent, ShardIndex};
use crate::fault::{Fault, Listed, quoted};
use crate::setting::Setting;
use crate::storage::Version;

/// The fault of a file that ends as an archive does and begins as something else.
pub(crate) fn hidden_archive() -> Fault {
    let finding = vramp_pickle::hidden_archive();
    Fault::Refused { list: std::iter::once(finding.to_string()).collect(), advice: String::new() }
}

/// A file of PyTorch as a checkpoint.
pub(crate) fn open(path: &Path, file: &Opened, kind: Kind, options: &OpenOptions) -> Result<Checkpoint> {
    let reader = Reader { path, options, rank: None };
    let (part, format) = reader.part(file, kind, 0)?;
    Ok(reader.checkpoint(part, file.version(), format))
}

/// What one file gave.
pub(crate) struct Part {
    pub(crate) tensors: Vec<TensorInfo>,
    pub(crate) recipe: Recipe,
    /// Names that lie over the same storage.
    pub(crate) shared: Vec<Vec<Arc<str>>>,
    pub(crate) skipped: Vec<Skipped>,
    pub(crate) warnings: Vec<String>,
    /// Tensors that are cut over ranks; empty unless it was read as one rank's file.
    pub(crate) cut: Vec<CutFound>,
    /// CRC-32 of tensors that are the whole of a storage, where it is stated and the file was read as one rank's.
    pub(crate) sums: HashMap<String, u32>,
}

/// Reads one file.
pub(crate) struct Reader<'a> {
    pub(crate) path: &'a Path,
    pub(crate) options: &'a OpenOptions,
    /// The rank whose file it is, where the files of all ranks are put together.
    pub(crate) rank: Option<u64>,
}

impl Reader<'_> {
    /// The tensors of a whole file. They lie in the shard of that number, and the one after it.
    pub(crate) fn part(&self, bytes: &dyn Bytes, kind: Kind, number: ShardIndex) -> Result<(Part, Format)> {
        let key = self.options.key.as_deref();
        let part = read::read(bytes, kind, self.wanted(key)).map_err(|why| self.refusal(why, key))?;
        let format = if kind == Kind::Legacy { Format::TorchLegacy } else { Format::TorchZip };
        Ok((self.translated(part, number)?, format))
    }

    /// The archive without a key that begins at byte `start` of the file.
    pub(crate) fn zip(&self, bytes: &dyn Bytes, start: u64, number: ShardIndex) -> Result<Part> {
        let part = read::zip(bytes, start, self.wanted(None)).map_err(|why| self.refusal(why, None))?;
        self.translated(part, number)
    }

    fn wanted<'k>(&self, key: Option<&'k str>) -> Wanted<'k> {
        Wanted { key, skip_unknown: self.options.skip_unknown, rank: self.rank }
    }

    fn translated(&self, part: read::Part, number: ShardIndex) -> Result<Part> {
        let read::Part { assembled, skipped, warnings, cut, sums } = part;
        let tensors: Vec<TensorInfo> = assembled.tensors.into_iter().map(|tensor| translated(tensor, number)).collect();
        self.demand_free_names(&tensors)?;
        let skipped = skipped.into_iter().map(Skipped::from).collect();
        Ok(Part { tensors, recipe: assembled.recipe, shared: assembled.shared, skipped, warnings, cut, sums })
    }

    fn refusal(&self, why: Refusal, key: Option<&str>) -> Error {
        let key = key.unwrap_or_default();
        match why {
            Refusal::Io(error) => self.io(error),
            Refusal::Unsupported(what) => Error::Unsupported { path: self.path.to_owned(), tensor: None, what },
            Refusal::Refused(refused) => self.refused(&refused),
            Refusal::NoKey(keys) => {
                let keys: Listed = keys.iter().map(|key| quoted(key)).collect();
                let hint = (!keys.is_empty()).then(|| format!("the keys at the top are {keys}"));
                Error::Request { what: format!("{}: no key {key:?} in its object", self.path.display()), hint }
            }
            Refusal::SeveralKeys(count) => Error::Request {
                what: format!("{}: {count} paths are called {key:?}", self.path.display()),
                hint: Some(format!(
                    "without {} all tensors are there; choose among them with {}",
                    Setting::Key,
                    Setting::Include
                )),
            },
            other => Error::malformed(self.path, Fault::Other(format!("not read: {other:?}"))),
        }
    }

    /// safetensors keeps a name for itself, which no tensor may have under any other format either: it could never be saved.
    pub(crate) fn demand_free_names(&self, tensors: &[TensorInfo]) -> Result<()> {
        match tensors.iter().find(|tensor| *tensor.name == *RESERVED) {
            None => Ok(()),
            Some(_) => {
                let what = format!("a tensor called {RESERVED:?}: safetensors keeps that name for itself");
                let findings = vec![Finding::malformed("reserved-name", what)];
                Err(self.refused(&Refused { findings, ..Refused::default() }))
            }
        }
    }

    fn io(&self, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                Error::Changed { path: self.path.to_owned(), what: "it became shorter".into() }
            }
            _ => Error::io("read", self.path, error),
        }
    }

    fn checkpoint(&self, part: Part, version: &Version, format: Format) -> Checkpoint {
        let Part { tensors, recipe, shared, skipped, warnings, .. } = part;
        let file = Shard { path: self.path.to_owned(), bytes: version.len(), version: version.clone(), derived: None };
        let made = (!recipe.is_empty()).then(|| file.made_by(recipe));
        let shards = std::iter::once(file).chain(made).collect();
        let (path, metadata) = (self.path.to_owned(), BTreeMap::new());
        let storage = Arc::clone(&self.options.storage);
        Checkpoint { path, shards, tensors, metadata, warnings, format, skipped, shared, storage }
    }
}

/// What is made lies in the shard after that of the file.
fn translated(tensor: Tensor, number: ShardIndex) -> TensorInfo {
    let Tensor { name, element, shape, made, offset, len } = tensor;
    let extent = Extent { shard: number + ShardIndex::from(made), offset, len };
    let dtype = StoredDtype::from_safetensors(element);
    TensorInfo { name, dtype, shape: dims(&shape).into(), data: TensorData::Whole(extent) }
}

impl From<Aside> for Skipped {
    fn from(aside: Aside) -> Skipped {
        let is_whole_model = aside.is_whole_model();
        let loss = match aside.loss {
            vramp_pickle::Loss::None => Loss::None,
            vramp_pickle::Loss::OfConvert(word) => Loss::OfConvert(word),
            vramp_pickle::Loss::OfLoad(word) => Loss::OfLoad(word),
        };
        Skipped { is_whole_model, ..Skipped::new(aside.name, aside.why).losing(aside.tensors, loss) }
    }
}

impl Shard {
    /// The shard that is made of this one.
    pub(crate) fn made_by(&self, recipe: Recipe) -> Shard {
        Shard { bytes: recipe.len(), derived: Some(Arc::new(recipe)), ..self.clone() }
    }
}
