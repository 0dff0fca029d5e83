//! `vramp load --trace`: the file agrees with the report of the same load, and is written whole or refused beforehand.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use vramp::testing::safetensors;

use crate::cli::folder;

/// A file of two F32 tensors, the first of `elements` elements, each `value`, the second odd in place and size.
fn weights(folder: &Path, elements: usize, value: f32) -> PathBuf {
    let (first, second) = (value.to_le_bytes().repeat(elements), 1f32.to_le_bytes().repeat(12_345));
    let tensors = [("a", "F32", &[elements][..], &first[..]), ("b", "F32", &[12_345], &second)];
    let path = folder.join("m.safetensors");
    std::fs::write(&path, safetensors(&tensors, json!({}))).unwrap();
    path
}

#[track_caller]
fn assert_close(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() <= 0.02 * expected + 1e-6, "{what}: {found} s, the report says {expected} s");
}

/// The exit status, stdout and stderr of one run.
fn load(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    let Output { status, stdout, stderr } = command.arg("load").args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// The complete events of a trace, sorted into named lanes, which do not overlap within themselves.
fn lanes(path: &Path) -> BTreeMap<String, Vec<Value>> {
    let text = std::fs::read_to_string(path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let events = trace["traceEvents"].as_array().unwrap();
    let mut lanes: BTreeMap<u64, (String, Vec<Value>)> = BTreeMap::new();
    for event in events.iter().filter(|event| event["name"] == "thread_name") {
        let (tid, name) = (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap().to_owned());
        assert!(lanes.insert(tid, (name, Vec::new())).is_none(), "two names for lane {tid}");
    }
    for event in events.iter().filter(|event| event["ph"] == "X") {
        lanes.get_mut(&event["tid"].as_u64().unwrap()).expect("a lane without a name").1.push(event.clone());
    }
    assert!(events.iter().all(|event| event["pid"] == 1 && (event["ph"] == "X" || event["ph"] == "M")));
    for (name, events) in lanes.values() {
        let whole: Vec<_> = events.iter().filter(|event| event["name"] != "convert").collect();
        let overlaps = whole.windows(2).any(|pair| end(pair[0]) > number(pair[1], "ts") + 0.0005);
        assert!(!overlaps && !events.is_empty(), "{name}: {events:?}");
    }
    lanes.into_values().collect()
}

fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap()
}

fn end(event: &Value) -> f64 {
    number(event, "ts") + number(event, "dur")
}

fn named<'a>(lanes: &'a BTreeMap<String, Vec<Value>>, name: &'a str) -> impl Iterator<Item = &'a Value> {
    lanes.values().flatten().filter(move |event| event["name"] == name)
}

#[test]
fn a_trace_agrees_with_the_report_of_the_same_load() {
    let folder = folder();
    let path = weights(folder.path(), 5_000_000, 2.0);
    let (path, trace) = (path.to_str().unwrap(), folder.path().join("trace.json"));
    let file = trace.to_str().unwrap();
    let cases: [&[&str]; 5] = [
        &["--device", "cpu"],
        &["--device", "cpu", "--route", "direct", "--progress", "never"],
        &["--device", "null", "--route", "buffered"],
        &["--device", "cpu", "--dtype", "bf16"],
        &["--device", "null", "--staging", "2x64KiB"],
    ];
    for case in cases {
        let (code, out, err) = load(&[&[path, "--trace", file, "--json"], case].concat());
        assert_eq!((code, err.as_str()), (Some(0), ""), "{case:?}");
        let said: Value = serde_json::from_str(&out).unwrap();
        let report = &said["report"];
        let lanes = lanes(&trace);
        let sum = |name, key: &str| named(&lanes, name).map(|event| event["args"][key].as_u64().unwrap()).sum::<u64>();
        let routes = &report["routes"];
        let read: u64 = ["direct", "buffered", "mapped"].iter().map(|route| routes[route].as_u64().unwrap()).sum();
        assert_eq!(sum("read", "bytes"), read, "{case:?}");
        // Nothing is uploaded without a GPU: to host memory it is copied, and the null device drops it.
        assert_eq!(sum("copy", "bytes"), report["stages"]["upload"]["bytes"].as_u64().unwrap(), "{case:?}");
        assert!(!lanes.keys().any(|name| name.starts_with("upload")), "{case:?}: {:?}", lanes.keys());
        let copies = lanes.keys().any(|name| name.starts_with("copy"));
        assert!(!(copies && case.contains(&"null")), "{case:?}: {:?}", lanes.keys());
        let busy = named(&lanes, "read").map(|event| number(event, "dur")).sum::<f64>() / 1e6;
        assert_close(busy, report["stages"]["read_busy"]["seconds"].as_f64().unwrap(), &format!("{case:?}"));
        assert!(named(&lanes, "read").all(|event| event["args"]["shard"] == "m.safetensors"));
        for name in ["open", "plan", "set_up", "allocate", "wait_read"] {
            assert!(named(&lanes, name).next().is_some(), "{case:?}: no {name}");
        }
        assert_eq!(named(&lanes, "convert").next().is_some(), case.contains(&"--dtype"), "{case:?}");
        assert!(lanes.contains_key("loop") && lanes.keys().any(|name| name.starts_with("reader 0, ")), "{case:?}");
        let last = lanes.values().flatten().map(end).fold(0.0, f64::max) / 1e6;
        let whole = report["seconds"].as_f64().unwrap() + report["setup_seconds"].as_f64().unwrap();
        assert!(last <= whole + 0.01, "{case:?}: an event ends at {last} s of {whole} s");
    }
    let mode = std::fs::metadata(&trace).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, std::fs::metadata(path).unwrap().permissions().mode() & 0o777, "not as other new files");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "something is left beside the trace");
}

