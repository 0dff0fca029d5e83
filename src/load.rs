//! The loop that loads: one thread between two queues.
//!
//! It submits the transfers of a [`LoadPlan`] to a [`ReadQueue`] and gets their targets back filled, hands filled staging
//! buffers to a [`Stream`] and gets them back free. Ownership of the buffers and regions moves in and comes back; that is the
//! whole concurrency model. The loop knows no file system, no format and no device by name, and never copies bytes itself.
//!
//! Invariants, each with a test in `tests/load.rs`:
//! - **L1** each selected byte is written once.
//! - **L2** a buffer has one holder.
//! - **L3** the loop blocks only on something that is running.
//! - **L4** after the first error nothing is submitted, and reads and uploads in flight are drained before it returns.
//! - **L5** host memory is the pool plus a constant, device memory the arena plus a constant, whatever the checkpoint.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;

use crate::checkpoint::{Checkpoint, OpenOptions, Selected, Selection, Shard};
use crate::device::{CpuDevice, Device, InFlight, Piece, Region, Stream, Written};
use crate::error::{Error, Result};
use crate::extent::ShardIndex;
use crate::os;
use crate::plan::{self, Landing, LoadPlan, PlanOptions, RouteChoice, ShardFacts, Wanted};
use crate::report::{Bound, Cache, Report, Routes, Stage, StageTime, Stages, Staging, best_rate};
use crate::source::{
    Completed, Fallbacks, LocalStorage, OpenFile, QueueOptions, Read, ReadQueue, Route, Storage, Target, queue,
};
use crate::staging::StagingPool;
use crate::tensor::Tensor;

/// Bytes over which the best rate of a load is looked for, at least.
const RATE_WINDOW_BYTES: u64 = 64 << 20;

/// Everything that [`load`] may be told. The default loads all tensors to host memory.
#[derive(Clone)]
pub struct Options {
    /// Where the tensors go.
    pub device: Arc<dyn Device>,
    /// Which tensors, and which parts of them.
    pub selection: Selection,
    /// How the checkpoint is opened.
    pub open: OpenOptions,
    /// How the bytes are moved.
    pub transfer: TransferOptions,
}

/// How the bytes of a load are moved.
#[derive(Clone, Default)]
pub struct TransferOptions {
    /// Which way the bytes go.
    pub route: RouteChoice,
    /// The staging buffers; `None` leaves number and size to vramp.
    pub staging: Option<Staging>,
    /// What runs the reads.
    pub queue: QueueOptions,
    /// Stops the load from another thread.
    pub cancel: Cancel,
    /// Is told how far the load is.
    pub observer: Option<Arc<dyn Observer>>,
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
}

/// A finished load.
#[derive(Debug, Clone)]
pub struct Loaded {
    tensors: BTreeMap<Arc<str>, Tensor>,
    /// What the load did and what limited it.
    pub report: Report,
    /// What a person should know about the checkpoint.
    pub warnings: Vec<String>,
}

/// A plan with what was learned while making it.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// The plan.
    pub plan: LoadPlan,
    /// What of the files was in the page cache.
    pub cache: Cache,
    /// The file system of the first file.
    pub file_system: String,
    /// Seconds that opening the checkpoint took; the caller may set it, so that the report counts it.
    pub open_seconds: f64,
    /// Seconds that selecting and planning took.
    pub plan_seconds: f64,
}

/// Loads a checkpoint: the paved road.
///
/// # Errors
/// When the checkpoint is refused, something that was asked for is not there, reading fails, or a file changes meanwhile.
/// Nothing is handed out then.
pub fn load(path: impl AsRef<Path>, options: &Options) -> Result<Loaded> {
    let started = Instant::now();
    let checkpoint = Checkpoint::open_with(path, &options.open)?;
    let open_seconds = started.elapsed().as_secs_f64();
    let mut loader = Loader::new(Arc::clone(&options.device), options.transfer.clone());
    let planning = Instant::now();
    let selected = checkpoint.select(&options.selection)?;
    let prepared = loader.prepare(&checkpoint, &selected)?;
    let plan_seconds = planning.elapsed().as_secs_f64();
    loader.load(&checkpoint, &Prepared { open_seconds, plan_seconds, ..prepared })
}

impl Default for Options {
    fn default() -> Options {
        Options {
            device: Arc::new(CpuDevice::new()),
            selection: Selection::default(),
            open: OpenOptions::default(),
            transfer: TransferOptions::default(),
        }
    }
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
    /// [`Error::NotFound`] when the load did not have it.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| not_loaded(name))
    }

    /// All tensors by name, aliases included.
    pub fn tensors(&self) -> &BTreeMap<Arc<str>, Tensor> {
        &self.tensors
    }
}

