//! The bytes of an archive's members: small ones whole, checked against their CRC; all of them as streams.
//!
//! Memory grows with what arrives, never with what a header announces.

use std::io::{self, Read};

use flate2::read::DeflateDecoder;

use crate::bytes::{Bytes, Stream};
use crate::finding::Finding;
use crate::zip::{Entry, Method};

const CHUNK_BYTES: usize = 256 << 10;

/// A member that grows more than this many times when inflated, and beyond the second number of bytes, is a bomb.
const MOST_RATIO: u64 = 200;
const HARMLESS_BYTES: u64 = 16 << 20;

/// Whether inflating the member would make absurdly much of little.
pub(crate) fn is_bomb(entry: &Entry) -> bool {
    entry.len > HARMLESS_BYTES && entry.len / MOST_RATIO > entry.packed
}

/// The member's bytes as a stream; `None` where they cannot be found or unpacked.
pub(crate) fn stream<'a>(bytes: &'a dyn Bytes, entry: &Entry) -> Option<Box<dyn Read + 'a>> {
    let data = entry.data?;
    let packed = Stream { bytes, at: data, end: data.saturating_add(entry.packed) };
    match entry.method? {
        Method::Stored => Some(Box::new(packed)),
        Method::Deflated => Some(Box::new(DeflateDecoder::new(packed))),
    }
}

/// A member's bytes, at most `limit`. What is wrong with them is a finding.
pub(crate) fn read(bytes: &dyn Bytes, entry: &Entry, limit: u64) -> io::Result<Result<Vec<u8>, Finding>> {
    let fault = |rule, what: String| Ok(Err(Finding::malformed(rule, what).within(&entry.name)));
    if entry.len > limit {
        return fault("resource-limit", format!("{} bytes, above the limit of {limit}", entry.len));
    }
    if is_bomb(entry) {
        let what = format!("{} bytes would become {}", entry.packed, entry.len);
        return Ok(Err(Finding::suspicious("ratio-limit", what).within(&entry.name)));
    }
    let Some(mut stream) = stream(bytes, entry) else {
        return fault("header-mismatch", "its bytes cannot be found".into());
    };
    let mut out = Vec::new();
    match read_up_to(&mut stream, &mut out, entry.len) {
        Ok(()) => {}
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
            ) =>
        {
            return fault(
                "header-mismatch",
                format!("its bytes cannot be inflated to the {} that it states", entry.len),
            );
        }
        Err(e) => return Err(e),
    }
    if entry.crc != 0 && crc32fast::hash(&out) != entry.crc {
        return fault("crc", "its bytes do not have the CRC-32 that the archive states: damaged".into());
    }
    Ok(Ok(out))
}

/// Reads exactly `len` bytes, and demands that nothing follows.
pub(crate) fn read_up_to(stream: &mut dyn Read, out: &mut Vec<u8>, len: u64) -> io::Result<()> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    while out.len() < len {
        let (done, step) = (out.len(), (len - out.len()).min(CHUNK_BYTES.max(out.len() / 2)));
        out.try_reserve(step).map_err(|_| io::ErrorKind::OutOfMemory)?;
        out.resize(done + step, 0);
        stream.read_exact(out.get_mut(done..).unwrap_or_default())?;
    }
    match stream.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// What passing over a member's bytes showed.
pub(crate) struct Passed {
    pub(crate) crc: u32,
    pub(crate) len: u64,
    pub(crate) all_zero: bool,
}

/// Passes over a member without keeping it. `None` where it cannot be unpacked.
pub(crate) fn pass(bytes: &dyn Bytes, entry: &Entry) -> io::Result<Option<Passed>> {
    let Some(mut stream) = stream(bytes, entry) else { return Ok(None) };
    // A byte more than there should be, so that too many are seen.
    let most = usize::try_from(entry.len).map_or(CHUNK_BYTES, |len| len.saturating_add(1).min(CHUNK_BYTES));
    let (mut hasher, mut chunk) = (crc32fast::Hasher::new(), vec![0; most]);
    let mut passed = Passed { crc: 0, len: 0, all_zero: true };
    while passed.len <= entry.len {
        let count = match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => return Ok(None),
            Err(e) => return Err(e),
        };
        let read = chunk.get(..count).unwrap_or_default();
        hasher.update(read);
        passed.all_zero &= read.iter().all(|&byte| byte == 0);
        passed.len += count as u64;
    }
    passed.crc = hasher.finalize();
    Ok(Some(passed))
}
