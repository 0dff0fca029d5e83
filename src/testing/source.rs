//! Fakes of storages, files, sources and queues, and the suites that every real one has to pass as well.
//!
//! The suites take trait objects and panic with the place of the first difference. The fakes are deterministic: they never
//! sleep, and what is random in them follows from a seed.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use super::Random;
use crate::device::Arena;
use crate::error::{Error, Result};
use crate::memory::HostBlock;
use crate::memory::staging::StagingPool;
use crate::storage::{
    Completed, FileSystem, Limits, OpenFile, Read, ReadQueue, ReadTarget, Residency, Route, Source, Version,
};

// ------------------------------------------------------------------------------------------------ suites

/// Demands of a source that it gives exactly the bytes of `expected`, at any offset and length, and an error for every
/// range that leaves the file.
pub fn source_conformance(source: &dyn Source, expected: &[u8], seed: u64) {
    let len = expected.len();
    assert_eq!(source.len(), len as u64);
    assert_eq!(source.is_empty(), len == 0);
    let limits = source.limits();
    assert!(limits.align.is_power_of_two() && limits.memory_align.is_power_of_two(), "{limits:?}");
    assert!(limits.max_read > 0 && limits.depth > 0, "{limits:?}");
    // Room for every address that a read may be given.
    let block = HostBlock::new(len + 8192).unwrap();
    let (mut regions, _) = Arena::host(block).carve(std::slice::from_ref(&(0..len as u64 + 8192))).unwrap();
    let memory = regions[0].bytes_mut().unwrap();
    for (offset, count) in ranges_inside(len, &mut Random::new(seed)) {
        let page = offset % 4096;
        for skip in [page, 0, 1] {
            let target = &mut memory[skip..skip + count];
            target.fill(0xa5);
            source.read_at(offset as u64, target).unwrap();
            assert!(target == &expected[offset..offset + count], "bytes {offset}..{} differ", offset + count);
        }
    }
    for (offset, count) in ranges_outside(len) {
        let result = source.read_at(offset, &mut memory[..count]);
        assert!(result.is_err(), "{count} bytes at {offset} of a file of {len}: {result:?}");
    }
}

/// The edges of blocks and of the file, and random places.
fn ranges_inside(len: usize, random: &mut Random) -> Vec<(usize, usize)> {
    let edges: Vec<usize> = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, len / 2, len.saturating_sub(1), len]
        .into_iter()
        .filter(|&edge| edge <= len)
        .collect();
    let mut ranges = vec![(0, len)];
    for &offset in &edges {
        ranges.extend(edges.iter().map(|&count| (offset, count.min(len - offset))));
    }
    for _ in 0..100 {
        let offset = random.below(len + 1);
        ranges.push((offset, random.below(len - offset + 1)));
    }
    ranges
}

fn ranges_outside(len: usize) -> Vec<(u64, usize)> {
    let end = len as u64;
    vec![(end, 1), (0, len + 1), (end + 1, 0), (end + 4096, 4096), (u64::MAX, 1), (u64::MAX - 1, 4096), (1 << 63, 512)]
}

/// Demands of an open file that every route of it passes [`source_conformance`], gives the same source each time, and that
/// what it says of itself fits together.
pub fn file_conformance(file: &dyn OpenFile, expected: &[u8], seed: u64) {
    assert_eq!(file.version().len(), expected.len() as u64);
    assert!(!file.file_system().name.is_empty());
    for route in [Route::Buffered, Route::Direct, Route::Mapped] {
        let source = file.source(route);
        assert!(Arc::ptr_eq(&source, &file.source(route)), "{route:?} gives another source each time");
        source_conformance(&*source, expected, seed);
    }
    let residency = file.residency();
    assert_eq!(residency.len(), expected.len() as u64);
    assert!(residency.resident_bytes() <= residency.len());
    file.check_unchanged().unwrap();
}

