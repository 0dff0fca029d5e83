//! Folders of PyTorch's distributed checkpoint (DCP): `.metadata` says which boxes of which tensors lie where in which `.distcp`
//! file; each box is a whole archive of `torch.save` within it.
//!
//! `.metadata` is a pickle, which PyTorch itself unpickles without a check; here it goes through the same machine as every other.
//! A path in it may not leave the folder. Objects that are no tensors are named and not read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use vramp_pickle::bytes::{self, Bytes};
use vramp_pickle::dcp::{Description, Place, is_metadata};
use vramp_pickle::pickle::MAX_PICKLE_BYTES;

use super::{Opened, Part, Reader};
use crate::checkpoint::dcp::{self, Piece};
use crate::checkpoint::options::OpenOptions;
use crate::checkpoint::safetensors::Stored;
use crate::checkpoint::{Checkpoint, Format, Shard, Skipped, TensorData, TensorInfo, shard};
use crate::dtype::{StoredDtype, dims};
use crate::error::{Error, Result};
use crate::extent::ShardIndex;
use crate::fault::{Fault, Listed, quoted};
use crate::storage::{Location, Storage};

pub(crate) use vramp_pickle::dcp::METADATA;

/// A box of a tensor, to be found in a file.
struct Wanted {
    tensor: usize,
    start: Vec<usize>,
    shape: Vec<usize>,
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

/// The descriptions in a folder; one that is refused says nothing.
pub(super) fn descriptions(folder: &Path, storage: &Arc<dyn Storage>) -> impl Iterator<Item = Description> {
    let options = OpenOptions { skip_unknown: true, storage: Arc::clone(storage), ..OpenOptions::default() };
    let entries = storage.list(&Location::from(folder)).unwrap_or_default().into_iter();
    let names = entries.map(|entry| entry.name).filter(|name| is_metadata(OsStr::new(name)));
    names.filter_map(move |name| describe(&folder.join(name), &options).ok())
}

fn describe(path: &Path, options: &OpenOptions) -> Result<Description> {
    let file = Opened::of(&*options.storage, path)?;
    if file.len() > MAX_PICKLE_BYTES {
        let what = format!("the length in bytes of {}", path.display());
        return Err(Error::Limit { what, limit: MAX_PICKLE_BYTES, found: file.len(), hint: None });
    }
    let text = bytes::read_vec(&file, 0, file.len()).map_err(|error| Error::io("read", path, error))?;
    let refused = |refused| Reader { path, options, rank: None }.refused(&refused);
    let description = Description::read(text, options.skip_unknown).map_err(refused)?;
    // No path leaves the folder; none is opened before all are known to stay.
    let list: Listed = description.escapes().into_iter().collect();
    list.into_fault(Fault::Escapes).map_err(|fault| Error::malformed(path, fault))?;
    Ok(description)
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
    pieces: Vec<Vec<(ShardIndex, Stored, Vec<usize>)>>,
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
        let (path, metadata, skipped) = (
            self.folder.to_owned(),
            BTreeMap::new(),
            self.description.skipped.into_iter().map(Skipped::from).collect(),
        );
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
                        let (start, shape, place) = (dims(start), dims(shape), place.clone());
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
            let (name, dtype) = (name.clone(), StoredDtype::from_safetensors(described.element));
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
        let Part { tensors, recipe, skipped, .. } = reader.zip(&file.part(start, len), start, number)?;
        let [found] = tensors.as_slice() else {
            let what = skipped.first().map_or("no single tensor", |skipped| skipped.why.as_str());
            return Err(misplaced(path, place, name, &format!("holds {what}")));
        };
        let TensorData::Whole(extent) = &found.data else {
            return Err(misplaced(path, place, name, "lies in several pieces"));
        };
        let made = self.shards.get(number as usize).filter(|_| extent.shard != number);
        let made = made.map(|file| file.made_by(recipe));
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
                Ok((shape, data)) if shape == dims(&described.shape) => {
                    let (dtype, shape) = (StoredDtype::from_safetensors(described.element), shape.into());
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
