//! Whether a checkpoint is exactly what a model needs: one complete verdict over names, shapes, dtypes and ties.
//!
//! It looks at headers only. The bytes of tied tensors that are stored under both names are the one thing it cannot judge by
//! itself: the verdict says which are pending, and takes the answer from whoever reads them ([`same_bytes`] does).

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::de::MapAccess;

use super::json::{self, Notes, Object, Scalar};
use super::safetensors::Entry;
use super::selection::resolve;
use super::{Checkpoint, Selected, Selection, TensorInfo, Tie, shard};
use crate::dtype::StoredDtype;
use crate::error::{Error, Result};
use crate::extent::{ShardIndex, Strided};
use crate::fault::{Fault, Listed, dtype_name, quoted};
use crate::setting::Setting;
use crate::storage::{EntryKind, Fallbacks, LocalStorage, Location, Route, Source, Storage};

/// The longest specification that is read, in bytes.
const MAX_SPEC_BYTES: u64 = 1 << 30;

/// What a model needs: its tensors by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spec {
    tensors: BTreeMap<String, SpecTensor>,
}

/// One tensor of a [`Spec`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecTensor {
    /// Element type.
    pub dtype: StoredDtype,
    /// Elements along each dimension, outermost first.
    pub shape: Vec<usize>,
}

impl Spec {
    /// A specification of those tensors.
    pub fn new(tensors: BTreeMap<String, SpecTensor>) -> Spec {
        Spec { tensors }
    }

    /// The tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, SpecTensor> {
        &self.tensors
    }

    /// Reads `{"tensors": {NAME: {"dtype": …, "shape": […]}}}`; other members are ignored, so that the JSON of an inspected
    /// checkpoint is a specification too.
    ///
    /// # Errors
    /// Text that is not that, duplicate names, unknown dtypes, numbers outside 64 bits.
    pub fn parse(text: &[u8]) -> Result<Spec, Fault> {
        let mut draft = Draft::default();
        json::read(json::without_mark(text)?, "specification", &mut draft)?;
        if !draft.seen || draft.instead.is_some() || draft.tensors.instead.is_some() {
            return Err(Fault::Other(
                "a specification must be {\"tensors\": {NAME: {\"dtype\": …, \"shape\": […]}}}".into(),
            ));
        }
        draft.tensors.problems.into_fault(Fault::Member)?;
        Ok(Spec { tensors: draft.tensors.map })
    }

    /// Reads a specification from a file of JSON (or a pipe that gives one), or takes the tensors of the checkpoint that lies at
    /// `path`.
    ///
    /// # Errors
    /// When neither can be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Spec> {
        let path = path.as_ref();
        match Spec::text_at(path, &LocalStorage)? {
            Some(text) => Spec::parse(&text).map_err(|fault| Error::malformed(path, fault)),
            None => Ok(Spec::from(&Checkpoint::open(path)?)),
        }
    }

    /// Reads a specification from a stream, to its end. `name` stands for it in errors.
    ///
    /// # Errors
    /// When the stream fails, or gives no specification.
    pub fn read(stream: impl std::io::Read, name: impl AsRef<Path>) -> Result<Spec> {
        let name = name.as_ref();
        let text = shard::read_to_end(stream, name, MAX_SPEC_BYTES)?;
        Spec::parse(&text).map_err(|fault| Error::malformed(name, fault))
    }

    /// The JSON at `path` of a storage; `None` if a checkpoint lies there. A file counts as JSON by its name or else by its beginning; what a
    /// pipe gives can be nothing else, since weights are read by position.
    ///
    /// # Errors
    /// When the JSON cannot be read.
    pub fn text_at(path: impl AsRef<Path>, storage: &dyn Storage) -> Result<Option<Vec<u8>>> {
        let path = path.as_ref();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_json = name.ends_with(".json") && !name.contains(".index.");
        match storage.head(&Location::from(path)).map(|head| head.kind) {
            Ok(EntryKind::File) if is_json || begins_as_json(path, storage) => {
                shard::read_text(storage, path, MAX_SPEC_BYTES).map(Some)
            }
            Ok(EntryKind::Other) => shard::read_stream(path, MAX_SPEC_BYTES).map(Some),
            Ok(EntryKind::File | EntryKind::Folder) => Ok(None),
            Err(error) if is_json => Err(error),
            Err(_) => Ok(None),
        }
    }
}

