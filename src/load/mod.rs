//! Loading: what a caller says, what it gets, and the [`Loader`] between a checkpoint and a device.
//!
//! One loop (`run`) submits the transfers of a [`LoadPlan`] to a [`ReadQueue`] and gets their targets back filled, hands filled
//! staging buffers to a [`Stream`] and gets them back free. Ownership of the buffers and regions moves in and comes back;
//! that is the whole concurrency model. `files` opens late and closes early, `gpu_direct` asks whether the device reads files
//! itself, `loading` hands out tensors before the end, `scales` reads what quantised weights are multiplied by, `meter` keeps
//! time, `limits` compares with what was measured before, `options` is what `load` may be told, `profile` reads options from a
//! file, `trace` tells what happened when (`spans` tells the `tracing` crate). Nothing
//! here knows a file system, a format or a device by name, and nothing here copies bytes.

mod files;
mod gpu_direct;
mod limits;
mod loading;
mod meter;
mod options;
mod profile;
mod run;
mod scales;
#[cfg(feature = "tracing")]
mod spans;
mod trace;

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

#[doc(hidden)]
pub use limits::machine_digest;
pub use limits::{LimitPlace, LimitRates, MeasuredLimit, MeasuredLimits};
pub use loading::Loading;
pub use options::{Options, Progress};
#[doc(hidden)]
pub use profile::MOST_AT_ONCE;
pub use profile::Profile;
#[cfg(feature = "tracing")]
pub use spans::TracingObserver;
#[doc(hidden)]
pub use trace::place;
pub use trace::{TraceEvent, TraceLane, TracePlace};

use files::Files;
use gpu_direct::{Consent, TRIAL};
use limits::Passed;
use loading::{Ending, Readiness};
use meter::Meter;
use run::Run;
use trace::{Span, Tracer};

use crate::checkpoint::{
    Casts, Checkpoint, ConvertedTensor, ScaleSource, Selected, Shard, TensorInfo, no_tensor, runs_within, scaled_names,
};
use crate::convert::{Float, Table};
use crate::device::{Arena, Device, Region, Stream, StreamNeeds, View, Written};
use crate::dtype::{Dtype, dims};
use crate::error::{Error, Overflowed, Result};
use crate::extent::{align_down, align_up};
use crate::memory::staging::StagingPool;
use crate::os;
use crate::plan::{
    self, GlobalScale, LoadPlan, PlanOptions, RouteChoice, ScaleTable, ShardFacts, Transfer, Wanted, WantedCast,
};
use crate::report::{Cache, Report, StageTime, Staging};
use crate::storage::{Fallbacks, GpuDirect, Limits, OpenFile, QueueOptions, ReadQueue, Route, Source, queue};
use crate::tensor::Tensor;

/// What a [`Loader`] is told: how the bytes are moved, and what becomes of them. [`Options`] has the same fields for [`load`].
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct TransferOptions {
    /// Which way the bytes go.
    pub route: RouteChoice,
    /// The staging buffers; `None` leaves number and size to vramp.
    pub staging: Option<Staging>,
    /// What runs the reads.
    pub queue: QueueOptions,
    /// Bytes of a read, at most; `None` leaves that to the file system. Rounded to what the file can be read
    /// by; reads that land in host memory are 2 MiB at least, so that two of them do not share a huge page.
    pub read_bytes: Option<u64>,
    /// Uploads that are worked on side by side (streams of a GPU, copy threads of the host); `None` leaves that to the device.
    pub lanes: Option<usize>,
    /// What floating-point tensors become; `None` leaves all as they are stored.
    pub convert: Option<Convert>,
    /// Stops the load from another thread.
    pub cancel: Cancel,
    /// Is told how far the load is.
    pub observer: Option<Arc<dyn Observer>>,
    /// What the stages of a load can do here, as measured before: the report then has T = S / B. `None`: it has none.
    pub limits: Option<Arc<MeasuredLimits>>,
}

