//! The program as people and scripts meet it: help, output, JSON, exit statuses, signals, closed pipes.
//!
//! Help is compared with `tests/golden`; run with `VRAMP_BLESS=1` to write what it is now.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use vramp::testing::{safetensors, watched};

/// What one run said.
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {:?} {:?}", self.out, self.err))
    }

    /// The one line of JSON on stderr.
    pub(crate) fn error(&self) -> Value {
        assert_eq!(self.err.lines().count(), 1, "{}", self.err);
        let error: Value = serde_json::from_str(&self.err).unwrap();
        let keys: Vec<_> = error["error"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["kind", "message", "path", "tensor", "causes"]);
        error["error"].clone()
    }
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.args(args).stdin(Stdio::null());
    for name in ["COLUMNS", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "HF_HUB_CACHE"] {
        command.env_remove(name);
    }
    // Benchmarks keep limits there, and not in the folder of whoever runs the tests.
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command
}

pub(crate) fn vramp(args: &[&str]) -> Said {
    let Output { status, stdout, stderr } = command(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: status.code(), out: text(stdout), err: text(stderr) }
}

/// A folder on the disk that the target folder is on: the usual temporary one may be memory.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// `a.weight` F32 [2, 3] and `b.bias` I64 [2] in `m.safetensors`.
fn small(folder: &Path) -> String {
    let (a, b): (Vec<u8>, Vec<u8>) = ((0..24).collect(), (100..116).collect());
    let path = folder.join("m.safetensors");
    let file = safetensors(&[("a.weight", "F32", &[2, 3], &a), ("b.bias", "I64", &[2], &b)], json!({"format": "pt"}));
    std::fs::write(&path, file).unwrap();
    path.to_str().unwrap().to_owned()
}

fn spec(folder: &Path, rows: u64) -> String {
    let path = folder.join("spec.json");
    let tensors = json!({"a.weight": {"dtype": "F32", "shape": [rows, 3]}, "b.bias": {"dtype": "I64", "shape": [2]}});
    std::fs::write(&path, json!({"tensors": tensors}).to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    vramp::digest::Digest::of(bytes).to_string()
}

#[track_caller]
fn assert_golden(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("VRAMP_BLESS").is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(expected == found, "{name} differs; VRAMP_BLESS=1 writes what it is now:\n{found}");
}

// ---- help

#[test]
fn help_is_what_it_was() {
    let commands = ["inspect", "load", "estimate", "bench", "verify", "convert", "audit", "demo", "completions", "man"];
    for command in [""].into_iter().chain(commands) {
        for (option, kind) in [("-h", "short"), ("--help", "long")] {
            let args: Vec<&str> = [command, option].into_iter().filter(|arg| !arg.is_empty()).collect();
            let said = vramp(&args);
            assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{args:?}");
            let name = if command.is_empty() { "vramp" } else { command };
            assert_golden(&format!("help-{name}-{kind}.txt"), &said.out);
        }
    }
}

/// The keys that a command prints stand in its help, those of what it prints on the way included.
#[test]
fn help_names_every_key_of_the_json() {
    let folder = folder();
    let path = small(folder.path());
    let pickle = folder.path().join("pickle.bin");
    let evil = vramp::testing::torch::Pickle::new().global("os", "getenv").text("SECRET").raw(b"\x85R0N.").bytes();
    std::fs::write(&pickle, vramp::testing::torch::archive(&evil, &[])).unwrap();
    let pickle = pickle.to_str().unwrap();
    for (args, lists) in [
        (&["inspect", &path][..], &["shards"][..]),
        (&["load", &path], &[]),
        (&["load", &path, "--plan-only"], &[]),
        (&["estimate", &path, "--bandwidth", "1GB/s"], &["links", "parts"]),
        (&["bench", &path, "--device", "null", "--quick", "--rounds", "1"], &["stages", "states"]),
        (&["audit", pickle], &["globals", "findings"]),
        (&["demo", "--bytes", "1MiB", "--dir", folder.path().to_str().unwrap()], &["states"]),
    ] {
        let said = vramp(&[args, &["--json"]].concat()).json();
        // The demo prints what a benchmark does, and its checkpoint.
        let command = if args[0] == "demo" { "bench" } else { args[0] };
        let help = vramp(&[command, "--help"]).out;
        let inside = lists.iter().filter_map(|list| said[list][0].as_object()).flat_map(|item| item.keys());
        for key in said.as_object().unwrap().keys().chain(inside).filter(|key| *key != "checkpoint") {
            let json = help.split("\nJSON: ").nth(1).unwrap();
            let words: Vec<&str> = json.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            assert!(words.contains(&key.as_str()), "{args:?}: {key}");
        }
    }
}

#[test]
fn version_completions_and_manual_pages() {
    assert_eq!(vramp(&["--version"]).out, format!("vramp {}\n", env!("CARGO_PKG_VERSION")));
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(vramp(&["completions", shell]).out.contains("inspect"), "{shell}");
    }
    let page = vramp(&["man"]).out;
    assert!(page.starts_with(".ie") && !page.contains("help(1)"), "{page}");
    let folder = folder();
    assert_eq!(vramp(&["man", "--dir", folder.path().to_str().unwrap()]).code, Some(0));
    assert!(folder.path().join("vramp-load.1").is_file());
    let page = std::fs::read_to_string(folder.path().join("vramp.1")).unwrap();
    let named = page.split("vramp\\-").skip(1).filter_map(|rest| rest.split_once("(1)")).map(|(name, _)| name);
    let named: Vec<&str> = named.collect();
    assert!(named.contains(&"load"), "{named:?}");
    for name in named {
        assert!(folder.path().join(format!("vramp-{name}.1")).is_file(), "{name} in {page}");
    }
}

