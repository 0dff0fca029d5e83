//! Mistakes of life and of bounds: what is used after its end, before its time, or where it is not. For every report the
//! smallest program that earns it, under several schedules, and the correct one beside it.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::ffi::c_void;

use support::{
    Code, alloc, begin, destroy, earns, end, event, free, free_pinned, has, is_clean, kinds, pinned, stream, upload,
};
use swcuda::{Config, Double};

const BYTES: usize = 8192;

#[test]
fn free_in_flight_of_device_memory() {
    earns("FREE_IN_FLIGHT", |_| {
        let (stream, device) = (stream(), alloc(BYTES));
        call!(cuMemsetD8Async(device, 1, BYTES, stream)).unwrap();
        free(device);
        destroy(&[stream]);
    });
    is_clean(|_| {
        let (stream, device, done) = (stream(), alloc(BYTES), event());
        call!(cuMemsetD8Async(device, 1, BYTES, stream)).unwrap();
        call!(cuEventRecord(done, stream)).unwrap();
        while call!(cuEventQuery(done)) == Err(Code::CUDA_ERROR_NOT_READY) {
            std::thread::yield_now();
        }
        free(device);
        call!(cuEventDestroy_v2(done)).unwrap();
        destroy(&[stream]);
    });
}

#[test]
fn free_in_flight_in_stream_order() {
    let program = |ordered: bool| {
        let (a, b, done) = (stream(), stream(), event());
        let device = get!(cuMemAllocAsync(BYTES, a)).unwrap();
        call!(cuMemsetD8Async(device, 1, BYTES, a)).unwrap();
        if ordered {
            call!(cuEventRecord(done, a)).unwrap();
            call!(cuStreamWaitEvent(b, done, 0)).unwrap();
        }
        call!(cuMemFreeAsync(device, b)).unwrap();
        call!(cuCtxSynchronize()).unwrap();
        destroy(&[a, b]);
        call!(cuEventDestroy_v2(done)).unwrap();
    };
    is_clean(|_| program(true));
    let double = Double::acquire(Config::default());
    begin(0);
    program(false);
    assert!(has(&double.reports(), "FREE_IN_FLIGHT"));
    end(0);
}

#[test]
fn free_in_flight_of_pinned_and_registered_memory() {
    earns("FREE_IN_FLIGHT", |_| {
        let (stream, device, buffer) = (stream(), alloc(BYTES), pinned(BYTES));
        upload(device, buffer, BYTES, stream);
        free_pinned(buffer);
        call!(cuStreamSynchronize(stream)).unwrap();
        destroy(&[stream]);
        free(device);
    });
    let registered = |wait: bool| {
        let (stream, device, mut memory) = (stream(), alloc(BYTES), vec![3_u8; BYTES]);
        call!(cuMemHostRegister_v2(memory.as_mut_ptr().cast(), BYTES, 1)).unwrap();
        upload(device, memory.as_mut_ptr(), BYTES, stream);
        if wait {
            call!(cuStreamSynchronize(stream)).unwrap();
        }
        call!(cuMemHostUnregister(memory.as_mut_ptr().cast())).unwrap();
        memory.fill(4);
        call!(cuStreamSynchronize(stream)).unwrap();
        destroy(&[stream]);
        free(device);
    };
    earns("FREE_IN_FLIGHT", |_| registered(false));
    is_clean(|_| registered(true));
}

#[test]
fn double_free() {
    earns("DOUBLE_FREE", |_| {
        let (device, buffer, stream) = (alloc(BYTES), pinned(BYTES), stream());
        free(device);
        assert_eq!(call!(cuMemFree_v2(device)), Err(Code::CUDA_ERROR_INVALID_VALUE));
        free_pinned(buffer);
        assert_eq!(call!(cuMemFreeHost(buffer.cast())), Err(Code::CUDA_ERROR_INVALID_VALUE));
        let pooled = get!(cuMemAllocAsync(BYTES, stream)).unwrap();
        call!(cuMemFreeAsync(pooled, stream)).unwrap();
        assert!(call!(cuMemFreeAsync(pooled, stream)).is_err());
        destroy(&[stream]);
    });
}

#[test]
fn bad_free() {
    earns("BAD_FREE", |_| {
        let (device, mut memory, stream) = (alloc(BYTES), [0_u8; 64], stream());
        assert!(call!(cuMemFree_v2(device + 16)).is_err());
        assert!(call!(cuMemFreeHost(memory.as_mut_ptr().cast())).is_err());
        assert!(call!(cuMemFreeAsync(device, stream)).is_err(), "not of cuMemAllocAsync");
        destroy(&[stream]);
        free(device);
    });
    is_clean(|_| call!(cuMemFree_v2(0)).unwrap());
}

