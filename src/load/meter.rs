//! The clock and the counters of a load, and the report that they add up to. It decides nothing.

use std::time::{Duration, Instant};

use super::Prepared;
use super::trace::Tracer;
use crate::os;
use crate::report::{Bound, Report, Routes, Stage, StageTime, Stages, Staging, best_rate};
use crate::source::{Fallback, Route};

/// The lane of reads past the page cache, by its index.
pub(super) const DIRECT: usize = 0;

/// The lane of reads through the page cache, by its index.
pub(super) const CACHED: usize = 1;

/// The lane of reads that the device makes itself, by its index.
pub(super) const GPU_DIRECT: usize = 2;

/// Number of lanes.
pub(super) const LANES: usize = 3;

/// Bytes over which the best rate of a load is looked for, at least.
const RATE_WINDOW_BYTES: u64 = 256 << 20;

/// A share of the time from which on something is at work "most" of it.
const MOSTLY: f64 = 0.75;

/// Counts and times of one load.
pub(super) struct Meter {
    started: Instant,
    pub(super) stages: Stages,
    routes: Routes,
    samples: Vec<(f64, u64)>,
    first_read: Option<f64>,
    last_read: f64,
    first_upload: Option<f64>,
    last_upload: f64,
    uploads: usize,
    uploading_since: f64,
    /// Wall-clock seconds in which each lane had something in flight.
    pub(super) lanes: [f64; LANES],
    /// Who is told what happened when.
    pub(super) tracer: Tracer,
}

impl Meter {
    pub(super) fn new(started: Instant, tracer: Tracer) -> Meter {
        Meter {
            started,
            stages: Stages::default(),
            routes: Routes::default(),
            samples: Vec::new(),
            first_read: None,
            last_read: 0.0,
            first_upload: None,
            last_upload: 0.0,
            uploads: 0,
            uploading_since: 0.0,
            lanes: [0.0; LANES],
            tracer,
        }
    }

    /// Bytes read so far, by route.
    pub(super) fn routes(&self) -> Routes {
        self.routes
    }

    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    pub(super) fn read_began(&mut self) {
        if self.first_read.is_none() {
            let now = self.now();
            self.first_read = Some(now);
            self.samples.push((now, 0));
        }
    }

    pub(super) fn read_ended(&mut self, route: Route, bytes: u64, busy: Duration, staged: bool) {
        self.last_read = self.now();
        self.stages.read.bytes += bytes;
        self.stages.read_busy.bytes += bytes;
        self.stages.read_busy.seconds += busy.as_secs_f64();
        if staged {
            self.stages.stage.bytes += bytes;
            self.stages.stage.seconds += busy.as_secs_f64();
        }
        match route {
            Route::Direct => self.routes.direct += bytes,
            Route::Buffered => self.routes.buffered += bytes,
            Route::Mapped => self.routes.mapped += bytes,
            Route::GpuDirect => self.routes.gpu_direct += bytes,
        }
    }

    pub(super) fn upload_began(&mut self, bytes: u64) {
        let now = self.now();
        self.first_upload.get_or_insert(now);
        self.stages.upload.bytes += bytes;
        if self.uploads == 0 {
            self.uploading_since = now;
        }
        self.uploads += 1;
    }

    /// An upload is over, also one that failed.
    pub(super) fn upload_ended(&mut self) {
        self.last_upload = self.now();
        self.uploads = self.uploads.saturating_sub(1);
        if self.uploads == 0 {
            self.stages.uploading.seconds += self.last_upload - self.uploading_since;
        }
    }

    /// Notes that more bytes are there; returns how many there are now.
    pub(super) fn arrived(&mut self, bytes: u64) -> u64 {
        let done = self.samples.last().map_or(0, |sample| sample.1) + bytes;
        self.samples.push((self.now(), done));
        done
    }

