//! Which tensors to load, under which names, and which part of each: what was asked for, checked against what is there.
//!
//! Pure but for one read: the built-in rules for tensor parallelism look at `config.json`. Globs (`*` matches any text, `.`
//! and `/` included) are matched against names as stored; a pattern that is a stored name means that name. Whatever matches
//! nothing is an error with the nearest name or the way to see all, for `exclude` too: a typing error must not load what was to be left out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::data::{Checkpoint, TensorInfo, Tie};
use super::glob::Glob;
use super::nearest;
use super::tensor_parallel::Rules;
use crate::error::{Absent, Error, Result};
use crate::fault::{Listed, dtype_name, quoted};
use crate::setting::Setting;

/// What to load. The default is everything, under the stored names.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Selection {
    /// Globs of the names to load; none means all.
    pub include: Vec<String>,
    /// Globs of the names to leave out.
    pub exclude: Vec<String>,
    /// Parts of single tensors.
    pub slices: Vec<SliceRequest>,
    /// The share of one rank of a tensor-parallel group.
    pub tensor_parallel: Option<TensorParallel>,
    /// Prefixes to take off the names. One is taken off once. Of several, each is taken off in whatever order and as often as the
    /// names begin with one of them, the longest first: wrappers come in any order (`module._orig_mod.`, `_orig_mod.module.`).
    pub strip_prefix: Vec<String>,
    /// Further names for tensors, beside those that the checkpoint records itself.
    pub ties: Vec<Tie>,
}

impl Selection {
    /// Sets the globs of the names to load.
    #[must_use]
    pub fn include<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Selection {
        self.include = patterns.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the globs of the names to leave out.
    #[must_use]
    pub fn exclude<P: Into<String>>(mut self, patterns: impl IntoIterator<Item = P>) -> Selection {
        self.exclude = patterns.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the prefixes to take off the names.
    #[must_use]
    pub fn strip_prefix<P: Into<String>>(mut self, prefixes: impl IntoIterator<Item = P>) -> Selection {
        self.strip_prefix = prefixes.into_iter().map(Into::into).collect();
        self
    }
}

setters!(Selection {
    /// Sets the parts of single tensors to load.
    slices: Vec<SliceRequest>,
    /// Sets the rank of a tensor-parallel group to load the share of.
    tensor_parallel: into Option<TensorParallel>,
    /// Sets further names for tensors.
    ties: Vec<Tie>,
});

/// A part of one tensor, by its stored name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceRequest {
    /// Name, exactly as stored.
    pub name: String,
    /// The dimension that is cut, counted from 0 (outermost).
    pub dim: usize,
    /// The elements to take along it.
    pub range: Range<usize>,
}

/// One rank's share of a tensor-parallel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorParallel {
    /// Which rank, from 0.
    pub rank: usize,
    /// How many ranks.
    pub world: usize,
    /// Which tensors are cut along which dimension (the first matching glob counts; the others are replicated). Empty: the
    /// built-in rules of the architecture that `config.json` names.
    pub dims: Vec<(String, usize)>,
}

/// A tensor that will be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// Name after stripping.
    pub name: Arc<str>,
    /// Index into [`Checkpoint::tensors`].
    pub tensor: usize,
    /// The part that is taken, unless it is the whole.
    pub slice: Option<Slice>,
    /// Elements along each dimension, after slicing.
    pub shape: Arc<[usize]>,
    /// Further names of the same bytes.
    pub aliases: Vec<Arc<str>>,
}

/// A range of one dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Slice {
    /// The dimension, counted from 0 (outermost).
    pub dim: usize,
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

impl Checkpoint {
    /// The tensors that `selection` asks for, sorted by name.
    ///
    /// # Errors
    /// [`Error::NoMatch`] when a name or pattern matches nothing; [`Error::Request`] when something cuts unevenly or out of
    /// range, or gives two tensors one name; [`Error::Unsupported`] when it covers tensors that cannot be loaded, unless that
    /// was agreed to (see [`Checkpoint::passing_over`]).
    pub fn select(&self, selection: &Selection) -> Result<Vec<Selected>> {
        let mut picked = self.pick(selection)?;
        self.cut_slices(&selection.slices, &mut picked)?;
        if let Some(parallel) = &selection.tensor_parallel {
            self.cut_ranks(parallel, &mut picked)?;
        }
        strip(&selection.strip_prefix, &mut picked)?;
        self.tie(&selection.ties, &mut picked)?;
        picked.sort_by(|a, b| a.name.cmp(&b.name));
        self.refuse_collisions(&picked)?;
        Ok(picked)
    }

