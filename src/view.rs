//! Zero-copy views: tensors that borrow a read-only mapping of their file. Nothing is read until it is touched, and only
//! what is touched costs anything.
//!
//! The bytes are those of the file now: a write to the file changes the tensors. Therefore safe
//! code gets copies ([`MappedTensor::copy_to`]) or, where the kernel guarantees that the file cannot change (a sealed `memfd`),
//! slices; any other slice is `unsafe` and the caller's word that the file stays as it is. A file that shrinks never ends in
//! a signal: the touch reads zeros and [`MappedTensor::check`] says so (a touch of a slice, only on a thread that does not
//! block `SIGBUS`). Loads that own their memory are `load`.
#![allow(unsafe_code)] // passes on the promise of the caller, or of the kernel's seals

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::{Checkpoint, Selected, TensorInfo, no_tensor};
use crate::digest::{Digest, Hasher};
use crate::dtype::{Dtype, element_count};
use crate::error::{Error, Result};
use crate::os;
use crate::report::{Cache, MainStage, Report, Routes, Stage, StageTime, Stages, Staging};
use crate::storage::{Fallbacks, MappedFile, OpenFile};
use crate::tensor::{Element, cast};

/// Bytes that are copied out of a mapping at a time for hashing.
const CHUNK_BYTES: usize = 1 << 20;

/// The selected tensors of a checkpoint, borrowed from mappings of its files.
#[derive(Debug, Clone)]
pub struct Mapped {
    tensors: BTreeMap<Arc<str>, MappedTensor>,
    /// What was done: the route is `view`, and no byte has been read.
    pub report: Report,
    /// Warnings about the checkpoint.
    pub warnings: Vec<String>,
}

/// A tensor as it lies in its file. Cloning is cheap and shares the mapping; `Send` and `Sync`.
#[derive(Clone)]
pub struct MappedTensor {
    name: Arc<str>,
    dtype: Dtype,
    shape: Arc<[usize]>,
    /// `None` for a tensor without bytes.
    map: Option<Arc<MappedFile>>,
    offset: u64,
    len: u64,
}

impl Checkpoint {
    /// Maps the files of the selected tensors. Reads nothing.
    ///
    /// ```
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// # let header = r#"{"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}"#;
    /// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2, 3, 4, 5]].concat())?;
    /// use vramp::checkpoint::{Checkpoint, Selection, SliceRequest};
    ///
    /// let checkpoint = Checkpoint::open(&path)?;
    /// let rows = SliceRequest { name: "a".into(), dim: 0, range: 1..2 };
    /// let selection = Selection::default().slices(vec![rows]);
    /// let mapped = checkpoint.map(&checkpoint.select(&selection)?)?;
    /// let tensor = mapped.tensor("a")?;
    /// let mut copy = [0; 2];
    /// tensor.copy_to(0, &mut copy)?; // safe: a copy, checked against the file having changed
    /// assert_eq!((tensor.shape(), copy), (&[1, 2][..], [3, 4]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When a tensor as selected does not lie in one piece (a column slice, a tensor cut over files), has an unknown
    /// element type, or its file cannot be mapped or is no longer the one whose header was read.
    pub fn map(&self, selected: &[Selected]) -> Result<Mapped> {
        let started = Instant::now();
        self.require_known_dtypes(selected)?;
        let mut maps = Maps { checkpoint: self, open: BTreeMap::new(), fallbacks: Fallbacks::default() };
        let mut tensors = BTreeMap::new();
        for chosen in selected {
            let info = self.tensors().get(chosen.tensor);
            let info = info.ok_or(Error::Poisoned { what: "a selection of another checkpoint" })?;
            let tensor = maps.tensor(info, chosen)?;
            for name in std::iter::once(&chosen.name).chain(&chosen.aliases) {
                tensors.insert(Arc::clone(name), MappedTensor { name: Arc::clone(name), ..tensor.clone() });
            }
        }
        let bytes = selected.iter().filter_map(|chosen| tensors.get(&chosen.name)).map(MappedTensor::byte_len).sum();
        let report = maps.report(bytes, (selected.len(), tensors.len()), started.elapsed().as_secs_f64());
        Ok(Mapped { tensors, report, warnings: self.warnings().to_vec() })
    }
}

/// The mappings made so far.
struct Maps<'a> {
    checkpoint: &'a Checkpoint,
    open: BTreeMap<u32, (Arc<dyn OpenFile>, Arc<MappedFile>)>,
    fallbacks: Fallbacks,
}

