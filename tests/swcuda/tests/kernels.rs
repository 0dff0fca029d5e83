//! Kernels in streams: their order, what they may touch, and what becomes of a device that they break.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::ffi::c_void;

use cudarc::driver::sys::{CUfunction, CUmodule, CUstream};
use support::{Answer, Code, alloc, begin, end, event, free, kinds, schedules, stream};
use swcuda::{Config, Double, Schedule};

const COUNT: u32 = 300;
const BYTES: usize = COUNT as usize * 4;

/// `target[i] = source[i] + 1` for the first `count` words.
const PTX: &[u8] = b".version 8.0
.target sm_75
.address_size 64

.visible .entry increment(
    .param .u64 increment_param_0,
    .param .u64 increment_param_1,
    .param .u32 increment_param_2
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [increment_param_0];
    ld.param.u64 %rd2, [increment_param_1];
    ld.param.u32 %r1, [increment_param_2];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra $done;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    ld.global.u32 %r6, [%rd6];
    add.s32 %r7, %r6, 1;
    add.s64 %rd7, %rd4, %rd5;
    st.global.u32 [%rd7], %r7;
$done:
    ret;
}
\0";

/// The kernel, loaded; `None` in a build that still has the placeholder for the interpreter.
fn load() -> Option<(CUmodule, CUfunction)> {
    if swcuda::ptx::Module::parse("").is_err_and(|text| text.contains("not in this build")) {
        println!("the PTX interpreter is not in this build");
        return None;
    }
    let module = get!(cuModuleLoadData(PTX.as_ptr().cast())).unwrap();
    let unknown: Answer<CUfunction> = get!(cuModuleGetFunction(module, c"decrement".as_ptr()));
    assert_eq!(unknown, Err(Code::CUDA_ERROR_NOT_FOUND));
    let function = get!(cuModuleGetFunction(module, c"increment".as_ptr())).unwrap();
    Some((module, function))
}

fn launch(function: CUfunction, source: u64, target: u64, count: u32, stream: CUstream) -> Answer {
    let mut parameters: [*mut c_void; 3] = [
        (&raw const source).cast_mut().cast(),
        (&raw const target).cast_mut().cast(),
        (&raw const count).cast_mut().cast(),
    ];
    let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
    call!(cuLaunchKernel(function, count.div_ceil(64), 1, 1, 64, 1, 1, 0, stream, parameters, none))
}

/// Runs `program` with the kernel, two streams and two buffers, the first of them zero; what it earned in reports.
fn observe(config: Config, program: impl FnOnce(&Double, CUfunction, [CUstream; 2], [u64; 2])) -> Vec<String> {
    let double = Double::acquire(config);
    begin(0);
    let Some((module, function)) = load() else {
        end(0);
        return Vec::new();
    };
    let (streams, buffers) = ([stream(), stream()], [alloc(BYTES), alloc(BYTES)]);
    call!(cuMemsetD8_v2(buffers[0], 0, BYTES)).unwrap();
    program(&double, function, streams, buffers);
    assert!(double.settle());
    let reports = double.reports();
    let _ = call!(cuCtxSynchronize());
    // On a broken device these answer its error, and give back all the same.
    let freed = buffers.map(|buffer| call!(cuMemFree_v2(buffer)));
    let destroyed = streams.map(|stream| call!(cuStreamDestroy_v2(stream)));
    let unloaded = call!(cuModuleUnload(module));
    let answers: Vec<Answer> = freed.into_iter().chain(destroyed).chain([unloaded]).collect();
    assert!(answers.iter().all(|answer| *answer == unloaded), "{answers:?}");
    end(0);
    reports
}

fn is_here() -> bool {
    let _double = Double::acquire(Config::default());
    begin(0);
    let loaded = load();
    if let Some((module, _)) = loaded {
        call!(cuModuleUnload(module)).unwrap();
    }
    end(0);
    loaded.is_some()
}

#[test]
fn a_kernel_runs_in_the_order_of_its_stream() {
    for config in schedules() {
        let reports = observe(config, |double, function, [a, b], [first, second]| {
            let done = event();
            launch(function, first, second, COUNT, a).unwrap();
            launch(function, second, first, COUNT, a).unwrap();
            call!(cuEventRecord(done, a)).unwrap();
            call!(cuStreamWaitEvent(b, done, 0)).unwrap();
            launch(function, first, second, COUNT, b).unwrap();
            call!(cuStreamSynchronize(b)).unwrap();
            assert_eq!(double.read(second, BYTES), [3, 0, 0, 0].repeat(COUNT as usize));
            assert_eq!(double.stats().kernels, 3);
            call!(cuEventDestroy_v2(done)).unwrap();
        });
        assert!(reports.is_empty(), "{reports:?}");
    }
}

