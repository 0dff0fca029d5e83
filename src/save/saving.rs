//! A save in progress: takes the bytes of its tensors in order, in pieces of any size, and ends with the switch from old to new.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::feed;
use super::files::{Bounds, Files};
use super::input::Input;
use super::layout::{Layout, Outline};
use super::options::{SaveOptions, Saved, Target};
use super::publish::Place;
use crate::durable::{self, Store};
use crate::error::{Error, Listed, Result};
use crate::fallback::Fallbacks;
use crate::fault::{counted, quoted};
use crate::load::Cancel;
use crate::memory::Filled;
use crate::memory::staging::{StagingBuffer, StagingPool};

/// Bytes between two looks at the switch that cancels.
const PIECE_BYTES: usize = 8 << 20;

/// A save in progress: it takes the bytes of its tensors in the order of the files, in pieces of any size. At most 48 MiB of
/// them are kept, in blocks that other threads hash and write. Dropped before [`Saving::finish`], it leaves everything as it was.
pub struct Saving<'s> {
    files: Files<'s>,
    cancel: Cancel,
    /// The file whose bytes come next, and the number of the tensor in it.
    shard: usize,
    tensor: usize,
    /// Bytes of that tensor that have come.
    done: u64,
    /// Whether that file was made.
    open: bool,
    /// Made for the first byte.
    pool: Option<StagingPool>,
    /// The block that is being filled, and how much of it is.
    block: Option<(StagingBuffer, usize)>,
}

impl<'s> Saving<'s> {
    /// Looks at the place, makes the folder where it is missing, and the first file.
    ///
    /// # Errors
    /// When the folder that it should lie in is missing, too full, or holds something that must not be replaced.
    pub fn begin(store: &'s dyn Store, target: &Target, layout: Layout, options: &SaveOptions) -> Result<Saving<'s>> {
        let mut saving = Saving::without_file(store, target, layout, options, Bounds::STREAM)?;
        saving.settle()?;
        Ok(saving)
    }

    /// A save whose first file has not been made yet.
    pub(super) fn without_file(
        store: &'s dyn Store,
        target: &Target,
        layout: Layout,
        options: &SaveOptions,
        bounds: Bounds,
    ) -> Result<Saving<'s>> {
        let abandoned = remove_abandoned(store, target);
        let place = Place::of(store, target, &layout, &options.replace)?;
        let mut files = Files::new(store, layout, place, &options.leftovers, (options.digests, bounds));
        files.warnings.extend(abandoned);
        let (cancel, open) = (options.cancel.clone(), false);
        let saving = Saving { files, cancel, shard: 0, tensor: 0, done: 0, open, pool: None, block: None };
        saving.files.place.make_folder(store, &saving.files.leftovers)?; // from here on, dropping it takes everything back
        Ok(saving)
    }

    /// The tensor whose bytes, or whose next bytes, are to be written: an index into the tensors of the layout. Tensors
    /// without bytes are passed over. `None`: all have been written.
    pub fn next(&self) -> Option<usize> {
        self.files.layout.shards.get(self.shard)?.tensors.get(self.tensor).copied()
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.files.layout
    }

