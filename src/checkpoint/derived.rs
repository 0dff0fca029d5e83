//! A shard that lies nowhere: its bytes are *made* from a file when they are read. What an archive stores deflated, strided,
//! big-endian or with a lazy sign becomes a shard like any other, so that one pipeline loads both.
//!
//! [`Recipe`] is plain data: for each range of the image, which storage of the file it comes from and how. [`open`] wraps the
//! open file; only buffered reads are offered, nothing counts as resident, and the file's own identity stays, so that a change is
//! noticed as ever. Memory is bounded by one storage at a time, and by what is asked for where that suffices.

use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use flate2::read::DeflateDecoder;

use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::storage::{FileSystem, Limits, MappedFile, OpenFile, Residency, Route, Source, Version};

/// A span of the file that is read in one go for what is asked of it, beyond what is asked, in bytes.
const SLACK_BYTES: u64 = 1 << 20;

/// How the bytes of a shard are made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recipe {
    pub(crate) len: u64,
    pub(crate) storages: Vec<TorchStorage>,
    /// By their place in the image, without gap.
    pub(crate) pieces: Vec<Piece>,
}

/// Bytes of the file that pieces are made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TorchStorage {
    /// Offset in bytes in the file.
    pub(crate) offset: u64,
    /// Bytes in the file.
    pub(crate) packed: u64,
    /// Bytes once inflated; the same where they are stored.
    pub(crate) len: u64,
    /// Whether they are deflated.
    pub(crate) deflated: bool,
    /// CRC-32 of the inflated bytes; 0: not known.
    pub(crate) crc: u32,
}

/// A tensor's elements, gathered from a storage.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Piece {
    /// First byte in the image.
    pub(crate) at: u64,
    /// Bytes in the image.
    pub(crate) len: u64,
    /// Which storage.
    pub(crate) storage: usize,
    /// Offset in bytes of the first element in the inflated storage.
    pub(crate) first: u64,
    /// Elements along each dimension, and bytes from one to the next.
    pub(crate) dims: Vec<(u64, u64)>,
    /// Bytes of one element.
    pub(crate) element: u64,
    /// What is done to each element.
    pub(crate) change: Change,
}

/// What is done to each element, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Change {
    /// Bytes of the units whose order is turned around; 0 or 1: none.
    pub(crate) swap: u64,
    /// The numbers that are negated.
    pub(crate) negate: Negate,
}

/// Which numbers of an element are negated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Negate {
    /// None.
    #[default]
    Nothing,
    /// Floating-point numbers of so many bytes: all of an element.
    Floats(u64),
    /// The first of two.
    Real(u64),
    /// The second of two.
    Imaginary(u64),
    /// Integers of so many bytes.
    Integers(u64),
}

impl Recipe {
    /// Number of bytes of the image.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a piece and says where it begins in the image; pieces begin on multiples of 64.
    pub(crate) fn add(&mut self, piece: Piece) -> u64 {
        let at = self.len.next_multiple_of(64);
        self.len = at.saturating_add(piece.len);
        self.pieces.push(Piece { at, ..piece });
        at
    }

    /// Adds a storage and says its number.
    pub(crate) fn push_storage(&mut self, storage: TorchStorage) -> usize {
        self.storages.push(storage);
        self.storages.len() - 1
    }
}

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
    fn whole(&self, at: usize, storage: &TorchStorage) -> Result<Arc<Vec<u8>>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = kept.as_ref().filter(|(number, _)| *number == at) {
            return Ok(Arc::clone(bytes));
        }
        *kept = None;
        let bytes = Arc::new(if storage.deflated { self.inflate(storage)? } else { self.read(storage)? });
        *kept = Some((at, Arc::clone(&bytes)));
        Ok(bytes)
    }

    fn read(&self, storage: &TorchStorage) -> Result<Vec<u8>> {
        let mut bytes = zeroed(storage.len, &self.path)?;
        self.source.read_at(storage.offset, &mut bytes)?;
        Ok(bytes)
    }

    fn inflate(&self, storage: &TorchStorage) -> Result<Vec<u8>> {
        let packed =
            Packed { source: &*self.source, at: storage.offset, end: storage.offset.saturating_add(storage.packed) };
        let mut bytes = zeroed(storage.len, &self.path)?;
        let damaged = |what: String| Error::malformed(&self.path, Fault::Other(what));
        DeflateDecoder::new(packed).read_exact(&mut bytes).map_err(|error| {
            damaged(format!(
                "the storage at byte {} cannot be inflated to its {} bytes: {error}",
                storage.offset, storage.len
            ))
        })?;
        if storage.crc != 0 && crc32fast::hash(&bytes) != storage.crc {
            return Err(damaged(format!(
                "the storage at byte {} does not have the CRC-32 that is stated",
                storage.offset
            )));
        }
        Ok(bytes)
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

impl Piece {
    /// The bytes of the storage that hold the elements from number `first` to before `last`.
    fn span(&self, first: u64, last: u64) -> (u64, u64) {
        let Some(last) = last.checked_sub(1).filter(|last| *last >= first) else { return (self.first, self.first) };
        let inner = self.dims.get(1..).unwrap_or_default();
        let row: u64 = inner.iter().map(|(count, _)| *count).product();
        let reach: u64 = inner.iter().map(|(count, stride)| count.saturating_sub(1) * stride).sum();
        let stride = self.dims.first().map_or(0, |(_, stride)| *stride);
        let (top, bottom) = (first / row.max(1), last / row.max(1));
        (self.first + top * stride, self.first + bottom * stride + reach + self.element)
    }

    /// Copies elements from number `first` on, without the first `skip` bytes, out of a part of the storage that begins at
    /// byte `start`.
    fn gather(&self, bytes: &[u8], start: u64, first: u64, skip: usize, target: &mut [u8]) {
        let element = index(self.element.max(1));
        let mut places = Places::new(&self.dims, first);
        let (mut rest, mut skip) = (target, skip);
        while !rest.is_empty() {
            let from = index((self.first + places.offset).saturating_sub(start));
            // Whole elements that follow each other, or a part of one.
            let run = match (rest.len() / element).min(index(places.run(self.element))) {
                count if skip == 0 && count > 0 => count,
                _ => 1,
            };
            let found = bytes.get(from..from.saturating_add(run * element)).unwrap_or_default();
            let count = (run * element - skip).min(rest.len());
            let (part, after) = rest.split_at_mut(count);
            self.put(found, skip, part);
            (rest, skip) = (after, 0);
            places.advance(run as u64);
        }
    }

    /// Copies changed elements without their first `skip` bytes.
    fn put(&self, found: &[u8], skip: usize, target: &mut [u8]) {
        if found.len() == target.len() {
            target.copy_from_slice(found);
            return self.change.apply(target);
        }
        let mut element = found.to_vec();
        self.change.apply(&mut element);
        if let Some(part) = element.get(skip..).and_then(|part| part.get(..target.len())) {
            target.copy_from_slice(part);
        }
    }
}

/// The offsets of a tensor's elements, row-major.
struct Places<'a> {
    dims: &'a [(u64, u64)],
    indices: Vec<u64>,
    offset: u64,
}

