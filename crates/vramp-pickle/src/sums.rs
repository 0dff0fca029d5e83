//! The CRCs of all members of an archive, compared with their bytes: what opening leaves out where there are many bytes.
//!
//! It reads every byte once, a little at a time, and keeps none.

use std::io;

use crate::archive::Archive;
use crate::bytes::{Bytes, read_vec};
use crate::finding::Finding;
use crate::{BEGINNING, Kind, members, recognise};

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sums {
    /// Members whose bytes have the CRC-32 that is stated.
    pub same: u64,
    /// Members without one, or that would inflate absurdly: damage to them cannot be noticed.
    pub absent: u64,
}

/// Compares the sums of an archive that begins at byte `start` of its file; a file that is none has none. `go_on` is asked between
/// members, and its error ends it.
///
/// # Errors
/// That of `go_on`, and, as the inner result, that of a read.
pub fn check<E>(
    bytes: &dyn Bytes,
    start: u64,
    sums: &mut Sums,
    go_on: &dyn Fn() -> Result<(), E>,
) -> Result<io::Result<Vec<Finding>>, E> {
    let mut stopped = None;
    let mut go_on = || match go_on() {
        Ok(()) => true,
        Err(error) => {
            stopped = Some(error);
            false
        }
    };
    let damaged = check_while(bytes, start, sums, &mut go_on);
    stopped.map_or(Ok(damaged), Err)
}

fn check_while(
    bytes: &dyn Bytes,
    start: u64,
    sums: &mut Sums,
    go_on: &mut dyn FnMut() -> bool,
) -> io::Result<Vec<Finding>> {
    let beginning = read_vec(bytes, 0, bytes.len().min(BEGINNING))?;
    if recognise(&beginning, bytes.len()) != Some(Kind::Zip) {
        return Ok(Vec::new());
    }
    let archive = Archive::open(bytes, start)?;
    let mut damaged = archive.directory.findings.clone();
    for entry in archive.directory.entries.iter().filter(|entry| entry.len > 0) {
        if !go_on() {
            break;
        }
        match archive.wrong_crc(entry)? {
            Some(finding) if damaged.contains(&finding) => {} // found when it was opened
            Some(finding) => damaged.push(finding),
            None if entry.crc == 0 || members::is_bomb(entry) => sums.absent += 1,
            None => sums.same += 1,
        }
    }
    Ok(damaged)
}
