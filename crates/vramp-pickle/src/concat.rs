//! Archives one after the other, as PyTorch's distributed checkpoint writes them to a `.distcp` file: where each begins and ends.
//!
//! It finds places only; what the archives hold is for others. A file that is one archive is none of these.

use std::io;

use crate::bytes::{Bytes, read_vec};

const CHUNK_BYTES: u64 = 1 << 20;
const EOCD_BYTES: u64 = 22;
/// The end record of zip64 and its locator, which stand before the other.
const ZIP64_BYTES: u64 = 76;
const EOCD: &[u8] = b"PK\x05\x06";
/// Marks of an end record that are none of one: data that hold more are not worth the search.
const MOST_FALSE: usize = 1 << 12;

/// Start and end of each archive, where there are several and they are all of the file.
pub(crate) fn archives(bytes: &dyn Bytes) -> io::Result<Option<Vec<(u64, u64)>>> {
    let len = bytes.len();
    let Some(last) = len.checked_sub(EOCD_BYTES) else { return Ok(None) };
    if ends(bytes, 0, last)? || !begins(bytes, 0)? {
        return Ok(None);
    }
    let (mut found, mut start, mut at, mut wrong) = (Vec::new(), 0, 0, 0);
    while at <= last {
        let chunk = read_vec(bytes, at, (len - at).min(CHUNK_BYTES))?;
        for mark in (0..chunk.len()).filter(|mark| chunk.get(*mark..).is_some_and(|rest| rest.starts_with(EOCD))) {
            let place = at + mark as u64;
            if place < start || place > last {
                continue;
            }
            if ends(bytes, start, place)? && (place == last || begins(bytes, place + EOCD_BYTES)?) {
                found.push((start, place + EOCD_BYTES));
                start = place + EOCD_BYTES;
            } else {
                wrong += 1;
            }
            if wrong > MOST_FALSE {
                return Ok(None);
            }
        }
        // A mark across the end of the chunk is found in the next one.
        at += (chunk.len() as u64).saturating_sub(EOCD.len() as u64 - 1).max(1);
    }
    Ok(Some(found).filter(|_| start == len))
}

fn begins(bytes: &dyn Bytes, at: u64) -> io::Result<bool> {
    Ok(bytes.len() - at >= 4 && read_vec(bytes, at, 4)? == b"PK\x03\x04")
}

/// Whether the end record there is that of an archive which begins at `start`: its directory ends where its end records begin.
fn ends(bytes: &dyn Bytes, start: u64, at: u64) -> io::Result<bool> {
    let record = read_vec(bytes, at, EOCD_BYTES)?;
    let number = |bytes: &[u8], from: usize, len: usize| {
        let field = bytes.get(from..from + len).unwrap_or_default();
        field.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    if !record.starts_with(EOCD) || number(&record, 20, 2) != 0 {
        return Ok(false);
    }
    let (mut size, mut offset) = (number(&record, 12, 4), number(&record, 16, 4));
    let mut stop = at - start;
    if let Some(before) = stop.checked_sub(ZIP64_BYTES) {
        let wide = read_vec(bytes, start + before, ZIP64_BYTES)?;
        if wide.starts_with(b"PK\x06\x06") {
            (size, offset, stop) = (number(&wide, 40, 8), number(&wide, 48, 8), before);
        }
    }
    Ok(size.checked_add(offset) == Some(stop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Memory;
    use crate::testing::archive;

    #[test]
    fn archives_in_a_row_are_told_from_one_and_from_other_data() {
        let (a, b) = (archive(b"\x80\x02}.", &[("0", EOCD)]), archive(b"\x80\x02N.", &[]));
        let (first, all) = (a.len() as u64, (a.len() + b.len()) as u64);
        let places = |bytes: &[u8]| archives(&Memory(bytes)).unwrap();
        assert_eq!(places(&[&a[..], &b].concat()), Some(vec![(0, first), (first, all)]));
        for other in [a.clone(), [&a[..], b"x", &b].concat(), [&a[..], &b, b"x"].concat(), a[1..].to_vec(), vec![]] {
            assert_eq!(places(&other), None);
        }
    }
}
