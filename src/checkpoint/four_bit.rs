//! Weights of 4-bit floats, two in a byte, with a scale for each block of a row: which of them can be dequantised, and to what shape.
//!
//! | scheme | weight | scales | then |
//! |---|---|---|---|
//! | NVFP4 (ModelOpt) | `W` | `W_scale`, F8_E4M3, blocks of 16 | times `W_scale_2` |
//! | NVFP4 (compressed-tensors) | `W_packed` | `W_scale`, F8_E4M3, blocks of 16 | divided by `W_global_scale` |
//! | MXFP4 | `W`, `W_packed` | `W_scale`, E8M0, blocks of 32 | |
//! | MXFP4 (gpt-oss) | `W_blocks` `[.., blocks, 16]` | `W_scales` `[.., blocks]`, E8M0 | |
//!
//! The first number of a pair is in the lower half of its byte. What lacks a part, or has one of another shape, is never guessed: it
//! stays as stored, with a reason. Headers decide; no tensor is read.

use super::quantised::{Quantised, last_of};
use super::{Checkpoint, Selected, TensorData, TensorInfo};
use crate::device::BlockScale;
use crate::dtype::Dtype;

/// The tensors that a table of scales is made of (indices into [`Checkpoint::tensors`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct ScaleSource {
    /// The scales of blocks.
    pub tensor: usize,
    /// The scale of all of them, where there are two levels, and whether they are divided by it.
    pub global: Option<(usize, bool)>,
}

/// A weight that can be dequantised.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FourBit {
    /// What it is called.
    pub(super) scheme: &'static str,
    /// The scales.
    pub(super) source: ScaleSource,
    /// How they divide the bytes of the tensor as stored. The table is still to be set.
    pub(super) blocks: BlockScale,
    /// The shape of what was selected of it, in numbers.
    pub(super) shape: Vec<usize>,
    /// The end of its name that says that it is packed.
    pub(super) suffix: &'static str,
}

/// Bytes in a block of 32 numbers.
const MX_BYTES: usize = 16;
/// Bytes in a block of 16 numbers.
const NV_BYTES: usize = 8;

/// How the weight's scales are called, and what its name ends with.
struct Spelling {
    scale: String,
    /// The scale of all blocks, and whether it divides.
    global: Option<(String, bool)>,
    suffix: &'static str,
    /// Whether the last dimension is one block's bytes.
    in_blocks: bool,
}

impl Checkpoint {
    /// What dequantising `chosen` takes. `None`: these are no 4-bit floats; an error is the reason why they stay as they are.
    pub(super) fn four_bit(&self, chosen: &Selected, quantised: &Quantised) -> Option<Result<FourBit, String>> {
        let weight = self.tensors.get(chosen.tensor)?;
        if !matches!(weight.dtype.known(), Some(Dtype::U8 | Dtype::I8 | Dtype::F4)) {
            return None;
        }
        let find = |name: &str| self.tensors.binary_search_by(|tensor| tensor.name.as_ref().cmp(name)).ok();
        let (spelling, at) = spellings(&weight.name).find_map(|spelling| {
            let at = find(&spelling.scale)?;
            Some((spelling, at))
        })?;
        let scale = self.tensors.get(at)?;
        let is_nv = scale.dtype == Dtype::F8_E4M3;
        let is_mx = scale.dtype == Dtype::F8_E8M0 || (scale.dtype == Dtype::U8 && weight.dtype != Dtype::I8);
        // An 8-bit weight with exponents for scales is no 4-bit one; the shapes tell, and only E8M0 by type goes with I8.
        if !(is_nv && weight.dtype != Dtype::I8 || is_mx) {
            return None;
        }
        if scale.dtype == Dtype::U8
            && weight.dtype == Dtype::U8
            && spelling.suffix.is_empty()
            && !self.is_mxfp4(quantised)
        {
            return Some(Err("nothing says that the bytes beside it are exponents".to_owned()));
        }
        let shape = match in_bytes(weight, &spelling) {
            Some(shape) => shape,
            None => return Some(Err(format!("shape {:?} is not that of whole blocks", weight.shape))),
        };
        Some(self.fit(chosen, weight, (at, scale), &spelling, &shape, find))
    }

    fn is_mxfp4(&self, quantised: &Quantised) -> bool {
        ["mxfp4", "fp4", "quark"].iter().any(|word| quantised.declared.says(word))
    }

