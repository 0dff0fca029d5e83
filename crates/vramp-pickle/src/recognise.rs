//! What a file is that `torch.save` may have written, by its first bytes and by its end. It decides nothing about what is in it.

use std::io;

use crate::bytes::{self, Bytes};
use crate::finding::Finding;
use crate::{legacy, tar, zip};

/// Bytes at the beginning of a file that are enough to recognise it.
pub const BEGINNING: u64 = 1024;

/// What a file is that `torch.save` may have written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A zip archive.
    Zip,
    /// A stack of pickles, as before PyTorch 1.6.
    Legacy,
    /// One pickle.
    Pickle,
    /// A tar archive.
    Tar,
}

/// Recognises a file by its first bytes; `None` for what is none of these.
pub fn recognise(beginning: &[u8], len: u64) -> Option<Kind> {
    if is_safetensors(beginning, len) {
        return None;
    }
    match beginning {
        [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..] => Some(Kind::Zip),
        _ if legacy::is_legacy(beginning) => Some(Kind::Legacy),
        [0x80, 2..=5, opcode, ..] if *opcode != 0 => Some(Kind::Pickle),
        _ if beginning.get(257..262) == Some(b"ustar") || tar::is_header(beginning) => Some(Kind::Tar),
        _ => None,
    }
}

/// Whether it is a safetensors file: the length of a header can begin like a pickle, but in a pickle that is so long its brace
/// cannot be there.
pub fn is_safetensors(beginning: &[u8], len: u64) -> bool {
    let header = beginning.first_chunk().map(|length| u64::from_le_bytes(*length));
    header.is_some_and(|header| header < len) && beginning.get(8) == Some(&b'{')
}

/// Whether the file ends as a zip archive does: an archive behind something else, which other programs would read.
///
/// # Errors
/// When the bytes cannot be read.
pub fn hides_archive(bytes: &dyn Bytes) -> io::Result<bool> {
    // An end record and the longest comment behind it.
    const TAIL: u64 = 22 + 65_535;
    let len = bytes.len().min(TAIL);
    let tail = bytes::read_vec(bytes, bytes.len() - len, len)?;
    Ok(tail.windows(4).any(|window| window == b"PK\x05\x06") && !zip::read(bytes)?.entries.is_empty())
}

/// The finding of such a file.
pub fn hidden_archive() -> Finding {
    Finding::suspicious("prefix-data", "a zip archive stands behind other data: programs see different files in it")
}
