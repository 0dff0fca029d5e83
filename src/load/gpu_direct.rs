//! Which files of a load the device reads itself: those that it accepts, if the route was chosen; otherwise those of
//! the file systems on which a trial shows that it pays.
//!
//! The trial is two small loads by the loop itself, of the same cold bytes into the same device: one by way of the host, one
//! past it.
//! What came out stands in the report either way. What a device says once is remembered for the life of the loader. Nothing
//! here reads a file, and no device is known by name.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use super::consent::WHAT;
use super::loader::Loader;
use super::meter::Meter;
use super::options::TransferOptions;
use super::run::Run;
use super::tracer::Tracer;
use crate::checkpoint::{Checkpoint, Shard};
use crate::device::DirectReads;
use crate::dtype::{Dtype, dims};
use crate::error::{Error, Result};
use crate::extent::{Extent, ShardIndex, Strided};
use crate::plan::{self, LoadPlan, PlanOptions, RouteChoice, ShardFacts, Wanted};
use crate::storage::{GPU_DIRECT, GpuDirect, Limits, Route};

/// Past the host, bytes must come at least this many times as fast: a measured tie is no reason to leave the beaten track.
const MARGIN: f64 = 1.1;

/// Above this share of resident bytes a range is no longer cold, and says nothing about the storage device.
const COLD_SHARE: f64 = 0.05;

/// The reads of a trial, so many that both ways have enough in flight.
const TRIAL_READ_BYTES: u64 = 4 << 20;

/// How a trial is made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trial {
    /// Bytes that each way reads, twice.
    pub(super) bytes: u64,
    /// Cold bytes of a file system that a load must have for a trial to be worth its time.
    pub(super) worth_bytes: u64,
}

/// A trial reads a sixteenth of the smallest load that it is made for, and only once.
pub(super) const TRIAL: Trial = Trial { bytes: 64 << 20, worth_bytes: 4 << 30 };

/// Whether reading past the host pays, by both rates in bytes per second.
pub(super) fn pays(past_host: f64, by_host: f64) -> bool {
    past_host >= by_host * MARGIN && past_host > 0.0
}

impl Loader {
    /// Where it was asked for: lets the device read all files that it takes.
    pub(super) fn ask_gpu_direct(&self, checkpoint: &Checkpoint, facts: &mut [ShardFacts]) -> Result<()> {
        let Some(reads) = self.consent.reads(&*self.device, false, &self.fallbacks) else { return Ok(()) };
        let lying = |(facts, shard): &(&mut ShardFacts, &Shard)| facts.is_used() && shard.derived.is_none();
        for (facts, shard) in facts.iter_mut().zip(checkpoint.shards()).filter(lying) {
            let file_system = shard.version.device();
            let takes = match self.consent.known(file_system) {
                Some(known) => known,
                None => self.consent.settle(file_system, self.takes(&*reads, checkpoint, shard)?),
            };
            facts.gpu_direct = takes.then_some(GPU_DIRECT);
        }
        Ok(())
    }

    /// Without a chosen route: measures once for each file system whether it pays, and lets the device read where it does.
    pub(super) fn try_gpu_direct(
        &self,
        checkpoint: &Checkpoint,
        wanted: &[Wanted],
        facts: &mut [ShardFacts],
        trial: Trial,
    ) -> Result<()> {
        let shards = checkpoint.shards();
        if self.device.limits().host_visible {
            return Ok(());
        }
        for (file_system, cold_bytes) in cold_bytes(shards, wanted, facts) {
            let known = self.consent.known(file_system);
            let pays = match (known, sample(file_system, shards, facts, trial.bytes)) {
                (Some(known), _) => known,
                (None, Some(sample)) if cold_bytes >= trial.worth_bytes => {
                    let Some(reads) = self.consent.reads(&*self.device, true, &self.fallbacks) else { return Ok(()) };
                    let pays = self.takes(&*reads, checkpoint, &shards[sample.shard])?
                        && self.decide(checkpoint, facts, &sample)?;
                    self.consent.settle(file_system, pays)
                }
                _ => false,
            };
            let same = facts.iter_mut().zip(shards);
            let same = same.filter(|(_, shard)| shard.version.device() == file_system && shard.derived.is_none());
            let used = same.map(|(facts, _)| facts).filter(|facts| facts.is_used());
            used.for_each(|facts| facts.gpu_direct = pays.then_some(GPU_DIRECT));
        }
        Ok(())
    }

    /// Whether the device takes a file; why it does not is noted.
    fn takes(&self, reads: &dyn DirectReads, checkpoint: &Checkpoint, shard: &Shard) -> Result<bool> {
        let file = shard.open(&**checkpoint.storage(), &self.fallbacks)?;
        let taken = GpuDirect::takes(reads, &*file);
        Ok(taken.map_err(|why| self.fallbacks.note(WHAT, format!("{why}; read by way of the host"))).is_ok())
    }

