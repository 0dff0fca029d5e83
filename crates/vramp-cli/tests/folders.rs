//! Folders, indexes and names as people have them: doubles that an index decides, links to nothing, byte order marks, sub-folders,
//! prefixes, names that are nearly right.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use vramp::Error;
use vramp::checkpoint::{Checkpoint, Selection, SliceRequest};
use vramp::load::{Options, load};
use vramp::setting::Setting;
use vramp::testing::hostile::{self, bytes_file};
use vramp::testing::torch::{TensorOver, archive, state_dict};
use vramp::testing::{safetensors, watched};

use crate::cli::{Said, command, folder, vramp};

const INDEX: &str = "model.safetensors.index.json";

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> String {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The bytes of every tensor.
fn loaded(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let loaded = load(path, &Options::default()).unwrap();
    loaded.tensors().iter().map(|tensor| (tensor.name().to_owned(), tensor.bytes().unwrap().to_vec())).collect()
}

fn said(path: &Path) -> String {
    Checkpoint::open(path).map_or_else(|error| format!("{error:?}"), |checkpoint| checkpoint.warnings().join("\n"))
}

/// A `.bin` file of F32 vectors, each over a storage of its own.
fn bin(tensors: &[(&str, &[f32])]) -> Vec<u8> {
    let keys: Vec<String> = (0..tensors.len()).map(|at| at.to_string()).collect();
    let shapes: Vec<[i64; 1]> = tensors.iter().map(|(_, values)| [values.len() as i64]).collect();
    let over = |at: usize| TensorOver {
        key: &keys[at],
        storage: "FloatStorage",
        count: shapes[at][0],
        offset: 0,
        shape: &shapes[at],
        stride: &[1],
        bits: &[],
    };
    let named: Vec<_> = tensors.iter().enumerate().map(|(at, (name, _))| (*name, over(at))).collect();
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, values)| floats(values)).collect();
    let storages: Vec<_> = keys.iter().zip(&bytes).map(|(key, bytes)| (key.as_str(), bytes.as_slice())).collect();
    archive(&state_dict(&named), &storages)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

// ---- the index decides tensor by tensor

#[test]
fn a_tensor_in_two_files_is_taken_from_the_one_that_the_index_names() {
    for first in [true, false] {
        let dir = folder();
        let (mine, other) = if first { ("a.safetensors", "b.safetensors") } else { ("b.safetensors", "a.safetensors") };
        // Another value, another shape: nothing of the copy counts.
        write(dir.path(), mine, bytes_file(&[("mine", &[1, 2, 3]), ("twice", &[7, 8])]));
        write(dir.path(), other, bytes_file(&[("other", &[4]), ("twice", &[9, 9, 9])]));
        write(dir.path(), INDEX, hostile::index(&[("mine", mine), ("twice", mine), ("other", other)]));
        let expected = [("mine", vec![1, 2, 3]), ("other", vec![4]), ("twice", vec![7, 8])];
        assert_eq!(loaded(dir.path()), expected.map(|(name, bytes)| (name.to_owned(), bytes)).into());
        let said = said(dir.path());
        assert!(said.contains(&format!("\"twice\" is taken from \"{mine}\", not from \"{other}\"")), "{said}");
        // By the program, and converted: one tensor each, with the right bytes.
        let out = dir.path().join("out.safetensors");
        let done = vramp(&["convert", text(dir.path()), text(&out), "--json"]);
        assert_eq!((done.code, &done.json()["tensors"]), (Some(0), &json!(3)), "{}", done.err);
        assert_eq!(loaded(&out)["twice"], [7, 8]);
        // Without the index nobody says which counts.
        std::fs::remove_file(dir.path().join(INDEX)).unwrap();
        let said = vramp(&["load", text(dir.path())]);
        assert_eq!(said.code, Some(3));
        assert!(said.err.contains("\"twice\" is in") && said.err.contains(other), "{}", said.err);
    }
}

#[test]
fn doubles_of_pytorch_shards_are_decided_by_the_index_too() {
    let dir = folder();
    let (one, two) = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin");
    write(dir.path(), one, bin(&[("a", &[1.0]), ("twice", &[2.0, 3.0])]));
    write(dir.path(), two, bin(&[("twice", &[4.0, 5.0, 6.0]), ("z", &[7.0])]));
    for (taken, left, expected) in [(one, two, &[2.0, 3.0][..]), (two, one, &[4.0, 5.0, 6.0])] {
        write(dir.path(), "pytorch_model.bin.index.json", hostile::index(&[("a", one), ("twice", taken), ("z", two)]));
        let all = loaded(dir.path());
        assert_eq!((all.len(), &all["twice"], &all["z"]), (3, &floats(expected), &floats(&[7.0])));
        let said = said(dir.path());
        assert!(said.contains(&format!("\"twice\" is taken from \"{taken}\", not from \"{left}\"")), "{said}");
    }
    std::fs::remove_file(dir.path().join("pytorch_model.bin.index.json")).unwrap();
    let said = said(dir.path());
    assert!(said.contains("\"twice\" is in") && said.contains(one) && said.contains(two), "{said}");
}

