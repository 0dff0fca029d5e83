//! The document, read back: its charts have marks, nothing in it comes from outside, nothing from a file became markup.

use vramp_bench::TimelineEvent;

use super::super::sample;
use super::*;

/// The text between each `<svg …>` and its end.
fn charts(document: &str) -> Vec<&str> {
    document.split("<svg ").skip(1).filter_map(|rest| rest.split_once("</svg>")).map(|(svg, _)| svg).collect()
}

fn marks(svg: &str) -> usize {
    ["<rect ", "<path ", "<polyline ", "<polygon ", "<circle ", "<line "]
        .iter()
        .map(|mark| svg.matches(mark).count())
        .sum()
}

/// Whether every element that is opened is closed, in order.
fn is_nested(document: &str) -> bool {
    const VOID: [&str; 2] = ["meta", "!DOCTYPE"];
    let mut open: Vec<&str> = Vec::new();
    let without_style = document.split_once("<style>").zip(document.split_once("</style>"));
    let (head, body) = without_style.map(|((head, _), (_, body))| (head, body)).unwrap();
    for tag in [head, body].into_iter().flat_map(|part| part.split('<').skip(1)) {
        let (inside, _) = tag.split_once('>').unwrap();
        let name = inside.trim_start_matches('/').split([' ', '/']).next().unwrap();
        match () {
            () if inside.starts_with('/') && open.pop() != Some(name) => return false,
            () if inside.starts_with('/') || inside.ends_with('/') || VOID.contains(&name) => {}
            () => open.push(name),
        }
    }
    open.is_empty()
}

#[test]
fn every_chart_has_marks_a_title_and_both_widths() {
    let document = document(&sample::report(), Some(&sample::tuning()));
    let charts = charts(&document);
    // One of all loads; bars, timeline and rates of two states; two ways of storage and one of first touch.
    assert_eq!(charts.len(), 2 * (1 + 2 * 3 + 3));
    for svg in &charts {
        assert!(marks(svg) >= 3 && svg.contains("<title>") && svg.contains("role=\"img\""), "{svg}");
        assert!(svg.matches("<text ").count() > 1, "numbers have their units: {svg}");
    }
    assert_eq!(document.matches("class=\"wide\"").count(), document.matches("class=\"narrow\"").count());
    assert!(is_nested(&document));
}

#[test]
fn it_fetches_and_runs_nothing_and_names_become_no_markup() {
    let document = document(&sample::report(), Some(&sample::tuning()));
    for word in ["<script", "http://", "https://", "url(", "@import", "src=", "href=", "onload", "\x1b"] {
        assert!(!document.contains(word), "{word}");
    }
    assert!(document.contains("&lt;script&gt;alert(1)&lt;/script&gt;&amp;\\u{1b}[31m"));
    assert!(document.contains("refused: &lt;EPERM&gt;") && document.contains("with &quot;others&quot;"));
}

#[test]
fn every_colour_that_is_used_is_defined_for_light_and_dark() {
    let document = document(&sample::report(), Some(&sample::tuning()));
    for used in document.split("var(--").skip(1).filter_map(|rest| rest.split_once(')')).map(|(name, _)| name) {
        let defined = STYLE.matches(&format!("--{used}:")).count();
        assert!(defined == 2 || used == "c" && defined == 0, "{used} is defined {defined} times");
    }
}

#[test]
fn a_hundred_thousand_events_make_no_large_file() {
    let mut report = sample::report();
    for state in &mut report.states {
        let event = |at: u32| TimelineEvent {
            lane: format!("reader {}, direct", at % 32),
            name: if at.is_multiple_of(3) { "read" } else { "upload" }.to_owned(),
            start: f64::from(at / 32) * 1e-4,
            seconds: 0.7e-4,
            bytes: 1 << 20,
        };
        state.timeline = (0..100_000).map(event).collect();
    }
    let bytes = document(&report, None).len();
    assert!(bytes < 1 << 20, "{bytes}");
}

#[test]
fn a_report_of_nothing_is_a_document_all_the_same() {
    let mut report = sample::report();
    for state in &mut report.states {
        state.timeline.iter_mut().for_each(|event| (event.start, event.seconds, event.bytes) = (0.0, 0.0, 0));
        (state.prediction.seconds, state.prediction.bytes_per_second) = (0.0, 0.0);
        state.prediction.before_seconds = 0.0;
        state.loads.clear();
        state.ceilings.clear();
        state.proof.proven = false;
        state.proof.before.clear();
    }
    let document_of_none = document(&report, None);
    assert!(is_nested(&document_of_none) && document_of_none.contains("NOT proved"));
    report.states.iter_mut().for_each(|state| state.timeline.clear());
    assert!(is_nested(&document(&report, None)));
    (report.states, report.stages, report.warnings) = (Vec::new(), Vec::new(), Vec::new());
    assert!(is_nested(&document(&report, None)));
}
