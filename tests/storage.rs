//! Every storage is as good as the disk: checkpoints in memory give what the same ones on disk give, errors included; and a storage
//! that fails or changes ends in an error, never in other bytes.
//!
//! `VRAMP_CORPUS=FOLDER` compares whatever lies below a folder as well.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use swcuda::Schedule;
use vramp::ErrorKind;
use vramp::checkpoint::strict::{Spec, SpecTensor, verify};
use vramp::checkpoint::torch::audit::audit_in;
use vramp::checkpoint::{Checkpoint, OpenOptions, Selection};
use vramp::device::{CpuDevice, Device, NullDevice};
use vramp::durable::FileStore;
use vramp::load::{Options, load};
use vramp::save::{ConvertOptions, Target, convert};
use vramp::storage::{LocalStorage, Storage};
use vramp::testing::torch::{Member, Pickle, TensorOver, archive, legacy, legacy_object, members, state_dict, zip};
use vramp::testing::{LazyDevice, MemoryStorage, safetensors, watched};

use crate::cuda::{Rig, scheduled};

/// What an input gives, in words that can be compared: what was listed, loaded, converted and found, or which error.
#[derive(Debug, PartialEq)]
struct Outcome {
    listed: String,
    loaded: String,
    null: String,
    device: String,
    cuda: String,
    verified: String,
    converted: String,
    audit: String,
}

fn options(storage: &Arc<dyn Storage>) -> Options {
    let open = OpenOptions::default().storage(Arc::clone(storage));
    Options::default().open(open)
}

/// The software CUDA driver, or a GPU where one is required. It must outlive its device.
fn rig() -> (Rig, Arc<dyn Device>) {
    let rig = Rig::new(scheduled(Schedule::Random(12)));
    let device = rig.device();
    (rig, device)
}

fn outcome(path: &Path, storage: &Arc<dyn Storage>, cuda: &Arc<dyn Device>) -> Outcome {
    let said = |result: vramp::Result<String>| result.unwrap_or_else(|error| format!("{}: {error:?}", error.kind()));
    let open = || Checkpoint::open_with(path, &options(storage).open);
    let digests = |options: &Options| {
        let loaded = load(path, options)?;
        let digests =
            loaded.tensors().iter().map(|tensor| Ok((tensor.name().to_owned(), tensor.sha256()?.to_string())));
        let digests: BTreeMap<String, String> = digests.collect::<vramp::Result<_>>()?;
        Ok(format!("{digests:?} {:?}", loaded.warnings))
    };
    let listed = open().map(|checkpoint| {
        let shards: Vec<_> = checkpoint.shards().iter().map(|shard| (&shard.path, shard.bytes)).collect();
        format!("{:?} {shards:?} {:?} {:?}", checkpoint.tensors(), checkpoint.metadata(), checkpoint.warnings())
    });
    let null = || Ok(load(path, &options(storage).device(Arc::new(NullDevice::new())))?.report.bytes);
    let converted = || {
        let folder = tempfile::tempdir().unwrap();
        let target = Target::File(folder.path().join("out.safetensors"));
        let converted = convert(&open()?, &FileStore, &target, &ConvertOptions::default().check(true))?;
        let bytes = std::fs::read(target.path()).unwrap();
        Ok(format!("{} {:?}", vramp::digest::Digest::of(&bytes), converted.ties))
    };
    let verified = || {
        let checkpoint = open()?;
        // The checkpoint as it is, and one that differs from it in each way.
        let own = Spec::from(&checkpoint);
        let mut tensors = own.tensors().clone();
        if let Some(first) = tensors.values_mut().next() {
            *first = SpecTensor { shape: vec![7], ..first.clone() };
        }
        let last = tensors.pop_last();
        tensors.extend(last.map(|(name, tensor)| (format!("{name}.else"), tensor)));
        let verdict = |spec| verify(&checkpoint, &Selection::default(), &spec);
        Ok(format!("{:?} {:?}", verdict(own)?, verdict(Spec::new(tensors))?))
    };
    let audit = || Ok(serde_json::to_string(&audit_in(path, storage)?).unwrap());
    // Which folder a temporary file is made in is no part of the outcome.
    Outcome {
        listed: said(listed),
        loaded: said(digests(&options(storage))),
        null: said(null().map(|bytes: u64| bytes.to_string())),
        device: said(digests(&options(storage).device(Arc::new(LazyDevice::new(3))))),
        cuda: said(digests(&options(storage).device(Arc::clone(cuda)))),
        verified: said(verified()),
        converted: said(converted()),
        audit: said(audit()),
    }
}

