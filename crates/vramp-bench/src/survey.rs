//! The survey: which settings of which stages are tried, and what they gave.
//!
//! Rounds are interleaved: each setting is sampled once, then all once more, so that a slow moment of the machine hits all alike.
//! The first setting of a stage is the one that a load uses unless it is told otherwise.

use std::sync::Arc;
use std::time::Instant;

use super::Options;
use super::budget::{Clock, SURVEYING, memory_bytes};
use super::data::{BenchStage, CacheState, Sample, Setting, StageBench, Trial};
use super::memory::{self, CopyTarget};
use super::reads::{self, Portion, ReadWay, Tape};
use super::testbed::TestBed;
use super::uploads::{self, UploadWay};
use vramp::Float;
use vramp::device::Device;
use vramp::error::Result;
use vramp::extent::align_up;
use vramp::load::TransferOptions;
use vramp::os;
use vramp::plan::{Landing, LoadPlan, PlacedPiece, RouteChoice};
use vramp::storage::{Engine, Fallbacks, Route};

const MIB: u64 = 1 << 20;

/// Reads past the page cache are whole pages.
const PAGE_BYTES: u64 = 4 << 10;

/// A setting is better than one before it if it is so by this factor: less is noise.
const CLEARLY: f64 = 1.03;

/// One thing to try.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    Read(ReadWay),
    Fresh(ReadWay),
    FirstTouch { threads: usize },
    Copy { target: CopyTarget, threads: usize },
    Pin { count: usize, buffer_bytes: usize },
    Upload(UploadWay),
    Download { block_bytes: usize },
}

/// A stage, what to try, and what that gave.
struct Stage {
    stage: BenchStage,
    ways: Vec<Way>,
    trials: Vec<Trial>,
    skipped: Option<String>,
}

/// Everything that measuring stages takes.
pub(super) struct Survey<'a> {
    pub(super) bed: TestBed<'a>,
    /// How the loads move bytes.
    transfer: TransferOptions,
    fallbacks: &'a Fallbacks,
    tape: Tape,
    stages: Vec<Stage>,
}

/// Opens the device and waits until it can be used.
pub(super) fn open_device(options: &Options) -> Result<(Arc<dyn Device>, Sample)> {
    let began = Instant::now();
    let device = (options.open_device)()?;
    drop(device.alloc(1)?); // needs the context, which may be made in the background
    Ok((device, Sample { bytes: 0, seconds: began.elapsed().as_secs_f64() }))
}

