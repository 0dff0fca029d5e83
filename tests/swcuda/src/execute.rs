//! Does the work of operations, on their streams' threads, without the lock while bytes move.
//!
//! Once a device has a sticky error nothing on it is done any more, only marked as over. What is checked here is what
//! only the moment of execution can tell: whether the source has changed, and whether what is read was written. A thread
//! that a reset could not wait for finds another epoch when it takes the lock again, and leaves everything as it is.

use std::ffi::c_void;
use std::time::Instant;

use crate::address::Alias;
use crate::clock::StreamId;
use crate::config::Schedule;
use crate::engine;
use crate::footprint::Footprint;
use crate::kernel;
use crate::report::Kind;
use crate::state::{self, Guard, State};
use crate::stream::Operation;
use crate::work::{Copy, Direction, Fill, HostCall, Work};

thread_local! {
    /// Set while a function of the program runs in a stream: it must not call the driver.
    static IN_CALLBACK: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Whether this thread is inside a function that a stream called.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Does an operation. The lock is given up meanwhile.
pub(crate) fn run(mut state: Guard, id: StreamId, mut operation: Operation) -> Guard {
    let Some(device) = state.streams.get(&id).map(|stream| stream.device) else { return state };
    let ready = state.ready(id, &operation);
    let work = std::mem::replace(&mut operation.work, Work::Nothing);
    let mut finish = ready;
    match work {
        // Memory goes back whatever has happened.
        Work::Free(address) => state.release(address),
        Work::Host(call) if state.is_well(device) => state = call_host(state, &call),
        work if !state.is_well(device) || operation.fault.is_some() => state.abandon(id, device, &operation, &work),
        Work::Copy(mut copy) => {
            (state, finish) = move_rows(state, id, device, &operation, &copy, ready);
            state.recycle(copy.snapshot.take());
        }
        Work::Fill(fill) => state = set_bytes(state, &operation, &fill),
        Work::Kernel(run) => {
            state = kernel::execute(state, id, device, &operation, &run);
            finish = if state.config.modelled_clock { ready } else { Instant::now() };
        }
        Work::Stamp { event, generation } => state.stamp(event, generation, ready),
        Work::Host(_) | Work::Nothing => {}
    }
    if let Some(stream) = state.streams.get_mut(&id) {
        stream.finish = Some(finish);
    }
    state
}

impl State {
    fn is_well(&self, device: usize) -> bool {
        !self.draining && self.health(device).is_ok()
    }

    /// An operation that is not done, because it fails or because its device has failed before.
    fn abandon(&mut self, id: StreamId, device: usize, operation: &Operation, work: &Work) {
        match work {
            Work::Kernel(_) => self.log.arrived(id, operation.seq),
            Work::Host(_) => self.host_functions = self.host_functions.saturating_sub(1),
            _ => {}
        }
        if let Some(code) = operation.fault.filter(|_| !self.draining) {
            self.fail(device, code);
        }
    }

    /// Gives a device its sticky error, unless it has one.
    pub(crate) fn fail(&mut self, device: usize, code: cudarc::driver::sys::CUresult) {
        if let Some(device) = self.devices.get_mut(device) {
            device.sticky.get_or_insert(code);
        }
    }

    /// Keeps the memory of a snapshot for the next: new pages cost more than the copy into them.
    fn recycle(&mut self, snapshot: Option<Vec<u8>>) {
        const SPARES: usize = 8;
        if self.spares.len() < SPARES {
            self.spares.extend(snapshot);
        }
    }

    /// When an operation could have begun by the model; by the modelled clock, when it is over. Not in the future, however late the model's figures run.
    fn ready(&self, id: StreamId, operation: &Operation) -> Instant {
        if let Some(end) = self.end_of(id, operation.seq) {
            return end;
        }
        let now = Instant::now();
        if self.config.schedule != Schedule::Eager {
            return now;
        }
        let before = operation.dependencies.iter().map(|(other, _)| *other).chain([id]);
        let finishes = before.filter_map(|stream| self.streams.get(&stream)?.finish);
        finishes.fold(operation.enqueued, Instant::max).min(now)
    }

    /// The allocations that the device sides of a copy are in; `None` when one of them is gone.
    fn pages_of(&self, copy: &Copy) -> Option<Vec<u64>> {
        let source = (copy.direction != Direction::HostToDevice).then(|| copy.source_footprint());
        let target = (copy.direction != Direction::DeviceToHost).then(|| copy.target_footprint());
        source.into_iter().chain(target).map(|footprint| self.mapped_around(&footprint.bounds())).collect()
    }

    /// Counts a copy.
    pub(crate) fn count_copy(&mut self, device: usize, copy: &Copy, start: Instant, end: Instant) {
        let began = self.began;
        let Some(stats) = self.stats.devices.get_mut(device) else { return };
        let stats = match copy.direction {
            Direction::HostToDevice => &mut stats.h2d,
            Direction::DeviceToHost => &mut stats.d2h,
            Direction::WithinDevice => {
                self.stats.device_copies += 1;
                return;
            }
        };
        let since = |at: Instant| at.saturating_duration_since(began);
        stats.count(copy.bytes(), since(start), since(end));
    }

    /// Reserves the copy's engine, if there is a model of it.
    pub(crate) fn book(&mut self, device: usize, copy: &Copy, ready: Instant) -> Option<(Instant, Instant)> {
        let (index, rate) = match copy.direction {
            Direction::HostToDevice => (0, self.config.h2d_bytes_per_s),
            Direction::DeviceToHost => (1, self.config.d2h_bytes_per_s),
            Direction::WithinDevice => return None,
        };
        let length = engine::length(rate, self.config.latency, copy.bytes())?;
        let index = if self.config.copy_engines <= 1 { 0 } else { index };
        Some(self.devices.get_mut(device)?.engines[index].book(ready, length))
    }
}

/// Does a copy; the state, and when it ended by the model.
fn move_rows(
    mut state: Guard,
    id: StreamId,
    device: usize,
    operation: &Operation,
    copy: &Copy,
    ready: Instant,
) -> (Guard, Instant) {
    let Some(pages) = state.pages_of(copy) else {
        state
            .report(Kind::UseAfterFree, &format!("{} on stream {id} runs after its memory was freed", operation.label));
        return (state, ready);
    };
    if copy.direction != Direction::HostToDevice {
        state.check_written(&copy.source_footprint(), &operation.label);
    }
    pages.iter().for_each(|&page| state.hold_pages(page));
    let epoch = state.epoch;
    let modelled = state.config.modelled_clock;
    let booking = if modelled { Some((ready, ready)) } else { state.book(device, copy, ready) };
    if let Some((start, end)) = booking.filter(|_| !modelled) {
        // Now, while copies come in the order of their engine: they may wake up in another.
        state.count_copy(device, copy, start, end);
    }
    let alias = state.space.alias();
    let moves = state.config.moves_bytes || copy.direction != Direction::HostToDevice;
    drop(state);
    let begun = Instant::now();
    let changed = copy.snapshot.as_ref().and_then(|snapshot| first_change(alias, copy, snapshot));
    if moves {
        // SAFETY: the device sides are mapped and held; the host side is the program's promise, as with the real driver.
        unsafe { transfer(alias, copy) };
    }
    let end = booking.map_or_else(Instant::now, |(_, end)| end);
    if !modelled {
        engine::sleep_until(end);
    }
    let mut state = state::lock();
    if state.epoch != epoch {
        return (state, end);
    }
    if let Some(offset) = changed {
        let text = format!(
            "{} from {:#x} on stream {id}: the host wrote to the source, first at byte {offset}, while the copy was \
             pending",
            operation.label, copy.source
        );
        state.report(Kind::SourceChanged, &text);
    }
    if copy.direction != Direction::DeviceToHost {
        state.mark_written(&copy.target_footprint());
    }
    pages.iter().for_each(|&page| state.drop_pages(page));
    if booking.is_none() {
        state.count_copy(device, copy, begun, end);
    }
    (state, end)
}

/// Where the source differs from what it held when the copy was queued.
fn first_change(alias: Alias, copy: &Copy, snapshot: &[u8]) -> Option<usize> {
    let width = usize::try_from(copy.width).ok()?;
    for (row, old) in snapshot.chunks(width).enumerate() {
        let now = alias.bytes(copy.source + row as u64 * copy.source_pitch);
        // SAFETY: the row is the program's pinned memory, which stays until the copy is over.
        let same = unsafe { libc::memcmp(now.cast(), old.as_ptr().cast(), old.len()) } == 0;
        if !same {
            // SAFETY: as above.
            let now = unsafe { std::slice::from_raw_parts(now, old.len()) };
            let at = now.iter().zip(old).position(|(now, old)| now != old).unwrap_or(0);
            return Some(row * width + at);
        }
    }
    None
}

/// Moves the rows and spoils a bit if asked to.
///
/// # Safety
/// Source and target are mapped and long enough.
unsafe fn transfer(alias: Alias, copy: &Copy) {
    for row in 0..copy.rows {
        let source = alias.bytes(copy.source + row * copy.source_pitch);
        let target = alias.bytes(copy.target + row * copy.target_pitch);
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(source, target, copy.width as usize) };
    }
    if copy.flip {
        // SAFETY: inside the first row of the target.
        unsafe { *alias.bytes(copy.target + copy.width / 2) ^= 0x10 };
    }
}

