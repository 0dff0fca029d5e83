//! Where and how a checkpoint is saved or converted, and what came of it: plain data. It looks at no folder.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::layout::Notes;
use super::leftovers::Leftovers;
use crate::checkpoint::{Selection, Skipped};
use crate::digest::Digest;
use crate::load::{Cancel, Progress, TransferOptions};

/// The most bytes of tensors in one file, unless told otherwise: what the Hugging Face libraries take.
pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

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

/// What a save may replace. A place that holds another model is refused before any work, with [`Error::Exists`](crate::Error::Exists).
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
    pub(super) fn allows(&self, path: &Path) -> bool {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        match self {
            Replace::Nothing => false,
            Replace::These(files) => files.iter().any(|file| real(file) == real(path)),
            Replace::Anything => true,
        }
    }
}

/// The hint of an [`Error::Exists`](crate::Error::Exists) that [`Replace::Anything`] avoids.
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
    /// Where the save records the files that it would leave behind, for cleanup on interrupt.
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

/// A single file has no limit.
pub(super) fn shard_limit(target: &Target, max_shard_bytes: u64) -> u64 {
    match target {
        Target::File(_) => u64::MAX,
        Target::Folder(_) => max_shard_bytes,
    }
}

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
    /// Warnings: files of the checkpoint that was replaced, files that killed saves had left, permissions that the storage
    /// does not keep.
    pub warnings: Vec<String>,
}

/// What becomes of tensors that have several names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ties {
    /// Each name gets bytes of its own: every reader understands that.
    #[default]
    Write,
    /// One name gets the bytes, the others are recorded in the metadata as `safetensors.torch.save_model` does.
    Alias,
}

/// How a checkpoint is converted.
#[derive(Clone)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Which tensors, under which names.
    pub selection: Selection,
    /// How they are read, and what floating-point tensors become. Its switch stops the whole conversion.
    pub transfer: TransferOptions,
    /// What becomes of tensors that have several names.
    pub ties: Ties,
    /// The most bytes of tensors in one file of a folder.
    pub max_shard_bytes: u64,
    /// Whether another model may be replaced. The checkpoint that is converted may always be.
    pub overwrite: bool,
    /// Whether the checksums that the checkpoint states are compared first, and whether the files are read back, past the page
    /// cache where possible, and compared before they are put in place.
    pub check: bool,
    /// Called with the bytes done and the total.
    pub progress: Option<Progress>,
    /// Where the conversion records the files that it would leave behind, for cleanup on interrupt.
    pub leftovers: Leftovers,
}

impl fmt::Debug for ConvertOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConvertOptions { selection, transfer, ties, max_shard_bytes, overwrite, check, .. } = self;
        let mut debug = f.debug_struct("ConvertOptions");
        debug.field("selection", selection).field("transfer", transfer).field("ties", ties);
        debug.field("max_shard_bytes", max_shard_bytes).field("overwrite", overwrite).field("check", check);
        debug.finish_non_exhaustive()
    }
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        ConvertOptions {
            selection: Selection::default(),
            transfer: TransferOptions::default(),
            ties: Ties::default(),
            max_shard_bytes: MAX_SHARD_BYTES,
            overwrite: false,
            check: false,
            progress: None,
            leftovers: Leftovers::default(),
        }
    }
}

setters!(ConvertOptions {
    /// Sets which tensors to convert, and under which names.
    selection: Selection,
    /// Sets how they are read, and what floating-point tensors become.
    transfer: TransferOptions,
    /// Sets what becomes of tensors that have several names.
    ties: Ties,
    /// Sets the most bytes of tensors in one file of a folder.
    max_shard_bytes: u64,
    /// Sets whether another model may be replaced.
    overwrite: bool,
    /// Sets whether the files are read back and compared before they are put in place.
    check: bool,
    /// Sets the function that gets the bytes done so far and all bytes.
    progress: into Option<Progress>,
    /// Sets where the conversion notes the files that it would leave behind.
    leftovers: Leftovers,
});

/// What a conversion did.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Converted {
    /// The files and their tensors.
    pub saved: Saved,
    /// Tensors of the checkpoint that are not in the files, and why.
    pub skipped: Vec<Skipped>,
    /// The tensor of scales that each quantised weight was multiplied by.
    pub scales: BTreeMap<Arc<str>, Arc<str>>,
    /// Further names that were recorded: alias and name.
    pub ties: BTreeMap<Arc<str>, Arc<str>>,
    /// Warnings about the checkpoint, the casts and what was replaced.
    pub warnings: Vec<String>,
}
