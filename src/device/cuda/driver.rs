//! The CUDA driver as a table of functions, found at run time, and what its answers mean.
//!
//! cudarc opens the library and has the types; the functions are looked up here, all at once and with their results as plain
//! numbers: a driver that lacks one is an error that names it instead of a panic at its first use, and a code that no list
//! knows is a number instead of an enum with an impossible value. Only names that CUDA 12.0 has are asked for. The
//! parameter types are checked against cudarc's at compile time. Nothing here keeps state.
#![allow(unsafe_code)] // calls into the driver's library

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys;

/// CUDA 12.0: the first driver that takes the kernels' PTX (ISA 8.0).
const OLDEST_DRIVER: c_int = 12_000;

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The driver's functions that vramp calls.
        #[allow(non_snake_case)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Functions {
            /// Looks all of them up; the first that is missing is the error.
            fn find() -> Result<Functions, &'static str> {
                // SAFETY: `Driver::find` has seen that the library can be opened; opening the system's CUDA driver runs its
                // initialisers, which is what every CUDA program does.
                let library = unsafe { sys::culib() };
                Ok(Functions {
                    $($name: {
                        // SAFETY: the symbol of this name is the driver function of this signature (checked below), whose
                        // result is a C enum: an `unsigned int`. The library is never closed.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|_| stringify!($name))?
                    },)*
                })
            }
        }

        // The parameter types are those of cudarc's binding of the same name.
        const _: fn() = || {
            $(let _: unsafe fn($($type),*) -> sys::CUresult = sys::$name;)*
        };
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
    cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: sys::CUdevice);
    cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: sys::CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
    cuCtxPushCurrent_v2(context: sys::CUcontext);
    cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize);
    cuMemFree_v2(address: sys::CUdeviceptr);
    cuMemAllocAsync(address: *mut sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    cuMemFreeAsync(address: sys::CUdeviceptr, stream: sys::CUstream);
    cuMemHostRegister_v2(start: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(start: *mut c_void);
    cuMemcpyHtoDAsync_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    cuMemcpy2DAsync_v2(copy: *const sys::CUDA_MEMCPY2D, stream: sys::CUstream);
    cuMemsetD8Async(to: sys::CUdeviceptr, value: u8, bytes: usize, stream: sys::CUstream);
    cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: sys::CUstream);
    cuStreamSynchronize(stream: sys::CUstream);
    cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    cuEventDestroy_v2(event: sys::CUevent);
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    cuEventSynchronize(event: sys::CUevent);
    cuEventQuery(event: sys::CUevent);
    cuEventElapsedTime(milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent);
    cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    cuModuleUnload(module: sys::CUmodule);
    cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    cuLaunchKernel(
        function: sys::CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint,
        stream: sys::CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}

/// The driver of this machine.
pub(super) struct Driver {
    functions: Functions,
}

/// A driver call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The function.
    pub(super) call: &'static str,
    /// Its result.
    pub(super) code: u32,
}

impl Refusal {
    /// Whether there is no memory left: of the device, or that may be locked.
    pub(super) fn is_out_of_memory(self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32
    }
}

/// Why there is no driver to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Absence {
    /// The library cannot be opened.
    NoLibrary,
    /// The library is no driver of CUDA 12.0 or later.
    TooOld { version: c_int },
    /// The library lacks a function.
    Incomplete { function: &'static str },
    /// The driver does not start.
    Refused(Refusal),
}

/// Calls one function of the driver: `call!(driver, cuMemFree_v2(address))`. An expression of an `unsafe` block.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $crate::device::cuda::driver::answer(
            stringify!($name),
            ($driver.functions().$name)($($argument),*),
        )
    };
}
pub(super) use call;

/// A result code as a result.
pub(super) fn answer(call: &'static str, code: u32) -> Result<(), Refusal> {
    if code == 0 { Ok(()) } else { Err(Refusal { call, code }) }
}

