//! Device memory as a launch sees it: bounds, alignment, and the record of what was touched.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::Touched;
use super::execute::Fault;

/// The device memory that kernels may use.
pub trait DeviceMemory {
    /// The live allocation that holds the byte at `address`.
    fn allocation(&mut self, address: u64) -> Option<Range<u64>>;

    /// Where the byte at `address`, which lies in a live allocation, is in this process. The bytes up to the end of the
    /// allocation follow it, and what is aligned to 8 bytes on the device is so there.
    fn host(&self, address: u64) -> *mut u8;
}

/// Device memory during one launch.
pub(super) struct Global<'a> {
    memory: &'a mut dyn DeviceMemory,
    /// The allocations that were used last, and where they begin in this process: kernels go back and forth between few.
    recent: [(Range<u64>, *mut u8); 4],
    oldest: usize,
    reads: Bytes,
    writes: Bytes,
}

impl<'a> Global<'a> {
    pub(super) fn new(memory: &'a mut dyn DeviceMemory) -> Global<'a> {
        let none = || (0..0, std::ptr::null_mut());
        let recent = [none(), none(), none(), none()];
        Global { memory, recent, oldest: 0, reads: Bytes::default(), writes: Bytes::default() }
    }

    pub(super) fn touched(self) -> Touched {
        Touched { reads: self.reads.ranges(), writes: self.writes.ranges() }
    }

    pub(super) fn read<const N: usize>(&mut self, address: u64) -> Result<[u8; N], Fault> {
        let host = self.check(address, N)?;
        self.reads.mark(address, N);
        // SAFETY: `check` found N bytes of a live allocation there.
        Ok(unsafe { host.cast::<[u8; N]>().read() })
    }

    pub(super) fn write<const N: usize>(&mut self, address: u64, bytes: [u8; N]) -> Result<(), Fault> {
        let host = self.check(address, N)?;
        self.writes.mark(address, N);
        // SAFETY: `check` found N bytes of a live allocation there.
        unsafe { host.cast::<[u8; N]>().write(bytes) };
        Ok(())
    }

    /// Adds to a 4-byte or 8-byte integer and returns what it was.
    pub(super) fn add(&mut self, address: u64, bytes: usize, value: u64) -> Result<u64, Fault> {
        let host = self.check(address, bytes)?;
        self.reads.mark(address, bytes);
        self.writes.mark(address, bytes);
        if bytes == 8 {
            // SAFETY: `check` found 8 bytes of a live allocation there, aligned.
            let counter = unsafe { AtomicU64::from_ptr(host.cast()) };
            return Ok(counter.fetch_add(value, Ordering::Relaxed));
        }
        // SAFETY: `check` found 4 bytes of a live allocation there, aligned.
        let counter = unsafe { AtomicU32::from_ptr(host.cast()) };
        Ok(u64::from(counter.fetch_add(value as u32, Ordering::Relaxed)))
    }

    fn check(&mut self, address: u64, bytes: usize) -> Result<*mut u8, Fault> {
        let fault = |message: String| Fault { address: Some(address), message };
        if !address.is_multiple_of(bytes as u64) {
            return Err(fault(format!("a misaligned access to {bytes} bytes at {address:#x}")));
        }
        let inside = |range: &Range<u64>| range.contains(&address) && range.end - address >= bytes as u64;
        if let Some((range, host)) = self.recent.iter().find(|(range, _)| inside(range)) {
            return Ok(host.wrapping_add((address - range.start) as usize));
        }
        let Some(range) = self.memory.allocation(address) else {
            return Err(fault(format!("an access to {bytes} bytes at {address:#x}, where no live allocation is")));
        };
        if !inside(&range) {
            let (start, end) = (range.start, range.end);
            return Err(fault(format!(
                "an access to {bytes} bytes at {address:#x}, past the end of the allocation {start:#x} to {end:#x}"
            )));
        }
        let host = self.memory.host(range.start);
        let found = host.wrapping_add((address - range.start) as usize);
        self.recent[self.oldest] = (range, host);
        self.oldest = (self.oldest + 1) % self.recent.len();
        Ok(found)
    }
}

const PAGE_BYTES: u64 = 1 << 16;
type Page = [u64; PAGE_BYTES as usize / 64];

/// A set of bytes: a bit each, in pages that are there once something in them is marked.
#[derive(Default)]
struct Bytes {
    pages: Vec<Box<Page>>,
    index: HashMap<u64, usize>,
    /// Number and index of the pages that were marked last.
    recent: [Option<(u64, usize)>; 4],
}

impl Bytes {
    /// Marks `bytes` bytes, at most 16, at an address that is a multiple of them: so they lie in one word of bits.
    fn mark(&mut self, address: u64, bytes: usize) {
        let (number, within) = (address / PAGE_BYTES, address % PAGE_BYTES);
        let slot = (number % 4) as usize;
        let index = match self.recent[slot] {
            Some((recent, index)) if recent == number => index,
            _ => *self.index.entry(number).or_insert_with(|| {
                self.pages.push(Box::new([0; PAGE_BYTES as usize / 64]));
                self.pages.len() - 1
            }),
        };
        self.recent[slot] = Some((number, index));
        self.pages[index][within as usize / 64] |= ((1 << bytes) - 1) << (within % 64);
    }

    fn ranges(self) -> Vec<Range<u64>> {
        let mut numbers: Vec<(u64, usize)> = self.index.into_iter().collect();
        numbers.sort_unstable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (number, index) in numbers {
            for (word, bits) in self.pages[index].iter().enumerate() {
                let (start, mut left) = (number * PAGE_BYTES + word as u64 * 64, *bits);
                while left != 0 {
                    let first = left.trailing_zeros();
                    let len = (left >> first).trailing_ones();
                    let run = start + u64::from(first)..start + u64::from(first + len);
                    match ranges.last_mut() {
                        Some(last) if last.end == run.start => last.end = run.end,
                        _ => ranges.push(run),
                    }
                    left &= !(super::instruction::mask(len) << first);
                }
            }
        }
        ranges
    }
}
