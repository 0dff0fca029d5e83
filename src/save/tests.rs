//! Saves that crash or fail at every step: readers find the old checkpoint or the new one, and failures leave nothing behind.

mod place;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::*;
use crate::checkpoint::{Checkpoint, Selection};
use crate::device::Device;
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::durable::{self, NewFile};
use crate::error::Error;
use crate::load::{Loader, Options, TransferOptions, load};
use crate::testing::{CrashStore, LazyDevice, StoreTrouble, Synthetic, refused, watched};

/// Names and bytes.
type Tensors = BTreeMap<String, Vec<u8>>;

/// `count` tensors of 10 bytes, unlike those of another version.
fn version(version: u8, count: u8) -> Tensors {
    (0..count).map(|at| (format!("layer.{at}"), vec![version * 16 + at; 10])).collect()
}

fn inputs(tensors: &Tensors) -> Vec<Input<'_>> {
    let input = |(name, bytes): (&String, &'_ Vec<u8>)| Outline {
        name: name.as_str().into(),
        dtype: Dtype::U8,
        shape: [bytes.len()].into(),
    };
    tensors.iter().map(|tensor| Input { outline: input(tensor), bytes: Bytes::Host(tensor.1) }).collect()
}

fn folder() -> Target {
    Target::Folder("/d/m".into())
}

fn file() -> Target {
    Target::File("/d/m.safetensors".into())
}

/// Two tensors a file.
fn options() -> SaveOptions {
    SaveOptions { max_shard_bytes: 20, replace: Replace::Anything, ..SaveOptions::default() }
}

/// Files of many blocks, several of them under way at a time on threads of their own.
const SMALL: Bounds = Bounds { block_bytes: 160, blocks: 4, files: 2 };

/// Each file is one block, written by the thread that fills it.
fn put(store: &CrashStore, target: &Target, tensors: &Tensors) -> Result<Saved> {
    save_to(store, target, &inputs(tensors), &options())
}

/// A save of them under way, with nothing written yet.
fn begin<'s>(store: &'s CrashStore, target: &Target, tensors: &Tensors, options: &SaveOptions) -> Saving<'s> {
    let outlines = inputs(tensors).into_iter().map(|input| input.outline).collect();
    let limit = shard_limit(target, options.max_shard_bytes);
    let layout = Layout::new(target.path(), outlines, &Notes::default(), limit).unwrap();
    Saving::begin(store, target, layout, options).unwrap()
}

/// A checkpoint before and after, and where.
struct Change {
    what: &'static str,
    before: CrashStore,
    target: Target,
    old: Option<Tensors>,
    new: Tensors,
}

impl Change {
    fn new(what: &'static str, target: Target, old: Option<Tensors>, new: Tensors) -> Change {
        let store = CrashStore::new();
        store.put_folder("/d");
        if let Some(old) = &old {
            put(&store, &target, old).unwrap();
        }
        Change { what, before: store.copied(), target, old, new }
    }

    fn all() -> Vec<Change> {
        vec![
            Change::new("a new file", file(), None, version(1, 3)),
            Change::new("a file replaced", file(), Some(version(1, 3)), version(2, 4)),
            Change::new("a new folder of one file", folder(), None, version(1, 1)),
            Change::new("a new folder of many files", folder(), None, version(1, 6)),
            Change::new("many files replaced by as many", folder(), Some(version(1, 6)), version(2, 6)),
            Change::new("many files replaced by fewer", folder(), Some(version(1, 6)), version(2, 4)),
            Change::new("many files replaced by one", folder(), Some(version(1, 6)), version(2, 2)),
            Change::new("one file replaced by many", folder(), Some(version(1, 2)), version(2, 6)),
            Change::new("one file of a folder replaced", folder(), Some(version(1, 2)), version(2, 1)),
        ]
    }

