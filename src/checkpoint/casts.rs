//! Which tensors a load converts to another element type, and which scales go with quantised ones: by name and by shape.
//!
//! Floating-point tensors are converted, but for those that belong to packed integers (`quantised`), and weights of 4-bit floats
//! (`four_bit`). An 8-bit float weight that has a tensor of scales beside it is multiplied by
//! them, whatever its name says of inverses; a scale that does not fit its weight, or is spelled in a way that is not known, is an
//! error, never ignored. Scales of activations are none of a weight's. Headers decide; no tensor is read.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::cast_notes::{Notes, Unpacked};
use super::four_bit::{FourBit, ScaleSource, squeezed};
use super::quantised::{Quantised, last_of, layer_of};
use super::{Checkpoint, Selected, TensorData, TensorInfo};
use crate::convert::Float;
use crate::device::{BlockScale, Cast};
use crate::dtype::{Dtype, wide};
use crate::error::{Error, Result};
use crate::setting::Setting;

/// The edge, in elements, of the blocks that quantised checkpoints share a scale among, where nothing else is said.
const USUAL_BLOCK: u64 = 128;

/// The same along a row, where scales are exponents.
const EXPONENT_BLOCK: u64 = 32;

/// What converting a selection takes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Casts {
    /// The tensors to hand out, in the order of the selection: all of it but the scales that are used up.
    pub tensors: Vec<ConvertedTensor>,
    /// The tables of scales, as [`BlockScale::table`] counts them.
    pub scales: Vec<ScaleSource>,
    /// Warnings: weights that stay packed, get another name, or have no scale.
    pub warnings: Vec<String>,
}

/// A selected tensor and its conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConvertedTensor {
    /// The tensor.
    pub selected: Selected,
    /// How it is converted; `None` if it stays what it is.
    pub cast: Option<Cast>,
    /// Where in its file its first element lies; 0 for a tensor that is cut over several places.
    pub origin: u64,
}

impl Checkpoint {
    /// How the floating-point tensors of a selection become `to`.
    ///
    /// # Errors
    /// [`Error::Request`] when nothing can become `to`; [`Error::Unsupported`] when a quantised weight has scales that do not
    /// fit its shape, or scales under several names.
    #[doc(hidden)]
    pub fn casts(&self, selected: &[Selected], to: Float) -> Result<Casts> {
        if !to.is_target() {
            let what = format!("tensors are converted to F32, F16 or BF16, not to {}", to.dtype());
            return Err(Error::Request { what, hint: None });
        }
        let (ties, quantised) = (Ties::of(self, selected), Quantised::of(self));
        let mut work = Work { to, tables: BTreeMap::new(), notes: Notes::default() };
        let mut tensors = Vec::with_capacity(selected.len());
        for chosen in selected {
            let info = self.tensors.get(chosen.tensor);
            let info = info.ok_or(Error::Poisoned { what: "a selection of another checkpoint" })?;
            let mut selected = chosen.clone();
            let cast = match quantised.packed.get(&chosen.tensor) {
                Some(scheme) => match self.four_bit(chosen, &quantised) {
                    Some(Ok(weight)) => Some(self.unpacked(weight, &mut selected, info, &mut work)),
                    left => {
                        work.notes.packed.add(scheme, &chosen.name, left.and_then(Result::err));
                        None
                    }
                },
                None if quantised.state.contains(&chosen.tensor) => None,
                None => self.cast_of(chosen, info, &ties, &quantised, &mut work)?,
            };
            let origin = match &info.data {
                TensorData::Whole(extent) => extent.offset,
                TensorData::Parts(_) => 0,
            };
            tensors.push(ConvertedTensor { selected, cast, origin });
        }
        work.refuse_doubles(selected)?;
        let used = |source: &ScaleSource| [Some(source.tensor), source.global.map(|(tensor, _)| tensor)];
        let used: HashSet<usize> = work.tables.keys().flat_map(used).flatten().collect();
        tensors.retain(|tensor| !used.contains(&tensor.selected.tensor));
        let mut scales: Vec<(usize, ScaleSource)> =
            work.tables.into_iter().map(|(source, table)| (table, source)).collect();
        scales.sort_unstable();
        let warnings = work.notes.warnings(|tensor| used.contains(&tensor));
        Ok(Casts { tensors, scales: scales.into_iter().map(|(_, source)| source).collect(), warnings })
    }

