//! The report of a load as a person reads it. Pure text of a [`Report`].

use std::fmt::Write as _;

use vramp::report::{Report, Stage, StageTime, Stages};

use super::text::{self, Align, BAR, BOLD, DIM, GOOD, Table, WARN};

const BAR_CELLS: usize = 24;

/// The whole report.
pub(crate) fn text(report: &Report) -> String {
    format!("{}{}\n{}\n{}", headline(report), limit(report), stages(report), details(report))
}

fn headline(report: &Report) -> String {
    let (bytes, took) = (text::both(report.bytes), text::seconds(report.seconds));
    let mut tensors = text::plural(report.tensors as u64, "tensor");
    if report.names > report.tensors {
        tensors.push_str(&format!(" under {} names", text::count(report.names as u64)));
    }
    if report.routes.view > 0 {
        let headline = text::styled(BOLD, format!("{bytes} in {took}"));
        return format!("mapped  {headline}  ({tensors} as views; nothing is read before it is touched)\n");
    }
    let rate = text::rate(report.gb_per_s * 1e9);
    let headline = text::styled(BOLD, format!("{bytes} in {took}: {rate}"));
    format!("loaded  {headline}  ({tensors} to {})\n", text::escape(&report.device))
}

/// T = S/B and how near the load came to it; where the time went to something else, what the bytes alone would have taken.
fn limit(report: &Report) -> String {
    let bound = &report.estimate;
    if report.bytes == 0 || bound.bandwidth <= 0.0 {
        return "limit   none: no byte had to move\n".to_owned();
    }
    let efficiency = text::styled(efficiency_style(report.efficiency), text::percent(report.efficiency));
    let stage = stage_name(bound.bound_by);
    let (bytes, rate) = (text::decimal(report.stages.read.bytes), text::rate(bound.bandwidth));
    let division = format!("{bytes} / {rate} = {}", text::seconds(bound.seconds));
    if moves_bytes(bound.bound_by) {
        format!("limit   {stage}: T = S/B = {division}; reached {efficiency} of it\n")
    } else {
        format!("limit   {stage}; S/B alone = {division}, {efficiency} of the time\n")
    }
}

/// Whether a stage takes longer the more bytes there are, so that S/B can be its time.
fn moves_bytes(stage: Stage) -> bool {
    matches!(stage, Stage::Storage | Stage::PageCache | Stage::Upload | Stage::Kernels)
}

pub(crate) fn efficiency_style(efficiency: f64) -> anstyle::Style {
    if efficiency >= 0.9 { GOOD } else { WARN }
}

/// A stage in words.
pub(crate) fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Storage => "storage",
        Stage::PageCache => "memory (copies out of the page cache)",
        Stage::Upload => "uploads to the device",
        Stage::Kernels => "converting",
        Stage::Staging => "staging buffers (too few or too small: reads and uploads wait for each other)",
        Stage::Headers => "reading headers",
        Stage::Planning => "selecting and planning",
        Stage::SetUp => "set-up (too small for bandwidth to matter)",
        Stage::Bookkeeping => "bookkeeping of the loader",
        _ => "another stage",
    }
}

/// Where the time went: a line a stage that took any.
fn stages(report: &Report) -> String {
    let stages = &report.stages;
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Left]);
    table.heading(["stage", "time", "bytes", ""]);
    let mut line = |name: &str, stage: StageTime| {
        if stage.seconds <= 0.0 && stage.bytes == 0 {
            return;
        }
        let bytes = if stage.bytes == 0 { String::new() } else { text::decimal(stage.bytes) };
        let bar = text::bar(stage.seconds / report.seconds.max(f64::MIN_POSITIVE), BAR_CELLS);
        let plain = anstyle::Style::new();
        let cells = [name.to_owned(), text::seconds(stage.seconds), bytes].map(|cell| (plain, cell));
        let [name, time, bytes] = cells;
        table.styled_row([name, time, bytes, (BAR, bar)]);
    };
    line("open", stages.open);
    line("plan", stages.plan);
    line("allocate", stages.allocate);
    line("read", stages.read);
    line("upload", stages.upload);
    line("convert", stages.kernels);
    line("bookkeeping", stages.bookkeeping);
    let waits = waits(stages).map_or(String::new(), |waits| format!("{}\n", text::styled(DIM, waits)));
    table.render() + &waits
}

