//! Saving: tensors become safetensors files, whole or not at all.
//!
//! A save is laid out before anything is written (`layout`), written to temporary names in the folder where it will lie, made
//! durable, and put in place at the end in one step that readers either see or do not (`publish`). [`save`] takes tensors in
//! memory of any device, [`Saving`] a stream of them, [`convert`] a checkpoint by way of the ordinary loader. `files` has several
//! files under way at a time, a `file_writer` each. Files come and go through a [`Store`]; nothing here reads a weight file by itself,
//! knows a device by name, or holds more than its blocks (48 MiB of a stream, 96 MiB else) of what it is given.

mod batches;
mod convert;
mod feed;
mod file_writer;
mod files;
mod layout;
mod leftovers;
mod publish;
mod snapshot;
mod sums;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use convert::{ConvertOptions, Converted, Ties, convert};
pub use layout::{Layout, Notes, Outline, Shard};
pub use leftovers::Leftovers;
#[doc(hidden)]
pub use leftovers::write_file;

use crate::digest::Digest;
use crate::durable::{self, FileStore, Store};
use crate::error::{Error, Listed, Result};
use crate::fallback::Fallbacks;
use crate::fault::{counted, quoted};
use crate::load::Cancel;
use crate::memory::Filled;
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::tensor::Tensor;
use files::{Bounds, Files};
use publish::Place;

/// The most bytes of tensors in one file, unless told otherwise: what the Hugging Face libraries take.
pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Bytes between two looks at the switch that cancels.
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
#[doc(hidden)]
pub const REPLACE_HINT: &str = "write to another place, or allow what is there to be replaced";

/// How tensors are saved.
#[derive(Debug, Clone)]
#[non_exhaustive]
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

setters!(SaveOptions {
    /// Sets the text for the header, and further names of tensors.
    notes: Notes,
    /// Sets the most bytes of tensors in one file of a folder.
    max_shard_bytes: u64,
    /// Sets whether SHA-256 of each tensor is computed.
    digests: bool,
    /// Sets what may be replaced.
    replace: Replace,
    /// Sets the switch that stops the save from another thread.
    cancel: Cancel,
    /// Sets where the save notes the files that it would leave behind.
    leftovers: Leftovers,
});

/// A finished save.
#[derive(Debug, Clone)]
#[non_exhaustive]
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
#[non_exhaustive]
pub struct Input<'a> {
    /// What it is.
    pub outline: Outline,
    /// Where its elements are.
    pub bytes: Bytes<'a>,
}

impl<'a> Input<'a> {
    /// A tensor to be saved, and its elements: as many bytes as type and shape say.
    pub fn new(outline: Outline, bytes: Bytes<'a>) -> Input<'a> {
        Input { outline, bytes }
    }
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
    save_within(store, target, tensors, options, Bounds::ALL)
}

fn save_within(
    store: &dyn Store,
    target: &Target,
    tensors: &[Input<'_>],
    options: &SaveOptions,
    bounds: Bounds,
) -> Result<Saved> {
    let outlines: Vec<Outline> = tensors.iter().map(|tensor| tensor.outline.clone()).collect();
    let layout = Layout::new(target.path(), outlines, &options.notes, shard_limit(target, options.max_shard_bytes))?;
    demand_lengths(tensors)?;
    let mut saving = Saving::without_file(store, target, layout, options, bounds)?;
    saving.write_all(tensors)?;
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

/// A save under way: the bytes of its tensors are handed over in the order of the files, in pieces of any size. At most 48 MiB of
/// them are kept, in blocks that other threads hash and write. Dropped before [`Saving::finish`], it leaves everything as it was.
pub struct Saving<'s> {
    files: Files<'s>,
    cancel: Cancel,
    /// The file whose bytes come next, and the number of the tensor in it.
    shard: usize,
    tensor: usize,
    /// Bytes of that tensor that have come.
    done: u64,
    /// Whether that file was made.
    open: bool,
    /// Made for the first byte.
    pool: Option<StagingPool>,
    /// The block that is being filled, and how much of it is.
    block: Option<(StagingBuffer, usize)>,
}

impl<'s> Saving<'s> {
    /// Looks at the place, makes the folder where it is missing, and the first file.
    ///
    /// # Errors
    /// When the folder that it should lie in is missing, too full, or holds something that must not be replaced.
    pub fn begin(store: &'s dyn Store, target: &Target, layout: Layout, options: &SaveOptions) -> Result<Saving<'s>> {
        let mut saving = Saving::without_file(store, target, layout, options, Bounds::STREAM)?;
        saving.settle()?;
        Ok(saving)
    }

    /// A save whose first file has not been made yet.
    fn without_file(
        store: &'s dyn Store,
        target: &Target,
        layout: Layout,
        options: &SaveOptions,
        bounds: Bounds,
    ) -> Result<Saving<'s>> {
        let abandoned = remove_abandoned(store, target);
        let place = Place::of(store, target, &layout, &options.replace)?;
        let mut files = Files::new(store, layout, place, &options.leftovers, (options.digests, bounds));
        files.warnings.extend(abandoned);
        let (cancel, open) = (options.cancel.clone(), false);
        let saving = Saving { files, cancel, shard: 0, tensor: 0, done: 0, open, pool: None, block: None };
        saving.files.place.make_folder(store, &saving.files.leftovers)?; // from here on, dropping it takes everything back
        Ok(saving)
    }

    /// The tensor whose bytes, or whose next bytes, are to be written: an index into the tensors of the layout. Tensors
    /// without bytes are passed over. `None`: all have been written.
    pub fn next(&self) -> Option<usize> {
        self.files.layout.shards.get(self.shard)?.tensors.get(self.tensor).copied()
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.files.layout
    }

    /// Takes bytes of the tensor that is [next](Saving::next), as many of those that it still needs. Once those of the last tensor
    /// are taken, all files are complete and durable when this returns.
    ///
    /// # Errors
    /// When they are more than the tensor has left, these or earlier bytes cannot be written, or the save was cancelled.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.check_cancelled()?;
            let left = self.next_bytes().saturating_sub(self.done);
            if !self.open || piece.len() as u64 > left {
                return Err(Error::Poisoned { what: "more bytes were saved of a tensor than it has" });
            }
            self.append(piece)?;
            self.done += piece.len() as u64;
        }
        self.settle()
    }

