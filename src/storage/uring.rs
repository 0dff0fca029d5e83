//! A ring (`io_uring`) that serves direct reads on a thread of its own.
//!
//! The ring reads the whole blocks of a job; what is left at its ends, and every job that the ring cannot serve or that
//! fails in it, is read by the source itself, which knows how to fall back and how to word an error. A job's target stays
//! in the table of flights from the submission until the kernel has said that it is done with the memory: that is what
//! makes the raw addresses given to the kernel sound, and nothing else does. Nothing here decides what is read.
//!
//! A kernel that no longer takes entries (`EBUSY`, `EAGAIN`) is asked again for a while, ever more seldom. Then the ring is given
//! up: reads that the kernel never saw are made by threads, as all later ones are; a read that it did take ends with an error,
//! and its memory stays untouched and unfreed for good, since the kernel may still write there.
#![allow(unsafe_code)] // gives the kernel addresses of memory that the table of flights owns

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use io_uring::{IoUring, opcode, squeue, types};

use super::file::Parts;
use super::read::ReadTarget;
use super::route::Route;
use super::workers::{Job, Outlet, Workers};
use crate::fallback::Fallbacks;
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::os;

/// Marks the completion of the poll on the wake-up counter; flights are numbered from zero.
const WAKE: u64 = u64::MAX;
/// Times that the kernel may say "again" for one read before a thread makes it.
const MAX_RETRIES: u32 = 64;
/// Times in a row that the kernel may refuse to be entered before the ring is given up, and the longest wait between two. The waits
/// double from a millisecond on: some three seconds in all, and few in tests.
const MAX_REFUSALS: u32 = if cfg!(test) { 4 } else { 36 };
const LONGEST_WAIT: Duration = Duration::from_millis(100);
/// The kernel takes at most this many registered buffers, and at most 1 GiB in each.
const MAX_BUFFERS: usize = 16_384;
const MAX_BUFFER_BYTES: usize = 1 << 30;
/// The longest submission, a multiple of every block size. Short in tests, so that reads there take several, as they do
/// where the kernel completes them short.
const MAX_ENTRY_BYTES: usize = if cfg!(test) { 16 << 10 } else { 1 << 30 };

/// How the kernel is entered: submits what is queued and waits for a completion. Tests have it refused.
type Enter = dyn Fn(&IoUring) -> io::Result<usize> + Send;

/// The way to the ring's thread.
pub(super) struct Ring {
    state: Mutex<State>,
    wake: Arc<File>,
    outlet: Outlet,
}

struct State {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Ring {
    /// Sets up a ring of `depth` reads in flight. What it cannot serve goes to `spill`.
    ///
    /// # Errors
    /// Why the kernel refuses: not built in, forbidden by a sandbox or a setting, no memory that may be locked.
    pub(super) fn start(
        depth: usize,
        pool: Option<&StagingPool>,
        fallbacks: &Fallbacks,
        outlet: &Outlet,
        spill: &Arc<Workers>,
    ) -> io::Result<Ring> {
        Ring::start_with(depth, pool, fallbacks, outlet, spill, Box::new(|ring| ring.submit_and_wait(1)))
    }

