//! The driver refuses: the load ends with an error that says what, nothing is in flight and nothing is leaked.

use std::sync::Arc;

use swcuda::{Config, Fault, Schedule};
use vramp::Float;
use vramp::checkpoint::Selection;
use vramp::load::{Cancel, Loaded, Loader, TransferOptions};
use vramp::report::Staging;
use vramp::testing::{Synthetic, watched};
use vramp::{Error, Result};

use super::{Rig, scheduled, schedules};
use crate::casts::Sample;

/// A load of everything, and everything read back; the driver is opened for it.
pub(super) fn load(synthetic: &Synthetic, options: TransferOptions) -> Result<Loaded> {
    let device = vramp::device::open("cuda:0")?;
    let mut loader = Loader::new(device, options);
    let selected = synthetic.checkpoint.select(&Selection::default())?;
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected)?;
    let loaded = loader.load(&prepared)?;
    for (name, bytes) in &synthetic.expected {
        assert!(loaded.tensor(name)?.download()? == *bytes, "wrong bytes in {name}");
    }
    Ok(loaded)
}

pub(super) fn small() -> TransferOptions {
    TransferOptions::default().staging(Staging { count: 2, bytes: 16 << 10 })
}

/// Whatever call fails: an error of the device, or a load that is right and says what it had to do without.
fn judge<T>(outcome: Result<T>, what: &str) -> bool {
    match outcome {
        Ok(_) => true,
        Err(Error::Device { message, .. }) => {
            assert!(!message.is_empty(), "{what}");
            false
        }
        Err(Error::OutOfMemory { .. }) => false,
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Calls whose failure a load may survive: those that give something back, ask what it can do without, or lock memory.
const SURVIVABLE: &[&str] = &[
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2", // tried again where something is given back; a poll that fails is waited for
    "cuDeviceGetAttribute",
    "cuDeviceGetName", // for the report
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize", // tried again where memory is about to go
];

/// Has each call that `attempt` makes fail once, every `step`th of a kind, by several codes and schedules.
pub(super) fn fail_each_call<T>(step: usize, attempt: impl Fn() -> Result<T>) {
    let Some(double) = Rig::double(scheduled(Schedule::Lazy)) else { return };
    drop(attempt().unwrap()); // what is asked once in a process has been asked then
    drop(double);
    let double = Rig::double(scheduled(Schedule::Lazy)).unwrap();
    drop(attempt().unwrap());
    let calls = double.calls();
    drop(double);
    for (name, count) in calls {
        for nth in (1..=count).step_by(if count > 10 { step } else { 1 }) {
            for (code, schedule) in [(2, Schedule::Lazy), (999, Schedule::Random(nth))] {
                let double = Rig::double(Config { pageable_is_error: false, ..scheduled(schedule) }).unwrap();
                double.inject(Fault::Call { name: name.clone(), nth, code });
                let what = format!("call {nth} of {count} of {name} answers {code}, {schedule:?}");
                let survived = judge(attempt(), &what);
                assert!(!survived || SURVIVABLE.contains(&name.as_str()), "{what}: nobody noticed");
                let (reports, leaks) = (double.reports(), double.leaks());
                assert!(reports.is_empty() && leaks.is_empty(), "{what}: {reports:?} {leaks:?}");
            }
        }
    }
}

#[test]
fn each_driver_call_may_fail_once() {
    watched(|| {
        let synthetic = Synthetic::new(17, 2, 40_000, |_, file| file);
        fail_each_call(1, || load(&synthetic, small()));
    });
}

#[test]
fn each_call_of_a_load_that_converts_may_fail_once() {
    watched(|| {
        let sample = Sample::new(2, Float::F16);
        fail_each_call(5, || {
            let loaded = sample.load(vramp::device::open("cuda:0")?, Some(Staging { count: 2, bytes: 64 << 10 }))?;
            sample.try_check(&loaded, "after a failed call")?;
            Ok(loaded)
        });
    });
}

/// One operation after the other fails when the GPU carries it out, until `attempt` has fewer; it has `least` at least.
pub(super) fn fail_each_operation<T: std::fmt::Debug>(least: u64, attempt: impl Fn() -> Result<T>) {
    let mut nth = 1;
    loop {
        let Some(double) = Rig::double(scheduled(Schedule::Lazy)) else { return };
        double.inject(Fault::Async { nth, code: [700, 719, 214][nth as usize % 3] });
        let outcome = attempt();
        if outcome.is_ok() {
            let stats = double.stats();
            let copies: u64 = stats.devices.iter().map(|device| device.h2d.copies + device.d2h.copies).sum();
            let operations = copies + stats.fills + stats.kernels;
            assert!(operations < nth && nth > least, "operation {nth} of {operations}: {outcome:?}");
            return;
        }
        assert!(matches!(outcome, Err(Error::Device { .. })), "operation {nth}: {outcome:?}");
        double.allow_leaks(); // a GPU that cannot be waited for may still use the memory: it is leaked, never freed
        nth += 1;
    }
}

#[test]
fn an_error_that_comes_later_sticks_and_ends_the_load() {
    watched(|| {
        let synthetic = Synthetic::new(19, 2, 40_000, |_, file| file);
        fail_each_operation(5, || load(&synthetic, small()));
    });
}

#[test]
fn a_bit_that_flips_on_the_way_is_seen_in_the_checksum() {
    let synthetic = Synthetic::new(23, 1, 60_000, |_, file| file);
    let Some(double) = Rig::double(Config::default()) else { return };
    double.inject(Fault::Flip { nth: 1 });
    let mut loader = Loader::new(vramp::device::open("cuda:0").unwrap(), TransferOptions::default());
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
    let loaded = loader.load(&prepared).unwrap();
    let differ = |(name, bytes): &(&Arc<str>, &Vec<u8>)| {
        loaded.tensor(name).unwrap().checksum().unwrap() != vramp::digest::checksum(bytes)
    };
    assert_eq!(synthetic.expected.iter().filter(differ).count(), 1);
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_read() {
    let synthetic = Synthetic::new(29, 2, 400_000, |_, file| file);
    let Some(double) = Rig::double(Config { vram_bytes: 64 << 10, ..Config::default() }) else { return };
    let error = load(&synthetic, small()).unwrap_err();
    let Error::OutOfMemory { device, needed, free, .. } = &error else { panic!("{error}") };
    assert_eq!((device.as_str(), *free), ("cuda:0", Some(64 << 10)));
    assert!(*needed >= synthetic.checkpoint.total_bytes());
    assert_eq!(double.stats().operations, 0);
}

#[test]
fn memory_that_may_not_be_locked_is_told_once_and_the_load_goes_on() {
    watched(|| {
        let synthetic = Synthetic::new(31, 2, 100_000, |_, file| file);
        for schedule in schedules(2) {
            let config = Config { pin_limit: Some(20 << 10), ..scheduled(schedule) };
            let Some(_double) = Rig::double(Config { pageable_is_error: false, ..config }) else { return };
            let options = TransferOptions::default().staging(Staging { count: 3, bytes: 16 << 10 });
            let loaded = load(&synthetic, options).unwrap();
            let [fallback] = loaded.report.fallbacks.as_slice() else { panic!("{:?}", loaded.report.fallbacks) };
            assert!(fallback.what.contains("locked") && fallback.why.contains("ulimit -l"), "{fallback:?}");
        }
    });
}

#[test]
fn a_cancelled_load_leaves_nothing_behind() {
    watched(|| {
        for (seed, schedule) in (0..).zip(schedules(4)) {
            let _rig = Rig::new(scheduled(schedule));
            let synthetic = Synthetic::new(seed + 40, 2, 200_000, |_, file| file);
            let cancel = Cancel::new();
            cancel.cancel();
            let outcome = load(&synthetic, small().cancel(cancel));
            assert!(matches!(outcome, Err(Error::Cancelled)), "{outcome:?}");
        }
    });
}
