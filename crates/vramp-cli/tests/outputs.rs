//! Files that `bench` and `load` are asked to write: what they may not be written over, and beside which files not under which names.

use serde_json::json;
use vramp::testing::safetensors;

use crate::cli::{folder, vramp};

#[test]
fn a_name_that_readers_of_a_folder_know_is_refused_beside_the_weights_and_not_elsewhere() {
    let (weights, elsewhere) = (folder(), folder());
    let file = weights.path().join("model.safetensors");
    std::fs::write(&file, safetensors(&[("a", "U8", &[4], &[1, 2, 3, 4])], json!({}))).unwrap();
    let linked = elsewhere.path().join("snapshot");
    std::fs::create_dir(&linked).unwrap();
    std::os::unix::fs::symlink(&file, linked.join("model.safetensors")).unwrap();
    let names = [
        "model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "pytorch_model.bin.index.json",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "other.pt",
        ".metadata",
        "config.json",
        "vocab.json",
        "tokenizer.model",
        "chat_template.jinja",
        "modeling_own.py",
    ];
    for name in names {
        // Through the file, its folder, and a folder that links to it; beside the link and beside what it links to.
        for (path, beside) in [(&file, weights.path()), (&weights.path().to_owned(), weights.path())]
            .into_iter()
            .chain([(&linked, linked.as_path()), (&linked, weights.path())])
        {
            let (path, out) = (path.to_str().unwrap(), beside.join(name));
            let out = out.to_str().unwrap();
            for args in [
                &["load", path, "--device", "cpu", "--trace", out][..],
                &["bench", path, "--device", "cpu", "--quick", "--csv", out],
                &["bench", path, "--device", "cpu", "--quick", "--html", out],
                &["bench", path, "--device", "cpu", "--quick", "--tune=1", "--save-profile", out],
            ] {
                let said = vramp(&[args, &["--json"]].concat());
                let error = said.error();
                assert_eq!((said.code, &error["kind"]), (Some(2), &json!("usage")), "{args:?}: {error}");
                assert!(error["message"].as_str().unwrap().contains("beside the weights"), "{error}");
            }
        }
    }
    let kept: Vec<_> = std::fs::read_dir(weights.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(kept, ["model.safetensors"]);
    let out = elsewhere.path().join("config.json");
    let said = vramp(&["load", file.to_str().unwrap(), "--device", "cpu", "--trace", out.to_str().unwrap()]);
    assert_eq!((said.code, out.exists()), (Some(0), true), "{}", said.err);
}

#[test]
fn the_error_of_a_profile_names_the_profile() {
    let folder = folder();
    let file = folder.path().join("model.safetensors");
    std::fs::write(&file, safetensors(&[("a", "U8", &[4], &[1, 2, 3, 4])], json!({}))).unwrap();
    let profile = folder.path().join("profile");
    std::fs::write(&profile, r#"[1, "cpu", "ext4"]"#).unwrap();
    let (file, profile) = (file.to_str().unwrap(), profile.to_str().unwrap());
    for command in ["load", "bench"] {
        let said = vramp(&[command, file, "--device", "cpu", "--profile", profile, "--json"]);
        let error = said.error();
        assert_eq!(
            (said.code, &error["kind"], &error["path"]),
            (Some(2), &json!("request"), &json!(profile)),
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains("holds a list"), "{error}");
    }
}
