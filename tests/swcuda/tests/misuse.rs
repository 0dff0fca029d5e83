//! Every kind of report: the smallest program that earns it, under each schedule, and the correct one beside it.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::ffi::c_void;

use support::{
    Code, alloc, begin, destroy, end, event, free, free_pinned, has, host, kinds, pinned, schedules, stream,
};
use swcuda::{Config, Double, Schedule};

const BYTES: usize = 8192;

/// Runs `program` under each schedule and expects reports of `kind` and of no other.
fn earns(kind: &str, program: impl Fn(&Double)) {
    for config in schedules().into_iter().take(4) {
        let schedule = config.schedule;
        let double = Double::acquire(config);
        begin(0);
        program(&double);
        assert!(double.settle());
        let reports = double.reports();
        assert_eq!(kinds(&reports), [kind], "{schedule:?}: {reports:?}");
        end(0);
    }
}

/// Runs `program` under each schedule and expects no report.
fn is_clean(program: impl Fn(&Double)) {
    for config in schedules() {
        let double = Double::acquire(config);
        begin(0);
        program(&double);
        end(0);
    }
}

fn upload(target: u64, source: *mut u8, bytes: usize, stream: *mut cudarc::driver::sys::CUstream_st) {
    call!(cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, stream)).unwrap();
}

fn download(target: *mut u8, source: u64, bytes: usize, stream: *mut cudarc::driver::sys::CUstream_st) {
    call!(cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, stream)).unwrap();
}

#[test]
fn race_on_device_memory() {
    earns("RACE", |_| {
        let (a, b, target) = (stream(), stream(), alloc(BYTES));
        call!(cuMemsetD8Async(target, 1, BYTES, a)).unwrap();
        call!(cuMemsetD8Async(target + 100, 2, 50, b)).unwrap();
        call!(cuCtxSynchronize()).unwrap();
        destroy(&[a, b]);
        free(target);
    });
    is_clean(|_| {
        let (a, b, target, done) = (stream(), stream(), alloc(BYTES), event());
        call!(cuMemsetD8Async(target, 1, BYTES / 2, a)).unwrap();
        call!(cuMemsetD8Async(target + BYTES as u64 / 2, 2, BYTES / 2, b)).unwrap();
        call!(cuEventRecord(done, a)).unwrap();
        call!(cuStreamWaitEvent(b, done, 0)).unwrap();
        call!(cuMemsetD8Async(target, 3, BYTES, b)).unwrap();
        call!(cuStreamSynchronize(b)).unwrap();
        destroy(&[a, b]);
        call!(cuEventDestroy_v2(done)).unwrap();
        free(target);
    });
}

#[test]
fn race_on_pinned_memory() {
    earns("RACE", |_| {
        let (a, b, device, buffer) = (stream(), stream(), alloc(BYTES), pinned(BYTES));
        call!(cuMemsetD8_v2(device, 7, BYTES)).unwrap();
        download(buffer, device, BYTES, a);
        download(buffer, device, BYTES, b);
        call!(cuCtxSynchronize()).unwrap();
        destroy(&[a, b]);
        free_pinned(buffer);
        free(device);
    });
}

#[test]
fn rows_that_interleave_are_no_race_and_rows_that_meet_are() {
    let rows = |device: u64, buffer: *mut u8, stream, x: usize, width: usize| {
        let mut copy = support::rows(device, buffer);
        copy.srcPitch = width;
        copy.dstXInBytes = x;
        copy.dstPitch = 64;
        copy.WidthInBytes = width;
        copy.Height = 16;
        call!(cuMemcpy2DAsync_v2(&copy, stream))
    };
    let both = |width: usize| {
        let (a, b, device, buffers) = (stream(), stream(), alloc(1024), [pinned(1024), pinned(1024)]);
        host(buffers[0], 1024).fill(1);
        host(buffers[1], 1024).fill(2);
        rows(device, buffers[0], a, 0, width).unwrap();
        rows(device, buffers[1], b, 32, 32).unwrap();
        call!(cuCtxSynchronize()).unwrap();
        let mut out = [0_u8; 1024];
        call!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), device, 1024)).unwrap();
        destroy(&[a, b]);
        buffers.into_iter().for_each(free_pinned);
        free(device);
        out
    };
    is_clean(|_| {
        let out = both(32);
        assert!(out.chunks(64).all(|row| row[..32] == [1; 32] && row[32..] == [2; 32]));
    });
    earns("RACE", |_| {
        both(33);
    });
}

#[test]
fn source_changed_while_a_copy_is_pending() {
    let config = Config::default().schedule(Schedule::Lazy);
    let double = Double::acquire(config.clone());
    begin(0);
    let program = || {
        let (stream, device, buffer) = (stream(), alloc(BYTES), pinned(BYTES));
        host(buffer, BYTES).fill(1);
        upload(device, buffer, BYTES, stream);
        host(buffer, BYTES)[77] = 2;
        call!(cuStreamSynchronize(stream)).unwrap();
        destroy(&[stream]);
        free_pinned(buffer);
        free(device);
    };
    program();
    let reports = double.reports();
    assert_eq!(kinds(&reports), ["SOURCE_CHANGED"]);
    assert!(reports[0].contains("byte 77"), "{reports:?}");
    end(0);
    drop(double);
    let double = Double::acquire(Config { check_sources: false, ..config });
    begin(0);
    program();
    end(0);
    drop(double);
}

