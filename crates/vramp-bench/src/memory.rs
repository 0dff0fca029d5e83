//! The stages of host memory alone: making fresh memory resident, and copying.
//!
//! Each sample takes memory of its own and gives it back, which does not count.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread;
use std::time::Instant;

use super::data::{Sample, Setting};
use super::reads::blocks;
use vramp::device::{CpuDevice, Device, Region};
use vramp::error::{Error, Result};

/// Bytes that a thread takes at a time.
const BLOCK_BYTES: u64 = 4 << 20;

/// Takes `bytes` of memory, touches it and gives it back. The host of a virtual machine takes back memory that lies idle and
/// needs long to return it; what is measured must not depend on that.
pub(super) fn touch(bytes: u64) -> Result<()> {
    let (regions, _written) = CpuDevice::new().alloc(bytes)?.carve(std::slice::from_ref(&(0..bytes)))?;
    regions.iter().for_each(Region::populate);
    Ok(())
}

pub(super) fn first_touch_setting(threads: usize) -> Setting {
    Setting { way: "fresh memory on huge pages".to_owned(), block_bytes: BLOCK_BYTES, at_once: threads }
}

/// Makes fresh memory resident.
pub(super) fn first_touch(bytes: u64, threads: usize) -> Result<Sample> {
    let began = Instant::now();
    let (regions, _written) = CpuDevice::new().alloc(bytes)?.carve(&blocks(bytes, BLOCK_BYTES))?;
    shared(regions, threads, |region| region.populate())?;
    Ok(Sample { bytes, seconds: began.elapsed().as_secs_f64() })
}

/// What a copy is made into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyTarget {
    Fresh,
    Touched,
}

pub(super) fn copy_setting(target: CopyTarget, threads: usize) -> Setting {
    let way = match target {
        CopyTarget::Fresh => "memcpy to fresh huge pages",
        CopyTarget::Touched => "memcpy to touched huge pages",
    };
    Setting { way: way.to_owned(), block_bytes: BLOCK_BYTES, at_once: threads }
}

/// Copies `bytes` bytes of memory to other memory.
pub(super) fn copy(bytes: u64, threads: usize, target: CopyTarget) -> Result<Sample> {
    let source = resident(bytes, 1)?;
    let touched = if target == CopyTarget::Touched { Some(resident(bytes, 0)?) } else { None };
    let began = Instant::now();
    let targets = match touched {
        Some(regions) => regions,
        None => CpuDevice::new().alloc(bytes)?.carve(&blocks(bytes, BLOCK_BYTES))?.0,
    };
    shared(source.into_iter().zip(targets).collect(), threads, |(mut source, mut target)| {
        if let (Some(from), Some(to)) = (source.bytes_mut(), target.bytes_mut()) {
            to.copy_from_slice(from);
        }
    })?;
    Ok(Sample { bytes, seconds: began.elapsed().as_secs_f64() })
}

/// Memory in blocks whose every byte was written.
fn resident(bytes: u64, fill: u8) -> Result<Vec<Region>> {
    let (mut regions, _written) = CpuDevice::new().alloc(bytes)?.carve(&blocks(bytes, BLOCK_BYTES))?;
    regions.iter_mut().filter_map(Region::bytes_mut).for_each(|bytes| bytes.fill(fill));
    Ok(regions)
}

/// Has some threads do the work, each taking the next piece.
fn shared<T: Send>(work: Vec<T>, threads: usize, each: impl Fn(T) + Sync) -> Result<()> {
    let work = Mutex::new(work.into_iter());
    let take = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        while let Some(piece) = take() {
            each(piece);
        }
    };
    thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, run).ok();
        let helpers: Vec<_> = (1..threads).filter_map(spawn).collect();
        run();
        let lost = |_| Error::Poisoned { what: "a thread that measures" };
        helpers.into_iter().try_for_each(|helper| helper.join().map_err(lost))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_worked_on_whatever_the_threads() {
        for threads in [1, 3] {
            let bytes = 3 * BLOCK_BYTES + 17;
            assert_eq!(first_touch(bytes, threads).unwrap().bytes, bytes);
            for target in [CopyTarget::Fresh, CopyTarget::Touched] {
                assert_eq!(copy(bytes, threads, target).unwrap().bytes, bytes);
            }
        }
        touch(1).unwrap();
    }
}
