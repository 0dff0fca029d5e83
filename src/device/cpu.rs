//! The CPU device: arenas of host memory on huge pages, filled in place; a stream that copies what could not be.
//!
//! Uploads run on a few copy threads so that the loop never copies itself. No unsafe code here: the rights to the bytes
//! come as [`Region`]s and [`StagingBuffer`]s.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use super::{
    Arena, Cast, Device, DeviceLimits, InFlight, MAX_LANES, Piece, Region, Stream, StreamNeeds, Upload, Uploaded,
};
use crate::convert::{Table, convert};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::HostBlock;
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::os;

/// Host memory.
#[derive(Debug, Default)]
pub struct CpuDevice {
    align: Option<u64>,
}

impl CpuDevice {
    /// The device. Tensors are aligned for their element type; otherwise they keep the residue that they have in the file.
    pub fn new() -> CpuDevice {
        CpuDevice { align: None }
    }

    /// The device, with every tensor on a multiple of `align` bytes (a power of two), at the price of a copy through
    /// staging for tensors whose place in the file does not allow it. Above 2 MiB it holds for distances, not for addresses.
    pub fn with_align(align: u64) -> CpuDevice {
        CpuDevice { align: Some(align.checked_next_power_of_two().unwrap_or(1 << 63)) }
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn limits(&self) -> DeviceLimits {
        let align = self.align.unwrap_or(1);
        DeviceLimits { host_visible: true, keeps: true, align, staging: super::port::CACHED_STAGING }
    }

    fn staging(&self, count: usize, buffer_bytes: usize, _fallbacks: &Fallbacks) -> Result<StagingPool> {
        StagingPool::new(count, buffer_bytes)
            .map_err(|_| out_of_memory((count as u64).saturating_mul(buffer_bytes as u64)))
    }

    fn alloc(&self, bytes: u64) -> Result<Arena> {
        if os::available_memory_bytes().is_some_and(|available| available < bytes) {
            return Err(out_of_memory(bytes));
        }
        let len = usize::try_from(bytes).map_err(|_| out_of_memory(bytes))?;
        HostBlock::new(len).map(Arena::host).map_err(|_| out_of_memory(bytes))
    }

    fn stream(&self, lanes: Option<usize>, _fallbacks: &Fallbacks) -> Result<Box<dyn Stream>> {
        let usual = || thread::available_parallelism().map_or(2, |n| n.get().min(8));
        Ok(Box::new(CopyStream::new(lanes.unwrap_or_else(usual).clamp(1, MAX_LANES))))
    }
}

/// A stream whose copies run on threads of its own, which end with it.
struct CopyStream {
    /// `None` where the machine gave no thread at all: the uploader copies.
    jobs: Option<Sender<Job>>,
    threads: Vec<thread::JoinHandle<()>>,
    scales: Arc<[Table]>,
}

struct Job {
    buffer: StagingBuffer,
    pieces: Vec<(Piece, Region)>,
    scales: Arc<[Table]>,
    done: Sender<Finished>,
}

impl Job {
    /// Copies each piece of the buffer into its region, converting what is to be converted.
    fn run(self) {
        // A receiver that is gone means that the load gave up; the job's rights drop here.
        let _ = self.done.send(scatter(self.buffer, self.pieces, &self.scales));
    }
}

type Finished = Result<Uploaded>;

impl CopyStream {
    fn new(threads: usize) -> CopyStream {
        let (jobs, queue) = crossbeam_channel::unbounded::<Job>();
        let work = |queue: Receiver<Job>| {
            move || {
                queue.into_iter().for_each(Job::run);
            }
        };
        let start = |_| thread::Builder::new().name("vramp-copy".to_owned()).spawn(work(queue.clone())).ok();
        let threads: Vec<_> = (0..threads).filter_map(start).collect();
        CopyStream { jobs: (!threads.is_empty()).then_some(jobs), threads, scales: Arc::new([]) }
    }
}

impl Stream for CopyStream {
    fn prepare(&mut self, needs: &StreamNeeds) -> Result<()> {
        self.scales = needs.scales.as_slice().into();
        Ok(())
    }

