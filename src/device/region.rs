//! Arenas, and the exclusive right to write a range of one.
//!
//! An [`Arena`] is one allocation of a device. [`Arena::carve`] divides it, once, into [`Region`]s that do not overlap; a
//! region is the only way to write its bytes, and a finished region can never be written again. [`Written`] hands out
//! read-only [`View`]s of ranges whose regions are all finished, so a reader never meets a writer. Soundness rests on
//! this ownership, not on the plan being right. Host memory is not inherited by children of `fork` while regions of it exist.
//! This file moves no bytes.
#![allow(unsafe_code)] // slices of carved, disjoint ranges of one host block

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Device;
use super::cuda::DeviceMemory;
use super::null::Nothing;
use crate::convert::transpose;
use crate::digest;
use crate::error::{Error, Result};
use crate::memory::HostBlock;
use crate::os;

/// Memory of a device that the host cannot address.
///
/// An implementation answers questions; it never gives an address. `unsafe` code takes addresses from this package's own
/// GPU memory only, found by its type, so that no implementation can make a GPU write to memory that it does not own. A
/// device's own stream finds its own memory behind a region by [`Region::memory`].
pub trait Memory: Any + Send + Sync {
    /// Number of bytes.
    fn len(&self) -> u64;

    /// Whether there is no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the bytes that were written are still there.
    ///
    /// # Errors
    /// When the device keeps nothing (the null device), with what it is for.
    fn must_keep(&self) -> Result<()> {
        Ok(())
    }

    /// Copies `range` back into host memory; `target` has its length.
    ///
    /// # Errors
    /// When the device refuses, or keeps nothing (the null device).
    fn download(&self, range: Range<u64>, target: &mut [u8]) -> Result<()>;

    /// The device whose memory it is, for its staging buffers and its [streams](super::Stream::download) back to the host.
    /// `None`: bytes come back by [`Memory::download`] alone.
    fn device(&self) -> Option<Arc<dyn Device>> {
        None
    }

    /// Copies `bytes` to the byte `at` of the memory, and returns when they are there: the slow way for bytes that did not come
    /// by a stream. Only who has the right to write the range ([`Region`]) may ask for it.
    ///
    /// # Errors
    /// When the device refuses, or cannot do it.
    fn upload(&self, _at: u64, _bytes: &[u8]) -> Result<()> {
        let what = "this device takes bytes by a stream only".to_owned();
        Err(Error::Request { what, hint: None })
    }

    /// The [checksum](digest::checksum) of `range`, computed where the bytes are if the device can.
    ///
    /// # Errors
    /// As [`Memory::download`].
    fn checksum(&self, range: Range<u64>) -> Result<u64> {
        let len = range.end.saturating_sub(range.start);
        let mut bytes =
            vec![0; usize::try_from(len).map_err(|_| Error::Poisoned { what: "a range above the word size" })?];
        self.download(range, &mut bytes)?;
        Ok(digest::checksum(&bytes))
    }

    /// New memory of the device that holds the matrix in `range`, of `shape` (rows, columns) elements of 1, 2, 4 or 8 bytes,
    /// with rows and columns exchanged.
    ///
    /// # Errors
    /// When the device refuses, or cannot do it.
    fn transposed(&self, _range: Range<u64>, _shape: [u64; 2], _element_bytes: u64) -> Result<Box<dyn Memory>> {
        let what = "this device cannot transpose; download the tensor instead".to_owned();
        Err(Error::Request { what, hint: None })
    }
}

enum Backing {
    Host(HostBlock),
    Device(Box<dyn Memory>),
}

/// One allocation of a device, not yet divided.
#[derive(Debug)]
pub struct Arena {
    backing: Backing,
}

/// The exclusive right to write one range of an arena.
#[derive(Debug)]
pub struct Region {
    shared: Arc<Shared>,
    slot: usize,
}

/// What has been written of a carved arena. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Written {
    shared: Arc<Shared>,
}

/// A finished range of an arena, kept alive by reference count.
#[derive(Debug, Clone)]
pub struct View {
    shared: Arc<Shared>,
    range: Range<u64>,
}

/// `slots` are sorted and disjoint; `done[i]` turns true once, when region `i` is given up finished.
#[derive(Debug)]
struct Shared {
    backing: Backing,
    slots: Box<[Range<u64>]>,
    done: Box<[AtomicBool]>,
    /// Regions that still exist: while there is one, direct I/O may be writing to the memory.
    open: AtomicUsize,
}

