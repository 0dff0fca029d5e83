//! The float formats that conversion knows, and why one is not done. It converts nothing.

use serde::Serialize;

use crate::dtype::Dtype;

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
    pub(super) fn becomes(self, to: Float) -> usize {
        if self == Float::E2M1x2 { to.width() * 2 } else { to.width() }
    }

    /// [`Float::bytes`] as a length of memory.
    pub(super) fn width(self) -> usize {
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
