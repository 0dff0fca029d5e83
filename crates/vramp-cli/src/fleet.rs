//! `vramp estimate --fleet`: many hosts at once, as a table and as JSON. What is not typed is assumed, and printed as such.
//!
//! The times are the library's (`estimate::fleet`); nothing here computes any.

use serde_json::{Value, json};
use vramp_bench::estimate::fleet::{Drives, Fleet, Flip, Limit, Outcome, Spread, Storage, Way, best, flips, simulate};
use vramp_bench::estimate::{Link, NAMED_LINKS};

use super::args::FleetArgs;
use super::screen::Screen;
use super::text::{self, Align, BAR, BOLD, Table};
use super::values::Pair;

/// Changes of the best way are looked for up to so many hosts, or up to as many as were typed.
const LOOK_UP_TO: u64 = 10_000;

/// Cells of a bar, and the columns that a screen must have for bars.
const BAR_CELLS: usize = 10;
const COLUMNS_FOR_BARS: usize = 90;

const NOT_BUILT: &str = "vramp itself reads files: shared storage and local drives. It does not read object storage, fill \
    drives or pass weights on between peers yet; those times say what tools that do it could reach.";

const AT_BEST: &str = "At best, without set-up: no latency, no failures, no other traffic (docs/scaling.md).";

/// What comes out.
pub(crate) struct Times {
    fleet: Fleet,
    outcomes: Vec<Outcome>,
    flips: Vec<Flip>,
    looked_up_to: u64,
}

pub(crate) fn times(args: &FleetArgs, hosts: u64, bytes: u64) -> Times {
    let fleet = fleet(args, hosts, bytes);
    let looked_up_to = hosts.max(LOOK_UP_TO);
    Times { outcomes: simulate(&fleet), flips: flips(&fleet, looked_up_to), fleet, looked_up_to }
}

fn fleet(args: &FleetArgs, hosts: u64, bytes: u64) -> Fleet {
    let none_typed = args.shared.is_none() && args.object.is_none() && args.nvme.is_none();
    let assumed = |first, second| none_typed.then_some(Pair { first, second: Some(second) });
    let store = |pair: Pair| Storage { per_host: pair.first, total: pair.second.unwrap_or(f64::INFINITY) };
    let drives = |pair: Pair| Drives { read: pair.first, write: pair.second.unwrap_or(pair.first) };
    Fleet {
        hosts,
        bytes,
        chunk_bytes: args.chunk,
        gpus: args.gpus,
        gpu_link: args.gpu_link.bytes_per_second,
        gpu_copies: args.gpu_copies,
        nic: args.nic.bytes_per_second,
        shared: args.shared.or_else(|| assumed(5e9, 20e9)).map(store),
        object: args.object.or_else(|| assumed(8e9, 100e9)).map(store),
        nvme: args.nvme.or_else(|| assumed(7e9, 5e9)).map(drives),
    }
}

/// The fleet, each way, the best and where it changes.
pub(crate) fn json(times: &Times) -> Value {
    let mut all = serde_json::to_value(&times.fleet).unwrap_or_default();
    if let Some(all) = all.as_object_mut() {
        all.insert("ways".to_owned(), json!(times.outcomes));
        all.insert("best".to_owned(), json!(best(&times.outcomes).map(|best| best.way)));
        all.insert("best_built".to_owned(), json!(fastest_built(&times.outcomes).map(|fastest| fastest.way)));
        all.insert("flips".to_owned(), json!(times.flips));
        all.insert("flips_up_to_hosts".to_owned(), json!(times.looked_up_to));
    }
    all
}

/// Whether vramp does it, or another tool has to.
fn is_built(way: Way) -> bool {
    match way {
        Way::SharedStorage | Way::LocalNvme => true,
        Way::ObjectStorage | Way::Peers | Way::FilledNvme => false,
    }
}

