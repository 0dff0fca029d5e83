//! The port to reads in flight: a [`ReadQueue`] takes a read and its target and gives the target back, filled.
//!
//! [`ThreadQueue`] serves any [`Source`] with threads, in lanes: one for reads of the page cache, one for direct reads, one
//! for reads that a device makes itself, and one that makes the pages of an arena resident ahead of the direct reads into it,
//! so that neither disk nor reader waits for page faults. `uring` takes the place of the direct lane where the kernel permits
//! it. [`queue`] picks and says why. A queue never decides what is read, and never drops a target without giving it back,
//! except when it is itself dropped.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::uring::Ring;
use super::{Fallbacks, GPU_DIRECT, Lane, Route, Source};
use crate::device::Region;
use crate::error::{Error, Result};
use crate::memory::staging::{StagingBuffer, StagingPool};

/// One read of a file.
#[derive(Clone)]
pub struct Read {
    /// The caller's number of this read; it comes back with the [`Completed`].
    pub id: usize,
    /// The file, by the way to take.
    pub source: Arc<dyn Source>,
    /// First byte in the file.
    pub offset: u64,
    /// Number of bytes: not above the length of the target.
    pub len: usize,
}

/// Where the bytes of a read go: the first `len` bytes of the target.
#[derive(Debug)]
pub enum Target {
    /// A staging buffer, to be uploaded.
    Staging(StagingBuffer),
    /// The right place in the arena: one that the host can address, or that the source fills itself ([`Route::GpuDirect`]).
    InPlace(Region),
    /// Memory that the kernel may still write, and that therefore nobody gets back: only of a read that failed.
    Lost,
}

impl Read {
    /// Makes the read, here and now: the source fills host memory, or the region itself where that is its way.
    ///
    /// # Errors
    /// As [`Source::read_at`]; and when the target is too short or out of the source's reach.
    pub fn fill(&self, target: &mut Target) -> Result<Route> {
        match (self.source.as_device_source(), target) {
            (Some(device), Target::InPlace(region)) => device.read_region(self.offset, self.len as u64, region),
            (_, target) => self.source.read_at(self.offset, target.bytes_mut(self.len)?),
        }
    }
}

impl Target {
    /// The first `len` bytes.
    fn bytes_mut(&mut self, len: usize) -> Result<&mut [u8]> {
        let whole = match self {
            Target::Staging(buffer) => Some(buffer.bytes_mut()),
            Target::InPlace(region) => region.bytes_mut(),
            Target::Lost => None,
        };
        let bytes = whole.and_then(|bytes| bytes.get_mut(..len));
        bytes.ok_or(Error::Poisoned { what: "a read's target is too short or out of the host's reach" })
    }
}

/// A read that is over.
#[derive(Debug)]
pub struct Completed {
    /// The number that the read was given.
    pub id: usize,
    /// The target, whatever happened.
    pub target: Target,
    /// The route that was taken, or why there are no bytes.
    pub outcome: Result<Route>,
    /// When a reader or the ring took it up.
    pub started: Instant,
    /// Time that it spent on it, waiting in line excluded.
    pub busy: Duration,
}

/// Reads in flight.
pub trait ReadQueue: Send {
    /// Starts a read. Never blocks on the read itself.
    fn submit(&mut self, read: Read, target: Target);

    /// Waits for the next read to be over, in any order. `None` when none is in flight.
    fn complete(&mut self) -> Option<Completed>;

    /// Reads in flight that keep this queue busy.
    fn depth(&self) -> usize;

