//! What people see of results: how wide it is, how much of it is shown, what `-q` and `-v` change, and what JSON always has.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use vramp::testing::safetensors;
use vramp::testing::torch::{TensorOver, archive, state_dict};

use crate::cli::{Said, command, folder, vramp};

/// The same with COLUMNS, as a person with a screen of that width would see it.
fn on_screen(columns: usize, args: &[&str]) -> Said {
    let Output { status, stdout, stderr } = command(args).env("COLUMNS", columns.to_string()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: status.code(), out: text(stdout), err: text(stderr) }
}

#[track_caller]
fn assert_fits(columns: usize, text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= columns, "{} columns: {line}\n{text}", line.chars().count());
    }
}

/// A transformer of `layers` layers with names as long as real ones, over one file; tensor `i` of a layer has `64 * (i + 1)` bytes.
fn model(folder: &Path, layers: usize) -> (String, Vec<(String, usize)>) {
    let parts = [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_proj.weight",
        "mlp.experts.127.down_proj.weight_scale_inv",
    ];
    let name = |layer: usize, part: &str| format!("model.layers.{layer}.{part}");
    let listed: Vec<(String, usize)> = (0..layers)
        .flat_map(|layer| parts.iter().enumerate().map(move |(at, part)| (name(layer, part), 64 * (at + 1))))
        .collect();
    let shapes: Vec<[usize; 2]> = listed.iter().map(|(_, bytes)| [16, *bytes / 64]).collect();
    let zeros = [0u8; 256];
    let tensors: Vec<(&str, &str, &[usize], &[u8])> = listed
        .iter()
        .zip(&shapes)
        .map(|((name, bytes), shape)| (name.as_str(), "F32", &shape[..], &zeros[..*bytes]))
        .collect();
    let path = folder.join("m.safetensors");
    std::fs::write(&path, safetensors(&tensors, json!({"format": "pt"}))).unwrap();
    (path.to_str().unwrap().to_owned(), listed)
}

#[test]
fn inspect_shows_the_largest_tensors_and_lists_all_when_asked() {
    let folder = folder();
    let (path, listed) = model(folder.path(), 25);
    let few = vramp(&["inspect", &path]).out;
    let shown = |text: &str, part: &str| text.lines().filter(|line| line.contains(part)).count();
    assert_eq!((shown(&few, "weight_scale_inv"), shown(&few, "layernorm")), (20, 0), "{few}");
    let rest: usize = listed.iter().map(|(_, bytes)| bytes).sum::<usize>() - 20 * 256;
    assert!(few.contains("and 80 more tensors, none larger, of 10.9 kB together (--all lists them)"), "{rest}: {few}");
    assert_eq!(rest, 10_880);
    let all = vramp(&["inspect", &path, "--all"]).out;
    for (name, _) in &listed {
        assert_eq!(shown(&all, name), 1, "{name}: {all}");
    }
    let json = vramp(&["inspect", &path, "--json"]).json();
    assert_eq!(json["tensors"].as_object().unwrap().len(), 100);
    let (path, listed) = model(folder.path(), 5); // twenty: all fit
    let out = vramp(&["inspect", &path]).out;
    assert!(listed.iter().all(|(name, _)| out.contains(name.as_str())) && !out.contains("more tensor"), "{out}");
    assert_eq!(vramp(&["inspect", &path, "--all", "--tree"]).code, Some(2));
}

#[test]
fn results_fit_the_screen_and_pipes_get_names_whole() {
    let folder = folder();
    let (path, listed) = model(folder.path(), 25);
    let fleet = ["estimate", "--parameters", "70B", "--dtype", "f16", "--fleet", "64"];
    let chain = ["estimate", "--parameters", "70B", "--dtype", "f16"];
    let mixture = ["estimate", "--parameters", "1.6B=bf16", "--experts", "8x5.6B=fp8", "--scales", "128x128=f32"];
    let commands: [&[&str]; 9] = [
        &["inspect", &path],
        &["inspect", &path, "--all", "-v"],
        &["inspect", &path, "--plan"],
        &["load", &path, "--device", "cpu", "--plan-only"],
        &fleet,
        &chain,
        &mixture,
        &["verify", &path, "--spec", &path],
        &["audit", &path],
    ];
    for args in commands {
        for columns in [80, 100] {
            let said = on_screen(columns, args);
            assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
            // A path is one word and is never broken.
            let words = said.out.replace(&path, "PATH");
            assert_fits(columns, &words);
        }
    }
    let piped = vramp(&["inspect", &path, "--all"]).out;
    assert!(listed.iter().all(|(name, _)| piped.contains(name.as_str())), "{piped}");
    let narrow = on_screen(60, &["inspect", &path, "--all"]).out;
    assert!(narrow.contains('…') && narrow.contains("scale_inv"), "{narrow}");
    for args in [&fleet[..], &chain, &mixture] {
        assert_fits(80, &vramp(args).out); // in a pipe as well
    }
}

