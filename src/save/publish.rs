//! Putting a save in place: readers find the old checkpoint or the new one, at every moment and after every crash.
//!
//! One step is the switch: renaming the single file, or the index, or removing an index that would win over the single file.
//! Before it nothing that the old checkpoint consists of is touched, which is why numbered files never take a name that is
//! there already; after it the files of the old one are removed. Between those the folder is synced, so that a storage that
//! reorders names cannot mix them. What a save would leave behind is kept in [`Leftovers`] until the switch. Of several saves
//! to one place that overlap in time, one is put in place and the others are refused: each replaces what it found, or nothing.
//! The folder is locked while that is looked at and changed. Another model is replaced only where [`Replace`] allows it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::layout::Layout;
use super::leftovers::{Leftovers, mode_of};
use super::options::{REPLACE_HINT, Replace, Target};
use crate::checkpoint::index::Index;
use crate::checkpoint::{FolderChoice, choose_in_folder, pytorch_in_folder};
use crate::durable::{Found, Kind, Store, folder_of};
use crate::error::{Error, Listed, Result};
use crate::fault::{counted, quoted, sized};
use crate::load::Cancel;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How long a save waits for others that are being put in place in the same folder.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks whether they are done.
const PAUSE: Duration = Duration::from_millis(2);

/// The longest index that is read to learn which files it names, in bytes.
const LONGEST_INDEX: u64 = 100_000_000;

/// Where the files of a save will lie, and what is there already.
#[derive(Debug)]
pub(super) struct Place {
    folder: PathBuf,
    /// Whether the folder has yet to be made.
    missing: bool,
    /// The name of each file, and the permissions it takes over from one that it replaces.
    names: Vec<String>,
    modes: Vec<Option<u32>>,
    /// Whether an index is written.
    index: bool,
    index_mode: Option<u32>,
    /// An index that is there and must go.
    drops_index: bool,
    /// What a folder's readers take before the save.
    read: Option<Read>,
    /// The file that is replaced, or the files of the checkpoint that is, as they were when the save began.
    before: Vec<(String, Option<Found>)>,
    warnings: Vec<String>,
}

/// What readers of a folder take.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    choice: FolderChoice,
    files: Vec<Option<Found>>,
}

impl Read {
    fn of(store: &dyn Store, folder: &Path, there: &[String]) -> Result<Read> {
        let choice = choose_in_folder(there);
        let names: &[String] = match &choice {
            FolderChoice::Index(name) => std::slice::from_ref(name),
            FolderChoice::Weights(names) => names,
            FolderChoice::Nothing => &[],
        };
        let files = names.iter().map(|name| store.examine(&folder.join(name))).collect::<Result<_>>()?;
        Ok(Read { choice, files })
    }
}

/// What was put in place.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) outputs: Vec<PathBuf>,
    pub(super) warnings: Vec<String>,
}

impl Place {
    /// Looks at what is there and decides on the names.
    pub(super) fn of(store: &dyn Store, target: &Target, layout: &Layout, replace: &Replace) -> Result<Place> {
        let place = match target {
            Target::File(path) => Place::of_file(store, path, replace)?,
            Target::Folder(path) => Place::of_folder(store, path, layout.shards.len(), replace)?,
        };
        place.demand_room(store, layout.file_bytes())?;
        Ok(place)
    }

