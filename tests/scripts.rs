//! The scripts that need nothing but a shell: what they say of themselves, and where something is missing. It builds and measures
//! nothing.

use std::path::Path;
use std::process::{Command, Output};

fn script(name: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(name));
    ["VRAMP", "SWCUDA", "CARGO_TARGET_DIR"].iter().for_each(|name| drop(command.env_remove(name)));
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
