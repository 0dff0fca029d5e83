//! What a load tells of itself adds up: every read once, times within the load, sums as in the report; and `load --trace`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use vramp::Error;
use vramp::Float;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::{CpuDevice, Device, NullDevice};
use vramp::load::{Convert, Loader, Observer, TraceEvent, TraceLane, TransferOptions};
use vramp::plan::{LoadPlan, RouteChoice};
use vramp::report::{Report, Staging};
use vramp::storage::{Engine, QueueOptions, Route};
use vramp::testing::{FaultySource, LazyDevice, ShuffledQueue, Synthetic, Trouble, safetensors, watched};

/// Keeps what it is told.
#[derive(Default)]
struct Notes {
    events: Mutex<Vec<TraceEvent>>,
}

impl Observer for Notes {
    fn planned(&self, _plan: &LoadPlan) {}

    fn advanced(&self, _done: u64) {}

    fn event(&self, event: &TraceEvent) {
        self.events.lock().unwrap().push(*event);
    }
}

/// What was told of one load.
struct Told {
    events: Vec<TraceEvent>,
    plan: LoadPlan,
    /// From the start of opening to the end of the load, on the test's own clock.
    seconds: f64,
    outcome: vramp::Result<Report>,
}

impl Told {
    fn of(loader: &mut Loader, notes: &Notes, checkpoint: &Checkpoint) -> Told {
        notes.events.lock().unwrap().clear();
        let selected = checkpoint.select(&Selection::default()).unwrap();
        let mut prepared = loader.prepare(checkpoint.clone(), &selected).unwrap();
        prepared.open_seconds = 0.25;
        let began = Instant::now();
        let outcome = loader.load(&prepared).map(|loaded| loaded.report);
        let seconds = began.elapsed().as_secs_f64() + prepared.open_seconds + prepared.plan_seconds;
        let events = notes.events.lock().unwrap().clone();
        Told { events, plan: prepared.plan, seconds, outcome }
    }

    fn named(&self, name: &'static str) -> impl Iterator<Item = &TraceEvent> {
        self.events.iter().filter(move |event| event.name == name)
    }

    fn seconds_of(&self, name: &'static str) -> f64 {
        self.named(name).map(|event| event.duration.as_secs_f64()).sum()
    }

    fn bytes_of(&self, name: &'static str) -> u64 {
        self.named(name).map(|event| event.bytes).sum()
    }

    /// The reads that were told of, each of which the plan has, and none twice.
    fn reads(&self) -> BTreeSet<(u32, u64, u64)> {
        let reads: Vec<_> = self.named("read").map(|e| (e.shard.unwrap(), e.offset.unwrap(), e.bytes)).collect();
        let distinct: BTreeSet<_> = reads.iter().copied().collect();
        assert_eq!(reads.len(), distinct.len(), "a read was told twice");
        let planned: BTreeSet<_> = self.plan.transfers.iter().map(|it| (it.shard, it.offset, it.len)).collect();
        assert!(distinct.is_subset(&planned));
        distinct
    }

    /// What holds of every load, also of one that failed.
    fn check_times(&self, what: &str) {
        assert!(self.events.iter().all(|event| (event.start + event.duration).as_secs_f64() <= self.seconds), "{what}");
        let mut steps: Vec<_> = self.events.iter().filter(|event| event.lane == TraceLane::Loop).collect();
        steps.sort_by_key(|event| event.start);
        assert!(steps.windows(2).all(|pair| pair[0].start + pair[0].duration <= pair[1].start), "{what}: {steps:?}");
        assert_eq!(self.named("open").next().unwrap().duration, Duration::from_millis(250));
        assert!(self.named("convert").all(|part| {
            let end = part.start + part.duration;
            self.named("upload").chain(self.named("copy")).any(|whole| {
                whole.offset == part.offset && whole.start <= part.start && whole.start + whole.duration == end
            })
        }));
    }

    /// What holds of a load that succeeded.
    #[track_caller]
    fn check(&self, what: &str) {
        self.check_times(what);
        let report = self.outcome.as_ref().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(self.reads().len(), self.plan.transfers.len(), "{what}: a read was not told");
        assert_eq!(self.bytes_of("read"), self.plan.read_bytes(), "{what}");
        let by_route = |route| self.named("read").filter(move |e| e.lane == TraceLane::Reader(route)).map(|e| e.bytes);
        assert_eq!(by_route(Route::Direct).sum::<u64>(), report.routes.direct, "{what}");
        assert_eq!(by_route(Route::Buffered).sum::<u64>(), report.routes.buffered, "{what}");
        let stages = &report.stages;
        assert_eq!(self.bytes_of("upload") + self.bytes_of("copy"), stages.upload.bytes, "{what}");
        assert_eq!(self.bytes_of("convert"), stages.kernels.bytes, "{what}");
        for (name, stage) in [("read", stages.read_busy), ("wait_read", stages.wait_read)] {
            assert_close(self.seconds_of(name), stage.seconds, what);
        }
        assert_close(self.seconds_of("wait_upload"), stages.wait_upload.seconds, what);
        assert!(self.named("failed_read").next().is_none() && self.named("failed_upload").next().is_none());
    }
}

