//! The directory of a zip archive, read so that no second reader can see another archive in the same bytes.
//!
//! The central directory must end where its end record begins, count what it holds, and agree with every local header; names,
//! methods and flags that readers treat differently are findings. It goes on after a finding, so that an audit sees what any
//! reader could see; a load refuses for the first. It inflates nothing itself (`members` does) and trusts no length that it has
//! not compared with the file's.

use std::collections::HashMap;
use std::io;

use crate::bytes::{Bytes, read_vec};
use crate::finding::Finding;

/// Entries that are read at most.
pub(crate) const MAX_ENTRIES: u64 = 1 << 20;
/// The longest comment of an archive, in bytes.
const MAX_COMMENT: u64 = 65_535;
const EOCD_BYTES: u64 = 22;
const LOCATOR_BYTES: u64 = 20;
const EOCD64_BYTES: u64 = 56;
const CENTRAL_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;
/// A data descriptor with 64-bit sizes: the most that lies between a payload and the next header.
const MOST_GAP: u64 = 24;

const EOCD: &[u8] = b"PK\x05\x06";
const EOCD64: &[u8] = b"PK\x06\x06";
const LOCATOR: &[u8] = b"PK\x06\x07";
const CENTRAL: &[u8] = b"PK\x01\x02";
const LOCAL: &[u8] = b"PK\x03\x04";

/// How a member is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// As it is.
    Stored,
    /// Deflated.
    Deflated,
}

/// One member of an archive.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// How it is packed; `None` for a method that is not read.
    pub method: Option<Method>,
    /// CRC-32 of its bytes; 0 also where none was computed.
    pub crc: u32,
    /// Bytes in the archive.
    pub packed: u64,
    /// Bytes once unpacked.
    pub len: u64,
    /// Offset in bytes of the local header.
    pub header: u64,
    /// Offset in bytes of the first byte of the member; `None` where the local header does not lead there.
    pub data: Option<u64>,
    flags: u16,
    raw_method: u16,
    attributes: u32,
}

/// Where the bytes of a member lie and what becomes of them: those of two members with the same are the same.
pub(crate) type Placed = (Option<u64>, u64, u64, bool);

impl Entry {
    pub(crate) fn placed(&self) -> Placed {
        (self.data, self.packed, self.len, self.method == Some(Method::Deflated))
    }
}

/// An archive's members, and what is odd about it.
#[derive(Debug, Default)]
pub struct Directory {
    /// The members, in the directory's order.
    pub entries: Vec<Entry>,
    /// What is odd.
    pub findings: Vec<Finding>,
    /// Ranges of the file that belong to no member: where a second file could hide.
    pub strays: Vec<(u64, u64)>,
}

/// Reads the directory of the archive that `bytes` are.
///
/// # Errors
/// When the bytes cannot be read; whatever is wrong with them is a finding.
pub fn read(bytes: &dyn Bytes) -> io::Result<Directory> {
    let mut directory = Directory::default();
    if let Some(end) = find_end(bytes, &mut directory)? {
        read_central(bytes, &end, &mut directory)?;
        check_locals(bytes, &mut directory)?;
        check_names(&mut directory);
        check_layout(&end, &mut directory);
    }
    Ok(directory)
}

/// What the end records say.
struct End {
    count: u64,
    offset: u64,
    size: u64,
    /// Where the directory must end.
    stop: u64,
}

// ---- the end record

fn find_end(bytes: &dyn Bytes, out: &mut Directory) -> io::Result<Option<End>> {
    let tail_len = bytes.len().min(EOCD_BYTES + MAX_COMMENT);
    let tail_at = bytes.len() - tail_len;
    let tail = read_vec(bytes, tail_at, tail_len)?;
    let Some(at) = choose_end(&tail, tail_at, out) else { return Ok(None) };
    let record = tail.get(at..).unwrap_or_default();
    if le16(&record[20..]) > 0 {
        out.findings.push(Finding::notice("zip-comment", "the archive has a comment"));
        out.strays.push((tail_at + at as u64 + EOCD_BYTES, bytes.len()));
    }
    if le16(&record[4..]) != 0 || le16(&record[6..]) != 0 {
        out.findings.push(Finding::malformed("eocd-mismatch", "an archive cut over several disks"));
    }
    let short = End {
        count: le16(&record[10..]).into(),
        size: le32(&record[12..]).into(),
        offset: le32(&record[16..]).into(),
        stop: tail_at + at as u64,
    };
    with_zip64(bytes, short, out).map(Some)
}

