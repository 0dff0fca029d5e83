//! The loop: one thread between a queue of reads and a stream of uploads.
//!
//! Invariants, each with a test in `tests/load.rs`:
//! - **L1** each selected byte is written once.
//! - **L2** a buffer has one holder.
//! - **L3** the loop blocks only on something that is running.
//! - **L4** after the first error nothing is submitted, and reads and uploads in flight are drained before it returns.
//! - **L5** host memory is the pool plus a constant, device memory the arena plus a constant, whatever the checkpoint.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::files::Files;
use super::meter::Meter;
use super::options::TransferOptions;
use super::readiness::Readiness;
use super::trace::TraceLane;
use super::tracer::Span;
use crate::device::{InFlight, Piece, Region, Stream, Uploaded};
use crate::error::{Error, Result};
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::plan::{Landing, LoadPlan, PlacedPiece, Transfer};
use crate::storage::{Completed, Lane, Read, ReadQueue, ReadTarget};

/// Transfers of one kind of route, in order; the kinds run side by side.
#[derive(Default)]
struct LaneState {
    pending: VecDeque<usize>,
    in_flight: usize,
    active_since: Option<Instant>,
    active: Duration,
}

/// A staging buffer on its way to the device.
struct Uploading {
    transfer: usize,
    started: Instant,
    upload: InFlight,
}

