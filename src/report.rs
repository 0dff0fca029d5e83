//! What a load did and what limited it, as plain data. Text for people is made by the program.
//!
//! Seconds run from before the first open to the last byte usable; the set-up of the device and of the queue is shown apart.
//! GB is 1e9 bytes.

use serde::{Deserialize, Serialize};

pub use crate::fallback::Fallback;

/// The report of one load.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
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
    /// What took most of the time, as seen by the load itself. It says nothing about what the machine could do.
    pub main_stage: MainStage,
    /// T = S / B by limits that were measured before this load and given to it; `None` without such limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate: Option<Bound>,
    /// `estimate.seconds / seconds`: the share of the predicted rate that was reached. More than 1 is a load that was faster than
    /// the limits that were measured. `None` without an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub efficiency: Option<f64>,
    /// Why there is no estimate, in words; `None` where there is one, or where no byte had to move.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_estimate: Option<String>,
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

impl Default for Report {
    /// The report of a load that did nothing, for tests of what prints reports.
    fn default() -> Report {
        Report {
            bytes: 0,
            tensors: 0,
            names: 0,
            seconds: 0.0,
            gb_per_s: 0.0,
            main_stage: MainStage { stage: Stage::SetUp, seconds: 0.0, bytes_per_second: None },
            estimate: None,
            efficiency: None,
            no_estimate: None,
            stages: Stages::default(),
            routes: Routes::default(),
            cache: Cache::default(),
            staging: Staging::default(),
            peak_host_bytes: 0,
            cpu_seconds: 0.0,
            setup_seconds: 0.0,
            fallbacks: Vec::new(),
            file_system: String::new(),
            kernel: String::new(),
            device: String::new(),
            product: String::new(),
            engine: String::new(),
        }
    }
}

/// The stage that took most of the time of a load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MainStage {
    /// Which: never [`Stage::Storage`], [`Stage::PageCache`] or [`Stage::FirstTouch`]. A load sees that it was reading, not why
    /// that took so long.
    pub stage: Stage,
    /// Wall-clock seconds in which that stage was at work.
    pub seconds: f64,
    /// Bytes per second over those seconds, where the stage moves bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<f64>,
}

/// T = S / B by measured limits: the slowest of the stages that the bytes of a load passed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bound {
    /// S: the bytes that passed the slowest stage, as they lie in the files.
    pub bytes: u64,
    /// B in bytes per second.
    pub bandwidth: f64,
    /// The slowest stage: [`Stage::Storage`], [`Stage::FirstTouch`], [`Stage::PageCache`] or [`Stage::Upload`].
    pub bound_by: Stage,
    /// T in seconds: `bytes / bandwidth`.
    pub seconds: f64,
    /// Where B comes from.
    pub measured: Measured,
}

/// Where a limit comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Measured {
    /// When it was measured, in UTC: `2026-11-30T04:29:00Z`.
    pub when: String,
    /// By what: `vramp bench 0.1.0`.
    pub by: String,
}

/// A stage that can be the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Stage {
    /// Reading, wherever the bytes came from.
    Reading,
    /// Reading from the storage device.
    Storage,
    /// Copying out of the page cache.
    PageCache,
    /// Making fresh memory resident.
    FirstTouch,
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
#[non_exhaustive]
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
    /// Bytes of the files that were in the page cache before the load, estimated from samples (four pages of each 4 MiB of a
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

/// A time in seconds since 1970 as `2026-11-30T04:29:00Z`.
#[doc(hidden)]
pub fn utc(unix_seconds: u64) -> String {
    let (days, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second % 3600 / 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day so many days after 1970-01-01; years are counted from March, so that a leap day ends one.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days.saturating_add(719_468); // since 0000-03-01
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_796_012_940), "2026-11-30T04:29:00Z");
        assert_eq!(utc(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
