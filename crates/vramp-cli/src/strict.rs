//! `vramp verify`, and the check of `vramp load --spec`: is the checkpoint what a model demands? Names, types, shapes, ties.

use std::path::Path;

use vramp::Error;
use vramp::checkpoint::strict::{self, Spec, TieStatus, Verdict};
use vramp::checkpoint::{Checkpoint, OpenOptions, Selected, Selection, Tie};
use vramp::error::Listed;

use super::args::VerifyArgs;
use super::interrupt::Interrupt;
use super::output::{Failure, Output, even_unheard};
use super::text::{self, BAD, GOOD};
use super::{flags, inspect, options};

pub(crate) fn run(args: &VerifyArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let open = options::open(&args.how);
    let spec = read_spec(&args.spec, &open)?;
    let checkpoint = Checkpoint::open_with(&args.path, &open)?;
    inspect::opened(output, &checkpoint);
    interrupt.check()?;
    let mut verdict = check(&spec, &checkpoint, &options::names(&args.names))?;
    verdict.suggestion = verdict.suggestion.as_deref().map(flags::in_message);
    output.warnings(checkpoint.warnings());
    let printed = if output.json { output.json(&verdict) } else { output.text(&as_text(&verdict, &checkpoint)) };
    even_unheard(printed)?;
    if verdict.ok { Ok(()) } else { Err(Failure::CheckFailed) }
}

/// Refuses a checkpoint that is not what `spec` demands, with the whole verdict.
pub(crate) fn demand(
    spec: &Path,
    checkpoint: &Checkpoint,
    open: &OpenOptions,
    names: &Selection,
) -> Result<(), Failure> {
    Ok(check(&read_spec(spec, open)?, checkpoint, names)?.demand(checkpoint.path())?)
}

/// Refuses ties between two stored tensors whose bytes differ: to load both would be to load what was not meant.
pub(crate) fn demand_ties(checkpoint: &Checkpoint, selected: &[Selected], ties: &[Tie]) -> Result<(), Failure> {
    if ties.is_empty() {
        return Ok(());
    }
    let mut verdict = strict::check(checkpoint, selected, &Spec::default(), ties);
    verdict.compare_ties(checkpoint, |a, b| strict::same_bytes(checkpoint, a, b))?;
    let differ = verdict.ties.iter().filter(|tie| tie.status == TieStatus::Conflict);
    let differ: Listed = differ.map(ToString::to_string).collect();
    if differ.is_empty() {
        return Ok(());
    }
    let report = format!("--tied: {differ}");
    Err(Error::Mismatch { path: checkpoint.path().to_owned(), report }.into())
}

/// A selection that cannot be made (two names that become one after stripping) is a verdict as well: not what was demanded.
fn check(spec: &Spec, checkpoint: &Checkpoint, names: &Selection) -> Result<Verdict, Failure> {
    let mismatch = |report: String| Error::Mismatch { path: checkpoint.path().to_owned(), report };
    strict::verify(checkpoint, names, spec).map_err(|error| match error {
        Error::Request { .. } | Error::NoMatch { .. } => mismatch(error.to_string()).into(),
        other => other.into(),
    })
}

/// A checkpoint is opened as the one that is checked; anything else is a list of tensors, which the library reads. `-` is
/// standard input.
fn read_spec(path: &Path, open: &OpenOptions) -> Result<Spec, Failure> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| Failure::LibraryAt { error, path }
    };
    if path == Path::new("-") {
        let name = Path::new("standard input");
        return Spec::read(std::io::stdin().lock(), name).map_err(at(name));
    }
    let spec = match Spec::text_at(path, &*open.storage).map_err(at(path))? {
        Some(text) => Spec::parse(&text).map_err(|fault| Error::malformed(path, fault)),
        None => {
            // The key is that of the checkpoint which is judged.
            let mut open = open.clone();
            open.key = None;
            Checkpoint::open_with(path, &open).map(|checkpoint| Spec::from(&checkpoint))
        }
    };
    spec.map_err(at(path))
}

fn as_text(verdict: &Verdict, checkpoint: &Checkpoint) -> String {
    let word = if verdict.ok { text::styled(GOOD, "ok") } else { text::styled(BAD, "no match") };
    let path = text::escape(&checkpoint.path().display().to_string());
    format!("{word}: {path}: {}\n", text::escape_lines(verdict.to_string().trim_end()))
}