impl<'a> Places<'a> {
    fn new(dims: &'a [(u64, u64)], mut number: u64) -> Places<'a> {
        let mut indices = vec![0; dims.len()];
        let mut offset = 0;
        for (index, (count, stride)) in indices.iter_mut().zip(dims).rev() {
            *index = number % (*count).max(1);
            number /= (*count).max(1);
            offset += *index * stride;
        }
        Places { dims, indices, offset }
    }

    /// Elements from here to the end of the innermost dimension, where they follow each other; else one.
    fn run(&self, element: u64) -> u64 {
        match (self.dims.last(), self.indices.last()) {
            (Some((count, stride)), Some(index)) if *stride == element => count - index,
            _ => 1,
        }
    }

    /// Goes on by some elements, at most to the end of the innermost dimension.
    fn advance(&mut self, elements: u64) {
        let mut step = elements;
        for (index, (count, stride)) in self.indices.iter_mut().zip(self.dims).rev() {
            *index += step;
            self.offset += stride * step;
            step = 1;
            if *index < *count {
                return;
            }
            self.offset -= *index * stride;
            *index = 0;
        }
    }
}

impl Change {
    fn apply(self, element: &mut [u8]) {
        if self.swap > 1 {
            element.chunks_exact_mut(index(self.swap)).for_each(<[u8]>::reverse);
        }
        match self.negate {
            Negate::Nothing => {}
            Negate::Floats(width) => element.chunks_exact_mut(index(width)).for_each(flip_sign),
            Negate::Real(width) => element.chunks_exact_mut(index(width)).step_by(2).for_each(flip_sign),
            Negate::Imaginary(width) => element.chunks_exact_mut(index(width)).skip(1).step_by(2).for_each(flip_sign),
            Negate::Integers(width) => element.chunks_exact_mut(index(width)).for_each(negate),
        }
    }
}

fn flip_sign(number: &mut [u8]) {
    if let Some(last) = number.last_mut() {
        *last ^= 0x80;
    }
}

fn negate(number: &mut [u8]) {
    let mut carry = true;
    for byte in number {
        let (value, over) = (!*byte).overflowing_add(u8::from(carry));
        *byte = value;
        carry = over;
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // small numbers
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::MemoryFile;

    fn maker(bytes: Vec<u8>, piece: Piece) -> Arc<dyn OpenFile> {
        let len = bytes.len() as u64;
        let storage = TorchStorage { offset: 0, packed: len, len, deflated: false, crc: 0 };
        let mut recipe = Recipe::default();
        recipe.push_storage(storage);
        recipe.add(piece);
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

    #[test]
    fn signs_change_where_they_should() {
        let mut complex: Vec<u8> = [1f32, 2.0].iter().flat_map(|number| number.to_le_bytes()).collect();
        Change { swap: 0, negate: Negate::Imaginary(4) }.apply(&mut complex);
        assert_eq!(complex[4..], (-2f32).to_le_bytes());
        Change { swap: 0, negate: Negate::Real(4) }.apply(&mut complex);
        assert_eq!(complex[..4], (-1f32).to_le_bytes());
        let mut integer = 5i32.to_le_bytes();
        Change { swap: 0, negate: Negate::Integers(4) }.apply(&mut integer);
        assert_eq!(integer, (-5i32).to_le_bytes());
    }
}
