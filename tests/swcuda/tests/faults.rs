//! Failures made to order, sticky errors, and the double after a test that failed.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use support::{Answer, Code, alloc, begin, end, event, fill, free, free_pinned, host, pinned, stream};
use swcuda::{Config, Double, Fault, Live, Schedule};

const BYTES: usize = 4096;

#[test]
fn the_nth_call_of_a_name_fails() {
    let double = Double::acquire(Config::default());
    begin(0);
    free(alloc(BYTES));
    double.inject(Fault::Call { name: "cuMemAlloc".to_owned(), nth: 2, code: 2 });
    let first = alloc(BYTES);
    assert_eq!(get!(cuMemAlloc_v2(BYTES)), Err::<u64, _>(Code::CUDA_ERROR_OUT_OF_MEMORY));
    free(alloc(BYTES));
    free(first);
    end(0);
}

#[test]
fn a_call_that_gives_back_does_so_even_when_it_fails() {
    let double = Double::acquire(Config::default());
    begin(0);
    let (device, stream) = (alloc(BYTES), stream());
    double.inject(Fault::Call { name: "cuMemFree_v2".to_owned(), nth: 1, code: 999 });
    double.inject(Fault::Call { name: "cuStreamDestroy_v2".to_owned(), nth: 1, code: 999 });
    assert_eq!(call!(cuMemFree_v2(device)), Err(Code::CUDA_ERROR_UNKNOWN));
    assert_eq!(call!(cuStreamDestroy_v2(stream)), Err(Code::CUDA_ERROR_UNKNOWN));
    assert_eq!(double.live(), Live { contexts: 1, ..Live::default() });
    end(0);
}

/// A program that gives back all that it got, whatever fails.
fn careful() -> Answer {
    call!(cuInit(0))?;
    let context = get!(cuDevicePrimaryCtxRetain(0))?;
    let answer = call!(cuCtxSetCurrent(context)).and_then(|()| {
        let stream = get!(cuStreamCreate(1))?;
        let answer = get!(cuMemAlloc_v2(BYTES)).and_then(|device| {
            let set = call!(cuMemsetD8Async(device, 1, BYTES, stream));
            // What the driver does not say is over must be waited for some other way.
            let waited = call!(cuStreamSynchronize(stream)).or_else(|_| call!(cuCtxSynchronize()));
            let freed = call!(cuMemFree_v2(device));
            set.and(waited).and(freed)
        });
        answer.and(call!(cuStreamDestroy_v2(stream)))
    });
    answer.and(call!(cuDevicePrimaryCtxRelease_v2(0)))
}

#[test]
fn any_call_can_be_made_to_fail_once() {
    let calls = {
        let double = Double::acquire(Config::default());
        careful().unwrap();
        double.call_count()
    };
    assert_eq!(calls, 10);
    for nth in 1..=calls {
        let double = Double::acquire(Config::default());
        double.inject(Fault::Any { nth, code: 46 });
        let failed = careful();
        // Only the wait can be made up for.
        let made_up = double.calls().contains_key("cuCtxSynchronize");
        assert_eq!(failed.is_ok(), made_up, "call {nth}");
        assert_eq!(double.live(), Live::default(), "call {nth}");
    }
}

