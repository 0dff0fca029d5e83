//! Reads one file of `torch.save`: its pickle, what that says of storages, where they lie. The first kind of finding that blocks ends
//! it, all of its kind named. Nothing is executed, and no other file is opened than the one that was given.

use std::collections::HashMap;
use std::io;

use vramp_text::{Listed, counted, quoted};

use crate::archive::Archive;
use crate::aside::{Aside, Loss};
use crate::assemble::{Assembled, Assembly};
use crate::bytes::{Ahead, Bytes};
use crate::declared::Declared;
use crate::finding::{Finding, Severity};
use crate::inert::{self, Used};
use crate::legacy::{self, Stack};
use crate::objects::{CutFound, Objects};
use crate::pickle::Id;
use crate::pickled::Pickled;
use crate::recipe::Storage;
use crate::{Kind, tar};

/// What of a file is wanted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted<'a> {
    /// The key below which the tensors lie.
    pub key: Option<&'a str>,
    /// Whether unknown objects are passed over, and the state dict of a whole model is read.
    pub skip_unknown: bool,
    /// The rank whose file it is, where the files of all ranks are put together: tensors that are cut are then taken apart.
    pub rank: Option<u64>,
}

/// What one file gave.
#[derive(Debug, Default)]
pub struct Part {
    /// Its tensors.
    pub assembled: Assembled,
    /// What is no tensor, or none that could be loaded.
    pub skipped: Vec<Aside>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// Tensors that are cut over ranks; empty unless it was read as one rank's file.
    pub cut: Vec<CutFound>,
    /// CRC-32 of tensors that are the whole of a storage, where it is stated and the file was read as one rank's.
    pub sums: HashMap<String, u32>,
}

/// Why a file gave nothing.
#[derive(Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// It cannot be read.
    Io(io::Error),
    /// It is something that is not read, in words.
    Unsupported(String),
    /// It holds what no load accepts.
    Refused(Refused),
    /// The key is not there; those at the top are.
    NoKey(Vec<String>),
    /// So many paths have the key's name.
    SeveralKeys(usize),
}

/// Findings that block, and what of the object would be lost by passing over what is unknown.
#[derive(Debug, Default)]
pub struct Refused {
    /// All of their kind; at least one.
    pub findings: Vec<Finding>,
    /// Unknown objects with tensors in them.
    pub inside: Vec<Aside>,
    /// Keys that lead to tensors and to none of these.
    pub keys: Vec<String>,
}

type Result<T> = std::result::Result<T, Refusal>;

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        Refusal::Io(error)
    }
}

/// Refuses for those findings that block.
///
/// # Errors
/// They.
pub fn demand(findings: &[Finding], skip_unknown: bool) -> std::result::Result<(), Refused> {
    let findings: Vec<Finding> = findings.iter().filter(|finding| blocks(finding, skip_unknown)).cloned().collect();
    if findings.is_empty() { Ok(()) } else { Err(Refused { findings, ..Refused::default() }) }
}

/// Whether a finding refuses the file.
fn blocks(finding: &Finding, skip_unknown: bool) -> bool {
    let passed_over = skip_unknown && finding.rule == "global-not-allowed" && finding.severity == Severity::Suspicious;
    let too_wide = finding.rule == "integer-limit";
    (finding.severity.blocks() || too_wide) && !passed_over
}

fn refused(finding: Finding) -> Refusal {
    Refusal::Refused(Refused { findings: vec![finding], ..Refused::default() })
}

/// Reads a file of that kind.
///
/// # Errors
/// [`Refusal`].
pub fn read(bytes: &dyn Bytes, kind: Kind, wanted: Wanted<'_>) -> Result<Part> {
    let unsupported = |what: String| Err(Refusal::Unsupported(what));
    match kind {
        Kind::Zip => zip(bytes, 0, wanted),
        Kind::Legacy => Reader { wanted }.legacy(bytes),
        Kind::Tar => unsupported(tar::contents(bytes)?),
        Kind::Pickle => unsupported(
            "a plain pickle, not a file of torch.save: it holds no storages that could be loaded, and it is never \
             executed; an audit says what is in it"
                .to_owned(),
        ),
    }
}

/// Reads an archive that begins at byte `start` of a file; offsets in what it gives are those of the file.
///
/// # Errors
/// [`Refusal`].
pub fn zip(bytes: &dyn Bytes, start: u64, wanted: Wanted<'_>) -> Result<Part> {
    Reader { wanted }.zip(bytes, start)
}

