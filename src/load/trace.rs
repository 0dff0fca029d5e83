//! What happened when, as plain data for an [`Observer`](super::Observer): one [`TraceEvent`] for each read, upload and step of the loop.
//!
//! Events are sent when they end, so they come in the order of their ends. Nothing is made if nothing
//! observes, and nothing is kept here. It measures nothing itself: the times are those that the report adds up.

use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use crate::extent::ShardIndex;
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

#[cfg(test)]
mod tests {
    use super::*;

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
