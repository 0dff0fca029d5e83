//! Inputs and outputs of particular kinds: `.sft`, other endings, files that disagree, and checkpoints of nothing.

use std::path::Path;

use serde_json::json;
use vramp::testing::safetensors;

use super::{converted, names, path, reference};
use crate::cli::{folder, vramp};

fn small(path: &Path, tensors: &[(&str, &[usize], &[u8])], metadata: serde_json::Value) -> String {
    let tensors: Vec<_> = tensors.iter().map(|(name, shape, bytes)| (*name, "U8", *shape, *bytes)).collect();
    std::fs::write(path, safetensors(&tensors, metadata)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn sft_is_read_and_written_as_a_file() {
    let folder = folder();
    let from = small(&folder.path().join("in.sft"), &[("a", &[2], &[1, 2])], json!({}));
    for name in ["out.sft", "OUT.SFT"] {
        let out = path(folder.path(), name);
        converted(&[&from, &out]);
        assert!(Path::new(&out).is_file());
        assert_eq!(reference(&[out.into()])["a"].2, [1, 2]);
    }
}

#[test]
fn endings_of_other_formats_are_refused_before_any_work() {
    let folder = folder();
    let from = small(&folder.path().join("in.safetensors"), &[("a", &[2], &[1, 2])], json!({}));
    for name in [
        "o.pt",
        "o.bin",
        "o.PTH",
        "o.ckpt",
        "o.gguf",
        "o.h5",
        "o.onnx",
        "o.npz",
        "o.pickle",
        "o.msgpack",
        "o.safetensor",
    ] {
        let said = vramp(&["convert", &from, &path(folder.path(), name)]);
        assert_eq!(said.code, Some(2), "{name}: {}", said.err);
        assert!(said.err.contains(name) && said.err.contains("safetensors"), "{}", said.err);
    }
    assert_eq!(names(folder.path()), ["in.safetensors"]);
    // A folder that is there is one, whatever its name.
    std::fs::create_dir(folder.path().join("model.bin")).unwrap();
    converted(&[&from, &path(folder.path(), "model.bin")]);
}

#[test]
fn files_that_disagree_on_their_metadata_are_told() {
    let folder = folder();
    let model = folder.path().join("m");
    std::fs::create_dir(&model).unwrap();
    let part = |at: u8| model.join(format!("model-{at:05}-of-00003.safetensors"));
    let long = "x".repeat(300);
    small(&part(1), &[("a", &[1], &[1])], json!({"format": "pt", "rank": "0", "same": "s", "long": long, "one": "1"}));
    small(&part(2), &[("b", &[1], &[2])], json!({"format": "pt", "rank": "1", "same": "s", "two": "2"}));
    small(&part(3), &[("c", &[1], &[3])], json!({"format": "pt", "rank": "2", "same": "s", "long": "short"}));
    let said = vramp(&["convert", model.to_str().unwrap(), &path(folder.path(), "out"), "--json"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let warnings = said.json()["warnings"].clone();
    assert_eq!(warnings.as_array().unwrap().len(), 1, "{warnings}");
    let warning = warnings[0].as_str().unwrap();
    assert!(warning.contains("\"rank\" is \"0\" as in \"model-00001-of-00003.safetensors\""), "{warning}");
    assert!(warning.contains("not as in \"model-00002-of-00003.safetensors\""), "{warning}");
    assert!(warning.contains("\"long\" is \"xxx") && warning.len() < 600, "{warning}");
    assert!(!warning.contains("same") && !warning.contains("\"one\"") && !warning.contains("format"), "{warning}");
    let metadata = super::metadata(&folder.path().join("out/model.safetensors"));
    assert_eq!((metadata["rank"].as_str(), metadata["long"].len()), ("0", 300));
}

#[test]
fn a_checkpoint_of_nothing_is_an_error_to_convert_and_a_warning_to_look_at() {
    let folder = folder();
    let none = small(&folder.path().join("none.safetensors"), &[], json!({}));
    let zero3: &[(&str, &[usize], &[u8])] = &[("model.embed", &[0], &[]), ("model.norm", &[0], &[])];
    let zero3 = small(&folder.path().join("zero3.safetensors"), zero3, json!({}));
    let one_of_two: &[(&str, &[usize], &[u8])] = &[("empty", &[0], &[]), ("full", &[1], &[7])];
    let fine = small(&folder.path().join("fine.safetensors"), one_of_two, json!({}));
    for (file, said_of_it) in [(&none, "holds no tensor"), (&zero3, "DeepSpeed ZeRO-3")] {
        for out in ["out.safetensors", "out"] {
            let said = vramp(&["convert", file, &path(folder.path(), out), "--json"]);
            let message = said.error()["message"].as_str().unwrap().to_owned();
            assert_eq!(said.code, Some(3), "{message}");
            assert!(message.contains(said_of_it) && message.contains(file.as_str()), "{message}");
        }
        for args in [&["inspect", file.as_str()][..], &["load", file, "--device", "cpu"]] {
            let said = vramp(&[args, &["--json"]].concat());
            assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
            assert!(said.json()["warnings"].to_string().contains(said_of_it), "{args:?}: {}", said.out);
        }
    }
    assert_eq!(names(folder.path()), ["fine.safetensors", "none.safetensors", "zero3.safetensors"]);
    converted(&[&fine, &path(folder.path(), "out.safetensors")]);
}
