//! What a file would do to a program that trusts it: every global that its pickles name, every oddity of its container, found
//! without executing anything.
//!
//! It looks at content, and at what other readers could take the file for: members under a second name, bytes before, between and
//! after members, archives in comments. One extension counts: a `.distcp` file is not read as a whole by anybody. Everything found
//! stays in one list; [`Verdict`] is the worst of it. It never says that a file is harmless, only that it holds nothing but what is
//! on the allow-list.

use std::collections::hash_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::archive::Archive;
use super::assemble::Assembly;
use super::bytes::{Ahead, Bytes, Memory, Section, Window, read_vec};
use super::hunt::Place;
use super::legacy::{self, Stack};
use super::objects::{Declared, Objects};
pub use super::pickled::NamedGlobal;
use super::pickled::{MOST_NAMES, Pickled};
use super::zip::{Entry, Method, Placed};
use super::{BEGINNING, Kind, concat, dcp, hides_archive, is_safetensors, members, recognise, tar};
use crate::checkpoint::finding::{self, Finding, Severity};
use crate::checkpoint::lookalike;
use crate::checkpoint::made::Storage;
use crate::checkpoint::pickle::{Danger, Id, MAX_PICKLE_BYTES};
use crate::checkpoint::safetensors::MAX_HEADER_BYTES;
use crate::checkpoint::shard;
use crate::error::{Error, Result};
use crate::fault::Fault;

/// Archives within archives that are looked into.
const MOST_NESTED: usize = 3;
/// Findings of one file that are kept, of each severity: many of one kind must not leave out what is worse.
const MOST_FINDINGS: usize = 2500;
/// Bytes of items that are looked at beyond twice those of their file.
const SPARE_BYTES: u64 = 64 << 20;
/// Bytes at the beginning of a member that show whether it is a pickle.
const FIRST_READ: u64 = 64 << 10;

/// The worst that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Verdict {
    /// Contains only allow-listed constructs.
    Clean,
    /// The same, and something worth knowing.
    Notice,
    /// Damaged, or against the rules of its format.
    Malformed,
    /// Not what an honest writer of weights makes.
    Suspicious,
    /// Names something that is known to run code.
    Dangerous,
}

/// Tensors of one element type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct OfType {
    /// How many there are.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What an audit of one file found.
#[derive(Debug, Clone, Serialize)]
pub struct Audit {
    /// The file; what of its path is no UTF-8 is replaced.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// What it is: `torch-zip`, `torch-legacy`, `torchscript`, `torch-export`, `zip` (another archive), `pickle`, `tar`, `safetensors` or
    /// `unknown`.
    pub format: &'static str,
    /// The worst finding.
    pub verdict: Verdict,
    /// The pickle protocol, where there is a pickle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
    /// Every name that its pickles hold.
    pub globals: Vec<NamedGlobal>,
    /// Everything that was found.
    pub findings: Vec<Finding>,
    /// The tensors, by element type.
    pub tensors: BTreeMap<String, OfType>,
    /// Groups of tensors over the same storage.
    pub shared: Vec<Vec<std::sync::Arc<str>>>,
    /// Bytes of storages that no tensor has.
    pub bytes_in_no_tensor: u64,
    /// Whether checksums could be compared: `checked`, `absent`, `none` (the format has none).
    pub crc: &'static str,
    /// Where each name stands in `globals`.
    #[serde(skip)]
    known: HashMap<(String, String), usize>,
    /// Findings that are kept, of each severity.
    #[serde(skip)]
    kept: BTreeMap<Severity, usize>,
    /// Bytes of members that may still be run: members that share bytes make much of a small file.
    #[serde(skip)]
    spare: u64,
    /// Start and end of the archives that were looked at, where there are several.
    #[serde(skip)]
    archives: HashSet<(u64, u64)>,
}

/// Which parts of which files of a folder are read for themselves, as its `.metadata` says: a distributed checkpoint is unpickled item
/// by item, wherever in a file an item lies.
#[derive(Debug, Clone, Default)]
pub struct Items(BTreeMap<String, BTreeSet<(u64, u64)>>);

