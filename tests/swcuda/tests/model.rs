//! The model of the copy engines, by the modelled clock: the figures follow from the program and from nothing else.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUstream};
use support::{Code, alloc, begin, destroy, end, free, free_pinned, pinned, stream};
use swcuda::{Config, Double, Stats};

const CHUNK: usize = 64 << 10;

/// Copies chunks up and down, on streams in turn, and waits.
fn copies(config: Config, up: usize, down: usize, streams: usize) -> Stats {
    let double = Double::acquire(config);
    begin(0);
    let streams: Vec<CUstream> = (0..streams).map(|_| stream()).collect();
    let (device, buffer, result) = (alloc(CHUNK * up), pinned(CHUNK), pinned(CHUNK * down.max(1)));
    call!(cuMemsetD8_v2(device, 0, CHUNK * up)).unwrap();
    for chunk in 0..up {
        let target = device + (chunk * CHUNK) as u64;
        call!(cuMemcpyHtoDAsync_v2(target, buffer.cast(), CHUNK, streams[chunk % streams.len()])).unwrap();
    }
    call!(cuCtxSynchronize()).unwrap();
    for chunk in 0..down {
        let target = result.wrapping_add(chunk * CHUNK);
        call!(cuMemcpyDtoHAsync_v2(target.cast(), device, CHUNK, streams[chunk % streams.len()])).unwrap();
    }
    call!(cuCtxSynchronize()).unwrap();
    let stats = double.stats();
    destroy(&streams);
    free_pinned(buffer);
    free_pinned(result);
    free(device);
    end(0);
    stats
}

/// A model whose clock is its own.
fn modelled() -> Config {
    Config { modelled_clock: true, ..Config::default() }
}

/// An event that can be asked for the time.
fn timed() -> CUevent {
    let mut event = std::ptr::null_mut();
    call!(cuEventCreate(&mut event, 0)).unwrap();
    event
}

/// Equal but for the rounding of a nanosecond for each of 24 copies.
#[track_caller]
fn same(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 24e-9, "{found} is not {expected}");
}

#[test]
fn the_engine_is_busy_for_bytes_over_rate_plus_latency() {
    let config = Config {
        h2d_bytes_per_s: Some(100e6),
        d2h_bytes_per_s: Some(50e6),
        latency: Duration::from_micros(50),
        ..modelled()
    };
    let stats = copies(config, 24, 12, 3);
    let (up, down) = (&stats.devices[0].h2d, &stats.devices[0].d2h);
    assert_eq!((up.copies, up.bytes, down.copies), (24, 24 * CHUNK as u64, 12));
    same(up.busy_seconds, 24.0 * (CHUNK as f64 / 100e6 + 50e-6));
    same(down.busy_seconds, 12.0 * (CHUNK as f64 / 50e6 + 50e-6));
}

#[test]
fn streams_share_an_engine_and_do_not_gain_by_it() {
    let config = Config { h2d_bytes_per_s: Some(50e6), ..modelled() };
    for streams in [1, 4] {
        let stats = copies(config.clone(), 24, 0, streams);
        let up = &stats.devices[0].h2d;
        let span = up.last_end.unwrap() - up.first_start.unwrap();
        let expected = 24.0 * CHUNK as f64 / 50e6;
        same(up.busy_seconds, expected);
        same(span, expected);
        assert_eq!((up.gaps, up.gap_seconds), (0, 0.0));
    }
}

#[test]
fn the_hosts_clock_moves_when_it_waits() {
    let double = Double::acquire(Config { h2d_bytes_per_s: Some(20e6), ..modelled() });
    begin(0);
    let (stream, device, buffer, [first, second]) = (stream(), alloc(CHUNK), pinned(CHUNK), [timed(), timed()]);
    let copy_takes = CHUNK as f64 / 20e6;
    for done in [first, second] {
        call!(cuMemcpyHtoDAsync_v2(device, buffer.cast(), CHUNK, stream)).unwrap();
        call!(cuEventRecord(done, stream)).unwrap();
    }
    for _ in 0..100 {
        assert_eq!(call!(cuEventQuery(first)), Err(Code::CUDA_ERROR_NOT_READY), "asking takes no time");
    }
    assert_eq!(double.clock().now(), Duration::ZERO);
    double.clock().advance_to(Duration::from_secs_f64(copy_takes * 1.5));
    assert_eq!(call!(cuEventQuery(first)), Ok(()));
    assert_eq!(call!(cuEventQuery(second)), Err(Code::CUDA_ERROR_NOT_READY));
    call!(cuEventSynchronize(second)).unwrap();
    same(double.clock().now().as_secs_f64(), 2.0 * copy_takes);
    let mut milliseconds = 0.0;
    call!(cuEventElapsedTime(&mut milliseconds, first, second)).unwrap();
    assert!((f64::from(milliseconds) - copy_takes * 1e3).abs() < 1e-4, "{milliseconds}");
    // The engine was idle from then on, and the next copy begins when it is queued.
    double.clock().advance_to(Duration::from_secs(1));
    call!(cuMemcpyHtoDAsync_v2(device, buffer.cast(), CHUNK, stream)).unwrap();
    call!(cuStreamSynchronize(stream)).unwrap();
    same(double.clock().now().as_secs_f64(), 1.0 + copy_takes);
    assert_eq!(double.stats().devices[0].h2d.gaps, 1);
    destroy(&[stream]);
    [first, second].into_iter().for_each(|event| call!(cuEventDestroy_v2(event)).unwrap());
    free_pinned(buffer);
    free(device);
    end(0);
}

#[test]
fn one_engine_serves_both_directions_one_after_the_other() {
    let double = |copy_engines| {
        let config = Config { h2d_bytes_per_s: Some(2e6), d2h_bytes_per_s: Some(2e6), copy_engines, ..modelled() };
        let double = Double::acquire(config);
        begin(0);
        let (a, b, device, buffers) = (stream(), stream(), alloc(8 * CHUNK), [pinned(4 * CHUNK), pinned(4 * CHUNK)]);
        call!(cuMemsetD8_v2(device, 0, 8 * CHUNK)).unwrap();
        call!(cuMemcpyHtoDAsync_v2(device, buffers[0].cast(), 4 * CHUNK, a)).unwrap();
        call!(cuMemcpyDtoHAsync_v2(buffers[1].cast(), device + 4 * CHUNK as u64, 4 * CHUNK, b)).unwrap();
        call!(cuCtxSynchronize()).unwrap();
        let stats = double.stats();
        destroy(&[a, b]);
        buffers.into_iter().for_each(free_pinned);
        free(device);
        end(0);
        let (up, down) = (&stats.devices[0].h2d, &stats.devices[0].d2h);
        let overlap =
            up.last_end.unwrap().min(down.last_end.unwrap()) - up.first_start.unwrap().max(down.first_start.unwrap());
        overlap / up.busy_seconds
    };
    same(double(2), 1.0);
    same(double(1), 0.0);
}

#[test]
fn without_a_model_the_time_is_measured() {
    let stats = copies(Config::default(), 4, 4, 2);
    assert_eq!((stats.h2d_bytes(), stats.d2h_bytes()), (4 * CHUNK as u64, 4 * CHUNK as u64));
    assert!(stats.devices[0].h2d.busy_seconds > 0.0);
    assert_eq!(stats.pageable_copies, 0);
}
