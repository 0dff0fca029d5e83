//! `vramp convert`: writes a checkpoint anew as safetensors. The library does it; this file says what was meant and what was done.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde_json::json;
use vramp::Error;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::durable::FileStore;
use vramp::load::{Convert, TransferOptions};
use vramp::save::{self, ConvertOptions, Converted, MAX_SHARD_BYTES, Target, Ties};

use super::args::{ConversionArgs, ProgressArg, TiesArg};
use super::companions::{Companions, Left};
use super::interrupt::Interrupt;
use super::output::{Failure, Output};
use super::progress::Progress;
use super::text;
use super::{flags, inspect, options};

/// Ends of names that are no folder's.
const NO_FOLDERS: &[&str] = &[
    "json",
    "bin",
    "pt",
    "pth",
    "ckpt",
    "gguf",
    "ggml",
    "npz",
    "npy",
    "onnx",
    "pkl",
    "pickle",
    "h5",
    "hdf5",
    "keras",
    "msgpack",
    "pb",
    "tflite",
    "nemo",
    "tar",
    "gz",
    "zip",
    "distcp",
    "safetensor",
    "st",
    "ot",
    "pdparams",
    "mlmodel",
    "engine",
    "torch",
];

pub(crate) fn run(args: &ConversionArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let started = Instant::now();
    let target = target(args)?;
    let checkpoint = Checkpoint::open_with(&args.input, &options::open(&args.how))?;
    inspect::opened(output, &checkpoint);
    interrupt.check()?;
    output.warnings(checkpoint.warnings());
    let companions = args.copy_files.then(|| Companions::of(&checkpoint, &target, args.overwrite)).transpose()?;
    let companions = companions.unwrap_or_default();
    let shows = args.progress == ProgressArg::Auto && !output.is_quiet();
    let progress = shows.then(Progress::on_terminal).flatten();
    let converted = save::convert(&checkpoint, &FileStore, &target, &meant(args, interrupt, progress.clone()));
    if let Some(progress) = &progress {
        progress.clear();
    }
    let mut converted = converted.map_err(|error| about(error, &target))?;
    let (copied, noted) = companions.copy(&target, interrupt)?;
    converted.warnings.extend(noted);
    converted.warnings.extend(stale_config(&companions, args, &converted));
    // Those of the checkpoint have been said before.
    output.warnings(converted.warnings.get(checkpoint.warnings().len()..).unwrap_or_default());
    if output.json {
        return output.json(&as_json(&converted, &copied, &companions.left));
    }
    output.text(&as_text(&converted, &copied, &companions.left, started.elapsed().as_secs_f64()))
}

/// Where to write, unless options contradict it.
fn target(args: &ConversionArgs) -> Result<Target, Failure> {
    let target = Target::of(&args.output);
    let is_file = matches!(target, Target::File(_));
    let end = args.output.extension().map(|end| end.to_string_lossy().to_lowercase()).unwrap_or_default();
    let wrong = if is_file && args.max_shard_size.is_some() {
        "--max-shard-size is for folders: one file has no limit; give a name that does not end in .safetensors"
            .to_owned()
    } else if is_file && args.copy_files {
        "--copy-files is for folders: give a name that does not end in .safetensors".to_owned()
    } else if NO_FOLDERS.contains(&end.as_str()) && !args.output.is_dir() {
        let path = args.output.display();
        format!("{path}: only safetensors is written: a file whose name ends in .safetensors, or a folder")
    } else {
        return Ok(target);
    };
    Err(Failure::Usage(wrong))
}

