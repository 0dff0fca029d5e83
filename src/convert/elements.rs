//! Slices of elements to F32 and back, in loops that the compiler can vectorise. Knows no scales and counts nothing.

use half::f16;
use half::slice::HalfFloatSliceExt as _;

use super::{CHUNK, Float};

/// The values of packed elements, exactly. F64 is the exception: F32 cannot hold it, so it is rounded, to nearest if F32 is
/// what it is `to` become, else to odd, which leaves the one rounding that counts to [`encode`].
pub(super) fn decode(source: &[u8], from: Float, to: Float, values: &mut [f32]) {
    match from {
        Float::F64 if to == Float::F32 => each(source, values, |bytes| nearest(f64::from_le_bytes(bytes))),
        Float::F64 => each(source, values, |bytes| to_odd(f64::from_le_bytes(bytes))),
        Float::F32 => each(source, values, f32::from_le_bytes),
        Float::BF16 => each(source, values, |bytes| widen_bf16(u16::from_le_bytes(bytes))),
        Float::F16 => widen_f16(source, values),
        Float::F8E4M3 => each(source, values, |[bits]: [u8; 1]| E4M3[usize::from(bits)]),
        Float::F8E5M2 => each(source, values, |[bits]: [u8; 1]| E5M2[usize::from(bits)]),
        Float::F8E4M3Fnuz => each(source, values, |[bits]: [u8; 1]| E4M3FNUZ[usize::from(bits)]),
        Float::F8E5M2Fnuz => each(source, values, |[bits]: [u8; 1]| E5M2FNUZ[usize::from(bits)]),
    }
}

fn each<const N: usize>(source: &[u8], values: &mut [f32], one: impl Fn([u8; N]) -> f32) {
    for (bytes, value) in source.as_chunks::<N>().0.iter().zip(values) {
        *value = one(*bytes);
    }
}

/// Rounds values, at most [`CHUNK`] of them, to the nearest elements of a target format.
pub(super) fn encode(values: &[f32], to: Float, target: &mut [u8]) {
    match to {
        Float::F16 => {
            let mut rounded = [f16::ZERO; CHUNK];
            let rounded = &mut rounded[..values.len().min(CHUNK)];
            rounded.convert_from_f32_slice(values);
            target.copy_from_slice(bytemuck::cast_slice(rounded));
        }
        Float::BF16 => {
            for (value, bytes) in values.iter().zip(target.as_chunks_mut::<2>().0) {
                *bytes = narrow_bf16(value.to_bits()).to_le_bytes();
            }
        }
        _ => {
            for (value, bytes) in values.iter().zip(target.as_chunks_mut::<4>().0) {
                *bytes = value.to_le_bytes();
            }
        }
    }
}

/// BF16 to F32 in one pass, without a place in between; `false`, with nothing done, for every other pair. Only pairs that cannot
/// overflow may be here.
pub(super) fn direct(source: &[u8], from: Float, target: &mut [u8], to: Float) -> bool {
    if (from, to) != (Float::BF16, Float::F32) {
        return false;
    }
    for (source, target) in source.as_chunks::<2>().0.iter().zip(target.as_chunks_mut::<4>().0) {
        *target = widen_bf16(u16::from_le_bytes(*source)).to_le_bytes();
    }
    true
}

/// One-byte elements by a table of all 256 results. None of these formats overflows in any target.
pub(super) fn by_table(source: &[u8], from: Float, target: &mut [u8], to: Float) {
    let (mut bits, mut values, mut table) = ([0; 256], [0.0; 256], [0; 256 * 4]);
    for (value, bits) in (0..=255).zip(&mut bits) {
        *bits = value;
    }
    decode(&bits, from, to, &mut values);
    let table = &mut table[..256 * to.width()];
    encode(&values, to, table);
    if to == Float::F32 { look_up::<4>(source, table, target) } else { look_up::<2>(source, table, target) }
}

fn look_up<const N: usize>(source: &[u8], table: &[u8], target: &mut [u8]) {
    let Some(table) = table.as_chunks::<N>().0.first_chunk::<256>() else { return };
    for (bits, bytes) in source.iter().zip(target.as_chunks_mut::<N>().0) {
        *bytes = table[usize::from(*bits)];
    }
}

/// Multiplies in F32. A NaN, met or made, is the one without sign and payload.
pub(super) fn multiply(values: &mut [f32], scale: f32) {
    for value in values {
        let product = *value * scale;
        *value = if product.is_nan() { f32::NAN } else { product };
    }
}

/// 2^(`bits` - 127); 0xff is NaN.
pub(super) fn e8m0(bits: u8) -> f32 {
    match bits {
        0xff => f32::NAN,
        0 => f32::from_bits(0x40_0000),
        _ => f32::from_bits(u32::from(bits) << 23),
    }
}

/// Whether any element of a target format is infinite or NaN.
pub(super) fn any_not_finite(target: &[u8], to: Float) -> bool {
    // Added to a magnitude, the difference of 2^15 (2^31) and infinity carries into the sign bit from infinity on. Collected
    // without a branch, which the compiler vectorises.
    match to {
        Float::F16 | Float::BF16 => {
            let carry = if to == Float::F16 { 0x8000 - 0x7c00 } else { 0x8000 - 0x7f80 };
            let elements = target.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
            elements.fold(0, |seen, bits| seen | ((bits & 0x7fff) + carry)) & 0x8000 != 0
        }
        _ => {
            let elements = target.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
            elements.fold(0, |seen, bits| seen | ((bits & 0x7fff_ffff) + 0x80_0000)) & 0x8000_0000 != 0
        }
    }
}