setters!(TransferOptions {
    /// Sets how bytes come out of the files.
    route: RouteChoice,
    /// Sets the number and size of the staging buffers.
    staging: into Option<Staging>,
    /// Sets what runs the reads.
    queue: QueueOptions,
    /// Sets the most bytes of a read.
    read_bytes: Some(u64),
    /// Sets how many uploads run side by side.
    lanes: Some(usize),
    /// Sets what floating-point tensors become.
    convert: into Option<Convert>,
    /// Sets the switch that stops the load from another thread.
    cancel: Cancel,
    /// Sets who observes the plan, each advance and the trace events.
    observer: Some(Arc<dyn Observer>),
    /// Sets the measured limits that the report compares the load with.
    limits: into Option<Arc<MeasuredLimits>>,
});

/// What becomes of floating-point tensors. Others are left as they are; quantised weights are multiplied by the scales that lie
/// beside them in the checkpoint, which are then not handed out themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Convert {
    /// The element type: F32, F16 or BF16.
    pub to: Float,
    /// Whether finite numbers may become infinite; if not, that is [`Error::Overflow`].
    pub allow_overflow: bool,
}

impl Convert {
    /// Conversion to that type, with an error where a finite number would become infinite.
    pub const fn to(to: Float) -> Convert {
        Convert { to, allow_overflow: false }
    }

    /// Sets whether finite numbers may become infinite.
    #[must_use]
    pub const fn allow_overflow(self, allow_overflow: bool) -> Convert {
        Convert { allow_overflow, ..self }
    }
}

/// A switch that stops a load: everything in flight is drained, then the load returns [`Error::Cancelled`].
#[derive(Debug, Clone, Default)]
pub struct Cancel {
    flag: Arc<AtomicBool>,
}

/// Is told how far a load is. Calls come from the loading thread and must return soon.
pub trait Observer: Send + Sync {
    /// The plan stands; nothing has been read yet.
    fn planned(&self, plan: &LoadPlan);

    /// `done` bytes of the plan's reads have arrived.
    fn advanced(&self, done: u64);

    /// Something that took time is over. Called some three times for each read, so it should do little.
    fn event(&self, _event: &TraceEvent) {}
}

/// A finished load.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Loaded {
    /// Sorted by name.
    tensors: Vec<Tensor>,
    /// What the load did and what limited it.
    pub report: Report,
    /// What a person should know about the checkpoint.
    pub warnings: Vec<String>,
    /// Tensors whose finite numbers became infinite, and how many of them, where that was allowed. `warnings` ends with them.
    pub(crate) overflows: Vec<(String, u64)>,
}

/// A plan, the checkpoint that it loads, and what was learned while making it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Prepared {
    /// What is loaded. A plan fits no other checkpoint, so it keeps its own.
    checkpoint: Arc<Checkpoint>,
    /// The plan.
    pub plan: LoadPlan,
    /// What a person should know of the conversion.
    pub warnings: Vec<String>,
    /// What of the files was in the page cache.
    pub cache: Cache,
    /// The file system of the first file.
    pub file_system: String,
    /// Its device number, as `259:1`.
    pub volume: String,
    /// Seconds that opening the checkpoint took; the caller may set it, so that the report counts it.
    pub open_seconds: f64,
    /// Seconds that selecting and planning took.
    pub plan_seconds: f64,
}

impl Prepared {
    /// The checkpoint that is loaded.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }
}

/// Loads a checkpoint: the paved road.
///
/// # Errors
/// When the checkpoint is refused, something that was asked for is not there, reading fails, or a file changes meanwhile.
/// Nothing is handed out then. A change is seen by length, modification time and inode; what another process writes through a
/// shared mapping shows in none of these and is not seen, whatever the route.
pub fn load(path: impl AsRef<Path>, options: &Options) -> Result<Loaded> {
    let started = Instant::now();
    let checkpoint = Arc::new(Checkpoint::open_with(path, &options.open)?);
    let open_seconds = started.elapsed().as_secs_f64();
    let mut loader = Loader::new(Arc::clone(&options.device), options.transfer());
    let planning = Instant::now();
    let selected = checkpoint.select(&options.selection)?;
    let prepared = loader.prepare(checkpoint, &selected)?;
    let plan_seconds = planning.elapsed().as_secs_f64();
    loader.load(&Prepared { open_seconds, plan_seconds, ..prepared })
}

impl Cancel {
    /// A switch that is not thrown.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Throws the switch.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Whether it was thrown.
    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }
}