    /// What a reader finds, through the real file system and the real loader.
    fn read(&self, store: &CrashStore) -> Option<Tensors> {
        let disk = tempfile::tempdir().unwrap();
        let on_disk = |path: &Path| disk.path().join(path.strip_prefix("/").unwrap());
        for (path, bytes) in store.files() {
            std::fs::create_dir_all(on_disk(&path).parent().unwrap()).unwrap();
            std::fs::write(on_disk(&path), bytes).unwrap();
        }
        let loaded = load(on_disk(self.target.path()), &Options::default()).ok()?;
        Some(loaded.tensors().iter().map(|it| (it.name().to_owned(), it.bytes().unwrap().to_vec())).collect())
    }

    /// Saves with trouble at each step, until there is a step too few for it: in one thread, and in many.
    fn at_every_step(&self, trouble: StoreTrouble, check: impl Fn(usize, &CrashStore, Result<Saved>)) {
        let digests = SaveOptions { digests: true, ..options() };
        for bounds in [Bounds::ALL, SMALL] {
            for at in 0.. {
                let store = self.before.copied();
                store.plan(at, trouble);
                let saved = save_within(&store, &self.target, &inputs(&self.new), &digests, bounds);
                if store.steps() <= at {
                    assert!(at > 4 && saved.is_ok(), "{}: {at} steps", self.what);
                    break;
                }
                store.plan(usize::MAX, StoreTrouble::Fail);
                check(at, &store, saved);
            }
        }
    }
}

fn temporaries(store: &CrashStore) -> Vec<String> {
    let names = store.files().into_keys().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
    names.filter(|name| durable::is_temporary(name)).collect()
}

#[test]
fn a_name_says_whether_it_is_a_file_or_a_folder() {
    for (name, is_file) in [
        ("m.safetensors", true),
        ("d/M.SAFETENSORS", true),
        ("ae.sft", true),
        ("ae.SFT", true),
        ("sft", false),
        ("d/.safetensors", true),
        ("safetensors", false),
        ("m.safetensors.d", false),
        ("m.safetensors/..", false),
    ] {
        assert_eq!(matches!(Target::of(name), Target::File(_)), is_file, "{name}");
    }
}

#[test]
fn after_a_crash_at_any_step_the_old_or_the_new_checkpoint_is_there_complete() {
    watched(|| {
        for change in Change::all() {
            let (mut olds, mut news) = (0, 0);
            let seen = std::cell::RefCell::new((&mut olds, &mut news));
            change.at_every_step(StoreTrouble::Crash, |at, store, saved| {
                for seed in 0..8 {
                    let after = store.after_crash(seed);
                    let found = change.read(&after);
                    let is_new = found.as_ref() == Some(&change.new);
                    assert!(
                        is_new || found == change.old,
                        "{}, step {at}, seed {seed}: {:?}",
                        change.what,
                        after.files()
                    );
                    let mut seen = seen.borrow_mut();
                    if is_new {
                        *seen.1 += 1
                    } else {
                        *seen.0 += 1
                    }
                    assert!(is_new || saved.is_err(), "{}: what is said to be saved is there", change.what);
                }
            });
            assert!(olds > 0 && news > 0, "{}: {olds} old, {news} new", change.what);
        }
    });
}

#[test]
fn a_failure_at_any_step_leaves_nothing_behind() {
    watched(|| {
        for change in Change::all() {
            change.at_every_step(StoreTrouble::Fail, |at, store, saved| {
                let place = format!("{}, step {at}, {:?}", change.what, saved.as_ref().map(|_| ()));
                assert_eq!(temporaries(store), [""; 0], "{place}");
                if change.read(store).as_ref() == Some(&change.new) {
                    return; // after the switch: in place, and said to be if it is durable
                }
                assert!(saved.is_err(), "{place}");
                assert_eq!(store.files(), change.before.files(), "{place}");
                let was = change.before.is_folder(change.target.path()).unwrap();
                assert_eq!(store.is_folder(change.target.path()).unwrap(), was, "{place}");
            });
        }
    });
}

#[test]
fn what_a_killed_save_left_is_in_nobodys_way() {
    let change = Change::new("killed", folder(), Some(version(1, 6)), version(2, 6));
    change.at_every_step(StoreTrouble::Crash, |at, store, _| {
        let after = store.after_crash(1);
        put(&after, &change.target, &version(3, 6)).unwrap_or_else(|error| panic!("step {at}: {error}"));
        assert_eq!(change.read(&after), Some(version(3, 6)), "step {at}");
    });
}