impl Items {
    /// Those of a folder. None where it has no `.metadata`, or one that is refused: an audit of that file says why.
    pub fn of(folder: &Path) -> Items {
        Items(dcp::places(folder).unwrap_or_default())
    }

    /// Offset and length in bytes of those in one file.
    fn in_file(&self, path: &Path) -> impl Iterator<Item = (u64, u64)> {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(|name| self.0.get(name)).into_iter().flatten().copied()
    }
}

/// Audits one file, and what the `.metadata` beside it says to be an item in it.
///
/// # Errors
/// When the file is not there or cannot be read. Whatever is wrong with its content is a finding.
pub fn audit(path: impl AsRef<Path>) -> Result<Audit> {
    let path = path.as_ref();
    audit_with(path, &path.parent().map(Items::of).unwrap_or_default())
}

/// Audits one file of a folder whose items are known.
///
/// # Errors
/// Those of [`audit`].
pub fn audit_with(path: &Path, items: &Items) -> Result<Audit> {
    let (file, metadata) = shard::open_regular(path)?;
    let window = Window { file: &file, start: 0, len: metadata.len() };
    let mut audit = Audit::new(path);
    audit.look(&window).map_err(|error| Error::io("read", path, error))?;
    if audit.format == "safetensors"
        && let Err(error) = shard::read_head(path, MAX_HEADER_BYTES)
    {
        audit.add(Finding::malformed("safetensors", error.to_string()));
        // A header that is right leaves no room for anything else.
        audit.search(Place::of(&window, None), 0).map_err(|error| Error::io("read", path, error))?;
    }
    audit.items(&window, items.in_file(path)).map_err(|error| Error::io("read", path, error))?;
    if audit.format == "pickle" && path.file_name().is_some_and(|name| name == dcp::METADATA) {
        audit.description(path.parent().unwrap_or(Path::new("")));
    }
    Ok(audit.judged())
}

/// Audits bytes as if they were a file.
///
/// # Errors
/// None but those of the memory.
pub fn audit_bytes(bytes: &[u8]) -> io::Result<Audit> {
    let mut audit = Audit::new(Path::new("bytes"));
    audit.look(&Memory(bytes))?;
    Ok(audit.judged())
}

