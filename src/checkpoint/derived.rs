//! A shard that lies nowhere: its bytes are *made* from a file when they are read. What an archive stores deflated, strided,
//! big-endian or with a lazy sign becomes a shard like any other, so that one pipeline loads both.
//!
//! [`Recipe`] is plain data: for each range of the image, which storage of the file it comes from and how. [`open`] wraps the
//! open file; only buffered reads are offered, nothing counts as resident, and the file's own identity stays, so that a change is
//! noticed as ever. Memory is bounded by one storage at a time, and by what is asked for where that suffices.

use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use vramp_pickle::recipe::{NotInflated, Piece, Storage};

pub use vramp_pickle::recipe::Recipe;

use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::storage::{FileSystem, Limits, MappedFile, OpenFile, Residency, Route, Source, Version};

/// A span of the file that is read in one go for what is asked of it, beyond what is asked, in bytes.
const SLACK_BYTES: u64 = 1 << 20;

/// The shard that `recipe` makes of an open file.
pub(crate) fn open(file: Arc<dyn OpenFile>, recipe: Arc<Recipe>) -> Arc<dyn OpenFile> {
    let maker =
        Maker { source: file.source(Route::Buffered), path: file.path().to_owned(), recipe, kept: Mutex::new(None) };
    Arc::new(MadeFile { file, maker: Arc::new(maker) })
}

struct MadeFile {
    file: Arc<dyn OpenFile>,
    maker: Arc<Maker>,
}

impl OpenFile for MadeFile {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn version(&self) -> Version {
        self.file.version()
    }

    fn volume(&self) -> String {
        self.file.volume()
    }

    fn file_system(&self) -> &FileSystem {
        self.file.file_system()
    }

    /// As its file: made of what is in the page cache, or not.
    fn residency(&self) -> Residency {
        let (file, len) = (self.file.residency_glance(), self.maker.recipe.len);
        if file.share(0..file.len()) > 0.5 { Residency::all(len) } else { Residency::none(len) }
    }

    fn source(&self, _: Route) -> Arc<dyn Source> {
        Arc::clone(&self.maker) as Arc<dyn Source>
    }

    fn check_unchanged(&self) -> Result<()> {
        self.file.check_unchanged()
    }

    fn map(&self) -> Result<Arc<MappedFile>> {
        let what =
            "some tensors do not lie in the file as they are loaded (they are deflated, strided or big-endian), \
                    so that they cannot be viewed; load them, or convert the file"
                .to_owned();
        Err(Error::Unsupported { path: self.path().to_owned(), tensor: None, what })
    }
}

/// The storage that was made whole last.
type Kept = Option<(usize, Arc<Vec<u8>>)>;

struct Maker {
    source: Arc<dyn Source>,
    path: std::path::PathBuf,
    recipe: Arc<Recipe>,
    kept: Mutex<Kept>,
}

impl Source for Maker {
    fn len(&self) -> u64 {
        self.recipe.len
    }

    fn route(&self) -> Route {
        Route::Buffered
    }

    fn limits(&self) -> Limits {
        Limits { align: 1, memory_align: 1, ..self.source.limits() }
    }

    fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<Route> {
        let end = offset.checked_add(target.len() as u64).filter(|end| *end <= self.recipe.len);
        let end = end.ok_or(Error::Poisoned { what: "a read past the end of a made shard" })?;
        target.fill(0); // between pieces there is nothing
        let first = self.recipe.pieces.partition_point(|piece| piece.at + piece.len <= offset);
        let pieces = self.recipe.pieces.get(first..).unwrap_or_default();
        for piece in pieces.iter().take_while(|piece| piece.at < end) {
            let (from, to) = (offset.max(piece.at), end.min(piece.at + piece.len));
            if from < to {
                let part = target.get_mut(index(from - offset)..index(to - offset)).unwrap_or_default();
                self.make(piece, from - piece.at, part)?;
            }
        }
        Ok(Route::Buffered)
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Maker {
    /// Makes the bytes of a piece from `from` on.
    fn make(&self, piece: &Piece, from: u64, target: &mut [u8]) -> Result<()> {
        let Some(storage) = self.recipe.storages.get(piece.storage) else {
            return Err(Error::Poisoned { what: "a recipe without its storage" });
        };
        let element = piece.element.max(1);
        let (first, last) = (from / element, (from + target.len() as u64).div_ceil(element));
        let (start, end) = piece.span(first, last);
        let skip = index(from - first * element);
        if storage.deflated || end - start > 4 * target.len() as u64 + SLACK_BYTES {
            let whole = self.whole(piece.storage, storage)?;
            piece.gather(&whole, 0, first, skip, target);
        } else {
            let mut span = zeroed(end - start, &self.path)?;
            self.source.read_at(storage.offset.saturating_add(start), &mut span)?;
            piece.gather(&span, start, first, skip, target);
        }
        Ok(())
    }

    /// A storage's bytes, inflated. Others wait meanwhile: they most likely want the same.
    fn whole(&self, at: usize, storage: &Storage) -> Result<Arc<Vec<u8>>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = kept.as_ref().filter(|(number, _)| *number == at) {
            return Ok(Arc::clone(bytes));
        }
        *kept = None;
        let bytes = Arc::new(if storage.deflated { self.inflate(storage)? } else { self.read(storage)? });
        *kept = Some((at, Arc::clone(&bytes)));
        Ok(bytes)
    }

    fn read(&self, storage: &Storage) -> Result<Vec<u8>> {
        let mut bytes = zeroed(storage.len, &self.path)?;
        self.source.read_at(storage.offset, &mut bytes)?;
        Ok(bytes)
    }

    fn inflate(&self, storage: &Storage) -> Result<Vec<u8>> {
        let packed =
            Packed { source: &*self.source, at: storage.offset, end: storage.offset.saturating_add(storage.packed) };
        storage.inflate(packed).map_err(|why| match why {
            NotInflated::Memory => Error::io("hold a storage of", &self.path, io::ErrorKind::OutOfMemory.into()),
            NotInflated::Damaged(what) => Error::malformed(&self.path, Fault::Other(what)),
        })
    }
}

fn zeroed(len: u64, path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let refused = |_| Error::io("hold a storage of", path, io::ErrorKind::OutOfMemory.into());
    bytes.try_reserve_exact(index(len)).map_err(refused)?;
    bytes.resize(index(len), 0);
    Ok(bytes)
}

/// Deflated bytes of the file as a stream.
struct Packed<'a> {
    source: &'a dyn Source,
    at: u64,
    end: u64,
}

impl Read for Packed<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let len = target.len().min(index(self.end - self.at));
        let target = target.get_mut(..len).unwrap_or_default();
        self.source.read_at(self.at, target).map_err(io::Error::other)?;
        self.at += len as u64;
        Ok(len)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // small numbers
mod tests {
    use proptest::prelude::*;

    use vramp_pickle::recipe::{Change, Negate};

    use super::*;
    use crate::testing::MemoryFile;

    fn maker(bytes: Vec<u8>, piece: Piece) -> Arc<dyn OpenFile> {
        let len = bytes.len() as u64;
        let storage = Storage { offset: 0, packed: len, len, deflated: false, crc: 0 };
        let recipe = Recipe { len: piece.len, storages: vec![storage], pieces: vec![piece] };
        open(Arc::new(MemoryFile::new("made", bytes)), Arc::new(recipe))
    }

    proptest! {
        /// Any view of any storage, read in any parts, is what walking its indices gives.
        #[test]
        fn every_view_reads_as_its_indices_say(
            dims in prop::collection::vec((1u64..6, 0u64..9), 0..4),
            element in prop::sample::select(vec![1u64, 2, 4, 8]),
            first in 0u64..5,
            cuts in prop::collection::vec(0.0f64..1.0, 0..4),
        ) {
            let dims: Vec<_> = dims.into_iter().map(|(count, stride)| (count, stride * element)).collect();
            let reach: u64 = dims.iter().map(|(count, stride)| (count - 1) * stride).sum();
            let storage: Vec<u8> = (0..first + reach + element).map(|n| (n * 7 % 251) as u8).collect();
            let count: u64 = dims.iter().map(|(count, _)| count).product();
            let mut expected = Vec::new();
            for number in 0..count {
                let (mut rest, mut offset) = (number, first);
                for (count, stride) in dims.iter().rev() {
                    offset += rest % count * stride;
                    rest /= count;
                }
                let mut one = storage[offset as usize..(offset + element) as usize].to_vec();
                one.reverse();
                expected.extend(one);
            }
            let change = Change { swap: element, negate: Negate::Nothing };
            let len = count * element;
            let file = maker(storage, Piece { at: 0, len, storage: 0, first, dims, element, change });
            let mut ends: Vec<u64> = cuts.iter().map(|cut| (cut * len as f64) as u64).collect();
            ends.extend([0, len]);
            ends.sort_unstable();
            let source = file.source(Route::Direct);
            let mut found = Vec::new();
            for pair in ends.windows(2) {
                let mut part = vec![0xaa; (pair[1] - pair[0]) as usize];
                source.read_at(pair[0], &mut part).unwrap();
                found.extend(part);
            }
            prop_assert_eq!(found, expected);
        }
    }
}
