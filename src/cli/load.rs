//! `vramp load`: loads a checkpoint, reports where the time went, and hashes what was loaded if asked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use serde_json::json;
use vramp::Error;
use vramp::checkpoint::{Checkpoint, OpenOptions, Selected, Selection};
use vramp::device::{self, CpuDevice, Device};
use vramp::digest::Digest;
use vramp::load::{Loaded, Loader, Observer, Prepared, TransferOptions};
use vramp::plan::RouteChoice;
use vramp::report::Report;
use vramp::view::Mapped;

use super::args::{LoadArgs, ProgressArg, RouteArg};
use super::interrupt::Interrupt;
use super::output::{Failure, Output};
use super::progress::Progress;
use super::{digests, options, plan, report, strict, text, view};

/// What was meant.
struct Job {
    path: PathBuf,
    open: OpenOptions,
    selection: Selection,
    /// What the whole checkpoint must be like, under which names.
    demand: Option<(PathBuf, Selection)>,
    device: Arc<dyn Device>,
    transfer: TransferOptions,
    progress: Option<Arc<Progress>>,
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
    shape: &'a [u64],
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<&'a Digest>,
}

pub(crate) fn run(args: &LoadArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let job = Job::of(args, interrupt)?;
    let started = Instant::now();
    let checkpoint = Checkpoint::open_with(&job.path, &job.open)?;
    let open_seconds = started.elapsed().as_secs_f64();
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
    let mut prepared = loader.prepare(&checkpoint, &selected)?;
    prepared.open_seconds = open_seconds;
    prepared.plan_seconds += select_seconds;
    interrupt.check()?;
    output.warnings(checkpoint.warnings());
    if job.way == Way::PlanOnly {
        return show_plan(&job, &checkpoint, &prepared, output);
    }
    let got = job.carry_out(&mut loader, &checkpoint, &selected, &prepared)?;
    let hashing = Instant::now();
    let digests = if args.digests { got.digests(&prepared, interrupt)? } else { BTreeMap::new() };
    let digest_seconds = args.digests.then(|| hashing.elapsed().as_secs_f64());
    show(&got, &prepared, &digests, digest_seconds, &checkpoint, output)?;
    // The process is about to end: giving gigabytes back piece by piece would only cost the user time.
    std::mem::forget((got, loader));
    Ok(())
}

impl Job {
    fn of(args: &LoadArgs, interrupt: &Interrupt) -> Result<Job, Failure> {
        let way = way(args);
        refuse_contradictions(args, way)?;
        let progress = (args.progress == ProgressArg::Auto).then(Progress::on_terminal).flatten();
        let selection = options::selection(&args.selection);
        Ok(Job {
            path: args.path.clone(),
            open: options::open(&args.how),
            demand: args.spec.clone().map(|spec| (spec, options::names(&args.selection.names))),
            selection,
            device: open_device(args)?,
            transfer: TransferOptions {
                route: route(args.transfer.route),
                staging: args.transfer.staging,
                cancel: interrupt.cancel(),
                observer: progress.clone().map(|progress| progress as Arc<dyn Observer>),
                ..TransferOptions::default()
            },
            progress,
            way,
        })
    }

    fn carry_out(
        &self,
        loader: &mut Loader,
        checkpoint: &Checkpoint,
        selected: &[Selected],
        prepared: &Prepared,
    ) -> Result<Got, Failure> {
        if self.way == Way::View {
            return Ok(Got::Mapped(view::open(checkpoint, selected, prepared)?));
        }
        let loaded = loader.load(checkpoint, prepared);
        if let Some(progress) = &self.progress {
            progress.clear();
        }
        Ok(Got::Copied(loaded?))
    }
}

fn way(args: &LoadArgs) -> Way {
    match args.transfer.route {
        _ if args.plan_only => Way::PlanOnly,
        RouteArg::View => Way::View,
        _ => Way::Copy,
    }
}

fn route(route: RouteArg) -> RouteChoice {
    match route {
        RouteArg::Auto => RouteChoice::Auto,
        RouteArg::Direct => RouteChoice::Direct,
        RouteArg::Buffered => RouteChoice::Buffered,
        RouteArg::Mapped | RouteArg::View => RouteChoice::Mapped,
    }
}

