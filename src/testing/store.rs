//! A [`Store`] whose power can fail at any step, and the suite that every store must pass.
//!
//! [`CrashStore`] keeps two images: what programs see, and what the storage is sure to have. A crash leaves the second, and of
//! what was not synced whatever it likes: files torn at any byte with rubbish at their end, names that are new, old or missing,
//! in any combination.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::Random;
use crate::durable::{self, Found, Held, Kind, NewFile, Store, folder_of};
use crate::error::{Error, Result};

/// What goes wrong at one step of a [`CrashStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreTrouble {
    /// The step fails, half done if it writes; the following ones work.
    Fail,
    /// The power fails: neither this step nor any later one does anything.
    Crash,
}

/// A store in memory. Clones are the same store.
#[derive(Debug, Clone, Default)]
pub struct CrashStore {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    files: Vec<Contents>,
    live: Names,
    durable: Names,
    /// Changes of names that no sync of their folder has made durable yet.
    pending: Vec<Change>,
    steps: usize,
    trouble: Option<(usize, StoreTrouble)>,
    dead: bool,
    free_bytes: Option<u64>,
    locked: BTreeSet<PathBuf>,
    /// Files that are being written, or whose lock somebody keeps.
    held: BTreeSet<usize>,
}

type Names = BTreeMap<PathBuf, Entry>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    File(usize),
    Folder,
}

#[derive(Debug, Clone, Default)]
struct Contents {
    live: Vec<u8>,
    /// The beginning of `live` that a sync has made durable.
    durable: usize,
    mode: u32,
}

#[derive(Debug, Clone)]
struct Change {
    folder: PathBuf,
    taken: Option<PathBuf>,
    put: Option<(PathBuf, Entry)>,
}

impl Change {
    fn apply(&self, names: &mut Names) {
        if let Some(path) = &self.taken {
            names.remove(path);
        }
        if let Some((path, entry)) = &self.put {
            names.insert(path.clone(), *entry);
        }
    }
}

impl CrashStore {
    /// An empty store; `/` is a folder.
    pub fn new() -> CrashStore {
        CrashStore::default()
    }

    /// From now on, step number `at` (counted from 0, from now on too) goes wrong.
    pub fn plan(&self, at: usize, trouble: StoreTrouble) {
        let mut state = self.state();
        (state.steps, state.trouble) = (0, Some((at, trouble)));
    }

    /// From now on there are so many bytes free; what is written does not count.
    pub fn set_free_bytes(&self, bytes: u64) {
        self.state().free_bytes = Some(bytes);
    }

    /// Steps since the plan was made. More than its step means that it came to pass.
    pub fn steps(&self) -> usize {
        self.state().steps
    }

    /// The store as a machine finds it that starts again after the power failed. Seed 0 loses all that was not synced, seed 1
    /// nothing; others lose something.
    pub fn after_crash(&self, seed: u64) -> CrashStore {
        let (state, mut random) = (self.state(), Random::new(seed));
        let survives = |random: &mut Random| seed == 1 || (seed > 1 && random.below(2) == 0);
        let mut names = state.durable.clone();
        for change in &state.pending {
            if survives(&mut random) {
                change.apply(&mut names);
            }
        }
        let files: Vec<Contents> = state.files.iter().map(|file| file.after_crash(seed, &mut random)).collect();
        let after = State { files, live: names.clone(), durable: names, ..State::default() };
        CrashStore { state: Arc::new(Mutex::new(after)) }
    }

    /// A store of its own that holds what this one shows now, all of it durable.
    pub fn copied(&self) -> CrashStore {
        let state = self.state();
        let files = state.files.iter().map(|file| Contents { durable: file.live.len(), ..file.clone() }).collect();
        let after = State { files, live: state.live.clone(), durable: state.live.clone(), ..State::default() };
        CrashStore { state: Arc::new(Mutex::new(after)) }
    }

    /// Puts a file there, durably.
    pub fn put(&self, path: impl Into<PathBuf>, bytes: &[u8]) {
        let mut state = self.state();
        let entry = Entry::File(state.files.len());
        state.files.push(Contents { live: bytes.to_vec(), durable: bytes.len(), mode: 0o644 });
        let path = path.into();
        state.live.insert(path.clone(), entry);
        state.durable.insert(path, entry);
    }

    /// Puts a folder there, durably.
    pub fn put_folder(&self, path: impl Into<PathBuf>) {
        let (mut state, path) = (self.state(), path.into());
        state.live.insert(path.clone(), Entry::Folder);
        state.durable.insert(path, Entry::Folder);
    }

