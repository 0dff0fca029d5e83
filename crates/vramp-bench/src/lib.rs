//! The benchmark: each stage of a load measured alone on this machine and these files, T = S / B predicted from that, loads
//! with the page cache in a proved state, and the comparison of the two.
//!
//! `data` is what comes out. `budget` says how much can be loaded in the time, `part` which part of the checkpoint that is, `reads`, `memory` and `uploads` measure stages,
//! `cache` sees to the page cache, `survey` chooses what to try, `rounds` loads, `predict` compares, `tune` searches options among
//! those of `knobs`, `limits` is what later loads are compared with. It prints nothing, reads no environment, and knows no device by name.

mod budget;
mod cache;
mod data;
pub mod estimate;
mod knobs;
mod limits;
mod memory;
mod part;
mod predict;
mod reads;
mod rounds;
mod survey;
mod testbed;

#[cfg(test)]
mod tests;
mod tune;
mod uploads;
mod workload;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub use cache::{PageCache, Stretch, SystemCache, TOLERANCE, resident_share};
pub use data::{
    BenchReport, BenchStage, CacheState, Cause, Ceiling, Load, Machine, Prediction, Proof, Reason, Sample, Setting,
    Spread, StageBench, State, Subject, TimelineEvent, Trial, Verdict,
};
pub use predict::{judge, predict};
pub use tune::{TuneTrial, Tuning, tune};

use budget::Clock;
use survey::Survey;
use testbed::TestBed;
use workload::Workload;

use vramp::checkpoint::{Checkpoint, OpenOptions};
use vramp::device::Device;
use vramp::error::Result;
use vramp::load::{LimitPlace, TransferOptions};
use vramp::os;
use vramp::storage::Fallbacks;

/// Opens the device: the benchmark does it, because what that takes is one of the stages.
pub type DeviceOpener = Box<dyn Fn() -> Result<Arc<dyn Device>>>;

/// Options of [`run`].
pub struct Options {
    /// Where the tensors go.
    pub open_device: DeviceOpener,
    /// Who sees to the page cache.
    pub cache: Arc<dyn PageCache>,
    /// How the checkpoint is opened.
    pub open: OpenOptions,
    /// How the loads move bytes. An observer is not told: the benchmark is the observer.
    pub transfer: TransferOptions,
    /// How much time to spend.
    pub effort: Effort,
}

/// How much time to spend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Effort {
    /// Seconds of a sample of a stage, about.
    pub sample_seconds: f64,
    /// Samples of each setting when the stages are surveyed.
    pub survey_rounds: usize,
    /// Settings of each stage that are tried beside a load's own and the usual: few, or all.
    pub every_setting: bool,
    /// Loads of each state.
    pub rounds: usize,
    /// Bytes to load, at most; of a larger checkpoint a part is loaded.
    pub most_bytes: u64,
    /// Seconds that all of it may take, about: where storage or memory is slow a part is loaded, and rounds end early.
    pub most_seconds: Option<f64>,
}

impl Effort {
    /// Under half a minute.
    pub const QUICK: Effort = Effort {
        sample_seconds: 0.15,
        survey_rounds: 2,
        every_setting: false,
        rounds: 3,
        most_bytes: 768 << 20,
        most_seconds: Some(25.0),
    };

    /// A few minutes.
    pub const THOROUGH: Effort = Effort {
        sample_seconds: 0.5,
        survey_rounds: 3,
        every_setting: true,
        rounds: 7,
        most_bytes: 16 << 30,
        most_seconds: None,
    };
}

impl Options {
    /// The usual: local files, the machine's own page cache.
    pub fn new(open_device: DeviceOpener, effort: Effort) -> Options {
        Options {
            open_device,
            cache: Arc::new(SystemCache),
            open: OpenOptions::default(),
            transfer: TransferOptions::default(),
            effort,
        }
    }
}

/// Benchmarks the load of a checkpoint. `progress` is called with a few words for each step.
///
/// # Errors
/// When the checkpoint is refused, the device cannot be had, a file changes meanwhile, or on cancellation.
pub fn run(path: &Path, options: &Options, progress: &dyn Fn(&str)) -> Result<BenchReport> {
    bench(&Arc::new(Checkpoint::open_with(path, &options.open)?), Some(path), options, progress)
}

/// The same for a checkpoint that is open. Opening is then not part of the prediction.
///
/// # Errors
/// As [`run`].
pub fn run_on(checkpoint: &Arc<Checkpoint>, options: &Options, progress: &dyn Fn(&str)) -> Result<BenchReport> {
    bench(checkpoint, None, options, progress)
}

fn bench(
    checkpoint: &Arc<Checkpoint>,
    path: Option<&Path>,
    options: &Options,
    progress: &dyn Fn(&str),
) -> Result<BenchReport> {
    let began = Instant::now();
    let fallbacks = Fallbacks::default();
    progress("opening the device");
    let (device, context) = survey::open_device(options)?;
    let subject = Workload::of(checkpoint, &*device, options)?;
    let mut warnings = subject.warnings();
    let (bed, plan) = TestBed::new(&subject, Arc::clone(&device), options, path.map(Path::to_owned))?;
    let mut survey = Survey::new(bed, &plan, &fallbacks)?;
    let clock = Clock { began, most_seconds: options.effort.most_seconds };
    survey.measure(&clock, progress)?;
    let states = rounds::run(&mut survey, &clock, &mut warnings, progress)?;
    let stages = survey.into_stages(context);
    let place = LimitPlace::here(&*device, &subject.file_system, &subject.volume);
    let (machine, subject) = (machine(&*device, subject.file_system.clone()), subject.describe());
    let fallbacks = fallbacks.list();
    let seconds = began.elapsed().as_secs_f64();
    let vramp = env!("CARGO_PKG_VERSION").to_owned();
    let unix_seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let limits = None;
    let report =
        BenchReport { vramp, unix_seconds, seconds, machine, subject, stages, states, limits, warnings, fallbacks };
    Ok(BenchReport { limits: limits::of(&report, &options.transfer, place), ..report })
}

fn machine(device: &dyn Device, file_system: String) -> Machine {
    Machine {
        processor: os::processor_name().unwrap_or_default(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: os::memory_bytes(),
        kernel: os::kernel_release().unwrap_or_default(),
        file_system,
        device: device.name(),
        product: device.product().unwrap_or_default(),
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { open, transfer, effort, .. } = self;
        f.debug_struct("Options")
            .field("open", open)
            .field("transfer", transfer)
            .field("effort", effort)
            .finish_non_exhaustive()
    }
}
