//! Host memory that the driver knows: allocated by it, or registered.
//!
//! Memory that `cuMemFreeHost` gave back is kept without access rights, so that its later use dies at once. A range that
//! was only registered is the program's own again after `cuMemHostUnregister`, and plain. This file copies nothing.

use std::ops::Range;

use cudarc::driver::sys::CUresult;

use crate::footprint::Footprint;
use crate::report::Kind;
use crate::state::{Answer, Guard, State};
use crate::stream;

const PAGE: u64 = 4096;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;

/// One pinned range.
#[derive(Debug)]
pub(crate) struct Pin {
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    /// Registered, not allocated by the driver.
    pub(crate) registered: bool,
    /// Pinned for every device.
    portable: bool,
    /// Not freed. Registered ranges leave the table instead.
    pub(crate) live: bool,
}

/// What a range of host memory is to a device.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Host {
    Pinned,
    Pageable,
    /// Partly in a pinned range.
    Torn,
    /// Freed by `cuMemFreeHost`.
    Freed,
}

/// `cuMemHostAlloc`.
pub(crate) fn allocate(state: &mut State, device: usize, bytes: usize) -> Answer<u64> {
    let length = page_length(bytes as u64).filter(|_| bytes > 0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), length as usize, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    let pin = Pin { bytes: bytes as u64, device, registered: false, portable: true, live: true };
    state.pin(at as u64, pin);
    Ok(at as u64)
}

/// `cuMemFreeHost`: what still uses the memory finishes first, as in the driver; it is a mistake all the same.
pub(crate) fn free(mut state: Guard, address: u64) -> Answer {
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    let (bytes, device) = match state.pins.get(&address) {
        Some(pin) if pin.live && !pin.registered => (pin.bytes, pin.device),
        Some(pin) if !pin.live => {
            return state.refuse(Kind::DoubleFree, &format!("cuMemFreeHost({address:#x}): freed before"), invalid);
        }
        _ => return state.refuse(Kind::BadFree, &format!("cuMemFreeHost({address:#x}): no memory of its"), invalid),
    };
    let call = format!("cuMemFreeHost({address:#x})");
    if state.report_in_flight(&Footprint::flat(address, bytes), &call, None) {
        state = stream::wait_device(state, device);
    }
    state.retire(address);
    Ok(())
}

