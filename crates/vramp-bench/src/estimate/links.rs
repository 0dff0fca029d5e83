//! Links by name, with the bandwidth that well-made software reaches on them (not the number on the box).
//!
//! A table and arithmetic on it; nothing here measures. `docs/links.md` says where each figure comes from.

use serde::Serialize;

/// A stage with a bandwidth: storage, a link, memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Link {
    /// What it is: `PCIe 4 x16`, `NVMe gen4`, or whatever the caller typed.
    pub name: String,
    /// Effective bytes per second.
    pub bytes_per_second: f64,
}

impl Link {
    /// A link of a known bandwidth in bytes per second. `None` unless that is a finite number above zero.
    pub fn new(name: impl Into<String>, bytes_per_second: f64) -> Option<Link> {
        let usable = bytes_per_second.is_finite() && bytes_per_second > 0.0;
        usable.then(|| Link { name: name.into(), bytes_per_second })
    }

    /// A link that was measured: it moved `bytes` in `seconds`. `None` if that is no bandwidth.
    pub fn measured(name: impl Into<String>, bytes: u64, seconds: f64) -> Option<Link> {
        Link::new(name, as_f64(bytes) / seconds)
    }

    /// A link by its name in [`NAMED_LINKS`], or `pcie4x8`, `pcie5x4`: a half and a quarter of x16. Case does not matter.
    pub fn named(name: &str) -> Option<Link> {
        let lower = name.trim().to_ascii_lowercase();
        let rate = |name: &str| NAMED_LINKS.iter().find(|(known, _)| *known == name).map(|&(_, rate)| rate);
        let narrow = |suffix: &str, share: f64| {
            let wide = format!("{}x16", lower.strip_suffix(suffix).filter(|rest| rest.starts_with("pcie"))?);
            rate(&wide).map(|rate| rate * share)
        };
        let rate = rate(&lower).or_else(|| narrow("x8", 0.5)).or_else(|| narrow("x4", 0.25))?;
        Link::new(lower, rate)
    }

    /// Seconds that `bytes` take over it.
    pub fn seconds(&self, bytes: u64) -> f64 {
        as_f64(bytes) / self.bytes_per_second
    }
}

/// Names and effective bytes per second. `docs/links.md` says where each figure comes from.
pub const NAMED_LINKS: &[(&str, f64)] = &[
    ("pcie3x16", 12.3e9),
    ("pcie4x16", 25.0e9),
    ("pcie5x16", 56.0e9),
    ("pcie6x16", 107.0e9),
    ("nvlink-c2c", 210.0e9),
    ("nvme-gen3", 3.3e9),
    ("nvme-gen4", 7.0e9),
    ("nvme-gen5", 13.5e9),
    ("sata-ssd", 0.55e9),
    ("usb3-5g", 0.43e9),
    ("usb3-10g", 1.05e9),
    ("usb4-40g", 3.1e9),
    ("ebs-gp3", 0.131e9),
    ("ebs-gp3-max", 2.097e9),
    ("ebs-io2", 4.194e9),
    ("s3-stream", 0.085e9),
    ("s3-many", 8.0e9),
    ("10gbe", 1.18e9),
    ("25gbe", 2.94e9),
    ("40gbe", 4.71e9),
    ("100gbe", 11.8e9),
    ("200gbe", 23.5e9),
    ("400gbe", 47.1e9),
];

#[allow(clippy::cast_precision_loss)] // an estimate in seconds has no use for the 54th bit
pub(crate) fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_slots_are_shares_of_wide_ones() {
        let rate = |name: &str| Link::named(name).map(|link| link.bytes_per_second);
        assert_eq!(rate("PCIe5x16"), Some(56e9));
        assert_eq!((rate("pcie5x8"), rate("pcie5x4")), (Some(28e9), Some(14e9)));
        for unknown in ["", "x8", "pcie5", "pcie9x8", "10gbex4", "pcie5x2"] {
            assert_eq!(rate(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn a_bandwidth_is_finite_and_above_zero() {
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Link::new("x", wrong), None);
        }
        assert_eq!(Link::measured("disk", 7_000, 2.0), Link::new("disk", 3_500.0));
        assert_eq!((Link::measured("disk", 7, 0.0), Link::measured("disk", 0, 1.0)), (None, None));
        for (name, rate) in NAMED_LINKS {
            assert!(Link::new(*name, *rate).is_some_and(|link| Some(&link) == Link::named(name).as_ref()), "{name}");
        }
    }

    #[test]
    fn ethernet_is_the_line_rate_less_its_headers() {
        // 1448 of 1538 bytes on the wire are payload: TCP with time stamps, frames of 1500 bytes, preamble and gap.
        for gbit in [10.0, 25.0, 40.0, 100.0, 200.0, 400.0] {
            let link = Link::named(&format!("{gbit:.0}gbe")).unwrap();
            assert!((link.bytes_per_second / (gbit * 1e9 / 8.0 * 1448.0 / 1538.0) - 1.0).abs() < 0.005, "{gbit}");
        }
    }
}