    fn upload(&mut self, buffer: StagingBuffer, pieces: Vec<(Piece, Region)>) -> Result<InFlight> {
        let (done, receiver) = crossbeam_channel::bounded(1);
        let ended = |_| Error::Poisoned { what: "a copy thread ended" };
        let job = Job { buffer, pieces, scales: Arc::clone(&self.scales), done };
        match &self.jobs {
            Some(jobs) => jobs.send(job).map_err(ended)?,
            None => job.run(),
        }
        Ok(Box::new(Copying { receiver }))
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

struct Copying {
    receiver: Receiver<Finished>,
}

impl Upload for Copying {
    fn is_done(&mut self) -> bool {
        !self.receiver.is_empty()
    }

    fn finish(self: Box<Self>) -> Finished {
        self.receiver.recv().unwrap_or(Err(Error::Poisoned { what: "a copy thread ended" }))
    }
}

/// Copies each piece of the buffer into its region.
fn scatter(buffer: StagingBuffer, pieces: Vec<(Piece, Region)>, scales: &[Table]) -> Finished {
    let mut regions = Vec::with_capacity(pieces.len());
    let (mut overflows, mut convert_seconds) = (Vec::new(), 0.0);
    for (index, (piece, mut region)) in pieces.into_iter().enumerate() {
        match piece.cast {
            None => copy_piece(buffer.bytes(), &piece, &mut region)?,
            Some(cast) => {
                let started = Instant::now();
                let overflowed = convert_piece(buffer.bytes(), &piece, cast, scales, &mut region)?;
                convert_seconds += started.elapsed().as_secs_f64();
                overflows.extend((overflowed > 0).then_some((index, overflowed)));
            }
        }
        regions.push(region);
    }
    Ok(Uploaded { buffer, regions, overflows, convert_seconds })
}

/// Packs the runs of one piece into its region.
fn copy_piece(source: &[u8], piece: &Piece, region: &mut Region) -> Result<()> {
    for_each_run(source, piece, region, |_, from, to| {
        to.copy_from_slice(from);
        Ok(())
    })
}

/// Converts the runs of one piece into its region. Returns how many finite values became infinite.
fn convert_piece(source: &[u8], piece: &Piece, cast: Cast, scales: &[Table], region: &mut Region) -> Result<u64> {
    if !piece.holds_elements_of(&cast) {
        return Err(misfit());
    }
    let mut overflowed = 0;
    for_each_run(source, piece, region, |index, from, to| {
        let skipped = index * (piece.stride / cast.from.bytes());
        let scales = cast.scale.map(|scale| scale.table_in(scales, skipped)).transpose()?;
        overflowed += convert(from, cast.from, to, cast.to, scales).map_err(|_| misfit())?;
        Ok(())
    })?;
    Ok(overflowed)
}

/// Calls `work` with the number of each run of a piece, its bytes in the buffer and its place in the region.
fn for_each_run(
    source: &[u8],
    piece: &Piece,
    region: &mut Region,
    mut work: impl FnMut(u64, &[u8], &mut [u8]) -> Result<()>,
) -> Result<()> {
    let target = region.bytes_mut().ok_or_else(misfit)?;
    if target.len() as u64 != piece.len() {
        return Err(misfit());
    }
    if target.is_empty() {
        return Ok(());
    }
    let (run, stride) = (word(piece.run)?, word(piece.stride)?);
    let mut at = word(piece.at)?;
    for (index, chunk) in (0..).zip(target.chunks_exact_mut(word(piece.len() / piece.count)?)) {
        let from = at.checked_add(run).and_then(|end| source.get(at..end)).ok_or_else(misfit)?;
        work(index, from, chunk)?;
        at = at.saturating_add(stride);
    }
    Ok(())
}

fn misfit() -> Error {
    Error::Poisoned { what: "a piece leaves its staging buffer, its region or its scales" }
}

fn word(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::Poisoned { what: "a size that does not fit this machine" })
}

fn out_of_memory(needed: u64) -> Error {
    os::out_of_memory("cpu", needed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{device_conformance, refused, watched};

    #[test]
    fn a_machine_that_gives_no_thread_copies_all_the_same() {
        watched(|| {
            if refused(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN) {
                device_conformance(&CpuDevice::new());
            }
        });
    }

    #[test]
    fn numbers_that_make_no_sense_are_errors() {
        let device = CpuDevice::new();
        assert!(matches!(
            device.staging(usize::MAX, usize::MAX, &Fallbacks::default()),
            Err(Error::OutOfMemory { .. })
        ));
        assert!(matches!(device.staging(usize::MAX, 0, &Fallbacks::default()), Err(Error::OutOfMemory { .. })));
        assert_eq!(CpuDevice::with_align(u64::MAX).limits().align, 1 << 63);
        let piece = Piece { at: 0, run: 1 << 40, stride: 0, count: 1 << 40, cast: None };
        assert_eq!(piece.len(), u64::MAX);
    }
}