#[test]
fn of_two_saves_that_overlap_one_is_put_in_place_and_the_other_says_so() {
    for old in [None, Some(version(1, 1)), Some(version(1, 6))] {
        for (first, second) in [(6, 6), (6, 4), (6, 1), (1, 6), (1, 1)] {
            let (first, second) = (version(2, first), version(3, second));
            let change = Change::new("overlapping", folder(), old.clone(), first.clone());
            let store = change.before.copied();
            let begin = |tensors: &Tensors| begin(&store, &change.target, tensors, &options());
            if old.is_none() {
                store.make_folder(change.target.path()).unwrap();
            }
            let (mut one, mut other) = (begin(&first), begin(&second));
            second.values().for_each(|bytes| other.write(bytes).unwrap());
            first.values().for_each(|bytes| one.write(bytes).unwrap());
            one.finish().unwrap();
            let after = store.copied();
            let error = other.finish().unwrap_err();
            assert_eq!((error.kind().as_str(), error.exit_code()), ("conflict", 6), "{error}");
            assert_eq!(change.read(&store), Some(first.clone()));
            assert_eq!(temporaries(&store), [""; 0]);
            let mut whole = after.files();
            whole.retain(|path, _| !durable::is_temporary(path.file_name().unwrap().to_str().unwrap()));
            assert_eq!(store.files(), whole, "nothing more is there, and nothing less");
            put(&store, &change.target, &second).unwrap();
            assert_eq!(change.read(&store), Some(second));
        }
    }
}

#[test]
fn a_file_that_was_written_since_the_save_began_is_not_replaced() {
    for old in [None, Some(version(1, 3))] {
        let change = Change::new("a file", file(), old, version(2, 3));
        let store = change.before.copied();
        let mut saving = begin(&store, &change.target, &change.new, &options());
        change.new.values().for_each(|bytes| saving.write(bytes).unwrap());
        put(&store, &change.target, &version(3, 3)).unwrap();
        assert_eq!(saving.finish().unwrap_err().kind().as_str(), "conflict");
        assert_eq!(change.read(&store), Some(version(3, 3)));
        assert_eq!(temporaries(&store), [""; 0]);
    }
}

#[test]
fn many_saves_to_one_folder_at_once_leave_one_of_them_whole() {
    watched(|| {
        let disk = tempfile::tempdir().unwrap();
        let path = disk.path().join("m");
        for round in 0..8 {
            let save = |number: u8| {
                let tensors = version(number, 1 + (number + round) % 6);
                (save_to(&FileStore, &Target::Folder(path.clone()), &inputs(&tensors), &options()), tensors)
            };
            let done: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || save(number))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let found = load(&path, &Options::default()).unwrap();
            let found: Tensors =
                found.tensors().iter().map(|it| (it.name().to_owned(), it.bytes().unwrap().to_vec())).collect();
            assert!(done.iter().any(|(saved, tensors)| saved.is_ok() && *tensors == found), "{done:?}");
            // Whoever came too late says so; one that found the folder while another made it, or took it away, too.
            let codes: Vec<u8> = done.iter().filter_map(|it| it.0.as_ref().err().map(Error::exit_code)).collect();
            assert!(codes.iter().all(|code| [4, 6].contains(code)), "{done:?}");
            let names: Vec<String> = FileStore.list(&path).unwrap();
            assert!(!names.iter().any(|name| durable::is_temporary(name)), "{names:?}");
        }
    });
}