    /// Demands that the type of each selected tensor is known: others can be listed, but not loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming all of them with their types.
    pub fn require_known_dtypes(&self, selected: &[Selected]) -> Result<()> {
        let tensors = selected.iter().filter_map(|selected| self.tensors.get(selected.tensor));
        let unknown: Vec<&TensorInfo> = tensors.filter(|tensor| tensor.dtype.bits().is_none()).collect();
        let Some(first) = unknown.first() else { return Ok(()) };
        let all: Listed =
            unknown.iter().map(|tensor| format!("{} of {}", quoted(&tensor.name), dtype_name(&tensor.dtype))).collect();
        Err(Error::Unsupported {
            path: self.shards.get(first.shard() as usize).map_or(self.path.clone(), |shard| shard.path.clone()),
            tensor: (unknown.len() == 1).then(|| first.name.to_string()),
            what: format!(
                "unknown dtype: {all}: it can be listed, but not loaded (leave it out with {})",
                Setting::Exclude
            ),
        })
    }

    // ---- which

    fn pick(&self, selection: &Selection) -> Result<Vec<Selected>> {
        let names = self.all_names();
        let known = self.with_lost(&names);
        let (include, exclude) = (Globs::new(&selection.include, &known)?, Globs::new(&selection.exclude, &known)?);
        let is_wanted = self.wants(selection)?;
        self.demand_no_loss(false, &is_wanted)?;
        self.demand_matches(&include, Setting::Include, &names)?;
        self.demand_matches(&exclude, Setting::Exclude, &known)?;
        let mut picked: Vec<Selected> = Vec::with_capacity(names.len());
        let mut place = vec![None; self.tensors.len()];
        for (name, tensor) in names.iter().filter(|(name, _)| is_wanted(name)) {
            match place.get(*tensor).copied().flatten().and_then(|at: usize| picked.get_mut(at)) {
                Some(selected) => selected.aliases.push(Arc::clone(name)),
                None => {
                    place[*tensor] = Some(picked.len());
                    picked.push(self.whole(name, *tensor));
                }
            }
        }
        if picked.is_empty() && !names.is_empty() {
            let what =
                format!("nothing is selected: {} leaves out all that {} names", Setting::Exclude, Setting::Include);
            return Err(request(what, None));
        }
        Ok(picked)
    }

    /// Stored names first, then recorded ones, each with its tensor.
    fn all_names(&self) -> Vec<(Arc<str>, usize)> {
        let stored = self.tensors.iter().enumerate().map(|(at, tensor)| (Arc::clone(&tensor.name), at));
        let ties = self.recorded_ties().into_iter();
        stored.chain(ties.filter_map(|tie| Some((tie.alias.into(), self.number_of(&tie.target)?)))).collect()
    }

    /// The same and the names of what cannot be loaded, which may be left out by them.
    fn with_lost(&self, names: &[(Arc<str>, usize)]) -> Vec<(Arc<str>, usize)> {
        let lost = self.skipped.iter().filter(|skipped| skipped.tensors > 0);
        names.iter().cloned().chain(lost.map(|skipped| (skipped.name.as_str().into(), usize::MAX))).collect()
    }

    /// Whether a name is one that the globs of a selection ask for, also one of what cannot be loaded.
    pub(crate) fn wants(&self, selection: &Selection) -> Result<impl Fn(&str) -> bool + use<>> {
        let known = self.with_lost(&self.all_names());
        let (include, exclude) = (Globs::new(&selection.include, &known)?, Globs::new(&selection.exclude, &known)?);
        Ok(move |name: &str| (include.is_empty() || include.matches(name)) && !exclude.matches(name))
    }

    /// Demands that each pattern matches something.
    fn demand_matches(&self, globs: &Globs, setting: Setting, names: &[(Arc<str>, usize)]) -> Result<()> {
        let candidates = || names.iter().map(|(name, _)| name.as_ref());
        let absent: Vec<Absent> = globs.idle(names).map(|pattern| nearest::absent(pattern, candidates())).collect();
        if absent.is_empty() { Ok(()) } else { Err(self.no_match(setting, absent)) }
    }

    fn no_match(&self, setting: Setting, absent: Vec<Absent>) -> Error {
        let unlike_any = absent.iter().any(|absent| absent.nearest.is_empty());
        Error::NoMatch { setting, absent, hint: unlike_any.then(how_to_see_names) }
    }

    fn number_of(&self, name: &str) -> Option<usize> {
        self.tensors.binary_search_by(|tensor| tensor.name.as_ref().cmp(name)).ok()
    }