/// One load in progress.
pub(super) struct Run<'a> {
    plan: &'a LoadPlan,
    files: Files<'a>,
    queue: &'a mut dyn ReadQueue,
    pool: Option<&'a StagingPool>,
    stream: Option<&'a mut Box<dyn Stream>>,
    /// The regions of all transfers in the plan's order; those of transfer `i` start at `first_region[i]`.
    regions: Vec<Option<Region>>,
    first_region: Vec<usize>,
    lanes: [LaneState; Lane::COUNT],
    lane_depth: usize,
    uploads: VecDeque<Uploading>,
    /// Finite numbers that became infinite, by tensor.
    overflows: BTreeMap<usize, u64>,
    error: Option<Error>,
    options: &'a TransferOptions,
    meter: &'a mut Meter,
    readiness: Option<&'a Readiness>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        plan: &'a LoadPlan,
        files: Files<'a>,
        engine: &'a mut Engine,
        regions: Vec<Region>,
        options: &'a TransferOptions,
        meter: &'a mut Meter,
        readiness: Option<&'a Readiness>,
    ) -> Run<'a> {
        let mut lanes: [LaneState; Lane::COUNT] = Default::default();
        let mut first_region = Vec::with_capacity(plan.transfers.len());
        let mut next = 0;
        for (index, transfer) in plan.transfers.iter().enumerate() {
            lanes[transfer.route.lane().index()].pending.push_back(index);
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
            overflows: BTreeMap::new(),
            error: None,
            options,
            meter,
            readiness,
        }
    }

    /// Runs until everything is written, or until the first error and everything in flight has come back. Returns how many
    /// finite numbers became infinite, by tensor.
    pub(super) fn finish(mut self) -> Result<BTreeMap<usize, u64>> {
        loop {
            self.reap_uploads();
            if self.error.is_none() && self.is_cancelled() {
                self.error = Some(Error::Cancelled);
            }
            self.submit_all();
            if self.reading() > 0 {
                self.await_read();
            } else if let Some(uploading) = self.uploads.pop_front() {
                self.await_upload(uploading);
            } else if self.error.is_some() || self.lanes.iter().all(|lane| lane.pending.is_empty()) {
                break;
            } else if !self.submit_one_at_any_cost() {
                self.fail(Error::Poisoned { what: "the loop has work left and nothing in flight" });
            }
        }
        self.meter.lanes = self.lanes.each_ref().map(|lane| lane.active.as_secs_f64());
        self.error.map_or(Ok(self.overflows), Err)
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
        for lane in 0..Lane::COUNT {
            while self.error.is_none() && self.lanes[lane].in_flight < self.lane_depth && self.submit_next(lane, false)
            {
            }
        }
    }

    /// With nothing in flight, the limit on open shards must not stop the load.
    fn submit_one_at_any_cost(&mut self) -> bool {
        (0..Lane::COUNT).any(|lane| self.submit_next(lane, true))
    }

    /// Submits the next transfer of a lane, if there is one and what it needs is free.
    fn submit_next(&mut self, lane: usize, force: bool) -> bool {
        let Some(&index) = self.lanes[lane].pending.front() else { return false };
        let transfer = &self.plan.transfers[index];
        let source = match self.files.source(transfer.shard, transfer.route, force) {
            Ok(Some(source)) => source,
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
        self.meter.read_began();
        self.queue.submit(Read { id: index, source, offset: transfer.offset, len }, target);
        true
    }

    /// The place for the bytes of a transfer; `None` while every staging buffer is in use.
    fn target(&mut self, index: usize) -> Option<ReadTarget> {
        match self.plan.transfers[index].landing {
            Landing::InPlace { .. } => {
                self.regions.get_mut(self.first_region[index]).and_then(Option::take).map(ReadTarget::InPlace)
            }
            Landing::Staged { .. } => self.pool.and_then(StagingPool::acquire).map(ReadTarget::Staging),
        }
    }

    fn await_read(&mut self) {
        let waiting = Instant::now();
        let completed = self.queue.complete();
        let waited = Span::since(waiting);
        self.meter.stages.wait_read.seconds += waited.duration.as_secs_f64();
        self.meter.tracer.step("wait_read", waited);
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
        let Completed { id, target, outcome, started, busy } = completed;
        let span = Span { started, duration: busy };
        let Some(transfer) = self.plan.transfers.get(id) else {
            return self.fail(Error::Poisoned { what: "the read queue answered what was not asked" });
        };
        self.lanes[transfer.route.lane().index()].ended();
        let route = match outcome {
            Ok(route) => route,
            Err(error) => {
                if !matches!(error, Error::Cancelled) {
                    let lane = TraceLane::Reader(transfer.route);
                    self.meter.tracer.transfer(lane, "failed_read", span, transfer, 0);
                }
                return self.fail(error);
            }
        };
        self.meter.tracer.transfer(TraceLane::Reader(route), "read", span, transfer, transfer.len);
        let staged = matches!(target, ReadTarget::Staging(_));
        self.meter.read_ended(route, transfer.len, busy, staged);
        if let Err(error) = self.files.transfer_done(transfer.shard) {
            self.fail(error);
        }
        if self.error.is_some() {
            return;
        }
        match target {
            ReadTarget::InPlace(region) => {
                region.finish();
                self.arrived(transfer.len);
            }
            ReadTarget::Staging(buffer) => self.upload(id, buffer),
            ReadTarget::Lost => {
                self.fail(Error::Poisoned { what: "a read without its target succeeded" });
            }
        }
    }

    fn upload(&mut self, index: usize, buffer: StagingBuffer) {
        let Landing::Staged { pieces } = &self.plan.transfers[index].landing else { return };
        let first = self.first_region[index];
        let regions = self.regions[first..first + pieces.len()].iter_mut().map(Option::take);
        let pieces: Option<Vec<(Piece, Region)>> =
            pieces.iter().zip(regions).map(|(placed, region)| region.map(|region| (placed.piece, region))).collect();
        let (Some(pieces), Some(stream)) = (pieces, self.stream.as_mut()) else {
            return self.fail(Error::Poisoned { what: "a staged read without a stream or without its regions" });
        };
        self.meter.upload_began(self.plan.transfers[index].len);
        let started = Instant::now();
        match stream.upload(buffer, pieces) {
            Ok(upload) => self.uploads.push_back(Uploading { transfer: index, started, upload }),
            Err(error) => self.fail(error),
        }
        self.arrived(self.plan.transfers[index].len);
    }

    /// Takes back what is already over, in order, without waiting.
    fn reap_uploads(&mut self) {
        while self.uploads.front_mut().is_some_and(|uploading| uploading.upload.is_done()) {
            if let Some(uploading) = self.uploads.pop_front() {
                self.upload_done(uploading);
            }
        }
    }

    fn await_upload(&mut self, uploading: Uploading) {
        let waiting = Instant::now();
        self.upload_done(uploading);
        let waited = Span::since(waiting);
        self.meter.stages.wait_upload.seconds += waited.duration.as_secs_f64();
        self.meter.tracer.step("wait_upload", waited);
    }

    fn upload_done(&mut self, uploading: Uploading) {
        let Uploading { transfer, started, upload } = uploading;
        let uploaded = upload.finish();
        self.trace_upload(transfer, Span::since(started), &uploaded);
        match uploaded {
            Ok(uploaded) if self.error.is_none() => {
                self.note_conversion(transfer, &uploaded);
                uploaded.regions.into_iter().for_each(Region::finish);
            }
            Ok(_) => {}
            Err(error) => self.fail(error),
        }
        self.meter.upload_ended();
        if let Some(readiness) = self.readiness {
            readiness.notify();
        }
    }

    fn trace_upload(&self, index: usize, span: Span, uploaded: &Result<Uploaded>) {
        let Some(transfer) = self.plan.transfers.get(index) else { return };
        let converted = uploaded.as_ref().ok().map(|uploaded| (uploaded.convert_seconds, converted_bytes(transfer)));
        self.meter.tracer.moved(span, transfer, converted);
    }

    fn note_conversion(&mut self, transfer: usize, uploaded: &Uploaded) {
        let Some(transfer) = self.plan.transfers.get(transfer) else { return };
        let pieces = staged_pieces(transfer);
        self.meter.stages.kernels.bytes += converted_bytes(transfer);
        self.meter.stages.kernels.seconds += uploaded.convert_seconds;
        for &(piece, count) in &uploaded.overflows {
            if let Some(tensor) = pieces.get(piece).and_then(|placed| placed.tensor) {
                *self.overflows.entry(tensor).or_default() += count;
            }
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

fn staged_pieces(transfer: &Transfer) -> &[PlacedPiece] {
    match &transfer.landing {
        Landing::InPlace { .. } => &[],
        Landing::Staged { pieces } => pieces,
    }
}

/// Bytes of a transfer that are converted.
fn converted_bytes(transfer: &Transfer) -> u64 {
    let converted = staged_pieces(transfer).iter().filter(|placed| placed.piece.cast.is_some());
    converted.map(|placed| placed.piece.taken()).sum()
}

impl LaneState {
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
