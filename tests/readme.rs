//! The program of the README runs, on a checkpoint that has what it looks for and on one that has not.

use std::path::Path;

use serde_json::json;
use vramp::testing::safetensors;

/// The first Rust program of the README with other paths.
fn program(text: &str) -> String {
    let start = text.find("```rust,no_run\n").unwrap() + "```rust,no_run\n".len();
    text[start..start + text[start..].find("```").unwrap()].to_owned()
}

/// Compiles as a doctest; this demands that it stays short enough to be read.
#[test]
fn the_first_program_of_the_readme_is_short() {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let program = program(&readme);
    let lines = program.lines().filter(|line| !line.trim().is_empty() && !line.trim().starts_with("//")).count();
    assert!(lines <= 25, "{lines} lines of code:\n{program}");
    for word in ["Checkpoint::open", "load(", "Convert", "save(", "ErrorKind::NotFound"] {
        assert!(program.contains(word), "nothing shows {word}");
    }
}

/// The same calls, here and now.
fn run(model: &Path) -> vramp::Result<String> {
    use vramp::{Checkpoint, Convert, ErrorKind, Float, Options, SaveOptions, load, save};

    let mut said = String::new();
    for tensor in Checkpoint::open(model)?.tensors() {
        said += &format!("{}: {} {:?}\n", tensor.name, tensor.dtype, tensor.shape);
    }
    let loaded = load(model, &Options::default().convert(Convert::to(Float::BF16)))?;
    match loaded.tensor("lm_head.weight") {
        Ok(weight) => {
            let values = weight.as_slice::<vramp::half::bf16>()?;
            said += &format!("{} {:?}: {} elements\n", weight.dtype(), weight.shape(), values.len());
        }
        Err(error) if error.kind() == ErrorKind::NotFound => said += &format!("tied embeddings? {error}\n"),
        Err(error) => return Err(error),
    }
    let tensors: Vec<_> = loaded.tensors().iter().map(Into::into).collect();
    save(model.with_file_name("model-bf16"), &tensors, &SaveOptions::default())?;
    Ok(said)
}

#[test]
fn the_program_of_the_readme_does_what_it_says() {
    for (name, expected) in [
        ("lm_head.weight", "lm_head.weight: F32 [2, 2]\nBF16 [2, 2]: 4 elements\n"),
        ("lm_head.weigth", "lm_head.weigth: F32 [2, 2]\ntied embeddings? tensor \"lm_head.weight\" was not loaded"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        std::fs::create_dir(&model).unwrap();
        let file = safetensors(&[(name, "F32", &[2, 2], &1f32.to_le_bytes().repeat(4))], json!({}));
        std::fs::write(model.join("model.safetensors"), file).unwrap();
        let said = run(&model).unwrap();
        assert!(said.starts_with(expected), "{said}");
        let again = vramp::load(folder.path().join("model-bf16"), &vramp::Options::default()).unwrap();
        let one = again.tensor(name).unwrap().as_slice::<vramp::half::bf16>().unwrap();
        assert_eq!(one, [vramp::half::bf16::ONE; 4]);
    }
}