/// Demands of a queue that each read comes back exactly once, with its own target and the right bytes; that errors come
/// back with their target; and that it can be dropped while reads are in flight. `make` makes a fresh queue; `source` gives
/// `expected` and fails outside of it.
pub fn queue_conformance(make: &dyn Fn(&StagingPool) -> Box<dyn ReadQueue>, source: &Arc<dyn Source>, expected: &[u8]) {
    let pool = StagingPool::new(6, 64 << 10).unwrap();
    let mut queue = make(&pool);
    assert!(queue.complete().is_none(), "nothing is in flight");
    assert!(queue.depth() > 0);
    staged_reads_come_back_once(&mut *queue, &pool, source, expected);
    in_place_reads_come_back_once(&mut *queue, source, expected);
    errors_come_back_with_their_target(&mut *queue, &pool, source);
    assert!(queue.complete().is_none());
    drop(queue);
    assert_eq!(pool.available(), pool.count());
    dropping_gives_the_targets_back(make(&pool), &pool, source);
    assert_eq!(pool.available(), pool.count());
}

fn staged_reads_come_back_once(
    queue: &mut dyn ReadQueue,
    pool: &StagingPool,
    source: &Arc<dyn Source>,
    expected: &[u8],
) {
    let mut random = Random::new(7);
    let reads: Vec<(usize, usize)> = (0..200)
        .map(|_| {
            let offset =
                random.below(expected.len() + 1) / [1, 512, 4096][random.below(3)] * 512 % (expected.len() + 1);
            (offset, random.below((expected.len() - offset).min(pool.buffer_bytes()) + 1))
        })
        .collect();
    let mut seen = vec![false; reads.len()];
    let (mut next, mut left) = (0, reads.len());
    while left > 0 {
        while let Some(buffer) = (next < reads.len()).then(|| pool.acquire()).flatten() {
            let (offset, len) = reads[next];
            let read = Read { id: next, source: Arc::clone(source), offset: offset as u64, len };
            queue.submit(read, ReadTarget::Staging(buffer));
            next += 1;
        }
        let done = queue.complete().expect("a read is in flight");
        done.outcome.unwrap();
        let (offset, len) = reads[done.id];
        let ReadTarget::Staging(buffer) = done.target else { panic!("another kind of target came back") };
        assert!(buffer.bytes()[..len] == expected[offset..offset + len], "read {} at {offset}", done.id);
        assert!(!std::mem::replace(&mut seen[done.id], true), "read {} came back twice", done.id);
        left -= 1;
    }
}

fn in_place_reads_come_back_once(queue: &mut dyn ReadQueue, source: &Arc<dyn Source>, expected: &[u8]) {
    let part = 40_000;
    let ranges: Vec<_> = (0..expected.len())
        .step_by(part)
        .map(|start| start as u64..(start + part).min(expected.len()) as u64)
        .collect();
    let arena = Arena::host(HostBlock::new(expected.len()).unwrap());
    let (regions, written) = arena.carve(&ranges).unwrap();
    for (id, region) in regions.into_iter().enumerate() {
        let len = usize::try_from(region.len()).unwrap();
        let read = Read { id, source: Arc::clone(source), offset: region.range().start, len };
        queue.submit(read, ReadTarget::InPlace(region));
    }
    for _ in &ranges {
        let done = queue.complete().expect("a read is in flight");
        done.outcome.unwrap();
        let ReadTarget::InPlace(region) = done.target else { panic!("another kind of target came back") };
        assert_eq!(region.range(), ranges[done.id]);
        region.finish();
    }
    let view = written.view(0..expected.len() as u64).expect("every region is finished");
    assert!(view.bytes().unwrap() == expected, "the arena differs from the file");
}

fn errors_come_back_with_their_target(queue: &mut dyn ReadQueue, pool: &StagingPool, source: &Arc<dyn Source>) {
    let outside = Read { id: 71, source: Arc::clone(source), offset: source.len(), len: 4096 };
    let too_long = Read { id: 72, source: Arc::clone(source), offset: 0, len: pool.buffer_bytes() + 1 };
    for read in [outside, too_long] {
        queue.submit(read, ReadTarget::Staging(pool.acquire().unwrap()));
    }
    let mut failed: Vec<usize> = (0..2)
        .map(|_| {
            let done = queue.complete().expect("a read is in flight");
            assert!(done.outcome.is_err(), "read {}: {:?}", done.id, done.outcome);
            done.id
        })
        .collect();
    failed.sort_unstable();
    assert_eq!(failed, [71, 72]);
}