impl Loaded {
    /// The tensor of that name.
    ///
    /// # Errors
    /// [`Error::NoTensor`], with the nearest names, when the load did not have it.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        let at = self.tensors.binary_search_by(|tensor| tensor.name().cmp(name)).ok();
        let names = || self.tensors.iter().map(Tensor::name);
        at.and_then(|at| self.tensors.get(at)).ok_or_else(|| not_loaded(name, names()))
    }

    /// All tensors, aliases included, sorted by name.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The first byte of each tensor in the memory that they lie in, for [`Loader::prepare_into`].
    pub fn places(&self) -> BTreeMap<Arc<str>, u64> {
        self.tensors.iter().map(|tensor| (tensor.name().into(), tensor.view().range().start)).collect()
    }

    /// The memory that the tensors lie in, so that [`Loader::load_into`] can load others over them.
    ///
    /// # Errors
    /// The load as it was, where a tensor or view of it still exists elsewhere, or it has no tensor.
    pub fn into_arena(mut self) -> Result<Arena, Box<Loaded>> {
        let tensors = std::mem::take(&mut self.tensors);
        let (described, mut views): (Vec<_>, Vec<_>) = tensors.into_iter().map(Tensor::into_parts).unzip();
        View::into_arena(&mut views).ok_or_else(|| {
            let parts = described.into_iter().zip(views);
            self.tensors = parts.map(|((name, dtype, shape), view)| Tensor::new(name, dtype, shape, view)).collect();
            Box::new(self)
        })
    }
}

fn not_loaded<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Error {
    no_tensor(name, "was not loaded", names)
}

type QueueMaker = Box<dyn Fn(Option<&StagingPool>, &Fallbacks) -> Box<dyn ReadQueue> + Send>;

/// Loads checkpoints one after the other and keeps the staging pool, the queue and the stream for the next.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let header = r#"{"a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[1, 2, 3, 4, 5]].concat())?;
/// use std::sync::Arc;
/// use vramp::checkpoint::{Checkpoint, Selection};
/// use vramp::device::CpuDevice;
/// use vramp::load::{Loader, TransferOptions};
///
/// let checkpoint = Checkpoint::open(&path)?;
/// let selected = checkpoint.select(&Selection::default())?;
/// let mut loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
///
/// let prepared = loader.prepare(checkpoint, &selected)?; // headers and the page cache were looked at, nothing was read
/// println!("{}", prepared.plan);
/// let loaded = loader.load(&prepared)?;
/// assert_eq!(loaded.tensor("a")?.as_slice::<u8>()?, [1, 2, 3, 4]);
///
/// let loading = loader.start(prepared); // again, on a thread of its own
/// let early = loading.wait("b")?; // there before the rest may be
/// let (_loader, loaded) = loading.finish()?;
/// assert_eq!(early.as_slice::<u8>()?, loaded.tensor("b")?.as_slice::<u8>()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Loader {
    device: Arc<dyn Device>,
    options: TransferOptions,
    make_queue: QueueMaker,
    fallbacks: Fallbacks,
    consent: Consent,
    engine: Cell<Option<Engine>>,
}

/// What a loader keeps warm.
struct Engine {
    pool: Option<StagingPool>,
    queue: Box<dyn ReadQueue>,
    stream: Option<Box<dyn Stream>>,
}

impl Loader {
    /// A loader for a device.
    pub fn new(device: Arc<dyn Device>, options: TransferOptions) -> Loader {
        let queue_options = options.queue;
        let make_queue: QueueMaker = Box::new(move |pool, fallbacks| queue(&queue_options, pool, fallbacks));
        let (fallbacks, consent, engine) = (Fallbacks::default(), Consent::default(), Cell::new(None));
        Loader { device, options, make_queue, fallbacks, consent, engine }
    }

    /// The same loader with another engine for its reads.
    pub fn with_queue(
        self,
        make_queue: impl Fn(Option<&StagingPool>, &Fallbacks) -> Box<dyn ReadQueue> + Send + 'static,
    ) -> Loader {
        Loader { make_queue: Box::new(make_queue), ..self }
    }

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
                self.fallbacks.note(gpu_direct::WHAT, why);
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

    /// Carries a plan out.
    ///
    /// # Errors
    /// The first thing that went wrong; everything in flight has been drained and everything allocated released.
    pub fn load(&mut self, prepared: &Prepared) -> Result<Loaded> {
        self.carry_out(prepared, None, None)
    }

