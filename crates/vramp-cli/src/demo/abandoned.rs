//! Folders that killed demos left: removed by the next demo in the same place, when no live process holds them.
//!
//! A demo keeps a file in its folder open and locked. Only folders of this user whose name has our exact pattern and that hold such a
//! file, unlocked, are removed: one that was kept has none, and one that is just being made has none yet. No link is followed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use vramp::os;

/// The beginning of the names of folders; six letters and digits follow.
pub(super) const PREFIX: &str = "vramp-demo-";

/// The file that is locked.
const LOCK: &str = ".vramp-demo";

/// Makes the lock of a new folder. `None`: the file system has no locks, and the folder will never be taken for abandoned.
pub(super) fn lock(folder: &Path) -> Option<File> {
    // It gets its name when it is locked: whoever finds it unlocked knows that its owner has ended.
    let new = folder.join(".vramp-demo.new");
    let file = OpenOptions::new().write(true).create_new(true).open(&new).ok()?;
    let locked =
        os::try_lock(file.as_fd()).is_ok_and(|locked| locked) && std::fs::rename(&new, folder.join(LOCK)).is_ok();
    if !locked {
        let _ = std::fs::remove_file(&new);
    }
    locked.then_some(file)
}

/// Removes the lock of a folder that stays.
pub(super) fn unlock(folder: &Path) {
    let _ = std::fs::remove_file(folder.join(LOCK));
}

/// Removes what killed demos left in `place`, where that belongs to the user with the number `owner`; returns how many.
pub(super) fn remove(place: &Path, owner: u32) -> usize {
    let Ok(entries) = std::fs::read_dir(place) else { return 0 };
    let names = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_ours));
    names.filter(|entry| remove_one(&entry.path(), owner).unwrap_or(false)).count()
}

fn remove_one(folder: &Path, owner: u32) -> io::Result<bool> {
    let found = std::fs::symlink_metadata(folder)?;
    if !found.is_dir() || found.uid() != owner {
        return Ok(false);
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(folder.join(LOCK))?;
    if !file.metadata()?.is_file() || !os::try_lock(file.as_fd())? {
        return Ok(false);
    }
    std::fs::remove_dir_all(folder).map(|()| true)
}

fn is_ours(name: &str) -> bool {
    name.strip_prefix(PREFIX)
        .is_some_and(|rest| rest.len() == 6 && rest.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_killed_demo_left_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let owner = std::fs::metadata(place.path()).unwrap().uid();
        let make = |name: &str| {
            let folder = place.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("model.safetensors"), b"x").unwrap();
            folder
        };
        let (killed, live, kept) = (make("vramp-demo-aaaaaa"), make("vramp-demo-bbbbbb"), make("vramp-demo-cccccc"));
        let (other, long) = (make("vramp-demo-"), make("vramp-demo-aaaaaaa"));
        let _live = lock(&live).unwrap();
        drop(lock(&killed).unwrap());
        drop((lock(&kept).unwrap(), unlock(&kept)));
        for folder in [&other, &long] {
            drop(lock(folder).unwrap());
        }
        // A link to a folder, and a lock that is a link.
        let outside = tempfile::tempdir().unwrap();
        drop(lock(outside.path()).unwrap());
        let link = place.path().join("vramp-demo-dddddd");
        std::os::unix::fs::symlink(outside.path(), &link).unwrap();
        let linked = make("vramp-demo-eeeeee");
        std::os::unix::fs::symlink(outside.path().join(LOCK), linked.join(LOCK)).unwrap();

        assert_eq!(remove(place.path(), owner.wrapping_add(1)), 0, "another user's");
        assert_eq!(remove(place.path(), owner), 1);
        assert!(!killed.exists());
        for folder in [&live, &kept, &other, &long, &linked] {
            assert!(folder.join("model.safetensors").exists(), "{}", folder.display());
        }
        assert!(link.is_symlink() && outside.path().join(LOCK).exists());
        assert_eq!(remove(place.path(), owner), 0);
    }
}
