//! The write port for the local file systems.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use super::growing::Growing;
use super::port::{Found, Held, Kind, NewFile, Store, busy, is_there};
use crate::error::{Error, Result};
use crate::os;

/// The local file systems.
#[derive(Debug, Clone, Copy, Default)]
pub struct FileStore;

impl Store for FileStore {
    fn examine(&self, path: &Path) -> Result<Option<Found>> {
        match std::fs::symlink_metadata(path) {
            Ok(metadata) => Ok(Some(found(&metadata))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("examine", path, e)),
        }
    }

    fn is_folder(&self, path: &Path) -> Result<bool> {
        match std::fs::metadata(path) {
            Ok(metadata) => Ok(metadata.is_dir()),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
            Err(e) => Err(Error::io("examine", path, e)),
        }
    }

    fn list(&self, folder: &Path) -> Result<Vec<String>> {
        let cannot = |e| Error::io("list", folder, e);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(cannot)? {
            names.extend(entry.map_err(cannot)?.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Vec<u8>> {
        let cannot = |e| Error::io("read", path, e);
        let found = std::fs::metadata(path).map_err(cannot)?.len();
        if found > limit {
            let what = format!("the length in bytes of {}", path.display());
            return Err(Error::Limit { what, limit, found, hint: None });
        }
        std::fs::read(path).map_err(cannot)
    }

    fn free_bytes(&self, folder: &Path) -> Option<u64> {
        os::free_disk_bytes(folder).ok()
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        DirBuilder::new().create(path).map_err(|e| refused("make", path, e))
    }

    fn create(&self, path: &Path, mode: Option<u32>) -> Result<Box<dyn NewFile>> {
        // Never more open than asked for, not for a moment, and not where the mode cannot be set afterwards.
        let open = mode.map_or(0o666, |mode| mode & 0o666);
        let file = OpenOptions::new().write(true).create_new(true).mode(open).open(path);
        let file = file.map_err(|e| refused("create", path, e))?;
        if locked(&file, path) == Some(false) {
            return Err(is_there(path)); // another process took it for an abandoned one
        }
        let set = |mode| file.set_permissions(Permissions::from_mode(mode)).err().map(|error| (mode, error));
        let warning = mode.and_then(set).and_then(|(mode, error)| {
            let found = file.metadata().map_or(open, |metadata| metadata.mode() & 0o7777);
            let what =
                || format!("the storage does not let the mode {mode:o} be set: a new file has {found:o} ({error})");
            (found != mode).then(what)
        });
        Ok(Box::new(Growing::new(file, path, warning)))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to).map_err(|e| Error::io("put the new file in place of", to, e))
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<()> {
        match os::rename_new(from, to) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::ENOTSUP)) => {
                match self.examine(to)? {
                    Some(_) => Err(is_there(to)),
                    None => self.rename(from, to),
                }
            }
            renamed => renamed.map_err(|e| refused("put the new file in place of", to, e)),
        }
    }

    fn sync_folder(&self, folder: &Path) -> Result<()> {
        let synced = File::open(folder).and_then(|opened| opened.sync_all());
        match synced {
            // Some network file systems have no such question: their names are durable when the call returns.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOTSUP)) => Ok(()),
            synced => synced.map_err(|e| Error::io("sync", folder, e)),
        }
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let is_folder = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir());
        let removed = if is_folder { std::fs::remove_dir(path) } else { std::fs::remove_file(path) };
        removed.map_err(|e| Error::io("remove", path, e))
    }

    fn take_away(&self, path: &Path) -> Result<Box<dyn Send>> {
        // A file that somebody holds is freed when it is let go. Where it cannot be held, removing it takes as long as it takes.
        let held = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path);
        self.remove(path).map(|()| -> Box<dyn Send> { Box::new(held) })
    }

    fn lock(&self, folder: &Path) -> Result<Box<dyn Send>> {
        let opened = File::open(folder).map_err(|e| Error::io("open", folder, e))?;
        match os::try_lock(opened.as_fd()) {
            Ok(false) => Err(busy(folder)),
            Ok(true) | Err(_) => Ok(Box::new(opened)),
        }
    }

    fn hold(&self, path: &Path) -> Held {
        // Some network file systems lock only what is open for writing.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        match OpenOptions::new().read(true).write(true).custom_flags(flags).open(path) {
            Ok(file) if file.metadata().is_ok_and(|it| it.is_file()) && locked(&file, path) == Some(true) => {
                Held::Free(Box::new(file))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Held::Missing,
            Ok(_) | Err(_) => Held::Busy,
        }
    }
}

/// Locks an open file: whether nobody else has it, and `path` still leads to it. `None`: the storage has no locks.
fn locked(file: &File, path: &Path) -> Option<bool> {
    if !os::try_lock(file.as_fd()).ok()? {
        return Some(false);
    }
    let (held, there) = (file.metadata().ok()?, std::fs::symlink_metadata(path).ok());
    Some(there.is_some_and(|there| (there.dev(), there.ino()) == (held.dev(), held.ino())))
}

fn found(metadata: &std::fs::Metadata) -> Found {
    let kind = match metadata.file_type() {
        kind if kind.is_file() => Kind::File,
        kind if kind.is_dir() => Kind::Folder,
        kind if kind.is_symlink() => Kind::Link,
        _ => Kind::Other,
    };
    let time = metadata.mtime().wrapping_mul(1_000_000_000).wrapping_add(metadata.mtime_nsec());
    let version = u128::from(metadata.ino()) << 64 | u128::from(time.cast_unsigned());
    Found { kind, bytes: metadata.len(), mode: metadata.mode() & 0o7777, version }
}

fn refused(op: &'static str, path: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::AlreadyExists => is_there(path),
        _ => Error::io(op, path, error),
    }
}