fn set_bytes(mut state: Guard, operation: &Operation, fill: &Fill) -> Guard {
    let Some(page) = state.mapped_around(&(fill.target..fill.target + fill.bytes)) else {
        state.report(Kind::UseAfterFree, &format!("{} runs after its memory was freed", operation.label));
        return state;
    };
    state.hold_pages(page);
    let alias = state.space.alias();
    drop(state);
    let target = alias.bytes(fill.target);
    // SAFETY: the pages are mapped and held.
    unsafe { repeat(target, fill.bytes as usize, fill.pattern) };
    let mut state = state::lock();
    state.mark_written(&Footprint::flat(fill.target, fill.bytes));
    state.drop_pages(page);
    state.stats.fills += 1;
    state
}

/// Writes a pattern over and over; `bytes` is a multiple of 4 unless all four are the same.
///
/// # Safety
/// The target is mapped and long enough.
unsafe fn repeat(target: *mut u8, bytes: usize, pattern: [u8; 4]) {
    if pattern == [pattern[0]; 4] {
        // SAFETY: the caller's promise.
        unsafe { target.write_bytes(pattern[0], bytes) };
        return;
    }
    for at in (0..bytes).step_by(4) {
        // SAFETY: the caller's promise; an entry point checked the alignment.
        unsafe { target.add(at).cast::<[u8; 4]>().write(pattern) };
    }
}

