//! A storage as a pickle declares it: plain data.

use crate::kinds::Kind;

/// A storage as the pickle declares it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Declared {
    pub(crate) key: String,
    pub(crate) kind: Kind,
    /// Elements.
    pub(crate) count: u64,
    /// A part of the storage that is meant: first element and number of elements.
    pub(crate) view: Option<(u64, u64)>,
}

impl Declared {
    /// Bytes of the whole storage.
    pub(crate) fn bytes(&self) -> u64 {
        self.count.saturating_mul(self.kind.bytes)
    }
}