fn not_loaded(name: &str) -> Error {
    Error::NotFound { what: format!("tensor {name:?} was not loaded"), hint: None }
}

type QueueMaker = Box<dyn Fn(Option<&StagingPool>, &Fallbacks) -> Box<dyn ReadQueue> + Send>;

/// Loads checkpoints one after the other and keeps the staging pool, the queue and the stream for the next.
pub struct Loader {
    device: Arc<dyn Device>,
    storage: Arc<dyn Storage>,
    options: TransferOptions,
    make_queue: QueueMaker,
    fallbacks: Fallbacks,
    engine: Option<Engine>,
}

/// What a loader keeps warm.
struct Engine {
    pool: Option<StagingPool>,
    queue: Box<dyn ReadQueue>,
    stream: Option<Box<dyn Stream>>,
}

impl Loader {
    /// A loader of local files.
    pub fn new(device: Arc<dyn Device>, options: TransferOptions) -> Loader {
        let queue_options = options.queue;
        let make_queue: QueueMaker = Box::new(move |pool, fallbacks| queue(&queue_options, pool, fallbacks));
        let storage = Arc::new(LocalStorage);
        Loader { device, storage, options, make_queue, fallbacks: Fallbacks::default(), engine: None }
    }

    /// The same loader over another storage.
    pub fn with_storage(self, storage: Arc<dyn Storage>) -> Loader {
        Loader { storage, ..self }
    }

    /// The same loader with another engine for its reads.
    pub fn with_queue(
        self,
        make_queue: impl Fn(Option<&StagingPool>, &Fallbacks) -> Box<dyn ReadQueue> + Send + 'static,
    ) -> Loader {
        Loader { make_queue: Box::new(make_queue), ..self }
    }

    /// Asks the files and the page cache, and plans the load of `selected`.
    ///
    /// # Errors
    /// When a tensor cannot be loaded (unknown element type), a file is gone, or the plan does not fit the options.
    pub fn prepare(&self, checkpoint: &Checkpoint, selected: &[Selected]) -> Result<Prepared> {
        let started = Instant::now();
        let wanted = wanted(checkpoint, selected)?;
        let (facts, file_system) = self.facts(checkpoint.shards(), &wanted)?;
        let resident_before = facts.iter().map(|facts| facts.residency.resident_bytes()).sum();
        let file_bytes = facts.iter().map(|facts| facts.bytes).sum();
        let buffer_bytes = self.staging_shape().bytes as u64;
        let options = PlanOptions { route: self.options.route, buffer_bytes };
        let plan = plan::plan(&wanted, &facts, self.device.limits(), options)?;
        let cache = Cache { resident_before, file_bytes };
        let plan_seconds = started.elapsed().as_secs_f64();
        Ok(Prepared { plan, cache, file_system, open_seconds: 0.0, plan_seconds })
    }

    /// Carries a plan out.
    ///
    /// # Errors
    /// The first thing that went wrong; everything in flight has been drained and everything allocated released.
    pub fn load(&mut self, checkpoint: &Checkpoint, prepared: &Prepared) -> Result<Loaded> {
        self.carry_out(checkpoint, prepared, None)
    }

    /// Carries a plan out on a thread of its own, and hands out each tensor as soon as its bytes are there. Where the
    /// machine gives no thread, the load is over when this returns.
    pub fn start(self, checkpoint: Checkpoint, prepared: Prepared) -> Loading {
        let readiness = Arc::new(Readiness::new(&prepared.plan));
        let shared = Arc::clone(&readiness);
        let work = move || {
            let _ending = Ending(&shared);
            let mut loader = self;
            let loaded = loader.carry_out(&checkpoint, &prepared, Some(&shared))?;
            Ok((loader, loaded))
        };
        Loading { readiness, course: Some(Course::begin(work)) }
    }

