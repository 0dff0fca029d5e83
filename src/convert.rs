//! Conversion between float formats on the CPU, with dequantisation by block scales, and transposition: what `--dtype` does
//! where no GPU does it, and the oracle of the kernels (`kernels/convert.cu`, bit for bit).
//!
//! Rounding is to nearest, ties to even, once; subnormals are exact on both sides; a NaN stays a quiet NaN with its sign and
//! top payload bits. Only where a scale is involved a NaN is [`f32::NAN`] without sign or payload, because processors
//! disagree there. Nothing here allocates per element, starts threads or knows a file; slices of any alignment are taken.

use serde::Serialize;

use crate::dtype::Dtype;

mod elements;
mod loops;
#[cfg(test)]
mod tests;
mod transpose;

use loops::{Job, Vectors};
pub use transpose::transpose;

/// Elements that are converted at a time: their scales stay in the first-level cache.
const CHUNK: usize = 2048;

/// Float formats that conversion knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Float {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an F32.
    BF16,
    /// 4 exponent and 3 mantissa bits, bias 7; no infinities, `S.1111.111` is NaN (OCP "fn").
    F8E4M3,
    /// 5 exponent and 2 mantissa bits, bias 15, like IEEE.
    F8E5M2,
    /// 4 exponent and 3 mantissa bits, bias 8; 0x80 is the one NaN, there are no infinities and no negative zero.
    F8E4M3Fnuz,
    /// 5 exponent and 2 mantissa bits, bias 16; 0x80 is the one NaN, there are no infinities and no negative zero.
    F8E5M2Fnuz,
}

impl Float {
    /// Every format.
    pub const ALL: [Float; 8] = [
        Float::F64,
        Float::F32,
        Float::F16,
        Float::BF16,
        Float::F8E4M3,
        Float::F8E5M2,
        Float::F8E4M3Fnuz,
        Float::F8E5M2Fnuz,
    ];

    /// The format of an element type; `None` for what is no float or too narrow for a byte.
    pub fn of(dtype: &Dtype) -> Option<Float> {
        Float::ALL.into_iter().find(|float| float.dtype() == *dtype)
    }

    /// The element type.
    pub fn dtype(self) -> Dtype {
        match self {
            Float::F64 => Dtype::F64,
            Float::F32 => Dtype::F32,
            Float::F16 => Dtype::F16,
            Float::BF16 => Dtype::BF16,
            Float::F8E4M3 => Dtype::F8_E4M3,
            Float::F8E5M2 => Dtype::F8_E5M2,
            Float::F8E4M3Fnuz => Dtype::F8_E4M3FNUZ,
            Float::F8E5M2Fnuz => Dtype::F8_E5M2FNUZ,
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Float::F64 => 8,
            Float::F32 => 4,
            Float::F16 | Float::BF16 => 2,
            Float::F8E4M3 | Float::F8E5M2 | Float::F8E4M3Fnuz | Float::F8E5M2Fnuz => 1,
        }
    }

    /// The name as the kernels spell it: `cast_{from}_{to}` in the module `convert_{from}`.
    pub fn name(self) -> &'static str {
        match self {
            Float::F64 => "f64",
            Float::F32 => "f32",
            Float::F16 => "f16",
            Float::BF16 => "bf16",
            Float::F8E4M3 => "f8_e4m3",
            Float::F8E5M2 => "f8_e5m2",
            Float::F8E4M3Fnuz => "f8_e4m3fnuz",
            Float::F8E5M2Fnuz => "f8_e5m2fnuz",
        }
    }

    /// Whether one can convert to it: F32, F16 and BF16.
    pub fn is_target(self) -> bool {
        matches!(self, Float::F32 | Float::F16 | Float::BF16)
    }

    /// [`Float::bytes`] as a length of memory.
    fn width(self) -> usize {
        match self.bytes() {
            8 => 8,
            4 => 4,
            2 => 2,
            _ => 1,
        }
    }
}

/// Scales of a 2-D tensor (or one seen as such), one for each block of `block_rows` x `block_columns` elements, row-major;
/// blocks at the right and lower edge may be ragged. One scale for all: a block as large as the tensor.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    /// The scales: for each row of blocks `ceil(columns / block_columns)`.
    pub values: &'a [f32],
    /// Index, in the whole tensor, of the first element that is converted.
    pub first: u64,
    /// Columns of the whole tensor.
    pub columns: u64,
    /// Rows of a block.
    pub block_rows: u64,
    /// Columns of a block.
    pub block_columns: u64,
}

/// Why a conversion was not done. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// There is no such conversion.
    #[error("no conversion from {} to {}{}", from.dtype(), to.dtype(), if *scaled { " with scales" } else { "" })]
    Unsupported {
        /// The format of the source.
        from: Float,
        /// The format asked for.
        to: Float,
        /// Whether there were scales.
        scaled: bool,
    },
    /// The two slices do not hold the same number of elements.
    #[error("{source_bytes} bytes of {source_element} each do not fill {target_bytes} bytes of {target_element} each")]
    Lengths {
        /// Bytes of the source.
        source_bytes: usize,
        /// Bytes of an element of the source.
        source_element: usize,
        /// Bytes of the target.
        target_bytes: usize,
        /// Bytes of an element of the target.
        target_element: usize,
    },
    /// The scales do not cover the elements, or their blocks are empty.
    #[error("the elements need {needed} block scales, and there are {given}")]
    Scales {
        /// Scales that the elements need; 0 where blocks without rows or columns make that unknowable.
        needed: u64,
        /// Scales that there are.
        given: usize,
    },
}