#[test]
fn use_after_free() {
    earns("USE_AFTER_FREE", |_| {
        let (device, other, buffer) = (alloc(BYTES), alloc(BYTES), pinned(BYTES));
        free(device);
        assert_eq!(call!(cuMemsetD8_v2(device + 5, 0, 1)), Err(Code::CUDA_ERROR_INVALID_VALUE));
        free_pinned(buffer);
        assert!(call!(cuMemcpyHtoD_v2(other, buffer.cast(), BYTES)).is_err());
        free(other);
    });
}

#[test]
fn a_range_that_was_registered_once_is_plain_memory() {
    is_clean(|double| {
        let (device, mut memory) = (alloc(BYTES), vec![3_u8; BYTES]);
        let address: *mut c_void = memory.as_mut_ptr().cast();
        call!(cuMemHostRegister_v2(address, BYTES, 1)).unwrap();
        assert_eq!(double.live().pins, 1);
        call!(cuMemHostUnregister(address)).unwrap();
        let before = double.stats().pageable_copies;
        call!(cuMemcpyHtoDAsync_v2(device, address, BYTES, std::ptr::null_mut())).unwrap();
        assert_eq!(double.stats().pageable_copies, before + 1);
        assert_eq!(double.read(device, BYTES), memory);
        free(device);
    });
}

#[test]
fn out_of_bounds() {
    earns("OUT_OF_BOUNDS", |_| {
        let (device, mut out, buffer) = (alloc(BYTES), vec![0_u8; BYTES], pinned(BYTES));
        assert!(call!(cuMemsetD8_v2(device + 1, 0, BYTES)).is_err());
        assert!(call!(cuMemsetD8_v2(device + BYTES as u64, 0, 1)).is_err());
        assert!(call!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), device + 8, BYTES)).is_err());
        // No report for what is no range at all.
        assert!(call!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), device, usize::MAX)).is_err());
        // Half in pinned memory, half behind it.
        assert!(call!(cuMemcpyHtoD_v2(device, buffer.wrapping_add(1).cast(), BYTES)).is_err());
        free_pinned(buffer);
        free(device);
    });
}

#[test]
fn wild_pointer() {
    earns("WILD_POINTER", |_| {
        let device = alloc(BYTES);
        let mut out = [0_u8; 8];
        assert!(call!(cuMemsetD8_v2(device - (1 << 30), 0, 1)).is_err());
        assert!(call!(cuMemsetD8_v2(out.as_mut_ptr() as u64, 0, 1)).is_err());
        assert!(call!(cuMemcpyHtoD_v2(device, std::ptr::null(), 8)).is_err());
        assert!(call!(cuMemcpyDtoH_v2(device as *mut c_void, device, 8)).is_err());
        free(device);
    });
}

#[test]
fn wrong_context() {
    earns("WRONG_CONTEXT", |_| {
        std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| {
                assert_eq!(get!(cuMemAlloc_v2(64)), Err::<u64, _>(Code::CUDA_ERROR_INVALID_CONTEXT));
                assert_eq!(call!(cuCtxSynchronize()), Err(Code::CUDA_ERROR_INVALID_CONTEXT));
            });
            elsewhere.join().unwrap();
        });
    });
}

#[test]
fn bad_handle() {
    earns("BAD_HANDLE", |_| {
        let (stream, event) = (stream(), event());
        destroy(&[stream]);
        assert_eq!(call!(cuStreamSynchronize(stream)), Err(Code::CUDA_ERROR_INVALID_HANDLE));
        call!(cuEventDestroy_v2(event)).unwrap();
        assert_eq!(call!(cuEventQuery(event)), Err(Code::CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(call!(cuEventQuery(0x1234 as _)), Err(Code::CUDA_ERROR_INVALID_HANDLE));
    });
}

#[test]
fn leaks_at_the_end_of_a_context() {
    let double = Double::acquire(Config::default());
    begin(0);
    let mut memory = vec![0_u8; BYTES];
    call!(cuMemHostRegister_v2(memory.as_mut_ptr().cast(), BYTES, 1)).unwrap();
    let _left = (alloc(BYTES), pinned(BYTES), stream(), event());
    assert_eq!(double.leaks().len(), 5);
    end(0);
    let reports = double.reports();
    assert_eq!((reports.len(), kinds(&reports)), (5, vec!["LEAK".to_owned()]));
    drop(double);
}
