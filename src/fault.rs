//! What can be wrong inside a file, without saying which file: the parsers return it, their callers add the place.
//!
//! Each fault carries both numbers (what the format demands, what was found) and the likely cause in a person's words.
//! This file never reads anything: it only names conditions.

/// One kind of damage or rule broken inside a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Placeholder until the formats arrive.
    #[error("{0}")]
    Other(String),
}

impl Fault {
    /// The tensor this fault is about, where it is about exactly one.
    pub fn tensor(&self) -> Option<&str> {
        None
    }
}
