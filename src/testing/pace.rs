//! Things that are slow on purpose, by a clock: a source, a link and a kernel of a known rate. What they move is right.
//!
//! They wait as hardware makes one wait. They prove which stage is named as the limit, never how fast anything is.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::device::{
    Arena, CpuDevice, Device, DeviceLimits, InFlight, Piece, Region, Stream, StreamNeeds, Upload, Uploaded,
};
use crate::error::Result;
use crate::fallback::Fallbacks;
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::storage::{Limits, Route, Source};

/// A thing that does one job after the other at a rate. Clones share it.
#[derive(Clone)]
pub struct Pace {
    bytes_per_second: f64,
    latency: Duration,
    free_at: Arc<Mutex<Instant>>,
}

impl Pace {
    /// Something that moves this many bytes per second.
    pub fn new(bytes_per_second: f64) -> Pace {
        Pace { bytes_per_second, latency: Duration::ZERO, free_at: Arc::new(Mutex::new(Instant::now())) }
    }

    /// The same, with a delay for each job that the next jobs do not wait for.
    #[must_use]
    pub fn with_latency(self, latency: Duration) -> Pace {
        Pace { latency, ..self }
    }

    /// Takes up a job of `bytes` bytes that can begin at `ready`; says when it will be over.
    fn book(&self, bytes: u64, ready: Instant) -> Instant {
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        *free_at = (*free_at).max(ready) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        *free_at + self.latency
    }
}

fn wait_until(moment: Instant) {
    thread::sleep(moment.saturating_duration_since(Instant::now()));
}

/// A source that is as slow as its pace.
pub struct PacedSource {
    inner: Arc<dyn Source>,
    pace: Pace,
}

impl PacedSource {
    /// `inner`, slowed down. Sources with clones of one pace share it as files share a disk.
    pub fn new(inner: Arc<dyn Source>, pace: Pace) -> PacedSource {
        PacedSource { inner, pace }
    }
}

impl Source for PacedSource {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn route(&self) -> Route {
        self.inner.route()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        let over = self.pace.book(target.len() as u64, Instant::now());
        let route = self.inner.read_at(offset, target)?;
        wait_until(over);
        Ok(route)
    }
}

/// A device that says it is out of the host's reach, behind a link of some rate, with kernels of some rate.
pub struct PacedDevice {
    inner: CpuDevice,
    link: Pace,
    kernels: Pace,
}

impl PacedDevice {
    /// Such a device.
    pub fn new(link: Pace, kernels: Pace) -> PacedDevice {
        PacedDevice { inner: CpuDevice::with_align(256), link, kernels }
    }
}

impl Device for PacedDevice {
    fn name(&self) -> String {
        "paced".to_owned()
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { host_visible: false, staging: (8, 256 << 10), ..self.inner.limits() }
    }

    fn staging(&self, count: usize, buffer_bytes: usize, fallbacks: &Fallbacks) -> Result<StagingPool> {
        self.inner.staging(count, buffer_bytes, fallbacks)
    }

    fn alloc(&self, bytes: u64) -> Result<Arena> {
        self.inner.alloc(bytes)
    }

    fn stream(&self, lanes: Option<usize>, fallbacks: &Fallbacks) -> Result<Box<dyn Stream>> {
        let inner = self.inner.stream(lanes, fallbacks)?;
        Ok(Box::new(PacedStream { inner, link: self.link.clone(), kernels: self.kernels.clone() }))
    }
}

struct PacedStream {
    inner: Box<dyn Stream>,
    link: Pace,
    kernels: Pace,
}

impl Stream for PacedStream {
    fn prepare(&mut self, needs: &StreamNeeds) -> Result<()> {
        self.inner.prepare(needs)
    }

    fn upload(&mut self, buffer: StagingBuffer, pieces: Vec<(Piece, Region)>) -> Result<InFlight> {
        let taken = |converted: bool| pieces.iter().filter(move |(piece, _)| piece.cast.is_some() || !converted);
        let bytes = |converted| taken(converted).map(|(piece, _)| piece.taken()).sum::<u64>();
        let copied = self.link.book(bytes(false), Instant::now());
        let converted = bytes(true);
        let convert_seconds = converted as f64 / self.kernels.bytes_per_second;
        let over = if converted > 0 { self.kernels.book(converted, copied) } else { copied };
        Ok(Box::new(PacedUpload { inner: self.inner.upload(buffer, pieces)?, over, convert_seconds }))
    }
}

struct PacedUpload {
    inner: InFlight,
    over: Instant,
    convert_seconds: f64,
}

impl Upload for PacedUpload {
    fn is_done(&mut self) -> bool {
        Instant::now() >= self.over
    }

    fn finish(self: Box<Self>) -> Result<Uploaded> {
        wait_until(self.over);
        Ok(Uploaded { convert_seconds: self.convert_seconds, ..self.inner.finish()? })
    }
}
