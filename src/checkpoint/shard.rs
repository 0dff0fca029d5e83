//! Opens one weight file, reads its header and closes it again: 200 shards need no 200 descriptors.
//!
//! Everything is read through the port to the storage. Only the head is read; the
//! bytes that a hostile length field asks for are allocated after it has been compared with the file's length.

use std::fs::File;
use std::io::{self, Read};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::safetensors::{self, Header, LENGTH_BYTES, Rejected};
use super::{Shard, derived};
use crate::error::{Error, Result};
use crate::fault::{Fault, Listed, quoted};
use crate::setting::Setting;
use crate::storage::{EntryKind, Fallbacks, Location, OpenFile, Route, Source, Storage};

/// Bytes read at first: most headers fit, so that one read does.
const FIRST_READ: u64 = 64 << 10;

/// Files whose headers are read at the same time, at most.
const THREADS: usize = 8;

impl Shard {
    /// Opens the file and demands that it is the one whose header was read. What is made of a file is made as it is read.
    ///
    /// # Errors
    /// When it cannot be opened; [`Error::Changed`] where it is another version now.
    pub fn open(&self, storage: &dyn Storage, fallbacks: &Fallbacks) -> Result<Arc<dyn OpenFile>> {
        let file = storage.open(&Location::from(&self.path), fallbacks)?;
        match (self.version.difference(&file.version()), &self.derived) {
            (Some(what), _) => {
                let what = format!("{what}, since its header was read");
                Err(Error::Changed { path: self.path.clone(), what })
            }
            (None, Some(recipe)) => Ok(derived::open(file, Arc::clone(recipe))),
            (None, None) => Ok(file),
        }
    }
}

/// One weight file and what its header says.
#[derive(Debug)]
pub(crate) struct FileHeader {
    pub(crate) shard: Shard,
    pub(crate) header: Header,
}

/// Reads the heads of many files, several at a time. All damaged files are in the one error.
pub(crate) fn read_heads(storage: &dyn Storage, paths: &[PathBuf], limit: u64) -> Result<Vec<FileHeader>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((at, path)) = take(&next, paths) {
            done.push((at, read_head(storage, path, limit)));
        }
        done
    };
    let mut heads = std::thread::scope(|scope| {
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads_for(paths.len())).filter_map(spawn).collect();
        let mut heads = work();
        for helper in helpers {
            heads.extend(helper.join().map_err(|_| Error::Poisoned { what: "a thread that reads headers" })?);
        }
        Ok::<_, Error>(heads)
    })?;
    heads.sort_by_key(|(at, _)| *at);
    all_or_one_error(heads.into_iter().map(|(_, head)| head))
}

fn take<'a>(next: &AtomicUsize, paths: &'a [PathBuf]) -> Option<(usize, &'a PathBuf)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    paths.get(at).map(|path| (at, path))
}

fn threads_for(files: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    files.div_ceil(2).min(cores.max(2)).min(THREADS)
}

fn all_or_one_error(heads: impl Iterator<Item = Result<FileHeader>>) -> Result<Vec<FileHeader>> {
    let (mut good, mut first, mut others) = (Vec::new(), None, Listed::new());
    for head in heads {
        match (head, &first) {
            (Ok(head), _) => good.push(head),
            (Err(error), None) => first = Some(error),
            (Err(error), Some(_)) => others.push(|| error.path().map_or(error.to_string(), file_name)),
        }
    }
    match first {
        None => Ok(good),
        Some(Error::Malformed { path, tensor, fault: first }) if !others.is_empty() => {
            Err(Error::Malformed { path, tensor, fault: Box::new(Fault::Several { first, others }) })
        }
        Some(error) => Err(error),
    }
}

fn file_name(path: &Path) -> String {
    quoted(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy())
}

/// Reads the head of one file.
pub(crate) fn read_head(storage: &dyn Storage, path: &Path, limit: u64) -> Result<FileHeader> {
    head_of(&*open(storage, path)?, limit)
}

