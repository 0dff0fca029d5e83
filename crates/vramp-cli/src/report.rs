//! The report of a load as a person reads it. Pure text of a [`Report`].

use vramp::report::{Bound, Report, Stage, StageTime, Stages};

use super::text::{self, Align, BAR, BOLD, DIM, GOOD, Table, WARN};
use super::wrap;

const BAR_CELLS: usize = 24;

/// A load that reaches more than this of the predicted rate shows that the limits are out of date.
const FASTER: f64 = 1.1;

/// The whole report, in 80 columns.
pub(crate) fn text(report: &Report) -> String {
    format!("{}{}{}\n{}\n{}", headline(report), main_stage(report), limit(report), stages(report), details(report))
}

fn headline(report: &Report) -> String {
    let (bytes, took) = (text::both(report.bytes), text::seconds(report.seconds));
    let mut tensors = text::plural(report.tensors as u64, "tensor");
    if report.names > report.tensors {
        tensors.push_str(&format!(" under {} names", text::count(report.names as u64)));
    }
    if report.routes.view > 0 {
        let headline = text::styled(BOLD, format!("{bytes} in {took}"));
        return wrap::line("mapped", &format!("{headline} ({tensors} as views; nothing is read before it is touched)"));
    }
    let rate = text::rate(report.gb_per_s * 1e9);
    let headline = text::styled(BOLD, format!("{bytes} in {took}: {rate}"));
    wrap::line("loaded", &format!("{headline} ({tensors} to {})", text::escape(&report.device)))
}

/// Where the time went, as the load saw it.
fn main_stage(report: &Report) -> String {
    let main = &report.main_stage;
    if report.bytes == 0 || report.routes.view > 0 || report.seconds <= 0.0 {
        return String::new();
    }
    let share = text::percent((main.seconds / report.seconds).min(1.0));
    let rate = main.bytes_per_second.map_or(String::new(), |rate| format!(", at {}", text::rate(rate)));
    wrap::line("time", &format!("{share} of it was {}{rate}", doing(main.stage, report)))
}

/// T = S/B by measured limits and how near the load came to it, or how to get such limits.
fn limit(report: &Report) -> String {
    if let Some(bound) = &report.estimate {
        return wrap::line("limit", &predicted(bound, report.efficiency.unwrap_or_default()));
    }
    match &report.no_estimate {
        None => wrap::line("limit", "none: no byte had to move"),
        Some(why) => {
            let how = "`vramp bench PATH` measures what this machine can do, for later loads";
            wrap::line("limit", &format!("not known: {}. {how}", text::escape(why)))
        }
    }
}

fn predicted(bound: &Bound, efficiency: f64) -> String {
    let (bytes, rate) = (text::decimal(bound.bytes), text::rate(bound.bandwidth));
    let day: String = bound.measured.when.chars().take(10).collect();
    let measured = format!("measured {day} by {}", text::escape(&bound.measured.by));
    let (stage, seconds) = (stage_name(bound.bound_by), text::seconds(bound.seconds));
    let reached = text::styled(efficiency_style(efficiency), text::percent(efficiency));
    let verdict = match efficiency {
        faster if faster > FASTER => format!("this load ran at {reached} of that rate, so measure again"),
        _ => format!("this load ran at {reached} of that rate"),
    };
    format!("{stage}: T = S/B = {bytes} / {rate} = {seconds} ({measured}); {verdict}")
}

pub(crate) fn efficiency_style(efficiency: f64) -> anstyle::Style {
    if (0.9..=FASTER).contains(&efficiency) { GOOD } else { WARN }
}

/// What a load did in a stage.
fn doing(stage: Stage, report: &Report) -> &'static str {
    match stage {
        Stage::Reading => "reading",
        Stage::Upload if is_gpu(report) => "uploading to the device",
        Stage::Upload => "copying out of staging buffers",
        Stage::Kernels => "converting",
        Stage::Staging => {
            "spent on reads and uploads that waited for each other (too few or too small staging buffers)"
        }
        Stage::Headers => "reading headers",
        Stage::Planning => "selecting and planning",
        Stage::SetUp => "reserving memory (the load is too small for bandwidth to matter)",
        Stage::Bookkeeping => "the loader's own bookkeeping",
        _ => "another stage",
    }
}

