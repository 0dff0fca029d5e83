//! Sends the trace events of one load to its observer. It measures nothing itself: the times are those that the report adds up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::control::Observer;
use super::prepared::Prepared;
use super::trace::{TraceEvent, TraceLane};
use crate::device::DeviceLimits;
use crate::plan::Transfer;

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
}