/// Whether a file that is not called `.json` is JSON all the same: it begins with `{`, and the 8 bytes there are no length of a
/// header of safetensors.
fn begins_as_json(path: &Path, storage: &dyn Storage) -> bool {
    let is_index = path.extension().is_some_and(|extension| extension == "json");
    let Some(file) = shard::open(storage, path).ok().filter(|_| !is_index) else { return false };
    let Ok(beginning) = shard::beginning(&*file, 64) else { return false };
    let claims = beginning.first_chunk().map(|length| u64::from_le_bytes(*length));
    let is_header = claims.is_some_and(|claims| claims.checked_add(8).is_some_and(|end| end <= file.version().len()));
    let text = beginning.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&beginning);
    !is_header && text.trim_ascii_start().first() == Some(&b'{')
}

impl From<&Checkpoint> for Spec {
    fn from(checkpoint: &Checkpoint) -> Spec {
        let tensor = |t: &TensorInfo| SpecTensor { dtype: t.dtype.clone(), shape: t.shape.to_vec() };
        let stored = checkpoint.tensors.iter().map(|t| (t.name.to_string(), tensor(t)));
        let tied = checkpoint.recorded_ties();
        let tied = tied.into_iter().filter_map(|tie| Some((tie.alias, tensor(checkpoint.tensor(&tie.target)?))));
        Spec { tensors: stored.chain(tied).collect() }
    }
}

#[derive(Default)]
struct Draft {
    seen: bool,
    tensors: Tensors,
    instead: Option<Scalar>,
}

impl Object for Draft {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        if key != "tensors" {
            return json::field(map, notes).map(drop);
        }
        self.seen = true;
        json::object(key, map, notes, &mut self.tensors)
    }

    fn instead(&mut self, found: Scalar) {
        self.instead = Some(found);
    }
}

#[derive(Default)]
struct Tensors {
    map: BTreeMap<String, SpecTensor>,
    problems: Listed,
    instead: Option<Scalar>,
}

impl Object for Tensors {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        let mut entry = Entry::default();
        json::object(key, map, notes, &mut entry)?;
        let known = |(dtype, shape): (StoredDtype, Vec<usize>)| match dtype.bits() {
            Some(_) => Ok(SpecTensor { dtype, shape }),
            None => Err(format!("unknown dtype {}", dtype_name(&dtype))),
        };
        match entry.dtype_and_shape().and_then(known) {
            Ok(tensor) => drop(self.map.insert(key.to_owned(), tensor)),
            Err(why) => self.problems.push_tensor(key, || format!("tensor {}: {why}", quoted(key))),
        }
        Ok(())
    }

    fn instead(&mut self, found: Scalar) {
        self.instead = Some(found);
    }
}

// ---- the verdict

/// Everything in which a checkpoint differs from a specification. All lists are sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// Whether it matches in everything.
    pub ok: bool,
    /// Names that are needed and not there.
    pub missing: Vec<String>,
    /// Names that are there and not needed.
    pub unexpected: Vec<String>,
    /// Tensors of another shape than needed.
    pub shape_mismatch: Vec<ShapeMismatch>,
    /// Tensors of another element type than needed.
    pub dtype_mismatch: Vec<DtypeMismatch>,
    /// What became of each tie.
    pub ties: Vec<TieVerdict>,
    /// What would make it match, where that can be guessed.
    pub suggestion: Option<String>,
    #[serde(skip)]
    needed: usize,
}

/// A tensor of another shape than needed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct ShapeMismatch {
    /// Name.
    pub name: String,
    /// The shape that is needed.
    pub expected: Vec<usize>,
    /// The shape that is there.
    pub found: Vec<usize>,
}

/// A tensor of another element type than needed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct DtypeMismatch {
    /// Name.
    pub name: String,
    /// The type that is needed.
    pub expected: StoredDtype,
    /// The type that is there.
    pub found: StoredDtype,
}

/// What became of one tie.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct TieVerdict {
    /// The further name.
    pub alias: String,
    /// The tensor it means.
    pub target: String,
    /// How the two relate.
    pub status: TieStatus,
    /// The two tensors, where their bytes are to be compared.
    #[serde(skip)]
    pair: Option<(usize, usize)>,
}

