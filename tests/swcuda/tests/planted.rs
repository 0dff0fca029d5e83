//! A pipeline as a loader has it, right and with one bug planted at a time: what the double says to each.
//!
//! The table of `cuda.md`. Where it says that a bug passes silently under the eager schedule nothing is asserted there:
//! whether it does is a matter of time.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use support::{
    Answer, alloc, begin, differing, end, event, fill, free, free_pinned, has, host, kinds, pinned, schedules, stream,
    sweep,
};
use swcuda::{Config, Double, Fault, Schedule};

const CHUNK: usize = 64 << 10;
const CHUNKS: usize = 12;
const TOTAL: usize = CHUNK * CHUNKS;
const DEPTH: usize = 3;

/// What is wrong with the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// The staging buffer is filled again before its copy is over.
    Reuse,
    /// The result is read on another stream that waits for nothing.
    EarlyRead,
    /// The result is used before the last copy is waited for.
    NoFinalSync,
    /// The staging buffers are freed while copies read them.
    FreeInFlight,
    /// Memory of `cuMemAllocAsync` is used on a stream that does not wait for it.
    NoAllocWait,
    /// The last copy ends 8 bytes too late.
    OutOfBounds,
    DoubleFree,
    UseAfterFree,
}

/// Copies through a ring of pinned buffers and two streams, and back; the bytes that differ.
fn pipeline(bug: Bug) -> Answer<usize> {
    let streams = [stream(), stream()];
    let back = stream();
    let target = get!(cuMemAllocAsync(TOTAL, back))?;
    let ready = event();
    call!(cuEventRecord(ready, back))?;
    if bug != Bug::NoAllocWait {
        streams.iter().try_for_each(|&stream| call!(cuStreamWaitEvent(stream, ready, 0)))?;
    }
    let ring = [(); DEPTH].map(|()| (pinned(CHUNK), event()));
    for chunk in 0..CHUNKS {
        let (buffer, done) = ring[chunk % DEPTH];
        if bug != Bug::Reuse {
            call!(cuEventSynchronize(done))?;
        }
        fill(host(buffer, CHUNK), chunk * CHUNK);
        let stream = streams[chunk % 2];
        let shift = if bug == Bug::OutOfBounds && chunk == CHUNKS - 1 { 8 } else { 0 };
        let at = target + (chunk * CHUNK + shift) as u64;
        call!(cuMemcpyHtoDAsync_v2(at, buffer.cast(), CHUNK, stream))?;
        call!(cuEventRecord(done, stream))?;
    }
    if bug != Bug::EarlyRead {
        for (stream, (_, done)) in streams.into_iter().zip(ring) {
            call!(cuEventRecord(done, stream))?;
            call!(cuStreamWaitEvent(back, done, 0))?;
        }
    }
    let result = pinned(TOTAL);
    call!(cuMemcpyDtoHAsync_v2(result.cast(), target, TOTAL, back))?;
    if bug == Bug::FreeInFlight {
        ring.into_iter().for_each(|(buffer, _)| free_pinned(buffer));
    }
    if bug != Bug::NoFinalSync {
        call!(cuStreamSynchronize(back))?;
    }
    let wrong = differing(host(result, TOTAL));
    if bug != Bug::FreeInFlight {
        ring.into_iter().for_each(|(buffer, _)| free_pinned(buffer));
    }
    ring.into_iter().try_for_each(|(_, done)| call!(cuEventDestroy_v2(done)))?;
    call!(cuEventDestroy_v2(ready))?;
    free_pinned(result);
    call!(cuMemFreeAsync(target, back))?;
    call!(cuStreamSynchronize(back))?;
    match bug {
        Bug::DoubleFree => assert!(call!(cuMemFree_v2(target)).is_err()),
        Bug::UseAfterFree => assert!(call!(cuMemsetD8_v2(target, 0, 64)).is_err()),
        _ => {}
    }
    streams.into_iter().chain([back]).try_for_each(|stream| call!(cuStreamDestroy_v2(stream)))?;
    Ok(wrong)
}