    /// The cast of a weight of 4-bit floats, which gets the shape and the name that it has without its packing.
    fn unpacked(&self, weight: FourBit, selected: &mut Selected, info: &TensorInfo, work: &mut Work) -> Cast {
        let strip = |name: &Arc<str>| match weight.suffix {
            "_packed" => name.strip_suffix("_packed").filter(|bare| self.tensor(bare).is_none()).map(Arc::from),
            _ => None,
        };
        let was = Arc::clone(&selected.name);
        for name in std::iter::once(&mut selected.name).chain(&mut selected.aliases) {
            if let Some(bare) = strip(name) {
                *name = bare;
            }
        }
        selected.shape = weight.shape.into();
        let (name, shape) = (Arc::clone(&selected.name), Arc::clone(&selected.shape));
        work.notes.unpacked.push(Unpacked { scheme: weight.scheme, was, name, shape });
        let in_blocks = weight.suffix == "blocks";
        work.notes.stored_rows |= in_blocks && info.shape.len() > 3;
        let scale = BlockScale { table: work.table(weight.source), ..weight.blocks };
        Cast { from: Float::E2M1x2, to: work.to, scale: Some(scale) }
    }

    fn cast_of(
        &self,
        chosen: &Selected,
        info: &TensorInfo,
        ties: &Ties,
        quantised: &Quantised,
        work: &mut Work,
    ) -> Result<Option<Cast>> {
        let Some(from) = info.dtype.known().and_then(Float::of) else { return Ok(None) };
        let scale = match self.scale_of(chosen, info, from, ties)? {
            Some(index) => {
                let blocks = self.blocks(info, &self.tensors[index], quantised)?;
                Some(BlockScale { table: work.table(ScaleSource { tensor: index, global: None }), ..blocks })
            }
            None => None,
        };
        if from.bytes() == 1 && scale.is_none() && last_of(&info.name) != "scaled_fp8" && info.bytes() > 0 {
            work.notes.unscaled.push((chosen.tensor, Arc::clone(&chosen.name)));
        }
        let to = work.to;
        Ok((from != to || scale.is_some()).then_some(Cast { from, to, scale }))
    }

    /// The tensor of scales that belongs to a quantised weight, by the names that quantisers give it: beside any name of the
    /// weight, under any name of the scales.
    fn scale_of(&self, chosen: &Selected, weight: &TensorInfo, from: Float, ties: &Ties) -> Result<Option<usize>> {
        if from.bytes() != 1 {
            return Ok(None);
        }
        let stored = |name: &str| self.tensors.binary_search_by(|tensor| tensor.name.as_ref().cmp(name)).ok();
        let (mut found, mut unknown): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        for name in std::iter::once(weight.name.as_ref()).chain(ties.names_of(chosen.tensor)) {
            let either = |name: String| stored(&name).or_else(|| ties.tensor(&name));
            found.extend(scale_names(name).filter_map(either));
            unknown.extend(self.lookalikes(name));
        }
        // What a user calls the weight says nothing of what else is stored: only ties can mean its scales.
        found.extend(scale_names(&chosen.name).filter_map(|name| ties.tensor(&name)));
        // A parameter that is as narrow as the weight beside it is one more weight.
        let is_narrow =
            |tensor: &TensorInfo| tensor.dtype.known().and_then(Float::of).is_some_and(|float| float.bytes() == 1);
        found.retain(|&at| self.tensors.get(at).is_some_and(|scale| !is_bare(&scale.name) || !is_narrow(scale)));
        let first = found.first().copied();
        let refuse = |what: String| {
            let what = format!("{what}; load it without {} to get it as stored", Setting::Convert);
            Err(Error::Unsupported { path: self.path_of(weight), tensor: Some(weight.name.to_string()), what })
        };
        let name_of = |at: usize| self.tensors.get(at).map_or("", |tensor| tensor.name.as_ref());
        if let Some((second, first)) = found.iter().copied().find(|&other| Some(other) != first).zip(first) {
            let (first, second) = (name_of(first), name_of(second));
            return refuse(format!("it has scales under two names, {first:?} and {second:?}: which of them count?"));
        }
        match unknown.into_iter().find(|at| !found.contains(at)).map(name_of) {
            None => Ok(first),
            Some(other) => refuse(format!(
                "{other:?} beside it looks like a scale and is none that is known ({}): to convert the weight would ignore it",
                scale_names("NAME.weight").map(|name| name.replace("NAME.", "")).collect::<Vec<_>>().join(", ")
            )),
        }
    }

