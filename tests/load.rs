//! The loop's invariants, L1 to L5, against fakes that shuffle, delay and fail. A hang is a failure.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vramp::Float;
use vramp::checkpoint::Selection;
use vramp::device::{Arena, CpuDevice, Device, DeviceLimits, NullDevice, Stream};
use vramp::load::{Cancel, Convert, Loaded, Loader, Observer, TransferOptions};
use vramp::memory::staging::StagingPool;
use vramp::plan::{LoadPlan, RouteChoice};
use vramp::report::Staging;
use vramp::storage::{Completed, Fallbacks, QueueOptions, Read, ReadQueue, ReadTarget, Route, queue};
use vramp::testing::{
    FaultySource, Gate, LazyDevice, MemoryFile, Pace, PacedDevice, Random, ShuffledQueue, Synthetic, Trouble, watched,
};
use vramp::{Error, Result};

fn as_is(_shard: u32, file: MemoryFile) -> MemoryFile {
    file
}

/// A transfer with few and small buffers, so that everything that can run out does.
fn tight(seed: u64) -> TransferOptions {
    let mut random = Random::new(seed ^ 0x5eed);
    let staging = Some(Staging { count: 1 + random.below(4), bytes: 4096 << random.below(5) });
    let route = [RouteChoice::Auto, RouteChoice::Auto, RouteChoice::Direct, RouteChoice::Buffered, RouteChoice::Mapped];
    TransferOptions::default().staging(staging).route(route[random.below(5)])
}

fn load_with(loader: &mut Loader, synthetic: &Synthetic) -> Result<Loaded> {
    let selected = synthetic.checkpoint.select(&Selection::default())?;
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected)?;
    loader.load(&prepared)
}

fn loader(device: Arc<dyn Device>, options: TransferOptions) -> Loader {
    Loader::new(device, options)
}

/// The engine of a case: threads, or one of two shuffled orders.
fn engine(loader: Loader, seed: u64) -> Loader {
    match seed % 3 {
        0 => loader,
        _ => loader.with_queue(move |_, _| Box::new(ShuffledQueue::new(seed, 1 + (seed % 7) as usize))),
    }
}

fn assert_same(loaded: &Loaded, synthetic: &Synthetic, what: &str) {
    assert_eq!(loaded.tensors().len(), synthetic.expected.len(), "{what}");
    for (name, bytes) in &synthetic.expected {
        assert!(loaded.tensor(name).unwrap().download().unwrap() == *bytes, "wrong bytes in {name}: {what}");
    }
}

#[test]
fn l1_l2_l3_the_bytes_are_right_whatever_the_device_the_order_and_the_buffers() {
    watched(|| {
        for seed in 0..150u64 {
            let synthetic = Synthetic::new(seed, 1 + (seed % 4) as u32, 300_000, as_is);
            let devices: [Arc<dyn Device>; 3] =
                [Arc::new(CpuDevice::new()), Arc::new(CpuDevice::with_align(256)), Arc::new(LazyDevice::new(seed))];
            for device in devices {
                let what = format!("seed {seed} on {} {:?}", device.name(), device.limits());
                let mut loader = engine(loader(device, tight(seed)), seed);
                for _ in 0..2 {
                    let loaded = load_with(&mut loader, &synthetic).unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_same(&loaded, &synthetic, &what);
                    assert_eq!(loaded.report.bytes, synthetic.checkpoint.total_bytes());
                }
            }
        }
    });
}

/// A queue that notes what the loop asks of it.
struct Spy {
    inner: Box<dyn ReadQueue>,
    log: Arc<Mutex<Log>>,
}

#[derive(Default)]
struct Log {
    in_flight: usize,
    most_in_flight: usize,
    failed: bool,
    submitted_after_failure: usize,
    reads: u64,
    seen: BTreeSet<usize>,
    twice: bool,
}

impl ReadQueue for Spy {
    fn submit(&mut self, read: Read, target: ReadTarget) {
        let mut log = self.log.lock().unwrap();
        log.in_flight += 1;
        log.most_in_flight = log.most_in_flight.max(log.in_flight);
        log.submitted_after_failure += usize::from(log.failed);
        log.reads += 1;
        log.twice |= !log.seen.insert(read.id);
        drop(log);
        self.inner.submit(read, target);
    }