    fn start_with(
        depth: usize,
        pool: Option<&StagingPool>,
        fallbacks: &Fallbacks,
        outlet: &Outlet,
        spill: &Arc<Workers>,
        enter: Box<Enter>,
    ) -> io::Result<Ring> {
        let wake = Arc::new(os::event_counter()?);
        let (jobs, line) = unbounded();
        let (ready, answer) = bounded(1);
        let setup = Setup { depth: depth.clamp(1, 256), pool: pool.cloned(), fallbacks: fallbacks.clone() };
        let (counter, spill, results) = (Arc::clone(&wake), Arc::clone(spill), outlet.clone());
        let serve = move || match Server::new(&setup, counter, spill, results, enter) {
            Ok(server) => {
                let _ = ready.send(Ok(()));
                server.serve(&line);
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        };
        let thread = thread::Builder::new().name("vramp-ring".to_owned()).spawn(serve)?;
        answer.recv().unwrap_or_else(|_| Err(io::Error::other("the ring's thread ended")))?;
        let state = Mutex::new(State { jobs: Some(jobs), thread: Some(thread) });
        Ok(Ring { state, wake, outlet: outlet.clone() })
    }

    pub(super) fn send(&self, job: Job) {
        let jobs = self.state.lock().unwrap_or_else(PoisonError::into_inner).jobs.clone();
        let refused = match jobs {
            Some(jobs) => jobs.send(job).err().map(|refused| refused.into_inner()),
            None => Some(job),
        };
        match refused {
            Some(job) => self.outlet.give_up(job),
            // After the job is in line: a thread that takes this signal finds the job.
            None => drop((&*self.wake).write(&1u64.to_ne_bytes())),
        }
    }

    /// Waits until the kernel is done with every target, and ends the thread.
    pub(super) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.jobs = None;
        let thread = state.thread.take();
        drop(state);
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.close();
    }
}

struct Setup {
    depth: usize,
    pool: Option<StagingPool>,
    fallbacks: Fallbacks,
}

/// The ring, on its own thread.
struct Server {
    ring: IoUring,
    flights: Vec<Option<Flight>>,
    in_flight: usize,
    is_poll_armed: bool,
    wake: Arc<File>,
    /// Kept so that the registered memory outlives the ring.
    registered: Option<StagingPool>,
    spill: Arc<Workers>,
    outlet: Outlet,
    enter: Box<Enter>,
    fallbacks: Fallbacks,
    /// The tags of entries that the kernel has perhaps not taken yet, the oldest first: it takes them in order.
    queued: VecDeque<u64>,
    /// Refusals in a row.
    refusals: u32,
    given_up: bool,
}

/// A job whose middle the kernel is reading.
struct Flight {
    job: Job,
    fd: RawFd,
    align: u64,
    parts: Parts,
    /// Bytes of the middle that have arrived.
    done: usize,
    retries: u32,
    started: Instant,
}

impl Server {
    fn new(
        setup: &Setup,
        wake: Arc<File>,
        spill: Arc<Workers>,
        outlet: Outlet,
        enter: Box<Enter>,
    ) -> io::Result<Server> {
        // Each flight has at most one entry, and the poll one more.
        let entries = u32::try_from(setup.depth + 1).unwrap_or(257).next_power_of_two();
        let mut ring = build(entries)?;
        try_out(&mut ring)?;
        let registered = setup.pool.as_ref().and_then(|pool| match register(&ring, pool) {
            Ok(()) => Some(pool.clone()),
            Err(error) => {
                let why = format!("{error} (the limit of locked memory?); staging buffers are pinned read by read");
                setup.fallbacks.note("io_uring registered buffers", why);
                None
            }
        });
        let flights = (0..setup.depth).map(|_| None).collect();
        Ok(Server {
            ring,
            flights,
            in_flight: 0,
            is_poll_armed: false,
            wake,
            registered,
            spill,
            outlet,
            enter,
            fallbacks: setup.fallbacks.clone(),
            queued: VecDeque::new(),
            refusals: 0,
            given_up: false,
        })
    }

