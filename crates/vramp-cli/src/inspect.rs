//! `vramp inspect`: what a checkpoint holds, from its headers alone. No byte of a tensor is read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use serde::Serialize;
use vramp::checkpoint::{Checkpoint, Format, Selected, Shard, Skipped};
use vramp::device::CpuDevice;
use vramp::load::{Loader, Prepared, TransferOptions};

use super::args::InspectArgs;
use super::interrupt::Interrupt;
use super::listing::{
    Listed, OfType, by_type, counted_files, file_names, list_all, list_selected, parameters, total_bytes,
};
use super::output::{Failure, Output};
use super::screen::Screen;
use super::text::{self, Align, BOLD, DIM, Table};
use super::{flags, options, plan, tree};

/// Further names that the summary shows.
const MOST_TIES: usize = 12;

/// Entries of the metadata that it shows.
const MOST_METADATA: usize = 12;

/// Tensors that are listed without `--all`.
const MOST_TENSORS: usize = 20;

#[derive(Serialize)]
struct ShardListed {
    path: String,
    bytes: u64,
    /// Not as it lies in the file: made when it is loaded.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    made: bool,
}

#[derive(Serialize)]
struct Inspected<'a> {
    path: String,
    format: Format,
    shards: Vec<ShardListed>,
    metadata: &'a BTreeMap<String, String>,
    total_bytes: u64,
    parameters: u64,
    dtypes: BTreeMap<&'a str, OfType>,
    tensors: BTreeMap<&'a str, &'a Listed>,
    /// Further names and the tensors that they mean.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    ties: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a vramp::plan::LoadPlan>,
    #[serde(skip_serializing_if = "<[Skipped]>::is_empty")]
    skipped: &'a [Skipped],
    warnings: Vec<String>,
}

pub(crate) fn run(args: &InspectArgs, output: Output, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut checkpoint = Checkpoint::open_with(&args.path, &options::open(&args.how))?;
    if !args.plan {
        // It lists; what a load would refuse is in the warnings.
        checkpoint = checkpoint.passing_over();
    }
    let checkpoint = Arc::new(checkpoint);
    opened(output, &checkpoint);
    interrupt.check()?;
    let everything = options::selects_all(&args.selection);
    let selected =
        if everything && !args.plan { None } else { Some(checkpoint.select(&options::selection(&args.selection))?) };
    let listed = match &selected {
        Some(selected) if !everything => list_selected(&checkpoint, selected),
        _ => list_all(&checkpoint),
    };
    let prepared = match &selected {
        Some(selected) if args.plan => Some(prepare(&checkpoint, selected)?),
        _ => None,
    };
    output.warnings(checkpoint.warnings());
    if output.json {
        return output.json(&inspected(&checkpoint, &listed, prepared.as_ref()));
    }
    let mut out = summary(&checkpoint, &listed, everything, output.is_verbose());
    let files = if output.is_verbose() { file_names(checkpoint.shards()) } else { Vec::new() };
    match &prepared {
        Some(prepared) => out.push_str(&plan::text(prepared, checkpoint.shards(), "cpu", output.is_verbose())),
        None if args.tree => out.push_str(&tree::text(&listed)),
        None if args.all => out.push_str(&table(&listed.iter().collect::<Vec<_>>(), &files)),
        None => out.push_str(&largest(&listed, &files)),
    }
    output.text(&out)
}

/// For those who asked for more: which files a path came to.
pub(crate) fn opened(output: Output, checkpoint: &Checkpoint) {
    output.detail(|| {
        let shards = checkpoint.shards();
        let path = checkpoint.path().display();
        let mut out = format!("opened {path}: {}, {}", format_name(checkpoint.format()), counted_files(shards));
        for (shard, name) in shards.iter().zip(file_names(shards)) {
            let _ = write!(out, "\n  {}  {name}", text::both(shard.bytes));
        }
        out
    });
}

fn format_name(format: Format) -> String {
    let name = serde_json::to_value(format).ok().and_then(|name| name.as_str().map(str::to_owned));
    name.unwrap_or_default()
}

fn prepare(checkpoint: &Arc<Checkpoint>, selected: &[Selected]) -> Result<Prepared, Failure> {
    let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
    Ok(loader.prepare(Arc::clone(checkpoint), selected)?)
}

