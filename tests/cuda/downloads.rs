//! Downloads by themselves: several at once, given up half-way, in any order, or asked for what must not be done.

use std::ops::Range;

use vramp::Error;
use vramp::device::{Arena, CudaDevice, Device, Downloaded, Memory, Region, Stream, View};
use vramp::fallback::Fallbacks;
use vramp::memory::staging::StagingPool;
use vramp::testing::{Random, watched};

use super::{Rig, scheduled, schedules};

const BYTES: usize = 64 << 10;

fn stream(device: &dyn Device) -> (Box<dyn Stream>, StagingPool) {
    let pool = device.staging(2, BYTES, &Fallbacks::default()).unwrap();
    (device.stream(None, &Fallbacks::default()).unwrap(), pool)
}

/// A finished arena that holds `bytes`.
fn tensor(device: &dyn Device, bytes: &[u8]) -> View {
    let len = bytes.len() as u64;
    let (mut regions, written) = device.alloc(len).unwrap().carve(std::slice::from_ref(&(0..len))).unwrap();
    let mut region = regions.pop().unwrap();
    region.write(0, bytes).unwrap();
    Region::finish(region);
    written.view(0..len).unwrap()
}

/// The buffer is filled anew and the memory freed as soon as the download is gone: nothing may still write or read them.
#[test]
fn a_download_that_is_given_up_is_waited_for() {
    watched(|| {
        for schedule in schedules(6) {
            let rig = Rig::new(scheduled(schedule));
            let device = rig.device();
            let (mut stream, pool) = stream(&*device);
            for round in 0..8u8 {
                let mut buffers: Vec<_> = std::iter::from_fn(|| pool.acquire()).collect();
                assert_eq!(buffers.len(), 2, "a given-up download gives its buffer back");
                for buffer in &mut buffers {
                    buffer.bytes_mut().fill(round);
                    assert!(buffer.bytes().iter().all(|&byte| byte == round), "{schedule:?}");
                }
                let views = || vec![(3, tensor(&*device, &[round; 40_000])), (50_000, tensor(&*device, &[7; 9000]))];
                let downloads: Vec<_> =
                    buffers.into_iter().map(|buffer| stream.download(buffer, views()).unwrap()).collect();
                drop(downloads);
            }
        }
    });
}

/// Each waits for its own copies alone; the tensors go as soon as their downloads are over.
#[test]
fn downloads_may_be_waited_for_in_any_order() {
    watched(|| {
        for schedule in schedules(6) {
            let rig = Rig::new(scheduled(schedule));
            let device = rig.device();
            let (mut stream, pool) = stream(&*device);
            let mut start = |value: u8| {
                let view = tensor(&*device, &[value; 50_000]);
                (value, stream.download(pool.acquire().unwrap(), vec![(7, view)]).unwrap())
            };
            let downloads = [start(3), start(5)];
            for (value, download) in downloads.into_iter().rev() {
                let Downloaded { buffer, views } = download.finish().unwrap();
                assert_eq!((views.len(), views[0].0, views[0].1.len()), (1, 7, 50_000));
                assert!(buffer.bytes()[7..50_007].iter().all(|&byte| byte == value), "{schedule:?}");
            }
            assert_eq!(rig.pageable_copies(), 0);
        }
    });
}

/// What lies side by side in VRAM and in the buffer is one copy; what only one side has side by side is not.
#[test]
fn neighbours_are_copied_together() {
    let Some(double) = Rig::double(scheduled(swcuda::Schedule::Lazy)) else { return };
    let device = CudaDevice::open(0).unwrap();
    let (mut stream, pool) = stream(&device);
    let bytes = Random::new(9).bytes(8192);
    let view = tensor(&device, &bytes);
    let other = tensor(&device, &bytes);
    let part = |at: u64, range: Range<u64>| (at, view.part(range).unwrap());
    let apart = [part(0, 0..100), part(100, 100..300), part(300, 4000..4100), part(500, 4100..4200)];
    let next = [part(700, 8000..8192), (892, other.part(0..50).unwrap()), part(942, 0..0), part(942, 50..60)];
    let views: Vec<(u64, View)> = apart.into_iter().chain(next).collect();
    let before = double.stats().devices[0].d2h.copies;
    let Downloaded { buffer, views } = stream.download(pool.acquire().unwrap(), views).unwrap().finish().unwrap();
    assert_eq!(double.stats().devices[0].d2h.copies - before, 6);
    for (at, view) in views {
        let (at, range) = (usize::try_from(at).unwrap(), view.range());
        let len = usize::try_from(view.len()).unwrap();
        let from = usize::try_from(range.start).unwrap();
        assert!(buffer.bytes()[at..at + len] == bytes[from..from + len], "{len} bytes at {at}");
    }
}

/// Memory of another program's making: it says how long it is, and must never become an address.
struct Lie;

impl Memory for Lie {
    fn len(&self) -> u64 {
        1 << 20
    }

    fn download(&self, _: Range<u64>, _: &mut [u8]) -> Result<(), Error> {
        Ok(())
    }
}

#[test]
fn what_leaves_the_buffer_or_is_not_the_gpus_is_not_started() {
    let Some(double) = Rig::double(scheduled(swcuda::Schedule::Lazy)) else { return };
    let device = CudaDevice::open(0).unwrap();
    let (mut stream, pool) = stream(&device);
    let view = tensor(&device, &[1; 100]);
    let (_, written) = Arena::device(Box::new(Lie)).carve(&[]).unwrap();
    let lie = written.view(0..64).unwrap();
    let host = tensor(&*vramp::device::open("cpu").unwrap(), &[1; 64]);
    let before = double.stats().devices[0].d2h.copies;
    let good = || (0, view.clone());
    for (what, bad) in [
        ("bytes after the buffer", (BYTES as u64 - 99, view.clone())),
        ("no such place", (u64::MAX - 5, view.clone())),
        ("memory of others", (200, lie)),
        ("host memory", (200, host)),
    ] {
        assert!(stream.download(pool.acquire().unwrap(), vec![good(), bad]).is_err(), "{what}");
    }
    assert_eq!((double.stats().devices[0].d2h.copies, pool.available()), (before, 2));
}

/// The GPU may still write to what a copy that cannot be waited for was to fill: its memory is never freed.
#[test]
fn memory_whose_last_copy_cannot_be_waited_for_is_not_freed() {
    let Some(double) = Rig::double(scheduled(swcuda::Schedule::Lazy)) else { return };
    double.inject(swcuda::Fault::Async { nth: 1, code: 719 });
    double.allow_leaks();
    let device = CudaDevice::open(0).unwrap();
    let (mut regions, written) = device.alloc(9000).unwrap().carve(std::slice::from_ref(&(0..9000))).unwrap();
    let refused = regions[0].write(0, &[7; 9000]);
    assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
    drop((regions, written));
    assert!(!double.calls().contains_key("cuMemFree_v2"), "{:?}", double.calls());
    assert!(double.reports().is_empty(), "{:?}", double.reports());
}
