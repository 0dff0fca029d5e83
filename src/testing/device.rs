//! A device that is as late as it may be, and the suite that every device passes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::convert::{Table, convert};
use crate::device::{
    Arena, Device, DeviceLimits, Download, Downloaded, InFlight, Memory, Piece, Region, Stream, StreamNeeds, Upload,
    Uploaded, View,
};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::{StagingBuffer, StagingPool};

/// Memory that the host cannot address, written only when an upload is waited for: whoever reuses a buffer before its
/// upload is over gets wrong bytes. Polls say "not yet" in a pattern that the seed decides.
#[derive(Debug, Clone)]
pub struct LazyDevice {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    seed: AtomicU64,
    fail_upload: Option<u64>,
    uploads: AtomicU64,
    free_bytes: Option<u64>,
    next_address: AtomicU64,
    live_bytes: AtomicU64,
    memories: Mutex<BTreeMap<u64, Vec<u8>>>,
    scales: Mutex<Vec<Table>>,
}

impl LazyDevice {
    /// A device whose polls follow `seed`.
    pub fn new(seed: u64) -> LazyDevice {
        LazyDevice::with(seed, None, None)
    }

    /// The same, with upload number `fail_upload` (from 0) failing when it is waited for.
    pub fn failing(seed: u64, fail_upload: u64) -> LazyDevice {
        LazyDevice::with(seed, Some(fail_upload), None)
    }

    /// The same, with no more than `free_bytes` of memory.
    pub fn small(free_bytes: u64) -> LazyDevice {
        LazyDevice::with(1, None, Some(free_bytes))
    }

    fn with(seed: u64, fail_upload: Option<u64>, free_bytes: Option<u64>) -> LazyDevice {
        let inner = Inner {
            seed: AtomicU64::new(seed | 1),
            fail_upload,
            uploads: AtomicU64::new(0),
            free_bytes,
            next_address: AtomicU64::new(1 << 40),
            live_bytes: AtomicU64::new(0),
            memories: Mutex::default(),
            scales: Mutex::default(),
        };
        LazyDevice { inner: Arc::new(inner) }
    }

    /// Puts bytes where somebody else than a stream would.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        self.inner.write(address, bytes);
    }

    /// Bytes that are allocated now.
    pub fn live_bytes(&self) -> u64 {
        self.inner.live_bytes.load(Ordering::Relaxed)
    }
}

impl Inner {
    fn roll(&self) -> u64 {
        let step = |state: u64| state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.seed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |state| Some(step(state))).unwrap() >> 33
    }

    /// The allocation that holds `address`, and the offset in it.
    fn write(&self, address: u64, bytes: &[u8]) {
        let mut memories = self.memories.lock().unwrap();
        let (first, memory) = memories.range_mut(..=address).next_back().expect("an address of this device");
        let at = usize::try_from(address - first).unwrap();
        memory[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl Device for LazyDevice {
    fn name(&self) -> String {
        "lazy".to_owned()
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { host_visible: false, keeps: true, align: 256, staging: (4, 64 << 10) }
    }

    fn staging(&self, count: usize, buffer_bytes: usize, _fallbacks: &Fallbacks) -> Result<StagingPool> {
        StagingPool::new(count, buffer_bytes).map_err(|error| Error::io("allocate", "staging", error))
    }

    fn alloc(&self, bytes: u64) -> Result<Arena> {
        if let Some(free) = self.inner.free_bytes.filter(|&free| free < bytes) {
            return Err(Error::OutOfMemory { device: self.name(), needed: bytes, free: Some(free), limit: None });
        }
        let span = bytes.next_multiple_of(4096) + 4096;
        let address = self.inner.next_address.fetch_add(span, Ordering::Relaxed);
        // Never zero: bytes that nobody wrote must not look like data.
        self.inner.memories.lock().unwrap().insert(address, vec![0xA5; usize::try_from(bytes).unwrap()]);
        self.inner.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Arena::device(Box::new(LazyMemory { inner: Arc::clone(&self.inner), address, bytes })))
    }

    fn stream(&self, _lanes: Option<usize>, _fallbacks: &Fallbacks) -> Result<Box<dyn Stream>> {
        Ok(Box::new(LazyStream { inner: Arc::clone(&self.inner) }))
    }
}

struct LazyMemory {
    inner: Arc<Inner>,
    address: u64,
    bytes: u64,
}

impl Memory for LazyMemory {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn device(&self) -> Option<Arc<dyn Device>> {
        Some(Arc::new(LazyDevice { inner: Arc::clone(&self.inner) }))
    }

    fn upload(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write(self.address + at, bytes);
        Ok(())
    }

    fn download(&self, range: Range<u64>, target: &mut [u8]) -> Result<()> {
        let memories = self.inner.memories.lock().unwrap();
        let start = usize::try_from(range.start).unwrap();
        target.copy_from_slice(&memories[&self.address][start..start + target.len()]);
        Ok(())
    }
}

impl Drop for LazyMemory {
    fn drop(&mut self) {
        self.inner.memories.lock().unwrap().remove(&self.address);
        self.inner.live_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The address of a region of such a device.
pub(super) fn address(region: &Region) -> u64 {
    region.memory::<LazyMemory>().expect("memory of this device").address + region.range().start
}

struct LazyStream {
    inner: Arc<Inner>,
}

impl Stream for LazyStream {
    fn prepare(&mut self, needs: &StreamNeeds) -> Result<()> {
        self.inner.scales.lock().unwrap().clone_from(&needs.scales);
        Ok(())
    }

    fn upload(&mut self, buffer: StagingBuffer, pieces: Vec<(Piece, Region)>) -> Result<InFlight> {
        let number = self.inner.uploads.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(LazyUpload { inner: Arc::clone(&self.inner), number, buffer, pieces }))
    }

    fn download(&mut self, mut buffer: StagingBuffer, views: Vec<(u64, View)>) -> Result<Box<dyn Download>> {
        for (at, view) in &views {
            place(&mut buffer, *at, view)?.fill(0x5A); // a reader that comes before it is over sees it
        }
        Ok(Box::new(LazyDownload { inner: Arc::clone(&self.inner), buffer, views }))
    }
}

struct LazyDownload {
    inner: Arc<Inner>,
    buffer: StagingBuffer,
    views: Vec<(u64, View)>,
}

fn place<'b>(buffer: &'b mut StagingBuffer, at: u64, view: &View) -> Result<&'b mut [u8]> {
    let (at, len) = (usize::try_from(at).unwrap(), usize::try_from(view.len()).unwrap());
    buffer.bytes_mut().get_mut(at..at + len).ok_or(Error::Poisoned { what: "a view leaves its buffer" })
}