    /// Serves jobs until the line is closed and empty. A panic (our bug) sends what is left to the threads.
    fn serve(mut self, line: &Receiver<Job>) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve_line(line)));
        self.drain();
        if ended.is_err() {
            line.iter().for_each(|job| self.spill.send(job));
        }
    }

    fn serve_line(&mut self, line: &Receiver<Job>) {
        loop {
            if self.given_up {
                return line.iter().for_each(|job| self.spill.send(job));
            }
            self.take_jobs(line);
            if self.in_flight > 0 {
                self.arm_poll();
                self.wait();
                self.reap();
                continue;
            }
            match line.recv() {
                Ok(job) => self.begin(job),
                Err(_) => return,
            }
        }
    }

    fn take_jobs(&mut self, line: &Receiver<Job>) {
        while self.in_flight < self.flights.len() {
            let Ok(job) = line.try_recv() else { return };
            self.begin(job);
        }
    }

    /// Starts a job, or passes it on if it is not for the ring.
    fn begin(&mut self, mut job: Job) {
        if self.outlet.is_cancelled() {
            return self.outlet.give_up(job);
        }
        match (course(&mut job), self.flights.iter().position(Option::is_none)) {
            (Some(Course { fd, align, parts }), Some(slot)) => {
                let started = Instant::now();
                self.flights[slot] = Some(Flight { job, fd, align, parts, done: 0, retries: 0, started });
                self.in_flight += 1;
                self.push(slot);
            }
            _ => self.spill.send(job),
        }
    }

    /// Puts the rest of a flight's middle in the submission queue.
    fn push(&mut self, slot: usize) {
        let registered = self.registered.as_ref();
        let entry = self.flights[slot].as_mut().and_then(|flight| flight.entry(registered));
        let Some(entry) = entry else { return self.land_by_thread(slot) };
        let entry = entry.user_data(slot as u64);
        // SAFETY: the entry's address range lies in the target of `flights[slot]`, which stays there untouched until
        // this entry's completion is reaped (`reap`, `drain`).
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            // Cannot be: there is an entry for each flight. A thread makes the read; the kernel never saw it.
            self.land_by_thread(slot);
        } else {
            self.queued.push_back(slot as u64);
        }
    }

    /// Asks to be woken when a job comes.
    fn arm_poll(&mut self) {
        if self.is_poll_armed {
            return;
        }
        let events = u32::from(libc::POLLIN.cast_unsigned());
        let entry = opcode::PollAdd::new(types::Fd(self.wake.as_raw_fd()), events).build().user_data(WAKE);
        // SAFETY: a poll refers to no memory; the counter is open as long as `self`.
        self.is_poll_armed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        if self.is_poll_armed {
            self.queued.push_back(WAKE);
        }
    }

    /// Submits what is queued and waits until something has completed. A kernel that refuses again and again ends the ring.
    fn wait(&mut self) {
        let entered = (self.enter)(&self.ring);
        let waiting = self.ring.submission().len();
        while self.queued.len() > waiting {
            self.queued.pop_front();
        }
        let Err(error) = entered else {
            self.refusals = 0;
            return;
        };
        if error.raw_os_error() == Some(libc::EINTR) || !self.ring.completion().is_empty() {
            return; // completions to be reaped first are one reason to refuse
        }
        if self.refusals >= MAX_REFUSALS {
            return self.give_up(&error);
        }
        thread::sleep(Duration::from_millis(1 << self.refusals.min(7)).min(LONGEST_WAIT));
        self.refusals += 1;
    }

    /// Never enters the kernel again. What it has not taken goes to the threads; what it has taken ends here, its memory left alone.
    fn give_up(&mut self, error: &io::Error) {
        self.given_up = true;
        let why = format!("the kernel refuses again and again: {error}; direct reads are made by threads");
        self.fallbacks.note("io_uring", why);
        // The entries stay in the submission queue, which nobody submits any more.
        for slot in std::mem::take(&mut self.queued).into_iter().filter_map(|tag| usize::try_from(tag).ok()) {
            if slot < self.flights.len() {
                self.land_by_thread(slot);
            }
        }
        for slot in 0..self.flights.len() {
            let Some(Flight { job, started, .. }) = self.take(slot) else { continue };
            self.outlet.send(job.end_lost(error, started));
        }
    }

    fn reap(&mut self) {
        // Collected first: handling one may queue the next.
        let completions: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        if !completions.is_empty() {
            self.refusals = 0;
        }
        for (tag, result) in completions {
            match usize::try_from(tag) {
                Ok(slot) if slot < self.flights.len() => self.arrive(slot, result),
                _ => self.take_wake(),
            }
        }
    }

    fn take_wake(&mut self) {
        let _ = (&*self.wake).read(&mut [0; 8]);
        self.is_poll_armed = false;
    }

    /// Handles the kernel's answer to one entry.
    fn arrive(&mut self, slot: usize, result: i32) {
        let Some(flight) = self.flights[slot].as_mut() else { return };
        match flight.account(result) {
            Step::Done => self.land(slot),
            Step::Again => self.push(slot),
            Step::Refused => self.land_by_thread(slot),
        }
    }

    /// Ends a flight whose middle is there.
    fn land(&mut self, slot: usize) {
        let Some(mut flight) = self.take(slot) else { return };
        let outcome = flight.read_ends();
        self.outlet.send(flight.job.end(outcome, flight.started));
    }

    /// Ends a flight that the ring cannot serve: the source reads it again and words the error if there is one.
    fn land_by_thread(&mut self, slot: usize) {
        if let Some(flight) = self.take(slot) {
            self.spill.send(flight.job);
        }
    }

    fn take(&mut self, slot: usize) -> Option<Flight> {
        let flight = self.flights[slot].take()?;
        self.in_flight -= 1;
        Some(flight)
    }

    /// Waits until the kernel touches no target any more.
    fn drain(&mut self) {
        // Giving up leaves nothing in flight.
        while self.in_flight > 0 {
            self.wait();
            self.reap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.drain();
    }
}

