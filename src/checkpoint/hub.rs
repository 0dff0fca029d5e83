//! Where a Hugging Face name or cache folder leads on this machine.
//!
//! A cache folder is `models--ORG--NAME` with `refs/main` (the revision) and `snapshots/REVISION` (links into `blobs`).
//! Nothing is downloaded, and no environment variable is read: the caller says where the cache is.

use std::path::{Path, PathBuf};

use super::index::is_plain_name;
use super::shard;
use crate::error::{Error, Result};
use crate::storage::{EntryKind, Location, Storage};

/// The cache folder of a name such as `org/name`, if `path` can be one at all.
pub(crate) fn cache_folder(path: &Path, cache: &Path) -> Option<PathBuf> {
    let name = model_name(path)?;
    Some(cache.join(format!("models--{}", name.replace('/', "--"))))
}

/// `org/name` or `name`, as the Hub allows them.
pub(crate) fn model_name(path: &Path) -> Option<&str> {
    let name = path.to_str()?;
    let is_word = |word: &str| {
        !word.is_empty()
            && !word.starts_with(['.', '-'])
            && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    let words = name.split('/').collect::<Vec<_>>();
    let is_file = [".safetensors", ".sft", ".json", ".pt", ".bin"].iter().any(|end| name.ends_with(end));
    (words.len() <= 2 && words.iter().all(|word| is_word(word)) && !is_file).then_some(name)
}

/// Whether the folder is a model's folder in a cache, not a snapshot of it.
pub(crate) fn is_cache_folder(storage: &dyn Storage, folder: &Path) -> bool {
    let has = |name: &str| is_folder(storage, &folder.join(name));
    has("snapshots") && (has("refs") || has("blobs"))
}

fn is_folder(storage: &dyn Storage, path: &Path) -> bool {
    storage.head(&Location::from(path)).is_ok_and(|head| head.kind == EntryKind::Folder)
}

/// The longest `refs/main` that is read, in bytes: it holds a commit's hash or the name of a branch.
const MAX_REF_BYTES: u64 = 4096;

/// The snapshot that `refs/main` names, or the only one there is.
pub(crate) fn snapshot(storage: &dyn Storage, folder: &Path) -> Result<PathBuf> {
    let snapshots = folder.join("snapshots");
    // Read as weights are: a named pipe in its place must not be waited for.
    let named = shard::read_text(storage, &folder.join("refs/main"), MAX_REF_BYTES).ok();
    let named = named.and_then(|text| String::from_utf8(text).ok());
    if let Some(revision) = named.as_deref().map(str::trim).filter(|revision| is_plain_name(revision)) {
        let snapshot = snapshots.join(revision);
        return if is_folder(storage, &snapshot) { Ok(snapshot) } else { Err(absent(folder, revision)) };
    }
    match &all_snapshots(storage, &snapshots)?[..] {
        [only] => Ok(only.clone()),
        several => Err(undecided(folder, several)),
    }
}

fn all_snapshots(storage: &dyn Storage, snapshots: &Path) -> Result<Vec<PathBuf>> {
    let entries = storage.list(&Location::from(snapshots))?.into_iter();
    let folders = entries.filter(|entry| entry.kind == EntryKind::Folder);
    let mut found: Vec<PathBuf> = folders.map(|entry| snapshots.join(entry.name)).collect();
    found.sort();
    Ok(found)
}

fn absent(folder: &Path, revision: &str) -> Error {
    Error::NotFound {
        what: format!("{}: refs/main names the snapshot {revision:?}, which is not there", folder.display()),
        hint: Some("download the model again; vramp does not download".into()),
    }
}

fn undecided(folder: &Path, snapshots: &[PathBuf]) -> Error {
    let names: Vec<_> = snapshots.iter().filter_map(|path| path.file_name()?.to_str()).take(10).collect();
    Error::NotFound {
        what: format!("{}: no refs/main, and {} snapshots", folder.display(), snapshots.len()),
        hint: Some(match names[..] {
            [] => "download the model again; vramp does not download".into(),
            _ => format!("name the folder of one: {}", names.join(", ")),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        for name in ["org/name", "gpt2", "meta-llama/Llama-3.1-8B"] {
            assert_eq!(model_name(Path::new(name)), Some(name));
        }
        for path in ["./org/name", "/org/name", "a/b/c", "../x", "org/", "model.safetensors", "a b/c"] {
            assert_eq!(model_name(Path::new(path)), None, "{path}");
        }
    }
}
