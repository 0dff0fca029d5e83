//! The machine's own file systems as a storage: what lies at a path, the names of a folder, and opening. It reads no bytes of a file;
//! `file` does.

use std::fs::DirEntry;
use std::path::Path;
use std::sync::Arc;

use super::file::LocalFile;
use super::location::Location;
use super::paths::{cannot_open, dangling};
use super::port::{Entry, EntryKind, Head, OpenFile, Storage};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;

/// The machine's own file systems.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalStorage;

impl Storage for LocalStorage {
    fn open(&self, at: &Location, fallbacks: &Fallbacks) -> Result<Arc<dyn OpenFile>> {
        Ok(Arc::new(LocalFile::open(at.as_path(), fallbacks)?))
    }

    fn head(&self, at: &Location) -> Result<Head> {
        let path = at.as_path();
        let meta = std::fs::metadata(path).map_err(|error| cannot_open(path, error))?;
        let kind = match meta.file_type() {
            kind if kind.is_file() => EntryKind::File,
            kind if kind.is_dir() => EntryKind::Folder,
            _ => EntryKind::Other,
        };
        Ok(Head { kind, bytes: meta.len() })
    }

    fn list(&self, at: &Location) -> Result<Vec<Entry>> {
        // The folder of a bare name is the working folder.
        let path = Some(at.as_path()).filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let cannot = |error| Error::io("list", path, error);
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(path).map_err(cannot)? {
            let entry = entry.map_err(cannot)?;
            let kind = kind_of(&entry);
            // A name that is not UTF-8 is none that any writer of checkpoints makes.
            if let Ok(name) = entry.file_name().into_string() {
                entries.push(Entry { name, kind });
            }
        }
        Ok(entries)
    }

    fn dangling(&self, at: &Location) -> Option<String> {
        dangling(at.as_path())
    }
}

/// The kind of what an entry leads to.
fn kind_of(entry: &DirEntry) -> EntryKind {
    let is_folder = match entry.file_type() {
        Ok(kind) if kind.is_symlink() => entry.path().is_dir(),
        Ok(kind) => kind.is_dir(),
        Err(_) => false,
    };
    if is_folder { EntryKind::Folder } else { EntryKind::File }
}