/// Archives inside each other that are looked into at one level: each is looked into for more.
const MOST_STRAYS: usize = 4;

/// Which end record of the file's tail is looked at further. One whole record, whose comment ends where the file ends, is as it
/// should be.
fn choose_end(tail: &[u8], tail_at: u64, out: &mut Directory) -> Option<usize> {
    let len = tail.len() as u64;
    let found: Vec<usize> = positions(tail, EOCD);
    let whole: Vec<usize> = found.iter().copied().filter(|at| *at as u64 + EOCD_BYTES <= len).collect();
    let ends = |at: &&usize| {
        let comment = tail.get(**at + 20..).map_or(0, le16);
        **at as u64 + EOCD_BYTES + u64::from(comment) == len
    };
    let fitting: Vec<usize> = whole.iter().filter(ends).copied().collect();
    let end_of = |at: usize| tail_at + at as u64 + EOCD_BYTES;
    match (fitting.as_slice(), whole.last()) {
        ([at], _) => {
            // PyTorch takes the last one, also where it says that more follows.
            if let Some(other) = found.iter().find(|other| *other > at) {
                let what = "an end record stands in the archive's comment: readers see different archives in this file";
                out.findings.push(Finding::suspicious("ambiguous-eocd", what));
                out.strays.push((end_of(*at), tail_at + len));
                out.strays.push((tail_at + *other as u64, tail_at + len));
            }
            return Some(*at);
        }
        ([first, ..], _) => {
            let what = "several end records fit: readers see different archives in this file";
            out.findings.push(Finding::suspicious("ambiguous-eocd", what));
            out.strays.extend(fitting.iter().take(MOST_STRAYS).map(|at| (end_of(*at), tail_at + len)));
            return Some(*first);
        }
        ([], Some(&at)) => {
            let what = format!("{} bytes follow the archive's end: something was appended", tail_at + len - end_of(at));
            out.findings.push(Finding::suspicious("trailing-data", what));
            out.strays.push((end_of(at), tail_at + len));
            return Some(at);
        }
        ([], None) => {}
    }
    let what = "no end of central directory: the archive is truncated, an incomplete download or copy";
    out.findings.push(Finding::malformed("no-eocd", what));
    None
}

/// The end record, or the longer one that stands before it; both must say the same.
fn with_zip64(bytes: &dyn Bytes, short: End, out: &mut Directory) -> io::Result<End> {
    let Some(locator_at) = short.stop.checked_sub(LOCATOR_BYTES) else { return Ok(short) };
    let locator = read_vec(bytes, locator_at, LOCATOR_BYTES)?;
    if !locator.starts_with(LOCATOR) {
        return Ok(short);
    }
    let at = le64(&locator[8..]);
    let fits = at.checked_add(EOCD64_BYTES).is_some_and(|end| end == locator_at);
    let record = if fits { read_vec(bytes, at, EOCD64_BYTES)? } else { Vec::new() };
    if !record.starts_with(EOCD64) || le64(&record[4..]) != EOCD64_BYTES - 12 {
        out.findings
            .push(Finding::malformed("eocd-mismatch", "the zip64 locator does not lead to the zip64 end record"));
        return Ok(short);
    }
    let long = End { count: le64(&record[32..]), size: le64(&record[40..]), offset: le64(&record[48..]), stop: at };
    let agree = |short: u64, sentinel: u64, long: u64| short == sentinel || short == long;
    let same = agree(short.count, 0xffff, long.count)
        && agree(short.size, 0xffff_ffff, long.size)
        && agree(short.offset, 0xffff_ffff, long.offset)
        && le64(&record[24..]) == long.count;
    if !same {
        out.findings.push(Finding::malformed("eocd-mismatch", "the two end records differ"));
    }
    Ok(if same || short.count != long.count && long.count <= MAX_ENTRIES { long } else { End { stop: at, ..short } })
}

