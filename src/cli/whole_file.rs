//! A file that a command was asked to write: it appears whole or not at all, and never over the checkpoint it is about.
//!
//! It is made beside its place and renamed to it. Whether that can be done is asked before the work, not after it.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use vramp::checkpoint::Shard;

use super::output::Failure;
use super::text;

/// How names end of what belongs to the weights that it lies beside.
const BELONGS: [&str; 3] = [".index.json", "config.json", "tokenizer.json"];

/// A place to write to.
#[derive(Debug)]
pub(crate) struct WholeFile {
    /// The option that asked for it, for messages.
    option: &'static str,
    /// What it will hold, for messages.
    what: &'static str,
    /// As typed, for messages.
    asked: PathBuf,
    /// Where it goes: symbolic links followed.
    file: PathBuf,
}

impl WholeFile {
    /// The place `asked`, once it is clear that it can be written.
    pub(crate) fn to(asked: &Path, option: &'static str, what: &'static str) -> Result<WholeFile, Failure> {
        if asked == Path::new("-") {
            let why = "writes a file that appears once it is whole; it cannot be standard output";
            return Err(Failure::Usage(format!("{option} {why}")));
        }
        let file = resolved(asked).map_err(|source| cannot_write(asked, what, source))?;
        // A file of the same kind is made where this one will be; left there meanwhile, a kill would leave it for good.
        neighbour(&file).map_err(|source| cannot_write(asked, what, source))?;
        Ok(WholeFile { option, what, asked: asked.to_owned(), file })
    }

    /// Refuses that two options mean one file.
    pub(crate) fn apart_from(&self, other: &WholeFile) -> Result<(), Failure> {
        if self.file != other.file {
            return Ok(());
        }
        Err(Failure::Usage(format!("{} and {} name the same file; name two", self.option, other.option)))
    }

    /// Refuses to write over what is about to be loaded.
    pub(crate) fn spare(&self, shards: &[Shard]) -> Result<(), Failure> {
        let canonical = |shard: &Shard| fs::canonicalize(&shard.path).ok();
        let is_beside = |shard: PathBuf| shard.parent() == self.file.parent();
        let name = self.file.file_name().unwrap_or_default().to_string_lossy();
        let belongs = self.file.exists() && BELONGS.iter().any(|end| name.ends_with(end));
        if !shards.iter().filter_map(canonical).any(|shard| shard == self.file || belongs && is_beside(shard)) {
            return Ok(());
        }
        let (option, asked) = (self.option, text::escape(&self.asked.display().to_string()));
        Err(Failure::Usage(format!("{option} {asked} would write over the checkpoint; name another file")))
    }

    /// Writes it.
    pub(crate) fn write(&self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
        let written = neighbour(&self.file).and_then(|mut temporary| {
            let mut out = BufWriter::with_capacity(1 << 16, temporary.as_file_mut());
            fill(&mut out)?;
            out.flush()?;
            drop(out);
            temporary.persist(&self.file).map_err(|error| error.error)
        });
        written.map(drop).map_err(|source| cannot_write(&self.asked, self.what, source))
    }
}

fn cannot_write(asked: &Path, what: &str, source: io::Error) -> Failure {
    let what = format!("cannot write the {what} {}; name a file in a folder that is there", asked.display());
    Failure::System { what, path: Some(asked.to_owned()), source }
}

/// The place that a path means; what is there already must be a file that may be written.
fn resolved(asked: &Path) -> io::Result<PathBuf> {
    let name = asked.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::IsADirectory))?;
    match fs::metadata(asked) {
        Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        // It would be replaced, and `/dev/null` is wanted by others.
        Ok(found) if !found.is_file() => Err(io::Error::other("it is there and no regular file")),
        Ok(_) => OpenOptions::new().write(true).open(asked).and_then(|_| fs::canonicalize(asked)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(fs::canonicalize(folder_of(asked))?.join(name)),
        Err(error) => Err(error),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A temporary file beside `file`, with the permissions of any new file; gone with its handle.
fn neighbour(file: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".vramp-new-").permissions(Permissions::from_mode(0o666)).tempfile_in(folder_of(file))
}