/// What vramp had to wait for, where it had to wait.
fn waits(stages: &Stages) -> Option<String> {
    let waited = |seconds: f64, what: &str| (seconds > 0.0).then(|| format!("{} for {what}", text::seconds(seconds)));
    let storage = waited(stages.wait_read.seconds, "data to be read");
    let device = waited(stages.wait_upload.seconds, "the device to take it");
    let waits: Vec<String> = [storage, device].into_iter().flatten().collect();
    (!waits.is_empty()).then(|| format!("of that, vramp sat waiting {}", waits.join(" and ")))
}

fn details(report: &Report) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<12}{value}");
    };
    if !report.product.is_empty() {
        line("device", format!("{}, {}", text::escape(&report.device), text::escape(&report.product)));
    }
    line("routes", routes(report));
    line("page cache", cache(report));
    // Views are read by nobody before they are touched.
    match report.routes.view {
        0 => line("engine", format!("{} on {}", or_unknown(&report.engine), system(report))),
        _ => line("files", format!("on {}", system(report))),
    }
    if report.staging.count > 0 {
        let size = text::binary(report.staging.bytes as u64);
        line("staging", format!("{} of {size}", text::plural(report.staging.count as u64, "buffer")));
    }
    if report.peak_host_bytes > 0 {
        line("memory", format!("{} at the peak of this process", text::decimal(report.peak_host_bytes)));
    }
    line("CPU", format!("{} user and system", text::seconds(report.cpu_seconds)));
    if report.setup_seconds > 0.0 {
        line(
            "set-up",
            format!("{} for threads and staging, not in the time above", text::seconds(report.setup_seconds)),
        );
    }
    for fallback in &report.fallbacks {
        line("fallback", format!("{}: {}", text::escape(&fallback.what), text::escape(&fallback.why)));
    }
    out
}

fn routes(report: &Report) -> String {
    let routes = &report.routes;
    let named = [
        ("direct", routes.direct),
        ("buffered", routes.buffered),
        ("mapped", routes.mapped),
        ("view", routes.view),
        ("gpu-direct", routes.gpu_direct),
    ];
    let taken: Vec<String> = named
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(name, bytes)| format!("{name} {}", text::decimal(*bytes)))
        .collect();
    if taken.is_empty() { "none".to_owned() } else { taken.join(" · ") }
}

fn cache(report: &Report) -> String {
    let cache = &report.cache;
    let share = text::as_f64(cache.resident_before) / text::as_f64(cache.file_bytes).max(1.0);
    let state = match share {
        share if share < 0.01 => "cold",
        share if share > 0.99 => "warm",
        _ => "mixed",
    };
    let (resident, all) = (text::decimal(cache.resident_before), text::decimal(cache.file_bytes));
    format!("{state}: {resident} of {all} resident before")
}

fn system(report: &Report) -> String {
    format!("{}, kernel {}", or_unknown(&report.file_system), or_unknown(&report.kernel))
}

fn or_unknown(text: &str) -> String {
    if text.is_empty() { "unknown".to_owned() } else { text::escape(text) }
}

#[cfg(test)]
mod tests {
    use vramp::report::{Bound, Cache, Routes, Staging};
    use vramp::source::Fallback;

    use super::*;

    fn report() -> Report {
        let stage = |seconds, bytes| StageTime { seconds, bytes };
        let stages = Stages {
            open: stage(0.0021, 0),
            plan: stage(0.0007, 0),
            allocate: stage(0.0001, 4_340_000_000),
            read: stage(2.28, 4_340_000_000),
            upload: stage(0.4, 8_000_000),
            wait_read: stage(2.2, 0),
            wait_upload: stage(0.001, 0),
            bookkeeping: stage(0.03, 0),
            ..Stages::default()
        };
        Report {
            bytes: 4_340_000_000,
            tensors: 246,
            names: 246,
            seconds: 2.31,
            gb_per_s: 4.34 / 2.31,
            estimate: Bound { bandwidth: 1.99e9, bound_by: Stage::Storage, seconds: 4.34 / 1.99 },
            efficiency: 0.944,
            stages,
            routes: Routes { direct: 4_330_000_000, buffered: 10_000_000, ..Routes::default() },
            cache: Cache { resident_before: 262_144, file_bytes: 4_340_100_000 },
            staging: Staging { count: 16, bytes: 4 << 20 },
            peak_host_bytes: 4_400_000_000,
            cpu_seconds: 0.75,
            setup_seconds: 0.0034,
            fallbacks: vec![Fallback { what: "io_uring".to_owned(), why: "refused: EPERM\x1b[31m".to_owned() }],
            file_system: "ext4".to_owned(),
            kernel: "6.18.44".to_owned(),
            device: "cpu".to_owned(),
            product: String::new(),
            engine: "threads".to_owned(),
        }
    }

