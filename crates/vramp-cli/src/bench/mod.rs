//! `vramp bench`: measures each stage of a load here, predicts T, loads cold and warm, compares, says what to change, draws.
//!
//! The library measures; this folder turns what was typed into its options, and what it found into text, JSON, CSV and HTML.
//! It refuses the software driver of the tests: a number from it would be nobody's.

mod advice;
mod csv;
mod html;
mod labels;
#[cfg(test)]
mod sample;
mod text;
mod tuning;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use serde::Serialize;
use vramp::Error;
use vramp::checkpoint::Checkpoint;
use vramp::device::{self, CpuDevice, Device};
use vramp_bench::{BenchReport, DeviceOpener, Effort, Options, Tuning};

use super::args::{BenchArgs, RouteArg};
use super::interrupt::Interrupt;
use super::limits::Keeper;
use super::options;
use super::output::{Failure, Output};
use super::whole_file::WholeFile;
pub(crate) use text::text;

/// What the product of the tests' software driver is called.
const DOUBLE: &str = "test double";

/// The files that were asked for.
struct Files {
    csv: Option<WholeFile>,
    html: Option<WholeFile>,
    profile: Option<WholeFile>,
    limits: Keeper,
}

/// What was found out.
struct Found {
    report: BenchReport,
    tuning: Option<Tuning>,
}

/// What programs get.
#[derive(Serialize)]
pub(crate) struct Answer<'a> {
    #[serde(flatten)]
    report: &'a BenchReport,
    advice: BTreeMap<&'static str, String>,
    tuning: Option<&'a Tuning>,
}

/// Benchmarks loads to host memory with the usual options.
pub(crate) fn on_host(
    path: &Path,
    effort: Effort,
    output: Output,
    interrupt: &Interrupt,
) -> Result<BenchReport, Failure> {
    let mut options = Options::new(Box::new(|| Ok(Arc::new(CpuDevice::new()))), effort);
    options.transfer.cancel = interrupt.cancel();
    Ok(vramp_bench::run(path, &options, &|what| output.note(what))?)
}

pub(crate) fn run(args: &BenchArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    refuse_contradictions(args)?;
    let files = Files::of(args)?;
    let checkpoint = Checkpoint::open_with(&args.path, &options::open(&args.how))?;
    files.spare(&checkpoint)?;
    let mut found = measure(args, output, interrupt)?;
    let kept = files.limits.keep(found.report.limits.as_ref());
    let kept = kept.map(|unkept| found.report.warnings.extend(unkept));
    output.warnings(&found.report.warnings);
    let written = files.write(&found);
    // What was found comes first, also when a file could not be written.
    if output.json { output.json(&answer(&found.report, found.tuning.as_ref())) } else { output.text(&said(&found)) }?;
    written.and(kept)
}

fn said(found: &Found) -> String {
    let tuning = found.tuning.as_ref().map_or(String::new(), |tuning| format!("\n{}", tuning::text(tuning)));
    text(&found.report) + &tuning
}

fn refuse_contradictions(args: &BenchArgs) -> Result<(), Failure> {
    let wrong = if args.transfer.route == RouteArg::View {
        Some("--route view copies nothing, so there is nothing to measure; see vramp load --route view")
    } else {
        options::contradiction(args.device.as_deref(), &args.transfer, &args.convert)
    };
    wrong.map_or(Ok(()), |wrong| Err(Failure::Usage(wrong.to_owned())))
}

/// The library measures, and searches if asked.
fn measure(args: &BenchArgs, output: Output, interrupt: &Interrupt) -> Result<Found, Failure> {
    let unusable = Rc::new(RefCell::new(None));
    let transfer = options::transfer(&args.transfer, &args.convert)?.cancel(interrupt.cancel());
    let opener = opener(args, Rc::clone(&unusable));
    let options = Options { open: options::open(&args.how), transfer, ..Options::new(opener, effort(args)) };
    let progress = |what: &str| output.note(what);
    let mut report = vramp_bench::run(&args.path, &options, &progress)?;
    report.warnings.extend(unusable.take());
    let tuning = args.tune.map(|budget| vramp_bench::tune(&args.path, &options, budget, &progress)).transpose()?;
    Ok(Found { report, tuning })
}

