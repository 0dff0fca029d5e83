//! A storage in memory: files by path, with answers that come in another order, fail at a chosen call, or are of another version.
//!
//! It keeps the paths of what it copies, so that errors can be compared with those of the disk. It never sleeps: latency is a
//! number of turns that other threads get first, which follows from a seed.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{MemoryFile, Random};
use crate::error::{Error, Result};
use crate::storage::{
    Entry, EntryKind, Fallbacks, FileSystem, Head, Limits, Location, OpenFile, Residency, Route, Source, Storage,
    Version,
};

/// Files in memory, by path. Clones share them.
#[derive(Clone, Default)]
pub struct MemoryStorage {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    files: Mutex<BTreeMap<PathBuf, Arc<MemoryFile>>>,
    calls: AtomicU64,
    /// The call that fails, counted from 1; 0 for none.
    failing: AtomicU64,
    /// The seed of the latencies; 0 for none.
    latency: AtomicU64,
}

impl MemoryStorage {
    /// A storage without files.
    pub fn new() -> MemoryStorage {
        MemoryStorage::default()
    }

    /// A storage that holds what lies below `folder`, links followed, under the same paths. Panics where that cannot be read.
    pub fn copied(folder: &Path) -> MemoryStorage {
        let storage = MemoryStorage::new();
        storage.copy(folder);
        storage
    }

    fn copy(&self, path: &Path) {
        let Ok(meta) = std::fs::metadata(path) else { return }; // a link that leads nowhere
        if meta.is_dir() {
            for entry in std::fs::read_dir(path).unwrap() {
                self.copy(&entry.unwrap().path());
            }
        } else if meta.is_file() {
            self.add(path, std::fs::read(path).unwrap());
        }
    }

    /// Adds (or replaces) a file and gives it back, so that a test can change what it says.
    pub fn add(&self, path: impl Into<PathBuf>, bytes: impl Into<Vec<u8>>) -> Arc<MemoryFile> {
        let file = Arc::new(MemoryFile::new(path, bytes));
        self.insert(Arc::clone(&file));
        file
    }

    /// The file of that path.
    pub fn file(&self, path: &Path) -> Option<Arc<MemoryFile>> {
        self.inner.files.lock().unwrap().get(path).cloned()
    }

    /// Adds (or replaces) a file under its own path.
    pub fn insert(&self, file: Arc<MemoryFile>) {
        self.inner.files.lock().unwrap().insert(file.path().to_owned(), file);
    }

    /// Calls so far: of the storage itself, and reads of files that were opened.
    pub fn calls(&self) -> u64 {
        self.inner.calls.load(Ordering::Relaxed)
    }

    /// From now on the `nth` call from here (the first is 1) fails, and no other.
    pub fn fail_at(&self, nth: u64) {
        self.inner.failing.store(self.calls() + nth, Ordering::Relaxed);
    }

    /// From now on other threads get some turns before each answer, as many as the seed says.
    pub fn be_late(&self, seed: u64) {
        self.inner.latency.store(seed.max(1), Ordering::Relaxed);
    }

    fn is_folder(&self, path: &Path) -> bool {
        let files = self.inner.files.lock().unwrap();
        files.keys().any(|file| file.starts_with(path) && file != path)
    }
}

impl Inner {
    /// Counts a call, lets it wait, and fails it if it is the chosen one.
    fn call(&self, op: &'static str, path: &Path) -> Result<()> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let seed = self.latency.load(Ordering::Relaxed);
        if seed > 0 {
            (0..Random::new(seed ^ call).below(20)).for_each(|_| std::thread::yield_now());
        }
        match self.failing.load(Ordering::Relaxed) == call {
            true => Err(Error::io(op, path, io::Error::other("the storage fails here, as the test wants"))),
            false => Ok(()),
        }
    }
}

impl Storage for MemoryStorage {
    fn open(&self, at: &Location, _fallbacks: &Fallbacks) -> Result<Arc<dyn OpenFile>> {
        let path = at.as_path();
        self.inner.call("open", path)?;
        if let Some(file) = self.file(path) {
            return Ok(Arc::new(Opened { file, inner: Arc::clone(&self.inner) }));
        }
        if self.is_folder(path) {
            let what = "it is a folder, not a regular file: weights are read by position".to_owned();
            return Err(Error::Unsupported { path: path.to_owned(), tensor: None, what });
        }
        Err(Error::io("open", path, io::Error::from_raw_os_error(libc::ENOENT)))
    }

