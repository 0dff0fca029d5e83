//! Saving tensors that are in VRAM: right under every schedule, whatever fails, and as fast as the link.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use swcuda::{Config, Schedule};
use vramp::durable::{Found, Held, NewFile, Store};
use vramp::load::{Cancel, Loaded, Options, TransferOptions, load as load_files};
use vramp::memory::Filled;
use vramp::save::{Bytes, Input, SaveOptions, Saved, Target, save, save_to};
use vramp::testing::{CrashStore, StoreTrouble, Synthetic, watched};
use vramp::{Error, Result};

use super::errors::{fail_each_call, fail_each_operation, load, small};
use super::pipeline::{hollow, timed};
use super::{Rig, scheduled, schedules};

fn inputs(loaded: &Loaded) -> Vec<Input<'_>> {
    loaded.tensors().iter().map(Input::from).collect()
}

/// Files of about so many bytes, with digests.
fn sharded(bytes: u64) -> SaveOptions {
    SaveOptions::default().max_shard_bytes(bytes).digests(true)
}

/// Saves what is loaded to a store in memory, and demands every byte and digest.
fn save_and_compare(loaded: &Loaded, expected: &BTreeMap<Arc<str>, Vec<u8>>, shard_bytes: u64) -> Result<Saved> {
    let (store, folder) = (CrashStore::new(), tempfile::tempdir().unwrap());
    store.put_folder("/d");
    let saved = save_to(&store, &Target::Folder("/d/m".into()), &inputs(loaded), &sharded(shard_bytes))?;
    for (path, bytes) in store.files() {
        std::fs::write(folder.path().join(path.file_name().unwrap()), bytes).unwrap();
    }
    let again = load_files(folder.path(), &Options::default())?;
    assert_eq!((again.tensors().len(), saved.digests.len()), (expected.len(), expected.len()));
    for (name, bytes) in expected {
        assert!(again.tensor(name)?.bytes()? == bytes.as_slice(), "wrong bytes in {name}");
        assert_eq!(saved.digests[name], vramp::digest::Digest::of(bytes), "{name}");
    }
    Ok(saved)
}

#[test]
fn saved_files_are_right_under_every_schedule() {
    watched(|| {
        for (seed, schedule) in (0..).zip(schedules(6)) {
            let rig = Rig::new(scheduled(schedule));
            let synthetic = Synthetic::new(seed + 60, 2, 300_000, |_, file| file);
            let loaded = load(&synthetic, small()).unwrap();
            let saved = save_and_compare(&loaded, &synthetic.expected, 250_000).unwrap();
            assert!(saved.outputs.len() > 2 && saved.warnings.is_empty(), "{saved:?}");
            assert_eq!(rig.pageable_copies(), 0);
        }
    });
}

/// Tensors that begin in one block and end in another, in files that are under way side by side; some are in host memory.
#[test]
fn files_of_many_blocks_from_vram_and_from_the_host_are_right() {
    watched(|| {
        for schedule in [Schedule::Eager, Schedule::Lazy, Schedule::Random(5)] {
            let rig = Rig::new(Config { check_sources: false, ..scheduled(schedule) });
            let synthetic = Synthetic::new(71, 2, 30 << 20, |_, file| file);
            let loaded = load(&synthetic, TransferOptions::default()).unwrap();
            let mut mixed = inputs(&loaded);
            for input in mixed.iter_mut().step_by(3) {
                input.bytes = Bytes::Host(&synthetic.expected[&input.outline.name]);
            }
            let folder = tempfile::tempdir().unwrap();
            let saved = save(folder.path(), &mixed, &sharded(20 << 20)).unwrap();
            let again = load_files(folder.path(), &Options::default()).unwrap();
            for (name, bytes) in &synthetic.expected {
                assert!(again.tensor(name).unwrap().bytes().unwrap() == bytes.as_slice(), "{name}, {schedule:?}");
                assert_eq!(saved.digests[name], vramp::digest::Digest::of(bytes), "{name}");
            }
            assert_eq!(rig.pageable_copies(), 0);
        }
    });
}

#[test]
fn each_driver_call_of_a_save_may_fail_once() {
    watched(|| {
        let synthetic = Synthetic::new(17, 2, 40_000, |_, file| file);
        fail_each_call(1, || {
            let loaded = load(&synthetic, small())?;
            save_and_compare(&loaded, &synthetic.expected, 30_000)
        });
    });
}

#[test]
fn an_error_that_comes_later_sticks_and_ends_the_save() {
    watched(|| {
        let synthetic = Synthetic::new(19, 2, 40_000, |_, file| file);
        fail_each_operation(10, || save_and_compare(&load(&synthetic, small())?, &synthetic.expected, 30_000));
    });
}

