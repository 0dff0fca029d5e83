//! Stands in for `torch` in a build without the feature `torch`: a PyTorch file is recognised by its first bytes and refused.
//!
//! It reads nothing else of such a file.

use std::io;
use std::path::Path;

use super::{Checkpoint, OpenOptions};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::storage::{OpenFile, Storage};

/// Bytes at the beginning of a file that are enough to recognise it.
pub(crate) const BEGINNING: u64 = 1024;

/// How a file of `torch.save` begins before PyTorch 1.6: a pickle of its magic number.
const LEGACY: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// A file that `torch.save` may have written.
pub(crate) struct Kind;

/// Recognises a file by its first bytes.
pub(crate) fn recognise(beginning: &[u8], len: u64) -> Option<Kind> {
    let is_zip = beginning.starts_with(b"PK\x03\x04") || beginning.starts_with(b"PK\x05\x06");
    let is_pickle = matches!(beginning, [0x80, 2..=5, opcode, ..] if *opcode != 0);
    let is_torch = is_zip || is_pickle || beginning.starts_with(LEGACY);
    (is_torch && !is_safetensors(beginning, len)).then_some(Kind)
}

/// The length of a header can begin like a pickle; its brace cannot be there in one that is so long.
pub(crate) fn is_safetensors(beginning: &[u8], len: u64) -> bool {
    let header = beginning.first_chunk().map(|length| u64::from_le_bytes(*length));
    header.is_some_and(|header| header < len) && beginning.get(8) == Some(&b'{')
}

/// The beginning of a file is all that is looked at.
pub(crate) struct Opened;

impl From<&dyn OpenFile> for Opened {
    fn from(_: &dyn OpenFile) -> Opened {
        Opened
    }
}

/// No archive is read, so that none can be taken for the file.
pub(crate) fn hides_archive(_: &Opened) -> io::Result<bool> {
    Ok(false)
}

pub(crate) fn hidden_archive() -> Fault {
    Fault::Other("an archive stands behind other data".into())
}

pub(crate) fn open(path: &Path, _: &Opened, _: Kind, _: &OpenOptions) -> Result<Checkpoint> {
    Err(unread(path))
}

fn unread(path: &Path) -> Error {
    let what = "this build reads no PyTorch files: enable the feature `torch`".to_owned();
    Error::Unsupported { path: path.to_owned(), tensor: None, what }
}

pub(crate) mod dcp {
    //! Folders of PyTorch's distributed checkpoint.

    use super::{Checkpoint, OpenOptions, Path, Result, Storage, unread};

    /// The name of the file that describes the folder.
    pub(crate) const METADATA: &str = ".metadata";

    pub(crate) fn open(folder: &Path, _: &OpenOptions) -> Result<Checkpoint> {
        Err(unread(folder))
    }

    pub(crate) fn refuse_alone(path: &Path, _: &dyn Storage) -> Result<()> {
        let is_piece = path.extension().is_some_and(|end| end == "distcp");
        let is_metadata = path.file_name().is_some_and(|name| name == METADATA);
        if is_piece || is_metadata { Err(unread(path)) } else { Ok(()) }
    }
}

pub(crate) mod ranks {
    //! The files of the ranks of a parallel program.

    use super::{Checkpoint, OpenOptions, Path, Result, unread};
    use crate::checkpoint::rank_files::RankSet;

    pub(crate) fn open(folder: &Path, _: &RankSet, _: &OpenOptions) -> Result<Option<Checkpoint>> {
        Err(unread(folder))
    }
}

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sums {
    /// Members whose bytes have the CRC-32 that is stated.
    pub same: u64,
    /// Members without one.
    pub absent: u64,
}

impl Checkpoint {
    /// Compares the sums that archives state; this build reads none.
    ///
    /// # Errors
    /// None.
    pub fn check_sums(&self, _: &dyn Fn() -> Result<()>) -> Result<Sums> {
        Ok(Sums::default())
    }
}
