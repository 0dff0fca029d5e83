//! A safetensors header: bytes in, tensors out, and everything that the format forbids refused.
//!
//! The format: 8 bytes that hold the header's length (little-endian), the header (one JSON object, UTF-8, `{` first, padded
//! with spaces), the tensors' bytes without gap or overlap. This file never opens a file, never reads a tensor's bytes and
//! never allocates on the word of a number that it has not compared with the file's length. `json` does the walking,
//! `lookalike` says what a file is that is not safetensors at all.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::MapAccess;

use vramp_text::lookalike;

use super::json::{self, Field, Notes, Object, Scalar};
use crate::dtype::{StoredDtype, dims};
use crate::fault::{Fault, Listed, quoted};

/// The longest header that is read unless told otherwise, in bytes: the limit that the format's own library has.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes that hold the header's length.
pub const LENGTH_BYTES: u64 = 8;

/// What the header of one file says.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Header {
    /// The tensors, by the place of their bytes.
    pub tensors: Vec<Stored>,
    /// The free text of the file.
    pub metadata: BTreeMap<String, String>,
    /// What was ignored.
    pub warnings: Vec<String>,
}

/// The name in a header that is no tensor's.
pub(crate) const RESERVED: &str = "__metadata__";

/// One tensor as a file stores it. Its bytes lie in the file: that has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stored {
    /// Name.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: StoredDtype,
    /// Elements along each dimension, outermost first.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Why the length of a header was not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejected {
    /// The file is damaged, or no safetensors file.
    Fault(Fault),
    /// The header fits the file but is longer than the limit.
    TooLong {
        /// Length of the header in bytes, as the file states it.
        found: u64,
    },
}

/// The length of the header in bytes, given the first bytes of the file (8 at least, some hundreds for a better diagnosis),
/// the file's length and the limit.
///
/// # Errors
/// When the file is too short for such a header or for any, or the header is above the limit.
pub fn header_len(beginning: &[u8], file_len: u64, limit: u64) -> Result<u64, Rejected> {
    let Some(length) = beginning.first_chunk::<8>().filter(|_| file_len >= LENGTH_BYTES) else {
        return Err(Rejected::Fault(too_short(beginning, file_len)));
    };
    let header = u64::from_le_bytes(*length);
    let fits = header != 0 && header <= file_len - LENGTH_BYTES;
    if fits && header <= limit {
        return Ok(header);
    }
    // Asked for a length above the limit too: the magic of some formats is a number that a huge file could hold.
    Err(match (lookalike::recognise(beginning), header) {
        (Some(foreign), _) => Rejected::Fault(foreign.into()),
        (None, found) if fits => Rejected::TooLong { found },
        (None, 0) => Rejected::Fault(Fault::HeaderStart { found: "nothing: its stated length is 0".into() }),
        (None, _) => {
            let above = (header > limit).then_some(limit);
            Rejected::Fault(Fault::HeaderPastEnd { header, found: file_len, above })
        }
    })
}

fn too_short(beginning: &[u8], file_len: u64) -> Fault {
    match file_len {
        0 => Fault::Empty,
        _ => lookalike::recognise(beginning).map_or(Fault::TooShort { found: file_len }, Fault::from),
    }
}

/// Reads a header: the `header` bytes that follow the length field of a file of `file_len` bytes.
///
/// # Errors
/// The first kind of problem found, with all problems of that kind.
pub fn parse(header: &[u8], file_len: u64) -> Result<Header, Fault> {
    check_frame(header)?;
    let mut draft = Draft::default();
    json::read(header, "header", &mut draft)?;
    draft.problems.into_fault(Fault::Member)?;
    draft.metadata.problems.into_fault(Fault::Metadata)?;
    check_sizes(&draft.tensors)?;
    let data_start = LENGTH_BYTES + header.len() as u64;
    draft.tensors.sort_by_key(|tensor| (tensor.begin, tensor.end));
    check_coverage(&draft.tensors, data_start, file_len)?;
    let warnings = unknown_members(&draft.unknown);
    let tensors = draft.tensors.into_iter().map(|tensor| tensor.stored(data_start)).collect();
    Ok(Header { tensors, metadata: draft.metadata.entries, warnings })
}

/// The beginning and the end of the header, which JSON alone would be too lenient about.
fn check_frame(header: &[u8]) -> Result<(), Fault> {
    if header.first() != Some(&b'{') {
        return Err(Fault::HeaderStart { found: beginning(header) });
    }
    let padding = header.iter().rev().take_while(|&&byte| byte == 0 || byte == b' ');
    match padding.filter(|&&byte| byte == 0).count() {
        0 => Ok(()),
        count => Err(Fault::HeaderPadding { count }),
    }
}

