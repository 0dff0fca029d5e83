//! The model of the copy engines. Asserted on what the model computes, not on the clock of a loaded machine.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::time::Duration;

use cudarc::driver::sys::CUstream;
use support::{alloc, begin, destroy, end, free, free_pinned, pinned, stream};
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

fn close(measured: f64, expected: f64) {
    assert!((measured - expected).abs() <= expected * 0.1, "{measured} is not about {expected}");
}

#[test]
fn the_engine_is_busy_for_bytes_over_rate_plus_latency() {
    let config = Config {
        h2d_bytes_per_s: Some(100e6),
        d2h_bytes_per_s: Some(50e6),
        latency: Duration::from_micros(50),
        ..Config::default()
    };
    let stats = copies(config, 24, 12, 3);
    let (up, down) = (&stats.devices[0].h2d, &stats.devices[0].d2h);
    assert_eq!((up.copies, up.bytes, down.copies), (24, 24 * CHUNK as u64, 12));
    close(up.busy_seconds, 24.0 * (CHUNK as f64 / 100e6 + 50e-6));
    close(down.busy_seconds, 12.0 * (CHUNK as f64 / 50e6 + 50e-6));
}

#[test]
fn streams_share_an_engine_and_do_not_gain_by_it() {
    let config = Config { h2d_bytes_per_s: Some(50e6), ..Config::default() };
    for streams in [1, 4] {
        let stats = copies(config.clone(), 24, 0, streams);
        let up = &stats.devices[0].h2d;
        let span = up.last_end.unwrap() - up.first_start.unwrap();
        let expected = 24.0 * CHUNK as f64 / 50e6;
        close(up.busy_seconds, expected);
        // The span is at least the work; what it is longer is in the gaps.
        assert!(span >= expected * 0.999, "{span} {expected}");
        assert!((span - up.busy_seconds - up.gap_seconds).abs() < 1e-6);
    }
}

#[test]
fn the_wall_clock_follows_the_model() {
    let begun = std::time::Instant::now();
    copies(Config { h2d_bytes_per_s: Some(20e6), ..Config::default() }, 8, 0, 2);
    assert!(begun.elapsed().as_secs_f64() >= 8.0 * CHUNK as f64 / 20e6);
}

#[test]
fn one_engine_serves_both_directions_one_after_the_other() {
    let double = |copy_engines| {
        let config =
            Config { h2d_bytes_per_s: Some(2e6), d2h_bytes_per_s: Some(2e6), copy_engines, ..Config::default() };
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
    assert!(double(2) > 0.5, "two engines work at the same time");
    assert!(double(1) <= 1e-6, "one does not");
}

#[test]
fn without_a_model_the_time_is_measured() {
    let stats = copies(Config::default(), 4, 4, 2);
    assert_eq!((stats.h2d_bytes(), stats.d2h_bytes()), (4 * CHUNK as u64, 4 * CHUNK as u64));
    assert!(stats.devices[0].h2d.busy_seconds > 0.0);
    assert_eq!(stats.pageable_copies, 0);
}