    fn of_file(store: &dyn Store, path: &Path, replace: &Replace) -> Result<Place> {
        let folder = folder_of(path);
        let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| Error::Request {
            what: format!("{}: the name of the file to write is not UTF-8", path.display()),
            hint: None,
        })?;
        demand_folder(store, folder)?;
        let mode = mode_of(store, path)?;
        let found = store.examine(path)?;
        let before = vec![(name.to_owned(), found)];
        let place = Place { names: vec![name.to_owned()], modes: vec![mode], before, ..Place::empty(folder) };
        let place = place.demand_alone(store, path, name)?;
        match found {
            Some(found) if holds_something(path, &found) && !replace.allows(path) => {
                Err(holds_another(path, &format!("a file of {}", sized(found.bytes)), ""))
            }
            _ => Ok(place),
        }
    }

    /// Refuses to replace one of several files of a checkpoint: the others would no longer fit.
    fn demand_alone(mut self, store: &dyn Store, path: &Path, name: &str) -> Result<Place> {
        // A folder that cannot be listed can be written to all the same.
        let there = store.list(&self.folder).unwrap_or_default();
        let files = match choose_in_folder(&there) {
            // Files without numbers may have nothing to do with each other.
            FolderChoice::Weights(names) if name.contains("-of-") => names.into_iter().collect(),
            FolderChoice::Index(index) => {
                if name == SINGLE {
                    let what = "readers of the folder take what its index names, and some take this file first";
                    self.warnings.push(format!("{}: {what}", path.display()));
                }
                let bytes = store.read(&self.folder.join(index), LONGEST_INDEX).unwrap_or_default();
                Index::parse(&bytes).map(|index| index.files().iter().cloned().collect()).unwrap_or_default()
            }
            _ => BTreeSet::new(),
        };
        if files.len() < 2 || !files.contains(name) {
            return Ok(self);
        }
        let what = format!(
            "it is one of the {} of a checkpoint, whose others would no longer fit it",
            counted(files.len(), "file")
        );
        let hint = Some("write to a file of another name, or to a folder".to_owned());
        Err(Error::Exists { path: path.to_owned(), what, hint })
    }

    fn of_folder(store: &dyn Store, path: &Path, shards: usize, replace: &Replace) -> Result<Place> {
        let place = Place { index: shards > 1, ..Place::empty(path) };
        if !store.is_folder(path)? {
            if store.examine(path)?.is_some() {
                let hint = Some("a name that ends in .safetensors is taken as a file".to_owned());
                return Err(Error::Exists {
                    path: path.to_owned(),
                    what: "it is there and is no folder".to_owned(),
                    hint,
                });
            }
            demand_folder(store, folder_of(path))?;
            let read = Some(Read { choice: FolderChoice::Nothing, files: Vec::new() });
            return Ok(Place { missing: true, read, ..place.named(store, shards, &[])? });
        }
        let there = store.list(path)?;
        demand_own(store, path, &there, replace)?;
        let place = Place { read: Some(Read::of(store, path, &there)?), ..place };
        place.replacing(store, shards, &there)?.named(store, shards, &there)?.demand_clear_switch(&there)
    }

    /// Notes files of the checkpoint that is replaced.
    fn instead_of(self, store: &dyn Store, names: Vec<String>) -> Result<Place> {
        let examine = |name: String| store.examine(&self.folder.join(&name)).map(|found| (name, found));
        let before = names.into_iter().map(examine).collect::<Result<_>>()?;
        Ok(Place { before, ..self })
    }

    /// Permissions for new names: what all files of the checkpoint that is replaced allow.
    fn inherited(&self) -> Option<u32> {
        let read = self.read.iter().flat_map(|read| &read.files).flatten();
        let replaced = self.before.iter().filter_map(|(_, found)| found.as_ref()).chain(read);
        replaced.filter(|found| found.kind == Kind::File).map(|found| found.mode).reduce(|all, mode| all & mode)
    }

    fn empty(folder: &Path) -> Place {
        Place {
            folder: folder.to_owned(),
            missing: false,
            names: Vec::new(),
            modes: Vec::new(),
            index: false,
            index_mode: None,
            drops_index: false,
            read: None,
            before: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// The names of the files. Numbered ones take none that is there: the old checkpoint keeps its files until the switch.
    fn named(mut self, store: &dyn Store, shards: usize, there: &[String]) -> Result<Place> {
        let there: BTreeSet<&str> = there.iter().map(String::as_str).collect();
        if shards > 1 {
            let free = |names: &Vec<String>| names.iter().all(|name| !there.contains(name.as_str()));
            let names = (1u64..).map(|round| numbered(round, shards)).find(free);
            self.names = names.ok_or(Error::Poisoned { what: "no name is free" })?;
            self.modes = vec![None; shards];
            self.index_mode = self.mode_at(store, INDEX, &there)?;
        } else {
            self.modes = vec![self.mode_at(store, SINGLE, &there)?];
            self.names = vec![SINGLE.to_owned()];
        }
        Ok(self)
    }

    fn mode_at(&self, store: &dyn Store, name: &str, there: &BTreeSet<&str>) -> Result<Option<u32>> {
        if there.contains(name) { mode_of(store, &self.folder.join(name)) } else { Ok(None) }
    }

    /// What the checkpoint that is there means for the new one.
    fn replacing(self, store: &dyn Store, shards: usize, there: &[String]) -> Result<Place> {
        match choose_in_folder(there) {
            FolderChoice::Index(name) if name == INDEX => self.replacing_index(store, shards, there),
            FolderChoice::Weights(names) if shards > 1 && names == [SINGLE] => self.instead_of(store, names),
            FolderChoice::Weights(names) if shards == 1 && names != [SINGLE] => Ok(self.warning_of(&names)),
            FolderChoice::Index(other) => Ok(self.warning_of(&[other])),
            _ => Ok(self),
        }
    }

    /// Demands that readers see the old checkpoint until the switch, and the new one after it.
    fn demand_clear_switch(self, there: &[String]) -> Result<Place> {
        let before = choose_in_folder(there);
        let mut names: BTreeSet<String> = there.iter().chain(&self.names).cloned().collect();
        let choice = |names: &BTreeSet<String>| choose_in_folder(&names.iter().cloned().collect::<Vec<_>>());
        let two_steps = self.index || self.drops_index;
        let undisturbed = !two_steps || before == FolderChoice::Nothing || choice(&names) == before;
        if self.index {
            names.insert(INDEX.to_owned());
        } else if self.drops_index {
            names.remove(INDEX);
        }
        let ours =
            if self.index { FolderChoice::Index(INDEX.into()) } else { FolderChoice::Weights(vec![SINGLE.into()]) };
        if undisturbed && choice(&names) == ours {
            return Ok(self);
        }
        let in_the_way: Listed = match before {
            FolderChoice::Index(name) => [quoted(&name)].into_iter().collect(),
            FolderChoice::Weights(names) => names.iter().map(|name| quoted(name)).collect(),
            FolderChoice::Nothing => Listed::new(),
        };
        let what = format!("it holds weights that readers would mix with the new ones, or take instead: {in_the_way}");
        let hint = Some("write to another folder, or to one file (a name that ends in .safetensors)".to_owned());
        Err(Error::Exists { path: self.folder, what, hint })
    }

    /// A single file wins over files without an index, ours over indexes of other names; they are no part of anything any more, but nobody said whose they are.
    fn warning_of(mut self, names: &[String]) -> Place {
        let listed: Listed = names.iter().map(|name| quoted(name)).collect();
        self.warnings.push(format!("what was there is left alone, no part of the new model: {listed}"));
        self
    }

    fn replacing_index(mut self, store: &dyn Store, shards: usize, there: &[String]) -> Result<Place> {
        let path = self.folder.join(INDEX);
        let parsed = Index::parse(&store.read(&path, LONGEST_INDEX)?);
        let named: Vec<String> = match parsed {
            Ok(index) => there.iter().filter(|name| index.files().contains(name)).cloned().collect(),
            Err(fault) => {
                self.warnings.push(format!("the index that was there could not be read, and its files stay: {fault}"));
                Vec::new()
            }
        };
        let has_single = |names: &[String]| names.iter().any(|name| name == SINGLE);
        if shards > 1 && has_single(there) && !has_single(&named) {
            let what =
                format!("{SINGLE} lies beside the index and is no part of the new model; some readers take it first");
            self.warnings.push(what);
        }
        if shards == 1 && has_single(&named) {
            let what = format!("the index that is there names {SINGLE}, which the new file would replace too early");
            let hint = Some("write to another folder".to_owned());
            return Err(Error::Exists { path, what, hint });
        }
        Place { drops_index: shards == 1, ..self }.instead_of(store, named)
    }

    fn demand_room(&self, store: &dyn Store, needed: u64) -> Result<()> {
        let folder = if self.missing { folder_of(&self.folder) } else { &self.folder };
        match store.free_bytes(folder) {
            Some(free) if free < needed => {
                let exactly = format!("exactly {needed} and {free} bytes");
                let what = format!("{} are needed, {} are free ({exactly})", sized(needed), sized(free));
                let source = std::io::Error::new(std::io::ErrorKind::StorageFull, what);
                Err(Error::io("write to", folder, source))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The permissions that file number `shard` takes over.
    pub(super) fn mode(&self, shard: usize) -> Option<u32> {
        self.modes.get(shard).copied().flatten().or_else(|| self.inherited())
    }

    /// Makes the folder where it is missing.
    pub(super) fn make_folder(&self, store: &dyn Store, leftovers: &Leftovers) -> Result<()> {
        if !self.missing {
            return Ok(());
        }
        leftovers.change(|paths| {
            store.make_folder(&self.folder)?;
            paths.push(self.folder.clone());
            Ok(())
        })?;
        store.sync_folder(folder_of(&self.folder))
    }

    /// Puts durable files in place, in the order of the names.
    pub(super) fn publish(
        &self,
        store: &dyn Store,
        files: Vec<PathBuf>,
        layout: &Layout,
        leftovers: &Leftovers,
        cancel: &Cancel,
    ) -> Result<Published> {
        let outputs: Vec<PathBuf> = self.names.iter().map(|name| self.folder.join(name)).collect();
        let lock = self.locked(store, cancel);
        let _lock = match &self.read {
            Some(read) => {
                let lock = lock?;
                self.still(store, read)?;
                Some(lock)
            }
            None => {
                // A folder that cannot be opened can be written to all the same.
                let lock = match lock {
                    Err(error @ (Error::Conflict { .. } | Error::Cancelled)) => return Err(error),
                    lock => lock.ok(),
                };
                self.same_file(store)?;
                lock
            }
        };
        if self.index {
            self.publish_indexed(store, &files, &outputs, layout, leftovers)?;
        } else {
            self.publish_single(store, &files, &outputs, leftovers)?;
        }
        let mut warnings = self.warnings.clone();
        warnings.extend(self.remove_stale(store));
        let index = self.index.then(|| self.folder.join(INDEX));
        Ok(Published { outputs: outputs.into_iter().chain(index).collect(), warnings })
    }

    /// Demands that the file is the one that was there when the save began. Others may write to the folder meanwhile.
    fn same_file(&self, store: &dyn Store) -> Result<()> {
        for (name, before) in &self.before {
            let path = self.folder.join(name);
            if store.examine(&path)? != *before {
                return Err(written_since(path));
            }
        }
        Ok(())
    }

    /// Keeps other saves out of the folder. Those that are being put in place at this moment are waited for.
    fn locked(&self, store: &dyn Store, cancel: &Cancel) -> Result<Box<dyn Send>> {
        let began = Instant::now();
        loop {
            match store.lock(&self.folder) {
                Err(Error::Conflict { .. }) if cancel.is_cancelled() => return Err(Error::Cancelled),
                Err(Error::Conflict { .. }) if began.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
                lock => return lock,
            }
        }
    }

    /// Demands that what is there is what was there when this save began.
    fn still(&self, store: &dyn Store, read: &Read) -> Result<()> {
        let there = store.list(&self.folder)?;
        let is_taken = self.index && self.names.iter().any(|name| there.contains(name));
        if !is_taken && Read::of(store, &self.folder, &there)? == *read {
            return Ok(());
        }
        let what = "somebody else has put weights there since this save began".to_owned();
        Err(Error::Conflict { path: self.folder.clone(), what })
    }

    /// The numbered files, which nobody reads yet; then the index.
    fn publish_indexed(
        &self,
        store: &dyn Store,
        files: &[PathBuf],
        outputs: &[PathBuf],
        layout: &Layout,
        leftovers: &Leftovers,
    ) -> Result<()> {
        let (index, mut file) = leftovers.create(store, &self.folder, self.index_mode.or_else(|| self.inherited()))?;
        file.append(layout.index(&self.names).as_bytes())?;
        let _lock = file.sync()?;
        // The first file last: its lock tells other processes that the rest is not abandoned.
        for (from, to) in files.iter().zip(outputs).rev() {
            leftovers.change(|paths| {
                store.rename(from, to)?;
                paths.retain(|path| path != from);
                paths.push(to.clone());
                Ok(())
            })?;
        }
        store.sync_folder(&self.folder)?;
        leftovers.switch(|| store.rename(&index, &self.folder.join(INDEX)))?;
        store.sync_folder(&self.folder)
    }

    fn publish_single(
        &self,
        store: &dyn Store,
        files: &[PathBuf],
        outputs: &[PathBuf],
        leftovers: &Leftovers,
    ) -> Result<()> {
        let (Some(from), Some(to)) = (files.first(), outputs.first()) else {
            return Err(Error::Poisoned { what: "a save without a file" });
        };
        if !self.drops_index {
            // Also where the folder could not be locked, of two saves to a new file one is refused.
            let is_new = self.read.is_none() && self.before.iter().all(|(_, found)| found.is_none());
            let put = || match is_new {
                true => store.rename_new(from, to).map_err(|error| match error {
                    Error::Exists { path, .. } => written_since(path),
                    error => error,
                }),
                false => store.rename(from, to),
            };
            leftovers.switch(put)?;
            return store.sync_folder(&self.folder);
        }
        // Nobody reads the single file while the index is there. Unless it replaces another one, it can be taken back.
        leftovers.change(|paths| {
            store.rename(from, to)?;
            paths.retain(|path| path != from);
            paths.extend(self.modes.iter().all(Option::is_none).then(|| to.clone()));
            Ok(())
        })?;
        store.sync_folder(&self.folder)?;
        leftovers.switch(|| store.remove(&self.folder.join(INDEX)))?;
        store.sync_folder(&self.folder)
    }

    /// Removes the files of the checkpoint that was replaced. What stays harms nobody: the new one does not name it.
    fn remove_stale(&self, store: &dyn Store) -> Option<String> {
        let stale: Vec<_> = self.before.iter().filter(|(name, _)| !self.names.contains(name)).collect();
        if stale.is_empty() {
            return None;
        }
        let (mut gone, mut stay) = (Listed::new(), Listed::new());
        for (name, before) in stale {
            let path = self.folder.join(name);
            let is_same = store.examine(&path).map(|found| found == *before);
            match is_same.and_then(|same| if same { store.remove(&path).map(|()| true) } else { Ok(false) }) {
                Ok(true) => gone.push(|| quoted(name)),
                Ok(false) => stay.push(|| format!("{} (it is another file now)", quoted(name))),
                Err(error) => stay.push(|| format!("{} ({error})", quoted(name))),
            }
        }
        let _ = store.sync_folder(&self.folder); // they may come back after a crash, and are named by nothing
        let left = if stay.is_empty() { String::new() } else { format!("; could not be removed: {stay}") };
        Some(format!("removed {} of the checkpoint that was replaced: {gone}{left}", counted(gone.len(), "file")))
    }
}

/// The names of `count` files: those of Hugging Face, or where they are taken (`round` above 1) such that differ before the
/// number.
fn numbered(round: u64, count: usize) -> Vec<String> {
    let stem = if round == 1 { "model".to_owned() } else { format!("model-r{round}") };
    (1..=count).map(|at| format!("{stem}-{at:05}-of-{count:05}.safetensors")).collect()
}

/// Another process has written there since the save began.
fn written_since(path: PathBuf) -> Error {
    Error::Conflict { path, what: "somebody else has written it since this save began".to_owned() }
}

/// Whether replacing what a name leads to could lose anything: an empty file, and a link to nothing, hold nothing.
fn holds_something(path: &Path, found: &Found) -> bool {
    match found.kind {
        Kind::Link => std::fs::metadata(path).is_ok(),
        _ => found.bytes > 0,
    }
}

/// Demands that the model that readers find in a folder is one that may be replaced.
fn demand_own(store: &dyn Store, folder: &Path, there: &[String], replace: &Replace) -> Result<()> {
    let choice = match choose_in_folder(there) {
        FolderChoice::Nothing => pytorch_in_folder(there),
        choice => choice,
    };
    let (index, weights): (_, Vec<String>) = match choice {
        FolderChoice::Index(name) => {
            let bytes = store.read(&folder.join(&name), LONGEST_INDEX).unwrap_or_default();
            let named = Index::parse(&bytes).map(|index| index.files().to_vec()).unwrap_or_default();
            (Some(name), named.into_iter().filter(|name| there.contains(name)).collect())
        }
        FolderChoice::Weights(names) => (None, names),
        FolderChoice::Nothing => return Ok(()),
    };
    let is_own = |name: &String| replace.allows(&folder.join(name));
    if !weights.is_empty() && weights.iter().all(is_own) || index.as_ref().is_some_and(is_own) {
        return Ok(());
    }
    let size = |name: &String| store.examine(&folder.join(name)).ok().flatten().map_or(0, |found| found.bytes);
    let bytes = weights.iter().map(size).fold(0, u64::saturating_add);
    let listed: Listed = index.iter().chain(&weights).map(|name| quoted(name)).collect();
    let files = counted(weights.len(), "weight file");
    Err(holds_another(folder, &format!("another model ({files}, {})", sized(bytes)), &format!(": {listed}")))
}

fn holds_another(path: &Path, held: &str, listed: &str) -> Error {
    let what = format!("it holds {held}, which would be replaced{listed}");
    Error::Exists { path: path.to_owned(), what, hint: Some(REPLACE_HINT.to_owned()) }
}

fn demand_folder(store: &dyn Store, folder: &Path) -> Result<()> {
    if store.is_folder(folder)? {
        return Ok(());
    }
    let what = match store.examine(folder)? {
        Some(_) => format!("{} is no folder, so nothing can be written to it", folder.display()),
        None => format!("{}: there is no such folder to write to", folder.display()),
    };
    Err(Error::NotFound { what, hint: Some(format!("make it first: mkdir -p {}", folder.display())) })
}