    /// The tensors beside a weight that are called like a scale or a zero point of it, in ways that are known and others. Those of
    /// activations are none of a weight's.
    fn lookalikes(&self, weight: &str) -> impl Iterator<Item = usize> {
        let (base, is_ours): (&str, fn(&str) -> bool) = match (stem_of(weight), quantised_of(weight)) {
            (Some(stem), _) => (stem, is_scale_in_layer),
            (None, Some(base)) => (base, |rest| tells_scale(rest) && !rest.contains('.')),
            (None, None) => (weight, is_scale_behind),
        };
        self.beginning(base).filter(move |(_, rest)| is_ours(rest)).map(|(at, _)| at)
    }

    /// The tensors whose names begin so, and the rest of these.
    pub(super) fn beginning<'c>(&'c self, base: &str) -> impl Iterator<Item = (usize, &'c str)> + use<'c> {
        let first = self.tensors.partition_point(|tensor| *tensor.name < *base);
        let base = base.to_owned();
        let names = self.tensors.iter().enumerate().skip(first);
        names.map_while(move |(at, tensor)| Some((at, tensor.name.strip_prefix(base.as_str())?)))
    }

    /// Whether a weight was quantised for ComfyUI, which lays the scales of blocks of 16 and 32 out in tiles.
    pub(super) fn is_for_comfy(&self, weight: &str) -> bool {
        let layer = layer_of(weight);
        self.tensor(&format!("{layer}comfy_quant")).is_some() || self.metadata.contains_key("_quantization_metadata")
    }

    fn path_of(&self, tensor: &TensorInfo) -> PathBuf {
        self.shards.get(tensor.shard() as usize).map_or(self.path.clone(), |shard| shard.path.clone())
    }

    /// How the scales divide a weight. The table is still to be set.
    fn blocks(&self, weight: &TensorInfo, scale: &TensorInfo, quantised: &Quantised) -> Result<BlockScale> {
        let refuse = |why: String| {
            let path = self.path_of(weight);
            let what = format!(
                "its scales {:?} (shape {:?}, {}) cannot be used: {why}; load it without {} to get it as stored",
                scale.name,
                scale.shape,
                scale.dtype,
                Setting::Convert
            );
            Err(Error::Unsupported { path, tensor: Some(weight.name.to_string()), what })
        };
        let divided = divide(&weight.shape, &scale.shape, holds_exponents(scale));
        if scale.dtype == Dtype::U8 {
            // MXFP8: bytes are exponents where the configuration says so, or each belongs to 32 neighbours of a row.
            let is_mx = divided.is_some_and(|blocks| (blocks.block_rows, blocks.block_columns) == (1, EXPONENT_BLOCK));
            if !is_mx && !quantised.declared.has_exponents() {
                let why = "bytes are scales where they are E8M0 exponents, and nothing says so: no ue8m0 in config.json, and \
                           no 32 columns for each";
                return refuse(why.to_owned());
            }
        } else if !is_scale_type(scale) {
            return refuse("their type is none that scales have".to_owned());
        }
        let in_tiles = self.is_for_comfy(&weight.name);
        if in_tiles && holds_exponents(scale) {
            return refuse("E8M0 exponents for ComfyUI (MXFP8) are laid out in tiles".to_owned());
        }
        if matches!(weight.data, TensorData::Parts(_)) {
            return refuse("the weight is cut over several files".to_owned());
        }
        match divided {
            Some(blocks) => Ok(blocks),
            None => refuse(format!("they do not divide a weight of shape {:?} into blocks", weight.shape)),
        }
    }
}

