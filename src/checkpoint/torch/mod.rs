//! PyTorch's own files, read as data: zip archives and the older stacks of pickles. Nothing of them is ever executed.
//!
//! A file is recognised by its content. `zip` and `legacy` find the members, `pickled` runs the pickles (as data), `objects` says
//! what they mean (with `dense`, `numpy` and `below`; `sharded` for one rank's part of a tensor), `assemble` where each tensor's bytes lie. A load refuses for the first kind
//! of finding that blocks, all of its kind named; [`audit`] lists all of them. No other file is ever opened than the one it was
//! given.

mod archive;
mod aside;
mod assemble;
pub mod audit;
pub mod bytes;
mod calls;
mod concat;
mod contained;
pub(crate) mod dcp;
mod dense;
mod inert;
mod kinds;
mod legacy;
mod members;
mod module;
mod nested;
mod numpy;
mod objects;
mod pickled;
pub(crate) mod ranks;
mod refusal;
mod scan;
mod sharded;
mod storages;
mod sums;
mod tar;
mod unpack;
pub mod zip;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;

use self::archive::Archive;
use self::assemble::{Assembled, Assembly};
use self::bytes::{Ahead, Bytes, Opened, Window};
use self::inert::Used;
use self::legacy::Stack;
use self::objects::{CutFound, Objects};
use self::pickled::Pickled;
use self::storages::Declared;
pub use self::sums::Sums;
use super::derived::TorchStorage;
use super::finding::Finding;
use super::open::OpenOptions;
use super::pickle::Id;
use super::safetensors::RESERVED;
use super::{Checkpoint, Format, Loss, Shard, Skipped, TensorInfo};
use crate::error::{Error, Result};
use crate::fault::{Fault, Listed, counted, quoted};
use crate::setting::Setting;
use crate::storage::Version;

/// Bytes at the beginning of a file that are enough to recognise it.
pub(crate) const BEGINNING: u64 = 1024;

/// What a file is that `torch.save` may have written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Zip,
    Legacy,
    Pickle,
    Tar,
}

/// Recognises a file by its first bytes; `None` for what is none of these.
pub(crate) fn recognise(beginning: &[u8], len: u64) -> Option<Kind> {
    if is_safetensors(beginning, len) {
        return None;
    }
    match beginning {
        [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..] => Some(Kind::Zip),
        _ if legacy::is_legacy(beginning) => Some(Kind::Legacy),
        [0x80, 2..=5, opcode, ..] if *opcode != 0 => Some(Kind::Pickle),
        _ if beginning.get(257..262) == Some(b"ustar") || tar::is_header(beginning) => Some(Kind::Tar),
        _ => None,
    }
}

/// The length of a header can begin like a pickle; its brace cannot be there in one that is so long.
pub(crate) fn is_safetensors(beginning: &[u8], len: u64) -> bool {
    let header = beginning.first_chunk().map(|length| u64::from_le_bytes(*length));
    header.is_some_and(|header| header < len) && beginning.get(8) == Some(&b'{')
}

/// Whether the file ends as a zip archive does: an archive behind something else, which other programs would read.
pub(crate) fn hides_archive(bytes: &dyn Bytes) -> io::Result<bool> {
    // An end record and the longest comment behind it.
    const TAIL: u64 = 22 + 65_535;
    let len = bytes.len().min(TAIL);
    let tail = bytes::read_vec(bytes, bytes.len() - len, len)?;
    Ok(tail.windows(4).any(|window| window == b"PK\x05\x06") && !zip::read(bytes)?.entries.is_empty())
}

/// The fault of such a file.
pub(crate) fn hidden_archive() -> Fault {
    let finding = Finding::suspicious(
        "prefix-data",
        "a zip archive stands behind other data: programs see different files in it",
    );
    Fault::Refused { list: std::iter::once(finding.to_string()).collect(), advice: String::new() }
}

/// A file of PyTorch as a checkpoint.
pub(crate) fn open(path: &Path, file: &Opened, kind: Kind, options: &OpenOptions) -> Result<Checkpoint> {
    let reader = Reader { path, options, rank: None };
    let (part, format) = reader.part(&file.whole(), kind, 0)?;
    Ok(reader.checkpoint(part, file.version(), format))
}

/// What one file gave.
#[derive(Default)]
pub(crate) struct Part {
    pub(crate) assembled: Assembled,
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
    pub(crate) fn part(&self, window: &Window, kind: Kind, number: u32) -> Result<(Part, Format)> {
        let unsupported =
            |what: &str| Err(Error::Unsupported { path: self.path.to_owned(), tensor: None, what: what.to_owned() });
        match kind {
            Kind::Zip => Ok((self.zip(window, 0, number, self.options.key.as_deref())?, Format::TorchZip)),
            Kind::Legacy => Ok((self.legacy(window, number)?, Format::TorchLegacy)),
            Kind::Tar => unsupported(&tar::contents(window).map_err(|error| self.io(error))?),
            Kind::Pickle => unsupported(
                "a plain pickle, not a file of torch.save: it holds no storages that could be loaded, and it is never \
                 executed; an audit says what is in it",
            ),
        }
    }

