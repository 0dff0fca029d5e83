//! A checkpoint written anew: whatever [`Checkpoint`] opens, by way of the ordinary [`Loader`], to safetensors.
//!
//! Tensors are loaded to host memory batch by batch, in the order in which they are written, while another thread writes
//! the batch before: memory is bounded by two batches, that is by some 64 MiB or the largest tensor. Casts, scales and cuts are
//! the loader's. Nothing here opens a weight file, and nothing is replaced before all has been written and, where asked,
//! read back and compared.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::{Layout, Leftovers, MAX_SHARD_BYTES, Notes, Outline, SaveOptions, Saved, Saving, Target, shard_limit};
use crate::checkpoint::{
    Casts, Checkpoint, ConvertedTensor, ScaleSource, Selected, Selection, Skipped, Slice, StaleRecords, TensorData,
    TensorInfo,
};
use crate::device::{Cast, CpuDevice};
use crate::digest::checksum;
use crate::dtype::Dtype;
use crate::error::{Error, Listed, Result};
use crate::fault::quoted;
use crate::load::{Loaded, Loader, Prepared, TransferOptions};
use crate::plan::RouteChoice;
use crate::store::Store;

/// Bytes of a batch: enough that reading and writing are not interrupted all the time, and no more.
const BATCH_BYTES: u64 = 64 << 20;

/// Keys of the metadata that describe how a checkpoint was cut into files, and are wrong of any other cut.
const OF_THE_CUT: &str = "DCP_";

/// Is told how many bytes of how many are done.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

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
pub struct ConvertOptions {
    /// Which tensors, under which names.
    pub selection: Selection,
    /// How they are read, and what floating-point tensors become. Its switch stops the whole conversion.
    pub transfer: TransferOptions,
    /// What becomes of tensors that have several names.
    pub ties: Ties,
    /// The most bytes of tensors in one file of a folder.
    pub max_shard_bytes: u64,
    /// Whether the checksums that the checkpoint states are compared first, and whether the files are read back, past the page
    /// cache where possible, and compared before they are put in place.
    pub check: bool,
    /// Is told how far it is.
    pub progress: Option<Progress>,
    /// Where it notes what it would leave behind, for whoever has to end the process.
    pub leftovers: Leftovers,
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        ConvertOptions {
            selection: Selection::default(),
            transfer: TransferOptions::default(),
            ties: Ties::default(),
            max_shard_bytes: MAX_SHARD_BYTES,
            check: false,
            progress: None,
            leftovers: Leftovers::default(),
        }
    }
}

/// What a conversion did.
#[derive(Debug, Clone)]
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
/// use vramp::convert::Float;
/// use vramp::load::{Convert, TransferOptions};
/// use vramp::save::{ConvertOptions, Target, convert};
/// use vramp::store::FileStore;
///
/// let half = Convert { to: Float::BF16, allow_overflow: false };
/// let transfer = TransferOptions { convert: Some(half), ..TransferOptions::default() };
/// let options = ConvertOptions { transfer, ..ConvertOptions::default() };
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
    if options.check {
        let cancel = &options.transfer.cancel;
        checkpoint.check_sums(&|| if cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) })?;
    }
    let work = Work::plan(checkpoint, options)?;
    let outlines = work.outputs.iter().map(|output| output.outline.clone()).collect();
    let limit = shard_limit(target, options.max_shard_bytes);
    let layout = Layout::new(target.path(), outlines, &work.notes, limit)?;
    let saving = Saving::begin(store, target, layout, &work.save_options())?;
    let (saving, warnings) = work.carry_out(saving)?;
    let saved = saving.finish()?;
    let Work { skipped, scales, notes: Notes { ties, .. }, warnings: planned, .. } = work;
    let warnings =
        [checkpoint.warnings().to_vec(), planned, warnings, saved.warnings.clone()].into_iter().flatten().collect();
    Ok(Converted { saved, skipped, scales, ties, warnings })
}

/// A conversion that has been thought through.
struct Work<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a ConvertOptions,
    outputs: Vec<Output>,
    notes: Notes,
    warnings: Vec<String>,
    skipped: Vec<Skipped>,
    scales: BTreeMap<Arc<str>, Arc<str>>,
    /// The first name of each tensor.
    firsts: HashMap<Made<'a>, Arc<str>>,
}

/// What makes a tensor what it is: bytes, shape, the cut, the cast.
type Made<'a> = (&'a TensorData, Dtype, Arc<[u64]>, Option<Slice>, Option<Cast>);

/// A tensor of the result and the one that it comes from.
struct Output {
    outline: Outline,
    source: Selected,
    cast: Option<Cast>,
}

/// Tensors that are loaded together, by their numbers among the outputs, in the order in which they are written.
struct Batch {
    outputs: Vec<usize>,
    loaded: Loaded,
}

