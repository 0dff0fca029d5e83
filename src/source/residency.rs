//! Which parts of a file are in the page cache.

/// Which parts of a file are in the page cache, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Residency {
    _private: (),
}
