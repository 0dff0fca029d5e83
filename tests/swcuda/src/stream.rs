//! Streams: a queue and a thread each, which runs one operation after another once all that it depends on is over.
//!
//! When an operation is due is the schedule's business (`eager`, `lazy`, `random`), decided here and nowhere else. This
//! file does not know what operations do; `execute` does.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUresult, CUstream};

use crate::clock::{Access, Clock, Mode, StreamId};
use crate::config::Schedule;
use crate::execute;
use crate::footprint::Footprint;
use crate::handle::{Handles, Seen, Sort};
use crate::report::Kind;
use crate::state::{self, Answer, Guard, State};
use crate::work::Work;

/// Queries of unfinished work after which the lazy schedule takes the asker to be waiting.
const PATIENCE: u32 = 3;
/// Longest delay of the random schedule.
const LONGEST_HOLD_US: u64 = 700;

/// One operation in a queue.
pub(crate) struct Operation {
    pub(crate) seq: u64,
    /// What is ordered before it, itself included.
    pub(crate) clock: Arc<Clock>,
    pub(crate) label: Arc<str>,
    pub(crate) work: Work,
    /// The sticky error that it ends in instead of being done.
    pub(crate) fault: Option<CUresult>,
    pub(crate) enqueued: Instant,
    pub(crate) dependencies: Vec<(StreamId, u64)>,
    /// How long the random schedule holds it once it could run, and until when.
    hold: Duration,
    release: Option<Instant>,
}

/// One stream.
pub(crate) struct Stream {
    pub(crate) device: usize,
    /// Ordered with the default stream.
    pub(crate) blocking: bool,
    pub(crate) default: bool,
    pub(crate) priority: i32,
    pub(crate) queue: VecDeque<Operation>,
    pub(crate) running: bool,
    /// What is ordered before the next operation.
    pub(crate) clock: Clock,
    pub(crate) last: u64,
    pub(crate) done: u64,
    /// Somebody waits for operations up to here.
    demand: u64,
    pub(crate) destroyed: bool,
    polls: u32,
    /// When its last operation ended by the model.
    pub(crate) finish: Option<Instant>,
    /// When each of its operations is over by the modelled clock.
    pub(crate) ends: Vec<Instant>,
}

/// What is left of a stream that was destroyed and has done its work: what it did, for who waits for the device.
#[derive(Debug)]
pub(crate) struct Retired {
    id: StreamId,
    device: usize,
    blocking: bool,
    last: u64,
    clock: Clock,
}

/// What a stream's thread does next.
enum Step {
    Run(Operation),
    Wait(Option<Instant>),
    End,
}

impl State {
    /// Makes a stream and its thread.
    pub(crate) fn new_stream(&mut self, device: usize, blocking: bool, priority: i32) -> Answer<StreamId> {
        let id = StreamId::try_from(self.handles.fresh()).map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let stream = Stream {
            device,
            blocking,
            default: false,
            priority,
            queue: VecDeque::new(),
            running: false,
            clock: Clock::default(),
            last: 0,
            done: 0,
            demand: 0,
            destroyed: false,
            polls: 0,
            finish: None,
            ends: Vec::new(),
        };
        let epoch = self.epoch;
        let thread = std::thread::Builder::new().name(format!("swcuda-{id}")).spawn(move || serve(id, epoch));
        thread.map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        self.streams.insert(id, stream);
        Ok(id)
    }