/// A cast of a selection in the making.
struct Work {
    to: Float,
    /// The number of each table.
    tables: BTreeMap<ScaleSource, usize>,
    notes: Notes,
}

impl Work {
    /// A weight that loses the end of its name must not get that of another one.
    fn refuse_doubles(&self, selected: &[Selected]) -> Result<()> {
        let is_taken = |name: &Arc<str>| selected.binary_search_by(|chosen| chosen.name.cmp(name)).is_ok();
        let renamed = self.notes.unpacked.iter().filter(|weight| weight.was != weight.name);
        match renamed.into_iter().find(|weight| is_taken(&weight.name)) {
            None => Ok(()),
            Some(Unpacked { was, name, .. }) => {
                let what =
                    format!("{was:?} is called {name:?} once it is dequantised, and another tensor is called so");
                Err(Error::Request { what, hint: Some("leave one of them out".to_owned()) })
            }
        }
    }

    fn table(&mut self, source: ScaleSource) -> usize {
        let next = self.tables.len();
        *self.tables.entry(source).or_insert(next)
    }
}

/// The further names of tensors: those that the checkpoint records, and those that the selection gives.
struct Ties {
    tensors: BTreeMap<Arc<str>, usize>,
    names: BTreeMap<usize, Vec<Arc<str>>>,
}

impl Ties {
    fn of(checkpoint: &Checkpoint, selected: &[Selected]) -> Ties {
        let recorded = checkpoint.recorded_ties().into_iter().filter_map(|tie| {
            let index = checkpoint.tensors.binary_search_by(|tensor| tensor.name.as_ref().cmp(&tie.target)).ok()?;
            Some((Arc::from(tie.alias), index))
        });
        let given = |chosen: &Selected| chosen.aliases.iter().map(|alias| (Arc::clone(alias), chosen.tensor)).collect();
        let given = selected.iter().flat_map::<Vec<_>, _>(given);
        let tensors: BTreeMap<Arc<str>, usize> = recorded.chain(given).collect();
        let mut names: BTreeMap<usize, Vec<Arc<str>>> = BTreeMap::new();
        for (name, &index) in &tensors {
            names.entry(index).or_default().push(Arc::clone(name));
        }
        Ties { tensors, names }
    }

    fn tensor(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).copied()
    }

    fn names_of(&self, tensor: usize) -> impl Iterator<Item = &str> {
        self.names.get(&tensor).into_iter().flatten().map(AsRef::as_ref)
    }
}

/// The names of scales beside a tensor `weight`, without the part that both share.
const BESIDE_WEIGHT: [&str; 4] = ["scale_weight", "qscale_weight", "weights_scaling_factor", "scale"];

/// The names that quantisers give the scales of a weight. All of them are multiplied with it, also "the inverse" one: it is the
/// inverse of what the weight was multiplied with when it was quantised.
fn scale_names(weight: &str) -> impl Iterator<Item = String> {
    let behind = ["_scale_inv", "_scale"].map(|end| format!("{weight}{end}"));
    let beside = stem_of(weight).into_iter().flat_map(|stem| BESIDE_WEIGHT.map(|name| format!("{stem}{name}")));
    // Of a weight that is called `gate_weight`.
    let within = weight.strip_suffix("weight").filter(|_| stem_of(weight).is_none());
    behind.into_iter().chain(beside).chain(within.map(|stem| format!("{stem}scale_weight")))
}

/// What comes before `weight` in the name of a tensor that is called just so in its layer.
fn stem_of(weight: &str) -> Option<&str> {
    weight.strip_suffix("weight").filter(|stem| stem.is_empty() || stem.ends_with('.'))
}

/// What the parts of a weight share that is kept as data and scales: `P.weight:` of `P.weight:qdata`.
fn quantised_of(weight: &str) -> Option<&str> {
    ["qdata", "data"].iter().find_map(|end| weight.strip_suffix(end)).filter(|base| base.ends_with(['_', ':', '.']))
}

