//! Loading: the [`Loader`] between a checkpoint and a device.
//!
//! One loop (`run`) submits the transfers of a [`LoadPlan`](crate::plan::LoadPlan) to a `ReadQueue` and gets their targets back filled, hands filled
//! staging buffers to a [`Stream`](crate::device::Stream) and gets them back free. Ownership of the buffers and regions moves in and comes back;
//! that is the whole concurrency model. Nothing here knows a file system, a format or a device by name, and nothing here copies
//! bytes.
//!
//! | file | holds |
//! |---|---|
//! | `options`, `profile` | the options of a load, and options read from a file |
//! | `control` | cancellation and observation |
//! | `prepare`, `prepared` | from a selection to a plan: what the files and the page cache are like |
//! | `loader`, `engine`, `run` | carrying out a plan; what is kept between loads; the loop |
//! | `files`, `scales` | open files; scales of quantised weights |
//! | `gpu_direct`, `consent` | reads by the device itself, and whether they pay |
//! | `loaded`, `loading`, `readiness` | the result; a load on its own thread; tensors before its end |
//! | `meter`, `limits` | times of the stages, and their comparison with measured limits |
//! | `trace`, `tracer`, `spans` | trace events; who sends them; the `tracing` crate |

mod consent;
mod control;
mod engine;
mod files;
mod gpu_direct;
mod limits;
mod loaded;
mod loader;
mod loading;
mod meter;
mod options;
mod prepare;
mod prepared;
mod profile;
mod readiness;
mod run;
mod scales;
#[cfg(feature = "tracing")]
mod spans;
mod trace;
mod tracer;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub use control::{Cancel, Observer};
#[doc(hidden)]
pub use limits::machine_digest;
pub use limits::{LimitPlace, LimitRates, MeasuredLimit, MeasuredLimits};
pub use loaded::Loaded;
pub(crate) use loaded::overflow_warning;
pub use loader::Loader;
pub use loading::Loading;
pub use options::{Convert, Options, Progress, TransferOptions};
pub use prepared::Prepared;
#[doc(hidden)]
pub use profile::MOST_AT_ONCE;
pub use profile::Profile;
#[cfg(feature = "tracing")]
pub use spans::TracingObserver;
#[doc(hidden)]
pub use trace::place;
pub use trace::{TraceEvent, TraceLane, TracePlace};

use crate::checkpoint::Checkpoint;
use crate::error::Result;

/// Loads a checkpoint: opens, selects, plans and reads it, and returns its tensors.
///
/// # Errors
/// When the checkpoint is refused, something that was asked for is not there, reading fails, or a file changes meanwhile.
/// Nothing is handed out then. A change is seen by length, modification time and inode; what another process writes through a
/// shared mapping shows in none of these and is not seen, whatever the route.
pub fn load(path: impl AsRef<Path>, options: &Options) -> Result<Loaded> {
    let started = Instant::now();
    let checkpoint = Arc::new(Checkpoint::open_with(path, &options.open)?);
    let open_seconds = started.elapsed().as_secs_f64();
    let mut loader = Loader::new(Arc::clone(&options.device), options.transfer());
    let planning = Instant::now();
    let selected = checkpoint.select(&options.selection)?;
    let mut prepared = loader.prepare(checkpoint, &selected)?;
    (prepared.open_seconds, prepared.plan_seconds) = (open_seconds, planning.elapsed().as_secs_f64());
    loader.load(&prepared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Selection;
    use crate::device::CpuDevice;
    use crate::testing::{Synthetic, refused, watched};

    #[test]
    fn a_machine_that_gives_no_thread_loads_before_start_returns() {
        watched(|| {
            if !refused(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN) {
                return;
            }
            let Synthetic { checkpoint, expected, .. } = Synthetic::new(5, 3, 300_000, |_, file| file);
            let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
            let selected = checkpoint.select(&Selection::default()).unwrap();
            let prepared = loader.prepare(checkpoint, &selected).unwrap();
            let loading = loader.start(prepared);
            for (name, bytes) in &expected {
                assert!(loading.wait(name).unwrap().bytes().unwrap() == bytes.as_slice());
            }
            assert_eq!(loading.finish().unwrap().1.tensors().len(), expected.len());
        });
    }
}
