//! Saving: tensors become safetensors files, whole or not at all.
//!
//! A save is laid out before anything is written (`layout`), written to temporary names in the folder where it will lie, made
//! durable, and put in place at the end in one step that readers either see or do not (`publish`). [`save`] takes tensors in
//! memory, [`Saving`] a stream of them, [`convert`] a checkpoint by way of the ordinary loader. Files come and go through a
//! [`Store`]; nothing here reads a weight file by itself, knows a device, or holds more than it was just given.

mod batches;
mod convert;
mod layout;
mod leftovers;
mod publish;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use convert::{ConvertOptions, Converted, Ties, convert};
pub use layout::{Layout, Notes, Outline, Shard};
pub use leftovers::{Leftovers, write_file};

use crate::digest::{Digest, Hasher};
use crate::durable::{self, FileStore, NewFile, Store};
use crate::error::{Error, Listed, Result};
use crate::fault::{counted, quoted};
use crate::load::Cancel;
use crate::tensor::Tensor;
use publish::Place;

/// The most bytes of tensors in one file, unless told otherwise: what the Hugging Face libraries take.
pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Bytes between two looks at the switch that cancels, and of a piece that is fetched from a device.
const PIECE_BYTES: usize = 8 << 20;

/// Where a save goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// One file of that name.
    File(PathBuf),
    /// A folder in Hugging Face's layout: `model.safetensors`, or numbered files and an index. It is made if the folder that
    /// it lies in is there.
    Folder(PathBuf),
}

impl Target {
    /// What a path means: a name that ends in `.safetensors` or `.sft`, in letters of either case, is a file, any other a folder.
    pub fn of(path: impl Into<PathBuf>) -> Target {
        let path = path.into();
        let name = path.file_name().map(OsStr::to_ascii_lowercase).unwrap_or_default();
        let is_file = [".safetensors", ".sft"].iter().any(|end| name.as_encoded_bytes().ends_with(end.as_bytes()));
        if is_file { Target::File(path) } else { Target::Folder(path) }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        match self {
            Target::File(path) | Target::Folder(path) => path,
        }
    }
}

/// What a save may replace. A place that holds another model is refused before any work, with [`Error::Exists`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Replace {
    /// No model: only what holds none, such as an empty file.
    #[default]
    Nothing,
    /// These files, by whatever path they are reached: those of the model that is saved again.
    These(Vec<PathBuf>),
    /// Whatever is there.
    Anything,
}

impl Replace {
    /// Whether the file of that path may be replaced.
    fn allows(&self, path: &Path) -> bool {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        match self {
            Replace::Nothing => false,
            Replace::These(files) => files.iter().any(|file| real(file) == real(path)),
            Replace::Anything => true,
        }
    }
}

/// The hint of an [`Error::Exists`] that [`Replace::Anything`] avoids.
pub const REPLACE_HINT: &str = "write to another place, or allow what is there to be replaced";

/// How tensors are saved.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Free text for the header, and further names of tensors.
    pub notes: Notes,
    /// The most bytes of tensors in one file of a folder.
    pub max_shard_bytes: u64,
    /// Whether SHA-256 of each tensor is wanted.
    pub digests: bool,
    /// What may be replaced.
    pub replace: Replace,
    /// Stops the save from another thread.
    pub cancel: Cancel,
    /// Where the save notes what it would leave behind, for whoever has to end the process.
    pub leftovers: Leftovers,
}

impl Default for SaveOptions {
    fn default() -> SaveOptions {
        SaveOptions {
            notes: Notes::default(),
            max_shard_bytes: MAX_SHARD_BYTES,
            digests: false,
            replace: Replace::default(),
            cancel: Cancel::new(),
            leftovers: Leftovers::default(),
        }
    }
}

/// A finished save.
#[derive(Debug, Clone)]
pub struct Saved {
    /// The files, the index last.
    pub outputs: Vec<PathBuf>,
    /// Number of tensors, further names not counted.
    pub tensors: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
    /// SHA-256 of each tensor's bytes, if asked for.
    pub digests: BTreeMap<Arc<str>, Digest>,
    /// What a person should know: files of the checkpoint that was replaced, what killed saves had left, permissions that the storage
    /// does not keep.
    pub warnings: Vec<String>,
}

/// A tensor to be saved.
#[derive(Debug, Clone)]
pub struct Input<'a> {
    /// What it is.
    pub outline: Outline,
    /// Where its elements are.
    pub bytes: Bytes<'a>,
}

/// The elements of a tensor to be saved: row-major, little-endian.
#[derive(Debug, Clone, Copy)]
pub enum Bytes<'a> {
    /// In host memory.
    Host(&'a [u8]),
    /// Wherever a loaded tensor is.
    Tensor(&'a Tensor),
}

impl<'a> From<&'a Tensor> for Input<'a> {
    fn from(tensor: &'a Tensor) -> Input<'a> {
        let (name, dtype, shape) = (tensor.name().into(), tensor.dtype(), tensor.shape().into());
        Input { outline: Outline { name, dtype, shape }, bytes: Bytes::Tensor(tensor) }
    }
}

impl Bytes<'_> {
    fn len(&self) -> u64 {
        match self {
            Bytes::Host(bytes) => bytes.len() as u64,
            Bytes::Tensor(tensor) => tensor.byte_len(),
        }
    }

    /// Hands all bytes to `take`, in pieces where they come from a device.
    fn pass(&self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match self {
            Bytes::Host(bytes) => take(bytes),
            Bytes::Tensor(tensor) => match tensor.bytes() {
                Ok(bytes) => take(bytes),
                Err(_) => fetch(tensor, take),
            },
        }
    }
}

