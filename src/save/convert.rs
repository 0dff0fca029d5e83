//! A checkpoint written anew: whatever [`Checkpoint`] opens, by way of the ordinary [`Loader`], to safetensors.
//!
//! This file decides what the result holds: names, casts, ties, metadata, warnings. [`batches`](super::batches) then loads and
//! writes the tensors in memory of a bounded size. Casts, scales and cuts are the loader's. Nothing here opens a weight file, and
//! nothing is replaced before all has been written and, where asked, read back and compared.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::batches::BATCH_BYTES;
use super::{
    Bounds, Layout, Leftovers, MAX_SHARD_BYTES, Notes, Outline, Replace, SaveOptions, Saved, Saving, Target,
    shard_limit,
};
use crate::checkpoint::{
    Casts, Checkpoint, ConvertedTensor, ScaleSource, Selected, Selection, Skipped, Slice, StaleRecords, TensorData,
    TensorInfo,
};
use crate::device::Cast;
use crate::dtype::Dtype;
use crate::durable::Store;
use crate::error::{Error, Listed, Result};
use crate::fault::quoted;
use crate::load::{Progress, TransferOptions};

/// Keys of the metadata that describe how a checkpoint was cut into files, and are wrong of any other cut.
const OF_THE_CUT: &str = "DCP_";

/// What becomes of tensors that have several names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ties {
    /// Each name gets bytes of its own: every reader understands that.
    #[default]
    Write,
    /// One name gets the bytes, the others are recorded in the metadata as `safetensors.torch.save_model` does.
    Alias,
}

/// How a checkpoint is converted.
#[derive(Clone)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Which tensors, under which names.
    pub selection: Selection,
    /// How they are read, and what floating-point tensors become. Its switch stops the whole conversion.
    pub transfer: TransferOptions,
    /// What becomes of tensors that have several names.
    pub ties: Ties,
    /// The most bytes of tensors in one file of a folder.
    pub max_shard_bytes: u64,
    /// Whether another model may be replaced. The checkpoint that is converted may always be.
    pub overwrite: bool,
    /// Whether the checksums that the checkpoint states are compared first, and whether the files are read back, past the page
    /// cache where possible, and compared before they are put in place.
    pub check: bool,
    /// Is told how far it is.
    pub progress: Option<Progress>,
    /// Where it notes what it would leave behind, for whoever has to end the process.
    pub leftovers: Leftovers,
}

impl fmt::Debug for ConvertOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConvertOptions { selection, transfer, ties, max_shard_bytes, overwrite, check, .. } = self;
        let mut debug = f.debug_struct("ConvertOptions");
        debug.field("selection", selection).field("transfer", transfer).field("ties", ties);
        debug.field("max_shard_bytes", max_shard_bytes).field("overwrite", overwrite).field("check", check);
        debug.finish_non_exhaustive()
    }
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        ConvertOptions {
            selection: Selection::default(),
            transfer: TransferOptions::default(),
            ties: Ties::default(),
            max_shard_bytes: MAX_SHARD_BYTES,
            overwrite: false,
            check: false,
            progress: None,
            leftovers: Leftovers::default(),
        }
    }
}

setters!(ConvertOptions {
    /// Sets which tensors to convert, and under which names.
    selection: Selection,
    /// Sets how they are read, and what floating-point tensors become.
    transfer: TransferOptions,
    /// Sets what becomes of tensors that have several names.
    ties: Ties,
    /// Sets the most bytes of tensors in one file of a folder.
    max_shard_bytes: u64,
    /// Sets whether another model may be replaced.
    overwrite: bool,
    /// Sets whether the files are read back and compared before they are put in place.
    check: bool,
    /// Sets the function that gets the bytes done so far and all bytes.
    progress: into Option<Progress>,
    /// Sets where the conversion notes the files that it would leave behind.
    leftovers: Leftovers,
});

/// What a conversion did.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Converted {
    /// The files and their tensors.
    pub saved: Saved,
    /// Tensors of the checkpoint that are not in the files, and why.
    pub skipped: Vec<Skipped>,
    /// The tensor of scales that each quantised weight was multiplied by.
    pub scales: BTreeMap<Arc<str>, Arc<str>>,
    /// Further names that were recorded: alias and name.
    pub ties: BTreeMap<Arc<str>, Arc<str>>,
    /// What a person should know of the checkpoint, of casts, and of what was replaced.
    pub warnings: Vec<String>,
}