    fn whole(&self, name: &Arc<str>, tensor: usize) -> Selected {
        let shape = self.tensors.get(tensor).map_or([].into(), |tensor| Arc::clone(&tensor.shape));
        Selected { name: Arc::clone(name), tensor, slice: None, shape, aliases: Vec::new() }
    }

    fn stored_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_ref())
    }

    // ---- which part

    fn cut_slices(&self, slices: &[SliceRequest], picked: &mut [Selected]) -> Result<()> {
        for slice in slices {
            let tensor = self.number_of(&slice.name).ok_or_else(|| {
                self.no_match(Setting::Slices, vec![nearest::absent(&slice.name, self.stored_names())])
            })?;
            let selected = picked.iter_mut().find(|selected| selected.tensor == tensor).ok_or_else(|| {
                request(format!("{}: tensor {} is not selected", Setting::Slices, quoted(&slice.name)), None)
            })?;
            let range = Slice { dim: slice.dim, start: slice.range.start, end: slice.range.end };
            let cut = self.cut(selected, range);
            cut.map_err(|why| request(format!("{}: tensor {}: {why}", Setting::Slices, quoted(&slice.name)), None))?;
        }
        Ok(())
    }

    fn cut_ranks(&self, parallel: &TensorParallel, picked: &mut [Selected]) -> Result<()> {
        let &TensorParallel { rank, world, .. } = parallel;
        if rank >= world {
            let hint = if world == 0 { "a group has at least 1 rank" } else { "ranks count from 0" };
            return Err(request(format!("rank {rank} of {world} does not exist"), Some(hint.into())));
        }
        let dims = self.rank_dims(parallel)?;
        let mut uncut = Uncut::default();
        for selected in picked {
            let Some(name) = self.tensors.get(selected.tensor).map(|tensor| Arc::clone(&tensor.name)) else { continue };
            let cut = dims(&name).and_then(|dim| match dim {
                None => Ok(()),
                Some(dim) => share(selected, dim, rank, world).and_then(|slice| self.cut(selected, slice)),
            });
            if let Err(why) = cut {
                uncut.add(why, name);
            }
        }
        if uncut.0.is_empty() {
            Ok(())
        } else {
            Err(request(format!("cannot cut for {world} ranks: {}", uncut.listed()), None))
        }
    }

    /// The rule that tells the dimension along which a tensor is cut.
    #[allow(clippy::type_complexity)]
    fn rank_dims(&self, parallel: &TensorParallel) -> Result<Box<dyn Fn(&str) -> Result<Option<usize>, String>>> {
        if parallel.dims.is_empty() {
            let rules = Rules::of(&*self.storage, self.folder(), parallel.world)?;
            return Ok(Box::new(move |name| rules.dim(name)));
        }
        let names = self.all_names();
        let globs: Vec<String> = parallel.dims.iter().map(|(glob, _)| glob.clone()).collect();
        let globs = Globs::new(&globs, &names)?;
        self.demand_matches(&globs, Setting::TensorParallelDims, &names)?;
        let dims: Vec<usize> = parallel.dims.iter().map(|(_, dim)| *dim).collect();
        Ok(Box::new(move |name| Ok(globs.first_match(name).and_then(|at| dims.get(at).copied()))))
    }

    /// The folder that the weight files lie in.
    fn folder(&self) -> &Path {
        self.shards.first().and_then(|shard| shard.path.parent()).unwrap_or(Path::new(""))
    }

    fn cut(&self, selected: &mut Selected, slice: Slice) -> Result<(), String> {
        let Some(tensor) = self.tensors.get(selected.tensor) else { return Ok(()) };
        if selected.slice.is_some() {
            return Err("it would be cut twice".to_owned());
        }
        check_slice(tensor, &slice)?;
        let cut = |(dim, &len): (usize, &usize)| if dim == slice.dim { slice.end - slice.start } else { len };
        selected.shape = selected.shape.iter().enumerate().map(cut).collect();
        selected.slice = Some(slice);
        Ok(())
    }

    // ---- under which names

    fn tie(&self, ties: &[Tie], picked: &mut [Selected]) -> Result<()> {
        let mut problems = Listed::new();
        for tie in ties {
            let target = resolve(tie, ties);
            if picked.iter().any(|selected| selected.name.as_ref() == tie.alias) {
                // Stored under both names: each keeps its own bytes; a strict check compares them.
                continue;
            }
            let stored = self.number_of(target);
            let is_target = |selected: &&mut Selected| is_called(selected, target) || Some(selected.tensor) == stored;
            match picked.iter_mut().find(is_target) {
                Some(selected) if is_called(selected, &tie.alias) => {}
                Some(selected) => selected.aliases.push(tie.alias.as_str().into()),
                None if stored.is_some() => problems
                    .push(|| format!("{} is to mean {}, which is not selected", quoted(&tie.alias), quoted(target))),
                None => {
                    let near =
                        nearest::hint(target, self.stored_names()).map_or(String::new(), |near| format!(" ({near})"));
                    problems.push(|| {
                        format!("{} is to mean {}, which is not there{near}", quoted(&tie.alias), quoted(target))
                    });
                }
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(request(format!("{}: {problems}", Setting::Ties), None)) }
    }

    /// `picked` is sorted by name.
    fn refuse_collisions(&self, picked: &[Selected]) -> Result<()> {
        let has_aliases = picked.iter().any(|selected| !selected.aliases.is_empty());
        if !has_aliases && picked.windows(2).all(|pair| pair[0].name != pair[1].name) {
            return Ok(());
        }
        let stored = |selected: &Selected| self.tensors.get(selected.tensor).map_or("", |tensor| tensor.name.as_ref());
        let mut seen = HashMap::<&str, &str>::with_capacity(picked.len());
        let mut problems = Listed::new();
        for selected in picked {
            for name in std::iter::once(&selected.name).chain(&selected.aliases) {
                if let Some(other) = seen.insert(name, stored(selected)) {
                    let (a, b) = (quoted(other), quoted(stored(selected)));
                    problems.push(|| format!("{a} and {b} would both be called {}", quoted(name)));
                }
            }
        }
        let hint = || Some(format!("leave one out with {}", Setting::Exclude));
        if problems.is_empty() { Ok(()) } else { Err(request(format!("names collide: {problems}"), hint())) }
    }
}

