//! The write port: a [`Store`] makes new files, and a [`NewFile`] becomes durable. It says what they promise and does nothing.

use std::fmt;
use std::path::Path;

use crate::error::{Error, Result};
use crate::memory::Filled;

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

    /// Renames a file within its folder, in one step: an open of the new name finds the old file or the new
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

    /// Takes an exclusive advisory lock on a folder, until the returned value is dropped or the process ends. Nothing is written for
    /// it. A storage without locks lets all in.
    ///
    /// # Errors
    /// [`Error::Conflict`], without waiting, if another process holds it; an error if the folder cannot be opened.
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
    /// until then. Buffers of a whole `BLOCK_BYTES` are written best.
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

    /// A warning about the file: permissions that the storage does not keep.
    fn warning(&self) -> Option<String> {
        None
    }
}

/// Something has that name.
pub(crate) fn is_there(path: &Path) -> Error {
    Error::Exists { path: path.to_owned(), what: "it is there already".to_owned(), hint: None }
}

/// Another process holds the lock of a folder.
pub(crate) fn busy(folder: &Path) -> Error {
    Error::Conflict {
        path: folder.to_owned(),
        what: "another save is being put in place here at this moment".to_owned(),
    }
}
