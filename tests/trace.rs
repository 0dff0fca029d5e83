//! What a load tells of itself adds up: every read once, times within the load, sums as in the report; and `load --trace`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use vramp::Error;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::convert::Float;
use vramp::device::{CpuDevice, Device, NullDevice};
use vramp::load::{Convert, Loader, Observer, TraceEvent, TraceLane, TransferOptions};
use vramp::plan::{LoadPlan, RouteChoice};
use vramp::report::{Report, Staging};
use vramp::storage::{Engine, QueueOptions, Route};
use vramp::testing::{FaultySource, LazyDevice, ShuffledQueue, Synthetic, Trouble, watched};

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
        let mut prepared = loader.prepare(checkpoint, &selected).unwrap();
        prepared.open_seconds = 0.25;
        let began = Instant::now();
        let outcome = loader.load(checkpoint, &prepared).map(|loaded| loaded.report);
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
    TransferOptions { staging, observer: Some(Arc::clone(notes) as Arc<dyn Observer>), ..TransferOptions::default() }
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
                let mut loader = Loader::new(device, options(&notes)).with_storage(Arc::new(synthetic.storage.clone()));
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
            let mut loader = loader.with_storage(Arc::new(synthetic.storage.clone()));
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
        let mut loader = loader.with_storage(Arc::new(synthetic.storage.clone()));
        let told = Told::of(&mut loader, &notes, &synthetic.checkpoint);
        assert!(matches!(told.outcome, Err(Error::Device { .. })));
        told.check_times("failing upload");
    });
}

// ---- real files

/// A folder on the disk that the target folder is on: the usual temporary one may be memory.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file of two F32 tensors, the first of `elements` elements, each `value`, the second odd in place and size.
fn weights(folder: &Path, elements: usize, value: f32) -> PathBuf {
    let (first, second) = (value.to_le_bytes().repeat(elements), 1f32.to_le_bytes().repeat(12_345));
    let (middle, end) = (first.len(), first.len() + second.len());
    let header = json!({
        "a": {"dtype": "F32", "shape": [elements], "data_offsets": [0, middle]},
        "b": {"dtype": "F32", "shape": [12_345], "data_offsets": [middle, end]},
    });
    let header = header.to_string();
    let path = folder.join("m.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &first, &second].concat())
        .unwrap();
    path
}

#[test]
fn threads_and_ring_tell_the_same_reads() {
    watched(|| {
        let folder = folder();
        let checkpoint = Checkpoint::open(weights(folder.path(), 5_000_000, 2.0)).unwrap();
        for (engine, convert) in [(Engine::Threads, false), (Engine::Ring, false), (Engine::Ring, true)] {
            let what = format!("{engine:?}, converting: {convert}");
            let notes = Arc::new(Notes::default());
            let convert = convert.then_some(Convert { to: Float::BF16, allow_overflow: false });
            let queue = QueueOptions { engine, ..QueueOptions::default() };
            let staging = None;
            let route = RouteChoice::Direct;
            let options = TransferOptions { queue, convert, staging, route, ..options(&notes) };
            let mut loader = Loader::new(Arc::new(CpuDevice::new()), options);
            let told = Told::of(&mut loader, &notes, &checkpoint);
            told.check(&what);
            assert!(told.plan.transfers.len() > 3, "{what}: one read shows nothing");
            assert_eq!(told.named("convert").next().is_some(), convert.is_some(), "{what}");
        }
    });
}

// ---- the program

/// The exit status, stdout and stderr of one run.
fn load(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let Output { status, stdout, stderr } = command.arg("load").args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// The complete events of a trace, sorted into named lanes, which do not overlap within themselves.
fn lanes(path: &Path) -> BTreeMap<String, Vec<Value>> {
    let text = std::fs::read_to_string(path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let events = trace["traceEvents"].as_array().unwrap();
    let mut lanes: BTreeMap<u64, (String, Vec<Value>)> = BTreeMap::new();
    for event in events.iter().filter(|event| event["name"] == "thread_name") {
        let (tid, name) = (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap().to_owned());
        assert!(lanes.insert(tid, (name, Vec::new())).is_none(), "two names for lane {tid}");
    }
    for event in events.iter().filter(|event| event["ph"] == "X") {
        lanes.get_mut(&event["tid"].as_u64().unwrap()).expect("a lane without a name").1.push(event.clone());
    }
    assert!(events.iter().all(|event| event["pid"] == 1 && (event["ph"] == "X" || event["ph"] == "M")));
    for (name, events) in lanes.values() {
        let whole: Vec<_> = events.iter().filter(|event| event["name"] != "convert").collect();
        let overlaps = whole.windows(2).any(|pair| end(pair[0]) > number(pair[1], "ts") + 0.0005);
        assert!(!overlaps && !events.is_empty(), "{name}: {events:?}");
    }
    lanes.into_values().collect()
}

fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap()
}

fn end(event: &Value) -> f64 {
    number(event, "ts") + number(event, "dur")
}

fn named<'a>(lanes: &'a BTreeMap<String, Vec<Value>>, name: &'a str) -> impl Iterator<Item = &'a Value> {
    lanes.values().flatten().filter(move |event| event["name"] == name)
}

#[test]
fn a_trace_agrees_with_the_report_of_the_same_load() {
    let folder = folder();
    let path = weights(folder.path(), 5_000_000, 2.0);
    let (path, trace) = (path.to_str().unwrap(), folder.path().join("trace.json"));
    let file = trace.to_str().unwrap();
    let cases: [&[&str]; 5] = [
        &["--device", "cpu"],
        &["--device", "cpu", "--route", "direct", "--progress", "never"],
        &["--device", "null", "--route", "buffered"],
        &["--device", "cpu", "--dtype", "bf16"],
        &["--device", "null", "--staging", "2x64KiB"],
    ];
    for case in cases {
        let (code, out, err) = load(&[&[path, "--trace", file, "--json"], case].concat());
        assert_eq!((code, err.as_str()), (Some(0), ""), "{case:?}");
        let said: Value = serde_json::from_str(&out).unwrap();
        let report = &said["report"];
        let lanes = lanes(&trace);
        let sum = |name, key: &str| named(&lanes, name).map(|event| event["args"][key].as_u64().unwrap()).sum::<u64>();
        let routes = &report["routes"];
        let read: u64 = ["direct", "buffered", "mapped"].iter().map(|route| routes[route].as_u64().unwrap()).sum();
        assert_eq!(sum("read", "bytes"), read, "{case:?}");
        // Nothing is uploaded without a GPU: to host memory it is copied, and the null device drops it.
        assert_eq!(sum("copy", "bytes"), report["stages"]["upload"]["bytes"].as_u64().unwrap(), "{case:?}");
        assert!(!lanes.keys().any(|name| name.starts_with("upload")), "{case:?}: {:?}", lanes.keys());
        let copies = lanes.keys().any(|name| name.starts_with("copy"));
        assert!(!(copies && case.contains(&"null")), "{case:?}: {:?}", lanes.keys());
        let busy = named(&lanes, "read").map(|event| number(event, "dur")).sum::<f64>() / 1e6;
        assert_close(busy, report["stages"]["read_busy"]["seconds"].as_f64().unwrap(), &format!("{case:?}"));
        assert!(named(&lanes, "read").all(|event| event["args"]["shard"] == "m.safetensors"));
        for name in ["open", "plan", "set_up", "allocate", "wait_read"] {
            assert!(named(&lanes, name).next().is_some(), "{case:?}: no {name}");
        }
        assert_eq!(named(&lanes, "convert").next().is_some(), case.contains(&"--dtype"), "{case:?}");
        assert!(lanes.contains_key("loop") && lanes.keys().any(|name| name.starts_with("reader 0, ")), "{case:?}");
        let last = lanes.values().flatten().map(end).fold(0.0, f64::max) / 1e6;
        let whole = report["seconds"].as_f64().unwrap() + report["setup_seconds"].as_f64().unwrap();
        assert!(last <= whole + 0.01, "{case:?}: an event ends at {last} s of {whole} s");
    }
    let mode = std::fs::metadata(&trace).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, std::fs::metadata(path).unwrap().permissions().mode() & 0o777, "not as other new files");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "something is left beside the trace");
}

