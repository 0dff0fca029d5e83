//! One load, one line of JSON: what a benchmark that compares loaders wants to read.
//!
//!     cargo run --release --example 05_bench_line -- PATH
//!
//! `load_s` runs from before the checkpoint is opened until every byte is in memory, thread and queue set-up included. With
//! BENCH_VERIFY=1 a checksum is added: the sum over tensors of (fnv1a64(name) | 1) times the sum of the tensor's bytes as
//! little-endian 64-bit words, zero-padded, all modulo 2^64. With BENCH_VERIFY=sha256 it is the SHA-256 of each tensor's bytes
//! instead, by name: `scripts/peers` compares them with those of the files.

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)] // examples print

use std::collections::BTreeMap;
use std::time::Instant;

use vramp::digest::Digest;
use vramp::load::{Options, load};
use vramp::tensor::Tensor;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: 05_bench_line PATH")?;
    let started = Instant::now();
    let loaded = load(path, &Options::default())?;
    let load_s = started.elapsed().as_secs_f64();
    let asked = std::env::var("BENCH_VERIFY").unwrap_or_default();
    let verify = asked == "1";
    let mut checksum = 0u64;
    for tensor in loaded.tensors().iter().filter(|_| verify) {
        checksum = checksum.wrapping_add(check(tensor)?);
    }
    let mut digests = BTreeMap::new();
    for tensor in loaded.tensors().iter().filter(|_| asked == "sha256") {
        digests.insert(tensor.name(), Digest::of(tensor.bytes()?).to_string());
    }
    let report = &loaded.report;
    println!(
        "{{\"load_s\":{load_s:.6},\"bytes\":{},\"tensors\":{},\"peak_kib\":{},\"checksum\":{}{}}}",
        report.bytes,
        report.tensors,
        report.peak_host_bytes / 1024,
        if verify { checksum.to_string() } else { "null".to_owned() },
        if digests.is_empty() { String::new() } else { format!(",\"sha256\":{}", serde_json::to_string(&digests)?) }
    );
    std::process::exit(0) // the kernel frees faster than we do, and freeing is not part of a load
}

fn check(tensor: &Tensor) -> vramp::Result<u64> {
    let name = tensor
        .name()
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3));
    let words = tensor.bytes()?.chunks(8).fold(0u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        sum.wrapping_add(u64::from_le_bytes(word))
    });
    Ok((name | 1).wrapping_mul(words))
}
