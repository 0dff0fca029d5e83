//! The files of an audit: one, or all of a folder, each accounted for.
//!
//! A file is judged by its content. Only where that is nothing known does its name decide whether it should have been weights. What
//! cannot be read is named, and does not keep the others from being looked at. Links to folders are not followed.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vramp::Error;
use vramp::checkpoint::Severity;
use vramp::checkpoint::torch::audit::{self, Audit, Items, Verdict};

use super::super::interrupt::Interrupt;
use super::super::output::Failure;

/// Folders below the one that was named that are looked into.
const MOST_DEPTH: usize = 64;

/// Ends of names of files that are unpickled, or taken for weights without asking.
#[rustfmt::skip]
const WEIGHTS: &[&str] =
    &["bin", "ckpt", "distcp", "joblib", "mar", "pickle", "pkl", "pt", "pt2", "pth", "ptl", "safetensors", "t7", "th"];
/// Ends of names of weights in formats that are not looked into.
const FOREIGN: &[&str] = &["ggml", "gguf", "h5", "keras", "msgpack", "npy", "npz", "onnx", "tflite"];
/// Ends of names of files that are not all there.
const PARTIAL: &[&str] = &["aria2", "crdownload", "download", "incomplete", "part", "partial", "tmp"];

/// What was looked at.
#[derive(Default)]
pub(super) struct Looked {
    pub(super) audits: Vec<Audit>,
    pub(super) others: u64,
    pub(super) unreadable: Vec<Unreadable>,
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
    if !path.is_dir() {
        looked.audits.push(audit::audit(path)?);
        return Ok(looked);
    }
    let mut items = (PathBuf::new(), Items::default());
    for file in looked.files(path) {
        interrupt.check()?;
        let folder = file.parent().unwrap_or(path);
        if items.0 != folder {
            items = (folder.to_owned(), Items::of(folder));
        }
        match audit::audit_with(&file, &items.1) {
            Ok(audit) if is_other(&audit) => looked.others += 1,
            Ok(audit) => looked.audits.push(audit),
            Err(error) => looked.cannot(&file, error),
        }
    }
    Ok(looked)
}

impl Looked {
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
                        Ok(_) => {}
                        Err(error) => self.cannot(&path, Error::io("follow", &path, error)),
                    },
                    Ok(_) => {}
                    Err(error) => self.cannot(&folder, Error::io("list", &folder, error)),
                }
            }
        }
        found.sort();
        found
    }

    fn cannot(&mut self, path: &Path, error: Error) {
        let because = std::error::Error::source(&error).map_or(String::new(), |cause| format!(": {cause}"));
        let (path, why) = (path.display().to_string(), format!("{error}{because}"));
        self.unreadable.push(Unreadable { path, why, failure: error.into() });
    }
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

/// The end of a file's name, without those of downloads that are not over.
fn end_of_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    let mut ends = name.split('.').skip(1).collect::<Vec<_>>();
    while ends.last().is_some_and(|end| PARTIAL.contains(end)) {
        ends.pop();
    }
    ends.pop().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

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
