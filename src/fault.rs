//! What can be wrong inside a file, without saying which file: the parsers return it, their callers add the place.
//!
//! Each fault carries both numbers (what the format demands, what was found) and the likely cause in a person's words.
//! All problems of one kind are in one fault, as a [`Listed`]. This file never reads anything: it only names conditions.

use std::fmt;

pub use vramp_text::Listed;
pub(crate) use vramp_text::{counted, quoted};

use crate::dtype::StoredDtype;
use crate::setting::Setting;

/// One kind of damage or rule broken inside a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The file has no byte.
    #[error("the file is empty (0 bytes): a download or copy that never finished, or a full disk; fetch it again")]
    Empty,
    /// The file cannot even hold the length of a header.
    #[error(
        "the file has {found} bytes, fewer than the 8 that hold the length of the header: truncated, or not a \
         safetensors file; fetch it again"
    )]
    TooShort {
        /// Length of the file in bytes.
        found: u64,
    },
    /// The file is something else under a wrong name.
    #[error("not a safetensors file but {what}; {advice}")]
    Foreign {
        /// What it looks like.
        what: String,
        /// What to do.
        advice: String,
    },
    /// The header would end after the file does.
    #[error(
        "the header is said to take {header} bytes, but the file has {found} in all{}: truncated or half-downloaded, or \
         not a safetensors file; fetch it again",
        AboveLimit(above)
    )]
    HeaderPastEnd {
        /// Length of the header in bytes, as the file states it.
        header: u64,
        /// Length of the file in bytes.
        found: u64,
        /// The header limit in bytes, where the stated length is above it too.
        above: Option<u64>,
    },
    /// The header does not begin with `{`.
    #[error("the header must begin with `{{`, but begins with {found}")]
    HeaderStart {
        /// What it begins with.
        found: String,
    },
    /// The header is filled up with NUL bytes.
    #[error("the header is padded with {count} NUL bytes: the format allows spaces only; write the file again")]
    HeaderPadding {
        /// How many NUL bytes follow the object.
        count: usize,
    },
    /// Text that must be UTF-8 is not.
    #[error("the {what} is not UTF-8: byte {at} is no part of a character")]
    NotUtf8 {
        /// Which text.
        what: &'static str,
        /// Offset in bytes within that text.
        at: usize,
    },
    /// Text that must be JSON is not.
    #[error("the {what} is not valid JSON: {why}")]
    Json {
        /// Which text.
        what: &'static str,
        /// What the JSON parser says, with the position.
        why: String,
    },
    /// A key stands twice in one JSON object.
    #[error("duplicate {}: {list}", plural(.0, "key", "keys"), list = .0)]
    Duplicate(Listed),
    /// Members are missing, of the wrong type, or numbers outside 64 bits.
    #[error("{0}")]
    Member(Listed),
    /// The free-text `__metadata__` is not an object of strings.
    #[error("`__metadata__` must be an object of strings: {0}")]
    Metadata(Listed),
    /// Shape and dtype ask for another number of bytes than the range holds.
    #[error("{} do not fit: {list}", plural(.0, "a shape and its bytes", "shapes and their bytes"), list = .0)]
    Size(Listed),
    /// Tensors share bytes.
    #[error("tensors overlap: {0}")]
    Overlap(Listed),
    /// Bytes between tensors belong to none.
    #[error("{} not covered by any tensor (a hole): {list}", plural(.0, "bytes are", "byte ranges are"), list = .0)]
    Hole(Listed),
    /// The file ends before its last tensor does.
    #[error(
        "truncated: the tensors need a file of {needed} bytes, but it has {found} ({} missing): an incomplete download or \
         copy; fetch it again",
        needed.saturating_sub(*found)
    )]
    Truncated {
        /// Length in bytes that header and tensors need.
        needed: u64,
        /// Length of the file in bytes.
        found: u64,
    },
    /// The file goes on after its last tensor.
    #[error(
        "trailing bytes: the tensors end at byte {needed}, but the file has {found} ({} too many): written twice, or \
         something was appended",
        found.saturating_sub(*needed)
    )]
    Trailing {
        /// Length in bytes that header and tensors need.
        needed: u64,
        /// Length of the file in bytes.
        found: u64,
    },
    /// An index without its map.
    #[error("the index has no `weight_map` (tensor name to file name): {why}")]
    NoWeightMap {
        /// What was found instead.
        why: String,
    },
    /// Values of an index that lead out of its folder, or into a sub-folder.
    #[error(
        "the index names {} that may not be opened: only plain file names beside the index are followed: {list}",
        plural(.0, "a file", "files"), list = .0)]
    Escapes(Listed),
    /// An index that names tensors its files do not hold.
    #[error("stale index: {} where the index says: {list}", plural(.0, "a tensor is not", "tensors are not"), list = .0)]
    Stale(Listed),
    /// One tensor in several files.
    #[error("{} in more than one file: {list}", plural(.0, "a tensor is", "tensors are"), list = .0)]
    TwoFiles(Listed),
    /// Boxes of a tensor that was cut over several files do not cover it exactly once.
    #[error("{} cannot be put together from the files: {list}", plural(.0, "a cut tensor", "cut tensors"), list = .0)]
    Boxes(Listed),
    /// Several files of one checkpoint are damaged.
    #[error("{first} (and {others} refused too)")]
    Several {
        /// What is wrong with the first.
        first: Box<Fault>,
        /// The other files.
        others: Listed,
    },
    /// A file that could hold code, and things in it that are not accepted.
    #[error("refused: {list}{advice}")]
    Refused {
        /// What is not accepted.
        list: Listed,
        /// What to do, from `; ` on.
        advice: String,
    },
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl From<vramp_text::lookalike::Foreign> for Fault {
    fn from(foreign: vramp_text::lookalike::Foreign) -> Fault {
        Fault::Foreign { what: foreign.what, advice: foreign.advice }
    }
}

