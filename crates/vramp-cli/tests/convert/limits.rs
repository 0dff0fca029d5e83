//! Writes that fail in the middle of conversions of several batches: the program ends with 4 and leaves nothing, and never hangs.

use std::path::Path;
use std::process::Command;

use serde_json::json;
use vramp::testing::watched;

use super::{names, path};
use crate::cli::folder;

/// A checkpoint of `files` files with `each` tensors of `mib` MiB, all of them holes.
fn holes(folder: &Path, files: usize, each: u64, mib: u64) -> String {
    let model = folder.join("in");
    std::fs::create_dir(&model).unwrap();
    let len = mib << 20;
    for file in 1..=files {
        let tensor = |at: u64| json!({"dtype": "U8", "shape": [len], "data_offsets": [at * len, (at + 1) * len]});
        let header: serde_json::Map<String, serde_json::Value> =
            (0..each).map(|at| (format!("{file}.{at}"), tensor(at))).collect();
        let header = serde_json::Value::Object(header).to_string();
        let path = model.join(format!("model-{file:05}-of-{files:05}.safetensors"));
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(8 + header.len() as u64 + each * len).unwrap();
    }
    model.to_str().unwrap().to_owned()
}

/// 200 MiB waited for ever to hand over the third batch when the first could not be written; 100 MiB did not.
#[test]
fn a_limit_on_the_size_of_files_ends_conversions_of_many_batches() {
    watched(|| {
        // Files, tensors of each, and their MiB; the limit in MiB; the most MiB of a file, where it is a folder.
        for (files, each, mib, limit, shard) in [
            (1, 1, 200, 10, None),
            (1, 13, 10, 20, None),
            (3, 4, 17, 66, None),
            (3, 4, 17, 30, Some("48MiB")),
            (1, 2, 100, 90, Some("60MiB")),
        ] {
            let folder = folder();
            let from = holes(folder.path(), files, each, mib);
            let out = path(folder.path(), if shard.is_some() { "out" } else { "out.safetensors" });
            let mut args = vec!["convert", from.as_str(), &out];
            args.extend(shard.iter().flat_map(|bytes| ["--max-shard-size", bytes]));
            let limited = format!("ulimit -f {} && exec \"$@\"", limit * 2048);
            let said = Command::new("sh")
                .args(["-c", &limited, "sh", env!("CARGO_BIN_EXE_vramp")])
                .args(args)
                .output()
                .unwrap();
            let err = String::from_utf8(said.stderr).unwrap();
            assert_eq!(said.status.code(), Some(4), "{files} files of {each} x {mib} MiB: {err}");
            assert!(err.contains("ulimit -f") && err.contains(".vramp-"), "{err}");
            assert_eq!(names(folder.path()), ["in"]);
        }
    });
}