/// Runs a program under a configuration; its answer and what the double reported.
fn observe(config: Config, program: impl FnOnce() -> Answer<usize>) -> (Answer<usize>, Vec<String>) {
    let double = Double::acquire(config);
    begin(0);
    let answer = program();
    double.clear_faults();
    assert!(double.settle());
    let mut reports = double.reports();
    sweep(0);
    // What an error path leaves is a leak; that is its own report and not what is looked for here.
    let late = double.reports();
    reports.extend(late.into_iter().filter(|report| answer.is_ok() || !report.starts_with("LEAK")));
    (answer, reports)
}

/// The reports of a bug under a schedule, and the bytes that came out wrong.
fn planted(bug: Bug, schedule: Schedule) -> (Answer<usize>, Vec<String>) {
    observe(Config::default().schedule(schedule), || pipeline(bug))
}

#[test]
fn the_correct_program_is_never_reported() {
    for config in schedules() {
        let schedule = config.schedule;
        let (answer, reports) = observe(config, || pipeline(Bug::None));
        assert_eq!((answer, reports), (Ok(0), vec![]), "{schedule:?}");
    }
}

#[test]
fn a_staging_buffer_reused_too_early_is_certain_under_lazy() {
    let (answer, reports) = planted(Bug::Reuse, Schedule::Lazy);
    assert!(has(&reports, "SOURCE_CHANGED"), "{reports:?}");
    assert!(answer.unwrap() > 0);
}

#[test]
fn a_read_on_a_stream_that_does_not_wait() {
    let (_, reports) = planted(Bug::EarlyRead, Schedule::Eager);
    assert!(has(&reports, "RACE"), "{reports:?}");
    let (answer, reports) = planted(Bug::EarlyRead, Schedule::Lazy);
    assert!(has(&reports, "RACE") && has(&reports, "UNINITIALISED_READ"), "{reports:?}");
    assert!(answer.unwrap() > 0);
    for seed in 1..=3 {
        let (_, reports) = planted(Bug::EarlyRead, Schedule::Random(seed));
        assert!(has(&reports, "RACE"), "{reports:?}");
    }
}

#[test]
fn a_result_used_before_it_is_there() {
    let (_, reports) = planted(Bug::NoFinalSync, Schedule::Eager);
    assert!(has(&reports, "FREE_IN_FLIGHT"), "{reports:?}");
    let (answer, reports) = planted(Bug::NoFinalSync, Schedule::Lazy);
    assert!(has(&reports, "FREE_IN_FLIGHT"), "{reports:?}");
    assert!(answer.unwrap() > TOTAL / 2, "poison everywhere");
}

#[test]
fn mistakes_that_no_schedule_hides() {
    let table = [
        (Bug::FreeInFlight, "FREE_IN_FLIGHT"),
        (Bug::NoAllocWait, "RACE"),
        (Bug::OutOfBounds, "OUT_OF_BOUNDS"),
        (Bug::DoubleFree, "DOUBLE_FREE"),
        (Bug::UseAfterFree, "USE_AFTER_FREE"),
    ];
    for schedule in [Schedule::Eager, Schedule::Lazy, Schedule::Random(7)] {
        for (bug, kind) in table {
            let (_, reports) = planted(bug, schedule);
            assert_eq!(kinds(&reports), [kind], "{bug:?} {schedule:?} {reports:?}");
        }
    }
}

#[test]
fn an_error_path_that_does_not_drain() {
    for schedule in [Schedule::Eager, Schedule::Lazy] {
        let program = || {
            let (stream, buffer, target) = (stream(), pinned(CHUNK), alloc(TOTAL));
            let copy = |chunk: usize| {
                call!(cuMemcpyHtoDAsync_v2(target + (chunk * CHUNK) as u64, buffer.cast(), CHUNK, stream))
            };
            let copied = (0..CHUNKS).try_for_each(copy);
            // The mistake: on an error everything goes at once, without waiting for the copies that were queued.
            free_pinned(buffer);
            free(target);
            call!(cuStreamDestroy_v2(stream))?;
            copied.map(|()| 0)
        };
        let config = Config::default().schedule(schedule);
        let (answer, reports) = {
            let double = Double::acquire(config);
            begin(0);
            double.inject(Fault::Call { name: "cuMemcpyHtoDAsync".to_owned(), nth: 5, code: 2 });
            let answer = program();
            let reports = double.reports();
            end(0);
            (answer, reports)
        };
        assert_eq!(answer, Err(support::Code::CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(kinds(&reports), ["FREE_IN_FLIGHT"], "{schedule:?}");
    }
}