impl<'a> Survey<'a> {
    /// A survey of what a load by this plan passes.
    pub(super) fn new(bed: TestBed<'a>, plan: &LoadPlan, fallbacks: &'a Fallbacks) -> Result<Survey<'a>> {
        let tape = Tape::new(bed.subject.parts(plan, &**bed.subject.checkpoint.storage(), fallbacks)?)?;
        let mut survey = Survey { transfer: bed.transfer(), bed, fallbacks, tape, stages: Vec::new() };
        survey.stages = survey.choose(plan);
        Ok(survey)
    }

    /// Samples every way of every stage, round by round.
    pub(super) fn measure(&mut self, clock: &Clock, progress: &dyn Fn(&str)) -> Result<()> {
        let rounds = clock.rounds(self.bed.options.effort.survey_rounds, SURVEYING, |round| {
            progress(&format!("measuring each stage alone, round {round}"));
            (0..self.stages.len()).try_for_each(|at| self.sample_stage(at))
        });
        rounds.map(drop)
    }

    fn sample_stage(&mut self, at: usize) -> Result<()> {
        let stage = self.stages[at].stage;
        for index in 0..self.stages[at].ways.len() {
            let way = self.stages[at].ways[index];
            self.bed.check()?;
            self.set_cache(stage)?;
            let (sample, setting) = self.sample(&way, None)?;
            let trial = &mut self.stages[at].trials[index];
            trial.setting = setting;
            trial.samples.push(sample);
        }
        Ok(())
    }

    /// Puts the page cache into the state that a stage wants. Reads past it leave nothing in it; others have to be made cold
    /// each time.
    pub(super) fn set_cache(&self, stage: BenchStage) -> Result<()> {
        match stage {
            BenchStage::Storage => self.bed.reach(CacheState::Cold).map(drop),
            BenchStage::PageCache | BenchStage::PageCacheToFresh => self.bed.reach(CacheState::Warm).map(drop),
            _ => Ok(()),
        }
    }

    /// Samples one way: `bytes` bytes from the beginning, or for as long as the effort says.
    pub(super) fn sample(&mut self, way: &Way, bytes: Option<u64>) -> Result<(Sample, Setting)> {
        let seconds = self.bed.options.effort.sample_seconds;
        let most = memory_bytes(&self.bed.options.effort);
        let most = os::available_memory_bytes().map_or(most, |available| most.min(available / 6));
        let memory_bytes = bytes.unwrap_or(self.bed.subject.bytes).clamp(MIB, most.max(MIB));
        let (device, cancel, fallbacks) = (&*self.bed.device, &self.transfer.cancel, self.fallbacks);
        if bytes.is_some() {
            self.tape.rewind();
        }
        match way {
            Way::Read(way) => {
                let portion = bytes.map_or(Portion::Seconds(seconds), Portion::Bytes);
                let (sample, engine) = reads::to_staging(&mut self.tape, way, portion, device, cancel, fallbacks)?;
                Ok((sample, way.setting(engine)))
            }
            Way::Fresh(way) => {
                let bytes = bytes.unwrap_or(memory_bytes); // in the rounds, as many as the load takes
                memory::touch(bytes)?;
                let sample = reads::to_fresh(&mut self.tape, way, bytes, cancel, fallbacks)?;
                Ok((sample, way.setting("threads")))
            }
            Way::FirstTouch { threads } => {
                memory::touch(memory_bytes)?;
                Ok((memory::first_touch(memory_bytes, *threads)?, memory::first_touch_setting(*threads)))
            }
            Way::Copy { target, threads } => {
                memory::touch(2 * memory_bytes)?;
                Ok((memory::copy(memory_bytes, *threads, *target)?, memory::copy_setting(*target, *threads)))
            }
            Way::Pin { count, buffer_bytes } => {
                let setting = Setting { way: String::new(), block_bytes: *buffer_bytes as u64, at_once: *count };
                Ok((uploads::pinning(device, *count, *buffer_bytes, fallbacks)?, setting))
            }
            Way::Upload(way) => Ok((uploads::upload(device, way, seconds, cancel, fallbacks)?, way.setting())),
            Way::Download { block_bytes } => {
                let setting = Setting { way: String::new(), block_bytes: *block_bytes as u64, at_once: 1 };
                Ok((uploads::download(device, *block_bytes, seconds, cancel, fallbacks)?, setting))
            }
        }
    }

    /// The fastest way of a stage with its setting, and a load's own way if that is another.
    pub(super) fn best(&self, stage: BenchStage) -> Option<(Way, Setting, Option<Way>)> {
        let stage = self.stages.iter().find(|found| found.stage == stage)?;
        let best = stage.best()?;
        let own = stage.ways.first().copied().filter(|_| best > 0);
        Some((*stage.ways.get(best)?, stage.trials.get(best)?.setting.clone(), own))
    }

    pub(super) fn into_stages(self, context: Sample) -> Vec<StageBench> {
        let bench = |stage: Stage| StageBench {
            stage: stage.stage,
            best: stage.best(),
            trials: stage.trials,
            skipped: stage.skipped,
        };
        let mut stages: Vec<StageBench> = self.stages.into_iter().map(bench).collect();
        if !is_host(&*self.bed.device) {
            let setting = Setting { way: "first use in this process".to_owned(), block_bytes: 0, at_once: 1 };
            let trials = vec![Trial { setting, samples: vec![context] }];
            stages.push(StageBench { stage: BenchStage::Context, trials, best: Some(0), skipped: None });
        }
        stages
    }

    // ---- what to try

    fn choose(&self, plan: &LoadPlan) -> Vec<Stage> {
        let mut stages = vec![self.storage(plan), self.page_cache(plan), self.page_cache_to_fresh(plan)];
        stages.push(self.first_touch());
        stages.push(self.host_copy());
        stages.extend(self.device_stages(plan));
        stages
    }

    /// The longest read of the plan, in whole pages: what a load's own reads are like.
    fn own_block(&self, plan: &LoadPlan) -> u64 {
        align_up(plan.transfers.iter().map(|transfer| transfer.len).max().unwrap_or(MIB).max(1), PAGE_BYTES)
    }

    fn storage(&self, plan: &LoadPlan) -> Stage {
        if self.bed.subject.in_memory {
            return Stage::skipped(BenchStage::Storage, "the files lie in memory: nothing can be cold there");
        }
        let queue = self.transfer.queue;
        let route = match self.transfer.route {
            RouteChoice::Buffered => Route::Buffered,
            RouteChoice::Mapped => Route::Mapped,
            _ if self.tape.has(Route::Direct) => Route::Direct,
            _ => Route::Buffered,
        };
        let direct = route == Route::Direct;
        let depth = if direct { queue.direct_depth } else { queue.page_cache_threads };
        let depth = if plan.staged() > 0 { depth.min(self.staging_count()) } else { depth };
        let own = ReadWay { route, engine: queue.engine, block_bytes: self.own_block(plan), at_once: depth };
        let (blocks, depths): (&[u64], &[usize]) = match self.bed.options.effort.every_setting {
            true => (&[1, 4, 8, 16], &[1, 2, 4, 8, 16, 32]),
            false => (&[4, 8], &[2, 4, 16]),
        };
        let pairs = blocks.iter().flat_map(|block| depths.iter().map(move |depth| (block * MIB, *depth)));
        let ring = pairs.map(|(block_bytes, at_once)| ReadWay { engine: Engine::Auto, block_bytes, at_once, route });
        let threads = ReadWay { engine: Engine::Threads, block_bytes: 4 * MIB, at_once: 8, route };
        let others = ring.chain([threads]).filter(|way| self.has_room_for(way));
        let ways = unique(std::iter::once(own).chain(others));
        Stage::of(BenchStage::Storage, ways.into_iter().map(Way::Read))
    }

    /// Whether there is more to read than a way of reading has in flight.
    fn has_room_for(&self, way: &ReadWay) -> bool {
        let all: u64 = self.bed.files.iter().map(|stretch| stretch.range.end - stretch.range.start).sum();
        way.block_bytes.saturating_mul(way.at_once as u64) <= all
    }

    /// Number of staging buffers that a load may have.
    fn staging_count(&self) -> usize {
        self.transfer.staging.map_or(self.bed.device.limits().staging.0, |staging| staging.count).max(1)
    }

    fn cached_ways(&self, plan: &LoadPlan) -> Vec<ReadWay> {
        let (route, engine) = (self.cached_route(), Engine::Threads);
        let threads = self.transfer.queue.page_cache_threads;
        let own = ReadWay { route, engine, block_bytes: self.own_block(plan), at_once: threads };
        let every = self.bed.options.effort.every_setting;
        let blocks: &[u64] = if every { &[1, 2, 4, 8] } else { &[1, 4] };
        let counts = if every { vec![1, threads, 2 * threads] } else { vec![threads] };
        let with = |route| {
            let counts = counts.clone();
            let pairs =
                blocks.iter().flat_map(move |block| counts.clone().into_iter().map(move |count| (*block, count)));
            pairs.map(move |(block, at_once)| ReadWay { route, engine, block_bytes: block * MIB, at_once })
        };
        let others = with(route).chain(with(Route::Mapped)).filter(|way| self.has_room_for(way));
        unique(std::iter::once(own).chain(others))
    }

    /// How a load reads what is in the page cache.
    fn cached_route(&self) -> Route {
        if self.transfer.route == RouteChoice::Mapped { Route::Mapped } else { Route::Buffered }
    }

    fn page_cache(&self, plan: &LoadPlan) -> Stage {
        Stage::of(BenchStage::PageCache, self.cached_ways(plan).into_iter().map(Way::Read))
    }

    fn page_cache_to_fresh(&self, plan: &LoadPlan) -> Stage {
        if !self.bed.device.limits().host_visible {
            return Stage::skipped(BenchStage::PageCacheToFresh, "the tensors do not go to host memory");
        }
        let ways = self.cached_ways(plan).into_iter().filter(|way| way.route == self.cached_route());
        Stage::of(BenchStage::PageCacheToFresh, ways.map(Way::Fresh))
    }

    fn first_touch(&self) -> Stage {
        let usual = self.transfer.queue.populate_threads.max(1);
        let counts = unique([usual, 1, cores()]);
        Stage::of(BenchStage::FirstTouch, counts.into_iter().map(|threads| Way::FirstTouch { threads }))
    }

    fn host_copy(&self) -> Stage {
        let targets = [CopyTarget::Fresh, CopyTarget::Touched];
        let way = |(threads, target)| Way::Copy { target, threads };
        let counts = if self.bed.options.effort.every_setting { vec![cores(), 1] } else { vec![cores()] };
        let ways = unique(counts).into_iter().flat_map(|threads| targets.map(|target| (threads, target)));
        Stage::of(BenchStage::HostCopy, ways.map(way))
    }

    fn device_stages(&self, plan: &LoadPlan) -> Vec<Stage> {
        let all = [BenchStage::Pinning, BenchStage::Upload, BenchStage::Download, BenchStage::Kernels];
        let limits = self.bed.device.limits();
        if !limits.keeps {
            return all.map(|stage| Stage::skipped(stage, "the null device keeps nothing")).into();
        }
        if limits.host_visible && staged_bytes(plan) < plan.read_bytes() / 100 {
            return all.map(|stage| Stage::skipped(stage, "host memory: reads land in place")).into();
        }
        let pinning = match is_host(&*self.bed.device) {
            true => Stage::skipped(BenchStage::Pinning, "host memory: nothing is locked"),
            false => self.pinning(),
        };
        let download = match is_host(&*self.bed.device) {
            true => Stage::skipped(BenchStage::Download, "host memory: it can be read where it is"),
            false => Stage::of(BenchStage::Download, [16, 64].map(|mib| Way::Download { block_bytes: mib << 20 })),
        };
        vec![pinning, self.uploads(), download, self.kernels(plan)]
    }

    /// The staging buffers of a load: their number and size.
    fn own_staging(&self) -> (usize, usize) {
        self.transfer.staging.map_or(self.bed.device.limits().staging, |staging| (staging.count, staging.bytes))
    }

    fn pinning(&self) -> Stage {
        let (count, buffer_bytes) = self.own_staging();
        Stage::of(BenchStage::Pinning, [Way::Pin { count, buffer_bytes }])
    }

    /// A load's own way of uploading.
    fn own_upload(&self) -> UploadWay {
        let ((buffers, block_bytes), lanes) = (self.own_staging(), self.transfer.lanes);
        UploadWay { block_bytes, buffers, lanes, cast: None }
    }

    fn uploads(&self) -> Stage {
        let own = self.own_upload();
        let counts: &[usize] = if self.bed.options.effort.every_setting { &[1, 2, 4] } else { &[1, 2] };
        let (buffers, block_bytes) = self.bed.device.limits().staging;
        let usual = UploadWay { block_bytes, buffers, ..own };
        let others = counts.iter().map(|lanes| UploadWay { lanes: Some(*lanes), ..usual });
        Stage::of(BenchStage::Upload, std::iter::once(own).chain(others).map(Way::Upload))
    }

    fn kernels(&self, plan: &LoadPlan) -> Stage {
        let planned = casts_of(plan);
        let usual = [(Float::BF16, Float::F32), (Float::F32, Float::BF16), (Float::F8E4M3, Float::BF16)];
        match (planned.is_empty(), is_host(&*self.bed.device)) {
            (true, true) => Stage::skipped(BenchStage::Kernels, "no conversion was asked for"),
            (true, false) => self.kernels_of(&usual),
            (false, _) => self.kernels_of(&planned),
        }
    }

    fn kernels_of(&self, casts: &[(Float, Float)]) -> Stage {
        let way = |cast: &(Float, Float)| UploadWay { cast: Some(*cast), ..self.own_upload() };
        Stage::of(BenchStage::Kernels, casts.iter().map(way).map(Way::Upload))
    }
}