fn effort(args: &BenchArgs) -> Effort {
    let mut effort = if args.quick { Effort::QUICK } else { Effort::THOROUGH };
    effort.rounds = args.rounds.map_or(effort.rounds, usize::from);
    effort
}

/// What opens the device that was named, or the one that is best; why a GPU that is there is not used goes to `unusable`.
fn opener(args: &BenchArgs, unusable: Rc<RefCell<Option<String>>>) -> DeviceOpener {
    let (name, align) = (args.device.clone(), args.transfer.align);
    Box::new(move || match (&name, align) {
        (_, Some(align)) => Ok(Arc::new(CpuDevice::with_align(align))),
        (Some(name), None) => no_double(device::open(name)?),
        (None, None) => {
            let (device, why) = device::open_default();
            let why = why.map(|error| format!("{error}; loading to cpu"));
            unusable.replace(why);
            no_double(device)
        }
    })
}

/// The device, unless it is none.
fn no_double(device: Arc<dyn Device>) -> vramp::Result<Arc<dyn Device>> {
    let product = device.product().unwrap_or_default();
    if !product.contains(DOUBLE) {
        return Ok(device);
    }
    let message = format!("{product} is a driver in software and no GPU: nothing is measured on it; use --device cpu");
    Err(Error::Device { device: device.name(), op: "bench", message })
}

/// What programs get.
pub(crate) fn answer<'a>(report: &'a BenchReport, tuning: Option<&'a Tuning>) -> Answer<'a> {
    let advice = advice::of(report).into_iter().map(|(state, said)| (labels::state(state), said)).collect();
    Answer { report, advice, tuning }
}

impl Files {
    fn of(args: &BenchArgs) -> Result<Files, Failure> {
        let place = |asked: &Option<PathBuf>, option, what| {
            asked.as_deref().map(|asked| WholeFile::to(asked, option, what)).transpose()
        };
        let files = Files {
            csv: place(&args.csv, "--csv", "samples")?,
            html: place(&args.html, "--html", "report")?,
            profile: place(&args.save_profile, "--save-profile", "profile")?,
            limits: Keeper::to(args.limits.as_deref())?,
        };
        files.all().try_for_each(|file| file.spare_input("--profile", args.transfer.profile.as_deref()))?;
        let all: Vec<&WholeFile> = files.all().collect();
        all.iter()
            .enumerate()
            .try_for_each(|(at, file)| all.iter().skip(at + 1).try_for_each(|other| file.apart_from(other)))?;
        Ok(files)
    }

    fn all(&self) -> impl Iterator<Item = &WholeFile> {
        [self.csv.as_ref(), self.html.as_ref(), self.profile.as_ref(), self.limits.named()].into_iter().flatten()
    }

    /// Refuses to write over what is about to be loaded.
    fn spare(&self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        self.all().try_for_each(|file| file.spare(checkpoint.shards()))
    }

    /// Writes all of them, also when one fails.
    fn write(&self, found: &Found) -> Result<(), Failure> {
        let Found { report, tuning } = found;
        let csv = self.csv.as_ref().map(|file| file.write(|out| csv::write(report, out)));
        let html = self
            .html
            .as_ref()
            .map(|file| file.write(|out| out.write_all(html::document(report, tuning.as_ref()).as_bytes())));
        let profile = self
            .profile
            .as_ref()
            .zip(tuning.as_ref())
            .map(|(file, tuning)| file.write(|out| out.write_all(&tuning::file_of(&tuning.profile)?)));
        [csv, html, profile].into_iter().flatten().fold(Ok(()), Result::and)
    }
}
