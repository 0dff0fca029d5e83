//! Safe code that lies about memory: a GPU never writes to an address that this package did not make itself.
//!
//! `Memory` is a public, safe trait. Each test carves an arena of a `Memory` that another program wrote, which claims the bytes of
//! a finished tensor, and hands its regions to the GPU: to its stream as a copy, to its kernels as a cast, to cuFile, and to
//! `load_into`. Each is refused, the driver is asked for nothing, and the tensor keeps its bytes. Nothing here is unsafe.
#![forbid(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use fakecufile::{Fake, Plan};
use vramp::Float;
use vramp::checkpoint::Selection;
use vramp::device::{Arena, Cast, CudaDevice, Device, Memory, Piece, StreamNeeds, forget_cufile};
use vramp::fallback::Fallbacks;
use vramp::load::{Loaded, Loader, TransferOptions};
use vramp::testing::Synthetic;
use vramp::{Error, Result};

use super::{Rig, scheduled};

/// Memory that is none: what another program could write. It can say how long it is; it cannot say where.
struct Lie(u64);

impl Memory for Lie {
    fn len(&self) -> u64 {
        self.0
    }

    fn download(&self, _: Range<u64>, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

fn loaded(device: &CudaDevice, synthetic: &Synthetic) -> Loaded {
    let loader = Loader::new(Arc::new(device.clone()), TransferOptions::default());
    let mut loader = loader;
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
    loader.load(&prepared).unwrap()
}

fn keeps_its_bytes(loaded: &Loaded, synthetic: &Synthetic) {
    for (name, bytes) in &synthetic.expected {
        assert!(loaded.tensor(name).unwrap().download().unwrap() == *bytes, "{name} was overwritten");
    }
}

/// One upload of one piece into an arena of someone else's making.
fn upload(device: &CudaDevice, piece: Piece, arena: Arena) -> Result<()> {
    let fallbacks = Fallbacks::default();
    let pool = device.staging(1, 4096, &fallbacks)?;
    let mut stream = device.stream(None, &fallbacks)?;
    let casts = vec![(Float::F32, Float::BF16)];
    stream.prepare(&StreamNeeds { buffers: 1, buffer_bytes: 4096, casts, ..StreamNeeds::default() })?;
    let (mut regions, _) = arena.carve(std::slice::from_ref(&(0..piece.len())))?;
    let mut buffer = pool.acquire().expect("it is free");
    buffer.bytes_mut().fill(0xEE);
    stream.upload(buffer, vec![(piece, regions.pop().expect("one range"))])?.finish().map(drop)
}

fn refused(result: Result<()>) {
    assert!(matches!(&result, Err(Error::Request { what, .. }) if what.contains("not memory of cuda:0")), "{result:?}");
}

#[test]
fn a_stream_and_its_kernels_write_to_no_memory_of_others() {
    let Some(double) = Rig::double(scheduled(swcuda::Schedule::Eager)) else { return };
    let gpu = CudaDevice::open(0).unwrap();
    let synthetic = Synthetic::new(3, 2, 4_000, |_, file| file);
    let tensors = loaded(&gpu, &synthetic);
    let copies = double.calls().get("cuMemcpyHtoDAsync_v2").copied();
    let cast = Cast { from: Float::F32, to: Float::BF16, scale: None };
    let plain = Piece::contiguous(0, 64);
    for piece in [plain, Piece { cast: Some(cast), ..plain }, Piece { at: 0, run: 8, stride: 16, count: 4, cast: None }]
    {
        refused(upload(&gpu, piece, Arena::device(Box::new(Lie(64)))));
    }
    // A region of host memory, and one of another GPU, are no targets either.
    refused(upload(&gpu, plain, vramp::device::CpuDevice::new().alloc(64).unwrap()));
    assert_eq!(double.calls().get("cuMemcpyHtoDAsync_v2").copied(), copies, "the driver was asked to copy");
    assert!(double.reports().is_empty(), "{:?}", double.reports());
    keeps_its_bytes(&tensors, &synthetic);
}

#[test]
fn memory_of_another_gpu_is_refused() {
    let Some(_double) = Rig::double(swcuda::Config { devices: 2, ..scheduled(swcuda::Schedule::Eager) }) else {
        return;
    };
    let [first, second] = [0, 1].map(|ordinal| CudaDevice::open(ordinal).unwrap());
    refused(upload(&first, Piece::contiguous(0, 64), second.alloc(64).unwrap()));
    // The same GPU opened twice is one GPU.
    upload(&first, Piece::contiguous(0, 64), CudaDevice::open(0).unwrap().alloc(64).unwrap()).unwrap();
}

#[test]
fn cufile_reads_into_no_memory_of_others() {
    let Some(_double) = Rig::double(scheduled(swcuda::Schedule::Eager)) else { return };
    let fake = Fake::acquire(Plan::default());
    forget_cufile("/proc/version".as_ref(), Duration::from_secs(20));
    let gpu = CudaDevice::open(0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    std::fs::write(&path, [7; 8192]).unwrap();
    let file = File::open(&path).unwrap();
    let reads = gpu.direct_reads(false).unwrap().unwrap();
    let known = reads.register(file.as_fd(), &path).unwrap();
    let (mut regions, _) = Arena::device(Box::new(Lie(4096))).carve(std::slice::from_ref(&(0..4096))).unwrap();
    let error = known.read(0, 4096, &mut regions[0]).unwrap_err();
    assert!(error.to_string().contains("do not fit their region"), "{error}");
    assert_eq!(fake.counters().bytes, 0);
}

#[test]
fn a_load_into_memory_of_others_is_refused() {
    let Some(double) = Rig::double(scheduled(swcuda::Schedule::Eager)) else { return };
    let gpu = CudaDevice::open(0).unwrap();
    let synthetic = Synthetic::new(5, 2, 4_000, |_, file| file);
    let tensors = loaded(&gpu, &synthetic);
    let loader = Loader::new(Arc::new(gpu), TransferOptions::default());
    let mut loader = loader;
    let selected = synthetic.checkpoint.select(&Selection::default()).unwrap();
    let prepared = loader.prepare(synthetic.checkpoint.clone(), &selected).unwrap();
    let arena = Arena::device(Box::new(Lie(prepared.plan.arena_bytes)));
    refused(loader.load_into(&prepared, arena).map(drop));
    assert!(double.reports().is_empty(), "{:?}", double.reports());
    keeps_its_bytes(&tensors, &synthetic);
}