// ---- audit

#[test]
fn an_audit_names_what_would_run_and_its_exit_status_says_how_bad_it_is() {
    use vramp::testing::torch::{Pickle, TensorOver, archive, state_dict};
    let folder = folder();
    let storage =
        TensorOver { key: "0", storage: "FloatStorage", count: 1, offset: 0, shape: &[1], stride: &[1], bits: &[] };
    let good = archive(&state_dict(&[("a", storage)]), &[("0", &[0, 0, 128, 63])]);
    let evil = Pickle::new().global("os", "getenv").text("SECRET").raw(b"\x85R0N.").bytes();
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (good, evil, cut) = (put("good.pt", &good), put("evil.bin", &archive(&evil, &[])), put("cut.pt", &good[..200]));
    put("readme.txt", b"not weights");
    let whole = folder.path().to_str().unwrap();
    for (args, code) in [
        (&["audit", &good][..], 0),
        (&["audit", &evil], 1),
        (&["audit", &evil, "--fail-on", "dangerous"], 1),
        (&["audit", &cut], 3),
        (&["audit", whole], 1),
        (&["audit", "nowhere.pt"], 4),
    ] {
        let said = vramp(args);
        assert_eq!(said.code, Some(code), "{args:?}: {}{}", said.out, said.err);
        assert!(!said.out.to_lowercase().contains("safe "), "{}", said.out);
    }
    assert!(vramp(&["audit", &good]).out.contains("contains only allow-listed constructs"));
    let text = vramp(&["audit", &evil]).out;
    assert!(
        text.contains("os.getenv") && text.contains("made and thrown away") && text.contains("\"SECRET\""),
        "{text}"
    );
    let json: serde_json::Value = serde_json::from_str(&vramp(&["audit", &evil, "--json"]).out).unwrap();
    assert_eq!((&json["verdict"], &json["format"]), (&"dangerous".into(), &"torch-zip".into()));
    assert_eq!((&json["globals"][0]["module"], &json["globals"][0]["position"]), (&"os".into(), &2.into()));
    let finding = &json["findings"][0];
    assert_eq!(
        (&finding["rule"], &finding["reached"], &finding["opcode"]),
        (&"global-denied".into(), &false.into(), &"GLOBAL".into())
    );
    assert!(finding["place"].as_str().unwrap().ends_with("evil.bin!archive/data.pkl"), "{finding}");
    let sarif: serde_json::Value = serde_json::from_str(&vramp(&["audit", whole, "--format", "sarif"]).out).unwrap();
    let results = sarif["runs"][0]["results"].as_array().unwrap();
    assert!(results.iter().any(|result| result["ruleId"] == "global-denied" && result["level"] == "error"), "{sarif}");
    assert_eq!(vramp(&["audit", &good, "--json", "--format", "json"]).json()["verdict"], "clean");
    for other in ["sarif", "text"] {
        let said = vramp(&["audit", &good, "--format", other, "--json"]);
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "two formats, and only one output");
        assert_eq!(said.error()["kind"], "usage");
    }
}

// ---- results