    fn carry_out(
        &mut self,
        checkpoint: &Checkpoint,
        prepared: &Prepared,
        readiness: Option<&Readiness>,
    ) -> Result<Loaded> {
        let plan = &prepared.plan;
        if let Some(observer) = &self.options.observer {
            observer.planned(plan);
        }
        let set_up = Instant::now();
        let cpu_before = os::cpu_seconds().total();
        let mut engine = self.engine(plan)?;
        let setup_seconds = set_up.elapsed().as_secs_f64();
        let allocating = Instant::now();
        let ranges: Vec<_> = plan.transfers.iter().flat_map(|transfer| transfer.writes()).collect();
        let (regions, written) = self.device.alloc(plan.arena_bytes)?.carve(&ranges)?;
        if let Some(readiness) = readiness {
            readiness.begin(written.clone());
        }
        let mut meter = Meter::new(allocating);
        meter.stages.allocate = StageTime {
            seconds: allocating.elapsed().as_secs_f64(),
            bytes: if self.device.limits().keeps { plan.arena_bytes } else { 0 },
        };
        let files = Files::new(&*self.storage, checkpoint.shards(), plan, &self.fallbacks);
        let ran = Run::new(plan, files, &mut engine, regions, &self.options, &mut meter, readiness).finish();
        let seconds = allocating.elapsed().as_secs_f64();
        let staging = staging_of(&engine);
        let engine_name = engine.queue.engine();
        if ran.is_ok() {
            self.engine = Some(engine); // an engine that failed is not used again
        }
        ran?;
        let tensors = tensors(plan, &written)?;
        let mut report = meter.report(prepared, seconds, self.fallbacks.list());
        report.setup_seconds = setup_seconds;
        report.cpu_seconds = os::cpu_seconds().total() - cpu_before;
        report.device = self.device.name();
        report.engine = engine_name.to_owned();
        report.staging = staging;
        Ok(Loaded { tensors, report, warnings: checkpoint.warnings().to_vec() })
    }

    /// The engine kept from the last load if it fits this plan, else a new one.
    fn engine(&mut self, plan: &LoadPlan) -> Result<Engine> {
        let staged = plan.buffer_bytes > 0;
        let fits = |engine: &Engine| !staged || engine.pool.is_some();
        if let Some(engine) = self.engine.take().filter(fits) {
            return Ok(engine);
        }
        let shape = self.staging_shape();
        let pool = staged.then(|| self.device.staging(shape.count, shape.bytes)).transpose()?;
        let queue = (self.make_queue)(pool.as_ref(), &self.fallbacks);
        let stream = staged.then(|| self.device.stream()).transpose()?;
        Ok(Engine { pool, queue, stream })
    }

    /// The staging buffers that were asked for, or those that the device likes.
    fn staging_shape(&self) -> Staging {
        let (count, bytes) = self.device.limits().staging;
        self.options.staging.unwrap_or(Staging { count, bytes })
    }

    /// What the plan must know of each file that a selected tensor lies in.
    fn facts(&self, shards: &[Shard], wanted: &[Wanted]) -> Result<(Vec<ShardFacts>, String)> {
        let mut used = vec![false; shards.len()];
        for run in wanted.iter().flat_map(|tensor| &tensor.runs) {
            if let Some(used) = used.get_mut(run.shard as usize) {
                *used = true;
            }
        }
        let mut file_system = String::new();
        let mut facts = Vec::with_capacity(shards.len());
        for (shard, used) in shards.iter().zip(used) {
            if !used {
                facts.push(ShardFacts::untouched(shard.bytes));
                continue;
            }
            let file = open_same(&*self.storage, shard, &self.fallbacks)?;
            if file_system.is_empty() {
                file_system.clone_from(&file.file_system().name);
            }
            facts.push(self.facts_of(&*file));
        }
        Ok((facts, file_system))
    }

    fn facts_of(&self, file: &dyn OpenFile) -> ShardFacts {
        let system = file.file_system();
        let may_be_direct = !system.network && !system.memory;
        let wants_direct = !matches!(self.options.route, RouteChoice::Buffered | RouteChoice::Mapped);
        let direct = (may_be_direct && wants_direct).then(|| file.source(Route::Direct));
        ShardFacts {
            bytes: file.identity().len,
            residency: file.residency(),
            direct: direct.filter(|source| source.route() == Route::Direct).map(|source| source.limits()),
            cached: file.source(Route::Buffered).limits(),
            mappable: !system.network,
        }
    }
}

fn staging_of(engine: &Engine) -> Staging {
    let shape = |pool: &StagingPool| Staging { count: pool.count(), bytes: pool.buffer_bytes() };
    engine.pool.as_ref().map(shape).unwrap_or_default()
}

/// Opens a shard and demands that it is the file whose header was read.
fn open_same(storage: &dyn Storage, shard: &Shard, fallbacks: &Fallbacks) -> Result<Arc<dyn OpenFile>> {
    let file = storage.open(&shard.path, fallbacks)?;
    let (then, now) = (shard.identity, file.identity());
    if then == now {
        return Ok(file);
    }
    let what = if then.len != now.len {
        format!("{} bytes when its header was read, {} bytes now", then.len, now.len)
    } else if (then.device, then.inode) != (now.device, now.inode) {
        format!("replaced by another file: inode {} when its header was read, {} now", then.inode, now.inode)
    } else {
        "written to after its header was read".to_owned()
    };
    Err(Error::Changed { path: shard.path.clone(), what })
}

