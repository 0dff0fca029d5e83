//! Reads that a device makes itself, past the host, against a fake that refuses, fails and ends when it is told to: the bytes are
//! right whatever happens, and what happened stands in the report.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use vramp::checkpoint::Selection;
use vramp::device::{CpuDevice, Device};
use vramp::load::{Cancel, Loaded, Loader, TransferOptions};
use vramp::plan::{LoadPlan, RouteChoice};
use vramp::report::Staging;
use vramp::storage::{Fallback, Route};
use vramp::testing::{
    DirectDevice, DirectTrouble, FaultySource, Gate, MemoryFile, ShuffledQueue, Synthetic, Trouble, watched,
};
use vramp::{Error, Result};

use crate::load::CancelAfter;

fn with_descriptor(_shard: u32, file: MemoryFile) -> MemoryFile {
    file.with_descriptor()
}

fn options() -> TransferOptions {
    let staging = Some(Staging { count: 2, bytes: 32 << 10 });
    TransferOptions::default().route(RouteChoice::GpuDirect).staging(staging)
}

fn loader(device: &DirectDevice, options: TransferOptions, seed: u64) -> Loader {
    let loader = Loader::new(Arc::new(device.clone()), options);
    match seed % 3 {
        0 => loader,
        _ => loader.with_queue(move |_, _| Box::new(ShuffledQueue::new(seed, 1 + (seed % 7) as usize))),
    }
}

fn load(loader: &mut Loader, synthetic: &Synthetic) -> Result<(Loaded, LoadPlan)> {
    let selected = synthetic.checkpoint.select(&Selection::default())?;
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected)?;
    Ok((loader.load(&prepared)?, prepared.plan))
}

fn assert_same(loaded: &Loaded, synthetic: &Synthetic, what: &str) {
    assert_eq!(loaded.tensors().len(), synthetic.expected.len(), "{what}");
    for (name, bytes) in &synthetic.expected {
        assert!(loaded.tensor(name).unwrap().download().unwrap() == *bytes, "wrong bytes in {name}: {what}");
    }
}

/// What the report says of this route.
fn notes(loaded: &Loaded) -> Vec<&Fallback> {
    loaded.report.fallbacks.iter().filter(|note| note.what == "gpu-direct").collect()
}

#[test]
fn the_device_reads_what_it_can_and_the_bytes_are_right() {
    watched(|| {
        let mut past_host = 0;
        for seed in 0..50u64 {
            let synthetic = Synthetic::new(seed, 1 + (seed % 4) as u32, 250_000, with_descriptor);
            let device = DirectDevice::new(seed, Vec::new());
            let mut loader = loader(&device, options(), seed);
            for _ in 0..2 {
                let (loaded, plan) = load(&mut loader, &synthetic).unwrap();
                assert_same(&loaded, &synthetic, &format!("seed {seed}"));
                assert_eq!(loaded.report.routes.gpu_direct, plan.route_bytes(Route::GpuDirect), "seed {seed}");
                assert!(notes(&loaded).is_empty(), "seed {seed}: {:?}", notes(&loaded));
                past_host += loaded.report.routes.gpu_direct;
            }
            assert_eq!((device.open_files(), device.live_bytes()), (0, 0), "seed {seed}");
        }
        assert!(past_host > 10_000_000, "only {past_host} bytes were read past the host: the test tests nothing");
    });
}

#[test]
fn a_read_that_fails_is_noted_once_and_the_rest_goes_by_way_of_the_host() {
    watched(|| {
        let mut failed = 0;
        for seed in 0..40u64 {
            let synthetic = Synthetic::new(seed, 3, 250_000, with_descriptor);
            let device = DirectDevice::new(seed, vec![DirectTrouble::FailFrom(seed % 5)]);
            let (loaded, plan) = load(&mut loader(&device, options(), seed), &synthetic).unwrap();
            assert_same(&loaded, &synthetic, &format!("seed {seed}"));
            let planned = plan.route_bytes(Route::GpuDirect);
            if device.reads() <= seed % 5 {
                continue; // the load was over before its trouble
            }
            failed += 1;
            assert!(loaded.report.routes.gpu_direct < planned, "seed {seed}");
            let [note] = notes(&loaded)[..] else { panic!("seed {seed}: {:?}", notes(&loaded)) };
            assert!(note.why.contains("fails as planned") && note.why.contains("way of the host"), "{}", note.why);
        }
        assert!(failed > 20, "only {failed} loads met their trouble: the test tests nothing");
    });
}