    /// Takes bytes of the tensor that is [next](Saving::next), as many of those that it still needs. Once those of the last tensor
    /// are taken, all files are complete and durable when this returns.
    ///
    /// # Errors
    /// When they are more than the tensor has left, these or earlier bytes cannot be written, or the save was cancelled.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.check_cancelled()?;
            let left = self.next_bytes().saturating_sub(self.done);
            if !self.open || piece.len() as u64 > left {
                return Err(Error::Poisoned { what: "more bytes were saved of a tensor than it has" });
            }
            self.append(piece)?;
            self.done += piece.len() as u64;
        }
        self.settle()
    }

    /// Writes all tensors, which none have been taken of so far.
    pub(super) fn write_all(&mut self, tensors: &[Input<'_>]) -> Result<()> {
        feed::feed(&mut self.files, tensors, &self.cancel)?;
        self.shard = self.files.layout.shards.len();
        Ok(())
    }

    /// The files as they lie now, under temporary names, once all tensors have been written: complete and durable.
    ///
    /// # Errors
    /// When tensors are missing.
    pub fn files(&self) -> Result<&[PathBuf]> {
        match self.next() {
            None => Ok(&self.files.paths),
            Some(_) => Err(Error::Poisoned { what: "a save was finished before all of its tensors were written" }),
        }
    }

    /// Puts the files in place.
    ///
    /// # Errors
    /// When tensors are missing, the save was cancelled, the storage refuses, or another process has put weights there since
    /// [`Saving::begin`] ([`Error::Conflict`]); then all is as it was before. Only when the
    /// folder cannot be synced at the very end, the new files are in place and not known to be durable.
    pub fn finish(self) -> Result<Saved> {
        self.check_cancelled()?;
        let paths = self.files()?.to_vec();
        let Files { store, layout, place, leftovers, digests, warnings, .. } = &self.files;
        let published = place.publish(*store, paths, layout, leftovers, &self.cancel)?;
        let (tensors, bytes, digests) = (layout.tensors.len(), layout.bytes, digests.clone());
        let warnings = warnings.iter().cloned().chain(published.warnings).collect();
        Ok(Saved { outputs: published.outputs, tensors, bytes, digests, warnings })
    }

    fn check_cancelled(&self) -> Result<()> {
        if self.cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn next_bytes(&self) -> u64 {
        self.next().and_then(|at| self.files.layout.tensors.get(at)).and_then(Outline::bytes).unwrap_or(0)
    }

    /// Goes on to the next tensor that lacks bytes: past what is complete, to the next file where one is.
    pub(super) fn settle(&mut self) -> Result<()> {
        let layout = Arc::clone(&self.files.layout);
        while let Some(shard) = layout.shards.get(self.shard) {
            if !self.open {
                self.files.open(self.shard)?;
                self.open = true;
                self.append(&shard.header)?;
            }
            if self.next().is_none() {
                self.give()?;
                self.files.end(self.shard)?;
                (self.shard, self.tensor, self.open) = (self.shard + 1, 0, false);
                if self.shard == layout.shards.len() {
                    self.files.complete()?;
                }
            } else if self.done == self.next_bytes() {
                (self.tensor, self.done) = (self.tensor + 1, 0);
            } else {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Copies bytes of the open file to its blocks.
    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let pool = match self.pool.take() {
                Some(pool) => pool,
                None => self.files.blocks(None, &Fallbacks::default())?,
            };
            let pool = self.pool.insert(pool);
            let none = Error::Poisoned { what: "no block to write to" };
            let (mut block, filled) = match self.block.take() {
                Some(block) => block,
                None => (pool.acquire_waiting().ok_or(none)?, 0),
            };
            let room = block.bytes_mut().get_mut(filled..).unwrap_or_default();
            let (now, later) = bytes.split_at(room.len().min(bytes.len()));
            room[..now.len()].copy_from_slice(now);
            let filled = filled + now.len();
            let full = filled == block.len();
            self.block = Some((block, filled));
            if full {
                self.give()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Hands the block to the open file.
    fn give(&mut self) -> Result<()> {
        let Some((block, len)) = self.block.take() else { return Ok(()) };
        self.files.give(self.shard, Filled::new(block, len))
    }
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        self.files.give_up();
        self.files.leftovers.take_back(self.files.store);
    }
}

impl fmt::Debug for Saving<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saving").field("layout", self.layout()).finish_non_exhaustive()
    }
}

/// Removes temporary files that killed saves left at the target; returns a warning that lists them.
fn remove_abandoned(store: &dyn Store, target: &Target) -> Option<String> {
    let folder = match target {
        Target::File(path) => durable::folder_of(path),
        Target::Folder(path) => path,
    };
    let removed: Listed = durable::remove_abandoned(store, folder).iter().map(|name| quoted(name)).collect();
    let what =
        || format!("removed {} that a killed save had left: {removed}", counted(removed.len(), "temporary file"));
    (!removed.is_empty()).then(what)
}