    /// Demands that all parts are there and fit.
    fn fit(
        &self,
        chosen: &Selected,
        weight: &TensorInfo,
        (at, scale): (usize, &TensorInfo),
        spelling: &Spelling,
        shape: &[usize],
        find: impl Fn(&str) -> Option<usize>,
    ) -> Result<FourBit, String> {
        if self.is_for_comfy(&weight.name) {
            return Err("its scales are laid out in tiles, for ComfyUI".to_owned());
        }
        let is_nv = scale.dtype == Dtype::F8_E4M3;
        let (scheme, block) = if is_nv { ("NVFP4", NV_BYTES) } else { ("MXFP4", MX_BYTES) };
        let columns = shape.last().copied().unwrap_or(0);
        let mut wanted = shape.to_vec();
        if let Some(last) = wanted.last_mut() {
            *last /= block;
        }
        let fits = squeezed(&scale.shape, wanted.len()) == wanted && columns.is_multiple_of(block) && columns > 0;
        if !fits {
            let (name, found) = (&scale.name, &scale.shape);
            return Err(format!(
                "its scales {name:?} have shape {found:?}, and its own {:?} wants {wanted:?}",
                weight.shape
            ));
        }
        if matches!(weight.data, TensorData::Parts(_)) {
            return Err("it is cut over several files".to_owned());
        }
        let global = spelling.global.as_ref().and_then(|(name, divides)| Some((find(name)?, *divides)));
        let global = match (is_nv, global) {
            (false, None) => None,
            (true, Some((index, divides))) => Some((self.demand_number(index)?, divides)),
            (true, None) => {
                let name = spelling.global.as_ref().map_or("", |(name, _)| last_of(name));
                return Err(format!("the scale of all its blocks, {name:?}, is not there"));
            }
            (false, Some((index, _))) => {
                let name = self.tensors.get(index).map_or("", |tensor| tensor.name.as_ref());
                return Err(format!("{name:?} beside its exponents is one scale too many"));
            }
        };
        let blocks =
            BlockScale { table: 0, first: 0, columns: columns as u64, block_rows: 1, block_columns: block as u64 };
        let shape = selected_shape(chosen, weight, spelling)?;
        Ok(FourBit { scheme, source: ScaleSource { tensor: at, global }, blocks, shape, suffix: spelling.suffix })
    }

    /// Demands one F32 number.
    fn demand_number(&self, index: usize) -> Result<usize, String> {
        let fits = |tensor: &&TensorInfo| tensor.dtype == Dtype::F32 && tensor.shape.iter().all(|&dim| dim == 1);
        match self.tensors.get(index) {
            Some(tensor) if !fits(&tensor) => {
                let (name, dtype, shape) = (&tensor.name, &tensor.dtype, &tensor.shape);
                Err(format!("the scale of all its blocks, {name:?}, is {dtype} {shape:?} instead of one F32 number"))
            }
            _ => Ok(index),
        }
    }
}

/// The ways in which the scales of a weight are called.
fn spellings(name: &str) -> impl Iterator<Item = Spelling> {
    let packed = name.strip_suffix("_packed").map(|stem| Spelling {
        scale: format!("{stem}_scale"),
        global: Some((format!("{stem}_global_scale"), true)),
        suffix: "_packed",
        in_blocks: false,
    });
    let blocks = ['_', '.'].into_iter().filter_map(move |dot| {
        let stem = name.strip_suffix("blocks")?.strip_suffix(dot)?;
        Some(Spelling { scale: format!("{stem}{dot}scales"), global: None, suffix: "blocks", in_blocks: true })
    });
    let plain = ["_scale", "_weight_scale"].map(|end| Spelling {
        scale: format!("{name}{end}"),
        global: Some((format!("{name}{end}_2"), false)),
        suffix: "",
        in_blocks: false,
    });
    // DeepSeek's experts.
    let beside = name.strip_suffix("weight").map(|stem| Spelling {
        scale: format!("{stem}scale"),
        global: None,
        suffix: "",
        in_blocks: false,
    });
    packed.into_iter().chain(blocks).chain(plain).chain(beside)
}

/// The shape of a weight with its last dimension in bytes of a whole row.
fn in_bytes(weight: &TensorInfo, spelling: &Spelling) -> Option<Vec<usize>> {
    let (&last, before) = weight.shape.split_last()?;
    if !spelling.in_blocks {
        let bytes = if weight.dtype == Dtype::F4 { last / 2 } else { last };
        let whole = weight.dtype != Dtype::F4 || last.is_multiple_of(2);
        return (whole && !before.is_empty()).then(|| [before, &[bytes]].concat());
    }
    let (&blocks, before) = before.split_last()?;
    let bytes = blocks.checked_mul(last).filter(|_| last == MX_BYTES && !before.is_empty())?;
    Some([before, &[bytes]].concat())
}

/// The shape of the selected part, in numbers.
fn selected_shape(chosen: &Selected, weight: &TensorInfo, spelling: &Spelling) -> Result<Vec<usize>, String> {
    let dims = weight.shape.len();
    let cut = |dim: usize| chosen.slice.as_ref().is_some_and(|slice| slice.dim == dim);
    let shape: Vec<usize> = match &chosen.slice {
        Some(slice) => weight
            .shape
            .iter()
            .enumerate()
            .map(|(dim, &len)| if dim == slice.dim { slice.end - slice.start } else { len })
            .collect(),
        None => weight.shape.to_vec(),
    };
    let (last, before) = shape.split_last().ok_or("a scalar")?;
    if spelling.in_blocks {
        if cut(dims - 1) {
            return Err("it is cut within its blocks".to_owned());
        }
        let (blocks, before) = before.split_last().ok_or("no blocks")?;
        return Ok([before, &[blocks.saturating_mul(*last).saturating_mul(2)]].concat());
    }
    match weight.dtype.known() {
        Some(Dtype::F4) if cut(dims - 1) => Err("it is cut within its bytes".to_owned()),
        Some(Dtype::F4) => Ok(shape),
        _ => Ok([before, &[last.saturating_mul(2)]].concat()),
    }
}

/// A shape without the trailing ones that it has more than `dims` dimensions by.
pub(super) fn squeezed(shape: &[usize], dims: usize) -> &[usize] {
    let more = shape.len().saturating_sub(dims);
    let (kept, rest) = shape.split_at(shape.len() - more);
    if rest.iter().all(|&dim| dim == 1) { kept } else { shape }
}