    /// Measures and notes what came out. A trial that fails decides against it; only a cancelled one ends the load.
    fn decide(&self, checkpoint: &Checkpoint, facts: &[ShardFacts], sample: &Sample) -> Result<bool> {
        let (outcome, why) = match self.measure(checkpoint, facts, sample) {
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            Err(error) => (false, format!("could not be measured, not used: {error:?}")),
            Ok(None) => (false, "refused a read while it was measured, not used".to_owned()),
            Ok(Some([past_host, by_host])) => {
                let outcome = pays(past_host, by_host);
                let verdict = if outcome { "used" } else { "not used" };
                let rates = (past_host / 1e9, by_host / 1e9);
                (outcome, format!("measured {:.2} against {:.2} GB/s by way of the host, {verdict}", rates.0, rates.1))
            }
        };
        self.fallbacks.note(WHAT, why);
        Ok(outcome)
    }

    /// Bytes per second past the host and by way of it; `None` if the device refused. Both ways run twice, in turns: the first
    /// time readies threads and buffers and does not count.
    fn measure(&self, checkpoint: &Checkpoint, facts: &[ShardFacts], sample: &Sample) -> Result<Option<[f64; 2]>> {
        let mut facts = facts.to_vec();
        facts[sample.shard].gpu_direct = Some(Limits { max_read: TRIAL_READ_BYTES, ..GPU_DIRECT });
        let buffer_bytes = (self.staging_shape().bytes as u64).min(TRIAL_READ_BYTES);
        let plan = |route| {
            let options = PlanOptions { route, buffer_bytes };
            plan::plan(&[sample.wanted()], &facts, self.device.limits(), options)
        };
        let (by_host, past_host) = (plan(RouteChoice::Direct)?, plan(RouteChoice::GpuDirect)?);
        let mut rates = [0.0; 2];
        for _ in 0..2 {
            let (_, host_rate) = self.try_out(checkpoint, &by_host)?;
            let (read, rate) = self.try_out(checkpoint, &past_host)?;
            if read < past_host.route_bytes(Route::GpuDirect) {
                return Ok(None);
            }
            rates = [rate, host_rate];
        }
        Ok(Some(rates))
    }

    /// Carries out a plan of no consequence: the bytes that the device read itself, and all bytes per second.
    fn try_out(&self, checkpoint: &Checkpoint, plan: &LoadPlan) -> Result<(u64, f64)> {
        let mut engine = self.engine(plan)?;
        let (regions, _written) = self.set_up(checkpoint, plan, self.device.alloc(plan.arena_bytes)?, &mut engine)?;
        let options = TransferOptions { observer: None, ..self.options.clone() };
        let started = Instant::now();
        let mut meter = Meter::new(started, Tracer::silent());
        let files = self.files(checkpoint, plan);
        Run::new(plan, files, &mut engine, regions, &options, &mut meter, None).finish()?;
        let seconds = started.elapsed().as_secs_f64();
        self.engine.set(Some(engine));
        #[allow(clippy::cast_precision_loss)] // a rate has no use for the 54th bit
        let rate = plan.tensor_bytes() as f64 / seconds.max(f64::MIN_POSITIVE);
        Ok((meter.routes().gpu_direct, rate))
    }
}

/// A cold range of a file.
struct Sample {
    shard: usize,
    range: Range<u64>,
}

impl Sample {
    /// The range as a tensor to load.
    fn wanted(&self) -> Wanted {
        let bytes = self.range.end - self.range.start;
        // Shards are counted in 32 bits.
        let shard = ShardIndex::try_from(self.shard).unwrap_or(ShardIndex::MAX);
        let extent = Extent { shard, offset: self.range.start, len: bytes };
        Wanted {
            name: "trial".into(),
            aliases: Vec::new(),
            dtype: Dtype::U8,
            shape: dims(&[bytes]).into(),
            bytes,
            runs: vec![Strided::contiguous(extent, 0)],
            cast: None,
            place: None,
        }
    }
}

/// The selected bytes that are not in the page cache, about, by file system.
fn cold_bytes(shards: &[Shard], wanted: &[Wanted], facts: &[ShardFacts]) -> BTreeMap<u64, u64> {
    let mut selected = vec![0u64; shards.len()];
    for run in wanted.iter().flat_map(|tensor| &tensor.runs) {
        if let Some(bytes) = selected.get_mut(run.shard as usize) {
            *bytes = bytes.saturating_add(run.run.saturating_mul(run.count));
        }
    }
    let mut cold = BTreeMap::new();
    for ((shard, facts), selected) in shards.iter().zip(facts).zip(selected).filter(|((_, facts), _)| facts.is_used()) {
        let absent = facts.bytes.saturating_sub(facts.residency.resident_bytes());
        *cold.entry(shard.version.device()).or_default() += selected.min(absent);
    }
    cold
}

