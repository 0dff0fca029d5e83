//! The scales of a quantised tensor: a table with one entry for each block of elements, and which entry an element has.
//!
//! A table is kept as it is stored where that is smaller: one byte for each block and what the 256 bytes mean. It converts no
//! element and reads no file.

use std::sync::Arc;

use super::elements;
use super::float::Float;
use super::loops::{CHUNK, Factors, Job, Vectors};
use crate::dtype::Dtype;

/// A table of scales.
#[derive(Debug, Clone, PartialEq)]
pub enum Table {
    /// Single precision: products are rounded to F32 and then to the target.
    Single(Arc<[f32]>),
    /// Double precision: products are rounded once.
    Wide(Arc<[f64]>),
    /// One byte for each block: products are rounded once.
    Coded {
        /// The bytes.
        codes: Arc<[u8]>,
        /// What they mean.
        meaning: Meaning,
    },
}

/// What the bytes of a coded table mean.
#[derive(Debug, Clone, PartialEq)]
pub enum Meaning {
    /// E8M0: 2^(code - 127); 255 is NaN.
    Exponents,
    /// The value of each of the 256 codes.
    Values(Arc<[f64]>),
}

/// The values of a table, borrowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values<'a> {
    /// Those of [`Table::Single`].
    Single(&'a [f32]),
    /// Those of [`Table::Wide`].
    Wide(&'a [f64]),
    /// The codes of [`Table::Coded`], which are exponents.
    Exponents(&'a [u8]),
    /// The codes of [`Table::Coded`], and what each of the 256 means.
    Coded(&'a [u8], &'a [f64]),
}

/// Scales of a 2-D tensor (or one seen as such), one for each block of `block_rows` x `block_columns` elements, row-major;
/// blocks at the right and lower edge may be ragged. One scale for all: a block as large as the tensor.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    /// The scales: for each row of blocks `ceil(columns / block_columns)`.
    pub values: Values<'a>,
    /// Index, in the whole tensor, of the first element that is converted.
    pub first: u64,
    /// Columns of the whole tensor.
    pub columns: u64,
    /// Rows of a block.
    pub block_rows: u64,
    /// Columns of a block.
    pub block_columns: u64,
}

impl Table {
    /// The table of a tensor of scales as stored: F32, F16 and BF16 become single precision, F64 double; F8_E8M0 stays as it is,
    /// and so does U8, which is taken for the same. `None` for another type or a broken length.
    pub fn decode(source: &[u8], dtype: Dtype) -> Option<Table> {
        match dtype {
            Dtype::F8_E8M0 | Dtype::U8 => Some(Table::Coded { codes: source.into(), meaning: Meaning::Exponents }),
            Dtype::F64 => {
                let (words, rest) = source.as_chunks::<8>();
                let values = words.iter().map(|word| f64::from_le_bytes(*word));
                rest.is_empty().then(|| Table::Wide(values.collect()))
            }
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => {
                let from = Float::of(dtype)?;
                let fits = source.len().is_multiple_of(from.width());
                let mut values = vec![0.0f32; source.len() / from.width()];
                let target = bytemuck::cast_slice_mut(&mut values);
                Job { source, factors: None, target }.run(from, Float::F32, Vectors::widest());
                fits.then(|| Table::Single(values.into()))
            }
            _ => None,
        }
    }

    /// E4M3 scales of blocks, times one number for all of them, or divided by it. The 256 products are computed in double precision;
    /// the quotients are rounded to it.
    pub fn two_level(codes: Arc<[u8]>, global: f64, divides: bool) -> Table {
        let value = |code: u8| {
            let block = f64::from(elements::e4m3(code));
            if divides { block / global } else { block * global }
        };
        Table::Coded { codes, meaning: Meaning::Values((0..=255).map(value).collect()) }
    }

    /// Number of scales.
    pub fn len(&self) -> usize {
        self.values().len()
    }

    /// Whether there is no scale.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values.
    pub fn values(&self) -> Values<'_> {
        match self {
            Table::Single(values) => Values::Single(values),
            Table::Wide(values) => Values::Wide(values),
            Table::Coded { codes, meaning: Meaning::Exponents } => Values::Exponents(codes),
            Table::Coded { codes, meaning: Meaning::Values(values) } => Values::Coded(codes, values),
        }
    }
}

impl<const N: usize> From<[f32; N]> for Table {
    fn from(values: [f32; N]) -> Table {
        Table::Single(values.into())
    }
}

impl Meaning {
    /// The value of each of the 256 codes.
    pub fn values(&self) -> Arc<[f64]> {
        match self {
            Meaning::Exponents => (0..=255).map(|code| f64::from(elements::e8m0(code))).collect(),
            Meaning::Values(values) => Arc::clone(values),
        }
    }
}

