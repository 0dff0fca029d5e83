//! What an audit has found: a verdict, findings, globals, tensors. Plain data, and how findings are added to it.

use std::collections::hash_map::Entry as Slot;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::assemble::Assembly;
use crate::declared::Declared;
use crate::finding::{Finding, Severity};
use crate::objects::Objects;
use crate::pickle::{Danger, Id, MAX_PICKLE_BYTES};
use crate::pickled::{MOST_NAMES, NamedGlobal, Pickled};
use crate::recipe::Storage;

/// Findings of one file that are kept, of each severity: many of one kind must not leave out what is worse.
const MOST_FINDINGS: usize = 2500;
/// Bytes of archives within archives that are looked at beyond four times those of their file.
const SPARE_INNER_BYTES: u64 = 16 << 20;

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

#[allow(clippy::ptr_arg)] // as serde wants it
fn lossy<S: serde::Serializer>(path: &PathBuf, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

impl Verdict {
    pub(super) fn of(findings: &[Finding]) -> Verdict {
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

    pub(super) fn judged(mut self) -> Audit {
        self.judge_script();
        self.findings.append(&mut self.parts);
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        self.verdict = Verdict::of(&self.findings);
        self
    }

    // ---- pickles

    /// Lists names, each once.
    pub(super) fn name(&mut self, globals: &[NamedGlobal]) {
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

    // ---- parts of a distributed checkpoint

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