#[test]
fn an_index_that_is_wrong_about_a_double_is_stale() {
    let dir = folder();
    let files = ["a.safetensors", "b.safetensors", "c.safetensors"];
    write(dir.path(), files[0], bytes_file(&[("a", &[1]), ("twice", &[1])]));
    write(dir.path(), files[1], bytes_file(&[("b", &[2]), ("twice", &[2])]));
    write(dir.path(), files[2], bytes_file(&[("c", &[3])]));
    write(dir.path(), INDEX, hostile::index(&[("a", files[0]), ("b", files[1]), ("twice", files[2]), ("c", files[2])]));
    let said = said(dir.path());
    assert!(said.contains("stale index") && said.contains("\"twice\" is not in \"c.safetensors\" but in"), "{said}");
}

/// A file of PyTorch's Hugging Face writer: U8 vectors, and where each begins in its tensor.
fn piece(tensors: &[(&str, &[u8], Option<u64>)]) -> Vec<u8> {
    let shapes: Vec<[usize; 1]> = tensors.iter().map(|(_, bytes, _)| [bytes.len()]).collect();
    let begins =
        tensors.iter().filter_map(|(name, _, start)| Some(((*name).to_owned(), json!({"saved_offsets": [(*start)?]}))));
    let info = serde_json::Value::Object(begins.collect()).to_string();
    let stored: Vec<_> =
        tensors.iter().zip(&shapes).map(|((name, bytes, _), shape)| (*name, "U8", &shape[..], *bytes)).collect();
    safetensors(&stored, json!({"DCP_SHARDING_INFO": info}))
}

#[test]
fn pieces_of_a_tensor_are_no_doubles_but_copies_of_a_piece_are() {
    let dir = folder();
    let files = ["a.safetensors", "b.safetensors", "c.safetensors"];
    write(dir.path(), files[0], piece(&[("cut", &[1, 2], Some(0)), ("whole", &[9], None)]));
    write(dir.path(), files[1], piece(&[("cut", &[3, 4], Some(2)), ("whole", &[8], None)]));
    write(dir.path(), files[2], piece(&[("cut", &[5, 5], Some(0)), ("c", &[0], None)]));
    for (taken, expected) in [(files[0], [1, 2, 3, 4]), (files[2], [5, 5, 3, 4])] {
        write(dir.path(), INDEX, hostile::index(&[("cut", taken), ("whole", files[1]), ("c", files[2])]));
        let all = loaded(dir.path());
        assert_eq!((&all["cut"][..], &all["whole"][..]), (&expected[..], &[8][..]));
    }
}

// ---- links to nothing

#[test]
fn a_link_to_nothing_is_named_with_its_target() {
    let dir = folder();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let (one, two, three) = ("m-1.safetensors", "m-2.safetensors", "m-3.safetensors");
    symlink("../blobs/1111", model.join(one)).unwrap();
    symlink("../blobs/2222", model.join(two)).unwrap();
    let named = |said: &str, words: &[&str]| {
        words.iter().for_each(|word| assert!(said.contains(word), "no {word:?} in {said}"));
    };
    // Without an index, all of them.
    named(
        &said(&model),
        &["2 links to nothing", "\"m-1.safetensors\" is a link to ../blobs/1111, which is not there", "2222"],
    );
    // By an index, apart from files that are missing.
    write(&model, INDEX, hostile::index(&[("a", one), ("b", two), ("c", three)]));
    let all = said(&model);
    named(&all, &["1 file, not there: \"m-3.safetensors\"", "2 links to nothing", "\"b\"", "a link to ../blobs/2222"]);
    // The file itself, a chain of links, a folder on the way, the folder, the index.
    named(&said(&model.join(one)), &["a link to ../blobs/1111, which is not there"]);
    symlink(one, model.join("chain.safetensors")).unwrap();
    named(
        &said(&model.join("chain.safetensors")),
        &["a link to m-1.safetensors and in the end to", "blobs/1111, which"],
    );
    symlink("nowhere", dir.path().join("gone")).unwrap();
    named(&said(&dir.path().join("gone")), &["a link to nowhere, which is not there"]);
    named(&said(&dir.path().join("gone/model.safetensors")), &["its folder", "gone is a link to nowhere, which"]);
    std::fs::remove_file(model.join(INDEX)).unwrap();
    symlink("../blobs/index", model.join(INDEX)).unwrap();
    named(&said(&model), &["a link to ../blobs/index, which is not there"]);
    let shown = vramp(&["load", text(&model), "--json"]);
    assert_eq!((shown.code, shown.error()["kind"].as_str()), (Some(4), Some("not_found")));
    // PyTorch's files.
    let torch = dir.path().join("torch");
    std::fs::create_dir(&torch).unwrap();
    symlink("/blobs/3333", torch.join("pytorch_model.bin")).unwrap();
    named(&said(&torch), &["a link to /blobs/3333, which is not there"]);
}

