//! Where results, warnings and errors go: results to stdout, the rest to stderr; text for people or JSON for programs.
//!
//! Colours are stripped where stdout or stderr is no terminal or NO_COLOR is set (that is `anstream`'s doing). A closed
//! stdout (`| head`) is no failure. This is the only file of the program that writes to the standard streams, apart from
//! the progress bar.

use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;
use vramp::Error;

use super::flags;
use super::screen::Screen;
use super::text::{self, BAD, DIM, WARN};

/// The exit status after a panic, that is a bug of ours: not 101, and shared with devices, as `Error::Poisoned` is.
pub(crate) const INTERNAL_ERROR: u8 = 5;

/// Why a command ends without having done what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The library said no.
    Library(Error),
    /// The library said no to a file that its error may not name: the file is `path`.
    LibraryAt { error: Error, path: PathBuf },
    /// Options that make no sense together.
    Usage(String),
    /// A check says no, and its verdict is already on stdout.
    CheckFailed,
    /// The input is refused, and what was found is already on stdout.
    Refused,
    /// Something else of the operating system: what could not be done, to which file if to one, and why.
    System { what: String, path: Option<PathBuf>, source: io::Error },
    /// Too little memory (or else disk) for what was asked: which number, and what would fit.
    TooLittle { memory: bool, what: String },
    /// Nobody reads stdout any more.
    ReaderGone,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(error)
    }
}

impl Failure {
    /// The exit status of the program.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Library(error) | Failure::LibraryAt { error, .. } => error.exit_code(),
            Failure::Usage(_) => 2,
            Failure::CheckFailed => 1,
            Failure::Refused => 3,
            Failure::System { .. } | Failure::TooLittle { memory: false, .. } => 4,
            Failure::TooLittle { memory: true, .. } => 5,
            Failure::ReaderGone => 0,
        }
    }
}

/// How this run speaks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Output {
    pub(crate) json: bool,
    pub(crate) level: Level,
}

/// How much is said beside results and errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Level {
    /// Nothing.
    Quiet,
    /// Warnings; notes and progress on a terminal.
    #[default]
    Usual,
    /// Also what is being done, on stderr, terminal or not.
    Verbose,
}

impl Output {
    /// Whether a person wants results and errors only.
    pub(crate) fn is_quiet(&self) -> bool {
        self.level == Level::Quiet
    }

    /// Whether a person wants all that can be said.
    pub(crate) fn is_verbose(&self) -> bool {
        self.level == Level::Verbose
    }

