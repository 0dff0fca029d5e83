//! The scripts that need nothing but a shell: what they say of themselves, and where something is missing. It builds and measures
//! nothing.

use std::path::Path;
use std::process::{Command, Output};

fn script(name: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(name));
    for name in ["VRAMP", "SWCUDA", "CARGO_TARGET_DIR"] {
        command.env_remove(name);
    }
    command
}

#[test]
fn a_comparison_without_the_program_says_so_in_one_line() {
    for (name, value) in [("VRAMP", "/nowhere/vramp"), ("CARGO_TARGET_DIR", "/nowhere"), ("VRAMP", "/tmp")] {
        let Output { status, stdout, stderr } =
            script("against-cp").args(["in", "work"]).env(name, value).output().unwrap();
        let said = String::from_utf8(stderr).unwrap();
        assert_eq!((status.code(), stdout.len(), said.lines().count()), (Some(2), 0, 1), "{said}");
        assert!(said.starts_with(value) && said.contains("cargo build --release"), "{said}");
    }
}

#[test]
fn scripts_say_what_they_are_when_asked() {
    for name in ["against-cp", "save-against-fio", "fuzz-smoke", "gpu-check", "on-double", "report-picture"] {
        let Output { status, stdout, stderr } = script(name).arg("--help").output().unwrap();
        let said = String::from_utf8(stdout).unwrap();
        assert_eq!((status.code(), stderr.len()), (Some(0), 0), "{name}: {said}");
        assert!(said.contains(&format!("scripts/{name}")) && said.lines().count() > 3, "{name}: {said}");
        assert!(!said.contains("set -euo"), "{name}: only the comment at the head: {said}");
    }
    let unknown = script("gpu-check").arg("unknown").output().unwrap();
    assert!(unknown.status.code() == Some(2) && unknown.stdout.is_empty(), "{unknown:?}");
}
