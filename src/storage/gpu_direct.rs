//! Files that a device reads itself, past the host ([`Route::GpuDirect`]), and the way by the host for when it does not.
//!
//! The first refusal in the middle of a load, of a file or of a read, is noted with its reason, and the rest of the load goes by
//! way of the host: read into a buffer by the file's direct route, and written to the region. What is wrong with the file itself
//! stays an error, in the words of the ordinary route. Nothing here knows what a device is made of, or decides which files are
//! read so.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::port::{DeviceSource, Limits, OpenFile, Source};
use super::route::Route;
use crate::device::{DirectFile, DirectReads, Region};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::os;

/// What reads by a device want. Blocks of the file are whole pages; the longest read is the largest that GPUDirect Storage makes
/// in one piece; a gap is not worth reading, as it would take device memory. Any address will do: where source and target lie
/// differently in their pages, the device shifts the bytes on its own side.
pub const GPU_DIRECT: Limits = Limits { align: 4 << 10, memory_align: 1, max_read: 16 << 20, gap: 0, depth: 8 };

/// Bytes that go by way of the host at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// What the word is in the list of fallbacks.
const WHAT: &str = "gpu-direct";

/// The files that a device reads itself during one load.
pub struct GpuDirect {
    reads: Option<Arc<dyn DirectReads>>,
    /// Whether the device has refused a file or a read: it is not asked again.
    refused: AtomicBool,
    fallbacks: Fallbacks,
    /// Buffers of reads by way of the host, at most one for each that runs at a time.
    spare: Mutex<Vec<StagingBuffer>>,
}

impl GpuDirect {
    /// For a load whose device reads by `reads`, if it does at all.
    pub fn new(reads: Option<Arc<dyn DirectReads>>, fallbacks: &Fallbacks) -> Arc<GpuDirect> {
        let (refused, spare) = (AtomicBool::new(false), Mutex::default());
        Arc::new(GpuDirect { reads, refused, fallbacks: fallbacks.clone(), spare })
    }

    /// The file by this route. Where the device does not take the file, that is noted, and the source goes by way of the host.
    pub fn source(self: &Arc<GpuDirect>, file: &dyn OpenFile) -> Arc<dyn Source> {
        let taken = if self.is_refused() { None } else { self.take(file) };
        Arc::new(GpuDirectSource { taken, ordinary: file.source(Route::Direct), load: Arc::clone(self) })
    }

    fn take(&self, file: &dyn OpenFile) -> Option<Arc<dyn DirectFile>> {
        let registered = match &self.reads {
            Some(reads) => register(&**reads, file),
            None => Err("the device does not read files itself".to_owned()),
        };
        registered.map_err(|why| self.refuse(&why)).ok()
    }

    /// Whether the device takes this file.
    ///
    /// # Errors
    /// Why it does not.
    pub fn takes(reads: &dyn DirectReads, file: &dyn OpenFile) -> Result<(), String> {
        register(reads, file).map(drop)
    }

    fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Notes the first refusal; the others follow from it.
    fn refuse(&self, why: &str) {
        if !self.refused.swap(true, Ordering::Relaxed) {
            self.fallbacks.note(WHAT, format!("{why}; this and what was left went by way of the host"));
        }
    }

    /// A buffer of [`CHUNK_BYTES`].
    fn buffer(&self) -> Result<StagingBuffer> {
        if let Some(buffer) = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(buffer);
        }
        let made = StagingPool::reserve(1, CHUNK_BYTES).ok().and_then(|pool| pool.acquire());
        made.ok_or_else(|| os::out_of_memory("cpu", CHUNK_BYTES as u64))
    }

    fn put_back(&self, buffer: StagingBuffer) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

/// Asks the device to take a file.
///
/// # Errors
/// Why it does not.
fn register(reads: &dyn DirectReads, file: &dyn OpenFile) -> Result<Arc<dyn DirectFile>, String> {
    let system = file.file_system();
    if system.memory {
        return Err(format!("{} keeps its files in memory", system.name));
    }
    let descriptor = file.descriptor().ok_or("the storage gives no descriptor of its files")?;
    reads.register(descriptor, file.path())
}

/// A file that the device reads itself, if it has taken it.
struct GpuDirectSource {
    taken: Option<Arc<dyn DirectFile>>,
    ordinary: Arc<dyn Source>,
    load: Arc<GpuDirect>,
}

impl GpuDirectSource {
    /// The same bytes by the ordinary route and a buffer.
    fn by_host(&self, offset: u64, len: u64, region: &mut Region) -> Result<Route> {
        let mut buffer = self.load.buffer()?;
        let copied = self.copy(offset, len, region, &mut buffer);
        self.load.put_back(buffer);
        copied
    }

    fn copy(&self, offset: u64, len: u64, region: &mut Region, buffer: &mut StagingBuffer) -> Result<Route> {
        let (mut done, mut route) = (0, self.ordinary.route());
        while done < len {
            // Not above CHUNK_BYTES, so it fits.
            let part = usize::try_from(len - done).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
            let bytes = &mut buffer.bytes_mut()[..part];
            route = self.ordinary.read_at(offset + done, bytes)?;
            region.write(done, bytes)?;
            done += part as u64;
        }
        Ok(route)
    }
}

impl Source for GpuDirectSource {
    fn len(&self) -> u64 {
        self.ordinary.len()
    }

    fn route(&self) -> Route {
        Route::GpuDirect
    }

    fn limits(&self) -> Limits {
        GPU_DIRECT
    }

    /// Host memory is not this way's target: the ordinary route fills it.
    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        self.ordinary.read_at(offset, target)
    }

    fn as_device_source(&self) -> Option<&dyn DeviceSource> {
        Some(self)
    }
}

impl DeviceSource for GpuDirectSource {
    fn read_region(&self, offset: u64, len: u64, region: &mut Region) -> Result<Route> {
        if len > region.len() || offset.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(Error::Poisoned { what: "a read by the device that leaves its file or its region" });
        }
        let Some(file) = self.taken.as_ref().filter(|_| !self.load.is_refused()) else {
            return self.by_host(offset, len, region);
        };
        let Err(error) = file.read(offset, len, region) else { return Ok(Route::GpuDirect) };
        // Where it is the file's own trouble, the ordinary route meets it too, and has better words for it.
        let route = self.by_host(offset, len, region)?;
        self.load.refuse(&format!("{error:?}"));
        Ok(route)
    }
}

impl fmt::Debug for GpuDirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuDirect").finish_non_exhaustive()
    }
}
