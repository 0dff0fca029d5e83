//! `vramp convert` where something is there already: another model, itself, what a killed run left, another run at the same time.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;

use vramp::durable::is_temporary;
use vramp::testing::watched;

use super::{converted, converted_with_warnings, mixed, names, outputs, path, reference};
use crate::cli::{command, folder, vramp};

#[test]
fn another_model_is_replaced_only_when_asked_for() {
    let folder = folder();
    let file = mixed(folder.path());
    let expected = reference(&[file.clone().into()]);
    for (out, args) in
        [("out.safetensors", &[][..]), ("out.sft", &[]), ("single", &[]), ("many", &["--max-shard-size", "500000"])]
    {
        let out = path(folder.path(), out);
        let first = converted(&[&[file.as_str(), &out, "--exclude", "flags"], args].concat());
        let before = reference(&outputs(&first));
        let args = [&["convert", &file, &out, "--json"], args].concat();
        let said = vramp(&args);
        let error = said.error();
        assert_eq!((said.code, error["kind"].as_str()), (Some(6), Some("exists")), "{}", said.err);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("which would be replaced") && message.contains("--overwrite"), "{message}");
        assert!(reference(&outputs(&first)) == before);
        let said = vramp(&[&args[..], &["--overwrite"]].concat());
        assert_eq!(said.code, Some(0), "{}", said.err);
        assert!(reference(&outputs(&said.json())) == expected);
    }
}

#[test]
fn a_model_may_replace_itself_by_any_name() {
    let folder = folder();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let single = model.join("model.safetensors");
    std::fs::rename(mixed(folder.path()), &single).unwrap();
    let (model, single) = (model.to_str().unwrap(), single.to_str().unwrap());
    let expected = reference(&[single.into()]);
    let link = path(folder.path(), "link");
    symlink(model, &link).unwrap();
    let dotted = format!("{model}/../model");
    for (from, to) in
        [(model, model), (single, single), (single, model), (model, single), (&link, model), (model, &dotted)]
    {
        let said = converted(&[from, to]);
        assert!(reference(&outputs(&said)) == expected, "{from} to {to}");
    }
    // Into several files and back; then by way of the index.
    converted(&[model, model, "--max-shard-size", "500000"]);
    let index = format!("{model}/model.safetensors.index.json");
    assert!(reference(&outputs(&converted_with_warnings(&[&index, model]))) == expected);
    // A part of itself is asked for, and is all that is left then.
    converted(&[model, model, "--include", "flags"]);
    assert_eq!(reference(&[single.into()]).len(), 1);
    // A folder whose weights are PyTorch's is no other model than its own file.
    assert_eq!(names(Path::new(model)), ["model.safetensors"]);
}

#[test]
fn two_conversions_to_one_name_at_once_have_one_winner() {
    watched(|| {
        for round in 0..12 {
            let folder = folder();
            let file = mixed(folder.path());
            let out = path(folder.path(), if round % 2 == 0 { "out.safetensors" } else { "out" });
            let arguments = ["convert", &file, &out];
            let start = || command(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            let both = [start(), start()].map(|child| child.wait_with_output().unwrap());
            let mut codes = both.each_ref().map(|done| done.status.code().unwrap());
            codes.sort_unstable();
            // A folder that one of them made and the other one found may be gone again when that wants to use it.
            assert!(codes[0] == 0 && [6, 4].contains(&codes[1]), "{codes:?} {both:?}");
            let there = names(folder.path());
            assert!(!there.iter().any(|name| is_temporary(name)), "{there:?}");
            converted_with_warnings(&[&out, &path(folder.path(), "copy.safetensors")]);
        }
    });
}
