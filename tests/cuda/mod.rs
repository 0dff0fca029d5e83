//! The CUDA device: on the software driver, under each of its schedules; on a real GPU where `REQUIRE_CUDA=1` asks for it.
//!
//! The double is no GPU. What these tests show is that copies, events and memory are used in an order that is right whatever
//! the timing, and that nothing is lost or leaked when the driver refuses. `scripts/gpu-check` runs the same tests on a GPU.

mod direct;
mod downloads;
mod errors;
mod lies;
mod loads;
mod misuse;
mod pipeline;
mod probe;
mod saves;
mod uploads;

use std::sync::Arc;

use swcuda::{Config, Double, Schedule};
use vramp::device::{CudaDevice, Device};
use vramp::testing::{Feature, required_if};

/// Whether the tests are to run on the machine's own driver. Then its absence is a failure.
fn on_a_gpu() -> bool {
    std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1")
}

/// A driver to test with: the double, or the machine's.
pub(crate) struct Rig {
    double: Option<Double>,
}

impl Rig {
    /// The double as `config` says; where a GPU is required, that.
    pub(crate) fn new(config: Config) -> Rig {
        Rig { double: (!on_a_gpu()).then(|| Double::acquire(config)) }
    }

    /// The double, for what only it can do; `None`, and a line that says so, on a GPU.
    fn double(config: Config) -> Option<Double> {
        let why = "REQUIRE_CUDA=1 asks for the machine's own driver";
        required_if(Feature::Double, !on_a_gpu(), why).then(|| Double::acquire(config))
    }

    pub(crate) fn device(&self) -> Arc<dyn Device> {
        Arc::new(CudaDevice::open(0).unwrap())
    }

    /// Copies so far that were not asynchronous, because their memory was not locked.
    fn pageable_copies(&self) -> u64 {
        self.double.as_ref().map_or(0, |double| double.stats().pageable_copies)
    }
}

/// The three schedules, the random one by several seeds.
fn schedules(seeds: u64) -> Vec<Schedule> {
    let random = (1..=seeds).map(Schedule::Random);
    [Schedule::Eager, Schedule::Lazy].into_iter().chain(random).collect()
}

pub(crate) fn scheduled(schedule: Schedule) -> Config {
    Config { schedule, pageable_is_error: true, ..Config::default() }
}
