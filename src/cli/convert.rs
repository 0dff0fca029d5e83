//! `vramp convert`: writes a checkpoint anew as safetensors. The library does it; this file says what was meant and what was done.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde_json::json;
use vramp::Error;
use vramp::checkpoint::{Checkpoint, Selection};
use vramp::load::{Convert, TransferOptions};
use vramp::save::{self, ConvertOptions, Converted, MAX_SHARD_BYTES, Target, Ties};
use vramp::store::{FileStore, Kind, Store};

use super::args::{ConversionArgs, ProgressArg, TiesArg};
use super::interrupt::Interrupt;
use super::output::{Failure, Output};
use super::progress::Progress;
use super::text;
use super::{inspect, options};

/// Files that describe a model beside its weights, by their names or the beginnings of these.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.",
];

/// The largest of them that is copied, in bytes.
const LARGEST_COMPANION: u64 = 256 << 20;

/// Ends of names that are no folder's.
const NO_FOLDERS: &[&str] = &["json", "bin", "pt", "pth", "ckpt", "gguf", "npz", "onnx", "pkl"];

/// A file that goes along with the weights.
struct Companion {
    name: String,
    bytes: Vec<u8>,
}

pub(crate) fn run(args: &ConversionArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let started = Instant::now();
    let target = target(args)?;
    let checkpoint = Checkpoint::open_with(&args.input, &options::open(&args.how))?;
    inspect::opened(output, &checkpoint);
    interrupt.check()?;
    output.warnings(checkpoint.warnings());
    let companions = if args.copy_files { companions(&checkpoint, &target)? } else { Vec::new() };
    let shows = args.progress == ProgressArg::Auto && !output.is_quiet();
    let progress = shows.then(Progress::on_terminal).flatten();
    let converted = save::convert(&checkpoint, &FileStore, &target, &meant(args, interrupt, progress.clone()));
    if let Some(progress) = &progress {
        progress.clear();
    }
    let mut converted = converted.map_err(|error| about(error, &target))?;
    let copied = copy(&companions, &target, interrupt)?;
    converted.warnings.extend(stale_config(&companions, args, &converted));
    // Those of the checkpoint have been said before.
    output.warnings(converted.warnings.get(checkpoint.warnings().len()..).unwrap_or_default());
    if output.json {
        return output.json(&as_json(&converted, &copied));
    }
    output.text(&as_text(&converted, &copied, started.elapsed().as_secs_f64()))
}

/// Where to write, unless options contradict it.
fn target(args: &ConversionArgs) -> Result<Target, Failure> {
    let target = Target::of(&args.output);
    let is_file = matches!(target, Target::File(_));
    let end = args.output.extension().and_then(|end| end.to_str()).unwrap_or_default();
    let wrong = if is_file && args.max_shard_size.is_some() {
        "--max-shard-size is for folders: one file has no limit; give a name that does not end in .safetensors"
            .to_owned()
    } else if is_file && args.copy_files {
        "--copy-files is for folders: give a name that does not end in .safetensors".to_owned()
    } else if NO_FOLDERS.contains(&end) && !args.output.is_dir() {
        let path = args.output.display();
        format!("{path}: only safetensors is written: a file whose name ends in .safetensors, or a folder")
    } else {
        return Ok(target);
    };
    Err(Failure::Usage(wrong))
}

fn meant(args: &ConversionArgs, interrupt: &Interrupt, progress: Option<Arc<Progress>>) -> ConvertOptions {
    let convert = args.convert.dtype.map(|to| Convert { to, allow_overflow: args.convert.allow_overflow });
    ConvertOptions {
        selection: Selection {
            include: args.include.clone(),
            exclude: args.exclude.clone(),
            strip_prefix: args.strip_prefix.clone(),
            ..Selection::default()
        },
        transfer: TransferOptions { convert, cancel: interrupt.cancel(), ..TransferOptions::default() },
        ties: match args.ties {
            TiesArg::Write => Ties::Write,
            TiesArg::Alias => Ties::Alias,
        },
        max_shard_bytes: args.max_shard_size.unwrap_or(MAX_SHARD_BYTES),
        check: args.check,
        progress: progress
            .map(|progress| -> vramp::load::Progress { Arc::new(move |done, total| progress.show(done, total)) }),
        leftovers: interrupt.leftovers(),
    }
}

/// Errors that name no file are about the input, unless they are about where to write.
fn about(error: Error, target: &Target) -> Failure {
    match error {
        Error::NotFound { .. } => Failure::LibraryAt { error, path: target.path().to_owned() },
        error => error.into(),
    }
}

// ---- files that go along

/// The files beside the weights, read before any work; none where they would be copied onto themselves.
fn companions(checkpoint: &Checkpoint, target: &Target) -> Result<Vec<Companion>, Failure> {
    let first = checkpoint.shards().first().map(|shard| shard.path.as_path());
    let from = first.map(vramp::store::folder_of).unwrap_or(Path::new("."));
    let is_same = from.canonicalize().ok().zip(target.path().canonicalize().ok()).is_some_and(|(from, to)| from == to);
    if is_same {
        return Ok(Vec::new());
    }
    let goes_along = |name: &String| COMPANIONS.iter().any(|companion| name.starts_with(companion));
    let names = FileStore.list(from)?.into_iter().filter(|name| goes_along(name) && !from.join(name).is_dir());
    let read = |name: String| {
        demand_file(&from.join(&name), "copied")?;
        let to = target.path().join(&name);
        if FileStore.examine(&to)?.is_some_and(|found| !matches!(found.kind, Kind::File | Kind::Link)) {
            demand_file(&to, "replaced by a copy")?;
        }
        let bytes = FileStore.read(&from.join(&name), LARGEST_COMPANION)?;
        Ok(Companion { name, bytes })
    };
    names.map(read).collect()
}

/// A link to nothing, or something that would never end, is no file.
fn demand_file(path: &Path, what: &str) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => {
            let what = format!("it is no regular file, and cannot be {what}");
            Err(Error::Unsupported { path: path.to_owned(), tensor: None, what }.into())
        }
        Err(source) => Err(Error::io("open", path, source).into()),
    }
}

fn copy(companions: &[Companion], target: &Target, interrupt: &Interrupt) -> Result<Vec<PathBuf>, Failure> {
    let copy = |companion: &Companion| {
        interrupt.check()?;
        let path = target.path().join(&companion.name);
        save::write_file(&FileStore, &path, &companion.bytes, &interrupt.leftovers())?;
        Ok(path)
    };
    companions.iter().map(copy).collect()
}

/// What a copied configuration says that is no longer so.
fn stale_config(companions: &[Companion], args: &ConversionArgs, converted: &Converted) -> Option<String> {
    let config = companions.iter().find(|companion| companion.name == "config.json")?;
    let config: serde_json::Value = serde_json::from_slice(&config.bytes).ok()?;
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

fn as_json(converted: &Converted, copied: &[PathBuf]) -> serde_json::Value {
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
        "warnings": converted.warnings,
    })
}

fn left_out(converted: &Converted) -> u64 {
    converted.skipped.iter().fold(0, |sum, skipped| sum.saturating_add(skipped.tensors))
}

fn as_text(converted: &Converted, copied: &[PathBuf], seconds: f64) -> String {
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
    out.push_str(&text::left_out(left_out(converted)));
    out
}