#[test]
fn files_of_the_checkpoint_that_was_replaced_are_removed_and_others_stay() {
    let change = Change::new("many by many", folder(), Some(version(1, 6)), version(2, 6));
    let store = change.before.copied();
    for other in ["config.json", "adapter_model.safetensors", "model.fp16.safetensors"] {
        store.put(Path::new("/d/m").join(other), b"x");
    }
    let saved = put(&store, &change.target, &change.new).unwrap();
    let names = store.list(Path::new("/d/m")).unwrap();
    let expected = [
        "adapter_model.safetensors",
        "config.json",
        "model-r2-00001-of-00003.safetensors",
        "model-r2-00002-of-00003.safetensors",
        "model-r2-00003-of-00003.safetensors",
        "model.fp16.safetensors",
        "model.safetensors.index.json",
    ];
    assert_eq!(names, expected);
    assert!(saved.warnings[0].contains("removed 3 files of the checkpoint that was replaced"), "{:?}", saved.warnings);
    assert_eq!(saved.outputs.len(), 4);
    assert!(saved.outputs[3].ends_with("model.safetensors.index.json"));
    store.put("/d/m/model.safetensors", b"x");
    // And back to the usual names, which are free again.
    let saved = put(&store, &change.target, &version(3, 6)).unwrap();
    assert!(saved.warnings[0].contains("some readers take it first"), "{:?}", saved.warnings);
    assert!(store.list(Path::new("/d/m")).unwrap().contains(&"model-00001-of-00003.safetensors".to_owned()));
}

