//! One load by a loader written in Rust, one line of JSON: what `scripts/peers` reads.
//!
//!     peers-candle load|mmap|copy FILE...
//!     peers-candle vramp FOLDER
//!
//! `load` is `candle_core::safetensors::load` of each file; `mmap` is candle's mapping with `load` of each tensor; `copy` is a
//! mapping whose tensors are copied into a `Vec` each, what a program in Rust does without any library for it;
//! `vramp` is a load by vramp and a candle tensor made of each of its tensors, which copies every byte once more. With
//! BENCH_VERIFY=sha256 the line holds the SHA-256 of each tensor's bytes. It never runs as part of vramp.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::time::Instant;

use candle_core::safetensors::{MmapedSafetensors, load};
use candle_core::{DType, Device, Tensor};
use sha2::{Digest, Sha256};

enum Loaded {
    Tensor(Tensor),
    Bytes(Vec<u8>),
}

struct Hashing(Sha256);

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    if files.len() < 2 {
        return Err("usage: peers-candle load|mmap|copy|vramp FILE...".into());
    }
    let how = files.remove(0);
    let before = usage();
    let started = Instant::now();
    let mut loaded: Vec<(String, Loaded)> = Vec::new();
    match how.as_str() {
        "load" => {
            for file in &files {
                loaded
                    .extend(load(file, &Device::Cpu)?.into_iter().map(|(name, tensor)| (name, Loaded::Tensor(tensor))));
            }
        }
        "vramp" => loaded = by_vramp(&files[0])?,
        "mmap" | "copy" => {
            // SAFETY: nothing changes the files while they are compared; a file that shrank would end this process only.
            let mapped = unsafe { MmapedSafetensors::multi(&files)? };
            for (name, view) in mapped.tensors() {
                let tensor = match how.as_str() {
                    "mmap" => Loaded::Tensor(mapped.load(&name, &Device::Cpu)?),
                    _ => Loaded::Bytes(view.data().to_vec()),
                };
                loaded.push((name, tensor));
            }
        }
        _ => return Err(format!("no way to load is called {how}").into()),
    }
    let load_s = started.elapsed().as_secs_f64();
    let after = usage();
    let mut line = serde_json::json!({"load_s": load_s, "cpu_s": after.0 - before.0, "disk_bytes": after.1 - before.1});
    if std::env::var("BENCH_VERIFY").is_ok_and(|value| value == "sha256") {
        let digests: Result<BTreeMap<&String, String>, Box<dyn std::error::Error>> =
            loaded.iter().map(|(name, tensor)| Ok((name, digest(tensor)?))).collect();
        line["sha256"] = serde_json::to_value(digests?)?;
    }
    println!("{line}");
    std::process::exit(0) // the kernel frees faster, and freeing is not part of a load
}

/// Loads with vramp's defaults and makes candle tensors of what it loaded, as a program that computes with candle does.
fn by_vramp(path: &str) -> Result<Vec<(String, Loaded)>, Box<dyn std::error::Error>> {
    let loaded = vramp::load::load(path, &vramp::load::Options::default())?;
    let mut tensors = Vec::new();
    for tensor in loaded.tensors() {
        let dtype = match tensor.dtype().to_string().as_str() {
            "U8" => DType::U8,
            "U32" => DType::U32,
            "I64" => DType::I64,
            "BF16" => DType::BF16,
            "F16" => DType::F16,
            "F32" => DType::F32,
            "F64" => DType::F64,
            other => return Err(format!("no candle tensor is made of {other}").into()),
        };
        let shape = tensor.shape().iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>()?;
        let made = Tensor::from_raw_buffer(tensor.bytes()?, dtype, &shape, &Device::Cpu)?;
        tensors.push((tensor.name().to_owned(), Loaded::Tensor(made)));
    }
    std::mem::forget(loaded); // as the rest: freed by the kernel at the end of the process
    Ok(tensors)
}

fn digest(loaded: &Loaded) -> Result<String, Box<dyn std::error::Error>> {
    let mut hashing = BufWriter::with_capacity(1 << 20, Hashing(Sha256::new()));
    match loaded {
        Loaded::Tensor(tensor) => tensor.write_bytes(&mut hashing)?,
        Loaded::Bytes(bytes) => hashing.write_all(bytes)?,
    }
    let hash = hashing.into_inner().map_err(|error| error.into_error())?.0.finalize();
    Ok(hash.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// CPU seconds of this process so far, and bytes that it had the storage read.
fn usage() -> (f64, i64) {
    // SAFETY: all-zero bytes are a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is valid for writes; the call writes nothing else.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    (seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_inblock * 512)
}