    fn complete(&mut self) -> Option<Completed> {
        let completed = self.inner.complete();
        let mut log = self.log.lock().unwrap();
        if let Some(completed) = &completed {
            log.in_flight -= 1;
            log.failed |= completed.outcome.is_err();
        }
        completed
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn engine(&self) -> &'static str {
        "spy"
    }
}

/// A device that notes its allocations and keeps a handle on its pools.
struct SpyDevice {
    inner: Arc<dyn Device>,
    arenas: Mutex<Vec<u64>>,
    pools: Mutex<Vec<StagingPool>>,
}

impl SpyDevice {
    fn over(inner: impl Device + 'static) -> Arc<SpyDevice> {
        Arc::new(SpyDevice { inner: Arc::new(inner), arenas: Mutex::default(), pools: Mutex::default() })
    }

    fn buffers_out(&self) -> usize {
        self.pools.lock().unwrap().iter().map(|pool| pool.count() - pool.available()).sum()
    }
}

impl Device for SpyDevice {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn limits(&self) -> DeviceLimits {
        self.inner.limits()
    }

    fn staging(&self, count: usize, buffer_bytes: usize, fallbacks: &Fallbacks) -> Result<StagingPool> {
        let pool = self.inner.staging(count, buffer_bytes, fallbacks)?;
        self.pools.lock().unwrap().push(pool.clone());
        Ok(pool)
    }

    fn alloc(&self, bytes: u64) -> Result<Arena> {
        self.arenas.lock().unwrap().push(bytes);
        self.inner.alloc(bytes)
    }

    fn stream(&self, lanes: Option<usize>, fallbacks: &Fallbacks) -> Result<Box<dyn Stream>> {
        self.inner.stream(lanes, fallbacks)
    }
}

fn spied(loader: Loader, seed: u64) -> (Loader, Arc<Mutex<Log>>) {
    let log = Arc::new(Mutex::new(Log::default()));
    let shared = Arc::clone(&log);
    let threads = QueueOptions::default().page_cache_threads(2).direct_depth(2).populate_threads(1);
    let make = move |pool: Option<&StagingPool>, fallbacks: &_| -> Box<dyn ReadQueue> {
        let inner: Box<dyn ReadQueue> = match seed % 2 {
            0 => Box::new(ShuffledQueue::new(seed, 4)),
            _ => queue(&threads, pool, fallbacks),
        };
        Box::new(Spy { inner, log: Arc::clone(&shared) })
    };
    (loader.with_queue(make), log)
}

/// A file whose three routes share one kind of trouble.
fn troubled(file: MemoryFile, trouble: &Trouble) -> MemoryFile {
    [Route::Direct, Route::Buffered, Route::Mapped].into_iter().fold(file, |file, route| {
        let troubles = vec![trouble.clone()];
        file.with_source(route, |source| Arc::new(FaultySource::new(source, troubles)))
    })
}

#[test]
fn l4_after_a_failed_read_nothing_is_submitted_and_everything_comes_back() {
    watched(|| {
        let mut failures = 0;
        for seed in 0..120u64 {
            let at = seed / 4;
            let trouble =
                [Trouble::FailFrom(at), Trouble::ShortAt(at), Trouble::PanicAt(at)][(seed % 3) as usize].clone();
            if seed % 2 == 0 && matches!(trouble, Trouble::PanicAt(_)) {
                continue; // the shuffled queue reads on the loop's own thread, which a panic would end
            }
            let synthetic = Synthetic::new(seed, 2, 300_000, |_, file| troubled(file, &trouble));
            let lazy = LazyDevice::new(seed);
            let device = SpyDevice::over(lazy.clone());
            let (mut loader, log) = spied(loader(Arc::clone(&device) as Arc<dyn Device>, tight(seed)), seed);
            let outcome = load_with(&mut loader, &synthetic);
            let log = log.lock().unwrap();
            assert_eq!(outcome.is_err(), log.failed, "seed {seed}");
            failures += usize::from(log.failed);
            assert_eq!((log.submitted_after_failure, log.in_flight, log.twice), (0, 0, false), "seed {seed}");
            assert_eq!(device.buffers_out(), 0, "seed {seed}");
            drop(outcome);
            assert_eq!(lazy.live_bytes(), 0, "device memory leaks, seed {seed}");
        }
        assert!(failures > 20, "only {failures} loads met their trouble: the test tests nothing");
    });
}

