//! Every way a vramp call can fail, by condition, each with the place where it happened.
//!
//! An [`Error`] names the file, the tensor, both numbers and what to do; [`Fault`] says what is wrong *inside* a file and
//! the caller of the parser adds the place. `Display` prints this level only, lower case, without a full stop; causes come
//! through [`std::error::Error::source`]. This file never prints, and knows no source, device or format.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::fault::quoted;
pub use crate::fault::{Fault, Listed};
use crate::setting::Setting;

/// The result of a vramp call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, and where.
///
/// `Debug` prints what a person should read, causes included, so that `fn main() -> Result<_, Box<dyn Error>>` does.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("cannot {op} {}{}", path.display(), Bytes(range))]
    Io {
        /// The operation, as a verb: `open`, `read`, `map`.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// The bytes of the file it was about, where it was about some.
        range: Option<Range<u64>>,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file breaks the rules of its format.
    #[error("{}{}: {fault}", path.display(), Unnamed(tensor, fault))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The tensor concerned, where it is one.
        tensor: Option<String>,
        /// What is wrong with it.
        fault: Box<Fault>,
    },
    /// The input is well-formed, but vramp does not handle it.
    #[error("{}{}: {what}", path.display(), Named(tensor))]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The tensor concerned, where it is one.
        tensor: Option<String>,
        /// What is not supported, and what would be.
        what: String,
    },
    /// Something that was asked for is not there: a file, a shard, a tensor.
    #[error("{what}{}", Hint(hint))]
    NotFound {
        /// What was looked for, and where.
        what: String,
        /// The nearest thing that is there, or what to do.
        hint: Option<String>,
    },
    /// A tensor that was asked for by its name is not there.
    #[error("tensor {} {what}{}", quoted(name), Nearest(nearest, "; "))]
    NoTensor {
        /// The name that was asked for.
        name: String,
        /// Where it is not: `was not loaded`, `is not in the checkpoint`.
        what: &'static str,
        /// The names that are there and nearest to it, at most three; none where even those are far.
        nearest: Vec<String>,
    },
    /// Names or patterns that choose tensors match none.
    #[error("{setting}: no tensor is called {}{}", NoneCalled(absent), Hint(hint))]
    NoMatch {
        /// What they were given for.
        setting: Setting,
        /// Each name or pattern that matches nothing.
        absent: Vec<Absent>,
        /// How to find the right name, where none is near.
        hint: Option<String>,
    },
    /// The checkpoint does not match what was demanded of it (strict state-dict check).
    #[error("{}: {report}", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// The complete verdict, in words.
        report: String,
    },
    /// A file changed while it was being read.
    #[error(
        "{}: the file changed while it was being read ({what}); nothing of it was handed out: load again once it is complete",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// What differs: size, modification time or inode, both values.
        what: String,
    },
    /// What was asked for makes no sense for this checkpoint: a slice out of range, an uneven cut, a colliding name.
    #[error("{what}{}", Hint(hint))]
    Request {
        /// What cannot be done, with both numbers.
        what: String,
        /// What to do instead.
        hint: Option<String>,
    },
    /// A number passed a limit that guards memory.
    #[error("{what} is {found}, above the limit of {limit}{}", Hint(hint))]
    Limit {
        /// What is limited.
        what: String,
        /// The limit, in the unit that `what` names.
        limit: u64,
        /// The value found.
        found: u64,
        /// How to raise the limit, where that is possible.
        hint: Option<String>,
    },
    /// A device refused an operation.
    #[error("device {device}: {op} failed: {message}")]
    Device {
        /// The device, as `cpu`, `null` or `cuda:0`.
        device: String,
        /// The operation.
        op: &'static str,
        /// The device's own code and words.
        message: String,
    },
    /// A device has too little memory left for the load.
    #[error(
        "device {device}: out of memory: {} needed, {}; {}load less (a selection, a slice, one rank's part), or elsewhere",
        Size(Some(*needed)),
        Left(*free, *limit),
        if limit.is_some() { "raise that limit, " } else { "" }
    )]
    OutOfMemory {
        /// The device, as `cpu`, `null` or `cuda:0`.
        device: String,
        /// Bytes that were asked for.
        needed: u64,
        /// Bytes that are free, or that the limit leaves, where that is known.
        free: Option<u64>,
        /// The limit that leaves the least, as `RLIMIT_AS (ulimit -v)`; `None` where the memory itself is the limit.
        limit: Option<&'static str>,
    },
    /// Something is there already that must not be replaced, or not by this.
    #[error("{}: {what}{}", path.display(), Hint(hint))]
    Exists {
        /// The file or folder.
        path: PathBuf,
        /// What it is, and why it is in the way.
        what: String,
        /// What to do instead.
        hint: Option<String>,
    },
    /// Another process changed the same files meanwhile.
    #[error("{}: {what}; what this call wrote is gone: see whether it is still wanted, and run it again", path.display())]
    Conflict {
        /// The file or folder.
        path: PathBuf,
        /// What happened to it.
        what: String,
    },
    /// Converting would have made finite numbers infinite.
    #[error(
        "converting to {to} would make finite numbers infinite: {}; {to} reaches to {reach}: {}allow it \
         with {}",
        Overflowed(tensors),
        if to == "F16" { "take a type of more range (BF16, F32), or " } else { "" },
        Setting::AllowOverflow
    )]
    Overflow {
        /// The type that was asked for.
        to: String,
        /// The largest finite number that it holds.
        reach: &'static str,
        /// Each tensor, and how many of its numbers.
        tensors: Vec<(String, u64)>,
    },
    /// The caller cancelled the load.
    #[error("cancelled")]
    Cancelled,
    /// A part of vramp ended unexpectedly; the load cannot be trusted. This is a bug of vramp: please report it.
    #[error("internal error: {what}")]
    Poisoned {
        /// Which part.
        what: &'static str,
    },
}

