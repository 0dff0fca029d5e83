//! What a path leads to, in errors, and the file behind a descriptor opened again. It reads no bytes.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The error of a file that cannot be opened; a link that leads nowhere is named.
pub(super) fn cannot_open(path: &Path, error: io::Error) -> Error {
    match dangling(path) {
        Some(link) if error.kind() == io::ErrorKind::NotFound => Error::NotFound {
            what: format!("{}: {link}", path.display()),
            hint: Some("the download was cut short or its blob was removed; fetch it again".into()),
        },
        _ => Error::io("open", path, error),
    }
}

/// Refuses what is no regular file: a device may act when it is opened, and a pipe cannot be read by position.
pub(super) fn demand_regular(path: &Path, kind: FileType) -> Result<()> {
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

/// `a link to "x", which is not there`, if the path is a link that leads nowhere, or goes through a folder that is one.
pub(super) fn dangling(path: &Path) -> Option<String> {
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

/// Opens the file behind a descriptor once more: the same file, whatever its path leads to by now.
pub(super) fn reopen(file: &File, flags: libc::c_int) -> io::Result<File> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC | flags).open(link)
}
