//! The members of a zip that `torch.save` wrote: which is the pickle, which are storages, in which byte order; and what an archive is
//! that holds no such pickle.
//!
//! Everything lies in one top folder. It reads small members only; the bytes of storages are looked at for their CRC where they are
//! few, and by an audit.

use std::collections::{HashMap, HashSet};
use std::io;

use crate::bytes::Bytes;
use crate::declared::Declared;
use crate::finding::Finding;
use crate::pickle::MAX_PICKLE_BYTES;
use crate::recipe::Storage;
use crate::zip::{Directory, Entry, Method};
use crate::{members, zip};
use vramp_text::{Listed, counted, quoted};

/// Up to so many bytes of storages are compared with their CRC when the archive is opened.
const CHECKED_BYTES: u64 = 16 << 20;
/// The longest `version`, `byteorder` and `archive_format`, in bytes.
const SMALL_BYTES: u64 = 64;

/// The newest format of archives that PyTorch reads (2.x: `kMaxSupportedFileFormatVersion`).
const NEWEST_VERSION: u64 = 10;

const NO_PICKLE: &str = "no data.pkl in its top folder: not an archive of torch.save";

/// An archive and what its members are.
pub(crate) struct Archive<'a> {
    pub(crate) bytes: &'a dyn Bytes,
    /// Where the archive begins in its file.
    start: u64,
    pub(crate) directory: Directory,
    by_name: HashMap<String, usize>,
    root: String,
    pub(crate) big_endian: bool,
    /// Whether it is TorchScript: weights with code.
    pub(crate) script: bool,
    /// What else it is, where it has no pickle of `torch.save`.
    pub(crate) other: Option<Other>,
}

/// An archive that is none of `torch.save`, by what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Other {
    /// What an audit calls it.
    pub(crate) format: &'static str,
    /// The same in words.
    pub(crate) what: &'static str,
}

pub(crate) const EXPORT: Other = Other {
    format: "torch-export",
    what: "an archive of torch.export: a program, which torch.export.load builds, and its weights",
};
pub(crate) const PACKAGE: Other = Other {
    format: "torch-package",
    what: "an archive of torch.package: Python code, which torch.package would import, and what belongs to it",
};
pub(crate) const SERVED: Other = Other {
    format: "model-archive",
    what: "a model archive of TorchServe: a model, and Python code, which the server would run",
};

/// The weight files among the names in an archive, in words: safetensors before others.
pub(crate) fn packed_weights<'n>(names: impl Iterator<Item = &'n str> + Clone) -> Option<String> {
    const ENDS: &[&[&str]] =
        &[&[".safetensors"], &[".ckpt", ".pt", ".pth", ".bin", ".distcp"], &[".gguf", ".onnx", ".h5", ".msgpack"]];
    ENDS.iter().find_map(|ends| {
        let found: Listed =
            names.clone().filter(|name| ends.iter().any(|end| name.ends_with(end))).map(quoted).collect();
        (!found.is_empty()).then(|| format!("{} in it: {found}", counted(found.len(), "weight file")))
    })
}