impl Download for LazyDownload {
    fn is_done(&mut self) -> bool {
        self.inner.roll().is_multiple_of(3)
    }

    fn finish(mut self: Box<Self>) -> Result<Downloaded> {
        for (at, view) in &self.views {
            view.download(0..view.len(), place(&mut self.buffer, *at, view)?)?;
        }
        Ok(Downloaded { buffer: self.buffer, views: self.views })
    }
}

struct LazyUpload {
    inner: Arc<Inner>,
    number: u64,
    buffer: StagingBuffer,
    pieces: Vec<(Piece, Region)>,
}

impl Upload for LazyUpload {
    fn is_done(&mut self) -> bool {
        self.inner.roll().is_multiple_of(3)
    }

    fn finish(self: Box<Self>) -> Result<Uploaded> {
        let LazyUpload { inner, number, buffer, pieces } = *self;
        if inner.fail_upload == Some(number) {
            let message = "planned failure".to_owned();
            return Err(Error::Device { device: "lazy".to_owned(), op: "upload", message });
        }
        let mut overflows = Vec::new();
        for (index, (piece, region)) in pieces.iter().enumerate() {
            let (bytes, overflowed) = packed(buffer.bytes(), piece, &inner.scales.lock().unwrap());
            inner.write(address(region), &bytes);
            overflows.extend((overflowed > 0).then_some((index, overflowed)));
        }
        let regions = pieces.into_iter().map(|(_, region)| region).collect();
        Ok(Uploaded { buffer, regions, overflows, convert_seconds: 0.0 })
    }
}

/// What a piece of `buffer` puts into its region, and how many finite values became infinite.
fn packed(buffer: &[u8], piece: &Piece, scales: &[Table]) -> (Vec<u8>, u64) {
    let mut bytes = Vec::new();
    let mut overflowed = 0;
    for run in 0..piece.count {
        let at = usize::try_from(piece.at + run * piece.stride).unwrap();
        let from = &buffer[at..at + usize::try_from(piece.run).unwrap()];
        let Some(cast) = piece.cast else {
            bytes.extend_from_slice(from);
            continue;
        };
        let mut to = vec![0; usize::try_from(cast.converted(piece.run)).unwrap()];
        let skipped = run * piece.stride / cast.from.bytes();
        let scales = cast.scale.map(|scale| scale.table_in(scales, skipped).unwrap());
        overflowed += convert(from, cast.from, &mut to, cast.to, scales).unwrap();
        bytes.extend(to);
    }
    (bytes, overflowed)
}

/// What every device must do. Panics with what is wrong.
pub fn device_conformance(device: &dyn Device) {
    let limits = device.limits();
    assert!(limits.align.is_power_of_two(), "{limits:?}");
    assert!(limits.keeps || !limits.host_visible, "what the host can see is kept");
    uploads_arrive(device);
    downloads_arrive(device);
    an_arena_may_be_empty(device);
    an_impossible_arena_is_an_error(device);
}

