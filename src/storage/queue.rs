//! Reads served by threads and by a ring.
//!
//! [`ThreadQueue`] serves any [`Source`](super::Source) with threads, in lanes: one for reads of the page cache, one for direct reads, one
//! for reads that a device makes itself, and one that makes the pages of an arena resident ahead of the direct reads into it,
//! so that neither disk nor reader waits for page faults. `uring` takes the place of the direct lane where the kernel permits
//! it. [`queue`] picks and says why. A queue never decides what is read, and never drops a target without giving it back,
//! except when it is itself dropped.

use std::fmt;
use std::sync::Arc;
use std::thread;

use crossbeam_channel::Receiver;

use super::gpu_direct::GPU_DIRECT;
use super::read::{Completed, Read, ReadQueue, ReadTarget};
use super::route::Lane;
use super::uring::Ring;
use super::workers::{Job, Outlet, Workers};
use crate::fallback::Fallbacks;
use crate::memory::staging::StagingPool;

/// What serves direct reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Engine {
    /// A ring where the kernel permits one, else threads: they measured equally fast, the ring for about as much CPU time or
    /// less.
    #[default]
    Auto,
    /// Threads.
    Threads,
    /// `io_uring`, where the kernel permits it; else threads.
    Ring,
}

/// How a queue is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueOptions {
    /// What serves direct reads.
    pub engine: Engine,
    /// Threads that copy out of the page cache.
    pub page_cache_threads: usize,
    /// Direct reads in flight.
    pub direct_depth: usize,
    /// Reads in flight that a device makes itself.
    pub gpu_direct_depth: usize,
    /// Threads that make the pages of an arena resident ahead of direct reads.
    pub populate_threads: usize,
}

impl Default for QueueOptions {
    /// One page-cache reader for each core (at most 16), eight direct reads, a populate thread for every four cores (at
    /// most 4). Four direct reads saturate one disk; eight leave room for faster ones.
    fn default() -> QueueOptions {
        let cores = thread::available_parallelism().map_or(2, usize::from);
        QueueOptions {
            engine: Engine::Auto,
            page_cache_threads: cores.min(16),
            direct_depth: 8,
            gpu_direct_depth: GPU_DIRECT.depth,
            populate_threads: (cores / 4).clamp(1, 4),
        }
    }
}

setters!(QueueOptions {
    /// Sets what serves direct reads.
    engine: Engine,
    /// Sets the number of threads that copy out of the page cache.
    page_cache_threads: usize,
    /// Sets how many direct reads are in flight.
    direct_depth: usize,
    /// Sets how many reads that a device makes itself are in flight.
    gpu_direct_depth: usize,
    /// Sets the number of threads that make the pages of an arena resident.
    populate_threads: usize,
});

/// Makes the queue that `options` ask for. With `pool`, a ring registers its buffers with the kernel. An engine that the
/// kernel refuses is replaced by threads, with an entry in the fallbacks.
pub fn queue(options: &QueueOptions, pool: Option<&StagingPool>, fallbacks: &Fallbacks) -> Box<dyn ReadQueue> {
    match options.engine {
        Engine::Threads => Box::new(ThreadQueue::new(options)),
        Engine::Auto | Engine::Ring => Box::new(ThreadQueue::with_ring(options, pool, fallbacks)),
    }
}

/// What usually stands behind a kernel's refusal of a ring.
fn likely_cause(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => " (forbidden by a container's sandbox or by kernel.io_uring_disabled)",
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => " (this kernel has none, or a sandbox hides it)",
        Some(libc::ENOMEM) => " (the limit of locked memory)",
        Some(libc::EAGAIN) => " (no further thread: the limit of processes, ulimit -u, or that of a container)",
        _ => "",
    }
}

/// Reads served by threads, which end with the queue; direct reads by a ring where there is one.
pub struct ThreadQueue {
    page_cache: Arc<Workers>,
    direct: Arc<Workers>,
    gpu_direct: Arc<Workers>,
    populate: Arc<Workers>,
    ring: Option<Arc<Ring>>,
    outlet: Outlet,
    results: Receiver<Completed>,
    in_flight: usize,
    depth: usize,
}

