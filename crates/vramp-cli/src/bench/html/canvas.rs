//! Paper and ink of the charts: SVG, each chart once wide and once narrow, colours named and left to the style sheet.
//!
//! It measures no font: text is placed by its anchor. Nothing here knows what a chart is about.

use std::fmt::Write;
use std::ops::Range;

use super::escape::escaped;

/// The widths of the two drawings of a chart, in pixels of their own.
const WIDTHS: [u32; 2] = [1080, 344];

/// A colour by what it stands for; the style sheet has one for light and one for dark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ink {
    Text,
    Muted,
    Grid,
    Surface,
    Bar,
    Limit,
    Read,
    Upload,
    Convert,
    Loop,
    Wait,
    /// One of an ordered series, from the least to the most: 0 to 5.
    Step(u8),
}

/// All inks, with the names of their variables in the style sheet.
const INKS: [(Ink, &str); 17] = [
    (Ink::Text, "ink"),
    (Ink::Muted, "muted"),
    (Ink::Grid, "grid"),
    (Ink::Surface, "surface"),
    (Ink::Bar, "bar"),
    (Ink::Limit, "limit"),
    (Ink::Read, "read"),
    (Ink::Upload, "upload"),
    (Ink::Convert, "convert"),
    (Ink::Loop, "loop"),
    (Ink::Wait, "wait"),
    (Ink::Step(0), "step0"),
    (Ink::Step(1), "step1"),
    (Ink::Step(2), "step2"),
    (Ink::Step(3), "step3"),
    (Ink::Step(4), "step4"),
    (Ink::Step(5), "step5"),
];

/// The number of steps that an ordered series has colours for.
const STEPS: usize = 6;

impl Ink {
    /// The ink of the series `index` of `count` that are in order.
    pub(super) fn step(index: usize, count: usize) -> Ink {
        let at = index * (STEPS - 1) / count.saturating_sub(1).max(1);
        Ink::Step(u8::try_from(at.min(STEPS - 1)).unwrap_or_default())
    }

    /// The name of its variable.
    pub(super) fn name(self) -> &'static str {
        INKS.iter().find(|(ink, _)| *ink == self).map_or("ink", |(_, name)| name)
    }
}

/// A sheet of paper with axes.
pub(super) struct Axes {
    pub(super) x: Range<f64>,
    pub(super) y: Range<f64>,
    /// Where a line and a label stand.
    pub(super) x_ticks: Vec<(f64, String)>,
    pub(super) y_ticks: Vec<(f64, String)>,
    /// Pixels around the plot: left, top, right; below there is room for the labels.
    pub(super) around: [u32; 3],
    /// Pixels of the whole.
    pub(super) height: u32,
}

/// Room for the labels below a plot.
const BELOW: u32 = 24;

/// A drawing in the making.
pub(super) struct Canvas {
    svg: String,
    plot: Plot,
    /// Whether it is the wide one of the two.
    pub(super) wide: bool,
}

/// Where the plot lies on the paper.
struct Plot {
    x: Range<f64>,
    y: Range<f64>,
    /// From left to right, and from bottom to top.
    across: [u32; 2],
    up: [u32; 2],
}

/// Where text stands beside its point.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Left,
    Middle,
    Right,
}

/// Draws a chart twice, wide and narrow, for the style sheet to choose from. `axes` gets whether it is the wide one, and the width.
pub(super) fn both(title: &str, axes: impl Fn(bool, u32) -> Axes, paint: impl Fn(&mut Canvas)) -> String {
    let mut out = String::from("<div class=\"chart\">");
    for (width, wide) in WIDTHS.into_iter().zip([true, false]) {
        let axes = axes(wide, width);
        let mut canvas = Canvas::new(width, wide, title, &axes);
        canvas.grid(&axes);
        paint(&mut canvas);
        out.push_str(&canvas.svg);
        out.push_str("</svg>");
    }
    out.push_str("</div>\n");
    out
}

/// A place between two pixels.
#[allow(clippy::cast_possible_truncation)] // papers have some thousand pixels; a float that is none becomes 0
fn between([from, to]: [u32; 2], range: &Range<f64>, value: f64) -> i32 {
    let share = (value - range.start) / (range.end - range.start);
    (f64::from(from) + (f64::from(to) - f64::from(from)) * share).round() as i32
}

