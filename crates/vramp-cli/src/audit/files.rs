//! The files of an audit: one, or all of a folder, each accounted for.
//!
//! A file is judged by its content. Only where that is nothing known does its name decide whether it should have been weights. What
//! cannot be read is named, and does not keep the others from being looked at. Links to folders are not followed.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use vramp::Error;
use vramp::checkpoint::Severity;
use vramp::checkpoint::torch::audit::{self, Audit, FOREIGN, Items, Verdict, WEIGHTS, end_of_name};
use vramp::storage::{LocalStorage, Storage};

use super::super::interrupt::Interrupt;
use super::super::output::Failure;

/// Folders below the one that was named that are looked into.
const MOST_DEPTH: usize = 64;

/// What was looked at.
#[derive(Default)]
pub(super) struct Looked {
    pub(super) audits: Vec<Audit>,
    pub(super) others: u64,
    pub(super) unreadable: Vec<Unreadable>,
    /// Files and folders that were there when their folder was listed, and gone when they were to be looked at.
    pub(super) vanished: u64,
}

/// A file or a folder that could not be looked at.
#[derive(Serialize)]
pub(super) struct Unreadable {
    /// Its path; what of it is no UTF-8 is replaced.
    pub(super) path: String,
    pub(super) why: String,
    #[serde(skip)]
    pub(super) failure: Failure,
}

pub(super) fn look(path: &Path, interrupt: &Interrupt) -> Result<Looked, Failure> {
    let mut looked = Looked::default();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage);
    if !path.is_dir() {
        looked.audits.push(audit::audit(path)?);
        return Ok(looked);
    }
    let mut items = (PathBuf::new(), Items::default());
    for file in looked.files(path) {
        interrupt.check()?;
        let folder = file.parent().unwrap_or(path);
        if items.0 != folder {
            items = (folder.to_owned(), audit::items_of(folder, &storage));
        }
        looked.take(&file, audit::audit_with(&file, &items.1, &*storage));
    }
    looked.audits.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(looked)
}

impl Looked {
    /// Takes in what came of one file.
    fn take(&mut self, file: &Path, audited: Result<Audit, Error>) {
        match audited {
            Ok(audit) if is_other(&audit) => self.others += 1,
            Ok(audit) => self.audits.push(audit),
            Err(_) if is_gone(file) => self.vanished += 1,
            Err(error) => self.cannot(file, error),
        }
    }

    /// The regular files of a folder and of those in it, sorted.
    fn files(&mut self, folder: &Path) -> Vec<PathBuf> {
        let mut open = vec![(folder.to_owned(), 0)];
        let mut found = Vec::new();
        while let Some((folder, depth)) = open.pop() {
            let entries = match std::fs::read_dir(&folder) {
                Ok(entries) if depth <= MOST_DEPTH => entries,
                Ok(_) => {
                    self.cannot(&folder, Error::io("list", &folder, io::Error::other("folders are nested too deeply")));
                    continue;
                }
                Err(_) if depth > 0 && is_gone(&folder) => {
                    self.vanished += 1;
                    continue;
                }
                Err(error) => {
                    self.cannot(&folder, Error::io("list", &folder, error));
                    continue;
                }
            };
            for entry in entries {
                match entry.and_then(|entry| Ok((entry.path(), entry.file_type()?))) {
                    Ok((path, kind)) if kind.is_dir() => open.push((path, depth + 1)),
                    Ok((path, kind)) if kind.is_file() => found.push(path),
                    Ok((path, kind)) if kind.is_symlink() => match std::fs::metadata(&path) {
                        Ok(target) if target.is_file() => found.push(path),
                        Ok(target) if target.is_dir() => {}
                        Ok(target) => self.special(&path, target.file_type()),
                        Err(_) if is_gone(&path) => self.vanished += 1,
                        Err(error) => self.cannot(&path, Error::io("follow", &path, error)),
                    },
                    Ok((path, kind)) => self.special(&path, kind),
                    Err(error) => self.cannot(&folder, Error::io("list", &folder, error)),
                }
            }
        }
        found.sort();
        found
    }

    /// A pipe, a socket or a device: never opened, but told of where its name is that of weights.
    fn special(&mut self, path: &Path, kind: FileType) {
        let end = end_of_name(path);
        if end.as_deref().is_some_and(|end| WEIGHTS.contains(&end) || FOREIGN.contains(&end)) {
            let what = match kind {
                kind if kind.is_fifo() => "a named pipe (FIFO)",
                kind if kind.is_socket() => "a socket",
                _ => "a device",
            };
            self.audits.push(audit::special(path, what));
        }
    }

    fn cannot(&mut self, path: &Path, error: Error) {
        let because = std::error::Error::source(&error).map_or(String::new(), |cause| format!(": {cause}"));
        let (path, why) = (path.display().to_string(), format!("{error}{because}"));
        self.unreadable.push(Unreadable { path, why, failure: error.into() });
    }
}

/// Whether nothing has that name any more, not even a link.
fn is_gone(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Whether a file is no weights and holds no pickle, and never meant to: folders hold texts and pictures too.
fn is_other(audit: &Audit) -> bool {
    let end = end_of_name(&audit.path);
    let is = |ends: &[&str]| end.as_deref().is_some_and(|end| ends.contains(&end));
    let instead = || audit.findings.iter().any(|finding| matches!(finding.rule, "empty-file" | "not-weights"));
    match audit.format {
        _ if is_alarming(audit) => false,
        "unknown" => !(is(WEIGHTS) || is(FOREIGN) && instead()),
        "zip" => !is(WEIGHTS) && audit.verdict <= Verdict::Malformed,
        _ => false,
    }
}

/// Whether something was found that texts and pictures do not have by chance, as an opcode and two lines.
fn is_alarming(audit: &Audit) -> bool {
    audit.findings.iter().any(|finding| match finding.severity {
        Severity::Suspicious => finding.rule != "global-not-allowed" || finding.member.is_some(),
        severity => severity > Severity::Suspicious,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_vanishes_ends_nothing_and_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.pt", "b.pt"] {
            std::fs::write(folder.path().join(name), b"\x80\x02N.").unwrap();
        }
        let mut looked = Looked::default();
        let files = looked.files(folder.path());
        std::fs::remove_file(&files[0]).unwrap();
        for file in &files {
            looked.take(file, audit::audit(file));
        }
        assert_eq!((looked.vanished, looked.audits.len(), looked.unreadable.len()), (1, 1, 0));
        assert_eq!(looked.audits[0].path, files[1]);
    }

    #[test]
    fn the_end_of_a_name_is_that_of_the_whole_file() {
        for (name, end) in [
            ("model.PT", Some("pt")),
            ("model.safetensors.incomplete", Some("safetensors")),
            ("pytorch_model.bin.index.json", Some("json")),
            ("README", None),
            (".part", None),
        ] {
            assert_eq!(end_of_name(Path::new(name)).as_deref(), end, "{name}");
        }
    }
}
