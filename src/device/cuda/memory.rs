//! Memory of a GPU: an arena from the driver, from its stream-ordered pool, from the caller's own allocator or simply the
//! caller's; and the way back to the host, through a small locked block. An arena is written here only for who has the right to
//! write the range ([`Region::write`](crate::device::Region::write)).
#![allow(unsafe_code)] // allocates and frees by address, copies into memory that this file owns

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::CudaDevice;
use super::driver::{Refusal, call};
use super::gpu::{Bound, Gpu};
use super::handles::{Event, PinnedBlock, StreamHandle};
use crate::device::{Device, Memory, Region, View};
use crate::digest;
use crate::error::{Error, Result};
use crate::os;

/// Bytes of each half of the block that bytes come back through: one is copied out while the other is filled.
const HALF_BYTES: usize = 4 << 20;

/// Where arenas come from.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum CudaMemory {
    /// `cuMemAlloc`: an allocation of its own, given back to the system when it is dropped.
    #[default]
    Own,
    /// The driver's stream-ordered pool (`cuMemAllocAsync`), which other users of the process may share.
    Pool,
    /// The allocator of the embedding program.
    Allocator(Arc<dyn DeviceAllocator>),
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CudaMemory::Own => "Own",
            CudaMemory::Pool => "Pool",
            CudaMemory::Allocator(_) => "Allocator",
        })
    }
}

/// An allocator of GPU memory that the embedding program has.
///
/// # Safety
/// What [`DeviceAllocator::alloc`] returns is memory of the device it is asked for, at least as many bytes as asked for, on a
/// multiple of 256, and nobody else's until it is freed.
#[allow(unsafe_code)] // the promise of an implementation
pub unsafe trait DeviceAllocator: Send + Sync {
    /// The address of `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or whatever the allocator says.
    fn alloc(&self, bytes: u64) -> Result<u64>;

    /// Takes back what `alloc` returned. Called once, when no tensor of the load is left.
    fn free(&self, address: u64, bytes: u64);
}

/// One allocation, or a loan.
pub(in crate::device) struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: u64,
    origin: Origin,
    /// Made when something is read back.
    readback: Mutex<Option<Readback>>,
    /// Whether a copy to this memory was started that could not be waited for: the memory is then never freed.
    unsettled: AtomicBool,
}

enum Origin {
    Nothing,
    Own,
    Pool(StreamHandle),
    Allocator(Arc<dyn DeviceAllocator>),
    Lent(#[expect(dead_code, reason = "kept alive")] Arc<dyn Any + Send + Sync>),
}

impl DeviceMemory {
    fn new(gpu: &Arc<Gpu>, address: u64, bytes: u64, origin: Origin) -> DeviceMemory {
        let (gpu, readback, unsettled) = (Arc::clone(gpu), Mutex::new(None), AtomicBool::new(false));
        DeviceMemory { gpu, address, bytes, origin, readback, unsettled }
    }

    /// Memory from the driver, for the module's own needs.
    pub(super) fn own(gpu: &Arc<Gpu>, bound: &Bound<'_>, bytes: u64) -> Result<DeviceMemory> {
        DeviceMemory::alloc(gpu, bound, bytes, &CudaMemory::Own)
    }

    /// Memory from where `source` says. Whether there is enough is asked first: the answer has both numbers.
    pub(super) fn alloc(gpu: &Arc<Gpu>, bound: &Bound<'_>, bytes: u64, source: &CudaMemory) -> Result<DeviceMemory> {
        let memory = |address, origin| DeviceMemory::new(gpu, address, bytes, origin);
        if bytes == 0 {
            return Ok(memory(0, Origin::Nothing));
        }
        if let CudaMemory::Allocator(allocator) = source {
            return Ok(memory(allocator.alloc(bytes)?, Origin::Allocator(Arc::clone(allocator))));
        }
        let out_of_memory = |free| Error::OutOfMemory { device: gpu.name(), needed: bytes, free, limit: None };
        let (free, _) = bound.memory_info().map_err(|refusal| gpu.error("ask for free memory", refusal))?;
        // A pool may hold more than is free: only its own answer counts.
        if free < bytes && matches!(source, CudaMemory::Own) {
            return Err(out_of_memory(Some(free)));
        }
        let len = usize::try_from(bytes).map_err(|_| out_of_memory(Some(free)))?;
        let taken = match source {
            CudaMemory::Pool => from_pool(gpu, bound, len),
            _ => from_driver(bound, len),
        };
        match taken {
            Ok((address, origin)) => Ok(memory(address, origin)),
            Err(refusal) if refusal.is_out_of_memory() => {
                Err(out_of_memory(bound.memory_info().ok().map(|(free, _)| free)))
            }
            Err(refusal) => Err(gpu.error("allocate memory", refusal)),
        }
    }

