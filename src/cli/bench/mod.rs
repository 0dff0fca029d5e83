//! `vramp bench`: measures each stage of a load here, predicts T, loads cold and warm, compares, says what to change, draws.
//!
//! The library measures; this folder turns what was typed into its options, and what it found into text, JSON, CSV and HTML.
//! It refuses the software driver of the tests: a number from it would be nobody's.

mod advice;
mod csv;
mod html;
#[cfg(test)]
mod sample;
mod text;
mod words;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use serde::Serialize;
use vramp::Error;
use vramp::bench::{self, BenchReport, DeviceOpener, Effort, Options};
use vramp::checkpoint::Checkpoint;
use vramp::device::{self, CpuDevice, Device};
use vramp::load::TransferOptions;

use super::args::{BenchArgs, RouteArg};
use super::interrupt::Interrupt;
use super::options;
use super::output::{Failure, Output};
use super::whole_file::WholeFile;

/// What the product of the tests' software driver is called.
const DOUBLE: &str = "test double";

/// The files that were asked for.
struct Files {
    csv: Option<WholeFile>,
    html: Option<WholeFile>,
}

/// What programs get.
#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    report: &'a BenchReport,
    advice: BTreeMap<&'static str, String>,
}

pub(crate) fn run(args: &BenchArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    refuse_contradictions(args)?;
    let files = Files::of(args)?;
    let checkpoint = Checkpoint::open_with(&args.path, &options::open(&args.how))?;
    files.spare(&checkpoint)?;
    let report = measure(args, output, interrupt)?;
    output.warnings(&report.warnings);
    let written = files.write(&report);
    // What was found comes first, also when a file could not be written.
    if output.json { output.json(&answer(&report)) } else { output.text(&text::text(&report)) }?;
    written
}

fn refuse_contradictions(args: &BenchArgs) -> Result<(), Failure> {
    let wrong = if args.transfer.route == RouteArg::View {
        Some("--route view copies nothing, so there is nothing to measure; see vramp load --route view")
    } else {
        options::contradiction(args.device.as_deref(), &args.transfer, &args.convert)
    };
    wrong.map_or(Ok(()), |wrong| Err(Failure::Usage(wrong.to_owned())))
}

/// The library measures.
fn measure(args: &BenchArgs, output: Output, interrupt: &Interrupt) -> Result<BenchReport, Failure> {
    let unusable = Rc::new(RefCell::new(None));
    let transfer = TransferOptions { cancel: interrupt.cancel(), ..options::transfer(&args.transfer, &args.convert) };
    let opener = opener(args, Rc::clone(&unusable));
    let options = Options { open: options::open(&args.how), transfer, ..Options::new(opener, effort(args)) };
    let mut report = bench::run(&args.path, &options, &|what| output.note(what))?;
    report.warnings.extend(unusable.take());
    Ok(report)
}

fn effort(args: &BenchArgs) -> Effort {
    let mut effort = if args.quick { Effort::quick() } else { Effort::thorough() };
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

fn answer(report: &BenchReport) -> Answer<'_> {
    let advice = advice::of(report).into_iter().map(|(state, said)| (words::state(state), said)).collect();
    Answer { report, advice }
}

impl Files {
    fn of(args: &BenchArgs) -> Result<Files, Failure> {
        let csv = args.csv.as_deref().map(|asked| WholeFile::to(asked, "--csv", "samples")).transpose()?;
        let html = args.html.as_deref().map(|asked| WholeFile::to(asked, "--html", "report")).transpose()?;
        csv.as_ref().zip(html.as_ref()).map_or(Ok(()), |(csv, html)| csv.apart_from(html))?;
        Ok(Files { csv, html })
    }

    /// Refuses to write over what is about to be loaded.
    fn spare(&self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        [&self.csv, &self.html].into_iter().flatten().try_for_each(|file| file.spare(checkpoint.shards()))
    }

    /// Writes all of them, also when one fails.
    fn write(&self, report: &BenchReport) -> Result<(), Failure> {
        let csv = self.csv.as_ref().map_or(Ok(()), |file| file.write(|out| csv::write(report, out)));
        let html = self
            .html
            .as_ref()
            .map_or(Ok(()), |file| file.write(|out| out.write_all(html::document(report)?.as_bytes())));
        csv.and(html)
    }
}
