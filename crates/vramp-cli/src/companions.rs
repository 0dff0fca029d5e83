//! Files that go along with converted weights: what a loader needs beside them. All are read before any work.
//!
//! Chosen by name: configuration, tokenizers, templates and the model's own code, in sub-folders too (`1_Pooling/config.json`).
//! Weights, pickles (by name and by content), the state of a training run, hidden files and links that leave the folder are
//! left, and everything that is left is listed. Nothing is executed, and no link is written through.

use std::path::{Path, PathBuf};

use serde::Serialize;
use vramp::Error;
use vramp::checkpoint::Checkpoint;
use vramp::durable::{FileStore, Kind, Store, folder_of, is_temporary};
use vramp::save::{self, Target};

use super::interrupt::Interrupt;
use super::output::Failure;

/// Ends of names that describe a model: its configuration, tokenizer, templates and code.
const NEEDED: &[&str] = &[
    ".json",
    ".jsonl",
    ".yaml",
    ".yml",
    ".txt",
    ".model",
    ".tiktoken",
    ".vocab",
    ".bpe",
    ".spm",
    ".jinja",
    ".jinja2",
    ".py",
];

/// Ends of names that are weights or pickles, in this format or another.
const WEIGHTS: &[&str] = &[
    ".safetensors",
    ".sft",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".hdf5",
    ".onnx",
    ".onnx_data",
    ".msgpack",
    ".pkl",
    ".pickle",
    ".npz",
    ".npy",
    ".distcp",
    ".ot",
    ".nemo",
    ".tflite",
    ".pb",
    ".mlmodel",
    ".joblib",
    ".tar",
    ".zip",
];

/// Beginnings of names (in lower case) that belong to a training run or to one repository, not to the model.
const OTHERS: &[&str] = &[
    "trainer_state",
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "all_results",
    "train_results",
    "eval_results",
    "requirements",
    "readme",
    "license",
    "notice",
];

/// Beginnings of folders that hold the state of a training run.
const TRAINING: &[&str] = &["checkpoint-", "global_step", "runs", "logs", "wandb"];

/// The largest file that is copied, in bytes.
const LARGEST: u64 = 256 << 20;

/// How deep sub-folders are entered, and how many names are looked at.
const DEEPEST: usize = 4;
const MOST_NAMES: usize = 20_000;

/// A file that goes along with the weights.
struct Companion {
    /// Its path below the folder.
    name: String,
    bytes: Vec<u8>,
}

/// A file or folder that does not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Left {
    /// Its path below the folder.
    pub(crate) name: String,
    pub(crate) why: &'static str,
}

/// What goes along, and what is left.
#[derive(Default)]
pub(crate) struct Companions {
    files: Vec<Companion>,
    pub(crate) left: Vec<Left>,
}

impl Companions {
    /// Those of a checkpoint; none where they would be copied onto themselves.
    pub(crate) fn of(checkpoint: &Checkpoint, target: &Target, overwrite: bool) -> Result<Companions, Failure> {
        let first = checkpoint.shards().first().map(|shard| shard.path.as_path());
        let from = first.map(folder_of).unwrap_or(Path::new("."));
        let real = |path: &Path| path.canonicalize().ok();
        let (real_from, real_to) = (real(from), real(target.path()));
        if real_from.is_some() && real_from == real_to {
            return Ok(Companions::default());
        }
        let own = checkpoint.shards().iter().filter_map(|shard| real(&shard.path)).collect();
        let root = real_from.unwrap_or_else(|| from.to_owned());
        let mut walk = Walk { root, to: real_to, own, names: 0, found: Companions::default() };
        walk.enter(from, "", 0)?;
        let mut found = walk.found;
        found.left.sort_by(|a, b| a.name.cmp(&b.name));
        found.demand_room(target, overwrite)?;
        Ok(found)
    }

    /// Refuses to write over something else than a file, or over another file where that was not asked for.
    fn demand_room(&self, target: &Target, overwrite: bool) -> Result<(), Failure> {
        for Companion { name, bytes } in &self.files {
            let to = target.path().join(name);
            match FileStore.examine(&to)?.map(|found| found.kind) {
                None | Some(Kind::Link) if !to.exists() => {}
                Some(Kind::File | Kind::Link) if to.is_file() => {
                    let is_same = FileStore.read(&to, LARGEST).is_ok_and(|found| found == *bytes);
                    if !is_same && !overwrite {
                        let what = "another file of that name would be replaced by a copy".to_owned();
                        let hint = Some("write to another folder, or replace it with --overwrite".to_owned());
                        return Err(Error::Exists { path: to, what, hint }.into());
                    }
                }
                _ => demand_file(&to, "replaced by a copy")?,
            }
        }
        Ok(())
    }