#[test]
fn l4_a_failed_upload_ends_the_load_and_releases_everything() {
    watched(|| {
        for number in 0..12 {
            let synthetic = Synthetic::new(number, 3, 300_000, as_is);
            let lazy = LazyDevice::failing(number, number);
            let device = SpyDevice::over(lazy.clone());
            let (mut loader, log) = spied(loader(Arc::clone(&device) as Arc<dyn Device>, tight(3)), number);
            let error = load_with(&mut loader, &synthetic).map(drop).unwrap_err();
            assert!(matches!(error, Error::Device { .. }), "{error}");
            assert_eq!((log.lock().unwrap().in_flight, device.buffers_out(), lazy.live_bytes()), (0, 0, 0));
        }
    });
}

/// Throws the switch after so many steps.
pub(crate) struct CancelAfter {
    pub(crate) cancel: Cancel,
    pub(crate) steps: AtomicU64,
}

impl Observer for CancelAfter {
    fn planned(&self, _plan: &LoadPlan) {}

    fn advanced(&self, _done: u64) {
        if self.steps.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.cancel.cancel();
        }
    }
}

#[test]
fn l4_a_load_can_be_cancelled_at_any_step() {
    watched(|| {
        for step in 1..25 {
            let synthetic = Synthetic::new(7, 3, 300_000, as_is);
            let lazy = LazyDevice::new(step);
            let cancel = Cancel::new();
            let observer = Arc::new(CancelAfter { cancel: cancel.clone(), steps: AtomicU64::new(step) });
            let options = tight(3).cancel(cancel).observer(observer);
            let device = SpyDevice::over(lazy.clone());
            let (mut loader, log) = spied(loader(Arc::clone(&device) as Arc<dyn Device>, options), step);
            match load_with(&mut loader, &synthetic) {
                Err(Error::Cancelled) => {}
                Ok(loaded) => assert_same(&loaded, &synthetic, "the switch came after the last step"),
                Err(error) => panic!("{error}"),
            }
            assert_eq!((log.lock().unwrap().in_flight, device.buffers_out()), (0, 0));
        }
    });
}