fn meant(args: &ConversionArgs, interrupt: &Interrupt, progress: Option<Arc<Progress>>) -> ConvertOptions {
    let convert = args.convert.dtype.map(|to| Convert::to(to).allow_overflow(args.convert.allow_overflow));
    ConvertOptions::default()
        .selection(
            Selection::default()
                .include(args.include.clone())
                .exclude(args.exclude.clone())
                .strip_prefix(args.strip_prefix.clone()),
        )
        .transfer(TransferOptions::default().convert(convert).cancel(interrupt.cancel()))
        .ties(match args.ties {
            TiesArg::Write => Ties::Write,
            TiesArg::Alias => Ties::Alias,
        })
        .max_shard_bytes(args.max_shard_size.unwrap_or(MAX_SHARD_BYTES))
        .overwrite(args.overwrite)
        .check(args.check)
        .progress(
            progress
                .map(|progress| -> vramp::load::Progress { Arc::new(move |done, total| progress.show(done, total)) }),
        )
        .leftovers(interrupt.leftovers())
}

/// Errors that name no file are about the input, unless they are about where to write.
fn about(error: Error, target: &Target) -> Failure {
    match error {
        Error::NotFound { .. } => Failure::LibraryAt { error, path: target.path().to_owned() },
        Error::Exists { path, what, hint: Some(hint) } if hint == save::REPLACE_HINT => {
            let hint = Some("write to another place, or replace it with --overwrite".to_owned());
            Error::Exists { path, what, hint }.into()
        }
        error => error.into(),
    }
}

// ---- files that go along

/// What a copied configuration says that is no longer so.
fn stale_config(companions: &Companions, args: &ConversionArgs, converted: &Converted) -> Option<String> {
    let config: serde_json::Value = serde_json::from_slice(companions.bytes_of("config.json")?).ok()?;
    let has = |key: &str| config.get(key).is_some_and(|value| !value.is_null());
    if !converted.scales.is_empty() && has("quantization_config") {
        return Some(
            "config.json was copied as it is, and its quantization_config is no longer true: remove it".into(),
        );
    }
    let dtype = ["torch_dtype", "dtype"].into_iter().find(|key| has(key)).filter(|_| args.convert.dtype.is_some())?;
    Some(format!("config.json was copied as it is: see whether its {dtype} still says what you want"))
}

// ---- what was done

fn as_json(converted: &Converted, copied: &[PathBuf], left: &[Left]) -> serde_json::Value {
    let paths = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
    json!({
        "outputs": paths(&converted.saved.outputs),
        "tensors": converted.saved.tensors,
        "bytes": converted.saved.bytes,
        "skipped": converted.skipped,
        "tensors_left_out": left_out(converted),
        "scales": converted.scales,
        "ties": converted.ties,
        "copied": paths(copied),
        "not_copied": left,
        "warnings": flags::in_messages(&converted.warnings),
    })
}

fn left_out(converted: &Converted) -> u64 {
    converted.skipped.iter().fold(0, |sum, skipped| sum.saturating_add(skipped.tensors))
}

fn as_text(converted: &Converted, copied: &[PathBuf], left: &[Left], seconds: f64) -> String {
    let saved = &converted.saved;
    let rate = text::rate(text::as_f64(saved.bytes) / seconds.max(1e-9));
    let (tensors, bytes) = (text::plural(saved.tensors as u64, "tensor"), text::both(saved.bytes));
    let mut out = format!("{tensors}, {bytes}, in {} ({rate})\n", text::seconds(seconds));
    for path in saved.outputs.iter().chain(copied) {
        out.push_str(&format!("  {}\n", text::escape(&path.display().to_string())));
    }
    out.push_str(&text::scales(&converted.scales));
    let ties = converted.ties.iter().map(|(alias, name)| format!("{alias} is {name}"));
    out.push_str(&text::section("recorded as further names", ties.collect()));
    let skipped = converted.skipped.iter().map(|skipped| format!("{}: {}", skipped.name, skipped.why));
    out.push_str(&text::section("not in the result", skipped.collect()));
    let left = left.iter().map(|left| format!("{}: {}", left.name, left.why));
    out.push_str(&text::section("not copied", left.collect()));
    out.push_str(&text::left_out(left_out(converted)));
    out
}