// ---- byte order marks

#[test]
fn a_byte_order_mark_before_json_is_passed_over_or_named() {
    let dir = folder();
    write(dir.path(), "m.safetensors", bytes_file(&[("a", &[1, 2])]));
    let index = hostile::index(&[("a", "m.safetensors")]);
    write(dir.path(), INDEX, format!("\u{feff}{index}"));
    assert_eq!(loaded(dir.path())["a"], [1, 2]);
    let spec = write(dir.path(), "spec.json", "\u{feff}{\"tensors\":{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}}");
    assert_eq!(vramp(&["verify", text(dir.path()), "--spec", &spec]).code, Some(0));
    for wide in [u16::to_le_bytes, u16::to_be_bytes] {
        let text: Vec<u8> = format!("\u{feff}{index}").encode_utf16().flat_map(wide).collect();
        write(dir.path(), INDEX, text);
        let said = said(dir.path());
        assert!(said.contains("byte order mark") && said.contains("UTF-16"), "{said}");
    }
}

// ---- what lies below, and parts of a whole

#[test]
fn weights_in_sub_folders_are_named_whatever_their_format() {
    for (files, named) in [
        (&["model/.metadata", "model/__0_0.distcp", "optimizer_0/.metadata"][..], "\"model\""),
        (&["trainer_state.json", "scheduler.pt", "pytorch_model_fsdp_0/__0_0.distcp"], "\"pytorch_model_fsdp_0\""),
        (&["checkpoint-10/pytorch_model_fsdp_0/.metadata"], "\"checkpoint-10/pytorch_model_fsdp_0\""),
        (&["unet/diffusion_pytorch_model.bin"], "\"unet\""),
        (&["text_encoder/model.safetensors"], "\"text_encoder\""),
    ] {
        let dir = folder();
        files.iter().for_each(|file| drop(write(dir.path(), file, b"x")));
        let said = said(dir.path());
        assert!(said.contains("sub-folders are not searched") && said.contains(named), "{files:?}: {said}");
        assert!(!said.contains("optimizer_0"), "{said}");
    }
}

#[test]
fn a_part_of_a_distributed_checkpoint_names_its_folder() {
    let dir = folder();
    let part = write(dir.path(), "fsdp/__0_0.distcp", archive(b"\x80\x02}.", &[]));
    let at = text(dir.path()).to_owned() + "/fsdp";
    let missing = vramp(&["load", &part, "--json"]).error();
    let message = missing["message"].as_str().unwrap();
    assert!(message.contains("without the .metadata beside it") && message.contains(&at), "{message}");
    let whole = said(Path::new(&at));
    assert!(whole.contains("__0_0.distcp") && whole.contains(".metadata"), "{whole}");
    let description = write(dir.path(), "fsdp/.metadata", b"\x80\x02}.");
    for (path, word) in
        [(&part, ".metadata beside it says what is in it"), (&description, "which holds no tensors itself")]
    {
        let said = vramp(&["inspect", path]);
        assert_eq!(said.code, Some(3), "{}", said.err);
        assert!(said.err.contains(word) && said.err.contains(&format!("open the folder {at}")), "{}", said.err);
    }
}

#[test]
fn a_file_without_a_tensor_is_warned_of() {
    let dir = folder();
    let empty = write(dir.path(), "empty.safetensors", bytes_file(&[]));
    for args in [&["load", &empty, "--device", "cpu"][..], &["inspect", &empty]] {
        let shown = vramp(args);
        assert_eq!(shown.code, Some(0), "{}", shown.err);
        assert!((shown.out + &shown.err).contains("it holds no tensor"), "{args:?}");
    }
    let one = write(dir.path(), "one.safetensors", bytes_file(&[("a", b"x")]));
    assert_eq!(said(Path::new(&one)), "");
}