// ---- the central directory

fn read_central(bytes: &dyn Bytes, end: &End, out: &mut Directory) -> io::Result<()> {
    let stated = end.offset.checked_add(end.size).filter(|stop| *stop == end.stop);
    let start = match (stated, end.stop.checked_sub(end.size)) {
        (Some(_), _) => end.offset,
        // Before an archive with something in front all offsets are too small by the same number.
        (None, Some(start)) => {
            out.findings.push(Finding::malformed(
                "eocd-mismatch",
                format!(
                    "the directory should end at byte {}, its end record begins at {}",
                    end.offset.saturating_add(end.size),
                    end.stop
                ),
            ));
            start
        }
        (None, None) => {
            out.findings.push(Finding::malformed("eocd-mismatch", "the directory would be longer than the file"));
            return Ok(());
        }
    };
    if end.count > MAX_ENTRIES || end.size > MAX_ENTRIES * 256 {
        let rule = if end.count > end.size / CENTRAL_BYTES as u64 { "eocd-mismatch" } else { "entry-limit" };
        out.findings
            .push(Finding::malformed(rule, format!("{} entries in {} bytes of directory", end.count, end.size)));
        return Ok(());
    }
    let shift = if stated.is_some() { 0 } else { shift(bytes, start, end)? };
    let central = read_vec(bytes, start, end.size)?;
    let mut rest = central.as_slice();
    while let Some((entry, after)) = entry(rest, shift, &mut out.findings) {
        out.entries.push(entry);
        rest = after;
    }
    if !rest.is_empty() {
        out.findings
            .push(Finding::malformed("eocd-mismatch", format!("{} bytes of the directory are no entry", rest.len())));
    }
    let found = out.entries.len() as u64;
    if found != end.count {
        let what = format!("the end record counts {} entries, the directory has {found}", end.count);
        out.findings.push(Finding::malformed("eocd-mismatch", what));
    }
    Ok(())
}

/// By how much offsets are too small, where something stands in front of the archive.
fn shift(bytes: &dyn Bytes, start: u64, end: &End) -> io::Result<u64> {
    let is_central = bytes.len() >= start + 4 && read_vec(bytes, start, 4)? == CENTRAL;
    Ok(if is_central { start.saturating_sub(end.offset) } else { 0 })
}

fn entry<'a>(rest: &'a [u8], shift: u64, findings: &mut Vec<Finding>) -> Option<(Entry, &'a [u8])> {
    let fixed = rest.get(..CENTRAL_BYTES).filter(|fixed| fixed.starts_with(CENTRAL))?;
    let lengths = [28, 30, 32].map(|at| usize::from(le16(&fixed[at..])));
    let [name_len, extra_len, comment_len] = lengths;
    let name = rest.get(CENTRAL_BYTES..CENTRAL_BYTES + name_len)?;
    let extra = rest.get(CENTRAL_BYTES + name_len..CENTRAL_BYTES + name_len + extra_len)?;
    let after = rest.get(CENTRAL_BYTES + name_len + extra_len + comment_len..)?;
    let name = match std::str::from_utf8(name) {
        Ok(name) => name.to_owned(),
        Err(_) => {
            let name = String::from_utf8_lossy(name).into_owned();
            findings.push(Finding::malformed("entry-name", "a name that is not UTF-8").within(&name));
            name
        }
    };
    let raw_method = le16(&fixed[10..]);
    let mut entry = Entry {
        method: match raw_method {
            0 => Some(Method::Stored),
            8 => Some(Method::Deflated),
            _ => None,
        },
        crc: le32(&fixed[16..]),
        packed: le32(&fixed[20..]).into(),
        len: le32(&fixed[24..]).into(),
        header: le32(&fixed[42..]).into(),
        data: None,
        flags: le16(&fixed[8..]),
        raw_method,
        attributes: le32(&fixed[38..]),
        name,
    };
    if !widen([&mut entry.len, &mut entry.packed, &mut entry.header], extra) {
        findings.push(Finding::malformed("header-mismatch", "its zip64 sizes are missing").within(&entry.name));
    }
    entry.header = entry.header.saturating_add(shift);
    Some((entry, after))
}

