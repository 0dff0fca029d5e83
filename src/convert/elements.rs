//! One element of each float format to F32 and back, without a branch and without a table: loops over it become vector code.
//!
//! It knows neither slices nor scales. Both ways are exact or rounded once, to nearest, ties to even; an addition of floats rounds
//! where the result is subnormal. A NaN stays a quiet NaN with its sign and the top of its payload.

/// A format of `N` bytes that can be read.
pub(super) trait Decode<const N: usize> {
    /// The value. Exact but for F64, which is rounded to nearest where that is the `last` rounding, and otherwise to odd: one bit is
    /// left that tells the rounding that counts what was lost.
    fn decode(bytes: [u8; N], last: bool) -> f32;

    /// Whether an element whose value is `value` is finite.
    #[inline(always)]
    fn is_finite(_bytes: [u8; N], value: f32) -> bool {
        value.is_finite()
    }
}

/// A format of `N` bytes that can be written. Its elements are the lower bits of a `u32` meanwhile: lanes of one width vectorise best.
pub(super) trait Encode<const N: usize> {
    /// Whether it holds every F32.
    const HOLDS_F32: bool = false;

    /// The magnitude of infinity.
    const INFINITY: u32;

    /// The nearest element.
    fn encode(value: f32) -> u32;

    /// Its bytes.
    fn bytes(element: u32) -> [u8; N];

    /// Whether it is infinite.
    #[inline(always)]
    fn is_infinite(element: u32) -> bool {
        element & (Self::INFINITY | (Self::INFINITY - 1)) == Self::INFINITY
    }
}

/// IEEE double precision.
pub(super) enum F64 {}
/// IEEE single precision.
pub(super) enum F32 {}
/// IEEE half precision.
pub(super) enum F16 {}
/// The upper half of an F32.
pub(super) enum BF16 {}
/// 4 exponent bits, bias 7; all ones are NaN.
pub(super) enum E4M3 {}
/// 5 exponent bits, bias 15: the upper half of an F16.
pub(super) enum E5M2 {}
/// 4 exponent bits, bias 8; minus zero is NaN.
pub(super) enum E4M3Fnuz {}
/// 5 exponent bits, bias 16; minus zero is NaN.
pub(super) enum E5M2Fnuz {}

const F32_INFINITY: u32 = 0x7f80_0000;
const F32_QUIET: u32 = 0x0040_0000;
const F32_MANTISSA_BITS: u32 = 23;
const F32_BIAS: u32 = 127;

impl Decode<8> for F64 {
    #[inline(always)]
    fn decode(bytes: [u8; 8], last: bool) -> f32 {
        let value = f64::from_le_bytes(bytes);
        let rounded = nearest(value);
        if last { rounded } else { to_odd(value, rounded) }
    }

    #[inline(always)]
    fn is_finite(bytes: [u8; 8], _value: f32) -> bool {
        f64::from_le_bytes(bytes).is_finite()
    }
}

impl Decode<4> for F32 {
    #[inline(always)]
    fn decode(bytes: [u8; 4], _last: bool) -> f32 {
        f32::from_le_bytes(bytes)
    }
}

impl Decode<2> for F16 {
    #[inline(always)]
    fn decode(bytes: [u8; 2], _last: bool) -> f32 {
        widen_half(u32::from(u16::from_le_bytes(bytes)))
    }
}

impl Decode<2> for BF16 {
    #[inline(always)]
    fn decode(bytes: [u8; 2], _last: bool) -> f32 {
        let bits = u32::from(u16::from_le_bytes(bytes)) << 16;
        f32::from_bits(quieted(bits))
    }
}

impl Decode<1> for E4M3 {
    #[inline(always)]
    fn decode([bits]: [u8; 1], _last: bool) -> f32 {
        let bits = u32::from(bits);
        let is_nan = bits & 0x7f == 0x7f;
        let magnitude = if is_nan { F32_INFINITY | F32_QUIET } else { widen::<3, 7>(bits & 0x7f) };
        f32::from_bits((bits & 0x80) << 24 | magnitude)
    }
}