fn dropping_gives_the_targets_back(mut queue: Box<dyn ReadQueue>, pool: &StagingPool, source: &Arc<dyn Source>) {
    let len = usize::try_from(source.len()).unwrap().min(pool.buffer_bytes());
    while let Some(buffer) = pool.acquire() {
        queue.submit(Read { id: 0, source: Arc::clone(source), offset: 0, len }, ReadTarget::Staging(buffer));
    }
    drop(queue);
}

// ------------------------------------------------------------------------------------------------ fakes

/// One file in memory. All that it says of itself can be set.
pub struct MemoryFile {
    path: PathBuf,
    version: Version,
    file_system: FileSystem,
    residency: Mutex<Residency>,
    change: Mutex<Option<String>>,
    descriptor: Option<File>,
    sources: [Arc<dyn Source>; 3],
}

impl MemoryFile {
    /// A file with these bytes, fully cached, whose routes want what those of a local disk want.
    pub fn new(path: impl Into<PathBuf>, bytes: impl Into<Vec<u8>>) -> MemoryFile {
        let bytes: Arc<[u8]> = bytes.into().into();
        let len = bytes.len() as u64;
        let cached = Limits { align: 1, memory_align: 1, max_read: 4 << 20, gap: 64 << 10, depth: 2 };
        let direct = Limits { align: 512, memory_align: 512, depth: 4, ..cached };
        let source =
            |route, limits| Arc::new(MemorySource { bytes: Arc::clone(&bytes), route, limits }) as Arc<dyn Source>;
        let sources = [source(Route::Direct, direct), source(Route::Buffered, cached), source(Route::Mapped, cached)];
        MemoryFile {
            path: path.into(),
            version: Version::tagged(len, "first"),
            file_system: FileSystem { name: "memory".to_owned(), network: false, memory: true },
            residency: Mutex::new(Residency::all(len)),
            change: Mutex::new(None),
            descriptor: None,
            sources,
        }
    }

    /// The same file with other limits on one route.
    #[must_use]
    pub fn with_limits(mut self, route: Route, limits: Limits) -> MemoryFile {
        let bytes = self.all_bytes();
        self.sources[slot(route)] = Arc::new(MemorySource { bytes, route, limits });
        self
    }

    /// The same file with the source of one route replaced, for example by a [`FaultySource`] around it.
    #[must_use]
    pub fn with_source(mut self, route: Route, wrap: impl FnOnce(Arc<dyn Source>) -> Arc<dyn Source>) -> MemoryFile {
        self.sources[slot(route)] = wrap(Arc::clone(&self.sources[slot(route)]));
        self
    }

    /// The same file with a descriptor, for devices that read files themselves: its bytes as they are now, on a disk.
    #[must_use]
    pub fn with_descriptor(mut self) -> MemoryFile {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&self.all_bytes()).unwrap();
        self.descriptor = Some(file);
        self
    }

    /// The same file on another file system.
    #[must_use]
    pub fn with_file_system(mut self, file_system: FileSystem) -> MemoryFile {
        self.file_system = file_system;
        self
    }

    /// The same file in another version.
    #[must_use]
    pub fn with_version(mut self, tag: &str) -> MemoryFile {
        self.version = Version::tagged(self.version.len(), tag);
        self
    }

    /// From now on these parts are cached.
    pub fn set_residency(&self, residency: Residency) {
        *self.residency.lock().unwrap() = residency;
    }

    /// From now on the file is no longer what it was when it was opened: `what` says how.
    pub fn change(&self, what: impl Into<String>) {
        *self.change.lock().unwrap() = Some(what.into());
    }

    fn all_bytes(&self) -> Arc<[u8]> {
        let mut bytes = vec![0; usize::try_from(self.version.len()).unwrap()];
        self.sources[slot(Route::Buffered)].read_at(0, &mut bytes).unwrap();
        bytes.into()
    }
}

