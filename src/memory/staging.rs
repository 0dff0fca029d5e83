//! The staging pool: a fixed number of buffers of a fixed size, made once, in one block of host memory.
//!
//! A [`StagingBuffer`] is the only way to its bytes and has one holder at a time (invariant L2 of `load`); dropping it
//! gives the slot back. The pool never grows and never allocates after it is made. The memory is plain (never
//! write-combined), so that it can be hashed where it lies.
#![allow(unsafe_code)] // hands out disjoint slices of one block, one holder each

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::memory::HostBlock;
use crate::os;

/// A fixed set of equal buffers. Cloning the handle shares the set.
#[derive(Debug, Clone)]
pub struct StagingPool {
    inner: Arc<Inner>,
}

/// What a device does to the memory of a pool (locking it), in its own time. It goes before the memory does.
pub trait Preparation: Send + Sync {
    /// Waits until the buffer number `index` may be handed to the device.
    fn wait(&self, index: usize);
}

struct Inner {
    /// Before `block`: fields are dropped in this order.
    preparation: OnceLock<Box<dyn Preparation>>,
    block: HostBlock,
    buffer_bytes: usize,
    count: usize,
    free: Mutex<Vec<usize>>,
    /// Signalled when a buffer becomes free.
    freed: Condvar,
}

/// One buffer of a pool, held exclusively. Its bytes are zero at first and whatever was read last afterwards.
#[derive(Debug)]
pub struct StagingBuffer {
    inner: Arc<Inner>,
    index: usize,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} buffers of {} bytes", self.count, self.buffer_bytes)
    }
}

impl StagingPool {
    /// Makes `count` buffers of `buffer_bytes` bytes each and faults them in.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(count: usize, buffer_bytes: usize) -> io::Result<StagingPool> {
        let pool = StagingPool::reserve(count, buffer_bytes)?;
        pool.block().populate(0..pool.block().len());
        Ok(pool)
    }

    /// Makes `count` buffers of `buffer_bytes` bytes each, whose pages come when they are touched.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn reserve(count: usize, buffer_bytes: usize) -> io::Result<StagingPool> {
        let bytes = (count as u64).saturating_mul(buffer_bytes as u64);
        let out_of_memory = || os::no_memory(bytes);
        let total = count.checked_mul(buffer_bytes).ok_or_else(out_of_memory)?;
        // Asked first: the kernel does not refuse to fill more memory than there is, it ends the process.
        if os::available_memory_bytes().is_some_and(|available| available < total as u64) {
            return Err(out_of_memory());
        }
        let mut free = Vec::new();
        free.try_reserve_exact(count).map_err(|_| out_of_memory())?;
        free.extend((0..count).rev());
        let (block, preparation) = (HostBlock::new(total).map_err(|_| out_of_memory())?, OnceLock::new());
        block.inherit_on_fork(false); // the kernel and GPUs write to it by DMA
        let (free, freed) = (Mutex::new(free), Condvar::new());
        Ok(StagingPool { inner: Arc::new(Inner { preparation, block, buffer_bytes, count, free, freed }) })
    }

    /// Sets what prepares the pool's memory: it is waited for before a buffer goes to the device, and it is dropped
    /// before the memory is given back. The first one stays.
    pub fn prepare_by(&self, preparation: Box<dyn Preparation>) {
        let _ = self.inner.preparation.set(preparation);
    }

    /// Takes a free buffer; `None` while all are held.
    pub fn acquire(&self) -> Option<StagingBuffer> {
        let index = self.inner.free().pop()?;
        Some(StagingBuffer { inner: Arc::clone(&self.inner), index })
    }

    /// Takes a free buffer, and waits for one while all are held; `None` for a pool without buffers. The caller must not hold
    /// all of them itself.
    pub fn acquire_waiting(&self) -> Option<StagingBuffer> {
        if self.inner.count == 0 {
            return None;
        }
        let none_free = |free: &mut Vec<usize>| free.is_empty();
        let freed = self.inner.freed.wait_while(self.inner.free(), none_free);
        let index = freed.unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(StagingBuffer { inner: Arc::clone(&self.inner), index })
    }

    /// Number of buffers, held or free.
    pub fn count(&self) -> usize {
        self.inner.count
    }

    /// Bytes of each buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.inner.buffer_bytes
    }

    /// Number of free buffers.
    pub fn available(&self) -> usize {
        self.inner.free().len()
    }

    /// The memory of all buffers, in the order of their indices: for registering it with a device or a ring.
    pub fn block(&self) -> &HostBlock {
        &self.inner.block
    }
}

impl StagingBuffer {
    /// Which slot of the pool this is: `0..count`.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.inner.buffer_bytes
    }

    /// Whether the buffer has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until the device has prepared the buffer, where it does such a thing.
    pub fn wait_prepared(&self) {
        if let Some(preparation) = self.inner.preparation.get() {
            preparation.wait(self.index);
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: slot `index` lies inside the block (index < count) and is zero-initialised memory.
        let start = unsafe { self.inner.block.start().add(self.index * self.inner.buffer_bytes) };
        // SAFETY: an index is in the free list or in exactly one StagingBuffer, so only this borrow reaches the slot.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.inner.buffer_bytes) }
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: slot `index` lies inside the block (index < count) and is zero-initialised memory.
        let start = unsafe { self.inner.block.start().add(self.index * self.inner.buffer_bytes) };
        // SAFETY: an index is in the free list or in exactly one StagingBuffer, and this one is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.inner.buffer_bytes) }
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        self.inner.free().push(self.index);
        self.inner.freed.notify_one();
    }
}

impl Inner {
    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_disjoint_and_come_back() {
        let pool = StagingPool::new(3, 4096).unwrap();
        let mut held: Vec<_> = std::iter::from_fn(|| pool.acquire()).collect();
        assert_eq!((held.len(), pool.available()), (3, 0));
        for (value, buffer) in (1u8..).zip(&mut held) {
            buffer.bytes_mut().fill(value);
        }
        for (value, buffer) in (1u8..).zip(&held) {
            assert!(buffer.bytes().iter().all(|&byte| byte == value));
        }
        let first = held.remove(0).index();
        assert_eq!(pool.available(), 1);
        assert_eq!(pool.acquire().map(|b| b.index()), Some(first));
    }

    #[test]
    fn a_waiting_thread_gets_the_buffer_that_another_gives_back() {
        crate::testing::watched(|| {
            let pool = StagingPool::new(1, 4096).unwrap();
            let held = pool.acquire().unwrap();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| pool.acquire_waiting().map(|buffer| buffer.index()));
                drop(held);
                assert_eq!(waiting.join().unwrap(), Some(0));
            });
        });
    }

    #[test]
    fn a_pool_without_buffers_gives_none() {
        assert!(StagingPool::new(0, 1 << 20).unwrap().acquire().is_none());
        assert!(StagingPool::new(0, 1 << 20).unwrap().acquire_waiting().is_none());
        assert!(StagingPool::new(usize::MAX, 2).is_err());
        assert!(StagingPool::new(usize::MAX, 0).is_err());
    }
}