/// The selected tensors as the plan wants them.
fn wanted(checkpoint: &Checkpoint, selected: &[Selected]) -> Result<Vec<Wanted>> {
    checkpoint.require_known_dtypes(selected)?;
    let wanted = |chosen: &Selected| {
        let info = checkpoint.tensors().get(chosen.tensor);
        let info = info.ok_or(Error::Poisoned { what: "a selection of another checkpoint" })?;
        let runs = info.runs(chosen.slice.as_ref());
        Ok(Wanted {
            name: Arc::clone(&chosen.name),
            aliases: chosen.aliases.clone(),
            dtype: info.dtype.clone(),
            shape: Arc::clone(&chosen.shape),
            bytes: runs.iter().map(|run| run.run * run.count).sum(),
            runs,
        })
    };
    selected.iter().map(wanted).collect()
}

/// All tensors of a finished plan, under all their names.
fn tensors(plan: &LoadPlan, written: &Written) -> Result<BTreeMap<Arc<str>, Tensor>> {
    let mut tensors = Vec::with_capacity(plan.placements.len());
    for placement in &plan.placements {
        let view = written.view(placement.range()).ok_or(Error::Poisoned { what: "a tensor was not written whole" })?;
        for name in std::iter::once(&placement.name).chain(&placement.aliases) {
            let tensor =
                Tensor::new(Arc::clone(name), placement.dtype.clone(), Arc::clone(&placement.shape), view.clone());
            tensors.push((Arc::clone(name), tensor));
        }
    }
    Ok(tensors.into_iter().collect()) // sorted already: built in one go
}

/// A load under way. Dropping it cancels the load and waits for it to end.
pub struct Loading {
    readiness: Arc<Readiness>,
    course: Option<Course>,
}

type Outcome = Result<(Loader, Loaded)>;

/// Where a load that was started is.
enum Course {
    Running(JoinHandle<Outcome>),
    Over(Box<Outcome>),
}

impl Course {
    /// Does the work on a thread of its own, or here if there is none to be had.
    fn begin<W: FnOnce() -> Outcome + Send + 'static>(work: W) -> Course {
        // By a channel, so that the work is still here when the thread does not start.
        let (hand_over, taken) = bounded::<W>(1);
        let run = move || taken.recv().map_or(Err(Error::Poisoned { what: "a load without work" }), |work| work());
        match std::thread::Builder::new().name("vramp-load".to_owned()).spawn(run) {
            Ok(thread) => {
                let _ = hand_over.send(work); // the thread waits for it
                Course::Running(thread)
            }
            Err(_) => Course::Over(Box::new(work())),
        }
    }
}

/// Which tensors are there, for threads that wait for them.
struct Readiness {
    names: BTreeMap<Arc<str>, usize>,
    placements: Vec<plan::Placement>,
    written: OnceLock<Written>,
    ended: Mutex<bool>,
    changed: Condvar,
    /// Stops this load alone: the switch in the options may be another load's too.
    abandoned: Cancel,
}