#[test]
fn one_file_is_one_file_also_where_tensors_of_it_are_rearranged() {
    let folder = folder();
    let numbers: Vec<u8> = (0..24u8).collect();
    let over =
        TensorOver { key: "0", storage: "FloatStorage", count: 6, offset: 0, shape: &[], stride: &[], bits: &[] };
    let whole = TensorOver { shape: &[2, 3], stride: &[3, 1], ..over.clone() };
    let turned = TensorOver { shape: &[3, 2], stride: &[1, 3], ..over };
    let path = folder.path().join("m.pt");
    std::fs::write(&path, archive(&state_dict(&[("a", whole), ("b", turned)]), &[("0", &numbers)])).unwrap();
    let path = path.to_str().unwrap();
    let json = vramp(&["inspect", path, "--json"]).json();
    assert_eq!(json["shards"].as_array().unwrap().len(), 2, "the case is one: {json}");
    let out = vramp(&["inspect", path]).out;
    assert!(out.contains(", 1 file, 2 tensors"), "{out}");
    let plan = vramp(&["load", path, "--device", "cpu", "--plan-only"]).out;
    assert!(plan.contains("m.pt\n") && plan.contains("m.pt (rearranged)\n") && !plan.contains("not read"), "{plan}");
    let one = vramp(&["load", path, "--device", "cpu", "--plan-only", "--include", "b"]).out;
    assert!(one.contains("m.pt (rearranged)\n") && !one.contains("not read"), "{one}");
}