    #[allow(clippy::cast_precision_loss)] // rates have no use for the 54th bit
    pub(super) fn report(mut self, prepared: &Prepared, run_seconds: f64, fallbacks: Vec<Fallback>) -> Report {
        let plan = &prepared.plan;
        let bytes = plan.tensor_bytes();
        let seconds = prepared.open_seconds + prepared.plan_seconds + run_seconds;
        self.stages.open = StageTime { seconds: prepared.open_seconds, bytes: 0 };
        self.stages.plan = StageTime { seconds: prepared.plan_seconds, bytes: 0 };
        self.stages.read.seconds = self.first_read.map_or(0.0, |first| self.last_read - first);
        self.stages.upload.seconds = self.first_upload.map_or(0.0, |first| self.last_upload - first);
        self.stages.reading.seconds = self.lanes.iter().copied().fold(0.0, f64::max);
        let waited = self.stages.wait_read.seconds + self.stages.wait_upload.seconds;
        self.stages.bookkeeping.seconds = (run_seconds - self.stages.allocate.seconds - waited).max(0.0);
        let bound_by = self.bound_by(prepared, seconds);
        let bandwidth = best_rate(&self.samples, RATE_WINDOW_BYTES).unwrap_or_else(|| self.rate_of(bound_by));
        // What arrives is what is in the files, whatever becomes of it where it lands.
        let least = if bandwidth > 0.0 { self.stages.read.bytes as f64 / bandwidth } else { 0.0 };
        Report {
            bytes,
            tensors: plan.tensors(),
            names: plan.names(),
            seconds,
            gb_per_s: bytes as f64 / seconds.max(f64::MIN_POSITIVE) / 1e9,
            estimate: Bound { bandwidth, bound_by, seconds: least },
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
            product: String::new(),
            engine: String::new(),
        }
    }

    /// How fast bytes went through a stage, over all the time that it took; through one without bytes of its own: how fast they
    /// were read. For loads that are too small for a window.
    #[allow(clippy::cast_precision_loss)] // rates have no use for the 54th bit
    fn rate_of(&self, stage: Stage) -> f64 {
        let stages = &self.stages;
        let (bytes, seconds) = match stage {
            Stage::Upload => (stages.upload.bytes, stages.uploading.seconds),
            // Threads that convert at once add up to more than the time in which they do.
            Stage::Kernels => (stages.kernels.bytes, stages.kernels.seconds.min(stages.uploading.seconds)),
            _ => (stages.read.bytes, stages.read.seconds),
        };
        bytes as f64 / seconds.max(f64::MIN_POSITIVE)
    }

    /// Names the stage that took the time.
    fn bound_by(&self, prepared: &Prepared, seconds: f64) -> Stage {
        let stages = &self.stages;
        let set_up = stages.open.seconds + stages.plan.seconds + stages.allocate.seconds;
        if set_up > seconds / 2.0 {
            let parts = [
                (Stage::Headers, stages.open.seconds),
                (Stage::Planning, stages.plan.seconds),
                (Stage::SetUp, stages.allocate.seconds),
            ];
            return parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Stage::SetUp, |part| part.0);
        }
        if stages.bookkeeping.seconds > seconds / 2.0 {
            return Stage::Bookkeeping;
        }
        if self.is_alternating() {
            return Stage::Staging;
        }
        if stages.wait_upload.seconds > stages.wait_read.seconds {
            let converts = stages.kernels.seconds > stages.uploading.seconds * MOSTLY;
            return if converts { Stage::Kernels } else { Stage::Upload };
        }
        let through_cache = self.routes.buffered + self.routes.mapped;
        let was_cold = prepared.cache.resident_before < through_cache / 2;
        let past_cache = self.lanes[DIRECT].max(self.lanes[GPU_DIRECT]);
        if past_cache >= self.lanes[CACHED] || was_cold { Stage::Storage } else { Stage::PageCache }
    }

    /// Whether most bytes went through staging and neither readers nor uploads were at work most of that time.
    fn is_alternating(&self) -> bool {
        let stages = &self.stages;
        let span = self.first_read.map_or(0.0, |first| self.last_upload.max(self.last_read) - first);
        let staged = stages.stage.bytes > stages.read.bytes / 2;
        staged && stages.reading.seconds.max(stages.uploading.seconds) < span * MOSTLY
    }
}
