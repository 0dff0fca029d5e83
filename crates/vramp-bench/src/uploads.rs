//! The device's stages alone: locking staging memory, uploads with and without conversion, and the way back.
//!
//! What is uploaded is whatever lies in the staging buffers: no file is read. Making streams, staging and device memory does
//! not count, except where that is the stage.

use std::time::{Duration, Instant};

use super::data::{Sample, Setting};
use vramp::Float;
use vramp::device::{Cast, Device, InFlight, Piece, Region, Stream, StreamNeeds, View, Written};
use vramp::error::{Error, Result};
use vramp::load::Cancel;
use vramp::memory::staging::{StagingBuffer, StagingPool};
use vramp::storage::Fallbacks;

/// Device memory that samples write to and read from, in bytes, at most.
const ARENA_BYTES: u64 = 1 << 30;

/// One way of uploading.
#[derive(Debug, Clone, Copy)]
pub(super) struct UploadWay {
    pub(super) block_bytes: usize,
    pub(super) buffers: usize,
    /// `None` leaves the number to the device.
    pub(super) lanes: Option<usize>,
    pub(super) cast: Option<(Float, Float)>,
}

impl UploadWay {
    pub(super) fn setting(&self) -> Setting {
        let streams = self.lanes.map_or("as many streams as usual".to_owned(), |lanes| format!("streams: {lanes}"));
        let cast = |(from, to): (Float, Float)| format!("{} to {}, ", from.dtype(), to.dtype());
        let way = self.cast.map(cast).unwrap_or_default() + &streams;
        Setting { way, block_bytes: self.block_bytes as u64, at_once: self.buffers }
    }

    /// A whole buffer, as one piece.
    fn piece(&self) -> Piece {
        let piece = Piece::contiguous(0, self.block_bytes as u64);
        Piece { cast: self.cast.map(|(from, to)| Cast { from, to, scale: None }), ..piece }
    }
}

/// Locks staging memory of a shape, as the device does before its first upload.
pub(super) fn pinning(device: &dyn Device, count: usize, buffer_bytes: usize, fallbacks: &Fallbacks) -> Result<Sample> {
    let began = Instant::now();
    let pool = device.staging(count, buffer_bytes, fallbacks)?;
    all_buffers(&pool).iter().for_each(StagingBuffer::wait_prepared);
    Ok(Sample { bytes: (count as u64) * (buffer_bytes as u64), seconds: began.elapsed().as_secs_f64() })
}

fn all_buffers(pool: &StagingPool) -> Vec<StagingBuffer> {
    std::iter::from_fn(|| pool.acquire()).collect()
}

/// Uploads for some time.
pub(super) fn upload(
    device: &dyn Device,
    way: &UploadWay,
    seconds: f64,
    cancel: &Cancel,
    fallbacks: &Fallbacks,
) -> Result<Sample> {
    let pool = device.staging(way.buffers, way.block_bytes, fallbacks)?;
    let mut stream = device.stream(way.lanes, fallbacks)?;
    let casts = way.cast.into_iter().collect();
    stream.prepare(&StreamNeeds {
        buffers: way.buffers,
        buffer_bytes: way.block_bytes,
        casts,
        ..StreamNeeds::default()
    })?;
    let (mut regions, _written) = room(device, way)?; // after what the stream needs itself
    let buffers = all_buffers(&pool);
    buffers.iter().for_each(StagingBuffer::wait_prepared);
    let began = Instant::now();
    let mut in_flight = std::collections::VecDeque::new();
    for buffer in buffers {
        in_flight.push_back(start(&mut *stream, way, buffer, &mut regions)?);
    }
    let mut bytes = 0;
    while let Some(upload) = in_flight.pop_front() {
        let uploaded = upload.finish()?;
        bytes += way.block_bytes as u64;
        regions.extend(uploaded.regions);
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        if began.elapsed() < Duration::from_secs_f64(seconds) {
            in_flight.push_back(start(&mut *stream, way, uploaded.buffer, &mut regions)?);
        }
    }
    Ok(Sample { bytes, seconds: began.elapsed().as_secs_f64() })
}

