//! What a file would do to a program that trusts it: every global that its pickles name, every oddity of its container, found
//! without executing anything.
//!
//! It looks at content, and at what other readers could take the file for: members under a second name, bytes before, between and
//! after members, archives in comments. One extension counts: a `.distcp` file is read item by item, and as a whole only where the
//! `.metadata` beside it says so. Everything found stays in one list; [`Verdict`] is the worst of it. It never says that a file is
//! harmless, only that it holds nothing but what is on the allow-list.

use std::collections::hash_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vramp_text::lookalike::{self, Foreign};

use crate::assemble::Assembly;
use crate::bytes::{Bytes, Memory, Section, read_vec};
use crate::dcp::{self, Description};
use crate::finding::{Finding, Severity};
use crate::legacy::Stack;
use crate::objects::Objects;
use crate::pickle::{Danger, Id, MAX_PICKLE_BYTES};
pub use crate::pickled::NamedGlobal;
use crate::pickled::{MOST_NAMES, Pickled};
use crate::recipe::Storage;
use crate::scan::{MOST_PICKLES, Place};
use crate::storages::Declared;
use crate::unpack::MOST_NESTED;
use crate::{BEGINNING, Kind, hides_archive, is_safetensors, legacy, recognise, tar};

/// Findings of one file that are kept, of each severity: many of one kind must not leave out what is worse.
const MOST_FINDINGS: usize = 2500;
/// Bytes of archives within archives that are looked at beyond four times those of their file.
const SPARE_INNER_BYTES: u64 = 16 << 20;
/// Bytes of items that are looked at beyond twice those of their file.
const SPARE_BYTES: u64 = 64 << 20;

/// Ends of names of files that are unpickled, or taken for weights without asking.
#[rustfmt::skip]
pub const WEIGHTS: &[&str] =
    &["bin", "ckpt", "distcp", "joblib", "mar", "pickle", "pkl", "pt", "pt2", "pth", "ptl", "safetensors", "t7", "th"];
/// Ends of names of weights in formats that are not looked into.
pub const FOREIGN: &[&str] = &["ggml", "gguf", "h5", "keras", "msgpack", "npy", "npz", "onnx", "tflite"];
/// Ends of names of files that are not all there.
const PARTIAL: &[&str] = &["aria2", "crdownload", "download", "incomplete", "part", "partial", "tmp"];

/// The end of a file's name in lower case, without those of downloads that are not over.
pub fn end_of_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    let mut ends = name.split('.').skip(1).collect::<Vec<_>>();
    while ends.last().is_some_and(|end| PARTIAL.contains(end)) {
        ends.pop();
    }
    ends.pop().map(str::to_owned)
}

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
    /// What it is: `torch-zip`, `torch-legacy`, `torchscript`, `torch-export`, `torch-package`, `model-archive`, `zip` (another
    /// archive), `pickle`, `tar`, `safetensors` or `unknown`.
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
    pub(crate) spare: u64,
    /// Bytes of archives within archives that may still be looked at.
    #[serde(skip)]
    pub(crate) inner: u64,
    /// What was found in parts that are files of their own.
    #[serde(skip)]
    pub(crate) parts: Vec<Finding>,
    /// Start and end of the archives that were looked at, where there are several.
    #[serde(skip)]
    pub(crate) archives: HashSet<(u64, u64)>,
}

/// Which parts of which files of a folder are read for themselves, as its `.metadata` says (or one for each rank): a distributed checkpoint is unpickled item
/// by item, wherever in a file an item lies.
#[derive(Debug, Clone, Default)]
pub struct Items(BTreeMap<String, BTreeSet<(u64, u64)>>);

impl Items {
    /// Those that the descriptions of a folder name, its files for which [`dcp::is_metadata`]. One that is refused says nothing: an
    /// audit of that file says why.
    pub fn described(descriptions: impl IntoIterator<Item = Description>) -> Items {
        let mut places: BTreeMap<String, BTreeSet<(u64, u64)>> = BTreeMap::new();
        for description in descriptions {
            for dcp::Place { file, offset, len } in description.places.into_values() {
                places.entry(file).or_default().insert((offset, len));
            }
        }
        Items(places)
    }

