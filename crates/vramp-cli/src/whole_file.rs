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

/// How names end that mean something in a folder of weights: weights, and what tells how to read them.
#[rustfmt::skip]
const MEANT: [&str; 18] = [
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".metadata", "config.json", "tokenizer.json", "vocab.json",
    "tokens.json", "tokens_map.json", "merges.txt", ".model", ".jinja", ".py", "README.md", "chat_template.json",
];

/// Within the name of an index, before `json` or before a variant.
const INDEX: &str = ".index.";

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

    /// Refuses to write over what is about to be loaded, and to make a file beside it that readers would take for a part of it.
    pub(crate) fn spare(&self, shards: &[Shard]) -> Result<(), Failure> {
        let name = self.file.file_name().unwrap_or_default().to_string_lossy();
        let is_meant = MEANT.iter().any(|end| name.ends_with(end)) || name.contains(INDEX) && name.ends_with(".json");
        let canonical = |path: &Path| fs::canonicalize(path).ok();
        // A shard may be a link to a file elsewhere: both folders count.
        let is_beside = |shard: &Shard| {
            let of_file = canonical(&shard.path).and_then(|file| file.parent().map(Path::to_owned));
            let folders = [canonical(folder_of(&shard.path)), of_file];
            folders.iter().flatten().any(|folder| self.file.parent() == Some(folder.as_path()))
        };
        if shards.iter().any(|shard| canonical(&shard.path).as_ref() == Some(&self.file)) {
            return Err(self.refused("would write over the checkpoint"));
        }
        if is_meant && shards.iter().any(is_beside) {
            return Err(self.refused("would lie beside the weights under a name that readers take for a part of them"));
        }
        Ok(())
    }

    /// Refuses to write over a file that `option` reads.
    pub(crate) fn spare_input(&self, option: &str, input: Option<&Path>) -> Result<(), Failure> {
        let is_same = input.and_then(|input| fs::canonicalize(input).ok()).is_some_and(|input| input == self.file);
        if is_same { Err(self.refused(&format!("would write over what {option} reads"))) } else { Ok(()) }
    }

    fn refused(&self, why: &str) -> Failure {
        let (option, asked) = (self.option, text::escape(&self.asked.display().to_string()));
        Failure::Usage(format!("{option} {asked} {why}; name another file"))
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
