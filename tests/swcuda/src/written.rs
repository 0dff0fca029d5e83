//! A set of byte ranges, merged where they touch: which bytes of an allocation have been written.
//!
//! It never holds an empty range and never two that touch.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges, by their start.
#[derive(Debug, Default, Clone)]
pub(crate) struct RangeSet {
    ranges: BTreeMap<u64, u64>,
}

impl RangeSet {
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        // From the right: the last range that touches is the first that `next_back` gives.
        while let Some((&first, &last)) = self.ranges.range(..=end).next_back() {
            if last < start {
                break;
            }
            self.ranges.remove(&first);
            start = start.min(first);
            end = end.max(last);
        }
        self.ranges.insert(start, end);
    }

    /// The parts of `range` that are not in the set.
    pub(crate) fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        if let Some((_, &end)) = self.ranges.range(..=range.start).next_back() {
            at = at.max(end);
        }
        for (&start, &end) in self.ranges.range(range.start..range.end) {
            if start > at {
                gaps.push(at..start);
            }
            at = at.max(end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_a_bitmap() {
        let mut set = RangeSet::default();
        let mut bitmap = [false; 64];
        let mut random = 9_u64;
        for _ in 0..400 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let start = (random >> 33) % 60;
            let end = (start + (random >> 50) % 6).min(64);
            set.insert(start..end);
            (start..end).for_each(|i| bitmap[i as usize] = true);
            let low = (random >> 40) % 64;
            let missing: Vec<u64> = set.gaps(low..64).into_iter().flatten().collect();
            let expected: Vec<u64> = (low..64).filter(|&i| !bitmap[i as usize]).collect();
            assert_eq!(missing, expected);
            if expected.is_empty() && low == 0 {
                set = RangeSet::default();
                bitmap = [false; 64];
            }
        }
    }

    #[test]
    fn neighbours_merge() {
        let mut set = RangeSet::default();
        set.insert(0..4);
        set.insert(8..12);
        set.insert(4..8);
        set.insert(3..3);
        assert_eq!(set.ranges.len(), 1);
        assert!(set.gaps(0..12).is_empty());
        assert_eq!(set.gaps(10..14), vec![12..14]);
    }
}
