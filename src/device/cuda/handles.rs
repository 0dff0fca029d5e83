//! What the driver hands out and wants back: streams, events, locked host memory. Each ends with its owner; what may still be
//! in flight is for the owner to wait for. Nothing here decides what is copied.
#![allow(unsafe_code)] // driver calls on handles that this file owns

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Refusal, call};
use super::gpu::{Bound, Gpu};
use crate::memory::HostBlock;

/// A stream that no other stream waits for.
pub(super) struct StreamHandle {
    gpu: Arc<Gpu>,
    raw: usize,
}

/// A point in a stream.
pub(super) struct Event {
    gpu: Arc<Gpu>,
    raw: usize,
}

/// Host memory that the GPU reads and writes by itself.
pub(super) struct Pinned {
    gpu: Arc<Gpu>,
    start: usize,
}

/// A block of host memory of its own, locked where the system lets it be.
pub(super) struct PinnedBlock {
    /// Before `block`: fields are dropped in this order.
    _pinned: Option<Pinned>,
    block: HostBlock,
}

impl StreamHandle {
    pub(super) fn new(gpu: &Arc<Gpu>, bound: &Bound<'_>) -> Result<StreamHandle, Refusal> {
        let mut raw: sys::CUstream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: writes one handle.
        unsafe { call!(bound.driver(), cuStreamCreate(&raw mut raw, flags)) }?;
        Ok(StreamHandle { gpu: Arc::clone(gpu), raw: raw as usize })
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw as sys::CUstream
    }

    /// Waits until everything in the stream is over.
    pub(super) fn synchronize(&self, bound: &Bound<'_>) -> Result<(), Refusal> {
        // SAFETY: the stream is alive as long as `self`.
        unsafe { call!(bound.driver(), cuStreamSynchronize(self.raw())) }
    }

    /// Waits until nothing in the stream can touch memory any more, before that memory is freed. A wait that fails is tried
    /// once more. Returns whether the wait succeeded; if not, the caller must leak the memory, since the GPU may still use it.
    #[must_use = "memory of a stream that did not drain must be leaked"]
    pub(super) fn drain(&self, bound: &Bound<'_>) -> bool {
        self.synchronize(bound).or_else(|_| self.synchronize(bound)).is_ok()
    }

    /// Starts copying `bytes` bytes to the address `to` of the GPU.
    ///
    /// # Safety
    /// `from` is readable and not written, and the memory at `to` is the caller's, until the stream has passed this point.
    pub(super) unsafe fn copy_in(
        &self,
        bound: &Bound<'_>,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        unsafe { call!(bound.driver(), cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw())) }
    }

    /// Starts copying `bytes` bytes from the address `from` of the GPU.
    ///
    /// # Safety
    /// `to` is writable and touched by nothing else until the stream has passed this point. Until then the `bytes` bytes at `from`
    /// are memory of this GPU, alive, and written by nothing that the stream does not order before this.
    pub(super) unsafe fn copy_out(
        &self,
        bound: &Bound<'_>,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        unsafe { call!(bound.driver(), cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw())) }
    }

    /// Starts packing `rows` rows of `run` bytes, each `stride` bytes after the one before it, to the address `to`.
    ///
    /// # Safety
    /// As [`StreamHandle::copy_in`], for all rows.
    pub(super) unsafe fn copy_rows_in(
        &self,
        bound: &Bound<'_>,
        to: u64,
        from: *const u8,
        [run, stride, rows]: [usize; 3],
    ) -> Result<(), Refusal> {
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: from.cast(),
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: stride,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: run,
            WidthInBytes: run,
            Height: rows,
        };
        // SAFETY: the driver reads the description before it returns; the rest is the caller's promise.
        unsafe { call!(bound.driver(), cuMemcpy2DAsync_v2(&raw const copy, self.raw())) }
    }

    /// Starts setting `bytes` bytes at the address `to` of the GPU to zero.
    ///
    /// # Safety
    /// The memory at `to` is the caller's until the stream has passed this point.
    pub(super) unsafe fn zero(&self, bound: &Bound<'_>, to: u64, bytes: usize) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        unsafe { call!(bound.driver(), cuMemsetD8Async(to, 0, bytes, self.raw())) }
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if let Some(bound) = self.gpu.bind_to_release() {
            // SAFETY: the handle is this object's alone. Work still in the stream goes on.
            let _ = unsafe { call!(bound.driver(), cuStreamDestroy_v2(self.raw())) };
        }
    }
}

