//! `vramp inspect`: what a checkpoint holds, from its headers alone. No byte of a tensor is read.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;

use serde::Serialize;
use vramp::checkpoint::{Checkpoint, Format, Selected, Shard, Skipped, Slice, TensorData, TensorInfo};
use vramp::device::CpuDevice;
use vramp::dtype::element_count;
use vramp::load::{Loader, Prepared, TransferOptions};

use super::args::InspectArgs;
use super::interrupt::Interrupt;
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

/// One line of the listing.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Listed {
    #[serde(skip)]
    pub(crate) name: Arc<str>,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    shard: u32,
    offset: u64,
    pub(crate) bytes: u64,
    /// Whether the same bytes are listed under another name before: they count once.
    #[serde(skip)]
    is_again: bool,
    /// Further pieces of a tensor that is cut over several places.
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<usize>,
}

#[derive(Debug, Default, Serialize)]
struct OfType {
    tensors: u64,
    bytes: u64,
}

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

/// `4 files`. What is made of a file is not another file.
pub(crate) fn counted_files(shards: &[Shard]) -> String {
    let paths: HashSet<_> = shards.iter().map(|shard| &shard.path).collect();
    text::plural(paths.len() as u64, "file")
}

/// The name of each shard's file. Tensors that are unpacked or rearranged on loading are a shard of their own of the same file.
pub(crate) fn file_names(shards: &[Shard]) -> Vec<String> {
    let name = |shard: &Shard| {
        let name = shard.path.file_name().unwrap_or(shard.path.as_os_str()).to_string_lossy().into_owned();
        let made = if shard.derived.is_some() { " (rearranged)" } else { "" };
        format!("{}{made}", text::escape(&name))
    };
    shards.iter().map(name).collect()
}

fn prepare(checkpoint: &Arc<Checkpoint>, selected: &[Selected]) -> Result<Prepared, Failure> {
    let loader = Loader::new(Arc::new(CpuDevice::new()), TransferOptions::default());
    Ok(loader.prepare(Arc::clone(checkpoint), selected)?)
}

/// Bytes that are listed already, by the tensor and the part of it.
type Seen<'a> = HashSet<(&'a TensorData, Option<&'a Slice>)>;

fn listed<'a>(info: &'a TensorInfo, chosen: (&Arc<str>, &[usize], Option<&'a Slice>), seen: &mut Seen<'a>) -> Listed {
    let (name, shape, slice) = chosen;
    let (offset, parts) = match &info.data {
        TensorData::Whole(extent) => (extent.offset, None),
        TensorData::Parts(parts) => (parts.first().map_or(0, |part| part.extent.offset), Some(parts.len())),
    };
    Listed {
        name: Arc::clone(name),
        dtype: info.dtype.to_string(),
        shape: shape.to_vec(),
        shard: info.shard(),
        offset,
        is_again: !seen.insert((&info.data, slice)),
        bytes: if *shape == info.shape[..] { info.bytes() } else { info.dtype.tensor_bytes(shape).unwrap_or(0) },
        parts,
    }
}

fn list_all(checkpoint: &Checkpoint) -> Vec<Listed> {
    let mut seen = Seen::new();
    checkpoint.tensors().iter().map(|info| listed(info, (&info.name, &info.shape, None), &mut seen)).collect()
}

fn list_selected(checkpoint: &Checkpoint, selected: &[Selected]) -> Vec<Listed> {
    let (mut list, mut seen) = (Vec::with_capacity(selected.len()), Seen::new());
    for chosen in selected {
        if let Some(info) = checkpoint.tensors().get(chosen.tensor) {
            let names = std::iter::once(&chosen.name).chain(&chosen.aliases);
            list.extend(names.map(|name| listed(info, (name, &chosen.shape, chosen.slice.as_ref()), &mut seen)));
        }
    }
    list.sort_by(|a: &Listed, b| a.name.cmp(&b.name));
    list
}

fn by_type(listed: &[Listed]) -> BTreeMap<&str, OfType> {
    let mut types: BTreeMap<&str, OfType> = BTreeMap::new();
    for tensor in listed {
        let of_type = types.entry(&tensor.dtype).or_default();
        of_type.tensors += 1;
        of_type.bytes = of_type.bytes.saturating_add(if tensor.is_again { 0 } else { tensor.bytes });
    }
    types
}

fn total_bytes(listed: &[Listed]) -> u64 {
    distinct(listed).fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
}

fn parameters(listed: &[Listed]) -> u64 {
    distinct(listed).fold(0, |sum, tensor| sum.saturating_add(element_count(&tensor.shape)))
}

fn distinct(listed: &[Listed]) -> impl Iterator<Item = &Listed> {
    listed.iter().filter(|tensor| !tensor.is_again)
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