#[test]
fn a_load_that_fails_leaves_a_trace_of_what_it_did() {
    let folder = folder();
    let path = weights(folder.path(), 100_000, 1e9);
    let trace = folder.path().join("trace.json");
    let (path, file) = (path.to_str().unwrap(), trace.to_str().unwrap());
    let (code, _, err) = load(&[path, "--device", "cpu", "--dtype", "f16", "--trace", file]);
    assert!(code != Some(0) && err.contains("65504"), "{code:?} {err}");
    assert!(named(&lanes(&trace), "read").next().is_some());
}

#[test]
fn a_trace_that_cannot_be_written_ends_the_program_before_the_load() {
    let folder = folder();
    let path = weights(folder.path(), 1000, 2.0);
    let (path, inside) = (path.to_str().unwrap(), |name: &str| folder.path().join(name).to_str().unwrap().to_owned());
    for file in [inside("missing/trace.json"), inside(""), "/dev/full".to_owned(), "..".to_owned()] {
        // The checkpoint is not there either, and that is not what is said.
        let (code, out, err) = load(&[&inside("nothing"), "--device", "cpu", "--trace", &file]);
        assert_eq!((code, out.as_str()), (Some(4), ""), "{file}: {err}");
        assert!(err.contains("cannot write the trace"), "{file}: {err}");
    }
    let before = std::fs::read(path).unwrap();
    std::os::unix::fs::symlink(path, inside("link")).unwrap();
    for args in [
        [path, "--trace", path].as_slice(),
        &[path, "--trace", &inside("link")],
        &[path, "--trace", "-"],
        &[path, "--trace", &inside("t.json"), "--route", "view"],
        &[path, "--trace", &inside("t.json"), "--plan-only"],
    ] {
        let (code, out, err) = load(&[args, &["--device", "cpu"]].concat());
        assert_eq!((code, out.as_str()), (Some(2), ""), "{args:?}: {err}");
        assert!(err.contains("--trace"), "{args:?}: {err}");
    }
    assert!(std::fs::read(path).unwrap() == before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}