/// Longer than the buffer that its bytes go through: each part has its own place in the region.
#[test]
fn a_long_read_that_fails_goes_by_way_of_the_host_in_parts() {
    watched(|| {
        let synthetic = Synthetic::new(21, 1, 16 << 20, with_descriptor);
        let device = DirectDevice::new(4, vec![DirectTrouble::FailFrom(0)]);
        let (loaded, plan) = load(&mut loader(&device, options(), 0), &synthetic).unwrap();
        let longest = plan.transfers.iter().filter(|transfer| transfer.route == Route::GpuDirect).map(|read| read.len);
        assert!(longest.max() > Some(9 << 20), "no read is longer than two buffers: the test tests nothing");
        assert_same(&loaded, &synthetic, "in parts");
    });
}

#[test]
fn after_a_refusal_the_device_is_not_asked_again() {
    let synthetic = Synthetic::new(4, 4, 250_000, with_descriptor);
    let device = DirectDevice::new(4, vec![DirectTrouble::FailFrom(0)]);
    let one_by_one = loader(&device, options(), 1);
    let (loaded, plan) =
        load(&mut one_by_one.with_queue(|_, _| Box::new(ShuffledQueue::new(1, 4))), &synthetic).unwrap();
    assert!(plan.transfers.iter().filter(|transfer| transfer.route == Route::GpuDirect).count() > 3);
    assert_eq!((device.reads(), loaded.report.routes.gpu_direct), (1, 0));
}

/// Two hundred shards would have been two hundred lines.
#[test]
fn files_that_are_refused_in_the_middle_of_a_load_are_one_line() {
    for first in 1..5 {
        let synthetic = Synthetic::new(21, 8, 250_000, with_descriptor);
        let device = DirectDevice::new(4, vec![DirectTrouble::RefuseFilesFrom(first)]);
        let (loaded, plan) = load(&mut loader(&device, options(), 0), &synthetic).unwrap();
        assert_same(&loaded, &synthetic, "refused files");
        assert!(loaded.report.routes.gpu_direct < plan.route_bytes(Route::GpuDirect));
        let [note] = notes(&loaded)[..] else { panic!("{:?}", notes(&loaded)) };
        assert!(note.why.contains(&format!("file {first} is refused")), "{}", note.why);
    }
}

#[test]
fn a_file_that_ends_early_is_an_error_in_the_words_of_the_ordinary_route() {
    watched(|| {
        let synthetic = Synthetic::new(6, 1, 250_000, |shard, file| {
            let broken = |source| Arc::new(FaultySource::new(source, vec![Trouble::FailFrom(0)])) as Arc<_>;
            with_descriptor(shard, file).with_source(Route::Direct, broken).with_source(Route::Buffered, broken)
        });
        let device = DirectDevice::new(6, vec![DirectTrouble::EndFrom(0)]);
        let error = load(&mut loader(&device, options(), 0), &synthetic).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("memory")), "{error}");
        assert_eq!((device.open_files(), device.live_bytes()), (0, 0));
    });
}

#[test]
fn what_cannot_be_had_is_noted_with_its_reason_and_the_ordinary_route_is_taken() {
    for (trouble, reason) in [
        (DirectTrouble::Absent("no such library".to_owned()), "no such library"),
        (DirectTrouble::RefuseFiles("5 (no udev data)".to_owned()), "no udev data"),
    ] {
        let synthetic = Synthetic::new(8, 3, 250_000, with_descriptor);
        let device = DirectDevice::new(8, vec![trouble]);
        let (loaded, plan) = load(&mut loader(&device, options(), 0), &synthetic).unwrap();
        assert_same(&loaded, &synthetic, reason);
        assert_eq!((plan.route_bytes(Route::GpuDirect), device.reads()), (0, 0));
        let [note] = notes(&loaded)[..] else { panic!("{:?}", notes(&loaded)) };
        assert!(note.why.contains(reason), "{}", note.why);
    }
    // A device without such a way, a storage without descriptors.
    let synthetic = Synthetic::new(8, 3, 250_000, |_, file| file);
    let devices: [Arc<dyn Device>; 2] = [Arc::new(CpuDevice::new()), Arc::new(DirectDevice::new(1, Vec::new()))];
    for (device, reason) in devices.into_iter().zip(["cpu does not read files", "no descriptor"]) {
        let mut loader = Loader::new(device, options());
        let (loaded, _) = load(&mut loader, &synthetic).unwrap();
        assert_same(&loaded, &synthetic, reason);
        assert!(matches!(notes(&loaded)[..], [note] if note.why.contains(reason)), "{:?}", notes(&loaded));
    }
}