/// The condition that an [`Error`] describes. Its text is short and stable: `io`, `not_found`, `malformed`, ….
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system refused an operation.
    Io,
    /// A file, a shard or a tensor is not there.
    NotFound,
    /// A file breaks the rules of its format.
    Malformed,
    /// The input is well-formed, but not handled.
    Unsupported,
    /// The checkpoint does not match what was demanded of it.
    Mismatch,
    /// A file changed while it was being read.
    Changed,
    /// The request makes no sense for this checkpoint.
    Request,
    /// A number passed a limit that guards memory.
    Limit,
    /// A device refused an operation.
    Device,
    /// Too little memory is left.
    OutOfMemory,
    /// Something is there already that must not be replaced.
    Exists,
    /// Another process changed the same thing meanwhile.
    Conflict,
    /// A conversion would have made finite numbers infinite.
    Overflow,
    /// The caller cancelled.
    Cancelled,
    /// A bug of vramp.
    Internal,
}

impl ErrorKind {
    /// The text: `io`, `not_found`, `malformed`, ….
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorKind::Io => "io",
            ErrorKind::NotFound => "not_found",
            ErrorKind::Malformed => "malformed",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::Mismatch => "mismatch",
            ErrorKind::Changed => "changed",
            ErrorKind::Request => "request",
            ErrorKind::Limit => "limit",
            ErrorKind::Device => "device",
            ErrorKind::OutOfMemory => "out_of_memory",
            ErrorKind::Exists => "exists",
            ErrorKind::Conflict => "conflict",
            ErrorKind::Overflow => "overflow",
            ErrorKind::Cancelled => "cancelled",
            ErrorKind::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name or pattern that matches no tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Absent {
    /// What was asked for.
    pub name: String,
    /// The names that are there and nearest to it, at most three; none where even those are far.
    pub nearest: Vec<String>,
}

impl Error {
    /// An I/O error of `op` on the whole of `path`.
    pub fn io(op: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Error::Io { op, path: path.into(), range: None, source }
    }

    /// A fault in `path` as a whole.
    pub fn malformed(path: impl Into<PathBuf>, fault: Fault) -> Self {
        Error::Malformed { path: path.into(), tensor: fault.tensor().map(str::to_owned), fault: Box::new(fault) }
    }

    /// The condition, for programs that act on it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => ErrorKind::NotFound,
            Error::Io { .. } => ErrorKind::Io,
            Error::Malformed { .. } => ErrorKind::Malformed,
            Error::Unsupported { .. } => ErrorKind::Unsupported,
            Error::NotFound { .. } | Error::NoTensor { .. } => ErrorKind::NotFound,
            Error::Mismatch { .. } => ErrorKind::Mismatch,
            Error::Changed { .. } => ErrorKind::Changed,
            Error::Request { .. } | Error::NoMatch { .. } => ErrorKind::Request,
            Error::Limit { .. } => ErrorKind::Limit,
            Error::Device { .. } => ErrorKind::Device,
            Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Error::Exists { .. } => ErrorKind::Exists,
            Error::Conflict { .. } => ErrorKind::Conflict,
            Error::Overflow { .. } => ErrorKind::Overflow,
            Error::Cancelled => ErrorKind::Cancelled,
            Error::Poisoned { .. } => ErrorKind::Internal,
        }
    }

    /// The exit status of the program for this error.
    ///
    /// 1 a check says no · 2 wrong usage · 3 input refused · 4 I/O · 5 device · 6 conflict · 130 interrupted.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Mismatch { .. } => 1,
            Error::Request { .. } | Error::NoMatch { .. } => 2,
            Error::Malformed { .. }
            | Error::Unsupported { .. }
            | Error::Changed { .. }
            | Error::Limit { .. }
            | Error::Overflow { .. } => 3,
            Error::Io { .. } | Error::NotFound { .. } | Error::NoTensor { .. } => 4,
            Error::Device { .. } | Error::OutOfMemory { .. } | Error::Poisoned { .. } => 5,
            Error::Exists { .. } | Error::Conflict { .. } => 6,
            Error::Cancelled => 130,
        }
    }

    /// Whether the same call may succeed later without anything being mended by a person.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Changed { .. } | Error::OutOfMemory { .. } => true,
            Error::Io { source, .. } => {
                matches!(
                    source.kind(),
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                )
            }
            _ => false,
        }
    }

    /// The file concerned, where there is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Error::Io { path, .. }
            | Error::Malformed { path, .. }
            | Error::Unsupported { path, .. }
            | Error::Mismatch { path, .. }
            | Error::Changed { path, .. }
            | Error::Exists { path, .. }
            | Error::Conflict { path, .. } => Some(path),
            _ => None,
        }
    }

    /// The settings that the message advises to change.
    pub fn settings(&self) -> Vec<Setting> {
        Setting::named_in(&self.to_string())
    }

    /// The tensor concerned, where there is one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Error::Malformed { tensor, .. } | Error::Unsupported { tensor, .. } => tensor.as_deref(),
            Error::NoTensor { name, .. } => Some(name),
            _ => None,
        }
    }
}

