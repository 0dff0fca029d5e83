//! Locking the staging buffers for the GPU, in the background: pages are made resident on the GPU's NUMA node and locked
//! buffer by buffer while the first reads are already under way into buffers whose turn has not come.
//!
//! A buffer that the system will not lock stays usable: copies from it are slower and not asynchronous, and the report says
//! so once. Nothing here copies bytes.
#![allow(unsafe_code)] // locks memory that outlives the lock

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::driver::Refusal;
use super::gpu::Gpu;
use super::handles::Pinned;
use crate::fallback::Fallbacks;
use crate::memory::staging::{Preparation, StagingPool};
use crate::os;

/// Threads that fault pages in and lock them, at most: the work is the kernel's, and it has locks of its own.
const MOST_THREADS: usize = 4;

/// The locks of a pool, as they come.
pub(super) struct Pinning {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    gpu: Arc<Gpu>,
    /// The memory of the pool: alive until the last thread has been joined and the last lock is gone (see `Drop`).
    start: usize,
    /// Bytes that are locked at a time: a buffer, or all of them where a page would belong to two.
    unit_bytes: usize,
    units: usize,
    node: Option<u32>,
    fallbacks: Fallbacks,
    next: AtomicUsize,
    stop: AtomicBool,
    outcomes: Mutex<Outcomes>,
    changed: Condvar,
}

#[derive(Default)]
struct Outcomes {
    done: Vec<bool>,
    pinned: Vec<Pinned>,
    refused: usize,
}

impl Pinning {
    /// Begins to lock the buffers of `pool`, which owns the answer from then on.
    pub(super) fn start(gpu: &Arc<Gpu>, pool: &StagingPool, fallbacks: &Fallbacks) -> Pinning {
        let whole = pool.block().len();
        let pages = pool.buffer_bytes().is_multiple_of(os::page_bytes());
        let unit_bytes = if pages { pool.buffer_bytes() } else { whole };
        let units = whole.checked_div(unit_bytes).unwrap_or(0);
        let shared = Arc::new(Shared {
            gpu: Arc::clone(gpu),
            start: pool.block().start().as_ptr() as usize,
            unit_bytes,
            units,
            node: gpu.numa_node(),
            fallbacks: fallbacks.clone(),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            outcomes: Mutex::new(Outcomes { done: vec![false; pool.count()], ..Outcomes::default() }),
            changed: Condvar::new(),
        });
        let threads = thread::available_parallelism().map_or(2, usize::from).min(MOST_THREADS).min(units);
        let start = |_| {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name("vramp-pin".to_owned()).spawn(move || shared.work()).ok()
        };
        let threads: Vec<_> = (0..threads).filter_map(start).collect();
        if threads.is_empty() {
            shared.work();
        }
        Pinning { shared, threads }
    }
}

impl Preparation for Pinning {
    fn wait(&self, index: usize) {
        let mut outcomes = self.shared.outcomes();
        while outcomes.done.get(index) == Some(&false) && !self.shared.stop.load(Ordering::Acquire) {
            outcomes = self.shared.changed.wait(outcomes).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        let pinned = std::mem::take(&mut self.shared.outcomes().pinned);
        drop(pinned); // the pool's memory is unmapped after this object is gone
    }
}

impl Shared {
    fn outcomes(&self) -> std::sync::MutexGuard<'_, Outcomes> {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks buffers until none is left.
    fn work(&self) {
        // However this ends, nobody waits for buffers that will not be locked any more.
        let _ending = Ending(self);
        while !self.stop.load(Ordering::Acquire) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.units {
                return;
            }
            let outcome = self.pin(index);
            self.note(index, outcome);
        }
    }

    fn pin(&self, index: usize) -> Result<Pinned, String> {
        let start = (self.start + index * self.unit_bytes) as *mut u8;
        // SAFETY: the bytes lie in the pool's memory, which stays mapped while this thread runs (Drop joins it).
        unsafe { os::prepare_pages(start, self.unit_bytes, self.node) };
        let bound = self.gpu.bind().map_err(|error| error.to_string())?;
        // SAFETY: the pool drops its preparation, and with it this lock, before its memory.
        unsafe { Pinned::new(&self.gpu, &bound, start, self.unit_bytes) }.map_err(why)
    }

    fn note(&self, index: usize, outcome: Result<Pinned, String>) {
        let mut outcomes = self.outcomes();
        match outcome {
            Ok(pinned) => outcomes.pinned.push(pinned),
            Err(why) => {
                outcomes.refused += 1;
                if outcomes.refused == 1 {
                    let what = format!("locked staging memory on {}", self.gpu.name());
                    self.fallbacks.note(what, format!("{why}; copies from unlocked buffers wait for each other"));
                }
            }
        }
        match self.units {
            1 => outcomes.done.fill(true),
            _ => outcomes.done.get_mut(index).into_iter().for_each(|done| *done = true),
        }
        self.changed.notify_all();
    }
}

/// Lets everybody go who waits for a buffer, if a thread ends before its time.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.outcomes().done.fill(true);
        }
        self.0.changed.notify_all();
    }
}

fn why(refusal: Refusal) -> String {
    let cause =
        if refusal.is_out_of_memory() { " (a limit on locked memory: ulimit -l, or the container's)" } else { "" };
    format!("{refusal}{cause}")
}
