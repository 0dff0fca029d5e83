//! The longer road: open, select, plan, look at the plan, then load with a loader that stays warm.
//!
//!     cargo run --release --example 02_plan -- PATH 'GLOB'

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)] // examples print

use std::sync::Arc;

use vramp::checkpoint::{Checkpoint, Selection};
use vramp::device::CpuDevice;
use vramp::load::{Loader, TransferOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: 02_plan PATH [GLOB]")?;
    let selection = Selection::default().include(args);

    let checkpoint = Checkpoint::open(&path)?;
    let selected = checkpoint.select(&selection)?;
    let mut loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
    for round in 1..=2 {
        let prepared = loader.prepare(checkpoint.clone(), &selected)?;
        print!("{}", prepared.plan);
        let loaded = loader.load(&prepared)?;
        println!("round {round}: {:.2} GB/s, routes {:?}", loaded.report.gb_per_s, loaded.report.routes);
    }
    Ok(())
}