impl Decode<1> for E5M2 {
    #[inline(always)]
    fn decode([bits]: [u8; 1], _last: bool) -> f32 {
        widen_half(u32::from(bits) << 8)
    }
}

impl Decode<1> for E4M3Fnuz {
    #[inline(always)]
    fn decode([bits]: [u8; 1], _last: bool) -> f32 {
        widen_fnuz::<3, 8>(u32::from(bits))
    }
}

impl Decode<1> for E5M2Fnuz {
    #[inline(always)]
    fn decode([bits]: [u8; 1], _last: bool) -> f32 {
        widen_fnuz::<2, 16>(u32::from(bits))
    }
}

impl Encode<4> for F32 {
    const HOLDS_F32: bool = true;
    const INFINITY: u32 = F32_INFINITY;

    #[inline(always)]
    fn encode(value: f32) -> u32 {
        value.to_bits()
    }

    #[inline(always)]
    fn bytes(element: u32) -> [u8; 4] {
        element.to_le_bytes()
    }
}

impl Encode<2> for BF16 {
    const INFINITY: u32 = 0x7f80;

    /// Adding half of the last place, less one if the result would be even, rounds; a carry into the exponent is right.
    #[inline(always)]
    fn encode(value: f32) -> u32 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        (if value.is_nan() { bits | F32_QUIET } else { rounded }) >> 16
    }

    #[inline(always)]
    fn bytes(element: u32) -> [u8; 2] {
        lower_half(element)
    }
}

impl Encode<2> for F16 {
    const INFINITY: u32 = 0x7c00;

    #[inline(always)]
    fn encode(value: f32) -> u32 {
        /// The difference of the biases, as exponents of F32 are.
        const REBIAS: u32 = (F32_BIAS - 15) << F32_MANTISSA_BITS;
        /// The smallest normal number, 2^-14.
        const NORMAL: u32 = REBIAS + (1 << F32_MANTISSA_BITS);
        let bits = value.to_bits();
        let (sign, magnitude) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
        // As for BF16; what is beyond the largest number ends at infinity, however far.
        let half_less = 0xfff + (magnitude >> 13 & 1);
        let normal = (magnitude.wrapping_add(half_less).wrapping_sub(REBIAS) >> 13).min(Self::INFINITY);
        // The last place of 0.5 is the smallest subnormal number: the addition rounds to it.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let nan = Self::INFINITY | 0x200 | magnitude >> 13 & 0x3ff;
        let finite = if magnitude < NORMAL { subnormal } else { normal };
        sign | if magnitude > F32_INFINITY { nan } else { finite }
    }

    #[inline(always)]
    fn bytes(element: u32) -> [u8; 2] {
        lower_half(element)
    }
}

/// Multiplies in F32. A NaN, met or made, is the one without sign and payload: processors disagree there.
#[inline(always)]
pub(super) fn multiply(value: f32, scale: f32) -> f32 {
    let product = value * scale;
    if product.is_nan() { f32::NAN } else { product }
}

/// Multiplies in F64, and rounds as [`Decode::decode`] does: to nearest where that is the `last` rounding, otherwise to odd. A NaN
/// is the one of [`multiply`].
#[inline(always)]
pub(super) fn multiply_wide(value: f32, scale: f64, last: bool) -> f32 {
    let product = f64::from(value) * scale;
    let rounded = nearest(product);
    let finite = if last { rounded } else { to_odd(product, rounded) };
    if product.is_nan() { f32::NAN } else { finite }
}

/// The two numbers of a byte, the one in the lower half first, as E4M3 numbers of the same value.
#[inline(always)]
pub(super) fn e2m1_as_e4m3(byte: u8) -> [u8; 2] {
    [e4m3_of(byte & 15), e4m3_of(byte >> 4)]
}

