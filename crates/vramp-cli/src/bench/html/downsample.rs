//! Thousands of events as some hundreds of pieces: what is too short to be seen is joined, its busy share kept. Plain functions.

use std::collections::BTreeMap;

use vramp_bench::TimelineEvent;

/// Lanes that are shown at most.
const MOST_LANES: usize = 32;

/// Short events are joined to pieces of at most so many thresholds, so that they still show how busy a lane was when.
const LONGEST_JOINED: f64 = 8.0;

/// A piece of a lane.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Piece<'a> {
    pub(super) start: f64,
    pub(super) end: f64,
    /// What its longest event is.
    pub(super) name: &'a str,
    /// Seconds of it in which something happened.
    busy: f64,
    /// Seconds of the longest of its events.
    longest: f64,
}

impl Piece<'_> {
    /// The share of it in which something happened.
    pub(super) fn share(&self) -> f64 {
        (self.busy / (self.end - self.start).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
    }

    /// Whether it stands for several events.
    pub(super) fn is_joined(&self) -> bool {
        self.busy > self.longest
    }
}

/// The lanes by their names, the loop first, then readers, then uploads; and how many there are beyond those shown.
pub(super) fn lanes(events: &[TimelineEvent]) -> (Vec<(&str, Vec<&TimelineEvent>)>, usize) {
    let mut by_name: BTreeMap<(usize, usize, &str), Vec<&TimelineEvent>> = BTreeMap::new();
    for event in events {
        let kinds = ["loop", "reader", "upload", "copy"];
        let kind = kinds.iter().position(|kind| event.lane.starts_with(kind)).unwrap_or(kinds.len());
        by_name.entry((kind, event.lane.len(), &event.lane)).or_default().push(event);
    }
    let more = by_name.len().saturating_sub(MOST_LANES);
    let mut lanes: Vec<_> = by_name.into_iter().map(|((_, _, name), events)| (name, events)).take(MOST_LANES).collect();
    for (_, events) in &mut lanes {
        events.sort_by(|a, b| a.start.total_cmp(&b.start));
    }
    (lanes, more)
}

/// The pieces of each lane, at most `most` of them together; `shortest` seconds can just be seen.
pub(super) fn pieces<'a>(
    lanes: &[(&'a str, Vec<&'a TimelineEvent>)],
    shortest: f64,
    most: usize,
) -> Vec<Vec<Piece<'a>>> {
    let mut threshold = shortest.max(1e-9);
    loop {
        let pieces: Vec<Vec<Piece<'a>>> = lanes.iter().map(|(_, events)| joined(events, threshold)).collect();
        if pieces.iter().map(Vec::len).sum::<usize>() <= most.max(lanes.len()) || threshold > 1e9 {
            return pieces;
        }
        threshold *= 1.5;
    }
}

/// Joins events that are shorter than `threshold` and lie nearer than that.
fn joined<'a>(events: &[&'a TimelineEvent], threshold: f64) -> Vec<Piece<'a>> {
    let mut pieces: Vec<Piece<'a>> = Vec::new();
    for event in events {
        let end = event.start + event.seconds;
        match pieces.last_mut() {
            Some(last) if takes(last, event, threshold) => {
                last.busy += event.seconds;
                last.end = last.end.max(end);
                if event.seconds > last.longest {
                    (last.name, last.longest) = (&event.name, event.seconds);
                }
            }
            _ => {
                let (busy, longest) = (event.seconds, event.seconds);
                pieces.push(Piece { start: event.start, end, name: &event.name, busy, longest });
            }
        }
    }
    pieces
}

fn takes(piece: &Piece<'_>, event: &TimelineEvent, threshold: f64) -> bool {
    let short_events = piece.longest < threshold && event.seconds < threshold;
    let near = event.start - piece.end < threshold;
    // One that lies within the other (a conversion within its upload) is not a piece of its own when it is short.
    let within = event.start + event.seconds <= piece.end && event.seconds < threshold;
    within || short_events && near && event.start + event.seconds - piece.start < threshold * LONGEST_JOINED
}

