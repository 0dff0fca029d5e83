//! What a load would do, for `inspect --plan` and `load --plan-only`. Pure text of a [`Prepared`] plan.

use std::fmt::Write as _;

use vramp::checkpoint::Shard;
use vramp::load::Prepared;
use vramp::plan::{Landing, Transfer};
use vramp::source::Route;

use super::text::{self, Align, BOLD, Table};

/// The plan in a few lines and a table of the shards.
pub(crate) fn text(prepared: &Prepared, shards: &[Shard]) -> String {
    let plan = &prepared.plan;
    let staged = plan.staged();
    let in_place = plan.transfers.len() - staged;
    let tensors = text::plural(plan.tensors() as u64, "tensor");
    let mut out = format!("{} {} of {tensors}\n", text::styled(BOLD, "plan:"), text::both(plan.tensor_bytes()));
    let _ = writeln!(out, "  memory      {} in one piece", text::both(plan.arena_bytes));
    let _ = writeln!(
        out,
        "  reads       {}, together {}: {in_place} in place, {staged} staged{}",
        text::count(plan.transfers.len() as u64),
        text::decimal(plan.read_bytes()),
        if staged > 0 { format!(" through buffers of {}", text::binary(plan.buffer_bytes)) } else { String::new() },
    );
    let _ = writeln!(out, "  routes      {}", routes(prepared));
    let _ = writeln!(
        out,
        "  page cache  {} of {} resident",
        text::decimal(prepared.cache.resident_before),
        text::decimal(prepared.cache.file_bytes)
    );
    let _ = writeln!(out, "  file system {}\n", text::escape(&prepared.file_system));
    out + &shard_table(&plan.transfers, shards)
}

fn routes(prepared: &Prepared) -> String {
    let of = |route, name| {
        let bytes = prepared.plan.route_bytes(route);
        (bytes > 0).then(|| format!("{name} {}", text::decimal(bytes)))
    };
    let routes = [
        of(Route::Direct, "direct"),
        of(Route::Buffered, "buffered"),
        of(Route::Mapped, "mapped"),
        of(Route::GpuDirect, "gpu-direct"),
    ];
    let routes: Vec<String> = routes.into_iter().flatten().collect();
    if routes.is_empty() { "nothing to read".to_owned() } else { routes.join(" · ") }
}

fn shard_table(transfers: &[Transfer], shards: &[Shard]) -> String {
    let mut table = Table::new(&[Align::Right, Align::Right, Align::Right, Align::Right, Align::Left]);
    table.heading(["shard", "reads", "bytes", "in place", "file"]);
    let mut untouched = 0;
    for (index, shard) in shards.iter().enumerate() {
        let here: Vec<&Transfer> = transfers.iter().filter(|transfer| transfer.shard as usize == index).collect();
        if here.is_empty() {
            untouched += 1;
            continue;
        }
        let in_place = here.iter().filter(|transfer| matches!(transfer.landing, Landing::InPlace { .. }));
        let bytes = here.iter().map(|transfer| transfer.len).sum();
        table.row([
            index.to_string(),
            text::count(here.len() as u64),
            text::decimal(bytes),
            text::decimal(in_place.map(|transfer| transfer.len).sum()),
            text::escape(&shard.path.display().to_string()),
        ]);
    }
    match untouched {
        0 => table.render(),
        _ if table.is_bare() => String::new(),
        _ => format!("{}{} not read\n", table.render(), text::plural(untouched, "more shard")),
    }
}