    /// Carries a plan out in memory that exists already, where [`Loader::prepare_into`] has put the tensors: the addresses
    /// that others know stay valid. What lies elsewhere in it is left alone. The caller sees to it that nobody uses the
    /// tensors' bytes meanwhile; after an error they hold a mixture of old and new.
    ///
    /// # Errors
    /// As [`Loader::load`]; and when the memory is another device's, too small for the plan, or a tensor's address is misaligned for its type.
    pub fn load_into(&mut self, prepared: &Prepared, arena: Arena) -> Result<Loaded> {
        let (needed, found) = (prepared.plan.arena_bytes, arena.len());
        if found < needed {
            let what = format!("the memory to load into has {found} bytes; the last tensor ends at byte {needed}");
            return Err(Error::Request { what, hint: None });
        }
        if let Some(other) = arena.owner().filter(|device| *device != self.device.name()) {
            let what =
                format!("the memory to load into is that of {other}, and this loader is for {}", self.device.name());
            return Err(Error::Request { what, hint: None });
        }
        let first = arena.address().unwrap_or(0); // the host's memory begins on a page
        for placement in prepared.plan.placements.iter().filter(|placement| placement.bytes > 0) {
            let (address, align) = (first.saturating_add(placement.arena), placement.dtype.alignment());
            if !address.is_multiple_of(align) {
                let name = &placement.name;
                let what = format!("tensor {name:?} cannot lie at the address {address:#x}: {align}-byte elements");
                return Err(Error::Request { what, hint: None });
            }
        }
        self.carry_out(prepared, Some(arena), None)
    }

    /// Carries a plan out on a thread of its own, and hands out each tensor as soon as its bytes are there. Where the
    /// machine gives no thread, the load is over when this returns.
    pub fn start(self, prepared: Prepared) -> Loading {
        let readiness = Arc::new(Readiness::new(&prepared.plan));
        let shared = Arc::clone(&readiness);
        let work = move || {
            let _ending = Ending(&shared);
            let mut loader = self;
            let loaded = loader.carry_out(&prepared, None, Some(&shared))?;
            Ok((loader, loaded))
        };
        Loading::begin(readiness, work)
    }

    fn carry_out(
        &mut self,
        prepared: &Prepared,
        arena: Option<Arena>,
        readiness: Option<&Readiness>,
    ) -> Result<Loaded> {
        let (plan, checkpoint) = (&prepared.plan, &*prepared.checkpoint);
        if let Some(observer) = &self.options.observer {
            observer.planned(plan);
        }
        let tracer = Tracer::new(self.options.observer.clone(), prepared, self.device.limits());
        tracer.prepared(prepared);
        let set_up = Instant::now();
        let cpu_before = os::cpu_seconds().total();
        let mut engine = self.engine(plan)?;
        let setup_seconds = set_up.elapsed().as_secs_f64();
        tracer.step("set_up", Span::since(set_up));
        let allocating = Instant::now();
        let fresh = arena.is_none();
        let arena = arena.map_or_else(|| self.device.alloc(plan.arena_bytes), Ok)?;
        let (regions, written) = self.set_up(checkpoint, plan, arena, &mut engine)?;
        if let Some(readiness) = readiness {
            readiness.begin(written.clone());
        }
        tracer.step("allocate", Span::since(allocating));
        let mut meter = Meter::new(allocating, tracer);
        meter.stages.allocate = StageTime {
            seconds: allocating.elapsed().as_secs_f64(),
            bytes: if self.device.limits().keeps { plan.arena_bytes } else { 0 },
        };
        let files = self.files(checkpoint, plan);
        let ran = Run::new(plan, files, &mut engine, regions, &self.options, &mut meter, readiness).finish();
        let seconds = allocating.elapsed().as_secs_f64();
        let staging = staging_of(engine.pool.as_ref());
        let engine_name = engine.queue.engine();
        if ran.is_ok() {
            self.engine.set(Some(engine)); // an engine that failed is not used again
        }
        let overflows = self.judge_overflows(plan, ran?)?;
        let overflowed = self.options.convert.and_then(|convert| overflow_warning(convert.to, &overflows));
        let tensors = tensors(plan, &written)?;
        let mut report = meter.report(prepared, seconds, staging, self.fallbacks.list());
        report.setup_seconds = setup_seconds;
        report.cpu_seconds = os::cpu_seconds().total() - cpu_before;
        report.device = self.device.name();
        report.product = self.device.product().unwrap_or_default();
        report.engine = engine_name.to_owned();
        report.staging = staging;
        let passed = Passed { keeps: self.device.limits().keeps, fresh };
        limits::judge(&mut report, self.options.limits.as_deref(), prepared, &*self.device, &passed);
        let warnings = checkpoint.warnings().iter().chain(&prepared.warnings).cloned().chain(overflowed).collect();
        Ok(Loaded { tensors, report, warnings, overflows })
    }

