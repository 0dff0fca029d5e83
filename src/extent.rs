//! Byte ranges of shards: the only place that does arithmetic on file offsets, and all of it is checked.
//!
//! It knows no file and no format; offsets and lengths are bytes in `u64`.

use std::ops::Range;

/// Index of a weight file within its checkpoint.
pub type ShardIndex = u32;

/// A byte range of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Which file.
    pub shard: ShardIndex,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Extent {
    /// The extent, unless its end does not fit 64 bits.
    pub fn new(shard: ShardIndex, offset: u64, len: u64) -> Option<Extent> {
        offset.checked_add(len).map(|_| Extent { shard, offset, len })
    }

    /// One past the last byte. [`Extent::new`] has checked that it fits.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// The bytes as a range of the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.end()
    }
}

/// Equal runs of bytes at equal distances in a shard, and where they go in the selected tensor (row-major bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Strided {
    /// Which file.
    pub shard: ShardIndex,
    /// First byte of the first run in the file.
    pub offset: u64,
    /// Bytes of each run.
    pub run: u64,
    /// Distance in the file from the start of one run to the next.
    pub stride: u64,
    /// Number of runs.
    pub count: u64,
    /// First byte of the first run in the selected tensor.
    pub at: u64,
    /// Distance in the selected tensor from the start of one run to the next.
    pub at_stride: u64,
}

impl Strided {
    /// One run.
    pub fn contiguous(extent: Extent, at: u64) -> Strided {
        let Extent { shard, offset, len } = extent;
        Strided { shard, offset, run: len, stride: len, count: 1, at, at_stride: len }
    }

    /// One past the last byte of the last run in the file, saturating.
    pub fn end(&self) -> u64 {
        self.count.checked_sub(1).map_or(self.offset, |gaps| {
            self.offset.saturating_add(self.stride.saturating_mul(gaps)).saturating_add(self.run)
        })
    }

    /// The single run number `index`.
    pub fn nth(&self, index: u64) -> Strided {
        let (offset, at) = (self.offset + index * self.stride, self.at + index * self.at_stride);
        Strided { offset, at, count: 1, stride: self.run, at_stride: self.run, ..*self }
    }
}

/// The largest multiple of `align` that is not above `value`. `align` is a power of two.
pub fn align_down(value: u64, align: u64) -> u64 {
    debug_assert!(align.is_power_of_two());
    value & !(align - 1)
}

/// The smallest multiple of `align` that is not below `value`, saturating. `align` is a power of two.
pub fn align_up(value: u64, align: u64) -> u64 {
    debug_assert!(align.is_power_of_two());
    value.checked_add(align - 1).map_or(align_down(u64::MAX, align), |up| align_down(up, align))
}

/// The smallest number not below `value` that leaves the remainder `residue` when divided by `align` (a power of two).
pub fn congruent_up(value: u64, residue: u64, align: u64) -> u64 {
    debug_assert!(align.is_power_of_two());
    value.saturating_add(residue.wrapping_sub(value) & (align - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_goes_both_ways() {
        assert_eq!((align_down(4097, 4096), align_up(4097, 4096), align_up(4096, 4096)), (4096, 8192, 4096));
        assert_eq!(align_up(u64::MAX, 512), align_down(u64::MAX, 512));
    }

    #[test]
    fn congruence_moves_up_by_less_than_the_modulus() {
        for value in 0..40u64 {
            for residue in 0..16u64 {
                let up = congruent_up(value, residue, 16);
                assert!(up >= value && up < value + 16 && up % 16 == residue, "{value} {residue} {up}");
            }
        }
    }

    #[test]
    fn an_extent_that_ends_past_64_bits_does_not_exist() {
        assert_eq!(Extent::new(0, u64::MAX, 1), None);
        assert_eq!(Extent::new(0, 1, 2).map(|e| e.range()), Some(1..3));
    }
}