/// Exponents differ by 6 (the biases are 1 and 7) and the mantissa by two places; 0.5, the one subnormal number, is normal there.
#[inline(always)]
fn e4m3_of(bits: u8) -> u8 {
    let magnitude = bits & 7;
    let normal = (magnitude << 2) + (6 << 3);
    (bits & 8) << 4
        | match magnitude {
            0 => 0,
            1 => 6 << 3,
            _ => normal,
        }
}

/// An E4M3 number.
pub(super) fn e4m3(bits: u8) -> f32 {
    E4M3::decode([bits], true)
}

/// 2^(`bits` - 127); 0xff is NaN.
pub(super) fn e8m0(bits: u8) -> f32 {
    match bits {
        0xff => f32::NAN,
        0 => f32::from_bits(0x40_0000),
        _ => f32::from_bits(u32::from(bits) << F32_MANTISSA_BITS),
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the callers have shifted what counts down
fn lower_half(element: u32) -> [u8; 2] {
    (element as u16).to_le_bytes()
}

/// The bits of an F32, with the quiet bit set if it is NaN.
#[inline(always)]
fn quieted(bits: u32) -> u32 {
    let is_nan = bits & 0x7fff_ffff > F32_INFINITY;
    bits | if is_nan { F32_QUIET } else { 0 }
}

/// An F16, given by its bits.
#[inline(always)]
fn widen_half(bits: u32) -> f32 {
    let magnitude = bits & 0x7fff;
    let special = F32_INFINITY | (magnitude & 0x3ff) << 13;
    let finite = widen::<10, 15>(magnitude);
    let widened = if magnitude >= 0x7c00 { quieted(special) } else { finite };
    f32::from_bits((bits & 0x8000) << 16 | widened)
}

/// An FP8 number of the kind that has no infinity, no minus zero, and NaN in its place.
#[inline(always)]
fn widen_fnuz<const MANTISSA_BITS: u32, const BIAS: u32>(bits: u32) -> f32 {
    let finite = (bits & 0x80) << 24 | widen::<MANTISSA_BITS, BIAS>(bits & 0x7f);
    f32::from_bits(if bits == 0x80 { F32_INFINITY | F32_QUIET } else { finite })
}

/// The bits of an F32 of the same value as a finite, positive number of a narrower format.
#[inline(always)]
fn widen<const MANTISSA_BITS: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let shifted = magnitude << (F32_MANTISSA_BITS - MANTISSA_BITS);
    let rebias = (F32_BIAS - BIAS) << F32_MANTISSA_BITS;
    // A subnormal number with the exponent of the smallest normal one is too large by just that one.
    let smallest = rebias + (1 << F32_MANTISSA_BITS);
    let subnormal = f32::from_bits(shifted + smallest) - f32::from_bits(smallest);
    if magnitude < 1 << MANTISSA_BITS { subnormal.to_bits() } else { shifted + rebias }
}

/// To the nearest F32. A NaN keeps its sign and the top of its payload; what `as` gives for one is not promised.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // rounding is the point; of a NaN's bits those that are kept
fn nearest(value: f64) -> f32 {
    let bits = value.to_bits();
    let nan = (bits >> 32) as u32 & 0x8000_0000 | F32_INFINITY | F32_QUIET | (bits >> 29) as u32 & 0x003f_ffff;
    if value.is_nan() { f32::from_bits(nan) } else { value as f32 }
}

/// `value` cut to F32, with the last bit set if anything was lost, where `rounded` is the nearest. That bit lies below what F16 and
/// BF16 hold and below half of their last place, so rounding the result is rounding `value`.
#[inline(always)]
fn to_odd(value: f64, rounded: f32) -> f32 {
    let back = f64::from(rounded);
    let away = u32::from(back.abs() > value.abs());
    let odd = f32::from_bits(rounded.to_bits().wrapping_sub(away) | 1);
    if back == value || value.is_nan() { rounded } else { odd }
}