fn floats<'a>(key: &'a str, shape: &'a [i64], stride: &'a [i64]) -> TensorOver<'a> {
    let count = shape.iter().product();
    TensorOver { key, storage: "FloatStorage", count, offset: 0, shape, stride, bits: &[] }
}

/// Inputs of many kinds below a folder, right and wrong ones: the paths that a user would open.
fn inputs(root: &Path) -> Vec<PathBuf> {
    let values: Vec<u8> = (0u8..=255).cycle().take(40_000).collect();
    let weight = |name: &'static str, rows: usize| {
        let bytes = &values[..rows * 32];
        safetensors(&[(name, "F32", &[rows, 8], bytes), ("bias", "I64", &[2], &bytes[..16])], json!({"format": "pt"}))
    };
    let pickle = state_dict(&[("w", floats("0", &[4, 2], &[2, 1])), ("t", floats("0", &[4, 2], &[1, 4]))]);
    let mut deflated = members(&pickle, &[]);
    deflated.push(Member::deflated("archive/data/0", &values[..32]));
    let evil = Pickle::new().global("os", "getenv").text("HOME").raw(b"\x85R.").bytes();
    let index = json!({"weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}});
    let shard = |name: &'static str| safetensors(&[(name, "BF16", &[100], &values[..200])], json!({}));
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("one/model.safetensors", weight("a", 1000)),
        ("odd.safetensors", weight("odd", 3)),
        ("cut.safetensors", weight("cut", 100)[..1000].to_vec()),
        ("empty.safetensors", Vec::new()),
        ("sharded/model.safetensors.index.json", index.to_string().into_bytes()),
        ("sharded/model-00001-of-00002.safetensors", shard("a.weight")),
        ("sharded/model-00002-of-00002.safetensors", shard("b.weight")),
        ("missing/model.safetensors.index.json", index.to_string().into_bytes()),
        ("missing/model-00001-of-00002.safetensors", shard("a.weight")),
        ("incomplete/model-00001-of-00003.safetensors", shard("a.weight")),
        ("config/model.safetensors", weight("a", 4)),
        ("config/config.json", b"{\"model_type\": \"llama\"}".to_vec()),
        ("hub/models--org--name/refs/main", b"abc\n".to_vec()),
        ("hub/models--org--name/snapshots/abc/model.safetensors", weight("hub", 5)),
        ("torch/pytorch_model.bin", archive(&pickle, &[("0", &values[..32])])),
        ("deflated.pt", zip(&deflated)),
        ("legacy.pt", legacy(&legacy_object(&pickle), &[("0", 8, &values[..32])])),
        ("evil.pt", archive(&evil, &[])),
        ("plain.pkl", evil.clone()),
        ("nothing/readme.md", b"no weights".to_vec()),
        ("gguf/model.gguf", b"GGUF\x03\0\0\0".to_vec()),
    ];
    for (name, bytes) in &files {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let folders = [
        "one",
        "sharded",
        "missing",
        "incomplete",
        "config",
        "hub/models--org--name",
        "torch",
        "nothing",
        "gguf",
        "none",
    ];
    let paths = files.iter().map(|(name, _)| *name).chain(folders);
    paths.map(|name| root.join(name)).collect()
}

/// The same from a storage in memory whose answers take turns with other threads; the disk has nothing by then.
#[test]
fn checkpoints_in_memory_give_what_they_give_on_disk() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let inputs = inputs(folder.path());
        let (_rig, cuda) = rig();
        let local: Arc<dyn Storage> = Arc::new(LocalStorage);
        let on_disk: Vec<Outcome> = inputs.iter().map(|path| outcome(path, &local, &cuda)).collect();
        let memory = MemoryStorage::copied(folder.path());
        memory.be_late(7);
        drop(folder);
        let memory: Arc<dyn Storage> = Arc::new(memory);
        for (path, on_disk) in inputs.iter().zip(&on_disk) {
            assert_eq!(&outcome(path, &memory, &cuda), on_disk, "{}", path.display());
        }
        let loads = on_disk.iter().filter(|outcome| outcome.loaded.starts_with('{')).count();
        assert!(loads >= 12, "{loads} of {} inputs load: the comparison says little", inputs.len());
    });
}