/// Takes the numbers that do not fit 32 bits from the zip64 field.
fn widen<const N: usize>(numbers: [&mut u64; N], extra: &[u8]) -> bool {
    let mut field = zip64_field(extra).unwrap_or_default();
    for number in numbers {
        if *number == 0xffff_ffff {
            let Some((wide, rest)) = field.split_first_chunk::<8>() else { return false };
            *number = u64::from_le_bytes(*wide);
            field = rest;
        }
    }
    true
}

fn zip64_field(mut extra: &[u8]) -> Option<&[u8]> {
    while let Some((head, rest)) = extra.split_first_chunk::<4>() {
        let field = rest.get(..usize::from(le16(&head[2..])))?;
        if le16(head) == 1 {
            return Some(field);
        }
        extra = rest.get(field.len()..)?;
    }
    None
}

// ---- the local headers

fn check_locals(bytes: &dyn Bytes, out: &mut Directory) -> io::Result<()> {
    let mut beyond = Vec::new();
    for entry in &mut out.entries {
        let name_len = entry.name.len();
        let len = (LOCAL_BYTES + name_len) as u64;
        if entry.header.checked_add(len).is_none_or(|end| end > bytes.len()) {
            beyond.push(
                Finding::malformed("record-past-eof", "its header lies past the end of the file").within(&entry.name),
            );
            continue;
        }
        let local = read_vec(bytes, entry.header, len)?;
        if let Err(what) = check_local(bytes, entry, &local)? {
            beyond.push(Finding::malformed("header-mismatch", what).within(&entry.name));
        }
        let end = entry.data.and_then(|data| data.checked_add(entry.packed));
        if entry.data.is_some() && end.is_none_or(|end| end > bytes.len()) {
            entry.data = None;
            beyond.push(Finding::malformed("record-past-eof", "it ends past the end of the file").within(&entry.name));
        }
    }
    out.findings.append(&mut beyond);
    Ok(())
}

/// Compares a local header with the directory. Sets where the data begin, where that can be said.
fn check_local(bytes: &dyn Bytes, entry: &mut Entry, local: &[u8]) -> io::Result<Result<(), String>> {
    if !local.starts_with(LOCAL) {
        return Ok(Err("the directory leads to no local header".into()));
    }
    let (name_len, extra_len) = (usize::from(le16(&local[26..])), le16(&local[28..]));
    let data = entry.header + (LOCAL_BYTES + name_len) as u64 + u64::from(extra_len);
    entry.data = Some(data);
    if local.get(LOCAL_BYTES..) != Some(entry.name.as_bytes()) || name_len != entry.name.len() {
        return Ok(Err("its local header has another name".into()));
    }
    if le16(&local[8..]) != entry.raw_method {
        return Ok(Err("its local header states another method".into()));
    }
    if le16(&local[6..]) != entry.flags {
        return Ok(Err("its local header has other flags".into()));
    }
    let mut sizes = [u64::from(le32(&local[18..])), u64::from(le32(&local[22..]))];
    if sizes.contains(&0xffff_ffff) {
        let extra_at = entry.header + (LOCAL_BYTES + name_len) as u64;
        let fits = data <= bytes.len();
        let extra = if fits { read_vec(bytes, extra_at, extra_len.into())? } else { Vec::new() };
        let [packed, len] = &mut sizes;
        widen([len, packed], &extra);
    }
    let (crc, later) = (le32(&local[14..]), entry.flags & 8 != 0);
    let agree = |local: u64, central: u64| local == central || (later && local == 0);
    let [packed, len] = sizes;
    Ok(match agree(packed, entry.packed) && agree(len, entry.len) && agree(crc.into(), entry.crc.into()) {
        true => Ok(()),
        false => {
            Err(format!("its local header says {packed} bytes, the directory {}, or another checksum", entry.packed))
        }
    })
}