/// How an alias and its target relate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum TieStatus {
    /// The alias is not stored; its target stands for it.
    Absent,
    /// Both are stored, with the same bytes.
    Equal,
    /// Both are stored, and they differ.
    Conflict,
    /// Both are stored, and nobody has compared their bytes yet.
    Pending,
    /// There is no target that could stand for the alias.
    TargetMissing,
}

/// Judges `selected` tensors of a checkpoint by `spec`. `ties` are those that the user declares; those that the checkpoint
/// records count too. Aliases that `selected` lists already are taken as they are, and a tie whose target is not there is
/// part of the verdict, not an error.
pub fn check(checkpoint: &Checkpoint, selected: &[Selected], spec: &Spec, ties: &[Tie]) -> Verdict {
    let found = Found::new(checkpoint, selected, ties);
    let mut verdict = Verdict { needed: spec.tensors.len(), ..found.compare(spec) };
    verdict.ties = found.judge_ties(ties);
    verdict.suggestion = suggestion(&verdict.missing, &verdict.unexpected);
    verdict.settle();
    verdict
}

/// Judges what `selection` picks of a checkpoint by `spec`, and compares the bytes of tied tensors that are stored twice.
///
/// # Errors
/// [`Error::Mismatch`] when the selection makes no sense for this checkpoint (names collide once stripped): then it cannot
/// match either. I/O errors when tied tensors cannot be read. Any other mismatch is no error here: it is in the verdict.
pub fn verify(checkpoint: &Checkpoint, selection: &Selection, spec: &Spec) -> Result<Verdict> {
    // Ties are left to the check: there a missing target is one finding among others.
    let untied = Selection { ties: Vec::new(), ..selection.clone() };
    let selected = checkpoint.select(&untied).map_err(|error| mismatch(checkpoint, error))?;
    let mut verdict = check(checkpoint, &selected, spec, &selection.ties);
    verdict.compare_ties(checkpoint, |a, b| same_bytes(checkpoint, a, b))?;
    Ok(verdict)
}

fn mismatch(checkpoint: &Checkpoint, error: Error) -> Error {
    match error {
        Error::Request { .. } | Error::NoMatch { .. } => {
            Error::Mismatch { path: checkpoint.path.clone(), report: error.to_string() }
        }
        error => error,
    }
}

impl Verdict {
    /// The ties whose bytes are still to be compared.
    pub fn pending_ties(&self) -> impl Iterator<Item = &TieVerdict> {
        self.ties.iter().filter(|tie| tie.status == TieStatus::Pending)
    }

    /// Settles the pending ties by asking `same` for each pair.
    ///
    /// # Errors
    /// Whatever `same` fails with.
    pub fn compare_ties(
        &mut self,
        checkpoint: &Checkpoint,
        mut same: impl FnMut(&TensorInfo, &TensorInfo) -> Result<bool>,
    ) -> Result<()> {
        for tie in &mut self.ties {
            let Some((a, b)) = tie.pair.take() else { continue };
            if let (Some(a), Some(b)) = (checkpoint.tensors.get(a), checkpoint.tensors.get(b)) {
                tie.status = if same(a, b)? { TieStatus::Equal } else { TieStatus::Conflict };
            }
        }
        self.settle();
        Ok(())
    }

    /// The verdict as an error, unless all is well.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the whole verdict in words.
    pub fn demand(&self, path: &Path) -> Result<()> {
        if self.ok { Ok(()) } else { Err(Error::Mismatch { path: path.to_owned(), report: self.to_string() }) }
    }

    /// Whether tensors are needed and none of them is there.
    pub fn has_nothing_in_common(&self) -> bool {
        self.needed > 0 && self.missing.len() == self.needed
    }

    fn settle(&mut self) {
        let untied = |tie: &TieVerdict| matches!(tie.status, TieStatus::Conflict | TieStatus::Pending);
        self.ok = self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.shape_mismatch.is_empty()
            && self.dtype_mismatch.is_empty()
            && !self.ties.iter().any(untied);
    }
}

/// What is there, by the names that a model would see.
struct Found<'a> {
    checkpoint: &'a Checkpoint,
    by_name: BTreeMap<&'a str, (&'a Selected, &'a TensorInfo)>,
    /// Names that only a tie gives.
    aliases: BTreeMap<&'a str, &'a str>,
}

