//! Which tensors of a checkpoint are packed integers, and which floats belong to them: those are the state of a quantiser, and a
//! cast leaves them alone.
//!
//! Structure decides first: whole numbers in more than one dimension, in a layer that holds scales, zero points or tables for them, or
//! that a configuration declares quantised. Names only tell the parts of such a layer apart. Headers and `config.json` are all that
//! is looked at; whether packed weights can be dequantised is `four_bit`'s knowledge.

use std::collections::{BTreeMap, HashSet};

use super::{Checkpoint, TensorInfo, shard};
use crate::convert::Float;
use crate::dtype::Dtype;

/// The longest `config.json` that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The packed weights of a checkpoint and what belongs to them, as indices into [`Checkpoint::tensors`].
#[derive(Debug, Default)]
pub(super) struct Quantised {
    /// Each packed weight, and how it is quantised, in words.
    pub(super) packed: BTreeMap<usize, String>,
    /// The floats that belong to packed weights.
    pub(super) state: HashSet<usize>,
    /// What the configuration says.
    pub(super) declared: Declared,
}

/// What `config.json`, or the file's metadata, declare about quantisation.
#[derive(Debug, Default)]
pub(super) struct Declared {
    /// `quant_method`, in lower case.
    method: Option<String>,
    /// All of it, in lower case.
    text: String,
}

impl Quantised {
    pub(super) fn of(checkpoint: &Checkpoint) -> Quantised {
        let mut found = Quantised { declared: Declared::of(checkpoint), ..Quantised::default() };
        let mut layers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, tensor) in checkpoint.tensors.iter().enumerate() {
            layers.entry(layer_of(&tensor.name)).or_default().push(at);
        }
        for members in layers.values() {
            for &at in members.iter().filter(|&&at| checkpoint.tensors.get(at).is_some_and(is_packed)) {
                found.take(checkpoint, &layers, members, at);
            }
        }
        found
    }

    /// Takes in one tensor of packed numbers and what belongs to it, if something shows that it is a quantised weight.
    fn take(&mut self, checkpoint: &Checkpoint, layers: &BTreeMap<&str, Vec<usize>>, members: &[usize], at: usize) {
        let Some(weight) = checkpoint.tensors.get(at) else { return };
        let last = last_of(&weight.name);
        let (all, stem) = (is_the_weight(last), stem_of(last));
        let info = |&at: &usize| Some((at, checkpoint.tensors.get(at)?));
        let kin: Vec<(usize, &TensorInfo)> = members
            .iter()
            .filter_map(info)
            .filter(|(other, tensor)| *other != at && (all || last_of(&tensor.name).starts_with(stem)))
            .collect();
        let below: Vec<(usize, &str)> = checkpoint.beginning(&format!("{}.", weight.name)).collect();
        let shown = kin.iter().any(|(_, tensor)| tells_state(last_of(&tensor.name)))
            || below.iter().any(|(_, rest)| tells_state(last_of(rest)))
            // What a configuration says is about weights: a layer may have tables of whole numbers too.
            || (all && self.declared.is_quantised())
            || says_packed(last);
        if !shown {
            return;
        }
        let names: Vec<&str> =
            kin.iter().map(|(_, tensor)| last_of(&tensor.name)).chain(below.iter().map(|it| it.1)).collect();
        self.packed.insert(at, self.scheme(weight, &kin, &names));
        let belongs = |tensor: &TensorInfo| {
            let name = last_of(&tensor.name);
            let is_parameter = name == "weight" || (tensor.shape.len() > 1 && elements(tensor) >= elements(weight));
            !is_bias(name) && (tells_state(name) || (all && !is_parameter))
        };
        self.state.extend(kin.iter().filter(|(_, tensor)| is_float(tensor) && belongs(tensor)).map(|(at, _)| *at));
        self.state.extend(below.iter().filter_map(|(at, _)| info(at)).filter(|it| is_float(it.1)).map(|it| it.0));
        // `P.weight._data`: what belongs to it may lie beside `P.weight` too.
        let parent = layer_of(&weight.name).strip_suffix("weight.").and_then(|parent| layers.get(parent));
        let beside = parent.into_iter().flatten().filter_map(info).filter(|(_, it)| tells_state(last_of(&it.name)));
        self.state.extend(beside.filter(|(_, tensor)| is_float(tensor)).map(|(at, _)| at));
    }

    /// How a packed weight is quantised, in words: what the tensors beside it show, else what the configuration says, else its type.
    fn scheme(&self, weight: &TensorInfo, kin: &[(usize, &TensorInfo)], names: &[&str]) -> String {
        let has = |word: &str| names.iter().any(|name| name.contains(word));
        let last = last_of(&weight.name);
        let of = |name: &str| kin.iter().find(|(_, tensor)| last_of(&tensor.name) == name).map(|(_, tensor)| *tensor);
        let columns = |tensor: &TensorInfo| tensor.shape.last().copied().unwrap_or(0);
        let words = if has("bitsandbytes__nf4") {
            "bitsandbytes NF4"
        } else if has("bitsandbytes__fp4") {
            "bitsandbytes FP4"
        } else if has("SCB") {
            "bitsandbytes INT8"
        } else if has("absmax") {
            "bitsandbytes, 4-bit"
        } else if last == "W_q" {
            "HQQ"
        } else if last == "qweight" && has("qzeros") {
            let is_awq = of("scales").is_some_and(|scales| columns(scales) == columns(weight).saturating_mul(8));
            if is_awq { "AWQ" } else { "GPTQ" }
        } else if last == "_data" {
            "quanto"
        } else if has("biases") && has("scales") && weight.dtype == Dtype::U32 {
            "MLX"
        } else if last.ends_with("blocks") && has("scales") {
            "MXFP4, 4-bit"
        } else if kin.iter().any(|(_, it)| it.dtype == Dtype::F8_E4M3 && tells_state(last_of(&it.name))) {
            "NVFP4, 4-bit"
        } else if weight.dtype == Dtype::I8 && kin.iter().any(|(_, it)| it.dtype == Dtype::F8_E8M0) {
            "FP4 with E8M0 scales"
        } else {
            return self.declared.method.clone().unwrap_or_else(|| format!("packed {}", weight.dtype));
        };
        words.to_owned()
    }
}