    /// Writes all tensors, which none have been taken of so far.
    fn write_all(&mut self, tensors: &[Input<'_>]) -> Result<()> {
        feed::feed(&mut self.files, tensors, &self.cancel)?;
        self.shard = self.files.layout.shards.len();
        Ok(())
    }

    /// The files as they lie now, under temporary names, once all tensors have been written: complete and durable.
    ///
    /// # Errors
    /// When tensors are missing.
    pub fn files(&self) -> Result<&[PathBuf]> {
        match self.next() {
            None => Ok(&self.files.paths),
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
        let paths = self.files()?.to_vec();
        let Files { store, layout, place, leftovers, digests, warnings, .. } = &self.files;
        let published = place.publish(*store, paths, layout, leftovers, &self.cancel)?;
        let (tensors, bytes, digests) = (layout.tensors.len(), layout.bytes, digests.clone());
        let warnings = warnings.iter().cloned().chain(published.warnings).collect();
        Ok(Saved { outputs: published.outputs, tensors, bytes, digests, warnings })
    }

    fn check_cancelled(&self) -> Result<()> {
        if self.cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn next_bytes(&self) -> u64 {
        self.next().and_then(|at| self.files.layout.tensors.get(at)).and_then(Outline::bytes).unwrap_or(0)
    }

    /// Goes on to the next tensor that lacks bytes: past what is complete, to the next file where one is.
    fn settle(&mut self) -> Result<()> {
        let layout = Arc::clone(&self.files.layout);
        while let Some(shard) = layout.shards.get(self.shard) {
            if !self.open {
                self.files.open(self.shard)?;
                self.open = true;
                self.append(&shard.header)?;
            }
            if self.next().is_none() {
                self.give()?;
                self.files.end(self.shard)?;
                (self.shard, self.tensor, self.open) = (self.shard + 1, 0, false);
                if self.shard == layout.shards.len() {
                    self.files.complete()?;
                }
            } else if self.done == self.next_bytes() {
                (self.tensor, self.done) = (self.tensor + 1, 0);
            } else {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Copies bytes of the open file to its blocks.
    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let pool = match self.pool.take() {
                Some(pool) => pool,
                None => self.files.blocks(None, &Fallbacks::default())?,
            };
            let pool = self.pool.insert(pool);
            let none = Error::Poisoned { what: "no block to write to" };
            let (mut block, filled) = match self.block.take() {
                Some(block) => block,
                None => (pool.acquire_waiting().ok_or(none)?, 0),
            };
            let room = block.bytes_mut().get_mut(filled..).unwrap_or_default();
            let (now, later) = bytes.split_at(room.len().min(bytes.len()));
            room[..now.len()].copy_from_slice(now);
            let filled = filled + now.len();
            let full = filled == block.len();
            self.block = Some((block, filled));
            if full {
                self.give()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Hands the block to the open file.
    fn give(&mut self) -> Result<()> {
        let Some((block, len)) = self.block.take() else { return Ok(()) };
        self.files.give(self.shard, Filled::new(block, len))
    }
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        self.files.give_up();
        self.files.leftovers.take_back(self.files.store);
    }
}

impl fmt::Debug for Saving<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saving").field("layout", self.layout()).finish_non_exhaustive()
    }
}
