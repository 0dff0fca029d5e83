//! Bytes by position, from a file or from memory: what the readers of archives are given.
//!
//! A section is a part of other bytes, so that an archive within a file is read like one of its own.

use std::cell::RefCell;
use std::io::{self, Read};

/// Bytes that are read by position.
pub trait Bytes {
    /// Number of bytes.
    fn len(&self) -> u64;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `target` from `offset` on.
    ///
    /// # Errors
    /// When they are not there, or cannot be read.
    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()>;
}

/// Bytes in memory.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a>(pub &'a [u8]);

impl Bytes for Memory<'_> {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let found = start.and_then(|start| self.0.get(start..start.checked_add(target.len())?));
        target.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A part of other bytes. Reads are bounded by it.
#[derive(Debug)]
pub struct Section<'a, B: Bytes + ?Sized> {
    /// The other bytes.
    pub whole: &'a B,
    /// First byte.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
}

impl<B: Bytes + ?Sized> Bytes for Section<'_, B> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        match offset.checked_add(target.len() as u64) {
            Some(end) if end <= self.len => self.whole.read(self.start.saturating_add(offset), target),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Reads that stand close together in one go: an archive of many small members would else take a system call for each.
pub(crate) struct Ahead<'a> {
    bytes: &'a dyn Bytes,
    kept: RefCell<Kept>,
}

#[derive(Default)]
struct Kept {
    start: u64,
    bytes: Vec<u8>,
    /// One past the last byte that was asked for.
    last: u64,
}

/// Bytes that are read at a time, and the distance from the last read up to which that is done.
const AHEAD_BYTES: u64 = 64 << 10;
const NEAR_BYTES: u64 = 16 << 10;

impl<'a> Ahead<'a> {
    pub(crate) fn new(bytes: &'a dyn Bytes) -> Ahead<'a> {
        Ahead { bytes, kept: RefCell::default() }
    }
}

impl Bytes for Ahead<'_> {
    fn len(&self) -> u64 {
        self.bytes.len()
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let mut kept = self.kept.borrow_mut();
        let end = offset.saturating_add(target.len() as u64);
        let near = offset.checked_sub(kept.last).is_some_and(|distance| distance < NEAR_BYTES);
        kept.last = end;
        if kept.part(offset, target.len()).is_none() {
            if !near || target.len() as u64 > NEAR_BYTES {
                return self.bytes.read(offset, target);
            }
            let len = self.bytes.len().saturating_sub(offset).min(AHEAD_BYTES);
            kept.bytes = read_vec(self.bytes, offset, len)?;
            kept.start = offset;
        }
        target.copy_from_slice(kept.part(offset, target.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Kept {
    fn part(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }
}

/// The bytes of a range as a stream.
pub(crate) struct Stream<'a> {
    pub(crate) bytes: &'a dyn Bytes,
    pub(crate) at: u64,
    pub(crate) end: u64,
}

impl Read for Stream<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let len = left.min(target.len());
        let target = target.get_mut(..len).unwrap_or_default();
        self.bytes.read(self.at, target)?;
        self.at += len as u64;
        Ok(len)
    }
}

/// `len` bytes from `offset` on. The caller has compared `len` with what is there.
///
/// # Errors
/// When they are not there, cannot be read, or there is no memory for them.
pub fn read_vec(bytes: &dyn Bytes, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut out = zeroed(len)?;
    bytes.read(offset, &mut out)?;
    Ok(out)
}

/// Memory for `len` bytes, or an error.
pub(crate) fn zeroed(len: u64) -> io::Result<Vec<u8>> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_ahead_changes_no_byte_and_no_error() {
        let mut random = crate::testing::Random::new(7);
        let all = random.bytes(300_000);
        let whole = Memory(&all);
        let ahead = Ahead::new(&whole);
        let mut at = 0;
        for _ in 0..2000 {
            at = if random.below(4) == 0 { random.below(all.len() + 10) } else { at + random.below(300) };
            let most = if random.below(10) == 0 { 40_000 } else { 60 };
            let len = random.below(most);
            let mut target = vec![0; len];
            match (ahead.read(at as u64, &mut target), all.get(at..at + len)) {
                (Ok(()), Some(expected)) => assert_eq!(target, expected),
                (Err(_), None) => at = 0,
                (found, expected) => panic!("{found:?} {} at {at} + {len}", expected.is_some()),
            }
        }
    }
}