impl<'a> Found<'a> {
    fn new(checkpoint: &'a Checkpoint, selected: &'a [Selected], ties: &'a [Tie]) -> Found<'a> {
        let mut found = Found { checkpoint, by_name: BTreeMap::new(), aliases: BTreeMap::new() };
        for selected in selected {
            let Some(tensor) = checkpoint.tensors.get(selected.tensor) else { continue };
            found.by_name.insert(&selected.name, (selected, tensor));
            found.aliases.extend(selected.aliases.iter().map(|alias| (alias.as_ref(), selected.name.as_ref())));
        }
        for tie in ties.iter().filter(|tie| !found.by_name.contains_key(tie.alias.as_str())).collect::<Vec<_>>() {
            // The target may be an alias itself, declared before or after this one.
            if let Some(target) = found.name_of(&tie.target).or_else(|| found.name_of(resolve(tie, ties))) {
                found.aliases.insert(&tie.alias, target);
            }
        }
        found
    }

    /// The name under which a target goes: itself, or what stripping has left of the stored name.
    fn name_of(&self, target: &str) -> Option<&'a str> {
        let by_name = self.by_name.get_key_value(target).map(|(name, _)| *name);
        let stored =
            || self.by_name.iter().find(|(_, (_, tensor))| tensor.name.as_ref() == target).map(|(name, _)| *name);
        by_name.or_else(stored).or_else(|| self.aliases.get(target).copied())
    }

    fn get(&self, name: &str) -> Option<&(&'a Selected, &'a TensorInfo)> {
        self.by_name.get(name).or_else(|| self.by_name.get(self.aliases.get(name)?))
    }

    fn compare(&self, spec: &Spec) -> Verdict {
        let names = self.by_name.keys().chain(self.aliases.keys());
        let mut unexpected: Vec<String> =
            names.filter(|name| !spec.tensors.contains_key(**name)).map(|&name| name.to_owned()).collect();
        unexpected.sort();
        let missing = spec.tensors.keys().filter(|name| self.get(name).is_none()).cloned().collect();
        let both =
            || self.judged_by_themselves(spec).filter_map(|(name, needed)| Some((name, needed, self.get(name)?)));
        let shapes = both().filter(|(_, needed, (selected, _))| needed.shape[..] != selected.shape[..]);
        let dtypes = both().filter(|(_, needed, (_, tensor))| needed.dtype != tensor.dtype);
        Verdict {
            ok: false,
            missing,
            unexpected,
            shape_mismatch: shapes
                .map(|(name, needed, (selected, _))| ShapeMismatch::new(name, needed, selected))
                .collect(),
            dtype_mismatch: dtypes
                .map(|(name, needed, (_, tensor))| DtypeMismatch::new(name, needed, tensor))
                .collect(),
            ties: Vec::new(),
            suggestion: None,
            needed: 0,
        }
    }

    /// The needed tensors, without those that are the same finding as the target that stands for them.
    fn judged_by_themselves<'s>(&'s self, spec: &'s Spec) -> impl Iterator<Item = (&'s String, &'s SpecTensor)> {
        spec.tensors.iter().filter(|(name, needed)| {
            let target = self.aliases.get(name.as_str()).and_then(|target| spec.tensors.get(*target));
            target.is_none_or(|target| target != *needed)
        })
    }

    fn judge_ties(&self, declared: &[Tie]) -> Vec<TieVerdict> {
        let recorded =
            self.aliases.iter().map(|(alias, target)| Tie { alias: (*alias).into(), target: (*target).into() });
        let mut ties: Vec<Tie> = declared.to_vec();
        let recorded: Vec<Tie> = recorded.filter(|new| !ties.iter().any(|tie| tie.alias == new.alias)).collect();
        ties.extend(recorded);
        ties.sort();
        ties.dedup();
        ties.into_iter().map(|tie| self.judge(tie)).collect()
    }

    fn judge(&self, tie: Tie) -> TieVerdict {
        let target = self.name_of(&tie.target).and_then(|name| self.by_name.get(name));
        let (status, pair) = match (self.by_name.get(tie.alias.as_str()), target) {
            (_, None) => (TieStatus::TargetMissing, None),
            (None, Some(_)) => (TieStatus::Absent, None),
            (Some((a, _)), Some((b, _))) if a.tensor == b.tensor => (TieStatus::Equal, None),
            (Some((_, a)), Some((_, b))) if (&a.dtype, &a.shape) != (&b.dtype, &b.shape) => (TieStatus::Conflict, None),
            (Some((a, _)), Some((b, _))) => (TieStatus::Pending, Some((a.tensor, b.tensor))),
        };
        debug_assert!(pair.is_none_or(|(a, b)| a.max(b) < self.checkpoint.tensors.len()));
        TieVerdict { alias: tie.alias, target: tie.target, status, pair }
    }
}

