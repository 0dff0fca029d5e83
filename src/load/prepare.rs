//! From a selection to a [`Prepared`] load: what the files and the page cache are like, and the plan for them. It opens files and
//! reads no tensor.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::consent;
use super::gpu_direct::TRIAL;
use super::loader::Loader;
use super::prepared::Prepared;
use crate::checkpoint::{
    Casts, Checkpoint, ConvertedTensor, ScaleSource, Selected, Shard, TensorInfo, runs_within, scaled_names,
};
use crate::dtype::{Dtype, dims};
use crate::error::{Error, Result};
use crate::extent::{align_down, align_up};
use crate::plan::{
    self, GlobalScale, LoadPlan, PlanOptions, RouteChoice, ScaleTable, ShardFacts, Transfer, Wanted, WantedCast,
};
use crate::report::Cache;
use crate::storage::{Limits, OpenFile, Route, Source};

/// A size that reads may be told to have, at most: the kernel makes no longer ones.
const MOST_READ_BYTES: u64 = 1 << 30;

impl Loader {
    /// Asks the files and the page cache, and plans the load of `selected`. Where the device reads files itself and no route was
    /// chosen, a large cold load makes a trial first, once for each file system.
    ///
    /// # Errors
    /// When a tensor cannot be loaded (unknown element type), a file is gone, or the plan does not fit the options.
    pub fn prepare(&self, checkpoint: impl Into<Arc<Checkpoint>>, selected: &[Selected]) -> Result<Prepared> {
        self.prepare_with(checkpoint.into(), selected, None, None)
    }

    /// The same for a part of one tensor: the elements in `part`, a range of the bytes that it has as stored, row-major, after
    /// slicing. It cuts no element in two. What is loaded has the name and the type of the tensor, and one dimension.
    pub(crate) fn prepare_part(
        &self,
        checkpoint: &Arc<Checkpoint>,
        selected: &Selected,
        part: &Range<u64>,
    ) -> Result<Prepared> {
        self.prepare_with(Arc::clone(checkpoint), std::slice::from_ref(selected), None, Some(part))
    }

    /// The same, for [`Loader::load_into`]: `places` has the first byte of each selected tensor, counted from the start of
    /// the memory that exists already.
    ///
    /// # Errors
    /// As [`Loader::prepare`]; and when a tensor has no place, lies misaligned for its type, or would lie over another.
    pub fn prepare_into(
        &self,
        checkpoint: impl Into<Arc<Checkpoint>>,
        selected: &[Selected],
        places: &BTreeMap<Arc<str>, u64>,
    ) -> Result<Prepared> {
        self.prepare_with(checkpoint.into(), selected, Some(places), None)
    }

    fn prepare_with(
        &self,
        checkpoint: Arc<Checkpoint>,
        selected: &[Selected],
        places: Option<&BTreeMap<Arc<str>, u64>>,
        part: Option<&Range<u64>>,
    ) -> Result<Prepared> {
        let started = Instant::now();
        checkpoint.require_known_dtypes(selected)?;
        let casts = self.casts(&checkpoint, selected)?;
        let mut wanted = wanted(&checkpoint, &casts, places)?;
        if let Some(part) = part {
            wanted.iter_mut().for_each(|tensor| cut_to(tensor, part));
        }
        let (mut facts, file_system, volume) = self.facts(&checkpoint, &wanted)?;
        match self.options.route {
            RouteChoice::GpuDirect if places.is_some() => {
                let why = "is not for memory that exists already: the places decide, not the residues of the file";
                self.fallbacks.note(consent::WHAT, why);
            }
            _ if places.is_some() => {}
            RouteChoice::GpuDirect => self.ask_gpu_direct(&checkpoint, &mut facts)?,
            RouteChoice::Auto => self.try_gpu_direct(&checkpoint, &wanted, &mut facts, TRIAL)?,
            RouteChoice::Direct | RouteChoice::Buffered | RouteChoice::Mapped => {}
        }
        let used = || facts.iter().filter(|facts| facts.is_used());
        let resident_before = used().map(|facts| facts.residency.resident_bytes()).sum();
        let file_bytes = used().map(|facts| facts.bytes).sum();
        let buffer_bytes = self.staging_shape().bytes as u64;
        let options = PlanOptions { route: self.options.route, buffer_bytes };
        let plan = plan::plan(&wanted, &facts, self.device.limits(), options)?;
        if self.options.route == RouteChoice::Direct {
            self.note_small_reads(&plan, &facts);
        }
        let plan = LoadPlan { scales: scale_tables(&checkpoint, &casts), ..plan };
        let cache = Cache { resident_before, file_bytes };
        let plan_seconds = started.elapsed().as_secs_f64();
        let warnings = casts.warnings;
        Ok(Prepared { checkpoint, plan, warnings, cache, file_system, volume, open_seconds: 0.0, plan_seconds })
    }

