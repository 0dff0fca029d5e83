//! The [`Loader`]: carries out plans one after the other, and keeps the staging pool, the read queue and the stream for the next.
//!
//! It allocates the arena, divides it as the plan says, runs the loop (`run`) and makes the report. It copies no bytes itself.

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::consent::Consent;
use super::engine::Engine;
use super::files::Files;
use super::limits::{self, Passed};
use super::loaded::{Loaded, overflow_warning, tensors};
use super::meter::Meter;
use super::options::TransferOptions;
use super::prepared::Prepared;
use super::readiness::Readiness;
use super::run::Run;
use super::scales;
use super::tracer::{Span, Tracer};
use crate::checkpoint::Checkpoint;
use crate::convert::{Float, Table};
use crate::device::{Arena, Device, Region, StreamNeeds, Written};
use crate::error::{Error, Result};
use crate::memory::staging::StagingPool;
use crate::os;
use crate::plan::{Landing, LoadPlan};
use crate::report::{StageTime, Staging};
use crate::storage::{Fallbacks, GpuDirect, ReadQueue, Route, queue};

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
    pub(super) device: Arc<dyn Device>,
    pub(super) options: TransferOptions,
    pub(super) make_queue: QueueMaker,
    pub(super) fallbacks: Fallbacks,
    pub(super) consent: Consent,
    pub(super) engine: Cell<Option<Engine>>,
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

    pub(super) fn carry_out(
        &mut self,
        prepared: &Prepared,
        arena: Option<Arena>,
        readiness: Option<&Readiness>,
    ) -> Result<Loaded> {
        let (plan, checkpoint) = (&prepared.plan, &**prepared.checkpoint());
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
    pub(super) fn set_up(
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

    pub(super) fn files<'a>(&'a self, checkpoint: &'a Checkpoint, plan: &LoadPlan) -> Files<'a> {
        let wants = plan.transfers.iter().any(|transfer| transfer.route == Route::GpuDirect);
        let reads = wants.then(|| self.consent.reads(&*self.device, false, &self.fallbacks)).flatten();
        Files::new(checkpoint, plan, GpuDirect::new(reads, &self.fallbacks), &self.fallbacks)
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
    pub(super) fn engine(&self, plan: &LoadPlan) -> Result<Engine> {
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
    pub(super) fn staging_shape(&self) -> Staging {
        let (count, bytes) = self.device.limits().staging;
        self.options.staging.unwrap_or(Staging { count, bytes })
    }
}

fn staging_of(pool: Option<&StagingPool>) -> Staging {
    pool.map(|pool| Staging { count: pool.count(), bytes: pool.buffer_bytes() }).unwrap_or_default()
}

/// What the uploads of a plan ask of a stream.
fn needs(plan: &LoadPlan, staging: Staging, scales: Vec<Table>) -> StreamNeeds {
    let pieces = plan.transfers.iter().flat_map(|transfer| match &transfer.landing {
        Landing::InPlace { .. } => &[][..],
        Landing::Staged { pieces } => pieces,
    });
    let small_pieces = pieces.clone().filter(|placed| placed.piece.is_small()).count() as u64;
    let casts: HashSet<_> = pieces.filter_map(|placed| placed.piece.cast).map(|cast| (cast.from, cast.to)).collect();
    let casts = casts.into_iter().collect();
    StreamNeeds { buffers: staging.count, buffer_bytes: staging.bytes, casts, small_pieces, scales }
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("device", &self.device.name())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
