//! `vramp estimate`: S and T = S/B, from a checkpoint's headers or from a number of parameters. It measures nothing.

use serde_json::json;
use vramp::checkpoint::Checkpoint;
use vramp::estimate::{Estimate, Link, NAMED_LINKS, estimate, size_of};

use super::args::EstimateArgs;
use super::inspect::elements;
use super::options;
use super::output::{Failure, Output};
use super::text::{self, Align, BAR, BOLD, Table};
use super::values;

/// What is to be moved.
struct Weights {
    bytes: u64,
    parameters: u64,
    dtype: Option<String>,
    warnings: Vec<String>,
}

pub(crate) fn run(args: &EstimateArgs, output: Output) -> Result<(), Failure> {
    let weights = weights(args)?;
    // Without links there is no chain to compute, but there is a question: how long with each of those that have a name?
    let chained = !args.bandwidth.is_empty();
    let links = if chained { args.bandwidth.clone() } else { named_links() };
    let estimate = estimate(weights.bytes, links);
    output.warnings(&weights.warnings);
    if output.json {
        output.json(&as_json(&weights, &estimate, chained))
    } else {
        output.text(&as_text(&weights, &estimate, chained))
    }
}

fn weights(args: &EstimateArgs) -> Result<Weights, Failure> {
    if let (Some(parameters), Some(dtype)) = (args.parameters, &args.dtype) {
        let too_many = || Failure::Usage(format!("{parameters} parameters of {dtype} take more than 2^64 bytes"));
        let bytes = size_of(parameters, dtype).ok_or_else(too_many)?;
        return Ok(Weights { bytes, parameters, dtype: Some(dtype.to_string()), warnings: Vec::new() });
    }
    let path = args.path.as_ref().ok_or_else(|| Failure::Usage("a PATH or --parameters is needed".to_owned()))?;
    let checkpoint = Checkpoint::open_with(path, &options::open(&args.how))?;
    let parameters = checkpoint.tensors().iter().map(|tensor| elements(&tensor.shape)).fold(0, u64::saturating_add);
    let warnings = checkpoint.warnings().to_vec();
    Ok(Weights { bytes: checkpoint.total_bytes(), parameters, dtype: None, warnings })
}

fn named_links() -> Vec<Link> {
    let mut links: Vec<Link> =
        NAMED_LINKS.iter().map(|&(name, bytes_per_second)| Link { name: name.to_owned(), bytes_per_second }).collect();
    links.sort_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
    links
}

fn seconds_over(bytes: u64, link: &Link) -> f64 {
    text::as_f64(bytes) / link.bytes_per_second
}

fn as_json(weights: &Weights, estimate: &Estimate, chained: bool) -> serde_json::Value {
    let links: Vec<_> = estimate
        .links
        .iter()
        .map(|link| {
            json!({
                "name": link.name,
                "bytes_per_second": link.bytes_per_second,
                "seconds": seconds_over(weights.bytes, link),
            })
        })
        .collect();
    json!({
        "bytes": weights.bytes,
        "parameters": weights.parameters,
        "dtype": weights.dtype,
        "links": links,
        "bound_by": estimate.bound_by.as_ref().filter(|_| chained),
        "seconds": estimate.seconds.filter(|_| chained),
        "warnings": weights.warnings,
    })
}

fn as_text(weights: &Weights, estimate: &Estimate, chained: bool) -> String {
    let of_type = weights.dtype.as_ref().map(|dtype| format!(" of {dtype}")).unwrap_or_default();
    let mut out = format!(
        "S  {}  {} parameters{of_type}\n",
        text::styled(BOLD, text::both(weights.bytes)),
        text::large(weights.parameters)
    );
    if let (true, Some(seconds), Some(name)) = (chained, estimate.seconds, &estimate.bound_by) {
        let link = estimate.links.iter().find(|link| &link.name == name);
        let bandwidth = link.map_or(0.0, |link| link.bytes_per_second);
        // A link that was typed as a mere bandwidth has no name of its own.
        let name = if values::rate(name).is_ok() { String::new() } else { format!("  {}", text::escape(name)) };
        out.push_str(&format!("B  {}{name}\n", text::rate(bandwidth)));
        out.push_str(&format!("T  {}  = S/B, at best\n", text::styled(BOLD, text::seconds(seconds))));
    }
    if !chained || estimate.links.len() > 1 {
        out.push('\n');
        out.push_str(&table(weights.bytes, estimate, chained));
    }
    out
}

/// Each link alone, with a bar for its time.
fn table(bytes: u64, estimate: &Estimate, chained: bool) -> String {
    let longest = estimate.links.iter().map(|link| seconds_over(bytes, link)).fold(0.0, f64::max);
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]);
    table.heading(["link", "bandwidth", "seconds", ""]);
    for link in &estimate.links {
        let seconds = seconds_over(bytes, link);
        let bound = chained && estimate.bound_by.as_deref() == Some(&link.name);
        let bar = text::bar(seconds / longest, 20);
        table.styled_row([
            (anstyle::Style::new(), text::escape(&link.name)),
            (anstyle::Style::new(), text::rate(link.bytes_per_second)),
            (anstyle::Style::new(), text::seconds(seconds)),
            (BAR, if bound { format!("{bar} the limit") } else { bar }),
        ]);
    }
    table.render()
}