/// Tells those who wait that the load has ended, by whatever way it ends.
struct Ending<'a>(&'a Readiness);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Loading {
    /// Waits until the bytes of one tensor are there. The rest of the load goes on.
    ///
    /// The tensor is provisional until [`Loading::finish`] succeeds: a file that changed is found out at the end of its shard.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a name that is not loaded, [`Error::Cancelled`] when the load ended without it.
    pub fn wait(&self, name: &str) -> Result<Tensor> {
        let readiness = &self.readiness;
        let mut ended = readiness.ended.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(tensor) = readiness.tensor(name)? {
                return Ok(tensor);
            }
            if *ended {
                return Err(Error::Cancelled);
            }
            ended = readiness.changed.wait(ended).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The tensor, if its bytes are there already.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a name that is not loaded.
    pub fn ready(&self, name: &str) -> Result<Option<Tensor>> {
        self.readiness.tensor(name)
    }

    /// Waits for the whole load; gives the loader back for the next one.
    ///
    /// # Errors
    /// Whatever ended the load.
    pub fn finish(mut self) -> Result<(Loader, Loaded)> {
        match self.course.take().ok_or(Error::Poisoned { what: "a load was finished twice" })? {
            Course::Running(thread) => thread.join().unwrap_or(Err(Error::Poisoned { what: "the loading thread" })),
            Course::Over(outcome) => *outcome,
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(Course::Running(thread)) = self.course.take() {
            self.readiness.abandoned.cancel();
            let _ = thread.join();
        }
    }
}

impl Readiness {
    fn new(plan: &LoadPlan) -> Readiness {
        let names = plan.placements.iter().enumerate().flat_map(|(index, placement)| {
            std::iter::once(&placement.name).chain(&placement.aliases).map(move |name| (Arc::clone(name), index))
        });
        Readiness {
            names: names.collect(),
            placements: plan.placements.clone(),
            written: OnceLock::new(),
            ended: Mutex::new(false),
            changed: Condvar::new(),
            abandoned: Cancel::new(),
        }
    }

    fn begin(&self, written: Written) {
        let _ = self.written.set(written);
    }

    fn notify(&self) {
        // The lock makes sure that a waiter that has just found nothing is already waiting.
        drop(self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let (name, &index) = self.names.get_key_value(name).ok_or_else(|| not_loaded(name))?;
        let placement = self.placements.get(index).ok_or(Error::Poisoned { what: "the index of names" })?;
        let view = self.written.get().and_then(|written| written.view(placement.range()));
        let shape = || Arc::clone(&placement.shape);
        Ok(view.map(|view| Tensor::new(Arc::clone(name), placement.dtype.clone(), shape(), view)))
    }
}

/// The shards that are open now: each from its first transfer to its last, and not too many at once.
struct Files<'a> {
    storage: &'a dyn Storage,
    shards: &'a [Shard],
    fallbacks: &'a Fallbacks,
    open: BTreeMap<ShardIndex, Arc<dyn OpenFile>>,
    remaining: Vec<usize>,
    most_open: usize,
}

impl<'a> Files<'a> {
    fn new(storage: &'a dyn Storage, shards: &'a [Shard], plan: &LoadPlan, fallbacks: &'a Fallbacks) -> Files<'a> {
        let mut remaining = vec![0; shards.len()];
        for transfer in &plan.transfers {
            if let Some(count) = remaining.get_mut(transfer.shard as usize) {
                *count += 1;
            }
        }
        // A shard takes up to two descriptors; the rest of the process needs some too.
        let most_open = usize::try_from(os::open_files_limit().unwrap_or(256) / 4).unwrap_or(usize::MAX).clamp(1, 64);
        Files { storage, shards, fallbacks, open: BTreeMap::new(), remaining, most_open }
    }

    /// The open shard; `None` if opening one more would be too many (`force`: never too many).
    fn open(&mut self, index: ShardIndex, force: bool) -> Result<Option<Arc<dyn OpenFile>>> {
        if let Some(file) = self.open.get(&index) {
            return Ok(Some(Arc::clone(file)));
        }
        if self.open.len() >= self.most_open && !force {
            return Ok(None);
        }
        let shard = self.shards.get(index as usize).ok_or(Error::Poisoned { what: "a plan of another checkpoint" })?;
        let file = open_same(self.storage, shard, self.fallbacks)?;
        self.open.insert(index, Arc::clone(&file));
        Ok(Some(file))
    }

    /// One transfer of the shard is over. After the last one the file must still be what it was, and is closed.
    fn transfer_done(&mut self, index: ShardIndex) -> Result<()> {
        let Some(remaining) = self.remaining.get_mut(index as usize) else { return Ok(()) };
        *remaining = remaining.saturating_sub(1);
        if *remaining > 0 {
            return Ok(());
        }
        self.open.remove(&index).map_or(Ok(()), |file| file.check_unchanged())
    }
}

/// Transfers of one kind of route, in order; the two kinds run side by side.
#[derive(Default)]
struct Lane {
    pending: VecDeque<usize>,
    in_flight: usize,
    active_since: Option<Instant>,
    active: Duration,
}

const DIRECT: usize = 0;
const CACHED: usize = 1;

fn lane_of(route: Route) -> usize {
    if route == Route::Direct { DIRECT } else { CACHED }
}

/// One load in progress.
struct Run<'a> {
    plan: &'a LoadPlan,
    files: Files<'a>,
    queue: &'a mut dyn ReadQueue,
    pool: Option<&'a StagingPool>,
    stream: Option<&'a mut Box<dyn Stream>>,
    /// The regions of all transfers in the plan's order; those of transfer `i` start at `first_region[i]`.
    regions: Vec<Option<Region>>,
    first_region: Vec<usize>,
    lanes: [Lane; 2],
    lane_depth: usize,
    uploads: VecDeque<InFlight>,
    error: Option<Error>,
    options: &'a TransferOptions,
    meter: &'a mut Meter,
    readiness: Option<&'a Readiness>,
}

impl<'a> Run<'a> {
    fn new(
        plan: &'a LoadPlan,
        files: Files<'a>,
        engine: &'a mut Engine,
        regions: Vec<Region>,
        options: &'a TransferOptions,
        meter: &'a mut Meter,
        readiness: Option<&'a Readiness>,
    ) -> Run<'a> {
        let mut lanes: [Lane; 2] = Default::default();
        let mut first_region = Vec::with_capacity(plan.transfers.len());
        let mut next = 0;
        for (index, transfer) in plan.transfers.iter().enumerate() {
            lanes[lane_of(transfer.route)].pending.push_back(index);
            first_region.push(next);
            next += match &transfer.landing {
                Landing::InPlace { .. } => 1,
                Landing::Staged { pieces } => pieces.len(),
            };
        }
        let lane_depth = engine.queue.depth().max(1);
        Run {
            plan,
            files,
            queue: &mut *engine.queue,
            pool: engine.pool.as_ref(),
            stream: engine.stream.as_mut(),
            regions: regions.into_iter().map(Some).collect(),
            first_region,
            lanes,
            lane_depth,
            uploads: VecDeque::new(),
            error: None,
            options,
            meter,
            readiness,
        }
    }

    /// Runs until everything is written, or until the first error and everything in flight has come back.
    fn finish(mut self) -> Result<()> {
        loop {
            self.reap_uploads();
            if self.error.is_none() && self.is_cancelled() {
                self.error = Some(Error::Cancelled);
            }
            self.submit_all();
            if self.reading() > 0 {
                self.await_read();
            } else if let Some(upload) = self.uploads.pop_front() {
                self.await_upload(upload);
            } else if self.error.is_some() || self.lanes.iter().all(|lane| lane.pending.is_empty()) {
                break;
            } else if !self.submit_one_at_any_cost() {
                self.fail(Error::Poisoned { what: "the loop has work left and nothing in flight" });
            }
        }
        self.meter.lanes = self.lanes.each_ref().map(|lane| lane.active.as_secs_f64());
        self.error.map_or(Ok(()), Err)
    }

    fn is_cancelled(&self) -> bool {
        let abandoned = |readiness: &Readiness| readiness.abandoned.is_cancelled();
        self.options.cancel.is_cancelled() || self.readiness.is_some_and(abandoned)
    }

    fn reading(&self) -> usize {
        self.lanes.iter().map(|lane| lane.in_flight).sum()
    }

    /// Keeps the first error; from then on nothing is submitted.
    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }

