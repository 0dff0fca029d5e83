//! Ends: of a context, of a life of the double between two tests, of the process. What is alive then was leaked.
//!
//! A reset waits for what is in the middle of its work and abandons the rest; it never waits for ever.

use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::engine::HURRY;
use crate::report::Kind;
use crate::state::{self, Guard, State};
use crate::stats::Live;
use crate::stream;

/// How long a reset waits for a function of the program that a stream has called.
const PATIENCE: Duration = Duration::from_secs(10);

/// Ends a device's primary context: its work finishes, and everything of it goes.
pub(crate) fn end_context(mut state: Guard, device: usize) -> Guard {
    state = stream::wait_device(state, device);
    let poisoned = state.health(device).is_err();
    // With a sticky error nothing can be given back any more; that is no leak.
    for text in state.leaks(Some(device)).into_iter().filter(|_| !poisoned) {
        state.report(Kind::Leak, &format!("{text}, when its context was released"));
    }
    for id in state.streams_of(device) {
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.destroyed = true;
        }
    }
    state.devices[device].default_stream = None;
    let of_device = |(&number, owner): (&u64, usize)| (owner == device).then_some(number);
    let allocations: Vec<u64> =
        state.allocations.iter().map(|(number, one)| (number, one.device)).filter_map(of_device).collect();
    allocations.into_iter().for_each(|address| state.release(address));
    let pins: Vec<(u64, bool)> = state
        .pins
        .iter()
        .filter(|(_, pin)| pin.device == device && pin.live)
        .map(|(&address, pin)| (address, pin.registered))
        .collect();
    for (address, registered) in pins {
        match registered {
            true => drop(state.pins.remove(&address)),
            false => state.retire(address),
        }
    }
    state.events.retain(|_, event| event.device != device);
    let modules: Vec<u64> =
        state.modules.iter().map(|(number, one)| (number, one.device)).filter_map(of_device).collect();
    modules.into_iter().for_each(|module| state.unload(module));
    state::notify();
    state
}

/// Lets everything that is queued run; whether all of it came to an end.
pub(crate) fn settle(mut state: Guard) -> (Guard, bool) {
    let until = Instant::now() + PATIENCE;
    loop {
        let open: Vec<_> =
            state.streams.iter().filter(|(_, one)| one.done < one.last).map(|(&id, one)| (id, one.last)).collect();
        if open.is_empty() || Instant::now() >= until {
            let all = open.is_empty();
            return (state, all);
        }
        open.into_iter().for_each(|(id, last)| state.demand(id, last));
        state = state::wait_timeout(state, until.saturating_duration_since(Instant::now()));
    }
}

/// Begins a new life with `config`: nothing of the old one is left, and its handles and addresses are never used again.
pub(crate) fn reset(mut state: Guard, config: Config) {
    state.draining = true;
    HURRY.store(true, Ordering::Relaxed);
    state.streams.values_mut().for_each(|stream| stream.destroyed = true);
    state::notify();
    let until = Instant::now() + PATIENCE;
    while !state.streams.is_empty() && Instant::now() < until {
        state = state::wait_timeout(state, until.saturating_duration_since(Instant::now()));
    }
    // Pages that a thread is still in the middle of stay: it is better to lose them than to fault.
    let idle: Vec<u64> = state.allocations.iter().filter(|(_, one)| one.users == 0).map(|(&at, _)| at).collect();
    idle.into_iter().for_each(|address| state.release(address));
    state.bury();
    let next = State::new(config, state.space.reborn(), state.handles.reborn(), state.epoch + 1);
    // Pinned memory that a failed test has not freed stays mapped: a thread of it may still read there.
    *state = next;
    HURRY.store(false, Ordering::Relaxed);
    state::notify();
}

impl State {
    /// How much of everything is alive.
    pub(crate) fn live(&self) -> Live {
        let count = |n: usize| n as u64;
        Live {
            allocations: count(self.allocations.values().filter(|one| one.live).count()),
            pins: count(self.pins.values().filter(|one| one.live).count()),
            streams: count(self.streams.values().filter(|one| !one.default && !one.destroyed).count()),
            events: count(self.events.len()),
            modules: count(self.modules.len()),
            contexts: self.devices.iter().map(|device| device.references).sum(),
            queued: self.streams.values().map(|one| one.last - one.done).sum(),
        }
    }

    /// A text for each object that is alive, of one device or of all. Contexts are not among them.
    pub(crate) fn leaks(&self, device: Option<usize>) -> Vec<String> {
        let of = |owner: usize| device.is_none_or(|device| device == owner);
        let mut texts = Vec::new();
        for (address, one) in self.allocations.iter().filter(|(_, one)| one.live && of(one.device)) {
            texts.push(format!("{} bytes of device memory at {address:#x} were not freed", one.bytes));
        }
        for (address, one) in self.pins.iter().filter(|(_, one)| one.live && of(one.device)) {
            let how = if one.registered { "unregistered" } else { "freed" };
            texts.push(format!("{} bytes of pinned memory at {address:#x} were not {how}", one.bytes));
        }
        for (id, _) in self.streams.iter().filter(|(_, one)| !one.default && !one.destroyed && of(one.device)) {
            texts.push(format!("stream {id} was not destroyed"));
        }
        for (number, _) in self.events.iter().filter(|(_, one)| of(one.device)) {
            texts.push(format!("event {number} was not destroyed"));
        }
        for (number, _) in self.modules.iter().filter(|(_, one)| of(one.device)) {
            texts.push(format!("module {number} was not unloaded"));
        }
        texts
    }
}

/// Has [`last_words`] called when the process ends.
pub(crate) fn at_exit() {
    extern "C" fn end() {
        last_words();
    }
    // SAFETY: the function lives as long as the library, which whoever opened it keeps open.
    unsafe { libc::atexit(end) };
}

/// Says on stderr what was wrong, and writes the file that `SWCUDA_REPORT` names.
fn last_words() {
    let patience = Instant::now() + Duration::from_secs(1);
    let mut state = loop {
        match state::try_lock() {
            Some(state) => break state,
            // A thread that was stopped in the middle of a call never gives the lock back.
            None if Instant::now() > patience => return,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    for text in state.leaks(None) {
        state.report(Kind::Leak, &format!("{text}, when the process ended"));
    }
    for report in &state.reports {
        eprintln!("swcuda: {report}");
    }
    let Some(path) = std::env::var_os("SWCUDA_REPORT") else { return };
    let mut text: String = state.reports.iter().map(|report| format!("{report}\n")).collect();
    let live = state.live().to_text();
    for line in state.stats.to_text().lines().map(str::to_owned).chain(live.lines().map(|line| format!("leak.{line}")))
    {
        let _ = writeln!(text, "stat {line}");
    }
    for (name, count) in &state.calls {
        let _ = writeln!(text, "stat call.{name} {count}");
    }
    if let Err(error) = std::fs::write(&path, text) {
        eprintln!("swcuda: {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;

    #[test]
    fn leaks_are_of_one_device_or_of_all() {
        let mut state = State::for_tests(Config { devices: 2, ..Config::default() });
        state.events.insert(1, Event::new(0, true));
        state.events.insert(2, Event::new(1, true));
        crate::pinned::allocate(&mut state, 1, 64).unwrap();
        assert_eq!(state.leaks(None).len(), 3);
        assert_eq!(state.leaks(Some(0)), ["event 1 was not destroyed"]);
        assert_eq!(state.live(), Live { events: 2, pins: 1, ..Live::default() });
    }
}
