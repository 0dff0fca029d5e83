//! Checkpoints that exist only in memory, with the bytes that a load of them must give.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::{MemoryFile, MemoryStorage, Random};
use crate::checkpoint::{Checkpoint, Format, Shard, TensorData, TensorInfo};
use crate::dtype::Dtype;
use crate::extent::Extent;
use crate::storage::{FileSystem, OpenFile, Residency, Storage};

/// A random checkpoint, the storage that holds it, and what each tensor must be.
pub struct Synthetic {
    /// The opened checkpoint.
    pub checkpoint: Checkpoint,
    /// Its files.
    pub storage: MemoryStorage,
    /// The bytes of each tensor.
    pub expected: BTreeMap<Arc<str>, Vec<u8>>,
}

impl Synthetic {
    /// `shards` files of a few tensors each, of 0 to `most_bytes` bytes, at offsets of any alignment; each file is cold, warm
    /// or half warm and says that it lies on a disk. `wrap` may replace each file (with faults, gates, other limits).
    pub fn new(seed: u64, shards: u32, most_bytes: usize, wrap: impl Fn(u32, MemoryFile) -> MemoryFile) -> Synthetic {
        let mut random = Random::new(seed);
        let (mut infos, mut expected, storage) = (Vec::new(), BTreeMap::new(), MemoryStorage::new());
        let mut listed = Vec::new();
        for shard in 0..shards {
            let mut bytes = vec![b' '; 8 + random.below(3000)];
            for index in 0..1 + random.below(6) {
                let (info, data) = tensor(&mut random, shard, index, bytes.len() as u64, most_bytes);
                bytes.extend_from_slice(&data);
                expected.insert(Arc::clone(&info.name), data);
                infos.push(info);
            }
            let path = format!("shard-{shard}");
            let len = bytes.len() as u64;
            let disk = FileSystem { name: "ext4".to_owned(), network: false, memory: false };
            let file = wrap(shard, MemoryFile::new(&path, bytes).with_file_system(disk));
            file.set_residency(residency(&mut random, len));
            listed.push(Shard { path: path.into(), bytes: len, version: file.version(), derived: None });
            storage.insert(Arc::new(file));
        }
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        let checkpoint = checkpoint_of("synthetic", Arc::new(storage.clone()), listed, infos);
        Synthetic { checkpoint, storage, expected }
    }
}

impl Synthetic {
    /// From now on these parts of each file, by its length, are in the page cache.
    pub fn set_residency(&self, residency: impl Fn(u64) -> Residency) {
        for shard in &self.checkpoint.shards {
            self.storage.file(&shard.path).unwrap().set_residency(residency(shard.bytes));
        }
    }
}

fn tensor(random: &mut Random, shard: u32, index: usize, offset: u64, most_bytes: usize) -> (TensorInfo, Vec<u8>) {
    let dtype = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::I64][random.below(4)];
    let width = usize::try_from(dtype.alignment()).unwrap();
    let elements = random.below(most_bytes) / width;
    let data = random.bytes(elements * width);
    let name: Arc<str> = format!("layer.{shard}.{index}").into();
    let extent = Extent { shard, offset, len: data.len() as u64 };
    (TensorInfo { name, dtype: dtype.into(), shape: [elements].into(), data: TensorData::Whole(extent) }, data)
}

fn residency(random: &mut Random, len: u64) -> Residency {
    match random.below(3) {
        0 => Residency::none(len),
        1 => Residency::all(len),
        _ => {
            let granule = 16u64 << 10;
            let sizes = (0..len.div_ceil(granule)).map(|index| (len - index * granule).min(granule));
            let resident = sizes.map(|size| if random.below(2) == 0 { size } else { 0 }).collect();
            Residency::from_granules(len, granule, resident)
        }
    }
}

/// A safetensors file of these tensors (name, type, shape, bytes), padded as usual.
pub fn safetensors(tensors: &[(&str, &str, &[usize], &[u8])], metadata: serde_json::Value) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), metadata);
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).to_owned(), serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

/// A safetensors checkpoint of these files and tensors, as if they had been read.
pub fn checkpoint_of(
    path: impl Into<PathBuf>,
    storage: Arc<dyn Storage>,
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
) -> Checkpoint {
    Checkpoint {
        path: path.into(),
        shards,
        tensors,
        metadata: BTreeMap::new(),
        warnings: Vec::new(),
        format: Format::Safetensors,
        skipped: Vec::new(),
        shared: Vec::new(),
        storage,
    }
}
