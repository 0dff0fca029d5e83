//! STUB until the kernels branch is merged.
#![allow(missing_docs)]
use crate::dtype::Dtype;
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Float {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
}
impl Float {
    pub fn of(dtype: &Dtype) -> Option<Float> {
        Some(match dtype {
            Dtype::F64 => Float::F64,
            Dtype::F32 => Float::F32,
            Dtype::F16 => Float::F16,
            Dtype::BF16 => Float::BF16,
            Dtype::F8_E4M3 => Float::F8E4M3,
            Dtype::F8_E5M2 => Float::F8E5M2,
            Dtype::F8_E4M3FNUZ => Float::F8E4M3Fnuz,
            Dtype::F8_E5M2FNUZ => Float::F8E5M2Fnuz,
            _ => return None,
        })
    }
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
    pub fn bytes(self) -> u64 {
        self.dtype().bits().unwrap_or(8) / 8
    }
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
    pub fn is_target(self) -> bool {
        matches!(self, Float::F32 | Float::F16 | Float::BF16)
    }
}
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    pub values: &'a [f32],
    pub first: u64,
    pub columns: u64,
    pub block_rows: u64,
    pub block_columns: u64,
}
#[derive(Debug)]
pub struct ConvertError;
pub fn convert(
    _source: &[u8],
    _from: Float,
    _target: &mut [u8],
    _to: Float,
    _scales: Option<Scales<'_>>,
) -> Result<u64, ConvertError> {
    Err(ConvertError)
}
pub fn decode_f32(_source: &[u8], _dtype: &Dtype) -> Option<Vec<f32>> {
    None
}