impl Values<'_> {
    /// Number of scales.
    pub fn len(&self) -> usize {
        match self {
            Values::Single(values) => values.len(),
            Values::Wide(values) => values.len(),
            Values::Exponents(codes) | Values::Coded(codes, _) => codes.len(),
        }
    }

    /// Whether there is no scale.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(values: &'a [f32]) -> Values<'a> {
        Values::Single(values)
    }
}

impl<'a, const N: usize> From<&'a [f32; N]> for Values<'a> {
    fn from(values: &'a [f32; N]) -> Values<'a> {
        Values::Single(values)
    }
}

impl<'a> From<&'a Vec<f32>> for Values<'a> {
    fn from(values: &'a Vec<f32>) -> Values<'a> {
        Values::Single(values)
    }
}

/// Room for the scales of one chunk.
pub(super) struct Room {
    single: [f32; CHUNK],
    double: [f64; CHUNK],
}

impl Room {
    pub(super) fn new() -> Room {
        Room { single: [0.0; CHUNK], double: [0.0; CHUNK] }
    }

    /// The scales of `count` elements (a chunk at most) from number `skipped` on, if there are scales.
    pub(super) fn of(&mut self, scales: Option<&Scales<'_>>, skipped: u64, count: usize) -> Option<Factors<'_>> {
        let scales = scales?;
        let first = scales.first.saturating_add(skipped);
        let count = count.min(CHUNK);
        Some(match scales.values {
            Values::Single(values) => {
                let room = &mut self.single[..count];
                scales.fill(first, room, values, |value| *value);
                Factors::Single(room)
            }
            // Powers of two: no product is rounded.
            Values::Exponents(codes) => {
                let room = &mut self.single[..count];
                scales.fill(first, room, codes, |code| elements::e8m0(*code));
                Factors::Single(room)
            }
            Values::Wide(values) => {
                let room = &mut self.double[..count];
                scales.fill(first, room, values, |value| *value);
                Factors::Double(room)
            }
            Values::Coded(codes, meaning) => {
                let room = &mut self.double[..count];
                scales.fill(first, room, codes, |code| meaning.get(usize::from(*code)).copied().unwrap_or(f64::NAN));
                Factors::Double(room)
            }
        })
    }
}

impl<'a> Scales<'a> {
    /// The same scales where each element is `numbers` neighbours of a row.
    pub(super) fn of_numbers(self, numbers: u64) -> Scales<'a> {
        let times = |count: u64| count.saturating_mul(numbers);
        let (first, columns, block_columns) = (times(self.first), times(self.columns), times(self.block_columns));
        Scales { first, columns, block_columns, ..self }
    }

    /// How many scales `elements` elements need, if they are not all there.
    pub(super) fn missing(&self, elements: u64) -> Option<u64> {
        if self.columns == 0 || self.block_rows == 0 || self.block_columns == 0 {
            return Some(0);
        }
        let last = self.first.saturating_add(elements.checked_sub(1)?);
        let block_rows = last / self.columns / self.block_rows + 1;
        let needed = block_rows.saturating_mul(self.columns.div_ceil(self.block_columns));
        (needed > self.values.len() as u64).then_some(needed)
    }

    /// The scales of the elements from `first` on, one for each place. [`Scales::missing`] has seen to it that every scale is there.
    fn fill<V, F: Copy>(&self, first: u64, mut factors: &mut [F], values: &[V], value: impl Fn(&V) -> F) {
        let across = self.columns.div_ceil(self.block_columns);
        let (mut row, mut column) = (first / self.columns, first % self.columns);
        while !factors.is_empty() {
            let (of_row, rest) = factors.split_at_mut(within(self.columns - column, factors.len()));
            let index = row / self.block_rows * across + column / self.block_columns;
            let values = usize::try_from(index).ok().and_then(|index| values.get(index..)).unwrap_or_default();
            self.spread(values, column, of_row, &value);
            (factors, row, column) = (rest, row + 1, 0);
        }
    }

    /// Spreads the scales of a row of blocks over a part of one row of elements that begins at `column`.
    fn spread<V, F: Copy>(&self, values: &[V], column: u64, of_row: &mut [F], value: &impl Fn(&V) -> F) {
        if self.block_columns == 1 {
            return of_row.iter_mut().zip(values).for_each(|(factor, scale)| *factor = value(scale));
        }
        // The first block may have begun before.
        let left = within(self.block_columns - column % self.block_columns, of_row.len());
        let (begun, whole) = of_row.split_at_mut(left);
        let blocks = whole.chunks_mut(within(self.block_columns, CHUNK));
        for (block, scale) in std::iter::once(begun).chain(blocks).zip(values) {
            block.fill(value(scale));
        }
    }
}

/// `count`, at most `len`.
fn within(count: u64, len: usize) -> usize {
    usize::try_from(count).map_or(len, |count| count.min(len))
}