#[test]
fn kernels_race_byte_by_byte() {
    if !is_here() {
        return;
    }
    for schedule in [Schedule::Eager, Schedule::Lazy, Schedule::Random(4)] {
        let halves = |shift: u64| {
            observe(Config::default().schedule(schedule), |_, function, [a, b], [first, second]| {
                launch(function, first, second, COUNT / 2, a).unwrap();
                launch(function, first, second + u64::from(COUNT / 2) * 4 - shift, COUNT / 2, b).unwrap();
                call!(cuCtxSynchronize()).unwrap();
            })
        };
        assert!(halves(0).is_empty());
        let reports = halves(4);
        assert_eq!(kinds(&reports), ["RACE"], "{schedule:?} {reports:?}");
        let copied = observe(Config::default().schedule(schedule), |_, function, [a, b], [first, second]| {
            launch(function, first, second, COUNT, a).unwrap();
            call!(cuMemsetD8Async(second, 0, 4, b)).unwrap();
            // The host knows that the fill is over, and still it races with the kernel.
            call!(cuStreamSynchronize(b)).unwrap();
            call!(cuStreamSynchronize(a)).unwrap();
        });
        assert_eq!(kinds(&copied), ["RACE"], "{schedule:?} {copied:?}");
    }
}

#[test]
fn what_the_host_waited_for_stays_in_order_while_a_kernel_is_pending() {
    for schedule in [Schedule::Eager, Schedule::Lazy] {
        let reports = observe(Config::default().schedule(schedule), |_, function, [a, b], [first, second]| {
            let other = alloc(BYTES);
            launch(function, first, second, COUNT, a).unwrap();
            call!(cuMemsetD8Async(other, 1, BYTES, b)).unwrap();
            call!(cuStreamSynchronize(b)).unwrap();
            call!(cuMemsetD8Async(other, 2, BYTES, a)).unwrap();
            call!(cuStreamSynchronize(a)).unwrap();
            free(other);
        });
        assert!(reports.is_empty(), "{schedule:?}: {reports:?}");
    }
}

#[test]
fn a_kernel_may_not_read_what_nobody_wrote() {
    if !is_here() {
        return;
    }
    let reports = observe(Config::default(), |_, function, [a, _], [first, second]| {
        launch(function, second, first, COUNT, a).unwrap();
        call!(cuStreamSynchronize(a)).unwrap();
    });
    assert_eq!(kinds(&reports), ["UNINITIALISED_READ"]);
}

#[test]
fn memory_of_a_kernel_that_is_queued_is_in_use() {
    if !is_here() {
        return;
    }
    for schedule in [Schedule::Eager, Schedule::Lazy] {
        let reports = observe(Config::default().schedule(schedule), |_, function, [a, _], [first, _]| {
            let target = alloc(BYTES);
            launch(function, first, target, COUNT, a).unwrap();
            free(target);
        });
        assert_eq!(kinds(&reports), ["FREE_IN_FLIGHT"], "{reports:?}");
    }
}

#[test]
fn a_kernel_out_of_bounds_breaks_its_device() {
    if !is_here() {
        return;
    }
    for schedule in [Schedule::Eager, Schedule::Lazy] {
        let reports = observe(Config::default().schedule(schedule), |_, function, [a, _], [first, second]| {
            launch(function, first, second, COUNT + 1, a).unwrap();
            assert_eq!(call!(cuStreamSynchronize(a)), Err(Code::CUDA_ERROR_ILLEGAL_ADDRESS));
            assert_eq!(launch(function, first, second, COUNT, a), Err(Code::CUDA_ERROR_ILLEGAL_ADDRESS));
        });
        assert_eq!(kinds(&reports), ["KERNEL"]);
        assert!(reports[0].contains("increment"), "{reports:?}");
    }
}

#[test]
fn a_launch_is_checked_before_it_is_queued() {
    if !is_here() {
        return;
    }
    let reports = observe(Config::default(), |_, function, [a, _], [first, second]| {
        let mut nothing: [*mut c_void; 3] = [std::ptr::null_mut(); 3];
        let none = std::ptr::null_mut();
        let shapes = [(1, 2000), (0, 64), (1, 0)];
        for (grid, block) in shapes {
            let answer = call!(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, a, nothing.as_mut_ptr(), none));
            assert_eq!(answer, Err(Code::CUDA_ERROR_INVALID_VALUE));
        }
        assert_eq!(launch(std::ptr::null_mut(), first, second, COUNT, a), Err(Code::CUDA_ERROR_INVALID_HANDLE));
    });
    assert_eq!(kinds(&reports), ["BAD_HANDLE"]);
}

#[test]
fn a_module_that_is_unloaded_takes_its_functions_along() {
    let double = Double::acquire(Config::default());
    begin(0);
    if let Some((module, function)) = load() {
        call!(cuModuleUnload(module)).unwrap();
        assert_eq!(launch(function, 0, 0, 1, std::ptr::null_mut()), Err(Code::CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(kinds(&double.reports()), ["BAD_HANDLE"]);
    }
    end(0);
}
