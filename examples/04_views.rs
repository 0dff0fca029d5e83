//! Views of a mapping: nothing is read until it is touched.
//!
//!     cargo run --release --example 04_views -- PATH NAME

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)] // examples print
#![allow(unsafe_code)] // the borrow without a copy, below

use vramp::checkpoint::{Checkpoint, Selection};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (path, name) = args.next().zip(args.next()).ok_or("usage: 04_views PATH NAME")?;
    let checkpoint = Checkpoint::open(&path)?;
    let mapped = checkpoint.map(&checkpoint.select(&Selection::default())?)?;
    let tensor = mapped.tensor(&name)?;

    // Safe: a copy of the first bytes, checked against the file having changed.
    let mut first = vec![0; tensor.byte_len().min(16) as usize];
    tensor.copy_to(0, &mut first)?;
    println!("{tensor:?} begins with {first:02x?}");

    // Without a copy, on our word that nobody writes to the file meanwhile.
    // SAFETY: this program was given the file to look at; who runs it keeps it as it is.
    let bytes = unsafe { tensor.bytes() };
    println!("{} bytes at {:p}, route view: {} bytes", bytes.len(), bytes.as_ptr(), mapped.report.routes.view);
    tensor.check()?;
    Ok(())
}
