//! The members of a tar archive, as PyTorch wrote before 0.1.10, and as Python's `tarfile` would find them.
//!
//! Long names and sizes of GNU and of pax are read; nothing is unpacked. A block that is no header ends the list, and what follows is
//! for the caller to look at.

use std::io;

use super::bytes::{Bytes, read_vec};

pub(crate) const BLOCK: u64 = 512;
/// The longest record of names and sizes that is read.
const MAX_RECORD: u64 = 1 << 20;

/// One member with bytes of its own.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Offset in bytes of its first byte.
    pub(crate) start: u64,
    /// Its bytes, as far as they are there.
    pub(crate) len: u64,
}

/// Whether the block begins a member: its bytes have the sum that it states.
pub(crate) fn is_header(block: &[u8]) -> bool {
    let Some(block) = block.first_chunk::<512>() else { return false };
    let (before, rest) = block.split_at(148);
    let (stated, after) = rest.split_at(8);
    let sum: u64 = before.iter().chain(after).map(|byte| u64::from(*byte)).sum();
    let signed: i64 = before.iter().chain(after).map(|byte| i64::from(byte.cast_signed())).sum();
    let spaces = 8 * u64::from(b' ');
    let is_sum = |stated: u64| stated == sum + spaces || i64::try_from(stated) == Ok(signed + 8 * i64::from(b' '));
    sum > 0 && number(stated).is_some_and(is_sum)
}

/// A number in octal, or the base-256 form of GNU.
fn number(field: &[u8]) -> Option<u64> {
    match field {
        [first @ 0x80..=0xbf, rest @ ..] => {
            rest.iter().try_fold(u64::from(first & 0x3f), |sum, byte| sum.checked_mul(256)?.checked_add((*byte).into()))
        }
        [0xc0..=0xff, ..] => None,
        digits => {
            let digits = std::str::from_utf8(until_nul(digits)).ok()?.trim();
            if digits.is_empty() { Some(0) } else { u64::from_str_radix(digits, 8).ok() }
        }
    }
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// What a record says of the next member.
#[derive(Default)]
struct Said {
    name: Option<Vec<u8>>,
    len: Option<u64>,
}

/// The members, and where the first block is that is none.
pub(crate) fn members(bytes: &dyn Bytes) -> io::Result<(Vec<Member>, u64)> {
    let (mut members, mut at) = (Vec::new(), 0u64);
    let mut said = Said::default();
    while at.saturating_add(BLOCK) <= bytes.len() {
        let header = read_vec(bytes, at, BLOCK)?;
        let field = |from: usize, to: usize| header.get(from..to).unwrap_or_default();
        let Some(mut len) = number(field(124, 136)).filter(|_| is_header(&header)) else { break };
        let start = at + BLOCK;
        let left = bytes.len() - start;
        let kind = header.get(156).copied().unwrap_or_default();
        match kind {
            b'x' | b'g' | b'L' | b'K' => said.read(kind, &read_vec(bytes, start, len.min(left).min(MAX_RECORD))?),
            // Links, devices and folders have no bytes, whatever length they state.
            b'1'..=b'6' => (said, len) = (Said::default(), 0),
            _ => {
                len = said.len.unwrap_or(len);
                let name = said.name.take().unwrap_or_else(|| until_nul(field(0, 100)).to_vec());
                let name = String::from_utf8_lossy(&name).into_owned();
                members.push(Member { name, start, len: len.min(left) });
                said = Said::default();
            }
        }
        let Some(next) = len.checked_next_multiple_of(BLOCK).and_then(|len| start.checked_add(len)) else { break };
        at = next;
    }
    Ok((members, at.min(bytes.len())))
}

impl Said {
    fn read(&mut self, kind: u8, record: &[u8]) {
        match kind {
            b'L' => self.name = Some(until_nul(record).to_vec()),
            b'x' | b'g' => self.read_pax(record),
            _ => {}
        }
    }

    /// Lines of the form `30 path=…`, which begin with their own length.
    fn read_pax(&mut self, mut record: &[u8]) {
        while let Some(space) = record.iter().take(20).position(|byte| *byte == b' ') {
            let len =
                std::str::from_utf8(record.get(..space).unwrap_or_default()).ok().and_then(|len| len.parse().ok());
            let Some((line, rest)) = len.filter(|len| *len > space).and_then(|len| record.split_at_checked(len)) else {
                return;
            };
            record = rest;
            let line = line.get(space + 1..).unwrap_or_default().strip_suffix(b"\n").unwrap_or_default();
            if let Some(name) = line.strip_prefix(b"path=") {
                self.name = Some(name.to_vec());
            } else if let Some(len) = line.strip_prefix(b"size=") {
                self.len = std::str::from_utf8(len).ok().and_then(|len| len.parse().ok());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::bytes::Memory;
    use super::*;

    fn block(name: &[u8], kind: u8, size: &[u8]) -> Vec<u8> {
        let mut block = vec![0; 512];
        block[..name.len()].copy_from_slice(name);
        block[124..124 + size.len()].copy_from_slice(size);
        block[156] = kind;
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block
    }

    fn padded(data: &[u8]) -> Vec<u8> {
        let mut data = data.to_vec();
        data.resize(data.len().next_multiple_of(512), 0);
        data
    }

    #[test]
    fn names_and_sizes_are_read_in_every_form() {
        let pax = b"13 path=long\n13 size=1025\n";
        let tar = [
            block(b"plain", b'0', b"00000000003\0"),
            padded(b"abc"),
            block(b"base256", 0, &[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1]),
            padded(&[1; 513]),
            block(b"././@LongLink", b'L', b"200\0"),
            padded(&[&[b'n'; 127][..], b"\0"].concat()),
            block(b"n", b'0', b"1"),
            padded(b"x"),
            block(b"pax", b'x', b"32"),
            padded(pax),
            block(b"short", b'0', b"0"),
            padded(&[2; 1025]),
            block(b"link", b'2', b"77777"),
            block(b"last", b'0', b"77777"),
            padded(b"cut"),
        ]
        .concat();
        let (members, end) = members(&Memory(&tar)).unwrap();
        let found: Vec<(&str, u64)> = members.iter().map(|member| (member.name.as_str(), member.len)).collect();
        let long = "n".repeat(127);
        assert_eq!(found, [("plain", 3), ("base256", 513), (&long, 1), ("long", 1025), ("last", 512)]);
        assert_eq!(end, tar.len() as u64);
        let start = usize::try_from(members[3].start).unwrap();
        assert_eq!(&tar[start..start + 2], [2, 2]);
    }

    #[test]
    fn a_block_that_is_no_header_ends_the_list() {
        let tar = [block(b"a", b'0', b"1"), padded(b"x"), vec![0; 512], block(b"b", b'0', b"1"), padded(b"y")].concat();
        let (found, end) = members(&Memory(&tar)).unwrap();
        assert_eq!((found.len(), end), (1, 1024));
        assert!(!is_header(&[0; 512]) && !is_header(&[b'a'; 512]) && !is_header(b"short"));
    }
}