    /// Offset and length in bytes of those in one file.
    fn in_file(&self, path: &Path) -> impl Iterator<Item = (u64, u64)> {
        let name = path.file_name().and_then(|name| name.to_str());
        name.and_then(|name| self.0.get(name)).into_iter().flatten().copied()
    }
}

/// Audits the bytes of a file of that name, and what in it `items` says to be read for itself. `header` says what is wrong with
/// the header of a safetensors file, which is for others to read.
///
/// # Errors
/// When the bytes cannot be read. Whatever is wrong with their content is a finding.
pub fn audit_file(
    path: &Path,
    bytes: &dyn Bytes,
    items: &Items,
    header: &dyn Fn() -> Option<String>,
) -> io::Result<Audit> {
    let mut audit = Audit::new(path, bytes.len());
    // Such a file is read as a whole only where it is one item.
    let in_parts = path.extension().is_some_and(|extension| extension == "distcp");
    audit.look(bytes, in_parts)?;
    if audit.format == "safetensors"
        && let Some(wrong) = header()
    {
        audit.add(Finding::malformed("safetensors", wrong));
        // A header that is right leaves no room for anything else.
        audit.search(Place::of(bytes, None), 0)?;
    }
    audit.items(bytes, items.in_file(path))?;
    if audit.format == "pickle" && path.file_name().is_some_and(dcp::is_metadata) {
        audit.description(bytes)?;
    }
    Ok(audit.judged())
}

/// What is said of something with the name of a file that is none, and that is not opened: a pipe would be waited for.
pub fn special(path: &Path, what: &str) -> Audit {
    let mut audit = Audit::new(path, 0);
    let what =
        format!("{what} where weights should be; it was not opened, and a program that opens it may wait for ever");
    audit.add(Finding::malformed("not-regular", what));
    audit.judged()
}

