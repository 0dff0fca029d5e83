//! `vramp load`: loads a checkpoint, reports where the time went, and hashes what was loaded if asked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use serde_json::json;
use vramp::checkpoint::{Checkpoint, OpenOptions, Selected, Selection};
use vramp::device::{self, CpuDevice, Device};
use vramp::digest::Digest;
use vramp::load::{Loaded, Loader, Observer, Prepared, TransferOptions};
use vramp::report::Report;
use vramp::view::Mapped;

use super::args::{LoadArgs, ProgressArg, RouteArg};
use super::interrupt::Interrupt;
use super::output::{Failure, Output};
use super::progress::Progress;
use super::trace::{All, Trace};
use super::{digests, flags, inspect, limits, options, plan, report, strict, text, view};

/// What was meant.
struct Job {
    path: PathBuf,
    open: OpenOptions,
    selection: Selection,
    /// What the whole checkpoint must be like, under which names.
    demand: Option<(PathBuf, Selection)>,
    device: Arc<dyn Device>,
    /// Warnings about the choice of the device.
    warnings: Vec<String>,
    transfer: TransferOptions,
    progress: Option<Arc<Progress>>,
    trace: Option<Arc<Trace>>,
    way: Way,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    PlanOnly,
    View,
    Copy,
}

/// What a load gave, by whichever way.
enum Got {
    Copied(Loaded),
    Mapped(Mapped),
}

#[derive(Serialize)]
struct TensorLine<'a> {
    dtype: String,
    shape: &'a [usize],
    bytes: u64,
    /// The name whose bytes these are, where that is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    same_as: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<&'a Digest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
}

/// What was computed of the tensors as loaded, by their first names.
#[derive(Default)]
struct Proofs<'a> {
    digests: BTreeMap<&'a str, Digest>,
    checksums: BTreeMap<&'a str, u64>,
    /// Seconds for each kind that was asked for.
    digest_seconds: Option<f64>,
    checksum_seconds: Option<f64>,
}

pub(crate) fn run(args: &LoadArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let job = Job::of(args, output, interrupt)?;
    let started = Instant::now();
    let checkpoint = Arc::new(Checkpoint::open_with(&job.path, &job.open)?);
    let open_seconds = started.elapsed().as_secs_f64();
    inspect::opened(output, &checkpoint);
    job.trace.as_ref().map_or(Ok(()), |trace| trace.spare(checkpoint.shards()))?;
    interrupt.check()?;
    if let Some((spec, names)) = &job.demand {
        strict::demand(spec, &checkpoint, &job.open, names)?;
    }
    let selecting = Instant::now();
    let selected = checkpoint.select(&job.selection)?;
    let select_seconds = selecting.elapsed().as_secs_f64();
    if job.demand.is_none() {
        strict::demand_ties(&checkpoint, &selected, &job.selection.ties)?;
    }
    let mut loader = Loader::new(Arc::clone(&job.device), job.transfer.clone());
    let mut prepared = loader.prepare(Arc::clone(&checkpoint), &selected)?;
    prepared.open_seconds = open_seconds;
    prepared.plan_seconds += select_seconds;
    interrupt.check()?;
    output.warnings(checkpoint.warnings());
    if job.way == Way::PlanOnly {
        return show_plan(&job, &checkpoint, &prepared, output);
    }
    let got = job.carry_out(&mut loader, &checkpoint, &selected, &prepared, output);
    // Also of a load that failed, whose error then matters more; of one that did not, the report comes first.
    let traced = job.trace.as_ref().map_or(Ok(()), |trace| trace.write(checkpoint.shards()));
    let got = got?;
    let proofs = got.proofs(args, &prepared, interrupt)?;
    show(&job, &checkpoint, &got, &prepared, &proofs, output)?;
    if job.device.limits().host_visible {
        // The process is about to end: giving gigabytes back piece by piece would only cost the user time.
        std::mem::forget((got, loader));
    }
    traced
}

impl Job {
    fn of(args: &LoadArgs, output: Output, interrupt: &Interrupt) -> Result<Job, Failure> {
        let way = way(args);
        refuse_contradictions(args, way)?;
        let shows = args.progress == ProgressArg::Auto && !output.is_quiet();
        let progress = shows.then(Progress::on_terminal).flatten();
        let trace = args.trace.as_deref().map(Trace::to).transpose()?;
        for (option, input) in
            [("--profile", &args.transfer.profile), ("--spec", &args.spec), ("--limits", &args.limits)]
        {
            trace.as_ref().map_or(Ok(()), |trace| trace.spare_input(option, input.as_deref()))?;
        }
        let observer = observer(progress.clone(), trace.clone());
        let selection = options::selection(&args.selection);
        let mut warnings = Vec::new();
        let device = open_device(args, &mut warnings)?;
        let limits = limits::for_load(args.limits.as_deref(), &mut warnings)?;
        output.warnings(&warnings);
        let transfer = options::transfer(&args.transfer, &args.convert)?.cancel(interrupt.cancel()).limits(limits);
        Ok(Job {
            path: args.path.clone(),
            open: options::open(&args.how),
            demand: args.spec.clone().map(|spec| (spec, options::names(&args.selection.names))),
            selection,
            device,
            warnings,
            transfer: observer.into_iter().fold(transfer, TransferOptions::observer),
            progress,
            trace,
            way,
        })
    }