/// Whether one element of a target format is infinite.
pub(super) fn is_infinite(element: &[u8], to: Float) -> bool {
    let mut value = [0.0];
    decode(element, to, to, &mut value);
    value[0].is_infinite()
}

/// Whether one element of any format is finite.
pub(super) fn is_finite(element: &[u8], from: Float) -> bool {
    if from == Float::F64 {
        return element.as_chunks::<8>().0.iter().all(|bytes| f64::from_le_bytes(*bytes).is_finite());
    }
    let mut value = [f32::NAN];
    decode(element, from, Float::F32, &mut value);
    value[0].is_finite()
}

fn widen_bf16(bits: u16) -> f32 {
    let quiet = if bits & 0x7fff > 0x7f80 { 0x40 } else { 0 };
    f32::from_bits(u32::from(bits | quiet) << 16)
}

/// Adding half of the last place, less one if the result would be even, rounds; a carry into the exponent is right.
#[allow(clippy::cast_possible_truncation)] // the shift has left 16 bits
fn narrow_bf16(bits: u32) -> i16 {
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    let kept = if is_nan { bits | 0x40_0000 } else { rounded };
    // With the sign, since that is how processors pack vectors.
    (kept.cast_signed() >> 16) as i16
}

/// `half` knows the processor's instructions for F16, but wants aligned elements.
fn widen_f16(source: &[u8], values: &mut [f32]) {
    let mut aligned = [f16::ZERO; CHUNK];
    for (source, values) in source.chunks(CHUNK * 2).zip(values.chunks_mut(CHUNK)) {
        let aligned = &mut aligned[..values.len()];
        for (element, bytes) in aligned.iter_mut().zip(source.as_chunks::<2>().0) {
            *element = f16::from_bits(u16::from_le_bytes(*bytes));
        }
        aligned.convert_to_f32_slice(values);
    }
}

/// The sign, the quiet bit and the top of the payload of a NaN; what `as` gives for one is not promised.
#[allow(clippy::cast_possible_truncation)] // to the bits that are kept
fn narrow_nan(value: f64) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits >> 32) as u32 & 0x8000_0000 | 0x7fc0_0000 | (bits >> 29) as u32 & 0x003f_ffff)
}

#[allow(clippy::cast_possible_truncation)] // rounding is the point
fn nearest(value: f64) -> f32 {
    if value.is_nan() { narrow_nan(value) } else { value as f32 }
}

/// `value` cut to F32, with the last bit set if anything was lost. That bit lies below what F16 and BF16 hold and below half of
/// their last place, so rounding the result is rounding `value`.
fn to_odd(value: f64) -> f32 {
    let rounded = nearest(value);
    let back = f64::from(rounded);
    if back == value || value.is_nan() {
        return rounded;
    }
    let away = u32::from(back.abs() > value.abs());
    f32::from_bits((rounded.to_bits() - away) | 1)
}

static E4M3: [f32; 256] = table(3, 7, Special::TopIsNan);
static E5M2: [f32; 256] = table(2, 15, Special::Ieee);
static E4M3FNUZ: [f32; 256] = table(3, 8, Special::NegativeZeroIsNan);
static E5M2FNUZ: [f32; 256] = table(2, 16, Special::NegativeZeroIsNan);

/// What an 8-bit format uses for values that are no numbers.
#[derive(Clone, Copy)]
enum Special {
    Ieee,
    TopIsNan,
    NegativeZeroIsNan,
}

const fn table(mantissa_bits: u32, bias: u32, special: Special) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        values[bits as usize] = f32::from_bits(decode_f8(bits, mantissa_bits, bias, special));
        bits += 1;
    }
    values
}

const fn decode_f8(bits: u32, mantissa_bits: u32, bias: u32, special: Special) -> u32 {
    let (sign, magnitude) = (bits >> 7 << 31, bits & 0x7f);
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let top = 0x7f >> mantissa_bits;
    match special {
        Special::NegativeZeroIsNan if bits == 0x80 => return 0x7fc0_0000,
        Special::TopIsNan if magnitude == 0x7f => return sign | 0x7fc0_0000,
        Special::Ieee if exponent == top && mantissa == 0 => return sign | 0x7f80_0000,
        Special::Ieee if exponent == top => return sign | 0x7fc0_0000 | mantissa << (23 - mantissa_bits),
        _ => {}
    }
    if magnitude == 0 {
        return sign;
    }
    // A subnormal's mantissa is shifted up until its first bit is the implicit one.
    let up = if exponent == 0 { mantissa_bits + 1 - (u32::BITS - mantissa.leading_zeros()) } else { 0 };
    let exponent = if exponent == 0 { 1 } else { exponent };
    let fraction = (mantissa << up) & ((1 << mantissa_bits) - 1);
    sign | (exponent + 127 - bias - up) << 23 | fraction << (23 - mantissa_bits)
}
