//! One GPU as this process uses it: its primary context, made in the background, and the right to call the driver for it.
//!
//! [`Gpu::bind`] makes the context current on the calling thread and gives it back as it was afterwards: no thread ever opens
//! a context on another GPU by accident, and an embedding program's own current context stays. Nothing here copies bytes.
#![allow(unsafe_code)] // driver calls on a context that this file owns

use std::ffi::c_int;
use std::fmt::Write as _;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use cudarc::driver::sys;

use super::driver::{Absence, Driver, Refusal, call};
use super::kernels::Kernels;
use crate::error::{Error, Result};

/// A GPU and this process's hold on its primary context.
pub(super) struct Gpu {
    driver: &'static Driver,
    ordinal: c_int,
    device: sys::CUdevice,
    context: Context,
    kernels: Kernels,
}

/// The primary context, retained on a thread of its own: making one takes a good part of a second.
struct Context {
    retaining: Mutex<Option<JoinHandle<Result<usize, Refusal>>>>,
    retained: OnceLock<Result<usize, Refusal>>,
}

/// Proof that the calling thread may call the driver for a GPU. Dropping it gives the thread its former context back.
pub(super) struct Bound<'a> {
    gpu: &'a Gpu,
    /// The current context is the thread's: this must not move to another.
    _thread: PhantomData<*const ()>,
}

impl Gpu {
    /// The GPU of an ordinal, as this process counts them (`CUDA_VISIBLE_DEVICES` is the driver's to read).
    pub(super) fn open(ordinal: usize) -> Result<Arc<Gpu>> {
        let name = format!("cuda:{ordinal}");
        let refused = |message: String| Error::Device { device: name.clone(), op: "open", message };
        let driver = Driver::start().map_err(|absence| refused(absence.to_string()))?;
        let count = driver.device_count().map_err(|refusal| refused(refusal.to_string()))?;
        let Some(ordinal) = c_int::try_from(ordinal).ok().filter(|&ordinal| ordinal < count) else {
            return Err(refused(match count {
                0 => "there is no CUDA device, or CUDA_VISIBLE_DEVICES hides all of them".to_owned(),
                1 => "there is one device here: cuda:0".to_owned(),
                _ => format!("there are {count} devices here: cuda:0 to cuda:{}", count - 1),
            }));
        };
        let device = driver.device(ordinal).map_err(|refusal| refused(refusal.to_string()))?;
        let context = Context::retain(driver, device);
        Ok(Arc::new(Gpu { driver, ordinal, device, context, kernels: Kernels::default() }))
    }

    /// The ordinal of the GPU with this UUID (`GPU-…`, or its first characters as long as they fit one GPU only).
    pub(super) fn find(uuid: &str) -> Result<usize> {
        let device = format!("cuda:{uuid}");
        let refused = |message: String| Error::Device { device: device.clone(), op: "open", message };
        let found = all().map_err(refused)?;
        let fitting: Vec<_> = found.iter().filter(|gpu| gpu.uuid.starts_with(uuid)).collect();
        match fitting.as_slice() {
            [gpu] => Ok(gpu.ordinal),
            [] => {
                let known: Vec<_> = found.iter().map(|gpu| format!("cuda:{} is {}", gpu.ordinal, gpu.uuid)).collect();
                Err(refused(format!("no device here has this UUID; {}", known.join(", "))))
            }
            several => Err(refused(format!("{} devices have a UUID that begins so", several.len()))),
        }
    }

    /// What users type for it.
    pub(super) fn name(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    /// Whether addresses of one mean the same memory in the other: both use the primary context of one device.
    pub(super) fn shares_context_with(&self, other: &Gpu) -> bool {
        self.device == other.device
    }

    /// A refusal of this GPU as an error of the operation `op`.
    pub(super) fn error(&self, op: &'static str, refusal: Refusal) -> Error {
        Error::Device { device: self.name(), op, message: refusal.to_string() }
    }

    /// Makes the GPU's context current on this thread, until the answer is dropped.
    pub(super) fn bind(&self) -> Result<Bound<'_>> {
        self.push().map_err(|refusal| self.error("make its context", refusal))
    }

