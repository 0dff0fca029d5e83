//! Planted bottlenecks: one thing is slow by a clock, and the verdict must name it.
//!
//! The rates are far below what any machine does, so that a busy one changes little; no time is asserted.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use vramp::checkpoint::{Shard, TensorData, TensorInfo};
use vramp::convert::Float;
use vramp::device::CpuDevice;
use vramp::dtype::Dtype;
use vramp::extent::Extent;
use vramp::load::{Cancel, Convert};
use vramp::report::Staging;
use vramp::storage::{FileSystem, OpenFile, Residency, Route};
use vramp::testing::{MemoryFile, MemoryStorage, Pace, PacedDevice, PacedSource, watched};

const BYTES: u64 = 4 << 20;
const TENSOR: u64 = BYTES / TENSORS;
const TENSORS: u64 = 16;

/// Far above what the others do.
const FAST: f64 = 1e12;

/// So slow that nothing else matters.
const SLOW: f64 = 40e6;

/// One round, as many as the time takes.
const BRIEF: Effort = Effort { sample_seconds: 0.01, survey_rounds: 1, rounds: 1, most_seconds: None, ..Effort::QUICK };

/// A page cache that does as it is told.
struct ToldCache(MemoryStorage);

/// A page cache that keeps nothing.
struct NoCache(MemoryStorage);

impl PageCache for NoCache {
    fn drop_files(&self, files: &[Stretch]) -> Result<String> {
        ToldCache(self.0.clone()).drop_files(files)
    }

    fn fill(&self, files: &[Stretch], _cancel: &Cancel) -> Result<String> {
        self.drop_files(files)
    }
}

impl ToldCache {
    fn set(&self, files: &[Stretch], residency: impl Fn(u64) -> Residency) -> Result<String> {
        for stretch in files {
            let file = self.0.file(&stretch.path).unwrap();
            file.set_residency(residency(file.version().len()));
        }
        Ok("told so".to_owned())
    }
}

impl PageCache for ToldCache {
    fn drop_files(&self, files: &[Stretch]) -> Result<String> {
        self.set(files, Residency::none)
    }

    fn fill(&self, files: &[Stretch], _cancel: &Cancel) -> Result<String> {
        self.set(files, Residency::all)
    }
}

/// BF16 tensors in a file of about so many bytes, on a disk of this pace.
fn checkpoint(disk: Option<Pace>, bytes: u64) -> (Checkpoint, MemoryStorage) {
    let (path, first) = ("model.safetensors", 4096);
    let system = FileSystem { name: "ext4".to_owned(), network: false, memory: false };
    let each = bytes / TENSORS;
    let file = MemoryFile::new(path, vec![0; usize::try_from(first + bytes).unwrap()]).with_file_system(system);
    let file = match disk {
        Some(pace) => file.with_source(Route::Direct, |inner| Arc::new(PacedSource::new(inner, pace))),
        None => file,
    };
    let shard = Shard { path: path.into(), bytes: first + bytes, version: file.version(), derived: None };
    let storage = MemoryStorage::new();
    storage.insert(Arc::new(file));
    let tensor = |index: u64| TensorInfo {
        name: format!("layer.{index:02}").into(),
        dtype: Dtype::BF16.into(),
        shape: [each / 2].into(),
        data: TensorData::Whole(Extent { shard: 0, offset: first + index * each, len: each }),
    };
    let tensors = (0..TENSORS).map(tensor).collect();
    let checkpoint = vramp::testing::checkpoint_of(path, Arc::new(storage.clone()), vec![shard], tensors);
    (checkpoint, storage)
}

/// Benchmarks a small one, on the device.
fn bench(disk: Option<Pace>, device: impl Device + 'static, transfer: TransferOptions) -> BenchReport {
    bench_of(checkpoint(disk, BYTES), device, transfer)
}

fn bench_of(
    (checkpoint, storage): (Checkpoint, MemoryStorage),
    device: impl Device + 'static,
    transfer: TransferOptions,
) -> BenchReport {
    bench_for((checkpoint, storage), device, transfer, Effort { rounds: 3, ..BRIEF })
}