/// `cuMemHostRegister`.
pub(crate) fn register(state: &mut State, device: usize, address: u64, bytes: u64, flags: u32) -> Answer {
    let end = address.checked_add(bytes).filter(|_| address != 0 && bytes > 0);
    let range = address..end.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    if state.space.alias().contains(address) || !is_mapped(&range) {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if state.pins_in(&range).any(|(_, pin)| pin.live) {
        return Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    let limit = state.config.pin_limit.into_iter().chain(state.faults.pin_limit()).min();
    if limit.is_some_and(|limit| state.pinned_bytes().saturating_add(bytes) > limit) {
        return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    }
    // The kernel can give the pages of quarantined memory to nobody else, so what is there cannot be dead.
    let portable = flags & PORTABLE != 0;
    state.pin(address, Pin { bytes, device, registered: true, portable, live: true });
    Ok(())
}

/// `cuMemHostUnregister`. Waits for what is in flight, so that a program that is wrong does not take the test down.
pub(crate) fn unregister(mut state: Guard, address: u64) -> Answer {
    let Some((bytes, device)) =
        state.pins.get(&address).filter(|pin| pin.registered).map(|pin| (pin.bytes, pin.device))
    else {
        return Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    };
    let call = format!("cuMemHostUnregister({address:#x})");
    if state.report_in_flight(&Footprint::flat(address, bytes), &call, None) {
        for other in 0..state.devices.len() {
            state = stream::wait_device(state, other);
        }
        debug_assert!(device < state.devices.len());
    }
    state.pins.remove(&address);
    Ok(())
}

impl State {
    fn pin(&mut self, address: u64, pin: Pin) {
        self.pins.insert(address, pin);
        self.stats.peak_pinned_bytes = self.stats.peak_pinned_bytes.max(self.pinned_bytes());
    }

    /// Bytes that are pinned now.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pins.values().filter(|pin| pin.live).map(|pin| pin.bytes).sum()
    }

    /// The pinned ranges that overlap a range, with their addresses.
    fn pins_in(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Pin)> {
        let start = range.start;
        let below = self.pins.range(..range.end).rev().map(|(&base, pin)| (base, pin));
        // They are disjoint: the first that ends too early is followed by none that does not.
        below.take_while(move |(base, pin)| base + pin.bytes > start)
    }

    /// What a range of host memory is to a device.
    pub(crate) fn host_range(&self, range: &Range<u64>, device: usize) -> Host {
        let Some((base, pin)) = self.pins_in(range).next() else { return Host::Pageable };
        if !pin.live {
            return Host::Freed;
        }
        if range.start < base || range.end > base + pin.bytes {
            return Host::Torn;
        }
        if pin.portable || pin.device == device { Host::Pinned } else { Host::Pageable }
    }

    /// The live pin that an address is in.
    pub(crate) fn pin_at(&self, address: u64) -> Option<(u64, &Pin)> {
        self.pins_in(&(address..address.saturating_add(1))).next().filter(|(_, pin)| pin.live)
    }

    /// Takes all rights from memory of `cuMemHostAlloc`; the addresses stay taken until the double is reset.
    pub(crate) fn retire(&mut self, address: u64) {
        let Some(pin) = self.pins.get_mut(&address).filter(|pin| pin.live) else { return };
        pin.live = false;
        let length = page_length(pin.bytes).unwrap_or(0) as usize;
        // SAFETY: the range was mapped by `allocate` and nobody may use it any more.
        unsafe {
            libc::madvise(address as *mut _, length, libc::MADV_DONTNEED);
            libc::mprotect(address as *mut _, length, libc::PROT_NONE);
        }
    }

    /// Gives retired memory back to the kernel.
    pub(crate) fn bury(&mut self) {
        let dead = self.pins.iter().filter(|(_, pin)| !pin.live);
        for (&address, pin) in dead {
            // SAFETY: mapped by `allocate`, without rights since `retire`.
            unsafe { libc::munmap(address as *mut _, page_length(pin.bytes).unwrap_or(0) as usize) };
        }
        self.pins.retain(|_, pin| pin.live);
    }
}

fn page_length(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(PAGE)
}

/// Whether the pages of a range exist. Asked of the kernel by a call that changes nothing.
fn is_mapped(range: &Range<u64>) -> bool {
    let start = range.start / PAGE * PAGE;
    // SAFETY: msync with MS_ASYNC only looks at the mappings.
    unsafe { libc::msync(start as *mut _, (range.end - start) as usize, libc::MS_ASYNC) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_range_is_pinned_wholly_or_not_at_all() {
        let mut state = State::for_tests(Config { devices: 2, ..Config::default() });
        let memory = vec![0_u8; 8192];
        let start = memory.as_ptr() as u64;
        register(&mut state, 0, start + 1000, 1000, 0).unwrap();
        register(&mut state, 0, start + 2000, 1000, PORTABLE).unwrap();
        let at = |from: u64, to: u64, device| state.host_range(&(start + from..start + to), device);
        assert_eq!(at(0, 1000, 0), Host::Pageable);
        assert_eq!(at(1000, 2000, 0), Host::Pinned);
        assert_eq!(at(1000, 2000, 1), Host::Pageable, "not portable");
        assert_eq!(at(2000, 3000, 1), Host::Pinned);
        assert_eq!(at(3000, 4000, 0), Host::Pageable);
        for (from, to) in [(999, 1001), (1999, 2001), (2999, 3001), (0, 8192)] {
            assert_eq!(at(from, to, 0), Host::Torn, "{from}..{to}");
        }
        assert_eq!(state.pin_at(start + 1999).map(|(base, _)| base - start), Some(1000));
        assert!(state.pin_at(start + 3000).is_none());
    }

    #[test]
    fn what_is_not_there_cannot_be_registered() {
        let mut state = State::for_tests(Config::default());
        let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(register(&mut state, 0, 0, 10, 0), invalid);
        assert_eq!(register(&mut state, 0, PAGE, 10, 0), invalid, "nothing is mapped there");
        let front = state.space.next();
        assert_eq!(register(&mut state, 0, front, 10, 0), invalid, "device memory");
        assert_eq!(register(&mut state, 0, u64::MAX - 5, 10, 0), invalid);
    }

    #[test]
    fn freed_memory_is_known_until_it_is_buried() {
        let mut state = State::for_tests(Config::default());
        let address = allocate(&mut state, 0, 100).unwrap();
        assert_eq!(state.pinned_bytes(), 100);
        state.retire(address);
        assert_eq!((state.pinned_bytes(), state.host_range(&(address..address + 1), 0)), (0, Host::Freed));
        state.bury();
        assert_eq!(state.host_range(&(address..address + 1), 0), Host::Pageable);
    }
}
