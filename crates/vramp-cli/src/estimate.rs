//! `vramp estimate`: S and T = S/B, from a checkpoint's headers or from numbers of parameters. It measures nothing.
//!
//! With `--fleet` the times are those of many hosts (`fleet`).

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vramp::checkpoint::Checkpoint;
use vramp::dtype::{Dtype, element_count};
use vramp_bench::estimate::{Estimate, Link, NAMED_LINKS, QUANTISED, Size, Weights, estimate, size_of_all};

use super::args::EstimateArgs;
use super::fleet;
use super::output::{Failure, Output};
use super::screen::Screen;
use super::text::{self, Align, BAR, BOLD, Table};
use super::values::{self, Part};
use super::{flags, inspect, options};

/// What is to be moved.
struct Model {
    size: Size,
    parts: Vec<Weights>,
    /// Whether the parts are those of a checkpoint, whose mixture of types `inspect` shows.
    of_checkpoint: bool,
    warnings: Vec<String>,
}

pub(crate) fn run(args: &EstimateArgs, output: Output) -> Result<(), Failure> {
    let model = model(args, output)?;
    output.warnings(&model.warnings);
    if let Some(hosts) = args.fleet.fleet {
        let times = fleet::times(&args.fleet, hosts, model.size.bytes);
        return if output.json {
            output.json(&with_fleet(&model, &times))
        } else {
            output.text(&format!("{}{}", headline(&model), fleet::text(&times)))
        };
    }
    // Without links there is no chain to compute, but there is a question: how long with each of those that have a name?
    let chained = !args.bandwidth.is_empty();
    let links = if chained { args.bandwidth.clone() } else { named_links() };
    let estimate = estimate(model.size.bytes, links);
    if output.json {
        output.json(&as_json(&model, &estimate, chained))
    } else {
        output.text(&as_text(&model, &estimate, chained))
    }
}

fn model(args: &EstimateArgs, output: Output) -> Result<Model, Failure> {
    let Some(path) = &args.path else { return typed(args) };
    let checkpoint = Checkpoint::open_with(path, &options::open(&args.how))?;
    inspect::opened(output, &checkpoint);
    let mut by_type: BTreeMap<String, Weights> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let none = || Weights { parameters: 0, dtype: tensor.dtype.clone(), copies: 1 };
        let part = by_type.entry(tensor.dtype.to_string()).or_insert_with(none);
        part.parameters = part.parameters.saturating_add(element_count(&tensor.shape));
    }
    let parts: Vec<_> = by_type.into_values().collect();
    let parameters = parts.iter().map(|part| part.parameters).fold(0, u64::saturating_add);
    let size = Size { bytes: checkpoint.total_bytes(), parameters, scale_bytes: 0 };
    Ok(Model { size, parts, of_checkpoint: true, warnings: flags::in_messages(checkpoint.warnings()) })
}

fn typed(args: &EstimateArgs) -> Result<Model, Failure> {
    let parts = args.parameters.iter().chain(&args.experts);
    if parts.clone().next().is_none() {
        let what = "how many bytes? Name a checkpoint (PATH), or say --parameters 70B --dtype f16, or --experts";
        return Err(Failure::Usage(what.to_owned()));
    }
    if args.dtype.is_some() && parts.clone().all(|part| part.dtype.is_some()) {
        return Err(Failure::Usage(
            "--dtype is for numbers without a type, and all of them have one: leave it out".to_owned(),
        ));
    }
    let parts: Vec<Weights> = parts.map(|part| weights(part, args)).collect::<Result<_, _>>()?;
    let too_many = || Failure::Usage("so many parameters take more than 2^64 bytes".to_owned());
    let size = size_of_all(&parts, args.scales.as_ref()).ok_or_else(too_many)?;
    if args.scales.is_some() && size.scale_bytes == 0 {
        return Err(Failure::Usage("--scales go with weights of 8 bits or fewer, and there are none".to_owned()));
    }
    let warnings = if args.scales.is_none() { scales_left_out(&parts) } else { Vec::new() };
    Ok(Model { size, parts, of_checkpoint: false, warnings })
}

/// Quantised weights have scales, which are a part of S.
fn scales_left_out(parts: &[Weights]) -> Vec<String> {
    let is_there = |name: &str| parts.iter().any(|part| part.dtype.name() == name);
    let quantised = QUANTISED.iter().filter(|(name, ..)| is_there(name));
    let line = |(name, _, block, scale): &(&str, u64, u64, Dtype)| {
        format!("{name} weights have scales, which are not counted: often --scales {block}={scale}")
    };
    quantised.map(line).collect()
}

fn weights(part: &Part, args: &EstimateArgs) -> Result<Weights, Failure> {
    let dtype = part.dtype.as_ref().or(args.dtype.as_ref());
    let dtype = dtype.ok_or_else(|| {
        let number = text::large(part.parameters);
        Failure::Usage(format!("{number} parameters of which type? Add --dtype f16, or write the number as COUNT=f16"))
    })?;
    Ok(Weights { parameters: part.parameters, dtype: dtype.clone(), copies: part.copies })
}