#[test]
fn inspect_lists_everything_as_json() {
    let folder = folder();
    let path = small(folder.path());
    let said = vramp(&["inspect", &path, "--json"]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let offset = std::fs::metadata(&path).unwrap().len() - 40;
    let expected = json!({
        "path": path,
        "format": "safetensors",
        "shards": [{"path": path, "bytes": offset + 40}],
        "metadata": {"format": "pt"},
        "total_bytes": 40,
        "parameters": 8,
        "dtypes": {"F32": {"tensors": 1, "bytes": 24}, "I64": {"tensors": 1, "bytes": 16}},
        "tensors": {
            "a.weight": {"dtype": "F32", "shape": [2, 3], "shard": 0, "offset": offset, "bytes": 24},
            "b.bias": {"dtype": "I64", "shape": [2], "shard": 0, "offset": offset + 24, "bytes": 16},
        },
        "warnings": [],
    });
    assert_eq!(said.json(), expected);
}

#[test]
fn inspect_shows_a_table_a_tree_and_a_plan_to_people() {
    let folder = folder();
    let path = small(folder.path());
    let table = vramp(&["inspect", &path]).out;
    assert!(table.contains("a.weight  F32   [2, 3]   24 B\n"), "{table}");
    assert!(table.contains("40 B, 1 file, 2 tensors, 8 parameters"), "{table}");
    let tree = vramp(&["inspect", &path, "--tree"]).out;
    assert!(tree.contains("├─ a.weight  F32 [2, 3]  24 B\n└─ b.bias  I64 [2]  16 B\n"), "{tree}");
    let plan = vramp(&["inspect", &path, "--plan"]).out;
    assert!(plan.contains("plan: 40 B of 2 tensors"), "{plan}");
    let one = vramp(&["inspect", &path, "--include", "a*", "--json"]).json();
    assert_eq!(one["tensors"].as_object().unwrap().len(), 1);
    let planned = vramp(&["inspect", &path, "--plan", "--json"]).json();
    assert_eq!(planned["plan"]["placements"].as_array().unwrap().len(), 2);
}

#[test]
fn layers_that_are_alike_are_shown_once() {
    let folder = folder();
    let names: Vec<String> = (0..12).map(|layer| format!("model.layers.{layer}.up.weight")).collect();
    let tensors: Vec<(&str, &str, &[usize], &[u8])> =
        names.iter().map(|name| (name.as_str(), "U8", &[2][..], &[1, 2][..])).collect();
    let path = folder.path().join("m.safetensors");
    std::fs::write(&path, safetensors(&tensors, json!({}))).unwrap();
    let tree = vramp(&["inspect", path.to_str().unwrap(), "--tree"]).out;
    assert!(tree.contains("0 … 11  (12 alike, each:)"), "{tree}");
    assert_eq!(tree.matches("up.weight").count(), 1, "{tree}");
}

#[test]
fn load_gives_tensors_digests_and_the_report_as_json() {
    let folder = folder();
    let said = vramp(&["load", &small(folder.path()), "--digests", "--json"]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let loaded = said.json();
    let keys: Vec<_> = loaded.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["device", "tensors", "scales", "report", "warnings", "skipped", "tensors_left_out"]);
    assert_eq!((&loaded["device"], &loaded["tensors_left_out"]), (&json!("cpu"), &json!(0)));
    let a: Vec<u8> = (0..24).collect();
    assert_eq!(
        loaded["tensors"]["a.weight"],
        json!({"dtype": "F32", "shape": [2, 3], "bytes": 24, "sha256": sha256(&a)})
    );
    let report = &loaded["report"];
    for key in ["bytes", "seconds", "gb_per_s", "main_stage", "stages", "routes", "cache", "staging", "no_estimate"] {
        assert!(!report[key].is_null(), "{key}: {report}");
    }
    assert_eq!(report["bytes"], 40);
    assert!(report.get("estimate").is_none() && report.get("efficiency").is_none(), "{report}");
}

#[test]
fn every_route_gives_the_same_digests() {
    let folder = folder();
    let path = small(folder.path());
    let digests = |route: &str| {
        let said = vramp(&["load", &path, "--route", route, "--digests", "--json"]);
        assert_eq!(said.code, Some(0), "{route}: {}", said.err);
        (said.json()["tensors"].clone(), said.json()["report"]["routes"]["view"].clone())
    };
    let (auto, _) = digests("auto");
    // On a machine without a GPU, gpu-direct is the ordinary route, and the report says why.
    for route in ["direct", "buffered", "mapped", "gpu-direct"] {
        assert_eq!(digests(route), (auto.clone(), json!(0)), "{route}");
    }
    assert_eq!(digests("view"), (auto, json!(40)));
}

#[test]
fn slices_ranks_names_and_ties_reach_the_library() {
    let folder = folder();
    let path = small(folder.path());
    let a: Vec<u8> = (0..24).collect();
    let tensors = |args: &[&str]| {
        let said = vramp(&[&["load", &path, "--digests", "--json"], args].concat());
        assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
        said.json()["tensors"].clone()
    };
    let row = tensors(&["--slice", "a.weight=0:1:2", "--exclude", "b.*"]);
    assert_eq!(row, json!({"a.weight": {"dtype": "F32", "shape": [1, 3], "bytes": 12, "sha256": sha256(&a[12..])}}));
    let rank = tensors(&["--include", "a.weight", "--tp", "0/2", "--tp-dim", "a.weight=0"]);
    assert_eq!(rank["a.weight"]["sha256"], sha256(&a[..12]));
    let renamed = tensors(&["--strip-prefix", "a.", "--tied", "head=weight"]);
    assert_eq!(renamed["head"]["sha256"], renamed["weight"]["sha256"]);
}

#[test]
fn tied_tensors_that_are_both_stored_must_be_equal_to_be_loaded() {
    let folder = folder();
    let path = folder.path().join("m.safetensors");
    let tensors: &[(&str, &str, &[usize], &[u8])] =
        &[("a", "U8", &[2], &[1, 2]), ("same", "U8", &[2], &[1, 2]), ("other", "U8", &[2], &[1, 3])];
    std::fs::write(&path, safetensors(tensors, json!({}))).unwrap();
    let load = |tie: &str| vramp(&["load", path.to_str().unwrap(), "--tied", tie, "--json"]);
    assert_eq!(load("same=a").code, Some(0));
    let refused = load("other=a");
    assert_eq!((refused.code, refused.out.as_str()), (Some(1), ""));
    let message = refused.error()["message"].to_string();
    assert!(message.contains("other") && message.contains("both stored, and differ"), "{message}");
}

#[test]
fn load_tells_people_what_the_limit_was() {
    let folder = folder();
    let path = small(folder.path());
    let said = vramp(&["load", &path]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    for part in ["loaded      40 B in ", "(2 tensors to cpu)", "limit       ", "routes ", "page cache ", "CPU "] {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    assert!(!said.out.contains('\x1b'), "colours are for terminals");
    assert!(vramp(&["load", &path, "--device", "null"]).out.contains("(2 tensors to null)"));
    assert!(vramp(&["load", &path, "--plan-only"]).out.contains("plan: 40 B of 2 tensors"));
    assert!(vramp(&["load", &path, "--route", "view"]).out.starts_with("mapped      40 B"));
}

#[test]
fn a_header_that_does_not_fit_memory_is_an_error_and_no_abort() {
    let folder = folder();
    let path = folder.path().join("huge.safetensors");
    let bytes: u64 = 8 << 30;
    std::fs::write(&path, [&(bytes - 8).to_le_bytes()[..], b"{"].concat()).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
    let limited = "ulimit -v 4000000; exec \"$0\" inspect --max-header-bytes 1TB \"$1\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", limited, env!("CARGO_BIN_EXE_vramp")]).arg(&path);
    let Output { status, stderr, .. } = shell.output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(4), "{said}");
    assert!(said.contains("huge.safetensors") && said.contains("out of memory"), "{said}");
}

