//! Where bytes become durable: new files beside the old, synced, renamed, and the folder synced.
//!
//! [`Store`] is the port, [`FileStore`] the local file systems. Only this file creates, renames, syncs or removes anything
//! for the library; `save` says in which order. A file is never written in place: [`Store::create`] makes new ones only,
//! under names that [`temporary`] gives, and nothing here follows a link at the end of a path. It knows no format. How bytes get
//! to the disk is `growing`'s.

mod growing;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::memory::Filled;
use crate::os;
#[doc(hidden)]
pub use growing::BLOCK_BYTES;
use growing::Growing;

/// Something that a name of a folder leads to; links are not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub kind: Kind,
    /// Its length in bytes, where it is a file.
    pub bytes: u64,
    /// Its permissions, as `chmod` takes them.
    pub mode: u32,
    /// Another number for another file of the same name, and another after its bytes were changed, as far as the storage tells.
    pub version: u128,
}

/// What a name leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link, to whatever.
    Link,
    /// A device, a pipe, a socket.
    Other,
}

/// A place where files are made durable. What one call promises holds from the time when it has returned.
pub trait Store: Send + Sync {
    /// What `path` is, if it is anything. A link is a link.
    ///
    /// # Errors
    /// When it cannot be asked.
    fn examine(&self, path: &Path) -> Result<Option<Found>>;

    /// Whether `path` is a folder, or a link to one.
    ///
    /// # Errors
    /// When it cannot be asked.
    fn is_folder(&self, path: &Path) -> Result<bool>;

    /// The names in a folder, sorted; those that are not UTF-8 are left out.
    ///
    /// # Errors
    /// When it cannot be read.
    fn list(&self, folder: &Path) -> Result<Vec<String>>;

    /// The whole of a small file (an index).
    ///
    /// # Errors
    /// When it cannot be read, or has more than `limit` bytes.
    fn read(&self, path: &Path, limit: u64) -> Result<Vec<u8>>;

    /// Bytes that can still be written to the file system of a folder, where it says.
    fn free_bytes(&self, folder: &Path) -> Option<u64>;

    /// Makes a folder in a folder that is there.
    ///
    /// # Errors
    /// When it is there already, or cannot be made.
    fn make_folder(&self, path: &Path) -> Result<()>;

    /// Makes a new, empty file, with the permissions `mode` or else those that the user's mask leaves of 0666.
    ///
    /// # Errors
    /// [`Error::Exists`] when something has that name; when it cannot be made.
    fn create(&self, path: &Path, mode: Option<u32>) -> Result<Box<dyn NewFile>>;

    /// Gives a file another name in the same folder, in one step: whoever opens the new name finds the old file or the new
    /// one, whole. What has the new name is replaced; a link is replaced itself.
    ///
    /// # Errors
    /// When it cannot be renamed; nothing has changed then.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// The same for a name that nothing has. Where the storage can, that is one step too; else it is looked up just before.
    ///
    /// # Errors
    /// [`Error::Exists`] when something has the name; when it cannot be renamed. Nothing has changed then.
    fn rename_new(&self, from: &Path, to: &Path) -> Result<()> {
        match self.examine(to)? {
            Some(_) => Err(is_there(to)),
            None => self.rename(from, to),
        }
    }

    /// Makes the names of a folder durable: every file made, renamed and removed in it so far.
    ///
    /// # Errors
    /// When the storage does not confirm it.
    fn sync_folder(&self, folder: &Path) -> Result<()>;

    /// Removes a file or a link, or an empty folder.
    ///
    /// # Errors
    /// When it cannot be removed.
    fn remove(&self, path: &Path) -> Result<()>;

    /// The same without waiting for the bytes of a file to be freed, which may take seconds: that is done once what it gives is
    /// dropped, or the process has ended. A storage that cannot part the two frees them at once.
    ///
    /// # Errors
    /// When it cannot be removed.
    fn take_away(&self, path: &Path) -> Result<Box<dyn Send>> {
        self.remove(path).map(|()| -> Box<dyn Send> { Box::new(()) })
    }

    /// Keeps everybody else who asks out of a folder until what it gives is dropped or the process ends. Nothing is written for
    /// it. A storage without locks lets all in.
    ///
    /// # Errors
    /// [`Error::Conflict`], at once, when somebody else has it; when the folder cannot be opened.
    fn lock(&self, folder: &Path) -> Result<Box<dyn Send>>;

