//! What a conversion will write, decided from headers: names, casts, ties, metadata, what is left out. It loads and writes nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::layout::{Notes, Outline};
use super::options::{ConvertOptions, Replace, SaveOptions, Ties};
use crate::checkpoint::{
    Casts, Checkpoint, ConvertedTensor, ScaleSource, Selected, Skipped, Slice, StaleRecords, TensorData, TensorInfo,
};
use crate::device::Cast;
use crate::dtype::Dtype;
use crate::error::{Error, Listed, Result};
use crate::fault::quoted;

/// Keys of the metadata that describe how a checkpoint was cut into files, and are wrong of any other cut.
const OF_THE_CUT: &str = "DCP_";

/// A conversion that has been thought through.
pub(super) struct Work<'a> {
    pub(super) checkpoint: &'a Arc<Checkpoint>,
    pub(super) options: &'a ConvertOptions,
    pub(super) outputs: Vec<Output>,
    /// Bytes that are loaded and written at a time.
    pub(super) batch_bytes: u64,
    pub(super) notes: Notes,
    pub(super) warnings: Vec<String>,
    pub(super) skipped: Vec<Skipped>,
    pub(super) scales: BTreeMap<Arc<str>, Arc<str>>,
    /// The first name of each tensor.
    firsts: HashMap<Made<'a>, Arc<str>>,
}

/// What makes a tensor what it is: bytes, shape, the cut, the cast.
type Made<'a> = (&'a TensorData, Dtype, Arc<[usize]>, Option<Slice>, Option<Cast>);

/// A tensor of the result and the one that it comes from.
pub(super) struct Output {
    pub(super) outline: Outline,
    pub(super) source: Selected,
    pub(super) cast: Option<Cast>,
}

impl<'a> Work<'a> {
    pub(super) fn plan(
        checkpoint: &'a Arc<Checkpoint>,
        options: &'a ConvertOptions,
        batch_bytes: u64,
    ) -> Result<Work<'a>> {
        let selected = checkpoint.select(&options.selection)?;
        checkpoint.demand_no_loss(true, checkpoint.wants(&options.selection)?)?;
        demand_something(checkpoint, &selected)?;
        checkpoint.require_known_dtypes(&selected)?;
        let casts = casts(checkpoint, &selected, options)?;
        let stale = checkpoint.stale_records(&casts);
        let mut work = Work {
            checkpoint,
            options,
            batch_bytes,
            outputs: Vec::with_capacity(selected.len()),
            notes: Notes { metadata: metadata(checkpoint, &stale), ties: BTreeMap::new() },
            warnings: casts.warnings.iter().cloned().chain(stale.warning.clone()).collect(),
            skipped: skipped(checkpoint, &selected, &casts, &stale),
            scales: scales(checkpoint, &casts),
            firsts: HashMap::new(),
        };
        let is_true = |tensor: &&ConvertedTensor| !stale.tensors.contains(&tensor.selected.tensor);
        for tensor in in_stored_order(checkpoint, &casts).into_iter().filter(is_true) {
            work.add(tensor);
        }
        Ok(work)
    }

    fn add(&mut self, tensor: &ConvertedTensor) {
        let Some(info) = self.checkpoint.tensors().get(tensor.selected.tensor) else { return };
        let Some(dtype) = tensor.cast.map_or_else(|| info.dtype.known(), |cast| Some(cast.to.dtype())) else { return };
        let selected = &tensor.selected;
        let made = (&info.data, dtype, Arc::clone(&selected.shape), selected.slice.clone(), tensor.cast);
        let first = match info.bytes() {
            0 => Arc::clone(&selected.name), // tensors without bytes lie nowhere
            _ => Arc::clone(self.firsts.entry(made).or_insert_with(|| Arc::clone(&selected.name))),
        };
        for name in std::iter::once(&selected.name).chain(&selected.aliases) {
            if self.options.ties == Ties::Alias && *name != first {
                if !self.is_taken(name) {
                    self.notes.ties.insert(Arc::clone(name), Arc::clone(&first));
                    continue;
                }
                let (name, first) = (quoted(name), quoted(&first));
                let why = "a key of the metadata has that name, and readers would not take it for a tensor's";
                self.warnings.push(format!("{name} is the same tensor as {first} and was written all the same: {why}"));
            }
            let outline = Outline { name: Arc::clone(name), dtype, shape: Arc::clone(&selected.shape) };
            self.outputs.push(Output { outline, source: selected.clone(), cast: tensor.cast });
        }
    }

    /// Whether the metadata says something else under that name.
    fn is_taken(&self, name: &str) -> bool {
        name == "format" || self.notes.metadata.contains_key(name)
    }

    pub(super) fn save_options(&self) -> SaveOptions {
        let shards = self.checkpoint.shards().iter().map(|shard| shard.path.as_path());
        let own = || shards.chain([self.checkpoint.path()]).map(Path::to_owned).collect();
        SaveOptions {
            replace: if self.options.overwrite { Replace::Anything } else { Replace::These(own()) },
            cancel: self.options.transfer.cancel.clone(),
            leftovers: self.options.leftovers.clone(),
            ..SaveOptions::default()
        }
    }
}

