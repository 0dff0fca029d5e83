//! The files of a save in progress: created under temporary names, several of them open at a time.
//!
//! Each is a [`FileWriter`]. A file that has all of its bytes is made durable while the next ones are written; how many are open, and
//! how many blocks exist, is bounded ([`Bounds`]). Nothing here knows where a tensor's bytes come from, or puts a file in place.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::file_writer::{FileWriter, Work};
use super::layout::Layout;
use super::leftovers::Leftovers;
use super::publish::Place;
use super::sums::Sums;
use crate::device::Device;
use crate::digest::Digest;
use crate::durable::{BLOCK_BYTES, Store};
use crate::error::{Error, Result};
use crate::fallback::Fallbacks;
use crate::memory::Filled;
use crate::memory::staging::StagingPool;
use crate::os;

/// How much of a save is in memory and in progress at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Bytes of a block.
    pub(super) block_bytes: usize,
    /// Blocks that are being filled, hashed and written, together.
    pub(super) blocks: usize,
    /// Files that get blocks at a time. One more may be on its way to being durable.
    pub(super) files: usize,
}

impl Bounds {
    /// For tensors that are all in memory: 96 MiB, which is four blocks for each of three files.
    pub(super) const ALL: Bounds = Bounds { block_bytes: BLOCK_BYTES, blocks: 12, files: 3 };

    /// For tensors that come in the order of the files: 48 MiB, of one file that is filled and one before it.
    pub(super) const STREAM: Bounds = Bounds { block_bytes: BLOCK_BYTES, blocks: 6, files: 1 };
}

/// The files of a save.
pub(super) struct Files<'s> {
    pub(super) store: &'s dyn Store,
    pub(super) layout: Arc<Layout>,
    pub(super) place: Place,
    pub(super) leftovers: Leftovers,
    pub(super) bounds: Bounds,
    /// Those that were made and are durable, or become so, under their temporary names.
    pub(super) paths: Vec<PathBuf>,
    pub(super) digests: BTreeMap<Arc<str>, Digest>,
    pub(super) warnings: Vec<String>,
    with_digests: bool,
    /// The number of each open file, in the order in which they were made, and whether it has all of its bytes.
    open: Vec<Open>,
}

struct Open {
    shard: usize,
    writer: FileWriter,
    ended: bool,
}

impl<'s> Files<'s> {
    pub(super) fn new(
        store: &'s dyn Store,
        layout: Layout,
        place: Place,
        leftovers: &Leftovers,
        (with_digests, bounds): (bool, Bounds),
    ) -> Files<'s> {
        Files {
            store,
            layout: Arc::new(layout),
            place,
            leftovers: leftovers.clone(),
            bounds,
            paths: Vec::new(),
            digests: BTreeMap::new(),
            warnings: Vec::new(),
            with_digests,
            open: Vec::new(),
        }
    }

    /// Memory for the blocks of the files, no more than they need; locked for `device`, if bytes come from one.
    pub(super) fn blocks(&self, device: Option<&dyn Device>, fallbacks: &Fallbacks) -> Result<StagingPool> {
        let largest = self.layout.shards.iter().map(|shard| shard.bytes).max().unwrap_or(0);
        let largest = usize::try_from(largest).unwrap_or(usize::MAX).max(1);
        let whole_pages = largest.checked_next_multiple_of(os::page_bytes()).unwrap_or(usize::MAX);
        let bytes = if largest < self.bounds.block_bytes { whole_pages } else { self.bounds.block_bytes };
        let bytes = bytes.min(self.bounds.block_bytes);
        let blocks = self.layout.shards.iter().map(|shard| shard.bytes.div_ceil(bytes as u64));
        let blocks = blocks.fold(0, u64::saturating_add);
        let count = usize::try_from(blocks).unwrap_or(usize::MAX).clamp(1, self.bounds.blocks.max(1));
        match device {
            Some(device) => device.staging(count, bytes, fallbacks),
            None => StagingPool::reserve(count, bytes)
                .map_err(|e| Error::io("find memory to write", self.place.folder(), e)),
        }
    }

    /// Makes the file number `shard`, after all before it.
    pub(super) fn open(&mut self, shard: usize) -> Result<()> {
        let layout = Arc::clone(&self.layout);
        let unknown = Error::Poisoned { what: "a file that is not laid out" };
        let laid_out = layout.shards.get(shard).ok_or(unknown)?;
        while self.is_full() {
            if !self.complete_one()? {
                return Err(Error::Poisoned { what: "more files open than a save may have" });
            }
        }
        let (path, mut file) = self.leftovers.create(self.store, self.place.folder(), self.place.mode(shard))?;
        self.warnings.extend(file.warning().filter(|warning| !self.warnings.contains(warning)));
        self.paths.push(path.clone());
        file.reserve(laid_out.bytes)?;
        let sums = self.with_digests.then(|| Sums::of(laid_out, &layout));
        let beside = laid_out.bytes > self.bounds.block_bytes as u64;
        let writer = FileWriter::start(path, Work { file, sums }, beside);
        self.open.push(Open { shard, writer, ended: false });
        Ok(())
    }

    /// Whether no further file may be opened before another is complete.
    pub(super) fn is_full(&self) -> bool {
        self.open.len() > self.bounds.files
    }

    /// Whether all open files can go on.
    ///
    /// # Errors
    /// That of the first one that cannot.
    pub(super) fn check(&mut self) -> Result<()> {
        let failed = self.open.iter_mut().find(|open| open.writer.has_failed());
        failed.map_or(Ok(()), |open| Err(open.writer.reason()))
    }

    /// Blocks of the file that were given and are not hashed yet.
    pub(super) fn waiting(&self, shard: usize) -> u64 {
        self.open.iter().find(|open| open.shard == shard).map_or(0, |open| open.writer.waiting())
    }

    /// Hands the next block of an open file over.
    pub(super) fn give(&mut self, shard: usize, block: Filled) -> Result<()> {
        self.open_file(shard)?.writer.give(block)
    }

    /// The open file has all of its bytes.
    pub(super) fn end(&mut self, shard: usize) -> Result<()> {
        let open = self.open_file(shard)?;
        open.ended = true;
        if open.writer.is_beside() {
            open.writer.end();
            return Ok(());
        }
        self.complete_one().map(drop)
    }

    /// Waits until the oldest file that has all of its bytes is durable. `false`: each lacks some.
    pub(super) fn complete_one(&mut self) -> Result<bool> {
        let Some(at) = self.open.iter().position(|open| open.ended) else { return Ok(false) };
        let writer = self.open.remove(at).writer;
        let path = writer.path.clone();
        let complete = writer.complete()?;
        self.leftovers.keep(&path, complete.lock);
        self.digests.extend(complete.digests);
        Ok(true)
    }

    /// Waits until all files are durable, which all have their bytes.
    pub(super) fn complete(&mut self) -> Result<()> {
        while self.complete_one()? {}
        let missing = Error::Poisoned { what: "a file of a save lacks bytes" };
        if self.open.is_empty() { Ok(()) } else { Err(missing) }
    }

    /// Lets all open files go, as they are.
    pub(super) fn give_up(&mut self) {
        self.open.clear();
    }

    fn open_file(&mut self, shard: usize) -> Result<&mut Open> {
        let lost = Error::Poisoned { what: "bytes for a file that is not open" };
        self.open.iter_mut().find(|open| open.shard == shard && !open.ended).ok_or(lost)
    }
}