#[test]
fn a_load_that_fails_leaves_a_trace_of_what_it_did() {
    let folder = folder();
    let path = weights(folder.path(), 100_000, 1e9);
    let trace = folder.path().join("trace.json");
    let (path, file) = (path.to_str().unwrap(), trace.to_str().unwrap());
    let (code, _, err) = load(&[path, "--device", "cpu", "--dtype", "f16", "--trace", file]);
    assert!(code != Some(0) && err.contains("65504"), "{code:?} {err}");
    assert!(named(&lanes(&trace), "read").next().is_some());
}

#[test]
fn a_trace_that_cannot_be_written_ends_the_program_before_the_load() {
    let folder = folder();
    let path = weights(folder.path(), 1000, 2.0);
    let (path, inside) = (path.to_str().unwrap(), |name: &str| folder.path().join(name).to_str().unwrap().to_owned());
    for file in [inside("missing/trace.json"), inside(""), "/dev/full".to_owned(), "..".to_owned()] {
        // The checkpoint is not there either, and that is not what is said.
        let (code, out, err) = load(&[&inside("nothing"), "--device", "cpu", "--trace", &file]);
        assert_eq!((code, out.as_str()), (Some(4), ""), "{file}: {err}");
        assert!(err.contains("cannot write the trace"), "{file}: {err}");
    }
    let before = std::fs::read(path).unwrap();
    std::os::unix::fs::symlink(path, inside("link")).unwrap();
    for args in [
        [path, "--trace", path].as_slice(),
        &[path, "--trace", &inside("link")],
        &[path, "--trace", "-"],
        &[path, "--trace", &inside("t.json"), "--route", "view"],
        &[path, "--trace", &inside("t.json"), "--plan-only"],
    ] {
        let (code, out, err) = load(&[args, &["--device", "cpu"]].concat());
        assert_eq!((code, out.as_str()), (Some(2), ""), "{args:?}: {err}");
        assert!(err.contains("--trace"), "{args:?}: {err}");
    }
    assert!(std::fs::read(path).unwrap() == before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}
