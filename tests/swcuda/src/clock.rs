//! Vector clocks and the log of accesses: who may touch which bytes at the same time.
//!
//! Stream order, event waits and host synchronisation give "happens before"; two accesses to one byte, at least one of
//! them a write, that it does not order are a race, whatever the timing was. The host is one agent: no false alarms, but
//! what one host thread does wrong under cover of another's wait is missed. This file never looks at memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::footprint::Footprint;

/// A stream's number, unique in the life of the process.
pub(crate) type StreamId = u32;

/// For each stream, the last of its operations that is known to be over.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Clock {
    seen: BTreeMap<StreamId, u64>,
}

impl Clock {
    /// Learns all that `other` knows.
    pub(crate) fn join(&mut self, other: &Clock) {
        for (&stream, &seq) in &other.seen {
            self.advance(stream, seq);
        }
    }

    /// Learns that `seq` of `stream` is over.
    pub(crate) fn advance(&mut self, stream: StreamId, seq: u64) {
        let known = self.seen.entry(stream).or_insert(0);
        *known = (*known).max(seq);
    }

    /// Whether `seq` of `stream` is known to be over.
    pub(crate) fn covers(&self, stream: StreamId, seq: u64) -> bool {
        self.seen.get(&stream).is_some_and(|&known| known >= seq)
    }
}

/// What an access does. A hold is memory that a kernel may touch: it counts for frees, not for races.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Read,
    Write,
    Hold,
}

/// One operation's claim to some bytes.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) footprint: Footprint,
    pub(crate) mode: Mode,
    pub(crate) stream: StreamId,
    pub(crate) seq: u64,
    /// What is ordered before it.
    pub(crate) clock: Arc<Clock>,
    pub(crate) label: Arc<str>,
}

/// The accesses that the host does not yet know to be over.
#[derive(Debug, Default)]
pub(crate) struct Log {
    accesses: Vec<Access>,
    /// Kernels that have not run: their accesses come late and must still meet those that were there before.
    late: Vec<(StreamId, u64, Arc<Clock>)>,
}

impl Log {
    /// Adds an access; a message if it races with one that is there.
    pub(crate) fn add(&mut self, access: Access) -> Option<String> {
        let race = self.accesses.iter().find_map(|other| race(&access, other));
        self.accesses.push(access);
        race
    }

    /// A kernel was queued: see [`Log::late`].
    pub(crate) fn expect(&mut self, stream: StreamId, seq: u64, clock: Arc<Clock>) {
        self.late.push((stream, seq, clock));
    }

    /// The kernel's accesses are all in.
    pub(crate) fn arrived(&mut self, stream: StreamId, seq: u64) {
        self.late.retain(|late| (late.0, late.1) != (stream, seq));
    }

    /// Forgets what can no longer race: what the host and every kernel to come know to be over.
    pub(crate) fn prune(&mut self, host: &Clock) {
        let late = &self.late;
        self.accesses.retain(|access| {
            let known = |clock: &Clock| clock.covers(access.stream, access.seq);
            !(known(host) && late.iter().all(|(_, _, clock)| known(clock)))
        });
    }

    /// The accesses to `footprint` that are not known to be over by `clock`.
    pub(crate) fn in_flight(&self, footprint: &Footprint, clock: &Clock) -> impl Iterator<Item = &Access> {
        let unordered = self.accesses.iter().filter(|access| !clock.covers(access.stream, access.seq));
        unordered.filter(|access| access.footprint.overlap(footprint).is_some())
    }

    /// Whether one of those is a write.
    pub(crate) fn writer_in_flight(&self, footprint: &Footprint, clock: &Clock) -> bool {
        self.in_flight(footprint, clock).any(|access| access.mode == Mode::Write)
    }
}

fn race(new: &Access, old: &Access) -> Option<String> {
    let conflict = matches!((new.mode, old.mode), (Mode::Write, Mode::Read | Mode::Write) | (Mode::Read, Mode::Write));
    if !conflict || new.stream == old.stream {
        return None;
    }
    if new.clock.covers(old.stream, old.seq) || old.clock.covers(new.stream, new.seq) {
        return None;
    }
    let at = new.footprint.overlap(&old.footprint)?;
    Some(format!(
        "{} (stream {}, operation {}) and {} (stream {}, operation {}) both touch [{:#x}, {:#x}) with no event or wait \
         between",
        new.label, new.stream, new.seq, old.label, old.stream, old.seq, at.start, at.end
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(stream: StreamId, seq: u64, mode: Mode, clock: &Clock) -> Access {
        let clock = Arc::new(clock.clone());
        Access { footprint: Footprint::flat(100, 10), mode, stream, seq, clock, label: "copy".into() }
    }

    #[test]
    fn unordered_conflicts_race_and_ordered_ones_do_not() {
        let mut log = Log::default();
        let mut clock = Clock::default();
        assert!(log.add(access(1, 1, Mode::Write, &clock)).is_none());
        assert!(log.add(access(2, 1, Mode::Read, &clock)).is_some_and(|text| text.contains("[0x64, 0x6e)")));
        clock.advance(1, 1);
        assert!(log.add(access(3, 1, Mode::Read, &clock)).is_none(), "ordered after the write");
        assert!(log.add(access(4, 1, Mode::Hold, &Clock::default())).is_none(), "a hold never races");
    }

    #[test]
    fn a_late_kernel_is_ordered_before_what_waited_for_it() {
        let mut log = Log::default();
        let kernel = Arc::new(Clock::default());
        log.expect(1, 1, Arc::clone(&kernel));
        let mut after = Clock::default();
        after.advance(1, 1);
        log.add(access(2, 1, Mode::Read, &after));
        log.add(access(3, 1, Mode::Read, &Clock::default()));
        let mut host = Clock::default();
        host.advance(2, 1);
        host.advance(3, 1);
        log.prune(&host);
        let text = log.add(access(1, 1, Mode::Write, &kernel)).unwrap();
        assert!(text.contains("stream 3") && !text.contains("stream 2"), "{text}");
        log.arrived(1, 1);
        log.prune(&host);
        assert_eq!(log.accesses.len(), 1);
    }

    #[test]
    fn what_the_host_waited_for_is_not_in_flight() {
        let mut log = Log::default();
        let mut host = Clock::default();
        log.add(access(1, 4, Mode::Read, &host));
        assert!(log.in_flight(&Footprint::flat(109, 1), &host).next().is_some());
        assert!(log.in_flight(&Footprint::flat(110, 1), &host).next().is_none());
        host.advance(1, 4);
        assert!(log.in_flight(&Footprint::flat(109, 1), &host).next().is_none());
    }
}
