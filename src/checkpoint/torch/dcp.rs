//! Folders of PyTorch's distributed checkpoint (DCP): `.metadata` says which boxes of which tensors lie where in which `.distcp`
//! file; each box is a whole archive of `torch.save` within it.
//!
//! `.metadata` is a pickle, which PyTorch itself unpickles without a check; here it goes through the same machine as every other.
//! A path in it may not leave the folder. Objects that are no tensors are named and not read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use super::bytes::{self, Opened};
use super::pickled::Pickled;
use super::{Part, Reader, kinds};
use crate::checkpoint::dcp::{self, Piece};
use crate::checkpoint::finding::Finding;
use crate::checkpoint::index::is_plain_name;
use crate::checkpoint::open::OpenOptions;
use crate::checkpoint::pickle::{Arena, Id, MAX_PICKLE_BYTES};
use crate::checkpoint::safetensors::Stored;
use crate::checkpoint::{Checkpoint, Format, Loss, Shard, Skipped, TensorData, TensorInfo, shard};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::extent::ShardIndex;
use crate::fault::{Fault, Listed, quoted};
use crate::storage::{Location, Storage};

/// The name of the file that describes the folder.
pub(crate) const METADATA: &str = ".metadata";

/// A tensor as `.metadata` describes it.
struct Described {
    dtype: Dtype,
    shape: Vec<u64>,
    /// Where each box begins, and its size.
    boxes: Vec<(Vec<u64>, Vec<u64>)>,
}

/// Where an item lies.
#[derive(Clone)]
struct Place {
    file: String,
    offset: u64,
    len: u64,
}

/// A box of a tensor, to be found in a file.
struct Wanted {
    tensor: usize,
    start: Vec<u64>,
    shape: Vec<u64>,
    place: Place,
}

/// Opens a folder that DCP wrote.
pub(crate) fn open(folder: &Path, options: &OpenOptions) -> Result<Checkpoint> {
    Gather::new(folder, options, describe(&folder.join(METADATA), options)?).run()
}