    fn submit_all(&mut self) {
        for lane in [DIRECT, CACHED] {
            while self.error.is_none() && self.lanes[lane].in_flight < self.lane_depth && self.submit_next(lane, false)
            {
            }
        }
    }

    /// With nothing in flight, the limit on open shards must not stop the load.
    fn submit_one_at_any_cost(&mut self) -> bool {
        [DIRECT, CACHED].into_iter().any(|lane| self.submit_next(lane, true))
    }

    /// Submits the next transfer of a lane, if there is one and what it needs is free.
    fn submit_next(&mut self, lane: usize, force: bool) -> bool {
        let Some(&index) = self.lanes[lane].pending.front() else { return false };
        let transfer = &self.plan.transfers[index];
        let file = match self.files.open(transfer.shard, force) {
            Ok(Some(file)) => file,
            Ok(None) => return false,
            Err(error) => {
                self.fail(error);
                return false;
            }
        };
        let Some(target) = self.target(index) else { return false };
        let Ok(len) = usize::try_from(transfer.len) else { return false };
        self.lanes[lane].pending.pop_front();
        self.lanes[lane].began();
        let source = file.source(transfer.route);
        self.meter.read_began();
        self.queue.submit(Read { id: index, source, offset: transfer.offset, len }, target);
        true
    }

    /// The place for the bytes of a transfer; `None` while every staging buffer is in use.
    fn target(&mut self, index: usize) -> Option<Target> {
        match self.plan.transfers[index].landing {
            Landing::InPlace { .. } => {
                self.regions.get_mut(self.first_region[index]).and_then(Option::take).map(Target::InPlace)
            }
            Landing::Staged { .. } => self.pool.and_then(StagingPool::acquire).map(Target::Staging),
        }
    }