impl ShapeMismatch {
    fn new(name: &str, needed: &SpecTensor, found: &Selected) -> ShapeMismatch {
        ShapeMismatch { name: name.into(), expected: needed.shape.clone(), found: found.shape.to_vec() }
    }
}

impl DtypeMismatch {
    fn new(name: &str, needed: &SpecTensor, found: &TensorInfo) -> DtypeMismatch {
        DtypeMismatch { name: name.into(), expected: needed.dtype.clone(), found: found.dtype.clone() }
    }
}

// ---- the suggestion

/// A prefix on one side that explains most of what is missing.
fn suggestion(missing: &[String], unexpected: &[String]) -> Option<String> {
    if let Some((prefix, count)) = common_prefix(unexpected, missing) {
        return Some(format!(
            "{count} of the {} unexpected names begin with '{prefix}' and match a missing name without it: \
             {} takes it off",
            unexpected.len(),
            Setting::StripPrefix
        ));
    }
    let (prefix, count) = common_prefix(missing, unexpected)?;
    Some(format!(
        "{count} of the {} missing names begin with '{prefix}' and match an unexpected name without it: the checkpoint was \
         saved from a part of the model; write the specification without '{prefix}'",
        missing.len()
    ))
}

/// The prefix that leads from most of `longer` to one of `shorter` each, and from how many.
fn common_prefix<'a>(longer: &'a [String], shorter: &[String]) -> Option<(&'a str, usize)> {
    let known: std::collections::HashSet<&str> = shorter.iter().map(String::as_str).collect();
    let mut counts = HashMap::<&str, usize>::new();
    for name in longer {
        for (dot, _) in name.match_indices('.').take(16).filter(|(dot, _)| known.contains(&name[dot + 1..])) {
            *counts.entry(&name[..=dot]).or_default() += 1;
        }
    }
    let best = counts.into_iter().max_by(|a, b| a.1.cmp(&b.1).then(b.0.cmp(a.0)))?;
    (best.1 * 2 >= longer.len().min(shorter.len())).then_some(best)
}

// ---- in words

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ok {
            return write!(f, "matches: all {} tensors have the names, shapes and dtypes that are needed", self.needed);
        }
        f.write_str("does not match what is needed")?;
        if self.has_nothing_in_common() {
            let (needed, found) = (self.missing.len(), self.unexpected.len());
            let names = if found == 0 { "it holds no tensor at all".to_owned() } else { differ(self) };
            write!(f, ": no name is in common ({needed} needed, {found} found): {names}")?;
        }
        section(f, "missing", &self.missing, |name| quoted(name))?;
        section(f, "unexpected", &self.unexpected, |name| quoted(name))?;
        section(f, "of another shape", &self.shape_mismatch, |it| {
            format!("{}: expected {:?}, found {:?}", quoted(&it.name), it.expected, it.found)
        })?;
        section(f, "of another dtype", &self.dtype_mismatch, |it| {
            format!("{}: expected {}, found {}", quoted(&it.name), dtype_name(&it.expected), dtype_name(&it.found))
        })?;
        let conflicts: Vec<_> = self.ties.iter().filter(|tie| tie.status != TieStatus::Absent).collect();
        section(f, "tied", &conflicts, |tie| tie.to_string())?;
        self.suggestion.as_ref().map_or(Ok(()), |suggestion| write!(f, "\n  suggestion: {suggestion}"))
    }
}

/// What names without a single one in common look like, side by side.
fn differ(verdict: &Verdict) -> String {
    let first = |names: &[String]| names.first().map_or(String::new(), |name| quoted(name));
    let why = match &verdict.suggestion {
        Some(_) => "a prefix is too much, or missing",
        None => "this is another model, or its names are of another library",
    };
    format!("{why}; needed is {}, found is {}", first(&verdict.missing), first(&verdict.unexpected))
}

