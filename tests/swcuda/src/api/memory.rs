//! Memory of devices and pinned memory of the host.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemPool_attribute, CUmemoryPool, CUmemorytype_enum, CUpointer_attribute,
    CUpointer_attribute_enum, CUresult, CUstream,
};

use super::{exports, offer, put};
use crate::clock::Mode;
use crate::footprint::Footprint;
use crate::handle::{Handles, Sort};
use crate::state::{Answer, State};
use crate::work::Work;
use crate::{memory, pinned};

exports! {
    /// Device memory.
    Context fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) |state, device| {
        if bytes == 0 || address.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let (_state, allocated) = memory::allocate(state, device, bytes, false);
        unsafe { put(address, allocated?) }
    }

    /// Waits for the device and gives memory back.
    Release fn cuMemFree_v2(address: CUdeviceptr) |state, _| {
        memory::free(state, address)
    }

    /// Device memory that exists from a place in a stream on.
    Context fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream) |mut state, device| {
        if !state.config.pools {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        if bytes == 0 || address.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let id = state.stream(stream, device, "cuMemAllocAsync")?;
        let of = state.streams.get(&id).map_or(device, |stream| stream.device);
        let (mut state, allocated) = memory::allocate(state, of, bytes, true);
        let allocated = allocated?;
        let touches = vec![(Footprint::flat(allocated, bytes as u64), Mode::Write)];
        state.enqueue(id, "cuMemAllocAsync", touches, Vec::new(), Work::Nothing);
        unsafe { put(address, allocated) }
    }

    /// Gives it back at a place in a stream.
    Release fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) |mut state, device| {
        let id = match state.stream(stream, device, "cuMemFreeAsync") {
            Ok(id) => id,
            Err(code) => state.find_stream(stream).ok_or(code)?,
        };
        memory::free_in_order(state, address, id)
    }

    /// Pinned memory of the driver's own. The flags change nothing here.
    Context fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) |mut state, device| {
        if address.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let at = pinned::allocate(&mut state, device, bytes)?;
        unsafe { put(address, at as *mut c_void) }
    }

    /// The same.
    Context fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) |mut state, device| {
        if address.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let at = pinned::allocate(&mut state, device, bytes)?;
        unsafe { put(address, at as *mut c_void) }
    }

    /// Gives it back; a later use dies.
    Release fn cuMemFreeHost(address: *mut c_void) |state, _| {
        pinned::free(state, address as u64)
    }

    /// Pins memory of the program's own.
    Context fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) |mut state, device| {
        pinned::register(&mut state, device, address as u64, bytes as u64, flags)
    }

    /// Unpins it; it is plain memory again.
    Release fn cuMemHostUnregister(address: *mut c_void) |state, _| {
        pinned::unregister(state, address as u64)
    }

    /// The address by which a device knows pinned memory: the same.
    Context fn cuMemHostGetDevicePointer_v2(pointer: *mut CUdeviceptr, address: *mut c_void, _flags: c_uint) |state, _| {
        state.pin_at(address as u64).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        unsafe { put(pointer, address as CUdeviceptr) }
    }

    /// Free and total bytes of the current device.
    Context fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |state, device| {
        let all = state.config.vram_bytes;
        unsafe {
            put(free, (all - state.devices[device].used.min(all)) as usize)?;
            put(total, all as usize)
        }
    }

    /// The allocation that an address is in.
    Driver fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr) |state, _| {
        let (start, allocation) = state.allocation_at(address).ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        unsafe {
            offer(base, start);
            offer(bytes, allocation.bytes as usize);
        }
        Ok(())
    }

    /// One attribute of an address.
    Driver fn cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr) |state, _| {
        if data.is_null() || state.owner(address).is_none() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        unsafe { state.put_attribute(data, attribute, address) }
    }

    /// Several; those of an address that is nobody's are 0.
    Driver fn cuPointerGetAttributes(count: c_uint, attributes: *mut CUpointer_attribute, data: *mut *mut c_void, address: CUdeviceptr) |state, _| {
        if attributes.is_null() || data.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        for position in 0..count as usize {
            unsafe { state.put_attribute(*data.add(position), *attributes.add(position), address) }?;
        }
        Ok(())
    }

    /// The device's only memory pool.
    Driver fn cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice) |mut state, _| {
        let number = state.device(device)?.pool;
        if !state.config.pools {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        unsafe { put(pool, Handles::pointer(Sort::Pool, number)) }
    }

    /// The pool keeps nothing, so there is nothing to trim.
    Driver fn cuMemPoolTrimTo(pool: CUmemoryPool, _bytes: usize) |state, _| {
        state.pool_device(pool).map(|_| ())
    }

    /// Accepted; the pool keeps nothing whatever the threshold.
    Driver fn cuMemPoolSetAttribute(pool: CUmemoryPool, _attribute: CUmemPool_attribute, value: *mut c_void) |state, _| {
        state.pool_device(pool)?;
        if value.is_null() { Err(CUresult::CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
    }
}

/// Whose an address is.
struct Owner {
    device: usize,
    base: u64,
    bytes: u64,
    pinned: bool,
}

impl State {
    fn owner(&self, address: u64) -> Option<Owner> {
        if let Some((base, one)) = self.allocation_at(address) {
            return Some(Owner { device: one.device, base, bytes: one.bytes, pinned: false });
        }
        self.pin_at(address).map(|(base, pin)| Owner { device: pin.device, base, bytes: pin.bytes, pinned: true })
    }

    fn pool_device(&self, pool: CUmemoryPool) -> Answer<usize> {
        let device = self.devices.iter().position(|device| Handles::pointer(Sort::Pool, device.pool) == pool);
        device.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Writes an attribute in its own type.
    ///
    /// # Safety
    /// `data` has room for the attribute.
    unsafe fn put_attribute(&self, data: *mut c_void, attribute: CUpointer_attribute, address: u64) -> Answer {
        use CUpointer_attribute_enum as A;
        let owner = self.owner(address);
        let pinned = owner.as_ref().is_some_and(|owner| owner.pinned);
        let memory_type = match &owner {
            None => 0,
            Some(_) if pinned => CUmemorytype_enum::CU_MEMORYTYPE_HOST as c_uint,
            Some(_) => CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as c_uint,
        };
        // SAFETY: the caller's promise; the types are the manual's.
        unsafe {
            match attribute {
                A::CU_POINTER_ATTRIBUTE_CONTEXT => {
                    let context = owner.map_or(std::ptr::null_mut(), |owner| self.context(owner.device));
                    put(data.cast(), context)
                }
                A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(data.cast(), memory_type),
                A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => put(data.cast(), owner.map_or(0, |_| address)),
                A::CU_POINTER_ATTRIBUTE_HOST_POINTER => put(data.cast(), if pinned { address } else { 0 }),
                A::CU_POINTER_ATTRIBUTE_IS_MANAGED => put(data.cast::<u8>(), 0),
                A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                    put(data.cast::<c_int>(), owner.map_or(-2, |owner| owner.device as c_int))
                }
                A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(data.cast(), owner.map_or(0, |owner| owner.base)),
                A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => {
                    put(data.cast::<usize>(), owner.map_or(0, |owner| owner.bytes as usize))
                }
                A::CU_POINTER_ATTRIBUTE_BUFFER_ID => put(data.cast(), owner.map_or(0, |owner| owner.base)),
                A::CU_POINTER_ATTRIBUTE_MAPPED => put(data.cast::<u8>(), u8::from(owner.is_some())),
                _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
            }
        }
    }
}