    /// Memory that exists: `keep` is held for as long as it is used.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` are memory of this GPU, alive as long as `keep`, and nobody else writes them meanwhile.
    pub(super) unsafe fn lent(
        gpu: &Arc<Gpu>,
        address: u64,
        bytes: u64,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> DeviceMemory {
        DeviceMemory::new(gpu, address, bytes, Origin::Lent(keep))
    }

    /// The address of the first byte; `None` where there is no byte.
    pub(in crate::device) fn address(&self) -> Option<u64> {
        (self.bytes > 0).then_some(self.address)
    }

    /// The GPU whose memory it is, as its device is called.
    pub(in crate::device) fn owner(&self) -> String {
        self.gpu.name()
    }

    /// The address of the byte number `at`.
    pub(super) fn at(&self, at: u64) -> u64 {
        self.address + at
    }
}

/// The address of a region's first byte, if the region is memory that this package made or vouched for, in this GPU's context.
/// Nothing else may be the target of a copy, a kernel or a read of the GPU: an address from anywhere else is only a number.
pub(super) fn target(gpu: &Gpu, region: &Region) -> Option<u64> {
    let memory = region.memory::<DeviceMemory>().filter(|memory| memory.gpu.shares_context_with(gpu))?;
    memory.address()?.checked_add(region.range().start)
}

/// The memory that a view lies in and the address of the view's first byte, under the same conditions as [`target`]: nothing else
/// may be the source of a copy of the GPU.
pub(super) fn source<'v>(gpu: &Gpu, view: &'v View) -> Option<(&'v DeviceMemory, u64)> {
    let memory = view.memory::<DeviceMemory>().filter(|memory| memory.gpu.shares_context_with(gpu))?;
    Some((memory, memory.address()?.checked_add(view.range().start)?))
}

fn from_driver(bound: &Bound<'_>, bytes: usize) -> Result<(u64, Origin), Refusal> {
    let mut address = 0;
    // SAFETY: writes one address.
    unsafe { call!(bound.driver(), cuMemAlloc_v2(&raw mut address, bytes)) }?;
    Ok((address, Origin::Own))
}

fn from_pool(gpu: &Arc<Gpu>, bound: &Bound<'_>, bytes: usize) -> Result<(u64, Origin), Refusal> {
    let stream = StreamHandle::new(gpu, bound)?;
    let mut address = 0;
    // SAFETY: writes one address; the stream is alive.
    unsafe { call!(bound.driver(), cuMemAllocAsync(&raw mut address, bytes, stream.raw())) }?;
    // From here on the memory may be used from every stream.
    if let Err(refusal) = stream.synchronize(bound) {
        free_to_pool(bound, address, &stream);
        return Err(refusal);
    }
    Ok((address, Origin::Pool(stream)))
}

fn free_to_pool(bound: &Bound<'_>, address: u64, stream: &StreamHandle) {
    // SAFETY: allocated from the pool, freed once, and nothing that uses it is in flight.
    let _ = unsafe { call!(bound.driver(), cuMemFreeAsync(address, stream.raw())) };
    let _ = stream.drain(bound); // the driver frees in stream order: nothing else is waited for
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        drop(self.readback.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        if *self.unsettled.get_mut() {
            // The GPU may still write here: neither the memory nor what keeps it alive is given back.
            return std::mem::forget(std::mem::replace(&mut self.origin, Origin::Nothing));
        }
        if let Origin::Allocator(allocator) = &self.origin {
            return allocator.free(self.address, self.bytes);
        }
        let Some(bound) = self.gpu.bind_to_release() else { return };
        match &self.origin {
            Origin::Own => {
                // SAFETY: allocated by the driver, freed once; uploads in flight hold regions of it, which keep it alive.
                let _ = unsafe { call!(bound.driver(), cuMemFree_v2(self.address)) };
            }
            Origin::Pool(stream) => free_to_pool(&bound, self.address, stream),
            Origin::Nothing | Origin::Lent(_) | Origin::Allocator(_) => {}
        }
    }
}

impl Memory for DeviceMemory {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn device(&self) -> Option<Arc<dyn Device>> {
        Some(Arc::new(CudaDevice { gpu: Arc::clone(&self.gpu), memory: CudaMemory::default() }))
    }

    fn download(&self, range: Range<u64>, target: &mut [u8]) -> Result<()> {
        if range.start > range.end || range.end > self.bytes || range.end - range.start != target.len() as u64 {
            return Err(Error::Poisoned { what: "a range to read back that is none of the arena's" });
        }
        if target.is_empty() {
            return Ok(());
        }
        self.with_readback(|readback, bound| {
            let done = readback.download(&self.gpu, bound, self.at(range.start), target);
            done.map_err(|refusal| self.gpu.error("read memory back", refusal))
        })
    }