impl Selected {
    /// Bytes that the selected part takes.
    pub fn bytes(&self, tensor: &TensorInfo) -> u64 {
        tensor.dtype.tensor_bytes(&self.shape).unwrap_or_else(|| tensor.bytes())
    }
}

fn request(what: impl Into<String>, hint: Option<String>) -> Error {
    Error::Request { what: what.into(), hint }
}

fn is_called(selected: &Selected, name: &str) -> bool {
    selected.name.as_ref() == name || selected.aliases.iter().any(|alias| alias.as_ref() == name)
}

/// The end of a chain of ties; a circle ends somewhere in itself.
pub(super) fn resolve<'a>(tie: &'a Tie, ties: &'a [Tie]) -> &'a str {
    let mut target = tie.target.as_str();
    for _ in 0..ties.len() {
        match ties.iter().find(|tie| tie.alias == target) {
            Some(next) => target = &next.target,
            None => break,
        }
    }
    target
}

/// The share of one rank, if all are of the same size.
fn share(selected: &Selected, dim: usize, rank: usize, world: usize) -> Result<Slice, String> {
    let shape = &selected.shape;
    let &len = shape.get(dim).ok_or_else(|| format!("shape {shape:?} has no dimension {dim}"))?;
    if len % world != 0 {
        let left = len % world;
        return Err(format!(
            "dimension {dim} has {len} elements, which {world} ranks cannot share evenly ({left} left over)"
        ));
    }
    let each = len / world;
    Ok(Slice { dim, start: rank * each, end: (rank + 1) * each })
}

fn check_slice(tensor: &TensorInfo, slice: &Slice) -> Result<(), String> {
    let &Slice { dim, start, end } = slice;
    let shape = &tensor.shape;
    let &len = shape.get(dim).ok_or_else(|| format!("shape {shape:?} has no dimension {dim}"))?;
    if end > len || start > end {
        return Err(format!("{start}..{end} is not within dimension {dim}, which has {len} elements"));
    }
    if start == end && len > 0 {
        return Err(format!("{start}..{end} takes nothing of dimension {dim}, which has {len} elements"));
    }
    let dtype = dtype_name(&tensor.dtype);
    let Some(bits) = tensor.dtype.bits() else { return Err(format!("unknown dtype {dtype} cannot be cut")) };
    check_whole_bytes(shape, slice, bits).map_err(|at| {
        format!("{start}..{end} of dimension {dim} cuts through a byte (bit {at}): {dtype} has {bits} bits")
    })
}

/// Each run of the slice begins and ends with a byte; otherwise the first bit that does not.
fn check_whole_bytes(shape: &[usize], slice: &Slice, bits: u64) -> Result<(), u64> {
    if shape.contains(&0) {
        // Nothing to cut, and products of the other dimensions may pass 64 bits.
        return Ok(());
    }
    let inner: usize = shape[slice.dim + 1..].iter().product();
    let outer: usize = shape[..slice.dim].iter().product();
    let row = if outer > 1 { shape[slice.dim] } else { 0 };
    [slice.start, slice.end, row].into_iter().map(|at| (at * inner) as u64 * bits).try_for_each(|at| match at % 8 {
        0 => Ok(()),
        _ => Err(at),
    })
}