    /// All files and what they hold.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let state = self.state();
        let file = |(path, entry): (&PathBuf, &Entry)| match entry {
            Entry::File(at) => Some((path.clone(), state.files[*at].live.clone())),
            Entry::Folder => None,
        };
        state.live.iter().filter_map(file).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl Contents {
    fn after_crash(&self, seed: u64, random: &mut Random) -> Contents {
        let unsure = self.live.len() - self.durable;
        let kept = match seed {
            0 => 0,
            1 => unsure,
            _ => random.below(unsure + 1),
        };
        let mut live = self.live[..self.durable + kept].to_vec();
        if seed > 1 && random.below(2) == 0 {
            let rubbish = kept.min(512);
            let at = live.len() - rubbish;
            live[at..].fill(0);
        }
        Contents { durable: live.len(), live, mode: self.mode }
    }
}

impl State {
    /// Counts a step. `Err` when it goes wrong.
    fn step(&mut self, path: &Path) -> Result<()> {
        let failure = |why: &str| Err(Error::io("use", path, io::Error::other(why.to_owned())));
        if self.dead {
            return failure("the power is off");
        }
        let now = self.steps;
        self.steps += 1;
        match self.trouble {
            Some((at, StoreTrouble::Fail)) if at == now => failure("planned"),
            Some((at, StoreTrouble::Crash)) if at == now => {
                self.dead = true;
                failure("the power fails")
            }
            _ => Ok(()),
        }
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.live);
        self.pending.push(change);
    }

    fn is_folder(&self, path: &Path) -> bool {
        path == Path::new("/") || self.live.get(path) == Some(&Entry::Folder)
    }

    fn file(&self, path: &Path) -> Result<usize> {
        match self.live.get(path) {
            Some(Entry::File(at)) => Ok(*at),
            _ => Err(Error::io("open", path, io::ErrorKind::NotFound.into())),
        }
    }

    fn put(&mut self, path: &Path, entry: Entry) -> Result<()> {
        if self.live.contains_key(path) {
            return Err(Error::Exists { path: path.to_owned(), what: "it is there already".into(), hint: None });
        }
        if !self.is_folder(folder_of(path)) {
            return Err(Error::io("create", path, io::ErrorKind::NotFound.into()));
        }
        self.change(Change { folder: folder_of(path).into(), taken: None, put: Some((path.into(), entry)) });
        Ok(())
    }
}

impl Store for CrashStore {
    fn examine(&self, path: &Path) -> Result<Option<Found>> {
        let mut state = self.state();
        state.step(path)?;
        if state.is_folder(path) {
            return Ok(Some(Found { kind: Kind::Folder, bytes: 0, mode: 0o755, version: 0 }));
        }
        let found = |at: usize| {
            let Contents { live, mode, .. } = &state.files[at];
            Found { kind: Kind::File, bytes: live.len() as u64, mode: *mode, version: at as u128 }
        };
        Ok(state.file(path).ok().map(found))
    }

    fn is_folder(&self, path: &Path) -> Result<bool> {
        let mut state = self.state();
        state.step(path)?;
        Ok(state.is_folder(path))
    }