fn bench_for(
    (checkpoint, storage): (Checkpoint, MemoryStorage),
    device: impl Device + 'static,
    transfer: TransferOptions,
    effort: Effort,
) -> BenchReport {
    let device: Arc<dyn Device> = Arc::new(device);
    let open_device = move || Ok(Arc::clone(&device));

    let cache = Arc::new(ToldCache(storage.clone()));
    let options = Options { cache, transfer, ..Options::new(Box::new(open_device), effort) };
    run_on(&Arc::new(checkpoint), &options, &|_| {}).unwrap()
}

fn state(report: &BenchReport, state: CacheState) -> &State {
    report.states.iter().find(|found| found.state == state).unwrap()
}

#[test]
fn a_slow_disk_is_the_limit_when_cold_and_not_when_warm() {
    watched(|| {
        let report = bench(Some(Pace::new(SLOW)), CpuDevice::new(), TransferOptions::default());
        let cold = state(&report, CacheState::Cold);
        assert_eq!(cold.verdict.bound_by, BenchStage::Storage, "{cold:#?}");
        assert!(cold.proof.proven && cold.proof.before.iter().all(|share| *share == 0.0));
        assert!(cold.timeline.iter().any(|event| event.name == "read" && event.lane.contains("direct")));
        let warm = state(&report, CacheState::Warm);
        assert_eq!(warm.verdict.bound_by, BenchStage::PageCacheToFresh);
        assert!(warm.proof.proven && warm.seconds().unwrap().median < cold.seconds().unwrap().median);
    });
}

#[test]
fn a_slow_link_is_the_limit_in_both_states() {
    watched(|| {
        // So slow that a machine that is busy with other tests does not make the page cache look slower.
        let device = PacedDevice::new(Pace::new(SLOW / 4.0), Pace::new(FAST));
        let report = bench(None, device, TransferOptions::default());
        for found in &report.states {
            assert_eq!(found.verdict.bound_by, BenchStage::Upload, "{found:#?}");
            let median = found.median_load().unwrap();
            assert_eq!(median.report.main_stage.stage, vramp::report::Stage::Upload);
        }
    });
}

#[test]
fn a_slow_kernel_is_the_limit_where_something_is_converted() {
    watched(|| {
        let device = || PacedDevice::new(Pace::new(20.0 * SLOW), Pace::new(SLOW / 4.0));
        let convert = Some(Convert { to: Float::F32, allow_overflow: false });
        let report = bench(None, device(), TransferOptions { convert, ..TransferOptions::default() });
        for found in &report.states {
            assert_eq!(found.verdict.bound_by, BenchStage::Kernels, "{found:#?}");
            assert_eq!(found.median_load().unwrap().report.main_stage.stage, vramp::report::Stage::Kernels);
        }
        let report = bench(None, device(), TransferOptions::default());
        assert!(report.states.iter().all(|found| found.verdict.bound_by != BenchStage::Kernels));
    });
}

#[test]
fn staging_that_makes_reads_and_uploads_take_turns_is_named() {
    watched(|| {
        let device = PacedDevice::new(Pace::new(SLOW), Pace::new(FAST));
        let staging = Some(Staging { count: 1, bytes: 64 << 10 });
        let transfer = TransferOptions { staging, ..TransferOptions::default() };
        let report = bench(Some(Pace::new(SLOW)), device, transfer);
        let cold = state(&report, CacheState::Cold);
        assert_eq!(cold.verdict.reason.map(|reason| reason.cause), Some(Cause::Staging), "{cold:#?}");
        assert_eq!(cold.median_load().unwrap().report.main_stage.stage, vramp::report::Stage::Staging);
    });
}

#[test]
fn reads_that_are_too_few_and_too_small_are_named() {
    watched(|| {
        let disk = Pace::new(10.0 * SLOW).with_latency(Duration::from_millis(2));
        let mut transfer = TransferOptions { read_bytes: Some(64 << 10), ..TransferOptions::default() };
        transfer.queue.direct_depth = 1;
        let report = bench_of(checkpoint(Some(disk), 8 * BYTES), CpuDevice::new(), transfer);
        let cold = state(&report, CacheState::Cold);
        assert_eq!(cold.verdict.bound_by, BenchStage::Storage);
        assert_eq!(cold.verdict.reason.map(|reason| reason.cause), Some(Cause::ReadSetting), "{cold:#?}");
    });
}

