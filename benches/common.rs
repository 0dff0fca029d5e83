//! Checkpoints for the benchmarks, made in a temporary folder.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vramp::device::{CudaDevice, Device};

/// The first GPU, where there is one. Never the software driver of the tests: a number from it would be nobody's.
#[allow(clippy::print_stderr)] // what is not measured is said
pub(crate) fn gpu() -> Option<Arc<dyn Device>> {
    let device = CudaDevice::first().ok().flatten()?;
    let product = device.product().unwrap_or_default();
    if product.contains("test double") {
        eprintln!("refused: {product} is no GPU; nothing is measured on it");
        return None;
    }
    Some(Arc::new(device))
}

/// A header of `count` BF16 tensors of `elements` elements each, as a writer of large models lays it out.
pub(crate) fn header(count: usize, elements: usize) -> String {
    let mut entries = Vec::with_capacity(count);
    for index in 0..count {
        let (begin, end) = (index * elements * 2, (index + 1) * elements * 2);
        entries.push(format!(
            r#""model.layers.{}.mlp.experts.{}.up_proj.weight":{{"dtype":"BF16","shape":[{elements}],"data_offsets":[{begin},{end}]}}"#,
            index / 64,
            index % 64,
        ));
    }
    format!("{{{}}}", entries.join(","))
}

/// Writes `count` tensors of `elements` elements into one file of `folder`; the data never repeats within a page.
pub(crate) fn write(folder: &Path, count: usize, elements: usize) -> PathBuf {
    let path = folder.join("model.safetensors");
    let header = header(count, elements);
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let block: Vec<u8> = (0..1 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 13) as u8 & 0x3f).collect();
    let mut left = count * elements * 2;
    while left > 0 {
        let len = left.min(block.len());
        file.write_all(&block[..len]).unwrap();
        left -= len;
    }
    file.sync_all().unwrap();
    path
}

/// Reads the file, so that it is in the page cache.
pub(crate) fn warm(path: &Path) {
    std::io::copy(&mut File::open(path).unwrap(), &mut std::io::sink()).unwrap();
}

/// Drops the file from the page cache, as far as the kernel lets us.
pub(crate) fn cool(path: &Path) {
    use std::os::fd::AsFd;
    let file = File::open(path).unwrap();
    let len = fs::metadata(path).unwrap().len();
    vramp::os::advise(file.as_fd(), 0, len, vramp::os::Advice::DontNeed).unwrap();
}
