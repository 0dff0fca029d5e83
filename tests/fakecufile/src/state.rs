//! What the double is to do, and what was asked of it. One state for the process.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What is planned. The default works, natively.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Plan {
    /// What starting says; 0 is good.
    pub open_code: u32,
    /// Starting does not come back before [`Fake::release`](crate::Fake::release).
    pub open_hangs: bool,
    /// It works, but by way of the host.
    pub compat: bool,
    /// What registering a file says; 0 is good.
    pub register_code: u32,
    /// What goes wrong with reads, from which one on (from 0).
    pub read_fault: Option<(u64, ReadFault)>,
    /// A read gives at most this many bytes; 0: all.
    pub most_bytes: u64,
}

/// What goes wrong with a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFault {
    /// cuFile's own code.
    Code(u32),
    /// The operating system's.
    Errno(i32),
    /// It says that the file has ended.
    End,
    /// It says that it read more than it was asked for.
    TooMuch,
    /// It is interrupted, once.
    Interrupted,
}

/// What was asked of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Starts.
    pub opens: u64,
    /// Files made known.
    pub registered: u64,
    /// Files that are known now.
    pub known: u64,
    /// Reads.
    pub reads: u64,
    /// Bytes that it put into memory.
    pub bytes: u64,
    /// Most reads at a time.
    pub most_at_once: u64,
    /// Buffers made known: vramp registers none.
    pub buffers: u64,
}

pub(crate) struct State {
    pub(crate) plan: Plan,
    pub(crate) counters: Counters,
    pub(crate) released: bool,
    pub(crate) running: u64,
    pub(crate) next: usize,
    pub(crate) files: BTreeMap<usize, std::sync::Arc<File>>,
}

static STATE: Mutex<State> = Mutex::new(State {
    plan: Plan { open_code: 0, open_hangs: false, compat: false, register_code: 0, read_fault: None, most_bytes: 0 },
    counters: Counters { opens: 0, registered: 0, known: 0, reads: 0, bytes: 0, most_at_once: 0, buffers: 0 },
    released: false,
    running: 0,
    next: 1,
    files: BTreeMap::new(),
});

static RELEASED: Condvar = Condvar::new();

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until somebody releases those that hang.
pub(crate) fn hang(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    RELEASED.wait_while(state, |state| !state.released).unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn release() {
    lock().released = true;
    RELEASED.notify_all();
}

/// A plan as numbers, for the way between the library that is linked into a test and the one that it has opened.
pub(crate) const WORDS: usize = 8;

impl Plan {
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let (from, kind, code) = match self.read_fault {
            None => (0, 0, 0),
            Some((from, ReadFault::Code(code))) => (from, 1, u64::from(code)),
            Some((from, ReadFault::Errno(code))) => (from, 2, u64::from(code.unsigned_abs())),
            Some((from, ReadFault::End)) => (from, 3, 0),
            Some((from, ReadFault::TooMuch)) => (from, 4, 0),
            Some((from, ReadFault::Interrupted)) => (from, 5, 0),
        };
        let flags = u64::from(self.open_hangs) | u64::from(self.compat) << 1;
        [self.open_code.into(), flags, self.register_code.into(), from, kind, code, self.most_bytes, 0]
    }

    pub(crate) fn from_words(words: [u64; WORDS]) -> Plan {
        let [open_code, flags, register_code, from, kind, code, most_bytes, _] = words;
        let fault = match kind {
            1 => Some(ReadFault::Code(code as u32)),
            2 => Some(ReadFault::Errno(code as i32)),
            3 => Some(ReadFault::End),
            4 => Some(ReadFault::TooMuch),
            5 => Some(ReadFault::Interrupted),
            _ => None,
        };
        Plan {
            open_code: open_code as u32,
            open_hangs: flags & 1 != 0,
            compat: flags & 2 != 0,
            register_code: register_code as u32,
            read_fault: fault.map(|fault| (from, fault)),
            most_bytes,
        }
    }
}

impl Counters {
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        [self.opens, self.registered, self.known, self.reads, self.bytes, self.most_at_once, self.buffers, 0]
    }

    pub(crate) fn from_words(words: [u64; WORDS]) -> Counters {
        let [opens, registered, known, reads, bytes, most_at_once, buffers, _] = words;
        Counters { opens, registered, known, reads, bytes, most_at_once, buffers }
    }
}
