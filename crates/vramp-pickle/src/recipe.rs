//! How bytes are *made* from a file that do not lie in it as they are loaded: what an archive stores deflated, strided, big-endian
//! or with a lazy sign. Plain data, and the arithmetic that carries it out in memory; it opens no file.

use std::io::{self, Read};

use flate2::read::DeflateDecoder;

/// How the bytes of a shard are made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recipe {
    /// Bytes of what is made.
    pub len: u64,
    /// Where it comes from.
    pub storages: Vec<Storage>,
    /// By their place in the image, without gap.
    pub pieces: Vec<Piece>,
}

/// Bytes of the file that pieces are made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Storage {
    /// Offset in bytes in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub packed: u64,
    /// Bytes once inflated; the same where they are stored.
    pub len: u64,
    /// Whether they are deflated.
    pub deflated: bool,
    /// CRC-32 of the inflated bytes; 0: not known.
    pub crc: u32,
}

/// A tensor's elements, gathered from a storage.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// First byte in the image.
    pub at: u64,
    /// Bytes in the image.
    pub len: u64,
    /// Which storage.
    pub storage: usize,
    /// Offset in bytes of the first element in the inflated storage.
    pub first: u64,
    /// Elements along each dimension, and bytes from one to the next.
    pub dims: Vec<(u64, u64)>,
    /// Bytes of one element.
    pub element: u64,
    /// What is done to each element.
    pub change: Change,
}

/// What is done to each element, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Change {
    /// Bytes of the units whose order is turned around; 0 or 1: none.
    pub swap: u64,
    /// The numbers that are negated.
    pub negate: Negate,
}

/// Which numbers of an element are negated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Negate {
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
    pub(crate) fn push_storage(&mut self, storage: Storage) -> usize {
        self.storages.push(storage);
        self.storages.len() - 1
    }
}

/// Why a storage could not be inflated.
#[derive(Debug)]
pub enum NotInflated {
    /// There is no memory for it.
    Memory,
    /// It is damaged, in words.
    Damaged(String),
}

impl Storage {
    /// Inflates the storage's bytes, which `packed` gives.
    ///
    /// # Errors
    /// [`NotInflated`], also where the bytes do not have the CRC-32 that is stated.
    pub fn inflate(&self, packed: impl Read) -> Result<Vec<u8>, NotInflated> {
        let mut bytes = crate::bytes::zeroed(self.len).map_err(|_| NotInflated::Memory)?;
        let (offset, len) = (self.offset, self.len);
        DeflateDecoder::new(packed).read_exact(&mut bytes).map_err(|error: io::Error| {
            NotInflated::Damaged(format!("the storage at byte {offset} cannot be inflated to its {len} bytes: {error}"))
        })?;
        if self.crc != 0 && crc32fast::hash(&bytes) != self.crc {
            let what = format!("the storage at byte {offset} does not have the CRC-32 that is stated");
            return Err(NotInflated::Damaged(what));
        }
        Ok(bytes)
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Piece {
    /// The bytes of the storage that hold the elements from number `first` to before `last`.
    pub fn span(&self, first: u64, last: u64) -> (u64, u64) {
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
    pub fn gather(&self, bytes: &[u8], start: u64, first: u64, skip: usize, target: &mut [u8]) {
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
    use super::*;

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
