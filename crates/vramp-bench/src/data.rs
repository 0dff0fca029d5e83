//! What a benchmark found out, as plain data. Text, tables and charts are made of it by the program.
//!
//! Rates are bytes per second, times are seconds. Nothing here measures and nothing here decides.

use std::path::PathBuf;

use serde::Serialize;

use vramp::fallback::Fallback;
use vramp::load::MeasuredLimit;
use vramp::report::Report;

/// Everything that one run of the benchmark found out.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// The version of this crate.
    pub vramp: String,
    /// When it began, in seconds since 1970.
    pub unix_seconds: u64,
    /// How long it all took.
    pub seconds: f64,
    /// The machine.
    pub machine: Machine,
    /// What was loaded.
    pub subject: Subject,
    /// Each stage of a load, measured alone, at several settings.
    pub stages: Vec<StageBench>,
    /// The loads, by what was in the page cache before them.
    pub states: Vec<State>,
    /// What later loads can be compared with, if enough was measured.
    pub limits: Option<MeasuredLimit>,
    /// Warnings about the numbers.
    pub warnings: Vec<String>,
    /// Ways that were not taken, and why.
    pub fallbacks: Vec<Fallback>,
}

/// The machine.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The processor's name; empty where the system does not say.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory in bytes, where the system says.
    pub memory_bytes: Option<u64>,
    /// The kernel's release.
    pub kernel: String,
    /// The file system of the first file.
    pub file_system: String,
    /// The device as the user types it.
    pub device: String,
    /// What the device is: the product's name of a GPU; empty for host memory.
    pub product: String,
}

/// What was loaded.
#[derive(Debug, Clone, Serialize)]
pub struct Subject {
    /// The path that was opened; what of it is no UTF-8 is replaced.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// Bytes of all its tensors: the S of T = S / B.
    pub bytes: u64,
    /// Number of its tensors.
    pub tensors: usize,
    /// Number of its files.
    pub shards: usize,
    /// Bytes of the tensors that were loaded.
    pub loaded_bytes: u64,
    /// Number of the tensors that were loaded.
    pub loaded_tensors: usize,
    /// Why only a part was loaded, if so.
    pub part: Option<String>,
    /// Number of runs of neighbouring tensors that the part is made of, spread evenly over the files.
    pub runs: usize,
    /// How much the sizes of the part's tensors differ from those of the whole: 0 not at all, 1 in everything.
    pub unlike: f64,
}

#[allow(clippy::ptr_arg)] // as serde wants it
fn lossy<S: serde::Serializer>(path: &PathBuf, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// A stage of a load, measured alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum BenchStage {
    /// Reading headers and planning, which come before the first byte.
    Opening,
    /// Files to staging buffers, past the page cache.
    Storage,
    /// Pages of the page cache to staging buffers.
    PageCache,
    /// Pages of the page cache to fresh memory, first touch included: the least that owning warm weights takes.
    PageCacheToFresh,
    /// Making fresh memory resident.
    FirstTouch,
    /// Memory to memory.
    HostCopy,
    /// Making the driver's context, once in a process.
    Context,
    /// Making staging buffers resident and locking them for the device.
    Pinning,
    /// Staging buffers to the device.
    Upload,
    /// The device's memory to the host.
    Download,
    /// Staging buffers to the device, elements converted on the way.
    Kernels,
}

/// One stage at several settings.
#[derive(Debug, Clone, Serialize)]
pub struct StageBench {
    /// Which.
    pub stage: BenchStage,
    /// What was tried; the first is what a load would do unless it was told otherwise.
    pub trials: Vec<Trial>,
    /// The fastest of `trials` by its median, as an index; of those within 3 % of each other the first.
    pub best: Option<usize>,
    /// Why nothing was measured, where that is so.
    pub skipped: Option<String>,
}

/// One setting of one stage.
#[derive(Debug, Clone, Serialize)]
pub struct Trial {
    /// What was tried.
    pub setting: Setting,
    /// One sample of each round, in the order of time.
    pub samples: Vec<Sample>,
}

/// How a stage was run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// In words: `O_DIRECT, io_uring`.
    pub way: String,
    /// Bytes of each read or copy; 0 where it means nothing.
    pub block_bytes: u64,
    /// Reads in flight, threads or streams.
    pub at_once: usize,
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sample {
    /// Bytes that went through.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

/// What was in the page cache before a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheState {
    /// Nothing of the files.
    Cold,
    /// All of the files.
    Warm,
}

/// The loads of one state, and what they were compared with.
#[derive(Debug, Clone, Serialize)]
pub struct State {
    /// Which.
    pub state: CacheState,
    /// Whether the state was really had.
    pub proof: Proof,
    /// The stages that such a load passes, which work side by side; measured in turn with the loads.
    pub ceilings: Vec<Ceiling>,
    /// T = S / B by the slowest of them.
    pub prediction: Prediction,
    /// Seconds of opening and planning, measured apart, once before each load.
    pub opening_seconds: Vec<f64>,
    /// The loads, in the order of time. The warm-up is not among them.
    pub loads: Vec<Load>,
    /// What the comparison says.
    pub verdict: Verdict,
    /// What happened when, in the median load.
    pub timeline: Vec<TimelineEvent>,
}