impl OpenFile for MemoryFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn version(&self) -> Version {
        self.version.clone()
    }

    fn file_system(&self) -> &FileSystem {
        &self.file_system
    }

    fn residency(&self) -> Residency {
        self.residency.lock().unwrap().clone()
    }

    fn source(&self, route: Route) -> Arc<dyn Source> {
        Arc::clone(&self.sources[slot(route)])
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    fn check_unchanged(&self) -> Result<()> {
        match &*self.change.lock().unwrap() {
            Some(what) => Err(Error::Changed { path: self.path.clone(), what: what.clone() }),
            None => Ok(()),
        }
    }
}

fn slot(route: Route) -> usize {
    match route {
        Route::Direct | Route::GpuDirect => 0,
        Route::Buffered => 1,
        Route::Mapped => 2,
    }
}

/// Bytes in memory as a source.
pub struct MemorySource {
    bytes: Arc<[u8]>,
    route: Route,
    limits: Limits,
}

impl MemorySource {
    /// These bytes, by this route.
    pub fn new(bytes: impl Into<Arc<[u8]>>, route: Route, limits: Limits) -> MemorySource {
        MemorySource { bytes: bytes.into(), route, limits }
    }
}

impl Source for MemorySource {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn route(&self) -> Route {
        self.route
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let bytes = start.checked_add(target.len()).and_then(|end| self.bytes.get(start..end));
        let bytes = bytes.ok_or_else(|| failure(offset, target.len(), io::ErrorKind::UnexpectedEof))?;
        target.copy_from_slice(bytes);
        Ok(self.route)
    }
}

fn failure(offset: u64, len: usize, kind: io::ErrorKind) -> Error {
    let range = Some(offset..offset.saturating_add(len as u64));
    Error::Io { op: "read", path: PathBuf::from("memory"), range, source: kind.into() }
}

/// A gate that reads wait at, in place of a slow disk.
#[derive(Clone, Default)]
pub struct Gate {
    inner: Arc<(Mutex<GateState>, Condvar)>,
}

#[derive(Default)]
struct GateState {
    is_open: bool,
    waiting: usize,
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Gate {
        Gate::default()
    }

    /// Lets everyone through from now on.
    pub fn open(&self) {
        self.inner.0.lock().unwrap().is_open = true;
        self.inner.1.notify_all();
    }

    /// Waits until `count` reads stand at the gate.
    pub fn wait_for(&self, count: usize) {
        let state = self.inner.0.lock().unwrap();
        drop(self.inner.1.wait_while(state, |state| state.waiting < count).unwrap());
    }

    pub(super) fn pass(&self) {
        let mut state = self.inner.0.lock().unwrap();
        state.waiting += 1;
        self.inner.1.notify_all();
        drop(self.inner.1.wait_while(state, |state| !state.is_open).unwrap());
    }
}

/// What a [`FaultySource`] does wrong.
#[derive(Clone)]
pub enum Trouble {
    /// Every read from the `n`th on (from 0) fails.
    FailFrom(u64),
    /// The `n`th read fills half of its target and then meets the end of the file.
    ShortAt(u64),
    /// The `n`th read panics.
    PanicAt(u64),
    /// The byte at this offset of the file has its lowest bit flipped.
    Flip(u64),
    /// Every read waits at the gate first.
    Slow(Gate),
}

/// A source with troubles.
pub struct FaultySource {
    inner: Arc<dyn Source>,
    troubles: Vec<Trouble>,
    reads: AtomicU64,
}

impl FaultySource {
    /// `inner`, with these troubles.
    pub fn new(inner: Arc<dyn Source>, troubles: Vec<Trouble>) -> FaultySource {
        FaultySource { inner, troubles, reads: AtomicU64::new(0) }
    }