#[test]
fn a_detour_is_taken_when_it_was_asked_for_and_said() {
    let synthetic = Synthetic::new(8, 3, 250_000, with_descriptor);
    let device = DirectDevice::new(8, vec![DirectTrouble::Detour("reads by way of the host itself".to_owned())]);
    let (loaded, _) = load(&mut loader(&device, options(), 0), &synthetic).unwrap();
    assert_same(&loaded, &synthetic, "a detour");
    assert!(loaded.report.routes.gpu_direct > 0);
    assert!(matches!(notes(&loaded)[..], [note] if note.why.contains("host itself")), "{:?}", notes(&loaded));
}

#[test]
fn nobody_who_did_not_ask_gets_a_small_load_past_the_host() {
    let synthetic = Synthetic::new(8, 3, 250_000, with_descriptor);
    let device = DirectDevice::new(8, Vec::new());
    let auto = options().route(RouteChoice::Auto);
    let (loaded, plan) = load(&mut loader(&device, auto, 0), &synthetic).unwrap();
    assert_same(&loaded, &synthetic, "auto");
    assert_eq!((plan.route_bytes(Route::GpuDirect), device.reads(), notes(&loaded).len()), (0, 0, 0));
}

#[test]
fn memory_that_exists_is_filled_by_way_of_the_host() {
    let synthetic = Synthetic::new(8, 3, 250_000, with_descriptor);
    let device = DirectDevice::new(8, Vec::new());
    let mut loader = loader(&device, options(), 0);
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let mut next = 0;
    let mut places = BTreeMap::new();
    for (name, bytes) in &synthetic.expected {
        places.insert(Arc::clone(name), next);
        next += (bytes.len() as u64).next_multiple_of(256);
    }
    let prepared = loader.prepare_into(synthetic.checkpoint.clone(), &selected, &places).unwrap();
    let loaded = loader.load_into(&prepared, device.alloc(next).unwrap()).unwrap();
    assert_same(&loaded, &synthetic, "into memory that exists");
    assert_eq!(device.reads(), 0);
}

#[test]
fn a_device_that_panics_ends_the_load_with_an_error() {
    watched(|| {
        let synthetic = Synthetic::new(6, 2, 250_000, with_descriptor);
        let device = DirectDevice::new(6, vec![DirectTrouble::PanicAt(1)]);
        let error = load(&mut loader(&device, options(), 0), &synthetic).map(drop).unwrap_err();
        assert!(matches!(error, Error::Poisoned { .. }), "{error}");
        assert_eq!((device.open_files(), device.live_bytes()), (0, 0));
    });
}

#[test]
fn a_load_past_the_host_can_be_cancelled_at_any_step() {
    watched(|| {
        let mut cancelled = 0;
        for step in 1..20 {
            let synthetic = Synthetic::new(7, 3, 250_000, with_descriptor);
            let device = DirectDevice::new(step, Vec::new());
            let cancel = Cancel::new();
            let observer = Arc::new(CancelAfter { cancel: cancel.clone(), steps: AtomicU64::new(step) });
            let options = options().cancel(cancel).observer(observer);
            match load(&mut loader(&device, options, step), &synthetic) {
                Err(Error::Cancelled) => cancelled += 1,
                Ok((loaded, _)) => assert_same(&loaded, &synthetic, "the switch came after the last step"),
                Err(error) => panic!("{error}"),
            }
            assert_eq!((device.open_files(), device.live_bytes()), (0, 0));
        }
        assert!(cancelled > 5, "{cancelled}");
    });
}

#[test]
fn the_device_has_eight_reads_in_flight() {
    watched(|| {
        let gate = Gate::new();
        // Shards of several segments each, so that there are more reads than that.
        let synthetic = Synthetic::new(21, 12, 250_000, with_descriptor);
        let device = DirectDevice::new(6, vec![DirectTrouble::Slow(gate.clone())]);
        let opener = std::thread::spawn(move || {
            gate.wait_for(8);
            gate.open();
        });
        let (loaded, plan) = load(&mut loader(&device, options(), 0), &synthetic).unwrap();
        assert!(plan.transfers.iter().filter(|transfer| transfer.route == Route::GpuDirect).count() > 8);
        assert_same(&loaded, &synthetic, "slow");
        opener.join().unwrap();
    });
}