#[track_caller]
fn assert_close(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() <= 0.02 * expected + 1e-6, "{what}: {found} s, the report says {expected} s");
}

fn options(notes: &Arc<Notes>) -> TransferOptions {
    let staging = Some(Staging { count: 3, bytes: 16 << 10 });
    TransferOptions::default().staging(staging).observer(Arc::clone(notes) as Arc<dyn Observer>)
}

#[test]
fn each_read_and_upload_is_told_once_whatever_the_device_and_the_order() {
    watched(|| {
        for seed in 0..40u64 {
            let synthetic = Synthetic::new(seed, 1 + (seed % 4) as u32, 300_000, |_, file| file);
            let devices: [Arc<dyn Device>; 3] =
                [Arc::new(CpuDevice::with_align(256)), Arc::new(LazyDevice::new(seed)), Arc::new(NullDevice::new())];
            for device in devices {
                let what = format!("seed {seed} on {}", device.name());
                let notes = Arc::new(Notes::default());
                let mut loader = Loader::new(device, options(&notes));
                if seed % 2 == 0 {
                    loader = loader.with_queue(move |_, _| Box::new(ShuffledQueue::new(seed, 4)));
                }
                for _ in 0..2 {
                    Told::of(&mut loader, &notes, &synthetic.checkpoint).check(&what);
                }
            }
        }
    });
}

#[test]
fn a_load_that_fails_has_told_what_it_did() {
    watched(|| {
        let mut failed = 0;
        for number in 0..20u64 {
            let trouble = vec![Trouble::FailFrom(number)];
            let synthetic = Synthetic::new(7, 3, 300_000, |_, file| {
                let wrap = |source| Arc::new(FaultySource::new(source, trouble.clone())) as Arc<_>;
                file.with_source(Route::Direct, wrap).with_source(Route::Buffered, wrap)
            });
            let notes = Arc::new(Notes::default());
            let loader = Loader::new(Arc::new(LazyDevice::new(number)), options(&notes));
            let mut loader = loader;
            let told = Told::of(&mut loader, &notes, &synthetic.checkpoint);
            told.check_times("failing");
            told.reads();
            if told.outcome.is_err() {
                failed += 1;
                assert!(told.named("failed_read").any(|event| event.bytes == 0 && event.shard.is_some()));
            }
        }
        assert!(failed > 5, "only {failed} loads failed: the test tests nothing");
        let synthetic = Synthetic::new(7, 3, 300_000, |_, file| file);
        let notes = Arc::new(Notes::default());
        let loader = Loader::new(Arc::new(LazyDevice::failing(3, 2)), options(&notes));
        let mut loader = loader;
        let told = Told::of(&mut loader, &notes, &synthetic.checkpoint);
        assert!(matches!(told.outcome, Err(Error::Device { .. })));
        told.check_times("failing upload");
    });
}

// ---- real files

#[test]
fn threads_and_ring_tell_the_same_reads() {
    watched(|| {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("m.safetensors");
        let (first, second) = (2f32.to_le_bytes().repeat(5_000_000), 1f32.to_le_bytes().repeat(12_345));
        let tensors = [("a", "F32", &[5_000_000][..], &first[..]), ("b", "F32", &[12_345], &second)];
        std::fs::write(&path, safetensors(&tensors, json!({}))).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        for (engine, convert) in [(Engine::Threads, false), (Engine::Ring, false), (Engine::Ring, true)] {
            let what = format!("{engine:?}, converting: {convert}");
            let notes = Arc::new(Notes::default());
            let convert = convert.then_some(Convert::to(Float::BF16));
            let queue = QueueOptions::default().engine(engine);
            let staging = None;
            let route = RouteChoice::Direct;
            let options = options(&notes).queue(queue).convert(convert).staging(staging).route(route);
            let mut loader = Loader::new(Arc::new(CpuDevice::new()), options);
            let told = Told::of(&mut loader, &notes, &checkpoint);
            told.check(&what);
            assert!(told.plan.transfers.len() > 3, "{what}: one read shows nothing");
            assert_eq!(told.named("convert").next().is_some(), convert.is_some(), "{what}");
        }
    });
}