    fn await_read(&mut self) {
        let waiting = Instant::now();
        let completed = self.queue.complete();
        self.meter.stages.wait_read.seconds += waiting.elapsed().as_secs_f64();
        match completed {
            Some(completed) => self.read_done(completed),
            None => {
                // The queue lost reads: nothing will bring them back.
                self.lanes.iter_mut().for_each(|lane| lane.in_flight = 0);
                self.fail(Error::Poisoned { what: "the read queue lost a read" });
            }
        }
    }

    fn read_done(&mut self, completed: Completed) {
        let Completed { id, target, outcome, busy } = completed;
        let Some(transfer) = self.plan.transfers.get(id) else {
            return self.fail(Error::Poisoned { what: "the read queue answered what was not asked" });
        };
        self.lanes[lane_of(transfer.route)].ended();
        let route = match outcome {
            Ok(route) => route,
            Err(error) => return self.fail(error),
        };
        self.meter.read_ended(route, transfer.len, busy);
        if let Err(error) = self.files.transfer_done(transfer.shard) {
            self.fail(error);
        }
        if self.error.is_some() {
            return;
        }
        match target {
            Target::InPlace(region) => {
                region.finish();
                self.arrived(transfer.len);
            }
            Target::Staging(buffer) => self.upload(id, buffer),
        }
    }

    fn upload(&mut self, index: usize, buffer: crate::staging::StagingBuffer) {
        let Landing::Staged { pieces } = &self.plan.transfers[index].landing else { return };
        let first = self.first_region[index];
        let regions = self.regions[first..first + pieces.len()].iter_mut().map(Option::take);
        let pieces: Option<Vec<(Piece, Region)>> =
            pieces.iter().zip(regions).map(|(placed, region)| region.map(|region| (placed.piece, region))).collect();
        let (Some(pieces), Some(stream)) = (pieces, self.stream.as_mut()) else {
            return self.fail(Error::Poisoned { what: "a staged read without a stream or without its regions" });
        };
        self.meter.upload_began(self.plan.transfers[index].len);
        match stream.upload(buffer, pieces) {
            Ok(upload) => self.uploads.push_back(upload),
            Err(error) => self.fail(error),
        }
        self.arrived(self.plan.transfers[index].len);
    }

    /// Takes back what is already over, in order, without waiting.
    fn reap_uploads(&mut self) {
        while self.uploads.front_mut().is_some_and(|upload| upload.is_done()) {
            if let Some(upload) = self.uploads.pop_front() {
                self.upload_done(upload);
            }
        }
    }

    fn await_upload(&mut self, upload: InFlight) {
        let waiting = Instant::now();
        self.upload_done(upload);
        self.meter.stages.wait_upload.seconds += waiting.elapsed().as_secs_f64();
    }

    fn upload_done(&mut self, upload: InFlight) {
        match upload.finish() {
            Ok((_buffer, regions)) if self.error.is_none() => regions.into_iter().for_each(Region::finish),
            Ok(_) => {}
            Err(error) => self.fail(error),
        }
        self.meter.upload_ended();
        if let Some(readiness) = self.readiness {
            readiness.notify();
        }
    }

    fn arrived(&mut self, bytes: u64) {
        let done = self.meter.arrived(bytes);
        if let Some(observer) = &self.options.observer {
            observer.advanced(done);
        }
        if let Some(readiness) = self.readiness {
            readiness.notify();
        }
    }
}

impl Lane {
    fn began(&mut self) {
        if self.in_flight == 0 {
            self.active_since = Some(Instant::now());
        }
        self.in_flight += 1;
    }

    fn ended(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0
            && let Some(since) = self.active_since.take()
        {
            self.active += since.elapsed();
        }
    }
}

/// Counts and times of one load.
struct Meter {
    started: Instant,
    stages: Stages,
    routes: Routes,
    samples: Vec<(f64, u64)>,
    first_read: Option<f64>,
    last_read: f64,
    first_upload: Option<f64>,
    last_upload: f64,
    /// Wall-clock seconds in which each lane had something in flight.
    lanes: [f64; 2],
}

impl Meter {
    fn new(started: Instant) -> Meter {
        Meter {
            started,
            stages: Stages::default(),
            routes: Routes::default(),
            samples: Vec::new(),
            first_read: None,
            last_read: 0.0,
            first_upload: None,
            last_upload: 0.0,
            lanes: [0.0; 2],
        }
    }

    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn read_began(&mut self) {
        if self.first_read.is_none() {
            let now = self.now();
            self.first_read = Some(now);
            self.samples.push((now, 0));
        }
    }

    fn read_ended(&mut self, route: Route, bytes: u64, busy: Duration) {
        self.last_read = self.now();
        self.stages.read.bytes += bytes;
        self.stages.read_busy.bytes += bytes;
        self.stages.read_busy.seconds += busy.as_secs_f64();
        match route {
            Route::Direct => self.routes.direct += bytes,
            Route::Buffered => self.routes.buffered += bytes,
            Route::Mapped => self.routes.mapped += bytes,
        }
    }