    /// The stream of a handle: the current device's default stream for NULL.
    pub(crate) fn stream(&mut self, handle: CUstream, device: usize, call: &str) -> Answer<StreamId> {
        if handle as usize <= 1 {
            return self.default_stream(device);
        }
        if handle as usize == 2 {
            let text = format!("{call}: the per-thread default stream is not modelled");
            return self.refuse(Kind::Unsupported, &text, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let id = match self.handles.number(Sort::Stream, handle) {
            Seen::Number(number) => number as StreamId,
            Seen::Stale => return Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
            Seen::Foreign => 0,
        };
        match self.streams.get(&id) {
            Some(stream) if !stream.destroyed => self.health(stream.device).map(|()| id),
            _ => {
                let text = format!("{call}: {handle:?} is no stream, or one that was destroyed");
                self.refuse(Kind::BadHandle, &text, CUresult::CUDA_ERROR_INVALID_HANDLE)
            }
        }
    }

    /// The stream of a handle whatever the state of its device, for calls that give something back.
    pub(crate) fn find_stream(&self, handle: CUstream) -> Option<StreamId> {
        let Seen::Number(number) = self.handles.number(Sort::Stream, handle) else { return None };
        let id = number as StreamId;
        self.streams.get(&id).filter(|stream| !stream.destroyed).map(|_| id)
    }

    fn default_stream(&mut self, device: usize) -> Answer<StreamId> {
        if let Some(id) = self.devices[device].default_stream {
            return Ok(id);
        }
        let id = self.new_stream(device, true, 0)?;
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.default = true;
        }
        self.devices[device].default_stream = Some(id);
        Ok(id)
    }

    /// Puts work at the end of a stream; its place in the stream.
    pub(crate) fn enqueue(
        &mut self,
        id: StreamId,
        label: &str,
        touches: Vec<(Footprint, Mode)>,
        dependencies: Vec<(StreamId, u64)>,
        work: Work,
    ) -> u64 {
        let mut dependencies = dependencies;
        dependencies.extend(self.order_with_default(id));
        let fault = if work.can_fail() { self.faults.operation() } else { None };
        let hold = self.hold();
        let host = self.host.clone();
        self.foresee(id, &work, &dependencies);
        let Some(stream) = self.streams.get_mut(&id) else { return 0 };
        stream.clock.join(&host);
        stream.last += 1;
        stream.polls = 0;
        let seq = stream.last;
        stream.clock.advance(id, seq);
        let clock = Arc::new(stream.clock.clone());
        let label: Arc<str> = label.into();
        stream.queue.push_back(Operation {
            seq,
            clock: Arc::clone(&clock),
            label: Arc::clone(&label),
            work,
            fault,
            enqueued: Instant::now(),
            dependencies,
            hold,
            release: None,
        });
        self.stats.operations += 1;
        self.log.prune(&host);
        for (footprint, mode) in touches {
            let (clock, label) = (Arc::clone(&clock), Arc::clone(&label));
            self.access(Access { footprint, mode, stream: id, seq, clock, label });
        }
        state::notify();
        seq
    }

    /// The default stream waits for all blocking streams of its device, and they wait for it.
    fn order_with_default(&mut self, id: StreamId) -> Vec<(StreamId, u64)> {
        let Some(own) = self.streams.get(&id) else { return Vec::new() };
        if !own.blocking {
            return Vec::new();
        }
        let (default, device) = (own.default, own.device);
        let others = self.streams.iter().filter(|(other, stream)| {
            **other != id && stream.device == device && stream.blocking && stream.default != default
        });
        let mut clock = Clock::default();
        let mut dependencies = Vec::new();
        for (&other, stream) in others {
            clock.join(&stream.clock);
            dependencies.push((other, stream.last));
        }
        for gone in self.retired.iter().filter(|gone| default && gone.device == device && gone.blocking) {
            clock.join(&gone.clock);
        }
        if let Some(own) = self.streams.get_mut(&id) {
            own.clock.join(&clock);
        }
        dependencies
    }

    /// How long the random schedule will hold an operation: half of them not at all.
    fn hold(&mut self) -> Duration {
        let random = matches!(self.config.schedule, Schedule::Random(_));
        match random && self.draw(2) == 1 {
            true => Duration::from_micros(self.draw(LONGEST_HOLD_US)),
            false => Duration::ZERO,
        }
    }

    /// Says that somebody waits for a stream's operations up to `seq`.
    pub(crate) fn demand(&mut self, id: StreamId, seq: u64) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.demand < seq
        {
            stream.demand = seq;
            state::notify();
        }
    }

    /// Whether an operation is over. A stream that is gone has done all it had.
    pub(crate) fn is_done(&self, id: StreamId, seq: u64) -> bool {
        self.streams.get(&id).is_none_or(|stream| stream.done >= seq)
    }

    /// Whether all of a stream is over; asking often enough counts as waiting.
    pub(crate) fn query_stream(&mut self, id: StreamId) -> Answer {
        let Some(stream) = self.streams.get_mut(&id) else { return Ok(()) };
        let last = stream.last;
        if stream.done >= last && self.has_passed(id, last) {
            let clock = self.streams.get(&id).map(|stream| stream.clock.clone()).unwrap_or_default();
            self.host_learns(id, last, &clock);
            return Ok(());
        }
        let Some(stream) = self.streams.get_mut(&id) else { return Ok(()) };
        stream.polls += 1;
        if stream.polls > PATIENCE {
            self.demand(id, last);
        }
        Err(CUresult::CUDA_ERROR_NOT_READY)
    }

    /// The streams of a device, with the last operation of each.
    pub(crate) fn streams_of(&self, device: usize) -> Vec<StreamId> {
        self.streams.iter().filter(|(_, stream)| stream.device == device).map(|(&id, _)| id).collect()
    }

