//! The pipeline keeps what is slowest busy: the link, or the reader. Reader and link share the double's modelled clock, so the
//! figures follow from the order of the loop's calls alone. Nothing here is a speed of anything.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use swcuda::{Config, HostClock};
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::load::{Loaded, Loader, TransferOptions};
use vramp::report::Staging;
use vramp::storage::{Completed, Read, ReadQueue, ReadTarget};
use vramp::testing::watched;

use super::Rig;

/// Small beside the loads, so that it runs out.
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

/// What a paced reader did, by the double's modelled clock.
#[derive(Default)]
pub(super) struct Pace {
    busy: Duration,
    first: Option<Duration>,
    last: Duration,
}

/// Reads that take the time that a rate says, one after the other, and bring nothing.
struct PacedQueue {
    waiting: VecDeque<(Read, ReadTarget, Duration)>,
    bytes_per_s: f64,
    pace: Arc<Mutex<Pace>>,
    clock: HostClock,
}

impl ReadQueue for PacedQueue {
    fn submit(&mut self, read: Read, target: ReadTarget) {
        let (now, takes) = (self.clock.now(), Duration::from_secs_f64(read.len as f64 / self.bytes_per_s));
        let mut pace = self.pace.lock().unwrap();
        pace.busy += takes;
        pace.first.get_or_insert(now);
        pace.last = pace.last.max(now) + takes;
        self.waiting.push_back((read, target, pace.last));
    }

    fn complete(&mut self) -> Option<Completed> {
        let (read, target, due) = self.waiting.pop_front()?;
        self.clock.advance_to(due);
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

/// The shares of their time in which the link and the reader worked.
struct Shares {
    link: f64,
    reader: f64,
}

/// The model of a device that only times its copies.
pub(super) fn timed() -> Config {
    let config = Config { check_sources: false, moves_bytes: false, vram_bytes: 8 << 30, ..Config::default() };
    Config { modelled_clock: true, ..config }
}

/// Loads everything by a reader of `reader` bytes per second; and what the reader did.
pub(super) fn load(rig: &Rig, path: &Path, reader: f64) -> (Loaded, Arc<Mutex<Pace>>) {
    let (pace, clock) = (Arc::new(Mutex::new(Pace::default())), rig.double.as_ref().unwrap().clock());
    let shared = Arc::clone(&pace);
    let queue = move || PacedQueue { waiting: VecDeque::new(), bytes_per_s: reader, pace: Arc::clone(&shared), clock };
    let loader = Loader::new(rig.device(), TransferOptions::default().staging(STAGING));
    let mut loader = loader.with_queue(move |_, _| Box::new(queue()));
    let checkpoint = Checkpoint::open(path).unwrap();
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(checkpoint, &selected).unwrap();
    (loader.load(&prepared).unwrap(), pace)
}

/// Loads by a reader of `reader` bytes per second over a link of `link`; `None` on a GPU.
fn shares(path: &Path, reader: f64, link: f64) -> Option<Shares> {
    let rig = Rig { double: Some(Rig::double(Config { h2d_bytes_per_s: Some(link), ..timed() })?) };
    let (loaded, pace) = load(&rig, path, reader);
    drop(loaded);
    let engine = rig.double.as_ref()?.stats().devices[0].h2d.clone();
    let pace = pace.lock().unwrap();
    Some(Shares {
        link: engine.busy_seconds / (engine.last_end? - engine.first_start?),
        reader: pace.busy.as_secs_f64() / (pace.last - pace.first?).as_secs_f64(),
    })
}

/// Taking turns, a reader twice as fast would leave the link idle for a third of the time.
#[test]
fn a_link_slower_than_the_reader_is_never_idle() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = hollow(folder.path(), 32, 12 << 20);
        for gigabytes in [0.5, 4.0, 60.0] {
            let Some(Shares { link, .. }) = shares(&path, 2e9 * gigabytes, 1e9 * gigabytes) else { return };
            assert!(link > 0.999, "the link of {gigabytes} GB/s was busy {link:.4} of its time");
        }
    });
}

#[test]
fn a_reader_slower_than_the_link_is_never_idle() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = hollow(folder.path(), 32, 12 << 20);
        for gigabytes in [0.5, 3.0, 60.0] {
            let Some(Shares { reader, .. }) = shares(&path, 1e9 * gigabytes, 2e9 * gigabytes) else { return };
            assert!(reader > 0.999, "the reader of {gigabytes} GB/s was busy {reader:.4} of its time");
        }
    });
}
