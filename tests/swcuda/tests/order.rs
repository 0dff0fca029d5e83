//! Mistakes of order: who touches which bytes when. For every report the smallest program that earns it, under several
//! schedules, and the correct one beside it.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::ffi::c_void;

use support::{
    Code, alloc, begin, destroy, download, earns, end, event, free, free_pinned, host, is_clean, kinds, pinned, stream,
    upload,
};
use swcuda::{Config, Double, Schedule};

const BYTES: usize = 8192;

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
