//! The charts of one state: how long each stage needs alone against what the loads took, what happened when, how fast it went.

use vramp_bench::{State, TimelineEvent};

use super::super::super::text;
use super::super::labels;
use super::canvas::{self, Axes, Canvas, Ink, Side, ticks};
use super::downsample::{self, Piece};
use super::markup::{Mark, legend};

/// Pixels of a row of bars: a line of text and a bar below it.
const ROW: u32 = 46;
const BAR: i32 = 18;

/// Pixels of a lane of the timeline.
const LANE: u32 = 20;

/// Pieces of a timeline, wide and narrow.
const MOST_PIECES: [usize; 2] = [1600, 700];

/// Parts of the time for which a rate is shown, wide and narrow.
const PARTS: [usize; 2] = [150, 50];

/// A row of the bars: what is written, from when to when, whether it is the limit.
struct Row {
    said: String,
    from: f64,
    to: f64,
    limit: bool,
}

/// Each stage as a bar in seconds, the loads as a line.
pub(super) fn bars(state: &State) -> String {
    let rows = rows(state);
    let loads = state.seconds();
    let most =
        rows.iter().map(|row| row.to).chain(loads.map(|it| it.max)).fold(state.prediction.seconds.max(1e-9), f64::max)
            * 1.03;
    let axes = |wide: bool, _| Axes {
        x: 0.0..most,
        y: 0.0..text::as_f64(rows.len() as u64),
        x_ticks: times(most, if wide { 9 } else { 4 }),
        y_ticks: Vec::new(),
        around: [8, 2, if wide { 24 } else { 26 }],
        height: ROW * u32::try_from(rows.len()).unwrap_or(1) + 32,
    };
    let title = format!(
        "Seconds that each stage of a {} load needs alone, and what the loads took",
        labels::state(state.state)
    );
    let chart = canvas::both(&title, axes, |canvas| paint_bars(canvas, state, &rows));
    bars_legend(state) + &chart
}

fn rows(state: &State) -> Vec<Row> {
    let before = state.prediction.before_seconds;
    let opening = format!("opening and planning: {}", text::seconds(before));
    let mut rows = vec![Row { said: opening, from: 0.0, to: before, limit: false }];
    rows.extend(state.ceilings.iter().map(|ceiling| {
        let limit = ceiling.stage == state.prediction.bound_by;
        let (stage, seconds) = (labels::limit(ceiling.stage, ceiling.bytes_per_second), text::seconds(ceiling.seconds));
        let said = format!("{stage}: {seconds}");
        Row { said, from: before, to: before + ceiling.seconds, limit }
    }));
    rows
}

fn paint_bars(canvas: &mut Canvas, state: &State, rows: &[Row]) {
    for (at, row) in rows.iter().enumerate() {
        let top = canvas.pixel(0.0, text::as_f64((rows.len() - at) as u64)).1;
        let (from, to) = (canvas.pixel(row.from, 0.0).0, canvas.pixel(row.to, 0.0).0);
        let ink = if row.limit { Ink::Limit } else { Ink::Bar };
        canvas.box_at((from, top + 23), (to, top + 23 + BAR), ink, 1.0);
        let write = if row.limit { Canvas::heading } else { beside };
        let left = canvas.pixel(0.0, 0.0).0;
        write(canvas, left, top + 11, &row.said, Ink::Text);
        paint_ends(canvas, state, top + 20, top + 26 + BAR);
    }
}

/// T and the loads across one bar: the text between the bars stays free of them.
fn paint_ends(canvas: &mut Canvas, state: &State, top: i32, bottom: i32) {
    let at = |canvas: &Canvas, seconds: f64| canvas.pixel(seconds, 0.0).0;
    let predicted = at(canvas, state.prediction.seconds);
    for dash in (top..bottom).step_by(7) {
        canvas.box_at((predicted - 1, dash), (predicted + 1, (dash + 4).min(bottom)), Ink::Limit, 1.0);
    }
    let Some(spread) = state.seconds() else { return };
    let [min, median, max] = [spread.min, spread.median, spread.max].map(|seconds| at(canvas, seconds));
    canvas.box_at((min, top), (max, bottom), Ink::Text, 0.14);
    canvas.box_at((median - 1, top), (median + 1, bottom), Ink::Text, 1.0);
}

fn beside(canvas: &mut Canvas, x: i32, y: i32, said: &str, ink: Ink) {
    canvas.label(x, y, Side::Right, said, ink);
}

fn bars_legend(state: &State) -> String {
    let predicted = format!("T = {}", text::seconds(state.prediction.seconds));
    let took = state.seconds().map(|it| format!("loads: median {}", text::seconds(it.median)));
    let between = state.seconds().map(|it| format!("{} to {}", text::seconds(it.min), text::seconds(it.max)));
    let mut entries = vec![
        (Mark::Block, Ink::Limit, "the limiting stage".to_owned()),
        (Mark::Block, Ink::Bar, "other stages, which work beside it".to_owned()),
        (Mark::Dashes, Ink::Limit, predicted),
    ];
    entries.extend(took.map(|took| (Mark::Line, Ink::Text, took)));
    entries.extend(between.map(|between| (Mark::Block, Ink::Grid, between)));
    legend(&entries)
}