#[test]
fn verify_says_yes_or_no() {
    let folder = folder();
    let path = small(folder.path());
    let yes = vramp(&["verify", &path, "--spec", &spec(folder.path(), 2), "--json"]);
    assert_eq!((yes.code, &yes.json()["ok"]), (Some(0), &json!(true)));
    let keys: Vec<_> = yes.json().as_object().unwrap().keys().cloned().collect();
    let expected = ["ok", "missing", "unexpected", "shape_mismatch", "dtype_mismatch", "ties", "suggestion"];
    assert_eq!(keys, expected);
    assert_eq!(vramp(&["verify", &path, "--spec", &path]).code, Some(0));
    let no = vramp(&["verify", &path, "--spec", &spec(folder.path(), 7), "--json"]);
    assert_eq!((no.code, &no.json()["ok"]), (Some(1), &json!(false)));
    let no = vramp(&["verify", &path, "--spec", &spec(folder.path(), 7)]);
    assert!(no.out.contains("a.weight") && no.out.contains("[7, 3]"), "{}", no.out);
    let strict = vramp(&["load", &path, "--spec", &spec(folder.path(), 7), "--json"]);
    assert_eq!((strict.code, strict.out.as_str()), (Some(1), ""));
    assert_eq!(strict.error()["kind"], "mismatch");
}

#[test]
fn estimates_are_s_over_b() {
    let seventy = ["estimate", "--parameters", "70B", "--dtype", "f16", "--bandwidth", "12GB/s"];
    let said = vramp(&seventy).out;
    assert!(said.contains("140 GB") && said.contains("11.7 s"), "{said}");
    let json = vramp(&[&seventy[..], &["--bandwidth", "gpu=56GB/s", "--json"]].concat()).json();
    assert_eq!((&json["bytes"], &json["bound_by"]), (&json!(140_000_000_000_u64), &json!("12GB/s")));
    assert!((json["seconds"].as_f64().unwrap() - 11.667).abs() < 0.001);
    let folder = folder();
    let said = vramp(&["estimate", &small(folder.path())]).out;
    assert!(said.contains("40 B") && said.contains("pcie5x16"), "{said}");
}

#[test]
fn an_estimate_of_nothing_says_both_things_that_it_could_be_of() {
    for args in [&["estimate"][..], &["estimate", "--dtype", "f16"], &["estimate", "--fleet", "8"]] {
        let said = vramp(args);
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{args:?}");
        assert!(said.err.contains("PATH") && said.err.contains("--parameters"), "{args:?}: {}", said.err);
    }
}