/// Refuses a file that is one of such a folder, opened by its own name: only the description says what is in it.
pub(crate) fn refuse_alone(path: &Path, storage: &dyn Storage) -> Result<()> {
    let name = path.file_name().unwrap_or_default();
    let (data, described) = (Path::new(name).extension() == Some(OsStr::new("distcp")), is_metadata(name));
    if !data && !described {
        return Ok(());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let there = described || shard::is_file(storage, &folder.join(METADATA));
    let what = match (data, there) {
        (true, true) => {
            format!("one of the files of a distributed checkpoint (DCP): {METADATA} beside it says what is in it")
        }
        (true, false) => format!(
            "one of the files of a distributed checkpoint (DCP), without the {METADATA} beside it that says what is in it: fetch that, \
             and all files of the folder"
        ),
        (false, _) => "the description of a distributed checkpoint (DCP), which holds no tensors itself".to_owned(),
    };
    let what = if there { format!("{what}; open the folder {}", folder.display()) } else { what };
    Err(Error::Unsupported { path: path.to_owned(), tensor: None, what })
}

/// Where in which files the items of such a folder lie: offset and length in bytes.
pub(crate) fn items(folder: &Path, storage: &Arc<dyn Storage>) -> Result<BTreeMap<String, BTreeSet<(u64, u64)>>> {
    let options = OpenOptions { skip_unknown: true, storage: Arc::clone(storage), ..OpenOptions::default() };
    let gather = Gather::new(folder, &options, describe(&folder.join(METADATA), &options)?);
    let mut items: BTreeMap<String, BTreeSet<(u64, u64)>> = BTreeMap::new();
    for Wanted { place: Place { file, offset, len }, .. } in gather.wanted()? {
        items.entry(file).or_default().insert((offset, len));
    }
    Ok(items)
}

/// Whether a file of that name describes such a folder: all of it, or what one rank has.
pub(super) fn is_metadata(name: &OsStr) -> bool {
    let rank = name.to_str().and_then(|name| name.strip_prefix("__")?.strip_suffix(METADATA));
    name == METADATA || rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Where in which files anything lies that such a folder is read for, tensors or not: offset and length in bytes. A description
/// that is refused says nothing.
pub(super) fn places(folder: &Path, storage: &Arc<dyn Storage>) -> BTreeMap<String, BTreeSet<(u64, u64)>> {
    let options = OpenOptions { skip_unknown: true, storage: Arc::clone(storage), ..OpenOptions::default() };
    let entries = storage.list(&Location::from(folder)).unwrap_or_default().into_iter();
    let names = entries.map(|entry| entry.name).filter(|name| is_metadata(OsStr::new(name)));
    let mut places: BTreeMap<String, BTreeSet<(u64, u64)>> = BTreeMap::new();
    for description in names.filter_map(|name| describe(&folder.join(name), &options).ok()) {
        for Place { file, offset, len } in description.places.into_values() {
            places.entry(file).or_default().insert((offset, len));
        }
    }
    places
}

/// What is wrong with a description.
pub(super) fn objection(pickled: &Pickled) -> Option<Finding> {
    let escapes = match Description::of(pickled) {
        Ok(description) => description.escapes(),
        Err(finding) => return Some(finding),
    };
    let list: Listed = escapes.into_iter().collect();
    let what = format!("it places items in files elsewhere: {list}");
    (!list.is_empty()).then(|| Finding::suspicious("dcp-metadata", what))
}

fn describe(path: &Path, options: &OpenOptions) -> Result<Description> {
    let file = Opened::of(&*options.storage, path)?;
    if file.len() > MAX_PICKLE_BYTES {
        let what = format!("the length in bytes of {}", path.display());
        return Err(Error::Limit { what, limit: MAX_PICKLE_BYTES, found: file.len(), hint: None });
    }
    let text = bytes::read_vec(&file.whole(), 0, file.len()).map_err(|error| Error::io("read", path, error))?;
    let mut pickled = Pickled::run(text, 0, None);
    pickled.check_end(usize::try_from(file.len()).unwrap_or(usize::MAX), METADATA);
    let reader = Reader { path, options, rank: None };
    reader.demand(&pickled.findings)?;
    let description = Description::of(&pickled).map_err(|finding| reader.refused(&[finding]))?;
    description.refuse_escapes(path)?;
    Ok(description)
}

// ---- the description

/// What `.metadata` says.
struct Description {
    tensors: Vec<(String, Described)>,
    places: HashMap<(String, Option<Vec<u64>>), Place>,
    skipped: Vec<Skipped>,
}

type Checked<T> = Result<T, Finding>;

fn damaged<T>(what: impl Into<String>) -> Checked<T> {
    Err(Finding::malformed("dcp-metadata", what))
}

/// The fields of a data class, by name.
fn field(arena: &Arena, object: Id, name: &str) -> Option<Id> {
    arena.member(arena.as_call(object)?.state?, name)
}

fn class(arena: &Arena, object: Id) -> &str {
    let function = arena.as_call(object).map(|call| call.function);
    function.and_then(|function| arena.as_global(function)).map_or("", |(_, name)| name)
}

/// A `torch.Size`, or a tuple or list of numbers.
pub(super) fn numbers(arena: &Arena, id: Id) -> Option<Vec<u64>> {
    let inner = match arena.as_call(id) {
        Some(call) if class(arena, id) == "Size" => *arena.as_tuple(call.arguments)?.first()?,
        _ => id,
    };
    arena.as_sequence(inner)?.iter().map(|item| u64::try_from(arena.as_int(*item)?).ok()).collect()
}

impl Description {
    fn of(pickled: &Pickled) -> Checked<Description> {
        let arena = &pickled.ran.arena;
        let root = pickled.ran.result.filter(|root| class(arena, *root) == "Metadata");
        let Some(root) = root else { return damaged("it does not hold a description of a distributed checkpoint") };
        let pairs = |name| field(arena, root, name).and_then(|id| arena.as_dict(id));
        let (Some(tensors), Some(places)) = (pairs("state_dict_metadata"), pairs("storage_data")) else {
            return damaged("the list of tensors or that of their places is missing");
        };
        let mut found = Description { tensors: Vec::new(), places: HashMap::new(), skipped: Vec::new() };
        for (name, object) in tensors {
            let Some(name) = arena.as_text(*name) else { return damaged("a tensor whose name is no text") };
            found.describe(arena, name, *object)?;
        }
        for (key, info) in places {
            found.place(arena, *key, *info)?;
        }
        found.tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    fn describe(&mut self, arena: &Arena, name: &str, object: Id) -> Checked<()> {
        if class(arena, object) != "TensorStorageMetadata" {
            let why = "plain data that is pickled: not read".to_owned();
            self.skipped.push(Skipped::new(name, why));
            return Ok(());
        }
        let described = described(arena, object);
        let Some((module, kind, shape, boxes)) = described else {
            return damaged(format!("the description of tensor {name:?} is not whole"));
        };
        match kinds::of_dtype(&module, &kind).and_then(|kind| kind.dtype) {
            Some(dtype) => self.tensors.push((name.to_owned(), Described { dtype, shape, boxes })),
            None => {
                let why = format!("a tensor of {kind}, which safetensors lacks");
                let loss = Loss::OfConvert("tensor of a type that safetensors lacks");
                self.skipped.push(Skipped::new(name, why).losing(1, loss));
            }
        }
        Ok(())
    }

    fn place(&mut self, arena: &Arena, key: Id, info: Id) -> Checked<()> {
        let read = || {
            let name = arena.as_text(field(arena, key, "fqn")?)?.to_owned();
            let offset = field(arena, key, "offset").and_then(|offset| numbers(arena, offset));
            let number = |name| u64::try_from(arena.as_int(field(arena, info, name)?)?).ok();
            let file = arena.as_text(field(arena, info, "relative_path")?)?.to_owned();
            Some(((name, offset), Place { file, offset: number("offset")?, len: number("length")? }))
        };
        let Some((key, place)) = read() else { return damaged("the place of a tensor is not whole") };
        match self.places.insert(key, place) {
            None => Ok(()),
            Some(_) => damaged("one box of a tensor has two places"),
        }
    }

    fn escapes(&self) -> BTreeSet<String> {
        let escapes = self.places.values().filter(|place| !is_plain_name(&place.file));
        escapes.map(|place| quoted(&place.file)).collect()
    }

    /// No path leaves the folder; none is opened before all are known to stay.
    fn refuse_escapes(&self, path: &Path) -> Result<()> {
        let list: Listed = self.escapes().into_iter().collect();
        list.into_fault(Fault::Escapes).map_err(|fault| Error::malformed(path, fault))
    }
}

/// Module and name of the element type, the shape, the boxes.
type Read = (String, String, Vec<u64>, Vec<(Vec<u64>, Vec<u64>)>);

fn described(arena: &Arena, object: Id) -> Option<Read> {
    let properties = arena.as_call(field(arena, object, "properties")?)?.state?;
    let dtype = match arena.as_tuple(properties) {
        Some(fields) => *fields.first()?,
        None => arena.member(properties, "dtype")?,
    };
    let (module, name) = arena.as_global(dtype)?;
    let shape = numbers(arena, field(arena, object, "size")?)?;
    let chunk = |chunk: &Id| {
        let part = |name| numbers(arena, field(arena, *chunk, name)?);
        Some((part("offsets")?, part("sizes")?))
    };
    let boxes = arena.as_sequence(field(arena, object, "chunks")?)?.iter().map(chunk).collect::<Option<_>>()?;
    Some((module.to_owned(), name.to_owned(), shape, boxes))
}

// ---- the files

const LOST: Error = Error::Poisoned { what: "a box of a tensor that is not described" };

fn misplaced(path: &Path, place: &Place, name: &str, what: &str) -> Error {
    let what = format!("the item at byte {} {what}, where {} belongs", place.offset, quoted(name));
    Error::malformed(path, Fault::Other(what))
}

/// The boxes of all tensors, found in their files one file after the other.
struct Gather<'a> {
    folder: &'a Path,
    options: &'a OpenOptions,
    description: Description,
    shards: Vec<Shard>,
    /// For each tensor: its boxes, and where each begins.
    pieces: Vec<Vec<(ShardIndex, Stored, Vec<u64>)>>,
    warnings: Vec<String>,
}

impl<'a> Gather<'a> {
    fn new(folder: &'a Path, options: &'a OpenOptions, description: Description) -> Gather<'a> {
        let pieces = description.tensors.iter().map(|_| Vec::new()).collect();
        Gather { folder, options, description, shards: Vec::new(), pieces, warnings: Vec::new() }
    }

    fn run(mut self) -> Result<Checkpoint> {
        let mut by_file: BTreeMap<String, Vec<Wanted>> = BTreeMap::new();
        for wanted in self.wanted()? {
            by_file.entry(wanted.place.file.clone()).or_default().push(wanted);
        }
        for (name, wanted) in by_file {
            self.file(&name, wanted)?;
        }
        let tensors = self.tensors().map_err(|fault| Error::malformed(self.folder, fault))?;
        Reader { path: self.folder, options: self.options, rank: None }.demand_free_names(&tensors)?;
        let (path, metadata, skipped) = (self.folder.to_owned(), BTreeMap::new(), self.description.skipped);
        let (shards, warnings, shared) = (self.shards, self.warnings, Vec::new());
        let (format, storage) = (Format::TorchDcp, Arc::clone(&self.options.storage));
        Ok(Checkpoint { path, shards, tensors, metadata, warnings, format, skipped, shared, storage })
    }

    /// Every box with its place.
    fn wanted(&self) -> Result<Vec<Wanted>> {
        let (mut wanted, mut missing) = (Vec::new(), Listed::new());
        for (at, (name, tensor)) in self.description.tensors.iter().enumerate() {
            for (start, shape) in &tensor.boxes {
                let key = |start: Option<Vec<u64>>| (name.clone(), start);
                let places = &self.description.places;
                let place = places.get(&key(Some(start.clone()))).or_else(|| places.get(&key(None)));
                match place {
                    Some(place) => {
                        let (start, shape, place) = (start.clone(), shape.clone(), place.clone());
                        wanted.push(Wanted { tensor: at, start, shape, place });
                    }
                    None => {
                        missing.push_tensor(name, || format!("{}: the box at {start:?} has no place", quoted(name)))
                    }
                }
            }
        }
        missing.into_fault(Fault::Boxes).map_err(|fault| Error::malformed(self.folder.join(METADATA), fault))?;
        Ok(wanted)
    }

    fn file(&mut self, name: &str, wanted: Vec<Wanted>) -> Result<()> {
        let path = self.folder.join(name);
        let file = Opened::of(&*self.options.storage, &path)?;
        let (bytes, version) = (file.len(), file.version().clone());
        let number = self.next_shard();
        self.shards.push(Shard { path: path.clone(), bytes, version, derived: None });
        let mut items: HashMap<(u64, u64), (ShardIndex, Stored)> = HashMap::new();
        for Wanted { tensor, start, shape, place } in wanted {
            let (name, described) = self.description.tensors.get(tensor).ok_or(LOST)?;
            let (name, dtype) = (name.clone(), described.dtype);
            // Two names of one item are one tensor.
            let key = (place.offset, place.len);
            let (shard, stored) = match items.get(&key) {
                Some(known) => known.clone(),
                None => self.item(&path, &file, number, &name, &place)?,
            };
            items.insert(key, (shard, stored.clone()));
            if stored.dtype != dtype || stored.shape != shape {
                let what = format!("is {} {:?}, not {dtype} {shape:?}", stored.dtype, stored.shape);
                return Err(misplaced(&path, &place, &name, &what));
            }
            self.pieces.get_mut(tensor).ok_or(LOST)?.push((shard, stored, start));
        }
        Ok(())
    }

    fn next_shard(&self) -> ShardIndex {
        ShardIndex::try_from(self.shards.len()).unwrap_or(ShardIndex::MAX)
    }

    /// One item: an archive within the file that holds exactly one tensor.
    fn item(
        &mut self,
        path: &Path,
        file: &Opened,
        number: ShardIndex,
        name: &str,
        place: &Place,
    ) -> Result<(ShardIndex, Stored)> {
        let (start, len) = (place.offset, place.len);
        if start.checked_add(len).is_none_or(|end| end > file.len()) {
            let what =
                format!("tensor {name:?} would lie at bytes {start} + {len} of a file of {}: truncated", file.len());
            return Err(Error::malformed(path, Fault::Other(what)));
        }
        let plain = OpenOptions { key: None, ..self.options.clone() };
        let reader = Reader { path, options: &plain, rank: None };
        let Part { assembled, skipped, .. } = reader.zip(&file.part(start, len), start, number, None)?;
        let [found] = assembled.tensors.as_slice() else {
            let what = skipped.first().map_or("no single tensor", |skipped| skipped.why.as_str());
            return Err(misplaced(path, place, name, &format!("holds {what}")));
        };
        let TensorData::Whole(extent) = &found.data else {
            return Err(misplaced(path, place, name, "lies in several pieces"));
        };
        let made = self.shards.get(number as usize).filter(|_| extent.shard != number);
        let made = made.map(|file| file.made_by(assembled.recipe));
        let shard = if made.is_some() { self.next_shard() } else { number };
        self.shards.extend(made);
        let (name, dtype, shape) = (Arc::clone(&found.name), found.dtype.clone(), found.shape.to_vec());
        Ok((shard, Stored { name, dtype, shape, offset: extent.offset, len: extent.len }))
    }

    /// The boxes put together.
    fn tensors(&self) -> Result<Vec<TensorInfo>, Fault> {
        let (mut tensors, mut problems) = (Vec::new(), Listed::new());
        for ((name, described), pieces) in self.description.tensors.iter().zip(&self.pieces) {
            let Some(called) = self.called(name) else { continue };
            let pieces: Vec<Piece> =
                pieces.iter().map(|(shard, stored, start)| Piece { shard: *shard, stored, start }).collect();
            match dcp::assemble(&pieces) {
                Ok((shape, data)) if shape == described.shape => {
                    let (dtype, shape) = (described.dtype.into(), shape.into());
                    tensors.push(TensorInfo { name: called.into(), dtype, shape, data });
                }
                Ok((shape, _)) => problems.push_tensor(name, || {
                    format!("{}: its boxes make {shape:?}, its shape is {:?}", quoted(name), described.shape)
                }),
                Err(why) => problems.push_tensor(name, || format!("{}: {why}", quoted(name))),
            }
        }
        problems.into_fault(Fault::Boxes)?;
        tensors.sort_by(|a: &TensorInfo, b: &TensorInfo| a.name.cmp(&b.name));
        Ok(tensors)
    }

    /// The name below the key that was asked for.
    fn called<'n>(&self, name: &'n str) -> Option<&'n str> {
        match &self.options.key {
            None => Some(name),
            Some(key) => name.strip_prefix(key.as_str())?.strip_prefix('.'),
        }
    }
}
