//! The clock and the counters of a load, and the report that they add up to. It decides nothing.

use std::time::{Duration, Instant};

use super::prepared::Prepared;
use super::tracer::Tracer;
use crate::os;
use crate::report::{MainStage, Report, Routes, Stage, StageTime, Stages, Staging};
use crate::storage::{Fallback, Lane, Route};

/// A share of the time from which on something is at work "most" of it.
const MOSTLY: f64 = 0.75;

/// Counts and times of one load.
pub(super) struct Meter {
    started: Instant,
    pub(super) stages: Stages,
    routes: Routes,
    arrived: u64,
    first_read: Option<f64>,
    last_read: f64,
    first_upload: Option<f64>,
    last_upload: f64,
    uploads: usize,
    uploading_since: f64,
    /// Wall-clock seconds in which each lane had something in flight.
    pub(super) lanes: [f64; Lane::COUNT],
    /// The sender of trace events.
    pub(super) tracer: Tracer,
}

impl Meter {
    pub(super) fn new(started: Instant, tracer: Tracer) -> Meter {
        Meter {
            started,
            stages: Stages::default(),
            routes: Routes::default(),
            arrived: 0,
            first_read: None,
            last_read: 0.0,
            first_upload: None,
            last_upload: 0.0,
            uploads: 0,
            uploading_since: 0.0,
            lanes: [0.0; Lane::COUNT],
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
            self.first_read = Some(self.now());
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
        if !self.tracer.moves() {
            return; // the null device drops the bytes
        }
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
        if !self.tracer.moves() {
            return;
        }
        self.last_upload = self.now();
        self.uploads = self.uploads.saturating_sub(1);
        if self.uploads == 0 {
            self.stages.uploading.seconds += self.last_upload - self.uploading_since;
        }
    }

    /// Notes that more bytes are there; returns how many there are now.
    pub(super) fn arrived(&mut self, bytes: u64) -> u64 {
        self.arrived += bytes;
        self.arrived
    }

    #[allow(clippy::cast_precision_loss)] // rates have no use for the 54th bit
    pub(super) fn report(
        mut self,
        prepared: &Prepared,
        run_seconds: f64,
        staging: Staging,
        fallbacks: Vec<Fallback>,
    ) -> Report {
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
        let main_stage = self.main_stage(staging);
        Report {
            bytes,
            tensors: plan.tensors(),
            names: plan.names(),
            seconds,
            gb_per_s: bytes as f64 / seconds.max(f64::MIN_POSITIVE) / 1e9,
            main_stage,
            estimate: None,
            efficiency: None,
            no_estimate: None,
            stages: self.stages,
            routes: self.routes,
            cache: prepared.cache,
            staging,
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

    /// The stage that took most of the time, for how long, and at which rate.
    #[allow(clippy::cast_precision_loss)] // rates have no use for the 54th bit
    fn main_stage(&self, staging: Staging) -> MainStage {
        let stages = &self.stages;
        let stage = self.busiest(staging);
        let (seconds, bytes) = match stage {
            Stage::Upload => (stages.uploading.seconds, stages.upload.bytes),
            // Threads that convert at once add up to more than the time in which they do.
            Stage::Kernels => (stages.kernels.seconds.min(stages.uploading.seconds), stages.kernels.bytes),
            Stage::Headers => (stages.open.seconds, 0),
            Stage::Planning => (stages.plan.seconds, 0),
            Stage::SetUp => (stages.allocate.seconds, 0),
            Stage::Bookkeeping => (stages.bookkeeping.seconds, 0),
            Stage::Staging => (self.span(), stages.stage.bytes),
            _ => (stages.reading.seconds, stages.read.bytes),
        };
        let rate = bytes as f64 / seconds.max(f64::MIN_POSITIVE);
        MainStage { stage, seconds, bytes_per_second: (bytes > 0 && seconds > 0.0).then_some(rate) }
    }

    /// Names that stage. Reads and uploads overlap: of the two it is the one that the loop waited for longer.
    fn busiest(&self, staging: Staging) -> Stage {
        let stages = &self.stages;
        // The loop does one thing after the other, so these parts and its waits add up to the whole.
        let parts = [
            (Stage::Headers, stages.open.seconds),
            (Stage::Planning, stages.plan.seconds),
            (Stage::SetUp, stages.allocate.seconds),
            (Stage::Bookkeeping, stages.bookkeeping.seconds),
        ];
        let waited = stages.wait_read.seconds + stages.wait_upload.seconds;
        let longest = parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((stage, _)) = longest.filter(|(_, seconds)| *seconds > waited) {
            return stage;
        }
        if self.is_alternating(staging) {
            return Stage::Staging;
        }
        if stages.wait_upload.seconds > stages.wait_read.seconds {
            let converts = stages.kernels.seconds > stages.uploading.seconds * MOSTLY;
            return if converts { Stage::Kernels } else { Stage::Upload };
        }
        Stage::Reading
    }

    /// Seconds from the first read to the last read or upload.
    fn span(&self) -> f64 {
        self.first_read.map_or(0.0, |first| self.last_upload.max(self.last_read) - first)
    }

    /// Whether most bytes went through staging and neither readers nor uploads were at work most of that time.
    /// With a buffer for each of a few transfers they have not: nothing waited for a buffer.
    fn is_alternating(&self, staging: Staging) -> bool {
        if self.stages.stage.bytes <= (staging.count as u64).saturating_mul(staging.bytes as u64) {
            return false;
        }
        let stages = &self.stages;
        let span = self.span();
        let staged = stages.stage.bytes > stages.read.bytes / 2;
        staged && stages.reading.seconds.max(stages.uploading.seconds) < span * MOSTLY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Staging = Staging { count: 2, bytes: 100 };

    /// A load of 1,000 bytes through two staging buffers, with these times.
    fn main_stage(set: impl FnOnce(&mut Meter)) -> MainStage {
        let mut meter = Meter::new(Instant::now(), Tracer::silent());
        let stages = &mut meter.stages;
        for stage in [&mut stages.read, &mut stages.stage, &mut stages.upload, &mut stages.kernels] {
            stage.bytes = 1000;
        }
        (meter.first_read, meter.last_read, meter.last_upload) = (Some(0.0), 1.0, 1.0);
        set(&mut meter);
        meter.main_stage(ROOM)
    }

    fn stage(stage: Stage, seconds: f64, rate: f64) -> MainStage {
        MainStage { stage, seconds, bytes_per_second: (rate > 0.0).then_some(rate) }
    }

    #[test]
    fn of_reads_and_uploads_the_one_that_was_waited_for_is_the_main_stage() {
        let found = main_stage(|meter| {
            let stages = &mut meter.stages;
            (stages.wait_read.seconds, stages.wait_upload.seconds) = (0.1, 0.7);
            (stages.reading.seconds, stages.uploading.seconds) = (0.9, 0.8);
        });
        assert_eq!(found, stage(Stage::Upload, 0.8, 1250.0));
        let found = main_stage(|meter| {
            let stages = &mut meter.stages;
            (stages.wait_read.seconds, stages.wait_upload.seconds) = (0.7, 0.1);
            (stages.reading.seconds, stages.uploading.seconds) = (0.8, 0.9);
        });
        assert_eq!(found, stage(Stage::Reading, 0.8, 1250.0));
    }

    #[test]
    fn uploads_that_mostly_convert_are_kernels() {
        let with = |kernels| {
            main_stage(|meter| {
                let stages = &mut meter.stages;
                (stages.wait_upload.seconds, stages.uploading.seconds, stages.kernels.seconds) = (0.7, 0.8, kernels);
            })
        };
        assert_eq!(with(0.64), stage(Stage::Kernels, 0.64, 1562.5));
        assert_eq!(with(0.5), stage(Stage::Upload, 0.8, 1250.0));
        assert_eq!(with(3.2), stage(Stage::Kernels, 0.8, 1250.0), "several threads at once");
    }

    #[test]
    fn neither_reads_nor_uploads_at_work_most_of_the_time_is_a_lack_of_staging() {
        let alternating = |meter: &mut Meter| {
            let stages = &mut meter.stages;
            (stages.wait_read.seconds, stages.wait_upload.seconds) = (0.5, 0.5);
            (stages.reading.seconds, stages.uploading.seconds) = (0.5, 0.5);
        };
        assert_eq!(main_stage(alternating), stage(Stage::Staging, 1.0, 1000.0));
        let roomy = main_stage(|meter| {
            alternating(meter);
            meter.stages.stage.bytes = 200;
        });
        assert_eq!(roomy.stage, Stage::Reading, "nothing waited for a buffer");
    }

    #[test]
    fn what_takes_longer_than_all_waits_is_the_main_stage() {
        type Part = fn(&mut Stages) -> &mut StageTime;
        let parts: [(Stage, Part); 4] = [
            (Stage::Headers, |stages| &mut stages.open),
            (Stage::Planning, |stages| &mut stages.plan),
            (Stage::SetUp, |stages| &mut stages.allocate),
            (Stage::Bookkeeping, |stages| &mut stages.bookkeeping),
        ];
        for (named, part) in parts {
            let found = main_stage(|meter| {
                meter.stages.wait_read.seconds = 0.3;
                part(&mut meter.stages).seconds = 0.4;
            });
            assert_eq!(found, stage(named, 0.4, 0.0));
        }
    }
}
