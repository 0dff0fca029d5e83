//! The port to where tensors end up: a [`Device`] allocates arenas, makes staging buffers and opens streams.
//!
//! A device whose memory the host can address says so ([`DeviceLimits::host_visible`]); reads then land in place and no
//! stream is used for them. Everything else goes through staging buffers that [`Stream::upload`] takes and gives back.
//! Nothing here reads files or knows a format.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "without_cuda.rs"]
mod cuda;
mod direct;
mod download;
mod null;
mod port;
mod region;

use std::sync::Arc;

pub use cpu::CpuDevice;
#[cfg(all(feature = "cuda", any(test, feature = "testing")))]
pub use cuda::forget_cufile;
#[cfg(feature = "cuda")]
pub use cuda::{CudaDevice, CudaInfo, CudaMemory, DeviceAllocator};
pub use direct::{DirectFile, DirectReads};
pub use download::{Download, Downloaded};
pub use null::NullDevice;
pub use port::{
    BlockScale, Cast, Device, DeviceLimits, InFlight, MAX_LANES, MAX_PIECES, Piece, Stream, StreamNeeds, Upload,
    Uploaded,
};
pub use region::{Arena, Memory, Region, View, Written};

use crate::error::{Error, Result};

/// Picks a device by the name a user types: `cpu` and `null` exist everywhere; `cuda` is the first GPU, `cuda:1` the second,
/// `cuda:GPU-8c6f…` the one with that UUID.
///
/// # Errors
/// When there is no such device on this machine, with what is missing.
pub fn open(name: &str) -> Result<Arc<dyn Device>> {
    match name {
        "cpu" => Ok(Arc::new(CpuDevice::new())),
        "null" => Ok(Arc::new(NullDevice::new())),
        _ => open_cuda(name),
    }
}

fn open_cuda(name: &str) -> Result<Arc<dyn Device>> {
    let which =
        name.strip_prefix("cuda").and_then(|rest| if rest.is_empty() { Some("0") } else { rest.strip_prefix(':') });
    match which {
        Some(which) if which.parse::<usize>().is_ok() || which.starts_with("GPU-") => cuda::open(which),
        _ => Err(Error::Device {
            device: name.to_owned(),
            op: "open",
            message: "devices are `cpu`, `null`, `cuda:0` and so on, or `cuda:GPU-…` by UUID".to_owned(),
        }),
    }
}

/// The default device: the first GPU where there is one, else host memory. The second part of the answer says why a driver that
/// is installed could not be used.
pub fn open_default() -> (Arc<dyn Device>, Option<Error>) {
    match cuda::first() {
        Ok(Some(device)) => (device, None),
        Ok(None) => (Arc::new(CpuDevice::new()), None),
        Err(error) => (Arc::new(CpuDevice::new()), Some(error)),
    }
}
