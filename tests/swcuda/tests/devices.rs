//! Devices: several of them, which are visible, and what belongs to which.
#![allow(clippy::macro_metavars_in_unsafe)] // See `support`.

mod support;

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, CUpointer_attribute_enum as Pointer};
use support::{Answer, Code, alloc, begin, destroy, end, event, free, free_pinned, host, kinds, pinned, stream};
use swcuda::{Config, Double};

fn two() -> Config {
    Config { devices: 2, ..Config::default() }
}

fn text(call: impl FnOnce(*mut c_char, c_int) -> Answer) -> String {
    let mut bytes = [1 as c_char; 100];
    call(bytes.as_mut_ptr(), 100).unwrap();
    // SAFETY: the double ends what it writes in NUL.
    unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_str().unwrap().to_owned()
}

fn attribute(attribute: Attribute, device: c_int) -> c_int {
    get!(cuDeviceGetAttribute(attribute, device)).unwrap()
}

#[test]
fn a_device_says_what_it_is() {
    let config = Config { driver_version: 12040, compute: (7, 5), copy_engines: 1, pools: false, ..two() };
    let _double = Double::acquire(config);
    assert_eq!(get!(cuDriverGetVersion()), Ok(12040), "before cuInit");
    assert_eq!(get!(cuDeviceGetCount()), Err::<c_int, _>(Code::CUDA_ERROR_NOT_INITIALIZED));
    call!(cuInit(0)).unwrap();
    assert_eq!(get!(cuDeviceGetCount()), Ok(2));
    assert_eq!(text(|to, room| call!(cuDeviceGetName(to, room, 1))), "Software CUDA (test double, no GPU)");
    assert_eq!(text(|to, _| call!(cuDeviceGetName(to, 9, 1))), "Software");
    let bus = |device| text(|to, room| call!(cuDeviceGetPCIBusId(to, room, device)));
    assert_eq!([bus(0), bus(1)], ["0000:01:00.0", "0000:02:00.0"]);
    let uuid = |device| get!(cuDeviceGetUuid_v2(device)).map(|uuid: cudarc::driver::sys::CUuuid| uuid.bytes).unwrap();
    assert_ne!(uuid(0), uuid(1));
    assert_eq!(get!(cuDeviceTotalMem_v2(0)), Ok(1_usize << 30));
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0), 7);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0), 5);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 1), 1);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1), 0);
    assert_eq!(get!(cuDeviceGet(2)), Err::<c_int, _>(Code::CUDA_ERROR_INVALID_DEVICE));
    assert!(get!(cuDeviceGetDefaultMemPool(0)).map(|_: cudarc::driver::sys::CUmemoryPool| ()).is_err());
}

#[test]
fn each_device_has_its_own_memory_and_context() {
    let double = Double::acquire(Config { vram_bytes: 1 << 20, ..two() });
    let first = begin(0);
    let a = alloc(1 << 20);
    let second = begin(1);
    assert_ne!(first, second);
    let b = alloc(1 << 20);
    assert_eq!(get!(cuCtxGetDevice()), Ok(1));
    let ordinal = |address| -> c_int {
        let mut ordinal: c_int = -1;
        call!(cuPointerGetAttribute((&raw mut ordinal).cast(), Pointer::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address))
            .unwrap();
        ordinal
    };
    assert_eq!([ordinal(a), ordinal(b)], [0, 1]);
    call!(cuCtxPushCurrent_v2(first)).unwrap();
    assert_eq!(get!(cuCtxGetCurrent()), Ok(first));
    free(a);
    assert_eq!(get!(cuCtxPopCurrent_v2()), Ok(first));
    assert_eq!(get!(cuCtxGetCurrent()), Ok(second));
    free(b);
    let (flags, active) = (&mut 0, &mut 0);
    call!(cuDevicePrimaryCtxSetFlags_v2(0, 4)).unwrap();
    call!(cuDevicePrimaryCtxGetState(0, flags, active)).unwrap();
    assert_eq!((*flags, *active), (4, 1));
    end(0);
    call!(cuDevicePrimaryCtxGetState(0, flags, active)).unwrap();
    assert_eq!(*active, 0);
    assert_eq!(double.live().contexts, 1);
    end(1);
    assert_eq!(call!(cuDevicePrimaryCtxRelease_v2(1)), Err(Code::CUDA_ERROR_INVALID_CONTEXT));
}