    fn upload(&self, at: u64, bytes: &[u8]) -> Result<()> {
        if at.checked_add(bytes.len() as u64).is_none_or(|end| end > self.bytes) {
            return Err(Error::Poisoned { what: "bytes for a range that is none of the arena's" });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        self.with_readback(|readback, bound| {
            let done = readback.upload(&self.gpu, bound, self.at(at), bytes);
            done.map_err(|refusal| self.gpu.error("copy to the GPU", refusal))
        })
    }

    fn checksum(&self, range: Range<u64>) -> Result<u64> {
        let len = range.end.saturating_sub(range.start);
        if range.end > self.bytes {
            return Err(Error::Poisoned { what: "a range to sum that is none of the arena's" });
        }
        if len == 0 {
            return Ok(digest::checksum(&[]));
        }
        let address = self.at(range.start);
        if !address.is_multiple_of(8) {
            return self.checksum_on_host(range); // of the kernel's words: in memory of the caller's only
        }
        let sum = self.with_readback(|readback, bound| readback.checksum(&self.gpu, bound, address, len))?;
        Ok(digest::checksum_finish(sum, len))
    }

    fn transposed(&self, range: Range<u64>, shape: [u64; 2], element_bytes: u64) -> Result<Box<dyn Memory>> {
        let bytes = shape[0].checked_mul(shape[1]).and_then(|elements| elements.checked_mul(element_bytes));
        let fits =
            range.end <= self.bytes && bytes.is_some_and(|bytes| range.end.checked_sub(range.start) == Some(bytes));
        let aligned = element_bytes.is_power_of_two() && self.at(range.start).is_multiple_of(element_bytes);
        if !fits || !aligned || element_bytes > 8 {
            return Err(Error::Poisoned { what: "a matrix that is none of the arena's" });
        }
        Ok(Box::new(self.transposed_copy(self.at(range.start), shape, element_bytes)?))
    }
}

impl DeviceMemory {
    /// The checksum of bytes that lie misaligned for the kernel.
    fn checksum_on_host(&self, range: Range<u64>) -> Result<u64> {
        let needed = range.end.saturating_sub(range.start);
        let out_of_memory = || os::out_of_memory("cpu", needed);
        let len = usize::try_from(needed).map_err(|_| out_of_memory())?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| out_of_memory())?;
        bytes.resize(len, 0);
        self.download(range, &mut bytes)?;
        Ok(digest::checksum(&bytes))
    }

    /// A new allocation that holds the `shape` (rows, columns) elements at `source` with rows and columns exchanged.
    fn transposed_copy(&self, source: u64, [rows, columns]: [u64; 2], element_bytes: u64) -> Result<DeviceMemory> {
        let bound = self.gpu.bind()?;
        let refused = |refusal| self.gpu.error("transpose", refusal);
        let bytes = rows * columns * element_bytes;
        let target = DeviceMemory::own(&self.gpu, &bound, bytes)?;
        if bytes == 0 {
            return Ok(target);
        }
        let stream = StreamHandle::new(&self.gpu, &bound).map_err(refused)?;
        let places = [source, target.address];
        // SAFETY: the source lies in this memory and the target is as long; both outlive the wait below.
        let started = unsafe { self.gpu.kernels().transpose(&bound, &stream, places, [rows, columns], element_bytes) };
        let done = started.and_then(|()| stream.synchronize(&bound));
        match done {
            Ok(()) => Ok(target),
            Err(refusal) => {
                if !stream.drain(&bound) {
                    std::mem::forget(target); // the kernel may still write to it
                }
                Err(refused(refusal))
            }
        }
    }

    /// Does `work` with the way back to the host, which is made the first time.
    fn with_readback<T>(&self, work: impl FnOnce(&mut Readback, &Bound<'_>) -> Result<T>) -> Result<T> {
        let bound = self.gpu.bind()?;
        let mut kept = self.readback.lock().unwrap_or_else(PoisonError::into_inner);
        let mut readback = kept.take().map_or_else(|| Readback::new(&self.gpu, &bound), Ok)?;
        match work(&mut readback, &bound) {
            Ok(done) => {
                *kept = Some(readback);
                Ok(done)
            }
            Err(error) => {
                // It is made anew the next time.
                if !readback.settle() {
                    self.unsettled.store(true, Ordering::Relaxed);
                }
                Err(error)
            }
        }
    }
}

/// The way back to the host: a stream, a locked block of two halves, and room for a sum on the GPU.
struct Readback {
    stream: StreamHandle,
    /// Shared with nobody but a leak.
    block: Arc<PinnedBlock>,
    sum: Option<Box<DeviceMemory>>,
}

impl Readback {
    fn new(gpu: &Arc<Gpu>, bound: &Bound<'_>) -> Result<Readback> {
        let stream = StreamHandle::new(gpu, bound).map_err(|refusal| gpu.error("make a stream", refusal))?;
        let out_of_memory = |_| os::out_of_memory("cpu", 2 * HALF_BYTES as u64);
        let block = PinnedBlock::new(gpu, bound, 2 * HALF_BYTES).map_err(out_of_memory)?;
        Ok(Readback { stream, block: Arc::new(block), sum: None })
    }