#[test]
fn estimates_of_a_chain_name_its_stages_in_order_and_both_times() {
    let chain = ["estimate", "--parameters", "70B", "--dtype", "f16", "--bandwidth", "disk=7GB/s", "--bandwidth"];
    let chain = [&chain[..], &["host=20GB/s", "--bandwidth", "pcie5x8"]].concat();
    let said = vramp(&chain).out;
    for part in ["disk -> host -> pcie5x8", "20.0 s  = S/B", "32.0 s  if no stage overlapped", "the limit"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let json = vramp(&[&chain[..], &["--json"]].concat()).json();
    assert_eq!((&json["chain"], &json["bound_by"]), (&json!("disk -> host -> pcie5x8"), &json!("disk")));
    assert_eq!((&json["seconds"], &json["seconds_one_by_one"]), (&json!(20.0), &json!(32.0)));
    assert_eq!(json["links"][2], json!({"name": "pcie5x8", "bytes_per_second": 28e9, "seconds": 5.0}));
}

#[test]
fn every_named_link_stands_in_the_help_and_in_the_docs() {
    let help = vramp(&["estimate", "--help"]).out;
    let docs = include_str!("../../../docs/links.md");
    for (name, rate) in vramp_bench::estimate::NAMED_LINKS {
        assert!(help.contains(name) && docs.contains(&format!("`{name}`")), "{name}");
        let gb = (rate / 1e9).to_string();
        let row = docs.lines().find(|line| line.contains(&format!("`{name}`"))).unwrap();
        assert!(row.replace(',', "").split_whitespace().any(|word| word == gb), "{name} is {gb} GB/s: {row}");
    }
}

#[test]
fn estimates_of_mixtures_count_experts_and_scales() {
    let mixture =
        ["estimate", "--parameters", "1.6B=bf16", "--experts", "8x5.6B=fp8", "--scales", "128x128=f32", "--json"];
    let json = vramp(&mixture).json();
    let scales = 44_800_000_000_u64.div_ceil(128 * 128) * 4;
    assert_eq!((&json["scale_bytes"], &json["dtype"]), (&json!(scales), &Value::Null));
    assert_eq!(json["bytes"], json!(3_200_000_000 + 44_800_000_000 + scales));
    assert_eq!(json["parts"][1], json!({"parameters": 5_600_000_000_u64, "dtype": "F8_E4M3", "copies": 8}));
    let folder = folder();
    let json = vramp(&["estimate", &small(folder.path()), "--json"]).json();
    let parts = json!([{"parameters": 6, "dtype": "F32", "copies": 1}, {"parameters": 2, "dtype": "I64", "copies": 1}]);
    assert_eq!((&json["parts"], &json["bytes"], &json["seconds"]), (&parts, &json!(40), &Value::Null));
}

#[test]
fn estimates_of_a_fleet_say_which_way_is_best_and_from_when_on() {
    let fleet = ["estimate", "--parameters", "70B", "--dtype", "f16", "--shared", "20GB/s,20GB/s", "--nic", "10GB/s"];
    let fleet = [&fleet[..], &["--nvme", "7GB/s,5GB/s", "--fleet"]].concat();
    let json = vramp(&[&fleet[..], &["64", "--json"]].concat()).json();
    let ways = json["fleet"]["ways"].as_array().unwrap();
    let seconds = |way: &str| ways.iter().find(|one| one["way"] == way).unwrap()["seconds"].as_f64().unwrap();
    assert!((seconds("shared_storage") - 64.0 * 140.0 / 20.0).abs() < 0.1);
    assert!((seconds("local_nvme") - 140.0 / 7.0).abs() < 0.1);
    assert!((14.0..14.2).contains(&seconds("peers")), "every host takes all of it over its card: {ways:?}");
    let flips = json!([{"hosts": 1, "way": "shared_storage"}, {"hosts": 3, "way": "peers"}]);
    assert_eq!((&json["fleet"]["best"], &json["fleet"]["flips"]), (&json!("peers"), &flips));
    let said = vramp(&[&fleet[..], &["64"]].concat()).out;
    for part in ["64 hosts of 8 GPUs", "peers from 3 hosts on", "448 s", "one copy leaves the store"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_benchmark_says_what_the_limit_is_and_writes_what_it_was_asked_for() {
    let folder = folder();
    let path = folder.path().join("<b>.safetensors");
    let bytes: Vec<u8> = (0..4 << 20).map(|at: u32| (at % 251) as u8).collect();
    std::fs::write(&path, safetensors(&[("a", "U8", &[4 << 20], &bytes)], json!({}))).unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (csv, html) = (file("samples.csv"), file("report.html"));
    let bench = ["bench", path.to_str().unwrap(), "--device", "cpu", "--quick", "--rounds", "1"];
    let said = vramp(&[&bench[..], &["--json", "--csv", &csv, "--html", &html]].concat());
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let json = said.json();
    assert_eq!((&json["subject"]["bytes"], &json["machine"]["device"]), (&json!(4 << 20), &json!("cpu")));
    for (at, state) in ["cold", "warm"].into_iter().enumerate() {
        assert_eq!(json["states"][at]["state"], state);
        assert!(json["states"][at]["prediction"]["seconds"].as_f64().unwrap() > 0.0, "{json}");
        assert!(json["advice"][state].as_str().is_some_and(|advice| advice.len() > 20), "{json}");
    }
    let samples = std::fs::read_to_string(csv).unwrap();
    assert!(samples.contains("\r\nload,cold,,,,,1,4194304,") && samples.contains("\r\nload,warm,"), "{samples}");
    let report = std::fs::read_to_string(html).unwrap();
    assert!(report.contains("<h1>&lt;b&gt;.safetensors</h1>") && report.ends_with("</html>\n"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "something is left beside the files");
}

#[test]
fn an_audit_in_json_fails_in_json() {
    for args in [&["audit", "--json", "/nowhere"][..], &["audit", "--format", "json", "/nowhere"]] {
        let said = vramp(args);
        assert_eq!((said.code, &said.error()["kind"]), (Some(4), &"not_found".into()), "{args:?}");
    }
}

#[test]
fn names_from_files_cannot_command_a_terminal() {
    let folder = folder();
    let path = folder.path().join("m.safetensors");
    std::fs::write(&path, safetensors(&[("a\x1b]0;x\x07", "U8", &[1], &[1])], json!({"k": "\x1b[2J"}))).unwrap();
    for args in [&["inspect"][..], &["inspect", "--tree"], &["load", "--digests"]] {
        let said = vramp(&[args, &[path.to_str().unwrap()]].concat());
        assert_eq!(said.code, Some(0));
        assert!(!said.out.contains('\x1b') && !said.out.contains('\x07'), "{:?}", said.out);
    }
}

// ---- failures

#[test]
fn each_kind_of_failure_has_its_status_and_one_line_of_json() {
    let folder = folder();
    let path = small(folder.path());
    let broken = folder.path().join("broken.safetensors");
    std::fs::write(&broken, [0xff; 64]).unwrap();
    let broken = broken.to_str().unwrap();
    let new = folder.path().join("new").to_str().unwrap().to_owned();
    let plain = folder.path().join("plain");
    std::fs::write(&plain, b"").unwrap();
    let plain = plain.to_str().unwrap().to_owned();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["inspect", "/no/such/place"], 4, "not_found"),
        (&["load", "/no/such/place"], 4, "not_found"),
        (&["inspect", broken], 3, "malformed"),
        (&["load", broken], 3, "malformed"),
        (&["inspect", &path, "--max-header-bytes", "16"], 3, "limit"),
        (&["load", &path, "--include", "nothing.like.it"], 2, "request"),
        (&["load", &path, "--tp", "0/3", "--tp-dim", "a.weight=0", "--include", "a.weight"], 2, "request"),
        (&["load", &path, "--device", "cuda:999"], 5, "device"),
        (&["load", &path, "--device", "cuda:GPU-none"], 5, "device"),
        (&["load", &path, "--device", "null", "--checksums"], 2, "usage"),
        (&["load", &path, "--device", "null", "--dtype", "f16"], 2, "usage"),
        (&["load", &path, "--route", "gpu-direct", "--device", "cpu"], 2, "usage"),
        (&["load", &path, "--route", "gpu-direct", "--device", "null"], 2, "usage"),
        (&["load", &path, "--route", "gpu-direct", "--align", "64"], 2, "usage"),
        (&["load", &path, "--route", "view", "--dtype", "f16"], 2, "usage"),
        (&["load", &path, "--route", "view", "--checksums"], 2, "usage"),
        (&["load", &path, "--dtype", "f64"], 2, "usage"),
        (&["load", &path, "--allow-overflow"], 2, "usage"),
        (&["load", &path, "--device", "tpu"], 2, "usage"),
        (&["load", &path, "--device", "null", "--digests"], 2, "usage"),
        (&["load", &path, "--route", "view", "--staging", "2x4KiB"], 2, "usage"),
        (&["load", &path, "--route", "view", "--device", "null"], 2, "usage"),
        (&["load", &path, "--align", "64", "--device", "null"], 2, "usage"),
        (&["load", &path, "--align", "3"], 2, "usage"),
        (&["load", &path, "--slice", "a.weight"], 2, "usage"),
        (&["load", &path, "--tp-dim", "a=0"], 2, "usage"),
        (&["load", "--no-such-option"], 2, "usage"),
        (&["estimate"], 2, "usage"),
        (&["estimate", "--parameters", "70B", "--dtype", "f16", "--bandwidth", "12Gb/s"], 2, "usage"),
        (&["estimate", "--parameters", "70B", "--dtype", "f16", "--bandwidth", "7"], 2, "usage"),
        (&["estimate", "--parameters", "70B", "--dtype", "f16", "--bandwidth", "-7GB/s"], 2, "usage"),
        (&["estimate", "--parameters", "0", "--dtype", "f16"], 2, "usage"),
        (&["estimate", "--parameters", "7B"], 2, "usage"),
        (&["estimate", "--parameters", "7B=f16", "--scales", "32=f32"], 2, "usage"),
        (&["estimate", "--parameters", "7B=f16", "--dtype", "bf16"], 2, "usage"),
        (&["estimate", "--parameters", "20000000000B=f64"], 2, "usage"),
        (&["estimate", "--parameters", "7B=f16", "--nic", "10gbe"], 2, "usage"),
        (&["estimate", "--parameters", "7B=f16", "--fleet", "0"], 2, "usage"),
        (&["estimate", "--parameters", "7B=f16", "--fleet", "2", "--bandwidth", "7GB/s"], 2, "usage"),
        (&["bench", "/no/such/place"], 4, "not_found"),
        (&["bench", broken], 3, "malformed"),
        (&["bench", &path, "--route", "view"], 2, "usage"),
        (&["bench", &path, "--route", "gpu-direct", "--device", "cpu"], 2, "usage"),
        (&["bench", &path, "--rounds", "0"], 2, "usage"),
        (&["bench", &path, "--device", "cuda:999"], 5, "device"),
        (&["bench", &path, "--html", "-"], 2, "usage"),
        (&["bench", &path, "--save-profile", &new], 2, "usage"),
        (&["bench", &path, "--tune=0"], 2, "usage"),
        (&["bench", &path, "--tune", "--save-profile", &path], 2, "usage"),
        (&["load", &path, "--profile", &path, "--device", "cpu"], 2, "request"),
        (&["load", &path, "--profile", "/no/such/place", "--device", "cpu"], 4, "not_found"),
        (&["load", &path, "--profile", &path, "--route", "view"], 2, "usage"),
        (&["load", &path, "--profile", &plain, "--trace", &plain, "--device", "cpu"], 2, "usage"),
        (&["load", &path, "--spec", &plain, "--trace", &plain, "--device", "cpu"], 2, "usage"),
        (&["bench", &path, "--profile", &plain, "--csv", &plain], 2, "usage"),
        (&["bench", &path, "--profile", &plain, "--html", &plain], 2, "usage"),
        (&["bench", &path, "--profile", &plain, "--tune", "--save-profile", &plain], 2, "usage"),
        (&["bench", &path, "--html", &path], 2, "usage"),
        (&["bench", &path, "--csv", &path], 2, "usage"),
        (&["bench", &path, "--csv", &new, "--html", &new], 2, "usage"),
        (&["bench", &path, "--html", "/no/such/place/report.html"], 4, "io"),
        (&["convert", &path, "/no/such/place/out.safetensors"], 4, "not_found"),
        (&["convert", &path, "/no/such/place/out"], 4, "not_found"),
        (&["convert", broken, "/no/such/place/out"], 3, "malformed"),
        (&["convert", &path, &plain], 6, "exists"),
        (&["convert", &path, "out.pt"], 2, "usage"),
        (&["convert", &path, "model.safetensors.index.json"], 2, "usage"),
        (&["convert", &path, "out.safetensors", "--max-shard-size", "1GB"], 2, "usage"),
        (&["convert", &path, "out.safetensors", "--copy-files"], 2, "usage"),
        (&["convert", &path, "out.safetensors", "--include", "nothing.like.it"], 2, "request"),
        (&["demo", "--bytes", "1000"], 2, "usage"),
        (&["demo", "--dir", "/no/such/place"], 4, "not_found"),
    ];
    for (args, code, kind) in cases {
        let said = vramp(&[args, &["--json"][..]].concat());
        let error = said.error();
        assert_eq!((said.code, &error["kind"], said.out.as_str()), (Some(*code), &json!(kind), ""), "{args:?} {error}");
        let plain = vramp(args);
        assert_eq!((plain.code, plain.out.as_str()), (Some(*code), ""), "{args:?}");
        assert!(plain.err.starts_with("error: "), "{args:?}: {}", plain.err);
    }
}

/// Which of the two is short first depends on the machine.
#[test]
fn a_demo_that_no_machine_has_room_for_names_disk_or_memory() {
    let said = vramp(&["demo", "--bytes", "9EB", "--json"]);
    let kind = said.error()["kind"].clone();
    assert!(
        matches!((said.code, kind.as_str()), (Some(5), Some("out_of_memory")) | (Some(4), Some("disk_full"))),
        "{}",
        said.err
    );
}

#[test]
fn errors_for_programs_name_the_path_that_was_typed() {
    let folder = folder();
    let path = small(folder.path());
    let absent = "/no/such/place";
    let cases: &[(&[&str], Option<&str>)] = &[
        (&["inspect", absent], Some(absent)),
        (&["estimate", absent], Some(absent)),
        (&["load", &path, "--include", "nothing.like.it"], Some(&path)),
        (&["load", &path, "--spec", absent], Some(absent)),
        (&["verify", &path, "--spec", absent], Some(absent)),
        (&["verify", &path, "--spec", &spec(folder.path(), 2), "--strip-prefix", "x."], Some(&path)),
        (&["demo", "--dir", absent], Some(absent)),
        (&["demo", "--dir", &path], Some(&path)),
        (&["load", &path, "--device", "cuda:999"], None),
        (&["load", &path, "--route", "view", "--align", "64"], None),
    ];
    for (args, path) in cases {
        let said = vramp(&[args, &["--json"][..]].concat());
        assert_eq!(said.error()["path"], json!(path), "{args:?}");
    }
}

#[test]
fn unknown_commands_are_wrong_usage() {
    let said = vramp(&["frobnicate", "x"]);
    assert_eq!(said.code, Some(2));
    assert!(said.err.contains("unrecognized subcommand"), "{}", said.err);
    assert_eq!(vramp(&[]).code, Some(2));
}

#[test]
fn warnings_go_to_people_on_stderr_and_to_programs_in_the_json() {
    let folder = folder();
    small(folder.path());
    std::fs::rename(folder.path().join("m.safetensors"), folder.path().join("model.safetensors")).unwrap();
    std::fs::copy(folder.path().join("model.safetensors"), folder.path().join("other.safetensors")).unwrap();
    let path = folder.path().to_str().unwrap();
    let json = vramp(&["inspect", path, "--json"]);
    let warnings = json.json()["warnings"].as_array().unwrap().len();
    assert!(warnings > 0 && json.err.is_empty(), "{}", json.err);
    assert!(vramp(&["inspect", path]).err.starts_with("warning: "));
}

#[test]
fn a_closed_pipe_is_no_failure_and_a_full_disk_is_one() {
    let folder = folder();
    let names: Vec<String> = (0..20_000).map(|at| format!("tensor.number.{at}")).collect();
    let tensors: Vec<(&str, &str, &[usize], &[u8])> =
        names.iter().map(|name| (name.as_str(), "U8", &[1][..], &[1][..])).collect();
    let path = folder.path().join("m.safetensors");
    std::fs::write(&path, safetensors(&tensors, json!({}))).unwrap();
    let path = path.to_str().unwrap();
    for args in [&["inspect", path][..], &["inspect", path, "--json"], &["load", path, "--json"]] {
        let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0; 64]).unwrap();
        let done = child.wait_with_output().unwrap();
        assert_eq!((done.status.code(), done.stderr.as_slice()), (Some(0), &b""[..]), "{args:?}");
    }
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let done = command(&["inspect", path]).stdout(full).output().unwrap();
    assert_eq!(done.status.code(), Some(4));
    for answer in ["--help", "--version"] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let done = command(&[answer]).stdout(full).output().unwrap();
        assert_eq!(done.status.code(), Some(4), "{answer}");
    }
}