#[test]
#[allow(clippy::print_stdout)] // a test that does not run says so
fn the_corpus_in_memory_gives_what_it_gives_on_disk() {
    let Some(corpus) = std::env::var_os("VRAMP_CORPUS").map(PathBuf::from) else {
        println!("skipped: VRAMP_CORPUS names no folder of checkpoints");
        return;
    };
    let (_rig, cuda) = rig();
    let local: Arc<dyn Storage> = Arc::new(LocalStorage);
    let mut compared = 0;
    for family in std::fs::read_dir(&corpus).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()) {
        let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::copied(&family));
        for case in std::fs::read_dir(&family).unwrap().map(|entry| entry.unwrap().path()) {
            let (on_disk, in_memory) = (outcome(&case, &local, &cuda), outcome(&case, &memory, &cuda));
            assert_eq!(in_memory, on_disk, "{}", case.display());
            compared += 1;
        }
    }
    assert!(compared > 50, "only {compared} cases");
}

#[test]
fn a_storage_that_fails_at_any_call_ends_a_load_with_an_error_that_names_the_file() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        inputs(folder.path());
        let memory = MemoryStorage::copied(folder.path());
        let (_rig, cuda) = rig();
        for name in ["one/model.safetensors", "sharded", "torch/pytorch_model.bin", "deflated.pt", "legacy.pt"] {
            let (path, storage) = (folder.path().join(name), Arc::new(memory.clone()) as Arc<dyn Storage>);
            let right = outcome(&path, &storage, &cuda).loaded;
            let mut failures = 0;
            loop {
                let before = memory.calls();
                memory.fail_at(failures + 1);
                match load(&path, &options(&storage)) {
                    // The failed call was one that a load can do without, or none was left to fail.
                    Ok(_) if memory.calls() - before <= failures => break,
                    Ok(_) => assert_eq!(outcome(&path, &storage, &cuda).loaded, right, "{name}, call {failures}"),
                    Err(error) => {
                        let at = error.path().map(Path::to_owned);
                        assert!(at.is_some_and(|at| at.starts_with(&folder)), "{name}, call {failures}: {error}");
                    }
                }
                failures += 1;
            }
            assert!(failures >= 3, "{name}: {failures} calls");
        }
    });
}

#[test]
fn another_version_between_opening_and_loading_is_a_change() {
    let folder = tempfile::tempdir().unwrap();
    inputs(folder.path());
    let memory = MemoryStorage::copied(folder.path());
    let path = folder.path().join("one/model.safetensors");
    let storage: Arc<dyn Storage> = Arc::new(memory.clone());
    let checkpoint = Checkpoint::open_with(&path, &options(&storage).open).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    memory.insert(Arc::new(vramp::testing::MemoryFile::new(&path, bytes).with_version("second")));
    let loader = vramp::load::Loader::new(Arc::new(CpuDevice::new()), vramp::load::TransferOptions::default());
    let selected = checkpoint.select(&Selection::default()).unwrap();
    let error = loader.prepare(checkpoint, &selected).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Changed && error.to_string().contains("version first before, second now"),
        "{error}"
    );
}