/// Audits bytes as if they were a file.
///
/// # Errors
/// None but those of the memory.
pub fn audit_bytes(bytes: &[u8]) -> io::Result<Audit> {
    let mut audit = Audit::new(Path::new("bytes"), bytes.len() as u64);
    audit.look(&Memory(bytes), false)?;
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
    pub(crate) fn new(path: &Path, len: u64) -> Audit {
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
            // Members that share bytes make much of a small file.
            spare: len.saturating_mul(2).saturating_add(MAX_PICKLE_BYTES),
            inner: len.saturating_mul(4).saturating_add(SPARE_INNER_BYTES),
            parts: Vec::new(),
            archives: HashSet::new(),
        }
    }

    pub(crate) fn add(&mut self, finding: Finding) {
        let kept = self.kept.entry(finding.severity).or_default();
        if *kept < MOST_FINDINGS && !self.findings.contains(&finding) {
            *kept += 1;
            self.findings.push(finding);
        }
    }

    /// Outside TorchScript Python resolves its names, and no archive holds such classes.
    fn judge_script(&mut self) {
        let is_script = self.format == "torchscript";
        let names = self.findings.iter_mut().filter(|finding| finding.rule == "torchscript" && !is_script);
        names.for_each(|finding| finding.severity = Severity::Suspicious);
    }

    /// Pickles that follow what a text is by chance, where they name something; else that of which a name is known to run code.
    fn behind_text(&mut self, bytes: &dyn Bytes, mut at: u64) -> io::Result<()> {
        for _ in 0..MOST_PICKLES {
            let next = legacy::run_at(bytes, at, None)?;
            if next.names_something() && next.acts() {
                self.format = "pickle";
                return self.pickles(Place::of(bytes, None), 0);
            }
            if !next.ran.stopped {
                return self.search(Place::of(bytes, None), at);
            }
            at = at.saturating_add(next.ran.end as u64);
        }
        // Each further one is reported for what it is.
        self.pickles(Place::of(bytes, None), 0)
    }

    fn judged(mut self) -> Audit {
        self.judge_script();
        self.findings.append(&mut self.parts);
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        self.verdict = Verdict::of(&self.findings);
        self
    }

    /// Recognises the bytes and looks at them as what they are, and as what else they could be taken for: archives one after the
    /// other are one to who reads them from their end, unless they are read `in_parts`.
    fn look(&mut self, bytes: &dyn Bytes, in_parts: bool) -> io::Result<()> {
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
                if !self.archives(bytes)? || !in_parts {
                    self.archives.insert((0, bytes.len()));
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
        let is_text = lookalike::is_text(beginning);
        // Text runs as a pickle by chance: `C` takes as many bytes as the next letter says, `G` takes eight, and a full stop ends it.
        if is_text && first.ran.stopped && !first.names_something() && !ends_with(bytes, first.ran.end)? {
            self.behind_text(bytes, first.ran.end as u64)?;
            self.add(self.of_text(other));
            return Ok(());
        }
        if first.is_pickle() && (first.acts() || other.is_none()) {
            self.format = "pickle";
            return self.pickles(Place::of(bytes, None), 0);
        }
        if first.ran.stopped {
            self.pickles(Place::of(bytes, None), 0)?;
        } else if first.names_something() && is_text {
            // It would be imported, and then the text is no pickle: as a list of packages that begins with `click`.
            self.name(&first.globals);
            let names = first.findings.iter().filter(|finding| finding.rule == "global-not-allowed").cloned();
            names.for_each(|finding| self.add(Finding { severity: Severity::Notice, ..finding }));
        } else if first.names_something() {
            self.take(&first);
        } else if !is_text {
            self.name(&first.globals);
        }
        self.add(match other {
            _ if bytes.is_empty() => Finding::malformed("empty-file", "an empty file: nothing was written, or fetched"),
            other if is_text => self.of_text(other),
            Some(Foreign { what, advice }) => {
                let rule = if lookalike::is_stand_in(beginning) { "not-weights" } else { "other-format" };
                Finding::malformed(rule, format!("{what}; {advice}"))
            }
            _ => Finding::malformed("not-recognised", "neither a file of PyTorch, nor a pickle, nor safetensors"),
        });
        Ok(())
    }

    /// What is said of a text: worth knowing, unless the file's name says that it should be weights.
    fn of_text(&self, other: Option<Foreign>) -> Finding {
        let Some(Foreign { what, advice }) = other else { return Finding::notice("not-weights", "text") };
        match end_of_name(&self.path).as_deref() {
            // Python reads such files when it starts, and runs lines that begin with `import`.
            Some("pth") if what.starts_with("text that") => Finding::notice(
                "not-weights",
                format!("{what}: no weights, but perhaps paths for Python's `site`, which may import"),
            ),
            Some(end) if WEIGHTS.contains(&end) || FOREIGN.contains(&end) => {
                Finding::malformed("not-weights", format!("{what}; {advice}"))
            }
            _ => Finding::notice("not-weights", what),
        }
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

    pub(crate) fn take(&mut self, pickled: &Pickled) {
        self.protocol = self.protocol.max(Some(pickled.ran.protocol));
        self.name(&pickled.globals);
        pickled.findings.iter().cloned().for_each(|finding| self.add(finding));
    }

    pub(crate) fn legacy(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
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
        objects.declare(|_| true);
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

    // ---- parts of a distributed checkpoint

    /// The description of a distributed checkpoint: one that is refused hides which items there are.
    fn description(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
        let refused = dcp::objection(&legacy::run_at(bytes, 0, None)?);
        refused.into_iter().for_each(|finding| self.add(finding));
        Ok(())
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
            if self.archives.insert((start, end)) {
                if !afford(&mut spare, len) {
                    let what = "items of .metadata that overlap each other: not all of them were looked at";
                    self.add(Finding::suspicious("resource-limit", what));
                    return Ok(());
                }
                let part = Section { whole: bytes, start, len };
                let seen = std::mem::take(&mut self.archives); // places within the part are none of the file
                let found = self.inside(&format!("byte {start}"), |audit| audit.look(&part, false))?;
                self.archives = seen;
                self.parts.extend(found);
            }
        }
        Ok(())
    }

    /// What is found in a part, which is named in front of its members. The file stays what the whole makes of it.
    pub(crate) fn inside(
        &mut self,
        part: &str,
        look: impl FnOnce(&mut Audit) -> io::Result<()>,
    ) -> io::Result<Vec<Finding>> {
        let whole = (self.format, self.crc, std::mem::take(&mut self.findings), std::mem::take(&mut self.parts));
        look(self)?;
        self.judge_script();
        let mut found = std::mem::take(&mut self.findings);
        found.append(&mut self.parts);
        (self.format, self.crc, self.findings, self.parts) = whole;
        let named = found.into_iter().map(|finding| {
            let member = finding.member.as_ref().map_or(String::new(), |member| format!("!{member}"));
            Finding { member: Some(format!("{part}{member}")), ..finding }
        });
        Ok(named.collect())
    }

    // ---- tensors

    pub(crate) fn tensors(&mut self, objects: Objects, file_bytes: u64, place: impl Fn(&Declared) -> Option<Storage>) {
        let Objects { storages, tensors, aside, findings, .. } = objects;
        findings.into_iter().for_each(|finding| self.add(finding));
        for aside in aside.into_iter().filter(|aside| aside.tell) {
            let unknown = aside.is_unknown();
            if !unknown {
                self.add(Finding::notice("not-converted", format!("{:?} is {}", aside.name, aside.why)));
            }
        }
        if tensors.is_empty() {
            self.add(Finding::notice("no-tensors", "no dense tensor in its object"));
        }
        let mut assembly = Assembly::new(file_bytes);
        let mut used: HashMap<String, (u64, u64)> = HashMap::new();
        for found in tensors {
            let id: Id = found.dense.storage;
            let Some((declared, storage)) = storages.get(&id).and_then(|it| Some((it, place(it)?))) else { continue };
            let bytes = found.dense.elements().saturating_mul(found.dense.kind.bytes);
            let of_type = self.tensors.entry(found.dense.kind.dtype.unwrap_or("?").to_owned());
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

/// Takes so many bytes from those that may still be looked at, if there are as many.
pub(crate) fn afford(spare: &mut u64, bytes: u64) -> bool {
    let rest = spare.checked_sub(bytes);
    *spare = rest.unwrap_or(*spare);
    rest.is_some()
}

/// Whether only the rest of the file is missing: text that happens to have a brace there is none.
/// Whether nothing but blanks follows byte `end`.
fn ends_with(bytes: &dyn Bytes, end: usize) -> io::Result<bool> {
    const MOST_BLANKS: u64 = 64;
    let left = bytes.len().saturating_sub(end as u64);
    Ok(left <= MOST_BLANKS && read_vec(bytes, end as u64, left)?.iter().all(u8::is_ascii_whitespace))
}

fn is_cut_safetensors(beginning: &[u8]) -> bool {
    beginning.get(8) == Some(&b'{') && lookalike::recognise(beginning).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hundred thousand items over the same gigabyte would be looked at for days.
    #[test]
    fn items_that_overlap_end_the_search_and_that_is_told() {
        let file = vec![0; 1 << 20];
        let len = file.len() as u64 - 100;
        let searched = |items: u64| {
            let mut audit = Audit::new(Path::new("file"), file.len() as u64);
            audit.items(&Memory(&file), (0..items).map(|at| (at, len))).unwrap();
            audit.findings.iter().any(|finding| finding.rule == "resource-limit")
        };
        assert_eq!((searched(60), searched(80)), (false, true));
    }
}