fn tells_scale(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["scal", "zero", "_zp"].iter().any(|word| name.contains(word))
}

/// Whether a name in a layer, or below its `weight`, is that of a scale, and not one of activations, of the bias, or a parameter.
fn is_scale_in_layer(rest: &str) -> bool {
    const OTHERS: [&str; 11] =
        ["act", "activation", "activations", "input", "in", "output", "out", "bias", "q", "k", "v"];
    // What is called after the weight is about it, whatever else it is called, and wherever below the layer.
    let of_weight = rest.starts_with("weight") || (rest.contains('.') && last_of(rest).starts_with("weight_"));
    let is_other = || rest == "scale" || rest.split(['_', '.', ':']).any(|word| OTHERS.contains(&word));
    tells_scale(rest) && (of_weight || (!rest.contains('.') && !is_other()))
}

/// Whether what follows the whole name of a weight makes it the name of a scale.
fn is_scale_behind(rest: &str) -> bool {
    const WORDS: [&str; 8] =
        ["scal", "zero", "zp", "inv_scal", "block_scal", "dequant_scal", "weight_scal", "quant_scal"];
    let rest = rest.to_ascii_lowercase();
    let below = rest.strip_prefix('.').is_some_and(tells_scale);
    let word = rest.strip_prefix(['_', '.', ':']).map(|word| word.trim_start_matches('_'));
    below || word.is_some_and(|word| !word.contains('.') && WORDS.iter().any(|known| word.starts_with(known)))
}

/// Whether this is a name that parameters of layers have too.
fn is_bare(name: &str) -> bool {
    last_of(name) == "scale"
}

fn holds_exponents(scale: &TensorInfo) -> bool {
    matches!(scale.dtype.known(), Some(Dtype::F8_E8M0 | Dtype::U8))
}

fn is_scale_type(scale: &TensorInfo) -> bool {
    matches!(scale.dtype.known(), Some(Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64 | Dtype::F8_E8M0))
}

/// The blocks that scales of shape `scale` divide a tensor of shape `weight` into, with all dimensions but the last taken as
/// rows; `None` where they do not.
fn divide(weight: &[usize], scale: &[usize], exponents: bool) -> Option<BlockScale> {
    let (scale, weight) = (&wide(squeezed(scale, weight.len()))[..], &wide(weight)[..]);
    let columns = weight.last().copied().unwrap_or(1).max(1);
    let rows = weight.iter().rev().skip(1).try_fold(1u64, |rows, &dim| rows.checked_mul(dim))?.max(1);
    let blocks = |block_rows, block_columns| BlockScale { table: 0, first: 0, columns, block_rows, block_columns };
    if scale.iter().all(|&dim| dim == 1) {
        return Some(blocks(rows, columns));
    }
    if scale.len() > weight.len() {
        return None;
    }
    // A short shape counts from the outermost dimension, one scale for each row: another number could mean columns, or blocks.
    if scale.len() < weight.len() && scale.iter().zip(weight).any(|(count, dim)| count != dim) {
        return None;
    }
    let edges: Vec<u64> = weight
        .iter()
        .zip(scale.iter().copied().chain(std::iter::repeat(1)))
        .map(|(&dim, count)| edge(dim, count, exponents))
        .collect::<Option<_>>()?;
    let (&block_columns, row_edges) = edges.split_last()?;
    Some(blocks(flattened(&weight[..row_edges.len()], row_edges)?, block_columns))
}

/// The edge of a block along a dimension of `dim` elements with `count` scales.
fn edge(dim: u64, count: u64, exponents: bool) -> Option<u64> {
    match count {
        1 => Some(dim.max(1)),
        _ if count == dim => Some(1),
        0 => None,
        _ if dim.div_ceil(USUAL_BLOCK) == count => Some(USUAL_BLOCK),
        _ if exponents && dim.div_ceil(EXPONENT_BLOCK) == count => Some(EXPONENT_BLOCK),
        _ => Some(dim / count).filter(|edge| dim.is_multiple_of(count) && edge.is_power_of_two()),
    }
}