    /// The archive that a window of a file is. Its tensors lie in the shard of that number, and the one after it.
    pub(crate) fn zip(&self, window: &Window, start: u64, number: u32, key: Option<&str>) -> Result<Part> {
        let ahead = Ahead::new(window);
        let archive = Archive::open(&ahead, start).map_err(|error| self.io(error))?;
        if archive.script {
            let what = "a TorchScript archive (torch.jit.save): it holds code beside the weights, and is not read; save the \
                        model's state_dict instead";
            return Err(Error::Unsupported { path: self.path.to_owned(), tensor: None, what: what.into() });
        }
        if let Some(other) = archive.other {
            let what = format!("{}; it is not read: save the model's state_dict instead", other.what);
            return Err(Error::Unsupported { path: self.path.to_owned(), tensor: None, what });
        }
        if let Some(what) = archive.contents() {
            return Err(Error::Unsupported { path: self.path.to_owned(), tensor: None, what });
        }
        self.demand(&archive.directory.findings)?;
        let (bytes, member) = match archive.pickle().map_err(|error| self.io(error))? {
            Ok(pickle) => pickle,
            Err(finding) => return Err(self.refused(&[finding])),
        };
        let len = bytes.len();
        let mut pickled = Pickled::run(bytes, 0, Some(&member));
        pickled.check_end(len, &member);
        let is_part = self.options.skip_unknown || key.is_some();
        self.demand_of(&pickled, pickled.ran.result, &inert::of_the_whole(&pickled, is_part))?;
        let file_bytes = window.len();
        self.tensors(&pickled, Assembly::new(number, file_bytes).swapped(archive.big_endian), key, false, |objects| {
            let (mut by_key, mut findings) = (HashMap::new(), Vec::new());
            for (key, (declared, users)) in objects.storages_by_key() {
                match archive.locate(declared, &users) {
                    Ok(storage) => drop(by_key.insert(key, storage)),
                    Err(finding) => findings.push(finding),
                }
            }
            let place = |(id, declared): (&Id, &Declared)| Some((*id, *by_key.get(declared.key.as_str())?));
            let places = objects.storages.iter().filter_map(place).collect();
            objects.findings.append(&mut findings);
            places
        })
    }

    fn legacy(&self, window: &Window, number: u32) -> Result<Part> {
        let stack = Stack::read(window).map_err(|error| self.io(error))?;
        let key = self.options.key.as_deref();
        let is_part = self.options.skip_unknown || key.is_some();
        let mut findings = stack.findings.clone();
        for pickled in &stack.pickles {
            let is_object = stack.object().is_some_and(|object| std::ptr::eq(object, pickled));
            findings.extend(if is_object { inert::of_the_whole(pickled, is_part) } else { pickled.findings.clone() });
        }
        match stack.object() {
            Some(pickled) => self.demand_of(pickled, pickled.ran.result, &findings)?,
            None => self.demand(&findings)?,
        }
        let (Some(pickled), Some(keys)) = (stack.object(), stack.keys()) else {
            return Err(self.refused(&[Finding::malformed("persistent-id", "the list of storages is no list of keys")]));
        };
        let mut failed = None;
        // Whatever `sys_info` says of the machine: PyTorch writes these storages little-endian on every one.
        let part = self.tensors(pickled, Assembly::new(number, window.len()), key, true, |objects| {
            let by_key: HashMap<&str, &Declared> =
                objects.storages.values().map(|declared| (declared.key.as_str(), declared)).collect();
            let places = match legacy::locate(window, stack.end, keys, |key| by_key.get(key).copied()) {
                Ok(Ok(places)) => places,
                Ok(Err(finding)) => {
                    objects.findings.push(finding);
                    return HashMap::new();
                }
                Err(error) => {
                    failed = Some(error);
                    return HashMap::new();
                }
            };
            let by_key = objects.storages_by_key().into_iter();
            let missing =
                by_key.filter(|(key, _)| !places.contains_key(*key)).map(|(key, (_, users))| match users.len() {
                    0 => format!("storage {key:?} is not in the file"),
                    _ => format!("storage {key:?} is not in the file, and these tensors need it: {users}"),
                });
            let missing: Vec<Finding> = missing.map(|what| Finding::malformed("record-missing", what)).collect();
            objects.findings.extend(missing);
            let place = |(id, declared): (&Id, &Declared)| Some((*id, *places.get(&declared.key)?));
            objects.storages.iter().filter_map(place).collect()
        });
        failed.map_or(part, |error| Err(self.io(error)))
    }