    fn carry_out(
        &self,
        loader: &mut Loader,
        checkpoint: &Checkpoint,
        selected: &[Selected],
        prepared: &Prepared,
        output: Output,
    ) -> Result<Got, Failure> {
        if self.way == Way::View {
            return Ok(Got::Mapped(view::open(checkpoint, selected, prepared)?));
        }
        let loaded = loader.load(prepared);
        if let Some(progress) = &self.progress {
            progress.clear();
        }
        let loaded = loaded?;
        // Those of the checkpoint have been said before the load.
        output.warnings(loaded.warnings.get(checkpoint.warnings().len()..).unwrap_or_default());
        Ok(Got::Copied(loaded))
    }
}

/// The observer of the load.
fn observer(progress: Option<Arc<Progress>>, trace: Option<Arc<Trace>>) -> Option<Arc<dyn Observer>> {
    match (progress, trace) {
        (Some(progress), Some(trace)) => Some(Arc::new(All(vec![progress, trace]))),
        (Some(progress), None) => Some(progress),
        (None, Some(trace)) => Some(trace),
        (None, None) => None,
    }
}

fn way(args: &LoadArgs) -> Way {
    match args.transfer.route {
        _ if args.plan_only => Way::PlanOnly,
        RouteArg::View => Way::View,
        _ => Way::Copy,
    }
}

/// Options that would do nothing, or cannot be had together.
fn refuse_contradictions(args: &LoadArgs, way: Way) -> Result<(), Failure> {
    let view = args.transfer.route == RouteArg::View;
    let null = args.device.as_deref() == Some("null");
    let wrong = if null && args.digests {
        "--digests needs the bytes back, and the null device keeps none; use --device cpu"
    } else if null && args.checksums {
        "--checksums needs the bytes, and the null device keeps none; use --device cpu"
    } else if let Some(wrong) = options::contradiction(args.device.as_deref(), &args.transfer, &args.convert) {
        wrong
    } else if view && args.checksums {
        "--checksums is for tensors that are loaded; with --route view use --digests"
    } else if view && args.limits.is_some() {
        "--limits does nothing with --route view: nothing is copied"
    } else if view && args.trace.is_some() {
        "--trace has nothing to show for --route view: nothing is copied"
    } else if view && way == Way::PlanOnly {
        "--plan-only has nothing to plan for --route view: nothing is read"
    } else {
        return Ok(());
    };
    Err(Failure::Usage(wrong.to_owned()))
}

/// The device that was named, or the one that is best where what else was asked for allows it; a driver that is there and
/// cannot be used is worth a warning.
fn open_device(args: &LoadArgs, warnings: &mut Vec<String>) -> Result<Arc<dyn Device>, Failure> {
    match (&args.device, args.transfer.align) {
        (_, Some(align)) => Ok(Arc::new(CpuDevice::with_align(align))),
        (Some(name), None) => Ok(device::open(name)?),
        (None, None) if args.transfer.route == RouteArg::View => Ok(Arc::new(CpuDevice::new())),
        (None, None) => {
            let (device, unusable) = device::open_default();
            warnings.extend(unusable.map(|error| format!("{error}; loading to cpu")));
            Ok(device)
        }
    }
}

impl Got {
    fn warnings(&self) -> &[String] {
        match self {
            Got::Copied(loaded) => &loaded.warnings,
            Got::Mapped(mapped) => &mapped.warnings,
        }
    }

    fn report(&self) -> &Report {
        match self {
            Got::Copied(loaded) => &loaded.report,
            Got::Mapped(mapped) => &mapped.report,
        }
    }

