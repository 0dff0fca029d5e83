//! Paper and ink of the charts: SVG by `plotters`, each chart once wide and once narrow, colours named and left to the style sheet.
//!
//! It measures no font: text is placed by its anchor. Nothing here knows what a chart is about.

use std::io;
use std::ops::Range;

use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea};
use plotters::element::{Circle, DashedPathElement, PathElement, Polygon, Rectangle, Text};
use plotters::prelude::{Cartesian2d, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, IntoFont, RGBColor, TextStyle};

use super::markup::escaped;

/// The widths of the two drawings of a chart, in pixels of their own.
const WIDTHS: [u32; 2] = [1080, 344];

/// `plotters` divides sizes by 1.24 to get pixels.
const FONT_SIZE: f64 = 13.0 * 1.24;

/// Why something could not be drawn. A string takes everything, so nothing comes of it in practice.
pub(super) type Trouble = DrawingAreaErrorKind<io::Error>;

type Root<'svg> = DrawingArea<SVGBackend<'svg>, Shift>;
type Chart<'root, 'svg> = ChartContext<'root, SVGBackend<'svg>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

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

    /// The colour that stands for it until the drawing is done.
    fn color(self) -> RGBColor {
        let at = INKS.iter().position(|(ink, _)| *ink == self).unwrap_or_default();
        RGBColor(0xFE, 0xED, u8::try_from(at).unwrap_or_default())
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
pub(super) struct Canvas<'root, 'svg> {
    root: Root<'svg>,
    chart: Chart<'root, 'svg>,
    /// Whether it is the wide one of the two.
    pub(super) wide: bool,
}

/// Where text stands beside its point.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Left,
    Middle,
    Right,
}

/// Draws a chart twice, wide and narrow, for the style sheet to choose from. `axes` is asked for each: whether it is wide, and the
/// width.
pub(super) fn both(
    title: &str,
    axes: impl Fn(bool, u32) -> Axes,
    paint: impl Fn(&Canvas<'_, '_>) -> Result<(), Trouble>,
) -> io::Result<String> {
    let mut out = String::from("<div class=\"chart\">");
    for (width, wide) in WIDTHS.into_iter().zip([true, false]) {
        let axes = axes(wide, width);
        let svg = drawn(width, wide, &axes, &paint).map_err(|trouble| io::Error::other(trouble.to_string()))?;
        out.push_str(&named(&svg, title, wide));
    }
    out.push_str("</div>\n");
    Ok(out)
}

fn drawn(
    width: u32,
    wide: bool,
    axes: &Axes,
    paint: &impl Fn(&Canvas<'_, '_>) -> Result<(), Trouble>,
) -> Result<String, Trouble> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (width, axes.height)).into_drawing_area();
        let [left, top, right] = axes.around;
        let mut builder = ChartBuilder::on(&root);
        builder.margin_left(left).margin_top(top).margin_right(right).margin_bottom(BELOW);
        let chart = builder.build_cartesian_2d(axes.x.clone(), axes.y.clone())?;
        let canvas = Canvas { root: root.clone(), chart, wide };
        canvas.grid(axes)?;
        paint(&canvas)?;
        root.present()?;
    }
    Ok(svg)
}

/// The colours by their names, the size left to the page, and a title for those who do not see it.
fn named(svg: &str, title: &str, wide: bool) -> String {
    let mut svg = svg.replace(" font-family=\"sans-serif\"", "").replace(" opacity=\"1\"", "");
    svg = svg.replace(" stroke=\"none\"", "").replace(" stroke-width=\"1\"", "").replace(">\n", ">");
    for (ink, name) in INKS {
        let RGBColor(r, g, b) = ink.color();
        svg = svg.replace(&format!("\"#{r:02X}{g:02X}{b:02X}\""), &format!("\"var(--{name})\""));
    }
    let body = svg.split_once('>').map_or("", |(_, body)| body);
    let size = svg.split_once("viewBox=\"").and_then(|(_, rest)| rest.split_once('"')).map_or("", |(size, _)| size);
    let class = if wide { "wide" } else { "narrow" };
    let title = escaped(title);
    format!(
        "<svg class=\"{class}\" viewBox=\"{size}\" role=\"img\" aria-label=\"{title}\"><title>{title}</title>{body}"
    )
}

impl Canvas<'_, '_> {
    /// Lines across the plot, and what they mean.
    fn grid(&self, axes: &Axes) -> Result<(), Trouble> {
        for (x, label) in &axes.x_ticks {
            self.line([(*x, axes.y.start), (*x, axes.y.end)], Ink::Grid, 1)?;
            let (at, bottom) = self.pixel(*x, axes.y.start);
            self.label(at, bottom + 13, Side::Middle, label, Ink::Muted)?;
        }
        for (y, label) in &axes.y_ticks {
            self.line([(axes.x.start, *y), (axes.x.end, *y)], Ink::Grid, 1)?;
            let (left, at) = self.pixel(axes.x.start, *y);
            self.label(left - 8, at, Side::Left, label, Ink::Muted)?;
        }
        Ok(())
    }

