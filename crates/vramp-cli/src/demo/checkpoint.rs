//! A checkpoint to measure with: shaped like a llama, BF16, Hugging Face names, several shards, an index and a config.
//!
//! The values are pseudo-random and finite, of the size that real weights have; no two pages are alike. Written in large
//! blocks on several threads and synced, so that its pages can be dropped from the page cache.

use std::fs::File;
use std::io::{self, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Map, json};
use vramp::Error;

use super::super::interrupt::Interrupt;
use super::super::output::Failure;

const BLOCK_BYTES: usize = 8 << 20;

/// Written bytes that may wait for the disk, a thread: small machines have little room for dirty pages.
const UNSYNCED_BYTES: u64 = 128 << 20;

const SHARDS: u64 = 4;

/// A tensor of BF16.
#[derive(Debug, Clone)]
struct Weight {
    name: String,
    shape: Vec<u64>,
}

/// The checkpoint that was made.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) shards: Vec<PathBuf>,
    pub(crate) bytes: u64,
    pub(crate) tensors: usize,
}

/// The numbers that make a llama.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Llama {
    hidden: u64,
    inter: u64,
    kv: u64,
    layers: u64,
    vocab: u64,
}

impl Llama {
    /// A llama of at most about `bytes` bytes: as many layers as fit four fifths, and the vocabulary takes the rest.
    fn of(bytes: u64) -> Llama {
        let (hidden, inter, kv) = match bytes >> 20 {
            0..32 => (64, 256, 16),
            32..512 => (512, 2048, 128),
            512..6144 => (2048, 8192, 512),
            6144..24576 => (4096, 14336, 1024),
            _ => (8192, 28672, 1024),
        };
        let sketch = Llama { hidden, inter, kv, layers: 1, vocab: 64 };
        let layers = (bytes / 5 * 4 / sketch.layer_bytes()).max(1);
        let rest = bytes.saturating_sub(layers * sketch.layer_bytes());
        let vocab = (rest / (4 * hidden) / 64 * 64).max(64);
        Llama { layers, vocab, ..sketch }
    }

    fn layer_bytes(&self) -> u64 {
        let (hidden, inter, kv) = (self.hidden, self.inter, self.kv);
        2 * (2 * hidden * hidden + 2 * kv * hidden + 3 * inter * hidden + 2 * hidden)
    }

    /// Elements of one attention head. There are at least two heads of keys, so that two ranks can share them.
    fn head(&self) -> u64 {
        match self.hidden {
            0..512 => 8,
            512..4096 => 64,
            _ => 128,
        }
    }

    /// The `config.json` that goes with the tensors.
    fn config(&self) -> serde_json::Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden / self.head(),
            "num_key_value_heads": self.kv / self.head(),
            "head_dim": self.head(),
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
        })
    }

    /// The tensors in the order of the modules.
    fn weights(&self) -> Vec<Weight> {
        let Llama { hidden, inter, kv, layers, vocab } = *self;
        let weight = |name: String, shape: &[u64]| Weight { name, shape: shape.to_vec() };
        let mut weights = vec![weight("model.embed_tokens.weight".to_owned(), &[vocab, hidden])];
        for layer in 0..layers {
            let mut add = |name: &str, shape: &[u64]| {
                weights.push(weight(format!("model.layers.{layer}.{name}.weight"), shape));
            };
            add("input_layernorm", &[hidden]);
            add("mlp.down_proj", &[hidden, inter]);
            add("mlp.gate_proj", &[inter, hidden]);
            add("mlp.up_proj", &[inter, hidden]);
            add("post_attention_layernorm", &[hidden]);
            add("self_attn.k_proj", &[kv, hidden]);
            add("self_attn.o_proj", &[hidden, hidden]);
            add("self_attn.q_proj", &[hidden, hidden]);
            add("self_attn.v_proj", &[kv, hidden]);
        }
        weights.push(weight("model.norm.weight".to_owned(), &[hidden]));
        weights.push(weight("lm_head.weight".to_owned(), &[vocab, hidden]));
        weights
    }
}

impl Weight {
    fn bytes(&self) -> u64 {
        2 * self.shape.iter().product::<u64>()
    }
}

/// Writes a checkpoint of about `bytes` bytes into `folder`.
pub(crate) fn make(folder: &Path, bytes: u64, interrupt: &Interrupt) -> Result<Made, Failure> {
    let llama = Llama::of(bytes);
    let weights = llama.weights();
    let total = weights.iter().map(Weight::bytes).sum();
    let shards = divide(&weights, total);
    let names: Vec<String> =
        (1..=shards.len()).map(|at| format!("model-{at:05}-of-{:05}.safetensors", shards.len())).collect();
    write_all(folder, &names, &shards, interrupt)?;
    write_index(folder, &names, &shards, total)?;
    write_json(&folder.join("config.json"), &llama.config())?;
    let shards = names.iter().map(|name| folder.join(name)).collect();
    Ok(Made { shards, bytes: total, tensors: weights.len() })
}

/// Shards of about equal size, in the order of the modules, as Hugging Face splits a model.
fn divide(weights: &[Weight], total: u64) -> Vec<&[Weight]> {
    let mut shards = Vec::new();
    let (mut start, mut done) = (0, 0);
    for (at, weight) in weights.iter().enumerate() {
        done += weight.bytes();
        let full = done >= total / SHARDS * (shards.len() as u64 + 1) && (shards.len() as u64) < SHARDS - 1;
        if full || at + 1 == weights.len() {
            shards.push(&weights[start..=at]);
            start = at + 1;
        }
    }
    shards
}

