//! Loads arrive, byte for byte, under every schedule, and leave nothing behind.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use swcuda::Config;
use vramp::Float;
use vramp::checkpoint::Selection;
use vramp::device::{CudaDevice, CudaMemory, Device, DeviceAllocator};
use vramp::load::{Loader, TransferOptions};
use vramp::report::Staging;
use vramp::testing::{Random, Synthetic, device_conformance, watched};

use super::{Rig, scheduled, schedules};
use crate::casts::{Sample, overflow_is_an_error_that_counts};

/// A transfer with few and small buffers, so that everything that can run out does.
fn tight(seed: u64) -> TransferOptions {
    let mut random = Random::new(seed ^ 0x5eed);
    let staging = Some(Staging { count: 1 + random.below(4), bytes: 4096 << random.below(5) });
    TransferOptions::default().staging(staging)
}

fn check(loader: &mut Loader, synthetic: &Synthetic, what: &str) {
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
    let loaded = loader.load(&prepared).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(loaded.tensors().len(), synthetic.expected.len(), "{what}");
    for (name, bytes) in &synthetic.expected {
        let tensor = loaded.tensor(name).unwrap();
        assert!(tensor.download().unwrap() == *bytes, "wrong bytes in {name}: {what}");
        assert_eq!(tensor.address().is_some_and(|address| address.is_multiple_of(256)), !bytes.is_empty(), "{what}");
    }
    assert_eq!(loaded.report.fallbacks, [], "{what}");
}

#[test]
fn the_cuda_device_conforms() {
    for schedule in schedules(5) {
        let rig = Rig::new(Config { pageable_is_error: false, ..scheduled(schedule) });
        device_conformance(&*rig.device());
    }
}

#[test]
fn loads_arrive_under_every_schedule() {
    watched(|| {
        for (seed, schedule) in (0..).zip(schedules(12)) {
            let rig = Rig::new(scheduled(schedule));
            let synthetic = Synthetic::new(seed, 1 + (seed % 3) as u32, 150_000, |_, file| file);
            let loader = Loader::new(rig.device(), tight(seed));
            let mut loader = loader;
            for round in 0..2 {
                check(&mut loader, &synthetic, &format!("seed {seed}, round {round}, {schedule:?}"));
            }
            assert_eq!(rig.pageable_copies(), 0);
        }
    });
}

#[test]
fn conversions_on_the_gpu_are_those_on_the_host() {
    watched(|| {
        for (seed, schedule) in (0..).zip(schedules(1)) {
            let to = [Float::BF16, Float::F16, Float::F32][seed as usize % 3];
            let sample = Sample::new(seed, to);
            let rig = Rig::new(scheduled(schedule));
            let staging = Some(Staging { count: 3, bytes: 12 << 10 });
            let loaded = sample.load(rig.device(), staging).unwrap();
            sample.check(&loaded, &format!("to {to:?}, {schedule:?}"));
            assert!(loaded.report.stages.kernels.bytes > 0);
            assert_eq!(rig.pageable_copies(), 0);
        }
    });
}

#[test]
fn overflow_is_counted_by_the_kernels() {
    let rig = Rig::new(Config::default());
    overflow_is_an_error_that_counts(&rig.device());
}

#[test]
fn packed_weights_are_dequantised_by_the_kernels() {
    let rig = Rig::new(Config::default());
    crate::quantised::every_scheme_gives_its_numbers(&rig.device());
}

#[test]
fn checksums_on_the_gpu_are_those_on_the_host() {
    let synthetic = Synthetic::new(7, 2, 30_000, |_, file| file);
    for schedule in schedules(1) {
        let rig = Rig::new(scheduled(schedule));
        let loader = Loader::new(rig.device(), TransferOptions::default());
        let mut loader = loader;
        let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
        let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
        let loaded = loader.load(&prepared).unwrap();
        for (name, bytes) in &synthetic.expected {
            assert_eq!(loaded.tensor(name).unwrap().checksum().unwrap(), vramp::digest::checksum(bytes), "{name}");
        }
        assert_eq!(rig.pageable_copies(), 0);
    }
}

#[test]
fn a_matrix_is_transposed_by_the_gpu() {
    let rig = Rig::new(Config::default());
    let sample = Sample::new(3, Float::F32);
    let loaded = sample.load(rig.device(), None).unwrap();
    let tensor = loaded.tensor("d.bf16").unwrap();
    let (rows, columns) = (tensor.shape()[0], tensor.shape()[1]);
    let (before, after) = (tensor.download().unwrap(), tensor.transposed().unwrap().download().unwrap());
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        let (from, to) = ((row * columns + column) * 4, (column * rows + row) * 4);
        assert_eq!(before[from..from + 4], after[to..to + 4], "{row}, {column}");
    }
}

