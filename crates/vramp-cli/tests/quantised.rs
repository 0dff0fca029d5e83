//! Quantised checkpoints by the program: what a cast leaves packed is said once.

use serde_json::json;
use vramp::testing::safetensors;

use crate::cli::vramp;

#[test]
fn the_program_says_what_stays_packed_once() {
    let folder = tempfile::tempdir().unwrap();
    let zeros = [0; 128];
    let layer: [(&str, &str, &[usize], &[u8]); 4] = [
        ("l.qweight", "I32", &[4, 8], &zeros),
        ("l.qzeros", "I32", &[1, 1], &zeros[..4]),
        ("l.scales", "F32", &[1, 8], &zeros[..32]),
        ("l.g_idx", "I32", &[32], &zeros),
    ];
    std::fs::write(folder.path().join("model.safetensors"), safetensors(&layer, json!({}))).unwrap();
    let config = json!({"quantization_config": {"quant_method": "gptq"}});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (input, output) = (path("model.safetensors"), path("out.safetensors"));
    let cast = ["--dtype", "bf16", "--json"];
    for args in [
        vec!["load", &input, "--device", "cpu"],
        vec!["load", &input, "--device", "cpu", "--plan-only"],
        vec!["convert", &input, &output],
    ] {
        let said = vramp(&[&args[..], &cast].concat());
        assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
        let warnings = said.json()["warnings"].as_array().unwrap().clone();
        let told = warnings.iter().filter(|warning| warning.as_str().unwrap().contains("1 GPTQ (\"l.qweight\")"));
        assert_eq!(told.count(), 1, "{args:?}: {warnings:?}");
    }
}
