//! Where bytes become durable: new files beside the old, synced, renamed, and the folder synced.
//!
//! [`Store`] is the port, [`FileStore`] the local file systems. Only this module creates, renames, syncs or removes anything
//! for the library; `save` says in which order. A file is never written in place: [`Store::create`] makes new ones only,
//! under names that `temporary` gives, and nothing here follows a link at the end of a path. It knows no format. How bytes get
//! to the disk is `growing`'s.

mod file_store;
mod growing;
mod port;
mod temporary;

pub use file_store::FileStore;
#[doc(hidden)]
pub use growing::BLOCK_BYTES;
#[cfg(any(test, feature = "testing"))]
pub(crate) use port::busy;
pub use port::{Found, Held, Kind, NewFile, Store};
pub use temporary::remove_abandoned;
#[doc(hidden)]
pub use temporary::{folder_of, is_temporary, temporary, temporary_after};

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::temporary::first_temporary;
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