#[allow(clippy::ptr_arg)] // as serde wants it
fn lossy<S: serde::Serializer>(path: &PathBuf, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

impl Verdict {
    fn of(findings: &[Finding]) -> Verdict {
        match findings.iter().map(|finding| finding.severity).max() {
            None => Verdict::Clean,
            Some(Severity::Notice) => Verdict::Notice,
            Some(Severity::Malformed) => Verdict::Malformed,
            Some(Severity::Suspicious) => Verdict::Suspicious,
            Some(Severity::Dangerous) => Verdict::Dangerous,
        }
    }
}

impl Audit {
    fn new(path: &Path) -> Audit {
        Audit {
            path: path.to_owned(),
            format: "unknown",
            verdict: Verdict::Clean,
            protocol: None,
            globals: Vec::new(),
            findings: Vec::new(),
            tensors: BTreeMap::new(),
            shared: Vec::new(),
            bytes_in_no_tensor: 0,
            crc: "none",
            known: HashMap::new(),
            kept: BTreeMap::new(),
            spare: 0,
            archives: HashSet::new(),
        }
    }

    pub(super) fn add(&mut self, finding: Finding) {
        let kept = self.kept.entry(finding.severity).or_default();
        if *kept < MOST_FINDINGS && !self.findings.contains(&finding) {
            *kept += 1;
            self.findings.push(finding);
        }
    }

    fn judged(mut self) -> Audit {
        // Elsewhere Python resolves these names, and no archive holds such classes.
        for finding in self.findings.iter_mut().filter(|finding| finding.rule == "torchscript") {
            if self.format != "torchscript" {
                finding.severity = Severity::Suspicious;
            }
        }
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        self.verdict = Verdict::of(&self.findings);
        self
    }

    /// Recognises the bytes and looks at them as what they are, and as what else they could be taken for.
    fn look(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
        self.spare = bytes.len().saturating_mul(2).saturating_add(MAX_PICKLE_BYTES);
        let beginning = read_vec(bytes, 0, bytes.len().min(BEGINNING))?;
        let kind = recognise(&beginning, bytes.len());
        if !matches!(kind, Some(Kind::Zip | Kind::Tar)) && hides_archive(bytes)? {
            self.add(Finding::suspicious("prefix-data", "a zip archive stands behind other data"));
            self.zip(bytes, MOST_NESTED)?;
        }
        if kind != Some(Kind::Tar) && tar::is_header(&beginning) {
            self.add(Finding::suspicious(
                "polyglot",
                "torch.load sees a tar archive in this file, and others something else",
            ));
            self.tar(bytes)?;
        }
        match kind {
            Some(Kind::Zip) => {
                self.format = "torch-zip";
                if !self.archives(bytes)? {
                    self.zip(bytes, MOST_NESTED)?;
                }
                self.polyglot(bytes)
            }
            Some(Kind::Legacy) => {
                self.format = "torch-legacy";
                self.legacy(bytes)
            }
            Some(Kind::Tar) => {
                self.format = "tar";
                self.tar(bytes)?;
                self.polyglot(bytes)
            }
            Some(Kind::Pickle) => {
                self.format = "pickle";
                self.pickles(Place::of(bytes, None), 0)
            }
            None if is_safetensors(&beginning, bytes.len()) || is_cut_safetensors(&beginning) => {
                self.format = "safetensors";
                self.polyglot(bytes)
            }
            None => self.unknown(bytes, &beginning),
        }
    }

    /// Old pickles have no mark at their beginning: whatever runs as one, or names a global, is one.
    fn unknown(&mut self, bytes: &dyn Bytes, beginning: &[u8]) -> io::Result<()> {
        let other = lookalike::recognise(beginning);
        let first = legacy::run_at(bytes, 0, None)?;
        if first.is_pickle() && (first.acts() || other.is_none()) {
            self.format = "pickle";
            return self.pickles(Place::of(bytes, None), 0);
        }
        if first.ran.stopped {
            self.pickles(Place::of(bytes, None), 0)?;
        } else if first.names_something() {
            self.take(&first);
        } else {
            self.name(&first.globals);
        }
        self.add(match other {
            _ if bytes.is_empty() => Finding::malformed("empty-file", "an empty file: nothing was written, or fetched"),
            Some(Fault::Foreign { what, advice }) => {
                let rule = if lookalike::is_stand_in(beginning) { "not-weights" } else { "other-format" };
                Finding::malformed(rule, format!("{what}; {advice}"))
            }
            _ => Finding::malformed("not-recognised", "neither a file of PyTorch, nor a pickle, nor safetensors"),
        });
        Ok(())
    }

    // ---- pickles

    /// Lists names, each once.
    fn name(&mut self, globals: &[NamedGlobal]) {
        for global in globals {
            let next = self.globals.len();
            // Many unknown names must not leave out what is known to run code.
            let most = if global.danger == Danger::Dangerous { 2 * MOST_NAMES } else { MOST_NAMES };
            match self.known.entry(global.key()) {
                Slot::Occupied(at) => {
                    if let Some(known) = self.globals.get_mut(*at.get()) {
                        known.count = known.count.saturating_add(global.count);
                    }
                }
                Slot::Vacant(slot) if next < most => {
                    slot.insert(next);
                    self.globals.push(global.clone());
                }
                Slot::Vacant(_) => {
                    let what = format!("more than {MOST_NAMES} different names: not all are listed");
                    self.add(Finding::suspicious("resource-limit", what));
                }
            }
        }
    }

    pub(super) fn take(&mut self, pickled: &Pickled) {
        self.protocol = self.protocol.max(Some(pickled.ran.protocol));
        self.name(&pickled.globals);
        pickled.findings.iter().cloned().for_each(|finding| self.add(finding));
    }

    fn legacy(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
        let stack = Stack::read(bytes)?;
        stack.pickles.iter().for_each(|pickled| self.take(pickled));
        stack.findings.iter().cloned().for_each(|finding| self.add(finding));
        let (Some(pickled), Some(keys)) = (stack.object(), stack.keys()) else {
            return self.search(Place::of(bytes, None), stack.end);
        };
        let mut objects = Objects::new(&pickled.ran.arena);
        let Some(root) = pickled.ran.result.filter(|_| pickled.walk.broken.is_none()) else {
            return self.search(Place::of(bytes, None), stack.end);
        };
        objects.declare();
        objects.gather(root);
        let by_key: HashMap<&str, &Declared> =
            objects.storages.values().map(|declared| (declared.key.as_str(), declared)).collect();
        let places = match legacy::locate(bytes, stack.end, keys, |key| by_key.get(key).copied())? {
            Ok(places) => places,
            Err(finding) => {
                self.add(finding);
                self.search(Place::of(bytes, None), stack.end)?;
                HashMap::new()
            }
        };
        self.tensors(objects, bytes.len(), |declared| places.get(&declared.key).copied());
        Ok(())
    }

    // ---- archives

    pub(super) fn zip(&mut self, bytes: &dyn Bytes, nested: usize) -> io::Result<()> {
        let ahead = Ahead::new(bytes);
        let archive = Archive::open(&ahead, 0)?;
        archive.directory.findings.iter().cloned().for_each(|finding| self.add(finding));
        if archive.script {
            self.format = "torchscript";
            let what = "a TorchScript archive: it holds code, which torch.jit.load would run";
            self.add(Finding::notice("torchscript", what));
        }
        if !archive.script && !archive.directory.entries.is_empty() && archive.member("data.pkl").is_none() {
            self.format = "zip";
        }
        if archive.exported {
            self.format = "torch-export";
            let what = "an archive of torch.export: a program, which torch.export.load builds, and its weights";
            self.add(Finding::notice("torch-export", what));
        }
        self.checksums(&archive)?;
        let referenced = if archive.exported { HashSet::new() } else { self.main_pickle(&archive, bytes.len())? };
        let main = archive.member("data.pkl").map(|entry| entry.header);
        let mut seen = HashSet::new();
        for entry in archive.directory.entries.iter().filter(|entry| Some(entry.header) != main) {
            self.other_member(bytes, entry, &referenced, &mut seen, nested)?;
        }
        for (from, to) in &archive.directory.strays {
            let len = bytes.len().min(*to).saturating_sub(*from);
            if len > 0 {
                self.stray(&Section { whole: bytes, start: *from, len }, nested)?;
            }
        }
        Ok(())
    }

    /// Archives one after the other. Returns whether that is all that the file can be taken for: under a name that
    /// `torch.load` is given it may be another archive.
    fn archives(&mut self, bytes: &dyn Bytes) -> io::Result<bool> {
        let Some(archives) = concat::archives(bytes)? else { return Ok(false) };
        let what = format!("{} archives one after the other, as a distributed checkpoint holds them", archives.len());
        self.add(Finding::notice("archives", what));
        for (start, end) in archives {
            self.archives.insert((start, end));
            self.zip(&Section { whole: bytes, start, len: end - start }, MOST_NESTED)?;
        }
        Ok(self.path.extension().is_some_and(|extension| extension == "distcp"))
    }

    fn checksums(&mut self, archive: &Archive) -> io::Result<()> {
        let absent = archive.storages().any(|entry| entry.crc == 0 && entry.len > 0);
        self.crc = if absent { "absent" } else { "checked" };
        archive.wrong_crcs()?.into_iter().for_each(|finding| self.add(finding));
        if absent && archive.is_unwritten()? {
            let what = "no storage has a CRC and all are zeros: the file was laid out and its weights never written";
            self.add(Finding::suspicious("crc-absent", what));
        }
        Ok(())
    }

    /// The archive's own pickle. Returns the names of the storages that it declares.
    fn main_pickle(&mut self, archive: &Archive, file_bytes: u64) -> io::Result<HashSet<String>> {
        let mut referenced = HashSet::new();
        let (bytes, member) = match archive.pickle()? {
            Ok(pickle) => pickle,
            Err(finding) => {
                self.add(finding);
                let Some(entry) = archive.member("data.pkl") else { return Ok(referenced) };
                (self.bytes_of(archive.bytes, entry)?, entry.name.clone())
            }
        };
        let len = bytes.len();
        let mut pickled = Pickled::run(bytes, 0, Some(&member));
        pickled.check_end(len, &member);
        self.take(&pickled);
        if pickled.ran.end < len {
            let rest = Memory(&pickled.ran.arena.bytes);
            self.pickles(Place { several: true, ..Place::of(&rest, Some(&member)) }, pickled.ran.end as u64)?;
        }
        let Some(root) = pickled.ran.result.filter(|_| pickled.walk.broken.is_none() && !archive.script) else {
            return Ok(referenced);
        };
        let mut objects = Objects::new(&pickled.ran.arena);
        objects.declare();
        objects.gather(root);
        let mut places = HashMap::new();
        for declared in objects.storages.values() {
            referenced.insert(format!("data/{}", declared.key));
            match archive.locate(declared) {
                Ok(storage) => drop(places.insert(declared.key.clone(), storage)),
                Err(finding) => self.add(finding),
            }
        }
        self.tensors(objects, file_bytes, |declared| places.get(&declared.key).copied());
        Ok(referenced)
    }

    /// A member's bytes whatever its checksum says, as far as they can be had.
    fn bytes_of(&mut self, bytes: &dyn Bytes, entry: &Entry) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        if members::is_bomb(entry) {
            let what = format!("{} bytes would become {}", entry.packed, entry.len);
            self.add(Finding::suspicious("ratio-limit", what).within(&entry.name));
            return Ok(out);
        }
        let Some(stream) = members::stream(bytes, entry) else { return Ok(out) };
        match stream.take(entry.len.min(MAX_PICKLE_BYTES)).read_to_end(&mut out) {
            Err(e) if e.kind() == io::ErrorKind::OutOfMemory => Err(e),
            _ => Ok(out),
        }
    }

    /// A member besides the archive's own pickle. Of those that are the same bytes only the first is run.
    fn other_member(
        &mut self,
        bytes: &dyn Bytes,
        entry: &Entry,
        referenced: &HashSet<String>,
        seen: &mut HashSet<(Placed, bool)>,
        nested: usize,
    ) -> io::Result<()> {
        let name = entry.name.split('\0').next().unwrap_or_default().to_ascii_lowercase();
        let inner = entry.name.split_once('/').map_or("", |(_, inner)| inner);
        let is_storage = inner.starts_with("data/");
        if referenced.contains(inner) || entry.len == 0 {
            return Ok(());
        }
        if is_storage && self.format == "torch-zip" {
            self.bytes_in_no_tensor = self.bytes_in_no_tensor.saturating_add(entry.len);
            self.add(Finding::notice("unreferenced-record", "a storage that no tensor has").within(&entry.name));
        }
        // TorchScript says there where in the source each piece of code came from.
        let traces = self.format == "torchscript" && inner.starts_with("code/") && name.ends_with(".debug_pkl");
        let named = name.ends_with(".pkl") || traces;
        if !seen.insert((entry.placed(), named)) || !self.spend(entry.len.min(FIRST_READ)) {
            return Ok(());
        }
        if nested > 0 && beginning_of(bytes, entry, 4)?.is_some_and(|beginning| beginning == b"PK\x03\x04") {
            return self.inner_archive(bytes, entry, nested - 1);
        }
        if (!named && !may_be_pickle(bytes, entry)?) || !self.spend(entry.len) {
            return Ok(());
        }
        let content = self.bytes_of(bytes, entry)?;
        let content = Memory(&content);
        let pickled = legacy::run_at(&content, 0, Some(&entry.name))?;
        if !named && pickled.is_pickle() {
            self.add(Finding::suspicious("extra-pickle", "a pickle where a storage should be").within(&entry.name));
        }
        if named || pickled.is_pickle() {
            self.pickles(Place::of(&content, Some(&entry.name)), 0)?;
        }
        Ok(())
    }

    /// The description of a distributed checkpoint: one that is refused hides which items there are.
    fn description(&mut self, folder: &Path) {
        let refused = dcp::places(folder).err().filter(|_| Verdict::of(&self.findings) < Verdict::Malformed);
        refused.into_iter().for_each(|error| self.add(Finding::malformed("dcp-metadata", error.to_string())));
    }

    /// What is unpickled of a file by itself, and is none of the archives that were looked at.
    fn items(&mut self, bytes: &dyn Bytes, items: impl Iterator<Item = (u64, u64)>) -> io::Result<()> {
        let mut spare = bytes.len().saturating_mul(2).saturating_add(SPARE_BYTES);
        for (start, len) in items {
            let Some(end) = start.checked_add(len).filter(|end| *end <= bytes.len()) else {
                let what = format!(".metadata has {len} bytes at {start} for an item, of {}", bytes.len());
                self.add(Finding::malformed("dcp-metadata", what));
                continue;
            };
            if self.archives.insert((start, end)) && (start, end) != (0, bytes.len()) {
                let Some(rest) = spare.checked_sub(len) else {
                    let what = "items of .metadata that overlap each other: not all of them were looked at";
                    self.add(Finding::suspicious("resource-limit", what));
                    return Ok(());
                };
                spare = rest;
                let found =
                    self.inside(&format!("byte {start}"), |audit| audit.look(&Section { whole: bytes, start, len }))?;
                self.findings.extend(found);
            }
        }
        Ok(())
    }

    /// A member that is an archive itself, in which nobody expects a model.
    fn inner_archive(&mut self, bytes: &dyn Bytes, entry: &Entry, nested: usize) -> io::Result<()> {
        let found = self.inside(&finding::name(&entry.name), |audit| {
            match entry.data.filter(|_| entry.method == Some(Method::Stored)) {
                Some(start) if audit.spend(entry.packed) => {
                    audit.zip(&Section { whole: bytes, start, len: entry.packed }, nested)
                }
                None if entry.len > MAX_PICKLE_BYTES => {
                    let what = format!("a packed archive of {} bytes: not looked into", entry.len);
                    audit.add(Finding::suspicious("resource-limit", what));
                    Ok(())
                }
                None if audit.spend(entry.len) => {
                    let content = audit.bytes_of(bytes, entry)?;
                    audit.zip(&Memory(&content), nested)
                }
                _ => Ok(()),
            }
        })?;
        let expected = |finding: &Finding| !matches!(finding.rule, "pickle-missing" | "ambiguous-root");
        self.findings.extend(found.into_iter().filter(expected));
        Ok(())
    }

    /// What is found in a part, which is named in front of its members. The file stays what the whole makes of it.
    fn inside(&mut self, part: &str, look: impl FnOnce(&mut Audit) -> io::Result<()>) -> io::Result<Vec<Finding>> {
        let whole = (self.format, self.crc, std::mem::take(&mut self.findings));
        look(self)?;
        let found = std::mem::take(&mut self.findings);
        (self.format, self.crc, self.findings) = whole;
        let named = found.into_iter().map(|finding| {
            let member = finding.member.as_ref().map_or(String::new(), |member| format!("!{member}"));
            Finding { member: Some(format!("{part}{member}")), ..finding }
        });
        Ok(named.collect())
    }

    /// Whether so many bytes may still be run.
    fn spend(&mut self, bytes: u64) -> bool {
        let rest = self.spare.checked_sub(bytes);
        if rest.is_none() {
            let what = "members that unpack to far more bytes than the file has: not all of them were looked at";
            self.add(Finding::suspicious("resource-limit", what));
        }
        self.spare = rest.unwrap_or(self.spare);
        rest.is_some()
    }

    /// Bytes that belong to no member: whatever could be read there is looked at.
    fn stray(&mut self, part: &Section<'_, dyn Bytes + '_>, nested: usize) -> io::Result<()> {
        let beginning = read_vec(part, 0, part.len().min(4))?;
        if beginning.starts_with(b"PK") && nested > 0 {
            return self.zip(part, nested - 1);
        }
        self.region(Place::of(part, None))
    }

    // ---- tensors

    fn tensors(&mut self, objects: Objects, file_bytes: u64, place: impl Fn(&Declared) -> Option<Storage>) {
        let Objects { storages, tensors, aside, findings, .. } = objects;
        findings.into_iter().for_each(|finding| self.add(finding));
        for aside in aside.into_iter().filter(|aside| aside.tell) {
            let unknown = aside.why.starts_with("an unknown object");
            if !unknown {
                self.add(Finding::notice("not-converted", format!("{:?} is {}", aside.name, aside.why)));
            }
        }
        if tensors.is_empty() {
            self.add(Finding::notice("no-tensors", "no dense tensor in its object"));
        }
        let mut assembly = Assembly::new(0, file_bytes);
        let mut used: HashMap<String, (u64, u64)> = HashMap::new();
        for found in tensors {
            let id: Id = found.dense.storage;
            let Some((declared, storage)) = storages.get(&id).and_then(|it| Some((it, place(it)?))) else { continue };
            let bytes = found.dense.elements().saturating_mul(found.dense.kind.bytes);
            let of_type = self.tensors.entry(found.dense.kind.dtype.as_ref().map_or("?", |it| it.name()).to_owned());
            let of_type = of_type.or_default();
            of_type.tensors += 1;
            of_type.bytes = of_type.bytes.saturating_add(bytes);
            let used = used.entry(declared.key.clone()).or_insert((0, storage.len));
            used.0 = used.0.saturating_add(bytes).min(storage.len);
            assembly.add(found, storage, 0);
        }
        let unused: u64 = used.values().map(|(used, all)| all - used).sum();
        self.bytes_in_no_tensor = self.bytes_in_no_tensor.saturating_add(unused);
        let assembled = assembly.finish();
        self.shared = assembled.shared;
        for finding in assembled.findings {
            // Two paths with one name are odd to a list of names only.
            let severity = if finding.rule == "typed-path" { Severity::Notice } else { finding.severity };
            self.add(Finding { severity, ..finding });
        }
    }
}