#[test]
fn files_in_memory_cannot_be_cold_and_that_is_said() {
    let (checkpoint, storage) = checkpoint(None, BYTES);
    let path = Path::new("model.safetensors");
    let memory = FileSystem { name: "tmpfs".to_owned(), network: false, memory: true };
    let bytes = usize::try_from(4096 + BYTES).unwrap();
    storage.insert(Arc::new(MemoryFile::new(path, vec![0; bytes]).with_file_system(memory)));
    let effort = BRIEF;
    let cache = Arc::new(ToldCache(storage.clone()));

    let open_device = || Ok(Arc::new(CpuDevice::new()) as Arc<dyn Device>);
    let options = Options { cache, ..Options::new(Box::new(open_device), effort) };
    let report = run_on(&Arc::new(checkpoint), &options, &|_| {}).unwrap();
    assert!(report.states.iter().all(|found| found.state == CacheState::Warm));
    assert!(report.warnings.iter().any(|warning| warning.contains("tmpfs")), "{:?}", report.warnings);
    let storage = report.stages.iter().find(|found| found.stage == BenchStage::Storage).unwrap();
    assert!(storage.skipped.is_some());
}

#[test]
fn of_a_checkpoint_that_is_too_large_a_part_is_loaded() {
    let effort = Effort { most_bytes: 3 * TENSOR, ..BRIEF };
    let report = bench_for(checkpoint(None, BYTES), CpuDevice::new(), TransferOptions::default(), effort);
    assert_eq!((report.subject.loaded_bytes, report.subject.loaded_tensors), (3 * TENSOR, 3));
    assert!(report.subject.part.is_some() && report.subject.bytes == BYTES);
}

#[test]
fn a_tensor_that_is_too_large_is_cut() {
    let most_bytes = TENSOR / 2 - 1;
    let effort = Effort { most_bytes, ..BRIEF };
    let report = bench_for(checkpoint(None, BYTES), CpuDevice::new(), TransferOptions::default(), effort);
    let loaded = report.subject.loaded_bytes;
    assert!(report.subject.loaded_tensors == 1 && loaded <= most_bytes && loaded > most_bytes - 32, "{loaded}");
}

#[test]
fn from_a_slow_disk_as_much_is_loaded_as_the_time_allows() {
    watched(|| {
        let slow = checkpoint(Some(Pace::new(SLOW)), 4 * BYTES);
        let effort = Effort { most_seconds: Some(1.0), ..BRIEF };
        let report = bench_for(slow, CpuDevice::new(), TransferOptions::default(), effort);
        // No disk is faster than its pace: the bytes pass it more than ten times in a second, which is said.
        let loaded = report.subject.loaded_bytes;
        assert!(loaded > 0 && (loaded as f64) < SLOW / 10.0, "{loaded}");
        assert!(report.subject.part.as_ref().is_some_and(|why| why.contains("MB/s")), "{:?}", report.subject.part);
    });
}

/// A search on a disk with a delay, told to read one piece at a time; nothing is ever warm, so that nothing is quick and by chance.
fn search(budget: Duration) -> Tuning {
    let disk = Pace::new(10.0 * SLOW).with_latency(Duration::from_millis(20));
    let (checkpoint, storage) = checkpoint(Some(disk), 4 * BYTES);
    let cache = Arc::new(NoCache(storage));
    let open_device = || Ok(Arc::new(CpuDevice::new()) as Arc<dyn Device>);
    let mut transfer = TransferOptions { read_bytes: Some(2 << 20), ..TransferOptions::default() };
    transfer.queue.direct_depth = 1;
    let options = Options { cache, transfer, ..Options::new(Box::new(open_device), Effort::QUICK) };
    super::tune::tune_on(&Arc::new(checkpoint), &options, budget, &|_| {}).unwrap()
}

#[test]
fn tuning_finds_what_is_far_better_and_stops_when_time_is_up() {
    watched(|| {
        let tuning = search(Duration::from_secs(3600));
        assert!(tuning.not_reached.is_empty() && tuning.trials.iter().any(|trial| trial.kept), "{tuning:#?}");
        let deeper = tuning.profile.direct_depth.is_some_and(|depth| depth > 1);
        let longer = tuning.profile.read_bytes.is_some_and(|bytes| bytes > 2 << 20);
        assert!(deeper || longer, "{tuning:#?}");
        let brief = search(Duration::ZERO);
        assert!(!brief.not_reached.is_empty() && brief.trials.len() == 1);
    });
}