    /// The bytes of one of them.
    pub(crate) fn bytes_of(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|file| file.name == name).map(|file| file.bytes.as_slice())
    }

    /// Writes them; returns the paths and warnings.
    pub(crate) fn copy(&self, target: &Target, interrupt: &Interrupt) -> Result<(Vec<PathBuf>, Vec<String>), Failure> {
        let (mut copied, mut warnings) = (Vec::with_capacity(self.files.len()), Vec::new());
        for Companion { name, bytes } in &self.files {
            interrupt.check()?;
            let path = target.path().join(name);
            make_folders(target.path(), name)?;
            warnings.extend(save::write_file(&FileStore, &path, bytes, &interrupt.leftovers())?);
            copied.push(path);
        }
        Ok((copied, warnings))
    }
}

/// Makes the sub-folders of a file that are missing.
fn make_folders(root: &Path, name: &str) -> Result<(), Failure> {
    let mut folder = root.to_owned();
    let parents = name.rsplit_once('/').map_or("", |(parents, _)| parents);
    for part in parents.split('/').filter(|part| !part.is_empty()) {
        folder.push(part);
        if !FileStore.is_folder(&folder)? {
            FileStore.make_folder(&folder)?;
            FileStore.sync_folder(folder_of(&folder))?;
        }
    }
    Ok(())
}

/// A folder of a model on the way through.
struct Walk {
    /// The folder itself, without links.
    root: PathBuf,
    /// Where the result goes, which may lie in it.
    to: Option<PathBuf>,
    /// The files that are converted.
    own: Vec<PathBuf>,
    names: usize,
    found: Companions,
}

impl Walk {
    fn enter(&mut self, folder: &Path, below: &str, depth: usize) -> Result<(), Failure> {
        for name in FileStore.list(folder)? {
            let (path, full) = (folder.join(&name), format!("{below}{name}"));
            self.names += 1;
            if self.names > MOST_NAMES {
                self.leave(full, "the folder has too many names: this one and those after it were not looked at");
                return Ok(());
            }
            if name.starts_with('.') {
                if !is_temporary(&name) {
                    self.leave(full, "hidden");
                }
                continue;
            }
            let kind = FileStore.examine(&path)?.map(|found| found.kind);
            match kind {
                Some(Kind::Folder) => self.folder(&path, &name, full, depth)?,
                Some(Kind::File | Kind::Link) => self.file(&path, &name, full, kind == Some(Kind::Link))?,
                _ => self.leave(full, "no regular file"),
            }
        }
        Ok(())
    }

    fn folder(&mut self, path: &Path, name: &str, full: String, depth: usize) -> Result<(), Failure> {
        if self.to.is_some() && path.canonicalize().ok() == self.to {
            return Ok(());
        }
        if TRAINING.iter().any(|beginning| name.to_lowercase().starts_with(beginning)) {
            self.leave(full, "a training run's");
        } else if depth == DEEPEST {
            self.leave(full, "too deep");
        } else {
            self.enter(path, &format!("{full}/"), depth + 1)?;
        }
        Ok(())
    }

    fn file(&mut self, path: &Path, name: &str, full: String, is_link: bool) -> Result<(), Failure> {
        let real = path.canonicalize().ok();
        if real.as_ref().is_some_and(|real| self.own.contains(real)) {
            return Ok(());
        }
        let lower = name.to_lowercase();
        let ends = |ends: &[&str]| ends.iter().any(|end| lower.ends_with(end));
        if ends(WEIGHTS) {
            self.leave(full, "weights or a pickle");
        } else if lower.ends_with(".index.json") {
            // Of these weights, which get one of their own, or of others, which are not there.
        } else if !ends(NEEDED) || OTHERS.iter().any(|beginning| lower.starts_with(beginning)) {
            self.leave(full, "nothing that a loader is known to need");
        } else if is_link && real.as_ref().is_some_and(|real| !self.is_inside(real)) {
            self.leave(full, "a link that leaves the folder");
        } else if is_link && path.is_dir() {
            self.leave(full, "a link to a folder");
        } else {
            demand_file(path, "copied")?;
            let bytes = FileStore.read(path, LARGEST)?;
            if is_packed(&bytes) {
                self.leave(full, "a pickle or an archive by its content");
            } else {
                self.found.files.push(Companion { name: full, bytes });
            }
        }
        Ok(())
    }

    /// Whether a file lies in the folder, or where the Hugging Face cache keeps the files of a snapshot.
    fn is_inside(&self, real: &Path) -> bool {
        let snapshots = self.root.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"));
        let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
        real.starts_with(&self.root) || blobs.is_some_and(|blobs| real.starts_with(blobs))
    }

    fn leave(&mut self, name: String, why: &'static str) {
        self.found.left.push(Left { name, why });
    }
}

/// Whether a file begins as a pickle or an archive does, whatever its name.
fn is_packed(bytes: &[u8]) -> bool {
    matches!(bytes, [0x80, 0..=5, ..] | [b'P', b'K', 3 | 5, 4 | 6, ..] | [0x1f, 0x8b, ..])
}

/// A link to nothing, or something that would never end, is no file.
fn demand_file(path: &Path, what: &str) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => {
            let what = format!("it is no regular file, and cannot be {what}");
            Err(Error::Unsupported { path: path.to_owned(), tensor: None, what }.into())
        }
        Err(source) => Err(Error::io("open", path, source).into()),
    }
}