// ---- signals

/// Waits until `done`, without a fixed time: the deadline only ends a test that hangs.
#[track_caller]
pub(crate) fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(600);
    while !done() {
        assert!(Instant::now() < deadline, "it never happens");
        std::thread::yield_now();
    }
}

/// Whether SIGINT is in a set of signals of the process' main thread, by its name in `/proc`.
fn has_sigint(child: &Child, set: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let signals = status.lines().find_map(|line| line.strip_prefix(set)).unwrap_or("0");
    u64::from_str_radix(signals.trim(), 16).unwrap_or(0) & 2 != 0
}

/// Waits until the process has taken over SIGINT: its main thread blocks the signal, so that another one takes it.
pub(crate) fn until_it_handles_signals(child: &Child) {
    until(|| has_sigint(child, "SigBlk:"));
}

/// Sends SIGINT and waits until the process has taken it.
fn interrupt(child: &Child) {
    signal(child, "-INT");
    until(|| !has_sigint(child, "ShdPnd:"));
}

pub(crate) fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

/// A checkpoint that takes minutes to read and no disk: tensors `a` and `b`, all of them a hole.
fn endless(folder: &Path) -> String {
    let len: u64 = 1 << 39;
    let tensor = |at: u64| json!({"dtype": "U8", "shape": [len], "data_offsets": [at, at + len]});
    let header = json!({"a": tensor(0), "b": tensor(len)}).to_string();
    let path = folder.join("endless.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + 2 * len).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Sends signals to a command once it handles them; returns what it said.
pub(crate) fn interrupted(args: &[&str], signals: &[&str]) -> Said {
    let child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until_it_handles_signals(&child);
    signals.iter().for_each(|name| signal(&child, name));
    let done = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: done.status.code(), out: text(done.stdout), err: text(done.stderr) }
}

#[test]
fn an_interrupted_load_ends_early_with_130() {
    watched(|| {
        let folder = folder();
        let path = endless(folder.path());
        for name in ["-INT", "-TERM"] {
            let said = interrupted(&["load", &path, "--device", "null", "--route", "direct", "--json"], &[name]);
            assert_eq!((said.code, said.out.as_str()), (Some(130), ""));
            assert_eq!(said.error()["kind"], "cancelled");
        }
    });
}

/// Comparing tied tensors knows no cancel switch, as a read from a dead server would not: the watchdog has to end it.
#[test]
fn what_cannot_be_cancelled_ends_as_well() {
    watched(|| {
        let folder = folder();
        let path = endless(folder.path());
        for signals in [&["-INT"][..], &["-INT", "-INT"]] {
            let said = interrupted(&["verify", &path, "--spec", &path, "--tied", "b=a", "--json"], signals);
            assert_eq!((said.code, said.out.as_str()), (Some(130), ""));
            assert_eq!(said.error()["kind"], "cancelled");
        }
    });
}

/// The command and a second signal come to their ends together, held up by a full pipe; each once had its own last word.
#[test]
fn an_interrupted_program_says_why_it_ends_once() {
    watched(|| {
        let folder = folder();
        let path = endless(folder.path());
        for _ in 0..25 {
            let (mut reader, mut writer) = std::io::pipe().unwrap();
            writer.write_all(&[b'.'; 1 << 16]).unwrap();
            let mut vramp = command(&["load", &path, "--device", "null", "--route", "direct", "--json"]);
            let mut child = vramp.stdout(Stdio::null()).stderr(writer).spawn().unwrap();
            drop(vramp); // and with it our end of the pipe for writing
            until_it_handles_signals(&child);
            interrupt(&child);
            interrupt(&child);
            let mut said = String::new();
            reader.read_to_string(&mut said).unwrap();
            assert_eq!(child.wait().unwrap().code(), Some(130));
            assert!(said.matches("error").count() <= 1, "{}", said.trim_start_matches('.'));
        }
    });
}

/// `vramp ... 2>&1 | less` with a full screen: nobody reads the pipe, and the last words once waited for ever.
#[test]
fn an_interrupt_does_not_wait_for_a_pipe_that_nobody_reads() {
    let folder = folder();
    let names: Vec<String> = (0..20_000).map(|at| format!("tensor.number.{at}")).collect();
    let tensors: Vec<(&str, &str, &[usize], &[u8])> =
        names.iter().map(|name| (name.as_str(), "U8", &[1][..], &[1][..])).collect();
    let path = folder.path().join("m.safetensors");
    std::fs::write(&path, safetensors(&tensors, json!({}))).unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut vramp = command(&["inspect", path.to_str().unwrap(), "--json"]);
    let mut child = vramp.stdout(writer.try_clone().unwrap()).stderr(writer).spawn().unwrap();
    reader.read_exact(&mut [0; 64]).unwrap(); // it writes; the pipe holds less than what it has to say
    signal(&child, "-INT");
    assert_eq!(watched(move || child.wait().unwrap()).code(), Some(130));
    drop((vramp, reader)); // not before: they keep the pipe open
}

#[test]
fn a_kept_folder_is_named_even_when_nobody_reads_stdout() {
    let folder = folder();
    let args = ["demo", "--bytes", "1MiB", "--keep", "--dir", folder.path().to_str().unwrap()];
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    for stdout in [Stdio::from(writer), Stdio::null()] {
        let said = command(&args).stdout(stdout).output().unwrap();
        let err = String::from_utf8(said.stderr).unwrap();
        assert_eq!(said.status.code(), Some(0), "{err}");
        let kept = demo_folders(folder.path());
        assert!(kept.iter().any(|path| err.ends_with(&format!("kept: {}\n", path.display()))), "{err:?} {kept:?}");
    }
}

#[test]
fn a_folder_that_was_kept_here_has_the_name_of_this_place() {
    let folder = folder();
    let said =
        command(&["demo", "--bytes", "1MiB", "--keep", "--dir", "."]).current_dir(folder.path()).output().unwrap();
    let (out, kept) = (String::from_utf8(said.stdout).unwrap(), demo_folders(folder.path()));
    assert_eq!((said.status.code(), kept.len()), (Some(0), 1), "{out}");
    assert!(out.ends_with(&format!("kept: {}\n", kept[0].display())), "{out} {kept:?}");
}

fn demo_folders(inside: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(inside).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn an_interrupted_demo_removes_its_folder() {
    let folder = folder();
    let inside = folder.path().to_str().unwrap();
    let args = ["demo", "--bytes", "256MiB", "--dir", inside];
    let child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until(|| !demo_folders(folder.path()).is_empty());
    signal(&child, "-INT");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    assert_eq!(demo_folders(folder.path()), Vec::<PathBuf>::new());
}

#[test]
fn the_demo_compares_cold_and_warm_and_leaves_nothing_behind() {
    let folder = folder();
    let inside = folder.path().to_str().unwrap();
    let said = vramp(&["demo", "--bytes", "8MiB", "--dir", inside, "--json"]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "with --json, warnings are in the JSON");
    let demo = said.json();
    assert_eq!(demo["subject"]["loaded_bytes"], demo["checkpoint"]["bytes"], "{demo}");
    for state in demo["states"].as_array().unwrap() {
        assert_eq!(state["loads"].as_array().unwrap().len(), 5, "{state}");
        assert!(state["verdict"]["reached"].as_f64().unwrap() > 0.0);
        assert!(demo["advice"][state["state"].as_str().unwrap()].is_string());
    }
    assert_eq!(demo_folders(folder.path()), Vec::<PathBuf>::new());

    let kept = vramp(&["demo", "--bytes", "2MiB", "--dir", inside, "--keep"]);
    assert!(kept.out.contains("cold        T = ") && kept.out.contains("kept: "), "{}", kept.out);
    let [kept] = &demo_folders(folder.path())[..] else { panic!("one folder is kept") };
    let kept = kept.to_str().unwrap();
    assert_eq!(vramp(&["verify", kept, "--spec", kept]).code, Some(0));
    let rank = vramp(&["load", kept, "--tp", "1/2", "--json"]);
    assert_eq!(rank.code, Some(0), "{}", rank.err);
    assert!(rank.json()["report"]["bytes"].as_u64().unwrap() < 2 << 20);
}
