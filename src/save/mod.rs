//! Saving: tensors become safetensors files, whole or not at all.
//!
//! A save is laid out before anything is written (`layout`), written to temporary names in the folder where it will lie, made
//! durable, and put in place at the end in one step that readers either see or do not (`publish`). [`save`] takes tensors in
//! memory of any device, [`Saving`] a stream of them, [`convert`] a checkpoint by way of the ordinary loader. `files` has several
//! files in progress at a time, a `file_writer` each. Files come and go through a [`Store`]; nothing here reads a weight file by itself,
//! knows a device by name, or holds more than its blocks (48 MiB of a stream, 96 MiB else) of what it is given.

mod batches;
mod convert;
mod feed;
mod file_writer;
mod files;
mod input;
mod layout;
mod leftovers;
mod options;
mod publish;
mod saving;
mod snapshot;
mod sums;
mod work;

#[cfg(test)]
mod tests;

use std::path::Path;

pub use convert::convert;
pub use input::{Bytes, Input};
pub use layout::{Layout, Notes, Outline, ShardLayout};
pub use leftovers::Leftovers;
#[doc(hidden)]
pub use leftovers::write_file;
#[doc(hidden)]
pub use options::REPLACE_HINT;
pub use options::{ConvertOptions, Converted, MAX_SHARD_BYTES, Replace, SaveOptions, Saved, Target, Ties};
pub use saving::Saving;

use crate::durable::{FileStore, Store};
use crate::error::Result;
use files::Bounds;
use input::demand_lengths;
use options::shard_limit;

/// Saves tensors to `path`: a file if it ends in `.safetensors` or `.sft`, else a folder. Where [`SaveOptions::replace`] allows it,
/// what is there is replaced in one step once the new is durable; whatever fails, the old stays as it is and nothing is left behind.
///
/// ```
/// use vramp::dtype::Dtype;
/// use vramp::load::{Options, load};
/// use vramp::save::{Bytes, Input, Outline, SaveOptions, save};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let values: Vec<u8> = [1f32, 2.0, 3.0].iter().flat_map(|value| value.to_le_bytes()).collect();
/// let bias = Input::new(Outline::new("bias", Dtype::F32, [3]), Bytes::Host(&values));
/// save(&path, &[bias], &SaveOptions::default())?;
///
/// assert_eq!(load(&path, &Options::default())?.tensor("bias")?.as_slice::<f32>()?, [1.0, 2.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Before anything is written: when a tensor cannot be saved, its bytes do not fit its shape, the folder is missing, full or
/// holds something that must stay: another model ([`Error::Exists`](crate::Error::Exists)). Later: when writing fails. See [`Layout::new`].
pub fn save(path: impl AsRef<Path>, tensors: &[Input<'_>], options: &SaveOptions) -> Result<Saved> {
    save_to(&FileStore, &Target::of(path.as_ref()), tensors, options)
}

/// The same with another store, or a target that the name does not tell.
///
/// # Errors
/// As [`save`].
pub fn save_to(store: &dyn Store, target: &Target, tensors: &[Input<'_>], options: &SaveOptions) -> Result<Saved> {
    save_within(store, target, tensors, options, Bounds::ALL)
}

fn save_within(
    store: &dyn Store,
    target: &Target,
    tensors: &[Input<'_>],
    options: &SaveOptions,
    bounds: Bounds,
) -> Result<Saved> {
    let outlines: Vec<Outline> = tensors.iter().map(|tensor| tensor.outline.clone()).collect();
    let layout = Layout::new(target.path(), outlines, &options.notes, shard_limit(target, options.max_shard_bytes))?;
    demand_lengths(tensors)?;
    let mut saving = Saving::without_file(store, target, layout, options, bounds)?;
    saving.write_all(tensors)?;
    saving.finish()
}