/// Ticks of a time axis from 0.
pub(super) fn times(most: f64, count: u32) -> Vec<(f64, String)> {
    ticks(most, count).into_iter().map(|tick| (tick, text_of_tick(tick, most))).collect()
}

/// A time in the unit of the whole axis.
fn text_of_tick(tick: f64, most: f64) -> String {
    let (factor, unit) = match most {
        most if most < 1e-3 => (1e6, "µs"),
        most if most < 1.0 => (1e3, "ms"),
        _ => (1.0, "s"),
    };
    // Ten digits after the point are more than a step of an axis has.
    let number = (tick * factor * 1e6).round() / 1e6;
    if tick == 0.0 { "0".to_owned() } else { format!("{number} {unit}") }
}

// ---- what happened when

/// Who did what when in the median load.
pub(super) fn timeline(state: &State) -> String {
    let (lanes, more) = downsample::lanes(&state.timeline);
    let end = end_of(&state.timeline);
    let count = u32::try_from(lanes.len()).unwrap_or(1);
    let axes = |wide: bool, _| Axes {
        x: 0.0..end,
        y: 0.0..f64::from(count),
        x_ticks: times(end, if wide { 9 } else { 4 }),
        y_ticks: Vec::new(),
        around: if wide { [150, 2, 24] } else { [76, 2, 26] },
        height: LANE * count + 28,
    };
    let title = format!(
        "What happened when in the median {} load, a lane for each reader and upload",
        labels::state(state.state)
    );
    let chart = canvas::both(&title, axes, |canvas| paint_timeline(canvas, &lanes, end));
    let rest = if more > 0 { format!("{more} more lanes are not shown.") } else { String::new() };
    timeline_legend(&state.timeline, &rest) + &chart
}

fn paint_timeline(canvas: &mut Canvas, lanes: &[(&str, Vec<&TimelineEvent>)], end: f64) {
    let plot = canvas.pixel(end, 0.0).0 - canvas.pixel(0.0, 0.0).0;
    let most = if canvas.wide { MOST_PIECES[0] } else { MOST_PIECES[1] };
    let pieces = downsample::pieces(lanes, 2.0 * end / f64::from(plot.max(1)), most);
    let count = text::as_f64(lanes.len() as u64);
    for (at, ((name, _), pieces)) in lanes.iter().zip(&pieces).enumerate() {
        let (left, bottom) = canvas.pixel(0.0, count - 1.0 - text::as_f64(at as u64));
        let middle = bottom - i32::try_from(LANE).unwrap_or(0) / 2;
        canvas.label(left - 8, middle, Side::Left, &shortened(name, canvas.wide), Ink::Muted);
        pieces.iter().for_each(|piece| paint_piece(canvas, piece, bottom));
    }
}

/// As high as it was busy; an event of its own has a gap to its neighbour where it is wide enough for one.
fn paint_piece(canvas: &mut Canvas, piece: &Piece<'_>, bottom: i32) {
    let (from, to) = (canvas.pixel(piece.start, 0.0).0, canvas.pixel(piece.end, 0.0).0);
    let to = if to - from > 3 && !piece.is_joined() { to - 1 } else { to };
    #[allow(clippy::cast_possible_truncation)] // at most the height of a lane
    let height = ((f64::from(LANE) - 4.0) * piece.share()).round().max(2.0) as i32;
    canvas.box_at((from, bottom - 2 - height), (to, bottom - 2), ink_of(piece.name), 1.0);
}

/// The name of a lane as far as there is room: narrow, without its route.
fn shortened(name: &str, wide: bool) -> String {
    let name = text::escape(name);
    let (name, most) = if wide { (name.as_str(), 22) } else { (name.split(',').next().unwrap_or_default(), 10) };
    if name.chars().count() <= most { name.to_owned() } else { name.chars().take(most - 1).chain(['…']).collect() }
}

/// What an event is drawn with, by its name.
fn ink_of(name: &str) -> Ink {
    match name {
        "read" => Ink::Read,
        "upload" | "copy" => Ink::Upload,
        "convert" => Ink::Convert,
        name if name.starts_with("wait") => Ink::Wait,
        _ => Ink::Loop,
    }
}

