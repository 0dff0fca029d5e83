//! Devices, their primary contexts and which context is current.

use std::ffi::{c_char, c_int, c_uint};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUdevice_attribute_enum, CUresult, CUuuid};

use super::{exports, offer, put};
use crate::config::Config;
use crate::device::{Device, NAME};
use crate::state::Answer;
use crate::{lifetime, stream};

exports! {
    /// Makes the devices; says once in a process that they are none.
    Nothing fn cuInit(flags: c_uint) |mut state, _| {
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        announce();
        if !state.initialised {
            state.make_devices();
            if state.devices.is_empty() {
                return Err(CUresult::CUDA_ERROR_NO_DEVICE);
            }
            state.initialised = true;
        }
        Ok(())
    }

    /// Works before `cuInit`.
    Nothing fn cuDriverGetVersion(version: *mut c_int) |state, _| {
        unsafe { put(version, state.config.driver_version) }
    }

    /// Number of visible devices.
    Driver fn cuDeviceGetCount(count: *mut c_int) |state, _| {
        unsafe { put(count, state.devices.len() as c_int) }
    }

    /// A device by its ordinal.
    Driver fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) |mut state, _| {
        state.device(ordinal)?;
        unsafe { put(device, ordinal) }
    }

    /// The name, which says that there is no GPU.
    Driver fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) |mut state, _| {
        state.device(device)?;
        unsafe { put_text(name, length, NAME) }
    }

    /// 16 bytes that differ between devices.
    Driver fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) |mut state, _| {
        let physical = state.device(device)?.physical;
        unsafe { put(uuid, CUuuid { bytes: Device::uuid(physical).map(|byte| byte as c_char) }) }
    }

    /// Bytes of memory.
    Driver fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) |mut state, _| {
        state.device(device)?;
        unsafe { put(bytes, state.config.vram_bytes as usize) }
    }

    /// Attributes: those that the configuration knows, and a few constants; the rest are 0.
    Driver fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) |mut state, _| {
        let physical = state.device(device)?.physical;
        unsafe { put(value, self::attribute(&state.config, physical, attribute)) }
    }

    /// The PCI address.
    Driver fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: CUdevice) |mut state, _| {
        let physical = state.device(device)?.physical;
        unsafe { put_text(text, length, &Device::pci(physical)) }
    }

    /// Retains the primary context.
    Driver fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) |mut state, _| {
        let index = device as usize;
        state.device(device)?;
        unsafe { put(context, state.context(index)) }?;
        state.device(device)?.references += 1;
        Ok(())
    }

    /// Releases it; the last release ends it and all that is in it.
    DriverRelease fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |mut state, _| {
        let of = state.device(device)?;
        of.references = of.references.checked_sub(1).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        if of.references == 0 {
            drop(lifetime::end_context(state, device as usize));
        }
        Ok(())
    }

    /// Flags, and whether anybody holds it.
    Driver fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int) |mut state, _| {
        let of = state.device(device)?;
        unsafe {
            put(flags, of.flags)?;
            put(active, c_int::from(of.references > 0))
        }
    }

    /// Flags, kept and without effect.
    Driver fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint) |mut state, _| {
        state.device(device)?.flags = flags;
        Ok(())
    }

    /// The current context, or null.
    Driver fn cuCtxGetCurrent(context: *mut CUcontext) |state, _| {
        let current = state.current().map_or(std::ptr::null_mut(), |device| state.context(device));
        unsafe { put(context, current) }
    }

    /// Makes a context current in the place of the one that is.
    Driver fn cuCtxSetCurrent(context: CUcontext) |state, _| {
        let device = state.context_device(context)?;
        state.set_current(device);
        Ok(())
    }

    /// Makes a context current above the one that is.
    Driver fn cuCtxPushCurrent_v2(context: CUcontext) |state, _| {
        let device = state.context_device(context)?.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        state.push_current(device);
        Ok(())
    }

    /// Undoes a push.
    Driver fn cuCtxPopCurrent_v2(context: *mut CUcontext) |state, _| {
        let device = state.pop_current().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        unsafe { offer(context, state.context(device)) };
        Ok(())
    }

    /// The device of the current context.
    Driver fn cuCtxGetDevice(device: *mut CUdevice) |state, _| {
        let current = state.current().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        unsafe { put(device, current as CUdevice) }
    }

    /// Waits for all work of the current context.
    Context fn cuCtxSynchronize() |state, device| {
        stream::wait_device(state, device).health(device)
    }

    /// Greatest and least priority of streams.
    Context fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |_state, _| {
        unsafe {
            offer(least, 0);
            offer(greatest, super::stream::GREATEST_PRIORITY);
        }
        Ok(())
    }
}

/// Says once in a process what this is.
fn announce() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("SWCUDA_QUIET").is_none_or(|value| value != "1") {
            eprintln!("swcuda: this is a test double, no GPU");
        }
    });
}

/// Writes text that ends in NUL, cut to the length that the program has room for.
///
/// # Safety
/// `target` has room for `length` bytes.
unsafe fn put_text(target: *mut c_char, length: c_int, text: &str) -> Answer {
    let room = usize::try_from(length).ok().filter(|&length| length > 0 && !target.is_null());
    let shown = text.len().min(room.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)? - 1);
    // SAFETY: the caller's promise; `shown` leaves room for the NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), target.cast::<u8>(), shown);
        target.add(shown).write(0);
    }
    Ok(())
}

fn attribute(config: &Config, physical: usize, attribute: CUdevice_attribute) -> c_int {
    use CUdevice_attribute_enum as A;
    match attribute {
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => config.compute.0,
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => config.compute.1,
        A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => c_int::from(config.pools),
        A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => config.copy_engines,
        A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => physical as c_int + 1,
        A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 4,
        A::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
        A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => c_int::MAX,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
        A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => 48 << 10,
        A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => 2048,
        A::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT => 512,
        A::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
        | A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM => 1,
        _ => 0,
    }
}