// ---- names, flags, order

fn check_names(out: &mut Directory) {
    let mut seen = HashMap::new();
    let mut found = Vec::new();
    for entry in &out.entries {
        let mut add = |finding: Finding| found.push(finding.within(&entry.name));
        if let Some(what) = bad_name(&entry.name) {
            add(Finding::malformed("entry-name", what));
        }
        // Readers that look names up without regard to case, or stop at a NUL, would take the other one.
        let key = entry.name.split('\0').next().unwrap_or_default().to_ascii_lowercase();
        match seen.insert(key, entry.len > 0) {
            // A reader that takes the empty one fails: no two see different data.
            Some(had_bytes) if !had_bytes || entry.len == 0 => {
                add(Finding::notice("duplicate-entry", "the name stands twice in the archive, once without a byte"));
            }
            Some(_) => add(Finding::malformed("duplicate-entry", "the name stands twice in the archive")),
            None => {}
        }
        match entry.flags {
            flags if flags & 1 != 0 => add(Finding::suspicious("encrypted-flag", "it says that it is encrypted")),
            flags if flags & 0x2060 != 0 => add(Finding::suspicious("zip-flags", format!("odd flags {flags:#06x}"))),
            _ => {}
        }
        if entry.method.is_none() {
            add(Finding::malformed(
                "zip-method",
                format!("packed by method {}; only 0 and 8 are read", entry.raw_method),
            ));
        }
        if entry.method == Some(Method::Stored) && entry.packed != entry.len {
            add(Finding::malformed("header-mismatch", format!("stored, yet {} bytes are {}", entry.packed, entry.len)));
        }
        if (entry.attributes >> 16) & 0o170_000 == 0o120_000 {
            add(Finding::suspicious("entry-type", "it is a symbolic link"));
        }
    }
    out.findings.append(&mut found);
}

fn bad_name(name: &str) -> Option<&'static str> {
    match name {
        "" => Some("an empty name"),
        _ if name.contains('\0') => Some("a name with a NUL byte, where some readers end it"),
        _ if name.starts_with('/') || name.contains('\\') || name.contains(':') && name.find(':') == Some(1) => {
            Some("an absolute name, or one with backslashes")
        }
        _ if name.split('/').any(|part| part == "..") => Some("a name that leads out of its folder"),
        _ => None,
    }
}

/// Members may not share bytes, and nothing may lie before, between or after them.
fn check_layout(end: &End, out: &mut Directory) {
    let mut places: Vec<(u64, Option<u64>, usize)> = Vec::with_capacity(out.entries.len());
    for (at, entry) in out.entries.iter().enumerate() {
        places.push((entry.header, entry.data.map(|data| data.saturating_add(entry.packed)), at));
    }
    places.sort_unstable();
    let mut found = Vec::new();
    let mut done = 0;
    for (start, stop, at) in places {
        let name = out.entries.get(at).map_or("", |entry| entry.name.as_str());
        if start < done {
            found.push(Finding::malformed("entry-overlap", "it shares bytes with another member").within(name));
        } else if done == 0 && start > 0 {
            found.push(Finding::suspicious("prefix-data", format!("{start} bytes stand before the archive")));
            out.strays.push((0, start));
        } else if start > done.saturating_add(MOST_GAP) {
            found.push(
                Finding::notice("gap", format!("{} bytes before it belong to no member", start - done)).within(name),
            );
            out.strays.push((done, start));
        }
        done = done.max(stop.unwrap_or(start + 1));
    }
    if done > end.stop {
        found.push(Finding::malformed("entry-overlap", "a member reaches into the directory"));
    }
    out.findings.append(&mut found);
}

// ---- numbers

fn positions(bytes: &[u8], magic: &[u8]) -> Vec<usize> {
    bytes.windows(magic.len()).enumerate().filter(|(_, window)| *window == magic).map(|(at, _)| at).collect()
}

fn le16(bytes: &[u8]) -> u16 {
    bytes.first_chunk().map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

fn le32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn le64(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