    fn list(&self, folder: &Path) -> Result<Vec<String>> {
        let mut state = self.state();
        state.step(folder)?;
        if !state.is_folder(folder) {
            return Err(Error::io("list", folder, io::ErrorKind::NotFound.into()));
        }
        let inside = state.live.keys().filter(|path| path.parent() == Some(folder));
        Ok(inside.map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect())
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Vec<u8>> {
        let mut state = self.state();
        state.step(path)?;
        let at = state.file(path)?;
        let bytes = state.files[at].live.clone();
        match bytes.len() as u64 {
            found if found > limit => Err(Error::Limit { what: "its length".into(), limit, found, hint: None }),
            _ => Ok(bytes),
        }
    }

    fn free_bytes(&self, _folder: &Path) -> Option<u64> {
        self.state().free_bytes
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        let mut state = self.state();
        state.step(path)?;
        state.put(path, Entry::Folder)
    }

    fn create(&self, path: &Path, mode: Option<u32>) -> Result<Box<dyn NewFile>> {
        let mut state = self.state();
        state.step(path)?;
        let at = state.files.len();
        state.put(path, Entry::File(at))?;
        state.files.push(Contents { mode: mode.unwrap_or(0o644), ..Contents::default() });
        state.held.insert(at);
        let lock = FileLock { store: self.clone(), at };
        Ok(Box::new(Growing { store: self.clone(), path: path.to_owned(), at, lock }))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let mut state = self.state();
        state.step(to)?;
        let entry = Entry::File(state.file(from)?);
        state.change(Change { folder: folder_of(to).into(), taken: Some(from.into()), put: Some((to.into(), entry)) });
        Ok(())
    }

    fn sync_folder(&self, folder: &Path) -> Result<()> {
        let mut state = self.state();
        state.step(folder)?;
        let (done, pending) = std::mem::take(&mut state.pending).into_iter().partition(|it| it.folder == folder);
        state.pending = pending;
        let changes: Vec<Change> = done;
        changes.iter().for_each(|change| change.apply(&mut state.durable));
        Ok(())
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let mut state = self.state();
        state.step(path)?;
        let missing = || Error::io("remove", path, io::ErrorKind::NotFound.into());
        if *state.live.get(path).ok_or_else(missing)? == Entry::Folder
            && state.live.keys().any(|inside| inside.parent() == Some(path))
        {
            return Err(Error::io("remove", path, io::ErrorKind::DirectoryNotEmpty.into()));
        }
        state.change(Change { folder: folder_of(path).into(), taken: Some(path.into()), put: None });
        Ok(())
    }

    fn lock(&self, folder: &Path) -> Result<Box<dyn Send>> {
        let mut state = self.state();
        state.step(folder)?;
        if !state.locked.insert(folder.to_owned()) {
            return Err(durable::busy(folder));
        }
        Ok(Box::new(Locked { store: self.clone(), folder: folder.to_owned() }))
    }

    fn hold(&self, path: &Path) -> Held {
        let mut state = self.state();
        match state.live.get(path).copied() {
            None => Held::Missing,
            Some(Entry::File(at)) if !state.dead && state.held.insert(at) => {
                Held::Free(Box::new(FileLock { store: self.clone(), at }))
            }
            Some(_) => Held::Busy,
        }
    }
}

struct FileLock {
    store: CrashStore,
    at: usize,
}

impl Drop for FileLock {
    fn drop(&mut self) {
        self.store.state().held.remove(&self.at);
    }
}

struct Locked {
    store: CrashStore,
    folder: PathBuf,
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.store.state().locked.remove(&self.folder);
    }
}

struct Growing {
    store: CrashStore,
    path: PathBuf,
    at: usize,
    lock: FileLock,
}

impl NewFile for Growing {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let mut state = self.store.state();
        let was_dead = state.dead;
        let stepped = state.step(&self.path);
        let written = if stepped.is_ok() { bytes } else { &bytes[..bytes.len() / 2] };
        if !was_dead {
            state.files[self.at].live.extend_from_slice(written);
        }
        stepped
    }

    fn sync(self: Box<Self>) -> Result<Box<dyn Send>> {
        let mut state = self.store.state();
        state.step(&self.path)?;
        let file = &mut state.files[self.at];
        file.durable = file.live.len();
        drop(state);
        Ok(Box::new(self.lock))
    }
}

