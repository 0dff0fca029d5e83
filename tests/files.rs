//! Weight files for tests, written by hand so that nothing of ours vouches for itself.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use vramp::testing::Random;

/// A folder with a checkpoint, and the bytes of its tensors.
pub(crate) struct Folder {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) shards: Vec<PathBuf>,
    pub(crate) expected: BTreeMap<String, Vec<u8>>,
}

impl Folder {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// `shards` files of `tensors` U8 vectors of `bytes` bytes each, with an index if there are several.
pub(crate) fn folder(seed: u64, shards: usize, tensors: usize, bytes: usize) -> Folder {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random::new(seed);
    let (mut expected, mut map, mut paths) = (BTreeMap::new(), serde_json::Map::new(), Vec::new());
    for shard in 0..shards {
        let file = match shards {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
        };
        let data: Vec<(String, Vec<u8>)> =
            (0..tensors).map(|tensor| (format!("layer.{shard}.{tensor}"), random.bytes(bytes))).collect();
        let path = folder.path().join(&file);
        fs::write(&path, file_bytes(&data)).unwrap();
        paths.push(path);
        for (name, bytes) in data {
            map.insert(name.clone(), file.clone().into());
            expected.insert(name, bytes);
        }
    }
    if shards > 1 {
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
    Folder { folder, shards: paths, expected }
}

/// A whole file of U8 vectors.
pub(crate) fn file_bytes(tensors: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, data) in tensors {
        let entry = serde_json::json!({"dtype": "U8", "shape": [data.len()], "data_offsets": [at, at + data.len()]});
        header.insert(name.clone(), entry);
        at += data.len();
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    tensors.iter().for_each(|(_, data)| bytes.extend_from_slice(data));
    bytes
}
