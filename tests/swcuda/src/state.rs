//! All that the double knows, behind one lock, and the one condition on which everybody waits.
//!
//! There is one driver in a process, as in life. Nothing in this file decides what a call means; no memory is copied
//! under the lock.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;

use crate::address::AddressSpace;
use crate::clock::{Access, Clock, Log, StreamId};
use crate::config::Config;
use crate::device::Device;
use crate::event::Event;
use crate::faults::{Fault, Faults};
use crate::handle::Handles;
use crate::kernel::{Function, Loaded};
use crate::lifetime;
use crate::memory::Allocation;
use crate::pinned::Pin;
use crate::report::Kind;
use crate::stats::Stats;
use crate::stream::{Retired, Stream};

/// What an entry point answers; `Err` is the driver's code.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// The lock, held.
pub(crate) type Guard = MutexGuard<'static, State>;

/// All that the double knows.
pub(crate) struct State {
    pub(crate) config: Config,
    /// Counts resets: threads of an earlier life see that they are.
    pub(crate) epoch: u64,
    pub(crate) began: Instant,
    /// The host's modelled clock, since `began`.
    pub(crate) host_time: Duration,
    pub(crate) initialised: bool,
    /// Set while a reset abandons what is queued.
    pub(crate) draining: bool,
    pub(crate) devices: Vec<Device>,
    pub(crate) space: AddressSpace,
    /// Addresses below belong to an earlier life.
    pub(crate) first_address: u64,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) pins: BTreeMap<u64, Pin>,
    pub(crate) streams: BTreeMap<StreamId, Stream>,
    pub(crate) retired: Vec<Retired>,
    pub(crate) events: BTreeMap<u64, Event>,
    pub(crate) modules: BTreeMap<u64, Loaded>,
    pub(crate) functions: BTreeMap<u64, Function>,
    pub(crate) handles: Handles,
    /// What the host knows to be over.
    pub(crate) host: Clock,
    pub(crate) log: Log,
    pub(crate) reports: Vec<String>,
    pub(crate) calls: BTreeMap<&'static str, u64>,
    pub(crate) faults: Faults,
    pub(crate) stats: Stats,
    /// Host functions that are queued: they may change pinned memory in stream order.
    pub(crate) host_functions: u64,
    pub(crate) dma_writes: u64,
    /// Memory of snapshots that are done with.
    pub(crate) spares: Vec<Vec<u8>>,
    pub(crate) random: u64,
}

struct Driver {
    state: Mutex<State>,
    changed: Condvar,
}

static DRIVER: LazyLock<Driver> = LazyLock::new(|| {
    lifetime::at_exit();
    Driver { state: Mutex::new(first_state()), changed: Condvar::new() }
});

fn first_state() -> State {
    let config = Config::from_environment();
    let mut state = State::new(config.clone().unwrap_or_default(), AddressSpace::new(), Handles::default(), 0);
    if let Err(text) = config {
        state.report(Kind::Config, &format!("SWCUDA_{text}"));
    }
    let faults = std::env::var("SWCUDA_FAULTS").unwrap_or_default();
    for text in faults.split(',').filter(|text| !text.trim().is_empty()) {
        match Fault::parse(text) {
            Ok(fault) => state.faults.inject(fault),
            Err(text) => state.report(Kind::Config, &format!("SWCUDA_FAULTS: {text}")),
        }
    }
    state
}

/// Takes the lock. A panic under it leaves figures that are at worst incomplete.
pub(crate) fn lock() -> Guard {
    DRIVER.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock if that is possible now; for the exit handler, which must not hang.
pub(crate) fn try_lock() -> Option<Guard> {
    match DRIVER.state.try_lock() {
        Ok(guard) => Some(guard),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(std::sync::TryLockError::WouldBlock) => None,
    }
}

/// Gives the lock up until something changes.
pub(crate) fn wait(state: Guard) -> Guard {
    DRIVER.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
}

/// Gives the lock up until something changes or the time is over.
pub(crate) fn wait_timeout(state: Guard, limit: Duration) -> Guard {
    DRIVER.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
}

/// Wakes everybody who waits.
pub(crate) fn notify() {
    DRIVER.changed.notify_all();
}

impl State {
    /// A driver that has just been loaded, `epoch` lives after the first.
    pub(crate) fn new(config: Config, space: AddressSpace, handles: Handles, epoch: u64) -> State {
        let seed = match config.schedule {
            crate::config::Schedule::Random(seed) => seed,
            _ => 1,
        };
        State {
            config,
            epoch,
            began: Instant::now(),
            host_time: Duration::ZERO,
            initialised: false,
            draining: false,
            devices: Vec::new(),
            first_address: space.next(),
            space,
            allocations: BTreeMap::new(),
            pins: BTreeMap::new(),
            streams: BTreeMap::new(),
            retired: Vec::new(),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            handles,
            host: Clock::default(),
            log: Log::default(),
            reports: Vec::new(),
            calls: BTreeMap::new(),
            faults: Faults::default(),
            stats: Stats::default(),
            host_functions: 0,
            dma_writes: 0,
            spares: Vec::new(),
            // Mixed, so that seeds 1 and 2 differ from the first draw on; never zero, where the generator would stay.
            random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
        }
    }

    /// Notes a mistake of the program.
    pub(crate) fn report(&mut self, kind: Kind, text: &str) {
        self.reports.push(kind.line(text));
    }

    /// Notes a mistake and gives the code to answer.
    pub(crate) fn refuse<T>(&mut self, kind: Kind, text: &str, code: CUresult) -> Answer<T> {
        self.report(kind, text);
        Err(code)
    }

    /// Enters an access into the log and reports the race that it makes.
    pub(crate) fn access(&mut self, access: Access) {
        if let Some(text) = self.log.add(access) {
            self.report(Kind::Race, &text);
        }
    }

    /// The host learns that `seq` of `stream` is over, and what was before it.
    pub(crate) fn host_learns(&mut self, stream: StreamId, seq: u64, clock: &Clock) {
        self.host.join(clock);
        self.host.advance(stream, seq);
        self.log.prune(&self.host);
    }

    /// A device's sticky error.
    pub(crate) fn health(&self, device: usize) -> Answer {
        self.devices.get(device).and_then(|device| device.sticky).map_or(Ok(()), Err)
    }

    /// The next number of the seeded generator.
    pub(crate) fn draw(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit.max(1)
    }

    /// The host's clock, to be kept.
    pub(crate) fn host_clock(&self) -> Arc<Clock> {
        Arc::new(self.host.clone())
    }
}

#[cfg(test)]
impl State {
    /// A state of its own with its devices made, for the unit tests of this crate. It has no threads.
    pub(crate) fn for_tests(config: Config) -> State {
        let mut state = State::new(config, AddressSpace::new(), Handles::default(), 1);
        state.make_devices();
        state.initialised = true;
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_and_repeat() {
        let draws = |seed| {
            let schedule = crate::config::Schedule::Random(seed);
            let mut state =
                State::new(Config::default().schedule(schedule), AddressSpace::new(), Handles::default(), 1);
            [(); 8].map(|()| state.draw(1000))
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }
}