#[test]
fn folders_whose_weights_would_mix_with_the_new_ones_are_refused_before_any_work() {
    let refused = |names: &[&str], tensors: &Tensors| {
        let store = CrashStore::new();
        store.put_folder("/d");
        store.put_folder("/d/m");
        names
            .iter()
            .for_each(|name| store.put(Path::new("/d/m").join(name), br#"{"weight_map":{"a":"model.safetensors"}}"#));
        let before = store.files();
        let said = put(&store, &folder(), tensors).map(|saved| saved.warnings);
        assert!(said.is_ok() || store.files() == before);
        said.map_err(|error| (error.exit_code(), error.to_string()))
    };
    let (one, many) = (version(1, 1), version(1, 6));
    for names in [&["a.safetensors", "b.safetensors"][..], &["w-1-of-1.safetensors"]] {
        let (code, said) = refused(names, &many).unwrap_err();
        assert!(code == 6 && said.contains(&format!("{:?}", names[0])), "{code} {said}");
    }
    assert_eq!(refused(&["vae.safetensors.index.json"], &one).unwrap_err().0, 6);
    assert_eq!(refused(&["model.safetensors.index.json", "model.safetensors"], &one).unwrap_err().0, 6);
    assert!(
        refused(&["vae.safetensors.index.json"], &many).unwrap()[0].contains("left alone"),
        "ours is the usual one"
    );
    assert!(
        refused(&["a.safetensors"], &one).unwrap()[0].contains("left alone"),
        "one file wins over files without an index"
    );
    assert_eq!(refused(&["model-00001-of-00003.safetensors", "adapter_model.safetensors"], &many).unwrap(), [""; 0]);
}

#[test]
fn a_place_that_is_missing_full_or_something_else_is_an_error_before_any_work() {
    let store = CrashStore::new();
    let said = |target: &Target| put(&store, target, &version(1, 6)).unwrap_err();
    assert!(said(&folder()).to_string().contains("/d: there is no such folder"), "{}", said(&folder()));
    assert_eq!(said(&Target::File("/x/y/m.safetensors".into())).kind().as_str(), "not_found");
    store.put_folder("/d");
    store.put("/d/plain", b"");
    assert_eq!(said(&Target::Folder("/d/plain".into())).exit_code(), 6);
    store.put_folder("/d/m.safetensors");
    assert_eq!(said(&file()).exit_code(), 6);
    store.set_free_bytes(100);
    let full = said(&folder());
    assert_eq!((full.exit_code(), full.kind().as_str()), (4, "io"));
    assert_eq!(store.files().len(), 1);
    let outline = Outline { name: "a".into(), dtype: Dtype::U8, shape: [4_290_000_000].into() };
    let layout = Layout::new(Path::new("out"), vec![outline], &Notes::default(), u64::MAX).unwrap();
    store.set_free_bytes(1_500_000_000);
    let full = Saving::begin(&store, &Target::File("/d/large.safetensors".into()), layout, &options()).map(drop);
    let Err(Error::Io { source, .. }) = full else { panic!("{full:?}") };
    assert!(source.to_string().starts_with("4.29 GB are needed, 1.50 GB are free (exactly 429"), "{source}");
}

#[test]
fn a_save_that_is_cancelled_given_up_or_ended_from_outside_leaves_nothing() {
    let change = Change::new("given up", folder(), Some(version(1, 6)), version(2, 6));
    let tensors = change.new.clone();
    let store = change.before.copied();
    let mut saving = begin(&store, &change.target, &tensors, &options());
    saving.write(&tensors["layer.0"]).unwrap();
    assert_eq!(temporaries(&store).len(), 1);
    drop(saving);
    assert_eq!(store.files(), change.before.files());

    let cancelled = options();
    let mut saving = begin(&store, &change.target, &tensors, &cancelled);
    cancelled.cancel.cancel();
    assert!(matches!(saving.write(&tensors["layer.0"]), Err(Error::Cancelled)));
    drop(saving);
    assert_eq!(store.files(), change.before.files());

    let ended = options();
    let mut saving = begin(&store, &change.target, &tensors, &ended);
    ended.leftovers.remove(&store);
    assert_eq!(store.files(), change.before.files());
    let written = tensors.values().try_for_each(|bytes| saving.write(bytes));
    assert!(matches!(written, Err(Error::Cancelled)), "the next file is not made");
    drop(saving);
    assert_eq!(store.files(), change.before.files());
}

/// A store that notes, whenever the bytes of a file have been freed, whether the folder of the save is still there.
#[derive(Clone, Default)]
struct Freeing {
    inner: CrashStore,
    notes: Arc<Mutex<Vec<bool>>>,
}

impl Drop for Freeing {
    fn drop(&mut self) {
        let is_there = self.inner.is_folder(folder().path()).unwrap();
        self.notes.lock().unwrap().push(is_there);
    }
}

impl Store for Freeing {
    fn examine(&self, path: &Path) -> Result<Option<durable::Found>> {
        self.inner.examine(path)
    }

    fn is_folder(&self, path: &Path) -> Result<bool> {
        self.inner.is_folder(path)
    }

    fn list(&self, folder: &Path) -> Result<Vec<String>> {
        self.inner.list(folder)
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Vec<u8>> {
        self.inner.read(path, limit)
    }

    fn free_bytes(&self, folder: &Path) -> Option<u64> {
        self.inner.free_bytes(folder)
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        self.inner.make_folder(path)
    }

    fn create(&self, path: &Path, mode: Option<u32>) -> Result<Box<dyn NewFile>> {
        self.inner.create(path, mode)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.rename(from, to)
    }

    fn sync_folder(&self, folder: &Path) -> Result<()> {
        self.inner.sync_folder(folder)
    }

    fn remove(&self, path: &Path) -> Result<()> {
        self.take_away(path).map(drop)
    }

    fn take_away(&self, path: &Path) -> Result<Box<dyn Send>> {
        let is_file = !self.inner.is_folder(path)?;
        self.inner.remove(path)?;
        Ok(if is_file { Box::new(self.clone()) } else { Box::new(()) })
    }

    fn lock(&self, folder: &Path) -> Result<Box<dyn Send>> {
        self.inner.lock(folder)
    }
}

/// Freeing gigabytes takes seconds, and an interrupted process ends meanwhile: its new folder once stayed behind, empty.
#[test]
fn a_folder_that_was_made_goes_before_the_bytes_of_its_files_are_freed() {
    let tensors = version(1, 6);
    for from_outside in [true, false] {
        let store = Freeing::default();
        store.inner.put_folder("/d");
        let options = options();
        let outlines = inputs(&tensors).into_iter().map(|input| input.outline).collect();
        let layout = Layout::new(folder().path(), outlines, &Notes::default(), options.max_shard_bytes).unwrap();
        let mut saving = Saving::begin(&store, &folder(), layout, &options).unwrap();
        tensors.values().take(3).for_each(|bytes| saving.write(bytes).unwrap());
        assert_eq!(temporaries(&store.inner).len(), 2);
        if from_outside {
            options.leftovers.remove(&store);
        }
        drop(saving);
        assert_eq!(*store.notes.lock().unwrap(), [false, false], "from outside: {from_outside}");
    }
}

#[test]
fn bytes_that_do_not_fit_their_tensor_are_refused() {
    let store = CrashStore::new();
    store.put_folder("/d");
    let outline = Outline { name: "a".into(), dtype: Dtype::F32, shape: [2].into() };
    let short = Input { outline: outline.clone(), bytes: Bytes::Host(&[0; 7]) };
    let said = save_to(&store, &file(), &[short], &options()).unwrap_err().to_string();
    assert!(said.contains("takes 8 bytes, and 7 were given"), "{said}");
    let layout = Layout::new(Path::new("out"), vec![outline], &Notes::default(), 9).unwrap();
    let mut saving = Saving::begin(&store, &file(), layout, &options()).unwrap();
    saving.write(&[0; 5]).unwrap();
    assert!(saving.write(&[0; 4]).is_err());
    assert!(saving.finish().is_err(), "bytes are missing");
    assert!(store.files().is_empty());
}

#[test]
fn nothing_scalars_and_empty_tensors_are_saved() {
    let store = CrashStore::new();
    store.put_folder("/d");
    let change = Change::new("empty", file(), None, Tensors::new());
    put(&store, &file(), &Tensors::new()).unwrap();
    assert_eq!(change.read(&store), Some(Tensors::new()));
    let tensors = Tensors::from([("a".into(), vec![]), ("b".into(), vec![1]), ("c".into(), vec![])]);
    let saved = save_to(&store, &file(), &inputs(&tensors), &SaveOptions { digests: true, ..options() }).unwrap();
    assert_eq!(change.read(&store), Some(tensors.clone()));
    let digests = tensors.iter().map(|(name, bytes)| (name.as_str().into(), Digest::of(bytes)));
    assert_eq!(saved.digests, digests.collect());
}

#[test]
fn tensors_on_a_device_that_the_host_cannot_address_are_saved() {
    let Synthetic { checkpoint, expected, .. } = Synthetic::new(7, 2, 300_000, |_, file| file);
    let device: Arc<dyn Device> = Arc::new(LazyDevice::new(7));
    let mut loader = Loader::new(device, TransferOptions::default());
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(checkpoint.clone(), &selected).unwrap();
    let loaded = loader.load(&prepared).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let inputs: Vec<Input<'_>> = loaded.tensors().iter().map(Input::from).collect();
    let options = SaveOptions { max_shard_bytes: 400_000, ..SaveOptions::default() };
    save(folder.path(), &inputs, &options).unwrap();
    let again = load(folder.path(), &Options::default()).unwrap();
    assert_eq!(again.tensors().len(), expected.len());
    for (name, bytes) in &expected {
        assert!(again.tensor(name).unwrap().bytes().unwrap() == bytes.as_slice(), "{name}");
    }
    assert!(Checkpoint::open(folder.path()).unwrap().warnings().is_empty());
}

/// What the kernel refuses to a real store: the step that fails, and the error.
#[test]
fn local_files_that_cannot_be_renamed_or_synced_leave_nothing_behind() {
    for (calls, code) in [
        (&[libc::SYS_rename, libc::SYS_renameat, libc::SYS_renameat2][..], libc::EACCES),
        (&[libc::SYS_fsync], libc::EIO),
        (&[libc::SYS_pwrite64], libc::ENOSPC),
    ] {
        watched(move || {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("m.safetensors");
            std::fs::write(&path, b"old").unwrap();
            if !refused(calls, code) {
                return;
            }
            let error = save(&path, &inputs(&version(1, 3)), &options()).unwrap_err();
            assert!(matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(code)), "{error:?}");
            let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
            assert_eq!(names, ["m.safetensors"]);
            assert_eq!(std::fs::read(&path).unwrap(), b"old");
        });
    }
}
