//! A staging buffer that has been filled: read by several holders at once, written by none.
//!
//! The last holder gives the buffer back to its pool. Nothing here copies bytes or waits.

use std::sync::Arc;

use super::staging::StagingBuffer;

/// The first bytes of a staging buffer, read-only. Cloning shares the buffer.
#[derive(Debug, Clone)]
pub struct Filled {
    buffer: Arc<StagingBuffer>,
    len: usize,
}

impl Filled {
    /// The first `len` bytes of `buffer`, or all of them where it has fewer.
    pub fn new(buffer: StagingBuffer, len: usize) -> Filled {
        let len = len.min(buffer.len());
        Filled { buffer: Arc::new(buffer), len }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.bytes().get(..self.len).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::staging::StagingPool;

    #[test]
    fn the_last_holder_gives_the_buffer_back() {
        let pool = StagingPool::new(1, 4096).unwrap();
        let mut buffer = pool.acquire().unwrap();
        buffer.bytes_mut()[..3].copy_from_slice(b"abc");
        let first = Filled::new(buffer, 3);
        let second = first.clone();
        drop(first);
        assert_eq!((second.bytes(), pool.available()), (&b"abc"[..], 0));
        drop(second);
        assert_eq!(pool.available(), 1);
        assert_eq!(Filled::new(pool.acquire().unwrap(), usize::MAX).bytes().len(), 4096);
    }
}