impl Stage {
    fn of(stage: BenchStage, ways: impl IntoIterator<Item = Way>) -> Stage {
        let ways: Vec<Way> = ways.into_iter().collect();
        let setting = Setting { way: String::new(), block_bytes: 0, at_once: 0 };
        let trials = ways.iter().map(|_| Trial { setting: setting.clone(), samples: Vec::new() }).collect();
        Stage { stage, ways, trials, skipped: None }
    }

    /// The fastest of the ways that do the same as the first: other conversions are other work.
    fn best(&self) -> Option<usize> {
        let cast = |way: &Way| if let Way::Upload(way) = way { way.cast } else { None };
        let first = self.ways.first().and_then(cast);
        let alike = self.ways.iter().zip(&self.trials).enumerate().filter(|(_, (way, _))| cast(way) == first);
        let medians = alike.filter_map(|(index, (_, trial))| Some((index, trial.rates()?.median)));
        medians.reduce(|best, other| if other.1 > best.1 * CLEARLY { other } else { best }).map(|best| best.0)
    }

    fn skipped(stage: BenchStage, why: &str) -> Stage {
        Stage { stage, ways: Vec::new(), trials: Vec::new(), skipped: Some(why.to_owned()) }
    }
}

/// Whether the device is the host: nothing has to be opened, locked or fetched back.
fn is_host(device: &dyn Device) -> bool {
    device.limits().host_visible || !device.limits().keeps
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

/// Each once, in the order of the first.
fn unique<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut kept = Vec::new();
    for one in all {
        if !kept.contains(&one) {
            kept.push(one);
        }
    }
    kept
}

