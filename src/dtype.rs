//! Element types: their names in each format, their width in bits and the alignment a typed view of them needs.
//!
//! [`Dtype`] is a type that vramp knows. A checkpoint may name another one ([`StoredDtype::Unknown`]): such a tensor can be
//! listed, and is never guessed or loaded. This file converts no values; that is `convert`.

use std::fmt;
use std::sync::Arc;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal bits;)*) => {
        /// The element type of a tensor, named as safetensors names it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types)]
        pub enum Dtype {
            $($(#[$doc])* $variant,)*
        }

        impl Dtype {
            /// Every known element type.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant,)*];

            /// The type that safetensors calls `name` (case matters), where there is one.
            pub fn from_safetensors(name: &str) -> Option<Dtype> {
                match name {
                    $($name => Some(Dtype::$variant),)*
                    _ => None,
                }
            }

            /// The name in safetensors: `F32`, `BF16`, `F8_E4M3`, ….
            pub fn name(self) -> &'static str {
                match self {
                    $(Dtype::$variant => $name,)*
                }
            }

            /// Bits of one element.
            pub fn bits(self) -> u64 {
                match self {
                    $(Dtype::$variant => $bits,)*
                }
            }
        }
    };
}

dtypes! {
    /// Boolean, one byte, 0 or 1.
    Bool = "BOOL", 8 bits;
    /// 4-bit float, two elements a byte (MX FP4, E2M1).
    F4 = "F4", 4 bits;
    /// 6-bit float, 2 exponent and 3 mantissa bits, four elements in three bytes.
    F6_E2M3 = "F6_E2M3", 6 bits;
    /// 6-bit float, 3 exponent and 2 mantissa bits, four elements in three bytes.
    F6_E3M2 = "F6_E3M2", 6 bits;
    /// Unsigned 8-bit integer.
    U8 = "U8", 8 bits;
    /// Signed 8-bit integer.
    I8 = "I8", 8 bits;
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    F8_E5M2 = "F8_E5M2", 8 bits;
    /// 8-bit float, 4 exponent and 3 mantissa bits (no infinities).
    F8_E4M3 = "F8_E4M3", 8 bits;
    /// 8-bit float, 4 exponent and 3 mantissa bits, no negative zero.
    F8_E4M3FNUZ = "F8_E4M3FNUZ", 8 bits;
    /// 8-bit float, 5 exponent and 2 mantissa bits, no negative zero.
    F8_E5M2FNUZ = "F8_E5M2FNUZ", 8 bits;
    /// 8-bit exponent only: a power-of-two block scale.
    F8_E8M0 = "F8_E8M0", 8 bits;
    /// Signed 16-bit integer.
    I16 = "I16", 16 bits;
    /// Unsigned 16-bit integer.
    U16 = "U16", 16 bits;
    /// IEEE half precision.
    F16 = "F16", 16 bits;
    /// bfloat16: the upper half of an F32.
    BF16 = "BF16", 16 bits;
    /// Signed 32-bit integer.
    I32 = "I32", 32 bits;
    /// Unsigned 32-bit integer.
    U32 = "U32", 32 bits;
    /// IEEE single precision.
    F32 = "F32", 32 bits;
    /// Complex number of two F32: real, imaginary.
    C64 = "C64", 64 bits;
    /// IEEE double precision.
    F64 = "F64", 64 bits;
    /// Signed 64-bit integer.
    I64 = "I64", 64 bits;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64 bits;
}

impl Dtype {
    /// Bytes that a tensor of `shape` takes. `None` where the product overflows 64 bits, or the bits do not fill whole bytes (an
    /// odd number of F4 elements).
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim as u64))?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// The alignment in bytes that a typed view of the elements needs. 1 for packed types.
    pub fn alignment(self) -> u64 {
        match self {
            Dtype::C64 => 4,
            _ => (self.bits() / 8).max(1),
        }
    }
}

/// The element type that a checkpoint states.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StoredDtype {
    /// One that vramp knows.
    Known(Dtype),
    /// Another one, by its name as it was found. A tensor of it is listed and never loaded.
    Unknown(Arc<str>),
}

impl StoredDtype {
    /// The type that safetensors calls `name` (case matters), or the name itself.
    pub fn from_safetensors(name: &str) -> StoredDtype {
        Dtype::from_safetensors(name).map_or_else(|| StoredDtype::Unknown(name.into()), StoredDtype::Known)
    }