/// The fastest way that vramp goes itself for hosts that have nothing yet.
fn fastest_built(outcomes: &[Outcome]) -> Option<&Outcome> {
    let built = outcomes.iter().filter(|outcome| is_built(outcome.way) && outcome.way.starts_empty());
    built.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

pub(crate) fn text(times: &Times) -> String {
    let (best, screen) = (best(&times.outcomes), Screen::stdout());
    let mut out = hosts(&times.fleet);
    out.push('\n');
    out.push_str(&table(&times.outcomes, screen.columns >= COLUMNS_FOR_BARS));
    out.push('\n');
    match best {
        Some(best) => {
            let seconds = text::styled(BOLD, text::seconds(best.seconds));
            out.push_str(&format!("best     {seconds}  {}\n", way(best)));
            if let Some(spread) = &best.spread {
                out.push_str(&format!("{}\n", screen.wrapped(&format!("         {}", how(spread)), 9)));
            }
            if let Some(itself) = fastest_built(&times.outcomes).filter(|itself| itself.way != best.way) {
                let seconds = text::styled(BOLD, text::seconds(itself.seconds));
                out.push_str(&format!("itself   {seconds}  {}\n", way(itself)));
            }
            out.push_str(&format!("{}\n", screen.wrapped(&format!("changes  {}", changes(times)), 9)));
        }
        None => out.push_str("best     none: there is no store that hosts without the weights could read\n"),
    }
    out.push_str(&format!("\n{}\n", screen.wrapped(NOT_BUILT, 0)));
    out.push_str(&format!("{}\n", screen.wrapped(AT_BEST, 0)));
    out
}

/// What the fleet is made of, typed or assumed.
fn hosts(fleet: &Fleet) -> String {
    let each = if fleet.gpu_copies { "each with the whole model" } else { "each with its share" };
    let (hosts, gpus) = (text::plural(fleet.hosts, "host"), text::plural(fleet.gpus, "GPU"));
    let mut table = Table::new(&[Align::Left, Align::Left]);
    let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
    line("N", format!("{hosts} of {gpus}, {each}; chunks of {}", text::binary(fleet.chunk_bytes)));
    line("GPU link", text::rate(fleet.gpu_link) + &called(fleet.gpu_link));
    line("network card", text::rate(fleet.nic) + &called(fleet.nic));
    let store = |store: Storage| {
        let total =
            if store.total.is_finite() { format!("{} in all", text::rate(store.total)) } else { "no limit".to_owned() };
        format!("{} a host, {total}", text::rate(store.per_host))
    };
    fleet.shared.into_iter().for_each(|shared| line("shared storage", store(shared)));
    fleet.object.into_iter().for_each(|object| line("object storage", store(object)));
    let drives = |nvme: Drives| format!("read {}, write {}", text::rate(nvme.read), text::rate(nvme.write));
    fleet.nvme.into_iter().for_each(|nvme| line("local NVMe", drives(nvme)));
    table.render()
}

/// The name of a bandwidth, if it has one.
#[allow(clippy::float_cmp)] // it is one of these numbers or it is not
fn called(rate: f64) -> String {
    let named = NAMED_LINKS.iter().filter_map(|(name, _)| Link::named(name));
    named
        .into_iter()
        .find(|link| link.bytes_per_second == rate)
        .map(|link| format!("  {}", link.name))
        .unwrap_or_default()
}

fn table(outcomes: &[Outcome], bars: bool) -> String {
    let longest = outcomes.iter().map(|outcome| outcome.seconds).fold(0.0, f64::max);
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left, Align::Left]);
    table.heading(["way", "seconds", "store gives", "the limit", ""]);
    for outcome in outcomes {
        table.styled_row([
            (anstyle::Style::new(), way(outcome)),
            (anstyle::Style::new(), short(outcome.seconds)),
            (anstyle::Style::new(), text::decimal(outcome.storage_bytes)),
            (anstyle::Style::new(), limit(outcome.limit).to_owned()),
            (BAR, if bars { text::bar(outcome.seconds / longest, BAR_CELLS) } else { String::new() }),
        ]);
    }
    table.render()
}

/// `448 s`: without the minutes in brackets, for columns.
fn short(seconds: f64) -> String {
    let long = text::seconds(seconds);
    long.split_once(" (").map_or(long.clone(), |(short, _)| short.to_owned())
}

fn way(outcome: &Outcome) -> String {
    let from = outcome.from.map(|from| format!(", from {}", name(from))).unwrap_or_default();
    format!("{}{from}", name(outcome.way))
}

fn name(way: Way) -> &'static str {
    match way {
        Way::SharedStorage => "shared storage",
        Way::ObjectStorage => "object storage",
        Way::Peers => "peers",
        Way::FilledNvme => "NVMe, filled",
        Way::LocalNvme => "NVMe, already there",
    }
}

fn limit(limit: Limit) -> &'static str {
    match limit {
        Limit::StorageTotal => "store, all hosts",
        Limit::StoragePerHost => "store, one host",
        Limit::Nic => "network card",
        Limit::NvmeRead => "reading the drives",
        Limit::NvmeWrite => "writing the drives",
        Limit::GpuLink => "GPU link",
    }
}

fn how(spread: &Spread) -> String {
    let read = if spread.groups == 1 { "one copy leaves" } else { "copies leave" };
    let groups = if spread.groups == 1 { String::new() } else { format!("{} ", text::count(spread.groups)) };
    let shape = match spread.stripes {
        1 => "hosts pass it on in a chain".to_owned(),
        stripes => format!("hosts pass it on in {} trees of as many branches", text::count(stripes)),
    };
    format!("{groups}{read} the store; {shape}, {} at most", text::plural(spread.hops, "hop"))
}

fn changes(times: &Times) -> String {
    let since = |flip: &Flip| match flip.hosts {
        1 => name(flip.way).to_owned(),
        hosts => format!("{} from {} hosts on", name(flip.way), text::count(hosts)),
    };
    match times.flips.as_slice() {
        [] => "none".to_owned(),
        [only] => format!("none: {} is best up to {} hosts", name(only.way), text::count(times.looked_up_to)),
        all => all.iter().map(since).collect::<Vec<_>>().join("; "),
    }
}