/// Bytes of a plan that go through staging buffers.
pub(super) fn staged_bytes(plan: &LoadPlan) -> u64 {
    let staged = plan.transfers.iter().filter(|one| matches!(one.landing, Landing::Staged { .. }));
    staged.map(|one| one.len).sum()
}

/// The pieces of a plan that lie in staging buffers.
pub(super) fn staged_pieces(plan: &LoadPlan) -> impl Iterator<Item = &PlacedPiece> {
    plan.transfers.iter().flat_map(|transfer| match &transfer.landing {
        Landing::InPlace { .. } => &[][..],
        Landing::Staged { pieces } => pieces,
    })
}

/// The conversions of a plan, the one of most bytes first.
fn casts_of(plan: &LoadPlan) -> Vec<(Float, Float)> {
    let cast = |placed: &PlacedPiece| placed.piece.cast.map(|cast| (cast.from, cast.to));
    let mut casts: Vec<(u64, (Float, Float))> = Vec::new();
    for (pair, bytes) in staged_pieces(plan).filter_map(|placed| Some((cast(placed)?, placed.piece.taken()))) {
        match casts.iter_mut().find(|known| known.1 == pair) {
            Some(known) => known.0 += bytes,
            None => casts.push((bytes, pair)),
        }
    }
    casts.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    casts.into_iter().map(|(_, pair)| pair).collect()
}
