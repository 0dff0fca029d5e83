//! What tests ask of the double beside the driver's own calls: exported functions `swcuda_...`.
//!
//! Text goes in as bytes with a length and comes out line by line through a callback, so that neither side frees what
//! the other allocated.

use std::ffi::c_void;
use std::time::Duration;

use crate::clock::{Access, Mode};
use crate::config::Config;
use crate::faults::Fault;
use crate::footprint::Footprint;
use crate::lifetime;
use crate::state::{self, State};

/// The stream number of third-party writes; real streams begin at 1.
const DMA: u32 = 0;

/// Takes a line of an answer: `user`, the bytes, their number.
pub(crate) type Sink = unsafe extern "C" fn(*mut c_void, *const u8, usize);

/// Questions of [`swcuda_query`].
pub(crate) mod question {
    pub(crate) const REPORTS: u32 = 0;
    pub(crate) const STATS: u32 = 1;
    pub(crate) const LIVE: u32 = 2;
    pub(crate) const CALLS: u32 = 3;
    pub(crate) const LEAKS: u32 = 4;
}

/// Abandons everything and begins anew. `config` is text of `NAME=VALUE` lines. 0 if it was understood.
///
/// # Safety
/// `config` has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swcuda_reset(config: *const u8, length: usize) -> i32 {
    // SAFETY: the caller's promise.
    let text = unsafe { text(config, length) };
    match text.and_then(|text| Config::from_text(&text).ok()) {
        Some(config) => {
            lifetime::reset(state::lock(), config);
            0
        }
        None => 1,
    }
}

/// Adds a fault, in the form of `SWCUDA_FAULTS`. 0 if it was understood.
///
/// # Safety
/// `fault` has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swcuda_inject(fault: *const u8, length: usize) -> i32 {
    // SAFETY: the caller's promise.
    let text = unsafe { text(fault, length) };
    match text.and_then(|text| Fault::parse(&text).ok()) {
        Some(fault) => {
            state::lock().faults.inject(fault);
            0
        }
        None => 1,
    }
}

/// Takes all faults back that are not due yet.
#[unsafe(no_mangle)]
pub extern "C" fn swcuda_clear_faults() {
    state::lock().faults.clear();
}

/// Lets everything that is queued run. 0 if it all came to an end.
#[unsafe(no_mangle)]
pub extern "C" fn swcuda_settle() -> i32 {
    let (_state, all) = lifetime::settle(state::lock());
    i32::from(!all)
}

/// Moves the host's modelled clock to so many nanoseconds, unless it is further; where it is then.
#[unsafe(no_mangle)]
pub extern "C" fn swcuda_host_time(at_least: u64) -> u64 {
    let mut state = state::lock();
    state.host_at_least(Duration::from_nanos(at_least));
    u64::try_from(state.host_time.as_nanos()).unwrap_or(u64::MAX)
}

/// Answers a question line by line. Reports are taken away by it.
///
/// # Safety
/// `sink` may be called with `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swcuda_query(what: u32, sink: Sink, user: *mut c_void) {
    let lines = answer(&mut state::lock(), what);
    for line in lines {
        // SAFETY: the caller's promise; the bytes live until the call returns.
        unsafe { sink(user, line.as_ptr(), line.len()) };
    }
}

/// Copies device memory out, outside of all checks but that it is there. 0 if it was.
///
/// # Safety
/// `target` has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swcuda_read(address: u64, target: *mut u8, length: usize) -> i32 {
    let state = state::lock();
    let Some(end) = address.checked_add(length as u64) else { return 1 };
    if length == 0 || state.mapped_around(&(address..end)).is_none() {
        return i32::from(length > 0);
    }
    state.refill(&Footprint::flat(address, length as u64));
    // SAFETY: the pages are mapped, and stay so under the lock; the caller's promise for the target.
    unsafe { std::ptr::copy_nonoverlapping(state.space.alias().bytes(address), target, length) };
    0
}

/// Puts bytes into device memory as a third party does (a network card, a disk): bounds and life are checked, and it
/// races with what is in flight. What the host does before and after is ordered with it. 0, or the driver's code.
///
/// # Safety
/// `source` has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swcuda_dma_write(address: u64, source: *const u8, length: usize) -> i32 {
    let mut state = state::lock();
    if length == 0 {
        return 0;
    }
    let label = format!("DMA write({length} bytes)");
    let Some(end) = address.checked_add(length as u64) else { return 1 };
    let device = match state.check_range(&(address..end), &label) {
        Ok(device) => device,
        Err(code) => return code as i32,
    };
    if let Err(sticky) = state.health(device) {
        return sticky as i32;
    }
    state.dma_writes += 1;
    let (seq, clock, footprint) = (state.dma_writes, state.host_clock(), Footprint::flat(address, length as u64));
    state.access(Access {
        footprint: footprint.clone(),
        mode: Mode::Write,
        stream: DMA,
        seq,
        clock,
        label: label.into(),
    });
    // SAFETY: the allocation is alive, and stays so under the lock; the caller's promise for the source.
    unsafe { std::ptr::copy(source, state.space.alias().bytes(address), length) };
    state.mark_written(&footprint);
    state.stats.dma_writes += 1;
    state.stats.dma_bytes += length as u64;
    let clock = state.host.clone();
    state.host_learns(DMA, seq, &clock);
    0
}

fn answer(state: &mut State, what: u32) -> Vec<String> {
    let lines = |text: String| text.lines().map(str::to_owned).collect();
    match what {
        question::REPORTS => std::mem::take(&mut state.reports),
        question::STATS => lines(state.stats.to_text()),
        question::LIVE => lines(state.live().to_text()),
        question::CALLS => state.calls.iter().map(|(name, count)| format!("{name} {count}")).collect(),
        question::LEAKS => state.leaks(None),
        _ => Vec::new(),
    }
}

/// # Safety
/// `start` has `length` bytes.
unsafe fn text(start: *const u8, length: usize) -> Option<String> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(start, length) };
    String::from_utf8(bytes.to_vec()).ok()
}
