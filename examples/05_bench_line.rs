//! One load, one line of JSON: what a benchmark that compares loaders wants to read.
//!
//!     cargo run --release --example 05_bench_line -- PATH
//!
//! `load_s` runs from before the checkpoint is opened until every byte is in memory, thread and queue set-up included. With
//! BENCH_VERIFY=1 a checksum is added: the sum over tensors of (fnv1a64(name) | 1) times the sum of the tensor's bytes as
//! little-endian 64-bit words, zero-padded, all modulo 2^64.

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)] // examples print

use std::time::Instant;

use vramp::load::{Options, load};
use vramp::tensor::Tensor;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: 05_bench_line PATH")?;
    let started = Instant::now();
    let loaded = load(path, &Options::default())?;
    let load_s = started.elapsed().as_secs_f64();
    let verify = std::env::var("BENCH_VERIFY").is_ok_and(|value| value == "1");
    let mut checksum = 0u64;
    for tensor in loaded.tensors().iter().filter(|_| verify) {
        checksum = checksum.wrapping_add(check(tensor)?);
    }
    let report = &loaded.report;
    println!(
        "{{\"load_s\":{load_s:.6},\"bytes\":{},\"tensors\":{},\"peak_kib\":{},\"checksum\":{}}}",
        report.bytes,
        report.tensors,
        report.peak_host_bytes / 1024,
        if verify { checksum.to_string() } else { "null".to_owned() }
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