impl Maps<'_> {
    fn tensor(&mut self, info: &TensorInfo, chosen: &Selected) -> Result<MappedTensor> {
        let runs = info.runs(chosen.slice.as_ref());
        let (map, offset, len) = match runs.as_slice() {
            [] => (None, 0, 0),
            [run] if run.run * run.count == 0 => (None, 0, 0),
            [run] if run.count == 1 => (Some(self.shard(run.shard)?), run.offset, run.run),
            _ => return Err(scattered(&chosen.name)),
        };
        let (name, shape) = (Arc::clone(&chosen.name), Arc::clone(&chosen.shape));
        let dtype = info.dtype.known().ok_or(Error::Poisoned { what: "a tensor of an unknown type was selected" })?;
        Ok(MappedTensor { name, dtype, shape, map, offset, len })
    }

    /// The mapping of a shard, which must be the file whose header was read.
    fn shard(&mut self, index: u32) -> Result<Arc<MappedFile>> {
        if let Some((_, map)) = self.open.get(&index) {
            return Ok(Arc::clone(map));
        }
        let shard = self
            .checkpoint
            .shards()
            .get(index as usize)
            .ok_or(Error::Poisoned { what: "a shard that is not there" })?;
        let file = shard.open(&**self.checkpoint.storage(), &self.fallbacks)?;
        let map = file.map()?;
        self.open.insert(index, (file, Arc::clone(&map)));
        Ok(map)
    }

    fn report(&self, bytes: u64, (tensors, names): (usize, usize), seconds: f64) -> Report {
        let files = || self.open.values().map(|(file, _)| file);
        let resident_before = files().map(|file| file.residency().resident_bytes()).sum();
        let cache = Cache { resident_before, file_bytes: files().map(|file| file.version().len()).sum() };
        Report {
            bytes,
            tensors,
            names,
            seconds,
            gb_per_s: 0.0, // nothing moved
            main_stage: MainStage { stage: Stage::SetUp, seconds, bytes_per_second: None },
            estimate: None,
            efficiency: None,
            no_estimate: None,
            stages: Stages { allocate: StageTime { seconds, bytes: 0 }, ..Stages::default() },
            routes: Routes { view: bytes, ..Routes::default() },
            cache,
            staging: Staging::default(),
            peak_host_bytes: os::peak_resident_bytes().unwrap_or(0),
            cpu_seconds: 0.0,
            setup_seconds: 0.0,
            fallbacks: self.fallbacks.list(),
            file_system: files().next().map_or(String::new(), |file| file.file_system().name.clone()),
            kernel: os::kernel_release().unwrap_or_default(),
            device: "cpu".to_owned(),
            product: String::new(),
            engine: "none".to_owned(),
        }
    }
}

fn scattered(name: &str) -> Error {
    Error::Request {
        what: format!("tensor {name:?} does not lie in one piece as selected, so it cannot be viewed"),
        hint: Some("load it (a copy), or select whole tensors and slices of the first dimension".to_owned()),
    }
}

impl Mapped {
    /// The tensor of that name.
    ///
    /// # Errors
    /// [`Error::NoTensor`], with the nearest names, when it was not selected.
    pub fn tensor(&self, name: &str) -> Result<&MappedTensor> {
        let missing = || no_tensor(name, "was not mapped", self.tensors.keys().map(Arc::as_ref));
        self.tensors.get(name).ok_or_else(missing)
    }

    /// All tensors by name, aliases included.
    pub fn tensors(&self) -> &BTreeMap<Arc<str>, MappedTensor> {
        &self.tensors
    }
}

impl MappedTensor {
    /// The name it was asked for by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each dimension, outermost first; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of bytes that the elements take.
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// Number of elements: the product of the shape, 1 for a scalar.
    pub fn element_count(&self) -> u64 {
        element_count(&self.shape)
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the bytes from `offset` (within the tensor) on into `target`.
    ///
    /// # Errors
    /// When the range leaves the tensor, or the file shrank, was written to, or cannot be read.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<()> {
        let len = target.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let what = format!("bytes {offset} + {len} leave tensor {:?} of {} bytes", self.name, self.len);
            return Err(Error::Request { what, hint: None });
        }
        self.map.as_ref().map_or(Ok(()), |map| map.copy_to(self.offset + offset, target))
    }

    /// SHA-256 of the elements' bytes, by copies.
    ///
    /// # Errors
    /// As [`MappedTensor::copy_to`].
    pub fn sha256(&self) -> Result<Digest> {
        let mut hasher = Hasher::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut done = 0;
        while done < self.len {
            let len = usize::try_from(self.len - done).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
            self.copy_to(done, &mut chunk[..len])?;
            hasher.update(&chunk[..len]);
            done += len as u64;
        }
        Ok(hasher.finish())
    }

    /// The bytes, without a copy.
    ///
    /// # Safety
    /// While the slice lives, no process writes to the file or truncates it.
    pub unsafe fn bytes(&self) -> &[u8] {
        let Some(map) = &self.map else { return &[] };
        // SAFETY: the caller's promise is the one that `MappedFile::bytes` asks for.
        self.part_of(unsafe { map.bytes() })
    }

    /// The elements as a slice of `T`, without a copy.
    ///
    /// # Safety
    /// As [`MappedTensor::bytes`].
    ///
    /// # Errors
    /// When `T` is not the element type, or the tensor lies misaligned in its file (which is legal; a load realigns it).
    pub unsafe fn as_slice<T: Element>(&self) -> Result<&[T]> {
        // SAFETY: the caller's promise is the one that `bytes` asks for.
        cast(&self.name, self.dtype, unsafe { self.bytes() })
    }

    /// The bytes, without a copy, if the kernel guarantees that they cannot change: the file is a `memfd` sealed
    /// against writing and shrinking. `None` for every other file.
    pub fn sealed_bytes(&self) -> Option<&[u8]> {
        match &self.map {
            None => Some(&[]),
            Some(map) => map.sealed_bytes().map(|bytes| self.part_of(bytes)),
        }
    }

    /// Demands that everything seen so far was really the file's.
    ///
    /// # Errors
    /// [`Error::Changed`] when the file shrank or was written to since it was mapped.
    pub fn check(&self) -> Result<()> {
        self.map.as_ref().map_or(Ok(()), |map| map.check())
    }

    /// This tensor's part of its file. The header was checked against the length that was mapped.
    fn part_of<'a>(&self, file: &'a [u8]) -> &'a [u8] {
        let range = usize::try_from(self.offset).ok().zip(usize::try_from(self.len).ok());
        range.and_then(|(start, len)| file.get(start..start.checked_add(len)?)).unwrap_or(&[])
    }
}

impl fmt::Debug for MappedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedTensor({:?}, {}, {:?})", self.name, self.dtype, self.shape)
    }
}