fn beginning(header: &[u8]) -> String {
    match header {
        [] => "nothing".into(),
        [0xef, 0xbb, 0xbf, ..] => "a byte-order mark (UTF-8 BOM)".into(),
        [b' ' | b'\t' | b'\r' | b'\n', ..] => "white space".into(),
        [b'[', ..] => "`[`: a JSON list".into(),
        [0, ..] => "a NUL byte".into(),
        [byte @ 0x21..=0x7e, ..] => format!("`{}`: not a safetensors file", char::from(*byte)),
        [byte, ..] => format!("the byte 0x{byte:02x}: not a safetensors file"),
    }
}

// ---- walking the JSON

/// What the walk has gathered.
#[derive(Default)]
struct Draft {
    tensors: Vec<Ranged>,
    metadata: Metadata,
    problems: Listed,
    unknown: Listed,
}

/// A tensor with its range as the header writes it: counted from the end of the header.
struct Ranged {
    name: Arc<str>,
    dtype: StoredDtype,
    shape: Vec<usize>,
    begin: u64,
    end: u64,
}

impl Ranged {
    /// Only after [`check_coverage`]: the sums fit the file's length.
    fn stored(self, data_start: u64) -> Stored {
        let (offset, len) = (data_start.saturating_add(self.begin), self.end.saturating_sub(self.begin));
        Stored { name: self.name, dtype: self.dtype, shape: self.shape, offset, len }
    }
}

impl Object for Draft {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        if key == RESERVED {
            return json::object(key, map, notes, &mut self.metadata);
        }
        let mut entry = Entry::default();
        json::object(key, map, notes, &mut entry)?;
        if !entry.unknown.is_empty() {
            self.unknown.push(|| format!("tensor {}: {}", quoted(key), entry.unknown));
        }
        match entry.finish(key) {
            Ok(tensor) => self.tensors.push(tensor),
            Err(why) => self.problems.push_tensor(key, || format!("tensor {}: {why}", quoted(key))),
        }
        Ok(())
    }

    fn instead(&mut self, _: Scalar) {
        // `check_frame` has seen the `{`.
    }
}

/// `__metadata__`: an object of strings, or null.
#[derive(Default)]
struct Metadata {
    entries: BTreeMap<String, String>,
    problems: Listed,
}

impl Object for Metadata {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        match json::field(map, notes)? {
            Field::Scalar(Scalar::Text(value)) => drop(self.entries.insert(key.to_owned(), value)),
            other => self.problems.push(|| {
                let hint = if key == "data_offsets" { " (no tensor can have the name `__metadata__`)" } else { "" };
                format!("the value of {} is {}, not a string{hint}", quoted(key), other.describe())
            }),
        }
        Ok(())
    }

    fn instead(&mut self, found: Scalar) {
        if found != Scalar::Null {
            self.problems.push(|| format!("it is {}", found.describe()));
        }
    }
}

/// The description of one tensor, as far as it has been read. Other formats that describe tensors by dtype and shape use
/// it too.
#[derive(Default)]
pub(crate) struct Entry {
    dtype: Option<Field>,
    shape: Option<Field>,
    offsets: Option<Field>,
    instead: Option<Scalar>,
    unknown: Listed,
}

impl Object for Entry {
    fn member<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A, notes: &mut Notes) -> Result<(), A::Error> {
        let value = json::field(map, notes)?;
        match key {
            "dtype" => self.dtype = Some(value),
            "shape" => self.shape = Some(value),
            "data_offsets" => self.offsets = Some(value),
            unknown => self.unknown.push(|| quoted(unknown)),
        }
        Ok(())
    }

    fn instead(&mut self, found: Scalar) {
        self.instead = Some(found);
    }
}

impl Entry {
    fn finish(mut self, name: &str) -> Result<Ranged, String> {
        let (dtype, shape) = self.dtype_and_shape()?;
        let (begin, end) = offsets(self.offsets)?;
        Ok(Ranged { name: name.into(), dtype, shape, begin, end })
    }

    /// The two members that every description of a tensor has.
    pub(crate) fn dtype_and_shape(&mut self) -> Result<(StoredDtype, Vec<usize>), String> {
        if let Some(found) = &self.instead {
            return Err(format!("its entry must be an object, found {}", found.describe()));
        }
        Ok((dtype(self.dtype.take())?, index_numbers("shape", self.shape.take())?))
    }
}

fn dtype(value: Option<Field>) -> Result<StoredDtype, String> {
    match value.ok_or("has no dtype")? {
        Field::Scalar(Scalar::Text(name)) => Ok(StoredDtype::from_safetensors(&name)),
        other => Err(format!("dtype must be a string, found {}", other.describe())),
    }
}

