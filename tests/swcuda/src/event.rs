//! Events: a place in a stream, taken when the event is recorded.
//!
//! Who waits for an event waits for the recording that was current when he began to; a later recording is none of his
//! business. An event that was never recorded is over.

use std::time::Instant;

use cudarc::driver::sys::{CUevent, CUresult};

use crate::clock::{Clock, StreamId};
use crate::handle::{Seen, Sort};
use crate::report::Kind;
use crate::state::{Answer, Guard, State};
use crate::stream;
use crate::work::Work;

/// Queries after which the lazy schedule takes the asker to be waiting.
const PATIENCE: u32 = 3;

/// One event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: usize,
    pub(crate) timing: bool,
    record: Option<Record>,
    stamp: Option<Instant>,
    generation: u64,
    polls: u32,
}

#[derive(Debug, Clone)]
struct Record {
    stream: StreamId,
    seq: u64,
    clock: Clock,
}

impl Event {
    pub(crate) fn new(device: usize, timing: bool) -> Event {
        Event { device, timing, record: None, stamp: None, generation: 0, polls: 0 }
    }
}

/// `cuEventQuery`. What is over by the modelled clock is waited for, so that the answer follows from the model alone.
pub(crate) fn query(mut state: Guard, number: u64) -> Answer {
    let record = state.events.get(&number).and_then(|event| event.record.clone());
    if state.config.modelled_clock
        && let Some(record) = record.filter(|record| state.has_passed(record.stream, record.seq))
    {
        state = stream::wait_for(state, record.stream, record.seq, &record.clock);
    }
    state.query_event(number)
}

/// `cuEventSynchronize`.
pub(crate) fn synchronise(mut state: Guard, number: u64) -> Answer {
    let Some((device, record)) = state.events.get(&number).map(|event| (event.device, event.record.clone())) else {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    };
    if let Some(record) = record {
        state = stream::wait_for(state, record.stream, record.seq, &record.clock);
    }
    state.health(device)
}

impl State {
    /// The number of a live event's handle.
    pub(crate) fn event(&mut self, handle: CUevent, call: &str) -> Answer<u64> {
        match self.handles.number(Sort::Event, handle) {
            Seen::Number(number) if self.events.contains_key(&number) => Ok(number),
            Seen::Stale => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
            _ => {
                let text = format!("{call}: {handle:?} is no event, or one that was destroyed");
                self.refuse(Kind::BadHandle, &text, CUresult::CUDA_ERROR_INVALID_HANDLE)
            }
        }
    }

    /// `cuEventRecord`.
    pub(crate) fn record(&mut self, number: u64, id: StreamId) -> Answer {
        let of_stream = self.streams.get(&id).map(|stream| stream.device);
        let Some(event) = self.events.get_mut(&number) else { return Err(CUresult::CUDA_ERROR_INVALID_HANDLE) };
        if of_stream != Some(event.device) {
            let text = format!("cuEventRecord: an event of device {} on a stream of {of_stream:?}", event.device);
            return self.refuse(Kind::WrongContext, &text, CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        event.generation += 1;
        event.stamp = None;
        event.polls = 0;
        let stamp = Work::Stamp { event: number, generation: event.generation };
        let seq = self.enqueue(id, "cuEventRecord", Vec::new(), Vec::new(), stamp);
        let clock = self.streams.get(&id).map(|stream| stream.clock.clone()).unwrap_or_default();
        if let Some(event) = self.events.get_mut(&number) {
            event.record = Some(Record { stream: id, seq, clock });
        }
        Ok(())
    }

    /// `cuStreamWaitEvent`.
    pub(crate) fn wait_event(&mut self, id: StreamId, number: u64) {
        let Some(record) = self.events.get(&number).and_then(|event| event.record.clone()) else { return };
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.clock.join(&record.clock);
        }
        let dependency = vec![(record.stream, record.seq)];
        self.enqueue(id, "cuStreamWaitEvent", Vec::new(), dependency, Work::Nothing);
    }

    /// Whether what was recorded is over; asking often enough counts as waiting.
    fn query_event(&mut self, number: u64) -> Answer {
        let Some(event) = self.events.get_mut(&number) else { return Err(CUresult::CUDA_ERROR_INVALID_HANDLE) };
        event.polls += 1;
        let (device, impatient) = (event.device, event.polls > PATIENCE);
        let Some(record) = event.record.clone() else { return Ok(()) };
        self.health(device)?;
        if self.is_done(record.stream, record.seq) && self.has_passed(record.stream, record.seq) {
            self.host_learns(record.stream, record.seq, &record.clock);
            return Ok(());
        }
        if impatient {
            self.demand(record.stream, record.seq);
        }
        Err(CUresult::CUDA_ERROR_NOT_READY)
    }

    /// Notes the time in an event that has not been recorded anew.
    pub(crate) fn stamp(&mut self, number: u64, generation: u64, at: Instant) {
        if let Some(event) = self.events.get_mut(&number).filter(|event| event.generation == generation) {
            event.stamp = Some(at);
        }
    }

    /// `cuEventElapsedTime`, in milliseconds.
    pub(crate) fn elapsed(&self, start: u64, end: u64) -> Answer<f32> {
        let (Some(start), Some(end)) = (self.events.get(&start), self.events.get(&end)) else {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        };
        let recorded = start.record.is_some() && end.record.is_some();
        if !recorded || !start.timing || !end.timing || start.device != end.device {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let (Some(from), Some(to)) = (start.stamp, end.stamp) else { return Err(CUresult::CUDA_ERROR_NOT_READY) };
        let forward = to.saturating_duration_since(from).as_secs_f32();
        let backward = from.saturating_duration_since(to).as_secs_f32();
        Ok((forward - backward) * 1e3)
    }
}