impl Arena {
    /// An arena of host memory, which reads can fill in place.
    pub fn host(block: HostBlock) -> Arena {
        Arena { backing: Backing::Host(block) }
    }

    /// An arena in memory that only the device reaches.
    pub fn device(memory: Box<dyn Memory>) -> Arena {
        Arena { backing: Backing::Device(memory) }
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.backing.len()
    }

    /// The GPU's own address of the first byte; `None` for any other memory and for nothing.
    pub fn address(&self) -> Option<u64> {
        self.backing.memory::<DeviceMemory>()?.address()
    }

    /// The device whose memory it is, as [`Device::name`](super::Device::name) says it: `cpu`, `null` or a GPU. `None` for
    /// memory of any other device.
    pub fn owner(&self) -> Option<String> {
        self.backing.owner()
    }

    /// Whether the arena has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Divides the arena: one region for each of `ranges`, in their order. Bytes outside all of them stay as they are.
    ///
    /// # Errors
    /// When two ranges overlap or one leaves the arena.
    pub fn carve(self, ranges: &[Range<u64>]) -> Result<(Vec<Region>, Written)> {
        let mut order: Vec<usize> = (0..ranges.len()).collect();
        order.sort_unstable_by_key(|&i| (ranges[i].start, ranges[i].end));
        let slots: Box<[Range<u64>]> = order.iter().map(|&i| ranges[i].clone()).collect();
        let overlap = slots.windows(2).any(|pair| pair[0].end > pair[1].start);
        let inside = slots.iter().all(|slot| slot.start <= slot.end && slot.end <= self.len());
        if overlap || !inside {
            return Err(Error::Poisoned { what: "the plan's ranges overlap or leave the arena" });
        }
        let done = slots.iter().map(|_| AtomicBool::new(false)).collect();
        if let (Backing::Host(block), false) = (&self.backing, ranges.is_empty()) {
            block.inherit_on_fork(false); // until the last region is gone
        }
        let open = AtomicUsize::new(ranges.len());
        let shared = Arc::new(Shared { backing: self.backing, slots, done, open });
        let mut slot_of = vec![0; order.len()];
        for (slot, &i) in order.iter().enumerate() {
            slot_of[i] = slot;
        }
        let regions = slot_of.into_iter().map(|slot| Region { shared: Arc::clone(&shared), slot }).collect();
        Ok((regions, Written { shared }))
    }
}

impl Region {
    /// The range of the arena, in bytes.
    pub fn range(&self) -> Range<u64> {
        self.shared.slots[self.slot].clone()
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        let range = self.range();
        range.end - range.start
    }

    /// Whether the region has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, where the host can address them.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let Backing::Host(block) = &self.shared.backing else { return None };
        let range = host_range(&self.shared.slots[self.slot])?;
        // SAFETY: `carve` checked that every slot lies inside the arena, whose length is the block's.
        let start = unsafe { block.start().add(range.start) };
        // SAFETY: slots are disjoint, each belongs to one Region, no View covers a slot that is not done, and this Region
        // (whose slot is not done: `finish` takes it by value) is borrowed mutably. The memory is initialised (zeros).
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), range.len()) })
    }

    /// The memory that the region lies in, if it is an `M`: a device finds its own memory by its type. [`Region::range`] says
    /// which bytes of it are the region's.
    pub fn memory<M: Memory>(&self) -> Option<&M> {
        self.shared.backing.memory()
    }

    /// Makes the pages of the region resident, so that whoever fills it meets no page fault. Host memory only.
    pub fn populate(&self) {
        if let (Backing::Host(block), Some(range)) = (&self.shared.backing, host_range(&self.range())) {
            block.populate(range);
        }
    }

    /// Writes `bytes` to the byte `at` of the region, and returns when they are there.
    ///
    /// # Errors
    /// When they do not fit, or the device refuses.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let misfit = || Error::Poisoned { what: "bytes that do not fit their region" };
        let range = self.range();
        let end =
            at.checked_add(bytes.len() as u64).filter(|&end| end <= range.end - range.start).ok_or_else(misfit)?;
        if let Backing::Device(memory) = &self.shared.backing {
            return memory.upload(range.start + at, bytes);
        }
        let place = host_range(&(at..end)).ok_or_else(misfit)?;
        let target = self.bytes_mut().and_then(|whole| whole.get_mut(place)).ok_or_else(misfit)?;
        target.copy_from_slice(bytes);
        Ok(())
    }

    /// Gives the right up: the bytes are final and may be read from now on.
    pub fn finish(self) {
        self.shared.done[self.slot].store(true, Ordering::Release);
    }
}