    /// Reads that were asked for so far.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::SeqCst)
    }

    fn before(&self, trouble: &Trouble, number: u64, offset: u64, target: &mut [u8]) -> Result<()> {
        match trouble {
            Trouble::FailFrom(first) if number >= *first => {
                return Err(failure(offset, target.len(), io::ErrorKind::Other));
            }
            Trouble::ShortAt(which) if number == *which => {
                let half = target.len() / 2;
                self.inner.read_at(offset, &mut target[..half])?;
                return Err(failure(offset, target.len(), io::ErrorKind::UnexpectedEof));
            }
            Trouble::PanicAt(which) if number == *which => panic!("a faulty source panics, as asked"),
            Trouble::Slow(gate) => gate.pass(),
            _ => {}
        }
        Ok(())
    }
}

impl Source for FaultySource {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn route(&self) -> Route {
        self.inner.route()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        let number = self.reads.fetch_add(1, Ordering::SeqCst);
        for trouble in &self.troubles {
            self.before(trouble, number, offset, target)?;
        }
        let route = self.inner.read_at(offset, target)?;
        for trouble in &self.troubles {
            if let Trouble::Flip(at) = trouble
                && let Some(place) = at.checked_sub(offset).and_then(|place| usize::try_from(place).ok())
                && let Some(byte) = target.get_mut(place)
            {
                *byte ^= 1;
            }
        }
        Ok(route)
    }
}

/// A queue that reads in the caller's own thread and gives reads back in an order that follows from its seed.
pub struct ShuffledQueue {
    random: Random,
    waiting: Vec<(Read, ReadTarget)>,
    depth: usize,
}

impl ShuffledQueue {
    /// A queue that says it wants `depth` reads in flight.
    pub fn new(seed: u64, depth: usize) -> ShuffledQueue {
        ShuffledQueue { random: Random::new(seed), waiting: Vec::new(), depth: depth.max(1) }
    }
}

impl ReadQueue for ShuffledQueue {
    fn submit(&mut self, read: Read, target: ReadTarget) {
        self.waiting.push((read, target));
    }

    fn complete(&mut self) -> Option<Completed> {
        let which = self.random.below(self.waiting.len());
        let (read, mut target) = (!self.waiting.is_empty()).then(|| self.waiting.swap_remove(which))?;
        let started = Instant::now();
        let outcome = read.fill(&mut target);
        Some(Completed { id: read.id, target, outcome, started, busy: started.elapsed() })
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn engine(&self) -> &'static str {
        "shuffled"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::watched;

    fn memory(len: usize) -> (Arc<dyn Source>, Vec<u8>) {
        let bytes = Random::new(1).bytes(len);
        (MemoryFile::new("a", bytes.clone()).source(Route::Buffered), bytes)
    }

    #[test]
    fn the_memory_file_passes_the_suite() {
        for len in [0, 1, 511, 512, 513, 40_000] {
            let bytes = Random::new(2).bytes(len);
            file_conformance(&MemoryFile::new("a", bytes.clone()), &bytes, 3);
        }
    }

    #[test]
    fn the_shuffled_queue_passes_the_suite() {
        watched(|| {
            let (source, bytes) = memory(300_000);
            for seed in 0..5 {
                queue_conformance(&|_| Box::new(ShuffledQueue::new(seed, 4)), &source, &bytes);
            }
        });
    }

    #[test]
    fn troubles_happen_when_they_should() {
        let (source, bytes) = memory(100);
        let flips = FaultySource::new(Arc::clone(&source), vec![Trouble::Flip(50)]);
        let mut target = [0; 20];
        flips.read_at(40, &mut target).unwrap();
        assert_eq!(target[10], bytes[50] ^ 1);
        flips.read_at(60, &mut target).unwrap();
        assert_eq!(target, bytes[60..80]);
        let fails = FaultySource::new(Arc::clone(&source), vec![Trouble::ShortAt(1), Trouble::FailFrom(3)]);
        let outcomes: Vec<bool> = (0..5).map(|_| fails.read_at(0, &mut target).is_ok()).collect();
        assert_eq!((outcomes, fails.reads()), (vec![true, false, true, false, false], 5));
    }
}
