//! The pipeline keeps whatever is slowest busy: the link, or the reader. Modelled rates, no measured ones: what is compared is
//! the time in which the modelled engine worked with the time in which it could have. Nothing here is a speed of anything.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use swcuda::Config;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::report::Staging;
use vramp::load::{Loaded, Loader, TransferOptions};
use vramp::source::{Completed, Read, ReadQueue, Target};
use vramp::testing::watched;

use super::Rig;

/// Small beside the load, so that making it ready is small beside the load too.
const STAGING: Staging = Staging { count: 12, bytes: 2 << 20 };

/// A safetensors file whose tensors are one hole: it takes no disk and has every size.
fn hollow(folder: &Path, tensors: u64, bytes: u64) -> PathBuf {
    let mut header = serde_json::Map::new();
    for index in 0..tensors {
        let entry = serde_json::json!({"dtype": "U8", "shape": [bytes], "data_offsets": [index * bytes, (index + 1) * bytes]});
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

/// Reads that take the time that a rate says, one after the other, and bring nothing.
struct PacedQueue {
    waiting: VecDeque<(Read, Target)>,
    bytes_per_s: Option<f64>,
    /// When the reader is done with what it was given so far.
    free_at: Instant,
    busy: Duration,
    span: std::sync::Arc<std::sync::Mutex<(Duration, Option<Instant>, Option<Instant>)>>,
}

type Span = std::sync::Arc<std::sync::Mutex<(Duration, Option<Instant>, Option<Instant>)>>;

impl PacedQueue {
    fn new(bytes_per_s: Option<f64>, span: Span) -> PacedQueue {
        PacedQueue { waiting: VecDeque::new(), bytes_per_s, free_at: Instant::now(), busy: Duration::ZERO, span }
    }
}

impl ReadQueue for PacedQueue {
    fn submit(&mut self, read: Read, target: Target) {
        let now = Instant::now();
        let takes = self.bytes_per_s.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(read.len as f64 / rate));
        self.free_at = self.free_at.max(now) + takes;
        self.busy += takes;
        let mut span = self.span.lock().unwrap();
        span.0 = self.busy;
        span.1.get_or_insert(now);
        span.2 = Some(self.free_at);
        self.waiting.push_back((read, target));
    }

    fn complete(&mut self) -> Option<Completed> {
        let (read, target) = self.waiting.pop_front()?;
        if let Some(rate) = self.bytes_per_s {
            let behind: usize = self.waiting.iter().map(|(read, _)| read.len).sum();
            let due = self.free_at - Duration::from_secs_f64(behind as f64 / rate);
            let (_never, silence) = std::sync::mpsc::channel::<()>();
            drop(silence.recv_timeout(due.saturating_duration_since(Instant::now())).err());
            std::thread::park_timeout(due.saturating_duration_since(Instant::now()));
        }
        let outcome = Ok(read.source.route());
        Some(Completed { id: read.id, target, outcome, busy: Duration::ZERO })
    }

    fn depth(&self) -> usize {
        16
    }

    fn engine(&self) -> &'static str {
        "paced"
    }
}

fn load(rig: &Rig, path: &Path, reader: Option<f64>, span: Span) -> Loaded {
    let loader = Loader::new(rig.device(), TransferOptions { staging: Some(STAGING), ..TransferOptions::default() });
    let mut loader = loader.with_queue(move |_, _| Box::new(PacedQueue::new(reader, span.clone())));
    let checkpoint = Checkpoint::open(path).unwrap();
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(&checkpoint, &selected).unwrap();
    loader.load(&checkpoint, &prepared).unwrap()
}

#[test]
fn a_link_slower_than_the_reader_is_never_idle() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        for (gigabytes, megabytes) in [(2.0, 320), (4.0, 640), (16.0, 768)] {
            let path = hollow(folder.path(), 32, megabytes << 15);
            let config = Config { h2d_bytes_per_s: Some(gigabytes * 1e9), check_sources: false, moves_bytes: false, ..Config::default() };
            let Some(double) = Rig::double(config) else { return };
            let rig = Rig { double: Some(double) };
            let loaded = load(&rig, &path, None, Span::default());
            let link = rig.double.as_ref().unwrap().stats().devices[0].h2d.clone();
            let span = link.last_end.unwrap() - link.first_start.unwrap();
            let share = link.busy_seconds / span;
            println!("{gigabytes} GB/s: busy {share:.4} of {span:.3} s, {} gaps, {:?}", link.gaps, loaded.report.estimate);
            assert!(share >= 0.95, "{gigabytes} GB/s: busy {share:.3} of {span:.3} s, {} gaps", link.gaps);
        }
    });
}

#[test]
fn a_reader_slower_than_the_link_is_never_idle() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = hollow(folder.path(), 32, 12 << 20);
        for reader in [1e9, 3e9] {
            let config = Config { h2d_bytes_per_s: Some(16e9), check_sources: false, moves_bytes: false, ..Config::default() };
            let Some(double) = Rig::double(config) else { return };
            let rig = Rig { double: Some(double) };
            let span = Span::default();
            load(&rig, &path, Some(reader), span.clone());
            let (busy, first, last) = *span.lock().unwrap();
            let share = busy.as_secs_f64() / (last.unwrap() - first.unwrap()).as_secs_f64();
            println!("reader of {} GB/s: busy {share:.4}", reader / 1e9);
            assert!(share >= 0.95, "a reader of {} GB/s was busy {share:.3} of the time", reader / 1e9);
        }
    });
}
