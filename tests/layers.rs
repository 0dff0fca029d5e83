//! The layers hold: a file names only its own room and rooms below it. Reads the sources, so it cannot be argued with.

use std::fs;
use std::path::{Path, PathBuf};

/// Rooms from the bottom up; those of one line do not know each other.
const LAYERS: &[&[&str]] = &[
    &["dtype", "extent", "digest", "fallback", "setting", "setters"],
    &["fault", "convert"],
    &["error"],
    &["os"],
    &["memory"],
    &["device"],
    &["storage", "durable"],
    &["checkpoint"],
    &["plan"],
    &["tensor", "report"],
    &["load"],
    &["view", "save"],
    &["testing"],
];

/// Names that `lib.rs` re-exports for users; inside the crate the room itself is named.
const REEXPORTS: &[(&str, &str)] =
    &[("Error", "error"), ("ErrorKind", "error"), ("Fault", "fault"), ("Result", "error"), ("Setting", "setting")];

fn layer(room: &str) -> usize {
    let at = LAYERS.iter().position(|rooms| rooms.contains(&room));
    at.unwrap_or_else(|| panic!("room {room:?} has no layer: give it one in this test and in ARCHITECTURE.md"))
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The library; files of unit tests (`tests.rs`, and those in a folder `tests`) aside, which may use the fakes.
fn all_sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    sources(&root, &mut found);
    let is_test = |path: &PathBuf| path.strip_prefix(&root).unwrap().iter().any(|it| it == "tests.rs" || it == "tests");
    found.retain(|path| !is_test(path));
    let relative = |path: &PathBuf| path.strip_prefix(&root).unwrap().to_owned();
    found.iter().map(|path| (relative(path), fs::read_to_string(path).unwrap())).collect()
}

/// The room of a file: its folder, or its own name at the top.
fn room_of(path: &Path) -> String {
    let first = path.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

/// The rooms that the code of a file names by `crate::`, or by as many `super::` as lead to the crate; comments and unit tests aside.
fn named_rooms(path: &Path, text: &str) -> Vec<(usize, String)> {
    let depth = path.iter().filter(|name| *name != "mod.rs").count();
    let to_the_crate = "super::".repeat(depth);
    let mut named = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        if code.trim() == "mod tests {" {
            break;
        }
        for start in ["crate::", &to_the_crate] {
            for (at, _) in code.match_indices(start).filter(|(at, _)| !code[..*at].ends_with("super::")) {
                let rest = &code[at + start.len()..];
                assert!(!rest.starts_with('{'), "name one room a `use`, so that this test can read it: {line}");
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                let name = &rest[..end];
                if !name.is_empty() && name != "super" {
                    let room = REEXPORTS.iter().find(|(export, _)| *export == name).map_or(name, |(_, room)| room);
                    named.push((number + 1, room.to_owned()));
                }
            }
        }
    }
    named
}

#[test]
fn every_file_names_only_its_own_room_and_lower_ones() {
    let mut wrong = Vec::new();
    for (path, text) in all_sources() {
        let room = room_of(&path);
        if room == "lib" {
            continue;
        }
        let own = layer(&room);
        let above = named_rooms(&path, &text).into_iter().filter(|(_, named)| *named != room && layer(named) >= own);
        wrong.extend(above.map(|(line, named)| format!("src/{}:{line} names {named}", path.display())));
    }
    assert!(wrong.is_empty(), "a room may name only itself and lower layers:\n{}", wrong.join("\n"));
}

/// The library's own files, and those of the packages beside it.
#[test]
fn every_file_says_what_it_is() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("crates"), &mut files);
    assert!(files.len() > 100, "the packages are elsewhere");
    let others = files.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap()));
    let all = all_sources().into_iter().chain(others);
    let silent: Vec<_> = all.filter(|(_, text)| !text.starts_with("//! ")).map(|file| file.0).collect();
    assert!(silent.is_empty(), "files without a heading: {silent:?}");
}

#[test]
fn unsafe_code_lives_only_in_its_rooms() {
    const ROOMS: &[&str] = &[
        "convert/loops.rs",
        "memory/host.rs",
        "memory/staging.rs",
        "os.rs",
        "os/memory.rs",
        "os/signals.rs",
        "device/region.rs",
        "device/cuda/cufile.rs",
        "device/cuda/download.rs",
        "device/cuda/driver.rs",
        "device/cuda/gpu.rs",
        "device/cuda/handles.rs",
        "device/cuda/kernels.rs",
        "device/cuda/memory.rs",
        "device/cuda/mod.rs",
        "device/cuda/pinning.rs",
        "device/cuda/stream.rs",
        "storage/mmap.rs",
        "storage/uring.rs",
        "view.rs",
    ];
    for (path, text) in all_sources() {
        let opts_in = text.contains("allow(unsafe_code)");
        let named = ROOMS.iter().any(|room| path == Path::new(room));
        assert!(!opts_in || named, "src/{} opts in to unsafe code but is no room for it", path.display());
    }
}

#[test]
fn the_library_reads_no_environment_and_prints_nothing() {
    for (path, text) in all_sources() {
        if room_of(&path) == "testing" {
            continue; // not compiled into a program
        }
        let code = text.split("mod tests {").next().unwrap_or_default();
        let code: String = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        for word in ["env::var", "println!", "eprintln!"] {
            assert!(!code.contains(word), "src/{} uses {word}", path.display());
        }
    }
}

#[test]
fn the_library_names_no_flag_of_the_program() {
    for (path, text) in all_sources() {
        let code = text.split("mod tests {").next().unwrap_or_default();
        for (number, line) in code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            let flags = line.match_indices("--").filter(|(at, _)| {
                let (before, after) = (line[..*at].chars().next_back(), line[at + 2..].chars().next());
                after.is_some_and(|c| c.is_ascii_lowercase()) && before.is_none_or(|c| c == ' ' || c == '"' || c == '`')
            });
            // Docker's own flag is what a user of a container has to type.
            assert!(flags.count() == 0 || line.contains("--gpus all"), "src/{}:{}: {line}", path.display(), number + 1);
        }
    }
}

#[test]
fn only_durable_renames_syncs_and_removes() {
    for (path, text) in all_sources() {
        let room = room_of(&path);
        if room == "durable" || room == "os" || room == "testing" {
            continue; // `os` wraps the calls, and decides nothing
        }
        let code = text.split("mod tests {").next().unwrap_or_default();
        for word in
            ["fs::rename", "sync_all", "sync_data", "remove_file", "remove_dir", "create_new", "set_permissions"]
        {
            assert!(!code.contains(word), "src/{} uses {word}: only `durable` may", path.display());
        }
    }
}
