//! Which parts of a file are in the page cache.

use std::ops::Range;

/// Which parts of a file are in the page cache, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Residency {
    len: u64,
    granule: u64,
    resident: Vec<u64>,
}

impl Residency {
    /// Nothing.
    pub fn none(len: u64) -> Residency {
        Residency { len, granule: u64::MAX, resident: vec![0] }
    }
    /// All.
    pub fn all(len: u64) -> Residency {
        Residency { len, granule: u64::MAX, resident: vec![len] }
    }
    /// Granules.
    pub fn from_granules(len: u64, granule: u64, resident: Vec<u64>) -> Residency {
        Residency { len, granule, resident }
    }
    /// Bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.resident.iter().sum()
    }
    /// Share.
    pub fn share(&self, range: Range<u64>) -> f64 {
        if self.granule == u64::MAX {
            return if self.resident_bytes() > 0 { 1.0 } else { 0.0 };
        }
        let a = (range.start / self.granule) as usize;
        let b = (range.end.div_ceil(self.granule) as usize).min(self.resident.len());
        self.resident[a..b].iter().sum::<u64>() as f64 / ((b - a).max(1) as u64 * self.granule) as f64
    }
}