impl ThreadQueue {
    /// A queue of threads only.
    pub fn new(options: &QueueOptions) -> ThreadQueue {
        let (outlet, results) = Outlet::new();
        let direct = Workers::reading("direct", options.direct_depth, &outlet);
        ThreadQueue::assemble(options, direct, None, outlet, results)
    }

    /// A queue whose direct reads go through a ring, or through threads if the kernel refuses one.
    pub fn with_ring(options: &QueueOptions, pool: Option<&StagingPool>, fallbacks: &Fallbacks) -> ThreadQueue {
        let (outlet, results) = Outlet::new();
        let direct = Workers::reading("direct", options.direct_depth, &outlet);
        let ring = match Ring::start(options.direct_depth, pool, fallbacks, &outlet, &direct) {
            Ok(ring) => Some(Arc::new(ring)),
            Err(error) => {
                fallbacks
                    .note("io_uring", format!("{error}{}; direct reads are made by threads", likely_cause(&error)));
                None
            }
        };
        ThreadQueue::assemble(options, direct, ring, outlet, results)
    }

    fn assemble(
        options: &QueueOptions,
        direct: Arc<Workers>,
        ring: Option<Arc<Ring>>,
        outlet: Outlet,
        results: Receiver<Completed>,
    ) -> ThreadQueue {
        let page_cache = Workers::reading("cached", options.page_cache_threads, &outlet);
        let gpu_direct = Workers::reading("gpu", options.gpu_direct_depth, &outlet);
        let next = Inlet { lane: Arc::clone(&direct), ring: ring.clone() };
        let populate = move |job: Job| {
            job.populate();
            next.send(job);
        };
        let populate = Workers::new("populate", options.populate_threads, outlet.clone(), Arc::new(populate));
        // Twice: one read waits in line for each that runs, so that nobody waits for the submitter.
        let depth = 2 * options.page_cache_threads.max(options.direct_depth).max(options.gpu_direct_depth).max(1);
        ThreadQueue { page_cache, direct, gpu_direct, populate, ring, outlet, results, in_flight: 0, depth }
    }

    fn inlet(&self) -> Inlet {
        Inlet { lane: Arc::clone(&self.direct), ring: self.ring.clone() }
    }
}

impl ReadQueue for ThreadQueue {
    fn submit(&mut self, read: Read, target: ReadTarget) {
        self.in_flight += 1;
        let job = Job { read, target };
        match (job.read.source.route().lane(), &job.target) {
            (Lane::Direct, ReadTarget::InPlace(_)) => self.populate.send(job),
            (Lane::Direct, ReadTarget::Staging(_) | ReadTarget::Lost) => self.inlet().send(job),
            (Lane::Device, _) => self.gpu_direct.send(job),
            (Lane::PageCache, _) => self.page_cache.send(job),
        }
    }

    fn complete(&mut self) -> Option<Completed> {
        if self.in_flight == 0 {
            return None;
        }
        // Cannot fail: `outlet` holds a sender. Every job ends in exactly one message, even if its source panics.
        let completed = self.results.recv().ok()?;
        self.in_flight -= 1;
        Some(completed)
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn engine(&self) -> &'static str {
        if self.ring.is_some() { "io_uring" } else { "threads" }
    }
}

impl Drop for ThreadQueue {
    /// Waits for the reads that run (the kernel may be writing to their targets) and gives up those that wait in line.
    fn drop(&mut self) {
        self.outlet.cancel();
        // Each lane is closed before the one that it feeds.
        self.populate.close();
        if let Some(ring) = &self.ring {
            ring.close();
        }
        self.direct.close();
        self.gpu_direct.close();
        self.page_cache.close();
        while let Ok(completed) = self.results.try_recv() {
            drop(completed);
        }
    }
}