/// The first cold range of `bytes` bytes on a file system that can also be read past the page cache.
fn sample(file_system: u64, shards: &[Shard], facts: &[ShardFacts], bytes: u64) -> Option<Sample> {
    let usable = shards.iter().zip(facts).enumerate().filter(|(_, (shard, facts))| {
        shard.version.device() == file_system && facts.is_used() && facts.direct.is_some()
    });
    let mut samples = usable.flat_map(|(shard, (_, facts))| {
        let ranges = (0..facts.bytes / bytes.max(1)).map(move |index| index * bytes..(index + 1) * bytes);
        ranges
            .filter(|range| facts.residency.share(range.clone()) < COLD_SHARE)
            .map(move |range| Sample { shard, range })
    });
    samples.next()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::checkpoint::Selection;
    use crate::plan::LoadPlan;
    use crate::storage::Residency;
    use crate::testing::{DirectDevice, DirectTrouble, MemoryFile, Synthetic, watched};

    /// Small enough for a test.
    const SMALL: Trial = Trial { bytes: 256 << 10, worth_bytes: 1 << 20 };

    /// A cold checkpoint, its loader on `device`, and what it plans after a trial.
    fn planned(device: &DirectDevice, trial: Trial) -> (Loader, LoadPlan, Vec<String>) {
        let cold = |_, file: MemoryFile| file.with_descriptor();
        let synthetic = Synthetic::new(21, 6, 250_000, cold);
        synthetic.set_residency(Residency::none);
        let loader = Loader::new(Arc::new(device.clone()), TransferOptions::default());
        let checkpoint = &synthetic.checkpoint;
        let selected = checkpoint.select(&Selection::default()).unwrap();
        let casts = loader.casts(checkpoint, &selected).unwrap();
        let wanted = super::super::prepare::wanted(checkpoint, &casts, None).unwrap();
        let (mut facts, ..) = loader.facts(&synthetic.checkpoint, &wanted).unwrap();
        for _ in 0..2 {
            loader.try_gpu_direct(&synthetic.checkpoint, &wanted, &mut facts, trial).unwrap();
        }
        let options = PlanOptions { route: RouteChoice::Auto, buffer_bytes: 64 << 10 };
        let plan = plan::plan(&wanted, &facts, loader.device.limits(), options).unwrap();
        let notes = loader.fallbacks.list().into_iter().filter(|note| note.what == WHAT).map(|note| note.why).collect();
        (loader, plan, notes)
    }

    #[test]
    fn a_trial_is_made_once_and_its_outcome_is_noted_and_followed() {
        watched(|| {
            let device = DirectDevice::new(1, Vec::new());
            let (_, plan, notes) = planned(&device, SMALL);
            let [note] = &notes[..] else { panic!("{notes:?}") };
            assert!(note.starts_with("measured ") && note.contains(" GB/s by way of the host, "), "{note}");
            assert_eq!(plan.route_bytes(Route::GpuDirect) > 0, note.ends_with(", used"), "{note}");
            assert_eq!(device.reads(), 2, "two passes of one read each");
            assert_eq!((device.open_files(), device.live_bytes()), (0, 0));
        });
    }

    #[test]
    fn a_device_that_refuses_its_trial_is_not_used() {
        watched(|| {
            for (trouble, reason) in [
                (DirectTrouble::FailFrom(1), "refused a read while it was measured"),
                (DirectTrouble::RefuseFiles("no udev data".to_owned()), "no udev data"),
                (DirectTrouble::Absent("no library".to_owned()), "no library"),
            ] {
                let (_, plan, notes) = planned(&DirectDevice::new(1, vec![trouble]), SMALL);
                assert!(notes.iter().any(|note| note.contains(reason)), "{reason}: {notes:?}");
                assert_eq!(plan.route_bytes(Route::GpuDirect), 0);
            }
        });
    }

    #[test]
    fn no_trial_is_made_for_a_small_load_or_a_way_that_is_none() {
        let device = DirectDevice::new(1, Vec::new());
        let large = Trial { worth_bytes: 1 << 40, ..SMALL };
        assert_eq!((planned(&device, large).2, device.reads()), (Vec::new(), 0));
        let detour = DirectDevice::new(1, vec![DirectTrouble::Detour("by way of the host".to_owned())]);
        assert_eq!((planned(&detour, SMALL).2, detour.reads()), (Vec::new(), 0));
    }

    #[test]
    fn it_pays_where_it_is_a_tenth_faster() {
        for (past_host, by_host, expected) in [
            (1.0, 1.0, false),
            (1.09, 1.0, false),
            (1.11, 1.0, true),
            (2.0, 1.0, true),
            (0.5, 1.0, false),
            (0.0, 0.0, false),
        ] {
            assert_eq!(pays(past_host, by_host), expected, "{past_host} against {by_host}");
        }
        assert!(!pays(f64::NAN, 1.0) && !pays(1.0, f64::NAN));
    }
}