// ---- prefixes

#[test]
fn several_prefixes_come_off_in_any_order_and_as_often_as_they_occur() {
    let dir = folder();
    let names = ["module._orig_mod.a", "_orig_mod.module.b", "module.module.c", "_orig_mod.d", "e"];
    let file: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, &[1u8][..])).collect();
    let path = write(dir.path(), "m.safetensors", bytes_file(&file));
    let spec = ["a", "b", "c", "d", "e"].map(|name| (name.to_owned(), json!({"dtype": "U8", "shape": [1]})));
    let spec = json!({"tensors": serde_json::Map::from_iter(spec)}).to_string();
    let spec = write(dir.path(), "spec.json", spec);
    let out = text(dir.path()).to_owned() + "/out.safetensors";
    for pair in [["module.", "_orig_mod."], ["_orig_mod.", "module."]] {
        let strip = ["--strip-prefix", pair[0], "--strip-prefix", pair[1]];
        let run = |args: &[&str]| -> Said { vramp(&[args, &strip].concat()) };
        let names = |said: &Said| said.json()["tensors"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        for args in [&["load", &path, "--json"][..], &["inspect", &path, "--json"]] {
            assert_eq!(names(&run(args)), ["a", "b", "c", "d", "e"], "{args:?}");
        }
        assert_eq!(run(&["verify", &path, "--spec", &spec]).code, Some(0));
        assert_eq!(run(&["convert", &path, &out, "--json"]).code, Some(0));
        assert_eq!(loaded(Path::new(&out)).keys().collect::<Vec<_>>(), ["a", "b", "c", "d", "e"]);
        std::fs::remove_file(&out).unwrap();
    }
    // One prefix comes off once: what is below it may begin alike and be meant so.
    let once = vramp(&["load", &path, "--strip-prefix", "module.", "--json"]).json();
    assert!(once["tensors"]["module.c"].is_object(), "{once}");
    // The longest counts, so that one prefix may begin another one.
    let path = write(dir.path(), "n.safetensors", bytes_file(&[("model.language_model.x", &[1]), ("model.y", &[2])]));
    let strip = ["--strip-prefix", "model.", "--strip-prefix", "model.language_model."];
    let both = vramp(&[&["load", &path, "--json"][..], &strip].concat()).json();
    assert_eq!(both["tensors"].as_object().unwrap().keys().collect::<Vec<_>>(), ["x", "y"]);
    // Two that become one are an error with both; a prefix that no name has is one too.
    let path = write(dir.path(), "c.safetensors", bytes_file(&[("a.b.x", &[1]), ("b.a.x", &[2])]));
    let collide = vramp(&["load", &path, "--strip-prefix", "a.", "--strip-prefix", "b."]);
    assert_eq!(collide.code, Some(2));
    assert!(collide.err.contains("\"a.b.x\"") && collide.err.contains("\"b.a.x\""), "{}", collide.err);
    let idle = vramp(&["load", &path, "--strip-prefix", "a.", "--strip-prefix", "nothing."]);
    assert!(idle.code == Some(2) && idle.err.contains("\"nothing.\": no name begins with it"), "{}", idle.err);
}

// ---- names that are nearly right