impl<'a> Archive<'a> {
    /// Reads the directory and the small members. `start` is where `bytes` begin in their file.
    pub(crate) fn open(bytes: &'a dyn Bytes, start: u64) -> io::Result<Archive<'a>> {
        let directory = zip::read(bytes)?;
        let mut by_name: HashMap<String, usize> = HashMap::with_capacity(directory.entries.len());
        for (at, entry) in directory.entries.iter().enumerate() {
            // Where a name stands twice without a byte in one of them, the other one counts.
            if entry.len > 0 || !by_name.contains_key(&entry.name) {
                by_name.insert(entry.name.clone(), at);
            }
        }
        let first = directory.entries.first().map_or("", |entry| entry.name.as_str());
        let root = first.split_once('/').map_or(String::new(), |(root, _)| root.to_owned());
        let mut archive =
            Archive { bytes, start, directory, by_name, root, big_endian: false, script: false, other: None };
        archive.script = archive.member("constants.pkl").is_some() || archive.has_code();
        archive.other = archive.other()?;
        archive.check_root();
        archive.check_small_members()?;
        archive.check_crcs()?;
        Ok(archive)
    }

    /// What is in an archive that is none of PyTorch's, in words, where that is known: other formats, or weight files to be unpacked.
    pub(crate) fn contents(&self) -> Option<String> {
        let names = || self.directory.entries.iter().map(|entry| entry.name.as_str());
        if names().any(|name| name == "data.pkl" || name.ends_with("/data.pkl")) {
            return None;
        }
        let arrays = names().filter(|name| name.ends_with(".npy")).count();
        if arrays > 0 && names().all(|name| name.ends_with(".npy") || name.ends_with('/')) {
            return Some(format!(
                "a NumPy archive (`.npz`) of {}; it is not read: load it with numpy.load, and save it as safetensors",
                counted(arrays, "array")
            ));
        }
        if names().any(|name| name.ends_with("model.weights.h5")) {
            return Some("a Keras model (`.keras`); it is not read: save its weights as safetensors".to_owned());
        }
        packed_weights(names())
            .map(|packed| format!("a zip archive with {packed}: unpack it first (`unzip`), then open that"))
    }

    /// A member of the top folder.
    pub(crate) fn member(&self, name: &str) -> Option<&Entry> {
        let at = self.by_name.get(&format!("{}/{name}", self.root))?;
        self.directory.entries.get(*at)
    }

    fn has_code(&self) -> bool {
        let code = format!("{}/code/", self.root);
        self.directory.entries.iter().any(|entry| entry.name.starts_with(&code))
    }

    fn other(&self) -> io::Result<Option<Other>> {
        let has = |name: &str| self.by_name.contains_key(name) || self.member(name).is_some();
        Ok(match () {
            () if self.member("data.pkl").is_some() => None,
            () if self.small("archive_format", &mut Vec::new())?.as_deref() == Some(b"pt2") => Some(EXPORT),
            () if has("serialized_exported_program.json") => Some(EXPORT),
            () if has(".data/extern_modules") => Some(PACKAGE),
            () if has("MAR-INF/MANIFEST.json") => Some(SERVED),
            () => None,
        })
    }

    fn check_root(&mut self) {
        let folder = format!("{}/", self.root);
        let strays = self.directory.entries.iter().filter(|entry| !entry.name.starts_with(&folder));
        let stray = strays.map(|entry| entry.name.clone()).next();
        let findings = &mut self.directory.findings;
        if let Some(stray) = stray.filter(|_| !self.root.is_empty() && self.other.is_none()) {
            let what =
                format!("it lies outside the top folder {:?}: readers disagree on which folder counts", self.root);
            findings.push(Finding::malformed("ambiguous-root", what).within(&stray));
        }
        // Without a directory something worse has been found.
        let readable = findings.iter().all(|finding| finding.rule != "no-eocd");
        if readable && self.member("data.pkl").is_none() && self.other.is_none() {
            self.directory.findings.push(Finding::malformed("pickle-missing", NO_PICKLE));
        }
    }

    fn check_small_members(&mut self) -> io::Result<()> {
        let mut found = Vec::new();
        let number = |text: &[u8]| std::str::from_utf8(text).ok()?.trim().parse::<u64>().ok();
        match self.small("version", &mut found)?.map(|text| number(&text)) {
            Some(Some(..=NEWEST_VERSION)) => {}
            Some(Some(version)) => {
                let what = format!("file format version {version}; this reads up to {NEWEST_VERSION}");
                found.push(Finding::malformed("version", what));
            }
            Some(None) => found.push(Finding::malformed("version", "the member version is no number")),
            None if self.member("data.pkl").is_none() => {}
            None => found.push(Finding::malformed("version", "no member version: torch itself refuses that")),
        }
        if self.small(".format_version", &mut found)?.is_some_and(|text| number(&text).is_none()) {
            found.push(Finding::malformed("format-version", "the member .format_version is no number"));
        }
        match self.small("byteorder", &mut found)?.as_deref() {
            None | Some(b"little") => {}
            Some(b"big") => self.big_endian = true,
            Some(other) => {
                let other = String::from_utf8_lossy(other).into_owned();
                found.push(Finding::malformed(
                    "byteorder",
                    format!("the byte order is {other:?}, neither little nor big"),
                ));
            }
        }
        self.directory.findings.append(&mut found);
        Ok(())
    }

    fn small(&self, name: &str, found: &mut Vec<Finding>) -> io::Result<Option<Vec<u8>>> {
        let Some(entry) = self.member(name) else { return Ok(None) };
        Ok(members::read(self.bytes, entry, SMALL_BYTES)?.map_err(|finding| found.push(finding)).ok())
    }

    fn check_crcs(&mut self) -> io::Result<()> {
        let absent = self.directory.entries.iter().filter(|entry| entry.crc == 0 && entry.len > 0).count();
        if absent > 0 {
            let what = format!("{absent} members have no CRC: damage to them cannot be noticed");
            self.directory.findings.push(Finding::notice("crc-absent", what));
        }
        let bytes: u64 = self.storages().map(|entry| entry.packed).sum();
        if bytes <= CHECKED_BYTES {
            let wrong = self.wrong_crcs()?;
            self.directory.findings.extend(wrong);
        }
        Ok(())
    }

    /// The members that are storages.
    pub(crate) fn storages(&self) -> impl Iterator<Item = &Entry> {
        let folder = format!("{}/data/", self.root);
        self.directory.entries.iter().filter(move |entry| entry.name.starts_with(&folder))
    }

    /// The storages whose bytes do not have the CRC that is stated.
    pub(crate) fn wrong_crcs(&self) -> io::Result<Vec<Finding>> {
        // Members may not overlap; where they do nothing is read again and again.
        let (mut seen, mut spare) = (HashSet::new(), self.bytes.len().saturating_mul(2));
        let apart = self.storages().filter(|entry| {
            seen.insert((entry.placed(), entry.crc))
                && spare.checked_sub(entry.packed).map(|rest| spare = rest).is_some()
        });
        apart.filter_map(|entry| self.wrong_crc(entry).transpose()).collect()
    }

    /// What is wrong with the bytes of a member, if it states a CRC.
    pub(crate) fn wrong_crc(&self, entry: &Entry) -> io::Result<Option<Finding>> {
        if entry.crc == 0 || members::is_bomb(entry) {
            return Ok(None);
        }
        let what = match members::pass(self.bytes, entry)? {
            Some(passed) if passed.len != entry.len => {
                format!("it inflates to {} bytes, {} are stated", passed.len, entry.len)
            }
            Some(passed) if passed.crc == entry.crc => return Ok(None),
            Some(_) => "its bytes do not have the CRC-32 that the archive states: damaged".to_owned(),
            None => "its bytes cannot be unpacked".to_owned(),
        };
        Ok(Some(Finding::malformed("crc", what).within(&entry.name)))
    }

    /// Whether storages without a CRC hold nothing but zeros: set aside and never written.
    pub(crate) fn is_unwritten(&self) -> io::Result<bool> {
        let mut any = false;
        for entry in self.storages().filter(|entry| entry.len > 0) {
            if entry.crc != 0 || !members::pass(self.bytes, entry)?.is_some_and(|passed| passed.all_zero) {
                return Ok(false);
            }
            any = true;
        }
        Ok(any)
    }

    /// The pickle of the archive, and the name of its member.
    pub(crate) fn pickle(&self) -> io::Result<Result<(Vec<u8>, String), Finding>> {
        match self.member("data.pkl") {
            Some(entry) => {
                Ok(members::read(self.bytes, entry, MAX_PICKLE_BYTES)?.map(|bytes| (bytes, entry.name.clone())))
            }
            None => Ok(Err(Finding::malformed("pickle-missing", NO_PICKLE))),
        }
    }

    /// Where the bytes of a storage lie, which these tensors need.
    pub(crate) fn locate(&self, declared: &Declared, users: &Listed) -> Result<Storage, Finding> {
        if declared.view.is_some() {
            let what = format!("storage {:?} is a part of another one, as only older files have them", declared.key);
            return Err(Finding::malformed("persistent-id", what));
        }
        let name = format!("data/{}", declared.key);
        let missing = || {
            let needed = match users.len() {
                0 => "which the pickle names".to_owned(),
                1 => format!("which tensor {users} needs"),
                _ => format!("which tensors {users} need"),
            };
            Finding::malformed("record-missing", format!("no member {name}, {needed}"))
        };
        let entry = self.member(&name).ok_or_else(missing)?;
        if members::is_bomb(entry) {
            let what = format!("{} bytes would become {}", entry.packed, entry.len);
            return Err(Finding::suspicious("ratio-limit", what).within(&entry.name));
        }
        if entry.len != declared.bytes() {
            let what = format!("{} bytes, but the pickle says {}", entry.len, declared.bytes());
            return Err(Finding::malformed("storage-size", what).within(&entry.name));
        }
        let data = entry.data.ok_or_else(missing)?;
        Ok(Storage {
            offset: self.start.saturating_add(data),
            packed: entry.packed,
            len: entry.len,
            deflated: entry.method == Some(Method::Deflated),
            crc: entry.crc,
        })
    }
}