struct Reader<'a> {
    wanted: Wanted<'a>,
}

impl Reader<'_> {
    fn demand(&self, findings: &[Finding]) -> Result<()> {
        demand(findings, self.wanted.skip_unknown).map_err(Refusal::Refused)
    }

    /// The same for findings about a pickle whose object is `root`, or what was asked for of it.
    fn demand_of(&self, pickled: &Pickled, root: Option<Id>, findings: &[Finding]) -> Result<()> {
        let blocking = demand(findings, self.wanted.skip_unknown);
        blocking.map_err(|blocking| match root {
            Some(root) => Refusal::Refused(with_unread(blocking, pickled, root)),
            None => Refusal::Refused(blocking),
        })
    }

    fn zip(&self, bytes: &dyn Bytes, start: u64) -> Result<Part> {
        let ahead = Ahead::new(bytes);
        let archive = Archive::open(&ahead, start)?;
        if archive.script {
            let what = "a TorchScript archive (torch.jit.save): it holds code beside the weights, and is not read; save the \
                        model's state_dict instead";
            return Err(Refusal::Unsupported(what.to_owned()));
        }
        if let Some(other) = archive.other {
            let what = format!("{}; it is not read: save the model's state_dict instead", other.what);
            return Err(Refusal::Unsupported(what));
        }
        if let Some(what) = archive.contents() {
            return Err(Refusal::Unsupported(what));
        }
        self.demand(&archive.directory.findings)?;
        let (pickle, member) = match archive.pickle()? {
            Ok(pickle) => pickle,
            Err(finding) => return Err(refused(finding)),
        };
        let len = pickle.len();
        let mut pickled = Pickled::run(pickle, 0, Some(&member));
        pickled.check_end(len, &member);
        let is_part = self.wanted.skip_unknown || self.wanted.key.is_some();
        self.demand_of(&pickled, pickled.ran.result, &inert::of_the_whole(&pickled, is_part))?;
        self.tensors(&pickled, Assembly::new(bytes.len()).swapped(archive.big_endian), false, |objects| {
            let (mut by_key, mut findings) = (HashMap::new(), Vec::new());
            for (key, (declared, users)) in objects.storages_by_key() {
                match archive.locate(declared, &users) {
                    Ok(storage) => drop(by_key.insert(key, storage)),
                    Err(finding) => findings.push(finding),
                }
            }
            let place = |(id, declared): (&Id, &Declared)| Some((*id, *by_key.get(declared.key.as_str())?));
            let places = objects.storages.iter().filter_map(place).collect();
            objects.findings.append(&mut findings);
            places
        })
    }

    fn legacy(&self, bytes: &dyn Bytes) -> Result<Part> {
        let stack = Stack::read(bytes)?;
        let is_part = self.wanted.skip_unknown || self.wanted.key.is_some();
        let mut findings = stack.findings.clone();
        for pickled in &stack.pickles {
            let is_object = stack.object().is_some_and(|object| std::ptr::eq(object, pickled));
            findings.extend(if is_object { inert::of_the_whole(pickled, is_part) } else { pickled.findings.clone() });
        }
        match stack.object() {
            Some(pickled) => self.demand_of(pickled, pickled.ran.result, &findings)?,
            None => self.demand(&findings)?,
        }
        let (Some(pickled), Some(keys)) = (stack.object(), stack.keys()) else {
            return Err(refused(Finding::malformed("persistent-id", "the list of storages is no list of keys")));
        };
        let mut failed = None;
        // Whatever `sys_info` says of the machine: PyTorch writes these storages little-endian on every one.
        let part = self.tensors(pickled, Assembly::new(bytes.len()), true, |objects| {
            let by_key: HashMap<&str, &Declared> =
                objects.storages.values().map(|declared| (declared.key.as_str(), declared)).collect();
            let places = match legacy::locate(bytes, stack.end, keys, |key| by_key.get(key).copied()) {
                Ok(Ok(places)) => places,
                Ok(Err(finding)) => {
                    objects.findings.push(finding);
                    return HashMap::new();
                }
                Err(error) => {
                    failed = Some(error);
                    return HashMap::new();
                }
            };
            let by_key = objects.storages_by_key().into_iter();
            let missing =
                by_key.filter(|(key, _)| !places.contains_key(*key)).map(|(key, (_, users))| match users.len() {
                    0 => format!("storage {key:?} is not in the file"),
                    _ => format!("storage {key:?} is not in the file, and these tensors need it: {users}"),
                });
            let missing: Vec<Finding> = missing.map(|what| Finding::malformed("record-missing", what)).collect();
            objects.findings.extend(missing);
            let place = |(id, declared): (&Id, &Declared)| Some((*id, *places.get(&declared.key)?));
            objects.storages.iter().filter_map(place).collect()
        });
        failed.map_or(part, |error| Err(error.into()))
    }

    /// The tensors that a pickle's object holds, `locate` saying where each storage lies: those that are used, or all, where the place
    /// of one takes the sizes of others.
    fn tensors(
        &self,
        pickled: &Pickled,
        mut assembly: Assembly,
        needs_all: bool,
        locate: impl FnOnce(&mut Objects) -> HashMap<Id, Storage>,
    ) -> Result<Part> {
        let Some(root) = pickled.ran.result else {
            return Err(refused(Finding::malformed("truncated", "the pickle has no result")));
        };
        let skips = self.wanted.skip_unknown;
        let mut objects = Objects::new(&pickled.ran.arena);
        objects.rank = self.wanted.rank;
        let key = self.wanted.key;
        let root = key.map_or(Ok(root), |key| self.subtree(&objects, root, key))?;
        if skips {
            objects.open_module(root);
        }
        // What is not used need not be right.
        let used = Used::of(&objects, root, key.is_some(), skips);
        self.demand_of(pickled, Some(root), &used.findings(&objects, pickled))?;
        objects.declare(|id| needs_all || used.reaches(id));
        objects.gather(root);
        let places = if objects.findings.is_empty() { locate(&mut objects) } else { HashMap::new() };
        self.demand(&objects.findings)?;
        let Objects { storages, tensors, aside, cut, .. } = objects;
        let mut sums = HashMap::new();
        for found in tensors {
            let id = found.dense.storage;
            let (Some(declared), Some(storage)) = (storages.get(&id), places.get(&id)) else { continue };
            let whole = found.dense.elements().checked_mul(found.dense.kind.bytes) == Some(storage.len);
            if self.wanted.rank.is_some() && whole && storage.crc != 0 {
                sums.insert(found.name.clone(), storage.crc);
            }
            let view = declared.view.map_or(0, |(first, _)| first.saturating_mul(declared.kind.bytes));
            assembly.add(found, *storage, view);
        }
        let assembled = assembly.finish();
        self.demand(&assembled.findings)?;
        let told: Listed = aside
            .iter()
            .filter(|aside| aside.tell)
            .map(|aside| format!("{} ({})", quoted(&aside.name), aside.why))
            .collect();
        let mut warnings = Vec::new();
        if !told.is_empty() {
            warnings.push(format!("not converted: {}: {told}", counted(told.len(), "object")));
        }
        let skipped = aside.into_iter().map(|mut aside| {
            if skips {
                aside.loss = Loss::None;
            }
            aside
        });
        Ok(Part { assembled, skipped: skipped.collect(), warnings, cut, sums })
    }

    fn subtree(&self, objects: &Objects, root: Id, key: &str) -> Result<Id> {
        match objects.find(root, key, self.wanted.skip_unknown).as_slice() {
            [one] => Ok(*one),
            [] => Err(Refusal::NoKey(objects.top_keys(root))),
            several => Err(Refusal::SeveralKeys(several.len())),
        }
    }
}

/// Adds what of an object a load would leave out that passes over unknown objects.
fn with_unread(refused: Refused, pickled: &Pickled, root: Id) -> Refused {
    let mut objects = Objects::new(&pickled.ran.arena);
    let used = Used::of(&objects, root, false, true);
    if !used.is_whole() {
        return refused;
    }
    objects.declare(|id| used.reaches(id));
    objects.gather(root);
    let mut keys = objects.top_keys(root);
    let is_below =
        |name: &str, key: &str| name.strip_prefix(key).is_some_and(|rest| rest.starts_with('.') || rest.is_empty());
    keys.retain(|key| {
        objects.tensors.iter().any(|found| is_below(&found.name, key))
            && !objects.aside.iter().any(|aside| is_below(&aside.name, key) && aside.tensors > 0)
    });
    let inside = objects.aside.into_iter().filter(|aside| aside.tensors > 0).collect();
    Refused { inside, keys, ..refused }
}
