//! The test bed: a checkpoint, a device and a page cache, ready for loads in either state. It compares nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::Options;
use super::cache::{Stretch, TOLERANCE, resident_share};
use super::data::CacheState;
use super::memory;
use super::workload::Workload;
use vramp::checkpoint::Checkpoint;
use vramp::device::Device;
use vramp::error::{Error, Result};
use vramp::load::{Loaded, Loader, Prepared, TransferOptions};
use vramp::plan::LoadPlan;

/// What loads need.
pub(super) struct TestBed<'a> {
    pub(super) subject: &'a Workload<'a>,
    pub(super) device: Arc<dyn Device>,
    pub(super) options: &'a Options,
    /// The parts of files that a load reads.
    pub(super) files: Vec<Stretch>,
    /// Where the checkpoint can be opened again, to see how long that takes.
    reopen: Option<PathBuf>,
}

impl<'a> TestBed<'a> {
    /// A bed for this subject, and what a load of it would do as the page cache is now.
    pub(super) fn new(
        subject: &'a Workload<'a>,
        device: Arc<dyn Device>,
        options: &'a Options,
        reopen: Option<PathBuf>,
    ) -> Result<(TestBed<'a>, LoadPlan)> {
        let mut bed = TestBed { subject, device, options, files: Vec::new(), reopen };
        let plan = bed.prepare(&bed.loader(bed.transfer()))?.plan;
        bed.files = subject.stretches(&plan);
        Ok((bed, plan))
    }

    /// The same with another part of the checkpoint.
    pub(super) fn with<'b>(&'b self, subject: &'b Workload<'b>) -> Result<TestBed<'b>> {
        Ok(TestBed::new(subject, Arc::clone(&self.device), self.options, None)?.0)
    }

    /// How a load moves bytes unless it is told otherwise.
    pub(super) fn transfer(&self) -> TransferOptions {
        let mut transfer = self.options.transfer.clone();
        transfer.observer = None;
        transfer
    }

    fn loader(&self, transfer: TransferOptions) -> Loader {
        Loader::new(Arc::clone(&self.device), transfer)
    }

    fn prepare(&self, loader: &Loader) -> Result<Prepared> {
        loader.prepare(Arc::clone(self.subject.checkpoint), &self.subject.selected)
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.options.transfer.cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// The share of the files' parts that is in the page cache.
    pub(super) fn resident(&self) -> Result<f64> {
        resident_share(&**self.subject.checkpoint.storage(), &self.files)
    }

    /// Puts the page cache into a state; says how. Files that are there are not read again.
    pub(super) fn reach(&self, state: CacheState) -> Result<String> {
        match state {
            CacheState::Cold => self.options.cache.drop_files(&self.files),
            CacheState::Warm if self.resident()? >= 1.0 - TOLERANCE / 10.0 => Ok("read before".to_owned()),
            CacheState::Warm => self.options.cache.fill(&self.files, &self.options.transfer.cancel),
        }
    }

    /// Opens the checkpoint as a load would; how long that took. 0 for one that has no path.
    fn open_again(&self) -> Result<f64> {
        let Some(path) = &self.reopen else { return Ok(0.0) };
        let began = Instant::now();
        drop(Checkpoint::open_with(path, &self.options.open)?);
        Ok(began.elapsed().as_secs_f64())
    }

    /// Seconds of what comes before the first byte: opening and planning.
    pub(super) fn opening(&self) -> Result<f64> {
        let open_seconds = self.open_again()?;
        Ok(open_seconds + self.prepare(&self.loader(self.transfer()))?.plan_seconds)
    }

    /// One load by a loader of its own, as the page cache is now.
    pub(super) fn load(&self, transfer: TransferOptions) -> Result<(Prepared, Loaded)> {
        self.check()?;
        let loader = &mut self.loader(transfer);
        let open_seconds = self.open_again()?;
        let mut prepared = self.prepare(loader)?;
        prepared.open_seconds = open_seconds;
        let loaded = loader.load(&prepared)?;
        Ok((prepared, loaded))
    }

    /// Takes and gives back as much memory as a load takes, where it takes the host's.
    pub(super) fn touch(&self) -> Result<()> {
        if self.device.limits().host_visible { memory::touch(self.subject.bytes) } else { Ok(()) }
    }
}
