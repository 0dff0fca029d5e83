//! Copies and fills.

use std::ffi::{c_uchar, c_uint, c_void};

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUdeviceptr, CUmemorytype, CUmemorytype_enum, CUresult, CUstream};

use super::exports;
use crate::copy::{fill, flat, submit};
use crate::state::Answer;
use crate::work::{Copy, Direction, Fill};

exports! {
    /// Host to device, in a stream.
    Context fn cuMemcpyHtoDAsync_v2(target: CUdeviceptr, source: *const c_void, bytes: usize, stream: CUstream) |mut state, device| {
        let id = state.stream(stream, device, "cuMemcpyHtoDAsync")?;
        submit(state, id, "cuMemcpyHtoDAsync", flat(Direction::HostToDevice, target, source as u64, bytes), false)
    }

    /// Device to host, in a stream.
    Context fn cuMemcpyDtoHAsync_v2(target: *mut c_void, source: CUdeviceptr, bytes: usize, stream: CUstream) |mut state, device| {
        let id = state.stream(stream, device, "cuMemcpyDtoHAsync")?;
        submit(state, id, "cuMemcpyDtoHAsync", flat(Direction::DeviceToHost, target as u64, source, bytes), false)
    }

    /// Within a device, in a stream.
    Context fn cuMemcpyDtoDAsync_v2(target: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream) |mut state, device| {
        let id = state.stream(stream, device, "cuMemcpyDtoDAsync")?;
        submit(state, id, "cuMemcpyDtoDAsync", flat(Direction::WithinDevice, target, source, bytes), false)
    }

    /// Host to device, done when the call returns.
    Context fn cuMemcpyHtoD_v2(target: CUdeviceptr, source: *const c_void, bytes: usize) |mut state, device| {
        let id = state.stream(std::ptr::null_mut(), device, "cuMemcpyHtoD")?;
        submit(state, id, "cuMemcpyHtoD", flat(Direction::HostToDevice, target, source as u64, bytes), true)
    }

    /// Device to host, done when the call returns.
    Context fn cuMemcpyDtoH_v2(target: *mut c_void, source: CUdeviceptr, bytes: usize) |mut state, device| {
        let id = state.stream(std::ptr::null_mut(), device, "cuMemcpyDtoH")?;
        submit(state, id, "cuMemcpyDtoH", flat(Direction::DeviceToHost, target as u64, source, bytes), true)
    }

    /// Rows, in a stream.
    Context fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) |mut state, device| {
        let copy = unsafe { copy.as_ref() }.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let id = state.stream(stream, device, "cuMemcpy2DAsync")?;
        let Some(copy) = rows(copy)? else { return Ok(()) };
        submit(state, id, "cuMemcpy2DAsync", copy, false)
    }

    /// Bytes, in a stream.
    Context fn cuMemsetD8Async(target: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream) |mut state, device| {
        let id = state.stream(stream, device, "cuMemsetD8Async")?;
        fill(state, id, "cuMemsetD8Async", Fill { target, bytes: count as u64, pattern: [value; 4] }, false)
    }

    /// Bytes, done when the call returns.
    Context fn cuMemsetD8_v2(target: CUdeviceptr, value: c_uchar, count: usize) |mut state, device| {
        let id = state.stream(std::ptr::null_mut(), device, "cuMemsetD8")?;
        fill(state, id, "cuMemsetD8", Fill { target, bytes: count as u64, pattern: [value; 4] }, true)
    }

    /// Words of 4 bytes, in a stream.
    Context fn cuMemsetD32Async(target: CUdeviceptr, value: c_uint, count: usize, stream: CUstream) |mut state, device| {
        let id = state.stream(stream, device, "cuMemsetD32Async")?;
        let bytes = (count as u64).checked_mul(4).filter(|_| target.is_multiple_of(4));
        let bytes = bytes.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        fill(state, id, "cuMemsetD32Async", Fill { target, bytes, pattern: value.to_ne_bytes() }, false)
    }
}

/// The copy that the structure describes; `None` if it has no byte.
fn rows(copy: &CUDA_MEMCPY2D) -> Answer<Option<Copy>> {
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    let (width, rows) = (copy.WidthInBytes as u64, copy.Height as u64);
    if width == 0 || rows == 0 {
        return Ok(None);
    }
    let pitch = |pitch: usize| match pitch as u64 {
        0 => Ok(width),
        pitch if pitch < width => Err(invalid),
        pitch => Ok(pitch),
    };
    let (source_pitch, target_pitch) = (pitch(copy.srcPitch)?, pitch(copy.dstPitch)?);
    let source = place(copy.srcMemoryType, copy.srcHost as u64, copy.srcDevice);
    let target = place(copy.dstMemoryType, copy.dstHost as u64, copy.dstDevice);
    let ((source, source_on_host), (target, target_on_host)) = (source?, target?);
    let direction = match (source_on_host, target_on_host) {
        (true, false) => Direction::HostToDevice,
        (false, true) => Direction::DeviceToHost,
        (false, false) => Direction::WithinDevice,
        (true, true) => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    };
    let start = |base: u64, x: usize, y: usize, pitch: u64| -> Answer<u64> {
        let offset = (y as u64).checked_mul(pitch).and_then(|rows| rows.checked_add(x as u64));
        offset.and_then(|offset| base.checked_add(offset)).ok_or(invalid)
    };
    Ok(Some(Copy {
        direction,
        source: start(source, copy.srcXInBytes, copy.srcY, source_pitch)?,
        source_pitch,
        target: start(target, copy.dstXInBytes, copy.dstY, target_pitch)?,
        target_pitch,
        width,
        rows,
        snapshot: None,
        flip: false,
    }))
}

/// The address of a side, and whether it is host memory.
fn place(kind: CUmemorytype, host: u64, device: CUdeviceptr) -> Answer<(u64, bool)> {
    match kind {
        CUmemorytype_enum::CU_MEMORYTYPE_HOST => Ok((host, true)),
        CUmemorytype_enum::CU_MEMORYTYPE_DEVICE => Ok((device, false)),
        _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    }
}