/// The entrance to the ring or the threads that serve direct reads.
struct Inlet {
    lane: Arc<Workers>,
    ring: Option<Arc<Ring>>,
}

impl Inlet {
    fn send(&self, job: Job) {
        match &self.ring {
            Some(ring) => ring.send(job),
            None => self.lane.send(job),
        }
    }
}

impl fmt::Debug for ThreadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadQueue").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::device::Arena;
    use crate::error::{Error, Result};
    use crate::memory::HostBlock;
    use crate::storage::{Limits, LocalStorage, Location, OpenFile, Route, Source, Storage};
    use crate::testing::{FaultySource, Gate, MemoryFile, Trouble, queue_conformance};
    use crate::testing::{Feature, Random, refused, required, watched};

    fn local(len: usize) -> (tempfile::TempDir, Arc<dyn OpenFile>, Vec<u8>) {
        let bytes = Random::new(21).bytes(len);
        let folder = tempfile::tempdir().unwrap();
        let path: PathBuf = folder.path().join("a");
        std::fs::write(&path, &bytes).unwrap();
        (folder, LocalStorage.open(&Location::from(&path), &Fallbacks::default()).unwrap(), bytes)
    }

    fn options(engine: Engine) -> QueueOptions {
        QueueOptions { engine, page_cache_threads: 3, direct_depth: 3, gpu_direct_depth: 3, populate_threads: 2 }
    }

    fn memory(route: Route, trouble: Trouble) -> Arc<dyn Source> {
        let file = MemoryFile::new("a", vec![7; 100_000]);
        Arc::new(FaultySource::new(file.source(route), vec![trouble]))
    }

    fn read(id: usize, source: &Arc<dyn Source>) -> Read {
        Read { id, source: Arc::clone(source), offset: 0, len: 4096 }
    }

    #[test]
    fn both_engines_pass_the_suite_on_every_route() {
        watched(|| {
            let (_folder, file, bytes) = local(400_001);
            for engine in [Engine::Auto, Engine::Threads, Engine::Ring] {
                for route in [Route::Buffered, Route::Direct, Route::Mapped] {
                    let make = |pool: &StagingPool| queue(&options(engine), Some(pool), &Fallbacks::default());
                    queue_conformance(&make, &file.source(route), &bytes);
                }
            }
        });
    }

    /// Where there is no ring, the tests of the ring run on threads: this one says so.
    #[test]
    fn the_tests_of_the_ring_have_one() {
        let notes = Fallbacks::default();
        let engine = queue(&options(Engine::Ring), None, &notes).engine();
        let found = if engine == "threads" { Err(format!("{:?}", notes.list())) } else { Ok(()) };
        assert!(required(Feature::Uring, found).is_none_or(|()| engine == "io_uring"), "{engine}");
    }

    #[test]
    fn a_ring_without_registered_buffers_passes_the_suite() {
        watched(|| {
            let (_folder, file, bytes) = local(300_000);
            let make = |_: &StagingPool| queue(&options(Engine::Ring), None, &Fallbacks::default());
            queue_conformance(&make, &file.source(Route::Direct), &bytes);
            // A pool that is not the registered one, too.
            let other = StagingPool::new(6, 64 << 10).unwrap();
            let make = |_: &StagingPool| queue(&options(Engine::Ring), Some(&other), &Fallbacks::default());
            queue_conformance(&make, &file.source(Route::Direct), &bytes);
        });
    }

    /// A source that says the wrong things of its descriptor.
    struct Lying {
        inner: Arc<dyn Source>,
        limits: Limits,
        /// Lent in place of the source's own.
        other: Option<std::fs::File>,
    }

    impl Source for Lying {
        fn len(&self) -> u64 {
            self.inner.len()
        }

        fn route(&self) -> Route {
            Route::Direct
        }

        fn limits(&self) -> Limits {
            self.limits
        }

        fn ring_descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            use std::os::fd::AsFd as _;
            self.other.as_ref().map(|file| file.as_fd()).or_else(|| self.inner.ring_descriptor())
        }

        fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
            self.inner.read_at(offset, target)
        }
    }

    /// Refusals in the ring (no such alignment, no such descriptor, an alignment that is none) cost time, not bytes.
    #[test]
    fn what_a_ring_refuses_is_read_by_the_source() {
        watched(|| {
            let (_folder, file, bytes) = local(300_001);
            let inner = file.source(Route::Direct);
            let limits = inner.limits();
            // Descriptors that refuse to be read: one opened for writing only, and a folder.
            let unreadable = || std::fs::OpenOptions::new().write(true).open("/dev/null").ok();
            let folder = || std::fs::File::open("/").ok();
            for (align, memory_align, other) in
                [(1, 1, None), (512, 1, None), (512, 512, unreadable()), (512, 512, folder()), (3, 0, None)]
            {
                let limits = Limits { align, memory_align, ..limits };
                let source: Arc<dyn Source> = Arc::new(Lying { inner: Arc::clone(&inner), limits, other });
                let make = |pool: &StagingPool| queue(&options(Engine::Ring), Some(pool), &Fallbacks::default());
                queue_conformance(&make, &source, &bytes);
            }
        });
    }

    #[test]
    fn a_file_that_shrank_is_an_error_from_both_engines() {
        watched(|| {
            for engine in [Engine::Threads, Engine::Ring] {
                let (folder, file, bytes) = local(200_000);
                let source = file.source(Route::Direct);
                let whole = std::fs::OpenOptions::new().write(true).open(folder.path().join("a")).unwrap();
                whole.set_len(100_000).unwrap();
                let pool = StagingPool::new(2, 200_000).unwrap();
                let mut queue = queue(&options(engine), Some(&pool), &Fallbacks::default());
                let read = |id, len| Read { id, source: Arc::clone(&source), offset: 0, len };
                queue.submit(read(1, 200_000), ReadTarget::Staging(pool.acquire().unwrap()));
                queue.submit(read(2, 100_000), ReadTarget::Staging(pool.acquire().unwrap()));
                for _ in 0..2 {
                    let done = queue.complete().unwrap();
                    match (done.id, done.outcome, done.target) {
                        (1, Err(Error::Changed { what, .. }), _) => assert!(what.contains("200000"), "{what}"),
                        (2, Ok(_), ReadTarget::Staging(buffer)) => {
                            assert!(buffer.bytes()[..100_000] == bytes[..100_000])
                        }
                        (id, outcome, _) => panic!("read {id}: {outcome:?}"),
                    }
                }
            }
        });
    }

    /// A sandbox once let a ring be set up and never entered: the load waited for it for ever.
    #[test]
    fn a_ring_that_may_not_be_entered_is_noted_and_replaced() {
        watched(|| {
            let (_folder, file, bytes) = local(100_000);
            if !refused(&[libc::SYS_io_uring_enter], libc::EPERM) {
                return;
            }
            let notes = Fallbacks::default();
            let make = |pool: &StagingPool| queue(&options(Engine::Ring), Some(pool), &notes);
            assert_eq!(make(&StagingPool::new(1, 4096).unwrap()).engine(), "threads");
            queue_conformance(&make, &file.source(Route::Direct), &bytes);
            assert!(notes.list().iter().any(|note| note.what == "io_uring" && note.why.contains("sandbox")));
        });
    }

    #[test]
    fn a_refused_ring_or_registration_is_noted_and_replaced() {
        watched(|| {
            let notes = Fallbacks::default();
            let empty = StagingPool::new(0, 4096).unwrap();
            let made = queue(&options(Engine::Ring), Some(&empty), &notes);
            // Without io_uring the note is about the ring, with it about the registration.
            assert!(!notes.list().is_empty());
            assert_eq!(made.engine() == "threads", notes.list().iter().any(|note| note.what == "io_uring"));
            assert_eq!(queue(&options(Engine::Threads), None, &notes).engine(), "threads");
            assert_eq!(notes.list().len(), 1);
        });
    }

    #[test]
    fn a_panic_in_a_source_comes_back_as_an_error_with_its_target() {
        watched(|| {
            for engine in [Engine::Threads, Engine::Ring] {
                for route in [Route::Buffered, Route::Direct] {
                    let pool = StagingPool::new(2, 4096).unwrap();
                    let mut queue = queue(&options(engine), Some(&pool), &Fallbacks::default());
                    let source = memory(route, Trouble::PanicAt(0));
                    queue.submit(read(5, &source), ReadTarget::Staging(pool.acquire().unwrap()));
                    let done = queue.complete().unwrap();
                    assert!(matches!(done.outcome, Err(Error::Poisoned { .. })), "{:?}", done.outcome);
                    queue.submit(read(6, &source), ReadTarget::Staging(pool.acquire().unwrap()));
                    assert_eq!(queue.complete().unwrap().outcome.unwrap(), route, "the reader lives on");
                }
            }
        });
    }

    #[test]
    fn dropping_waits_for_reads_that_run_and_gives_up_those_in_line() {
        watched(|| {
            for route in [Route::Buffered, Route::Direct] {
                let gate = Gate::new();
                let slow = Arc::new(FaultySource::new(
                    MemoryFile::new("a", vec![7; 100_000]).source(route),
                    vec![Trouble::Slow(gate.clone())],
                ));
                let source: Arc<dyn Source> = slow.clone();
                let pool = StagingPool::new(20, 4096).unwrap();
                let mut queue = ThreadQueue::new(&options(Engine::Threads));
                for id in 0..20 {
                    queue.submit(read(id, &source), ReadTarget::Staging(pool.acquire().unwrap()));
                }
                gate.wait_for(3);
                queue.outlet.cancel(); // as the drop does first; the gate may open only after that
                gate.open();
                drop(queue);
                assert_eq!(slow.reads(), 3, "reads in line were not made");
                assert_eq!(pool.available(), 20);
            }
        });
    }

    #[test]
    fn a_region_that_is_read_past_the_cache_is_populated_and_filled() {
        watched(|| {
            let (_folder, file, bytes) = local(3 << 20);
            let arena = Arena::host(HostBlock::new(bytes.len()).unwrap());
            let (regions, written) = arena.carve(&[0..1 << 20, 1 << 20..3 << 20]).unwrap();
            let mut queue = ThreadQueue::new(&QueueOptions::default());
            for (id, region) in regions.into_iter().enumerate() {
                let len = usize::try_from(region.len()).unwrap();
                let read = Read { id, source: file.source(Route::Direct), offset: region.range().start, len };
                queue.submit(read, ReadTarget::InPlace(region));
            }
            while let Some(done) = queue.complete() {
                done.outcome.unwrap();
                let ReadTarget::InPlace(region) = done.target else { panic!("another target") };
                region.finish();
            }
            assert!(written.view(0..3 << 20).unwrap().bytes().unwrap() == bytes);
        });
    }

    #[test]
    fn a_lane_that_gets_no_thread_does_the_work_itself() {
        let (outlet, results) = Outlet::new();
        let lane = Workers::reading("test", 1, &outlet);
        // Put in line past `send`, as if no thread could be had.
        let pool = StagingPool::new(1, 4096).unwrap();
        let source = MemoryFile::new("a", vec![7; 5000]).source(Route::Buffered);
        let job = Job { read: read(1, &source), target: ReadTarget::Staging(pool.acquire().unwrap()) };
        lane.state.lock().unwrap().line.as_ref().unwrap().0.send(job).unwrap();
        lane.serve_here();
        assert_eq!(results.try_recv().unwrap().outcome.unwrap(), Route::Buffered);
        lane.close();
        let job = Job { read: read(2, &source), target: ReadTarget::Staging(pool.acquire().unwrap()) };
        lane.send(job);
        assert!(matches!(results.try_recv().unwrap().outcome, Err(Error::Cancelled)));
    }
}