/// Options that would do nothing, or cannot be had together.
fn refuse_contradictions(args: &LoadArgs, way: Way) -> Result<(), Failure> {
    let view = args.transfer.route == RouteArg::View;
    let null = args.device == "null";
    let wrong = if null && args.digests {
        "--digests needs the bytes back, and the null device keeps none; use --device cpu"
    } else if args.transfer.align.is_some() && args.device != "cpu" {
        "--align is for --device cpu"
    } else if view && args.device != "cpu" {
        "--route view is for --device cpu: a view borrows host memory"
    } else if view && args.transfer.align.is_some() {
        "--align cannot be had with --route view: a view lies where it lies in the file"
    } else if view && args.transfer.staging.is_some() {
        "--staging does nothing with --route view: nothing is copied"
    } else if view && way == Way::PlanOnly {
        "--plan-only has nothing to plan for --route view: nothing is read"
    } else {
        return Ok(());
    };
    Err(Failure::Usage(wrong.to_owned()))
}

fn open_device(args: &LoadArgs) -> Result<Arc<dyn Device>, Failure> {
    if args.device.starts_with("cuda") {
        let message = "this version of vramp has no CUDA device yet; --device is cpu or null".to_owned();
        return Err(Error::Device { device: args.device.clone(), op: "open", message }.into());
    }
    match args.transfer.align {
        Some(align) => Ok(Arc::new(CpuDevice::with_align(align))),
        None => Ok(device::open(&args.device)?),
    }
}

impl Got {
    fn report(&self) -> &Report {
        match self {
            Got::Copied(loaded) => &loaded.report,
            Got::Mapped(mapped) => &mapped.report,
        }
    }

    /// The digest of each tensor by its first name.
    fn digests<'a>(&self, prepared: &'a Prepared, interrupt: &Interrupt) -> Result<BTreeMap<&'a str, Digest>, Failure> {
        let names = prepared.plan.placements.iter().map(|placement| placement.name.as_ref());
        match self {
            Got::Copied(loaded) => {
                let tensors = names.map(|name| Ok((name, loaded.tensor(name)?))).collect::<Result<_, Failure>>()?;
                digests::of(tensors, |tensor| tensor.len(), |tensor| tensor.sha256(), interrupt)
            }
            Got::Mapped(mapped) => {
                let tensors = names.map(|name| Ok((name, mapped.tensor(name)?))).collect::<Result<_, Failure>>()?;
                digests::of(tensors, |tensor| tensor.len(), |tensor| tensor.sha256(), interrupt)
            }
        }
    }
}

fn show(
    got: &Got,
    prepared: &Prepared,
    digests: &BTreeMap<&str, Digest>,
    digest_seconds: Option<f64>,
    checkpoint: &Checkpoint,
    output: Output,
) -> Result<(), Failure> {
    let report = got.report();
    if output.json {
        let tensors = tensor_lines(prepared, digests);
        let warnings = checkpoint.warnings();
        return output
            .json(&json!({"device": report.device, "tensors": tensors, "report": report, "warnings": warnings}));
    }
    let mut out = report::text(report);
    if let Some(seconds) = digest_seconds {
        out.push_str(&format!("{:<12}{} for SHA-256, not in the time above\n\n", "digests", text::seconds(seconds)));
        for (name, line) in tensor_lines(prepared, digests) {
            if let Some(digest) = line.sha256 {
                out.push_str(&format!("{digest}  {}\n", text::escape(name)));
            }
        }
    }
    output.text(&out)
}

/// All tensors under all their names.
fn tensor_lines<'a>(prepared: &'a Prepared, digests: &'a BTreeMap<&str, Digest>) -> BTreeMap<&'a str, TensorLine<'a>> {
    let mut lines = BTreeMap::new();
    for placement in &prepared.plan.placements {
        for name in std::iter::once(&placement.name).chain(&placement.aliases) {
            let line = TensorLine {
                dtype: placement.dtype.to_string(),
                shape: &placement.shape,
                bytes: placement.bytes,
                sha256: digests.get(placement.name.as_ref()),
            };
            lines.insert(name.as_ref(), line);
        }
    }
    lines
}

fn show_plan(job: &Job, checkpoint: &Checkpoint, prepared: &Prepared, output: Output) -> Result<(), Failure> {
    if output.json {
        let (device, warnings) = (job.device.name(), checkpoint.warnings());
        return output.json(&json!({
            "device": device,
            "tensors": tensor_lines(prepared, &BTreeMap::new()),
            "plan": prepared.plan,
            "warnings": warnings,
        }));
    }
    let device = format!("{:<14}{}\n", "  device", job.device.name());
    output.text(&(plan::text(prepared, checkpoint.shards()) + "\n" + &device))
}