impl Driver {
    /// The driver, started. Asks again each time until there is one.
    pub(super) fn start() -> Result<&'static Driver, Absence> {
        static FOUND: OnceLock<Driver> = OnceLock::new();
        let driver = match FOUND.get() {
            Some(driver) => driver,
            None => {
                let found = Driver::find()?;
                FOUND.get_or_init(|| found)
            }
        };
        // SAFETY: takes no pointer; may be called again and again.
        unsafe { call!(driver, cuInit(0)) }.map_err(Absence::Refused)?;
        Ok(driver)
    }

    fn find() -> Result<Driver, Absence> {
        // SAFETY: opens and closes the system's CUDA driver, as every CUDA program does.
        if !unsafe { sys::is_culib_present() } {
            return Err(Absence::NoLibrary);
        }
        let functions = Functions::find().map_err(|function| Absence::Incomplete { function })?;
        let driver = Driver { functions };
        let version = driver.version().map_err(Absence::Refused)?;
        if version < OLDEST_DRIVER { Err(Absence::TooOld { version }) } else { Ok(driver) }
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The CUDA version that the driver speaks: 12000 is 12.0.
    pub(super) fn version(&self) -> Result<c_int, Refusal> {
        let mut version = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuDriverGetVersion(&raw mut version)) }?;
        Ok(version)
    }

    /// Number of devices that this process may see.
    pub(super) fn device_count(&self) -> Result<c_int, Refusal> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuDeviceGetCount(&raw mut count)) }?;
        Ok(count)
    }

    /// The device of an ordinal.
    pub(super) fn device(&self, ordinal: c_int) -> Result<sys::CUdevice, Refusal> {
        let mut device = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuDeviceGet(&raw mut device, ordinal)) }?;
        Ok(device)
    }

    /// The device's product name.
    pub(super) fn device_name(&self, device: sys::CUdevice) -> Result<String, Refusal> {
        let mut name = [0; 256];
        // SAFETY: writes at most as many bytes as it is told, a terminating zero included.
        unsafe { call!(self, cuDeviceGetName(name.as_mut_ptr(), 256, device)) }?;
        Ok(text(&name))
    }

    /// The device's address on the PCI bus, as `0000:3b:00.0`.
    pub(super) fn device_bus(&self, device: sys::CUdevice) -> Result<String, Refusal> {
        let mut bus = [0; 32];
        // SAFETY: writes at most as many bytes as it is told, a terminating zero included.
        unsafe { call!(self, cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, device)) }?;
        Ok(text(&bus))
    }

    /// The device's identity, whatever its ordinal is today.
    pub(super) fn device_uuid(&self, device: sys::CUdevice) -> Result<[u8; 16], Refusal> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes the 16 bytes.
        unsafe { call!(self, cuDeviceGetUuid_v2(&raw mut uuid, device)) }?;
        Ok(uuid.bytes.map(i8::cast_unsigned))
    }

    /// A number that describes the device.
    pub(super) fn attribute(&self, device: sys::CUdevice, what: sys::CUdevice_attribute) -> Result<c_int, Refusal> {
        let mut value = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuDeviceGetAttribute(&raw mut value, what, device)) }?;
        Ok(value)
    }
}

/// A C string out of a buffer.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|&byte| byte.cast_unsigned()).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, words) = meaning(self.code);
        write!(f, "{} says {} ({name}): {words}", self.call, self.code)
    }
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Absence::NoLibrary => f.write_str(
                "there is no CUDA driver here (libcuda.so.1 cannot be opened): this machine has no NVIDIA driver, or this \
                 container was started without it (--gpus all)",
            ),
            Absence::TooOld { version } => write!(
                f,
                "the CUDA driver speaks CUDA {}.{}, and vramp needs 12.0 (driver 525) or later: update the NVIDIA driver",
                version / 1000,
                version % 1000 / 10
            ),
            Absence::Incomplete { function } => {
                write!(f, "the CUDA library lacks {function}: it is no driver of CUDA 12.0 or later")
            }
            Absence::Refused(refusal) => write!(f, "the CUDA driver does not start: {refusal}"),
        }
    }
}

/// The name of a result code, and what usually stands behind it.
fn meaning(code: u32) -> (&'static str, &'static str) {
    match code {
        1 => ("CUDA_ERROR_INVALID_VALUE", "an argument is out of range"),
        2 => ("CUDA_ERROR_OUT_OF_MEMORY", "there is not enough memory"),
        3 => ("CUDA_ERROR_NOT_INITIALIZED", "the driver has not been started"),
        4 => ("CUDA_ERROR_DEINITIALIZED", "the process is ending"),
        34 => (
            "CUDA_ERROR_STUB_LIBRARY",
            "the library found is the toolkit's stub, not a driver: a `stubs` folder is on the library path",
        ),
        46 => (
            "CUDA_ERROR_DEVICE_UNAVAILABLE",
            "another process has the device for itself, or it is in a prohibited mode",
        ),
        100 => ("CUDA_ERROR_NO_DEVICE", "there is no CUDA device, or CUDA_VISIBLE_DEVICES hides all of them"),
        101 => ("CUDA_ERROR_INVALID_DEVICE", "there is no such device"),
        201 => ("CUDA_ERROR_INVALID_CONTEXT", "the device's context is gone"),
        209 => ("CUDA_ERROR_NO_BINARY_FOR_GPU", "the kernels cannot run on this device"),
        214 => ("CUDA_ERROR_ECC_UNCORRECTABLE", "the device's memory is damaged: it must be reset"),
        218 => ("CUDA_ERROR_INVALID_PTX", "the driver cannot compile the kernels"),
        222 => ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the driver is older than the kernels"),
        304 => ("CUDA_ERROR_OPERATING_SYSTEM", "the operating system refused it"),
        500 => ("CUDA_ERROR_NOT_FOUND", "there is no such thing"),
        600 => ("CUDA_ERROR_NOT_READY", "it is not over yet"),
        700 => (
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            "a kernel used an address that is not its own; the process must be started anew",
        ),
        702 => ("CUDA_ERROR_LAUNCH_TIMEOUT", "a kernel took longer than a display allows"),
        712 => ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "the memory is locked already"),
        719 => ("CUDA_ERROR_LAUNCH_FAILED", "a kernel failed; the process must be started anew"),
        801 => ("CUDA_ERROR_NOT_SUPPORTED", "the device or the system cannot do it"),
        802 => ("CUDA_ERROR_SYSTEM_NOT_READY", "the system's GPU services (fabric manager) do not run yet"),
        803 => (
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            "the kernel module and the library are of different drivers: restart after a driver update",
        ),
        804 => ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "the compatibility library is not for this kind of GPU"),
        999 => ("CUDA_ERROR_UNKNOWN", "an error that the driver has no name for"),
        _ => ("a code that vramp does not know", "see the CUDA driver's list of results"),
    }
}
