//! How long a load must take: T = S / B, for a chain of stages that all see every byte, and for a fleet of hosts.
//!
//! Pure arithmetic on sizes and bandwidths that the caller brings; nothing here measures. Bandwidths are bytes per second,
//! GB means 1e9 bytes. `links` knows bandwidths by name, `size` counts S, `fleet` is many hosts at once.

use serde::Serialize;

pub mod fleet;
mod links;
mod size;

pub use links::{Link, NAMED_LINKS};
pub use size::{QUANTISED, Scales, Size, Weights, element_bits, size_of, size_of_all};

/// T = S / B for one size and a chain of links.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// S: bytes that must move.
    pub bytes: u64,
    /// The links, in the order in which a byte passes them.
    pub links: Vec<Link>,
    /// The slowest link, by its place in `links`, the first of equals: it decides, since the stages overlap. `None` without
    /// links.
    pub bound_at: Option<usize>,
    /// Its name.
    pub bound_by: Option<String>,
    /// T in seconds, all stages at the same time: the longest of them. `None` without links.
    pub seconds: Option<f64>,
    /// Seconds if each stage waited for the one before to end: the sum of them. `None` without links.
    pub seconds_one_by_one: Option<f64>,
}

impl Estimate {
    /// `disk -> host -> link`.
    pub fn chain(&self) -> String {
        self.links.iter().map(|link| link.name.as_str()).collect::<Vec<_>>().join(" -> ")
    }
}

/// T = S / B, where B is the slowest of `links`.
pub fn estimate(bytes: u64, links: Vec<Link>) -> Estimate {
    let by_rate = |a: &(usize, &Link), b: &(usize, &Link)| a.1.bytes_per_second.total_cmp(&b.1.bytes_per_second);
    let slowest = links.iter().enumerate().min_by(by_rate);
    let bound_at = slowest.map(|(at, _)| at);
    let bound_by = slowest.map(|(_, link)| link.name.clone());
    let seconds = slowest.map(|(_, link)| link.seconds(bytes));
    let seconds_one_by_one = slowest.map(|_| links.iter().map(|link| link.seconds(bytes)).sum());
    Estimate { bytes, bound_at, bound_by, seconds, seconds_one_by_one, links }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramp::dtype::Dtype;

    #[test]
    fn seventy_billion_halves_over_twelve_gigabytes_a_second() {
        let bytes = size_of(70_000_000_000, &Dtype::F16.into()).unwrap();
        assert_eq!(bytes, 140_000_000_000);
        let link = |name: &str, rate| Link { name: name.to_owned(), bytes_per_second: rate };
        let estimate = estimate(bytes, vec![link("link", 56e9), link("disk", 12e9), link("slot", 12e9)]);
        assert_eq!((estimate.bound_by.as_deref(), estimate.bound_at), (Some("disk"), Some(1)));
        assert!((estimate.seconds.unwrap() - 11.667).abs() < 0.001);
        assert!((estimate.seconds_one_by_one.unwrap() - (2.5 + 2.0 * 11.667)).abs() < 0.001);
        assert_eq!(estimate.chain(), "link -> disk -> slot");
    }

    #[test]
    fn without_links_there_is_no_time() {
        let nothing = estimate(7, Vec::new());
        assert_eq!((nothing.bound_at, nothing.seconds, nothing.seconds_one_by_one), (None, None, None));
    }
}