#[test]
fn a_thread_has_no_context_before_it_asks() {
    let _double = Double::acquire(Config::default());
    let context = begin(0);
    std::thread::scope(|scope| {
        let other =
            scope.spawn(|| get!(cuCtxGetCurrent()).map(|context: cudarc::driver::sys::CUcontext| context as u64));
        assert_eq!(other.join().unwrap(), Ok(0));
    });
    assert_eq!(get!(cuCtxGetCurrent()), Ok(context));
    end(0);
}

#[test]
fn what_is_of_one_device_is_refused_on_another() {
    let double = Double::acquire(two());
    begin(0);
    let (device, done, buffer) = (alloc(4096), event(), pinned(4096));
    begin(1);
    let stream = stream();
    host(buffer, 4096).fill(1);
    let earns = |answer: Answer, code: Code| {
        assert_eq!(answer, Err(code));
        assert_eq!(kinds(&double.reports()), ["WRONG_CONTEXT"]);
    };
    let copy = call!(cuMemcpyHtoDAsync_v2(device, buffer.cast(), 4096, stream));
    earns(copy, Code::CUDA_ERROR_INVALID_VALUE);
    earns(call!(cuMemsetD8Async(device, 1, 4096, stream)), Code::CUDA_ERROR_INVALID_VALUE);
    earns(call!(cuEventRecord(done, stream)), Code::CUDA_ERROR_INVALID_HANDLE);
    // Waiting for another device's event, and asking about it, is allowed.
    call!(cuStreamWaitEvent(stream, done, 0)).unwrap();
    call!(cuEventSynchronize(done)).unwrap();
    call!(cuEventQuery(done)).unwrap();
    destroy(&[stream]);
    call!(cuEventDestroy_v2(done)).unwrap();
    free(device);
    free_pinned(buffer);
    end(1);
    end(0);
}

#[test]
fn a_context_that_is_gone_is_no_context() {
    let double = Double::acquire(Config::default());
    begin(0);
    end(0);
    assert_eq!(get!(cuMemAlloc_v2(64)), Err::<u64, _>(Code::CUDA_ERROR_CONTEXT_IS_DESTROYED));
    assert_eq!(kinds(&double.reports()), ["WRONG_CONTEXT"]);
}

#[test]
fn the_visible_devices_are_the_only_ones() {
    let visible = |list: &str| Config { devices: 3, visible_devices: Some(list.to_owned()), ..Config::default() };
    let bus = |device| text(|to, room| call!(cuDeviceGetPCIBusId(to, room, device)));
    {
        let _double = Double::acquire(visible("2,0,9,1"));
        call!(cuInit(0)).unwrap();
        assert_eq!(get!(cuDeviceGetCount()), Ok(2));
        assert_eq!([bus(0), bus(1)], ["0000:03:00.0", "0000:01:00.0"]);
    }
    for none in ["", "-1", "3"] {
        let _double = Double::acquire(visible(none));
        assert_eq!(call!(cuInit(0)), Err(Code::CUDA_ERROR_NO_DEVICE), "{none:?}");
        assert_eq!(get!(cuDeviceGetCount()), Err::<c_int, _>(Code::CUDA_ERROR_NOT_INITIALIZED));
    }
    let _double = Double::acquire(Config { devices: 0, ..Config::default() });
    assert_eq!(call!(cuInit(0)), Err(Code::CUDA_ERROR_NO_DEVICE));
}

#[test]
fn pinned_memory_that_is_not_portable_is_pinned_for_one_device() {
    let double = Double::acquire(two());
    begin(0);
    let mut memory = vec![1_u8; 4096];
    begin(1);
    let device = alloc(4096);
    for (flags, pageable) in [(1, 0), (0, 1)] {
        call!(cuCtxSetCurrent(begin(0))).unwrap();
        call!(cuMemHostRegister_v2(memory.as_mut_ptr().cast(), 4096, flags)).unwrap();
        begin(1);
        call!(cuMemcpyHtoD_v2(device, memory.as_ptr().cast(), 4096)).unwrap();
        assert_eq!(double.stats().pageable_copies, pageable);
        call!(cuMemHostUnregister(memory.as_mut_ptr().cast())).unwrap();
    }
    free(device);
    (0..3).for_each(|_| end(0));
    (0..3).for_each(|_| end(1));
}
