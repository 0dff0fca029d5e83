//! NVIDIA GPUs: locked staging buffers, copies that the GPU makes itself on streams of its own, tensors in one arena in VRAM.
//!
//! The driver is looked for when a device is opened, never before: one program serves machines with and without a GPU. The
//! primary context is used, so that other users of the GPU in the process (cudarc, PyTorch, CUDA's runtime) share addresses
//! with it. Every call is made with that context current on the calling thread, which gets its own back afterwards.
//!
//! `driver` finds and calls, `gpu` owns the context, `handles` what the driver hands out, `memory` arenas and the way back,
//! `pinning` locks the staging buffers, `stream` uploads, `download` the way back of many bytes, `kernels` launches, `cufile` and `direct` let the GPU read files itself.
//! These files alone name cudarc. Nothing here reads
//! files or knows a format.

mod cufile;
mod direct;
mod download;
mod driver;
mod gpu;
mod handles;
mod kernels;
mod memory;
mod pinning;
mod stream;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

#[cfg(any(test, feature = "testing"))]
pub use cufile::forget_cufile;
pub use gpu::CudaInfo;
pub use memory::{CudaMemory, DeviceAllocator};

use direct::CudaReads;
use gpu::Gpu;
pub(super) use memory::DeviceMemory;
use pinning::Pinning;
use stream::CudaStream;

use super::{Arena, Device, DeviceLimits, DirectReads, MAX_LANES, Stream};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::StagingPool;
use crate::os;

/// Staging that keeps a link and the readers busy at once: a copy of 16 MiB takes a third of a millisecond on the fastest
/// link, far more than starting it.
const STAGING: (usize, usize) = (16, 16 << 20);

/// Alignment of tensors: what the driver's own allocations have, and what its copies and the widest loads like.
const ALIGN: u64 = 256;

/// Streams for uploads, unless told otherwise, at most. One keeps a copy engine busy; a second hides the start of its copies, and lets one upload be
/// converted while the next is copied.
const USUAL_STREAMS: usize = 2;

/// The GPU of an ordinal or a UUID.
pub(super) fn open(which: &str) -> Result<Arc<dyn Device>> {
    let device = match which.parse() {
        Ok(ordinal) => CudaDevice::open(ordinal),
        Err(_) => CudaDevice::open_uuid(which),
    };
    Ok(Arc::new(device?))
}

/// The first GPU, where there is one.
pub(super) fn first() -> Result<Option<Arc<dyn Device>>> {
    Ok(CudaDevice::first()?.map(|device| Arc::new(device) as Arc<dyn Device>))
}

/// One GPU.
#[derive(Clone)]
pub struct CudaDevice {
    gpu: Arc<Gpu>,
    memory: CudaMemory,
}

impl CudaDevice {
    /// The GPU of an ordinal, as this process counts them (`CUDA_VISIBLE_DEVICES` hides and reorders). Its context is made in
    /// the background: the first call that needs it waits.
    ///
    /// # Errors
    /// [`Error::Device`] that says what is missing: the driver, a newer driver, a device, or a device of this number.
    pub fn open(ordinal: usize) -> Result<CudaDevice> {
        Ok(CudaDevice { gpu: Gpu::open(ordinal)?, memory: CudaMemory::default() })
    }

    /// The first GPU; `None` on a machine without a CUDA driver or without a device that this process may see.
    ///
    /// # Errors
    /// [`Error::Device`] when there is a driver that cannot be used.
    pub fn first() -> Result<Option<CudaDevice>> {
        if gpu::any()? { CudaDevice::open(0).map(Some) } else { Ok(None) }
    }

    /// The GPU with this UUID (`GPU-8c6f…`); its first characters are enough if they fit one GPU only.
    ///
    /// # Errors
    /// As [`CudaDevice::open`]; and when no GPU has it, naming those that are there.
    pub fn open_uuid(uuid: &str) -> Result<CudaDevice> {
        CudaDevice::open(Gpu::find(uuid)?)
    }

    /// The GPUs that this process may see.
    ///
    /// # Errors
    /// [`Error::Device`] when there is no driver to ask, or it does not start.
    pub fn list() -> Result<Vec<CudaInfo>> {
        gpu::all().map_err(|message| Error::Device { device: "cuda".to_owned(), op: "list devices", message })
    }

    /// The same device with arenas from elsewhere.
    pub fn with_memory(self, memory: CudaMemory) -> CudaDevice {
        CudaDevice { memory, ..self }
    }

    /// An arena of memory that exists already, for [`Loader::load_into`](crate::load::Loader::load_into): a model whose
    /// addresses must stay (captured graphs know them) gets new weights.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` are memory of this GPU that stays allocated as long as `keep` is held, and nobody else
    /// reads or writes what is loaded into until the load is over.
    #[allow(unsafe_code)] // the caller's promise about addresses
    pub unsafe fn memory_at(&self, address: u64, bytes: u64, keep: Arc<dyn Any + Send + Sync>) -> Arena {
        // SAFETY: the caller's promise.
        Arena::device(Box::new(unsafe { DeviceMemory::lent(&self.gpu, address, bytes, keep) }))
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.gpu.name()
    }

    fn product(&self) -> Option<String> {
        Some(self.gpu.product())
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { host_visible: false, keeps: true, align: ALIGN, staging: STAGING }
    }

    fn staging(&self, count: usize, buffer_bytes: usize, fallbacks: &Fallbacks) -> Result<StagingPool> {
        let pool = StagingPool::reserve(count, buffer_bytes)
            .map_err(|_| os::out_of_memory("cpu", (count as u64).saturating_mul(buffer_bytes as u64)))?;
        pool.prepare_by(Box::new(Pinning::start(&self.gpu, &pool, fallbacks)));
        Ok(pool)
    }

    fn alloc(&self, bytes: u64) -> Result<Arena> {
        let bound = self.gpu.bind()?;
        Ok(Arena::device(Box::new(DeviceMemory::alloc(&self.gpu, &bound, bytes, &self.memory)?)))
    }

    fn stream(&self, lanes: Option<usize>, fallbacks: &Fallbacks) -> Result<Box<dyn Stream>> {
        let usual = || self.gpu.copy_engines().min(USUAL_STREAMS);
        let count = lanes.unwrap_or_else(usual).min(MAX_LANES);
        Ok(Box::new(CudaStream::new(&self.gpu, count, fallbacks)?))
    }

    fn direct_reads(&self, native_only: bool) -> Option<Result<Arc<dyn DirectReads>, String>> {
        Some(CudaReads::of(&self.gpu, native_only)?.map(|reads| Arc::new(reads) as Arc<dyn DirectReads>))
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({})", self.gpu.name())
    }
}
