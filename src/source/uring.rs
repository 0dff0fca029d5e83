//! A ring for direct reads.
