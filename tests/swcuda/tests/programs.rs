//! Random programs that are right: streams that copy to and fro between slots of memory, each operation ordered by an
//! event after those that it meets. The double must find nothing wrong, and the bytes must be those of doing it all in
//! the order of the program.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use cudarc::driver::sys::{CUevent, CUstream};
use support::{alloc, begin, destroy, end, event, free, free_pinned, host, pinned, schedules, stream};
use swcuda::{Config, Double};

const SLOTS: usize = 6;
const BYTES: usize = 512;
const STREAMS: usize = 3;
const STEPS: usize = 60;

/// Numbers that only a seed decides.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// An operation that the host does not know to be over.
struct Pending {
    stream: usize,
    done: CUevent,
    reads: Option<usize>,
    writes: usize,
}

/// A program in the making: slots below [`SLOTS`] are of the device, the others pinned memory.
struct Program {
    streams: Vec<CUstream>,
    device: u64,
    pinned: *mut u8,
    /// What each slot holds once all that was queued is over.
    expected: Vec<u8>,
    pending: Vec<Pending>,
    events: Vec<CUevent>,
}

impl Program {
    fn new() -> Program {
        let (device, pinned) = (alloc(SLOTS * BYTES), pinned(SLOTS * BYTES));
        call!(cuMemsetD8_v2(device, 0, SLOTS * BYTES)).unwrap();
        host(pinned, SLOTS * BYTES).fill(0);
        let streams = (0..STREAMS).map(|_| stream()).collect();
        Program { streams, device, pinned, expected: vec![0; 2 * SLOTS], pending: Vec::new(), events: Vec::new() }
    }

    fn on_device(&self, slot: usize) -> u64 {
        self.device + (slot * BYTES) as u64
    }

    fn on_host(&self, slot: usize) -> *mut u8 {
        self.pinned.wrapping_add((slot - SLOTS) * BYTES)
    }

    /// Queues one operation, after events of all that it meets on other streams.
    fn operate(&mut self, stream: usize, reads: Option<usize>, writes: usize, value: u8) {
        let meets = |one: &Pending| one.writes == writes || reads == Some(one.writes) || one.reads == Some(writes);
        let handle = self.streams[stream];
        for one in self.pending.iter().filter(|one| one.stream != stream && meets(one)) {
            call!(cuStreamWaitEvent(handle, one.done, 0)).unwrap();
        }
        match reads {
            None => call!(cuMemsetD8Async(self.on_device(writes), value, BYTES, handle)),
            Some(from) if from >= SLOTS => {
                call!(cuMemcpyHtoDAsync_v2(self.on_device(writes), self.on_host(from).cast(), BYTES, handle))
            }
            Some(from) if writes >= SLOTS => {
                call!(cuMemcpyDtoHAsync_v2(self.on_host(writes).cast(), self.on_device(from), BYTES, handle))
            }
            Some(from) => call!(cuMemcpyDtoDAsync_v2(self.on_device(writes), self.on_device(from), BYTES, handle)),
        }
        .unwrap();
        self.expected[writes] = reads.map_or(value, |from| self.expected[from]);
        let done = event();
        call!(cuEventRecord(done, handle)).unwrap();
        self.events.push(done);
        self.pending.push(Pending { stream, done, reads, writes });
    }

    /// The host writes a pinned slot, once nothing uses it any more.
    fn refill(&mut self, slot: usize, value: u8) {
        let users = |one: &Pending| one.writes == slot || one.reads == Some(slot);
        for one in self.pending.iter().filter(|one| users(one)) {
            call!(cuEventSynchronize(one.done)).unwrap();
        }
        self.pending.retain(|one| !users(one));
        assert_eq!(host(self.on_host(slot), BYTES), [self.expected[slot]; BYTES]);
        host(self.on_host(slot), BYTES).fill(value);
        self.expected[slot] = value;
    }

    fn step(&mut self, random: &mut Random) {
        let (stream, value) = (random.below(STREAMS), random.below(256) as u8);
        let (a, b) = (random.below(SLOTS), random.below(SLOTS - 1));
        let other = if b >= a { b + 1 } else { b };
        match random.below(6) {
            0 => self.operate(stream, None, a, value),
            1 | 2 => self.operate(stream, Some(SLOTS + b), a, 0),
            3 => self.operate(stream, Some(a), SLOTS + b, 0),
            4 => self.operate(stream, Some(a), other, 0),
            _ => self.refill(SLOTS + b, value),
        }
    }

    fn finish(self, double: &Double) {
        self.streams.iter().for_each(|&stream| call!(cuStreamSynchronize(stream)).unwrap());
        for slot in 0..SLOTS {
            assert_eq!(double.read(self.on_device(slot), BYTES), [self.expected[slot]; BYTES]);
            assert_eq!(host(self.on_host(SLOTS + slot), BYTES), [self.expected[SLOTS + slot]; BYTES]);
        }
        self.events.iter().for_each(|&event| call!(cuEventDestroy_v2(event)).unwrap());
        destroy(&self.streams);
        free_pinned(self.pinned);
        free(self.device);
    }
}

fn run(config: Config, seed: u64) {
    let schedule = config.schedule;
    let double = Double::acquire(config);
    begin(0);
    let (mut program, mut random) = (Program::new(), Random(seed));
    (0..STEPS).for_each(|_| program.step(&mut random));
    program.finish(&double);
    end(0);
    let reports = double.reports();
    assert!(reports.is_empty(), "seed {seed}, {schedule:?}: {reports:?}");
}

#[test]
fn right_programs_are_never_reported_and_never_wrong() {
    for config in schedules() {
        (1..=4).for_each(|seed| run(config.clone(), seed));
    }
}
