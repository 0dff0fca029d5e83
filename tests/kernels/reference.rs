//! What a conversion must give, by arithmetic that shares nothing with the kernels or with `vramp::convert`: values are f64,
//! rounding is a search for the neighbours and a comparison with their middle.

use vramp::Float;

#[derive(Clone, Copy)]
struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    bias: i32,
    special: Special,
}

#[derive(Clone, Copy, PartialEq)]
enum Special {
    /// The highest exponent means infinities and NaNs.
    Ieee,
    /// All ones are NaN.
    Top,
    /// Minus zero is NaN.
    NegativeZero,
}

fn format(float: Float) -> Format {
    let (exponent_bits, mantissa_bits, bias, special) = match float {
        Float::F64 => (11, 52, 1023, Special::Ieee),
        Float::F32 => (8, 23, 127, Special::Ieee),
        Float::F16 => (5, 10, 15, Special::Ieee),
        Float::BF16 => (8, 7, 127, Special::Ieee),
        Float::F8E4M3 => (4, 3, 7, Special::Top),
        Float::F8E5M2 => (5, 2, 15, Special::Ieee),
        Float::F8E4M3Fnuz => (4, 3, 8, Special::NegativeZero),
        Float::F8E5M2Fnuz => (5, 2, 16, Special::NegativeZero),
        Float::E2M1x2 => panic!("two numbers"),
    };
    Format { exponent_bits, mantissa_bits, bias, special }
}

#[derive(Clone, Copy)]
enum Number {
    /// The payload's highest bit is bit 63.
    Nan {
        negative: bool,
        payload: u64,
    },
    Value(f64),
}

impl Format {
    fn sign_bit(self) -> u64 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    fn infinity(self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.mantissa_bits
    }

    fn number(self, bits: u64) -> Number {
        let (negative, magnitude) = (bits & self.sign_bit() != 0, bits & (self.sign_bit() - 1));
        let mantissa = magnitude & ((1 << self.mantissa_bits) - 1);
        match self.special {
            Special::Ieee if magnitude > self.infinity() => {
                return Number::Nan { negative, payload: mantissa << (64 - self.mantissa_bits) };
            }
            Special::Ieee if magnitude == self.infinity() => {
                return Number::Value(if negative { f64::NEG_INFINITY } else { f64::INFINITY });
            }
            Special::Top if magnitude == self.sign_bit() - 1 => return Number::Nan { negative, payload: 0 },
            Special::NegativeZero if bits == self.sign_bit() => return Number::Nan { negative: false, payload: 0 },
            _ => {}
        }
        let value = self.magnitude(magnitude);
        Number::Value(if negative { -value } else { value })
    }

    /// The value of a number without sign, infinity read as the number that would come after the largest.
    fn magnitude(self, magnitude: u64) -> f64 {
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let mantissa = (magnitude & ((1 << self.mantissa_bits) - 1)) as f64;
        let unit = (exponent.max(1) - self.bias - self.mantissa_bits as i32).max(-1022 - 52);
        let implicit = if exponent > 0 { (1u64 << self.mantissa_bits) as f64 } else { 0.0 };
        // Two steps: a power of two below 2^-1022 is not within reach of `powi`.
        (mantissa + implicit) * 2f64.powi(unit / 2) * 2f64.powi(unit - unit / 2)
    }

    /// The nearest number; of two equally near ones that whose last bit is 0. Not for F64.
    fn round(self, value: f64) -> u64 {
        let sign = if value.is_sign_negative() { self.sign_bit() } else { 0 };
        if value.is_infinite() {
            return sign | self.infinity();
        }
        let (mut below, mut above) = (0, self.infinity());
        if value.abs() >= self.magnitude(above) {
            return sign | above;
        }
        while above - below > 1 {
            let between = below + (above - below) / 2;
            if self.magnitude(between) <= value.abs() { below = between } else { above = between }
        }
        let middle = (self.magnitude(below) + self.magnitude(above)) / 2.0;
        let up = value.abs() > middle || (value.abs() == middle && below % 2 == 1);
        sign | if up { above } else { below }
    }
}

/// The bits that an element must become, and whether it overflows.
pub(super) fn expected(from: Float, bits: u64, to: Float, scale: Option<f32>) -> (u64, bool) {
    let (source, target, single) = (format(from), format(to), format(Float::F32));
    let quiet = 1 << (target.mantissa_bits - 1);
    let value = match (source.number(bits), scale) {
        (Number::Nan { .. }, Some(_)) => f64::NAN,
        (Number::Nan { negative, payload }, None) => {
            let sign = if negative { target.sign_bit() } else { 0 };
            return (sign | target.infinity() | quiet | payload >> (64 - target.mantissa_bits), false);
        }
        (Number::Value(value), None) => value,
        // 24 bits times 24 bits: exact in f64.
        (Number::Value(value), Some(scale)) => value * f64::from(scale),
    };
    if value.is_nan() {
        return (target.infinity() | quiet, false);
    }
    let rounded = if scale.is_some() {
        match single.number(single.round(value)) {
            Number::Value(product) => target.round(product),
            Number::Nan { .. } => panic!("no NaN was rounded"),
        }
    } else {
        target.round(value)
    };
    let finite =
        matches!(source.number(bits), Number::Value(value) if value.is_finite()) && scale.is_none_or(f32::is_finite);
    (rounded, finite && rounded & (target.sign_bit() - 1) == target.infinity())
}

/// [`expected`] of many elements, as bytes, with the number of overflows. `scale` gives an element's scale by its index.
pub(super) fn expected_all(
    from: Float,
    source: &[u8],
    to: Float,
    scale: impl Fn(usize) -> Option<f32>,
) -> (Vec<u8>, u64) {
    let (mut target, mut overflowed) = (Vec::new(), 0);
    for (index, element) in source.chunks_exact(from.bytes() as usize).enumerate() {
        let (bits, overflows) = expected(from, bits(element), to, scale(index));
        target.extend_from_slice(&bits.to_le_bytes()[..to.bytes() as usize]);
        overflowed += u64::from(overflows);
    }
    (target, overflowed)
}

/// The bits of an element.
pub(super) fn bits(element: &[u8]) -> u64 {
    element.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

/// The value of an element; a NaN for every NaN.
pub(crate) fn value(from: Float, bits: u64) -> f64 {
    match format(from).number(bits) {
        Number::Value(value) => value,
        Number::Nan { .. } => f64::NAN,
    }
}

/// A 4-bit float.
pub(crate) fn e2m1(bits: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(bits & 7)];
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// The product, in F64, rounded to `to` once, and whether a finite one became infinite.
pub(crate) fn product(value: f64, scale: f64, to: Float) -> (u64, bool) {
    let (target, product) = (format(to), value * scale);
    if product.is_nan() {
        return (target.infinity() | 1 << (target.mantissa_bits - 1), false);
    }
    let rounded = target.round(product);
    (rounded, value.is_finite() && scale.is_finite() && rounded & (target.sign_bit() - 1) == target.infinity())
}
