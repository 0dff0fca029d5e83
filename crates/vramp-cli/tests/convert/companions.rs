//! `vramp convert --copy-files`: what goes along with the weights, and what is left and said to be.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use super::{converted_with_warnings, mixed, names, path};
use crate::cli::{folder, vramp};

/// A model as sentence-transformers lays it out, with all that lies about in such folders.
fn model(folder: &Path) -> String {
    let model = folder.join("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::rename(mixed(folder), model.join("model.safetensors")).unwrap();
    for (name, text) in FILES {
        let path = model.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    model.to_str().unwrap().to_owned()
}

const FILES: &[(&str, &[u8])] = &[
    ("config.json", b"{}"),
    ("modules.json", b"[]"),
    ("1_Pooling/config.json", b"{\"pooling\": 1}"),
    ("2_Dense/config.json", b"{}"),
    ("2_Dense/model.safetensors", b"weights"),
    ("2_Dense/pytorch_model.bin", b"weights"),
    ("tokenizer.json", b"{}"),
    ("sentencepiece.bpe.model", b"\n\x0e"),
    ("vocab.txt", b"[PAD]"),
    ("chat_template.jinja", b"{{ x }}"),
    ("modeling_own.py", b"class Own: pass"),
    ("README.md", b"# model"),
    ("training_args.bin", b"x"),
    ("trainer_state.json", b"{}"),
    ("checkpoint-10/config.json", b"{}"),
    ("vocabulary.json", b"\x80\x04\x95a pickle"),
    ("model.safetensors.index.json.bak", b"{}"),
    (".git/config.json", b"{}"),
    ("a/b/c/d/e/config.json", b"{}"),
];

fn not_copied(said: &Value) -> BTreeMap<&str, &str> {
    let left = said["not_copied"].as_array().unwrap().iter();
    left.map(|left| (left["name"].as_str().unwrap(), left["why"].as_str().unwrap())).collect()
}

#[test]
fn all_that_a_loader_needs_goes_along_and_the_rest_is_listed() {
    let folder = folder();
    let (from, out) = (model(folder.path()), path(folder.path(), "out"));
    std::fs::write(folder.path().join("secret.json"), "{}").unwrap();
    symlink("../secret.json", Path::new(&from).join("outside.json")).unwrap();
    symlink("config.json", Path::new(&from).join("inside.json")).unwrap();
    let said = converted_with_warnings(&[&from, &out, "--copy-files"]);
    let copied = [
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "chat_template.jinja",
        "config.json",
        "inside.json",
        "modeling_own.py",
        "modules.json",
        "sentencepiece.bpe.model",
        "tokenizer.json",
        "vocab.txt",
    ];
    let mut found: Vec<&str> = said["copied"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, copied.map(|name| format!("{out}/{name}")));
    for name in copied {
        let read = |folder: &str| std::fs::read(Path::new(folder).join(name)).unwrap();
        assert_eq!(read(&out), read(&from), "{name}");
        assert!(!Path::new(&out).join(name).is_symlink());
    }
    let left = not_copied(&said);
    let expected = [
        (".git", "hidden"),
        ("2_Dense/model.safetensors", "weights"),
        ("2_Dense/pytorch_model.bin", "weights"),
        ("README.md", "nothing that a loader"),
        ("a/b/c/d/e", "too deep"),
        ("checkpoint-10", "a training run's"),
        ("model.safetensors.index.json.bak", "nothing that a loader"),
        ("outside.json", "leaves the folder"),
        ("trainer_state.json", "nothing that a loader"),
        ("training_args.bin", "pickle"),
        ("vocabulary.json", "a pickle"),
    ];
    assert_eq!(left.keys().copied().collect::<Vec<_>>(), expected.map(|(name, _)| name));
    for (name, why) in expected {
        assert!(left[name].contains(why), "{name}: {}", left[name]);
    }
    assert!(!names(Path::new(&out)).iter().any(|name| name == "checkpoint-10" || name == "README.md"));
    let text = vramp(&["convert", &from, &path(folder.path(), "again"), "--copy-files"]).out;
    assert!(text.contains("\nnot copied\n") && text.contains("2_Dense/model.safetensors: weights"), "{text}");
}

#[test]
fn another_configuration_is_replaced_only_when_asked_for() {
    let folder = folder();
    let (from, out) = (model(folder.path()), path(folder.path(), "out"));
    std::fs::create_dir_all(Path::new(&out).join("1_Pooling")).unwrap();
    let theirs = Path::new(&out).join("1_Pooling/config.json");
    std::fs::write(&theirs, "{\"pooling\": 2}").unwrap();
    let args = ["convert", &from, &out, "--copy-files", "--json"];
    let said = vramp(&args);
    assert_eq!(said.code, Some(6), "{}", said.err);
    assert!(said.err.contains("1_Pooling/config.json") && said.err.contains("--overwrite"), "{}", said.err);
    assert_eq!(names(Path::new(&out)), ["1_Pooling"], "nothing was written");
    let said = vramp(&[&args[..], &["--overwrite"]].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(std::fs::read(&theirs).unwrap(), b"{\"pooling\": 1}");
    // The same files again are no conflict, and the result may lie within.
    let within = format!("{from}/converted");
    converted_with_warnings(&[&from, &within, "--copy-files"]);
    converted_with_warnings(&[&from, &within, "--copy-files", "--overwrite"]);
    assert!(!Path::new(&within).join("converted").exists());
}

/// The files of a snapshot in the Hugging Face cache are links into `blobs`.
#[test]
fn a_snapshot_of_the_cache_has_its_files_copied_through_its_links() {
    let folder = folder();
    let file = mixed(folder.path());
    let repository = folder.path().join("models--o--m");
    let snapshot = repository.join("snapshots/abc");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir(repository.join("blobs")).unwrap();
    std::fs::rename(file, repository.join("blobs/1")).unwrap();
    std::fs::write(repository.join("blobs/2"), "{}").unwrap();
    symlink("../../blobs/1", snapshot.join("model.safetensors")).unwrap();
    symlink("../../blobs/2", snapshot.join("config.json")).unwrap();
    let out = path(folder.path(), "out");
    let said = converted_with_warnings(&[snapshot.to_str().unwrap(), &out, "--copy-files"]);
    assert_eq!(not_copied(&said), BTreeMap::new());
    assert_eq!(names(Path::new(&out)), ["config.json", "model.safetensors"]);
}