    /// Divides the arena as the plan wants it, and tells the stream what is to come.
    fn set_up(
        &self,
        checkpoint: &Checkpoint,
        plan: &LoadPlan,
        arena: Arena,
        engine: &mut Engine,
    ) -> Result<(Vec<Region>, Written)> {
        let ranges: Vec<_> = plan.transfers.iter().flat_map(|transfer| transfer.writes()).collect();
        let carved = arena.carve(&ranges)?;
        if let Some(stream) = &mut engine.stream {
            let scales = scales::read(&**checkpoint.storage(), checkpoint.shards(), plan, &self.fallbacks)?;
            stream.prepare(&needs(plan, staging_of(engine.pool.as_ref()), scales))?;
        }
        Ok(carved)
    }

    fn files<'a>(&'a self, checkpoint: &'a Checkpoint, plan: &LoadPlan) -> Files<'a> {
        let wants = plan.transfers.iter().any(|transfer| transfer.route == Route::GpuDirect);
        let reads = wants.then(|| self.consent.reads(&*self.device, false, &self.fallbacks)).flatten();
        Files::new(checkpoint, plan, GpuDirect::new(reads, &self.fallbacks), &self.fallbacks)
    }

    /// What converting the selection takes: nothing, unless it was asked for.
    fn casts(&self, checkpoint: &Checkpoint, selected: &[Selected]) -> Result<Casts> {
        if let Some(convert) = self.options.convert {
            return checkpoint.casts(selected, convert.to);
        }
        let as_stored = |selected: &Selected| ConvertedTensor { selected: selected.clone(), cast: None, origin: 0 };
        let tensors = selected.iter().map(as_stored).collect();
        Ok(Casts { tensors, scales: Vec::new(), warnings: Vec::new() })
    }

    /// The tensors whose numbers overflowed, where that is allowed; else it is an error.
    fn judge_overflows(&self, plan: &LoadPlan, overflows: BTreeMap<usize, u64>) -> Result<Vec<(String, u64)>> {
        let Some(convert) = self.options.convert else { return Ok(Vec::new()) };
        let named = |(index, count): (usize, u64)| Some((plan.placements.get(index)?.name.to_string(), count));
        let tensors: Vec<(String, u64)> = overflows.into_iter().filter_map(named).collect();
        if tensors.is_empty() || convert.allow_overflow {
            return Ok(tensors);
        }
        let to = convert.to.dtype().to_string();
        let reach = if convert.to == Float::F16 { "65504" } else { "3.4e38" };
        Err(Error::Overflow { to, reach, tensors })
    }

    /// The engine kept from the last load if it fits this plan, else a new one.
    fn engine(&self, plan: &LoadPlan) -> Result<Engine> {
        let staged = plan.buffer_bytes > 0;
        let shape = self.staging_for(plan);
        let holds = |pool: &StagingPool| pool.count() >= shape.count && pool.buffer_bytes() >= shape.bytes;
        let fits = |engine: &Engine| !staged || engine.pool.as_ref().is_some_and(holds);
        if let Some(engine) = self.engine.take().filter(fits) {
            return Ok(engine);
        }
        let pool = staged.then(|| self.device.staging(shape.count, shape.bytes, &self.fallbacks)).transpose()?;
        let queue = (self.make_queue)(pool.as_ref(), &self.fallbacks);
        let stream = staged.then(|| self.device.stream(self.options.lanes, &self.fallbacks)).transpose()?;
        Ok(Engine { pool, queue, stream })
    }

    /// The staging buffers of a load: those that were asked for, or of those that the device likes as many and as large as
    /// the plan has use for.
    fn staging_for(&self, plan: &LoadPlan) -> Staging {
        let liked = self.staging_shape();
        if self.options.staging.is_some() {
            return liked;
        }
        let bytes = usize::try_from(plan.buffer_bytes).map_or(liked.bytes, |bytes| bytes.min(liked.bytes));
        Staging { count: liked.count.min(plan.staged()), bytes }
    }