    /// Whether a live process holds a file that [`Store::create`] made; see [`NewFile::sync`]. It is asked by taking the file's
    /// lock, which [`Held::Free`] keeps. What cannot be told counts as held: only what is known to be free may be removed.
    fn hold(&self, _path: &Path) -> Held {
        Held::Busy
    }
}

/// Who holds a file.
pub enum Held {
    /// Nothing has the name.
    Missing,
    /// A live process, or what is there is no file that [`Store::create`] makes, or the storage does not tell.
    Busy,
    /// No other process; the lock is ours until this is dropped.
    Free(Box<dyn Send>),
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Held::Missing => "Missing",
            Held::Busy => "Busy",
            Held::Free(_) => "Free",
        })
    }
}

/// A file in the making.
pub trait NewFile: Send {
    /// Makes room for a file of `bytes` bytes, where the storage can: writing is faster then, and a full disk is an error before
    /// anything is written. Called once at most, before anything is added.
    ///
    /// # Errors
    /// When there is no room for them.
    fn reserve(&mut self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Adds bytes at its end. They may stay in memory until [`NewFile::sync`].
    ///
    /// # Errors
    /// When they cannot be written: the disk is full.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Adds the bytes of a buffer at its end, and returns at once where the storage writes in the background; it keeps the buffer
    /// until then. Buffers of a whole [`BLOCK_BYTES`] are written best.
    ///
    /// # Errors
    /// When these bytes, or others that were added before, cannot be written.
    fn append_filled(&mut self, block: Filled) -> Result<()> {
        self.append(block.bytes())
    }

    /// Makes every byte durable, and asks the file system whether the file has as many as were added. The file is locked until
    /// what this gives is dropped, or the process ends, so that others can tell it from one that a killed process left.
    ///
    /// # Errors
    /// When the storage does not confirm it, or the length is another one.
    fn sync(self: Box<Self>) -> Result<Box<dyn Send>>;

    /// What a person should know of the file: permissions that the storage does not keep.
    fn warning(&self) -> Option<String> {
        None
    }
}

/// The beginning and the end of temporary names.
const TEMPORARY: (&str, &str) = (".vramp-", ".tmp");

/// The temporary name number `count` of this process, in `folder`. Names of processes elsewhere may be the same: whoever
/// meets one that exists takes the next.
#[doc(hidden)]
pub fn temporary(folder: &Path, count: u64) -> PathBuf {
    let (begin, end) = TEMPORARY;
    folder.join(format!("{begin}{}-{count}{end}", std::process::id()))
}

/// The temporary name number `count` of a save whose first file is `first`. Only that one stays open, and locked, until the save is
/// over: a save of many files would run out of descriptors otherwise.
#[doc(hidden)]
pub fn temporary_after(first: &Path, count: u64) -> PathBuf {
    let name = first.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(TEMPORARY.1).unwrap_or(&name);
    first.with_file_name(format!("{stem}-{count}{}", TEMPORARY.1))
}

/// Whether a name is one that [`temporary`] or [`temporary_after`] gives.
#[doc(hidden)]
pub fn is_temporary(name: &str) -> bool {
    first_temporary(name).is_some()
}

/// Of a temporary name, the name of its save's first file.
fn first_temporary(name: &str) -> Option<String> {
    let (begin, end) = TEMPORARY;
    let is_number = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers: Vec<&str> = name.strip_prefix(begin)?.strip_suffix(end)?.split('-').collect();
    let (pid, first) = (numbers.first()?, numbers.get(1)?);
    (numbers.len() <= 3 && numbers.iter().all(is_number)).then(|| format!("{begin}{pid}-{first}{end}"))
}

/// Removes the temporary files of a folder that killed processes left, and returns their names. What a live process holds stays, and
/// so does all that is no regular file. The folder is locked meanwhile; where another process has it locked, nothing is done.
pub fn remove_abandoned(store: &dyn Store, folder: &Path) -> Vec<String> {
    let names = store.list(folder).unwrap_or_default();
    let mut saves: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names {
        if let Some(first) = first_temporary(&name) {
            saves.entry(first).or_default().push(name);
        }
    }
    // Under the lock no save is being put in place: a first file that is missing now was not renamed a moment ago.
    let Some(_lock) = (!saves.is_empty()).then(|| store.lock(folder).ok()).flatten() else { return Vec::new() };
    let mut removed = Vec::new();
    for (first, names) in saves {
        let first_is_free = match store.hold(&folder.join(&first)) {
            Held::Busy => continue,
            Held::Free(lock) => Some(lock),
            Held::Missing => None,
        };
        let others = names.iter().filter(|name| **name != first);
        for name in others.filter(|name| matches!(store.hold(&folder.join(name)), Held::Free(_))) {
            removed.extend(store.remove(&folder.join(name)).is_ok().then(|| name.clone()));
        }
        // The first file last: as long as it is there, its lock speaks for the others.
        if first_is_free.is_some() && store.remove(&folder.join(&first)).is_ok() {
            removed.push(first);
        }
    }
    removed
}

/// The folder that a path lies in.
#[doc(hidden)]
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

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

/// Something has that name.
pub(crate) fn is_there(path: &Path) -> Error {
    Error::Exists { path: path.to_owned(), what: "it is there already".to_owned(), hint: None }
}

/// Somebody else has the lock of a folder.
pub(crate) fn busy(folder: &Path) -> Error {
    Error::Conflict {
        path: folder.to_owned(),
        what: "another save is being put in place here at this moment".to_owned(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CrashStore, store_conformance};

    #[test]
    fn local_files_and_the_double_keep_the_same_promises() {
        let folder = tempfile::tempdir().unwrap();
        store_conformance(&FileStore, folder.path());
        let store = CrashStore::new();
        store.make_folder(Path::new("/f")).unwrap();
        store_conformance(&store, Path::new("/f"));
    }

    #[test]
    fn a_new_file_has_the_mode_that_the_mask_leaves_or_the_one_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |name: &str| FileStore.examine(&folder.path().join(name)).unwrap().unwrap().mode;
        std::fs::write(folder.path().join("plain"), b"").unwrap();
        FileStore.create(&folder.path().join("new"), None).unwrap().sync().unwrap();
        assert_eq!(mode("new"), mode("plain"), "what any program's new file gets");
        FileStore.create(&folder.path().join("asked"), Some(0o751)).unwrap().sync().unwrap();
        assert_eq!(mode("asked"), 0o751);
    }

    #[test]
    fn a_file_that_is_taken_away_has_no_name_and_keeps_its_bytes_until_it_is_let_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        std::fs::write(&path, b"bytes").unwrap();
        let deleted = PathBuf::from(format!("{} (deleted)", path.canonicalize().unwrap().display()));
        let is_held = || {
            let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            descriptors.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|leads_to| leads_to == deleted)
        };
        let held = FileStore.take_away(&path).unwrap();
        assert!(!path.exists() && is_held());
        std::fs::remove_dir(folder.path()).unwrap();
        drop(held);
        assert!(!is_held());
        assert_eq!(FileStore.take_away(&path).map(drop).unwrap_err().kind().as_str(), "not_found");
    }

    #[test]
    fn a_link_is_replaced_and_what_it_leads_to_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("target"), b"old").unwrap();
        std::os::unix::fs::symlink(path("target"), path("link")).unwrap();
        assert_eq!(FileStore.examine(&path("link")).unwrap().unwrap().kind, Kind::Link);
        FileStore.create(&path("new"), None).unwrap().sync().unwrap();
        FileStore.rename(&path("new"), &path("link")).unwrap();
        assert_eq!(FileStore.examine(&path("link")).unwrap().unwrap().kind, Kind::File);
        assert_eq!(std::fs::read(path("target")).unwrap(), b"old");
    }

    #[test]
    fn temporary_names_are_told_from_others() {
        let name = temporary(Path::new("/a"), 3).file_name().unwrap().to_str().unwrap().to_owned();
        assert!(is_temporary(&name), "{name}");
        let second = temporary_after(&temporary(Path::new("/a"), 3), 5);
        let second = second.file_name().unwrap().to_str().unwrap();
        assert!(is_temporary(second) && first_temporary(second).as_ref() == Some(&name), "{second}");
        assert_eq!(first_temporary(&name), Some(name));
        let others = [
            "model.safetensors",
            ".vramp-x.tmp",
            ".vramp-1-.tmp",
            "a.tmp",
            ".vramp-1-2",
            "vramp-1-2.tmp",
            ".vramp-1-2-3-4.tmp",
        ];
        for other in others {
            assert!(!is_temporary(other), "{other}");
        }
    }
}