impl Declared {
    fn of(checkpoint: &Checkpoint) -> Declared {
        let folder = checkpoint.shards.first().and_then(|shard| shard.path.parent());
        let text = folder.and_then(|folder| {
            shard::read_text(&*checkpoint.storage, &folder.join("config.json"), MAX_CONFIG_BYTES).ok()
        });
        let config = text.and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
        let in_config = config.as_ref().and_then(|config| {
            let places = [Some(config), config.get("text_config"), config.get("language_config")];
            let inside = |place: &serde_json::Value| {
                let keys = ["quantization_config", "compression_config", "quantization"];
                keys.iter().find_map(|key| place.get(key).filter(|value| value.is_object()).cloned())
            };
            places.into_iter().flatten().find_map(inside)
        });
        let in_metadata =
            || checkpoint.metadata.get("quantization_config").and_then(|text| serde_json::from_str(text).ok());
        let Some(said): Option<serde_json::Value> = in_config.or_else(in_metadata) else { return Declared::default() };
        let method = said.get("quant_method").or_else(|| said.get("quant_algo")).and_then(|method| method.as_str());
        Declared { method: method.map(str::to_ascii_lowercase), text: said.to_string().to_ascii_lowercase() }
    }

    fn is_quantised(&self) -> bool {
        self.method.is_some()
    }

    /// Whether it says `word` anywhere.
    pub(super) fn says(&self, word: &str) -> bool {
        self.text.contains(word)
    }

    /// Whether scales that are stored as bytes are exponents.
    pub(super) fn has_exponents(&self) -> bool {
        self.says("ue8m0") || self.says("mxfp")
    }
}

