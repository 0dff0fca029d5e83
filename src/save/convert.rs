//! A checkpoint written anew: whatever [`Checkpoint`] opens, by way of the ordinary [`Loader`](crate::load::Loader), to safetensors.
//!
//! `work` decides what the result holds: names, casts, ties, metadata, warnings. [`batches`](super::batches) then loads and
//! writes the tensors in memory of a bounded size. Casts, scales and cuts are the loader's. Nothing here opens a weight file, and
//! nothing is replaced before all has been written and, where asked, read back and compared.

use std::sync::Arc;

use super::batches::BATCH_BYTES;
use super::files::Bounds;
use super::layout::{Layout, Notes};
use super::options::{ConvertOptions, Converted, Target, shard_limit};
use super::saving::Saving;
use super::work::Work;
use crate::checkpoint::Checkpoint;
use crate::durable::Store;
use crate::error::{Error, Result};

/// Writes `checkpoint` to `target`.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let (input, output) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
/// # let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&input, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &1f32.to_le_bytes()].concat())?;
/// use vramp::checkpoint::Checkpoint;
/// use vramp::Float;
/// use vramp::load::{Convert, TransferOptions};
/// use vramp::save::{ConvertOptions, Target, convert};
/// use vramp::durable::FileStore;
///
/// let options = ConvertOptions::default().transfer(TransferOptions::default().convert(Convert::to(Float::BF16)));
/// let converted = convert(&Checkpoint::open(&input)?, &FileStore, &Target::of(&output), &options)?;
/// assert_eq!(converted.saved.outputs, [output]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// What cannot be loaded or saved; [`Error::Overflow`] with all tensors concerned; [`Error::Mismatch`] when a check finds
/// other bytes than were written. Nothing is left behind then, and nothing was replaced.
pub fn convert(
    checkpoint: &Checkpoint,
    store: &dyn Store,
    target: &Target,
    options: &ConvertOptions,
) -> Result<Converted> {
    convert_in(checkpoint, store, target, options, BATCH_BYTES)
}

/// [`convert`] with batches of `batch_bytes` bytes; at least 16.
pub(super) fn convert_in(
    checkpoint: &Checkpoint,
    store: &dyn Store,
    target: &Target,
    options: &ConvertOptions,
    batch_bytes: u64,
) -> Result<Converted> {
    if options.check {
        let cancel = &options.transfer.cancel;
        checkpoint.check_sums(&|| if cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) })?;
    }
    demand_tensors(checkpoint)?;
    let checkpoint = &Arc::new(checkpoint.clone());
    let work = Work::plan(checkpoint, options, batch_bytes)?;
    let outlines = work.outputs.iter().map(|output| output.outline.clone()).collect();
    let limit = shard_limit(target, options.max_shard_bytes);
    let layout = Layout::new(target.path(), outlines, &work.notes, limit)?;
    // A block is no larger than a batch.
    let most = usize::try_from(batch_bytes).unwrap_or(usize::MAX);
    let bounds = Bounds { block_bytes: Bounds::STREAM.block_bytes.min(most), ..Bounds::STREAM };
    let mut saving = Saving::without_file(store, target, layout, &work.save_options(), bounds)?;
    saving.settle()?;
    let (saving, warnings) = work.carry_out(saving)?;
    let saved = saving.finish()?;
    let Work { skipped, scales, notes: Notes { ties, .. }, warnings: planned, .. } = work;
    let warnings =
        [checkpoint.warnings().to_vec(), planned, warnings, saved.warnings.clone()].into_iter().flatten().collect();
    Ok(Converted { saved, skipped, scales, ties, warnings })
}

/// Refuses to make a checkpoint of nothing: of no tensor at all, or of tensors without any bytes.
fn demand_tensors(checkpoint: &Checkpoint) -> Result<()> {
    match checkpoint.emptiness() {
        Some(what) if checkpoint.skipped().is_empty() => {
            Err(Error::Unsupported { path: checkpoint.path().to_owned(), tensor: None, what })
        }
        _ => Ok(()),
    }
}