    /// The type, where vramp knows it.
    pub fn known(&self) -> Option<Dtype> {
        match self {
            StoredDtype::Known(dtype) => Some(*dtype),
            StoredDtype::Unknown(_) => None,
        }
    }

    /// The name, as the checkpoint has it.
    pub fn name(&self) -> &str {
        match self {
            StoredDtype::Known(dtype) => dtype.name(),
            StoredDtype::Unknown(name) => name,
        }
    }

    /// Bits of one element; `None` for an unknown type.
    pub fn bits(&self) -> Option<u64> {
        self.known().map(Dtype::bits)
    }

    /// As [`Dtype::tensor_bytes`]; `None` for an unknown type.
    pub fn tensor_bytes(&self, shape: &[usize]) -> Option<u64> {
        self.known()?.tensor_bytes(shape)
    }

    /// As [`Dtype::alignment`]; 1 for an unknown type.
    pub fn alignment(&self) -> u64 {
        self.known().map_or(1, Dtype::alignment)
    }
}

impl From<Dtype> for StoredDtype {
    fn from(dtype: Dtype) -> StoredDtype {
        StoredDtype::Known(dtype)
    }
}

impl PartialEq<Dtype> for StoredDtype {
    fn eq(&self, other: &Dtype) -> bool {
        self.known() == Some(*other)
    }
}

impl fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl serde::Serialize for StoredDtype {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl serde::Serialize for Dtype {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The numbers of a shape as the Rust type of an index.
pub(crate) fn dims(numbers: &[u64]) -> Vec<usize> {
    numbers.iter().map(|&number| usize::try_from(number).unwrap_or(usize::MAX)).collect()
}

/// The elements along each dimension as 64-bit numbers, as byte ranges are counted.
pub(crate) fn wide(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|&dim| dim as u64).collect()
}

/// Number of elements of a shape: 1 for a scalar, 0 where a dimension is 0, `u64::MAX` where the product is larger.
pub fn element_count(shape: &[usize]) -> u64 {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |product, &dim| product.saturating_mul(dim as u64)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_safetensors(dtype.name()), Some(*dtype));
        }
        let unknown = StoredDtype::from_safetensors("f32");
        assert_eq!((unknown.known(), unknown.name(), unknown.bits(), unknown.alignment()), (None, "f32", None, 1));
    }

    #[test]
    fn sizes_count_bits_and_refuse_overflow() {
        assert_eq!(Dtype::F4.tensor_bytes(&[3, 2]), Some(3));
        assert_eq!(Dtype::F4.tensor_bytes(&[3]), None);
        assert_eq!(Dtype::F6_E2M3.tensor_bytes(&[4]), Some(3));
        assert_eq!(Dtype::BF16.tensor_bytes(&[]), Some(2));
        assert_eq!(Dtype::F32.tensor_bytes(&[0, usize::MAX]), Some(0));
        assert_eq!(Dtype::F32.tensor_bytes(&[1 << 62]), None);
        assert_eq!(Dtype::F32.tensor_bytes(&[1 << 32, 1 << 32]), None);
        assert_eq!((element_count(&[]), element_count(&[3, 0]), element_count(&[3, 5])), (1, 0, 15));
        assert_eq!((element_count(&[1 << 40, 1 << 40]), element_count(&[1 << 40, 1 << 40, 0])), (u64::MAX, 0));
    }

    #[test]
    fn every_type_of_the_reference_crate_has_the_same_name_and_width() {
        for (ours, theirs) in [
            (Dtype::Bool, safetensors::Dtype::BOOL),
            (Dtype::F4, safetensors::Dtype::F4),
            (Dtype::F6_E2M3, safetensors::Dtype::F6_E2M3),
            (Dtype::F6_E3M2, safetensors::Dtype::F6_E3M2),
            (Dtype::F8_E8M0, safetensors::Dtype::F8_E8M0),
            (Dtype::C64, safetensors::Dtype::C64),
            (Dtype::BF16, safetensors::Dtype::BF16),
        ] {
            assert_eq!(ours.name(), theirs.to_string());
            assert_eq!(ours.bits(), theirs.bitsize() as u64);
        }
    }
}