/// Reads the head of an open file.
pub(crate) fn head_of(file: &dyn OpenFile, limit: u64) -> Result<FileHeader> {
    let (path, version, source) = (file.path(), file.version(), file.source(Route::Buffered));
    let bytes = version.len();
    let beginning = read(&*source, path, 0, bytes.min(FIRST_READ))?;
    let header_bytes = safetensors::header_len(&beginning, bytes, limit).map_err(|why| rejected(path, limit, why))?;
    let header = match in_memory(&beginning, header_bytes) {
        Some(header) => safetensors::parse(header, bytes),
        None => safetensors::parse(&read(&*source, path, LENGTH_BYTES, header_bytes)?, bytes),
    };
    let header = header.map_err(|fault| Error::malformed(path, fault))?;
    Ok(FileHeader { shard: Shard { path: path.to_owned(), bytes, version, derived: None }, header })
}

/// Opens a file to read what it says of itself.
pub(crate) fn open(storage: &dyn Storage, path: &Path) -> Result<Arc<dyn OpenFile>> {
    // Which way its bytes come is of no interest here.
    storage.open(&Location::from(path), &Fallbacks::default())
}

/// Whether a file lies there.
pub(crate) fn is_file(storage: &dyn Storage, path: &Path) -> bool {
    storage.head(&Location::from(path)).is_ok_and(|head| head.kind == EntryKind::File)
}

/// The first bytes of an open file, at most `most`.
pub(crate) fn beginning(file: &dyn OpenFile, most: u64) -> Result<Vec<u8>> {
    read(&*file.source(Route::Buffered), file.path(), 0, file.version().len().min(most))
}

fn in_memory(beginning: &[u8], header_bytes: u64) -> Option<&[u8]> {
    let (_, rest) = beginning.split_first_chunk::<8>()?;
    rest.get(..usize::try_from(header_bytes).ok()?)
}

fn rejected(path: &Path, limit: u64, why: Rejected) -> Error {
    match why {
        Rejected::Fault(fault) => Error::malformed(path, fault),
        Rejected::TooLong { found } => Error::Limit {
            what: format!("the length in bytes of the header of {}", path.display()),
            limit,
            found,
            hint: Some(format!("if the file is to be trusted, raise the limit with {}", Setting::MaxHeaderBytes)),
        },
    }
}

/// Reads a text file (an index, a config) whole, refusing one longer than `limit` bytes.
pub(crate) fn read_text(storage: &dyn Storage, path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open(storage, path)?;
    match file.version().len() {
        0 => Err(Error::malformed(path, Fault::Empty)),
        found if found > limit => Err(Error::Limit {
            what: format!("the length in bytes of {}", path.display()),
            limit,
            found,
            hint: Some(format!("raise the limit with {}", Setting::MaxHeaderBytes)),
        }),
        len => read(&*file.source(Route::Buffered), path, 0, len),
    }
}

/// Reads a text as [`read_text`] does, or what a pipe or a device gives until its end.
pub(crate) fn read_stream(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    read_to_end(file, path, limit)
}

/// Reads all that a stream gives, refusing more than `limit` bytes. `path` names it in errors.
pub(crate) fn read_to_end(stream: impl Read, path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    stream.take(limit.saturating_add(1)).read_to_end(&mut text).map_err(|e| Error::io("read", path, e))?;
    match text.len() as u64 {
        0 => Err(Error::malformed(path, Fault::Empty)),
        found if found > limit => {
            Err(Error::Limit { what: format!("the length in bytes of {}", path.display()), limit, found, hint: None })
        }
        _ => Ok(text),
    }
}

/// `len` is never above the file's length, nor above a limit.
fn read(source: &dyn Source, path: &Path, offset: u64, len: u64) -> Result<Vec<u8>> {
    let range = Some(offset..offset.saturating_add(len));
    let mut bytes = zeroed(len).map_err(|source| Error::Io { op: "read", path: path.to_owned(), range, source })?;
    source.read_at(offset, &mut bytes)?;
    Ok(bytes)
}

/// Memory for `len` bytes, or an error: a limit that the user raised may be above what this machine has.
fn zeroed(len: u64) -> io::Result<Vec<u8>> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    Ok(bytes)
}
