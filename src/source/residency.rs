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
    /// Bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.resident.iter().sum()
    }
    /// Share.
    pub fn share(&self, _range: Range<u64>) -> f64 {
        self.resident_bytes() as f64 / self.len.max(1) as f64
    }
}