    /// Where a point of the plot lies on the paper.
    pub(super) fn pixel(&self, x: f64, y: f64) -> (i32, i32) {
        self.chart.backend_coord(&(x, y))
    }

    /// A filled rectangle on the paper, at least a pixel wide.
    pub(super) fn box_at(&self, from: (i32, i32), to: (i32, i32), ink: Ink, strength: f64) -> Result<(), Trouble> {
        let to = (to.0.max(from.0 + 1), to.1.max(from.1 + 1));
        self.root.draw(&Rectangle::new([from, to], ink.color().mix(strength).filled()))
    }

    /// A straight line of the plot.
    pub(super) fn line(&self, ends: [(f64, f64); 2], ink: Ink, width: u32) -> Result<(), Trouble> {
        self.path(ends.to_vec(), ink, width)
    }

    /// A line through points of the plot.
    pub(super) fn path(&self, points: Vec<(f64, f64)>, ink: Ink, width: u32) -> Result<(), Trouble> {
        let points: Vec<_> = points.into_iter().map(|(x, y)| self.pixel(x, y)).collect();
        self.root.draw(&PathElement::new(points, ink.color().stroke_width(width)))
    }

    /// A straight line of dashes.
    pub(super) fn dashes(&self, ends: [(f64, f64); 2], ink: Ink, width: u32) -> Result<(), Trouble> {
        let ends = ends.map(|(x, y)| self.pixel(x, y));
        self.root.draw(&DashedPathElement::new(ends, 6, 4, ink.color().stroke_width(width)))
    }

    /// A filled shape of the plot.
    pub(super) fn area(&self, points: Vec<(f64, f64)>, ink: Ink, strength: f64) -> Result<(), Trouble> {
        let points: Vec<_> = points.into_iter().map(|(x, y)| self.pixel(x, y)).collect();
        self.root.draw(&Polygon::new(points, ink.color().mix(strength).filled()))
    }

    /// A dot of the plot, with a rim that keeps it apart from others.
    pub(super) fn dot(&self, x: f64, y: f64, radius: i32, ink: Ink) -> Result<(), Trouble> {
        let at = self.pixel(x, y);
        self.root.draw(&Circle::new(at, radius + 1, Ink::Surface.color().filled()))?;
        self.root.draw(&Circle::new(at, radius, ink.color().filled()))
    }

    /// A ring around a point of the plot.
    pub(super) fn ring(&self, x: f64, y: f64, radius: i32, ink: Ink) -> Result<(), Trouble> {
        self.root.draw(&Circle::new(self.pixel(x, y), radius, ink.color().stroke_width(2)))
    }

    /// Text on the paper, its middle at the height `y`; `Side::Left` ends at `x`, `Side::Right` begins there.
    pub(super) fn label(&self, x: i32, y: i32, side: Side, text: &str, ink: Ink) -> Result<(), Trouble> {
        self.root.draw(&Text::new(text.to_owned(), (x, y), style(side, ink, FontStyle::Normal)))
    }

    /// The same in bold, beginning at `x`.
    pub(super) fn heading(&self, x: i32, y: i32, text: &str, ink: Ink) -> Result<(), Trouble> {
        self.root.draw(&Text::new(text.to_owned(), (x, y), style(Side::Right, ink, FontStyle::Bold)))
    }
}

fn style(side: Side, ink: Ink, weight: FontStyle) -> TextStyle<'static> {
    let anchor = match side {
        Side::Left => HPos::Right,
        Side::Middle => HPos::Center,
        Side::Right => HPos::Left,
    };
    let font = ("sans-serif", FONT_SIZE, weight).into_font();
    TextStyle { font, color: ink.color().to_backend_color(), pos: Pos::new(anchor, VPos::Center) }
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
    fn a_chart_is_drawn_for_both_widths_with_no_colour_of_its_own() {
        let axes = |wide: bool, _| Axes {
            x: 0.0..1.0,
            y: 0.0..1.0,
            x_ticks: vec![(0.5, "<half>".to_owned())],
            y_ticks: Vec::new(),
            around: [10, 10, 10],
            height: if wide { 100 } else { 200 },
        };
        let svg = both("a \"title\" <b>", axes, |canvas| {
            canvas.dot(0.5, 0.5, 4, Ink::Read)?;
            canvas.dashes([(0.0, 0.0), (1.0, 1.0)], Ink::Limit, 2)?;
            canvas.area(vec![(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)], Ink::Step(5), 0.5)
        })
        .unwrap();
        assert_eq!((svg.matches("<svg ").count(), svg.matches("</svg>").count()), (2, 2), "{svg}");
        assert!(svg.contains("viewBox=\"0 0 1080 100\"") && svg.contains("viewBox=\"0 0 344 200\""), "{svg}");
        assert!(svg.contains("var(--read)") && svg.contains("var(--step5)") && !svg.contains("FEED"), "{svg}");
        assert!(svg.contains("&lt;half&gt;") && svg.contains("a &quot;title&quot; &lt;b&gt;"), "{svg}");
    }
}