/// Demands of a store what [`Store`] promises, in `folder`, which is empty and is left empty.
pub fn store_conformance(store: &dyn Store, folder: &Path) {
    let (one, two, inner) = (folder.join("1"), folder.join("2"), folder.join("inner"));
    let kind = |path: &Path| store.examine(path).unwrap().map(|found| found.kind);
    let write = |path: &Path, bytes: &[u8]| {
        let mut file = store.create(path, None).unwrap();
        bytes.chunks(3).for_each(|chunk| file.append(chunk).unwrap());
        file.sync().unwrap();
    };
    assert_eq!(store.list(folder).unwrap(), [""; 0]);
    assert!(store.is_folder(folder).unwrap() && !store.is_folder(&inner).unwrap());
    assert_eq!((kind(folder), kind(&one)), (Some(Kind::Folder), None));

    write(&one, b"first");
    assert_eq!(store.examine(&one).unwrap().map(|found| (found.kind, found.bytes)), Some((Kind::File, 5)));
    assert_eq!(store.read(&one, 5).unwrap(), b"first");
    assert!(matches!(store.read(&one, 4), Err(Error::Limit { found: 5, limit: 4, .. })));
    assert!(matches!(store.create(&one, None).map(drop), Err(Error::Exists { .. })), "nothing is written in place");
    assert_eq!(store.read(&one, 5).unwrap(), b"first");

    write(&two, b"second");
    assert_eq!(store.list(folder).unwrap(), ["1", "2"]);
    store.rename(&two, &one).unwrap();
    store.sync_folder(folder).unwrap();
    assert_eq!((store.list(folder).unwrap().len(), store.read(&one, 9).unwrap().as_slice()), (1, &b"second"[..]));

    let before = store.examine(&one).unwrap();
    write(&two, b"second");
    store.rename(&two, &one).unwrap();
    assert_ne!(store.examine(&one).unwrap(), before, "the same bytes, and not the same file");

    assert!(matches!(store.hold(&two), Held::Missing) && matches!(store.hold(&inner), Held::Missing));
    let mut file = store.create(&two, None).unwrap();
    assert!(matches!(store.hold(&two), Held::Busy), "it is being written");
    file.append(b"third").unwrap();
    let synced = file.sync().unwrap();
    assert!(matches!(store.hold(&two), Held::Busy), "and kept");
    drop(synced);
    let Held::Free(held) = store.hold(&two) else { panic!("nobody has it") };
    assert!(matches!(store.hold(&two), Held::Busy));
    drop(held);
    assert!(matches!(store.rename_new(&two, &one), Err(Error::Exists { .. })), "the name is taken");
    assert_eq!(
        (store.read(&one, 9).unwrap().as_slice(), store.read(&two, 9).unwrap().as_slice()),
        (&b"second"[..], &b"third"[..])
    );
    store.remove(&one).unwrap();
    store.rename_new(&two, &one).unwrap();
    assert_eq!((store.list(folder).unwrap().len(), store.read(&one, 9).unwrap().as_slice()), (1, &b"third"[..]));

    store.make_folder(&inner).unwrap();
    assert!(matches!(store.hold(&inner), Held::Busy), "a folder is no file of ours");
    let lock = store.lock(folder).unwrap();
    assert!(matches!(store.lock(folder).map(drop), Err(Error::Conflict { .. })));
    drop((lock, store.lock(&inner).unwrap()));
    drop(store.lock(folder).unwrap());
    assert!(store.is_folder(&inner).unwrap() && store.make_folder(&inner).is_err());
    write(&inner.join("a"), b"");
    assert!(store.remove(&inner).is_err(), "it is not empty");
    let freed_later = store.take_away(&inner.join("a")).unwrap();
    drop((store.take_away(&inner).unwrap(), freed_later));
    store.remove(&one).unwrap();
    store.sync_folder(folder).unwrap();
    assert_eq!(store.list(folder).unwrap(), [""; 0]);

    for missing in [
        store.remove(&one),
        store.take_away(&one).map(drop),
        store.rename(&one, &two),
        store.read(&one, 9).map(drop),
        store.list(&inner).map(drop),
    ] {
        assert_eq!(missing.unwrap_err().kind().as_str(), "not_found");
    }
    assert_eq!(store.create(&inner.join("a"), None).map(drop).unwrap_err().kind().as_str(), "not_found");
    assert_eq!(store.make_folder(&inner.join("a")).unwrap_err().kind().as_str(), "not_found");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_unsynced() -> CrashStore {
        let store = CrashStore::new();
        store.put("/old", b"old");
        let mut file = store.create(Path::new("/new"), None).unwrap();
        file.append(&[7; 5000]).unwrap();
        store.rename(Path::new("/new"), Path::new("/old")).unwrap();
        store
    }

    #[test]
    fn a_crash_loses_what_was_not_synced_and_may_keep_it() {
        let old = BTreeMap::from([(PathBuf::from("/old"), b"old".to_vec())]);
        assert_eq!(with_unsynced().after_crash(0).files(), old);
        assert_eq!(with_unsynced().after_crash(1).files(), BTreeMap::from([("/old".into(), vec![7; 5000])]));
        let torn = (2..100).map(|seed| with_unsynced().after_crash(seed).files());
        let torn: Vec<usize> = torn.filter_map(|files| files.get(Path::new("/old")).map(Vec::len)).collect();
        assert!(torn.contains(&3) && torn.iter().any(|len| (4..5000).contains(len)), "{torn:?}");
    }

    #[test]
    fn what_was_synced_survives_every_crash() {
        let store = CrashStore::new();
        let mut file = store.create(Path::new("/new"), None).unwrap();
        file.append(b"whole").unwrap();
        file.sync().unwrap();
        store.sync_folder(Path::new("/")).unwrap();
        for seed in 0..20 {
            assert_eq!(store.after_crash(seed).files(), BTreeMap::from([("/new".into(), b"whole".to_vec())]));
        }
    }

    #[test]
    fn a_planned_step_fails_alone_or_ends_everything() {
        let store = CrashStore::new();
        store.plan(1, StoreTrouble::Fail);
        assert!(store.make_folder(Path::new("/a")).is_ok());
        assert!(store.make_folder(Path::new("/b")).is_err());
        assert!(store.make_folder(Path::new("/b")).is_ok());
        store.plan(0, StoreTrouble::Crash);
        assert!(store.remove(Path::new("/a")).is_err() && store.remove(Path::new("/b")).is_err());
        assert_eq!(store.state().live.len(), 2);
    }
}