/// A stage with a measured rate, in words.
fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Storage => "storage",
        Stage::PageCache => "page cache",
        Stage::FirstTouch => "fresh memory",
        Stage::Upload => "uploads",
        _ => "another stage",
    }
}

/// Whether the tensors are on a device of its own memory.
fn is_gpu(report: &Report) -> bool {
    !matches!(report.device.as_str(), "cpu" | "null")
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
    line(if is_gpu(report) { "upload" } else { "copy" }, stages.upload);
    line("convert", stages.kernels);
    line("bookkeeping", stages.bookkeeping);
    let waits = waits(report).map_or(String::new(), |waits| {
        let lines = wrap::wrapped(&waits, wrap::COLUMNS);
        lines.into_iter().map(|line| format!("{}\n", text::styled(DIM, line))).collect()
    });
    table.render() + &waits
}

/// What vramp had to wait for, where it had to wait.
fn waits(report: &Report) -> Option<String> {
    let Stages { wait_read, wait_upload, .. } = &report.stages;
    let waited = |seconds: f64, what: &str| (seconds > 0.0).then(|| format!("{} for {what}", text::seconds(seconds)));
    let storage = waited(wait_read.seconds, "data to be read");
    let device = waited(wait_upload.seconds, if is_gpu(report) { "the device to take it" } else { "copies" });
    let waits: Vec<String> = [storage, device].into_iter().flatten().collect();
    (!waits.is_empty()).then(|| format!("of that, vramp sat waiting {}", waits.join(" and ")))
}

fn details(report: &Report) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| out.push_str(&wrap::line(name, &value));
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
    use vramp::report::{Cache, MainStage, Measured, Routes, Staging};
    use vramp::storage::Fallback;

    use super::*;

    fn report() -> Report {
        let stage = |seconds, bytes| StageTime { seconds, bytes };
        let mut stages = Stages::default();
        stages.open = stage(0.0021, 0);
        stages.plan = stage(0.0007, 0);
        stages.allocate = stage(0.0001, 4_340_000_000);
        stages.read = stage(2.28, 4_340_000_000);
        stages.upload = stage(0.4, 8_000_000);
        stages.wait_read = stage(2.2, 0);
        stages.wait_upload = stage(0.001, 0);
        stages.bookkeeping = stage(0.03, 0);
        let mut report = Report::default();
        (report.bytes, report.tensors, report.names) = (4_340_000_000, 246, 246);
        (report.seconds, report.gb_per_s) = (2.31, 4.34 / 2.31);
        report.main_stage = MainStage { stage: Stage::Reading, seconds: 2.28, bytes_per_second: Some(4.34e9 / 2.28) };
        report.no_estimate = Some("no measured limits were given".to_owned());
        report.stages = stages;
        report.routes = Routes { direct: 4_330_000_000, buffered: 10_000_000, ..Routes::default() };
        report.cache = Cache { resident_before: 262_144, file_bytes: 4_340_100_000 };
        report.staging = Staging { count: 16, bytes: 4 << 20 };
        report.peak_host_bytes = 4_400_000_000;
        (report.cpu_seconds, report.setup_seconds) = (0.75, 0.0034);
        report.fallbacks = vec![Fallback { what: "io_uring".to_owned(), why: "refused: EPERM\x1b[31m".to_owned() }];
        (report.file_system, report.kernel) = ("ext4".to_owned(), "6.18.44".to_owned());
        (report.device, report.engine) = ("cpu".to_owned(), "threads".to_owned());
        report
    }

    fn plain(report: &Report) -> String {
        anstream::adapter::strip_str(&text(report)).to_string()
    }

    /// The same load, compared with limits.
    fn judged(efficiency: f64) -> Report {
        let measured = Measured { when: "2026-11-30T04:29:00Z".to_owned(), by: "vramp bench 0.1.0".to_owned() };
        let bytes = 4_340_000_000;
        let seconds = 2.31 * efficiency;
        let bandwidth = 4.34e9 / seconds;
        let bound = Bound { bytes, bandwidth, bound_by: Stage::Storage, seconds, measured };
        let mut report = report();
        (report.estimate, report.efficiency, report.no_estimate) = (Some(bound), Some(efficiency), None);
        report
    }

    #[test]
    fn a_report_reads_so() {
        let expected = "\
loaded      4.34 GB (4.04 GiB) in 2.31 s: 1.88 GB/s (246 tensors to cpu)
time        99 % of it was reading, at 1.90 GB/s
limit       not known: no measured limits were given. `vramp bench PATH`
            measures what this machine can do, for later loads

stage           time    bytes
open         2.10 ms           ▏
plan          700 µs           ▏
allocate      100 µs  4.34 GB  ▏
read          2.28 s  4.34 GB  ███████████████████████▊
copy          400 ms  8.00 MB  ████▏
bookkeeping  30.0 ms           ▎
of that, vramp sat waiting 2.20 s for data to be read and 1.00 ms for copies

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
        let mut one = report();
        one.staging = Staging { count: 1, bytes: 4 << 10 };
        assert!(plain(&one).contains("staging     1 buffer of 4 KiB\n"), "{}", plain(&one));
    }

    #[test]
    fn a_share_is_printed_only_of_a_limit_that_was_measured_before() {
        let expected = "\
limit       storage: T = S/B = 4.34 GB / 2.00 GB/s = 2.17 s (measured 2026-11-30
            by vramp bench 0.1.0); this load ran at 94 % of that rate