#[test]
fn names_of_errors_are_calls_as_well() {
    let double = Double::acquire(Config::default());
    double.inject(Fault::Any { nth: 2, code: 1 });
    let code = Code::CUDA_ERROR_ECC_UNCORRECTABLE;
    let name: *const std::ffi::c_char = {
        let mut name = std::ptr::null();
        call!(cuGetErrorName(code, &mut name)).unwrap();
        name
    };
    // SAFETY: the name is static text.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(name) }, c"CUDA_ERROR_ECC_UNCORRECTABLE");
    let mut text = std::ptr::null();
    assert_eq!(call!(cuGetErrorString(code, &mut text)), Err(Code::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(double.calls()["cuGetErrorName"], 1);
    assert_eq!(double.call_count(), 2);
}

#[test]
fn an_operation_that_fails_later_sticks_to_its_device() {
    for schedule in [Schedule::Eager, Schedule::Lazy, Schedule::Random(3)] {
        for (number, code) in [
            (700, Code::CUDA_ERROR_ILLEGAL_ADDRESS),
            (719, Code::CUDA_ERROR_LAUNCH_FAILED),
            (214, Code::CUDA_ERROR_ECC_UNCORRECTABLE),
        ] {
            let double = Double::acquire(Config { devices: 2, ..Config::default().schedule(schedule) });
            begin(1);
            let healthy = alloc(BYTES);
            let context = begin(0);
            let (device, stream, event, buffer) = (alloc(BYTES), stream(), event(), pinned(BYTES));
            host(buffer, BYTES).fill(1);
            double.inject(Fault::Async { nth: 2, code: number });
            let copy = |at: u64| call!(cuMemcpyHtoDAsync_v2(device + at, buffer.cast(), 16, stream));
            copy(0).unwrap();
            // The eager schedule may be done with the second when the third is queued.
            let _ = copy(16).and_then(|()| copy(32));
            assert_eq!(call!(cuStreamSynchronize(stream)), Err(code));
            assert_eq!(call!(cuStreamQuery(stream)), Err(code));
            assert_eq!(get!(cuMemAlloc_v2(8)), Err::<u64, _>(code));
            assert_eq!(double.read(device, 48), [[1; 16], [0xA5; 16], [0xA5; 16]].concat(), "nor what follows");
            begin(1);
            call!(cuMemsetD8_v2(healthy, 1, BYTES)).unwrap();
            free(healthy);
            end(1);
            end(1);
            call!(cuCtxSetCurrent(context)).unwrap();
            assert_eq!(call!(cuMemFree_v2(device)), Err(code));
            assert_eq!(call!(cuMemFreeHost(buffer.cast())), Err(code));
            assert_eq!(call!(cuEventDestroy_v2(event)), Err(code));
            assert_eq!(call!(cuStreamDestroy_v2(stream)), Err(code));
            end(0);
            assert!(double.reports().is_empty());
        }
    }
}

#[test]
fn a_flipped_bit_is_one_wrong_byte() {
    let double = Double::acquire(Config::default());
    begin(0);
    let (device, buffer) = (alloc(BYTES), pinned(BYTES));
    fill(host(buffer, BYTES), 0);
    double.inject(Fault::Flip { nth: 2 });
    for (copy, wrong) in [(1, 0), (2, 1), (3, 0)] {
        call!(cuMemcpyHtoDAsync_v2(device, buffer.cast(), BYTES, std::ptr::null_mut())).unwrap();
        call!(cuStreamSynchronize(std::ptr::null_mut())).unwrap();
        assert_eq!(support::differing(&double.read(device, BYTES)), wrong, "copy {copy}");
    }
    free_pinned(buffer);
    free(device);
    end(0);
}

#[test]
fn pinned_memory_has_a_limit_if_asked() {
    let register = |memory: &mut [u8]| call!(cuMemHostRegister_v2(memory.as_mut_ptr().cast(), memory.len(), 0));
    let mut memory = [vec![0_u8; BYTES], vec![0_u8; BYTES]];
    let double = Double::acquire(Config { pin_limit: Some(BYTES as u64 * 3 / 2), ..Config::default() });
    begin(0);
    let [first, second] = &mut memory;
    register(first).unwrap();
    assert_eq!(register(first), Err(Code::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED));
    assert_eq!(register(second), Err(Code::CUDA_ERROR_OUT_OF_MEMORY));
    call!(cuMemHostUnregister(first.as_mut_ptr().cast())).unwrap();
    assert_eq!(call!(cuMemHostUnregister(first.as_mut_ptr().cast())), Err(Code::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED));
    register(second).unwrap();
    call!(cuMemHostUnregister(second.as_mut_ptr().cast())).unwrap();
    double.inject(Fault::PinLimit { bytes: 8 });
    assert_eq!(register(first), Err(Code::CUDA_ERROR_OUT_OF_MEMORY));
    double.clear_faults();
    register(first).unwrap();
    call!(cuMemHostUnregister(first.as_mut_ptr().cast())).unwrap();
    assert_eq!(double.stats().peak_pinned_bytes, BYTES as u64);
    end(0);
}

#[test]
fn memory_ends_where_the_configuration_says() {
    let double = Double::acquire(Config { vram_bytes: 1 << 20, ..Config::default() });
    begin(0);
    let half = alloc(1 << 19);
    let mut free_bytes = 0;
    let mut total = 0;
    call!(cuMemGetInfo_v2(&mut free_bytes, &mut total)).unwrap();
    assert_eq!((free_bytes, total), (1 << 19, 1 << 20));
    assert_eq!(get!(cuMemAlloc_v2((1 << 19) + 1)), Err::<u64, _>(Code::CUDA_ERROR_OUT_OF_MEMORY));
    let other = alloc(1 << 19);
    free(half);
    free(other);
    assert_eq!(double.stats().peak_bytes, 1 << 20);
    end(0);
}

#[test]
fn memory_that_a_stream_will_free_is_waited_for() {
    for schedule in [Schedule::Eager, Schedule::Lazy] {
        let _double = Double::acquire(Config { vram_bytes: 1 << 20, ..Config::default().schedule(schedule) });
        begin(0);
        let stream = stream();
        for _ in 0..5 {
            let device = get!(cuMemAllocAsync(1 << 20, stream)).unwrap();
            call!(cuMemFreeAsync(device, stream)).unwrap();
        }
        call!(cuStreamSynchronize(stream)).unwrap();
        call!(cuStreamDestroy_v2(stream)).unwrap();
        end(0);
    }
}

#[test]
fn a_reset_abandons_what_a_failed_test_has_left() {
    let slow = Config { h2d_bytes_per_s: Some(1e6), ..Config::default() };
    let (device, left, buffer) = {
        let double = Double::acquire(slow);
        begin(0);
        let (device, left, buffer) = (alloc(BYTES), stream(), pinned(BYTES));
        for _ in 0..100 {
            call!(cuMemcpyHtoDAsync_v2(device, buffer.cast(), BYTES, left)).unwrap();
        }
        call!(cuStreamDestroy_v2(stream())).unwrap();
        // As a panic would: without the checks at the end.
        let failed = std::thread::scope(|scope| {
            let test = scope.spawn(|| {
                let _held = &double;
                panic!("a planted failure");
            });
            test.join().is_err()
        });
        assert!(failed);
        let next = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || drop(double)));
        assert!(next.is_err(), "a double with something alive says so");
        (device, left, buffer)
    };
    let double = Double::acquire(Config::default().schedule(Schedule::Lazy));
    assert_eq!((double.live(), double.call_count()), (Live::default(), 0));
    begin(0);
    assert_eq!(call!(cuStreamSynchronize(left)), Err(Code::CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(call!(cuMemFree_v2(device)), Err(Code::CUDA_ERROR_INVALID_VALUE));
    let fresh = alloc(BYTES);
    assert!(fresh > device);
    free(fresh);
    // The memory itself is still there for who holds its address, though the driver knows it no more.
    host(buffer, BYTES).fill(1);
    assert_eq!(double.reports(), Vec::<String>::new(), "what is of an earlier life is refused in silence");
    end(0);
}