impl Drop for Region {
    /// Once nothing writes to the memory any more, children of `fork` may inherit it.
    fn drop(&mut self) {
        if self.shared.open.fetch_sub(1, Ordering::AcqRel) == 1
            && let Backing::Host(block) = &self.shared.backing
        {
            block.inherit_on_fork(true);
        }
    }
}

impl Written {
    /// A read-only view of `range`; `None` while any byte of it may still be written, or if it leaves the arena.
    pub fn view(&self, range: Range<u64>) -> Option<View> {
        let shared = &self.shared;
        if range.start > range.end || range.end > shared.backing.len() {
            return None;
        }
        let first = shared.slots.partition_point(|slot| slot.end <= range.start);
        let touched = shared.slots[first..].iter().zip(&shared.done[first..]);
        let mut touched = touched.take_while(|(slot, _)| slot.start < range.end);
        let finished = touched.all(|(slot, done)| slot.is_empty() || done.load(Ordering::Acquire));
        finished.then(|| View { shared: Arc::clone(shared), range })
    }

    /// Number of bytes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.shared.backing.len()
    }
}

impl View {
    /// The arena that `views` are of, whole and free to be carved again. `None`, and nothing happens, where they are of several
    /// arenas, or another view, region or [`Written`] of theirs still exists.
    pub(crate) fn into_arena(views: &mut Vec<View>) -> Option<Arena> {
        let first = views.first()?;
        let of_one = views.iter().all(|view| Arc::ptr_eq(&view.shared, &first.shared));
        if !of_one || Arc::strong_count(&first.shared) != views.len() {
            return None;
        }
        // All references are here, so none can be made elsewhere meanwhile.
        let shared = Arc::clone(&first.shared);
        views.clear();
        Arc::into_inner(shared).map(|shared| Arena { backing: shared.backing })
    }

    /// The range of the arena, in bytes.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether the view has no byte.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The bytes, where the host can address them.
    pub fn bytes(&self) -> Option<&[u8]> {
        let Backing::Host(block) = &self.shared.backing else { return None };
        let range = host_range(&self.range)?;
        // SAFETY: `Written::view` checked that the range lies inside the arena.
        let start = unsafe { block.start().add(range.start) };
        // SAFETY: every region that touches the range was done when the view was made and stays done, so nothing writes
        // these bytes any more; the memory is initialised and lives as long as `shared`.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) })
    }

    /// A part of the view; `part` counts from its start. `None` where it leaves the view.
    pub fn part(&self, part: Range<u64>) -> Option<View> {
        let fits = part.start <= part.end && part.end <= self.len();
        let range = || self.range.start + part.start..self.range.start + part.end;
        fits.then(|| View { shared: Arc::clone(&self.shared), range: range() })
    }

    /// The memory that the view lies in, if it is an `M`: a device finds its own memory by its type. [`View::range`] says which
    /// bytes of it are the view's.
    pub fn memory<M: Memory>(&self) -> Option<&M> {
        self.shared.backing.memory()
    }

    /// The device whose memory it is, as [`Arena::owner`] says it.
    pub fn owner(&self) -> Option<String> {
        self.shared.backing.owner()
    }

    /// The device that streams the bytes back to the host; `None` for host memory, and where [`View::download`] is the only way.
    pub fn device(&self) -> Option<Arc<dyn Device>> {
        match &self.shared.backing {
            Backing::Host(_) => None,
            Backing::Device(memory) => memory.device(),
        }
    }

    /// Whether the bytes that were loaded are still there.
    ///
    /// # Errors
    /// When the device keeps nothing (the null device), with what it is for.
    pub fn must_keep(&self) -> Result<()> {
        match &self.shared.backing {
            Backing::Host(_) => Ok(()),
            Backing::Device(memory) => memory.must_keep(),
        }
    }

    /// The GPU's own address of the first byte; `None` for any other memory and for nothing.
    pub fn address(&self) -> Option<u64> {
        Some(self.shared.backing.memory::<DeviceMemory>()?.address()? + self.range.start)
    }

