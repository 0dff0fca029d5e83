//! Modules, their functions and launches.

use std::ffi::{CStr, c_char, c_uint, c_void};

use cudarc::driver::sys::{CUfunction, CUjit_option, CUmodule, CUresult, CUstream};

use super::{exports, put};
use crate::handle::{Handles, Sort};
use crate::kernel::{self, Shape};
use crate::report::Kind;

exports! {
    /// A module of PTX text.
    Context fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) |mut state, device| {
        if module.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let number = unsafe { kernel::load(&mut state, device, image) }?;
        unsafe { put(module, Handles::pointer(Sort::Module, number)) }
    }

    /// The same; the options change nothing here.
    Context fn cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, _count: c_uint, _options: *mut CUjit_option, _values: *mut *mut c_void) |mut state, device| {
        if module.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let number = unsafe { kernel::load(&mut state, device, image) }?;
        unsafe { put(module, Handles::pointer(Sort::Module, number)) }
    }

    /// Its functions are no more; launches that are queued still run.
    Release fn cuModuleUnload(module: CUmodule) |mut state, _| {
        let number = state.module(module, "cuModuleUnload")?;
        state.unload(number);
        Ok(())
    }

    /// A kernel by its name.
    Context fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) |mut state, _| {
        if function.is_null() || name.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let number = state.module(module, "cuModuleGetFunction")?;
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let found = state.find_function(number, &name)?;
        unsafe { put(function, Handles::pointer(Sort::Function, found)) }
    }

    /// Queues a kernel. Its parameters are copied now.
    Context fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |mut state, device| {
        let function = state.function(function, "cuLaunchKernel")?;
        let id = state.stream(stream, device, "cuLaunchKernel")?;
        if !extra.is_null() {
            let text = "cuLaunchKernel: `extra` is not modelled; pass `kernelParams`";
            return state.refuse(Kind::Unsupported, text, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
        unsafe { kernel::launch(state, function, id, shape, parameters) }
    }
}
