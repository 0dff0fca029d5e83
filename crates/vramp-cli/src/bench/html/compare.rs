//! Charts over states and settings: every load of every state as a dot, and what each setting of a stage reached.

use std::collections::BTreeSet;

use vramp_bench::{BenchReport, Spread, StageBench, State, Trial};

use super::super::super::text;
use super::super::labels;
use super::canvas::{self, Axes, Canvas, Ink, ticks};
use super::markup::{Mark, legend};
use super::stages::{rate_of_tick, times};

/// Pixels of a row of dots: a line of text and the dots below it.
const ROW: u32 = 62;

/// Fewer places are better read in the table.
const LEAST_PLACES: usize = 3;

/// Lines whose ranges can be told apart.
const FEW: usize = 3;

/// All loads of all states against T.
pub(super) fn loads(report: &BenchReport) -> String {
    let seconds = report.states.iter().flat_map(|state| &state.loads).map(|load| load.seconds);
    let predicted = report.states.iter().map(|state| state.prediction.seconds);
    let most = seconds.chain(predicted).fold(1e-9, f64::max) * 1.04;
    let count = u32::try_from(report.states.len()).unwrap_or(1);
    let axes = |wide: bool, _| Axes {
        x: 0.0..most,
        y: 0.0..f64::from(count),
        x_ticks: times(most, if wide { 9 } else { 4 }),
        y_ticks: Vec::new(),
        around: [8, 2, if wide { 24 } else { 26 }],
        height: ROW * count + 28,
    };
    let chart = canvas::both("Every load, cold and warm, against its T", axes, |canvas| {
        report.states.iter().enumerate().for_each(|(at, state)| paint_loads(canvas, state, at, count));
    });
    let marks = legend(&[
        (Mark::Dot, Ink::Read, "a load".to_owned()),
        (Mark::Line, Ink::Text, "their median".to_owned()),
        (Mark::Dashes, Ink::Limit, "T".to_owned()),
    ]);
    marks + &chart
}

fn paint_loads(canvas: &mut Canvas, state: &State, at: usize, count: u32) {
    let middle = f64::from(count) - text::as_f64(at as u64) - 0.68;
    let top = canvas.pixel(0.0, f64::from(count) - text::as_f64(at as u64)).1;
    let median = state.seconds().map_or("none".to_owned(), |it| text::seconds(it.median));
    let said =
        format!("{}: median {median}, T = {}", labels::state(state.state), text::seconds(state.prediction.seconds));
    canvas.heading(8, top + 11, &said, Ink::Text);
    if let Some(spread) = state.seconds() {
        canvas.line([(spread.min, middle), (spread.max, middle)], Ink::Muted, 1);
        canvas.line([(spread.median, middle - 0.2), (spread.median, middle + 0.2)], Ink::Text, 3);
    }
    let predicted = state.prediction.seconds;
    canvas.dashes([(predicted, middle - 0.28), (predicted, middle + 0.28)], Ink::Limit, 2);
    state.loads.iter().for_each(|load| canvas.dot(load.seconds, middle, 4, Ink::Read));
}

// ---- settings

/// What changes from left to right.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Across {
    Blocks,
    AtOnce,
}

/// A line of a chart: what it is called, and for each place its trial.
struct Series<'a> {
    said: String,
    points: Vec<(u64, &'a Trial)>,
}

/// A chart for each way of a stage that was tried at several settings; empty where there is nothing to compare.
pub(super) fn survey(stage: &StageBench) -> String {
    let ways = distinct(stage.trials.iter().map(|trial| trial.setting.way.as_str()));
    let most = stage.trials.iter().filter_map(Trial::rates).map(|rates| rates.max).fold(0.0, f64::max) * 1.06;
    let mut out = String::new();
    for way in ways.into_iter().filter(|_| most > 0.0) {
        let trials: Vec<&Trial> = stage.trials.iter().filter(|trial| trial.setting.way == way).collect();
        let Some((across, series)) = series(&trials) else { continue };
        let only = series.first().filter(|line| series.len() == 1 && !line.said.is_empty());
        let only = only.map_or(String::new(), |line| format!(", {}", line.said));
        let (name, way) = (labels::stage(stage.stage), text::escape(way));
        let title = format!("{name}, {way}{only}: rate by {}", across.by());
        out.push_str(&format!("<h4>{}</h4>\n", super::escape::escaped(&title)));
        out.push_str(&names(&series));
        out.push_str(&chart(&title, across, &series, most, stage.best()));
    }
    out
}