/// What a ring needs to know to read the middle of a job.
struct Course {
    fd: RawFd,
    align: u64,
    parts: Parts,
}

/// How the ring can serve a job; `None` if a thread has to: no descriptor, no whole block, an address that is not aligned,
/// a range outside the file. The source's own code may panic, which must not cost the target.
fn course(job: &mut Job) -> Option<Course> {
    let source = Arc::clone(&job.read.source);
    // The job keeps the source, and so its descriptor, until the completion is reaped.
    let ask = AssertUnwindSafe(|| {
        let descriptor = source.ring_descriptor().map(|descriptor| descriptor.as_raw_fd());
        (descriptor, source.limits(), source.len())
    });
    let (fd, limits, len) = catch_unwind(ask).ok()?;
    let (fd, offset) = (fd?, job.read.offset);
    if !limits.align.is_power_of_two() || offset.checked_add(job.read.len as u64)? > len {
        return None;
    }
    let parts = Parts::of(offset, job.read.len, limits.align);
    let middle = job.bytes_mut().ok()?.get(parts.middle.clone())?;
    let aligned = (middle.as_ptr() as usize as u64).is_multiple_of(limits.memory_align.max(1));
    (aligned && !middle.is_empty()).then_some(Course { fd, align: limits.align, parts })
}

/// What follows from a completion.
enum Step {
    Done,
    Again,
    Refused,
}

impl Flight {
    /// The submission for what is missing of the middle.
    fn entry(&mut self, registered: Option<&StagingPool>) -> Option<squeue::Entry> {
        let middle = self.parts.middle.start + self.done..self.parts.middle.end;
        let offset = self.job.read.offset + middle.start as u64;
        let index = registered.and_then(|pool| registered_index(pool, &mut self.job.target));
        let bytes = self.job.bytes_mut().ok()?.get_mut(middle)?;
        let (address, len) = (bytes.as_mut_ptr(), u32::try_from(bytes.len().min(MAX_ENTRY_BYTES)).ok()?);
        let fd = types::Fd(self.fd);
        Some(match index {
            Some(index) => opcode::ReadFixed::new(fd, address, len, index).offset(offset).build(),
            None => opcode::Read::new(fd, address, len).offset(offset).build(),
        })
    }

    fn account(&mut self, result: i32) -> Step {
        match usize::try_from(result) {
            Ok(count) if count > 0 && (count as u64).is_multiple_of(self.align) => {
                self.done += count;
                if self.done >= self.parts.middle.len() { Step::Done } else { Step::Again }
            }
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) && self.retries < MAX_RETRIES => {
                self.retries += 1;
                Step::Again
            }
            _ => Step::Refused,
        }
    }

    /// Reads what lies before the first and after the last whole block: less than a block each.
    fn read_ends(&mut self) -> crate::Result<Route> {
        let (source, offset, middle) =
            (Arc::clone(&self.job.read.source), self.job.read.offset, self.parts.middle.clone());
        let target = self.job.bytes_mut()?;
        let total = target.len();
        let (rest, tail) = target.split_at_mut(middle.end);
        let ends = [(offset, &mut rest[..middle.start]), (offset + middle.end as u64, tail)];
        for (offset, end) in ends.into_iter().filter(|(_, end)| !end.is_empty()) {
            let read = AssertUnwindSafe(|| source.read_at(offset, end));
            catch_unwind(read).unwrap_or(Err(crate::error::Error::Poisoned { what: "a source panicked" }))?;
        }
        Ok(if middle.len() * 2 >= total { Route::Direct } else { Route::Buffered })
    }
}