/// Pieces of several shapes arrive where they belong, and the buffer comes back.
fn uploads_arrive(device: &dyn Device) {
    const LEN: u64 = 10_000;
    let pool = device.staging(2, 4096, &Fallbacks::default()).unwrap();
    let mut stream = device.stream(None, &Fallbacks::default()).unwrap();
    stream.prepare(&StreamNeeds { buffers: 2, buffer_bytes: 4096, ..StreamNeeds::default() }).unwrap();
    let pieces = [
        (Piece::contiguous(0, 4096), 0),
        (Piece::contiguous(5, 100), 5000),
        (Piece { at: 3, run: 7, stride: 13, count: 20, cast: None }, 6001),
        (Piece::contiguous(0, 0), 9999),
    ];
    let ranges: Vec<_> = pieces.iter().map(|(piece, at)| *at..*at + piece.len()).collect();
    let (regions, written) = device.alloc(LEN).unwrap().carve(&ranges).unwrap();
    let mut expected = Vec::new();
    for (round, ((piece, at), region)) in pieces.into_iter().zip(regions).enumerate() {
        let mut buffer = pool.acquire().expect("a finished upload gives its buffer back");
        for (index, byte) in buffer.bytes_mut().iter_mut().enumerate() {
            *byte = u8::try_from((index * 7 + round * 31) % 251).unwrap();
        }
        let runs = (0..piece.count).map(|run| usize::try_from(piece.at + run * piece.stride).unwrap());
        let bytes = runs.flat_map(|from| buffer.bytes()[from..from + usize::try_from(piece.run).unwrap()].to_vec());
        expected.push((at, bytes.collect::<Vec<u8>>()));
        assert!(written.view(at..at + 1).is_none() || piece.is_empty(), "readable before it is written");
        let mut upload = stream.upload(buffer, vec![(piece, region)]).unwrap();
        upload.is_done();
        let Uploaded { buffer, regions, .. } = upload.finish().unwrap();
        drop(buffer);
        regions.into_iter().for_each(Region::finish);
    }
    assert_eq!(pool.available(), 2);
    for (at, bytes) in expected {
        let view = written.view(at..at + bytes.len() as u64).expect("everything was written");
        let mut back = vec![0; bytes.len()];
        match view.download(0..view.len(), &mut back) {
            Ok(()) if device.limits().keeps => assert!(back == bytes, "wrong bytes at {at}"),
            Ok(()) => assert!(view.is_empty() || view.bytes().is_none(), "a device that keeps nothing gave bytes"),
            Err(_) => assert!(!device.limits().keeps, "the bytes at {at} cannot be read back"),
        }
    }
}

/// Views of several places arrive where they belong in a buffer, whose other bytes stay; the buffer and the views come back.
fn downloads_arrive(device: &dyn Device) {
    const LEN: usize = 3000;
    let pool = device.staging(2, 4096, &Fallbacks::default()).unwrap();
    let mut stream = device.stream(None, &Fallbacks::default()).unwrap();
    stream.prepare(&StreamNeeds { buffers: 2, buffer_bytes: 4096, ..StreamNeeds::default() }).unwrap();
    let (regions, written) = device.alloc(LEN as u64).unwrap().carve(std::slice::from_ref(&(0..LEN as u64))).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
    let mut buffer = pool.acquire().unwrap();
    buffer.bytes_mut()[..LEN].copy_from_slice(&bytes);
    let pieces = regions.into_iter().map(|region| (Piece::contiguous(0, LEN as u64), region)).collect();
    let Uploaded { buffer, regions, .. } = stream.upload(buffer, pieces).unwrap().finish().unwrap();
    drop(buffer);
    regions.into_iter().for_each(Region::finish);

    let places = [(1000, 0..500), (0, 2000..2900), (3000, 500..500), (1500, 500..700), (4000, 17..113)];
    let view = |(at, range): &(u64, Range<u64>)| (*at, written.view(range.clone()).unwrap());
    let mut buffer = pool.acquire().unwrap();
    buffer.bytes_mut().fill(0xEE);
    let views = places.iter().map(view).collect();
    let over = stream.download(buffer, views).and_then(|mut download| {
        download.is_done();
        download.finish()
    });
    let Downloaded { buffer, views } = match over {
        Ok(over) => over,
        Err(error) => {
            assert!(!device.limits().keeps, "{error}");
            assert_eq!(pool.available(), 2, "a failed download gives its buffer back");
            return;
        }
    };
    let ranges = |views: &[(u64, View)]| views.iter().map(|(at, view)| (*at, view.range())).collect::<Vec<_>>();
    assert_eq!(ranges(&views), places, "the views come back");
    let mut expected = vec![0xEE; 4096];
    for (at, range) in places {
        let [at, from, to] = [at, range.start, range.end].map(|it| usize::try_from(it).unwrap());
        expected[at..at + (to - from)].copy_from_slice(&bytes[from..to]);
    }
    assert!(buffer.bytes() == expected, "wrong bytes, or others than were asked for");
    let beyond = stream.download(buffer, vec![(4000, written.view(0..97).unwrap())]);
    assert!(beyond.is_err(), "a view that leaves its buffer");
    drop(beyond);
    assert_eq!(pool.available(), 2);
}

fn an_arena_may_be_empty(device: &dyn Device) {
    let (regions, written) = device.alloc(0).unwrap().carve(&[]).unwrap();
    assert!(regions.is_empty());
    assert_eq!(written.view(0..0).expect("nothing is always there").len(), 0);
}

fn an_impossible_arena_is_an_error(device: &dyn Device) {
    if device.limits().host_visible {
        assert!(device.alloc(u64::MAX / 2).is_err(), "an arena of 2^63 bytes");
    }
}