/// The storage fails while downloads are under way: they are waited for, and nothing stays behind.
#[test]
fn a_storage_that_fails_at_any_step_ends_the_save_and_leaks_nothing() {
    watched(|| {
        let synthetic = Synthetic::new(23, 1, 40_000, |_, file| file);
        for schedule in schedules(2) {
            let Some(double) = Rig::double(scheduled(schedule)) else { return };
            let loaded = load(&synthetic, small()).unwrap();
            for at in 0.. {
                let store = CrashStore::new();
                store.put_folder("/d");
                store.plan(at, StoreTrouble::Fail);
                let saved = save_to(&store, &Target::Folder("/d/m".into()), &inputs(&loaded), &sharded(10_000));
                if store.steps() <= at {
                    assert!(saved.is_ok() && at > 10, "{saved:?}");
                    break;
                }
            }
            drop(loaded);
            assert!(double.reports().is_empty() && double.leaks().is_empty());
        }
    });
}

/// A store that keeps no bytes, takes them as fast as they come, and may throw a switch at the first.
#[derive(Clone)]
struct Sink {
    names: CrashStore,
    cancel: Option<Cancel>,
}

impl Sink {
    fn new(cancel: Option<Cancel>) -> Sink {
        let names = CrashStore::new();
        names.put_folder("/d");
        Sink { names, cancel }
    }
}

impl Store for Sink {
    fn examine(&self, path: &Path) -> Result<Option<Found>> {
        self.names.examine(path)
    }

    fn is_folder(&self, path: &Path) -> Result<bool> {
        self.names.is_folder(path)
    }

    fn list(&self, folder: &Path) -> Result<Vec<String>> {
        self.names.list(folder)
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Vec<u8>> {
        self.names.read(path, limit)
    }

    fn free_bytes(&self, folder: &Path) -> Option<u64> {
        self.names.free_bytes(folder)
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        self.names.make_folder(path)
    }

    fn create(&self, path: &Path, mode: Option<u32>) -> Result<Box<dyn NewFile>> {
        Ok(Box::new(Drain { file: self.names.create(path, mode)?, cancel: self.cancel.clone() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.names.rename(from, to)
    }

    fn sync_folder(&self, folder: &Path) -> Result<()> {
        self.names.sync_folder(folder)
    }

    fn remove(&self, path: &Path) -> Result<()> {
        self.names.remove(path)
    }

    fn lock(&self, folder: &Path) -> Result<Box<dyn Send>> {
        self.names.lock(folder)
    }

    fn hold(&self, path: &Path) -> Held {
        self.names.hold(path)
    }
}

struct Drain {
    file: Box<dyn NewFile>,
    cancel: Option<Cancel>,
}

impl NewFile for Drain {
    fn append(&mut self, _bytes: &[u8]) -> Result<()> {
        self.cancel.iter().for_each(Cancel::cancel);
        Ok(())
    }

    fn append_filled(&mut self, block: Filled) -> Result<()> {
        self.append(block.bytes())
    }

    fn sync(self: Box<Self>) -> Result<Box<dyn Send>> {
        self.file.sync()
    }
}

#[test]
fn a_save_that_is_cancelled_with_downloads_under_way_leaves_nothing() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = hollow(folder.path(), 8, 24 << 20);
        for rate in [None, Some(4e9)] {
            let Some(double) = Rig::double(Config { d2h_bytes_per_s: rate, ..timed() }) else { return };
            let rig = Rig { double: Some(double) };
            let (loaded, _) = super::pipeline::load(&rig, &path, FAST);
            let cancel = Cancel::new();
            let (options, sink) = (sharded(64 << 20).cancel(cancel.clone()), Sink::new(Some(cancel)));
            let saved = save_to(&sink, &Target::Folder("/d/m".into()), &inputs(&loaded), &options);
            assert!(matches!(saved, Err(Error::Cancelled)), "{saved:?}");
            assert!(sink.names.files().is_empty());
            drop(loaded);
            let double = rig.double.as_ref().unwrap();
            assert!(double.reports().is_empty() && double.leaks().is_empty());
        }
    });
}

/// Bytes per second of a reader that nothing waits for.
const FAST: f64 = 1e15;

/// The share of its time in which the link to the host worked while everything was saved.
fn share(path: &Path, link: f64, digests: bool) -> Option<f64> {
    let rig = Rig { double: Some(Rig::double(Config { d2h_bytes_per_s: Some(link), ..timed() })?) };
    let (loaded, _) = super::pipeline::load(&rig, path, FAST);
    let options = sharded(100 << 20).digests(digests);
    let saved = save_to(&Sink::new(None), &Target::Folder("/d/m".into()), &inputs(&loaded), &options).unwrap();
    assert!(saved.outputs.len() > 3 && saved.warnings.is_empty(), "{:?}", saved.warnings);
    let engine = rig.double.as_ref()?.stats().devices[0].d2h.clone();
    assert_eq!(engine.bytes, saved.bytes, "every byte came over the link once");
    Some(engine.busy_seconds / (engine.last_end? - engine.first_start?))
}

#[test]
fn the_link_from_the_gpu_is_never_idle_while_files_are_saved() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = hollow(folder.path(), 20, (24 << 20) + 4096);
        for (gigabytes, digests) in [(0.25, true), (0.5, true), (1.0, false), (2.0, false)] {
            let Some(share) = share(&path, gigabytes * 1e9, digests) else { return };
            assert!(share > 0.95, "a link of {gigabytes} GB/s, digests {digests}, was busy {share:.4} of its time");
        }
    });
}