    /// The [checksum](digest::checksum) of the bytes, computed where they are: nothing is read back from a GPU but the sum.
    ///
    /// # Errors
    /// When the device refuses, or keeps nothing.
    pub fn checksum(&self) -> Result<u64> {
        match &self.shared.backing {
            Backing::Device(memory) => memory.checksum(self.range.clone()),
            Backing::Host(_) => self.bytes().map(digest::checksum).ok_or(Error::Poisoned { what: "a view's range" }),
        }
    }

    /// The matrix in this view, of `shape` (rows, columns) elements of 1, 2, 4 or 8 bytes, with rows and columns exchanged, in
    /// new memory of the same device.
    ///
    /// # Errors
    /// When the shape is not that of the view, there is no memory, or the device refuses.
    pub fn transposed(&self, shape: [u64; 2], element_bytes: u64) -> Result<View> {
        let bytes = shape[0].checked_mul(shape[1]).and_then(|elements| elements.checked_mul(element_bytes));
        if bytes != Some(self.len()) || !matches!(element_bytes, 1 | 2 | 4 | 8) {
            let what = format!("{} bytes as a matrix of {shape:?} elements of {element_bytes} bytes", self.len());
            return Err(Error::Request { what, hint: None });
        }
        let arena = match &self.shared.backing {
            Backing::Device(memory) => Arena::device(memory.transposed(self.range.clone(), shape, element_bytes)?),
            Backing::Host(_) => return self.transposed_on_host(shape, element_bytes),
        };
        let (_, written) = arena.carve(&[])?;
        written.view(0..self.len()).ok_or(Error::Poisoned { what: "a transposed view" })
    }

    fn transposed_on_host(&self, [rows, columns]: [u64; 2], element_bytes: u64) -> Result<View> {
        let misfit = || Error::Poisoned { what: "a transposed view" };
        let out_of_memory = |_| os::out_of_memory("cpu", self.len());
        let source = self.bytes().ok_or_else(misfit)?;
        let arena = Arena::host(HostBlock::new(source.len()).map_err(out_of_memory)?);
        let (mut regions, written) = arena.carve(std::slice::from_ref(&(0..self.len())))?;
        let mut region = regions.pop().ok_or_else(misfit)?;
        let element_bytes = usize::try_from(element_bytes).map_err(|_| misfit())?;
        let target = region.bytes_mut().ok_or_else(misfit)?;
        transpose(source, target, rows, columns, element_bytes).map_err(|_| misfit())?;
        region.finish();
        written.view(0..self.len()).ok_or_else(misfit)
    }

    /// Copies a part of the view (`range` counts from its start) into host memory.
    ///
    /// # Errors
    /// When the range leaves the view, its length is not that of `target`, or the device refuses.
    pub fn download(&self, range: Range<u64>, target: &mut [u8]) -> Result<()> {
        if range.start > range.end || range.end > self.len() || range.end - range.start != target.len() as u64 {
            let what =
                format!("bytes {}..{} of a view of {} into {}", range.start, range.end, self.len(), target.len());
            return Err(Error::Request { what, hint: None });
        }
        if let Some(bytes) = self.bytes() {
            let part = host_range(&range).and_then(|range| bytes.get(range));
            return part.map(|part| target.copy_from_slice(part)).ok_or(Error::Poisoned { what: "a view's range" });
        }
        match &self.shared.backing {
            Backing::Host(_) => Err(Error::Poisoned { what: "a host view without bytes" }),
            Backing::Device(memory) => {
                memory.download(self.range.start + range.start..self.range.start + range.end, target)
            }
        }
    }
}

impl Backing {
    /// The device's memory, if it is an `M`.
    fn memory<M: Memory>(&self) -> Option<&M> {
        let Backing::Device(memory) = self else { return None };
        (memory.as_ref() as &dyn Any).downcast_ref()
    }

    fn owner(&self) -> Option<String> {
        match self {
            Backing::Host(_) => Some("cpu".to_owned()),
            Backing::Device(_) if self.memory::<Nothing>().is_some() => Some("null".to_owned()),
            Backing::Device(_) => self.memory::<DeviceMemory>().map(DeviceMemory::owner),
        }
    }