    /// What converting the selection takes: nothing, unless it was asked for.
    pub(super) fn casts(&self, checkpoint: &Checkpoint, selected: &[Selected]) -> Result<Casts> {
        if let Some(convert) = self.options.convert {
            return checkpoint.casts(selected, convert.to);
        }
        let as_stored = |selected: &Selected| ConvertedTensor { selected: selected.clone(), cast: None, origin: 0 };
        let tensors = selected.iter().map(as_stored).collect();
        Ok(Casts { tensors, scales: Vec::new(), warnings: Vec::new() })
    }

    /// What the plan must know of each file that a selected tensor lies in; the file system of the first one and its device number.
    pub(super) fn facts(
        &self,
        checkpoint: &Checkpoint,
        wanted: &[Wanted],
    ) -> Result<(Vec<ShardFacts>, String, String)> {
        let shards = checkpoint.shards();
        let mut used = vec![false; shards.len()];
        for run in wanted.iter().flat_map(|tensor| &tensor.runs) {
            if let Some(used) = used.get_mut(run.shard as usize) {
                *used = true;
            }
        }
        let (mut file_system, mut volume) = (String::new(), String::new());
        let mut facts = Vec::with_capacity(shards.len());
        for (shard, used) in shards.iter().zip(used) {
            if !used {
                facts.push(ShardFacts::untouched(shard.bytes));
                continue;
            }
            let file = shard.open(&**checkpoint.storage(), &self.fallbacks)?;
            if file_system.is_empty() {
                file_system.clone_from(&file.file_system().name);
                volume = file.volume();
            }
            facts.push(self.facts_of(shard, &*file));
        }
        Ok((facts, file_system, volume))
    }

    /// The limits of a source, with reads as long as was asked for.
    fn limits_of(&self, source: &dyn Source) -> Limits {
        let limits = source.limits();
        let asked = |bytes: u64| align_down(bytes.min(MOST_READ_BYTES), limits.align).max(limits.align).max(2);
        Limits { max_read: self.options.read_bytes.map_or(limits.max_read, asked), ..limits }
    }

    fn facts_of(&self, shard: &Shard, file: &dyn OpenFile) -> ShardFacts {
        let system = file.file_system();
        let lies_there = shard.derived.is_none();
        let may_be_direct = lies_there && !system.network && !system.memory;
        let wants_direct = !matches!(self.options.route, RouteChoice::Buffered | RouteChoice::Mapped);
        // What was asked for is asked of the file even where it cannot be had: the file notes why.
        let asked_direct = self.options.route == RouteChoice::Direct && lies_there;
        let direct = ((may_be_direct && wants_direct) || asked_direct).then(|| file.source(Route::Direct));
        match self.options.route {
            RouteChoice::Mapped if lies_there => drop(file.source(Route::Mapped)),
            RouteChoice::Direct => self.note_made("O_DIRECT", shard),
            RouteChoice::Mapped => self.note_made("mmap", shard),
            RouteChoice::GpuDirect => self.note_made(consent::WHAT, shard),
            RouteChoice::Auto | RouteChoice::Buffered => {}
        }
        ShardFacts {
            bytes: shard.bytes,
            residency: file.residency_glance(),
            direct: direct.filter(|source| source.route() == Route::Direct).map(|source| self.limits_of(&*source)),
            gpu_direct: None,
            cached: self.limits_of(&*file.source(Route::Buffered)),
            mappable: lies_there && !system.network,
        }
    }

