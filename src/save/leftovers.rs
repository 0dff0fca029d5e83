//! The files that an unfinished save would leave behind, and small files that are written in one step.
//!
//! Temporary files, numbered files that no index names yet, a folder that was made: all of it is one list, emptied by the switch
//! or by removing what is on it. The first temporary file of a save stays open and locked until then, so that other processes can tell
//! a save under way from one that was killed (`durable::remove_abandoned`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::durable::{self, Kind, NewFile, Store, folder_of};
use crate::error::{Error, Result};

/// Names that are tried for a temporary file, at most.
const TEMPORARIES: u64 = 100_000;

/// The files that an unfinished save would leave behind: its temporary files, numbered files that no index names yet, a folder
/// that it made. Clones share it, and belong to one save at a time. A program that ends during a save calls [`Leftovers::remove`] first.
#[derive(Debug, Clone, Default)]
pub struct Leftovers {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// In the order in which they were made.
    paths: Vec<PathBuf>,
    /// The first temporary file, after which the others are named.
    first: Option<PathBuf>,
    /// What keeps it locked once it is complete.
    lock: Lock,
    closed: bool,
}

#[derive(Default)]
struct Lock(Option<Box<dyn Send>>);

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "locked" } else { "open" })
    }
}

impl Leftovers {
    /// Removes them, and has the save fail if it goes on. A save that has been put in place stays. First all names go; that the
    /// storage then frees the bytes may take it seconds, and happens also when the process ends meanwhile.
    pub fn remove(&self, store: &dyn Store) {
        let mut state = self.state();
        state.closed = true;
        let held = state.take_away(store);
        drop(state); // nobody has to wait for the bytes
        drop(held);
    }

    /// Removes them.
    pub(super) fn take_back(&self, store: &dyn Store) {
        let held = self.state().take_away(store);
        drop(held);
    }

    /// Makes a new file with a temporary name. What its `sync` gives is handed to [`Leftovers::keep`], or kept until it has its name.
    pub(super) fn create(
        &self,
        store: &dyn Store,
        folder: &Path,
        mode: Option<u32>,
    ) -> Result<(PathBuf, Box<dyn NewFile>)> {
        let mut state = self.open_state()?;
        let mut count = state.paths.len() as u64;
        loop {
            let path = match &state.first {
                None => durable::temporary(folder, count),
                Some(first) => durable::temporary_after(first, count),
            };
            match store.create(&path, mode) {
                Ok(file) => {
                    state.paths.push(path.clone());
                    state.first.get_or_insert_with(|| path.clone());
                    return Ok((path, file));
                }
                // Left by a killed process of the same number, or written by one elsewhere.
                Err(Error::Exists { .. }) if count < TEMPORARIES => count += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Keeps the lock of a file that is complete, if it is the first one, until all are in place or taken back.
    pub(super) fn keep(&self, path: &Path, lock: Box<dyn Send>) {
        let mut state = self.state();
        if state.first.as_deref() == Some(path) {
            state.lock = Lock(Some(lock));
        }
    }

    /// The step after which the new checkpoint is the one that is read, and there is nothing to take back.
    pub(super) fn switch(&self, step: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.open_state()?;
        step()?;
        state.paths.clear();
        (state.first, state.lock) = (None, Lock(None));
        Ok(())
    }

    /// Does something to the files while nobody can take them back. It is told what there is.
    pub(super) fn change(&self, work: impl FnOnce(&mut Vec<PathBuf>) -> Result<()>) -> Result<()> {
        work(&mut self.open_state()?.paths)
    }

    fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state();
        if state.closed { Err(Error::Cancelled) } else { Ok(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The last first: a folder is empty then. None waits until the bytes of those before it are freed: a process that ends
    /// meanwhile would leave it behind.
    fn take_away(&mut self, store: &dyn Store) -> Vec<Box<dyn Send>> {
        let mut held = Vec::new();
        for path in std::mem::take(&mut self.paths).iter().rev() {
            match store.take_away(path) {
                Ok(bytes) => held.push(bytes),
                Err(_) => {
                    // NFS keeps a file that is held under another name, and with it the folder. What cannot be removed even then
                    // has a name that says what it is.
                    held.clear();
                    let _ = store.remove(path);
                }
            }
        }
        self.first = None;
        held.extend(std::mem::take(&mut self.lock).0);
        held
    }
}

/// Writes a small file: what is there is replaced in one step, and keeps its permissions.
///
/// Returns a warning, if any: permissions that the storage does not keep.
///
/// # Errors
/// When it cannot be written; what was there stays then.
pub fn write_file(store: &dyn Store, path: &Path, bytes: &[u8], leftovers: &Leftovers) -> Result<Option<String>> {
    let written = || {
        let (from, mut file) = leftovers.create(store, folder_of(path), mode_of(store, path)?)?;
        let warning = file.warning().map(|warning| format!("{}: {warning}", path.display()));
        file.append(bytes)?;
        leftovers.keep(&from, file.sync()?);
        leftovers.switch(|| store.rename(&from, path))?;
        store.sync_folder(folder_of(path)).map(|()| warning)
    };
    written().inspect_err(|_| leftovers.take_back(store))
}

/// The permissions of the file that will be replaced, if there is one. Links are replaced and have none of their own.
pub(super) fn mode_of(store: &dyn Store, path: &Path) -> Result<Option<u32>> {
    let what = match store.examine(path)?.map(|found| (found.kind, found.mode)) {
        None | Some((Kind::Link, _)) => return Ok(None),
        Some((Kind::File, mode)) => return Ok(Some(mode)),
        Some((Kind::Folder, _)) => "it is a folder, not a file that could be replaced",
        Some((Kind::Other, _)) => "it is a device or a pipe, not a file that could be replaced",
    };
    Err(Error::Exists { path: path.to_owned(), what: what.to_owned(), hint: None })
}
