//! Opening files and folders, and a table of hostile headers: each with the fault that it must be and the words and numbers
//! that the message must hold.

#![allow(clippy::cast_possible_truncation)]

use std::os::unix::fs::symlink;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::safetensors::{self, Header, Rejected};
use super::*;
use crate::dtype::StoredDtype;
use crate::error::Error;
use crate::fault::{Fault, Listed};
use crate::testing::hostile::{self, bytes_file, entry, file, file_claiming, header};

fn parse(bytes: &[u8]) -> Result<Header, Fault> {
    parse_within(bytes, safetensors::MAX_HEADER_BYTES)
}

fn parse_within(bytes: &[u8], limit: u64) -> Result<Header, Fault> {
    let file_len = bytes.len() as u64;
    match safetensors::header_len(bytes, file_len, limit) {
        Ok(len) => safetensors::parse(&bytes[8..8 + len as usize], file_len),
        Err(Rejected::Fault(fault)) => Err(fault),
        Err(Rejected::TooLong { found }) => panic!("too long: {found}"),
    }
}

/// The variant's name.
fn kind(fault: &Fault) -> String {
    let debug = format!("{fault:?}");
    debug.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn each_hostile_header_is_refused_for_what_it_is() {
    let two = |a: (u64, u64), b: (u64, u64)| {
        header(&[entry("a", "U8", &[a.1 - a.0], a.0, a.1), entry("b", "U8", &[b.1 - b.0], b.0, b.1)])
    };
    let table: Vec<(&str, Vec<u8>, &str, &[&str])> = vec![
        ("empty", vec![], "Empty", &["empty", "0 bytes"]),
        ("short", vec![7, 0, 0], "TooShort", &["3 bytes", "8"]),
        ("past end", file_claiming(70_000_000, b"{", b""), "HeaderPastEnd", &["70000000", "9 in all", "truncated"]),
        (
            "2^63",
            file_claiming(1 << 63, b"{}", b""),
            "HeaderPastEnd",
            &["9223372036854775808", "10", "100000000", "`OpenOptions::max_header_bytes`"],
        ),
        ("no header", file_claiming(0, b"", b"abc"), "HeaderStart", &["stated length is 0"]),
        ("zeros", vec![0; 4096], "Foreign", &["zero bytes"]),
        ("gguf", b"GGUF\x03\0\0\0rest".to_vec(), "Foreign", &["GGUF"]),
        ("white space", file(" {}", b""), "HeaderStart", &["white space", "`{`"]),
        ("BOM", file("\u{feff}{}", b""), "HeaderStart", &["BOM"]),
        ("list", file("[]", b""), "HeaderStart", &["list"]),
        ("NUL padding", file("{}\0\0\0", b""), "HeaderPadding", &["3 NUL"]),
        ("form feed", file("{}\u{c}", b""), "Json", &["something follows"]),
        ("not UTF-8", file_claiming(6, b"{\"\xff\":1", b""), "NotUtf8", &["byte 2", "header"]),
        ("two values", file("{}{}", b""), "Json", &["something follows"]),
        ("cut JSON", file(r#"{"w":{"dtype""#, b""), "Json", &["header", "EOF"]),
        ("NaN", file(&one("F32", "[NaN]", "[0,4]"), &[0; 4]), "Json", &["header"]),
        ("deep", file(&format!(r#"{{"a":{}"#, "[".repeat(100_000)), b""), "Json", &["nested deeper"]),
        (
            "duplicate tensor",
            file(&header(&[entry("t", "U8", &[1], 0, 1), entry("t", "U8", &[1], 0, 1)]), &[0]),
            "Duplicate",
            &["duplicate", "\"t\""],
        ),
        (
            "duplicate field",
            file(r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"dtype":"U8"}}"#, &[0]),
            "Duplicate",
            &["\"w\" > \"dtype\""],
        ),
        ("duplicate metadata", file(r#"{"__metadata__":{},"__metadata__":{}}"#, b""), "Duplicate", &["__metadata__"]),
        (
            "duplicate metadata key",
            file(r#"{"__metadata__":{"a":"1","a":"1"}}"#, b""),
            "Duplicate",
            &["\"__metadata__\" > \"a\""],
        ),
        (
            "duplicate deep down",
            file(r#"{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[{"y":1,"y":2}]}}"#, b""),
            "Duplicate",
            &["\"y\""],
        ),
        (
            "metadata number",
            file(r#"{"__metadata__":{"step":3,"lr":[1]}}"#, b""),
            "Metadata",
            &["\"step\" is 3", "\"lr\" is a list", "string"],
        ),
        ("metadata list", file(r#"{"__metadata__":[]}"#, b""), "Metadata", &["it is a list"]),
        (
            "tensor called metadata",
            file(r#"{"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[0]),
            "Metadata",
            &["no tensor can have the name"],
        ),
        ("null entry", file(r#"{"w":null}"#, b""), "Member", &["tensor \"w\"", "null"]),
        ("no shape", file(r#"{"w":{"dtype":"U8","data_offsets":[0,1]}}"#, &[0]), "Member", &["has no shape"]),
        ("no dtype", file(r#"{"w":{"shape":[1],"data_offsets":[0,1]}}"#, &[0]), "Member", &["has no dtype"]),
        (
            "dtype number",
            file(r#"{"w":{"dtype":8,"shape":[1],"data_offsets":[0,1]}}"#, &[0]),
            "Member",
            &["dtype must be a string, found 8"],
        ),
        ("three offsets", file(&one("U8", "[1]", "[0,1,2]"), &[0]), "Member", &["two numbers, found 3"]),
        ("backwards", file(&one("U8", "[1]", "[4,0]"), &[0]), "Member", &["[4, 0] end before they begin"]),
        ("negative", file(&one("U8", "[1]", "[-4,0]"), &[0]), "Member", &["data_offsets[0] is -4"]),
        ("float shape", file(&one("U8", "[1.5]", "[0,1]"), &[0]), "Member", &["shape[0] is 1.5"]),
        ("float that is whole", file(&one("U8", "[1.0]", "[0,1]"), &[0]), "Member", &["the float 1.0"]),
        (
            "2^64",
            file(&one("U8", "[1]", "[0,18446744073709551616]"), &[0]),
            "Member",
            &["data_offsets[1]", "above 64 bits"],
        ),
        ("long shape", file(&one("U8", &format!("{:?}", vec![1; 5000]), "[0,1]"), &[0]), "Member", &["5000"]),
        ("size", file(&one("F32", "[1000,1000]", "[0,4]"), &[0; 4]), "Size", &["\"w\"", "4000000", "has 4"]),
        ("odd BF16", file(&one("BF16", "[3]", "[0,5]"), &[0; 5]), "Size", &["6 bytes", "has 5"]),
        ("half a byte", file(&one("F4", "[3]", "[0,2]"), &[0; 2]), "Size", &["12 bits", "whole bytes"]),
        ("overflow", file(&one("U8", "[4294967296,4294967296]", "[0,0]"), b""), "Size", &["overflows"]),
        ("overflow of bytes", file(&one("F32", "[4611686018427387904]", "[0,0]"), b""), "Size", &["overflows"]),
        ("overlap", file(&two((0, 8), (4, 12)), &[0; 12]), "Overlap", &["\"a\" and \"b\"", "0..8", "4..12"]),
        ("same range", file(&two((0, 8), (0, 8)), &[0; 8]), "Overlap", &["same bytes 0..8"]),
        ("hole", file(&two((0, 8), (12, 16)), &[0; 16]), "Hole", &["8..12", "4 bytes", "\"b\""]),
        ("hole at start", file(&one("U8", "[8]", "[8,16]"), &[0; 16]), "Hole", &["0..8", "\"w\""]),
        ("truncated", file(&one("U8", "[10]", "[0,10]"), &[0; 7]), "Truncated", &["truncated", "3 missing"]),
        (
            "far past the end",
            file(&one("U8", "[1152921504606846976]", "[0,1152921504606846976]"), &[0; 7]),
            "Truncated",
            &["1152921504606847"],
        ),
        ("trailing", file(&one("U8", "[10]", "[0,10]"), &[0; 12]), "Trailing", &["2 too many"]),
        (
            "empty inside",
            file(&header(&[entry("a", "U8", &[4], 0, 4), entry("z", "U8", &[0], 2, 2)]), &[0; 4]),
            "Overlap",
            &["\"a\" and \"z\""],
        ),
    ];
    for (what, bytes, expected, words) in table {
        let fault = parse(&bytes).expect_err(what);
        let said = fault.to_string();
        assert_eq!(kind(&fault), expected, "{what}: {said}");
        for word in words {
            assert!(said.contains(word), "{what}: no {word:?} in {said:?}");
        }
        assert!(!said.ends_with('.'), "{what}: {said}");
    }
}

#[test]
fn unusual_headers_that_the_format_allows_are_read() {
    let spaces = file(&format!("{}{}", header(&[entry("a", "U8", &[1], 0, 1)]), " ".repeat(99)), &[0]);
    assert_eq!(parse(&spaces).unwrap().tensors.len(), 1);
    assert_eq!(parse(&file("{}", b"")).unwrap().tensors.len(), 0);
    assert!(parse(&file(r#"{"__metadata__":null}"#, b"")).unwrap().metadata.is_empty());
    let empties =
        header(&[entry("y", "F32", &[0, 3], 0, 0), entry("z", "F32", &[0], 0, 0), entry("s", "I64", &[], 0, 8)]);
    let parsed = parse(&file(&empties, &[0; 8])).unwrap();
    assert_eq!(parsed.tensors.iter().map(|t| t.len).collect::<Vec<_>>(), [0, 0, 8]);
}

#[test]
fn unknown_types_are_kept_and_unknown_members_warned_of() {
    let text = r#"{"w":{"dtype":"F12_X","shape":[3],"data_offsets":[0,5],"scale":{"a":[1]}}}"#;
    let parsed = parse(&file(text, &[0; 5])).unwrap();
    assert_eq!(parsed.tensors[0].dtype, StoredDtype::Unknown("F12_X".into()));
    assert!(parsed.warnings[0].contains("\"w\"") && parsed.warnings[0].contains("\"scale\""), "{:?}", parsed.warnings);
}

#[test]
fn all_problems_of_a_kind_are_in_one_fault_and_their_words_are_bounded() {
    let members: Vec<String> = (0..500).map(|n| entry(&format!("t{n}"), "F32", &[2], 0, 4)).collect();
    let Err(Fault::Size(listed)) = parse(&file(&header(&members), &[0; 4])) else { panic!() };
    assert_eq!(listed.len(), 500);
    assert!(listed.to_string().ends_with(&format!("and {} more", 500 - Listed::SHOWN)));
}

#[test]
fn the_header_limit_is_named_with_the_option_that_raises_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    std::fs::write(&path, bytes_file(&[("a", &[1])])).unwrap();
    let options = OpenOptions { max_header_bytes: 10, ..OpenOptions::default() };
    let error = Checkpoint::open_with(&path, &options).unwrap_err();
    let said = error.to_string();
    assert!(
        matches!(error, Error::Limit { limit: 10, .. }) && said.contains("`OpenOptions::max_header_bytes`"),
        "{said}"
    );
    assert!(said.contains("a.safetensors"), "{said}");
}

#[test]
fn a_huge_file_of_another_kind_is_named_before_its_header_is_called_too_long() {
    // As a length, the magic of GGUF is 14 GB: less than a large GGUF file has.
    let refused = safetensors::header_len(b"GGUF\x03\0\0\0", 40 << 30, safetensors::MAX_HEADER_BYTES);
    assert!(matches!(refused, Err(Rejected::Fault(Fault::Foreign { .. }))), "{refused:?}");
}

// ---- against the reference implementation

fn agree(bytes: &[u8]) -> Result<(), TestCaseError> {
    let (ours, theirs) = (parse(bytes), ::safetensors::SafeTensors::read_metadata(bytes));
    match (ours, theirs) {
        (Ok(header), Ok((start, metadata))) => {
            prop_assert_eq!(header.tensors.len(), metadata.tensors().len());
            for stored in &header.tensors {
                let Some(info) = metadata.info(&stored.name) else { return Err(TestCaseError::fail("a name differs")) };
                prop_assert_eq!(stored.offset, (8 + start + info.data_offsets.0) as u64);
                prop_assert_eq!(&stored.shape, &info.shape);
            }
        }
        (Ok(header), Err(e)) => {
            // We carry types that the reference does not know; nothing else may be accepted by us alone.
            prop_assert!(header.tensors.iter().any(|t| t.dtype.bits().is_none()), "accepted by us alone: {}", e);
        }
        // The reference reads the header only: it does not see what follows the last tensor. It is laxer about white space
        // before the header and about duplicates.
        (
            Err(Fault::Truncated { .. } | Fault::Trailing { .. } | Fault::HeaderStart { .. } | Fault::Duplicate(_)),
            Ok(_),
        ) => {}
        (Err(fault), Ok(_)) => return Err(TestCaseError::fail(format!("refused by us alone: {fault}"))),
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

fn tensors() -> impl Strategy<Value = Vec<(String, ::safetensors::Dtype, Vec<usize>)>> {
    use ::safetensors::Dtype::{BF16, F4, F32, F64, I8, U16};
    let dtype = prop::sample::select(vec![BF16, F32, F64, I8, U16, F4]);
    let tensor = (dtype, prop::collection::vec(0usize..5, 0..4)).prop_map(|(dtype, mut shape)| {
        if dtype == F4 {
            shape.push(2);
        }
        (dtype, shape)
    });
    prop::collection::btree_map(".{0,12}", tensor, 0..12).prop_map(|map| {
        let named = map.into_iter().filter(|(name, _)| name != "__metadata__");
        named.map(|(name, (dtype, shape))| (name, dtype, shape)).collect()
    })
}

fn serialized(tensors: &[(String, ::safetensors::Dtype, Vec<usize>)]) -> Vec<u8> {
    let bytes = |dtype: &::safetensors::Dtype, shape: &[usize]| {
        vec![7u8; shape.iter().product::<usize>() * dtype.bitsize() / 8]
    };
    let data: Vec<_> = tensors.iter().map(|(_, dtype, shape)| bytes(dtype, shape)).collect();
    let views = tensors.iter().zip(&data).map(|((name, dtype, shape), data)| {
        (name.clone(), ::safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    ::safetensors::serialize(views, None).unwrap()
}

proptest! {
    #[test]
    fn what_the_reference_writes_is_read_back(tensors in tensors()) {
        let bytes = serialized(&tensors);
        let header = parse(&bytes).map_err(|fault| TestCaseError::fail(fault.to_string()))?;
        prop_assert_eq!(header.tensors.len(), tensors.len());
        for (name, dtype, shape) in &tensors {
            let stored = header.tensors.iter().find(|stored| stored.name.as_ref() == name).unwrap();
            prop_assert_eq!(stored.dtype.name(), dtype.to_string());
            prop_assert_eq!(&stored.shape, shape);
        }
        agree(&bytes)?;
    }

    #[test]
    fn damaged_files_never_panic_and_are_never_accepted_by_us_alone(
        tensors in tensors(), damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut in any::<prop::sample::Index>(), cuts in any::<bool>(),
    ) {
        let mut bytes = serialized(&tensors);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if cuts {
            bytes.truncate(cut.index(bytes.len()));
        }
        agree(&bytes)?;
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), text in r#"[{}\[\]":,0-9a-z_\-\. ]{0,80}"#) {
        agree(&bytes)?;
        agree(&file(&format!("{{{text}}}"), b""))?;
        let _ = index::Index::parse(&bytes);
        let _ = index::Index::parse(text.as_bytes());
        let _ = strict::Spec::parse(text.as_bytes());
    }
}

// ---- folders

fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().iter().map(|tensor| tensor.name.as_ref()).collect()
}

fn said(path: &Path) -> String {
    Checkpoint::open(path)
        .map_or_else(|error| error.to_string(), |checkpoint| format!("opened: {:?}", names(&checkpoint)))
}

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn sharded(index: &[(&str, &str)]) -> TempDir {
    folder(&[
        (FIRST, bytes_file(&[("a", &[1, 2]), ("b", &[3])])),
        (SECOND, bytes_file(&[("c", &[4])])),
        (INDEX, hostile::index(index).into_bytes()),
    ])
}

#[test]
fn an_index_decides_and_what_it_does_not_name_is_left_alone() {
    let dir = sharded(&[("c", SECOND), ("a", FIRST)]);
    std::fs::write(dir.path().join("extra.safetensors"), b"not even read").unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(names(&checkpoint), ["a", "c"]);
    assert_eq!(checkpoint.path(), dir.path());
    let warnings = checkpoint.warnings().join("\n");
    assert!(warnings.contains("\"b\"") && warnings.contains("\"extra.safetensors\""), "{warnings}");
    let direct = Checkpoint::open(dir.path().join(INDEX)).unwrap();
    assert_eq!(names(&direct), ["a", "c"]);
    let a = checkpoint.tensor("a").unwrap();
    assert_eq!(checkpoint.shards()[a.shard() as usize].path, dir.path().join(FIRST));
}

#[test]
fn an_index_that_disagrees_with_the_files_is_stale() {
    let dir = sharded(&[("a", FIRST), ("b", SECOND), ("gone", FIRST), ("c", SECOND)]);
    let said = said(dir.path());
    for word in
        ["stale index", "\"gone\" is not in \"model-00001", "\"b\" is not in \"model-00002", "but in \"model-00001"]
    {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
}

#[test]
fn a_missing_shard_is_named_with_its_tensors() {
    let dir = sharded(&[("a", FIRST), ("c", SECOND)]);
    std::fs::remove_file(dir.path().join(SECOND)).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    let said = error.to_string();
    assert_eq!(error.exit_code(), 4);
    assert!(said.contains(SECOND) && said.contains("\"c\""), "{said}");
}

#[test]
fn an_index_of_very_many_missing_files_costs_no_more_than_reading_it() {
    let names: Vec<String> = (0..200_000).map(|n| format!("f{n}")).collect();
    let map: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
    let dir = folder(&[(INDEX, hostile::index(&map).into_bytes())]);
    let said = said(dir.path());
    assert!(said.contains("200000 files") && said.contains("\"f0\" (with 1 tensor: \"f0\")"), "{said}");
}

#[test]
fn without_an_index_a_tensor_in_two_files_names_both() {
    let dir =
        folder(&[(FIRST, bytes_file(&[("a", &[1]), ("b", &[1])])), (SECOND, bytes_file(&[("a", &[2]), ("b", &[1])]))]);
    let said = said(dir.path());
    for word in ["\"a\" is in", "\"b\" is in", FIRST, SECOND] {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
}

#[test]
fn names_that_leave_the_folder_are_never_opened() {
    let dir = sharded(&[("a", FIRST), ("x", "../outside.safetensors")]);
    let said = said(dir.path());
    assert!(said.contains("\"../outside.safetensors\"") && said.contains("may not be opened"), "{said}");
}

#[test]
fn several_damaged_files_are_in_one_error() {
    let dir = sharded(&[("a", FIRST), ("c", SECOND)]);
    std::fs::write(dir.path().join(FIRST), b"version https://git-lfs.github.com/spec/v1\nsize 12\n").unwrap();
    std::fs::write(dir.path().join(SECOND), b"").unwrap();
    let said = said(dir.path());
    assert!(said.contains("Git LFS") && said.contains(FIRST) && said.contains(SECOND), "{said}");
}

#[test]
fn a_folder_without_weights_says_what_was_looked_for_and_what_is_there() {
    let dir = folder(&[("config.json", b"{}".to_vec())]);
    assert!(said(dir.path()).contains("looked for model.safetensors.index.json"), "{}", said(dir.path()));
    std::fs::create_dir(dir.path().join("unet")).unwrap();
    std::fs::write(dir.path().join("unet/model.safetensors"), bytes_file(&[])).unwrap();
    assert!(said(dir.path()).contains("\"unet\""), "{}", said(dir.path()));
    std::fs::write(dir.path().join("model.gguf"), b"x").unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("model.gguf"), "{error}");
}

#[test]
fn variants_are_taken_only_when_asked_for() {
    let dir = folder(&[("model.fp16.safetensors", bytes_file(&[("half", &[1])]))]);
    assert!(said(dir.path()).contains("`OpenOptions::variant`"), "{}", said(dir.path()));
    let options = OpenOptions { variant: Some("fp16".into()), ..OpenOptions::default() };
    assert_eq!(names(&Checkpoint::open_with(dir.path(), &options).unwrap()), ["half"]);
}

#[test]
fn a_path_that_is_not_there_names_the_nearest_file() {
    let dir = folder(&[("model.safetensors", bytes_file(&[]))]);
    let error = Checkpoint::open(dir.path().join("modle.safetensors")).unwrap_err();
    assert!(error.exit_code() == 4 && error.to_string().contains("\"model.safetensors\""), "{error}");
}

#[test]
fn links_are_followed_and_loops_and_dangling_links_are_errors() {
    let dir = folder(&[]);
    let path = |name: &str| dir.path().join(name);
    symlink("a.safetensors", path("b.safetensors")).unwrap();
    symlink("b.safetensors", path("a.safetensors")).unwrap();
    let error = Checkpoint::open(path("a.safetensors")).unwrap_err();
    assert!(error.exit_code() == 4 && error.to_string().contains("a.safetensors"), "{error}");
    symlink("../blobs/gone", path("c.safetensors")).unwrap();
    let error = Checkpoint::open(path("c.safetensors")).unwrap_err();
    assert!(error.exit_code() == 4 && error.to_string().contains("../blobs/gone"), "{error}");
}

#[test]
fn what_is_no_regular_file_is_refused_and_never_waited_for() {
    let dir = folder(&[]);
    let pipe = dir.path().join("model.safetensors");
    let status = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(status.success());
    assert!(said(&pipe).contains("a named pipe"), "{}", said(&pipe));
    assert!(said(dir.path()).contains("a named pipe"), "{}", said(dir.path()));
    assert!(said(Path::new("/dev/null")).contains("a device"));
}

#[test]
fn a_cache_folder_and_a_name_lead_to_the_snapshot_of_main() {
    let cache = folder(&[]);
    let model = cache.path().join("models--org--name");
    let snapshot = model.join("snapshots/0123");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(model.join("blobs")).unwrap();
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::create_dir_all(model.join("snapshots/older")).unwrap();
    std::fs::write(model.join("blobs/beef"), bytes_file(&[("w", &[1])])).unwrap();
    symlink("../../blobs/beef", snapshot.join("model.safetensors")).unwrap();
    assert!(said(&model).contains("2 snapshots"), "{}", said(&model));
    std::fs::write(model.join("refs/main"), "0123").unwrap();
    assert_eq!(names(&Checkpoint::open(&model).unwrap()), ["w"]);
    let options = OpenOptions { hub_cache: Some(cache.path().into()), ..OpenOptions::default() };
    assert_eq!(names(&Checkpoint::open_with("org/name", &options).unwrap()), ["w"]);
    let error = Checkpoint::open_with("org/other", &options).unwrap_err();
    assert!(error.to_string().contains("does not download"), "{error}");
    std::fs::write(model.join("refs/main"), "../../..").unwrap();
    assert!(Checkpoint::open(&model).is_err());
    std::fs::remove_file(model.join("refs/main")).unwrap();
    let status = std::process::Command::new("mkfifo").arg(model.join("refs/main")).status().unwrap();
    assert!(status.success());
    assert!(said(&model).contains("2 snapshots"), "a pipe is not waited for: {}", said(&model));
}

#[test]
fn the_identity_of_each_file_is_noted() {
    let dir = folder(&[("model.safetensors", bytes_file(&[("w", &[1, 2, 3])]))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let shard = &checkpoint.shards()[0];
    assert!(shard.version.len() == shard.bytes && shard.version.device() != 0);
}

// ---- tensors cut over several files

fn piece(names: &[(&str, &[u64], &[u64])]) -> Vec<u8> {
    let mut at = 0;
    let mut members = Vec::new();
    let mut info = Vec::new();
    for (name, shape, start) in names {
        let len: u64 = shape.iter().product();
        members.push(entry(name, "U8", shape, at, at + len));
        info.push(format!(r#"\"{name}\":{{\"saved_offsets\":{start:?}}}"#));
        at += len;
    }
    members.push(format!(r#""__metadata__":{{"DCP_SHARDING_INFO":"{{{}}}"}}"#, info.join(",")));
    file(&header(&members), &vec![0; at as usize])
}

fn ranks(first: &[(&str, &[u64], &[u64])], second: &[(&str, &[u64], &[u64])]) -> TempDir {
    folder(&[
        ("shard-00001-model-00001-of-00001.safetensors", piece(first)),
        ("shard-00002-model-00001-of-00001.safetensors", piece(second)),
    ])
}

#[test]
fn cut_tensors_are_put_together() {
    let dir = ranks(&[("rows", &[4, 2], &[0, 0]), ("one", &[3], &[0])], &[("rows", &[3, 2], &[4, 0])]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let rows = checkpoint.tensor("rows").unwrap();
    assert_eq!((rows.shape.to_vec(), rows.bytes()), (vec![7, 2], 14));
    assert!(matches!(&rows.data, TensorData::Parts(parts) if parts.len() == 2));
    assert!(matches!(checkpoint.tensor("one").unwrap().data, TensorData::Whole(_)));
}

#[test]
fn pieces_that_do_not_cover_a_tensor_once_are_refused() {
    for (second, words) in [
        ((&[3u64, 2][..], &[3u64, 0][..]), ["\"rows\"", "overlap"]),
        ((&[3, 2], &[5, 0]), ["a gap", "14 elements of the 16"]),
        ((&[3, 1], &[4, 0]), ["a gap", "11 elements of the 14"]),
        ((&[6], &[8]), ["\"rows\"", "rank"]),
        ((&[3, 2], &[4]), ["\"rows\"", "offsets"]),
    ] {
        let dir = ranks(&[("rows", &[4, 2], &[0, 0])], &[("rows", second.0, second.1)]);
        let said = said(dir.path());
        assert!(words.iter().all(|word| said.contains(word)), "{words:?} in {said}");
    }
}

const DOUBT: &str = "the end of tensors cannot be checked";

/// A piece with the shapes of whole tensors, as `global_shape`.
fn piece_of(name: &str, shape: &[u64], start: &[u64], whole: &[u64]) -> Vec<u8> {
    let plain = piece(&[(name, shape, start)]);
    let rest = std::str::from_utf8(&plain[8..]).unwrap();
    let end = rest.rfind('}').unwrap();
    let noted = format!(r#"\"saved_offsets\":{start:?}"#);
    let more = rest[..=end].replace(&noted, &format!(r#"{noted},\"global_shape\":{whole:?}"#));
    file(&more, &vec![0; usize::try_from(shape.iter().product::<u64>()).unwrap()])
}

#[test]
fn where_no_shape_of_the_whole_is_recorded_the_end_is_said_to_be_unchecked() {
    let warned = |dir: &TempDir| Checkpoint::open(dir.path()).unwrap().warnings().join("\n");
    // A save of three ranks: one, and two of its files.
    let alone = folder(&[("shard-00001-model-00001-of-00001.safetensors", piece(&[("rows", &[4, 2], &[0, 0])]))]);
    assert!(warned(&alone).contains(DOUBT) && warned(&alone).contains("DCP"), "{}", warned(&alone));
    let two = ranks(&[("rows", &[4, 2], &[0, 0])], &[("rows", &[3, 2], &[4, 0])]);
    assert!(warned(&two).contains(DOUBT) && !warned(&two).contains("not there"), "{}", warned(&two));
    let gap = folder(&[
        ("shard-00001-model-00001-of-00001.safetensors", piece(&[("rows", &[4, 2], &[0, 0])])),
        ("shard-00003-model-00001-of-00001.safetensors", piece(&[("rows", &[3, 2], &[4, 0])])),
    ]);
    assert!(warned(&gap).contains("not there: shard-00002"), "{}", warned(&gap));
    // By name, and under a name of its own.
    let one = Checkpoint::open(alone.path().join("shard-00001-model-00001-of-00001.safetensors")).unwrap();
    assert!(one.warnings().join("\n").contains(DOUBT), "{:?}", one.warnings());
    // What one rank wrote is whole.
    let whole = folder(&[("model-00001-of-00001.safetensors", piece(&[("rows", &[4, 2], &[0, 0])]))]);
    assert_eq!(warned(&whole), "");
}

#[test]
fn a_shape_of_the_whole_that_is_recorded_must_come_out() {
    let files = |second: &[(&'static str, Vec<u8>)]| {
        let first = ("shard-00001-model-00001-of-00001.safetensors", piece_of("rows", &[4, 2], &[0, 0], &[7, 2]));
        folder(&[&[first], second].concat())
    };
    let last = |shape: &[u64], whole: &[u64]| {
        [("shard-00002-model-00001-of-00001.safetensors", piece_of("rows", shape, &[4, 0], whole))]
    };
    let dir = files(&last(&[3, 2], &[7, 2]));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((checkpoint.tensor("rows").unwrap().shape.to_vec(), checkpoint.warnings()), (vec![7, 2], &[][..]));
    for second in [&[][..], &last(&[2, 2], &[7, 2]), &last(&[3, 2], &[8, 2])] {
        let said = said(files(second).path());
        assert!(said.contains("\"rows\": its pieces make") && said.contains("is a file missing?"), "{said}");
    }
    let one = Checkpoint::open(dir.path().join("shard-00001-model-00001-of-00001.safetensors")).unwrap();
    assert!(one.warnings()[0].contains("pieces of tensors"), "{:?}", one.warnings());
}

#[test]
fn a_file_of_a_distributed_checkpoint_names_its_folder() {
    let dir = folder(&[("__0_0.distcp", b"PK\x03\x04".to_vec())]);
    let lone = dir.path().join("__0_0.distcp");
    for path in [dir.path(), &lone] {
        let said = said(path);
        assert!(said.contains("__0_0.distcp") && said.contains("without the .metadata"), "{said}");
    }
    std::fs::write(dir.path().join(".metadata"), b"\x80\x02}.").unwrap();
    for name in ["__0_0.distcp", ".metadata"] {
        let said = said(&dir.path().join(name));
        assert!(said.contains(&format!("open the folder {}", dir.path().display())), "{said}");
    }
}

#[test]
fn a_single_file_of_pieces_is_shown_as_it_is_with_a_warning() {
    let dir = ranks(&[("rows", &[4, 2], &[0, 0])], &[("rows", &[3, 2], &[4, 0])]);
    let checkpoint = Checkpoint::open(dir.path().join("shard-00002-model-00001-of-00001.safetensors")).unwrap();
    assert_eq!(checkpoint.tensor("rows").unwrap().shape[..], [3, 2]);
    assert!(checkpoint.warnings()[0].contains("pieces of tensors"));
}