/// Writes `checkpoint` to `target`.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let (input, output) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
/// # let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&input, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &1f32.to_le_bytes()].concat())?;
/// use vramp::checkpoint::Checkpoint;
/// use vramp::Float;
/// use vramp::load::{Convert, TransferOptions};
/// use vramp::save::{ConvertOptions, Target, convert};
/// use vramp::durable::FileStore;
///
/// let options = ConvertOptions::default().transfer(TransferOptions::default().convert(Convert::to(Float::BF16)));
/// let converted = convert(&Checkpoint::open(&input)?, &FileStore, &Target::of(&output), &options)?;
/// assert_eq!(converted.saved.outputs, [output]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// What cannot be loaded or saved; [`Error::Overflow`] with all tensors concerned; [`Error::Mismatch`] when a check finds
/// other bytes than were written. Nothing is left behind then, and nothing was replaced.
pub fn convert(
    checkpoint: &Checkpoint,
    store: &dyn Store,
    target: &Target,
    options: &ConvertOptions,
) -> Result<Converted> {
    convert_in(checkpoint, store, target, options, BATCH_BYTES)
}

/// [`convert`] with batches of `batch_bytes` bytes; at least 16.
pub(super) fn convert_in(
    checkpoint: &Checkpoint,
    store: &dyn Store,
    target: &Target,
    options: &ConvertOptions,
    batch_bytes: u64,
) -> Result<Converted> {
    if options.check {
        let cancel = &options.transfer.cancel;
        checkpoint.check_sums(&|| if cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) })?;
    }
    demand_tensors(checkpoint)?;
    let checkpoint = &Arc::new(checkpoint.clone());
    let work = Work::plan(checkpoint, options, batch_bytes)?;
    let outlines = work.outputs.iter().map(|output| output.outline.clone()).collect();
    let limit = shard_limit(target, options.max_shard_bytes);
    let layout = Layout::new(target.path(), outlines, &work.notes, limit)?;
    // A block is no larger than a batch.
    let most = usize::try_from(batch_bytes).unwrap_or(usize::MAX);
    let bounds = Bounds { block_bytes: Bounds::STREAM.block_bytes.min(most), ..Bounds::STREAM };
    let mut saving = Saving::without_file(store, target, layout, &work.save_options(), bounds)?;
    saving.settle()?;
    let (saving, warnings) = work.carry_out(saving)?;
    let saved = saving.finish()?;
    let Work { skipped, scales, notes: Notes { ties, .. }, warnings: planned, .. } = work;
    let warnings =
        [checkpoint.warnings().to_vec(), planned, warnings, saved.warnings.clone()].into_iter().flatten().collect();
    Ok(Converted { saved, skipped, scales, ties, warnings })
}

/// A conversion that has been thought through.
pub(super) struct Work<'a> {
    pub(super) checkpoint: &'a Arc<Checkpoint>,
    pub(super) options: &'a ConvertOptions,
    pub(super) outputs: Vec<Output>,
    /// Bytes that are loaded and written at a time.
    pub(super) batch_bytes: u64,
    notes: Notes,
    warnings: Vec<String>,
    skipped: Vec<Skipped>,
    scales: BTreeMap<Arc<str>, Arc<str>>,
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
    fn plan(checkpoint: &'a Arc<Checkpoint>, options: &'a ConvertOptions, batch_bytes: u64) -> Result<Work<'a>> {
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

    fn save_options(&self) -> SaveOptions {
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

/// Refuses to make a checkpoint of nothing: of no tensor at all, or of tensors without any bytes.
fn demand_tensors(checkpoint: &Checkpoint) -> Result<()> {
    match checkpoint.emptiness() {
        Some(what) if checkpoint.skipped().is_empty() => {
            Err(Error::Unsupported { path: checkpoint.path().to_owned(), tensor: None, what })
        }
        _ => Ok(()),
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
