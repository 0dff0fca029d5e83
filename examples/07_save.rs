//! Save tensors: some that are in memory at once, then a stream of them, of which only one is in memory at a time.
//!
//!     cargo run --release --example 07_save -- FOLDER

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)] // examples print

use std::path::PathBuf;

use vramp::dtype::Dtype;
use vramp::durable::FileStore;
use vramp::load::{Options, load};
use vramp::save::{Bytes, Input, Layout, Notes, Outline, SaveOptions, Saving, Target, save};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("usage: 07_save FOLDER")?);
    let bias: Vec<u8> = [0.5f32, -0.5].iter().flat_map(|value| value.to_le_bytes()).collect();
    let outline = Outline::new("bias", Dtype::F32, [2]);
    let one = folder.join("one.safetensors");
    save(&one, &[Input::new(outline, Bytes::Host(&bias))], &SaveOptions::default())?;
    println!("{:?}", load(&one, &Options::default())?.tensor("bias")?.as_slice::<f32>()?);

    // The names, types and shapes are known first; the bytes come in the order of the files.
    let layer = |at: u64| Outline::new(format!("layer.{at}"), Dtype::BF16, [1024, 1024]);
    let target = Target::of(folder.join("many"));
    let layout = Layout::new(target.path(), (0..16).map(layer).collect(), &Notes::default(), 8 << 20)?;
    let mut saving = Saving::begin(&FileStore, &target, layout, &SaveOptions::default())?;
    while let Some(number) = saving.next() {
        saving.write(&vec![number as u8; 2 << 20])?; // whole, or in pieces of any size
    }
    let saved = saving.finish()?; // until here, nobody sees anything of it
    println!("{} tensors in {} files", saved.tensors, saved.outputs.len());
    Ok(())
}