/// The newest kind of ring that the kernel has.
fn build(entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun();
    match builder.build(entries) {
        // Before Linux 6.1.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        result => result,
    }
}

/// Has the ring do nothing, once: a sandbox may let a ring be set up and never be entered, and once targets are given to a
/// ring there is no way on without the kernel's answer.
fn try_out(ring: &mut IoUring) -> io::Result<()> {
    let nothing = opcode::Nop::new().build();
    // SAFETY: a no-op refers to no memory.
    unsafe { ring.submission().push(&nothing) }.map_err(io::Error::other)?;
    while let Err(error) = ring.submit_and_wait(1) {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    ring.completion().for_each(drop);
    Ok(())
}

/// Pins the pool's buffers once, under their own indices.
fn register(ring: &IoUring, pool: &StagingPool) -> io::Result<()> {
    let bytes = pool.buffer_bytes();
    if pool.count() == 0 || bytes == 0 || pool.count() > MAX_BUFFERS || bytes > MAX_BUFFER_BYTES {
        return Err(io::Error::other("the pool has no buffer, too many, or too big ones"));
    }
    let start = pool.block().start().as_ptr();
    let vector = |index: usize| libc::iovec { iov_base: start.wrapping_add(index * bytes).cast(), iov_len: bytes };
    let vectors: Vec<_> = (0..pool.count()).map(vector).collect();
    // SAFETY: the vectors cover the pool's block, which the server keeps alive until after the ring; registering pins
    // pages and writes nothing.
    unsafe { ring.submitter().register_buffers(&vectors) }
}

/// The registered buffer that a target is, if it is one of this pool.
fn registered_index(pool: &StagingPool, target: &mut ReadTarget) -> Option<u16> {
    let ReadTarget::Staging(buffer) = target else { return None };
    is_of(pool, buffer).then(|| u16::try_from(buffer.index()).ok()).flatten()
}

fn is_of(pool: &StagingPool, buffer: &StagingBuffer) -> bool {
    let place = pool.block().start().as_ptr().wrapping_add(buffer.index() * pool.buffer_bytes());
    buffer.len() == pool.buffer_bytes() && std::ptr::eq(buffer.bytes().as_ptr(), place)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;
    use crate::storage::{Engine, QueueOptions, Read, queue};
    use crate::storage::{LocalStorage, Location, Storage};
    use crate::testing::{Feature, Random, required, required_if, watched};

    const CHILD: &str = "VRAMP_TEST_CHILD";

    /// No descriptor is left for a ring, whatever the kernel would say otherwise.
    #[test]
    fn child_has_no_descriptor_for_a_ring() {
        if std::env::var(CHILD).is_err() {
            return;
        }
        let usual = os::open_files_limit().unwrap();
        limit_descriptors(3);
        let notes = Fallbacks::default();
        for engine in [Engine::Auto, Engine::Ring] {
            let options = QueueOptions { engine, ..QueueOptions::default() };
            let mut made = queue(&options, None, &notes);
            assert_eq!(made.engine(), "threads");
            assert!(made.complete().is_none());
        }
        limit_descriptors(usual);
        let list = notes.list();
        assert!(list.len() == 1 && list[0].what == "io_uring" && list[0].why.contains("open files"), "{list:?}");
    }

    fn limit_descriptors(soft: u64) {
        let limit = Rlimit { current: Some(soft), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).unwrap();
    }

    /// A kernel that lets itself be entered `first` times and then refuses for a while, or for ever.
    fn refusing(first: usize, refusals: usize, code: i32) -> Box<Enter> {
        let entered = std::sync::atomic::AtomicUsize::new(0);
        Box::new(move |ring| {
            let number = entered.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            if (first..first.saturating_add(refusals)).contains(&number) {
                return Err(io::Error::from_raw_os_error(code));
            }
            ring.submit_and_wait(1)
        })
    }

    type Outcomes = Vec<Result<(), String>>;

    /// Twelve direct reads through such a ring: for each that its bytes are right, or the error. `None` where there is no ring.
    fn read_all(enter: Box<Enter>) -> Option<(Outcomes, Vec<crate::storage::Fallback>)> {
        const BLOCK: usize = 4096;
        let bytes = Random::new(3).bytes(12 * BLOCK);
        // On the disk that the target folder is on: the usual temporary folder may be memory, which has no direct reads.
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, &bytes).unwrap();
        let notes = Fallbacks::default();
        let file = LocalStorage.open(&Location::from(&path), &notes).unwrap();
        let source = file.source(Route::Direct);
        if !required_if(Feature::Direct, source.route() == Route::Direct, &format!("{:?}", notes.list())) {
            return None;
        }
        let pool = StagingPool::new(12, BLOCK).unwrap();
        let (outlet, results) = Outlet::new();
        let lane = Workers::reading("direct", 2, &outlet);
        let ring = required(Feature::Uring, Ring::start_with(4, Some(&pool), &notes, &outlet, &lane, enter))?;
        for id in 0..12 {
            let read = Read { id, source: Arc::clone(&source), offset: (id * BLOCK) as u64, len: BLOCK };
            ring.send(Job { read, target: ReadTarget::Staging(pool.acquire().unwrap()) });
        }
        let mut found = vec![Err("no answer".to_owned()); 12];
        for _ in 0..12 {
            let done = results.recv().unwrap();
            found[done.id] = match (done.outcome, done.target) {
                (Ok(_), ReadTarget::Staging(buffer)) => {
                    assert!(buffer.bytes() == &bytes[done.id * BLOCK..][..BLOCK], "read {}", done.id);
                    Ok(())
                }
                (Err(error), ReadTarget::Lost) => Err(error.to_string()),
                other => panic!("{other:?}"),
            };
        }
        ring.close();
        Some((found, notes.list()))
    }

    #[test]
    fn a_kernel_that_refuses_for_a_while_costs_nothing() {
        for code in [libc::EBUSY, libc::EAGAIN, libc::EINTR] {
            let Some((found, notes)) = watched(move || read_all(refusing(0, 3, code))) else { return };
            assert!(found.iter().all(Result::is_ok), "{found:?}");
            assert!(notes.iter().all(|note| note.what != "io_uring"), "{notes:?}");
        }
    }

    #[test]
    fn a_kernel_that_refuses_for_ever_loses_the_ring_and_no_read_that_it_has_not_taken() {
        for code in [libc::EBUSY, libc::EAGAIN, libc::ENOMEM] {
            let Some((found, notes)) = watched(move || read_all(refusing(0, usize::MAX, code))) else { return };
            assert!(found.iter().all(Result::is_ok), "{found:?}");
            let note = notes.iter().find(|note| note.what == "io_uring").unwrap();
            assert!(note.why.contains("again and again") && note.why.contains("threads"), "{note:?}");
        }
    }

    #[test]
    fn whatever_the_kernel_has_taken_when_it_begins_to_refuse_every_read_ends() {
        for first in 1..8 {
            let ran = watched(move || read_all(refusing(first, usize::MAX, libc::EBUSY)));
            let Some((found, _)) = ran else { return };
            for outcome in found {
                assert!(outcome.is_ok() || outcome.as_ref().is_err_and(|e| e.contains("io_uring")), "{outcome:?}");
            }
        }
    }

    #[test]
    fn a_ring_that_cannot_be_set_up_is_replaced_by_threads_and_noted_once() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let test = "storage::uring::tests::child_has_no_descriptor_for_a_ring";
        child.args(["--exact", test, "--test-threads=1"]).env(CHILD, "yes");
        let output = watched(move || child.output().unwrap());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}