/// Converts `source` (packed elements of `from`) into `target` (packed elements of `to`) and returns how many elements that
/// were finite (and whose scale was) became infinite. Equal formats without scales are a copy.
pub fn convert(
    source: &[u8],
    from: Float,
    target: &mut [u8],
    to: Float,
    scales: Option<Scales<'_>>,
) -> Result<u64, ConvertError> {
    let same = from == to && scales.is_none();
    // No checkpoint scales F64, and a product in F32 would round twice.
    if !same && (!to.is_target() || (from == Float::F64 && scales.is_some())) {
        return Err(ConvertError::Unsupported { from, to, scaled: scales.is_some() });
    }
    let elements = count(source, from.width(), target, to.width())?;
    if let Some(scales) = &scales {
        scales.check(elements as u64)?;
    }
    if same {
        target.copy_from_slice(source);
        return Ok(0);
    }
    Ok(by_chunks(source, from, target, to, scales, Vectors::widest()))
}

/// Decodes a tensor of scales (F32, F16, BF16, F64, F8_E8M0) to F32. `None` for another type or a broken length.
pub fn decode_f32(source: &[u8], dtype: &Dtype) -> Option<Vec<f32>> {
    if *dtype == Dtype::F8_E8M0 {
        return Some(source.iter().map(|&bits| elements::e8m0(bits)).collect());
    }
    let from = Float::of(dtype)?;
    if from.width() == 1 || !source.len().is_multiple_of(from.width()) {
        return None;
    }
    let mut values = vec![0.0f32; source.len() / from.width()];
    by_chunks(source, from, bytemuck::cast_slice_mut(&mut values), Float::F32, None, Vectors::widest());
    Some(values)
}

/// The number of elements, if it is the same on both sides.
fn count(source: &[u8], source_element: usize, target: &[u8], target_element: usize) -> Result<usize, ConvertError> {
    let elements = source.len() / source_element;
    let fits = source.len() == elements * source_element
        && target.len().is_multiple_of(target_element)
        && target.len() / target_element == elements;
    let (source_bytes, target_bytes) = (source.len(), target.len());
    fits.then_some(elements).ok_or(ConvertError::Lengths { source_bytes, source_element, target_bytes, target_element })
}

/// Converts a chunk at a time, each with its scales. Returns how many finite elements became infinite.
fn by_chunks(
    source: &[u8],
    from: Float,
    target: &mut [u8],
    to: Float,
    scales: Option<Scales<'_>>,
    vectors: Vectors,
) -> u64 {
    let (mut factors, mut overflowed) = ([0.0; CHUNK], 0);
    let chunks = source.chunks(CHUNK * from.width()).zip(target.chunks_mut(CHUNK * to.width()));
    for (index, (source, target)) in (0..).zip(chunks) {
        let factors = &mut factors[..source.len() / from.width()];
        if let Some(scales) = &scales {
            scales.fill(scales.first.saturating_add(index * CHUNK as u64), factors);
        }
        let factors = scales.is_some().then_some(&*factors);
        overflowed += u64::from(Job { source, factors, target }.run(from, to, vectors));
    }
    overflowed
}

impl Scales<'_> {
    /// Whether there is a scale for each of `elements` elements.
    fn check(&self, elements: u64) -> Result<(), ConvertError> {
        let given = self.values.len();
        if self.columns == 0 || self.block_rows == 0 || self.block_columns == 0 {
            return Err(ConvertError::Scales { needed: 0, given });
        }
        let Some(last) = elements.checked_sub(1) else { return Ok(()) };
        let last = self.first.saturating_add(last);
        let block_rows = last / self.columns / self.block_rows + 1;
        let needed = block_rows.saturating_mul(self.columns.div_ceil(self.block_columns));
        if needed > given as u64 { Err(ConvertError::Scales { needed, given }) } else { Ok(()) }
    }

    /// The scales of the elements from `first` on, one for each place. [`Scales::check`] has seen to it that every scale is there.
    fn fill(&self, first: u64, mut factors: &mut [f32]) {
        let across = self.columns.div_ceil(self.block_columns);
        let (mut row, mut column) = (first / self.columns, first % self.columns);
        while !factors.is_empty() {
            let (of_row, rest) = factors.split_at_mut(within(self.columns - column, factors.len()));
            let index = row / self.block_rows * across + column / self.block_columns;
            let scales = usize::try_from(index).ok().and_then(|index| self.values.get(index..)).unwrap_or_default();
            self.spread(scales, column, of_row);
            (factors, row, column) = (rest, row + 1, 0);
        }
    }

    /// Spreads the scales of a row of blocks over a part of one row of elements that begins at `column`.
    fn spread(&self, scales: &[f32], column: u64, of_row: &mut [f32]) {
        if self.block_columns == 1 {
            return of_row.iter_mut().zip(scales).for_each(|(factor, scale)| *factor = *scale);
        }
        // The first block may have begun before.
        let left = within(self.block_columns - column % self.block_columns, of_row.len());
        let (begun, whole) = of_row.split_at_mut(left);
        let blocks = whole.chunks_mut(within(self.block_columns, CHUNK));
        for (block, scale) in std::iter::once(begun).chain(blocks).zip(scales) {
            block.fill(*scale);
        }
    }
}

/// `count`, at most `len`.
fn within(count: u64, len: usize) -> usize {
    usize::try_from(count).map_or(len, |count| count.min(len))
}