    fn upload_began(&mut self, bytes: u64) {
        let now = self.now();
        self.first_upload.get_or_insert(now);
        self.stages.upload.bytes += bytes;
    }

    fn upload_ended(&mut self) {
        self.last_upload = self.now();
    }

    /// Notes that more bytes are there; returns how many there are now.
    fn arrived(&mut self, bytes: u64) -> u64 {
        let done = self.samples.last().map_or(0, |sample| sample.1) + bytes;
        self.samples.push((self.now(), done));
        done
    }

    #[allow(clippy::cast_precision_loss)] // rates have no use for the 54th bit
    fn report(mut self, prepared: &Prepared, run_seconds: f64, fallbacks: Vec<crate::source::Fallback>) -> Report {
        let plan = &prepared.plan;
        let bytes = plan.tensor_bytes();
        let seconds = prepared.open_seconds + prepared.plan_seconds + run_seconds;
        self.stages.open = StageTime { seconds: prepared.open_seconds, bytes: 0 };
        self.stages.plan = StageTime { seconds: prepared.plan_seconds, bytes: 0 };
        self.stages.read.seconds = self.first_read.map_or(0.0, |first| self.last_read - first);
        self.stages.upload.seconds = self.first_upload.map_or(0.0, |first| self.last_upload - first);
        let waited = self.stages.wait_read.seconds + self.stages.wait_upload.seconds;
        self.stages.bookkeeping.seconds = (run_seconds - self.stages.allocate.seconds - waited).max(0.0);
        let read_seconds = self.stages.read.seconds.max(f64::MIN_POSITIVE);
        let bandwidth =
            best_rate(&self.samples, RATE_WINDOW_BYTES).unwrap_or(self.stages.read.bytes as f64 / read_seconds);
        let least = if bandwidth > 0.0 { bytes as f64 / bandwidth } else { 0.0 };
        Report {
            bytes,
            tensors: plan.placements.len(),
            seconds,
            gb_per_s: bytes as f64 / seconds.max(f64::MIN_POSITIVE) / 1e9,
            estimate: Bound { bandwidth, bound_by: self.bound_by(prepared, seconds), seconds: least },
            efficiency: (least / seconds.max(f64::MIN_POSITIVE)).min(1.0),
            stages: self.stages,
            routes: self.routes,
            cache: prepared.cache,
            staging: Staging::default(),
            peak_host_bytes: os::peak_resident_bytes().unwrap_or(0),
            cpu_seconds: 0.0,
            setup_seconds: 0.0,
            fallbacks,
            file_system: prepared.file_system.clone(),
            kernel: os::kernel_release().unwrap_or_default(),
            device: String::new(),
            engine: String::new(),
        }
    }

    /// Names the stage that took the time.
    fn bound_by(&self, prepared: &Prepared, seconds: f64) -> Stage {
        let stages = &self.stages;
        let set_up = stages.open.seconds + stages.plan.seconds + stages.allocate.seconds;
        if set_up > seconds / 2.0 {
            return Stage::SetUp;
        }
        if stages.bookkeeping.seconds > seconds / 2.0 {
            return Stage::Bookkeeping;
        }
        if stages.wait_upload.seconds > stages.wait_read.seconds {
            return Stage::Upload;
        }
        let through_cache = self.routes.buffered + self.routes.mapped;
        let was_cold = prepared.cache.resident_before < through_cache / 2;
        if self.lanes[DIRECT] >= self.lanes[CACHED] || was_cold { Stage::Storage } else { Stage::PageCache }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Synthetic, watched};

    #[test]
    fn a_machine_that_gives_no_thread_loads_before_start_returns() {
        watched(|| {
            if !os::refuse(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN) {
                return; // a kernel without seccomp
            }
            let Synthetic { checkpoint, storage, expected } = Synthetic::new(5, 3, 300_000, |_, file| file);
            let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
            let loader = loader.with_storage(Arc::new(storage));
            let selected = checkpoint.select(&Selection::default()).unwrap();
            let prepared = loader.prepare(&checkpoint, &selected).unwrap();
            let loading = loader.start(checkpoint, prepared);
            for (name, bytes) in &expected {
                assert!(loading.wait(name).unwrap().bytes().unwrap() == bytes.as_slice());
            }
            assert_eq!(loading.finish().unwrap().1.tensors().len(), expected.len());
        });
    }
}
