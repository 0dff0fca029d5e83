//! Downloads: finished ranges of VRAM to staging buffers, by copies that the GPU makes itself, several streams in turn.
//!
//! A download owns its buffer and its views until its event has passed; one that is dropped, or that the driver refuses half-way,
//! is waited for. Neighbours in VRAM that stay neighbours in the buffer are one copy. Nothing here decides what is copied, and
//! nothing here writes to VRAM.
#![allow(unsafe_code)] // starts copies between memory that this file's objects own

use std::sync::Arc;

use super::driver::Refusal;
use super::gpu::{Bound, Gpu};
use super::handles::{Event, StreamHandle};
use super::memory::{DeviceMemory, source};
use crate::device::download::place;
use crate::device::{Download, Downloaded, View};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::StagingBuffer;

/// A copy: where it goes in the buffer, where it comes from on the GPU, and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Copy {
    to: usize,
    from: u64,
    bytes: usize,
}

/// A download on its way.
pub(super) struct CudaDownload {
    gpu: Arc<Gpu>,
    stream: Arc<StreamHandle>,
    /// What the GPU may be writing and reading; taken when that is over.
    payload: Option<(StagingBuffer, Vec<(u64, View)>)>,
    /// Recorded when everything had been started.
    end: Option<Event>,
    fallbacks: Fallbacks,
}

impl CudaDownload {
    /// Starts copying `views` into `buffer`, in `stream`.
    pub(super) fn start(
        gpu: &Arc<Gpu>,
        stream: Arc<StreamHandle>,
        buffer: StagingBuffer,
        views: Vec<(u64, View)>,
        fallbacks: &Fallbacks,
    ) -> Result<CudaDownload> {
        let copies = copies(gpu, &buffer, &views)?;
        let bound = gpu.bind()?;
        buffer.wait_prepared();
        let (gpu, payload, fallbacks) = (Arc::clone(gpu), Some((buffer, views)), fallbacks.clone());
        let mut download = CudaDownload { gpu, stream, payload, end: None, fallbacks };
        // An error drops the download, which waits for what it has started.
        let started = download.start_copies(&bound, &copies);
        started.map_err(|refusal| download.gpu.error("start a copy", refusal))?;
        Ok(download)
    }

    fn start_copies(&mut self, bound: &Bound<'_>, copies: &[Copy]) -> Result<(), Refusal> {
        let Some((buffer, _)) = &mut self.payload else { return Ok(()) };
        let target = buffer.bytes_mut().as_mut_ptr();
        for &Copy { to, from, bytes } in copies {
            // SAFETY: `copies` has checked that the copy's target lies in the buffer, and took its source from views of this
            // package's own memory of this GPU. Both are this download's until the stream has passed (`Drop` and `finish`
            // wait): no one else reaches the buffer's bytes, and what a view covers is alive and no longer written.
            unsafe { self.stream.copy_out(bound, target.wrapping_add(to), from, bytes) }?;
        }
        self.end = Some(Event::record(&self.gpu, bound, &self.stream, false)?);
        Ok(())
    }
}

/// The copies that bring `views` into `buffer`, checked: every byte that is written lies in the buffer, and every byte that is
/// read in its view.
fn copies(gpu: &Gpu, buffer: &StagingBuffer, views: &[(u64, View)]) -> Result<Vec<Copy>> {
    let mut copies: Vec<Copy> = Vec::new();
    let mut before: Option<&DeviceMemory> = None;
    for (at, view) in views.iter().filter(|(_, view)| !view.is_empty()) {
        let place = place(buffer.len(), *at, view)?;
        let (memory, from) = source(gpu, view).ok_or_else(|| {
            let what = format!("the memory to read is not memory of {}, or was not made by this library", gpu.name());
            Error::Request { what, hint: None }
        })?;
        let next = Copy { to: place.start, from, bytes: place.len() };
        // Allocations may follow each other without a gap, and no copy may cross from one to the next.
        let same = before.replace(memory).is_some_and(|before| std::ptr::eq(before, memory));
        match copies.last_mut() {
            Some(last) if same && last.ends_where_begins(&next) => last.bytes += next.bytes,
            _ => copies.push(next),
        }
    }
    Ok(copies)
}

impl Copy {
    /// Whether `next` begins where this ends, on both sides.
    fn ends_where_begins(&self, next: &Copy) -> bool {
        self.to + self.bytes == next.to && self.from + self.bytes as u64 == next.from
    }
}

impl Download for CudaDownload {
    fn is_done(&mut self) -> bool {
        let (Some(end), Ok(bound)) = (&self.end, self.gpu.bind()) else { return true };
        end.has_passed(&bound)
    }

    fn finish(mut self: Box<Self>) -> Result<Downloaded> {
        let lost = Error::Poisoned { what: "a download without its end" };
        let gpu = Arc::clone(&self.gpu);
        let bound = gpu.bind()?;
        let Some(end) = &self.end else { return Err(lost) };
        end.wait(&bound).map_err(|refusal| gpu.error("copy from the GPU", refusal))?;
        let Some((buffer, views)) = self.payload.take() else { return Err(lost) };
        Ok(Downloaded { buffer, views })
    }
}

impl Drop for CudaDownload {
    /// The buffer and the views are released after the GPU's last use of them. Where that cannot be waited for (no context, or a
    /// wait that fails twice) they are leaked: the GPU may still write the one and read the others.
    fn drop(&mut self) {
        let Some(payload) = self.payload.take() else { return };
        let drained = self.gpu.bind_to_release().is_some_and(|bound| self.stream.drain(&bound));
        if !drained {
            let bytes = payload.0.len();
            let why = format!("the GPU could not be waited for: {bytes} bytes and their arena stay allocated");
            self.fallbacks.note("freeing a download", why);
            std::mem::forget(payload);
        }
    }
}
