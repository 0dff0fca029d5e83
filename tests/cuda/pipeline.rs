//! The pipeline keeps whatever is slowest busy: the link, or the reader. Modelled rates, no measured ones: what is compared is
//! the time in which the modelled engine worked with the time in which it could have. Nothing here is a speed of anything.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use swcuda::Config;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::load::{Loaded, Loader, TransferOptions};
use vramp::report::Staging;
use vramp::storage::{Completed, Read, ReadQueue, Target};
use vramp::testing::watched;

use super::Rig;

/// Small beside the loads, so that making it ready is small beside them too; buffers so large that a copy takes longer than
/// the double takes to be told of it: it is a program, and other programs run beside it.
const STAGING: Staging = Staging { count: 8, bytes: 4 << 20 };

/// A safetensors file whose tensors are one hole: it takes no disk and has every size.
pub(super) fn hollow(folder: &Path, tensors: u64, bytes: u64) -> PathBuf {
    let mut header = serde_json::Map::new();
    for index in 0..tensors {
        let entry =
            serde_json::json!({"dtype": "U8", "shape": [bytes], "data_offsets": [index * bytes, (index + 1) * bytes]});
        header.insert(format!("t{index:04}"), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let path = folder.join("hollow.safetensors");
    let file = File::create(&path).unwrap();
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
    file.write_all_at(header.as_bytes(), 8).unwrap();
    file.set_len(8 + header.len() as u64 + tensors * bytes).unwrap();
    path
}

/// What a paced reader did.
#[derive(Default)]
pub(super) struct Pace {
    busy: Duration,
    first: Option<Instant>,
    last: Option<Instant>,
}

/// Reads that take the time that a rate says, one after the other, and bring nothing.
struct PacedQueue {
    waiting: VecDeque<(Read, Target)>,
    bytes_per_s: Option<f64>,
    pace: Arc<Mutex<Pace>>,
}

impl ReadQueue for PacedQueue {
    fn submit(&mut self, read: Read, target: Target) {
        let now = Instant::now();
        let takes = self.bytes_per_s.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(read.len as f64 / rate));
        let mut pace = self.pace.lock().unwrap();
        pace.busy += takes;
        pace.first.get_or_insert(now);
        pace.last = Some(pace.last.map_or(now, |last| last.max(now)) + takes);
        self.waiting.push_back((read, target));
    }

    fn complete(&mut self) -> Option<Completed> {
        let (read, target) = self.waiting.pop_front()?;
        if let Some(rate) = self.bytes_per_s {
            let behind: usize = self.waiting.iter().map(|(read, _)| read.len).sum();
            let last = self.pace.lock().unwrap().last?;
            wait_until(last - Duration::from_secs_f64(behind as f64 / rate));
        }
        let outcome = Ok(read.source.route());
        Some(Completed { id: read.id, target, outcome, started: Instant::now(), busy: Duration::ZERO })
    }

    fn depth(&self) -> usize {
        16
    }

    fn engine(&self) -> &'static str {
        "paced"
    }
}

/// A modelled device takes its time: this is part of the model and waits for nobody.
fn wait_until(due: Instant) {
    while let Some(left) = due.checked_duration_since(Instant::now()) {
        std::thread::park_timeout(left);
    }
}

/// The model of a device that only times its copies.
pub(super) fn timed() -> Config {
    Config { check_sources: false, moves_bytes: false, vram_bytes: 8 << 30, ..Config::default() }
}

/// Loads everything by a reader of `reader` bytes per second, or an infinitely fast one; and what the reader did.
pub(super) fn load(rig: &Rig, path: &Path, reader: Option<f64>) -> (Loaded, Arc<Mutex<Pace>>) {
    let pace = Arc::new(Mutex::new(Pace::default()));
    let shared = Arc::clone(&pace);
    let queue = move || PacedQueue { waiting: VecDeque::new(), bytes_per_s: reader, pace: Arc::clone(&shared) };
    let loader = Loader::new(rig.device(), TransferOptions { staging: Some(STAGING), ..TransferOptions::default() });
    let mut loader = loader.with_queue(move |_, _| Box::new(queue()));
    let checkpoint = Checkpoint::open(path).unwrap();
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(checkpoint, &selected).unwrap();
    (loader.load(&prepared).unwrap(), pace)
}

/// Loads by a reader of `reader` bytes per second (or an infinitely fast one) over a link of `link`; the shares of their
/// time in which the link and the reader worked.
fn shares(path: &Path, reader: Option<f64>, link: f64) -> Option<(f64, f64)> {
    let rig = Rig { double: Some(Rig::double(Config { h2d_bytes_per_s: Some(link), ..timed() })?) };
    let (loaded, pace) = load(&rig, path, reader);
    drop(loaded);
    let engine = rig.double.as_ref()?.stats().devices[0].h2d.clone();
    let pace = pace.lock().unwrap();
    let reading = pace.busy.as_secs_f64() / (pace.last? - pace.first?).as_secs_f64().max(f64::MIN_POSITIVE);
    Some((engine.busy_seconds / (engine.last_end? - engine.first_start?), reading))
}

/// Demands that a share reaches 95 % in one of several attempts: a machine that is busy with other things takes threads
/// away for longer than any staging lasts, which is no fault of the pipeline; a pipeline that leaves gaps of its own leaves
/// them each time.
pub(super) fn reaches(what: &str, attempt: impl Fn() -> Option<f64>) {
    let mut best = 0.0f64;
    for _ in 0..20 {
        let Some(share) = attempt() else { return };
        best = best.max(share);
        if best >= 0.95 {
            return;
        }
    }
    panic!("{what} was busy {best:.3} of the time at best");
}

#[test]
fn a_link_slower_than_the_reader_is_never_idle() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        for (gigabytes, bytes) in [(0.5, 8 << 20), (1.0, 16 << 20), (4.0, 64 << 20)] {
            let path = hollow(folder.path(), 32, bytes);
            let what = format!("a link of {gigabytes} GB/s");
            reaches(&what, || shares(&path, None, gigabytes * 1e9).map(|shares| shares.0));
        }
    });
}

#[test]
fn a_reader_slower_than_the_link_is_never_idle() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = hollow(folder.path(), 32, 12 << 20);
        for gigabytes in [1.0, 3.0] {
            let what = format!("a reader of {gigabytes} GB/s");
            reaches(&what, || shares(&path, Some(gigabytes * 1e9), 16e9).map(|shares| shares.1));
        }
    });
}
