//! How long a load must take: T = S / B, for a chain of stages that all see every byte.
//!
//! Pure arithmetic on sizes and bandwidths that the caller brings; nothing here measures. Bandwidths are bytes per second,
//! GB means 1e9 bytes.

use serde::Serialize;

use crate::dtype::Dtype;

/// A stage with a bandwidth: storage, a link, memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Link {
    /// What it is: `PCIe 4 x16`, `NVMe gen4`, or whatever the caller typed.
    pub name: String,
    /// Effective bytes per second.
    pub bytes_per_second: f64,
}

/// T = S / B for one size and a chain of links.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// S: bytes that must move.
    pub bytes: u64,
    /// The links, as given.
    pub links: Vec<Link>,
    /// The slowest link: it decides, since the stages overlap. `None` without links.
    pub bound_by: Option<String>,
    /// T in seconds. `None` without links.
    pub seconds: Option<f64>,
}

/// Links that people name, with the bandwidth that well-made software reaches on them (not the number on the box).
/// `docs/benchmarking.md` says where each figure comes from.
pub const NAMED_LINKS: &[(&str, f64)] = &[
    ("pcie3x16", 12.3e9),
    ("pcie4x16", 25.0e9),
    ("pcie5x16", 56.0e9),
    ("nvlink-c2c", 210.0e9),
    ("nvme-gen3", 3.3e9),
    ("nvme-gen4", 7.0e9),
    ("nvme-gen5", 13.5e9),
    ("sata-ssd", 0.55e9),
    ("10gbe", 1.2e9),
    ("25gbe", 2.9e9),
    ("100gbe", 11.8e9),
];

/// Bytes of `parameters` weights of one element type. `None` for an unknown type or on overflow.
pub fn size_of(parameters: u64, dtype: &Dtype) -> Option<u64> {
    dtype.bits().and_then(|bits| parameters.checked_mul(bits)).map(|bits| bits.div_ceil(8))
}

/// T = S / B, where B is the slowest of `links`.
pub fn estimate(bytes: u64, links: Vec<Link>) -> Estimate {
    let slowest = links.iter().min_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
    let bound_by = slowest.map(|link| link.name.clone());
    #[allow(clippy::cast_precision_loss)] // an estimate in seconds has no use for the 54th bit
    let seconds = slowest.map(|link| bytes as f64 / link.bytes_per_second);
    Estimate { bytes, bound_by, seconds, links }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seventy_billion_halves_over_twelve_gigabytes_a_second() {
        let bytes = size_of(70_000_000_000, &Dtype::F16).unwrap();
        assert_eq!(bytes, 140_000_000_000);
        let link = |name: &str, rate| Link { name: name.to_owned(), bytes_per_second: rate };
        let estimate = estimate(bytes, vec![link("link", 56e9), link("disk", 12e9)]);
        assert_eq!(estimate.bound_by.as_deref(), Some("disk"));
        assert!((estimate.seconds.unwrap() - 11.667).abs() < 0.001);
    }

    #[test]
    fn packed_types_count_bits() {
        assert_eq!(size_of(3, &Dtype::F4), Some(2));
        assert_eq!(size_of(u64::MAX, &Dtype::F64), None);
    }
}
