//! Which bytes an operation touches: rows at a pitch (a copy), or a list of ranges (a kernel).
//!
//! Exact to the byte, so that two operations that interleave without touching the same byte are no race. Addresses of
//! the host and of devices share one number line; they cannot collide.

use std::ops::Range;

/// Bytes touched, in one of two shapes.
#[derive(Debug, Clone)]
pub(crate) enum Footprint {
    /// `rows` rows of `width` bytes, `pitch` apart. Never empty; `width <= pitch` unless there is one row.
    Rows { start: u64, width: u64, pitch: u64, rows: u64 },
    /// Ranges, sorted and disjoint.
    List(Vec<Range<u64>>),
}

impl Footprint {
    /// One range.
    pub(crate) fn flat(start: u64, bytes: u64) -> Footprint {
        Footprint::rows(start, bytes, bytes, 1)
    }

    /// Rows; rows without a gap become one.
    pub(crate) fn rows(start: u64, width: u64, pitch: u64, rows: u64) -> Footprint {
        match pitch == width {
            true => Footprint::Rows { start, width: width * rows, pitch: width * rows, rows: 1 },
            false => Footprint::Rows { start, width, pitch, rows },
        }
    }

    /// A list of ranges in any order.
    pub(crate) fn list(mut ranges: Vec<Range<u64>>) -> Footprint {
        ranges.retain(|range| !range.is_empty());
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, kept| {
            let touches = next.start <= kept.end;
            if touches {
                kept.end = kept.end.max(next.end);
            }
            touches
        });
        Footprint::List(ranges)
    }

    /// From the first byte to behind the last.
    pub(crate) fn bounds(&self) -> Range<u64> {
        match self {
            Footprint::Rows { start, width, pitch, rows } => *start..start + pitch * (rows - 1) + width,
            Footprint::List(ranges) => {
                ranges.first().map_or(0, |range| range.start)..ranges.last().map_or(0, |range| range.end)
            }
        }
    }

    /// Each contiguous range.
    pub(crate) fn ranges(&self) -> Box<dyn Iterator<Item = Range<u64>> + '_> {
        match self {
            Footprint::Rows { start, width, pitch, rows } => {
                Box::new((0..*rows).map(move |row| start + row * pitch..start + row * pitch + width))
            }
            Footprint::List(ranges) => Box::new(ranges.iter().cloned()),
        }
    }

    /// A range that both touch.
    pub(crate) fn overlap(&self, other: &Footprint) -> Option<Range<u64>> {
        let (a, b) = (self.bounds(), other.bounds());
        if a.start >= b.end || b.start >= a.end {
            return None;
        }
        let (few, many) = if self.count() <= other.count() { (self, other) } else { (other, self) };
        few.ranges().find_map(|range| many.part_in(&range))
    }

    fn count(&self) -> usize {
        match self {
            Footprint::Rows { rows, .. } => usize::try_from(*rows).unwrap_or(usize::MAX),
            Footprint::List(ranges) => ranges.len(),
        }
    }

    /// The first part of `range` that is touched.
    fn part_in(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let cut = |own: Range<u64>| {
            let cut = own.start.max(range.start)..own.end.min(range.end);
            (!cut.is_empty()).then_some(cut)
        };
        match self {
            Footprint::Rows { start, width, pitch, rows } => {
                let row = (range.start.saturating_sub(*start) / (*pitch).max(1)).min(rows - 1);
                let candidates = [row, (row + 1).min(rows - 1)];
                candidates.into_iter().find_map(|row| cut(start + row * pitch..start + row * pitch + width))
            }
            Footprint::List(ranges) => {
                let first = ranges.partition_point(|own| own.end <= range.start);
                ranges.get(first).cloned().and_then(cut)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(footprint: &Footprint) -> Vec<u64> {
        footprint.ranges().flatten().collect()
    }

    #[test]
    fn interleaved_rows_do_not_overlap() {
        let left = Footprint::rows(1000, 4, 16, 10);
        assert!(left.overlap(&Footprint::rows(1004, 12, 16, 10)).is_none());
        assert_eq!(left.overlap(&Footprint::rows(1003, 12, 16, 10)), Some(1003..1004));
        assert!(left.overlap(&Footprint::flat(1004, 12)).is_none());
        assert!(left.overlap(&Footprint::flat(0, 1000)).is_none());
        assert_eq!(left.overlap(&Footprint::flat(0, 1001)), Some(1000..1001));
    }

    #[test]
    fn agrees_with_counting_bytes() {
        let mut random = 5_u64;
        let mut next = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(11);
            (random >> 33) % limit
        };
        for _ in 0..2000 {
            let mut shape = || {
                let width = 1 + next(5);
                match next(2) {
                    0 => Footprint::rows(next(40), width, width + next(6), 1 + next(5)),
                    _ => Footprint::list((0..=next(4)).map(|_| next(60)).map(|at| at..at + width).collect()),
                }
            };
            let (a, b) = (shape(), shape());
            let both = bytes(&a).iter().any(|byte| bytes(&b).contains(byte));
            assert_eq!(a.overlap(&b).is_some(), both, "{a:?} {b:?}");
        }
    }
}