    /// The same for giving something back: tried again once, because nobody can after that.
    pub(super) fn bind_to_release(&self) -> Option<Bound<'_>> {
        self.push().or_else(|_| self.push()).ok()
    }

    fn push(&self) -> Result<Bound<'_>, Refusal> {
        let context = self.context.get()?;
        // SAFETY: the context is retained for as long as this Gpu lives.
        unsafe { call!(self.driver, cuCtxPushCurrent_v2(context as sys::CUcontext)) }?;
        Ok(Bound { gpu: self, _thread: PhantomData })
    }

    /// The kernels, each compiled by the driver the first time that it is asked for.
    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Copy engines that work side by side; at least 1.
    pub(super) fn copy_engines(&self) -> usize {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT;
        let engines = self.driver.attribute(self.device, attribute).unwrap_or(1);
        usize::try_from(engines).unwrap_or(1).max(1)
    }

    /// The NUMA node that the GPU hangs on, where the system knows one.
    pub(super) fn numa_node(&self) -> Option<u32> {
        let bus = self.driver.device_bus(self.device).ok()?.to_lowercase();
        let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{bus}/numa_node")).ok()?;
        text.trim().parse().ok()
    }

    /// The product's name.
    pub(super) fn product(&self) -> String {
        self.driver.device_name(self.device).unwrap_or_default()
    }
}

impl Bound<'_> {
    pub(super) fn driver(&self) -> &'static Driver {
        self.gpu.driver
    }

    /// Free and total bytes of the GPU's memory.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), Refusal> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { call!(self.driver(), cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: writes one pointer; takes off what `push` put on this thread.
        let _ = unsafe { call!(self.gpu.driver, cuCtxPopCurrent_v2(&raw mut popped)) };
    }
}

impl Context {
    fn retain(driver: &'static Driver, device: sys::CUdevice) -> Context {
        let retain = move || {
            let mut context: sys::CUcontext = std::ptr::null_mut();
            // SAFETY: writes one pointer.
            unsafe { call!(driver, cuDevicePrimaryCtxRetain(&raw mut context, device)) }?;
            Ok(context as usize)
        };
        let retained = OnceLock::new();
        let retaining = thread::Builder::new().name("vramp-cuda".to_owned()).spawn(retain).ok();
        if retaining.is_none() {
            let _ = retained.set(retain());
        }
        Context { retaining: Mutex::new(retaining), retained }
    }

    /// The context, as soon as it is there.
    fn get(&self) -> Result<usize, Refusal> {
        let mut retaining = self.retaining.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = retaining.take() {
            let lost = Err(Refusal { call: "cuDevicePrimaryCtxRetain", code: 999 });
            let _ = self.retained.set(thread.join().unwrap_or(lost));
        }
        drop(retaining);
        self.retained.get().copied().unwrap_or(Err(Refusal { call: "cuDevicePrimaryCtxRetain", code: 999 }))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.context.get().is_err() {
            return;
        }
        let kernels = std::mem::take(&mut self.kernels);
        if let Some(bound) = self.bind_to_release() {
            kernels.unload(&bound);
        }
        // SAFETY: gives back what `retain` took, once; whatever was made in the context has been given back before, because
        // it held this Gpu.
        let _ = unsafe { call!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device)) };
    }
}

/// A GPU that the driver knows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaInfo {
    /// Its number in this process: `cuda:0` is number 0.
    pub ordinal: usize,
    /// The product's name.
    pub product: String,
    /// Its identity, as `GPU-8c6f…`, which no restart changes.
    pub uuid: String,
    /// Its address on the PCI bus.
    pub bus: String,
}

/// Whether there is a GPU that this process may see; an error where there is a driver that cannot be used.
pub(super) fn any() -> Result<bool> {
    const NO_DEVICE: u32 = sys::CUresult::CUDA_ERROR_NO_DEVICE as u32;
    let refused = |message| Err(Error::Device { device: "cuda".to_owned(), op: "open", message });
    match Driver::start() {
        Ok(driver) => driver.device_count().map_or_else(|refusal| refused(refusal.to_string()), |count| Ok(count > 0)),
        Err(Absence::NoLibrary | Absence::Refused(Refusal { code: NO_DEVICE, .. })) => Ok(false),
        Err(absence) => refused(absence.to_string()),
    }
}

/// All GPUs that this process may see, or why there are none.
pub(super) fn all() -> Result<Vec<CudaInfo>, String> {
    let driver = Driver::start().map_err(|absence| absence.to_string())?;
    let count = driver.device_count().map_err(|refusal| refusal.to_string())?;
    let info = |ordinal: c_int| {
        let device = driver.device(ordinal)?;
        Ok(CudaInfo {
            ordinal: usize::try_from(ordinal).unwrap_or(0),
            product: driver.device_name(device)?,
            uuid: uuid_text(driver.device_uuid(device)?),
            bus: driver.device_bus(device)?,
        })
    };
    (0..count).map(info).collect::<Result<_, Refusal>>().map_err(|refusal| refusal.to_string())
}

/// `GPU-` and the usual groups of hexadecimal digits.
fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = "GPU".to_owned();
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_the_driver_tools_write_it() {
        let bytes = std::array::from_fn(|index| u8::try_from(index * 17).unwrap());
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