    /// What a stream's thread does next.
    fn step(&mut self, id: StreamId) -> Step {
        let (schedule, limit, draining) = (self.config.schedule, self.config.lazy_limit, self.draining);
        let Some(stream) = self.streams.get(&id) else { return Step::End };
        let Some(head) = stream.queue.front() else {
            return if stream.destroyed { Step::End } else { Step::Wait(None) };
        };
        let unwanted = schedule == Schedule::Lazy && stream.demand < head.seq && !draining;
        if unwanted && head.enqueued.elapsed() < limit {
            return Step::Wait(Some(head.enqueued + limit));
        }
        let unmet: Vec<(StreamId, u64)> =
            head.dependencies.iter().copied().filter(|&(other, seq)| !self.is_done(other, seq)).collect();
        if !unmet.is_empty() && !draining {
            unmet.into_iter().for_each(|(other, seq)| self.demand(other, seq));
            return Step::Wait(None);
        }
        let Some(stream) = self.streams.get_mut(&id) else { return Step::End };
        if let Some(head) = stream.queue.front_mut() {
            let release = *head.release.get_or_insert_with(|| Instant::now() + head.hold);
            if !draining && Instant::now() < release {
                return Step::Wait(Some(release));
            }
        }
        stream.running = true;
        stream.queue.pop_front().map_or(Step::Wait(None), Step::Run)
    }
}

/// A stream's thread.
fn serve(id: StreamId, epoch: u64) {
    let mut state = state::lock();
    loop {
        // After a reset that could not wait for this thread, nothing here is its own any more.
        if state.epoch != epoch {
            return;
        }
        match state.step(id) {
            Step::End => break,
            Step::Wait(None) => state = state::wait(state),
            Step::Wait(Some(until)) => {
                state = state::wait_timeout(state, until.saturating_duration_since(Instant::now()));
            }
            Step::Run(operation) => {
                let seq = operation.seq;
                state = run(state, id, operation);
                if let Some(stream) = state.streams.get_mut(&id).filter(|stream| stream.last >= seq) {
                    stream.done = seq;
                    stream.running = false;
                    stream.polls = 0;
                }
                state::notify();
            }
        }
    }
    if let Some(stream) = state.streams.remove(&id) {
        let Stream { device, blocking, last, clock, .. } = stream;
        state.retired.push(Retired { id, device, blocking, last, clock });
    }
    state::notify();
}

/// Runs an operation. Should the double itself fail at it, the device is broken, and nobody waits for ever.
fn run(state: Guard, id: StreamId, operation: Operation) -> Guard {
    let device = state.streams.get(&id).map_or(0, |stream| stream.device);
    let label = Arc::clone(&operation.label);
    let outcome = catch_unwind(AssertUnwindSafe(|| execute::run(state, id, operation)));
    outcome.unwrap_or_else(|_| {
        let mut state = state::lock();
        state.report(Kind::Internal, &format!("the double panicked in {label}"));
        state.fail(device, CUresult::CUDA_ERROR_LAUNCH_FAILED);
        state
    })
}

/// Waits until an operation is over, and with it all that `clock` orders before it; the host then knows.
pub(crate) fn wait_for(mut state: Guard, id: StreamId, seq: u64, clock: &Clock) -> Guard {
    let epoch = state.epoch;
    state.demand(id, seq);
    while state.epoch == epoch && !state.is_done(id, seq) {
        state = state::wait(state);
    }
    if state.epoch == epoch {
        state.host_learns(id, seq, clock);
        state.host_waited(id, seq);
    }
    state
}

/// Waits for all that is in a stream now.
pub(crate) fn wait_stream(state: Guard, id: StreamId) -> Guard {
    let Some((last, clock)) = state.streams.get(&id).map(|stream| (stream.last, stream.clock.clone())) else {
        return state;
    };
    wait_for(state, id, last, &clock)
}

/// Waits for all that is in a device's streams now.
pub(crate) fn wait_device(mut state: Guard, device: usize) -> Guard {
    // All are asked first: what one waits for may be behind something in another.
    let streams = state.streams_of(device);
    for &id in &streams {
        let last = state.streams.get(&id).map_or(0, |stream| stream.last);
        state.demand(id, last);
    }
    for id in streams {
        state = wait_stream(state, id);
    }
    let (gone, others) = std::mem::take(&mut state.retired).into_iter().partition(|gone| gone.device == device);
    state.retired = others;
    gone.into_iter().for_each(|Retired { id, last, clock, .. }: Retired| state.host_learns(id, last, &clock));
    state
}

/// The handle of a stream.
pub(crate) fn pointer(id: StreamId) -> CUstream {
    Handles::pointer(Sort::Stream, u64::from(id))
}
