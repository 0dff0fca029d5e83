//! Weights into a GPU's memory, and new weights to the same addresses later: captured CUDA graphs stay valid.
//!
//!     cargo run --release --example 06_gpu -- OLD NEW
//!
//! OLD and NEW are two checkpoints of the same shapes. Without a GPU it says so and does nothing.

#![allow(clippy::print_stdout)] // examples print

use std::collections::BTreeMap;
use std::sync::Arc;

use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::CudaDevice;
use vramp::load::{Loader, TransferOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [old, new] = paths.as_slice() else { return Err("usage: 06_gpu OLD NEW".into()) };
    let Some(device) = CudaDevice::first()? else {
        println!("there is no GPU here");
        return Ok(());
    };
    let mut loader = Loader::new(Arc::new(device.clone()), TransferOptions::default());

    let checkpoint = Checkpoint::open(old)?;
    let prepared = loader.prepare(&checkpoint, &checkpoint.select(&Selection::default())?)?;
    let serving = loader.load(&checkpoint, &prepared)?;
    for tensor in serving.tensors().iter().take(3) {
        println!("{} {:?} at {:#x?}", tensor.name(), tensor.shape(), tensor.address());
    }

    // The places of the serving model's tensors, counted from the first of them. A tensor without elements has no address.
    let addresses = || serving.tensors().iter().filter_map(|tensor| Some((tensor.address()?, tensor.byte_len())));
    let base = addresses().map(|(address, _)| address).min().ok_or("no tensors")?;
    let end = addresses().map(|(address, len)| address + len).max().unwrap_or(base);
    let place = |tensor: &vramp::tensor::Tensor| tensor.address().map_or(0, |address| address - base);
    let places: BTreeMap<Arc<str>, u64> =
        serving.tensors().iter().map(|tensor| (tensor.name().into(), place(tensor))).collect();

    let checkpoint = Checkpoint::open(new)?;
    let prepared = loader.prepare_into(&checkpoint, &checkpoint.select(&Selection::default())?, &places)?;
    // Here a server lets its running requests end: from now until `load_into` returns nobody may use the weights.
    // SAFETY: the memory is that of `serving`, which is kept alive with it, and nothing else uses it now.
    #[allow(unsafe_code)]
    let memory = unsafe { device.memory_at(base, end - base, Arc::new(serving)) };
    let swapped = loader.load_into(&checkpoint, &prepared, memory)?;
    println!("swapped {} tensors in {:.3} s", swapped.tensors().len(), swapped.report.seconds);
    Ok(())
}