fn offsets(value: Option<Field>) -> Result<(u64, u64), String> {
    match whole_numbers("data_offsets", value)?[..] {
        [begin, end] if begin <= end => Ok((begin, end)),
        [begin, end] => Err(format!("data_offsets [{begin}, {end}] end before they begin")),
        ref other => Err(format!("data_offsets must be two numbers, found {}", other.len())),
    }
}

/// A list of exact whole numbers, each a number of elements.
pub(crate) fn index_numbers(member: &str, value: Option<Field>) -> Result<Vec<usize>, String> {
    whole_numbers(member, value).map(|numbers| dims(&numbers))
}

/// A list of exact whole numbers of 64 bits.
pub(crate) fn whole_numbers(member: &str, value: Option<Field>) -> Result<Vec<u64>, String> {
    match value.ok_or_else(|| format!("has no {member}"))? {
        Field::Whole(numbers) => Ok(numbers),
        Field::List(items, count) if items.len() < count => Err(format!("{member} has {count} numbers, too many")),
        Field::List(items, _) => items.iter().enumerate().map(|(at, item)| whole_number(member, at, item)).collect(),
        other => Err(format!("{member} must be a list of whole numbers, found {}", other.describe())),
    }
}

fn whole_number(member: &str, at: usize, item: &Scalar) -> Result<u64, String> {
    match item {
        Scalar::Whole(number) => Ok(*number),
        other => {
            Err(format!("{member}[{at}] is {}, not a whole number from 0 to 18446744073709551615", other.describe()))
        }
    }
}

fn unknown_members(unknown: &Listed) -> Vec<String> {
    match unknown.is_empty() {
        true => Vec::new(),
        false => vec![format!("unknown members were ignored: {unknown}")],
    }
}

// ---- checking the numbers

fn check_sizes(tensors: &[Ranged]) -> Result<(), Fault> {
    let mut problems = Listed::new();
    for tensor in tensors {
        if let Err(why) = check_size(tensor) {
            problems.push_tensor(&tensor.name, || format!("tensor {}: {why}", quoted(&tensor.name)));
        }
    }
    problems.into_fault(Fault::Size)
}

fn check_size(tensor: &Ranged) -> Result<(), String> {
    let found = tensor.end.saturating_sub(tensor.begin);
    if tensor.dtype.tensor_bytes(&tensor.shape) == Some(found) {
        return Ok(());
    }
    // An unknown dtype has no width to check with: its bytes stay opaque.
    let Some(bits) = tensor.dtype.bits() else { return Ok(()) };
    let what = format!("shape {:?} of {}", tensor.shape, tensor.dtype);
    let elements = tensor.shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim as u64));
    let needed = elements.and_then(|elements| elements.checked_mul(bits));
    Err(match needed {
        None => format!("{what} overflows 64 bits, its range has {found} bytes"),
        Some(bits) if bits % 8 != 0 => format!("{what} takes {bits} bits, which do not fill whole bytes"),
        Some(bits) => {
            format!("{what} takes {} bytes, its range {}..{} has {found}", bits / 8, tensor.begin, tensor.end)
        }
    })
}

/// Each byte of the file belongs to exactly one tensor. `tensors` are sorted by their ranges.
fn check_coverage(tensors: &[Ranged], data_start: u64, file_len: u64) -> Result<(), Fault> {
    let (mut overlaps, mut holes) = (Listed::new(), Listed::new());
    let (mut covered, mut last) = (0, None::<&Ranged>);
    for tensor in tensors {
        match last {
            Some(before) if tensor.begin < covered => overlaps.push(|| overlap(before, tensor)),
            _ if tensor.begin > covered => holes.push(|| hole(covered, tensor)),
            _ => {}
        }
        if tensor.end >= covered {
            (covered, last) = (tensor.end, Some(tensor));
        }
    }
    overlaps.into_fault(Fault::Overlap)?;
    holes.into_fault(Fault::Hole)?;
    check_end(data_start.saturating_add(covered), file_len)
}

fn overlap(first: &Ranged, second: &Ranged) -> String {
    let both = format!("{} and {}", quoted(&first.name), quoted(&second.name));
    if (first.begin, first.end) == (second.begin, second.end) {
        return format!("{both} have the same bytes {}..{} of the data", first.begin, first.end);
    }
    format!("{both} have bytes {}..{} and {}..{} of the data", first.begin, first.end, second.begin, second.end)
}

fn hole(covered: u64, tensor: &Ranged) -> String {
    let (name, begin) = (quoted(&tensor.name), tensor.begin);
    format!("{covered}..{begin} of the data ({} bytes) before {name}, whose offset is {begin}", begin - covered)
}

fn check_end(needed: u64, found: u64) -> Result<(), Fault> {
    match needed.cmp(&found) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(Fault::Truncated { needed, found }),
        std::cmp::Ordering::Less => Err(Fault::Trailing { needed, found }),
    }
}
