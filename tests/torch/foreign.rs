//! Files that are no weights this package reads: each is named for what it is, with what to do, and no message blames a download.

use super::*;

/// A member of a tar archive.
fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, data) in members {
        let mut header = [0u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..108].copy_from_slice(b"0000644\0");
        header[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
        header[156] = b'0';
        header[257..263].copy_from_slice(b"ustar\0");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.extend(header);
        out.extend(*data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

fn packed(names: &[&str]) -> Vec<u8> {
    zip(&names.iter().map(|name| Member::stored(name, b"data")).collect::<Vec<_>>())
}

fn field(number: u8, body: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(body.len()).unwrap()][..], body].concat()
}

/// A model as PyTorch's exporter and others write it.
fn onnx(version: u8, maker: Option<&str>) -> Vec<u8> {
    let maker = maker.map_or(Vec::new(), |maker| [field(2, maker.as_bytes()), field(3, b"2.1.0")].concat());
    let graph = field(7, &field(1, b"node"));
    [vec![0x08, version], maker, graph, field(8, &[0x10, 17])].concat()
}

#[test]
fn each_foreign_file_is_named_with_what_to_do() {
    type Case<'a> = (&'a str, Vec<u8>, &'a [&'a str]);
    let cases: Vec<Case> = vec![
        ("model.onnx", onnx(8, Some("pytorch")), &["an ONNX model"]),
        ("model.bin", onnx(10, None), &["an ONNX model"]),
        ("model.onnx", vec![0x99; 600], &["an ONNX model, by its name"]),
        ("model.onnx_data", vec![0x99; 600], &["the tensors of an ONNX model"]),
        (
            "a.nemo",
            tar(&[("./model_config.yaml", b"a: 1"), ("./model_weights.ckpt", b"x")]),
            &["NeMo", "tar -xf", "model_weights.ckpt"],
        ),
        (
            "a.nemo",
            tar(&[
                ("model_config.yaml", b"a: 1"),
                ("model_weights/.metadata", b"x"),
                ("model_weights/__0_0.distcp", b"x"),
            ]),
            &["NeMo", "open the folder", ".metadata"],
        ),
        (
            "a.tar",
            tar(&[("model/w.safetensors", b"x"), ("model/readme", b"x")]),
            &["a tar archive", "tar -xf", "\"model/w.safetensors\""],
        ),
        ("a.tar", tar(&[("photo.jpg", b"x")]), &["a tar archive", "tar -xf", "1 member"]),
        (
            "a.pt",
            tar(&[("sys_info", b"x"), ("pickle", b"x"), ("tensors", b"x"), ("storages", b"x")]),
            &["before 0.1.10", "newer PyTorch"],
        ),
        (
            "a.zip",
            packed(&["model/config.json", "model/model.safetensors"]),
            &["a zip archive", "unzip", "\"model/model.safetensors\""],
        ),
        ("a.zip", packed(&["pytorch_model.bin"]), &["a zip archive", "unzip", "\"pytorch_model.bin\""]),
        ("weights.npz", packed(&["w.npy", "b.npy"]), &["NumPy archive", "2 arrays"]),
        ("model.keras", packed(&["metadata.json", "config.json", "model.weights.h5"]), &["a Keras model"]),
        ("model.h5", b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08\0".to_vec(), &["HDF5", "Keras"]),
        ("model.tflite", b"\x1c\0\0\0TFL3\x14\0\x20\0".to_vec(), &["TensorFlow Lite"]),
        ("model.gguf", b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0".to_vec(), &["a GGUF file"]),
        ("ggml-model.bin", b"lmgg\0\x7d\0\0\0\x10\0\0".to_vec(), &["a GGML file"]),
        ("model.safetensors", b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab\xaa".to_vec(), &["gzip", "gunzip", "tar -xzf"]),
        ("model.safetensors", b"\x28\xb5\x2f\xfd\x04\0\x09\0\0\x01".to_vec(), &["zstd", "unzstd"]),
        ("model.pt", b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4\x46".to_vec(), &["xz archive", "unxz"]),
        (
            "flax_model.msgpack",
            vec![0x83, 0xa6, b'p', b'a', b'r', b'a', b'm', b's', 0x81, 0xa1],
            &["a Flax checkpoint"],
        ),
    ];
    for (name, bytes, words) in cases {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        let said = error.to_string();
        assert_eq!(error.exit_code(), 3, "{said}");
        assert!(said.contains(name) && words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
        assert!(!said.contains("fetch it again") && !said.contains("truncated"), "{said}");
    }
}

#[test]
fn the_weights_of_openvino_are_known_by_the_description_beside_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("openvino_model.bin");
    std::fs::write(&path, data(40)).unwrap();
    let said = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    assert!(!said(&path).contains("OpenVINO"));
    std::fs::write(path.with_extension("xml"), b"<?xml version=\"1.0\"?>\n<net name=\"m\" version=\"11\">").unwrap();
    for opened in [path.as_path(), dir.path()] {
        let said = said(opened);
        assert!(
            said.contains("openvino_model.bin") && said.contains("OpenVINO") && said.contains("openvino_model.xml"),
            "{said}"
        );
    }
    // A file of PyTorch is one, whatever stands beside it.
    std::fs::write(&path, archive(&state_dict(&[("w", one())]), &[("0", &data(4))])).unwrap();
    assert_eq!(loaded(&path)["w"], data(4));
}

#[test]
fn an_archive_of_torch_that_packs_others_is_still_one() {
    let mut members = members(&state_dict(&[("w", one())]), &[("0", &data(4))]);
    members.push(Member::stored("archive/extra.safetensors", b"x"));
    let (_dir, path) = written(&zip(&members));
    assert_eq!(loaded(&path)["w"], data(4));
}
