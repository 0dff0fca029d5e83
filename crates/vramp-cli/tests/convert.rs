//! `vramp convert`: checkpoints written anew. The safetensors crate reads what was written; modes, links, signals, power.

mod companions;
mod kinds;
mod limits;
mod replace;

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use vramp::checkpoint::Checkpoint;
use vramp::durable::{FileStore, Found, NewFile, Store, is_temporary};
use vramp::error::Error;
use vramp::save::{ConvertOptions, Target, convert};
use vramp::testing::torch::{Pickle, TensorOver, archive, state_dict};
use vramp::testing::{Random, safetensors};

use crate::cli::{command, folder, interrupted, signal, until, vramp};

/// Type, shape and bytes by name.
type Tensors = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

fn names(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = std::fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

/// What the reference crate reads in these files.
fn reference(files: &[PathBuf]) -> Tensors {
    let mut tensors = Tensors::new();
    for file in files {
        let bytes = std::fs::read(file).unwrap();
        for (name, view) in ::safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let tensor = (view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec());
            assert!(tensors.insert(name.clone(), tensor).is_none(), "{name} is in two files");
        }
    }
    tensors
}

fn metadata(file: &Path) -> BTreeMap<String, String> {
    Checkpoint::open(file).unwrap().metadata().clone()
}

/// The weight files that a conversion said it wrote.
fn outputs(said: &Value) -> Vec<PathBuf> {
    let outputs = said["outputs"].as_array().unwrap().iter().map(|path| PathBuf::from(path.as_str().unwrap()));
    outputs.filter(|path| path.extension().is_some_and(|end| end == "safetensors" || end == "sft")).collect()
}

#[track_caller]
fn converted(args: &[&str]) -> Value {
    let said = vramp(&[&["convert", "--json"], args].concat());
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{args:?}");
    said.json()
}

/// The same where a person is told something.
#[track_caller]
fn converted_with_warnings(args: &[&str]) -> Value {
    let said = vramp(&[&["convert", "--json"], args].concat());
    assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
    said.json()
}

/// Tensors of several types in one file, of 1.3 MB, with text in its metadata.
fn mixed(folder: &Path) -> String {
    let mut random = Random::new(9);
    let mut bytes = |len: usize| random.bytes(len);
    let (a, b, c, d) = (bytes(400_000), bytes(600_000), bytes(300_008), bytes(3));
    let tensors: &[(&str, &str, &[usize], &[u8])] = &[
        ("layer.10.w", "BF16", &[200, 1000], &a),
        ("layer.2.w", "F32", &[150_000], &b),
        ("count", "I64", &[37_501], &c),
        ("flags", "U8", &[3], &d),
        ("nothing", "F32", &[0, 7], &[]),
        ("scalar", "F64", &[], &[1, 2, 3, 4, 5, 6, 7, 8]),
    ];
    let file = folder.join("mixed.safetensors");
    std::fs::write(&file, safetensors(tensors, json!({"format": "pt", "note": "kept"}))).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn files_become_folders_and_folders_files_and_every_byte_stays() {
    let folder = folder();
    let file = mixed(folder.path());
    let expected = reference(&[file.clone().into()]);
    let sharded = path(folder.path(), "sharded");
    let said = converted(&[&file, &sharded, "--max-shard-size", "700kB", "--check"]);
    let files = outputs(&said);
    assert_eq!(
        names(Path::new(&sharded)),
        [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json"
        ]
    );
    assert_eq!((said["tensors"].as_u64(), said["bytes"].as_u64()), (Some(6), Some(1_300_019)));
    assert_eq!(reference(&files), expected);
    for file in &files {
        assert_eq!(metadata(file), BTreeMap::from([("format".into(), "pt".into()), ("note".into(), "kept".into())]));
    }
    let index: Value =
        serde_json::from_slice(&std::fs::read(Path::new(&sharded).join("model.safetensors.index.json")).unwrap())
            .unwrap();
    assert_eq!(index["metadata"]["total_size"], 1_300_019);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), 6);

    let one = path(folder.path(), "one.safetensors");
    assert_eq!(outputs(&converted(&[&sharded, &one, "--check"])), [PathBuf::from(&one)]);
    assert_eq!(reference(&[one.into()]), expected);
    // In place: to other files, and to a single one, which an index would hide.
    let said = converted(&[&sharded, &sharded, "--max-shard-size", "700kB"]);
    assert_eq!(reference(&outputs(&said)), expected);
    assert!(said["warnings"][0].as_str().unwrap().contains("removed 3 files"), "{said}");
    let said = converted(&[&sharded, &sharded]);
    assert_eq!(names(Path::new(&sharded)), ["model.safetensors"]);
    assert_eq!(reference(&outputs(&said)), expected);
}

