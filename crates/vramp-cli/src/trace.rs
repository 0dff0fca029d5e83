//! `load --trace FILE`: what happened when, as a file that Perfetto and `chrome://tracing` open.
//!
//! It observes the load, keeps what it is told, and writes once the load is over, also one that failed. Events that overlap
//! are packed into as few lanes as hold them. `whole_file` writes the file; this one knows nothing of places.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use vramp::checkpoint::Shard;
use vramp::load::{self, Observer, TraceEvent, TraceLane, TracePlace};
use vramp::plan::LoadPlan;
use vramp::storage::Route;

use super::output::Failure;
use super::whole_file::WholeFile;

/// Events for each transfer of a plan, about: the wait, the read, the upload.
const EVENTS_PER_TRANSFER: usize = 3;

/// The process that the viewer shows.
const PROCESS: u32 = 1;

/// A trace in the making.
pub(crate) struct Trace {
    file: WholeFile,
    events: Mutex<Vec<TraceEvent>>,
}

/// Observers that are all told everything.
pub(crate) struct All(pub(crate) Vec<Arc<dyn Observer>>);

impl Trace {
    /// A trace that will be written to `asked`, once it is clear that it can be.
    pub(crate) fn to(asked: &Path) -> Result<Arc<Trace>, Failure> {
        Ok(Arc::new(Trace { file: WholeFile::to(asked, "--trace", "trace")?, events: Mutex::default() }))
    }

    /// Refuses to write over what is about to be loaded.
    pub(crate) fn spare(&self, shards: &[Shard]) -> Result<(), Failure> {
        self.file.spare(shards)
    }

    /// Refuses to write over a file that `option` reads.
    pub(crate) fn spare_input(&self, option: &str, input: Option<&Path>) -> Result<(), Failure> {
        self.file.spare_input(option, input)
    }

    /// Writes what has been told so far.
    pub(crate) fn write(&self, shards: &[Shard]) -> Result<(), Failure> {
        let mut events = std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        let names: Vec<String> = shards.iter().map(|shard| file_name(&shard.path)).collect();
        self.file.write(|mut out| write_events(&mut out, &mut events, &names))
    }
}

impl Observer for Trace {
    fn planned(&self, plan: &LoadPlan) {
        let expected = plan.transfers.len().saturating_mul(EVENTS_PER_TRANSFER);
        self.events.lock().unwrap_or_else(PoisonError::into_inner).reserve(expected);
    }

    fn advanced(&self, _done: u64) {}

    fn event(&self, event: &TraceEvent) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(*event);
    }
}

impl Observer for All {
    fn planned(&self, plan: &LoadPlan) {
        self.0.iter().for_each(|observer| observer.planned(plan));
    }

    fn advanced(&self, done: u64) {
        self.0.iter().for_each(|observer| observer.advanced(done));
    }

    fn event(&self, event: &TraceEvent) {
        self.0.iter().for_each(|observer| observer.event(event));
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

// ---- the events

/// One entry of `traceEvents`.
#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    /// `X`: a complete event; `M`: what a lane or the process is called.
    ph: &'static str,
    pid: u32,
    tid: usize,
    /// Microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    /// Microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Args<'a>,
}

#[derive(Default, Serialize)]
struct Args<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sort_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<Route>,
}

fn write_events(out: &mut impl Write, events: &mut [TraceEvent], shards: &[String]) -> io::Result<()> {
    let places = load::place(events);
    let lanes: BTreeSet<TracePlace> = places.iter().copied().collect();
    let threads: BTreeMap<TracePlace, usize> = lanes.into_iter().zip(1..).collect();
    let process = Args { name: Some("vramp load"), ..Args::default() };
    out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
    serde_json::to_writer(&mut *out, &metadata("process_name", 0, process))?;
    for (place, &tid) in &threads {
        let name = place.to_string();
        let named = metadata("thread_name", tid, Args { name: Some(&name), ..Args::default() });
        let sorted = metadata("thread_sort_index", tid, Args { sort_index: Some(tid), ..Args::default() });
        append(out, &named)?;
        append(out, &sorted)?;
    }
    for (event, place) in events.iter().zip(&places) {
        append(out, &complete(event, threads.get(place).copied().unwrap_or_default(), shards))?;
    }
    out.write_all(b"\n]}\n")
}

fn append(out: &mut impl Write, entry: &Entry<'_>) -> io::Result<()> {
    out.write_all(b",\n")?;
    Ok(serde_json::to_writer(out, entry)?)
}

fn metadata<'a>(name: &'static str, tid: usize, args: Args<'a>) -> Entry<'a> {
    Entry { name, ph: "M", pid: PROCESS, tid, ts: None, dur: None, args }
}

fn complete<'a>(event: &'a TraceEvent, tid: usize, shards: &'a [String]) -> Entry<'a> {
    let shard = event.shard.and_then(|shard| shards.get(shard as usize)).map(String::as_str);
    let route = match event.lane {
        TraceLane::Reader(route) => Some(route),
        _ => None,
    };
    let bytes = event.shard.map(|_| event.bytes);
    let args = Args { bytes, shard, offset: event.offset, route, ..Args::default() };
    let (ts, dur) = (Some(microseconds(event.start)), Some(microseconds(event.duration)));
    Entry { name: event.name, ph: "X", pid: PROCESS, tid, ts, dur, args }
}

/// To the nanosecond.
#[allow(clippy::cast_precision_loss)] // of a load of more than a hundred days
fn microseconds(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}