/// Passes on the bytes of a tensor that the host cannot address, piece by piece.
fn fetch(tensor: &Tensor, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut piece = vec![0; usize::try_from(tensor.byte_len()).map_or(PIECE_BYTES, |len| len.min(PIECE_BYTES))];
    let mut done = 0;
    while done < tensor.byte_len() {
        let len = usize::try_from(tensor.byte_len() - done).map_or(piece.len(), |left| left.min(piece.len()));
        let (now, _) = piece.split_at_mut(len);
        tensor.view().download(done..done + len as u64, now)?;
        take(now)?;
        done += len as u64;
    }
    Ok(())
}

/// Saves tensors to `path`: a file if it ends in `.safetensors` or `.sft`, else a folder. Where [`SaveOptions::replace`] allows it,
/// what is there is replaced in one step once the new is durable; whatever fails, the old stays as it is and nothing is left behind.
///
/// ```
/// use vramp::dtype::Dtype;
/// use vramp::load::{Options, load};
/// use vramp::save::{Bytes, Input, Outline, SaveOptions, save};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let values: Vec<u8> = [1f32, 2.0, 3.0].iter().flat_map(|value| value.to_le_bytes()).collect();
/// let outline = Outline { name: "bias".into(), dtype: Dtype::F32, shape: [3].into() };
/// save(&path, &[Input { outline, bytes: Bytes::Host(&values) }], &SaveOptions::default())?;
///
/// assert_eq!(load(&path, &Options::default())?.tensor("bias")?.as_slice::<f32>()?, [1.0, 2.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Before anything is written: when a tensor cannot be saved, its bytes do not fit its shape, the folder is missing, full or
/// holds something that must stay: another model ([`Error::Exists`]). Later: when writing fails. See [`Layout::new`].
pub fn save(path: impl AsRef<Path>, tensors: &[Input<'_>], options: &SaveOptions) -> Result<Saved> {
    save_to(&FileStore, &Target::of(path.as_ref()), tensors, options)
}

/// The same with another store, or a target that the name does not tell.
///
/// # Errors
/// As [`save`].
pub fn save_to(store: &dyn Store, target: &Target, tensors: &[Input<'_>], options: &SaveOptions) -> Result<Saved> {
    let outlines: Vec<Outline> = tensors.iter().map(|tensor| tensor.outline.clone()).collect();
    let layout = Layout::new(target.path(), outlines, &options.notes, shard_limit(target, options.max_shard_bytes))?;
    demand_lengths(tensors)?;
    let mut saving = Saving::begin(store, target, layout, options)?;
    while let Some(at) = saving.next() {
        let input = tensors.get(at).ok_or(Error::Poisoned { what: "a layout of other tensors" })?;
        input.bytes.pass(|bytes| saving.write(bytes))?;
    }
    saving.finish()
}

/// Removes what killed saves left where this one will write, and says so.
fn remove_abandoned(store: &dyn Store, target: &Target) -> Option<String> {
    let folder = match target {
        Target::File(path) => durable::folder_of(path),
        Target::Folder(path) => path,
    };
    let removed: Listed = durable::remove_abandoned(store, folder).iter().map(|name| quoted(name)).collect();
    let what =
        || format!("removed {} that a killed save had left: {removed}", counted(removed.len(), "temporary file"));
    (!removed.is_empty()).then(what)
}

/// A single file has no limit.
fn shard_limit(target: &Target, max_shard_bytes: u64) -> u64 {
    match target {
        Target::File(_) => u64::MAX,
        Target::Folder(_) => max_shard_bytes,
    }
}

fn demand_lengths(tensors: &[Input<'_>]) -> Result<()> {
    for Input { outline, bytes } in tensors {
        let (needed, found) = (outline.bytes().unwrap_or(0), bytes.len());
        if needed != found {
            let Outline { name, dtype, shape } = outline;
            let what =
                format!("tensor {name:?} of shape {shape:?} and {dtype} takes {needed} bytes, and {found} were given");
            return Err(Error::Request { what, hint: None });
        }
    }
    Ok(())
}

/// A save under way: the bytes of its tensors are handed over in the order of the files, in pieces of any size, and nothing
/// of them is kept. Dropped before [`Saving::finish`], it leaves everything as it was.
pub struct Saving<'s> {
    store: &'s dyn Store,
    layout: Layout,
    place: Place,
    cancel: Cancel,
    leftovers: Leftovers,
    /// The file being written, and the number of its tensor whose bytes come next.
    shard: usize,
    tensor: usize,
    /// Bytes of that tensor that have come.
    done: u64,
    file: Option<Box<dyn NewFile>>,
    /// The finished files and the one being written, under their temporary names.
    files: Vec<PathBuf>,
    hasher: Option<Hasher>,
    digests: BTreeMap<Arc<str>, Digest>,
    warnings: Vec<String>,
}

impl<'s> Saving<'s> {
    /// Looks at the place, makes the folder where it is missing, and the first file.
    ///
    /// # Errors
    /// When the folder that it should lie in is missing, too full, or holds something that must not be replaced.
    pub fn begin(store: &'s dyn Store, target: &Target, layout: Layout, options: &SaveOptions) -> Result<Saving<'s>> {
        let abandoned = remove_abandoned(store, target);
        let place = Place::of(store, target, &layout, &options.replace)?;
        let mut saving = Saving {
            store,
            layout,
            place,
            cancel: options.cancel.clone(),
            leftovers: options.leftovers.clone(),
            shard: 0,
            tensor: 0,
            done: 0,
            file: None,
            files: Vec::new(),
            hasher: options.digests.then(Hasher::new),
            digests: BTreeMap::new(),
            warnings: abandoned.into_iter().collect(),
        };
        saving.place.make_folder(store, &saving.leftovers)?; // from here on, dropping it takes everything back
        saving.settle()?;
        Ok(saving)
    }

    /// The tensor whose bytes, or whose next bytes, are to be written: an index into the tensors of the layout. Tensors
    /// without bytes are passed over. `None`: all have been written.
    pub fn next(&self) -> Option<usize> {
        self.layout.shards.get(self.shard)?.tensors.get(self.tensor).copied()
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes bytes of the tensor that is [next](Saving::next), as many of those that it still needs.
    ///
    /// # Errors
    /// When they are more than the tensor has left, writing fails, or the save was cancelled.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.check_cancelled()?;
            let left = self.next_bytes().saturating_sub(self.done);
            let too_many = Error::Poisoned { what: "more bytes were saved of a tensor than it has" };
            let fits = piece.len() as u64 <= left;
            let file = self.file.as_mut().filter(|_| fits).ok_or(too_many)?;
            file.append(piece)?;
            self.done += piece.len() as u64;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(piece);
            }
        }
        self.settle()
    }

    /// The files as they lie now, under temporary names, once all tensors have been written: complete and durable.
    ///
    /// # Errors
    /// When tensors are missing.
    pub fn files(&self) -> Result<&[PathBuf]> {
        match self.next() {
            None => Ok(&self.files),
            Some(_) => Err(Error::Poisoned { what: "a save was finished before all of its tensors were written" }),
        }
    }

    /// Puts the files in place.
    ///
    /// # Errors
    /// When tensors are missing, the save was cancelled, the storage refuses, or somebody else has put weights there since
    /// [`Saving::begin`] ([`Error::Conflict`]); then all is as it was before. Only when the
    /// folder cannot be synced at the very end, the new files are in place and not known to be durable.
    pub fn finish(self) -> Result<Saved> {
        self.check_cancelled()?;
        let files = self.files()?.to_vec();
        let published = self.place.publish(self.store, files, &self.layout, &self.leftovers, &self.cancel)?;
        let (tensors, bytes) = (self.layout.tensors.len(), self.layout.bytes);
        let outputs = published.outputs;
        let warnings = self.warnings.iter().cloned().chain(published.warnings).collect();
        Ok(Saved { outputs, tensors, bytes, digests: self.digests.clone(), warnings })
    }

    fn check_cancelled(&self) -> Result<()> {
        if self.cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn next_bytes(&self) -> u64 {
        self.next().and_then(|at| self.layout.tensors.get(at)).and_then(Outline::bytes).unwrap_or(0)
    }

    /// Goes on to the next tensor that lacks bytes: past what is complete, to the next file where one is.
    fn settle(&mut self) -> Result<()> {
        while let Some(shard) = self.layout.shards.get(self.shard) {
            if self.file.is_none() {
                let mode = self.place.mode(self.shard);
                let (path, mut file) = self.leftovers.create(self.store, self.place.folder(), mode)?;
                self.warnings.extend(file.warning().filter(|warning| !self.warnings.contains(warning)));
                file.append(&shard.header)?;
                self.file = Some(file);
                self.files.push(path);
            }
            if self.next().is_none() {
                if let Some((file, path)) = self.file.take().zip(self.files.last()) {
                    self.leftovers.keep(path, file.sync()?);
                }
                (self.shard, self.tensor) = (self.shard + 1, 0);
            } else if self.done == self.next_bytes() {
                self.note_digest();
                (self.tensor, self.done) = (self.tensor + 1, 0);
            } else {
                return Ok(());
            }
        }
        Ok(())
    }

    fn note_digest(&mut self) {
        let name = self.next().and_then(|at| self.layout.tensors.get(at)).map(|tensor| Arc::clone(&tensor.name));
        if let Some((hasher, name)) = self.hasher.as_mut().zip(name) {
            self.digests.insert(name, std::mem::take(hasher).finish());
        }
    }
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        self.file = None;
        self.leftovers.take_back(self.store);
    }
}