#[test]
fn l5_a_load_takes_one_arena_and_one_pool_whatever_the_checkpoint() {
    watched(|| {
        for shards in [1, 8, 40] {
            let synthetic = Synthetic::new(11, shards, 60_000, as_is);
            let device = SpyDevice::over(LazyDevice::new(5));
            let staging = Some(Staging { count: 3, bytes: 16 << 10 });
            let options = TransferOptions::default().staging(staging);
            let (mut loader, log) = spied(loader(Arc::clone(&device) as Arc<dyn Device>, options), 4);
            let bytes = load_with(&mut loader, &synthetic).unwrap().report.bytes;
            let arenas = device.arenas.lock().unwrap();
            let pools = device.pools.lock().unwrap();
            assert_eq!((arenas.len(), pools.len(), pools[0].count()), (1, 1, 3));
            assert!(arenas[0] <= bytes + 256 * synthetic.expected.len() as u64, "{} for {bytes}", arenas[0]);
            assert!(log.lock().unwrap().most_in_flight <= 3, "more reads than buffers");
        }
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_read() {
    let synthetic = Synthetic::new(1, 2, 300_000, as_is);
    let (mut loader, log) = spied(loader(Arc::new(LazyDevice::small(1000)), tight(1)), 0);
    let error = load_with(&mut loader, &synthetic).map(drop).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { free: Some(1000), .. }), "{error}");
    assert_eq!(log.lock().unwrap().reads, 0);
}

#[test]
fn a_file_that_changes_during_the_load_is_an_error() {
    watched(|| {
        let synthetic = Synthetic::new(2, 3, 100_000, |shard, file| {
            if shard == 1 {
                file.change("2 bytes before, 3 now");
            }
            file
        });
        for device in [Arc::new(CpuDevice::new()) as Arc<dyn Device>, Arc::new(LazyDevice::new(1))] {
            let error = load_with(&mut loader(device, tight(1)), &synthetic).map(drop).unwrap_err();
            assert!(matches!(&error, Error::Changed { path, .. } if path.ends_with("shard-1")), "{error}");
        }
    });
}

#[test]
fn a_file_that_is_no_longer_the_one_whose_header_was_read_is_an_error() {
    let synthetic = Synthetic::new(2, 2, 100_000, as_is);
    let len = synthetic.checkpoint.shards()[1].bytes;
    synthetic.storage.insert(Arc::new(MemoryFile::new("shard-1", vec![0; len as usize]).with_version("second")));
    let mut loader = loader(Arc::new(CpuDevice::new()), tight(1));
    let error = load_with(&mut loader, &synthetic).map(drop).unwrap_err();
    assert!(error.to_string().contains("version first before, second now"), "{error}");
}

#[test]
fn a_tensor_can_be_used_while_another_shard_still_waits_for_its_disk() {
    watched(|| {
        let gate = Gate::new();
        let closed = gate.clone();
        let synthetic = Synthetic::new(5, 2, 100_000, move |shard, file| match shard {
            0 => file,
            _ => troubled(file, &Trouble::Slow(closed.clone())),
        });
        let ready: Vec<_> = synthetic.expected.keys().filter(|name| name.starts_with("layer.0.")).cloned().collect();
        let late = synthetic.expected.iter().find(|(name, bytes)| name.starts_with("layer.1.") && !bytes.is_empty());
        let late = Arc::clone(late.unwrap().0);
        let threads = QueueOptions::default().page_cache_threads(4).direct_depth(4);
        let options = TransferOptions::default().queue(threads);
        let loader = loader(Arc::new(CpuDevice::new()), options);
        let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
        let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
        let loading = loader.start(prepared);
        for name in ready {
            assert!(loading.wait(&name).unwrap().bytes().unwrap() == synthetic.expected[&name]);
        }
        assert!(loading.ready(&late).unwrap().is_none());
        assert!(matches!(loading.wait("no such tensor"), Err(Error::NoTensor { .. })));
        gate.open();
        assert!(loading.wait(&late).unwrap().bytes().unwrap() == synthetic.expected[&late]);
        let (mut loader, loaded) = loading.finish().unwrap();
        assert_same(&loaded, &synthetic, "after waiting");
        assert_same(&load_with(&mut loader, &synthetic).unwrap(), &synthetic, "again with the warm loader");
    });
}

/// Dropping one load once threw the switch in its options, and with it every other load that had been given the same.
#[test]
fn dropping_a_load_leaves_the_switch_of_its_options_alone() {
    watched(|| {
        let synthetic = Synthetic::new(3, 2, 300_000, as_is);
        let options = TransferOptions::default();
        let first = loader(Arc::new(CpuDevice::new()), options.clone());
        let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
        let prepared = first.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
        drop(first.start(prepared));
        assert!(!options.cancel.is_cancelled());
        assert_same(&load_with(&mut loader(Arc::new(CpuDevice::new()), options), &synthetic).unwrap(), &synthetic, "");
    });
}

/// Panics as soon as it is told anything.
struct Clumsy;

impl Observer for Clumsy {
    fn planned(&self, _plan: &LoadPlan) {
        std::panic::resume_unwind(Box::new("an observer's own bug"));
    }

    fn advanced(&self, _done: u64) {}
}

/// Whoever waited for a tensor of a load that ended by a panic once waited for ever.
#[test]
fn a_load_that_panics_ends_for_those_who_wait_for_it() {
    watched(|| {
        let synthetic = Synthetic::new(3, 2, 300_000, as_is);
        let options = TransferOptions::default().observer(Arc::new(Clumsy));
        let loader = loader(Arc::new(CpuDevice::new()), options);
        let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
        let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
        let loading = loader.start(prepared);
        let (name, _) = synthetic.expected.iter().find(|(_, bytes)| !bytes.is_empty()).unwrap();
        assert!(matches!(loading.wait(name), Err(Error::Cancelled)));
        assert!(matches!(loading.finish(), Err(Error::Poisoned { .. })));
    });
}

/// Dropped anywhere on its way, and once while a read is certainly under way.
#[test]
fn dropping_a_load_ends_its_reads_and_frees_what_it_held() {
    watched(|| {
        for round in 0..20 {
            let gate = Gate::new();
            let closed = gate.clone();
            let synthetic = Synthetic::new(5, 3, 300_000, move |_, file| match round {
                0 => troubled(file, &Trouble::Slow(closed.clone())),
                _ => file,
            });
            let lazy = LazyDevice::new(3);
            let device = SpyDevice::over(lazy.clone());
            let engine = 1 + 2 * round; // odd: threads, of which one can stand at the gate
            let (loader, log) = spied(loader(Arc::clone(&device) as Arc<dyn Device>, tight(9)), engine);
            let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
            let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
            let transfers = prepared.plan.transfers.len() as u64;
            let loading = loader.start(prepared);
            let opener = (round == 0).then(|| {
                gate.wait_for(1);
                std::thread::spawn(move || gate.open())
            });
            drop(loading);
            opener.into_iter().for_each(|opener| opener.join().unwrap());
            let log = log.lock().unwrap();
            assert_eq!((log.in_flight, log.twice, device.buffers_out()), (0, false, 0), "round {round}");
            assert!(log.reads <= transfers, "round {round}: {} of {transfers} reads", log.reads);
            assert_eq!(lazy.live_bytes(), 0, "device memory leaks, round {round}");
        }
    });
}

#[test]
fn the_null_device_reads_everything_and_keeps_nothing() {
    let synthetic = Synthetic::new(3, 3, 300_000, as_is);
    let loaded = load_with(&mut loader(Arc::new(NullDevice::new()), tight(1)), &synthetic).unwrap();
    let report = &loaded.report;
    assert!(report.routes.direct + report.routes.buffered + report.routes.mapped >= report.bytes);
    let full = loaded.tensors().iter().find(|tensor| !tensor.is_empty()).unwrap();
    assert!(full.download().is_err() && full.bytes().is_err());
}

#[test]
fn loaded_tensors_can_be_sent_and_shared() {
    fn check<T: Send + Sync>() {}
    check::<Loaded>();
    check::<vramp::tensor::Tensor>();
}

/// All is read at once into staging buffers, and then goes through something that has a pace: its time is that of the pace, or more
/// on a busy machine. Which stage is the main one follows from the times (`load/meter.rs`).
#[test]
fn uploads_and_kernels_are_timed_at_work() {
    const SLOW: f64 = 4e6;
    const FAST: f64 = 1e12;
    let convert = Some(Convert::to(Float::F32).allow_overflow(true));
    for (link, kernels, convert) in [(SLOW, FAST, None), (FAST, SLOW, convert)] {
        let synthetic = Synthetic::new(12, 1, 400_000, as_is);
        let device = Arc::new(PacedDevice::new(Pace::new(link), Pace::new(kernels)));
        let staging = Some(Staging { count: 16, bytes: 256 << 10 });
        let options = TransferOptions::default().staging(staging).convert(convert);
        let report = load_with(&mut loader(device, options), &synthetic).unwrap().report;
        let stages = &report.stages;
        let (bytes, seconds) = match convert {
            None => (stages.upload.bytes, stages.uploading.seconds),
            Some(_) => (stages.kernels.bytes, stages.kernels.seconds.min(stages.uploading.seconds)),
        };
        assert!(bytes > 0 && seconds >= bytes as f64 / (SLOW * 1.01), "{report:#?}");
        assert!(report.main_stage.seconds <= report.seconds, "{report:#?}");
        // A load never grades itself.
        assert!(report.estimate.is_none() && report.efficiency.is_none(), "{report:#?}");
    }
}