    /// The tensors that a pickle's object holds, `locate` saying where each storage lies: those that are used, or all, where the place
    /// of one takes the sizes of others.
    fn tensors(
        &self,
        pickled: &Pickled,
        mut assembly: Assembly,
        key: Option<&str>,
        needs_all: bool,
        locate: impl FnOnce(&mut Objects) -> HashMap<Id, TorchStorage>,
    ) -> Result<Part> {
        let Some(root) = pickled.ran.result else {
            return Err(self.refused(&[Finding::malformed("truncated", "the pickle has no result")]));
        };
        let skips = self.options.skip_unknown;
        let mut objects = Objects::new(&pickled.ran.arena);
        objects.rank = self.rank;
        let root = key.map_or(Ok(root), |key| self.subtree(&objects, root, key))?;
        if skips {
            objects.open_module(root);
        }
        // What is not used need not be right.
        let used = Used::of(&objects, root, key.is_some(), skips);
        self.demand_of(pickled, Some(root), &used.findings(&objects, pickled))?;
        objects.declare(|id| needs_all || used.reaches(id));
        objects.gather(root);
        let places = if objects.findings.is_empty() { locate(&mut objects) } else { HashMap::new() };
        self.demand(&objects.findings)?;
        let Objects { storages, tensors, aside, cut, .. } = objects;
        let mut sums = HashMap::new();
        for found in tensors {
            let id = found.dense.storage;
            let (Some(declared), Some(storage)) = (storages.get(&id), places.get(&id)) else { continue };
            let whole = found.dense.elements().checked_mul(found.dense.kind.bytes) == Some(storage.len);
            if self.rank.is_some() && whole && storage.crc != 0 {
                sums.insert(found.name.clone(), storage.crc);
            }
            let view = declared.view.map_or(0, |(first, _)| first.saturating_mul(declared.kind.bytes));
            assembly.add(found, *storage, view);
        }
        let assembled = assembly.finish();
        self.demand(&assembled.findings)?;
        self.demand_free_names(&assembled.tensors)?;
        let told: Listed = aside
            .iter()
            .filter(|aside| aside.tell)
            .map(|aside| format!("{} ({})", quoted(&aside.name), aside.why))
            .collect();
        let mut warnings = Vec::new();
        if !told.is_empty() {
            warnings.push(format!("not converted: {}: {told}", counted(told.len(), "object")));
        }
        let skipped = aside.into_iter().map(|aside| {
            let loss = if skips { Loss::None } else { aside.loss };
            Skipped::new(aside.name, aside.why).losing(aside.tensors, loss)
        });
        Ok(Part { assembled, skipped: skipped.collect(), warnings, cut, sums })
    }

    fn subtree(&self, objects: &Objects, root: Id, key: &str) -> Result<Id> {
        match objects.find(root, key, self.options.skip_unknown).as_slice() {
            [one] => Ok(*one),
            [] => {
                let keys: Listed = objects.top_keys(root).iter().map(|key| quoted(key)).collect();
                let hint = (!keys.is_empty()).then(|| format!("the keys at the top are {keys}"));
                Err(Error::Request { what: format!("{}: no key {key:?} in its object", self.path.display()), hint })
            }
            several => Err(Error::Request {
                what: format!("{}: {} paths are called {key:?}", self.path.display(), several.len()),
                hint: Some(format!(
                    "without {} all tensors are there; choose among them with {}",
                    Setting::Key,
                    Setting::Include
                )),
            }),
        }
    }

    /// safetensors keeps a name for itself, which no tensor may have under any other format either: it could never be saved.
    pub(crate) fn demand_free_names(&self, tensors: &[TensorInfo]) -> Result<()> {
        match tensors.iter().find(|tensor| *tensor.name == *RESERVED) {
            None => Ok(()),
            Some(_) => {
                let what = format!("a tensor called {RESERVED:?}: safetensors keeps that name for itself");
                Err(self.refused(&[Finding::malformed("reserved-name", what)]))
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

    pub(crate) fn checkpoint(&self, part: Part, version: &Version, format: Format) -> Checkpoint {
        let Part { assembled, skipped, warnings, .. } = part;
        let Assembled { tensors, recipe, shared, .. } = assembled;
        let file = Shard { path: self.path.to_owned(), bytes: version.len(), version: version.clone(), derived: None };
        let made = (!recipe.is_empty()).then(|| file.made_by(recipe));
        let shards = std::iter::once(file).chain(made).collect();
        let (path, metadata) = (self.path.to_owned(), BTreeMap::new());
        let storage = Arc::clone(&self.options.storage);
        Checkpoint { path, shards, tensors, metadata, warnings, format, skipped, shared, storage }
    }
}

impl Shard {
    /// The shard that is made of this one.
    pub(crate) fn made_by(&self, recipe: super::derived::Recipe) -> Shard {
        Shard { bytes: recipe.len(), derived: Some(Arc::new(recipe)), ..self.clone() }
    }
}