/// The first bytes of a member, at most so many; `None` where they cannot be had.
fn beginning_of(bytes: &dyn Bytes, entry: &Entry, most: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(stream) = members::stream(bytes, entry) else { return Ok(None) };
    let mut beginning = Vec::new();
    Ok(stream.take(most).read_to_end(&mut beginning).is_ok().then_some(beginning))
}

/// Whether a member may be a pickle: it has the mark of one, its beginning runs as one, or that is cut off.
fn may_be_pickle(bytes: &dyn Bytes, entry: &Entry) -> io::Result<bool> {
    let Some(head) = beginning_of(bytes, entry, FIRST_READ)? else { return Ok(false) };
    let first = Pickled::run_part(head, entry.len, 0, None);
    let is_cut = first.ran.wants > first.read as u64 && first.ran.wants <= entry.len;
    Ok(first.is_pickle() || first.ran.protocol > 0 || is_cut)
}

/// Whether only the rest of the file is missing: text that happens to have a brace there is none.
fn is_cut_safetensors(beginning: &[u8]) -> bool {
    beginning.get(8) == Some(&b'{') && lookalike::recognise(beginning).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_beyond_the_limit_are_not_run_and_that_is_told() {
        let mut audit = Audit { spare: 10, ..Audit::new(Path::new("file")) };
        assert!(audit.spend(6) && audit.findings.is_empty());
        assert!(!audit.spend(5) && audit.spend(4));
        assert_eq!((audit.findings.len(), audit.judged().verdict), (1, Verdict::Suspicious));
    }

    /// A hundred thousand items over the same gigabyte would be looked at for days.
    #[test]
    fn items_that_overlap_end_the_search_and_that_is_told() {
        let file = vec![0; 1 << 20];
        let len = file.len() as u64 - 100;
        let searched = |items: u64| {
            let mut audit = Audit::new(Path::new("file"));
            audit.items(&Memory(&file), (0..items).map(|at| (at, len))).unwrap();
            audit.findings.iter().any(|finding| finding.rule == "resource-limit")
        };
        assert_eq!((searched(60), searched(80)), (false, true));
    }
}
