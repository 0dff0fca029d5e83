//! The null device: takes every byte, counts nothing and keeps nothing.
//!
//! It isolates the read side: a load to it costs what reading costs, in the memory of the staging ring alone, so that a
//! checkpoint larger than the machine can be measured. It can never give a tensor's bytes back.

use std::ops::Range;

use super::{Arena, Device, DeviceLimits, InFlight, Memory, Piece, Region, Stream, StreamNeeds, Upload, Uploaded};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::staging::{StagingBuffer, StagingPool};
use crate::os;

/// A device without memory.
#[derive(Debug, Default)]
pub struct NullDevice;

impl NullDevice {
    /// The device.
    pub fn new() -> NullDevice {
        NullDevice
    }
}

impl Device for NullDevice {
    fn name(&self) -> String {
        "null".to_owned()
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { host_visible: false, keeps: false, align: 256, staging: super::port::CACHED_STAGING }
    }

    fn staging(&self, count: usize, buffer_bytes: usize, _fallbacks: &Fallbacks) -> Result<StagingPool> {
        StagingPool::new(count, buffer_bytes)
            .map_err(|_| os::out_of_memory("null", (count as u64).saturating_mul(buffer_bytes as u64)))
    }

    fn alloc(&self, bytes: u64) -> Result<Arena> {
        Ok(Arena::device(Box::new(Nothing(bytes))))
    }

    fn stream(&self, _lanes: Option<usize>, _fallbacks: &Fallbacks) -> Result<Box<dyn Stream>> {
        Ok(Box::new(Discard))
    }
}

pub(super) struct Nothing(u64);

impl Memory for Nothing {
    fn len(&self) -> u64 {
        self.0
    }

    fn must_keep(&self) -> Result<()> {
        Err(kept_nothing())
    }

    fn download(&self, _range: Range<u64>, _target: &mut [u8]) -> Result<()> {
        Err(kept_nothing())
    }

    fn transposed(&self, _range: Range<u64>, _shape: [u64; 2], _element_bytes: u64) -> Result<Box<dyn Memory>> {
        Err(kept_nothing())
    }
}

fn kept_nothing() -> Error {
    Error::Device {
        device: "null".to_owned(),
        op: "read back",
        message: "the null device keeps no bytes; it measures reading. Load to `cpu` or `cuda` to use tensors"
            .to_owned(),
    }
}

struct Discard;

impl Stream for Discard {
    fn prepare(&mut self, _needs: &StreamNeeds) -> Result<()> {
        Ok(())
    }

    fn upload(&mut self, buffer: StagingBuffer, pieces: Vec<(Piece, Region)>) -> Result<InFlight> {
        Ok(Box::new(Discarded { buffer, regions: pieces.into_iter().map(|(_, region)| region).collect() }))
    }
}

struct Discarded {
    buffer: StagingBuffer,
    regions: Vec<Region>,
}

impl Upload for Discarded {
    fn is_done(&mut self) -> bool {
        true
    }

    fn finish(self: Box<Self>) -> Result<Uploaded> {
        Ok(Uploaded::copied(self.buffer, self.regions))
    }
}