    /// Copies the bytes from `address` on into `target`: one half of the block is filled while the other is emptied.
    fn download(&self, gpu: &Arc<Gpu>, bound: &Bound<'_>, address: u64, target: &mut [u8]) -> Result<(), Refusal> {
        let mut before: Option<(Event, usize, &mut [u8])> = None;
        let mut address = address;
        for (index, chunk) in target.chunks_mut(HALF_BYTES).enumerate() {
            let half = index % 2 * HALF_BYTES;
            let len = chunk.len();
            // SAFETY: the half lies in the block, was emptied before (two chunks ago), and is emptied after its event only;
            // errors end in `Drop`, which waits.
            unsafe { self.stream.copy_out(bound, self.half(half), address, len) }?;
            let filling = (Event::record(gpu, bound, &self.stream, false)?, half, chunk);
            if let Some(filled) = before.replace(filling) {
                self.empty(bound, filled)?;
            }
            address += len as u64;
        }
        before.map_or(Ok(()), |filled| self.empty(bound, filled))
    }

    /// Copies `bytes` to the address `address` on: one half of the block is filled while the other is emptied.
    fn upload(&self, gpu: &Arc<Gpu>, bound: &Bound<'_>, address: u64, bytes: &[u8]) -> Result<(), Refusal> {
        let mut emptied: [Option<Event>; 2] = [None, None];
        let mut address = address;
        for (index, chunk) in bytes.chunks(HALF_BYTES).enumerate() {
            let half = self.half(index % 2 * HALF_BYTES);
            if let Some(event) = emptied[index % 2].take() {
                event.wait(bound)?;
            }
            // SAFETY: the chunk is no longer than a half, and nothing reads this half: its last copy has passed.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), half, chunk.len()) };
            // SAFETY: the half is not written before this copy has passed (the event above); the caller has the right to write
            // the memory at `address` until this function returns, which waits. After an error `settle` waits, and where it
            // cannot, block and memory are leaked.
            unsafe { self.stream.copy_in(bound, address, half, chunk.len()) }?;
            emptied[index % 2] = Some(Event::record(gpu, bound, &self.stream, false)?);
            address += chunk.len() as u64;
        }
        self.stream.synchronize(bound)
    }

    /// The first byte of the half that begins at `offset`.
    fn half(&self, offset: usize) -> *mut u8 {
        self.block.start().wrapping_add(offset)
    }

    fn empty(&self, bound: &Bound<'_>, (event, half, target): (Event, usize, &mut [u8])) -> Result<(), Refusal> {
        event.wait(bound)?;
        // SAFETY: `target` is no longer than a half, and the half lies in the block, filled: its event has passed.
        let source = unsafe { std::slice::from_raw_parts(self.half(half), target.len()) };
        target.copy_from_slice(source);
        Ok(())
    }

    /// The checksum of the bytes from `address` on, before their number is mixed in.
    fn checksum(&mut self, gpu: &Arc<Gpu>, bound: &Bound<'_>, address: u64, bytes: u64) -> Result<u64> {
        let refused = |refusal| gpu.error("sum memory", refusal);
        if self.sum.is_none() {
            self.sum = Some(Box::new(DeviceMemory::own(gpu, bound, 8)?));
        }
        let sum = self.sum.as_ref().map_or(0, |sum| sum.at(0));
        // SAFETY: eight bytes of this object's own; `Drop` waits before they are freed.
        unsafe { self.stream.zero(bound, sum, 8) }.map_err(refused)?;
        // SAFETY: the caller's memory is alive while this waits; the result goes into this object's eight bytes.
        unsafe { gpu.kernels().checksum(bound, &self.stream, address, bytes, sum) }.map_err(refused)?;
        let mut result = [0; 8];
        self.download(gpu, bound, sum, &mut result).map_err(refused)?;
        Ok(u64::from_le_bytes(result))
    }
}

impl Readback {
    /// Waits for copies that an error may have left in flight. `false`: it could not, and the block and the sum are leaked.
    fn settle(&mut self) -> bool {
        let drained = self.stream.gpu().bind_to_release().is_some_and(|bound| self.stream.drain(&bound));
        if !drained {
            std::mem::forget(Arc::clone(&self.block));
            std::mem::forget(self.sum.take());
        }
        drained
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        self.settle();
    }
}