#[test]
fn a_name_that_is_not_there_brings_the_nearest_ones() {
    let dir = folder();
    let path = write(
        dir.path(),
        "m.safetensors",
        bytes_file(&[("lm_head.weight", &[1]), ("layers.0.weight", &[2]), ("layers.1.weight", &[3])]),
    );
    let checkpoint = Checkpoint::open(&path).unwrap();
    let loaded = load(&path, &Options::default()).unwrap();
    let mapped = checkpoint.map(&checkpoint.select(&Selection::default()).unwrap()).unwrap();
    let errors = [
        loaded.tensor("lm_haed.weight").unwrap_err(),
        mapped.tensor("lm_haed.weight").unwrap_err(),
        checkpoint.find("lm_haed.weight").unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains("the nearest name is \"lm_head.weight\""), "{error}");
        let Error::NoTensor { name, nearest, .. } = error else { panic!("{error:?}") };
        assert_eq!((name.as_str(), &nearest[..]), ("lm_haed.weight", &["lm_head.weight".to_owned()][..]));
    }
    assert_eq!(&*checkpoint.find("layers.1.weight").unwrap().name, "layers.1.weight");
    let error = loaded.tensor("layers.7.weight").unwrap_err();
    assert!(error.to_string().ends_with("the nearest names are \"layers.0.weight\", \"layers.1.weight\""), "{error}");
    assert!(!loaded.tensor("vision").unwrap_err().to_string().contains("nearest"));
    let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let slice = SliceRequest { name: "lm_head.weigth".into(), dim: 0, range: 0..1 };
    for (selection, setting, name, near) in [
        (
            Selection::default().include(texts(&["lm_head.weigth"])),
            Setting::Include,
            "lm_head.weigth",
            "lm_head.weight",
        ),
        (Selection::default().exclude(texts(&["*.weigth"])), Setting::Exclude, "*.weigth", "lm_head.weight"),
        (Selection::default().slices(vec![slice]), Setting::Slices, "lm_head.weigth", "lm_head.weight"),
    ] {
        let error = checkpoint.select(&selection).unwrap_err();
        let Error::NoMatch { setting: found, absent, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*found, absent[0].name.as_str()), (setting, name));
        assert!(absent[0].nearest.iter().any(|it| it.ends_with(&near[near.len() - 7..])), "{error}");
        assert!(error.to_string().contains("nearest"), "{error}");
    }
}

// ---- specifications from pipes

#[test]
fn a_specification_may_come_from_standard_input_or_a_pipe() {
    let dir = folder();
    let path = write(dir.path(), "m.safetensors", bytes_file(&[("a", &[1, 2])]));
    let spec = |bytes: u64| json!({"tensors": {"a": {"dtype": "U8", "shape": [bytes]}}}).to_string();
    let through = |spec: String, args: Vec<String>| {
        watched(move || {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let mut child = command(&args);
            let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            child.stdin.take().unwrap().write_all(spec.as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            (
                output.status.code(),
                String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap(),
            )
        })
    };
    for at in ["-", "/dev/stdin"] {
        let args = |command: &str| vec![command.to_owned(), path.clone(), "--spec".into(), at.into()];
        assert_eq!(through(spec(2), args("verify")).0, Some(0));
        assert_eq!(through(spec(3), args("verify")).0, Some(1));
        assert_eq!(through(spec(2), args("load")).0, Some(0));
        let (code, said) = through("no JSON".into(), args("verify"));
        assert!(code == Some(3) && said.contains("not valid JSON"), "{said}");
        assert_eq!(through(String::new(), args("verify")).0, Some(3));
    }
    // A file under another name, and a checkpoint whose first byte is that of JSON.
    let other = write(dir.path(), "spec.txt", spec(2));
    assert_eq!(vramp(&["verify", &path, "--spec", &other]).code, Some(0));
    let header = format!("{{\"a\":{}}}", "{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}");
    let header = header.clone() + &" ".repeat(0x7b - header.len());
    let bytes = [&0x7bu64.to_le_bytes()[..], header.as_bytes(), &[1, 2]].concat();
    assert_eq!(bytes[0], b'{');
    let odd = write(dir.path(), "odd", bytes);
    assert_eq!(vramp(&["verify", &path, "--spec", &odd]).code, Some(0));
}

#[test]
fn a_model_without_a_name_in_common_is_told_of_first() {
    let dir = folder();
    let path = write(dir.path(), "m.safetensors", bytes_file(&[("encoder.a", &[1]), ("encoder.b", &[1])]));
    let spec = |names: &[&str]| {
        let tensors = names.iter().map(|name| ((*name).to_owned(), json!({"dtype": "U8", "shape": [1]})));
        write(dir.path(), "spec.json", json!({"tensors": serde_json::Map::from_iter(tensors)}).to_string())
    };
    let first = |said: &Said| said.out.lines().next().unwrap().to_owned();
    let other = vramp(&["verify", &path, "--spec", &spec(&["h.0.w", "h.1.w", "wte"])]);
    assert_eq!(other.code, Some(1));
    let line = first(&other);
    assert!(line.contains("no name is in common (3 needed, 2 found)") && line.contains("another model"), "{line}");
    assert!(line.contains("\"h.0.w\"") && line.contains("\"encoder.a\""), "{line}");
    let prefixed = first(&vramp(&["verify", &path, "--spec", &spec(&["a", "b"])]));
    assert!(prefixed.contains("no name is in common") && prefixed.contains("a prefix"), "{prefixed}");
    let some = first(&vramp(&["verify", &path, "--spec", &spec(&["encoder.a", "x"])]));
    assert!(!some.contains("in common"), "{some}");
}