fn section<T>(f: &mut fmt::Formatter<'_>, what: &str, items: &[T], words: impl Fn(&T) -> String) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    write!(f, "\n  {} {what}:", items.len())?;
    items.iter().try_for_each(|item| write!(f, "\n    {}", words(item)))
}

impl fmt::Display for TieVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (alias, target) = (quoted(&self.alias), quoted(&self.target));
        match self.status {
            TieStatus::Absent => write!(f, "{alias} is not stored, {target} stands for it"),
            TieStatus::Equal => write!(f, "{alias} and {target} are both stored, with the same bytes"),
            TieStatus::Conflict => write!(f, "{alias} and {target} are both stored, and differ"),
            TieStatus::Pending => write!(f, "{alias} and {target} are both stored; their bytes were not compared"),
            TieStatus::TargetMissing => write!(f, "{alias} is to mean {target}, which is not there"),
        }
    }
}

// ---- bytes

/// Whether two tensors of a checkpoint hold the same bytes. Reads both, at most 1 MiB of each at a time, unless they lie in the
/// same place.
///
/// # Errors
/// When a file cannot be read, or is no longer the one whose header was read.
pub fn same_bytes(checkpoint: &Checkpoint, a: &TensorInfo, b: &TensorInfo) -> Result<bool> {
    const CHUNK: u64 = 1 << 20;
    if a.bytes() != b.bytes() || a.data == b.data {
        return Ok(a.data == b.data);
    }
    let mut files = Files { checkpoint, open: HashMap::new() };
    let (mut a, mut b) = (Pieces::of(a), Pieces::of(b));
    let (mut left, mut right) = (Vec::new(), Vec::new());
    while let (Some(here), Some(there)) = (a.next_len(), b.next_len()) {
        let len = here.min(there).min(CHUNK);
        files.read(a.take(len), len, &mut left)?;
        files.read(b.take(len), len, &mut right)?;
        if left != right {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The contiguous pieces of a tensor in the order of its bytes, taken bit by bit.
struct Pieces {
    /// File, first byte, length; the next one last.
    rest: Vec<(ShardIndex, u64, u64)>,
}

impl Pieces {
    fn of(tensor: &TensorInfo) -> Pieces {
        let runs = tensor.runs(None);
        let one =
            |run: &Strided, k: u64| (run.at + k * run.at_stride, (run.shard, run.offset + k * run.stride, run.run));
        let mut all: Vec<_> = runs.iter().flat_map(|run| (0..run.count).map(|k| one(run, k))).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        Pieces { rest: all.into_iter().map(|(_, piece)| piece).collect() }
    }

    fn next_len(&self) -> Option<u64> {
        self.rest.last().map(|(_, _, len)| *len)
    }

    /// The place of the next `len` bytes; they are within the next piece.
    fn take(&mut self, len: u64) -> (ShardIndex, u64) {
        let Some((shard, offset, rest)) = self.rest.pop() else { return (0, 0) };
        if rest > len {
            self.rest.push((shard, offset + len, rest - len));
        }
        (shard, offset)
    }
}

/// The files that are open for comparing.
struct Files<'a> {
    checkpoint: &'a Checkpoint,
    open: HashMap<ShardIndex, Arc<dyn Source>>,
}

impl Files<'_> {
    fn read(&mut self, (shard, offset): (ShardIndex, u64), len: u64, target: &mut Vec<u8>) -> Result<()> {
        let file = self.file(shard)?;
        target.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
        file.read_at(offset, target).map(drop)
    }

    fn file(&mut self, shard: ShardIndex) -> Result<Arc<dyn Source>> {
        if let Some(file) = self.open.get(&shard) {
            return Ok(Arc::clone(file));
        }
        // A tensor cut over very many files must not use up the descriptors.
        if self.open.len() >= 16 {
            self.open.clear();
        }
        let known = self.checkpoint.shards.get(shard as usize);
        let known = known.ok_or(Error::Poisoned { what: "a tensor of a shard that is not there" })?;
        let file = known.open(&*self.checkpoint.storage, &Fallbacks::default())?;
        let source = file.source(Route::Buffered);
        self.open.insert(shard, Arc::clone(&source));
        Ok(source)
    }
}

#[cfg(test)]
mod tests;