#[test]
fn a_plan_says_what_first_and_then_the_reads_in_the_order_of_the_json() {
    let folder = folder();
    let names: Vec<String> = (1..=3).map(|file| format!("model-{file:05}-of-00003.safetensors")).collect();
    let mut map = serde_json::Map::new();
    for (at, name) in names.iter().enumerate() {
        let tensor = format!("t{at}");
        let file = safetensors(&[(&tensor, "U8", &[4096], &[at as u8; 4096])], json!({}));
        std::fs::write(folder.path().join(name), file).unwrap();
        map.insert(tensor, json!(name));
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    let path = folder.path().to_str().unwrap();
    let args = ["load", path, "--device", "cpu", "--plan-only"];
    let out = vramp(&args).out;
    let at = |part: &str| out.find(part).unwrap_or_else(|| panic!("{part}: {out}"));
    assert!(at("plan: ") < at("files, in the order") && at("files, in the order") < at("reads, in the order"), "{out}");
    assert!(out.contains("of 3 tensors to cpu"), "{out}");
    let json = vramp(&[&args[..], &["--json"]].concat()).json();
    let transfers = json["plan"]["transfers"].as_array().unwrap();
    let rows: Vec<&str> = out.split("reads, in the order").nth(1).unwrap().lines().skip(2).collect();
    assert_eq!(rows.len(), transfers.len(), "{out}");
    for (number, (row, transfer)) in rows.iter().zip(transfers).enumerate() {
        let file = &names[transfer["shard"].as_u64().unwrap() as usize];
        let expected = (number + 1).to_string();
        assert!(row.trim_start().starts_with(&expected) && row.ends_with(file.as_str()), "{row}: {transfer}");
    }
    let one = vramp(&["load", path, "--device", "cpu", "--plan-only", "--include", "t1"]).out;
    assert!(one.contains("2 files not read"), "{one}");
}

#[test]
fn quiet_leaves_results_and_errors_and_verbose_says_which_files() {
    let folder = folder();
    let (path, _) = model(folder.path(), 1);
    let nested = folder.path().join("none.safetensors");
    let warned = ["estimate", "--parameters", "7B", "--dtype", "nf4", "--bandwidth", "7GB/s"];
    let usual = vramp(&warned);
    assert!(usual.err.contains("warning: NF4"), "{}", usual.err);
    for quiet in ["-q", "--quiet"] {
        let said = vramp(&[&warned[..], &[quiet]].concat());
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), usual.out.as_str(), ""));
        let first = vramp(&[&[quiet][..], &warned].concat());
        assert_eq!((first.out.as_str(), first.err.as_str()), (usual.out.as_str(), ""), "before the command as well");
    }
    let failed = vramp(&["-q", "inspect", nested.to_str().unwrap()]);
    assert!(failed.code == Some(4) && failed.err.starts_with("error: "), "{}", failed.err);
    let json = vramp(&[&warned[..], &["-q", "--json"]].concat());
    assert!(json.json()["warnings"][0].as_str().unwrap().starts_with("NF4"), "JSON is whole");
    for command in ["inspect", "load", "estimate", "verify", "convert"] {
        let out = folder.path().join("out.safetensors");
        let more: &[&str] = match command {
            "load" => &["--device", "cpu"],
            "verify" => &["--spec", &path],
            "convert" => &[out.to_str().unwrap()],
            _ => &[],
        };
        let args = [&[command, path.as_str()][..], more].concat();
        assert_eq!(vramp(&args).err, "", "{command}");
        let _ = std::fs::remove_file(&out);
        let said = vramp(&[&args[..], &["-v"]].concat());
        assert!(
            said.code == Some(0) && said.err.starts_with("opened ") && said.err.contains("m.safetensors"),
            "{}",
            said.err
        );
        let _ = std::fs::remove_file(&out);
        let json = vramp(&[&args[..], &["-v", "--json"]].concat());
        assert_eq!((json.code, json.err.as_str()), (Some(0), ""), "{command}: programs get JSON alone");
    }
    assert_eq!(vramp(&["inspect", &path, "-q", "-v"]).code, Some(2));
}

#[test]
fn quantised_weights_are_estimated_by_their_bits() {
    let bytes = |dtype: &str| -> Value {
        vramp(&["estimate", "--parameters", "70B", "--dtype", dtype, "--json"]).json()["bytes"].clone()
    };
    for (dtype, gigabytes) in [
        ("int4", 35),
        ("INT4", 35),
        ("uint4", 35),
        ("nf4", 35),
        ("mxfp4", 35),
        ("nvfp4", 35),
        ("fp4", 35),
        ("int8", 70),
    ] {
        assert_eq!(bytes(dtype), json!(gigabytes * 1_000_000_000u64), "{dtype}");
    }
    let mxfp4 = ["estimate", "--parameters", "32M", "--dtype", "mxfp4", "--scales", "32=F8_E8M0", "--json"];
    let json = vramp(&mxfp4).json();
    assert_eq!((&json["bytes"], &json["dtype"], &json["warnings"]), (&json!(17_000_000), &json!("MXFP4"), &json!([])));
    let unknown = vramp(&["estimate", "--parameters", "7B", "--dtype", "int3"]);
    assert!(unknown.code == Some(2) && unknown.err.contains("INT4") && unknown.err.contains("BF16"), "{}", unknown.err);
}

#[test]
fn a_fleet_says_what_vramp_itself_does() {
    let fleet = ["estimate", "--parameters", "70B", "--dtype", "f16", "--fleet", "64"];
    let out = vramp(&fleet).out;
    assert!(out.contains("vramp itself reads files: shared storage and local drives."), "{out}");
    assert!(out.contains("itself   448 s (7 min 28 s)  shared storage\n"), "140 GB × 64 / 20 GB/s: {out}");
    let json = vramp(&[&fleet[..], &["--json"]].concat()).json();
    assert_eq!((&json["fleet"]["best"], &json["fleet"]["best_built"]), (&json!("peers"), &json!("shared_storage")));
    let none = vramp(&[&fleet[..], &["--object", "5GB/s", "--json"]].concat()).json();
    assert_eq!(none["fleet"]["best_built"], Value::Null);
}
