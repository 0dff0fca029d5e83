//! What a load did and what limited it, as plain data. Text for people is made by the program.
//!
//! Seconds run from before the first open to the last byte usable; the set-up of the device and of the queue is shown apart.
//! GB is 1e9 bytes.

use serde::{Deserialize, Serialize};

use crate::fallback::Fallback;

/// The report of one load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Bytes of the tensors, those that have several names counted once.
    pub bytes: u64,
    /// Number of tensors, counted so.
    pub tensors: usize,
    /// Number of names that they are handed out under: more than tensors where some are tied.
    pub names: usize,
    /// From before the first open to the last byte usable.
    pub seconds: f64,
    /// `bytes / seconds / 1e9`.
    pub gb_per_s: f64,
    /// T = S / B of this load, and the stage that took the time. T is that stage's where it is a matter of bandwidth.
    pub estimate: Bound,
    /// `estimate.seconds / seconds`, at most 1: how near the load came to T, whichever stage took the time.
    pub efficiency: f64,
    /// Where the time went.
    pub stages: Stages,
    /// Bytes read by each route.
    pub routes: Routes,
    /// The page cache.
    pub cache: Cache,
    /// The staging buffers.
    pub staging: Staging,
    /// The most resident memory that the process ever had, in bytes (0 where the system does not say).
    pub peak_host_bytes: u64,
    /// CPU seconds, user and system, that the process used during the load.
    pub cpu_seconds: f64,
    /// Seconds to make the queue, its threads and the staging buffers; 0 when a warm loader had them. Not in `seconds`.
    pub setup_seconds: f64,
    /// Ways that were not taken, and why.
    pub fallbacks: Vec<Fallback>,
    /// The file system of the first file.
    pub file_system: String,
    /// The kernel's release.
    pub kernel: String,
    /// The device, as the user types it.
    pub device: String,
    /// What the device is: the product's name of a GPU; empty for host memory.
    pub product: String,
    /// What ran the reads: `threads`, `io_uring` or `none` (views).
    pub engine: String,
}

/// T = S / B, and the stage that was the limit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bound {
    /// B in bytes per second: the best rate at which bytes arrived over a quarter of them, whichever stage held them up. Of a load
    /// below 256 MiB: the rate of the stage, where that is [`Stage::Upload`] or [`Stage::Kernels`] (its bytes by the time in which
    /// any were under way), else the rate from the first read to the last. What the machine could do beyond that, only a
    /// measurement of its own tells.
    pub bandwidth: f64,
    /// The stage that took the time. Only the first four are a matter of bandwidth; where it is another one, `bandwidth` and
    /// `seconds` are not that stage's: they say what moving the bytes alone would have taken.
    pub bound_by: Stage,
    /// T in seconds: the bytes that were read, `stages.read.bytes`, divided by `bandwidth`. With conversions these are other bytes
    /// than those of the tensors as loaded.
    pub seconds: f64,
}

/// A stage that can be the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Stage {
    /// Reading from the storage device.
    Storage,
    /// Copying out of the page cache: memory bandwidth and first touch of the destination.
    PageCache,
    /// Copies from staging buffers to the device.
    Upload,
    /// Converting, on the device or in the host's copy threads.
    Kernels,
    /// Neither reads nor uploads: each waited for the other, because the staging buffers are too few or too small.
    Staging,
    /// Reading headers and the index.
    Headers,
    /// Selecting and planning.
    Planning,
    /// Reserving memory, or nothing at all: the load is too small for bandwidth to matter.
    SetUp,
    /// The loop's own work.
    Bookkeeping,
}

/// Time and bytes of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct StageTime {
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Bytes that went through.
    pub bytes: u64,
}

/// Where the time of a load went. `read` and `upload` overlap; the waits are the loop's.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Stages {
    /// Reading headers and the index.
    pub open: StageTime,
    /// Asking the page cache and planning.
    pub plan: StageTime,
    /// Reserving the arena and dividing it.
    pub allocate: StageTime,
    /// From the first read submitted to the last one completed.
    pub read: StageTime,
    /// Seconds that the readers together were at work on reads (busy, not waiting in line).
    pub read_busy: StageTime,
    /// The part of `read_busy` that filled staging buffers.
    pub stage: StageTime,
    /// Bytes that went on from staging buffers, and the time from the first to the last upload.
    pub upload: StageTime,
    /// Converting: seconds that the device's kernels or the host's copy threads together were at work, and the bytes they took.
    pub kernels: StageTime,
    /// Wall-clock seconds in which at least one read was in flight (of the kind of reads that had most).
    pub reading: StageTime,
    /// Wall-clock seconds in which at least one upload was in flight.
    pub uploading: StageTime,
    /// The loop waited for reads.
    pub wait_read: StageTime,
    /// The loop waited for uploads.
    pub wait_upload: StageTime,
    /// The loop's own work: submitting, opening shards, checking them.
    pub bookkeeping: StageTime,
}

/// Bytes by route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Routes {
    /// Past the page cache.
    pub direct: u64,
    /// Through the page cache, by `read`.
    pub buffered: u64,
    /// Copied out of a mapping.
    pub mapped: u64,
    /// Lent from a mapping: nothing was read.
    pub view: u64,
    /// From the storage device to the GPU without the host.
    pub gpu_direct: u64,
}

/// The page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Cache {
    /// Bytes of the files that were in the page cache before the load, as seen at a glance (four pages of each 4 MiB of a
    /// large file).
    pub resident_before: u64,
    /// Bytes of the files.
    pub file_bytes: u64,
}

/// The staging buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Staging {
    /// Number of buffers.
    pub count: usize,
    /// Bytes of each.
    pub bytes: usize,
}

/// Finds the best rate over windows of a load: (seconds since the start, bytes so far), in order of time.
///
/// The window is a quarter of the bytes, at least `min_window_bytes`: long enough that a burst is not taken for a rate. `None`
/// if there are not two samples that far apart.
pub fn best_rate(samples: &[(f64, u64)], min_window_bytes: u64) -> Option<f64> {
    let total = samples.last()?.1;
    let window = (total / 4).max(min_window_bytes);
    let mut first = 0;
    let mut best: Option<f64> = None;
    for &(time, bytes) in samples {
        while samples.get(first + 1).is_some_and(|&(_, from)| bytes >= from.saturating_add(window)) {
            first += 1;
        }
        let (from_time, from_bytes) = samples[first];
        if bytes - from_bytes >= window && time > from_time {
            #[allow(clippy::cast_precision_loss)] // a rate has no use for the 54th bit
            let rate = (bytes - from_bytes) as f64 / (time - from_time);
            best = Some(best.map_or(rate, |best| best.max(rate)));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_window_is_found_and_bursts_are_not_it() {
        // 10 bytes a second, then 100 bytes a second for 200 bytes, then a burst of 10 bytes at once.
        let mut samples: Vec<(f64, u64)> = (0..20).map(|i| (f64::from(i), u64::from(i as u32) * 10)).collect();
        samples.extend((1..=20).map(|i| (19.0 + f64::from(i) * 0.1, 190 + u64::from(i as u32) * 10)));
        samples.push((21.0001, 400));
        let rate = best_rate(&samples, 100).unwrap();
        assert!((90.0..=115.0).contains(&rate), "{rate}");
        assert_eq!(best_rate(&samples[..2], 100), None);
        assert_eq!(best_rate(&[], 1), None);
    }
}