fn write_all(folder: &Path, names: &[String], shards: &[&[Weight]], interrupt: &Interrupt) -> Result<(), Failure> {
    let noise = Noise::new();
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some(name), Some(weights)) = (names.get(at), shards.get(at)) else { return Ok(()) };
            write_shard(&folder.join(name), weights, &noise, at as u64, interrupt)?;
        }
    };
    let threads = thread::available_parallelism().map_or(2, NonZero::get).min(names.len());
    thread::scope(|scope| {
        // Where no further thread is to be had, those that are there do all the work.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads).filter_map(spawn).collect();
        let here = work();
        let joined = helpers.into_iter().map(|helper| helper.join().unwrap_or(Err(lost_thread())));
        joined.fold(here, Result::and)
    })
}

fn lost_thread() -> Failure {
    Error::Poisoned { what: "a thread that writes the checkpoint" }.into()
}

fn write_shard(
    path: &Path,
    weights: &[Weight],
    noise: &Noise,
    seed: u64,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let failed = |source| Failure::from(Error::io("write", path, source));
    let mut file = File::create_new(path).map_err(failed)?;
    file.write_all(&header(weights)).map_err(failed)?;
    let mut left: u64 = weights.iter().map(Weight::bytes).sum();
    let (mut block, mut unsynced, mut number) = (vec![0; BLOCK_BYTES / 8], 0, seed << 32);
    while left > 0 {
        interrupt.check()?;
        noise.fill(number, &mut block);
        number += 1;
        let len = usize::try_from(left).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
        file.write_all(&bytemuck::cast_slice(&block)[..len]).map_err(failed)?;
        left -= len as u64;
        unsynced += len as u64;
        if unsynced >= UNSYNCED_BYTES {
            file.sync_data().map_err(failed)?;
            unsynced = 0;
        }
    }
    file.sync_all().map_err(failed)
}

/// The head of a safetensors file whose tensors follow one another.
fn header(weights: &[Weight]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut at = 0;
    for weight in weights {
        let end = at + weight.bytes();
        entries.insert(weight.name.clone(), json!({"dtype": "BF16", "shape": weight.shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut text = serde_json::Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut head = (text.len() as u64).to_le_bytes().to_vec();
    head.extend(text);
    head
}

fn write_index(folder: &Path, names: &[String], shards: &[&[Weight]], total: u64) -> Result<(), Failure> {
    let mut map = Map::new();
    for (name, weights) in names.iter().zip(shards) {
        map.extend(weights.iter().map(|weight| (weight.name.clone(), json!(name))));
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    write_json(&folder.join("model.safetensors.index.json"), &index)
}

fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), Failure> {
    let write = || -> io::Result<()> {
        let mut file = File::create_new(path)?;
        file.write_all(value.to_string().as_bytes())?;
        file.sync_all()
    };
    write().map_err(|source| Error::io("write", path, source).into())
}

/// Pseudo-random weights: one random block, changed by a different key each time it is used.
struct Noise {
    block: Vec<u64>,
}

impl Noise {
    fn new() -> Noise {
        Noise { block: (0..BLOCK_BYTES as u64 / 8).map(mixed).collect() }
    }

    /// Block number `number`: sign, mantissa and low exponent bits are random, so that 2^-7 <= |x| < 2^-3.
    fn fill(&self, number: u64, block: &mut [u64]) {
        let key = mixed(!number);
        for (target, word) in block.iter_mut().zip(&self.block) {
            *target = ((word ^ key) & 0x81ff_81ff_81ff_81ff) | 0x3c00_3c00_3c00_3c00;
        }
    }
}

/// SplitMix64.
fn mixed(number: u64) -> u64 {
    let z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_llama_fits_its_size_and_is_divided_without_loss() {
        for bytes in [1 << 20, 40 << 20, 1 << 30, 8 << 30, 140_000_000_000] {
            let llama = Llama::of(bytes);
            let (heads, kv_heads) = (llama.hidden / llama.head(), llama.kv / llama.head());
            assert_eq!((heads * llama.head(), kv_heads * llama.head()), (llama.hidden, llama.kv));
            assert!(heads % kv_heads == 0 && kv_heads % 2 == 0, "{heads} {kv_heads}");
            let weights = llama.weights();
            let total: u64 = weights.iter().map(Weight::bytes).sum();
            assert!(total <= bytes && total > bytes / 10 * 9, "{bytes}: {total}");
            let shards = divide(&weights, total);
            assert_eq!(shards.len() as u64, SHARDS);
            assert_eq!(shards.iter().map(|shard| shard.len()).sum::<usize>(), weights.len());
        }
    }

    #[test]
    fn every_value_is_finite() {
        let noise = Noise::new();
        let mut block = vec![0; 1024];
        noise.fill(7, &mut block);
        for half in bytemuck::cast_slice::<u64, u16>(&block) {
            let value = f32::from_bits(u32::from(*half) << 16).abs();
            assert!((0.0078..0.25).contains(&value), "{value}");
        }
    }
}
