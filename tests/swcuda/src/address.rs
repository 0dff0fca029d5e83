//! Device addresses: a range of 1 TiB that nobody can read or write, and the alias behind it where the bytes are.
//!
//! Host code that follows a device pointer dies at once instead of appearing to work. Addresses are never used twice in
//! the life of the process, and a guard page lies between any two allocations. This file knows no owners: what an address
//! belongs to is the business of `memory`.

use std::ops::Range;

const SPAN: u64 = 1 << 40;
const PAGE: u64 = 4096;
const HUGE_PAGE: u64 = 2 << 20;
/// Allocations from here on get huge pages: a quarter of the page faults' time.
const HUGE_FROM: u64 = 4 << 20;
/// Allocations up to here are filled when made; in larger ones the gaps are filled when something reads them.
const FILL_TO: u64 = 16 << 20;
/// What new device memory holds: never accidental zeros.
pub(crate) const FRESH: u8 = 0xA5;

/// Where device addresses are and where their bytes are. Free to copy, so that work can go on without the lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Alias {
    front: u64,
    back: u64,
}

impl Alias {
    /// Whether this is an address of device memory, allocated or not.
    pub(crate) fn contains(self, address: u64) -> bool {
        (self.front..self.front + SPAN).contains(&address)
    }

    /// Where the bytes are: the alias of a device address, and a host address itself.
    pub(crate) fn bytes(self, address: u64) -> *mut u8 {
        let at = if self.contains(address) { address - self.front + self.back } else { address };
        at as *mut u8
    }
}

/// The allocator of addresses.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    alias: Alias,
    next: u64,
}

impl AddressSpace {
    /// Reserves both ranges; they cost no memory.
    pub(crate) fn new() -> AddressSpace {
        let front = reserve();
        AddressSpace { alias: Alias { front, back: reserve() }, next: front }
    }

    /// The same space, for a new life: it goes on where the old one ended.
    pub(crate) fn reborn(&self) -> AddressSpace {
        AddressSpace { alias: self.alias, next: self.next }
    }

    pub(crate) fn alias(&self) -> Alias {
        self.alias
    }

    /// The first address that has not been given out.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Bytes that an allocation takes of the device.
    pub(crate) fn footprint(bytes: u64) -> Option<u64> {
        bytes.max(1).checked_next_multiple_of(PAGE)
    }

    /// The address of `bytes` new bytes, whole pages; `None` when the machine has no memory for them.
    pub(crate) fn map(&mut self, bytes: u64) -> Option<u64> {
        let huge = bytes >= HUGE_FROM;
        let address = if huge { self.next.next_multiple_of(HUGE_PAGE) } else { self.next };
        let end = address.checked_add(bytes)?.checked_add(PAGE)?;
        if end > self.alias.front + SPAN {
            return None;
        }
        let start = self.alias.bytes(address);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        if !remap(start, bytes, access) {
            return None;
        }
        if huge {
            // SAFETY: the pages were mapped above; the advice changes no byte.
            unsafe { libc::madvise(start.cast(), bytes as usize, libc::MADV_HUGEPAGE) };
        }
        if bytes <= FILL_TO {
            // SAFETY: the pages were mapped above and nobody else has their address.
            unsafe { start.write_bytes(FRESH, bytes as usize) };
        }
        self.next = end;
        Some(address)
    }

    /// Gives the memory back; the addresses stay dead.
    pub(crate) fn unmap(&self, address: u64, bytes: u64) {
        remap(self.alias.bytes(address), bytes, libc::PROT_NONE);
    }

    /// Writes the fill into parts that were never written.
    pub(crate) fn refill(&self, gaps: &[Range<u64>]) {
        for gap in gaps {
            // SAFETY: the caller says that the gaps lie in a mapped allocation.
            unsafe { self.alias.bytes(gap.start).write_bytes(FRESH, (gap.end - gap.start) as usize) };
        }
    }
}

fn remap(start: *mut u8, bytes: u64, access: i32) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range lies in the alias, which this file reserved and only this file maps.
    let at = unsafe { libc::mmap(start.cast(), bytes as usize, access, flags, -1, 0) };
    at != libc::MAP_FAILED
}

fn reserve() -> u64 {
    let bytes = (SPAN + HUGE_PAGE) as usize;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
    assert!(at != libc::MAP_FAILED, "swcuda: no address space for 1 TiB (is it limited by ulimit -v?)");
    (at as u64).next_multiple_of(HUGE_PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_never_used_twice_and_have_guards() {
        let mut space = AddressSpace::new();
        let first = space.map(PAGE).unwrap();
        let second = space.map(PAGE).unwrap();
        assert_eq!(second, first + 2 * PAGE);
        space.unmap(first, PAGE);
        assert!(space.map(PAGE).unwrap() > second);
        let huge = space.map(HUGE_FROM).unwrap();
        assert_eq!(huge % HUGE_PAGE, 0);
    }

    #[test]
    fn new_memory_is_filled_and_lives_behind_the_alias() {
        let mut space = AddressSpace::new();
        let address = space.map(PAGE).unwrap();
        let bytes = space.alias().bytes(address);
        assert_ne!(bytes as u64, address);
        // SAFETY: mapped above.
        assert_eq!(unsafe { *bytes.add(100) }, FRESH);
        assert!(!space.alias().contains(bytes as u64));
    }
}
