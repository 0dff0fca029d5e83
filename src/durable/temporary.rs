//! Names of temporary files, and the removal of those that killed saves have left. It removes nothing that a process has locked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::port::{Held, Store};

/// The beginning and the end of temporary names.
const TEMPORARY: (&str, &str) = (".vramp-", ".tmp");

/// The temporary name number `count` of this process, in `folder`. Names of processes elsewhere may be the same: whoever
/// meets one that exists takes the next.
#[doc(hidden)]
pub fn temporary(folder: &Path, count: u64) -> PathBuf {
    let (begin, end) = TEMPORARY;
    folder.join(format!("{begin}{}-{count}{end}", std::process::id()))
}

/// The temporary name number `count` of a save whose first file is `first`. Only that one stays open, and locked, until the save is
/// over: a save of many files would run out of descriptors otherwise.
#[doc(hidden)]
pub fn temporary_after(first: &Path, count: u64) -> PathBuf {
    let name = first.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(TEMPORARY.1).unwrap_or(&name);
    first.with_file_name(format!("{stem}-{count}{}", TEMPORARY.1))
}

/// Whether a name is one that [`temporary`] or [`temporary_after`] gives.
#[doc(hidden)]
pub fn is_temporary(name: &str) -> bool {
    first_temporary(name).is_some()
}

/// Of a temporary name, the name of its save's first file.
pub(super) fn first_temporary(name: &str) -> Option<String> {
    let (begin, end) = TEMPORARY;
    let is_number = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers: Vec<&str> = name.strip_prefix(begin)?.strip_suffix(end)?.split('-').collect();
    let (pid, first) = (numbers.first()?, numbers.get(1)?);
    (numbers.len() <= 3 && numbers.iter().all(is_number)).then(|| format!("{begin}{pid}-{first}{end}"))
}

/// Removes the temporary files of a folder that killed processes left, and returns their names. What a live process holds stays, and
/// so does all that is no regular file. The folder is locked meanwhile; where another process has it locked, nothing is done.
pub fn remove_abandoned(store: &dyn Store, folder: &Path) -> Vec<String> {
    let names = store.list(folder).unwrap_or_default();
    let mut saves: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names {
        if let Some(first) = first_temporary(&name) {
            saves.entry(first).or_default().push(name);
        }
    }
    // Under the lock no save is being put in place: a first file that is missing now was not renamed a moment ago.
    let Some(_lock) = (!saves.is_empty()).then(|| store.lock(folder).ok()).flatten() else { return Vec::new() };
    let mut removed = Vec::new();
    for (first, names) in saves {
        let first_is_free = match store.hold(&folder.join(&first)) {
            Held::Busy => continue,
            Held::Free(lock) => Some(lock),
            Held::Missing => None,
        };
        let others = names.iter().filter(|name| **name != first);
        for name in others.filter(|name| matches!(store.hold(&folder.join(name)), Held::Free(_))) {
            removed.extend(store.remove(&folder.join(name)).is_ok().then(|| name.clone()));
        }
        // The first file last: as long as it is there, its lock speaks for the others.
        if first_is_free.is_some() && store.remove(&folder.join(&first)).is_ok() {
            removed.push(first);
        }
    }
    removed
}

/// The folder that a path lies in.
#[doc(hidden)]
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
