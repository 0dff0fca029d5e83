//! What a load would do, for `inspect --plan` and `load --plan-only`: what and where to first, then the files, then the reads in the
//! order in which they are submitted. Pure text of a [`Prepared`] plan.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;

use vramp::checkpoint::Shard;
use vramp::load::Prepared;
use vramp::plan::{Landing, Transfer};
use vramp::storage::Route;

use super::listing::file_names;
use super::screen::Screen;
use super::text::{self, Align, BOLD, DIM, Table};

/// Reads and files that are shown unless all are asked for.
const MOST_ROWS: usize = 12;

/// The plan: a few lines, a table of the files, a table of the reads. `whole` shows all rows of both.
pub(crate) fn text(prepared: &Prepared, shards: &[Shard], device: &str, whole: bool) -> String {
    let most = if whole { usize::MAX } else { MOST_ROWS };
    let transfers = &prepared.plan.transfers;
    let mut out = summary(prepared, device);
    if !transfers.is_empty() {
        let names = file_names(shards);
        out.push_str(&section("files, in the order in which they are read", &files(transfers, shards, &names, most)));
        out.push_str(&section(
            &format!("reads, in the order in which they start{}", lanes(transfers)),
            &reads(transfers, &names, most),
        ));
    }
    out
}

fn section(heading: &str, table: &str) -> String {
    format!("\n{}\n{table}", text::styled(BOLD, heading))
}

fn summary(prepared: &Prepared, device: &str) -> String {
    let plan = &prepared.plan;
    let (staged, tensors) = (plan.staged(), text::plural(plan.tensors() as u64, "tensor"));
    let bytes = text::both(plan.tensor_bytes());
    let mut out = format!("{} {bytes} of {tensors} to {}\n", text::styled(BOLD, "plan:"), text::escape(device));
    let _ = writeln!(out, "  memory       {} in one allocation", text::both(plan.arena_bytes));
    let _ = writeln!(
        out,
        "  reads        {}, together {}: {} in place, {staged} staged{}",
        text::count(plan.transfers.len() as u64),
        text::decimal(plan.read_bytes()),
        plan.transfers.len() - staged,
        if staged > 0 { format!(" through buffers of {}", text::binary(plan.buffer_bytes)) } else { String::new() },
    );
    let _ = writeln!(out, "  routes       {}", routes(prepared));
    let (resident, all) = (prepared.cache.resident_before, prepared.cache.file_bytes);
    let _ = writeln!(out, "  page cache   {} of {} resident", text::decimal(resident), text::decimal(all));
    let _ = writeln!(out, "  file system  {}", text::escape(&prepared.file_system));
    out
}

fn routes(prepared: &Prepared) -> String {
    let of = |route| {
        let bytes = prepared.plan.route_bytes(route);
        (bytes > 0).then(|| format!("{} {}", route.name(), text::decimal(bytes)))
    };
    let routes = [Route::Direct, Route::Buffered, Route::Mapped, Route::GpuDirect];
    let routes: Vec<String> = routes.into_iter().filter_map(of).collect();
    if routes.is_empty() { "nothing to read".to_owned() } else { routes.join(" · ") }
}

/// Reads of different kinds wait for their own kind only.
fn lanes(transfers: &[Transfer]) -> &'static str {
    let is_direct = |transfer: &&Transfer| transfer.route == Route::Direct;
    let direct = transfers.iter().filter(is_direct).count();
    if direct > 0 && direct < transfers.len() { " (direct and cached ones side by side)" } else { "" }
}

fn path_of<'a>(shards: &'a [Shard], transfer: &Transfer) -> Option<&'a Path> {
    shards.get(transfer.shard as usize).map(|shard| shard.path.as_path())
}

fn files(transfers: &[Transfer], shards: &[Shard], names: &[String], most: usize) -> String {
    let mut table = Table::new(&[Align::Right, Align::Right, Align::Right, Align::Left]).elastic(3);
    table.heading(["reads", "bytes", "in place", "file"]);
    let used = || transfers.chunk_by(|a, b| a.shard == b.shard);
    for of_file in used().take(most) {
        let in_place = of_file.iter().filter(|transfer| matches!(transfer.landing, Landing::InPlace { .. }));
        table.row([
            text::count(of_file.len() as u64),
            text::decimal(of_file.iter().map(|transfer| transfer.len).sum()),
            text::decimal(in_place.map(|transfer| transfer.len).sum()),
            of_file.first().and_then(|first| names.get(first.shard as usize)).cloned().unwrap_or_default(),
        ]);
    }
    let read: HashSet<&Path> = used().filter_map(|of_file| path_of(shards, of_file.first()?)).collect();
    let all: HashSet<&Path> = shards.iter().map(|shard| shard.path.as_path()).collect();
    let mut out = table.render_on(Screen::stdout()) + &more(used().count(), most, "file");
    if all.len() > read.len() {
        let _ = writeln!(out, "{} not read", text::plural((all.len() - read.len()) as u64, "file"));
    }
    out
}

fn reads(transfers: &[Transfer], names: &[String], most: usize) -> String {
    let left_and_right = [Align::Right, Align::Left, Align::Right, Align::Right, Align::Left, Align::Left];
    let mut table = Table::new(&left_and_right).elastic(5);
    table.heading(["", "route", "bytes", "offset", "lands", "file"]);
    for (at, transfer) in transfers.iter().enumerate().take(most) {
        let lands = match &transfer.landing {
            Landing::InPlace { .. } => "in place".to_owned(),
            Landing::Staged { pieces } => format!("staged, {}", text::plural(pieces.len() as u64, "piece")),
        };
        table.row([
            text::count(at as u64 + 1),
            Route::name(transfer.route).to_owned(),
            text::decimal(transfer.len),
            text::count(transfer.offset),
            lands,
            names.get(transfer.shard as usize).cloned().unwrap_or_default(),
        ]);
    }
    table.render_on(Screen::stdout()) + &more(transfers.len(), most, "read")
}

/// What is not shown.
fn more(all: usize, most: usize, thing: &str) -> String {
    let more = all.checked_sub(most).filter(|more| *more > 0);
    let line = more.map(|more| format!("and {} (-v lists all)", text::plural(more as u64, &format!("more {thing}"))));
    line.map_or(String::new(), |line| format!("{}\n", text::styled(DIM, line)))
}
