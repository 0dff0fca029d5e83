//! Pickles in bytes, wherever they stand: one after the other, behind other data, in what is something else to other programs.
//!
//! Part of an audit. Work is bounded by what is looked at: where a limit ends the search, that is a finding.

use std::io;

use super::data::Audit;
use crate::bytes::{Bytes, Section, read_vec};
use crate::finding::Finding;
use crate::legacy;
use crate::pickle::{Danger, globals};
use crate::pickled::Pickled;
use crate::{hides_archive, tar};

/// Pickles back to back that are run at most.
pub(crate) const MOST_PICKLES: usize = 100_000;
/// Bytes that a search reads at a time, and the longest line that it takes for a name.
const CHUNK_BYTES: u64 = 1 << 20;
const LONGEST_LINE: usize = 256;
/// Bytes of pickles that a search runs beyond twice those that it looks at.
const SPARE_BYTES: u64 = 64 << 20;

/// Bytes of a file that are looked at as one thing.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) bytes: &'a dyn Bytes,
    pub(crate) member: Option<&'a str>,
    /// Whether honest writers put several pickles there, and data between them.
    pub(crate) several: bool,
}

impl<'a> Place<'a> {
    pub(crate) fn of(bytes: &'a dyn Bytes, member: Option<&'a str>) -> Place<'a> {
        Place { bytes, member, several: false }
    }

    fn suspicious(&self, rule: &'static str, what: impl Into<String>) -> Finding {
        let finding = Finding::suspicious(rule, what);
        self.member.map_or(finding.clone(), |member| finding.within(member))
    }
}

impl Audit {
    /// Pickles back to back from byte `at` on, and what stands behind them.
    pub(crate) fn pickles(&mut self, place: Place, mut at: u64) -> io::Result<()> {
        let mut searched = false;
        for number in 0..MOST_PICKLES {
            let pickled = legacy::run_at(place.bytes, at, place.member)?;
            let left = place.bytes.len() - at;
            if at > 0 && !pickled.tells() && !pickled.ran.stopped {
                return self.search(place, at);
            }
            if at == 0 || pickled.tells() {
                self.take(&pickled);
            }
            if let Some(end) = pickled.other_end {
                let end = at + end as u64;
                let other = legacy::run_at(place.bytes, end, place.member)?;
                if other.tells() {
                    self.take(&other);
                }
                if !std::mem::replace(&mut searched, true) {
                    self.search(place, end)?;
                }
            }
            let len = pickled.ran.end as u64;
            at += len;
            if !pickled.ran.stopped {
                return self.search(place, at);
            }
            if len == left {
                return Ok(());
            }
            if number == 0 && !place.several {
                self.add(place.suspicious("trailing-pickle", format!("{} bytes follow the first pickle", left - len)));
            }
        }
        let what = format!("more than {MOST_PICKLES} pickles back to back: the rest was not looked at");
        self.add(place.suspicious("resource-limit", what));
        Ok(())
    }

    /// Bytes that nobody has asked for: pickles in them are findings.
    pub(crate) fn region(&mut self, place: Place) -> io::Result<()> {
        if !legacy::run_at(place.bytes, 0, place.member)?.is_pickle() {
            return self.search(place, 0);
        }
        if !place.several {
            self.add(place.suspicious("extra-pickle", "a pickle outside all members"));
        }
        self.pickles(place, 0)
    }

    /// What runs as a pickle, though it is something else as well.
    pub(crate) fn polyglot(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
        if legacy::run_at(bytes, 0, None)?.names_something() {
            let what = "programs that unpickle see a pickle in this file, and others something else";
            self.add(Finding::suspicious("polyglot", what));
            self.pickles(Place { several: true, ..Place::of(bytes, None) }, 0)?;
        }
        Ok(())
    }

    /// Looks for pickles from byte `from` on: for marks of their beginning, and for names that run code.
    pub(crate) fn search(&mut self, place: Place, from: u64) -> io::Result<()> {
        let len = place.bytes.len();
        let mut spare = len.saturating_sub(from).saturating_mul(2).saturating_add(SPARE_BYTES);
        let mut at = from;
        while at < len {
            let chunk = read_vec(place.bytes, at, (len - at).min(CHUNK_BYTES))?;
            let is_last = at + chunk.len() as u64 == len;
            // What stands across the end of the chunk is found in the next one.
            let until = if is_last { chunk.len() } else { chunk.len() - 2 * LONGEST_LINE };
            let mut next = 0;
            while let Some(found) = (next..until).find(|start| chunk.get(*start..).is_some_and(begins_pickle)) {
                let pickled = legacy::run_at(place.bytes, at + found as u64, place.member)?;
                let end = pickled.ran.end.max(pickled.read) as u64;
                let Some(rest) = spare.checked_sub(end) else {
                    let what = "too many beginnings of pickles: not all of them were looked at";
                    self.add(place.suspicious("resource-limit", what));
                    return Ok(());
                };
                spare = rest;
                next = found + 1;
                if pickled.names_something() {
                    self.found(place, &pickled);
                    next = found + pickled.ran.end.max(1);
                }
            }
            at += until.max(next) as u64;
        }
        Ok(())
    }

    fn found(&mut self, place: Place, pickled: &Pickled) {
        self.take(pickled);
        if !place.several {
            self.add(place.suspicious("extra-pickle", "a pickle behind other data"));
        }
    }

    pub(crate) fn tar(&mut self, bytes: &dyn Bytes) -> io::Result<()> {
        self.add(Finding::notice("legacy-tar", "a tar archive, which PyTorch wrote before 0.1.10; it is not loaded"));
        let listing = tar::members(bytes)?;
        for what in listing.odd {
            self.add(Finding::suspicious("tar-member", what));
        }
        for member in listing.members {
            let part = Section { whole: bytes, start: member.start, len: member.len };
            match hides_archive(&part)? {
                true => self.zip(&part, 1)?,
                false => self.region(Place { several: true, ..Place::of(&part, Some(&member.name)) })?,
            }
        }
        let rest = Section { whole: bytes, start: listing.end, len: bytes.len() - listing.end };
        if !is_zero(&rest)? {
            self.add(Finding::suspicious("tar-member", "bytes that belong to no member follow the last one"));
        }
        self.region(Place::of(&rest, None))
    }
}

fn is_zero(bytes: &dyn Bytes) -> io::Result<bool> {
    let mut at = 0;
    while at < bytes.len() {
        let chunk = read_vec(bytes, at, (bytes.len() - at).min(CHUNK_BYTES))?;
        if chunk.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += chunk.len() as u64;
    }
    Ok(true)
}

/// Whether a pickle may begin there: the mark of the newer protocols, or a name of the older ones that is known to run code.
fn begins_pickle(bytes: &[u8]) -> bool {
    match bytes {
        [0x80, 0..=5, ..] => true,
        [b'c' | b'i', rest @ ..] => {
            let mut lines =
                rest.get(..rest.len().min(2 * LONGEST_LINE)).unwrap_or_default().split(|byte| *byte == b'\n');
            let mut line = || std::str::from_utf8(lines.next()?).ok().filter(|line| line.len() < LONGEST_LINE);
            let (Some(module), Some(name)) = (line(), line()) else { return false };
            lines.next().is_some() && globals::danger(module, name) == Danger::Dangerous
        }
        _ => false,
    }
}