fn timeline_legend(events: &[TimelineEvent], rest: &str) -> String {
    let meanings = [
        (Ink::Read, "reading"),
        (Ink::Upload, if events.iter().any(|event| event.name == "copy") { "copying" } else { "uploading" }),
        (Ink::Convert, "converting"),
        (Ink::Loop, "the loader's own work"),
        (Ink::Wait, "the loader waits"),
    ];
    let there = meanings.into_iter().filter(|(ink, _)| events.iter().any(|event| ink_of(&event.name) == *ink));
    let mut entries: Vec<_> = there.map(|(ink, meaning)| (Mark::Block, ink, meaning.to_owned())).collect();
    if !rest.is_empty() {
        entries.push((Mark::Block, Ink::Grid, rest.to_owned()));
    }
    legend(&entries)
}

fn end_of(events: &[TimelineEvent]) -> f64 {
    events.iter().map(|event| event.start + event.seconds).fold(1e-9, f64::max)
}

// ---- how fast it went

/// The names of events that move bytes, what several of them are called, and their ink.
const MOVES: [(&str, &str, Ink); 3] =
    [("read", "reads", Ink::Read), ("upload", "uploads", Ink::Upload), ("copy", "copies", Ink::Upload)];

/// Bytes per second while the median load ran, against the limits.
pub(super) fn throughput(state: &State) -> String {
    let end = end_of(&state.timeline);
    let bound = state.prediction.bytes_per_second;
    let highest = PARTS.into_iter().flat_map(|parts| rates(state, end, parts)).flat_map(|(_, rates)| rates);
    let most = highest.fold(bound.max(1.0), f64::max) * 1.08;
    let axes = |wide: bool, _| Axes {
        x: 0.0..end,
        y: 0.0..most,
        x_ticks: times(end, if wide { 9 } else { 4 }),
        y_ticks: ticks(most, 4).into_iter().map(|tick| (tick, rate_of_tick(tick))).collect(),
        around: if wide { [84, 8, 24] } else { [72, 8, 26] },
        height: if wide { 260 } else { 220 },
    };
    let title = format!("Bytes per second while the median {} load ran", labels::state(state.state));
    let chart = canvas::both(&title, axes, |canvas| paint_rates(canvas, state, end, bound));
    let mut entries: Vec<_> = moves(state).map(|(_, names, ink)| (Mark::Block, ink, names.to_owned())).collect();
    entries.push((Mark::Dashes, Ink::Limit, format!("the limit: {}", labels::limit(state.prediction.bound_by, bound))));
    legend(&entries) + &chart
}

fn moves(state: &State) -> impl Iterator<Item = (&'static str, &'static str, Ink)> {
    MOVES.into_iter().filter(|(name, ..)| state.timeline.iter().any(|event| event.name == *name && event.bytes > 0))
}

fn rates(state: &State, end: f64, parts: usize) -> Vec<(Ink, Vec<f64>)> {
    let of = |name: &'static str| {
        downsample::rates(state.timeline.iter().filter(move |event| event.name == name), end, parts)
    };
    moves(state).map(|(name, _, ink)| (ink, of(name))).collect()
}

fn paint_rates(canvas: &mut Canvas, state: &State, end: f64, bound: f64) {
    let parts = if canvas.wide { PARTS[0] } else { PARTS[1] };
    for (ink, rates) in rates(state, end, parts) {
        let width = end / text::as_f64(parts as u64);
        let steps = rates.iter().enumerate().flat_map(|(at, &rate)| {
            let from = text::as_f64(at as u64) * width;
            [(from, rate), (from + width, rate)]
        });
        let steps: Vec<_> = steps.collect();
        let ends = [(end, 0.0), (0.0, 0.0)];
        let area: Vec<_> = steps.iter().copied().chain(ends).collect();
        canvas.area(&area, ink, 0.22);
        canvas.path(&steps, ink, 2);
    }
    canvas.dashes([(0.0, bound), (end, bound)], Ink::Limit, 2);
}

/// A rate as a tick of an axis.
pub(super) fn rate_of_tick(tick: f64) -> String {
    let (factor, unit) = match tick {
        0.0 => return "0".to_owned(),
        tick if tick >= 0.999e9 => (1e9, "GB/s"),
        tick if tick >= 0.999e6 => (1e6, "MB/s"),
        _ => (1e3, "kB/s"),
    };
    format!("{} {unit}", (tick / factor * 1e6).round() / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_an_axis_share_a_unit() {
        let said = |most| times(most, 3).into_iter().map(|tick| tick.1).collect::<Vec<_>>();
        assert_eq!(said(0.27), ["0", "100 ms", "200 ms"]);
        assert_eq!(said(1.3), ["0", "0.5 s", "1 s"]);
        assert_eq!(said(0.000_6), ["0", "200 µs", "400 µs", "600 µs"]);
        assert_eq!((rate_of_tick(5e8).as_str(), rate_of_tick(1.5e9).as_str()), ("500 MB/s", "1.5 GB/s"));
    }

    #[test]
    fn long_names_of_lanes_are_cut() {
        assert_eq!(shortened("reader 0, direct", true), "reader 0, direct");
        assert_eq!(shortened("reader 0, direct", false), "reader 0");
        assert_eq!(shortened("another lane", false), "another l…");
    }
}
