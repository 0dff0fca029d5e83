//! Anonymous host memory in one block: page-aligned, on huge pages where the kernel gives them, zero when fresh.
//!
//! The staging pool and the arena of the CPU device are made of it. A [`HostBlock`] is the unique owner of its memory and
//! cannot be cloned; whoever divides it (`staging`, `device::region`) takes it by value. It never grows and never moves.
#![allow(unsafe_code)] // mmap, madvise and munmap of memory that this file alone owns

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

/// The size of a huge page on x86-64 and of the usual one on aarch64; only a hint for alignment and population.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

const PAGE_BYTES: usize = 4096;

/// One anonymous, private, writable mapping. Starts on a 2 MiB boundary.
#[derive(Debug)]
pub struct HostBlock {
    start: NonNull<u8>,
    len: usize,
    mapping: NonNull<c_void>,
    mapping_len: usize,
}

// SAFETY: the block owns its mapping, which no thread-local state refers to; bytes are reached only by `start`, and each caller
// of that argues its own access.
unsafe impl Send for HostBlock {}
// SAFETY: through `&HostBlock` one gets the address, `populate` and `inherit_on_fork`; both ask the kernel, which serialises them and
// changes no byte.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Reserves `len` bytes of zeros. Nothing is resident before it is touched or [populated](HostBlock::populate).
    ///
    /// # Errors
    /// What `mmap` says: usually that there is no address space or no memory left.
    pub fn new(len: usize) -> io::Result<HostBlock> {
        let span = len.max(1).checked_next_multiple_of(PAGE_BYTES).and_then(|len| len.checked_add(HUGE_PAGE_BYTES));
        let Some(mapping_len) = span else {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "the size does not fit the address space"));
        };
        let (anywhere, protection) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapping = unsafe { mm::mmap_anonymous(anywhere, mapping_len, protection, MapFlags::PRIVATE) }?;
        let Some(mapping) = NonNull::new(mapping) else {
            return Err(io::Error::other("the kernel mapped memory at address zero"));
        };
        let skip = (mapping.as_ptr() as usize).next_multiple_of(HUGE_PAGE_BYTES) - mapping.as_ptr() as usize;
        // SAFETY: skip < HUGE_PAGE_BYTES <= mapping_len - len, so the result lies inside the mapping.
        let start = unsafe { mapping.cast::<u8>().add(skip) };
        let block = HostBlock { start, len, mapping, mapping_len };
        if len >= HUGE_PAGE_BYTES {
            block.advise(0..len.next_multiple_of(PAGE_BYTES), Advice::LinuxHugepage);
        }
        Ok(block)
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the block holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the pages of `range` resident and writable ahead of their use. Best effort: a kernel that cannot (before
    /// 5.14) leaves the work to the first touch. Returns whether the kernel did it.
    pub fn populate(&self, range: Range<usize>) -> bool {
        if range.start >= range.end || range.end > self.len {
            return range.start == range.end;
        }
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        self.advise(start..range.end.next_multiple_of(PAGE_BYTES), Advice::LinuxPopulateWrite)
    }

    /// Whether a child of `fork` gets a copy of the block (as it does of a new one). Memory that the kernel or a GPU writes by
    /// DMA must not be inherited meanwhile: after a `fork`, copy-on-write may move the parent's pages away from the transfer.
    /// A child that touches a block that it did not inherit is ended by SIGSEGV. Returns whether the kernel did it.
    pub fn inherit_on_fork(&self, inherited: bool) -> bool {
        let advice = if inherited { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
        self.advise(0..self.len.next_multiple_of(PAGE_BYTES), advice)
    }

    /// The address of the first byte. Reading or writing through it is the caller's to justify.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// `madvise` of whole pages inside the mapping.
    fn advise(&self, range: Range<usize>, advice: Advice) -> bool {
        // SAFETY: callers pass page-aligned ranges that end within the block rounded up to a page, so inside the mapping.
        let address = unsafe { self.start.add(range.start) };
        // SAFETY: HUGEPAGE, POPULATE_WRITE, DOFORK and DONTFORK change no contents, and the pages belong to this block.
        unsafe { mm::madvise(address.as_ptr().cast(), range.len(), advice) }.is_ok()
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and nothing borrows from a block that is being dropped.
        let _ = unsafe { mm::munmap(self.mapping.as_ptr(), self.mapping_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_starts_on_a_huge_page_and_populates_any_range() {
        for len in [0, 1, 4095, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1] {
            let block = HostBlock::new(len).unwrap();
            assert_eq!(block.len(), len);
            assert_eq!(block.start().as_ptr() as usize % HUGE_PAGE_BYTES, 0);
            block.populate(0..len);
            assert!(!block.populate(0..len + 1));
        }
    }

    /// The kernel's flags of the mapping that holds the block's first byte.
    fn flags(block: &HostBlock) -> Vec<String> {
        let start = block.start().as_ptr() as usize;
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let ends = range.map(|(from, to)| [from, to].map(|end| usize::from_str_radix(end, 16)));
            if let Some([Ok(from), Ok(to)]) = ends {
                inside = (from..to).contains(&start);
            } else if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
                return flags.split_whitespace().map(str::to_owned).collect();
            }
        }
        panic!("no mapping holds the block");
    }

    #[test]
    fn a_block_is_inherited_by_children_unless_it_says_otherwise() {
        for len in [1, 4096, HUGE_PAGE_BYTES + 1] {
            let block = HostBlock::new(len).unwrap();
            for inherited in [false, true, false] {
                assert!(block.inherit_on_fork(inherited));
                assert_eq!(flags(&block).contains(&"dc".to_owned()), !inherited, "{len} bytes");
            }
        }
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(HostBlock::new(usize::MAX).is_err());
        assert!(HostBlock::new(usize::MAX - HUGE_PAGE_BYTES - PAGE_BYTES).is_err());
    }
}
