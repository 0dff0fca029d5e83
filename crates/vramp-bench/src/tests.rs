//! Whole benchmarks over fakes: one thing has a pace, and the report must have it among its figures.
//!
//! A busy machine makes things slower and never faster, so only what a pace forbids is asserted of rates. Which stage the verdict
//! names follows from the figures alone (`predict`).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::data::Ceiling;
use super::*;
use vramp::Float;
use vramp::checkpoint::{Shard, TensorData, TensorInfo};
use vramp::device::CpuDevice;
use vramp::dtype::Dtype;
use vramp::extent::Extent;
use vramp::load::{Cancel, Convert};
use vramp::storage::{FileSystem, OpenFile, Residency, Route};
use vramp::testing::{MemoryFile, MemoryStorage, Pace, PacedDevice, PacedSource, watched};

const BYTES: u64 = 4 << 20;
const TENSOR: u64 = BYTES / TENSORS;
const TENSORS: u64 = 16;

/// No limit.
const FAST: f64 = 1e12;

/// A pace that a benchmark of a few megabytes can wait for.
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
    let shard = Shard::new(path, first + bytes, file.version());
    let storage = MemoryStorage::new();
    storage.insert(Arc::new(file));
    let tensor = |index: u64| {
        let data = TensorData::Whole(Extent { shard: 0, offset: first + index * each, len: each });
        TensorInfo::new(format!("layer.{index:02}"), Dtype::BF16, [usize::try_from(each / 2).unwrap()], data)
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

/// The stages that such a load passes.
fn stages(state: &State) -> Vec<BenchStage> {
    state.ceilings.iter().map(|ceiling| ceiling.stage).collect()
}

/// A stage that has a pace was measured through it: nothing is faster than its pace.
#[track_caller]
fn keeps_pace(state: &State, stage: BenchStage, pace: f64) {
    let found: Vec<&Ceiling> = state.ceilings.iter().filter(|ceiling| ceiling.stage == stage).collect();
    let [ceiling] = found[..] else { panic!("{stage:?} is not among {:?}", stages(state)) };
    assert!(ceiling.samples.iter().all(|sample| sample.rate() <= pace * 1.001), "{ceiling:#?}");
}

#[test]
fn a_cold_load_passes_the_disk_and_a_warm_one_does_not() {
    watched(|| {
        let report = bench(Some(Pace::new(SLOW)), CpuDevice::new(), TransferOptions::default());
        let cold = state(&report, CacheState::Cold);
        keeps_pace(cold, BenchStage::Storage, SLOW);
        assert_eq!(stages(cold), [BenchStage::Storage, BenchStage::FirstTouch]);
        assert!(cold.seconds().unwrap().min >= BYTES as f64 / SLOW, "{cold:#?}");
        assert!(cold.proof.proven && cold.proof.before.iter().all(|share| *share == 0.0));
        assert!(cold.timeline.iter().any(|event| event.name == "read" && event.lane.contains("direct")));
        let warm = state(&report, CacheState::Warm);
        assert_eq!(stages(warm), [BenchStage::PageCacheToFresh]);
        assert!(warm.proof.proven && warm.proof.before.iter().all(|share| *share == 1.0));
    });
}

#[test]
fn a_load_to_a_device_passes_the_link_in_both_states() {
    watched(|| {
        let report = bench(None, PacedDevice::new(Pace::new(SLOW), Pace::new(FAST)), TransferOptions::default());
        assert_eq!(report.states.len(), 2);
        for found in &report.states {
            keeps_pace(found, BenchStage::Upload, SLOW);
            assert!(found.seconds().unwrap().min >= BYTES as f64 / SLOW, "{found:#?}");
        }
    });
}

#[test]
fn a_load_passes_the_kernels_where_something_is_converted() {
    watched(|| {
        let device = || PacedDevice::new(Pace::new(FAST), Pace::new(SLOW));
        let convert = Some(Convert::to(Float::F32));
        let report = bench(None, device(), TransferOptions::default().convert(convert));
        for found in &report.states {
            keeps_pace(found, BenchStage::Kernels, SLOW);
            assert!(found.seconds().unwrap().min >= BYTES as f64 / SLOW, "{found:#?}");
        }
        let report = bench(None, device(), TransferOptions::default());
        assert!(report.states.iter().all(|found| !stages(found).contains(&BenchStage::Kernels)));
    });
}

#[test]
fn reads_are_measured_as_the_load_makes_them_and_in_the_fastest_way() {
    watched(|| {
        let mut transfer = TransferOptions::default().read_bytes(64 << 10);
        transfer.queue.direct_depth = 1;
        let report = bench(Some(Pace::new(SLOW)), CpuDevice::new(), transfer);
        let storage = report.stages.iter().find(|found| found.stage == BenchStage::Storage).unwrap();
        assert!(storage.trials[0].setting.at_once == 1 && storage.best.is_some(), "{storage:#?}");
        for state in &report.states {
            let ceilings = state.ceilings.iter().filter(|ceiling| ceiling.stage == BenchStage::Storage);
            ceilings.for_each(|it| {
                assert_eq!(it.own_setting.is_some(), it.own_samples.len() == it.samples.len(), "{it:#?}")
            });
        }
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

/// A search for options; nothing is ever warm.
fn search(budget: Duration) -> Tuning {
    let (checkpoint, storage) = checkpoint(None, BYTES);
    let cache = Arc::new(NoCache(storage));
    let open_device = || Ok(Arc::new(CpuDevice::new()) as Arc<dyn Device>);
    let options = Options { cache, ..Options::new(Box::new(open_device), Effort::QUICK) };
    super::tune::tune_on(&Arc::new(checkpoint), &options, budget, &|_| {}).unwrap()
}

#[test]
fn tuning_tries_everything_in_time_and_one_value_without() {
    watched(|| {
        let tuning = search(Duration::from_secs(3600));
        assert!(tuning.not_reached.is_empty() && tuning.trials.len() > 1, "{tuning:#?}");
        let brief = search(Duration::ZERO);
        assert!(!brief.not_reached.is_empty() && brief.trials.len() == 1);
        assert_eq!(brief.not_reached.len() + 1, tuning.trials.len());
    });
}
