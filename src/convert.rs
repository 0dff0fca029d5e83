//! Conversion between float formats on the CPU, with dequantisation by block scales, and transposition: what `--dtype` does
//! where no GPU does it, and the oracle of the kernels (`kernels/convert.cu`, bit for bit).
//!
//! Rounding is to nearest, ties to even, once; subnormals are exact on both sides; a NaN stays a quiet NaN with its sign and
//! top payload bits. Only where a scale is involved a NaN is [`f32::NAN`] without sign or payload, because processors
//! disagree there. A product with a scale in single precision is rounded to that and then to the target; one with a scale that
//! is wider ([`Table::Wide`], [`Table::Coded`]) is computed in double precision and rounded from there once. Nothing here allocates per element, starts threads or knows a file; slices of any alignment are taken.

mod chunks;
mod elements;
mod float;
mod loops;
mod scales;
#[cfg(test)]
mod tests;
mod transpose;

pub use float::{ConvertError, Float};
pub use scales::{Meaning, Scales, Table, Values};
pub use transpose::transpose;

use chunks::by_chunks;
use loops::Vectors;

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