/// Each once, in the order of their first appearance.
fn distinct<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = BTreeSet::new();
    all.filter(|way| seen.insert(*way)).collect()
}

/// The lines of trials of one way: by block size where several were tried, else by how many at once; `None` where a table says it as
/// well.
fn series<'a>(trials: &[&'a Trial]) -> Option<(Across, Vec<Series<'a>>)> {
    let blocks: BTreeSet<u64> =
        trials.iter().map(|trial| trial.setting.block_bytes).filter(|bytes| *bytes > 0).collect();
    let numbers: BTreeSet<usize> =
        trials.iter().map(|trial| trial.setting.at_once).filter(|number| *number > 0).collect();
    let line = |said: String, across: Across, of: &dyn Fn(&Trial) -> bool| {
        let mut points: Vec<_> =
            trials.iter().filter(|trial| of(trial)).map(|trial| (across.place(trial), *trial)).collect();
        points.sort_by_key(|point| point.0);
        Series { said, points }
    };
    if blocks.len() >= LEAST_PLACES {
        let lines = numbers.iter().map(|&number| {
            line(format!("{number} at once"), Across::Blocks, &|trial| {
                trial.setting.at_once == number && trial.setting.block_bytes > 0
            })
        });
        return Some((Across::Blocks, lines.collect()));
    }
    if numbers.len() < LEAST_PLACES {
        return None;
    }
    let all: BTreeSet<u64> = trials.iter().map(|trial| trial.setting.block_bytes).collect();
    let lines = all.into_iter().map(|bytes| {
        let said = if bytes > 0 { text::binary(bytes) } else { String::new() };
        line(said, Across::AtOnce, &|trial| trial.setting.block_bytes == bytes && trial.setting.at_once > 0)
    });
    Some((Across::AtOnce, lines.collect()))
}

impl Across {
    fn by(self) -> &'static str {
        match self {
            Across::Blocks => "block size",
            Across::AtOnce => "number at once",
        }
    }

    fn place(self, trial: &Trial) -> u64 {
        match self {
            Across::Blocks => trial.setting.block_bytes,
            Across::AtOnce => trial.setting.at_once as u64,
        }
    }

    fn tick(self, place: u64) -> String {
        match self {
            Across::Blocks => text::binary(place),
            Across::AtOnce => text::count(place),
        }
    }
}

/// Doublings are as far apart as each other.
fn doublings(place: u64) -> f64 {
    text::as_f64(place.max(1)).log2()
}

