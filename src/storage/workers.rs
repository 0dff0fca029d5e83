//! Jobs (a read with its target) and the threads that serve a line of them. They decide nothing about reads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::read::{Completed, Read, ReadTarget};
use super::route::Route;
use crate::error::{Error, Result};

/// A read with its target, on its way through the lanes.
pub(super) struct Job {
    pub(super) read: Read,
    pub(super) target: ReadTarget,
}

impl Job {
    /// The bytes to fill.
    pub(super) fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.target.bytes_mut(self.read.len)
    }

    pub(super) fn populate(&self) {
        if let ReadTarget::InPlace(region) = &self.target {
            region.populate();
        }
    }

    /// Reads, whatever the source does.
    pub(super) fn run(mut self) -> Completed {
        let started = Instant::now();
        // After a panic the target may hold anything, which is what an error says of it anyway.
        let read = AssertUnwindSafe(|| self.read.fill(&mut self.target));
        let outcome = catch_unwind(read).unwrap_or(Err(Error::Poisoned { what: "a source panicked" }));
        self.end(outcome, started)
    }

    /// Ends a job whose target the kernel may still write: that is never freed.
    pub(super) fn end_lost(mut self, source: &std::io::Error, started: Instant) -> Completed {
        std::mem::forget(std::mem::replace(&mut self.target, ReadTarget::Lost));
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

    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub(super) fn run(&self, job: Job) {
        if self.is_cancelled() { self.give_up(job) } else { self.send(job.run()) }
    }
}

type Work = Arc<dyn Fn(Job) + Send + Sync>;

/// A line of jobs and the threads that serve it, started one by one as jobs come.
pub(super) struct Workers {
    name: &'static str,
    wanted: usize,
    outlet: Outlet,
    work: Work,
    pub(super) state: Mutex<LaneState>,
}

pub(super) struct LaneState {
    /// Both ends of the line; `None` once it is closed.
    pub(super) line: Option<(Sender<Job>, Receiver<Job>)>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    pub(super) fn new(name: &'static str, wanted: usize, outlet: Outlet, work: Work) -> Arc<Workers> {
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

    pub(super) fn serve_here(&self) {
        let line = self.state.lock().unwrap_or_else(PoisonError::into_inner).line.clone();
        let Some((_, receiver)) = line else { return };
        receiver.try_iter().for_each(|job| (self.work)(job));
    }

    /// Lets the threads finish what is in line, and waits for them.
    pub(super) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.line = None;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        for thread in threads {
            let _ = thread.join();
        }
    }
}
