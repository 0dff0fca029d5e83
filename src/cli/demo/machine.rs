//! What this machine has and can do: free memory and disk, the rate of the storage, the rate of filling memory.
//!
//! Each measurement is brief and says in words how it was made; none of them is taken from a load.

use std::fs;
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use serde::Serialize;
use vramp::Error;
use vramp::device::{CpuDevice, Device, Region};
use vramp::source::{Fallbacks, LocalStorage, Route, Source, Storage};
use vramp::staging::{StagingBuffer, StagingPool};

use super::super::interrupt::Interrupt;
use super::super::output::Failure;
use super::super::text;

/// Enough to be past the start-up of any disk, little enough to be brief.
const STORAGE_BYTES: u64 = 2 << 30;
const READ_BYTES: u64 = 8 << 20;
const MEMORY_BYTES: u64 = 1 << 30;
const MEMORY_ROUNDS: usize = 3;

/// A bandwidth and how it was measured.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Measured {
    pub(crate) bytes_per_second: f64,
    pub(crate) how: String,
}

/// Bytes of memory that this process may still take: the machine's, or what its control group leaves.
pub(crate) fn available_memory() -> Option<u64> {
    [machine_memory(), group_memory()].into_iter().flatten().min()
}

fn machine_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// The least that any control group of this process leaves; page cache that it may give up counts as free.
fn group_memory() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let paths = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (kind, path) = (parts.next()?, parts.next()?);
        let root = if kind.is_empty() { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
        (kind.is_empty() || kind == "memory").then(|| [format!("{root}{path}"), root.to_owned()])
    });
    paths.flatten().filter_map(|folder| left_in_group(Path::new(&folder))).min()
}

