//! How the tensors of known architectures are cut for tensor parallelism: a table, and who may use it.
//!
//! Attention and the multilayer perceptron are cut so that each rank computes its own heads and columns: the first layer of
//! each pair by rows (dimension 0), the second by columns (dimension 1), embeddings by vocabulary. All else is replicated.
//! A bias behind a cut by columns is replicated as well: only one rank may add it. A tensor of a cut module that the table
//! does not know (a quantisation scale) is an error, never a guess.

use std::path::Path;

use super::{json, shard};
use crate::error::{Error, Result};
use crate::setting::Setting;
use crate::storage::Storage;

/// The rules of one checkpoint.
#[derive(Debug)]
pub(crate) struct Rules {
    table: &'static [Rule],
}

/// Last two parts of a name, and the dimension to cut; nothing: replicated on purpose.
type Rule = (&'static str, &'static str, Option<usize>);

/// Names that Llama gave and others kept.
const LLAMA: &[Rule] = &[
    ("q_proj", "weight", Some(0)),
    ("q_proj", "bias", Some(0)),
    ("k_proj", "weight", Some(0)),
    ("k_proj", "bias", Some(0)),
    ("v_proj", "weight", Some(0)),
    ("v_proj", "bias", Some(0)),
    ("o_proj", "weight", Some(1)),
    ("o_proj", "bias", None),
    ("gate_proj", "weight", Some(0)),
    ("gate_proj", "bias", Some(0)),
    ("up_proj", "weight", Some(0)),
    ("up_proj", "bias", Some(0)),
    ("down_proj", "weight", Some(1)),
    ("down_proj", "bias", None),
    ("embed_tokens", "weight", Some(0)),
    ("lm_head", "weight", Some(0)),
];

/// Llama's attention, experts of three matrices.
const MIXTRAL: &[Rule] = &[
    ("q_proj", "weight", Some(0)),
    ("k_proj", "weight", Some(0)),
    ("v_proj", "weight", Some(0)),
    ("o_proj", "weight", Some(1)),
    ("w1", "weight", Some(0)),
    ("w2", "weight", Some(1)),
    ("w3", "weight", Some(0)),
    ("embed_tokens", "weight", Some(0)),
    ("lm_head", "weight", Some(0)),
];

/// `model_type` of `config.json`, and its rules.
const ARCHITECTURES: &[(&str, &[Rule])] = &[
    ("gemma", LLAMA),
    ("gemma2", LLAMA),
    ("gemma3_text", LLAMA),
    ("llama", LLAMA),
    ("mistral", LLAMA),
    ("mixtral", MIXTRAL),
    ("qwen2", LLAMA),
    ("qwen2_moe", LLAMA),
    ("qwen3", LLAMA),
    ("qwen3_moe", LLAMA),
];

/// The longest `config.json` that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

#[derive(serde::Deserialize)]
struct Config {
    model_type: Option<String>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
}

impl Rules {
    /// The rules of the architecture that `config.json` in `folder` names, once `world` ranks can share its heads.
    pub(crate) fn of(storage: &dyn Storage, folder: &Path, world: usize) -> Result<Rules> {
        let path = folder.join("config.json");
        let config = read(storage, &path)?;
        let name = config.model_type.as_deref().unwrap_or_default();
        let Some((_, table)) = ARCHITECTURES.iter().find(|(known, _)| *known == name) else {
            return Err(no_rules(&format!("{} says model_type {name:?}, which has no built-in rules", path.display())));
        };
        for (what, heads) in
            [("num_attention_heads", config.num_attention_heads), ("num_key_value_heads", config.num_key_value_heads)]
        {
            check_heads(&path, what, heads, world)?;
        }
        Ok(Rules { table })
    }

    /// The dimension to cut the tensor along, or nothing for a replicated one.
    ///
    /// # Errors
    /// In words, when the tensor belongs to a module that is cut, but is not one that the table knows.
    pub(crate) fn dim(&self, name: &str) -> Result<Option<usize>, String> {
        let mut parts = name.rsplit('.');
        let (Some(leaf), Some(module)) = (parts.next(), parts.next()) else { return Ok(None) };
        let mut of_module = self.table.iter().filter(|rule| rule.0 == module).peekable();
        if of_module.peek().is_none() {
            return Ok(None);
        }
        match of_module.find(|rule| rule.1 == leaf) {
            Some(rule) => Ok(rule.2),
            None => Err(format!("{module} is cut, but the built-in rules say nothing about its {leaf}")),
        }
    }
}

fn read(storage: &dyn Storage, path: &Path) -> Result<Config> {
    let text = match shard::read_text(storage, path, MAX_CONFIG_BYTES) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(no_rules(&format!("there is no {} to name the architecture", path.display())));
        }
        text => text?,
    };
    let text = json::without_mark(&text).map_err(|fault| no_rules(&format!("{}: {fault}", path.display())))?;
    serde_json::from_slice(text).map_err(|e| no_rules(&format!("{} cannot be read: {e}", path.display())))
}

fn no_rules(why: &str) -> Error {
    let known: Vec<_> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
    Error::Request {
        what: format!("no rules for tensor parallelism: {why}"),
        hint: Some(format!(
            "say how to cut with {}; built-in rules are known for {}",
            Setting::TensorParallelDims,
            known.join(", ")
        )),
    }
}

/// Rows could be shared evenly while a head is torn apart, so heads are counted too.
fn check_heads(path: &Path, what: &str, heads: Option<usize>, world: usize) -> Result<()> {
    match heads {
        Some(heads) if heads % world != 0 => Err(Error::Request {
            what: format!("{}: {what} is {heads}, which {world} ranks cannot share evenly", path.display()),
            hint: Some(format!("choose a world size that divides it, or cut with {}", Setting::TensorParallelDims)),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_by_their_last_two_parts() {
        let rules = Rules { table: LLAMA };
        for (name, dim) in [
            ("model.layers.0.self_attn.q_proj.weight", Ok(Some(0))),
            ("model.layers.0.self_attn.o_proj.weight", Ok(Some(1))),
            ("model.layers.0.mlp.down_proj.bias", Ok(None)),
            ("model.norm.weight", Ok(None)),
            ("model.layers.0.self_attn.q_norm.weight", Ok(None)),
            ("lm_head.weight", Ok(Some(0))),
            ("scalar", Ok(None)),
        ] {
            assert_eq!(rules.dim(name), dim, "{name}");
        }
        assert!(rules.dim("model.layers.0.self_attn.q_proj.weight_scale").is_err());
    }
}
