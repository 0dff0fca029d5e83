//! Mapped reads.
/// A mapped file.
#[derive(Debug)]
pub struct MappedFile {
    _private: (),
}
