//! Device memory: what is allocated, what of it was written, and whether a range may be used.
//!
//! An allocation that was freed stays in the table, so that its later use is named for what it is. Its pages go when no
//! operation is in the middle of them. This file copies nothing.

use std::ops::Range;

use cudarc::driver::sys::CUresult;

use crate::address::AddressSpace;
use crate::clock::{Clock, Mode, StreamId};
use crate::footprint::Footprint;
use crate::report::Kind;
use crate::state::{Answer, Guard, State};
use crate::stream;
use crate::work::Work;
use crate::written::RangeSet;

/// How far behind its end an address still counts as that of an allocation, gone too far.
const GUARD: u64 = 4096;

/// One allocation.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) bytes: u64,
    /// Bytes that it takes of its device.
    pub(crate) mapped_bytes: u64,
    pub(crate) device: usize,
    /// Not freed, in the order of the program's calls.
    pub(crate) live: bool,
    /// Its pages are there.
    pub(crate) mapped: bool,
    /// Operations in the middle of it.
    pub(crate) users: u32,
    /// Unmap when the last user is gone.
    doomed: bool,
    /// Made by `cuMemAllocAsync`.
    pub(crate) pooled: bool,
    pub(crate) written: RangeSet,
}

/// Where a device address lies.
enum Place {
    /// In a live allocation, with its end and its device.
    Live(u64, usize),
    Freed(u64),
    /// Behind the end of a live allocation.
    Behind(u64, u64),
    Nowhere,
}

/// Allocates; waits for frees in streams before it says that there is no memory.
pub(crate) fn allocate(mut state: Guard, device: usize, bytes: usize, pooled: bool) -> (Guard, Answer<u64>) {
    let mut answer = state.try_allocate(device, bytes as u64, pooled);
    if answer.is_err() && state.frees_pending(device) {
        state = stream::wait_device(state, device);
        answer = state.try_allocate(device, bytes as u64, pooled);
    }
    (state, answer)
}

/// `cuMemFree`: waits for the device, as the driver does, and gives the memory back.
pub(crate) fn free(mut state: Guard, address: u64) -> Answer {
    if address == 0 {
        return Ok(());
    }
    let device = state.check_free(address, "cuMemFree")?;
    state.report_in_flight_free(address, "cuMemFree", None);
    if let Some(allocation) = state.allocations.get_mut(&address) {
        allocation.live = false;
    }
    state = stream::wait_device(state, device);
    state.release(address);
    Ok(())
}

