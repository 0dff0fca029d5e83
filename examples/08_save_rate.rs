//! How fast tensors in memory are saved: random ones, to several files, with SHA-256 of each. Prints bytes per second, from the
//! call until everything is durable and in place; the index counts as a file. `scripts/save-against-fio` compares it with the disk.
//!
//!     cargo run --release --example 08_save_rate -- FOLDER BYTES FILES

#![allow(clippy::print_stdout)] // examples print

use std::path::PathBuf;
use std::time::Instant;

use vramp::dtype::Dtype;
use vramp::save::{Bytes, Input, Outline, Replace, SaveOptions, save};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, bytes, files] = arguments.as_slice() else {
        return Err("usage: 08_save_rate FOLDER BYTES FILES".into());
    };
    let (folder, bytes, files): (_, u64, u64) = (PathBuf::from(folder), bytes.parse()?, files.parse()?);
    // Eight tensors a file, as layers of a model are: none is as large as a file.
    let columns = bytes / (files * 8 * 2 * 1024);
    let values: Vec<Vec<u8>> = (0..files * 8).map(|seed| noise(seed, columns * 2 * 1024)).collect();
    let outline = |at: usize| {
        Outline::new(format!("layer.{at:03}"), Dtype::BF16, [1024, usize::try_from(columns).unwrap_or(usize::MAX)])
    };
    let inputs: Vec<Input<'_>> =
        values.iter().enumerate().map(|(at, bytes)| Input::new(outline(at), Bytes::Host(bytes))).collect();
    let max_shard_bytes = columns * 2 * 1024 * 8;
    let options = SaveOptions::default().digests(true).max_shard_bytes(max_shard_bytes).replace(Replace::Anything);
    let started = Instant::now();
    let saved = save(&folder, &inputs, &options)?;
    let seconds = started.elapsed().as_secs_f64();
    println!("{:.0} bytes/s, {} bytes in {} files", saved.bytes as f64 / seconds, saved.bytes, saved.outputs.len());
    Ok(())
}

/// Bytes that no storage can compress (xorshift).
fn noise(seed: u64, bytes: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..bytes.div_ceil(8)).flat_map(|_| next()).collect()
}
