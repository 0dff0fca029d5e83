//! What a checkpoint records of its quantisation, beside the weights, and what of it is no longer true once weights are dequantised.
//!
//! One rule: a record goes when every weight that it describes is dequantised, and stays otherwise; one that describes several layers
//! loses those that are. Scales of activations are tensors like any other and stay. It changes nothing itself.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde_json::Value;

use super::quantised::{Quantised, last_of, layer_of, tells_state};
use super::{Casts, Checkpoint, ConvertedTensor};
use crate::convert::Float;
use crate::fault::{Listed, quoted};

/// Records that are no longer true.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleRecords {
    /// Tensors to leave out, as indices into [`Checkpoint::tensors`].
    pub tensors: BTreeSet<usize>,
    /// What entries of the metadata become; `None`: they go.
    pub metadata: BTreeMap<String, Option<String>>,
    /// The same in words, where there is something to say.
    pub warning: Option<String>,
}

/// The layers of a conversion, by their names with the dot at the end.
struct Layers<'a> {
    /// Those with a weight that is dequantised.
    done: HashSet<&'a str>,
    /// Those with one that stays quantised.
    left: HashSet<&'a str>,
}

impl Layers<'_> {
    fn are_done(&self, layer: &str) -> bool {
        self.done.contains(layer) && !self.left.contains(layer)
    }

    /// Whether something below `prefix` is dequantised, and nothing stays quantised there.
    fn are_all_done(&self, prefix: &str) -> bool {
        let below = |layers: &HashSet<&str>| layers.iter().any(|layer| layer.starts_with(prefix));
        below(&self.done) && !below(&self.left)
    }
}

impl Checkpoint {
    /// The records of quantisation that are no longer true after `casts`.
    #[doc(hidden)]
    pub fn stale_records(&self, casts: &Casts) -> StaleRecords {
        let layers = self.layers(casts);
        let mut stale = StaleRecords::default();
        if layers.done.is_empty() {
            return stale;
        }
        let (mut gone, mut kept, mut doubtful) = (Listed::new(), Listed::new(), Listed::new());
        for tensor in &casts.tensors {
            let Some(info) = self.tensors.get(tensor.selected.tensor) else { continue };
            let (layer, last) = (layer_of(&info.name), last_of(&info.name));
            let is_stale = match last {
                "comfy_quant" => layers.are_done(layer),
                "scaled_fp8" => layers.are_all_done(layer),
                _ => false,
            };
            if is_stale {
                stale.tensors.insert(tensor.selected.tensor);
                gone.push(|| quoted(&info.name));
            } else if tells_state(last) && layers.are_done(layer) && info.dtype.known().and_then(Float::of).is_some() {
                kept.push(|| quoted(&info.name));
            }
        }
        for (key, value) in &self.metadata {
            match self.stale_entry(key, value, &layers) {
                Entry::True => {}
                Entry::Doubtful => doubtful.push(|| quoted(key)),
                Entry::Changed(value) => {
                    gone.push(|| match value {
                        None => format!("{} of the metadata", quoted(key)),
                        Some(_) => format!("a part of {} of the metadata", quoted(key)),
                    });
                    stale.metadata.insert(key.clone(), value);
                }
            }
        }
        let gone =
            (!gone.is_empty()).then(|| format!("left out, since it describes weights that are dequantised: {gone}"));
        let doubtful = (!doubtful.is_empty())
            .then(|| format!("kept, though it may no longer be true: {doubtful} of the metadata"));
        let kept = (!kept.is_empty()).then(|| format!("kept: scales of activations of dequantised weights: {kept}"));
        let said: Vec<String> = gone.into_iter().chain(doubtful).chain(kept).collect();
        stale.warning = (!said.is_empty()).then(|| said.join("; "));
        stale
    }

    fn layers(&self, casts: &Casts) -> Layers<'_> {
        let quantised = Quantised::of(self);
        let is_narrow = |float: Float| float.bytes() == 1;
        let is_done = |tensor: &&ConvertedTensor| tensor.cast.is_some_and(|cast| is_narrow(cast.from));
        let stays = |tensor: &&ConvertedTensor| {
            let dtype = self.tensors.get(tensor.selected.tensor).and_then(|info| info.dtype.known());
            let is_narrow = dtype.and_then(Float::of).is_some_and(is_narrow);
            let is_state = quantised.state.contains(&tensor.selected.tensor);
            tensor.cast.is_none()
                && (quantised.packed.contains_key(&tensor.selected.tensor) || (is_narrow && !is_state))
        };
        let name = |tensor: &ConvertedTensor| self.tensors.get(tensor.selected.tensor).map(|info| layer_of(&info.name));
        let done = casts.tensors.iter().filter(is_done).filter_map(name).collect();
        let left = casts.tensors.iter().filter(stays).filter_map(name).collect();
        Layers { done, left }
    }

    fn stale_entry(&self, key: &str, value: &str, layers: &Layers<'_>) -> Entry {
        match key {
            "_quantization_metadata" => without_layers(value, layers),
            "quantization_config" if layers.are_all_done("") => Entry::Changed(None),
            // torchao: the type of each tensor under its name.
            _ if layers.are_done(layer_of(key)) || layers.are_done(&format!("{key}.")) => {
                let said: Option<Value> = serde_json::from_str(value).ok();
                let class = said.as_ref().and_then(|said| said.get("_type")).and_then(Value::as_str);
                if class.is_some_and(|class| class != "Tensor") { Entry::Changed(None) } else { Entry::True }
            }
            _ => Entry::True,
        }
    }
}

/// What becomes of an entry of the metadata.
enum Entry {
    True,
    /// It is not understood.
    Doubtful,
    Changed(Option<String>),
}

/// ComfyUI's record, `{"layers": {"name": {"format": …}}}`, without the layers that are dequantised.
fn without_layers(value: &str, layers: &Layers<'_>) -> Entry {
    let Ok(mut said) = serde_json::from_str::<Value>(value) else { return Entry::Doubtful };
    let Some(described) = said.get_mut("layers").and_then(Value::as_object_mut) else { return Entry::Doubtful };
    let before = described.len();
    described.retain(|layer, _| !layers.are_done(&format!("{layer}.")));
    match (described.len(), before) {
        (0, _) => Entry::Changed(None),
        // Layers are dequantised, and it describes none of them: perhaps under other names.
        (after, before) if after == before => Entry::Doubtful,
        _ => Entry::Changed(Some(said.to_string())),
    }
}
