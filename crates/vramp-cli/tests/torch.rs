//! PyTorch's files by the program: what is said of names that share their bytes, and of tensors that cannot be loaded.

use std::path::PathBuf;

use serde_json::json;
use vramp::testing::torch::{Pickle, TensorOver, archive, state_dict};

use crate::cli::vramp;

fn written(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.pt");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn floats<'a>(key: &'a str, shape: &'a [i64], stride: &'a [i64]) -> TensorOver<'a> {
    let count = shape.iter().product();
    TensorOver { key, storage: "FloatStorage", count, offset: 0, shape, stride, bits: &[] }
}

#[test]
fn the_program_says_which_names_share_their_bytes() {
    let whole = || floats("0", &[6, 4], &[4, 1]);
    let values: Vec<u8> = (0..24).flat_map(|number| (number as f32).to_le_bytes()).collect();
    let file = archive(&state_dict(&[("embed", whole()), ("head", whole())]), &[("0", &values)]);
    let (_dir, path) = written(&file);
    let path = path.to_str().unwrap();
    let inspected = vramp(&["inspect", path, "--json"]).json();
    assert_eq!(inspected["ties"], json!({"head": "embed"}));
    assert_eq!((&inspected["total_bytes"], &inspected["parameters"]), (&96.into(), &24.into()));
    assert!(vramp(&["inspect", path]).out.contains("head is embed"));
    let loaded = vramp(&["load", path, "--device", "cpu", "--digests", "--json"]).json();
    assert_eq!(loaded["tensors"]["head"]["same_as"], "embed");
    assert_eq!(loaded["tensors"]["head"]["sha256"], loaded["tensors"]["embed"]["sha256"]);
    assert_eq!((&loaded["report"]["tensors"], &loaded["report"]["names"]), (&1.into(), &2.into()));
    assert!(vramp(&["load", path, "--device", "cpu"]).out.contains("1 tensor under 2 names"));
}

#[test]
fn tensors_that_cannot_be_loaded_are_counted_where_less_was_asked_for() {
    let whole = floats("0", &[2, 2], &[2, 1]);
    let pickle = Pickle::new().raw(b"}(").text("w").tensor(&whole).text("x");
    let pickle = pickle.global("torch._utils", "_rebuild_qtensor").raw(b"(NNtR").text("y");
    let pickle = pickle.global("torch._utils", "_rebuild_sparse_tensor").raw(b"(NNtR").text("z");
    let pickle = pickle.global("torch._utils", "_rebuild_qtensor").raw(b"(NNtR");
    let (_dir, path) = written(&archive(&pickle.raw(b"u").stop(), &[("0", &[0; 16])]));
    let path = path.to_str().unwrap();
    let lax = vramp(&["load", path, "--device", "cpu", "--skip-unknown", "--json"]).json();
    assert_eq!((&lax["tensors_left_out"], lax["skipped"].as_array().unwrap().len()), (&3.into(), 3));
    let text = vramp(&["load", path, "--device", "cpu", "--skip-unknown"]).out;
    assert!(text.lines().last().unwrap().starts_with("3 tensors left out"), "{text}");
    let listed = vramp(&["inspect", path]);
    assert!(listed.code == Some(0) && listed.err.contains("quantised"), "{}", listed.err);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let strict = vramp(&["convert", path, out.to_str().unwrap()]);
    assert_eq!((strict.code, out.exists()), (Some(3), false));
    let lax = vramp(&["convert", path, out.to_str().unwrap(), "--skip-unknown", "--json"]).json();
    assert_eq!((&lax["tensors"], &lax["tensors_left_out"]), (&1.into(), &3.into()));
    std::fs::remove_file(&out).unwrap();
    let text = vramp(&["convert", path, out.to_str().unwrap(), "--skip-unknown"]).out;
    assert!(text.lines().last().unwrap().starts_with("3 tensors left out"), "{text}");
}