fn call_host(state: Guard, call: &HostCall) -> Guard {
    let epoch = state.epoch;
    drop(state);
    IN_CALLBACK.set(true);
    // SAFETY: the program gave the function and its argument for this.
    unsafe { (call.function)(call.argument as *mut c_void) };
    IN_CALLBACK.set(false);
    let mut state = state::lock();
    if state.epoch != epoch {
        return state;
    }
    state.host_functions = state.host_functions.saturating_sub(1);
    state
}

/// A copy of the bytes of a footprint, one row after another, in the memory of `spare`.
pub(crate) fn gather(alias: Alias, footprint: &Footprint, spare: Vec<u8>) -> Vec<u8> {
    let mut bytes = spare;
    bytes.clear();
    for range in footprint.ranges() {
        let length = (range.end - range.start) as usize;
        bytes.reserve(length);
        let held = bytes.len();
        // SAFETY: the range is pinned or mapped memory; the vector has room for it.
        unsafe {
            std::ptr::copy_nonoverlapping(alias.bytes(range.start), bytes.as_mut_ptr().add(held), length);
            bytes.set_len(held + length);
        }
    }
    bytes
}

/// Fills pinned host memory.
pub(crate) fn fill_host(footprint: &Footprint, value: u8) {
    for range in footprint.ranges() {
        // SAFETY: the range is pinned memory that the program gave as a target.
        unsafe { (range.start as *mut u8).write_bytes(value, (range.end - range.start) as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::AddressSpace;
    use crate::copy::flat;

    #[test]
    fn a_changed_source_is_found_to_the_byte() {
        let alias = AddressSpace::new().alias();
        let mut memory = vec![7_u8; 60];
        let start = memory.as_mut_ptr();
        // SAFETY: the vector has 60 bytes and is not used but by this pointer.
        let clear = |at: usize| unsafe { *start.add(at) = 0 };
        let mut copy = flat(Direction::HostToDevice, 0, start as u64, 10);
        (copy.source_pitch, copy.rows) = (20, 3);
        let snapshot = gather(alias, &copy.source_footprint(), vec![1, 2, 3]);
        assert_eq!(snapshot, [7; 30]);
        clear(15);
        assert_eq!(first_change(alias, &copy, &snapshot), None, "between two rows");
        clear(43);
        assert_eq!(first_change(alias, &copy, &snapshot), Some(23));
    }

    #[test]
    fn patterns_repeat() {
        let mut memory = [0_u8; 12];
        // SAFETY: the array has 8 and 12 bytes.
        unsafe {
            repeat(memory.as_mut_ptr(), 12, [9; 4]);
            repeat(memory.as_mut_ptr(), 8, [1, 2, 3, 4]);
        }
        assert_eq!(memory, [1, 2, 3, 4, 1, 2, 3, 4, 9, 9, 9, 9]);
    }
}