/// Refuses to make an empty checkpoint of one that has something, none of which can be converted.
fn demand_something(checkpoint: &Checkpoint, selected: &[Selected]) -> Result<()> {
    if !selected.is_empty() || checkpoint.skipped().is_empty() {
        return Ok(());
    }
    let skipped: Listed = checkpoint.skipped().iter().map(|it| format!("{} ({})", quoted(&it.name), it.why)).collect();
    let what = format!("none of what it holds can be converted: {skipped}");
    Err(Error::Unsupported { path: checkpoint.path().to_owned(), tensor: None, what })
}

/// What converting takes: nothing, unless it was asked for.
fn casts(checkpoint: &Checkpoint, selected: &[Selected], options: &ConvertOptions) -> Result<Casts> {
    if let Some(convert) = options.transfer.convert {
        return checkpoint.casts(selected, convert.to);
    }
    let as_stored = |selected: &Selected| ConvertedTensor { selected: selected.clone(), cast: None, origin: 0 };
    let tensors = selected.iter().map(as_stored).collect();
    Ok(Casts { tensors, scales: Vec::new(), warnings: Vec::new() })
}

/// The text that goes with the tensors wherever they lie. Records of shared memory are made anew, those of quantisation are what
/// is left of them.
fn metadata(checkpoint: &Checkpoint, stale: &StaleRecords) -> BTreeMap<String, String> {
    let is_name = |key: &str| checkpoint.tensor(key).is_some();
    let is_tie = |key: &String, value: &String| key != "format" && is_name(value);
    let kept = checkpoint.metadata().iter().filter(|(key, value)| !is_tie(key, value) && !key.starts_with(OF_THE_CUT));
    let entry = |(key, value): (&String, &String)| match stale.metadata.get(key) {
        Some(changed) => changed.as_ref().map(|value| (key.clone(), value.clone())),
        None => Some((key.clone(), value.clone())),
    };
    kept.filter_map(entry).collect()
}

fn skipped(checkpoint: &Checkpoint, selected: &[Selected], casts: &Casts, stale: &StaleRecords) -> Vec<Skipped> {
    let chosen: HashSet<usize> = selected.iter().map(|selected| selected.tensor).collect();
    let sources = |source: &ScaleSource| [Some(source.tensor), source.global.map(|(tensor, _)| tensor)];
    let applied: HashSet<usize> = casts.scales.iter().flat_map(sources).flatten().collect();
    let skipped = |(at, info): (usize, &TensorInfo)| {
        let why = match (applied.contains(&at), chosen.contains(&at)) {
            (true, _) => "scales that have been applied",
            (false, true) if stale.tensors.contains(&at) => "a record of quantisation that is no longer true",
            (false, false) => "not selected",
            (false, true) => return None,
        };
        Some(Skipped::new(info.name.as_ref(), why))
    };
    let left_out = checkpoint.tensors().iter().enumerate().filter_map(skipped);
    checkpoint.skipped().iter().cloned().chain(left_out).collect()
}

/// The weights that are multiplied by scales, as they are called in the result, and the scales as they were.
fn scales(checkpoint: &Checkpoint, casts: &Casts) -> BTreeMap<Arc<str>, Arc<str>> {
    let pair = |tensor: &ConvertedTensor| {
        let table = casts.scales.get(tensor.cast?.scale?.table)?.tensor;
        Some((Arc::clone(&tensor.selected.name), Arc::clone(&checkpoint.tensors().get(table)?.name)))
    };
    casts.tensors.iter().filter_map(pair).collect()
}

/// The tensors as their files have them: neighbours stay neighbours, and are read together.
fn in_stored_order<'c>(checkpoint: &Checkpoint, casts: &'c Casts) -> Vec<&'c ConvertedTensor> {
    let place = |tensor: &&ConvertedTensor| {
        let info = checkpoint.tensors().get(tensor.selected.tensor)?;
        let offset = match &info.data {
            TensorData::Whole(extent) => extent.offset,
            TensorData::Parts(parts) => parts.first().map_or(0, |part| part.extent.offset),
        };
        Some((info.shard(), offset))
    };
    let mut tensors: Vec<&ConvertedTensor> = casts.tensors.iter().collect();
    tensors.sort_by_key(place); // stable: by name where the place is the same
    tensors
}