#[test]
fn a_folder_that_was_converted_is_found_whole_by_load_and_verify() {
    let folder = folder();
    let (file, sharded) = (mixed(folder.path()), path(folder.path(), "sharded"));
    converted(&[&file, &sharded, "--max-shard-size", "400kB"]);
    let said = vramp(&["verify", &sharded, "--spec", &file]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    let digests =
        |path: &str| vramp(&["load", path, "--device", "cpu", "--digests", "--json"]).json()["tensors"].clone();
    assert_eq!(digests(&sharded), digests(&file));
}

#[test]
fn people_are_told_what_was_written() {
    let folder = folder();
    let (file, out) = (mixed(folder.path()), path(folder.path(), "out.safetensors"));
    let said = vramp(&["convert", &file, &out, "--exclude", "flags"]);
    assert_eq!(said.code, Some(0));
    assert!(said.out.starts_with("5 tensors, 1.30 MB"), "{}", said.out);
    assert!(said.out.contains("out.safetensors\n\nnot in the result\n  flags: not selected\n"), "{}", said.out);
}

// ---- names and ties

#[test]
fn names_lose_their_prefix_and_what_is_left_out_is_listed() {
    let folder = folder();
    let file = folder.path().join("m.safetensors");
    let tensors: &[(&str, &str, &[usize], &[u8])] =
        &[("module.a", "U8", &[1], &[1]), ("module.b", "U8", &[1], &[2]), ("opt.c", "U8", &[1], &[3])];
    std::fs::write(&file, safetensors(tensors, json!({"alias": "module.a"}))).unwrap();
    let out = path(folder.path(), "out.safetensors");
    let args = [file.to_str().unwrap(), &out, "--strip-prefix", "module.", "--include", "module.*"];
    let said = converted(&args);
    assert_eq!(reference(&outputs(&said)).into_keys().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(said["skipped"], json!([{"name": "opt.c", "why": "not selected"}]));
    assert_eq!(
        metadata(Path::new(&out)),
        BTreeMap::from([("format".into(), "pt".into())]),
        "the old record is wrong now"
    );
}

#[test]
fn tied_tensors_are_written_twice_or_recorded() {
    let folder = folder();
    let file = folder.path().join("m.safetensors");
    let tensors: &[(&str, &str, &[usize], &[u8])] = &[("embed", "U8", &[2], &[1, 2]), ("x", "U8", &[1], &[3])];
    std::fs::write(&file, safetensors(tensors, json!({"format": "pt", "lm_head": "embed"}))).unwrap();
    let file = file.to_str().unwrap();
    let (twice, once) = (path(folder.path(), "twice.safetensors"), path(folder.path(), "once"));
    let said = converted(&[file, &twice, "--check"]);
    let both = reference(&outputs(&said));
    assert_eq!((both.len(), &both["lm_head"].2, &both["embed"].2), (3, &vec![1, 2], &vec![1, 2]));
    assert_eq!(metadata(Path::new(&twice)), BTreeMap::from([("format".into(), "pt".into())]));

    let said = converted(&[file, &once, "--ties", "alias", "--max-shard-size", "2", "--check"]);
    assert_eq!((&said["ties"], said["tensors"].as_u64()), (&json!({"lm_head": "embed"}), Some(2)));
    assert_eq!(reference(&outputs(&said)).into_keys().collect::<Vec<_>>(), ["embed", "x"]);
    let loaded = vramp(&["load", &once, "--device", "cpu", "--digests", "--json"]).json();
    assert_eq!(loaded["tensors"]["lm_head"]["sha256"], loaded["tensors"]["embed"]["sha256"]);
}

#[test]
fn names_over_one_storage_are_one_tensor_if_their_bytes_say_so() {
    let folder = folder();
    let file = folder.path().join("m.pt");
    let over = |offset: i64, shape: &'static [i64], stride: &'static [i64]| TensorOver {
        key: "0",
        storage: "ByteStorage",
        count: 6,
        offset,
        shape,
        stride,
        bits: &[],
    };
    let same = || over(0, &[2], &[1]);
    let pickle = state_dict(&[
        ("a", same()),
        ("b", same()),
        ("c", over(1, &[2], &[1])),
        ("d", over(0, &[1, 2], &[2, 1])),
        ("e", over(4, &[2], &[1])),
        ("format", same()),
    ]);
    std::fs::write(&file, archive(&pickle, &[("0", &[1, 2, 9, 9, 1, 2])])).unwrap();
    let (file, out) = (file.to_str().unwrap(), path(folder.path(), "out.safetensors"));
    let said = converted_with_warnings(&[file, &out, "--ties", "alias", "--check"]);
    let ties = said["ties"].as_object().unwrap();
    assert_eq!(ties.get("b"), Some(&json!("a")), "{said}");
    let found = reference(&[out.into()]);
    assert!(["a", "c", "d", "format"].iter().all(|name| found.contains_key(*name)), "{:?}", found.keys());
    let all = |name: &str| found.get(name).or_else(|| found.get(ties[name].as_str().unwrap())).unwrap().2.clone();
    let bytes = ["a", "b", "c", "d", "e", "format"].map(all);
    assert_eq!(bytes, [[1, 2], [1, 2], [2, 9], [1, 2], [1, 2], [1, 2]]);
    let warnings = said["warnings"].to_string();
    assert!(warnings.contains("a key of the metadata has that name"), "{warnings}");
}

#[test]
fn a_checkpoint_without_anything_that_can_be_converted_is_refused_and_says_why() {
    let folder = folder();
    let file = folder.path().join("m.pt");
    let pickle = Pickle::new().raw(b"}(").text("s").global("torch._utils", "_rebuild_sparse_tensor").raw(b"(NNtRu");
    std::fs::write(&file, archive(&pickle.stop(), &[])).unwrap();
    let out = path(folder.path(), "out.safetensors");
    let said = vramp(&["convert", file.to_str().unwrap(), &out, "--json"]);
    let error = said.error();
    assert_eq!((said.code, &error["kind"]), (Some(3), &json!("unsupported")));
    assert!(error["message"].as_str().unwrap().contains("1 sparse tensor (\"s\")"), "{error}");
    assert_eq!(names(folder.path()), ["m.pt"]);
}

// ---- casts

#[test]
fn casts_and_scales_give_what_a_load_gives_and_are_said() {
    let folder = folder();
    let file = folder.path().join("m.safetensors");
    let weight: Vec<u8> = (0..16).map(|at| 0x30 + at).collect();
    let scale = 0.5f32.to_le_bytes();
    let plain: Vec<u8> = [1f32, 1.0039, -3.3].iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensors: &[(&str, &str, &[usize], &[u8])] = &[
        ("w.weight", "F8_E4M3", &[4, 4], &weight),
        ("w.weight_scale_inv", "F32", &[1], &scale),
        ("n", "F32", &[3], &plain),
        ("steps", "I64", &[1], &[7, 0, 0, 0, 0, 0, 0, 0]),
    ];
    std::fs::write(&file, safetensors(tensors, json!({}))).unwrap();
    let (file, out) = (file.to_str().unwrap(), path(folder.path(), "out.safetensors"));
    let said = converted(&[file, &out, "--dtype", "bf16", "--check"]);
    assert_eq!(said["scales"], json!({"w.weight": "w.weight_scale_inv"}));
    assert_eq!(said["skipped"], json!([{"name": "w.weight_scale_inv", "why": "scales that have been applied"}]));
    let load = ["load", file, "--device", "cpu", "--dtype", "bf16"];
    for plan in [&[][..], &["--plan-only"]] {
        assert_eq!(vramp(&[&load, plan, &["--json"]].concat()).json()["scales"], said["scales"]);
        let text = vramp(&[&load[..], plan].concat()).out;
        assert!(text.contains("\nmultiplied by scales\n  w.weight by w.weight_scale_inv\n"), "{text}");
    }
    let digests =
        |args: &[&str]| vramp(&[args, &["--device", "cpu", "--digests", "--json"]].concat()).json()["tensors"].clone();
    assert_eq!(digests(&["load", &out]), digests(&["load", file, "--dtype", "bf16"]));
    assert_eq!(reference(&[out.into()])["steps"].0, "I64");
}

#[test]
fn numbers_that_would_become_infinite_are_all_named_unless_they_may() {
    let folder = folder();
    let file = folder.path().join("m.safetensors");
    // More than a batch apart: the second is found although the first has already failed.
    let large = 1e6f32.to_le_bytes();
    let mut far = vec![0; 136 << 20];
    far[..4].copy_from_slice(&large);
    let tensors: &[(&str, &str, &[usize], &[u8])] =
        &[("a", "F32", &[1], &large), ("b", "F32", &[(136 << 20) / 4], &far), ("c", "I64", &[0], &[])];
    std::fs::write(&file, safetensors(tensors, json!({}))).unwrap();
    let (file, out) = (file.to_str().unwrap(), path(folder.path(), "out.safetensors"));
    let said = vramp(&["convert", file, &out, "--dtype", "f16", "--json"]);
    let error = said.error();
    assert_eq!((said.code, &error["kind"]), (Some(3), &json!("overflow")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("\"a\" (1 number), \"b\" (1 number)"), "{message}");
    assert_eq!(names(folder.path()), ["m.safetensors"]);
    let said = converted_with_warnings(&[file, &out, "--dtype", "f16", "--allow-overflow"]);
    let expected = "finite numbers became infinite in F16: \"a\" (1 number), \"b\" (1 number)";
    assert_eq!(said["warnings"], json!([expected]));
}

// ---- files

#[test]
fn a_file_keeps_its_mode_and_a_link_is_replaced() {
    let folder = folder();
    let file = mixed(folder.path());
    let expected = reference(&[file.clone().into()]);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
    let before = std::fs::metadata(&file).unwrap().ino();
    converted(&[&file, &file, "--check"]);
    let after = std::fs::metadata(&file).unwrap();
    assert_eq!((after.mode() & 0o7777, after.ino() == before), (0o640, false));
    assert_eq!(reference(&[file.clone().into()]), expected);

    let link = folder.path().join("link.safetensors");
    symlink(&file, &link).unwrap();
    let said = converted(&[&file, link.to_str().unwrap(), "--include", "flags"]);
    assert!(!link.is_symlink() && reference(&outputs(&said)).len() == 1);
    assert_eq!(reference(&[file.into()]), expected);
}

#[test]
fn files_that_go_along_are_copied_when_asked_for() {
    let folder = folder();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::rename(mixed(folder.path()), model.join("model.safetensors")).unwrap();
    std::fs::write(model.join("config.json"), r#"{"torch_dtype": "bfloat16"}"#).unwrap();
    for (name, text) in [("tokenizer.json", "{}"), ("README.md", "no"), ("training_args.bin", "no")] {
        std::fs::write(model.join(name), text).unwrap();
    }
    let (model, out) = (model.to_str().unwrap(), path(folder.path(), "out"));
    converted(&[model, &out]);
    assert_eq!(names(Path::new(&out)), ["model.safetensors"]);
    let said = converted_with_warnings(&[model, &out, "--copy-files", "--dtype", "f32", "--overwrite"]);
    assert_eq!(names(Path::new(&out)), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(said["copied"].as_array().unwrap().len(), 2);
    assert!(said["warnings"].to_string().contains("torch_dtype"), "{said}");
    assert_eq!(converted(&[&out, &out, "--copy-files"])["copied"], json!([]));
}

#[test]
fn a_place_that_cannot_be_written_to_is_an_error_before_any_work() {
    let folder = folder();
    let file = mixed(folder.path());
    let missing = path(folder.path(), "no/such/out.safetensors");
    let said = vramp(&["convert", &file, &missing]);
    assert_eq!(said.code, Some(4));
    assert!(said.err.contains("no/such: there is no such folder to write to; make it first"), "{}", said.err);
    let said = vramp(&["convert", &file, "/dev/null/out.safetensors"]);
    assert_eq!(said.code, Some(4), "{}", said.err);
    // A name that ends in .safetensors and is a device: root could replace it.
    let link = path(folder.path(), "folder.safetensors");
    std::fs::create_dir(&link).unwrap();
    let said = vramp(&["convert", &file, &link]);
    assert_eq!(said.code, Some(6), "{}", said.err);
    assert_eq!(names(folder.path()), ["folder.safetensors", "mixed.safetensors"]);
}

/// Local files, with one byte of what is written turned.
struct Turning;

impl Store for Turning {
    fn examine(&self, path: &Path) -> Result<Option<Found>, Error> {
        FileStore.examine(path)
    }

    fn is_folder(&self, path: &Path) -> Result<bool, Error> {
        FileStore.is_folder(path)
    }

    fn list(&self, folder: &Path) -> Result<Vec<String>, Error> {
        FileStore.list(folder)
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
        FileStore.read(path, limit)
    }

    fn free_bytes(&self, folder: &Path) -> Option<u64> {
        FileStore.free_bytes(folder)
    }

    fn make_folder(&self, path: &Path) -> Result<(), Error> {
        FileStore.make_folder(path)
    }

    fn create(&self, path: &Path, mode: Option<u32>) -> Result<Box<dyn NewFile>, Error> {
        Ok(Box::new(Turned(FileStore.create(path, mode)?)))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), Error> {
        FileStore.rename(from, to)
    }

    fn sync_folder(&self, folder: &Path) -> Result<(), Error> {
        FileStore.sync_folder(folder)
    }

    fn remove(&self, path: &Path) -> Result<(), Error> {
        FileStore.remove(path)
    }

    fn lock(&self, folder: &Path) -> Result<Box<dyn Send>, Error> {
        FileStore.lock(folder)
    }
}

struct Turned(Box<dyn NewFile>);

impl NewFile for Turned {
    fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let mut bytes = bytes.to_vec();
        if let [.., flag, _] = bytes.as_mut_slice() {
            *flag ^= 1; // the last tensor of the file is "flags"
        }
        self.0.append(&bytes)
    }

    fn sync(self: Box<Self>) -> Result<Box<dyn Send>, Error> {
        self.0.sync()
    }
}

#[test]
fn a_check_finds_what_the_disk_did_not_keep_and_nothing_is_put_in_place() {
    let folder = folder();
    let checkpoint = Checkpoint::open(mixed(folder.path())).unwrap();
    let target = Target::of(folder.path().join("out.safetensors"));
    let options = ConvertOptions::default().check(true);
    let error = convert(&checkpoint, &Turning, &target, &options).unwrap_err();
    assert_eq!((error.kind().as_str(), error.exit_code()), ("mismatch", 1));
    assert!(error.to_string().contains("\"flags\"") && !error.to_string().contains("layer"), "{error}");
    assert_eq!(names(folder.path()), ["mixed.safetensors"]);
    convert(&checkpoint, &Turning, &target, &ConvertOptions::default()).unwrap();
}

#[test]
fn one_of_several_files_of_a_checkpoint_is_not_replaced_alone() {
    let folder = folder();
    let file = mixed(folder.path());
    let out = path(folder.path(), "out");
    converted(&[&file, &out, "--max-shard-size", "500000"]);
    let before = reference(&outputs(&converted(&[&out, &path(folder.path(), "copy")])));
    let shard = std::fs::read_dir(&out).unwrap().map(|it| it.unwrap().path());
    let shard = shard.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).min().unwrap();
    let said = vramp(&["convert", &file, shard.to_str().unwrap(), "--json"]);
    assert_eq!((said.code, &said.error()["kind"]), (Some(6), &json!("exists")), "{}", said.err);
    assert!(said.error()["message"].as_str().unwrap().contains("whose others would no longer fit it"), "{}", said.err);
    // Without an index, and a file beside them, which is no part.
    std::fs::remove_file(Path::new(&out).join("model.safetensors.index.json")).unwrap();
    assert_eq!(vramp(&["convert", &file, shard.to_str().unwrap()]).code, Some(6));
    let again = reference(&outputs(&converted(&[&out, &path(folder.path(), "again")])));
    assert!(again == before);
}

#[test]
fn new_names_are_no_more_open_than_what_they_replace() {
    let folder = folder();
    let (file, out) = (mixed(folder.path()), folder.path().join("out"));
    let out_path = out.to_str().unwrap();
    converted(&[&file, out_path]);
    let modes = || -> BTreeMap<String, u32> {
        let mode = |name: String| {
            let mode = std::fs::metadata(out.join(&name)).unwrap().permissions().mode() & 0o777;
            (name, mode)
        };
        names(&out).into_iter().map(mode).collect()
    };
    std::fs::set_permissions(out.join("model.safetensors"), std::fs::Permissions::from_mode(0o600)).unwrap();
    for args in [&["--max-shard-size", "500000"][..], &["--max-shard-size", "400000"], &[]] {
        let said = vramp(&[&["convert", out_path, out_path], args].concat());
        assert_eq!(said.code, Some(0), "{}", said.err);
        assert!(modes().values().all(|mode| *mode == 0o600), "{args:?}: {:?}", modes());
    }
}

#[test]
fn a_companion_that_cannot_be_copied_is_an_error_before_any_work() {
    let folder = folder();
    let (source, out) = (folder.path().join("in"), folder.path().join("out"));
    std::fs::create_dir(&source).unwrap();
    let file = mixed(&source);
    symlink("../nowhere", source.join("config.json")).unwrap();
    let args = ["convert", &file, out.to_str().unwrap(), "--copy-files"];
    let said = vramp(&args);
    assert!(said.code == Some(4) && said.err.contains("config.json"), "{}", said.err);
    std::fs::remove_file(source.join("config.json")).unwrap();
    std::fs::write(source.join("config.json"), "{}").unwrap();
    std::fs::create_dir_all(out.join("config.json")).unwrap();
    let said = vramp(&args);
    assert!(said.code == Some(3) && said.err.contains("cannot be replaced by a copy"), "{}", said.err);
    assert_eq!(names(&out), ["config.json"]);
}

// ---- signals

/// Under `ulimit -f` the kernel sends a signal that ends the process, unless it is ignored: the write fails then.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_like_a_full_disk() {
    let folder = folder();
    for (len, blocks) in [(100_000, 20), (24 << 20, 20_001)] {
        let file = path(folder.path(), "in.safetensors");
        std::fs::write(&file, safetensors(&[("a", "U8", &[len], &vec![1; len])], json!({}))).unwrap();
        for out in ["out.safetensors", "out"] {
            let limited = format!("ulimit -f {blocks} && exec \"$@\"");
            let vramp = ["sh", env!("CARGO_BIN_EXE_vramp"), "convert", &file, &path(folder.path(), out)];
            let said = std::process::Command::new("sh").args(["-c", &limited]).args(vramp).output().unwrap();
            let err = String::from_utf8(said.stderr).unwrap();
            assert_eq!(said.status.code(), Some(4), "{err}");
            assert!(err.contains("ulimit -f") && err.contains(".vramp-"), "{err}");
            assert_eq!(names(folder.path()), ["in.safetensors"]);
        }
    }
}

/// A checkpoint that takes seconds to write, of 8 GiB, all of it a hole.
fn large(folder: &Path) -> String {
    let len: u64 = 4 << 30;
    let tensor = |at: u64| json!({"dtype": "U8", "shape": [len], "data_offsets": [at, at + len]});
    let header = json!({"a": tensor(0), "b": tensor(len)}).to_string();
    let path = folder.join("large.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + 2 * len).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn an_interrupted_conversion_leaves_nothing_behind() {
    let folder = folder();
    let file = large(folder.path());
    for (out, names_before) in [("out.safetensors", 1), ("out", 1)] {
        let said = interrupted(&["convert", &file, &path(folder.path(), out), "--json"], &["-INT"]);
        assert_eq!((said.code, said.out.as_str()), (Some(130), ""), "{}", said.err);
        assert_eq!(said.error()["kind"], "cancelled");
        assert_eq!(names(folder.path()).len(), names_before, "{:?}", names(folder.path()));
    }
}

#[test]
fn a_killed_conversion_leaves_the_old_file_and_a_name_that_says_what_it_is() {
    let folder = folder();
    let (file, out) = (large(folder.path()), folder.path().join("out.safetensors"));
    std::fs::write(&out, b"old").unwrap();
    let arguments = ["convert", &file, out.to_str().unwrap(), "--overwrite"];
    let mut child = command(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let left = || names(folder.path()).into_iter().filter(|name| is_temporary(name)).collect::<Vec<_>>();
    until(|| !left().is_empty());
    signal(&child, "-KILL");
    child.wait().unwrap();
    assert_eq!((left().len(), std::fs::read(&out).unwrap().as_slice()), (1, &b"old"[..]));
    assert_eq!(names(folder.path()).len(), 3);
    // The next one removes it, and says so.
    let small = mixed(folder.path());
    let said = converted_with_warnings(&[&small, out.to_str().unwrap(), "--overwrite"]);
    assert!(said["warnings"].to_string().contains("removed 1 temporary file that a killed save had left"), "{said}");
    assert_eq!(left(), [""; 0]);
}

/// Two that are alive: neither takes the other's files for a killed one's.
#[test]
fn a_conversion_beside_another_one_leaves_its_files_alone() {
    let folder = folder();
    let (file, out) = (large(folder.path()), path(folder.path(), "large-out.safetensors"));
    let child = command(&["convert", &file, &out]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let left = || names(folder.path()).into_iter().filter(|name| is_temporary(name)).collect::<Vec<_>>();
    until(|| !left().is_empty());
    let before = left();
    let small = mixed(folder.path());
    let said = converted(&[&small, &path(folder.path(), "small-out.safetensors")]);
    assert_eq!(said["warnings"], json!([]));
    assert_eq!(left(), before);
    signal(&child, "-KILL");
    { child }.wait().unwrap();
}