    fn len(&self) -> u64 {
        match self {
            Backing::Host(block) => block.len() as u64,
            Backing::Device(memory) => memory.len(),
        }
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self, Backing::Host(_)) { "host" } else { "device" };
        write!(f, "{kind} memory of {} bytes", self.len())
    }
}

/// The range in the machine's own word size.
fn host_range(range: &Range<u64>) -> Option<Range<usize>> {
    Some(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(len: usize) -> Arena {
        Arena::host(HostBlock::new(len).unwrap())
    }

    #[test]
    fn overlap_and_escape_are_refused() {
        assert!(arena(10).carve(&[0..4, 3..5]).is_err());
        assert!(arena(10).carve(std::slice::from_ref(&(5..11))).is_err());
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 5..4;
        assert!(arena(10).carve(std::slice::from_ref(&backwards)).is_err());
        assert!(arena(10).carve(&[6..10, 0..3, 3..6]).is_ok());
    }

    #[test]
    fn a_range_is_readable_once_every_region_in_it_is_finished() {
        let (mut regions, written) = arena(10).carve(&[4..8, 0..4]).unwrap();
        regions[1].bytes_mut().unwrap().copy_from_slice(&[1, 2, 3, 4]);
        assert!(written.view(0..4).is_none());
        regions.pop().unwrap().finish();
        assert_eq!(written.view(1..3).unwrap().bytes().unwrap(), &[2, 3]);
        assert!(written.view(3..5).is_none());
        assert_eq!(written.view(8..10).unwrap().bytes().unwrap(), &[0, 0], "what no region covers is never written");
        regions.pop().unwrap().finish();
        assert_eq!(written.view(0..10).unwrap().len(), 10);
        assert!(written.view(5..11).is_none());
    }

    #[test]
    fn a_region_that_was_dropped_unfinished_stays_unreadable() {
        let (regions, written) = arena(8).carve(std::slice::from_ref(&(0..8))).unwrap();
        drop(regions);
        assert!(written.view(0..1).is_none());
    }

    #[test]
    fn bytes_are_written_inside_their_region_only() {
        let (mut regions, written) = arena(10).carve(&[0..4, 4..10]).unwrap();
        regions[1].write(1, &[7, 8]).unwrap();
        for (at, len) in [(5, 2), (7, 0), (u64::MAX, 1)] {
            assert!(regions[1].write(at, &vec![1; len]).is_err(), "{len} bytes at {at}");
        }
        regions.into_iter().for_each(Region::finish);
        assert_eq!(written.view(0..10).unwrap().bytes().unwrap(), &[0, 0, 0, 0, 0, 7, 8, 0, 0, 0]);
    }

    #[test]
    fn an_arena_comes_back_from_the_last_of_its_views_only() {
        let (regions, written) = arena(8).carve(&[0..4, 4..8]).unwrap();
        regions.into_iter().for_each(Region::finish);
        let mut views = vec![written.view(0..4).unwrap(), written.view(4..8).unwrap()];
        assert!(View::into_arena(&mut views).is_none() && views.len() == 2, "`written` could make another view");
        drop(written);
        let clone = views[0].clone();
        assert!(View::into_arena(&mut views).is_none() && views.len() == 2);
        drop(clone);
        let (others, written) = arena(8).carve(&[]).unwrap();
        views.push(written.view(0..8).unwrap());
        assert!(others.is_empty() && View::into_arena(&mut views).is_none() && views.len() == 3, "of two arenas");
        views.pop();
        let arena = View::into_arena(&mut views).unwrap();
        assert!(views.is_empty() && arena.len() == 8);
        assert_eq!(arena.carve(std::slice::from_ref(&(2..6))).unwrap().0[0].len(), 4);
        assert!(View::into_arena(&mut Vec::new()).is_none());
    }

    #[test]
    fn a_view_outlives_its_arena_handle() {
        let (regions, written) = arena(8).carve(std::slice::from_ref(&(0..8))).unwrap();
        regions.into_iter().for_each(Region::finish);
        let view = written.view(2..6).unwrap();
        drop(written);
        let mut copy = [9; 2];
        view.download(1..3, &mut copy).unwrap();
        assert_eq!((copy, view.len()), ([0, 0], 4));
        assert_eq!(view.part(1..3).map(|part| part.range()), Some(3..5));
        assert!(view.part(3..5).is_none() && view.part(4..4).is_some());
        assert!(view.download(0..3, &mut copy).is_err());
    }
}
