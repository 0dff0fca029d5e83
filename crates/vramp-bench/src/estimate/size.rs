//! S from numbers of parameters: mixtures of element types, experts, block scales.
//!
//! Checked arithmetic; nothing here reads a file (`Checkpoint::total_bytes` knows S of one).

use serde::Serialize;

use vramp::dtype::{Dtype, StoredDtype};

/// Weights of one element type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Weights {
    /// Number of elements, of one copy.
    pub parameters: u64,
    /// Their type.
    pub dtype: StoredDtype,
    /// How many times they are there: the number of experts, 1 for what is shared.
    pub copies: u64,
}

/// Scales that are stored beside weights of 8 bits or fewer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Scales {
    /// Elements of a block, which share one scale: 128 × 128, 32, 16.
    pub block: u64,
    /// Type of a scale.
    pub dtype: Dtype,
}

/// What a model weighs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Size {
    /// S: bytes, scales included.
    pub bytes: u64,
    /// Number of weights; scales are not counted.
    pub parameters: u64,
    /// Bytes of the scales.
    pub scale_bytes: u64,
}

/// Types that weights are quantised to, which no safetensors type is: name, bits of an element, and the scales that usually lie
/// beside them, as elements that share one and its type.
pub const QUANTISED: [(&str, u64, u64, Dtype); 6] = [
    ("INT4", 4, 128, Dtype::F16),
    ("UINT4", 4, 128, Dtype::F16),
    ("NF4", 4, 64, Dtype::F32),
    ("MXFP4", 4, 32, Dtype::F8_E8M0),
    ("NVFP4", 4, 16, Dtype::F8_E4M3),
    ("MXFP8", 8, 32, Dtype::F8_E8M0),
];

/// Bits of an element, also of the types in [`QUANTISED`], which are [`StoredDtype::Unknown`] by their names there.
pub fn element_bits(dtype: &StoredDtype) -> Option<u64> {
    let named = |name: &str| QUANTISED.iter().find(|(quantised, ..)| *quantised == name).map(|(_, bits, ..)| *bits);
    dtype.bits().or_else(|| named(dtype.name()))
}

/// Bytes of `parameters` weights of one element type. `None` for an unknown type or on overflow.
pub fn size_of(parameters: u64, dtype: &StoredDtype) -> Option<u64> {
    element_bits(dtype).and_then(|bits| parameters.checked_mul(bits)).map(|bits| bits.div_ceil(8))
}

/// The sum over all parts. `None` for an unknown type, a block of no elements, or on overflow.
///
/// Blocks are counted as if tensors were whole numbers of them, so scales of ragged tensors are counted a little low.
pub fn size_of_all(parts: &[Weights], scales: Option<&Scales>) -> Option<Size> {
    let mut size = Size::default();
    for part in parts {
        let parameters = part.parameters.checked_mul(part.copies)?;
        let scale_bytes = match scales {
            Some(scales) if element_bits(&part.dtype)? <= 8 => {
                size_of(blocks(parameters, scales.block)?, &scales.dtype.into())?
            }
            _ => 0,
        };
        let bytes = size_of(parameters, &part.dtype)?.checked_add(scale_bytes)?;
        size.parameters = size.parameters.checked_add(parameters)?;
        size.scale_bytes = size.scale_bytes.checked_add(scale_bytes)?;
        size.bytes = size.bytes.checked_add(bytes)?;
    }
    Some(size)
}

fn blocks(parameters: u64, block: u64) -> Option<u64> {
    (block > 0).then(|| parameters.div_ceil(block))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(parameters: u64, dtype: impl Into<StoredDtype>, copies: u64) -> Weights {
        let dtype = dtype.into();
        Weights { parameters, dtype, copies }
    }

    #[test]
    fn packed_types_count_bits() {
        assert_eq!(size_of(3, &Dtype::F4.into()), Some(2));
        assert_eq!(size_of(u64::MAX, &Dtype::F64.into()), None);
        for (name, bytes) in [("INT4", 35), ("UINT4", 35), ("NF4", 35), ("MXFP4", 35), ("NVFP4", 35), ("MXFP8", 70)] {
            let dtype = StoredDtype::from_safetensors(name);
            assert_eq!(size_of(70_000_000_000, &dtype), Some(bytes * 1_000_000_000), "{name}");
        }
        let scales = Scales { block: 32, dtype: Dtype::F8_E8M0 };
        let size = size_of_all(&[weights(64, StoredDtype::from_safetensors("MXFP4"), 1)], Some(&scales)).unwrap();
        assert_eq!((size.bytes, size.scale_bytes), (34, 2));
    }

    #[test]
    fn experts_count_as_often_as_they_are_there() {
        let mixture = [weights(1_600, Dtype::BF16, 1), weights(5_600, Dtype::F8_E4M3, 8)];
        let size = size_of_all(&mixture, None).unwrap();
        assert_eq!(size, Size { bytes: 1_600 * 2 + 5_600 * 8, parameters: 1_600 + 5_600 * 8, scale_bytes: 0 });
    }

    #[test]
    fn scales_go_with_weights_of_eight_bits_and_fewer() {
        let parts = [weights(1 << 20, Dtype::BF16, 1), weights(1 << 20, Dtype::F8_E4M3, 2), weights(64, Dtype::F4, 1)];
        let scales = Scales { block: 32, dtype: Dtype::F32 };
        let size = size_of_all(&parts, Some(&scales)).unwrap();
        assert_eq!(size.scale_bytes, (2 << 20) / 32 * 4 + 2 * 4);
        assert_eq!(size.bytes, (2 << 20) + (2 << 20) + 32 + size.scale_bytes);
    }

    #[test]
    fn what_cannot_be_counted_is_none() {
        assert_eq!(size_of_all(&[weights(u64::MAX, Dtype::U8, 2)], None), None);
        assert_eq!(size_of_all(&[weights(1, Dtype::U8, 1)], Some(&Scales { block: 0, dtype: Dtype::F32 })), None);
        assert_eq!(size_of_all(&[weights(1, StoredDtype::from_safetensors("NEW"), 1)], None), None);
        assert_eq!(size_of_all(&[], None), Some(Size::default()));
    }
}