    /// Prints a result for people. It brings its own line breaks.
    pub(crate) fn text(&self, text: &str) -> Result<(), Failure> {
        let text = Screen::stdout().folded(text);
        let mut stdout = anstream::stdout().lock();
        written(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
    }

    /// Prints a result for programs, on one line.
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<(), Failure> {
        let mut stdout = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
        let done = serde_json::to_writer(&mut stdout, value).map_err(io::Error::from);
        written(done.and_then(|()| stdout.write_all(b"\n")).and_then(|()| stdout.flush()))
    }

    /// Prints warnings for people; programs find them in the JSON.
    pub(crate) fn warnings(&self, warnings: &[String]) {
        if self.json || self.is_quiet() {
            return;
        }
        for warning in warnings {
            complain(&format!(
                "{}: {}\n",
                text::styled(WARN, "warning"),
                text::escape_lines(&flags::in_message(warning))
            ));
        }
    }

    /// Says on stderr what was meant for stdout and must not be lost with it.
    pub(crate) fn aside(&self, what: &str) {
        complain(&format!("{}\n", text::escape(what)));
    }

    /// Whether stdout leads nowhere: it is `/dev/null`, which also stands in for a stdout that was closed at the start.
    pub(crate) fn is_lost(&self) -> bool {
        let device = |path: &str| std::fs::metadata(path).ok().filter(|it| it.file_type().is_char_device());
        device("/dev/stdout").zip(device("/dev/null")).is_some_and(|(out, null)| out.rdev() == null.rdev())
    }

    /// Says what is being done, to a person who waits: where stderr is a terminal, or where more was asked for.
    pub(crate) fn note(&self, what: &str) {
        let is_wanted = match self.level {
            Level::Quiet => false,
            Level::Usual => io::stderr().is_terminal(),
            Level::Verbose => true,
        };
        if is_wanted {
            complain(&format!("{}\n", text::styled(DIM, text::escape(what))));
        }
    }

    /// Says what only those want to know who asked for more. Programs get their JSON and nothing beside it.
    pub(crate) fn detail(&self, what: impl FnOnce() -> String) {
        if self.is_verbose() && !self.json {
            complain(&format!("{}\n", text::styled(DIM, text::escape_lines(&what()))));
        }
    }

    /// Prints why the program failed. `asked` is the path that was typed, for failures that name no file themselves.
    pub(crate) fn failure(&self, failure: &Failure, asked: Option<&Path>) {
        let library = |error: &Error, path: Option<&Path>| {
            let path = error.path().or(path.filter(|_| is_about_input(error)));
            self.error(error.kind().as_str(), &error.to_string(), &causes_of(error), path, error.tensor());
        };
        match failure {
            Failure::Library(error) => library(error, asked),
            Failure::LibraryAt { error, path } => library(error, Some(path)),
            Failure::Usage(what) => self.error("usage", what, &[], None, None),
            Failure::System { what, path, source } => {
                self.error("io", what, &[source.to_string()], path.as_deref(), None);
            }
            Failure::TooLittle { memory: true, what } => self.error("out_of_memory", what, &[], None, None),
            Failure::TooLittle { memory: false, what } => self.error("disk_full", what, &[], asked, None),
            Failure::CheckFailed | Failure::Refused | Failure::ReaderGone => {}
        }
    }

    /// Prints one error: a line of JSON, or a message with its causes.
    pub(crate) fn error(
        &self,
        kind: &str,
        message: &str,
        causes: &[String],
        path: Option<&Path>,
        tensor: Option<&str>,
    ) {
        let (message, causes) = (flags::in_message(message), flags::in_messages(causes));
        if self.json {
            let path = path.map(|path| path.display().to_string());
            let error = json!({"kind": kind, "message": message, "path": path, "tensor": tensor, "causes": causes});
            write_to_stderr(&format!("{}\n", json!({ "error": error })));
            return;
        }
        let mut out = format!("{}: {}\n", text::styled(BAD, "error"), text::escape_lines(&message));
        for cause in &causes {
            out.push_str(&format!("  because: {}\n", text::escape_lines(cause)));
        }
        complain(&out);
    }
}

/// Whether an error that names no file is about the checkpoint all the same, and not about the machine or the user's wish to stop.
fn is_about_input(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound { .. }
            | Error::NoTensor { .. }
            | Error::NoMatch { .. }
            | Error::Request { .. }
            | Error::Limit { .. }
            | Error::OutOfMemory { .. }
    )
}

/// The chain of causes below an error.
fn causes_of(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string).collect()
}

/// Writes to stderr, for people.
fn complain(text: &str) {
    write_to_stderr(&Screen::stderr().folded(text));
}

/// A stderr that is gone leaves nobody to tell.
fn write_to_stderr(text: &str) {
    let _ = anstream::stderr().lock().write_all(text.as_bytes());
}

/// For verdicts: whoever closes stdout early asks for less text, and for no other exit status.
pub(crate) fn even_unheard(printed: Result<(), Failure>) -> Result<(), Failure> {
    match printed {
        Err(Failure::ReaderGone) => Ok(()),
        other => other,
    }
}

/// A closed pipe is not our failure; anything else on stdout is.
fn written(result: io::Result<()>) -> Result<(), Failure> {
    result.map_err(|source| match source.kind() {
        io::ErrorKind::BrokenPipe => Failure::ReaderGone,
        _ => Failure::System { what: "cannot write to standard output".to_owned(), path: None, source },
    })
}
