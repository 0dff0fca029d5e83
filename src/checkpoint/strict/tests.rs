//! Verdicts on small checkpoints: every kind of difference, ties with and without bytes, prefixes on either side.

#![allow(clippy::cast_possible_truncation)]

use super::*;
use crate::dtype::dims;
use crate::testing::hostile::{entry, file, header};
use tempfile::TempDir;

fn stored(tensors: &[(&str, &str, &[u64], u8)]) -> (TempDir, Checkpoint) {
    let (mut members, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, byte) in tensors {
        let begin = data.len() as u64;
        let len = StoredDtype::from_safetensors(dtype).tensor_bytes(&dims(shape)).unwrap();
        data.extend(vec![*byte; len as usize]);
        members.push(entry(name, dtype, shape, begin, begin + len));
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), file(&header(&members), &data)).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

fn spec(tensors: &[(&str, &str, &[u64])]) -> Spec {
    let tensor = |dtype: &str, shape: &[usize]| SpecTensor {
        dtype: StoredDtype::from_safetensors(dtype),
        shape: shape.to_vec(),
    };
    Spec::new(tensors.iter().map(|(name, dtype, shape)| ((*name).to_owned(), tensor(dtype, &dims(shape)))).collect())
}

fn tie(alias: &str, target: &str) -> Selection {
    Selection { ties: vec![Tie { alias: alias.into(), target: target.into() }], ..Selection::default() }
}

#[test]
fn a_match_is_ok_and_serialises_with_the_documented_names() {
    let (_dir, checkpoint) = stored(&[("w", "F32", &[2, 4], 1)]);
    let verdict = verify(&checkpoint, &Selection::default(), &spec(&[("w", "F32", &[2, 4])])).unwrap();
    let json = serde_json::to_string(&verdict).unwrap();
    let expected = r#"{"ok":true,"missing":[],"unexpected":[],"shape_mismatch":[],"dtype_mismatch":[],"ties":[],"suggestion":null}"#;
    assert_eq!(json, expected);
    assert!(verdict.demand(checkpoint.path()).is_ok());
}

#[test]
fn everything_that_differs_is_in_one_message() {
    let (_dir, checkpoint) = stored(&[("w", "F32", &[2, 4], 1), ("h", "F16", &[3], 1), ("extra", "U8", &[1], 1)]);
    let spec = spec(&[("w", "F32", &[4, 2]), ("h", "F32", &[3]), ("gone", "U8", &[1])]);
    let verdict = verify(&checkpoint, &Selection::default(), &spec).unwrap();
    let error = verdict.demand(checkpoint.path()).unwrap_err();
    let said = error.to_string();
    assert_eq!(error.exit_code(), 1);
    for word in ["\"w\": expected [4, 2], found [2, 4]", "\"h\": expected F32, found F16", "\"gone\"", "\"extra\""] {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
}

#[test]
fn an_absent_alias_is_covered_by_a_target_of_the_same_shape_and_type() {
    let (_dir, checkpoint) = stored(&[("embed", "F32", &[4, 2], 1)]);
    let same = spec(&[("embed", "F32", &[4, 2]), ("head", "F32", &[4, 2])]);
    let verdict = verify(&checkpoint, &tie("head", "embed"), &same).unwrap();
    assert!(verdict.ok && verdict.ties[0].status == TieStatus::Absent, "{verdict}");
    let other = spec(&[("embed", "F32", &[4, 2]), ("head", "F32", &[2, 4])]);
    let verdict = verify(&checkpoint, &tie("head", "embed"), &other).unwrap();
    assert!(!verdict.ok && verdict.shape_mismatch[0].name == "head", "{verdict}");
    assert_eq!(verify(&checkpoint, &Selection::default(), &same).unwrap().missing, ["head"]);
}

#[test]
fn a_wrong_target_is_one_finding_not_two() {
    let (_dir, checkpoint) = stored(&[("embed", "F32", &[2, 4], 1)]);
    let spec = spec(&[("embed", "F32", &[4, 2]), ("head", "F32", &[4, 2])]);
    let verdict = verify(&checkpoint, &tie("head", "embed"), &spec).unwrap();
    assert_eq!(verdict.shape_mismatch.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["embed"]);
}

#[test]
fn a_chain_of_ties_may_be_declared_in_any_order() {
    let (_dir, checkpoint) = stored(&[("w", "F32", &[2], 1)]);
    let needed = spec(&[("w", "F32", &[2]), ("a", "F32", &[2]), ("b", "F32", &[2]), ("c", "F32", &[2])]);
    let tie = |(alias, target): (&str, &str)| Tie { alias: alias.into(), target: target.into() };
    for ties in [[("a", "b"), ("b", "c"), ("c", "w")], [("c", "w"), ("b", "c"), ("a", "b")]] {
        let selection = Selection { ties: ties.map(tie).into(), ..Selection::default() };
        let verdict = verify(&checkpoint, &selection, &needed).unwrap();
        assert!(verdict.ok, "{ties:?}: {verdict}");
    }
}

#[test]
fn a_tie_without_a_target_leaves_both_names_missing() {
    let (_dir, checkpoint) = stored(&[("other", "F32", &[4, 2], 1)]);
    let spec = spec(&[("embed", "F32", &[4, 2]), ("head", "F32", &[4, 2])]);
    let verdict = verify(&checkpoint, &tie("head", "embed"), &spec).unwrap();
    assert_eq!((verdict.missing.len(), verdict.ties[0].status), (2, TieStatus::TargetMissing));
}

#[test]
fn both_names_stored_are_compared_byte_by_byte() {
    let spec = spec(&[("embed", "U8", &[2_000_000]), ("head", "U8", &[2_000_000])]);
    for (byte, status, ok) in [(1, TieStatus::Equal, true), (2, TieStatus::Conflict, false)] {
        let (_dir, checkpoint) = stored(&[("embed", "U8", &[2_000_000], 1), ("head", "U8", &[2_000_000], byte)]);
        let selected = checkpoint.select(&Selection::default()).unwrap();
        let pending = check(&checkpoint, &selected, &spec, &tie("head", "embed").ties);
        assert!(!pending.ok && pending.pending_ties().count() == 1);
        let verdict = verify(&checkpoint, &tie("head", "embed"), &spec).unwrap();
        assert_eq!((verdict.ties[0].status, verdict.ok), (status, ok), "{verdict}");
    }
}

#[test]
fn a_file_that_changed_since_its_header_was_read_is_not_compared() {
    let (dir, checkpoint) = stored(&[("a", "U8", &[4], 1), ("b", "U8", &[4], 1)]);
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, [std::fs::read(&path).unwrap(), vec![0]].concat()).unwrap();
    let error = verify(&checkpoint, &tie("a", "b"), &Spec::from(&checkpoint)).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
}

