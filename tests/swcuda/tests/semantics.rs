//! Programs that are right: that streams, events, copies and attributes do what the driver's manual says.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::sys::CUpointer_attribute_enum as Pointer;
use support::{Code, alloc, begin, destroy, end, event, free, free_pinned, host, pinned, schedules, stream};
use swcuda::{Config, Double, Schedule};

const BYTES: usize = 4096;

fn lazy() -> Config {
    Config::default().schedule(Schedule::Lazy)
}

#[test]
fn lazy_work_runs_when_something_waits_for_it_and_not_before() {
    let double = Double::acquire(Config { lazy_limit: Duration::from_secs(600), ..lazy() });
    begin(0);
    let (stream, device, done) = (stream(), alloc(BYTES), event());
    let waits: [&dyn Fn(); 5] = [
        &|| call!(cuStreamSynchronize(stream)).unwrap(),
        &|| call!(cuEventSynchronize(done)).unwrap(),
        &|| call!(cuCtxSynchronize()).unwrap(),
        &|| while call!(cuStreamQuery(stream)).is_err() {},
        &|| while call!(cuEventQuery(done)).is_err() {},
    ];
    for (round, wait) in waits.into_iter().enumerate() {
        call!(cuMemsetD8Async(device, round as u8 + 1, BYTES, stream)).unwrap();
        call!(cuEventRecord(done, stream)).unwrap();
        // Three questions are no wait.
        for _ in 0..3 {
            assert_eq!(call!(cuEventQuery(done)), Err(Code::CUDA_ERROR_NOT_READY));
        }
        assert_eq!(double.live().queued, 2);
        wait();
        assert_eq!(double.read(device, 1), [round as u8 + 1]);
    }
    destroy(&[stream]);
    call!(cuEventDestroy_v2(done)).unwrap();
    free(device);
    end(0);
}

#[test]
fn lazy_work_that_nobody_waits_for_runs_after_the_limit() {
    let config = Config { lazy_limit: Duration::from_millis(1), ..lazy() };
    let double = Double::acquire(config);
    begin(0);
    let (stream, device) = (stream(), alloc(BYTES));
    call!(cuMemsetD8Async(device, 1, BYTES, stream)).unwrap();
    while double.live().queued > 0 {
        std::thread::yield_now();
    }
    call!(cuStreamSynchronize(stream)).unwrap();
    destroy(&[stream]);
    free(device);
    end(0);
}

#[test]
fn a_wait_is_for_the_recording_that_was_current() {
    for config in schedules() {
        let double = Double::acquire(config);
        begin(0);
        let (a, b, device, done) = (stream(), stream(), alloc(BYTES), event());
        call!(cuStreamWaitEvent(b, done, 0)).unwrap();
        call!(cuMemsetD8Async(device, 1, BYTES, a)).unwrap();
        call!(cuEventRecord(done, a)).unwrap();
        call!(cuStreamWaitEvent(b, done, 0)).unwrap();
        call!(cuMemsetD8Async(device, 2, BYTES, b)).unwrap();
        call!(cuEventRecord(done, b)).unwrap();
        call!(cuEventSynchronize(done)).unwrap();
        assert_eq!(double.read(device, BYTES), [2; BYTES]);
        destroy(&[a, b]);
        call!(cuEventDestroy_v2(done)).unwrap();
        free(device);
        end(0);
    }
}

#[test]
fn the_default_stream_is_ordered_with_blocking_streams_only() {
    let program = |flags: u32| {
        let (stream, device) = (get!(cuStreamCreate(flags)).unwrap(), alloc(BYTES));
        call!(cuMemsetD8Async(device, 1, BYTES, stream)).unwrap();
        call!(cuMemsetD8Async(device, 2, BYTES, std::ptr::null_mut())).unwrap();
        call!(cuMemsetD8Async(device, 3, BYTES, stream)).unwrap();
        call!(cuCtxSynchronize()).unwrap();
        destroy(&[stream]);
        device
    };
    for config in schedules() {
        let double = Double::acquire(config);
        begin(0);
        let device = program(0);
        assert_eq!(double.read(device, BYTES), [3; BYTES]);
        free(device);
        assert!(double.reports().is_empty());
        free(program(1));
        assert!(support::has(&double.reports(), "RACE"));
        end(0);
    }
}