";
        let found = plain(&judged(0.94));
        assert!(found.contains(expected), "{found}");
        assert!(plain(&judged(1.3)).replace("\n            ", " ").contains("130 % of that rate, so measure again"));
        let alone = plain(&report());
        assert!(!alone.contains("T = ") && !alone.contains("that rate"), "{alone}");
        let mut gpu = report();
        gpu.main_stage = MainStage { stage: Stage::Upload, seconds: 1.0, bytes_per_second: None };
        gpu.device = "cuda:0".to_owned();
        assert!(plain(&gpu).contains("43 % of it was uploading to the device\n") && plain(&gpu).contains("\nupload "));
    }

    #[test]
    fn every_line_fits_80_columns() {
        let mut long = judged(0.5);
        long.fallbacks = vec![Fallback { what: "io_uring".to_owned(), why: "word ".repeat(60) }];
        (long.tensors, long.names) = (12_291, 24_582);
        long.device = "cuda:0".to_owned();
        long.product = "NVIDIA ".repeat(20);
        for stage in [Stage::Staging, Stage::SetUp, Stage::Reading] {
            long.main_stage.stage = stage;
            for line in plain(&long).lines() {
                assert!(line.chars().count() <= wrap::COLUMNS, "{line}");
            }
        }
    }

    #[test]
    fn a_view_and_a_load_of_nothing_claim_no_bandwidth() {
        let mut view = report();
        view.main_stage = MainStage { stage: Stage::SetUp, seconds: 2.31, bytes_per_second: None };
        view.routes = Routes { view: 4_340_000_000, ..Routes::default() };
        (view.stages, view.engine, view.no_estimate) = (Stages::default(), "none".to_owned(), None);
        let found = plain(&view);
        assert!(found.starts_with("mapped      4.34 GB (4.04 GiB) in 2.31 s (246 tensors as views;"), "{found}");
        assert!(found.contains("limit       none") && found.contains("files       on ext4, kernel"));
        assert!(!found.contains("waiting") && !found.contains("engine") && !found.contains("\ntime "), "{found}");
        let mut empty = report();
        (empty.bytes, empty.seconds, empty.gb_per_s, empty.no_estimate) = (0, 0.0, 0.0, None);
        assert!(plain(&empty).contains("limit       none"));
    }
}
