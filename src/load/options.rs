//! Options of [`load`](super::load) and of a [`Loader`](super::Loader).
//!
//! Plain data and one adapter from a progress function to an [`Observer`]. Nothing here loads.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::control::{Cancel, Observer};
use super::limits::MeasuredLimits;
use super::trace::TraceEvent;
use crate::checkpoint::{OpenOptions, Selection};
use crate::convert::Float;
use crate::device::{CpuDevice, Device};
use crate::plan::{LoadPlan, RouteChoice};
use crate::report::Staging;
use crate::storage::QueueOptions;

/// A function of the bytes done and the total. The working thread calls it, so it must return soon.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// The options of [`load`](super::load). The default loads all tensors to host memory, as they are stored; the program `vramp` loads
/// to the first GPU where there is one. A library that took a GPU unasked would create a CUDA context in every process.
///
/// ```
/// use vramp::Float;
/// use vramp::load::{Cancel, Convert, Options};
///
/// let cancel = Cancel::new(); // keep a clone; `cancel.cancel()` from another thread stops the load
/// let options = Options::default()
///     .convert(Convert::to(Float::BF16))
///     .progress(|done, total| eprintln!("{done} of {total} bytes"))
///     .cancel(cancel.clone());
/// # assert!(options.convert.is_some());
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// Where the tensors go.
    pub device: Arc<dyn Device>,
    /// Which tensors, and which parts of them.
    pub selection: Selection,
    /// How the checkpoint is opened.
    pub open: OpenOptions,
    /// What floating-point tensors become; `None` leaves all as they are stored.
    pub convert: Option<Convert>,
    /// Stops the load from another thread.
    pub cancel: Cancel,
    /// Called with the bytes read so far and the bytes to read.
    pub progress: Option<Progress>,
    /// Observes the plan, each advance and the trace events.
    pub observer: Option<Arc<dyn Observer>>,
    /// Which way the bytes go.
    pub route: RouteChoice,
    /// The staging buffers; `None` leaves number and size to vramp.
    pub staging: Option<Staging>,
    /// What runs the reads.
    pub queue: QueueOptions,
    /// Bytes of a read, at most; see [`TransferOptions::read_bytes`].
    pub read_bytes: Option<u64>,
    /// Uploads that are worked on side by side; see [`TransferOptions::lanes`].
    pub lanes: Option<usize>,
    /// What the report compares the load with; see [`TransferOptions::limits`].
    pub limits: Option<Arc<MeasuredLimits>>,
}

impl Default for Options {
    fn default() -> Options {
        let TransferOptions { route, staging, queue, read_bytes, lanes, convert, cancel, observer, limits } =
            TransferOptions::default();
        Options {
            device: Arc::new(CpuDevice::new()),
            selection: Selection::default(),
            open: OpenOptions::default(),
            convert,
            cancel,
            progress: None,
            observer,
            route,
            staging,
            queue,
            read_bytes,
            lanes,
            limits,
        }
    }
}

setters!(Options {
    /// Sets where the tensors go: [`CpuDevice`], [`NullDevice`](crate::device::NullDevice), `CudaDevice`.
    device: Arc<dyn Device>,
    /// Sets which tensors to load, and which parts of them.
    selection: Selection,
    /// Sets how the checkpoint is opened.
    open: OpenOptions,
    /// Sets what floating-point tensors become.
    convert: into Option<Convert>,
    /// Sets the switch that stops the load from another thread.
    cancel: Cancel,
    /// Sets who observes the plan, each advance and the trace events.
    observer: Some(Arc<dyn Observer>),
    /// Sets how bytes come out of the files.
    route: RouteChoice,
    /// Sets the number and size of the staging buffers.
    staging: into Option<Staging>,
    /// Sets what runs the reads.
    queue: QueueOptions,
    /// Sets the most bytes of a read; see [`TransferOptions::read_bytes`].
    read_bytes: Some(u64),
    /// Sets how many uploads run side by side; see [`TransferOptions::lanes`].
    lanes: Some(usize),
    /// Sets the measured limits that the report compares the load with.
    limits: into Option<Arc<MeasuredLimits>>,
});

impl Options {
    /// Sets the function that gets the bytes read so far and the bytes to read, in this order. The working thread calls it.
    #[must_use]
    pub fn progress(mut self, progress: impl Fn(u64, u64) + Send + Sync + 'static) -> Options {
        self.progress = Some(Arc::new(progress));
        self
    }

    /// Returns the options of a [`Loader`](super::Loader), which takes its device, checkpoint and selection separately.
    pub fn transfer(&self) -> TransferOptions {
        TransferOptions {
            route: self.route,
            staging: self.staging,
            queue: self.queue,
            read_bytes: self.read_bytes,
            lanes: self.lanes,
            convert: self.convert,
            cancel: self.cancel.clone(),
            observer: self.told(),
            limits: self.limits.clone(),
        }
    }

    fn told(&self) -> Option<Arc<dyn Observer>> {
        let Some(progress) = &self.progress else { return self.observer.clone() };
        let (progress, observer) = (Arc::clone(progress), self.observer.clone());
        Some(Arc::new(Told { progress, observer, total: AtomicU64::new(0) }))
    }
}

/// A progress function as an observer, in front of another one if there is one.
struct Told {
    progress: Progress,
    observer: Option<Arc<dyn Observer>>,
    /// Bytes that the plan reads.
    total: AtomicU64,
}

impl Observer for Told {
    fn planned(&self, plan: &LoadPlan) {
        self.total.store(plan.read_bytes(), Ordering::Relaxed);
        if let Some(observer) = &self.observer {
            observer.planned(plan);
        }
    }

    fn advanced(&self, done: u64) {
        (self.progress)(done, self.total.load(Ordering::Relaxed));
        if let Some(observer) = &self.observer {
            observer.advanced(done);
        }
    }

    fn event(&self, event: &TraceEvent) {
        if let Some(observer) = &self.observer {
            observer.event(event);
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Options");
        debug.field("device", &self.device.name()).field("selection", &self.selection).field("open", &self.open);
        debug.field("transfer", &self.transfer()).finish_non_exhaustive()
    }
}

/// Options of a [`Loader`](super::Loader): how bytes are moved and converted. [`Options`] has the same fields for [`load`](super::load).
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
    /// Observes the progress of the load.
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
    /// Whether finite numbers may become infinite; if not, that is [`Error::Overflow`](crate::Error::Overflow).
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

impl fmt::Debug for TransferOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TransferOptions { route, staging, queue, read_bytes, lanes, convert, limits, .. } = self;
        let mut debug = f.debug_struct("TransferOptions");
        debug.field("route", route).field("staging", staging).field("queue", queue).field("read_bytes", read_bytes);
        debug.field("lanes", lanes).field("convert", convert).field("limits", limits).finish_non_exhaustive()
    }
}