impl Event {
    /// An event at the present end of `stream`, waited for without burning a core; with `timed`, its time can be told.
    pub(super) fn record(
        gpu: &Arc<Gpu>,
        bound: &Bound<'_>,
        stream: &StreamHandle,
        timed: bool,
    ) -> Result<Event, Refusal> {
        let mut raw: sys::CUevent = std::ptr::null_mut();
        let blocking = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint;
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let flags = if timed { blocking } else { blocking | untimed };
        // SAFETY: writes one handle.
        unsafe { call!(bound.driver(), cuEventCreate(&raw mut raw, flags)) }?;
        let event = Event { gpu: Arc::clone(gpu), raw: raw as usize };
        // SAFETY: both handles are alive.
        unsafe { call!(bound.driver(), cuEventRecord(event.raw(), stream.raw())) }?;
        Ok(event)
    }

    fn raw(&self) -> sys::CUevent {
        self.raw as sys::CUevent
    }

    /// Waits until the stream has passed the event. An error of the work before it comes out here.
    pub(super) fn wait(&self, bound: &Bound<'_>) -> Result<(), Refusal> {
        // SAFETY: the event is alive.
        unsafe { call!(bound.driver(), cuEventSynchronize(self.raw())) }
    }

    /// Whether the stream has passed the event; an error counts as yes, waiting tells it.
    pub(super) fn has_passed(&self, bound: &Bound<'_>) -> bool {
        const NOT_READY: u32 = sys::CUresult::CUDA_ERROR_NOT_READY as u32;
        // SAFETY: the event is alive.
        let answer = unsafe { call!(bound.driver(), cuEventQuery(self.raw())) };
        !matches!(answer, Err(Refusal { code: NOT_READY, .. }))
    }

    /// Seconds from `earlier` to this event; both are timed and have passed.
    pub(super) fn seconds_since(&self, bound: &Bound<'_>, earlier: &Event) -> Result<f64, Refusal> {
        let mut milliseconds = 0.0;
        // SAFETY: writes one number; both events are alive.
        unsafe { call!(bound.driver(), cuEventElapsedTime(&raw mut milliseconds, earlier.raw(), self.raw())) }?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(bound) = self.gpu.bind_to_release() {
            // SAFETY: the handle is this object's alone.
            let _ = unsafe { call!(bound.driver(), cuEventDestroy_v2(self.raw())) };
        }
    }
}

impl Pinned {
    /// Locks `bytes` bytes from `start` on for the GPU.
    ///
    /// # Safety
    /// The memory stays mapped for as long as the answer lives.
    pub(super) unsafe fn new(
        gpu: &Arc<Gpu>,
        bound: &Bound<'_>,
        start: *mut u8,
        bytes: usize,
    ) -> Result<Pinned, Refusal> {
        // SAFETY: the caller's promise; locking changes no byte. Flag 1: for the contexts of all GPUs.
        unsafe { call!(bound.driver(), cuMemHostRegister_v2(start.cast::<c_void>(), bytes, 1)) }?;
        Ok(Pinned { gpu: Arc::clone(gpu), start: start as usize })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(bound) = self.gpu.bind_to_release() {
            // SAFETY: registered by `new`, unregistered once. Owners wait for the copies from it first.
            let _ = unsafe { call!(bound.driver(), cuMemHostUnregister(self.start as *mut c_void)) };
        }
    }
}

impl PinnedBlock {
    /// A block of `bytes` zeros, locked if the system lets it be.
    pub(super) fn new(gpu: &Arc<Gpu>, bound: &Bound<'_>, bytes: usize) -> std::io::Result<PinnedBlock> {
        let block = HostBlock::new(bytes)?;
        block.inherit_on_fork(false); // the GPU reads and writes it by DMA
        block.populate(0..bytes);
        // SAFETY: the block is dropped after its registration, and does not move.
        let pinned = unsafe { Pinned::new(gpu, bound, block.start().as_ptr(), bytes) };
        Ok(PinnedBlock { _pinned: pinned.ok(), block })
    }

    /// The first byte. Reading and writing is the owner's to justify.
    pub(super) fn start(&self) -> *mut u8 {
        self.block.start().as_ptr()
    }

    /// Number of bytes.
    pub(super) fn len(&self) -> usize {
        self.block.len()
    }
}
