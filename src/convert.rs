//! Conversion between float formats on the CPU, with dequantisation by block scales, and transposition: what `--dtype` does
//! where no GPU does it, and the oracle of the kernels (`kernels/convert.cu`, bit for bit).
//!
//! Rounding is to nearest, ties to even, once; subnormals are exact on both sides; a NaN stays a quiet NaN with its sign and
//! top payload bits. Only where a scale is involved a NaN is [`f32::NAN`] without sign or payload, because processors
//! disagree there. A product with a scale in single precision is rounded to that and then to the target; one with a scale that
//! is wider ([`Table::Wide`], [`Table::Coded`]) is computed in double precision and rounded from there once. Nothing here allocates per element, starts threads or knows a file; slices of any alignment are taken.

use serde::Serialize;

use crate::dtype::Dtype;

mod elements;
mod loops;
mod scales;
#[cfg(test)]
mod tests;
mod transpose;

use loops::{Job, Vectors};
pub use scales::{Meaning, Scales, Table, Values};
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
    /// Two numbers in a byte, the first in the lower half: a sign, 2 exponent bits and 1 mantissa bit, bias 1 (OCP FP4). An
    /// element is the byte with its two numbers. No element type says it: the tensors beside a weight do.
    E2M1x2,
}

impl Float {
    /// Every format that an element type names.
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
    pub fn of(dtype: Dtype) -> Option<Float> {
        Float::ALL.into_iter().find(|float| float.dtype() == dtype)
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
            Float::E2M1x2 => Dtype::F4,
        }
    }

    /// Numbers in one element.
    pub fn numbers(self) -> u64 {
        if self == Float::E2M1x2 { 2 } else { 1 }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Float::F64 => 8,
            Float::F32 => 4,
            Float::F16 | Float::BF16 => 2,
            Float::F8E4M3 | Float::F8E5M2 | Float::F8E4M3Fnuz | Float::F8E5M2Fnuz | Float::E2M1x2 => 1,
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
            Float::E2M1x2 => "e2m1x2",
        }
    }

    /// Whether one can convert to it: F32, F16 and BF16.
    pub fn is_target(self) -> bool {
        matches!(self, Float::F32 | Float::F16 | Float::BF16)
    }

    /// Bytes of an element of `to` for each number of one of this.
    fn becomes(self, to: Float) -> usize {
        if self == Float::E2M1x2 { to.width() * 2 } else { to.width() }
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
    let elements = count(source, from.width(), target, from.becomes(to))?;
    if let Some(scales) = &scales
        && let Some(needed) = scales.missing(elements as u64)
    {
        return Err(ConvertError::Scales { needed, given: scales.values.len() });
    }
    if same {
        target.copy_from_slice(source);
        return Ok(0);
    }
    Ok(by_chunks(source, from, target, to, scales, Vectors::widest()))
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
    if from == Float::E2M1x2 {
        return by_pairs(source, target, to, scales, vectors);
    }
    let (mut room, mut overflowed) = (scales::Room::new(), 0);
    let chunks = source.chunks(CHUNK * from.width()).zip(target.chunks_mut(CHUNK * to.width()));
    for (index, (source, target)) in (0..).zip(chunks) {
        let factors = room.of(scales.as_ref(), index * CHUNK as u64, source.len() / from.width());
        overflowed += u64::from(Job { source, factors, target }.run(from, to, vectors));
    }
    overflowed
}

/// The same for two numbers in a byte: each is an E4M3 number too, and converted as that.
fn by_pairs(source: &[u8], target: &mut [u8], to: Float, scales: Option<Scales<'_>>, vectors: Vectors) -> u64 {
    let scales = scales.map(|scales| scales.of_numbers(2));
    let (mut room, mut numbers, mut overflowed) = (scales::Room::new(), [[0u8; 2]; CHUNK / 2], 0);
    let chunks = source.chunks(CHUNK / 2).zip(target.chunks_mut(CHUNK * to.width()));
    for (index, (bytes, target)) in (0..).zip(chunks) {
        let numbers = &mut numbers[..bytes.len()];
        numbers.iter_mut().zip(bytes).for_each(|(pair, byte)| *pair = elements::e2m1_as_e4m3(*byte));
        let source = numbers.as_flattened();
        let factors = room.of(scales.as_ref(), index * CHUNK as u64, source.len());
        overflowed += u64::from(Job { source, factors, target }.run(Float::F8E4M3, to, vectors));
    }
    overflowed
}