fn inspected<'a>(checkpoint: &'a Checkpoint, listed: &'a [Listed], prepared: Option<&'a Prepared>) -> Inspected<'a> {
    let shard = |shard: &Shard| ShardListed {
        path: shard.path.display().to_string(),
        bytes: shard.bytes,
        made: shard.derived.is_some(),
    };
    Inspected {
        path: checkpoint.path().display().to_string(),
        format: checkpoint.format(),
        shards: checkpoint.shards().iter().map(shard).collect(),
        metadata: checkpoint.metadata(),
        total_bytes: total_bytes(listed),
        parameters: parameters(listed),
        dtypes: by_type(listed),
        tensors: listed.iter().map(|tensor| (tensor.name.as_ref(), tensor)).collect(),
        ties: checkpoint.ties().into_iter().map(|tie| (tie.alias, tie.target)).collect(),
        plan: prepared.map(|prepared| &prepared.plan),
        skipped: checkpoint.skipped(),
        warnings: flags::in_messages(checkpoint.warnings()),
    }
}

/// The checkpoint in a few lines.
fn summary(checkpoint: &Checkpoint, listed: &[Listed], everything: bool, whole: bool) -> String {
    let (most_ties, most_metadata) = if whole { (usize::MAX, usize::MAX) } else { (MOST_TIES, MOST_METADATA) };
    let selected = if everything { "" } else { " selected" };
    let mut out = format!(
        "{}\n{}, {}, {}{selected}, {} parameters\n",
        text::styled(BOLD, text::escape(&checkpoint.path().display().to_string())),
        text::both(total_bytes(listed)),
        counted_files(checkpoint.shards()),
        text::plural(listed.len() as u64, "tensor"),
        text::large(parameters(listed)),
    );
    let ties = checkpoint.ties();
    for tie in ties.iter().take(most_ties) {
        let line = format!("{} is {}", text::escape(&tie.alias), text::escape(&tie.target));
        let _ = writeln!(out, "{}", text::styled(DIM, line));
    }
    if let Some(more) = ties.len().checked_sub(most_ties).filter(|more| *more > 0) {
        let more = format!("and {} more names of the same bytes (-v lists all)", text::count(more as u64));
        let _ = writeln!(out, "{}", text::styled(DIM, more));
    }
    for (key, value) in checkpoint.metadata().iter().take(most_metadata) {
        let _ = writeln!(out, "{}", text::styled(DIM, format!("{}: {}", text::escape(key), shortened(value))));
    }
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Right]);
    table.heading(["type", "tensors", "bytes", "share"]);
    let total = text::as_f64(total_bytes(listed)).max(1.0);
    for (dtype, of_type) in by_type(listed) {
        let share = text::as_f64(of_type.bytes) / total;
        let bytes = text::decimal(of_type.bytes);
        table.row([text::escape(dtype), text::count(of_type.tensors), bytes, text::percent(share)]);
    }
    let _ = write!(out, "\n{}\n", table.render());
    out
}

/// A value of the metadata on one line.
fn shortened(value: &str) -> String {
    const MOST_CHARS: usize = 60;
    let escaped = text::escape(value);
    if escaped.chars().count() <= MOST_CHARS {
        return escaped;
    }
    format!("{}…", escaped.chars().take(MOST_CHARS).collect::<String>())
}

/// The largest tensors, or all of them by name where they are few.
fn largest(listed: &[Listed], files: &[String]) -> String {
    let mut order: Vec<&Listed> = listed.iter().collect();
    if listed.len() <= MOST_TENSORS {
        return table(&order, files);
    }
    order.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let rest = order.split_off(MOST_TENSORS);
    let bytes =
        rest.iter().filter(|tensor| !tensor.is_again).fold(0, |sum: u64, tensor| sum.saturating_add(tensor.bytes));
    let more = format!(
        "and {}, none larger, of {} together (--all lists them)",
        text::plural(rest.len() as u64, "more tensor"),
        text::decimal(bytes)
    );
    format!("{}{}\n", table(&order, files), text::styled(DIM, more))
}

/// A line a tensor; with the names of the files, also where each lies.
fn table(listed: &[&Listed], files: &[String]) -> String {
    let mut table = Table::new(&[Align::Left, Align::Left, Align::Left, Align::Right, Align::Left]).elastic(0);
    table.heading(["tensor", "type", "shape", "bytes", if files.is_empty() { "" } else { "file" }]);
    for tensor in listed {
        table.row([
            text::escape(&tensor.name),
            text::escape(&tensor.dtype),
            text::shape(&tensor.shape),
            text::decimal(tensor.bytes),
            files.get(tensor.shard as usize).cloned().unwrap_or_default(),
        ]);
    }
    table.render_on(Screen::stdout())
}