#[test]
fn a_destroyed_stream_still_does_its_work() {
    for config in schedules() {
        let double = Double::acquire(config);
        begin(0);
        let (stream, device) = (stream(), alloc(BYTES));
        call!(cuMemsetD8Async(device, 5, BYTES, stream)).unwrap();
        destroy(&[stream]);
        assert!(double.settle());
        assert_eq!(double.read(device, BYTES), [5; BYTES]);
        call!(cuCtxSynchronize()).unwrap();
        free(device);
        end(0);
    }
}

#[test]
fn streams_call_functions_in_their_order() {
    static STEP: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn step(expected: *mut c_void) {
        let before = STEP.fetch_add(1, Ordering::SeqCst);
        assert_eq!(before as usize, expected as usize);
    }
    for config in schedules() {
        let _double = Double::acquire(config);
        begin(0);
        let stream = stream();
        STEP.store(0, Ordering::SeqCst);
        for expected in 0..5_usize {
            call!(cuLaunchHostFunc(stream, Some(step), expected as *mut c_void)).unwrap();
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(STEP.load(Ordering::SeqCst), 5);
        destroy(&[stream]);
        end(0);
    }
}

#[test]
fn rows_go_where_their_pitches_say() {
    let double = Double::acquire(Config::default());
    begin(0);
    let (device, buffer, stream) = (alloc(1000), pinned(300), stream());
    host(buffer, 300).iter_mut().zip(0_usize..).for_each(|(byte, value)| *byte = value as u8);
    call!(cuMemsetD8_v2(device, 0, 1000)).unwrap();
    let mut copy = support::rows(device, buffer);
    (copy.srcPitch, copy.srcXInBytes, copy.srcY) = (10, 2, 1);
    (copy.dstPitch, copy.dstXInBytes, copy.dstY) = (100, 50, 2);
    (copy.WidthInBytes, copy.Height) = (5, 4);
    call!(cuMemcpy2DAsync_v2(&copy, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    let bytes = double.read(device, 1000);
    for (at, byte) in bytes.into_iter().enumerate() {
        let (row, column) = (at / 100, at % 100);
        let inside = (2..6).contains(&row) && (50..55).contains(&column);
        let expected = if inside { (row - 2 + 1) * 10 + 2 + column - 50 } else { 0 };
        assert_eq!(usize::from(byte), expected, "byte {at}");
    }
    copy.WidthInBytes = 11;
    assert_eq!(call!(cuMemcpy2DAsync_v2(&copy, stream)), Err(Code::CUDA_ERROR_INVALID_VALUE));
    copy.WidthInBytes = 0;
    call!(cuMemcpy2DAsync_v2(&copy, stream)).unwrap();
    destroy(&[stream]);
    free_pinned(buffer);
    free(device);
    end(0);
}

#[test]
fn fills_and_copies_within_a_device() {
    let double = Double::acquire(lazy());
    begin(0);
    let (device, other, stream) = (alloc(64), alloc(64), stream());
    call!(cuMemsetD32Async(device, 0x0102_0304, 16, stream)).unwrap();
    call!(cuMemcpyDtoDAsync_v2(other, device, 64, stream)).unwrap();
    assert_eq!(call!(cuMemsetD32Async(device + 2, 0, 1, stream)), Err(Code::CUDA_ERROR_INVALID_VALUE));
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(double.read(other, 8), [4, 3, 2, 1, 4, 3, 2, 1]);
    assert_eq!((double.stats().fills, double.stats().device_copies), (1, 1));
    destroy(&[stream]);
    free(device);
    free(other);
    end(0);
}

#[test]
fn pointers_know_what_they_are() {
    let _double = Double::acquire(Config::default());
    let context = begin(0);
    let (device, buffer, mut plain) = (alloc(BYTES), pinned(BYTES), 0_u8);
    let describe = |address: u64| {
        let (mut kind, mut owner, mut start, mut bytes) = (7_u32, 7_u64, 7_u64, 7_usize);
        let mut attributes = [
            Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Pointer::CU_POINTER_ATTRIBUTE_CONTEXT,
            Pointer::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Pointer::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut targets: [*mut c_void; 4] =
            [(&raw mut kind).cast(), (&raw mut owner).cast(), (&raw mut start).cast(), (&raw mut bytes).cast()];
        call!(cuPointerGetAttributes(4, attributes.as_mut_ptr(), targets.as_mut_ptr(), address)).unwrap();
        (kind, owner, start, bytes)
    };
    assert_eq!(describe(device + 7), (2, context as u64, device, BYTES));
    assert_eq!(describe(buffer as u64 + 7), (1, context as u64, buffer as u64, BYTES));
    assert_eq!(describe(&raw const plain as u64), (0, 0, 0, 0));
    let one = call!(cuPointerGetAttribute(
        (&raw mut plain).cast(),
        Pointer::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        &raw const plain as u64
    ));
    assert_eq!(one, Err(Code::CUDA_ERROR_INVALID_VALUE));
    let (mut base, mut size) = (0, 0);
    call!(cuMemGetAddressRange_v2(&mut base, &mut size, device + 100)).unwrap();
    assert_eq!((base, size), (device, BYTES));
    assert_eq!(get!(cuMemHostGetDevicePointer_v2(buffer.cast(), 0)), Ok(buffer as u64));
    free_pinned(buffer);
    free(device);
    end(0);
}

#[test]
fn entry_points_are_found_by_name() {
    let _double = Double::acquire(Config::default());
    let find = |name: &std::ffi::CStr| {
        let (mut address, mut status) = (
            std::ptr::null_mut(),
            cudarc::driver::sys::CUdriverProcAddressQueryResult_enum::CU_GET_PROC_ADDRESS_SUCCESS,
        );
        let answer = call!(cuGetProcAddress_v2(name.as_ptr(), &mut address, 12000, 0, &mut status));
        (answer, address.is_null())
    };
    assert_eq!(find(c"cuMemAlloc"), (Ok(()), false));
    assert_eq!(find(c"cuInit"), (Ok(()), false));
    assert_eq!(find(c"cuFlyToTheMoon"), (Err(Code::CUDA_ERROR_NOT_FOUND), true));
}

#[test]
fn events_measure_time_if_they_may() {
    let _double = Double::acquire(Config { h2d_bytes_per_s: Some(1e6), ..Config::default() });
    begin(0);
    let (stream, device, buffer) = (stream(), alloc(BYTES), pinned(BYTES));
    let [from, to]: [cudarc::driver::sys::CUevent; 2] = [(); 2].map(|()| get!(cuEventCreate(0)).unwrap());
    assert_eq!(get!(cuEventElapsedTime(from, to)), Err::<f32, _>(Code::CUDA_ERROR_INVALID_HANDLE), "not recorded");
    call!(cuEventRecord(from, stream)).unwrap();
    call!(cuMemcpyHtoDAsync_v2(device, buffer.cast(), BYTES, stream)).unwrap();
    call!(cuEventRecord(to, stream)).unwrap();
    call!(cuEventSynchronize(to)).unwrap();
    let milliseconds: f32 = get!(cuEventElapsedTime(from, to)).unwrap();
    assert!(milliseconds > 3.5, "4096 bytes at 1 MB/s took {milliseconds} ms");
    let coarse = event();
    call!(cuEventRecord(coarse, stream)).unwrap();
    call!(cuEventSynchronize(coarse)).unwrap();
    assert_eq!(get!(cuEventElapsedTime(from, coarse)), Err::<f32, _>(Code::CUDA_ERROR_INVALID_HANDLE));
    for event in [from, to, coarse] {
        call!(cuEventDestroy_v2(event)).unwrap();
    }
    destroy(&[stream]);
    free_pinned(buffer);
    free(device);
    end(0);
}

#[test]
fn modules_that_cannot_run_are_refused() {
    let double = Double::acquire(Config { compute: (7, 5), ..Config::default() });
    begin(0);
    let load = |image: &[u8]| get!(cuModuleLoadData(image.as_ptr().cast())).map(|_: cudarc::driver::sys::CUmodule| ());
    assert_eq!(load(b".version 8.1\n.target sm_75\n\0"), Err(Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION));
    assert_eq!(load(b".version 8.0\n.target sm_80\n\0"), Err(Code::CUDA_ERROR_NO_BINARY_FOR_GPU));
    assert_eq!(load(b"hello\0"), Err(Code::CUDA_ERROR_INVALID_IMAGE));
    assert!(double.reports().is_empty());
    assert_eq!(load(b"\x7fELF...."), Err(Code::CUDA_ERROR_NO_BINARY_FOR_GPU));
    assert_eq!(support::kinds(&double.reports()), ["UNSUPPORTED"]);
    let nonsense = b".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k() { frobnicate.u32 %r1; ret; }\0";
    assert_eq!(load(nonsense), Err(Code::CUDA_ERROR_INVALID_PTX));
    assert_eq!(support::kinds(&double.reports()), ["PTX"]);
    end(0);
}