impl Canvas {
    /// An empty sheet. The page decides its size; the title is for those who do not see it.
    fn new(width: u32, wide: bool, title: &str, axes: &Axes) -> Canvas {
        let [left, top, right] = axes.around;
        let (across, up) = ([left, width - right - 1], [axes.height - BELOW - 1, top]);
        let plot = Plot { x: axes.x.clone(), y: axes.y.clone(), across, up };
        let (class, title, height) = (if wide { "wide" } else { "narrow" }, escaped(title), axes.height);
        let svg = format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">\
             <title>{title}</title>"
        );
        Canvas { svg, plot, wide }
    }

    /// Adds an element.
    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = self.svg.write_fmt(element); // a string takes everything
    }

    /// Lines across the plot, and what they mean.
    fn grid(&mut self, axes: &Axes) {
        for (x, label) in &axes.x_ticks {
            self.line([(*x, axes.y.start), (*x, axes.y.end)], Ink::Grid, 1);
            let (at, bottom) = self.pixel(*x, axes.y.start);
            self.label(at, bottom + 13, Side::Middle, label, Ink::Muted);
        }
        for (y, label) in &axes.y_ticks {
            self.line([(axes.x.start, *y), (axes.x.end, *y)], Ink::Grid, 1);
            let (left, at) = self.pixel(axes.x.start, *y);
            self.label(left - 8, at, Side::Left, label, Ink::Muted);
        }
    }

    /// Where a point of the plot lies on the paper.
    pub(super) fn pixel(&self, x: f64, y: f64) -> (i32, i32) {
        let Plot { x: xs, y: ys, across, up } = &self.plot;
        (between(*across, xs, x), between(*up, ys, y))
    }

    /// Points of the plot as an attribute.
    fn points(&self, points: &[(f64, f64)]) -> String {
        let point = |&(x, y): &(f64, f64)| self.pixel(x, y);
        let texts: Vec<String> = points.iter().map(point).map(|(x, y)| format!("{x},{y}")).collect();
        texts.join(" ")
    }

    /// A filled rectangle on the paper, at least a pixel wide.
    pub(super) fn box_at(&mut self, from: (i32, i32), to: (i32, i32), ink: Ink, strength: f64) {
        let ((x, y), width, height, ink) = (from, (to.0 - from.0).max(1), (to.1 - from.1).max(1), ink.name());
        let strength = opacity(strength);
        self.add(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"{strength} fill=\"var(--{ink})\"/>"
        ));
    }

    /// A straight line of the plot.
    pub(super) fn line(&mut self, ends: [(f64, f64); 2], ink: Ink, width: u32) {
        self.path(&ends, ink, width);
    }

    /// A line through points of the plot.
    pub(super) fn path(&mut self, points: &[(f64, f64)], ink: Ink, width: u32) {
        self.polyline(points, ink, width, "");
    }

    /// A straight line of dashes.
    pub(super) fn dashes(&mut self, ends: [(f64, f64); 2], ink: Ink, width: u32) {
        self.polyline(&ends, ink, width, " stroke-dasharray=\"6 4\"");
    }

    fn polyline(&mut self, points: &[(f64, f64)], ink: Ink, width: u32, more: &str) {
        let (points, ink) = (self.points(points), ink.name());
        self.add(format_args!(
            "<polyline fill=\"none\" stroke=\"var(--{ink})\" stroke-width=\"{width}\"{more} points=\"{points}\"/>"
        ));
    }

    /// A filled shape of the plot.
    pub(super) fn area(&mut self, points: &[(f64, f64)], ink: Ink, strength: f64) {
        let (points, ink, strength) = (self.points(points), ink.name(), opacity(strength));
        self.add(format_args!("<polygon{strength} fill=\"var(--{ink})\" points=\"{points}\"/>"));
    }

    /// A dot of the plot, with a rim that keeps it apart from others.
    pub(super) fn dot(&mut self, x: f64, y: f64, radius: u32, ink: Ink) {
        let (x, y) = self.pixel(x, y);
        for (radius, ink) in [(radius + 1, Ink::Surface), (radius, ink)] {
            let ink = ink.name();
            self.add(format_args!("<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"var(--{ink})\"/>"));
        }
    }

    /// A ring around a point of the plot.
    pub(super) fn ring(&mut self, x: f64, y: f64, radius: u32, ink: Ink) {
        let ((x, y), ink) = (self.pixel(x, y), ink.name());
        self.add(format_args!(
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"none\" stroke=\"var(--{ink})\" stroke-width=\"2\"/>"
        ));
    }

    /// Text on the paper, its middle at the height `y`; `Side::Left` ends at `x`, `Side::Right` begins there.
    pub(super) fn label(&mut self, x: i32, y: i32, side: Side, text: &str, ink: Ink) {
        self.text(x, y, side, text, ink, "");
    }

    /// The same in bold, beginning at `x`.
    pub(super) fn heading(&mut self, x: i32, y: i32, text: &str, ink: Ink) {
        self.text(x, y, Side::Right, text, ink, " font-weight=\"bold\"");
    }

    fn text(&mut self, x: i32, y: i32, side: Side, text: &str, ink: Ink, more: &str) {
        let anchor = match side {
            Side::Left => "end",
            Side::Middle => "middle",
            Side::Right => "start",
        };
        let (text, ink) = (escaped(text), ink.name());
        self.add(format_args!(
            "<text x=\"{x}\" y=\"{y}\" dy=\"0.5ex\" text-anchor=\"{anchor}\" font-size=\"13\"{more} fill=\"var(--{ink})\">\
             {text}</text>"
        ));
    }
}

