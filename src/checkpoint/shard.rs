//! Opens one weight file, reads its header and closes it again: 200 shards need no 200 descriptors.
//!
//! Only regular files are opened, and never in a way that could hang (a pipe without a writer). Only the head is read; the
//! bytes that a hostile length field asks for are allocated after it has been compared with the file's length.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::num::NonZero;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Shard;
use super::safetensors::{self, Header, LENGTH_BYTES, Rejected};
use crate::error::{Error, Result};
use crate::fault::{Fault, Listed, quoted};
use crate::setting::Setting;
use crate::storage::Identity;

/// Bytes read at first: most headers fit, so that one read does.
const FIRST_READ: u64 = 64 << 10;

/// Files whose headers are read at the same time, at most.
const THREADS: usize = 8;

/// One weight file and what its header says.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) shard: Shard,
    pub(crate) header: Header,
}

/// Reads the heads of many files, several at a time. All damaged files are in the one error.
pub(crate) fn read_heads(paths: &[PathBuf], limit: u64) -> Result<Vec<Head>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((at, path)) = take(&next, paths) {
            done.push((at, read_head(path, limit)));
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

fn all_or_one_error(heads: impl Iterator<Item = Result<Head>>) -> Result<Vec<Head>> {
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
pub(crate) fn read_head(path: &Path, limit: u64) -> Result<Head> {
    let (file, metadata) = open_regular(path)?;
    let bytes = metadata.len();
    let beginning = read(&file, path, 0, bytes.min(FIRST_READ))?;
    let header_bytes = safetensors::header_len(&beginning, bytes, limit).map_err(|why| rejected(path, limit, why))?;
    let header = match in_memory(&beginning, header_bytes) {
        Some(header) => safetensors::parse(header, bytes),
        None => safetensors::parse(&read(&file, path, LENGTH_BYTES, header_bytes)?, bytes),
    };
    let header = header.map_err(|fault| Error::malformed(path, fault))?;
    Ok(Head { shard: Shard { path: path.to_owned(), bytes, identity: identity(&metadata), derived: None }, header })
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
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let (file, metadata) = open_regular(path)?;
    match metadata.len() {
        0 => Err(Error::malformed(path, Fault::Empty)),
        found if found > limit => Err(Error::Limit {
            what: format!("the length in bytes of {}", path.display()),
            limit,
            found,
            hint: Some(format!("raise the limit with {}", Setting::MaxHeaderBytes)),
        }),
        len => read(&file, path, 0, len),
    }
}

/// Reads a text as [`read_text`] does, or what a pipe or a device gives until its end.
pub(crate) fn read_stream(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|e| cannot_open(path, e))?;
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
fn read(file: &File, path: &Path, offset: u64, len: u64) -> Result<Vec<u8>> {
    match zeroed(len).and_then(|mut bytes| file.read_exact_at(&mut bytes, offset).map(|()| bytes)) {
        Ok(bytes) => Ok(bytes),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            Err(Error::Changed { path: path.to_owned(), what: "it became shorter".into() })
        }
        Err(e) => Err(Error::Io { op: "read", path: path.to_owned(), range: Some(offset..offset + len), source: e }),
    }
}

/// Memory for `len` bytes, or an error: a limit that the user raised may be above what this machine has.
fn zeroed(len: u64) -> io::Result<Vec<u8>> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Opens a regular file for reading. The kind is looked at before (a device may act when it is opened) and after.
pub(crate) fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    let metadata = std::fs::metadata(path).map_err(|e| cannot_open(path, e))?;
    demand_regular(path, &metadata)?;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| cannot_open(path, e))?;
    let metadata = file.metadata().map_err(|e| Error::io("examine", path, e))?;
    demand_regular(path, &metadata)?;
    Ok((file, metadata))
}

fn cannot_open(path: &Path, error: io::Error) -> Error {
    match dangling(path) {
        Some(link) if error.kind() == io::ErrorKind::NotFound => Error::NotFound {
            what: format!("{}: {link}", path.display()),
            hint: Some("the download was cut short or its blob was removed; fetch it again".into()),
        },
        _ => Error::io("open", path, error),
    }
}

/// `a link to "x", which is not there`, if the path is a link that leads nowhere, or goes through a folder that is one.
pub(crate) fn dangling(path: &Path) -> Option<String> {
    let is_gone = |path: &Path| std::fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    if !is_gone(path) {
        return None;
    }
    // The outermost link that leads nowhere: what lies below it cannot be looked at.
    let mut above: Vec<&Path> = path.ancestors().filter(|above| !above.as_os_str().is_empty()).collect();
    above.reverse();
    let link = above.into_iter().find(|above| above.is_symlink() && is_gone(above))?;
    let target = std::fs::read_link(link).ok()?;
    let end = end_of(link);
    let within = if link == path { String::new() } else { format!("its folder {} is ", link.display()) };
    let by_way = link.parent().map_or(target.clone(), |parent| parent.join(&target));
    let which = if end == by_way { String::new() } else { format!(" and in the end to {}", end.display()) };
    Some(format!("{within}a link to {}{which}, which is not there", target.display()))
}

/// Where a chain of links ends.
fn end_of(link: &Path) -> PathBuf {
    /// As many as the kernel follows.
    const MOST_LINKS: usize = 40;
    let mut end = link.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(target) = std::fs::read_link(&end) else { break };
        end = end.parent().map_or(target.clone(), |parent| parent.join(&target));
    }
    end
}

fn demand_regular(path: &Path, metadata: &Metadata) -> Result<()> {
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    let what = format!("it is {what}, not a regular file: weights are read by position");
    Err(Error::Unsupported { path: path.to_owned(), tensor: None, what })
}

/// What the file is now.
pub(crate) fn identity(metadata: &Metadata) -> Identity {
    Identity {
        device: metadata.dev(),
        inode: metadata.ino(),
        len: metadata.len(),
        modified_ns: i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()),
    }
}