    /// Notes that a route was asked for and a shard has none, because its bytes do not lie in the file as they are loaded.
    fn note_made(&self, what: &str, shard: &Shard) {
        if shard.derived.is_some() {
            let why =
                "some tensors do not lie in their file as they are loaded (they are deflated, strided or big-endian)";
            self.fallbacks.note(what, format!("{why}; read through the page cache"));
        }
    }

    /// Notes reads that were to be direct and hold no whole block, so that nothing of them can be.
    fn note_small_reads(&self, plan: &LoadPlan, facts: &[ShardFacts]) {
        let block = |transfer: &Transfer| facts.get(transfer.shard as usize)?.direct.map(|limits| limits.align.max(1));
        let is_small = |transfer: &&Transfer| {
            let end = transfer.offset.saturating_add(transfer.len);
            let whole = |block: u64| align_up(transfer.offset, block).saturating_add(block) <= end;
            transfer.route == Route::Direct && block(transfer).is_some_and(|block| !whole(block))
        };
        let small: Vec<&Transfer> = plan.transfers.iter().filter(is_small).collect();
        if let Some(block) = small.first().and_then(|transfer| block(transfer)) {
            let (count, all) = (small.len(), plan.transfers.len());
            let why =
                format!("{count} of {all} reads hold no whole block of {block} bytes; read through the page cache");
            self.fallbacks.note("O_DIRECT", why);
        }
    }
}

/// The selected tensors as the plan wants them.
pub(super) fn wanted(
    checkpoint: &Checkpoint,
    casts: &Casts,
    places: Option<&BTreeMap<Arc<str>, u64>>,
) -> Result<Vec<Wanted>> {
    let wanted = |tensor: &ConvertedTensor| {
        let ConvertedTensor { selected: chosen, cast, origin } = tensor;
        let info = checkpoint.tensors().get(chosen.tensor);
        let info = info.ok_or(Error::Poisoned { what: "a selection of another checkpoint" })?;
        let runs = info.runs(chosen.slice.as_ref());
        let stored = runs.iter().map(|run| run.run * run.count).sum();
        let place = |places: &BTreeMap<Arc<str>, u64>| {
            let missing = || format!("tensor {:?} has been given no place in the memory to load into", chosen.name);
            places.get(&chosen.name).copied().ok_or_else(|| Error::Request { what: missing(), hint: None })
        };
        Ok(Wanted {
            name: Arc::clone(&chosen.name),
            aliases: chosen.aliases.clone(),
            dtype: cast.map_or_else(|| known(info), |cast| Ok(cast.to.dtype()))?,
            shape: Arc::clone(&chosen.shape),
            bytes: cast.map_or(stored, |cast| cast.converted(stored)),
            runs,
            cast: cast.map(|cast| WantedCast { cast, origin: *origin }),
            place: places.map(place).transpose()?,
        })
    };
    casts.tensors.iter().map(wanted).collect()
}

/// The element type of a tensor that is loaded.
fn known(info: &TensorInfo) -> Result<Dtype> {
    info.dtype.known().ok_or(Error::Poisoned { what: "a tensor of an unknown type was selected" })
}

/// Leaves of a wanted tensor the elements in a range of its bytes.
fn cut_to(tensor: &mut Wanted, part: &Range<u64>) {
    let stored = part.end.saturating_sub(part.start);
    tensor.runs = runs_within(&tensor.runs, part);
    tensor.bytes = tensor.cast.map_or(stored, |wanted| wanted.cast.converted(stored));
    tensor.shape = dims(&[tensor.bytes.saturating_mul(8) / tensor.dtype.bits()]).into();
}

/// The tables of scales that a plan's conversions count.
fn scale_tables(checkpoint: &Checkpoint, casts: &Casts) -> Vec<ScaleTable> {
    let global = |(index, divides): (usize, bool)| {
        let info = checkpoint.tensors().get(index)?;
        Some(GlobalScale { name: Arc::clone(&info.name), divides, runs: info.runs(None) })
    };
    let table = |(source, scales): (&ScaleSource, Vec<Arc<str>>)| {
        let info = checkpoint.tensors().get(source.tensor)?;
        let (name, dtype, runs) = (Arc::clone(&info.name), info.dtype.known()?, info.runs(None));
        Some(ScaleTable { name, scales, dtype, runs, global: source.global.and_then(global) })
    };
    casts.scales.iter().zip(scaled_names(casts)).filter_map(table).collect()
}