fn strip(prefixes: &[String], picked: &mut [Selected]) -> Result<()> {
    let mut longest_first: Vec<&str> =
        prefixes.iter().map(String::as_str).filter(|prefix| !prefix.is_empty()).collect();
    longest_first.sort_by_key(|prefix| std::cmp::Reverse(prefix.len()));
    let most = if prefixes.len() == 1 { 1 } else { usize::MAX };
    let mut used: BTreeSet<&str> = BTreeSet::new();
    let names = picked.iter_mut().flat_map(|one| std::iter::once(&mut one.name).chain(&mut one.aliases));
    for name in names {
        let mut rest = name.as_ref();
        let mut taken = 0;
        while taken < most {
            used.extend(longest_first.iter().filter(|prefix| rest.starts_with(**prefix)));
            let next = longest_first.iter().find_map(|prefix| Some((prefix, rest.strip_prefix(prefix)?)));
            let Some((prefix, after)) = next else { break };
            if after.is_empty() {
                return Err(request(
                    format!("{} {prefix:?} would leave nothing of the name {name:?}", Setting::StripPrefix),
                    None,
                ));
            }
            rest = after;
            taken += 1;
        }
        if taken > 0 {
            *name = rest.into();
        }
    }
    match prefixes.iter().find(|prefix| !used.contains(prefix.as_str())) {
        Some(idle) => {
            Err(request(format!("{} {idle:?}: no name begins with it", Setting::StripPrefix), beginnings(picked)))
        }
        None => Ok(()),
    }
}

fn beginnings(picked: &[Selected]) -> Option<String> {
    let first = |selected: &Selected| selected.name.split_inclusive('.').next().map(quoted);
    let all: BTreeSet<String> = picked.iter().filter_map(first).collect();
    let shown: Vec<String> = all.into_iter().take(8).collect();
    (!shown.is_empty()).then(|| format!("names begin with {}", shown.join(", ")))
}

/// Tensors that cannot be cut, by the reason, which is often the same for hundreds of them.
#[derive(Default)]
struct Uncut(BTreeMap<String, Vec<Arc<str>>>);

impl Uncut {
    fn add(&mut self, why: String, name: Arc<str>) {
        self.0.entry(why).or_default().push(name);
    }

    fn listed(&self) -> Listed {
        let one = |(why, names): (&String, &Vec<Arc<str>>)| match names.as_slice() {
            [name] => format!("tensor {}: {why}", quoted(name)),
            [first, second, ..] => {
                let some = if names.len() > 2 { ", as" } else { "" };
                format!("{} tensors{some} {} and {}: {why}", names.len(), quoted(first), quoted(second))
            }
            [] => why.clone(),
        };
        self.0.iter().map(one).collect()
    }
}

/// Patterns, each a glob or the very name of a tensor.
struct Globs(Vec<(String, Option<Glob>)>);

impl Globs {
    fn new(patterns: &[String], names: &[(Arc<str>, usize)]) -> Result<Globs> {
        let names = names.iter().map(|(name, _)| name.as_ref()).collect::<BTreeSet<_>>();
        let glob = |pattern: &String| match names.contains(pattern.as_str()) {
            true => Ok((pattern.clone(), None)),
            false => Glob::new(pattern)
                .map(|glob| (pattern.clone(), Some(glob)))
                .map_err(|why| request(format!("{} is not a glob: {why}", quoted(pattern)), None)),
        };
        Ok(Globs(patterns.iter().map(glob).collect::<Result<_>>()?))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn matches(&self, name: &str) -> bool {
        self.first_match(name).is_some()
    }

    fn first_match(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|(text, glob)| glob.as_ref().map_or(text == name, |glob| glob.is_match(name)))
    }

    /// The patterns that match no name.
    fn idle(&self, names: &[(Arc<str>, usize)]) -> impl Iterator<Item = &str> {
        let is_idle = |(_, glob): &&(String, Option<Glob>)| {
            glob.as_ref().is_some_and(|glob| !names.iter().any(|(name, _)| glob.is_match(name.as_ref())))
        };
        self.0.iter().filter(is_idle).map(|(text, _)| text.as_str())
    }
}

#[cfg(test)]
mod tests;

fn how_to_see_names() -> String {
    format!("{} lists the names", Setting::TensorNames)
}