/// What the kernel said of the files' pages, before and after each load.
#[derive(Debug, Clone, Serialize)]
pub struct Proof {
    /// Whether every load found what it should.
    pub proven: bool,
    /// How the state was made.
    pub how: String,
    /// The share of the files' bytes that was in the page cache before each load.
    pub before: Vec<f64>,
    /// The share after it.
    pub after: Vec<f64>,
}

/// One stage of a state, at its best setting.
#[derive(Debug, Clone, Serialize)]
pub struct Ceiling {
    /// Which.
    pub stage: BenchStage,
    /// At which setting.
    pub setting: Setting,
    /// Bytes of the load that pass it.
    pub bytes: u64,
    /// One sample before each load.
    pub samples: Vec<Sample>,
    /// The median rate of the samples.
    pub bytes_per_second: f64,
    /// `bytes / bytes_per_second`.
    pub seconds: f64,
    /// The same at the setting that a load has unless it is told otherwise.
    pub own_bytes_per_second: f64,
    /// One sample at that setting before each load; none where it is the best one.
    pub own_samples: Vec<Sample>,
    /// That setting, where it is another one.
    pub own_setting: Option<Setting>,
}

/// How long a load must take.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prediction {
    /// Opening and planning, which come before the first byte: the median of several.
    pub before_seconds: f64,
    /// What takes longest: the slowest stage, or opening.
    pub bound_by: BenchStage,
    /// The slowest stage's rate.
    pub bytes_per_second: f64,
    /// T: `before_seconds` and the slowest stage.
    pub seconds: f64,
}

/// One load.
#[derive(Debug, Clone, Serialize)]
pub struct Load {
    /// From before the first open to the last byte usable, without the set-up of queue, threads and staging.
    pub seconds: f64,
    /// That set-up.
    pub setup_seconds: f64,
    /// What the load says of itself.
    pub report: Report,
}

/// What the comparison of a prediction with the loads says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The median of the loads.
    pub seconds: f64,
    /// T divided by it.
    pub reached: f64,
    /// The stage that limits such a load.
    pub bound_by: BenchStage,
    /// T divided by what it would be without the limiting stage: 1.3 means that more of it gains at most 30 %.
    pub next_is_faster_by: Option<f64>,
    /// Where every load took more than 5 % longer than T, and one cause explains at least half of that: what took the time.
    pub reason: Option<Reason>,
}

/// Why a load took longer than predicted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reason {
    /// What took the time.
    pub cause: Cause,
    /// How many seconds of the median load it explains.
    pub seconds: f64,
}

/// What can take time beyond the limiting stage.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Cause {
    /// Opening and planning took longer than usual.
    Opening,
    /// Reserving and dividing memory.
    Allocating,
    /// The loop's own work.
    Bookkeeping,
    /// Reads and uploads waited for each other: the staging buffers are too few or too small.
    Staging,
    /// The load's own reads are of another size or number than those that were fastest.
    ReadSetting,
    /// A stage ran slower within the load than alone: stages share cores and memory, or the machine is not quiet.
    SlowerTogether(BenchStage),
}

/// Something that took time in a load.
#[derive(Debug, Clone, Serialize)]
pub struct TimelineEvent {
    /// Who: `loop`, `reader 0, direct`, `upload 1`.
    pub lane: String,
    /// What: `open`, `plan`, `allocate`, `wait_read`, `wait_upload`, `read`, `upload`, `convert`.
    pub name: String,
    /// From the start of the load.
    pub start: f64,
    /// How long.
    pub seconds: f64,
    /// Bytes that were moved.
    pub bytes: u64,
}

impl Sample {
    /// Bytes per second; 0 for a sample without bytes.
    #[allow(clippy::cast_precision_loss)] // a rate has no use for the 54th bit
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// The least, the median and the most of a list of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The middle one (of an even number, the mean of the two).
    pub median: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// The spread of `values`; `None` of none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (lower, upper) = (sorted.get(sorted.len().saturating_sub(1) / 2)?, sorted.get(sorted.len() / 2)?);
        Some(Spread { min: *sorted.first()?, median: (lower + upper) / 2.0, max: *sorted.last()? })
    }
}

impl Trial {
    /// The rates of the samples in bytes per second; `None` before the first.
    pub fn rates(&self) -> Option<Spread> {
        Spread::of(self.samples.iter().map(Sample::rate))
    }

    /// The times of the samples; `None` before the first.
    pub fn seconds(&self) -> Option<Spread> {
        Spread::of(self.samples.iter().map(|sample| sample.seconds))
    }
}

impl StageBench {
    /// The fastest trial.
    pub fn best(&self) -> Option<&Trial> {
        self.trials.get(self.best?)
    }
}

impl State {
    /// The spread of the loads' seconds.
    pub fn seconds(&self) -> Option<Spread> {
        Spread::of(self.loads.iter().map(|load| load.seconds))
    }

    /// The load whose time is nearest to the median.
    pub fn median_load(&self) -> Option<&Load> {
        median_load(&self.loads).and_then(|at| self.loads.get(at))
    }
}

/// Which load's time is nearest to the median of all.
pub(super) fn median_load(loads: &[Load]) -> Option<usize> {
    let median = Spread::of(loads.iter().map(|load| load.seconds))?.median;
    let distance = |at: &usize| loads.get(*at).map_or(f64::INFINITY, |load| (load.seconds - median).abs());
    (0..loads.len()).min_by(|a, b| distance(a).total_cmp(&distance(b)))
}