#[test]
fn a_round_trip_through_one_buffer_in_one_stream_is_allowed() {
    is_clean(|_| {
        let (stream, device, buffer) = (stream(), alloc(BYTES), pinned(BYTES));
        host(buffer, BYTES).fill(5);
        upload(device, buffer, BYTES, stream);
        download(buffer, device, BYTES, stream);
        upload(device, buffer, BYTES, stream);
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(host(buffer, BYTES), [5; BYTES]);
        destroy(&[stream]);
        free_pinned(buffer);
        free(device);
    });
}

#[test]
fn a_target_is_poison_until_the_copy_is_done() {
    let double = Double::acquire(Config::default().schedule(Schedule::Lazy));
    begin(0);
    let (stream, device, buffer) = (stream(), alloc(BYTES), pinned(BYTES));
    call!(cuMemsetD8_v2(device, 9, BYTES)).unwrap();
    download(buffer, device, BYTES, stream);
    assert_eq!(host(buffer, BYTES), [0xDB; BYTES]);
    call!(cuStreamSynchronize(stream)).unwrap();
    assert_eq!(host(buffer, BYTES), [9; BYTES]);
    destroy(&[stream]);
    free_pinned(buffer);
    free(device);
    end(0);
    drop(double);
}

#[test]
fn uninitialised_read() {
    earns("UNINITIALISED_READ", |_| {
        let (device, mut out) = (alloc(BYTES), vec![0_u8; BYTES]);
        call!(cuMemsetD8_v2(device, 1, BYTES - 1)).unwrap();
        call!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), device, BYTES)).unwrap();
        assert_eq!(out[BYTES - 2..], [1, 0xA5]);
        free(device);
    });
    // A large allocation is not filled when it is made, but when it is read.
    earns("UNINITIALISED_READ", |double| {
        let (device, mut out) = (alloc(20 << 20), [0_u8; 4]);
        call!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), device + (19 << 20), 4)).unwrap();
        assert_eq!(out, [0xA5; 4]);
        assert_eq!(double.read(device, 3), [0xA5; 3]);
        free(device);
    });
}

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

#[test]
fn pageable_copies_block_and_are_reported_on_demand() {
    let double = Double::acquire(Config { pageable_is_error: true, ..Config::default().schedule(Schedule::Lazy) });
    begin(0);
    let (device, memory, stream) = (alloc(BYTES), vec![8_u8; BYTES], stream());
    call!(cuMemcpyHtoDAsync_v2(device, memory.as_ptr().cast(), BYTES, stream)).unwrap();
    assert_eq!(double.read(device, BYTES), memory, "done when the call returns");
    assert_eq!(kinds(&double.reports()), ["PAGEABLE"]);
    let stats = double.stats();
    assert_eq!((stats.pageable_copies, stats.pageable_bytes), (1, BYTES as u64));
    destroy(&[stream]);
    free(device);
    end(0);
}

#[test]
fn callbacks_must_not_call_the_driver() {
    unsafe extern "C" fn wrong(answer: *mut c_void) {
        let refused = get!(cuMemAlloc_v2(64)).map(|_: u64| ());
        // SAFETY: the test passes its own variable and waits.
        unsafe { *answer.cast() = refused };
    }
    earns("CALLBACK", |_| {
        let stream = stream();
        let mut answer: support::Answer = Ok(());
        call!(cuLaunchHostFunc(stream, Some(wrong), (&raw mut answer).cast())).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(answer, Err(Code::CUDA_ERROR_NOT_PERMITTED));
        destroy(&[stream]);
    });
}

#[test]
fn a_third_party_write_races_with_what_is_in_flight() {
    earns("RACE", |double| {
        let (device, stream) = (alloc(BYTES), stream());
        call!(cuMemsetD8Async(device, 1, BYTES, stream)).unwrap();
        double.dma_write(device + 10, &[7; 20]).unwrap();
        call!(cuStreamSynchronize(stream)).unwrap();
        destroy(&[stream]);
        free(device);
    });
    is_clean(|double| {
        let (device, stream, buffer) = (alloc(BYTES), stream(), pinned(BYTES));
        double.dma_write(device, &[7; BYTES]).unwrap();
        download(buffer, device, BYTES, stream);
        call!(cuStreamSynchronize(stream)).unwrap();
        assert_eq!(host(buffer, BYTES), [7; BYTES]);
        assert_eq!((double.stats().dma_writes, double.stats().dma_bytes), (1, BYTES as u64));
        destroy(&[stream]);
        free_pinned(buffer);
        free(device);
    });
    earns("OUT_OF_BOUNDS", |double| {
        let device = alloc(16);
        assert_eq!(double.dma_write(device, &[0; 17]), Err(1));
        free(device);
    });
}