/// A region for each upload in flight, and more where the device has room: the same bytes over and over may lie in a cache.
fn room(device: &dyn Device, way: &UploadWay) -> Result<(Vec<Region>, Written)> {
    let each = way.piece().len();
    let count = (ARENA_BYTES / each.max(1)).max(way.buffers as u64);
    let (least, most) = (way.buffers as u64 * each, count * each);
    let (arena, bytes) = match device.alloc(most) {
        Ok(arena) => (arena, most),
        Err(_) => (device.alloc(least)?, least),
    };
    arena.carve(&super::reads::blocks(bytes, each))
}

fn start(
    stream: &mut dyn Stream,
    way: &UploadWay,
    buffer: StagingBuffer,
    regions: &mut Vec<Region>,
) -> Result<InFlight> {
    // The one that was written longest ago.
    let region = if regions.is_empty() { None } else { Some(regions.remove(0)) };
    let region = region.ok_or(Error::Poisoned { what: "more uploads than regions" })?;
    stream.upload(buffer, vec![(way.piece(), region)])
}

/// Reads device memory back, `block_bytes` at a time.
pub(super) fn download(
    device: &dyn Device,
    block_bytes: usize,
    seconds: f64,
    cancel: &Cancel,
    fallbacks: &Fallbacks,
) -> Result<Sample> {
    let view = zeros(device, block_bytes, fallbacks)?;
    let mut target = vec![0; block_bytes];
    let block_bytes = view.len();
    view.download(0..block_bytes, &mut target)?; // once for the pages of the target
    let (began, mut bytes) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs_f64(seconds) && !cancel.is_cancelled() {
        view.download(0..block_bytes, &mut target)?;
        bytes += block_bytes;
    }
    Ok(Sample { bytes, seconds: began.elapsed().as_secs_f64() })
}

/// Device memory that holds zeros: what nobody wrote may be another's and is not read.
fn zeros(device: &dyn Device, bytes: usize, fallbacks: &Fallbacks) -> Result<View> {
    let way = UploadWay { block_bytes: bytes, buffers: 1, lanes: None, cast: None };
    let pool = device.staging(1, bytes, fallbacks)?;
    let mut stream = device.stream(None, fallbacks)?;
    stream.prepare(&StreamNeeds { buffers: 1, buffer_bytes: bytes, ..StreamNeeds::default() })?;
    let (mut regions, written) = device.alloc(bytes as u64)?.carve(std::slice::from_ref(&(0..bytes as u64)))?;
    let missing = || Error::Poisoned { what: "a view of what was just made" };
    let uploaded = start(&mut *stream, &way, pool.acquire().ok_or_else(missing)?, &mut regions)?.finish()?;
    uploaded.regions.into_iter().for_each(Region::finish);
    written.view(0..bytes as u64).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramp::device::CpuDevice;
    use vramp::testing::LazyDevice;

    #[test]
    fn uploads_count_their_bytes_with_and_without_conversion() {
        let (cancel, fallbacks) = (Cancel::new(), Fallbacks::default());
        let devices: [&dyn Device; 2] = [&CpuDevice::new(), &LazyDevice::new(3)];
        for device in devices {
            for cast in [None, Some((Float::F32, Float::BF16))] {
                let way = UploadWay { block_bytes: 4096, buffers: 3, lanes: Some(2), cast };
                let sample = upload(device, &way, 0.0, &cancel, &fallbacks).unwrap();
                assert_eq!(sample.bytes, 3 * 4096);
            }
        }
        assert_eq!(pinning(&CpuDevice::new(), 2, 4096, &fallbacks).unwrap().bytes, 8192);
        assert_eq!(download(&LazyDevice::new(1), 512, 0.0, &cancel, &fallbacks).unwrap().bytes, 0);
    }
}