    /// The staging buffers that were asked for, or those that the device likes.
    fn staging_shape(&self) -> Staging {
        let (count, bytes) = self.device.limits().staging;
        self.options.staging.unwrap_or(Staging { count, bytes })
    }

    /// What the plan must know of each file that a selected tensor lies in; the file system of the first one and its device number.
    fn facts(&self, checkpoint: &Checkpoint, wanted: &[Wanted]) -> Result<(Vec<ShardFacts>, String, String)> {
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
            RouteChoice::GpuDirect => self.note_made(gpu_direct::WHAT, shard),
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

/// What a person should know of tensors whose finite numbers became infinite.
pub(crate) fn overflow_warning(to: Float, overflows: &[(String, u64)]) -> Option<String> {
    let what = || format!("finite numbers became infinite in {}: {}", to.dtype(), Overflowed(overflows));
    (!overflows.is_empty()).then(what)
}

/// A size that reads may be told to have, at most: the kernel makes no longer ones.
const MOST_READ_BYTES: u64 = 1 << 30;

fn staging_of(pool: Option<&StagingPool>) -> Staging {
    pool.map(|pool| Staging { count: pool.count(), bytes: pool.buffer_bytes() }).unwrap_or_default()
}

/// The selected tensors as the plan wants them.
fn wanted(checkpoint: &Checkpoint, casts: &Casts, places: Option<&BTreeMap<Arc<str>, u64>>) -> Result<Vec<Wanted>> {
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

/// What the uploads of a plan ask of a stream.
fn needs(plan: &LoadPlan, staging: Staging, scales: Vec<Table>) -> StreamNeeds {
    let pieces = plan.transfers.iter().flat_map(|transfer| match &transfer.landing {
        plan::Landing::InPlace { .. } => &[][..],
        plan::Landing::Staged { pieces } => pieces,
    });
    let small_pieces = pieces.clone().filter(|placed| placed.piece.is_small()).count() as u64;
    let casts: HashSet<_> = pieces.filter_map(|placed| placed.piece.cast).map(|cast| (cast.from, cast.to)).collect();
    let casts = casts.into_iter().collect();
    StreamNeeds { buffers: staging.count, buffer_bytes: staging.bytes, casts, small_pieces, scales }
}

/// All tensors of a finished plan, under all their names, sorted.
fn tensors(plan: &LoadPlan, written: &Written) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::with_capacity(plan.placements.len());
    for placement in &plan.placements {
        let view = written.view(placement.range()).ok_or(Error::Poisoned { what: "a tensor was not written whole" })?;
        for name in std::iter::once(&placement.name).chain(&placement.aliases) {
            let shape = Arc::clone(&placement.shape);
            tensors.push(Tensor::new(Arc::clone(name), placement.dtype, shape, view.clone()));
        }
    }
    tensors.sort_by(|a, b| a.name().cmp(b.name())); // nearly sorted already: the selection is
    Ok(tensors)
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("device", &self.device.name())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for TransferOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TransferOptions { route, staging, queue, read_bytes, lanes, convert, limits, .. } = self;
        let mut debug = f.debug_struct("TransferOptions");
        debug.field("route", route).field("staging", staging).field("queue", queue).field("read_bytes", read_bytes);
        debug.field("lanes", lanes).field("convert", convert).field("limits", limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Selection;
    use crate::device::CpuDevice;
    use crate::testing::{Synthetic, refused, watched};

    #[test]
    fn a_machine_that_gives_no_thread_loads_before_start_returns() {
        watched(|| {
            if !refused(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN) {
                return;
            }
            let Synthetic { checkpoint, expected, .. } = Synthetic::new(5, 3, 300_000, |_, file| file);
            let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
            let selected = checkpoint.select(&Selection::default()).unwrap();
            let prepared = loader.prepare(checkpoint, &selected).unwrap();
            let loading = loader.start(prepared);
            for (name, bytes) in &expected {
                assert!(loading.wait(name).unwrap().bytes().unwrap() == bytes.as_slice());
            }
            assert_eq!(loading.finish().unwrap().1.tensors().len(), expected.len());
        });
    }
}