impl<'a> Work<'a> {
    fn plan(checkpoint: &'a Checkpoint, options: &'a ConvertOptions) -> Result<Work<'a>> {
        let selected = checkpoint.select(&options.selection)?;
        demand_something(checkpoint, &selected)?;
        checkpoint.require_known_dtypes(&selected)?;
        let casts = casts(checkpoint, &selected, options)?;
        let stale = checkpoint.stale_records(&casts);
        let mut work = Work {
            checkpoint,
            options,
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
        let dtype = tensor.cast.map_or_else(|| info.dtype.clone(), |cast| cast.to.dtype());
        let selected = &tensor.selected;
        let made = (&info.data, dtype.clone(), Arc::clone(&selected.shape), selected.slice.clone(), tensor.cast);
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
            let outline = Outline { name: Arc::clone(name), dtype: dtype.clone(), shape: Arc::clone(&selected.shape) };
            self.outputs.push(Output { outline, source: selected.clone(), cast: tensor.cast });
        }
    }

    /// Whether the metadata says something else under that name.
    fn is_taken(&self, name: &str) -> bool {
        name == "format" || self.notes.metadata.contains_key(name)
    }

    fn save_options(&self) -> SaveOptions {
        SaveOptions {
            cancel: self.options.transfer.cancel.clone(),
            leftovers: self.options.leftovers.clone(),
            ..SaveOptions::default()
        }
    }

    /// Loads and writes everything, each on a thread of its own, and compares where asked.
    fn carry_out<'s>(&self, mut saving: Saving<'s>) -> Result<(Saving<'s>, Vec<String>)> {
        let order: Vec<usize> = saving.layout().shards.iter().flat_map(|shard| shard.tensors.iter().copied()).collect();
        let total = saving.layout().bytes;
        let tell = |done: u64| {
            if let Some(progress) = &self.options.progress {
                progress(done, total);
            }
        };
        tell(0);
        let (give, take) = bounded(0);
        let (loaded, written) = thread::scope(|scope| {
            let write = || self.write_all(&take, &mut saving, &tell);
            let writer = thread::Builder::new().name("vramp-write".to_owned()).spawn_scoped(scope, write);
            let writer = match writer {
                Ok(writer) => writer,
                Err(e) => {
                    return (Err(Error::io("start a thread to write", self.checkpoint.path(), e)), Ok(Vec::new()));
                }
            };
            let loaded = self.load_all(&order, give);
            (loaded, writer.join().unwrap_or(Err(Error::Poisoned { what: "the thread that writes" })))
        });
        // A writer that ended early has the better reason than a loader that nobody took a batch from.
        let sums = written?;
        let warnings = loaded?;
        if self.options.check {
            self.compare(&saving, &order, &sums)?;
        }
        Ok((saving, warnings))
    }

    /// Loads batch after batch and gives them away; returns what the loads warned of. Overflows are gathered from all.
    fn load_all(&self, order: &[usize], give: Sender<Batch>) -> Result<Vec<String>> {
        let mut loader = Loader::new(Arc::new(CpuDevice::new()), self.options.transfer.clone());
        let (mut warnings, mut overflow) = (Vec::new(), None);
        for outputs in batches(order, |at| self.outputs.get(at).and_then(|output| output.outline.bytes()).unwrap_or(0))
        {
            if overflow.is_some() && !self.is_cast(&outputs) {
                continue;
            }
            match self.load(&mut loader, &outputs) {
                Ok(loaded) if overflow.is_none() => {
                    warnings
                        .extend(loaded.warnings.get(self.checkpoint.warnings().len()..).unwrap_or_default().to_vec());
                    give.send(Batch { outputs, loaded }).map_err(|_| Error::Cancelled)?;
                }
                Ok(_) => {}
                Err(error) => overflow = Some(added_overflow(overflow, error)?),
            }
        }
        overflow.map_or(Ok(warnings), Err)
    }

    fn is_cast(&self, outputs: &[usize]) -> bool {
        outputs.iter().any(|&at| self.outputs.get(at).is_some_and(|output| output.cast.is_some()))
    }

    fn load(&self, loader: &mut Loader, outputs: &[usize]) -> Result<Loaded> {
        let mut sources: Vec<Selected> =
            outputs.iter().filter_map(|&at| self.outputs.get(at)).map(|output| output.source.clone()).collect();
        sources.sort_by(|a, b| a.name.cmp(&b.name));
        sources.dedup_by(|a, b| a.name == b.name);
        // What is to be known of casts has been said of all batches at once.
        let prepared = Prepared { warnings: Vec::new(), ..loader.prepare(self.checkpoint, &sources)? };
        loader.load(self.checkpoint, &prepared)
    }

    /// Writes what comes; returns a checksum of each output where they are to be compared.
    fn write_all(&self, take: &Receiver<Batch>, saving: &mut Saving<'_>, tell: &dyn Fn(u64)) -> Result<Vec<u64>> {
        let mut sums = vec![0; if self.options.check { self.outputs.len() } else { 0 }];
        let mut done = 0;
        for Batch { outputs, loaded } in take {
            for at in outputs {
                let output = self.outputs.get(at).ok_or(Error::Poisoned { what: "a batch of other tensors" })?;
                let bytes = loaded.tensor(&output.outline.name)?.bytes()?;
                if let Some(sum) = sums.get_mut(at) {
                    *sum = checksum(bytes);
                }
                if saving.next() != Some(at) && !bytes.is_empty() {
                    return Err(Error::Poisoned { what: "tensors came in another order than they are written in" });
                }
                saving.write(bytes)?;
                done += bytes.len() as u64;
                tell(done);
            }
        }
        Ok(sums)
    }

    // ---- the check

    /// Reads the written files back and compares names, types, shapes and bytes with what was loaded.
    fn compare(&self, saving: &Saving<'_>, order: &[usize], sums: &[u64]) -> Result<()> {
        let mut differ = Listed::new();
        for (path, shard) in saving.files()?.iter().zip(&saving.layout().shards) {
            let found = Checkpoint::open(path)?;
            let wanted: BTreeMap<&str, usize> = shard
                .tensors
                .iter()
                .filter_map(|&at| Some((self.outputs.get(at)?.outline.name.as_ref(), at)))
                .collect();
            if found.tensors().len() != wanted.len() {
                differ.push(|| format!("{} tensors instead of {}", found.tensors().len(), wanted.len()));
            }
            self.compare_shard(&found, &wanted, sums, &mut differ)?;
        }
        if differ.is_empty() && sums.len() == order.len() {
            return Ok(());
        }
        let report = format!("what was read back is not what was written, and nothing was put in place: {differ}");
        Err(Error::Mismatch { path: self.checkpoint.path().to_owned(), report })
    }

    fn compare_shard(
        &self,
        found: &Checkpoint,
        wanted: &BTreeMap<&str, usize>,
        sums: &[u64],
        differ: &mut Listed,
    ) -> Result<()> {
        let transfer = TransferOptions {
            route: RouteChoice::Direct,
            cancel: self.options.transfer.cancel.clone(),
            ..TransferOptions::default()
        };
        let mut loader = Loader::new(Arc::new(CpuDevice::new()), transfer);
        let all = found.select(&Selection::default())?;
        let order: Vec<usize> = (0..all.len()).collect();
        for batch in batches(&order, |at| {
            all.get(at).map_or(0, |it| found.tensors().get(it.tensor).map_or(0, |info| info.bytes()))
        }) {
            let selected: Vec<Selected> = batch.iter().filter_map(|&at| all.get(at).cloned()).collect();
            let loaded = loader.load(found, &loader.prepare(found, &selected)?)?;
            for chosen in &selected {
                let tensor = loaded.tensor(&chosen.name)?;
                let at = wanted.get(chosen.name.as_ref());
                let outline = at.and_then(|&at| self.outputs.get(at)).map(|output| &output.outline);
                let is_same = outline.is_some_and(|it| (&it.dtype, &it.shape[..]) == (tensor.dtype(), tensor.shape()));
                if !is_same || at.and_then(|&at| sums.get(at)) != Some(&checksum(tensor.bytes()?)) {
                    differ.push(|| quoted(&chosen.name));
                }
            }
        }
        Ok(())
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
        Some(Skipped { name: info.name.to_string(), why: why.to_owned() })
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

/// Divides `order` into batches of [`BATCH_BYTES`]; a larger tensor is one of its own.
fn batches(order: &[usize], bytes_of: impl Fn(usize) -> u64) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut filled = u64::MAX;
    for &at in order {
        let bytes = bytes_of(at);
        match batches.last_mut().filter(|_| filled.saturating_add(bytes) <= BATCH_BYTES) {
            Some(batch) => batch.push(at),
            None => {
                batches.push(vec![at]);
                filled = 0;
            }
        }
        filled = filled.saturating_add(bytes);
    }
    batches
}

/// One error of all tensors that overflowed; any other error as it is.
fn added_overflow(before: Option<Error>, error: Error) -> Result<Error> {
    match (before, error) {
        (None, error @ Error::Overflow { .. }) => Ok(error),
        (Some(Error::Overflow { to, reach, mut tensors }), Error::Overflow { tensors: more, .. }) => {
            tensors.extend(more);
            Ok(Error::Overflow { to, reach, tensors })
        }
        (_, error) => Err(error),
    }
}
