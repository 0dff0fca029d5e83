//! Weights into a GPU's memory, and new weights to the same addresses later: captured CUDA graphs stay valid.
//!
//!     cargo run --release --example 06_gpu -- OLD NEW
//!
//! OLD and NEW are two checkpoints of the same shapes. Without a GPU it says so and does nothing.

#![allow(clippy::print_stdout)] // examples print

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
    let mut loader = Loader::new(Arc::new(device), TransferOptions::default());

    let checkpoint = Checkpoint::open(old)?;
    let selected = checkpoint.select(&Selection::default())?;
    let serving = loader.load(&loader.prepare(checkpoint, &selected)?)?;
    for tensor in serving.tensors().iter().take(3) {
        println!("{} {:?} at {:#x?}", tensor.name(), tensor.shape(), tensor.address());
    }

    // The new tensors go to the places of the old ones.
    let checkpoint = Checkpoint::open(new)?;
    let selected = checkpoint.select(&Selection::default())?;
    let prepared = loader.prepare_into(checkpoint, &selected, &serving.places())?;
    // Here a server lets its running requests end. A tensor that is still used somewhere keeps the memory, and this is an error.
    let memory = serving.into_arena().map_err(|_| "the old tensors are still in use")?;
    let swapped = loader.load_into(&prepared, memory)?;
    println!("swapped {} tensors in {:.3} s", swapped.tensors().len(), swapped.report.seconds);
    Ok(())
}