/// ` (tensor "name")`, or nothing.
struct Named<'a>(&'a Option<String>);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |name| write!(f, ": tensor {name:?}"))
    }
}

/// ` (tensor "name")`, or nothing where the fault names its tensor itself.
struct Unnamed<'a>(&'a Option<String>, &'a Fault);

impl fmt::Display for Unnamed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.1.tensor().is_some() { Ok(()) } else { Named(self.0).fmt(f) }
    }
}

/// `, bytes 0..10`, or nothing.
struct Bytes<'a>(&'a Option<Range<u64>>);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |r| write!(f, ", bytes {}..{}", r.start, r.end))
    }
}

/// `; the nearest name is "a"`, or nothing.
struct Nearest<'a>(&'a [String], &'static str);

impl fmt::Display for Nearest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(|name| quoted(name)).collect();
        match names.as_slice() {
            [] => Ok(()),
            [one] => write!(f, "{}the nearest name is {one}", self.1),
            several => write!(f, "{}the nearest names are {}", self.1, several.join(", ")),
        }
    }
}

/// Names that nothing is called, each with the nearest ones.
struct NoneCalled<'a>(&'a [Absent]);

impl fmt::Display for NoneCalled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let near = |absent: &Absent| match absent.nearest.is_empty() {
            true => String::new(),
            false => format!(" ({})", Nearest(&absent.nearest, "")),
        };
        let listed: Listed = self.0.iter().map(|absent| quoted(&absent.name) + &near(absent)).collect();
        listed.fmt(f)
    }
}

/// Tensors and how many of their numbers.
pub(crate) struct Overflowed<'a>(pub(crate) &'a [(String, u64)]);

impl fmt::Display for Overflowed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, count)) in self.0.iter().take(Listed::SHOWN).enumerate() {
            let (comma, plural) = (if index > 0 { ", " } else { "" }, if *count == 1 { "" } else { "s" });
            write!(f, "{comma}{} ({count} number{plural})", quoted(name))?;
        }
        match self.0.len().saturating_sub(Listed::SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more tensors"),
        }
    }
}

/// `; do this`, or nothing.
struct Hint<'a>(&'a Option<String>);

impl fmt::Display for Hint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

/// A number of bytes, exactly and in GB, or that it is not known.
struct Size(Option<u64>);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => {
                write!(f, "{bytes} bytes ({}.{:02} GB)", bytes / 1_000_000_000, bytes % 1_000_000_000 / 10_000_000)
            }
            None => f.write_str("an unknown number"),
        }
    }
}

/// What is free, or which limit leaves how much.
struct Left(Option<u64>, Option<&'static str>);

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(limit) => write!(f, "{limit} leaves {}", Size(self.0)),
            None => write!(f, "{} free", Size(self.0)),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_that_counts_is_named() {
        let said = |limit| {
            let (needed, free) = (3_000_000_000, Some(210_000_000));
            Error::OutOfMemory { device: "cpu".into(), needed, free, limit }.to_string()
        };
        assert!(said(None).contains("210000000 bytes (0.21 GB) free; load less"), "{}", said(None));
        let limited = said(Some("RLIMIT_AS (ulimit -v)"));
        assert!(limited.contains("RLIMIT_AS (ulimit -v) leaves 210000000 bytes (0.21 GB); raise that"), "{limited}");
    }

    #[test]
    fn a_type_is_not_advised_against_itself() {
        let said =
            |to: &str| Error::Overflow { to: to.into(), reach: "3.4e38", tensors: vec![("a".into(), 1)] }.to_string();
        assert!(said("F16").contains("take a type of more range (BF16, F32), or allow it"), "{}", said("F16"));
        assert!(said("BF16").ends_with(": allow it with `Convert::allow_overflow`"), "{}", said("BF16"));
    }
}