/// Many short rows and tiny tensors: collected by one kernel instead of one copy each, where there are enough of them.
#[test]
fn small_pieces_are_collected_by_a_kernel() {
    let count = 20_500;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let mut header = serde_json::Map::new();
    for index in 0..count {
        let entry = serde_json::json!({"dtype": "U8", "shape": [3], "data_offsets": [index * 3, index * 3 + 3]});
        header.insert(format!("t{index:05}"), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let data = Random::new(1).bytes(count * 3);
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(&path, file).unwrap();
    let rig = Rig::new(scheduled(swcuda::Schedule::Lazy));
    let options = vramp::load::Options::default().device(rig.device());
    let loaded = vramp::load::load(&path, &options).unwrap();
    for (index, tensor) in loaded.tensors().iter().enumerate().step_by(97) {
        assert_eq!(tensor.download().unwrap(), data[index * 3..index * 3 + 3], "{index}");
    }
    if let Some(double) = &rig.double {
        assert!(double.stats().kernels > 0 && double.calls()["cuMemcpyHtoDAsync_v2"] < 1000, "{:?}", double.calls());
    }
}

/// An allocator that counts, over the device's own.
struct Counting {
    device: CudaDevice,
    arenas: Mutex<BTreeMap<u64, vramp::device::Arena>>,
    freed: AtomicU64,
}

// SAFETY: addresses come from arenas of the device that are kept until they are freed.
#[allow(unsafe_code)]
unsafe impl DeviceAllocator for Counting {
    fn alloc(&self, bytes: u64) -> vramp::Result<u64> {
        let arena = self.device.alloc(bytes)?;
        let address = arena.address().unwrap();
        self.arenas.lock().unwrap().insert(address, arena);
        Ok(address)
    }

    fn free(&self, address: u64, _bytes: u64) {
        self.arenas.lock().unwrap().remove(&address).unwrap();
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn arenas_come_from_where_the_caller_wants() {
    let synthetic = Synthetic::new(11, 2, 50_000, |_, file| file);
    for schedule in schedules(2) {
        let rig = Rig::new(scheduled(schedule));
        let device = CudaDevice::open(0).unwrap();
        let counting =
            Arc::new(Counting { device: device.clone(), arenas: Mutex::default(), freed: AtomicU64::new(0) });
        let allocator = Arc::clone(&counting) as Arc<dyn DeviceAllocator>;
        for memory in [CudaMemory::Own, CudaMemory::Pool, CudaMemory::Allocator(allocator)] {
            let mut loader = Loader::new(Arc::new(device.clone().with_memory(memory)), tight(3));
            check(&mut loader, &synthetic, "memory");
        }
        assert_eq!((counting.freed.load(Ordering::Relaxed), counting.arenas.lock().unwrap().len()), (1, 0));
        assert_eq!(rig.pageable_copies(), 0);
    }
}

/// New weights at the addresses of the old ones: what captured graphs know stays true.
#[test]
#[allow(unsafe_code)]
fn a_hot_swap_keeps_every_address() {
    for schedule in schedules(2) {
        let _rig = Rig::new(scheduled(schedule));
        let device = CudaDevice::open(0).unwrap();
        let old = Synthetic::new(21, 2, 40_000, |_, file| file);
        let mut loader = Loader::new(Arc::new(device.clone()), tight(1));
        let selected = old.checkpoint.select(&Selection::default()).unwrap();
        let prepared = loader.prepare(old.checkpoint.clone(), &selected).unwrap();
        let first = loader.load(&prepared).unwrap();
        let addresses: BTreeMap<Arc<str>, u64> =
            first.tensors().iter().map(|tensor| (Arc::from(tensor.name()), tensor.address().unwrap_or(0))).collect();
        let base = addresses.values().copied().filter(|&address| address > 0).min().unwrap();
        let end = first.tensors().iter().map(|tensor| tensor.address().unwrap_or(0) + tensor.byte_len()).max().unwrap();
        let places =
            addresses.iter().map(|(name, &address)| (Arc::clone(name), address.saturating_sub(base))).collect();
        let prepared = loader.prepare_into(old.checkpoint.clone(), &selected, &places).unwrap();
        // SAFETY: the memory is the first load's, which is kept; nobody else uses it here.
        let arena = unsafe { device.memory_at(base, end - base, Arc::new(first.clone())) };
        let second = loader.load_into(&prepared, arena).unwrap();
        for tensor in second.tensors().iter().filter(|tensor| !tensor.is_empty()) {
            assert_eq!(tensor.address(), Some(addresses[tensor.name()]));
            assert!(tensor.download().unwrap() == old.expected[tensor.name()]);
        }
        // The same in safe code, by the only owner of what was loaded.
        drop(first);
        let kept = second.tensors().iter().find(|tensor| !tensor.is_empty()).unwrap().clone();
        let second = second.into_arena().map(drop).expect_err("a tensor is still used");
        assert!(kept.download().unwrap() == old.expected[kept.name()]);
        drop(kept);
        let prepared = loader.prepare_into(old.checkpoint.clone(), &selected, &second.places()).unwrap();
        let third = loader.load_into(&prepared, second.into_arena().unwrap()).unwrap();
        for tensor in third.tensors().iter().filter(|tensor| !tensor.is_empty()) {
            assert_eq!(tensor.address(), Some(addresses[tensor.name()]));
            assert!(tensor.download().unwrap() == old.expected[tensor.name()]);
        }
        drop((third, loader));
    }
}

#[test]
fn each_device_has_its_own_memory_and_its_own_context() {
    let Some(double) = Rig::double(Config { devices: 3, ..scheduled(swcuda::Schedule::Random(4)) }) else { return };
    let synthetic = Synthetic::new(5, 2, 60_000, |_, file| file);
    for ordinal in [2, 1] {
        let device = Arc::new(CudaDevice::open(ordinal).unwrap());
        assert_eq!(device.name(), format!("cuda:{ordinal}"));
        let mut loader = Loader::new(device, TransferOptions::default());
        check(&mut loader, &synthetic, "device");
    }
    let stats = double.stats();
    let calls = double.calls();
    assert_eq!(calls["cuCtxPushCurrent_v2"], calls["cuCtxPopCurrent_v2"], "threads get their own context back");
    assert_eq!(stats.devices[0].h2d.bytes, 0, "nothing went to the first GPU");
    assert!(stats.devices[1].h2d.bytes > 0 && stats.devices[1].h2d.bytes == stats.devices[2].h2d.bytes);
}