/// Bytes per second in `count` equal parts of `0..seconds`: the bytes of each event spread evenly over its time.
pub(super) fn rates<'a>(events: impl Iterator<Item = &'a TimelineEvent>, seconds: f64, count: usize) -> Vec<f64> {
    let mut bytes = vec![0.0; count];
    let width = seconds.max(f64::MIN_POSITIVE) / as_f64(count);
    for event in events {
        let (from, to) = (event.start / width, (event.start + event.seconds) / width);
        for (at, bin) in bytes.iter_mut().enumerate() {
            let (start, end) = (as_f64(at), as_f64(at + 1));
            let overlap = (to.min(end) - from.max(start)).max(0.0);
            // What took no time at all is all in the part where it was.
            let share =
                if to > from { overlap / (to - from) } else { f64::from(u8::from((start..end).contains(&from))) };
            *bin += share * super::super::super::text::as_f64(event.bytes);
        }
    }
    bytes.into_iter().map(|bytes| bytes / width).collect()
}

fn as_f64(number: usize) -> f64 {
    super::super::super::text::as_f64(number as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(lane: &str, name: &str, start: f64, seconds: f64) -> TimelineEvent {
        TimelineEvent { lane: lane.to_owned(), name: name.to_owned(), start, seconds, bytes: 1000 }
    }

    #[test]
    fn lanes_stand_in_the_order_of_their_kinds_and_numbers() {
        let events: Vec<_> = ["upload 0", "reader 10, direct", "reader 9, direct", "other", "loop"]
            .map(|lane| event(lane, "read", 0.0, 1.0))
            .to_vec();
        let names: Vec<&str> = lanes(&events).0.into_iter().map(|lane| lane.0).collect();
        assert_eq!(names, ["loop", "reader 9, direct", "reader 10, direct", "upload 0", "other"]);
        let many: Vec<_> = (0..40).map(|at| event(&format!("reader {at}"), "read", 0.0, 1.0)).collect();
        assert_eq!((lanes(&many).0.len(), lanes(&many).1), (MOST_LANES, 8));
    }

    #[test]
    fn long_events_stay_as_they_are_and_short_ones_are_joined_with_their_busy_share() {
        let mut events = vec![event("loop", "open", 0.0, 1.0)];
        events.extend((0..10).map(|at| event("loop", "read", 1.0 + f64::from(at) * 0.01, 0.005)));
        let (lanes, _) = lanes(&events);
        let found = pieces(&lanes, 0.1, 100);
        assert_eq!(found[0].len(), 2, "{found:?}");
        assert_eq!((found[0][0].start, found[0][0].end, found[0][0].share()), (0.0, 1.0, 1.0));
        let short_events = &found[0][1];
        assert!(
            (0.5..0.56).contains(&short_events.share()) && short_events.name == "read" && short_events.is_joined(),
            "{short_events:?}"
        );
    }

    #[test]
    fn however_many_events_there_are_the_pieces_are_few() {
        let events: Vec<_> = (0..100_000).map(|at| event("reader 0", "read", f64::from(at) * 1e-4, 0.9e-4)).collect();
        let (lanes, _) = lanes(&events);
        let found = pieces(&lanes, 1e-6, 500);
        assert!((50..=500).contains(&found[0].len()), "{}", found[0].len());
        let busy: f64 = found[0].iter().map(|piece| piece.busy).sum();
        assert!((busy - 9.0).abs() < 1e-6, "{busy}");
    }

    #[test]
    fn no_byte_is_lost_on_the_way_to_a_rate() {
        let events = [event("r", "read", 0.0, 1.0), event("r", "read", 0.25, 0.5), event("r", "read", 0.5, 0.0)];
        let found = rates(events.iter(), 1.0, 8);
        let bytes: f64 = found.iter().map(|rate| rate / 8.0).sum();
        assert!((bytes - 3000.0).abs() < 1e-6, "{found:?}");
        assert_eq!(found[0], 1000.0);
    }
}
