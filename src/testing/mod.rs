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
pub use vramp_pickle::testing as torch;
pub use vramp_pickle::testing::Random;

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
