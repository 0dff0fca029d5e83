//! What happened when, as plain data for an [`Observer`]: one [`TraceEvent`] for each read, upload and step of the loop.
//!
//! Events are told once they are over, so they come in the order in which things ended. Nothing is made where nobody
//! observes, and nothing is kept here. It measures nothing itself: the times are those that the report adds up.

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Observer, Prepared};
use crate::device::DeviceLimits;
use crate::extent::ShardIndex;
use crate::plan::Transfer;
use crate::storage::Route;

/// Who was busy. Several readers and several uploads are busy at the same time; the loop does one thing after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum TraceLane {
    /// What the loading thread did or waited for.
    Loop,
    /// One of the readers by this route: a thread, or a place in the ring.
    Reader(Route),
    /// One of the staging buffers on its way to the device.
    Upload,
    /// One of the staging buffers whose bytes are copied to their place in host memory.
    Copy,
}

/// Something that took time, once it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TraceEvent {
    /// Who was busy.
    pub lane: TraceLane,
    /// With what. The loop: `open`, `plan`, `set_up`, `allocate`, `wait_read`, `wait_upload`, as the report's stages are
    /// called. Readers: `read`, or `failed_read`, which brought nothing. Uploads: `upload`, `failed_upload`, and `convert`
    /// for the part of an upload that its conversion took (how long is known, when is not: it is put at the end). Copies to host
    /// memory: `copy`, `failed_copy` and `convert` likewise. The null device drops what it gets: it has neither.
    pub name: &'static str,
    /// From the start of the load. Opening and planning were before it: they are put right before the rest.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// Bytes that were moved.
    pub bytes: u64,
    /// The file, where it is about one.
    pub shard: Option<ShardIndex>,
    /// The first byte in that file.
    pub offset: Option<u64>,
}

/// A row in a picture of a load: one of those that were busy in the same way at the same time. Shows itself as `loop`,
/// `reader 0, direct`, `upload 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct TracePlace {
    /// Who.
    pub lane: TraceLane,
    /// Which of them, from 0.
    pub number: usize,
}

impl fmt::Display for TracePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.number;
        match self.lane {
            TraceLane::Reader(route) => write!(f, "reader {number}, {route}"),
            TraceLane::Upload => write!(f, "upload {number}"),
            TraceLane::Copy => write!(f, "copy {number}"),
            TraceLane::Loop => f.write_str("loop"),
        }
    }
}

/// Sorts the events of a load by who was busy and since when, and gives each the first row of its kind that is free; a
/// conversion stays with its upload, of which it is a part. As many rows as events overlap, no more.
pub fn place(events: &mut [TraceEvent]) -> Vec<TracePlace> {
    events.sort_by_key(|event| (event.lane, event.start, Reverse(event.duration)));
    let mut places = Vec::with_capacity(events.len());
    let mut lane = TraceLane::Loop;
    let mut last: Vec<&TraceEvent> = Vec::new(); // the longest-lasting event of each row of this kind so far
    for event in &*events {
        if event.lane != lane {
            lane = event.lane;
            last.clear();
        }
        let is_part = |upload: &&TraceEvent| is_part_of(event, upload);
        let free = |last: &&TraceEvent| end_of(last) <= event.start;
        if let Some(number) = last.iter().position(is_part) {
            places.push(TracePlace { lane, number });
            continue;
        }
        let number = last.iter().position(free).unwrap_or(last.len());
        match last.get_mut(number) {
            Some(last) => *last = event,
            None => last.push(event),
        }
        places.push(TracePlace { lane, number });
    }
    places
}

fn is_part_of(event: &TraceEvent, upload: &TraceEvent) -> bool {
    let same = (event.shard, event.offset) == (upload.shard, upload.offset);
    event.name == "convert" && same && end_of(event) <= end_of(upload)
}

fn end_of(event: &TraceEvent) -> Duration {
    event.start + event.duration
}

/// A stretch of time on this machine's clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) started: Instant,
    pub(super) duration: Duration,
}

impl Span {
    /// From then until now.
    pub(super) fn since(started: Instant) -> Span {
        Span { started, duration: started.elapsed() }
    }

    /// The last part of it, `seconds` long at most.
    pub(super) fn last(self, seconds: f64) -> Span {
        let duration = seconds_of(seconds).min(self.duration);
        Span { started: self.started + (self.duration - duration), duration }
    }
}

/// Tells the observer of one load, if there is one.
pub(super) struct Tracer {
    observer: Option<Arc<dyn Observer>>,
    began: Instant,
    /// What was before `began`: opening and planning.
    lead: Duration,
    /// What becomes of staging buffers.
    moves: Moves,
}

/// What a device does with a staging buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moves {
    /// Sends it to memory of its own.
    Upload,
    /// Copies it within host memory.
    Copy,
    /// Drops it.
    Nothing,
}

