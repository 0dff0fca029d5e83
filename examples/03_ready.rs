//! Use a tensor before the load is over: wait for one name while the rest still arrives.
//!
//!     cargo run --release --example 03_ready -- PATH NAME

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)] // examples print

use std::sync::Arc;
use std::time::Instant;

use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::CpuDevice;
use vramp::load::{Loader, TransferOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (path, name) = args.next().zip(args.next()).ok_or("usage: 03_ready PATH NAME")?;
    let started = Instant::now();
    let checkpoint = Checkpoint::open(&path)?;
    let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
    let selected = checkpoint.select(&Selection::default())?;
    let prepared = loader.prepare(checkpoint, &selected)?;
    let loading = loader.start(prepared);
    let tensor = loading.wait(&name)?;
    println!("{tensor:?} after {:.3} s", started.elapsed().as_secs_f64());
    let (_loader, loaded) = loading.finish()?;
    println!("all {} tensors after {:.3} s", loaded.tensors().len(), started.elapsed().as_secs_f64());
    Ok(())
}