/// Whether these are whole numbers that weights are packed in, and nothing that a layer has beside its weights.
fn is_packed(tensor: &TensorInfo) -> bool {
    use Dtype::{F4, F6_E2M3, F6_E3M2, I8, I16, I32, U8, U16, U32};
    const OTHERS: [&str; 16] = [
        "bias",
        "mask",
        "index",
        "idx",
        "ids",
        "id",
        "perm",
        "invperm",
        "shape",
        "format",
        "position",
        "positions",
        "groups",
        "comfy",
        "tracked",
        "lengths",
    ];
    let last = last_of(&tensor.name);
    let is_type = matches!(tensor.dtype.known(), Some(U8 | I8 | U16 | I16 | U32 | I32 | F4 | F6_E2M3 | F6_E3M2));
    let is_other = tells_state(last) || words(last).any(|word| OTHERS.contains(&word.to_ascii_lowercase().as_str()));
    let is_large = tensor.shape.len() > 1 || (tensor.shape.len() == 1 && is_the_weight(last));
    is_type && is_large && !is_other && elements(tensor) > 0
}

/// Whether a name is that of the one weight of a layer: `weight`, `qweight`, `weight_packed`, `W_q`, `_data`, ….
fn is_the_weight(last: &str) -> bool {
    const PACKING: [&str; 8] = ["q", "qdata", "data", "packed", "blocks", "int", "int4", "int8"];
    const WEIGHTS: [&str; 10] =
        ["weight", "weights", "qweight", "qweights", "w", "trellis", "qidxs", "codes", "indices", "b"];
    let mut rest = words(last).map(str::to_ascii_lowercase).filter(|word| !PACKING.contains(&word.as_str()));
    let first = rest.next();
    first.is_none_or(|first| WEIGHTS.contains(&first.as_str())) && rest.next().is_none()
}

/// The part of a parameter's name that the tensors that belong to it begin with: `gate_up_proj` of `gate_up_proj_blocks`.
fn stem_of(last: &str) -> &str {
    const ENDS: [&str; 8] = ["_blocks", ".blocks", "_packed", "_qweight", "_qdata", "_data", "_q", "_weight"];
    ENDS.iter().fold(last, |stem, end| stem.strip_suffix(end).unwrap_or(stem))
}

/// Whether a name alone says that whole numbers are a weight.
fn says_packed(last: &str) -> bool {
    let last = last.to_ascii_lowercase();
    last == "weight" || ["packed", "qweight", "w_q", "qdata"].iter().any(|word| last.contains(word))
}

/// Whether the name of a part of a layer is that of a scale, a zero point, or a table of a quantiser.
pub(super) fn tells_state(last: &str) -> bool {
    const PARTS: [&str; 14] = [
        "scal",
        "zero",
        "_zp",
        "absmax",
        "quant_map",
        "quant_state",
        "nested_",
        "scb",
        "g_idx",
        "codebook",
        "centroid",
        "amax",
        "weight_format",
        "comfy_quant",
    ];
    const WHOLE: [&str; 11] = ["s", "z", "zp", "su", "sv", "suh", "svh", "biases", "meta", "offset", "offsets"];
    let last = last.to_ascii_lowercase();
    WHOLE.contains(&last.as_str()) || PARTS.iter().any(|part| last.contains(part))
}

fn is_bias(last: &str) -> bool {
    last == "bias" || last.ends_with("_bias")
}

fn is_float(tensor: &TensorInfo) -> bool {
    tensor.dtype.known().and_then(Float::of).is_some()
}

fn elements(tensor: &TensorInfo) -> u64 {
    tensor.shape.iter().fold(1, |product, &dim| product.saturating_mul(dim as u64))
}

fn words(last: &str) -> impl Iterator<Item = &str> {
    last.split(['_', ':', '.']).filter(|word| !word.is_empty())
}

/// The name up to its last dot, with the dot.
pub(super) fn layer_of(name: &str) -> &str {
    name.rfind('.').and_then(|dot| name.get(..=dot)).unwrap_or("")
}

/// The name behind its last dot.
pub(super) fn last_of(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}
