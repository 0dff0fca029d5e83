//! The driver's calls without ceremony, for programs that are right and programs that are wrong.
//!
//! Each call is the raw one of cudarc; the thin functions here only check its answer. The macros expand their arguments
//! in an unsafe block: plain values, by a clippy lint that each test file has to allow for itself.
#![allow(dead_code)] // Each test file uses its part of it.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUcontext, CUdeviceptr, CUevent, CUresult, CUstream};

pub type Code = CUresult;
use swcuda::{Config, Double, Schedule};

/// What a call answers: the code, if it is an error.
pub type Answer<T = ()> = Result<T, CUresult>;

/// The answer as a result.
pub fn ok(code: CUresult) -> Answer {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

/// Calls a function of the driver and answers its code.
#[macro_export]
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the arguments are valid, or the double must notice that they are not.
        $crate::support::ok(unsafe { cudarc::driver::sys::$name($($argument),*) })
    };
}

/// Calls a function of the driver whose first argument takes its result.
#[macro_export]
macro_rules! get {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: every result of the driver may be all zero.
        let mut value = unsafe { std::mem::zeroed() };
        $crate::call!($name(&mut value, $($argument),*)).map(|()| value)
    }};
}

/// Retains the context of a device and makes it current.
pub fn begin(device: i32) -> CUcontext {
    call!(cuInit(0)).unwrap();
    let context = get!(cuDevicePrimaryCtxRetain(device)).unwrap();
    call!(cuCtxSetCurrent(context)).unwrap();
    context
}

/// Releases the context of a device.
pub fn end(device: i32) {
    call!(cuDevicePrimaryCtxRelease_v2(device)).unwrap();
}

pub fn alloc(bytes: usize) -> CUdeviceptr {
    get!(cuMemAlloc_v2(bytes)).unwrap()
}

pub fn free(address: CUdeviceptr) {
    call!(cuMemFree_v2(address)).unwrap();
}

/// A stream that is not ordered with the default one.
pub fn stream() -> CUstream {
    get!(cuStreamCreate(1)).unwrap()
}

pub fn destroy(streams: &[CUstream]) {
    streams.iter().for_each(|&stream| call!(cuStreamDestroy_v2(stream)).unwrap());
}

pub fn event() -> CUevent {
    get!(cuEventCreate(2)).unwrap()
}

/// Pinned memory of the driver's own.
pub fn pinned(bytes: usize) -> *mut u8 {
    let address: *mut c_void = get!(cuMemHostAlloc(bytes, 1)).unwrap();
    address.cast()
}

pub fn free_pinned(address: *mut u8) {
    call!(cuMemFreeHost(address.cast())).unwrap();
}

/// The bytes at an address of host memory.
pub fn host<'a>(address: *mut u8, bytes: usize) -> &'a mut [u8] {
    // SAFETY: the tests pass memory that they hold.
    unsafe { std::slice::from_raw_parts_mut(address, bytes) }
}

/// Bytes that depend on where they are.
pub fn fill(target: &mut [u8], offset: usize) {
    for (at, byte) in target.iter_mut().enumerate() {
        *byte = (((offset + at) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8;
    }
}

/// The number of bytes that are not as [`fill`] makes them.
pub fn differing(bytes: &[u8]) -> usize {
    let mut expected = vec![0; bytes.len()];
    fill(&mut expected, 0);
    bytes.iter().zip(&expected).filter(|(a, b)| a != b).count()
}

/// Eager, lazy and ten random schedules.
pub fn schedules() -> Vec<Config> {
    let random = (1..=10).map(Schedule::Random);
    let all = [Schedule::Eager, Schedule::Lazy].into_iter().chain(random);
    all.map(|schedule| Config::default().schedule(schedule)).collect()
}

/// Whether a report of a kind is among them.
pub fn has(reports: &[String], kind: &str) -> bool {
    reports.iter().any(|report| report.starts_with(&format!("{kind}: ")))
}

/// The kinds of the reports, each once.
pub fn kinds(reports: &[String]) -> Vec<String> {
    let mut kinds: Vec<String> =
        reports.iter().map(|report| report.split(':').next().unwrap_or_default().to_owned()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// Ends what a wrong program left, so that the double finds nothing alive.
pub fn sweep(device: i32) {
    while call!(cuDevicePrimaryCtxRelease_v2(device)).is_ok() {}
}

/// A copy of rows from host to device whose shape is still to be given.
pub fn rows(target: CUdeviceptr, source: *const u8) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST,
        srcHost: source.cast(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: target,
        dstArray: std::ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: 0,
        Height: 0,
    }
}

/// Runs `program` under each schedule and expects reports of `kind` and of no other.
pub fn earns(kind: &str, program: impl Fn(&Double)) {
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
pub fn is_clean(program: impl Fn(&Double)) {
    for config in schedules() {
        let double = Double::acquire(config);
        begin(0);
        program(&double);
        end(0);
    }
}

pub fn upload(target: u64, source: *mut u8, bytes: usize, stream: CUstream) {
    call!(cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, stream)).unwrap();
}

pub fn download(target: *mut u8, source: u64, bytes: usize, stream: CUstream) {
    call!(cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, stream)).unwrap();
}