    fn head(&self, at: &Location) -> Result<Head> {
        let path = at.as_path();
        self.inner.call("open", path)?;
        if let Some(file) = self.file(path) {
            return Ok(Head { kind: EntryKind::File, bytes: file.version().len() });
        }
        if self.is_folder(path) {
            return Ok(Head { kind: EntryKind::Folder, bytes: 0 });
        }
        Err(Error::io("open", path, io::Error::from_raw_os_error(libc::ENOENT)))
    }

    fn list(&self, at: &Location) -> Result<Vec<Entry>> {
        let path = at.as_path();
        self.inner.call("list", path)?;
        if !self.is_folder(path) {
            return Err(Error::io("list", path, io::Error::from_raw_os_error(libc::ENOENT)));
        }
        let files = self.inner.files.lock().unwrap();
        let mut names = BTreeMap::new();
        for below in files.keys().filter_map(|file| file.strip_prefix(path).ok()) {
            let mut parts = below.iter();
            let Some(name) = parts.next().and_then(|name| name.to_str()) else { continue };
            names.insert(name.to_owned(), if parts.next().is_some() { EntryKind::Folder } else { EntryKind::File });
        }
        Ok(names.into_iter().map(|(name, kind)| Entry { name, kind }).collect())
    }
}

impl fmt::Debug for MemoryStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryStorage({} files)", self.inner.files.lock().unwrap().len())
    }
}

/// A file of the storage, whose reads are calls of it.
struct Opened {
    file: Arc<MemoryFile>,
    inner: Arc<Inner>,
}

impl OpenFile for Opened {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn version(&self) -> Version {
        self.file.version()
    }

    fn file_system(&self) -> &FileSystem {
        self.file.file_system()
    }

    fn residency(&self) -> Residency {
        self.file.residency()
    }

    fn source(&self, route: Route) -> Arc<dyn Source> {
        let (source, path) = (self.file.source(route), self.file.path().to_owned());
        Arc::new(Counted { source, path, inner: Arc::clone(&self.inner) })
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.descriptor()
    }

    fn check_unchanged(&self) -> Result<()> {
        self.file.check_unchanged()
    }
}

struct Counted {
    source: Arc<dyn Source>,
    path: PathBuf,
    inner: Arc<Inner>,
}

impl Source for Counted {
    fn len(&self) -> u64 {
        self.source.len()
    }

    fn route(&self) -> Route {
        self.source.route()
    }

    fn limits(&self) -> Limits {
        self.source.limits()
    }

    fn ring_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.source.ring_descriptor()
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        self.inner.call("read", &self.path)?;
        self.source.read_at(offset, target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_storage_knows_its_files() {
        let storage = MemoryStorage::new();
        let file = storage.add("x/a", vec![1, 2, 3]);
        let opened = storage.open(&Location::from("x/a"), &Fallbacks::default()).unwrap();
        opened.check_unchanged().unwrap();
        file.change("size 3 bytes before, 2 now");
        assert!(matches!(opened.check_unchanged(), Err(Error::Changed { .. })));
        file.set_residency(Residency::none(3));
        assert_eq!(opened.residency().resident_bytes(), 0);
        assert!(storage.open(&Location::from("b"), &Fallbacks::default()).is_err());
        assert!(opened.map().is_err());
        let head = |path: &str| storage.head(&Location::from(path)).map(|head| (head.kind, head.bytes));
        assert_eq!(head("x/a").unwrap(), (EntryKind::File, 3));
        assert_eq!(head("x").unwrap().0, EntryKind::Folder);
        assert_eq!(head("y").unwrap_err().kind(), crate::ErrorKind::NotFound);
        storage.add("x/deep/b", vec![]);
        let mut names = storage.list(&Location::from("x")).unwrap();
        names.sort_by(|a, b| a.name.cmp(&b.name));
        let kinds: Vec<_> = names.iter().map(|entry| (entry.name.as_str(), entry.kind)).collect();
        assert_eq!(kinds, [("a", EntryKind::File), ("deep", EntryKind::Folder)]);
        storage.fail_at(2);
        assert!(head("x/a").is_ok() && head("x/a").unwrap_err().kind() == crate::ErrorKind::Io && head("x/a").is_ok());
    }
}