    /// What was asked for to be computed of the tensors as loaded. None of it counts as loading.
    fn proofs<'a>(
        &self,
        args: &LoadArgs,
        prepared: &'a Prepared,
        interrupt: &Interrupt,
    ) -> Result<Proofs<'a>, Failure> {
        let mut proofs = Proofs::default();
        if args.checksums {
            let summing = Instant::now();
            proofs.checksums = self.checksums(prepared, interrupt)?;
            proofs.checksum_seconds = Some(summing.elapsed().as_secs_f64());
        }
        if args.digests {
            let hashing = Instant::now();
            proofs.digests = self.digests(prepared, interrupt)?;
            proofs.digest_seconds = Some(hashing.elapsed().as_secs_f64());
        }
        Ok(proofs)
    }

    /// The checksum of each tensor by its first name.
    fn checksums<'a>(&self, prepared: &'a Prepared, interrupt: &Interrupt) -> Result<BTreeMap<&'a str, u64>, Failure> {
        let Got::Copied(loaded) = self else { return Ok(BTreeMap::new()) }; // refused before
        let names = prepared.plan.placements.iter().map(|placement| placement.name.as_ref());
        names.map(|name| interrupt.check().and_then(|()| Ok((name, loaded.tensor(name)?.checksum()?)))).collect()
    }

    /// The digest of each tensor by its first name.
    fn digests<'a>(&self, prepared: &'a Prepared, interrupt: &Interrupt) -> Result<BTreeMap<&'a str, Digest>, Failure> {
        let names = prepared.plan.placements.iter().map(|placement| placement.name.as_ref());
        match self {
            Got::Copied(loaded) => {
                let tensors = names.map(|name| Ok((name, loaded.tensor(name)?))).collect::<Result<_, Failure>>()?;
                digests::of(tensors, |tensor| tensor.byte_len(), |tensor| tensor.sha256(), interrupt)
            }
            Got::Mapped(mapped) => {
                let tensors = names.map(|name| Ok((name, mapped.tensor(name)?))).collect::<Result<_, Failure>>()?;
                digests::of(tensors, |tensor| tensor.byte_len(), |tensor| tensor.sha256(), interrupt)
            }
        }
    }
}

fn show(
    job: &Job,
    checkpoint: &Checkpoint,
    got: &Got,
    prepared: &Prepared,
    proofs: &Proofs<'_>,
    output: Output,
) -> Result<(), Failure> {
    let report = got.report();
    if output.json {
        let tensors = tensor_lines(prepared, proofs);
        let warnings = flags::in_messages(job.warnings.iter().chain(got.warnings()));
        let scales = prepared.plan.scaled();
        return output.json(&json!({
            "device": report.device, "tensors": tensors, "scales": scales, "report": report, "warnings": warnings,
            "skipped": checkpoint.skipped(), "tensors_left_out": checkpoint.tensors_left_out(),
        }));
    }
    let mut out = report::text(report);
    let lines = tensor_lines(prepared, proofs);
    if let Some(seconds) = proofs.digest_seconds {
        out.push_str(&format!("{:<12}{} for SHA-256, not in the time above\n\n", "digests", text::seconds(seconds)));
        let digests = lines.iter().filter_map(|(name, line)| line.sha256.map(|digest| (digest.to_string(), *name)));
        out.extend(digests.map(proof_line));
    }
    if let Some(seconds) = proofs.checksum_seconds {
        out.push_str(&format!("{:<12}{}, not in the time above\n\n", "checksums", text::seconds(seconds)));
        let sums = lines.iter().filter_map(|(name, line)| line.checksum.clone().map(|sum| (sum, *name)));
        out.extend(sums.map(proof_line));
    }
    out.push_str(&text::scales(&prepared.plan.scaled()));
    out.push_str(&text::left_out(checkpoint.tensors_left_out()));
    output.text(&out)
}

fn proof_line((proof, name): (String, &str)) -> String {
    format!("{proof}  {}\n", text::escape(name))
}

/// All tensors under all their names.
fn tensor_lines<'a>(prepared: &'a Prepared, proofs: &'a Proofs<'_>) -> BTreeMap<&'a str, TensorLine<'a>> {
    let mut lines = BTreeMap::new();
    for placement in &prepared.plan.placements {
        for name in std::iter::once(&placement.name).chain(&placement.aliases) {
            let first = placement.same_as.as_deref().unwrap_or(&placement.name);
            let line = TensorLine {
                dtype: placement.dtype.to_string(),
                shape: &placement.shape,
                bytes: placement.bytes,
                same_as: Some(first).filter(|first| *first != name.as_ref()),
                sha256: proofs.digests.get(placement.name.as_ref()),
                checksum: proofs.checksums.get(placement.name.as_ref()).map(|sum| format!("{sum:016x}")),
            };
            lines.insert(name.as_ref(), line);
        }
    }
    lines
}

fn show_plan(job: &Job, checkpoint: &Checkpoint, prepared: &Prepared, output: Output) -> Result<(), Failure> {
    if output.json {
        let warnings = job.warnings.iter().chain(checkpoint.warnings()).chain(&prepared.warnings);
        let warnings = flags::in_messages(warnings);
        let device = job.device.name();
        return output.json(&json!({
            "device": device,
            "tensors": tensor_lines(prepared, &Proofs::default()),
            "scales": prepared.plan.scaled(),
            "plan": prepared.plan,
            "warnings": warnings,
        }));
    }
    output.warnings(&prepared.warnings);
    let scales = text::scales(&prepared.plan.scaled());
    output.text(&(plan::text(prepared, checkpoint.shards(), &job.device.name(), output.is_verbose()) + &scales))
}
