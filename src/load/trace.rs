//! What happened when, as plain data for an [`Observer`]: one [`TraceEvent`] for each read, upload and step of the loop.
//!
//! Events are told once they are over, so they come in the order in which things ended. Nothing is made where nobody
//! observes, and nothing is kept here. It measures nothing itself: the times are those that the report adds up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Observer, Prepared};
use crate::extent::ShardIndex;
use crate::plan::Transfer;
use crate::source::Route;

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
}

/// Something that took time, once it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    /// Who was busy.
    pub lane: TraceLane,
    /// With what. The loop: `open`, `plan`, `set_up`, `allocate`, `wait_read`, `wait_upload`, as the report's stages are
    /// called. Readers: `read`, or `failed_read`, which brought nothing. Uploads: `upload`, `failed_upload`, and `convert`
    /// for the part of an upload that its conversion took (how long is known, when is not: it is put at the end).
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
}

impl Tracer {
    /// A load that begins now.
    pub(super) fn new(observer: Option<Arc<dyn Observer>>, prepared: &Prepared) -> Tracer {
        let lead = seconds_of(prepared.open_seconds) + seconds_of(prepared.plan_seconds);
        Tracer { observer, began: Instant::now(), lead }
    }

    /// For a load of no consequence.
    pub(super) fn silent() -> Tracer {
        Tracer { observer: None, began: Instant::now(), lead: Duration::ZERO }
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
}
