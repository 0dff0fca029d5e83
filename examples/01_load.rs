//! The paved road: load a checkpoint to host memory and look at a tensor.
//!
//!     cargo run --release --example 01_load -- PATH

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)] // examples print

use vramp::load::{Options, load};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: 01_load PATH")?;
    let loaded = load(path, &Options::default())?;
    for tensor in loaded.tensors().iter().take(5) {
        println!("{}: {} {:?}, {} bytes", tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()?.len());
    }
    let report = &loaded.report;
    println!("{} bytes in {:.3} s = {:.2} GB/s", report.bytes, report.seconds, report.gb_per_s);
    println!("{:.3} s of that was {:?}", report.main_stage.seconds, report.main_stage.stage);
    Ok(())
}
