//! The program on the double: what a person sees, and what it costs the host.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use vramp::testing::{Feature, required_if};

/// Whether the tests are to run on the machine's own driver. These are about the double.
fn on_a_gpu() -> bool {
    let is_required = std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1");
    !required_if(Feature::Double, !is_required, "REQUIRE_CUDA=1 asks for the machine's own driver")
}

/// What a run of the program said, and what the double counted.
struct Ran {
    json: Value,
    text: String,
    counted: String,
}

fn vramp(arguments: &[&str], settings: &[(&str, &str)]) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    swcuda::Double::link_folder(folder.path());
    fakecufile::Fake::link_folder(folder.path());
    let report = folder.path().join("report");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
    command.args(arguments).env("LD_LIBRARY_PATH", folder.path()).env("SWCUDA_QUIET", "1");
    command.env("SWCUDA_PAGEABLE", "error").env("SWCUDA_REPORT", &report).envs(settings.iter().copied());
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {err}");
    let counted = std::fs::read_to_string(report).unwrap_or_default();
    let wrong: Vec<_> = counted.lines().filter(|line| !line.starts_with("stat ")).collect();
    assert!(wrong.is_empty(), "{arguments:?}: {wrong:?}");
    Ran { json: serde_json::from_str(&out).unwrap_or_default(), text: out.into_owned(), counted }
}

impl Ran {
    fn stat(&self, name: &str) -> u64 {
        let line = self.counted.lines().find_map(|line| line.strip_prefix(&format!("stat {name} ")));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {}", self.counted))
    }
}

