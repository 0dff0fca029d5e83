//! The modelled clock: with [`Config::modelled_clock`](crate::Config) no time passes but by the model.
//!
//! When an operation ends follows from when it was queued, from what it waits for and from its engine, and is known as soon as it
//! is queued. The host's clock moves when the host waits for an operation, or when a test moves it; calls take no time. The same
//! program gives the same figures on every machine, however busy. This file waits for nothing and runs nothing.

use std::time::{Duration, Instant};

use crate::clock::StreamId;
use crate::state::State;
use crate::work::Work;

impl State {
    /// The time: the host's modelled one, or the machine's.
    pub(crate) fn now(&self) -> Instant {
        if self.config.modelled_clock { self.began + self.host_time } else { Instant::now() }
    }

    /// Computes when an operation that is being queued will be over.
    pub(crate) fn foresee(&mut self, id: StreamId, work: &Work, dependencies: &[(StreamId, u64)]) {
        let Some(stream) = self.streams.get(&id).filter(|_| self.config.modelled_clock) else { return };
        let (device, before) = (stream.device, stream.ends.last().copied());
        let others = dependencies.iter().filter_map(|&(other, seq)| self.end_of(other, seq));
        let ready = others.chain(before).fold(self.now(), Instant::max);
        let mut end = ready;
        if let Work::Copy(copy) = work
            && let Some((start, over)) = self.book(device, copy, ready)
        {
            self.count_copy(device, copy, start, over);
            end = over;
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.ends.push(end);
        }
    }

    /// When an operation is over by the modelled clock.
    pub(crate) fn end_of(&self, id: StreamId, seq: u64) -> Option<Instant> {
        let index = usize::try_from(seq.checked_sub(1)?).ok()?;
        self.streams.get(&id)?.ends.get(index).copied()
    }

    /// Whether an operation lies in the past of the host's modelled clock.
    pub(crate) fn has_passed(&self, id: StreamId, seq: u64) -> bool {
        self.end_of(id, seq).is_none_or(|end| end <= self.now())
    }

    /// The host has waited for an operation: its clock is not behind the end of it.
    pub(crate) fn host_waited(&mut self, id: StreamId, seq: u64) {
        if let Some(end) = self.end_of(id, seq) {
            self.host_at_least(end.saturating_duration_since(self.began));
        }
    }

    /// Moves the host's clock forward, never back.
    pub(crate) fn host_at_least(&mut self, time: Duration) {
        self.host_time = self.host_time.max(time);
    }
}
