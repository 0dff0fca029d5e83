//! Fakes and conformance suites, for the tests of this crate and of crates that implement its ports.
//!
//! Nothing here is compiled into a program that does not ask for the feature `testing`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a suite fails by panicking
#![allow(missing_debug_implementations)] // of fakes

mod checkpoint;
mod device;
mod direct;
pub mod hostile;
mod needs;
mod pace;
mod source;
mod storage;
mod store;
pub mod torch;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

pub use checkpoint::{Synthetic, checkpoint_of, safetensors};
pub use device::{LazyDevice, device_conformance};
pub use direct::{DirectDevice, DirectTrouble};
#[cfg(test)]
pub(crate) use needs::refused;
pub use needs::{Feature, required, required_if};
pub use pace::{Pace, PacedDevice, PacedSource};
pub use source::*;
pub use storage::MemoryStorage;
pub use store::{CrashStore, StoreTrouble, store_conformance};

/// Runs `test` and panics if it takes longer than ten minutes: a hang is a failure. So long because a machine may be busy, and
/// because tests that share one thing (the software driver) wait for each other, which counts here and is no hang.
pub fn watched<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, finished) = mpsc::channel();
    let runner = thread::spawn(move || {
        let result = test();
        let _ = done.send(());
        result
    });
    match finished.recv_timeout(Duration::from_secs(600)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
        // Done, or it panicked: joining tells.
        _ => match runner.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        },
    }
}

/// Repeatable random numbers (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next_u64() % (end as u64).max(1)).unwrap_or(0)
    }

    /// `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next_u64().to_le_bytes());
        words.take(len).collect()
    }
}