#[test]
fn a_prefix_on_either_side_is_suggested() {
    let plain = [("fc.weight", "U8", &[1][..]), ("fc.bias", "U8", &[1])];
    let prefixed = [("module.fc.weight", "U8", &[1][..]), ("module.fc.bias", "U8", &[1])];
    let with_bytes = |all: &[(&'static str, &'static str, &'static [u64])]| {
        stored(&all.iter().map(|(name, dtype, shape)| (*name, *dtype, *shape, 0)).collect::<Vec<_>>())
    };
    let plain_static: [(&str, &str, &'static [u64]); 2] = [("fc.weight", "U8", &[1]), ("fc.bias", "U8", &[1])];
    let prefixed_static: [(&str, &str, &'static [u64]); 2] =
        [("module.fc.weight", "U8", &[1]), ("module.fc.bias", "U8", &[1])];
    let (_dir, checkpoint) = with_bytes(&prefixed_static);
    let verdict = verify(&checkpoint, &Selection::default(), &spec(&plain)).unwrap();
    assert!(verdict.suggestion.as_ref().unwrap().contains("`Selection::strip_prefix` takes it off"), "{verdict}");
    let strip = Selection { strip_prefix: vec!["module.".into()], ..Selection::default() };
    assert!(verify(&checkpoint, &strip, &spec(&plain)).unwrap().ok);
    let (_dir, checkpoint) = with_bytes(&plain_static);
    let verdict = verify(&checkpoint, &Selection::default(), &spec(&prefixed)).unwrap();
    assert!(verdict.suggestion.as_ref().unwrap().contains("'module.'"), "{verdict}");
}

#[test]
fn a_child_of_a_known_name_suggests_no_prefix() {
    let unexpected = vec!["fc1.weight.bad_key".to_owned()];
    assert_eq!(suggestion(&[], &unexpected), None);
}

#[test]
fn specifications_are_read_strictly() {
    let good = r#"{"path":"x","tensors":{"w":{"dtype":"F32","shape":[2],"offset":9}}}"#;
    assert_eq!(Spec::parse(good.as_bytes()).unwrap(), spec(&[("w", "F32", &[2])]));
    for (text, word) in [
        (r#"{"tensors":{"w":{"dtype":"F32","shape":[2]},"w":{"dtype":"F32","shape":[2]}}}"#, "duplicate"),
        (r#"{"tensors":{"w":{"dtype":"F33","shape":[2]}}}"#, "tensor \"w\": unknown dtype \"F33\""),
        (r#"{"tensors":{"w":{"dtype":"F32","shape":[-2]}}}"#, "shape[0] is -2"),
        (r#"{"tensors":{"w":{"dtype":"F32"}}}"#, "has no shape"),
        (r#"{"tensors":[]}"#, "must be"),
        (r#"{}"#, "must be"),
        ("[", "not valid JSON"),
    ] {
        let said = Spec::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(said.contains(word), "{text}: {said}");
    }
}

#[test]
fn another_checkpoint_is_a_specification() {
    let (dir, checkpoint) = stored(&[("w", "F32", &[2, 4], 1)]);
    let spec = Spec::open(dir.path()).unwrap();
    assert!(verify(&checkpoint, &Selection::default(), &spec).unwrap().ok);
}