/// The rows of a block when the dimensions `dims` with block edges `edges` are taken as one. Possible where each dimension
/// before the one that is divided has a scale for each index, and each after it has one for all.
fn flattened(dims: &[u64], edges: &[u64]) -> Option<u64> {
    let divided = edges.iter().position(|&edge| edge > 1).unwrap_or(edges.len());
    let Some((&dim, &edge)) = dims.get(divided).zip(edges.get(divided)) else { return Some(1) };
    let mut inner = dims.iter().zip(edges).skip(divided + 1);
    let whole = inner.clone().all(|(dim, edge)| dim == edge);
    let even = divided == 0 || dim.is_multiple_of(edge);
    let rows = inner.try_fold(edge, |rows, (&dim, _)| rows.checked_mul(dim))?;
    (whole && even).then_some(rows)
}

/// The names of the tensors that each table of scales belongs to, as they are handed out.
pub(crate) fn scaled_names(casts: &Casts) -> Vec<Vec<Arc<str>>> {
    let mut names = vec![Vec::new(); casts.scales.len()];
    for tensor in &casts.tensors {
        if let Some(scale) = tensor.cast.and_then(|cast| cast.scale)
            && let Some(names) = names.get_mut(scale.table)
        {
            names.push(Arc::clone(&tensor.selected.name));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(weight: &[usize], scale: &[usize]) -> Option<(u64, u64)> {
        divide(weight, scale, false).map(|blocks| (blocks.block_rows, blocks.block_columns))
    }

    #[test]
    fn scales_divide_their_weights() {
        assert_eq!(blocks(&[200, 300], &[2, 3]), Some((128, 128)));
        assert_eq!(blocks(&[200, 300], &[]), Some((200, 300)));
        assert_eq!(blocks(&[200, 300], &[1]), Some((200, 300)));
        assert_eq!(blocks(&[200, 300], &[200]), Some((1, 300)));
        assert_eq!(blocks(&[200, 300], &[200, 1]), Some((1, 300)));
        assert_eq!(blocks(&[200, 300], &[1, 300]), Some((200, 1)));
        assert_eq!(blocks(&[64, 64], &[2, 2]), Some((32, 32)));
        assert_eq!(blocks(&[4, 256, 300], &[4, 2, 3]), Some((128, 128)));
        assert_eq!(blocks(&[4, 256, 300], &[4]), Some((256, 300)));
        assert_eq!(blocks(&[4, 256, 300], &[4, 1, 1]), Some((256, 300)));
        assert_eq!(blocks(&[5], &[1]), Some((1, 5)));
        assert_eq!(blocks(&[], &[1]), Some((1, 1)));
        assert_eq!(blocks(&[300, 0], &[3, 0]), Some((128, 1)), "nothing needs no scale");
        assert_eq!(blocks(&[200, 256], &[200, 8, 1]), Some((1, 32)), "the ones behind mean nothing");
        assert_eq!(blocks(&[200, 300], &[200, 1, 1]), Some((1, 300)));
        assert_eq!(blocks(&[200, 8, 32], &[200, 8, 1]), Some((1, 32)));
        let exponents = divide(&[5, 100], &[5, 4], true).unwrap();
        assert_eq!((exponents.block_rows, exponents.block_columns), (1, 32), "ragged blocks of 32");
    }

    #[test]
    fn what_does_not_divide_is_not_guessed() {
        assert_eq!(blocks(&[100, 300], &[2, 3]), None, "50 rows a block?");
        for (weight, scale) in [([200, 300], 300), ([600, 300], 300), ([3072, 768], 768), ([16, 8], 8)] {
            assert_eq!(blocks(&weight, &[scale]), None, "columns, or blocks of rows?");
        }
        assert_eq!(blocks(&[200, 300], &[2, 3, 2]), None);
        assert_eq!(blocks(&[200, 300], &[2, 1, 3]), None);
        assert_eq!(blocks(&[200, 300], &[0, 3]), None);
        assert_eq!(blocks(&[4, 200, 300], &[4, 2, 3]), None, "blocks of one expert would reach into the next");
        assert_eq!(blocks(&[4, 256, 300], &[2, 2, 3]), None);
    }
}