    fn plain(report: &Report) -> String {
        anstream::adapter::strip_str(&text(report)).to_string()
    }

    #[test]
    fn a_report_reads_so() {
        let expected = "\
loaded  4.34 GB (4.04 GiB) in 2.31 s: 1.88 GB/s  (246 tensors to cpu)
limit   storage: T = S/B = 4.34 GB / 1.99 GB/s = 2.18 s; reached 94 % of it

stage           time    bytes
open         2.10 ms           ▏
plan          700 µs           ▏
allocate      100 µs  4.34 GB  ▏
read          2.28 s  4.34 GB  ███████████████████████▊
upload        400 ms  8.00 MB  ████▏
bookkeeping  30.0 ms           ▎
of that, vramp sat waiting 2.20 s for data to be read and 1.00 ms for the device to take it

routes      direct 4.33 GB · buffered 10.0 MB
page cache  cold: 262 kB of 4.34 GB resident before
engine      threads on ext4, kernel 6.18.44
staging     16 buffers of 4 MiB
memory      4.40 GB at the peak of this process
CPU         750 ms user and system
set-up      3.40 ms for threads and staging, not in the time above
fallback    io_uring: refused: EPERM\\u{1b}[31m
";
        let found = plain(&report());
        assert_eq!(found, expected, "{found}");
        let one = Report { staging: Staging { count: 1, bytes: 4 << 10 }, ..report() };
        assert!(plain(&one).contains("staging     1 buffer of 4 KiB\n"), "{}", plain(&one));
    }

    #[test]
    fn a_limit_that_is_no_bandwidth_is_given_none() {
        let estimate = Bound { bandwidth: 62.2e9, bound_by: Stage::Planning, seconds: 0.00659 };
        let read = StageTime { seconds: 0.0077, bytes: 410_000_000 };
        let stages = Stages { read, ..report().stages };
        let small = Report { bytes: read.bytes, seconds: 0.22, efficiency: 0.03, estimate, stages, ..report() };
        let expected = "limit   selecting and planning; S/B alone = 410 MB / 62.2 GB/s = 6.59 ms, 3 % of the time\n";
        assert!(plain(&small).contains(expected), "{}", plain(&small));
        for stage in [Stage::Headers, Stage::SetUp, Stage::Bookkeeping, Stage::Staging] {
            let other = Report { estimate: Bound { bound_by: stage, ..report().estimate }, ..report() };
            assert!(!plain(&other).contains("T = "), "{}", plain(&other));
        }
    }

    #[test]
    fn a_view_and_a_load_of_nothing_claim_no_bandwidth() {
        let none = Bound { bandwidth: 0.0, bound_by: Stage::SetUp, seconds: 0.0 };
        let routes = Routes { view: 4_340_000_000, ..Routes::default() };
        let view = Report { routes, estimate: none, stages: Stages::default(), engine: "none".to_owned(), ..report() };
        assert!(
            plain(&view).starts_with("mapped  4.34 GB (4.04 GiB) in 2.31 s  (246 tensors as views"),
            "{}",
            plain(&view)
        );
        assert!(plain(&view).contains("limit   none") && plain(&view).contains("files       on ext4, kernel"));
        assert!(!plain(&view).contains("waiting") && !plain(&view).contains("engine"), "{}", plain(&view));
        let empty = Report { bytes: 0, seconds: 0.0, gb_per_s: 0.0, ..report() };
        assert!(plain(&empty).contains("limit   none"));
    }
}