    /// Which engine this is, for the report: `threads` or `io_uring`.
    fn engine(&self) -> &'static str;
}

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
    fn submit(&mut self, read: Read, target: Target) {
        self.in_flight += 1;
        let job = Job { read, target };
        match (job.read.source.route().lane(), &job.target) {
            (Lane::Direct, Target::InPlace(_)) => self.populate.send(job),
            (Lane::Direct, Target::Staging(_) | Target::Lost) => self.inlet().send(job),
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

/// A read with its target, on its way through the lanes.
pub(super) struct Job {
    pub(super) read: Read,
    pub(super) target: Target,
}

impl Job {
    /// The bytes to fill.
    pub(super) fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.target.bytes_mut(self.read.len)
    }

    fn populate(&self) {
        if let Target::InPlace(region) = &self.target {
            region.populate();
        }
    }

    /// Reads, whatever the source does.
    fn run(mut self) -> Completed {
        let started = Instant::now();
        // After a panic the target may hold anything, which is what an error says of it anyway.
        let read = AssertUnwindSafe(|| self.read.fill(&mut self.target));
        let outcome = catch_unwind(read).unwrap_or(Err(Error::Poisoned { what: "a source panicked" }));
        self.end(outcome, started)
    }

    /// Ends a job whose target the kernel may still write: that is never freed.
    pub(super) fn end_lost(mut self, source: &std::io::Error, started: Instant) -> Completed {
        std::mem::forget(std::mem::replace(&mut self.target, Target::Lost));
        let message = format!("the kernel took the read and then refused to give its answer: {source}");
        self.end(Err(Error::Device { device: "io_uring".to_owned(), op: "read", message }), started)
    }

    /// Ends a job that was taken up then.
    pub(super) fn end(self, outcome: Result<Route>, started: Instant) -> Completed {
        Completed { id: self.read.id, target: self.target, outcome, started, busy: started.elapsed() }
    }
}

/// Where finished reads go, and whether reads that have not begun still should.
#[derive(Clone)]
pub(super) struct Outlet {
    results: Sender<Completed>,
    cancelled: Arc<AtomicBool>,
}

impl Outlet {
    pub(super) fn new() -> (Outlet, Receiver<Completed>) {
        let (results, receiver) = unbounded();
        (Outlet { results, cancelled: Arc::new(AtomicBool::new(false)) }, receiver)
    }

    pub(super) fn send(&self, completed: Completed) {
        // The receiver outlives every lane: the queue joins them before it goes.
        let _ = self.results.send(completed);
    }

    /// Ends a job that will not run any more.
    pub(super) fn give_up(&self, job: Job) {
        self.send(job.end(Err(Error::Cancelled), Instant::now()));
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    fn run(&self, job: Job) {
        if self.is_cancelled() { self.give_up(job) } else { self.send(job.run()) }
    }
}

/// The way to whoever serves direct reads.
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

type Work = Arc<dyn Fn(Job) + Send + Sync>;

/// A line of jobs and the threads that serve it, started one by one as jobs come.
pub(super) struct Workers {
    name: &'static str,
    wanted: usize,
    outlet: Outlet,
    work: Work,
    state: Mutex<LaneState>,
}

struct LaneState {
    /// Both ends of the line; `None` once it is closed.
    line: Option<(Sender<Job>, Receiver<Job>)>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    fn new(name: &'static str, wanted: usize, outlet: Outlet, work: Work) -> Arc<Workers> {
        let state = Mutex::new(LaneState { line: Some(unbounded()), threads: Vec::new() });
        Arc::new(Workers { name, wanted: wanted.max(1), outlet, work, state })
    }

    /// A lane that reads.
    pub(super) fn reading(name: &'static str, wanted: usize, outlet: &Outlet) -> Arc<Workers> {
        let reader = outlet.clone();
        Workers::new(name, wanted, outlet.clone(), Arc::new(move |job| reader.run(job)))
    }

    pub(super) fn send(&self, job: Job) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((sender, receiver)) = state.line.clone() else { return self.outlet.give_up(job) };
        if state.threads.len() < self.wanted
            && let Ok(thread) = self.start_thread(receiver)
        {
            state.threads.push(thread);
        }
        let is_served = !state.threads.is_empty();
        drop(state);
        match sender.send(job) {
            // Where the machine gives us no thread at all, the submitter does the work.
            Ok(()) if !is_served => self.serve_here(),
            Ok(()) => {}
            Err(refused) => self.outlet.give_up(refused.into_inner()),
        }
    }

    fn start_thread(&self, jobs: Receiver<Job>) -> std::io::Result<JoinHandle<()>> {
        let work = Arc::clone(&self.work);
        let serve = move || jobs.into_iter().for_each(|job| work(job));
        thread::Builder::new().name(format!("vramp-{}", self.name)).spawn(serve)
    }

    fn serve_here(&self) {
        let line = self.state.lock().unwrap_or_else(PoisonError::into_inner).line.clone();
        let Some((_, receiver)) = line else { return };
        receiver.try_iter().for_each(|job| (self.work)(job));
    }

    /// Lets the threads finish what is in line, and waits for them.
    fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.line = None;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for ThreadQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadQueue").finish_non_exhaustive()
    }
}

impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Read { id, offset, len, .. } = self;
        f.debug_struct("Read").field("id", id).field("offset", offset).field("len", len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::device::Arena;
    use crate::memory::HostBlock;
    use crate::storage::{Limits, LocalStorage, Location, OpenFile, Storage};
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
                queue.submit(read(1, 200_000), Target::Staging(pool.acquire().unwrap()));
                queue.submit(read(2, 100_000), Target::Staging(pool.acquire().unwrap()));
                for _ in 0..2 {
                    let done = queue.complete().unwrap();
                    match (done.id, done.outcome, done.target) {
                        (1, Err(Error::Changed { what, .. }), _) => assert!(what.contains("200000"), "{what}"),
                        (2, Ok(_), Target::Staging(buffer)) => assert!(buffer.bytes()[..100_000] == bytes[..100_000]),
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
                    queue.submit(read(5, &source), Target::Staging(pool.acquire().unwrap()));
                    let done = queue.complete().unwrap();
                    assert!(matches!(done.outcome, Err(Error::Poisoned { .. })), "{:?}", done.outcome);
                    queue.submit(read(6, &source), Target::Staging(pool.acquire().unwrap()));
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
                    queue.submit(read(id, &source), Target::Staging(pool.acquire().unwrap()));
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
                queue.submit(read, Target::InPlace(region));
            }
            while let Some(done) = queue.complete() {
                done.outcome.unwrap();
                let Target::InPlace(region) = done.target else { panic!("another target") };
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
        let job = Job { read: read(1, &source), target: Target::Staging(pool.acquire().unwrap()) };
        lane.state.lock().unwrap().line.as_ref().unwrap().0.send(job).unwrap();
        lane.serve_here();
        assert_eq!(results.try_recv().unwrap().outcome.unwrap(), Route::Buffered);
        lane.close();
        let job = Job { read: read(2, &source), target: Target::Staging(pool.acquire().unwrap()) };
        lane.send(job);
        assert!(matches!(results.try_recv().unwrap().outcome, Err(Error::Cancelled)));
    }
}
