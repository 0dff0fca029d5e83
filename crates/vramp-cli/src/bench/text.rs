//! A benchmark as a person reads it in one look: what each stage can do, what the load reached, what to change. Pure text.

use anstyle::Style;
use vramp_bench::{BenchReport, Ceiling, Spread, StageBench, State};

use super::super::report::efficiency_style;
use super::super::text::{self, Align, BAD, BOLD, DIM, GOOD, Table, WARN};
use super::super::wrap::{self, line};
use super::{advice, labels};

/// Columns of a setting, so that the table fits.
const SETTING: usize = 32;

/// The whole report, in 80 columns.
pub(crate) fn text(report: &BenchReport) -> String {
    let mut out = head(report);
    for (state, (_, advice)) in report.states.iter().zip(advice::of(report)) {
        out.push('\n');
        out.push_str(&of_state(state, &advice));
    }
    if !report.stages.is_empty() {
        out.push('\n');
        out.push_str(&alone(&report.stages));
    }
    for fallback in &report.fallbacks {
        out.push_str(&line("fallback", &format!("{}: {}", text::escape(&fallback.what), text::escape(&fallback.why))));
    }
    out
}

fn head(report: &BenchReport) -> String {
    let mut out = line("checkpoint", &format!("{}: {}", labels::name(report), labels::subject(report)));
    out.extend(labels::part(report).map(|part| line("", &part)));
    out.push_str(&line("device", &labels::device(report)));
    out.push_str(&line("machine", &labels::machine(report).join(", ")));
    out
}

/// One state: what was predicted, what came of it, by which stages, and what to change.
fn of_state(state: &State, advice: &str) -> String {
    let name = text::styled(BOLD, labels::state(state.state));
    let (predicted, ceilings) = (line(&name, &predicted(state)), ceilings(state));
    format!("{predicted}{}{}{ceilings}{}", took(state), proved(state), line("advice", advice))
}

fn predicted(state: &State) -> String {
    let prediction = &state.prediction;
    let limit = labels::limit(prediction.bound_by, prediction.bytes_per_second);
    let before = text::seconds(prediction.before_seconds);
    let seconds = text::seconds(prediction.seconds);
    format!("T = {seconds} is predicted: {limit}, and {before} of opening and planning")
}

fn took(state: &State) -> String {
    let Some(spread) = state.seconds() else { return line("loads", "none") };
    let factor = text::styled(efficiency_style(state.verdict.reached), labels::times_predicted(state));
    let loads = state.loads.len();
    let rate = labels::load_rate(state).map_or(String::new(), |rate| format!(", {}", text::rate(rate)));
    let took = format!("{}, median of {loads}{rate}: {factor}", labels::spread(spread, text::seconds));
    line("loads", &took) + &line("set-up", &setup(state))
}

/// The set-up of threads and staging, apart from the load and with it.
pub(super) fn setup(state: &State) -> String {
    let apart = Spread::of(state.loads.iter().map(|load| load.setup_seconds));
    let with = Spread::of(state.loads.iter().map(|load| load.seconds + load.setup_seconds));
    let median = |spread: Option<Spread>| spread.map_or(String::new(), |it| text::seconds(it.median));
    format!("{} for threads and staging, not in the time above; {} with it", median(apart), median(with))
}

fn proved(state: &State) -> String {
    let style = if state.proof.proven { GOOD } else { BAD };
    line("page cache", &text::styled(style, labels::proof(state)))
}

/// Each stage that the load passes: what it can do alone, and what it did.
fn ceilings(state: &State) -> String {
    let [left, right] = [Align::Left, Align::Right];
    let mut table = Table::new(&[left, right, right, right, left]);
    table.heading(["stage", "alone", "in the load", "takes", ""]);
    for ceiling in &state.ceilings {
        table.styled_row(row(state, ceiling));
    }
    table.render()
}

fn row(state: &State, ceiling: &Ceiling) -> [(Style, String); 5] {
    let plain = Style::new();
    let within = labels::reached_in_load(state, ceiling);
    let share = within.map(|within| within / ceiling.bytes_per_second.max(f64::MIN_POSITIVE));
    let is_limit = ceiling.stage == state.prediction.bound_by;
    [
        (if is_limit { BOLD } else { plain }, labels::stage(ceiling.stage).to_owned()),
        (plain, labels::rate(ceiling.bytes_per_second)),
        (share.filter(|_| is_limit).map_or(plain, efficiency_style), within.map_or("-".to_owned(), text::rate)),
        (plain, text::seconds(ceiling.seconds)),
        (WARN, if is_limit { "the limit".to_owned() } else { String::new() }),
    ]
}

/// What each stage did on its own, at the best of the settings that were tried.
fn alone(stages: &[StageBench]) -> String {
    let mut table = Table::new(&[Align::Left, Align::Left, Align::Left]);
    table.heading(["stage alone", "median [least … most]", "at its best setting"]);
    for (stage, trial) in stages.iter().filter_map(|stage| Some((stage, stage.best()?))) {
        let best = labels::samples(&trial.samples).unwrap_or_default();
        let setting = labels::setting_by_numbers(&trial.setting);
        let plain = Style::new();
        let (name, setting) = (labels::stage(stage.stage).to_owned(), wrap::shortened(&setting, SETTING).into_owned());
        table.styled_row([(plain, name), (plain, best), (DIM, setting)]);
    }
    let skipped = labels::skipped(stages);
    let skipped = skipped.iter().map(|(names, why)| line("skipped", &format!("{names}: not measured alone ({why})")));
    table.render() + &skipped.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn plain(report: &BenchReport) -> String {
        anstream::adapter::strip_str(&text(report)).to_string()
    }

    #[test]
    fn a_benchmark_reads_so() {
        let mut report = sample::report();
        report.subject.path = "models/llama".into();
        let expected = "\
checkpoint  llama: S = 537 MB (512 MiB), 246 tensors in 3 files
device      cpu
machine     Some Processor, 2 cores, 16 GiB of memory, ext4 on kernel 6.18.44

cold        T = 270 ms is predicted: storage at 2.00 GB/s, and 2.00 ms of
            opening and planning
loads       276 ms [274 ms … 295 ms], median of 5, 1.95 GB/s: 1.02 times T
set-up      3.00 ms for threads and staging, not in the time above; 279 ms with
            it
page cache  proved: 0 % of the files in the page cache before the loads (each
            page asked by mincore)
stage                      alone  in the load    takes
storage                2.00 GB/s    1.96 GB/s   268 ms  the limit
cache to fresh memory  8.00 GB/s            -  67.1 ms
";
        let found = plain(&report);
        assert!(found.starts_with(expected), "{found}");
        assert!(found.contains("\nadvice      the limit is storage"), "{found}");
        let skipped = "\nskipped     upload: not measured alone (the device's memory is the host's)\n";
        assert!(found.contains(skipped) && found.contains("\ndriver's context  120 ms "), "{found}");
        let own = "storage           2.00 GB/s [1.96 … 2.06]  16 × 8 MiB, O_DIRECT, io_uring\n";
        assert!(found.contains(own), "{found}");
        let wide = found.lines().find(|line| line.chars().count() > wrap::COLUMNS);
        assert_eq!(wide, None, "{found}");
    }

    #[test]
    fn what_was_not_proved_is_said_and_names_command_no_terminal() {
        let mut report = sample::report();
        report.states[0].proof.proven = false;
        let found = plain(&report);
        assert!(found.contains("NOT proved") && !found.contains('\x1b'), "{found}");
        report.states[0].loads.clear();
        report.states[0].ceilings.clear();
        assert!(plain(&report).contains("loads       none"));
    }
}