/// `cuMemFreeAsync`: gives the memory back in the order of a stream.
pub(crate) fn free_in_order(mut state: Guard, address: u64, id: StreamId) -> Answer {
    let device = state.check_free(address, "cuMemFreeAsync")?;
    let pooled = state.allocations.get(&address).is_some_and(|allocation| allocation.pooled);
    if !pooled {
        let text = format!("cuMemFreeAsync({address:#x}): the memory is not of cuMemAllocAsync");
        return state.refuse(Kind::BadFree, &text, CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    state.same_device(device, id, "cuMemFreeAsync")?;
    let mut clock = state.streams.get(&id).map(|stream| stream.clock.clone()).unwrap_or_default();
    clock.join(&state.host);
    state.report_in_flight_free(address, "cuMemFreeAsync", Some(&clock));
    let bytes = state.allocations.get_mut(&address).map_or(0, |allocation| {
        allocation.live = false;
        allocation.bytes
    });
    let touches = vec![(Footprint::flat(address, bytes), Mode::Write)];
    state.enqueue(id, "cuMemFreeAsync", touches, Vec::new(), Work::Free(address));
    Ok(())
}

impl State {
    /// The allocation that begins nearest below an address, alive or not, with its address.
    fn nearest(&self, address: u64) -> Option<(u64, &Allocation)> {
        self.allocations.range(..=address).next_back().map(|(&base, allocation)| (base, allocation))
    }

    /// The live allocation that an address is in.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<(u64, &Allocation)> {
        self.nearest(address).filter(|(base, allocation)| allocation.live && address < base + allocation.bytes)
    }

    /// The allocation whose pages a range is in, freed or not.
    pub(crate) fn mapped_around(&self, range: &Range<u64>) -> Option<u64> {
        let (base, allocation) = self.nearest(range.start)?;
        (allocation.mapped && range.end <= base + allocation.bytes).then_some(base)
    }

    fn place(&self, address: u64) -> Place {
        match self.nearest(address) {
            Some((base, one)) if one.live && address < base + one.bytes => Place::Live(base + one.bytes, one.device),
            Some((base, one)) if address < base + one.bytes => Place::Freed(base),
            Some((base, one)) if one.live && address < base + one.mapped_bytes + GUARD => {
                Place::Behind(base, one.bytes)
            }
            _ => Place::Nowhere,
        }
    }

    /// Whether a range of device memory is inside one live allocation; its device.
    pub(crate) fn check_range(&mut self, range: &Range<u64>, label: &str) -> Answer<usize> {
        let Range { start, end } = *range;
        let at = format!("{label}: [{start:#x}, {end:#x})");
        let (kind, text) = match self.place(start) {
            Place::Live(limit, device) if start <= end && end <= limit => return Ok(device),
            Place::Live(limit, _) => {
                (Kind::OutOfBounds, format!("{at} runs {} bytes past its allocation", end.wrapping_sub(limit)))
            }
            Place::Freed(base) => (Kind::UseAfterFree, format!("{at} is in the allocation at {base:#x}, freed before")),
            Place::Behind(base, bytes) => {
                (Kind::OutOfBounds, format!("{at} is behind the {bytes} bytes of the allocation at {base:#x}"))
            }
            // What a test leaves behind must not disturb the next one.
            Place::Nowhere if self.space.alias().contains(start) && start < self.first_address => {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            Place::Nowhere => (Kind::WildPointer, format!("{at} is in no allocation")),
        };
        self.refuse(kind, &text, CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Refuses memory of one device on a stream of another.
    pub(crate) fn same_device(&mut self, device: usize, id: StreamId, label: &str) -> Answer {
        let Some(of_stream) = self.streams.get(&id).map(|stream| stream.device) else { return Ok(()) };
        if of_stream == device {
            return Ok(());
        }
        let text = format!("{label}: memory of device {device} on a stream of device {of_stream}");
        self.refuse(Kind::WrongContext, &text, CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    fn try_allocate(&mut self, device: usize, bytes: u64, pooled: bool) -> Answer<u64> {
        let no_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let mapped_bytes = AddressSpace::footprint(bytes).ok_or(no_memory)?;
        let used = self.devices[device].used.checked_add(mapped_bytes).ok_or(no_memory)?;
        if used > self.config.vram_bytes {
            return Err(no_memory);
        }
        let address = self.space.map(mapped_bytes).ok_or(no_memory)?;
        self.devices[device].used = used;
        let total = self.devices.iter().map(|device| device.used).sum();
        self.stats.peak_bytes = self.stats.peak_bytes.max(total);
        let allocation = Allocation {
            bytes,
            mapped_bytes,
            device,
            live: true,
            mapped: true,
            users: 0,
            doomed: false,
            pooled,
            written: RangeSet::default(),
        };
        self.allocations.insert(address, allocation);
        Ok(address)
    }

    /// Whether memory of a device was freed in program order and is still waiting for its stream.
    fn frees_pending(&self, device: usize) -> bool {
        self.allocations.values().any(|one| one.device == device && one.mapped && !one.live)
    }

    /// Whether an address can be freed; the device of its allocation.
    fn check_free(&mut self, address: u64, call: &str) -> Answer<usize> {
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        match self.allocations.get(&address) {
            Some(allocation) if allocation.live => Ok(allocation.device),
            Some(_) => self.refuse(Kind::DoubleFree, &format!("{call}({address:#x}): freed before"), invalid),
            None if address < self.first_address && self.space.alias().contains(address) => Err(invalid),
            None => {
                let text = format!("{call}({address:#x}): not the start of an allocation");
                self.refuse(Kind::BadFree, &text, invalid)
            }
        }
    }

    /// Reports work that touches an allocation about to be freed and is not ordered before. `clock` is the host's unless
    /// given.
    fn report_in_flight_free(&mut self, address: u64, call: &str, clock: Option<&Clock>) {
        let Some(bytes) = self.allocations.get(&address).map(|allocation| allocation.bytes) else { return };
        self.report_in_flight(&Footprint::flat(address, bytes.max(1)), &format!("{call}({address:#x})"), clock);
    }

    /// Reports work in flight on bytes that `call` takes away; whether there may be any. On a device with a sticky error
    /// nothing can be waited for any more and nothing will be done, so that is not reported.
    pub(crate) fn report_in_flight(&mut self, footprint: &Footprint, call: &str, clock: Option<&Clock>) -> bool {
        let users = || self.log.in_flight(footprint, clock.unwrap_or(&self.host));
        let well = |id| self.streams.get(&id).is_none_or(|stream| self.health(stream.device).is_ok());
        let any = users().next().is_some();
        let user = users().find(|user| well(user.stream));
        let text = user.map(|user| format!("{call} while {} (stream {}) may use it", user.label, user.stream));
        text.into_iter().for_each(|text| self.report(Kind::FreeInFlight, &text));
        any
    }

    /// Gives an allocation's pages back, now or when its last user is done.
    pub(crate) fn release(&mut self, address: u64) {
        let Some(allocation) = self.allocations.get_mut(&address).filter(|one| one.mapped) else { return };
        allocation.live = false;
        if allocation.users > 0 {
            allocation.doomed = true;
            return;
        }
        allocation.mapped = false;
        allocation.written = RangeSet::default();
        let (bytes, device) = (allocation.mapped_bytes, allocation.device);
        self.space.unmap(address, bytes);
        if let Some(device) = self.devices.get_mut(device) {
            device.used = device.used.saturating_sub(bytes);
        }
    }

    /// Keeps an allocation's pages while an operation is in the middle of them.
    pub(crate) fn hold_pages(&mut self, address: u64) {
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.users += 1;
        }
    }

    /// Ends [`State::hold_pages`].
    pub(crate) fn drop_pages(&mut self, address: u64) {
        let Some(allocation) = self.allocations.get_mut(&address) else { return };
        allocation.users = allocation.users.saturating_sub(1);
        if allocation.users == 0 && allocation.doomed {
            allocation.doomed = false;
            self.release(address);
        }
    }

    /// Notes that bytes have been written.
    pub(crate) fn mark_written(&mut self, footprint: &Footprint) {
        let Some(base) = self.mapped_around(&footprint.bounds()) else { return };
        let Some(allocation) = self.allocations.get_mut(&base) else { return };
        footprint.ranges().for_each(|range| allocation.written.insert(range));
    }

    /// Reports a read of bytes that nothing has written, and fills them so that they are not zeros by accident.
    pub(crate) fn check_written(&mut self, footprint: &Footprint, label: &str) {
        let gaps = self.refill(footprint);
        let Some(first) = gaps.first() else { return };
        let bytes: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
        let text = format!("{label} reads {bytes} bytes never written, first [{:#x}, {:#x})", first.start, first.end);
        self.report(Kind::UninitialisedRead, &text);
    }

    /// Fills what was never written; which ranges those are.
    pub(crate) fn refill(&self, footprint: &Footprint) -> Vec<Range<u64>> {
        let Some(base) = self.mapped_around(&footprint.bounds()) else { return Vec::new() };
        let Some(allocation) = self.allocations.get(&base) else { return Vec::new() };
        let gaps: Vec<Range<u64>> = footprint.ranges().flat_map(|range| allocation.written.gaps(range)).collect();
        self.space.refill(&gaps);
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn state() -> State {
        State::for_tests(Config { vram_bytes: 16 << 10, ..Config::default() })
    }

    #[test]
    fn every_way_to_miss_an_allocation_has_its_name() {
        let mut state = state();
        let freed = state.try_allocate(0, 100, false).unwrap();
        let live = state.try_allocate(0, 100, false).unwrap();
        state.release(freed);
        assert_eq!(state.check_range(&(live..live + 100), "copy"), Ok(0));
        let misses = [
            (live + 1..live + 101, "OUT_OF_BOUNDS"),
            (live + 100..live + 101, "OUT_OF_BOUNDS"),
            (freed + 7..freed + 8, "USE_AFTER_FREE"),
            (live + (1 << 30)..live + (1 << 30) + 1, "WILD_POINTER"),
            (4096..4097, "WILD_POINTER"),
        ];
        for (range, kind) in misses {
            assert_eq!(state.check_range(&range, "copy"), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
            let report = state.reports.pop().unwrap();
            assert!(report.starts_with(kind), "{report}");
        }
    }

    #[test]
    fn pages_stay_while_an_operation_is_in_them() {
        let mut state = state();
        let address = state.try_allocate(0, 5000, false).unwrap();
        state.hold_pages(address);
        state.release(address);
        assert!(state.mapped_around(&(address..address + 1)).is_some());
        assert_eq!(state.devices[0].used, 8192);
        state.drop_pages(address);
        assert!(state.mapped_around(&(address..address + 1)).is_none());
        assert_eq!(state.devices[0].used, 0);
    }

    #[test]
    fn memory_ends() {
        let mut state = state();
        let all = state.try_allocate(0, 16 << 10, false).unwrap();
        assert_eq!(state.try_allocate(0, 1, false), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(!state.frees_pending(0));
        state.release(all);
        assert!(state.try_allocate(0, 1, false).is_ok());
        assert_eq!(state.try_allocate(0, u64::MAX, false), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    }

    #[test]
    fn a_read_of_unwritten_bytes_is_named_and_filled() {
        let mut state = state();
        let address = state.try_allocate(0, 100, false).unwrap();
        state.mark_written(&Footprint::flat(address, 40));
        state.mark_written(&Footprint::flat(address + 41, 59));
        state.check_written(&Footprint::flat(address, 40), "copy");
        assert!(state.reports.is_empty());
        state.check_written(&Footprint::flat(address, 100), "copy");
        assert!(state.reports[0].contains("reads 1 bytes"), "{:?}", state.reports);
    }
}
