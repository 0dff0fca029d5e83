//! Where a save meets others: what killed ones left, what live ones hold, models that are there, and races to one name.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Barrier;

use super::*;
use crate::durable::remove_abandoned;

fn target_of(folder: &Path, name: &str) -> Target {
    Target::of(folder.join(name))
}

fn names(folder: &Path) -> Vec<String> {
    FileStore.list(folder).unwrap()
}

/// A save to a real folder under way, with nothing written yet.
fn begun<'s>(target: &Target, tensors: &Tensors, options: &SaveOptions) -> Result<Saving<'s>> {
    let outlines = inputs(tensors).into_iter().map(|input| input.outline).collect();
    let limit = shard_limit(target, options.max_shard_bytes);
    let layout = Layout::new(target.path(), outlines, &Notes::default(), limit).unwrap();
    Saving::begin(&FileStore, target, layout, options)
}

fn read(path: &Path) -> Tensors {
    let loaded = load(path, &Options::default()).unwrap();
    loaded.tensors().iter().map(|it| (it.name().to_owned(), it.bytes().unwrap().to_vec())).collect()
}

// ---- what is left, and what is held

#[test]
fn the_next_save_removes_what_a_killed_one_left() {
    watched(|| {
        for change in Change::all() {
            change.at_every_step(StoreTrouble::Crash, |at, store, _| {
                for seed in 0..4 {
                    let after = store.after_crash(seed);
                    let left = temporaries(&after).len();
                    let saved = put(&after, &change.target, &version(3, 6)).unwrap();
                    // A folder that was made and is empty now has none; one that is not there neither.
                    assert_eq!(temporaries(&after), [""; 0], "{}, step {at}, seed {seed}", change.what);
                    let said = saved.warnings.iter().any(|warning| warning.contains("that a killed save had left"));
                    assert_eq!(said, left > 0, "{}, step {at}, seed {seed}: {:?}", change.what, saved.warnings);
                }
            });
        }
    });
}

#[test]
fn what_a_live_save_holds_stays() {
    watched(|| {
        let disk = tempfile::tempdir().unwrap();
        let folder = disk.path().join("m");
        let tensors = version(1, 6);
        let mut one = begun(&Target::Folder(folder.clone()), &tensors, &options()).unwrap();
        // Two files complete, which nobody writes any more, and a third begun.
        tensors.values().take(5).for_each(|bytes| one.write(bytes).unwrap());
        let held = names(&folder);
        assert_eq!(held.len(), 3, "{held:?}");
        let beside = target_of(&folder, "other.safetensors");
        let other = save_to(&FileStore, &beside, &inputs(&version(2, 1)), &options()).unwrap();
        assert_eq!(other.warnings, [""; 0]);
        assert!(held.iter().all(|name| names(&folder).contains(name)));
        std::fs::remove_file(beside.path()).unwrap();
        one.write(&tensors["layer.5"]).unwrap();
        one.finish().unwrap();
        assert_eq!((read(&folder), names(&folder).len()), (tensors, 4));
    });
}

#[test]
fn only_files_of_our_own_names_that_nobody_holds_are_removed() {
    let disk = tempfile::tempdir().unwrap();
    let path = |name: &str| disk.path().join(name);
    let left = [".vramp-1-0.tmp", ".vramp-1-0-1.tmp", ".vramp-2-7-3.tmp", ".vramp-3-0.tmp"];
    let stay =
        [".vramp-1-0-1-2.tmp", ".vramp-1.tmp", ".vramp-a-0.tmp", "vramp-1-0.tmp", ".vramp-1-0.tmp~", "weights.tmp"];
    left.iter().chain(&stay).for_each(|name| std::fs::write(path(name), b"x").unwrap());
    // Of a save that is alive: its first file speaks for the second. A link and a folder are none of ours.
    let first = durable::temporary(disk.path(), 0);
    let live = FileStore.create(&first, None).unwrap();
    let second = durable::temporary_after(&first, 1);
    drop(FileStore.create(&second, None).unwrap().sync().unwrap());
    std::fs::write(path("target"), b"x").unwrap();
    symlink(path("target"), path(".vramp-4-0.tmp")).unwrap();
    std::fs::create_dir(path(".vramp-5-0.tmp")).unwrap();

    let lock = FileStore.lock(disk.path()).unwrap();
    assert_eq!(remove_abandoned(&FileStore, disk.path()), [""; 0], "another save is being put in place");
    drop(lock);
    let mut removed = remove_abandoned(&FileStore, disk.path());
    removed.sort();
    let mut expected = left.map(str::to_owned);
    expected.sort();
    assert_eq!(removed, expected);
    let there = names(disk.path());
    assert!(stay.iter().all(|name| there.iter().any(|it| it == name)), "{there:?}");
    assert!(
        first.exists() && second.exists() && path(".vramp-4-0.tmp").is_symlink() && path(".vramp-5-0.tmp").is_dir()
    );
    drop(live);
    assert_eq!(remove_abandoned(&FileStore, disk.path()).len(), 2);
}