impl Fault {
    /// The tensor this fault is about, where it is about exactly one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Fault::Member(listed)
            | Fault::Size(listed)
            | Fault::Overlap(listed)
            | Fault::Stale(listed)
            | Fault::TwoFiles(listed)
            | Fault::Boxes(listed) => listed.tensor(),
            Fault::Several { first, .. } => first.tensor(),
            _ => None,
        }
    }
}

/// The name of an element type; one that vramp does not know is text from a file, and quoted.
pub(crate) fn dtype_name(dtype: &StoredDtype) -> String {
    match dtype {
        StoredDtype::Unknown(name) => quoted(name),
        known => known.to_string(),
    }
}

/// `512 bytes`, `1.50 MB`, `4.29 GB`.
pub(crate) fn sized(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{bytes} bytes"),
        1_000_000..1_000_000_000 => format!("{:.2} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

fn plural<'a>(listed: &Listed, one: &'a str, many: &'a str) -> &'a str {
    if listed.len() == 1 { one } else { many }
}

/// ` (and the limit for headers is …)`, or nothing.
struct AboveLimit<'a>(&'a Option<u64>);

impl fmt::Display for AboveLimit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .map_or(Ok(()), |limit| write!(f, " (and headers are limited to {limit}, see {})", Setting::MaxHeaderBytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_about_one_tensor_names_it_and_one_about_two_does_not() {
        let mut listed = Listed::new();
        listed.push_tensor("a", || "a is odd".into());
        assert_eq!(Fault::Size(listed.clone()).tensor(), Some("a"));
        listed.push_tensor("b", || "b is odd".into());
        assert_eq!(Fault::Size(listed).tensor(), None);
    }

    #[test]
    fn an_unknown_type_is_quoted() {
        assert_eq!(dtype_name(&StoredDtype::from_safetensors("F32")), "F32");
        assert_eq!(dtype_name(&StoredDtype::from_safetensors("X\nok")), r#""X\nok""#);
    }
}