/// How much a filled shape covers what is behind it, as an attribute.
fn opacity(strength: f64) -> String {
    if strength < 1.0 { format!(" opacity=\"{strength}\"") } else { String::new() }
}

/// Round numbers from 0 to at most `max`, about `count` of them: steps of 1, 2 or 5 times a power of ten.
pub(super) fn ticks(max: f64, count: u32) -> Vec<f64> {
    if !(max.is_finite() && max > 0.0) {
        return vec![0.0];
    }
    let rough = max / f64::from(count.max(1));
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(rough);
    (0..=count * 2).map(|at| f64::from(at) * step).take_while(|tick| *tick <= max * 1.0001).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_end_before_the_end() {
        assert_eq!(ticks(1.0, 5).len(), 6);
        assert_eq!(ticks(0.27, 6), [0.0, 0.05, 0.1, 0.15000000000000002, 0.2, 0.25]);
        assert_eq!((ticks(0.0, 5), ticks(f64::NAN, 5)), (vec![0.0], vec![0.0]));
        for max in [1e-9, 0.3, 7.0, 1e12] {
            assert!((2..=13).contains(&ticks(max, 6).len()), "{max}: {:?}", ticks(max, 6));
        }
    }

    #[test]
    fn series_in_order_take_the_steps_from_the_first_to_the_last() {
        assert_eq!((Ink::step(0, 1), Ink::step(0, 3), Ink::step(2, 3)), (Ink::Step(0), Ink::Step(0), Ink::Step(5)));
        assert_eq!(Ink::step(99, 100), Ink::Step(5));
        assert_eq!(Ink::Step(3).name(), "step3");
    }

    #[test]
    fn a_chart_is_drawn_for_both_widths_with_colours_of_the_style_sheet() {
        let axes = |wide: bool, _| Axes {
            x: 0.0..1.0,
            y: 0.0..1.0,
            x_ticks: vec![(0.5, "<half>".to_owned())],
            y_ticks: Vec::new(),
            around: [10, 10, 10],
            height: if wide { 100 } else { 200 },
        };
        let svg = both("a \"title\" <b>", axes, |canvas| {
            assert_eq!((canvas.pixel(0.0, 0.0).0, canvas.pixel(1.0, 1.0).1), (10, 10));
            canvas.dot(0.5, 0.5, 4, Ink::Read);
            canvas.dashes([(0.0, 0.0), (1.0, 1.0)], Ink::Limit, 2);
            canvas.area(&[(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)], Ink::Step(5), 0.5);
        });
        assert_eq!((svg.matches("<svg ").count(), svg.matches("</svg>").count()), (2, 2), "{svg}");
        assert!(svg.contains("viewBox=\"0 0 1080 100\"") && svg.contains("viewBox=\"0 0 344 200\""), "{svg}");
        assert!(svg.contains("var(--read)") && svg.contains("var(--step5)"), "{svg}");
        assert!(svg.contains("&lt;half&gt;") && svg.contains("a &quot;title&quot; &lt;b&gt;"), "{svg}");
    }
}