fn left_in_group(folder: &Path) -> Option<u64> {
    let number = |names: [&str; 2]| {
        let text = names.iter().find_map(|name| fs::read_to_string(folder.join(name)).ok())?;
        text.trim().parse::<u64>().ok()
    };
    let limit = number(["memory.max", "memory.limit_in_bytes"])?;
    let used = number(["memory.current", "memory.usage_in_bytes"])?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let of = |key: &str| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
    let cached = of("file ").or_else(|| of("total_cache ")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

/// Reads the shards past the page cache, several reads at a time. They must not be in the page cache.
pub(crate) fn storage(shards: &[PathBuf], interrupt: &Interrupt) -> Result<Measured, Failure> {
    let fallbacks = Fallbacks::default();
    let sources: Vec<Arc<dyn Source>> = shards
        .iter()
        .map(|path| Ok(LocalStorage.open(path, &fallbacks)?.source(Route::Direct)))
        .collect::<Result<_, Error>>()?;
    let limits = sources.first().ok_or(Error::Poisoned { what: "a demo without shards" })?.limits();
    let read_bytes = limits.max_read.clamp(limits.align, READ_BYTES.max(limits.align));
    let reads = reads(&sources, read_bytes);
    let total: u64 = reads.iter().map(|(_, range)| range.end - range.start).sum();
    let depth = limits.depth.clamp(1, 8);
    let buffer_bytes =
        usize::try_from(read_bytes).map_err(|_| Error::Poisoned { what: "a read above the word size" })?;
    let pool = StagingPool::new(depth, buffer_bytes).map_err(|_| no_memory(depth as u64 * read_bytes))?;
    let started = Instant::now();
    let next = AtomicUsize::new(0);
    let work = |mut buffer: StagingBuffer| -> Result<(), Failure> {
        while let Some((source, range)) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
            interrupt.check()?;
            let len = usize::try_from(range.end - range.start).unwrap_or(0);
            source.read_at(range.start, &mut buffer.bytes_mut()[..len])?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let buffers = std::iter::from_fn(|| pool.acquire());
        let threads: Vec<_> = buffers.map(|buffer| scope.spawn(|| work(buffer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(Err(lost_thread()))).fold(Ok(()), Result::and)
    })?;
    let direct = sources.iter().all(|source| source.route() == Route::Direct);
    let way = if direct { "O_DIRECT" } else { "read (no O_DIRECT here)" };
    let how = format!("{way}, {depth} reads of {} at a time, files not in the page cache", text::binary(read_bytes));
    Ok(Measured { bytes_per_second: rate(total, started), how })
}

/// Consecutive reads over the shards, up to the bytes that a brief measurement takes.
fn reads(sources: &[Arc<dyn Source>], read_bytes: u64) -> Vec<(&dyn Source, Range<u64>)> {
    let mut left = STORAGE_BYTES;
    let mut reads = Vec::new();
    for source in sources {
        let mut offset = 0;
        while offset < source.len() && left > 0 {
            let end = source.len().min(offset + read_bytes);
            reads.push((&**source, offset..end));
            left = left.saturating_sub(end - offset);
            offset = end;
        }
    }
    reads
}

/// Takes `bytes` of memory, touches it and gives it back. The host of a virtual machine takes back memory that lies idle, and
/// needs long to return it; what a load costs must not depend on that.
pub(crate) fn touch(bytes: u64) -> Result<(), Failure> {
    let (regions, _written) = CpuDevice::new().alloc(bytes)?.carve(std::slice::from_ref(&(0..bytes)))?;
    regions.iter().for_each(Region::populate);
    Ok(())
}

/// Fills fresh memory on huge pages with bytes of a file that is in the page cache, on all cores, first touch included: the
/// least that owning warm weights takes. The best of some rounds, since it stands for what the machine can do.
pub(crate) fn memory(shards: &[PathBuf], bytes: u64, interrupt: &Interrupt) -> Result<Measured, Failure> {
    let bytes = bytes.min(MEMORY_BYTES);
    let threads = thread::available_parallelism().map_or(2, NonZero::get) as u64;
    let fallbacks = Fallbacks::default();
    let path = shards.first().ok_or(Error::Poisoned { what: "a demo without shards" })?;
    let source = LocalStorage.open(path, &fallbacks)?.source(Route::Buffered);
    let mut best: f64 = 0.0;
    for _ in 0..MEMORY_ROUNDS {
        interrupt.check()?;
        best = best.max(fill_round(bytes, threads, &*source)?);
    }
    let how = format!("{threads} threads reading cached pages into fresh memory on huge pages, first touch included");
    Ok(Measured { bytes_per_second: best, how })
}

fn fill_round(bytes: u64, threads: u64, source: &dyn Source) -> Result<f64, Failure> {
    let started = Instant::now();
    let share = bytes / threads;
    let ranges: Vec<Range<u64>> = (0..threads).map(|at| share * at..share * (at + 1)).collect();
    let (regions, _written) = CpuDevice::new().alloc(bytes)?.carve(&ranges)?;
    thread::scope(|scope| {
        let fills: Vec<_> = regions.into_iter().map(|region| scope.spawn(move || fill(region, source))).collect();
        fills.into_iter().map(|thread| thread.join().unwrap_or(Err(lost_thread()))).fold(Ok(()), Result::and)
    })?;
    Ok(rate(share * threads, started))
}

/// Fills a region from the beginning of a file, again and again if the file is shorter.
fn fill(mut region: Region, source: &dyn Source) -> Result<(), Failure> {
    let at_once = usize::try_from(READ_BYTES.min(source.len())).unwrap_or(1).max(1);
    let mut offset = 0;
    for target in region.bytes_mut().into_iter().flat_map(|target| target.chunks_mut(at_once)) {
        if offset + target.len() as u64 > source.len() {
            offset = 0;
        }
        source.read_at(offset, target)?;
        offset += target.len() as u64;
    }
    Ok(())
}

fn rate(bytes: u64, started: Instant) -> f64 {
    text::as_f64(bytes) / started.elapsed().as_secs_f64().max(f64::MIN_POSITIVE)
}

fn no_memory(needed: u64) -> Error {
    Error::OutOfMemory { device: "cpu".to_owned(), needed, free: available_memory() }
}

fn lost_thread() -> Failure {
    Error::Poisoned { what: "a thread that measures" }.into()
}
