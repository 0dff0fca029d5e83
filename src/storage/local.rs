//! The machine's own file systems as a storage: what lies at a path, the names of a folder, and opening. It reads no bytes of a file;
//! `file` does.

use std::fs::{DirEntry, FileType};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Entry, EntryKind, Fallbacks, Head, LocalFile, Location, OpenFile, Storage};
use crate::error::{Error, Result};

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

/// The error of a file that cannot be opened; a link that leads nowhere is named.
pub(super) fn cannot_open(path: &Path, error: io::Error) -> Error {
    match dangling(path) {
        Some(link) if error.kind() == io::ErrorKind::NotFound => Error::NotFound {
            what: format!("{}: {link}", path.display()),
            hint: Some("the download was cut short or its blob was removed; fetch it again".into()),
        },
        _ => Error::io("open", path, error),
    }
}

/// Refuses what is no regular file: a device may act when it is opened, and a pipe cannot be read by position.
pub(super) fn demand_regular(path: &Path, kind: FileType) -> Result<()> {
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    let what = format!("it is {what}, not a regular file: weights are read by position");
    Err(Error::Unsupported { path: path.to_owned(), tensor: None, what })
}

/// `a link to "x", which is not there`, if the path is a link that leads nowhere, or goes through a folder that is one.
fn dangling(path: &Path) -> Option<String> {
    let is_gone = |path: &Path| std::fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    if !is_gone(path) {
        return None;
    }
    // The outermost link that leads nowhere: what lies below it cannot be looked at.
    let mut above: Vec<&Path> = path.ancestors().filter(|above| !above.as_os_str().is_empty()).collect();
    above.reverse();
    let link = above.into_iter().find(|above| above.is_symlink() && is_gone(above))?;
    let target = std::fs::read_link(link).ok()?;
    let end = end_of(link);
    let within = if link == path { String::new() } else { format!("its folder {} is ", link.display()) };
    let by_way = link.parent().map_or(target.clone(), |parent| parent.join(&target));
    let which = if end == by_way { String::new() } else { format!(" and in the end to {}", end.display()) };
    Some(format!("{within}a link to {}{which}, which is not there", target.display()))
}

/// Where a chain of links ends.
fn end_of(link: &Path) -> PathBuf {
    /// As many as the kernel follows.
    const MOST_LINKS: usize = 40;
    let mut end = link.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(target) = std::fs::read_link(&end) else { break };
        end = end.parent().map_or(target.clone(), |parent| parent.join(&target));
    }
    end
}