/// Once it left a temporary file, one more each time, and could never succeed.
#[test]
fn a_storage_that_does_not_keep_permissions_is_written_to_all_the_same() {
    for (mode, said) in [(0o600, false), (0o755, true)] {
        watched(move || {
            let disk = tempfile::tempdir().unwrap();
            let target = target_of(disk.path(), "m.safetensors");
            save_to(&FileStore, &target, &inputs(&version(1, 3)), &options()).unwrap();
            std::fs::set_permissions(target.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            if !refused(&[libc::SYS_fchmod, libc::SYS_chmod, libc::SYS_fchmodat], libc::EPERM) {
                return;
            }
            let saved = save_to(&FileStore, &target, &inputs(&version(2, 3)), &options()).unwrap();
            assert_eq!((read(target.path()), names(disk.path()).len()), (version(2, 3), 1));
            let found = std::fs::metadata(target.path()).unwrap().permissions().mode() & 0o7777;
            assert_eq!(found & !mode, 0, "{found:o} is more open than {mode:o}");
            assert_eq!(saved.warnings.len(), usize::from(said), "{:?}", saved.warnings);
            assert!(
                saved.warnings.iter().all(|it| it.contains("does not let the mode 755 be set")),
                "{:?}",
                saved.warnings
            );
        });
    }
}

// ---- races

/// Both saw the same before either was put in place: two of twenty rounds ended with two winners.
#[test]
fn of_two_saves_to_one_file_at_once_exactly_one_is_put_in_place() {
    watched(|| {
        for round in 0..60 {
            let disk = tempfile::tempdir().unwrap();
            let target = target_of(disk.path(), "m.safetensors");
            if round % 2 == 1 {
                save_to(&FileStore, &target, &inputs(&version(9, 2)), &options()).unwrap();
            }
            let barrier = Barrier::new(2);
            let work = |number: u8| {
                let tensors = version(number, 3);
                let mut saving = begun(&target, &tensors, &options()).unwrap();
                tensors.values().for_each(|bytes| saving.write(bytes).unwrap());
                barrier.wait();
                (saving.finish().map(drop), tensors)
            };
            let work = &work;
            let done: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = [1, 2].map(|number| scope.spawn(move || work(number))).into();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let winners: Vec<&Tensors> = done.iter().filter(|it| it.0.is_ok()).map(|it| &it.1).collect();
            let [winner] = winners.as_slice() else { panic!("round {round}: {done:?}") };
            assert_eq!(&read(target.path()), *winner);
            let lost: Vec<&Error> = done.iter().filter_map(|it| it.0.as_ref().err()).collect();
            assert_eq!((lost[0].kind().as_str(), lost[0].exit_code()), ("conflict", 6));
            assert_eq!(names(disk.path()), ["m.safetensors"]);
        }
    });
}

/// A file that a program which knows nothing of locks made between the last look and the rename.
#[test]
fn a_new_file_never_replaces_one_that_came_in_between() {
    let disk = tempfile::tempdir().unwrap();
    let (from, to) = (disk.path().join("from"), disk.path().join("to"));
    std::fs::write(&from, b"new").unwrap();
    std::fs::write(&to, b"other").unwrap();
    assert!(matches!(FileStore.rename_new(&from, &to), Err(Error::Exists { .. })));
    assert_eq!((std::fs::read(&from).unwrap(), std::fs::read(&to).unwrap()), (b"new".to_vec(), b"other".to_vec()));
    watched(move || {
        // Where the kernel or the file system does not have it, the name is looked up.
        if refused(&[libc::SYS_renameat2], libc::EINVAL) {
            assert!(matches!(FileStore.rename_new(&from, &to), Err(Error::Exists { .. })));
            std::fs::remove_file(&to).unwrap();
            FileStore.rename_new(&from, &to).unwrap();
            assert_eq!(names(disk.path()), ["to"]);
        }
    });
}

// ---- models that are there

#[test]
fn another_model_is_replaced_only_where_that_is_allowed() {
    let with = |replace: Replace| SaveOptions { replace, ..options() };
    let disk = tempfile::tempdir().unwrap();
    let (file, folder) = (target_of(disk.path(), "m.safetensors"), target_of(disk.path(), "m"));
    for (target, count) in [(&file, 3), (&folder, 2), (&folder, 6)] {
        let save = |replace: Replace, number: u8| {
            save_to(&FileStore, target, &inputs(&version(number, count)), &with(replace)).map(drop)
        };
        save(Replace::Anything, 1).unwrap();
        let before = read(target.path());
        let (files, other) = (Checkpoint::open(target.path()).unwrap(), disk.path().join("other.safetensors"));
        for replace in [Replace::Nothing, Replace::These(vec![other])] {
            let refused = save(replace, 2).unwrap_err();
            assert_eq!((refused.kind().as_str(), refused.exit_code()), ("exists", 6));
            let said = refused.to_string();
            assert!(said.contains("which would be replaced") && said.contains(REPLACE_HINT), "{said}");
            assert!(read(target.path()) == before);
        }
        let own = files.shards().iter().map(|shard| shard.path.clone()).collect();
        save(Replace::These(own), 2).unwrap();
        assert_eq!(read(target.path()), version(2, count));
        save(Replace::Anything, 3).unwrap();
        assert_eq!(read(target.path()), version(3, count));
    }
}

#[test]
fn what_holds_no_model_is_in_nobodys_way() {
    let disk = tempfile::tempdir().unwrap();
    let path = |name: &str| disk.path().join(name);
    std::fs::write(path("empty.safetensors"), b"").unwrap();
    symlink(path("nowhere"), path("dangling.safetensors")).unwrap();
    std::fs::create_dir(path("config")).unwrap();
    std::fs::write(path("config/config.json"), b"{}").unwrap();
    std::fs::write(path("config/adapter_model.safetensors"), b"{}").unwrap();
    for name in ["empty.safetensors", "dangling.safetensors", "config"] {
        save(path(name), &inputs(&version(1, 1)), &SaveOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    assert!(!path("dangling.safetensors").is_symlink() && !path("nowhere").exists());
}

#[test]
fn models_of_pytorch_and_links_to_models_count_too() {
    for files in [
        &["pytorch_model.bin"][..],
        &["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"],
        &[".metadata", "__0_0.distcp"],
        &["model.pt"],
        &["a.safetensors", "b.safetensors"],
    ] {
        let disk = tempfile::tempdir().unwrap();
        files.iter().for_each(|name| std::fs::write(disk.path().join(name), b"some bytes").unwrap());
        let saved = save(disk.path(), &inputs(&version(1, 1)), &SaveOptions::default());
        let said = saved.unwrap_err();
        assert!(said.exit_code() == 6 && said.to_string().contains(REPLACE_HINT), "{files:?}: {said}");
        assert_eq!(names(disk.path()).len(), files.len());
    }
    let disk = tempfile::tempdir().unwrap();
    let (model, link) = (disk.path().join("m.safetensors"), disk.path().join("link.safetensors"));
    save(&model, &inputs(&version(1, 1)), &SaveOptions::default()).unwrap();
    symlink(&model, &link).unwrap();
    assert_eq!(save(&link, &inputs(&version(2, 1)), &SaveOptions::default()).unwrap_err().exit_code(), 6);
    let own = SaveOptions { replace: Replace::These(vec![model.clone()]), ..SaveOptions::default() };
    save(&link, &inputs(&version(2, 1)), &own).unwrap();
    assert_eq!((read(&model), read(&link)), (version(1, 1), version(2, 1)));
}