impl Tracer {
    /// A load that begins now.
    pub(super) fn new(observer: Option<Arc<dyn Observer>>, prepared: &Prepared, device: DeviceLimits) -> Tracer {
        let lead = seconds_of(prepared.open_seconds) + seconds_of(prepared.plan_seconds);
        let moves = match device {
            DeviceLimits { keeps: false, .. } => Moves::Nothing,
            DeviceLimits { host_visible: true, .. } => Moves::Copy,
            _ => Moves::Upload,
        };
        Tracer { observer, began: Instant::now(), lead, moves }
    }

    /// For a load of no consequence.
    pub(super) fn silent() -> Tracer {
        Tracer { observer: None, began: Instant::now(), lead: Duration::ZERO, moves: Moves::Upload }
    }

    /// Whether staging buffers go anywhere.
    pub(super) fn moves(&self) -> bool {
        self.moves != Moves::Nothing
    }

    /// Tells that a staging buffer has gone where it had to, or that it could not; the last `convert_seconds` were a conversion of
    /// `converted` bytes.
    pub(super) fn moved(&self, span: Span, transfer: &Transfer, outcome: Option<(f64, u64)>) {
        let (lane, name, failed) = match self.moves {
            Moves::Upload => (TraceLane::Upload, "upload", "failed_upload"),
            Moves::Copy => (TraceLane::Copy, "copy", "failed_copy"),
            Moves::Nothing => return,
        };
        let Some((convert_seconds, converted)) = outcome else { return self.transfer(lane, failed, span, transfer, 0) };
        self.transfer(lane, name, span, transfer, transfer.len);
        if convert_seconds > 0.0 {
            self.transfer(lane, "convert", span.last(convert_seconds), transfer, converted);
        }
    }

    /// Tells of what was done before the load.
    pub(super) fn prepared(&self, prepared: &Prepared) {
        let (open, plan) = (seconds_of(prepared.open_seconds), seconds_of(prepared.plan_seconds));
        self.tell(|| event("open", Duration::ZERO, open));
        self.tell(|| event("plan", open, plan));
    }

    /// Tells what the loop did.
    pub(super) fn step(&self, name: &'static str, span: Span) {
        self.tell(|| event(name, self.since_start(span.started), span.duration));
    }

    /// Tells what became of a transfer; `bytes` of it were moved.
    pub(super) fn transfer(&self, lane: TraceLane, name: &'static str, span: Span, transfer: &Transfer, bytes: u64) {
        self.tell(|| TraceEvent {
            lane,
            bytes,
            shard: Some(transfer.shard),
            offset: Some(transfer.offset),
            ..event(name, self.since_start(span.started), span.duration)
        });
    }

    fn tell(&self, make: impl FnOnce() -> TraceEvent) {
        if let Some(observer) = &self.observer {
            observer.event(&make());
        }
    }

    fn since_start(&self, at: Instant) -> Duration {
        self.lead + at.saturating_duration_since(self.began)
    }
}

fn event(name: &'static str, start: Duration, duration: Duration) -> TraceEvent {
    TraceEvent { lane: TraceLane::Loop, name, start, duration, bytes: 0, shard: None, offset: None }
}

/// What a caller says may be anything; what is no time is none.
fn seconds_of(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_a_span_lies_in_it_whatever_is_asked_for() {
        let span = Span { started: Instant::now(), duration: Duration::from_secs(2) };
        for (seconds, expected) in [(0.5, 0.5), (3.0, 2.0), (-1.0, 0.0), (f64::NAN, 0.0), (f64::INFINITY, 0.0)] {
            let last = span.last(seconds);
            assert_eq!(last.duration, Duration::from_secs_f64(expected), "{seconds}");
            assert_eq!(last.started + last.duration, span.started + span.duration, "{seconds}");
        }
    }

    fn over(lane: TraceLane, name: &'static str, offset: u64, milliseconds: std::ops::Range<u64>) -> TraceEvent {
        let (start, end) = (Duration::from_millis(milliseconds.start), Duration::from_millis(milliseconds.end));
        TraceEvent { lane, name, start, duration: end - start, bytes: 1, shard: Some(0), offset: Some(offset) }
    }

    #[test]
    fn overlapping_events_take_as_many_lanes_as_overlap_and_conversions_none() {
        let (direct, mapped) = (TraceLane::Reader(Route::Direct), TraceLane::Reader(Route::Mapped));
        let mut events = [
            over(direct, "read", 0, 0..10),
            over(direct, "read", 1, 2..5),
            over(direct, "read", 2, 5..7),
            over(direct, "read", 3, 6..9),
            over(direct, "read", 4, 10..11),
            over(mapped, "read", 5, 1..3),
            over(TraceLane::Upload, "upload", 0, 0..4),
            over(TraceLane::Upload, "upload", 1, 1..5),
            over(TraceLane::Upload, "convert", 0, 2..4),
            over(TraceLane::Upload, "convert", 1, 3..5),
            over(TraceLane::Upload, "upload", 2, 4..6),
        ];
        let places: Vec<usize> = place(&mut events).into_iter().map(|place| place.number).collect();
        assert_eq!(places, [0, 1, 1, 2, 0, 0, 0, 1, 0, 1, 0]);
    }
}