fn named_links() -> Vec<Link> {
    let mut links: Vec<Link> = NAMED_LINKS.iter().filter_map(|(name, _)| Link::named(name)).collect();
    links.sort_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
    links
}

/// The one type of what was typed.
fn only_type(model: &Model) -> Option<String> {
    let first = model.parts.first().filter(|_| !model.of_checkpoint)?;
    model.parts.iter().all(|part| part.dtype == first.dtype).then(|| first.dtype.to_string())
}

fn as_json(model: &Model, estimate: &Estimate, chained: bool) -> Value {
    let of_link = |link: &Link| {
        let seconds = link.seconds(model.size.bytes);
        json!({"name": link.name, "bytes_per_second": link.bytes_per_second, "seconds": seconds})
    };
    json!({
        "bytes": model.size.bytes,
        "parameters": model.size.parameters,
        "dtype": only_type(model),
        "parts": model.parts,
        "scale_bytes": model.size.scale_bytes,
        "links": estimate.links.iter().map(of_link).collect::<Vec<_>>(),
        "chain": chained.then(|| estimate.chain()),
        "bound_by": estimate.bound_by.as_ref().filter(|_| chained),
        "seconds": estimate.seconds.filter(|_| chained),
        "seconds_one_by_one": estimate.seconds_one_by_one.filter(|_| chained),
        "warnings": model.warnings,
    })
}

fn with_fleet(model: &Model, times: &fleet::Times) -> Value {
    let mut all = as_json(model, &estimate(model.size.bytes, Vec::new()), false);
    if let Some(all) = all.as_object_mut() {
        all.insert("fleet".to_owned(), fleet::json(times));
    }
    all
}

fn headline(model: &Model) -> String {
    let of_type = only_type(model).map(|dtype| format!(" of {dtype}")).unwrap_or_default();
    let bytes = text::styled(BOLD, text::both(model.size.bytes));
    let mut out = format!("S  {bytes}  {} parameters{of_type}\n", text::large(model.size.parameters));
    if only_type(model).is_none() && !model.of_checkpoint || model.parts.iter().any(|part| part.copies > 1) {
        let parts: Vec<String> = model.parts.iter().map(part_text).collect();
        out.push_str(&Screen::stdout().wrapped(&format!("   {}\n", parts.join(" + ")), 3));
    }
    if model.size.scale_bytes > 0 {
        out.push_str(&format!("   {} of S are scales\n", text::decimal(model.size.scale_bytes)));
    }
    out
}

fn part_text(part: &Weights) -> String {
    let copies = if part.copies > 1 { format!("{} × ", text::count(part.copies)) } else { String::new() };
    format!("{copies}{} of {}", text::large(part.parameters), part.dtype)
}

fn as_text(model: &Model, estimate: &Estimate, chained: bool) -> String {
    let mut out = headline(model);
    let bound = estimate.bound_at.and_then(|at| estimate.links.get(at)).filter(|_| chained);
    if let (Some(bound), Some(seconds), Some(sum)) = (bound, estimate.seconds, estimate.seconds_one_by_one) {
        // A link that was typed as a mere bandwidth has no name of its own.
        let named = values::rate(&bound.name).is_err();
        let name = if named { format!("  {}", text::escape(&bound.name)) } else { String::new() };
        out.push_str(&format!("B  {}{name}\n", text::rate(bound.bytes_per_second)));
        out.push_str(&format!("T  {}  = S/B, at best\n", text::styled(BOLD, text::seconds(seconds))));
        if estimate.links.len() > 1 {
            out.push_str(&format!("   {}  if no stage overlapped another: their sum\n", text::seconds(sum)));
            out.push_str(&format!("\n{}\n", Screen::stdout().wrapped(&text::escape(&estimate.chain()), 2)));
        }
    }
    if !chained || estimate.links.len() > 1 {
        out.push('\n');
        out.push_str(&table(model.size.bytes, estimate, chained));
    }
    out
}

/// Each link alone, with a bar for its time.
fn table(bytes: u64, estimate: &Estimate, chained: bool) -> String {
    let longest = estimate.links.iter().map(|link| link.seconds(bytes)).fold(0.0, f64::max);
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]);
    table.heading([if chained { "stage" } else { "link" }, "bandwidth", "seconds", ""]);
    for (at, link) in estimate.links.iter().enumerate() {
        let seconds = link.seconds(bytes);
        let bar = text::bar(seconds / longest, 20);
        table.styled_row([
            (anstyle::Style::new(), text::escape(&link.name)),
            (anstyle::Style::new(), text::rate(link.bytes_per_second)),
            (anstyle::Style::new(), text::seconds(seconds)),
            (BAR, if chained && estimate.bound_at == Some(at) { format!("{bar} the limit") } else { bar }),
        ]);
    }
    table.render()
}