/// One tensor of `bytes` bytes, a hole, and a small one that is not.
fn checkpoint(folder: &Path, bytes: u64) -> String {
    let header = format!(
        r#"{{"a":{{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}},"b":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[16,{}]}}}}"#,
        bytes + 16
    );
    let start = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[3; 16]].concat();
    let path = folder.join("m.safetensors");
    std::fs::write(&path, &start).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(start.len() as u64 + bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn the_first_gpu_is_the_default_and_gives_what_the_cpu_gives() {
    if on_a_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = checkpoint(folder.path(), 3_000_001);
    let host = vramp(&["load", &path, "--device", "cpu", "--digests", "--checksums", "--json"], &[]).json;
    for schedule in ["eager", "lazy", "random"] {
        let ran = vramp(&["load", &path, "--digests", "--checksums", "--json"], &[("SWCUDA_SCHED", schedule)]);
        assert_eq!(ran.json["device"], "cuda:0");
        assert_eq!(ran.json["tensors"], host["tensors"], "{schedule}");
        assert_eq!((ran.stat("pageable_copies"), ran.stat("leak.allocations"), ran.stat("leak.pins")), (0, 0, 0));
    }
    let said = vramp(&["load", &path], &[]).text;
    assert!(said.contains("to cuda:0") && said.contains("test double, no GPU"), "{said}");
    let cpu = vramp(&["load", &path, "--device", "cpu"], &[]);
    assert_eq!(cpu.counted, "", "nobody asked for the driver");
}

#[test]
fn nothing_is_measured_on_the_double() {
    if on_a_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = checkpoint(folder.path(), 1000);
    swcuda::Double::link_folder(folder.path());
    for device in [&[][..], &["--device", "cuda"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramp"));
        command.args(["bench", &path, "--quick"]).args(device);
        let output = command.env("LD_LIBRARY_PATH", folder.path()).env("SWCUDA_QUIET", "1").output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!((output.status.code(), out.as_ref()), (Some(5), ""), "{err}");
        assert!(err.contains("test double") && err.contains("nothing is measured on it"), "{err}");
    }
}

/// Where the kernel has a list of modules the GPU reads the file; a sandbox without one is told why it does not.
#[test]
fn gpu_direct_gives_what_the_cpu_gives_or_says_why_it_was_not_to_be_had() {
    if on_a_gpu() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = checkpoint(folder.path(), 3_000_001);
    let host = vramp(&["load", &path, "--device", "cpu", "--digests", "--json"], &[]).json;
    let ran = vramp(&["load", &path, "--route", "gpu-direct", "--digests", "--json"], &[]).json;
    assert_eq!((&ran["device"], &ran["tensors"]), (&Value::from("cuda:0"), &host["tensors"]));
    let report = &ran["report"];
    let notes: Vec<_> = report["fallbacks"].as_array().unwrap().iter().filter(|n| n["what"] == "gpu-direct").collect();
    assert_eq!(notes.is_empty(), report["routes"]["gpu_direct"].as_u64().unwrap() > 0, "{report}");
    if !Path::new("/proc/modules").exists() {
        assert!(notes[0]["why"].as_str().unwrap().contains("/proc/modules"), "{notes:?}");
    }
    let plan = vramp(&["load", &path, "--route", "gpu-direct", "--plan-only"], &[]).text;
    assert_eq!(plan.contains("gpu-direct 2."), notes.is_empty(), "{plan}");
}

#[test]
fn host_memory_is_staging_and_a_constant_whatever_the_checkpoint() {
    if on_a_gpu() {
        return;
    }
    const STAGING: u64 = 4 << 20;
    let peak = |bytes: u64| {
        let folder = tempfile::tempdir().unwrap();
        let path = checkpoint(folder.path(), bytes);
        let arguments = ["load", &path, "--device", "cuda:0", "--staging", "4x1MiB", "--json"];
        // The double's VRAM is memory of the host: it is counted, and taken off.
        let ran = vramp(&arguments, &[("SWCUDA_CHECK_SOURCES", "0")]);
        ran.json["report"]["peak_host_bytes"].as_u64().unwrap() - ran.stat("peak_bytes")
    };
    let (small, large) = (peak(1), peak(20 * STAGING));
    assert!(large <= small + STAGING + (64 << 20), "{large} bytes, and {small} for nothing at all");
}

#[test]
fn an_old_driver_is_named_with_what_is_needed() {
    if on_a_gpu() {
        return;
    }
    // The functions are found once a process; the version is asked of a driver that has not been used yet: a child's.
    let folder = tempfile::tempdir().unwrap();
    swcuda::Double::link_folder(folder.path());
    let old = child(folder.path(), &[("SWCUDA_DRIVER_VERSION", "11080")]);
    assert!(old.contains("11.8") && old.contains("12.0") && old.contains("driver 525"), "{old}");
    let none = child(folder.path(), &[("SWCUDA_DEVICES", "0")]);
    assert!(none.contains("no CUDA device"), "{none}");
    let empty = tempfile::tempdir().unwrap();
    if !Path::new("/dev/nvidiactl").exists() {
        let absent = child(empty.path(), &[]);
        assert!(absent.contains("no CUDA driver here"), "{absent}");
    }
}

/// What `vramp load --device cuda` says on stderr, with `libraries` searched first.
fn child(libraries: &Path, settings: &[(&str, &str)]) -> String {
    let file = libraries.join("m.safetensors");
    std::fs::write(&file, b"\x02\0\0\0\0\0\0\0{}").unwrap();
    let mut vramp = std::process::Command::new(env!("CARGO_BIN_EXE_vramp"));
    let ran = vramp.args(["load", "--device", "cuda"]).arg(&file).envs(settings.iter().copied());
    let output = ran.env("LD_LIBRARY_PATH", libraries).env("SWCUDA_QUIET", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_program_that_falls_back_says_why_to_programs_too() {
    if on_a_gpu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    swcuda::Double::link_folder(folder.path());
    let file = folder.path().join("m.safetensors");
    std::fs::write(&file, b"\x02\0\0\0\0\0\0\0{}").unwrap();
    let mut vramp = std::process::Command::new(env!("CARGO_BIN_EXE_vramp"));
    let ran = vramp.args(["load", "--json"]).arg(&file).env("SWCUDA_FAULTS", "cuInit:1=803");
    let output = ran.env("LD_LIBRARY_PATH", folder.path()).env("SWCUDA_QUIET", "1").output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["device"], "cpu");
    assert!(json["warnings"][0].as_str().unwrap().contains("803"), "{json}");
}