fn chart(title: &str, across: Across, series: &[Series<'_>], most: f64, best: Option<&Trial>) -> String {
    let places: BTreeSet<u64> = series.iter().flat_map(|line| &line.points).map(|point| point.0).collect();
    let (first, last) =
        (places.first().map_or(0.0, |it| doublings(*it)), places.last().map_or(1.0, |it| doublings(*it)));
    let axes = |wide: bool, _| Axes {
        x: first - 0.15..last + 0.15,
        y: 0.0..most,
        x_ticks: spaced(&places, across, if wide { 10 } else { 3 }),
        y_ticks: ticks(most, 4).into_iter().map(|tick| (tick, rate_of_tick(tick))).collect(),
        around: if wide { [84, 10, 30] } else { [70, 10, 30] },
        height: if wide { 240 } else { 230 },
    };
    canvas::both(title, axes, |canvas| paint_survey(canvas, series, best))
}

/// The places that get a label: those of whole doublings first, others where there is room; about `most` have it.
fn spaced(places: &BTreeSet<u64>, across: Across, most: u32) -> Vec<(f64, String)> {
    let span = places.first().zip(places.last()).map_or(0.0, |(first, last)| doublings(*last) - doublings(*first));
    let room = span / f64::from(most.max(1));
    let (whole, odd): (Vec<u64>, Vec<u64>) = places.iter().partition(|place| place.is_power_of_two());
    let mut ticks: Vec<(f64, String)> = Vec::new();
    for place in whole.into_iter().chain(odd) {
        let at = doublings(place);
        if ticks.iter().all(|tick| (tick.0 - at).abs() >= room) {
            ticks.push((at, across.tick(place)));
        }
    }
    ticks
}

/// The names of several lines, beside the chart and not in it: lines may end anywhere.
fn names(series: &[Series<'_>]) -> String {
    let entry = |(at, line): (usize, &Series<'_>)| (Mark::Block, Ink::step(at, series.len()), line.said.clone());
    if series.len() > 1 { legend(&series.iter().enumerate().map(entry).collect::<Vec<_>>()) } else { String::new() }
}

fn paint_survey(canvas: &mut Canvas, series: &[Series<'_>], best: Option<&Trial>) {
    for (at, line) in series.iter().enumerate() {
        let ink = if series.len() > 1 { Ink::step(at, series.len()) } else { Ink::Read };
        paint_line(canvas, line, ink, series.len() <= FEW);
        let chosen = line.points.iter().find(|(_, trial)| best.is_some_and(|best| std::ptr::eq(best, *trial)));
        if let Some((place, rates)) = chosen.and_then(|(place, trial)| Some((place, trial.rates()?))) {
            canvas.ring(doublings(*place), rates.median, 9, Ink::Limit);
        }
    }
}

/// A line through the medians, with lines from the least to the most where they can be told apart.
fn paint_line(canvas: &mut Canvas, line: &Series<'_>, ink: Ink, ranges: bool) {
    let points: Vec<(f64, Spread)> =
        line.points.iter().filter_map(|(place, trial)| Some((doublings(*place), trial.rates()?))).collect();
    for (x, rates) in points.iter().filter(|_| ranges) {
        canvas.line([(*x, rates.min), (*x, rates.max)], ink, 1);
    }
    let medians: Vec<_> = points.iter().map(|(x, rates)| (*x, rates.median)).collect();
    canvas.path(&medians, ink, 2);
    medians.into_iter().for_each(|(x, median)| canvas.dot(x, median, 3, ink));
}

#[cfg(test)]
mod tests {
    use super::super::super::sample;
    use super::*;

    #[test]
    fn settings_are_compared_by_block_size_or_else_by_number() {
        let stages = sample::report().stages;
        let trials: Vec<&Trial> = stages[0].trials.iter().filter(|it| it.setting.way.contains("io_uring")).collect();
        let (across, lines) = series(&trials).unwrap();
        assert!(across == Across::Blocks && lines.len() == 3 && lines[0].points.len() == 5);
        let touch: Vec<&Trial> = stages[1].trials.iter().collect();
        let (across, lines) = series(&touch).unwrap();
        assert!(across == Across::AtOnce && lines.len() == 1 && lines[0].points.len() == 3);
        assert!(series(&touch[..1]).is_none());
        let drawn = survey(&stages[0]);
        assert_eq!(drawn.matches("<svg ").count(), 4, "two ways, two widths each");
        assert_eq!(survey(&stages[2]), "");
        assert!(series(&touch[..2]).is_none(), "two points are a table");
        let quick: Vec<&Trial> = trials.iter().copied().filter(|it| it.setting.block_bytes >= 8 << 20).collect();
        let (across, lines) = series(&quick).unwrap();
        assert!(across == Across::AtOnce && lines.len() == 2 && lines.iter().all(|line| line.points.len() == 3));
    }

    #[test]
    fn places_that_lie_close_share_a_tick_and_round_ones_have_it() {
        let places = BTreeSet::from([(2 << 20) - 4096, 1 << 20, 2 << 20, 3 << 20, 4 << 20, 16 << 20]);
        let said = |most| spaced(&places, Across::Blocks, most).into_iter().map(|tick| tick.1).collect::<Vec<_>>();
        assert_eq!(said(10), ["1 MiB", "2 MiB", "4 MiB", "16 MiB", "3 MiB"]);
        assert_eq!(said(3), ["1 MiB", "4 MiB", "16 MiB"]);
        assert_eq!(spaced(&BTreeSet::from([5]), Across::AtOnce, 4).len(), 1);
    }
}
