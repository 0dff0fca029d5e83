//! Numbers, tables and names as a person reads them: units always printed, columns aligned, control characters escaped.
//!
//! Pure functions to strings; colours are ANSI codes that `output` strips where they are not wanted.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use anstyle::{AnsiColor, Style};

use super::screen::{Screen, elided};

pub(crate) const BOLD: Style = Style::new().bold();
pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const WARN: Style = AnsiColor::Yellow.on_default().bold();
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
pub(crate) const BAR: Style = AnsiColor::Cyan.on_default();

/// `text` in a style.
pub(crate) fn styled(style: Style, text: impl Display) -> String {
    format!("{style}{text}{style:#}")
}

/// `1.07 GB`: powers of 1000.
pub(crate) fn decimal(bytes: u64) -> String {
    scaled(bytes, 1000, ["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

/// `4 MiB`, `1.04 GiB`: powers of 1024, without a fraction where there is none.
pub(crate) fn binary(bytes: u64) -> String {
    let whole = [(30, "GiB"), (20, "MiB"), (10, "KiB")].into_iter().find(|(shift, _)| bytes.is_multiple_of(1 << shift));
    match whole {
        Some((shift, unit)) if (1..1024).contains(&(bytes >> shift)) => format!("{} {unit}", bytes >> shift),
        _ => fractional(bytes),
    }
}

fn fractional(bytes: u64) -> String {
    scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// `4.34 GB (4.04 GiB)`.
pub(crate) fn both(bytes: u64) -> String {
    if bytes < 1000 { decimal(bytes) } else { format!("{} ({})", decimal(bytes), binary(bytes)) }
}

fn scaled(bytes: u64, step: u64, units: [&str; 7]) -> String {
    if bytes < step {
        return format!("{bytes} {}", units[0]);
    }
    let (mut value, mut unit) = (as_f64(bytes), 0);
    // 999.5 would be printed as 1000.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= as_f64(step);
        unit += 1;
    }
    format!("{} {}", three_digits(value), units[unit])
}

/// `1.88 GB/s`, of bytes a second.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    match bytes_per_second {
        rate if rate >= 0.9995e9 => format!("{} GB/s", three_digits(rate / 1e9)),
        rate if rate >= 0.9995e6 => format!("{} MB/s", three_digits(rate / 1e6)),
        rate => format!("{} kB/s", three_digits(rate / 1e3)),
    }
}

/// `11.7 s`, `3.20 ms`; from two minutes on also in minutes, from an hour on in hours.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s <= 0.0 => "0 s".to_owned(),
        s if s < 0.999_5e-3 => format!("{} µs", three_digits(s * 1e6)),
        s if s < 0.999_5 => format!("{} ms", three_digits(s * 1e3)),
        s if s < 120.0 => format!("{} s", three_digits(s)),
        s if s >= 3599.5 => {
            let minutes = (s / 60.0).round();
            format!("{s:.0} s ({:.0} h {:.0} min)", (minutes / 60.0).floor(), minutes % 60.0)
        }
        s => {
            let total = s.round();
            format!("{total:.0} s ({:.0} min {:.0} s)", (total / 60.0).floor(), total % 60.0)
        }
    }
}

/// A number from 0 up with three significant digits, and no more digits than it needs above 1000.
fn three_digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// `94 %`.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// `12,291`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `3 shards`, `1 shard`.
pub(crate) fn plural(number: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(number), if number == 1 { "" } else { "s" })
}

/// `8.03 billion`, `560 million`, `12,291`.
pub(crate) fn large(number: u64) -> String {
    match as_f64(number) {
        n if n >= 0.9995e12 => format!("{} trillion", three_digits(n / 1e12)),
        n if n >= 0.9995e9 => format!("{} billion", three_digits(n / 1e9)),
        n if n >= 0.9995e6 => format!("{} million", three_digits(n / 1e6)),
        _ => count(number),
    }
}

/// `[4096, 128]`.
pub(crate) fn shape(dims: &[usize]) -> String {
    let dims: Vec<_> = dims.iter().map(usize::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// Text from a file, safe for a terminal: control characters and those that reorder text are shown as escapes.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_treacherous(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// The same for messages of several lines, whose line breaks are ours.
pub(crate) fn escape_lines(text: &str) -> String {
    text.split('\n').map(escape).collect::<Vec<_>>().join("\n")
}

fn is_treacherous(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// A bar of `width` cells, of which `share` are filled, to an eighth of a cell.
pub(crate) fn bar(share: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between 0 and 8 * width
    let eighths = (share * as_f64(width as u64) * 8.0).round() as usize;
    let filled = format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8]);
    if filled.is_empty() && share > 0.0 { "▏".to_owned() } else { filled }
}

/// Where the text of a cell stands in its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Characters of the widest cell that a column is made as wide as. A wider one sticks out of it: a single name of a
/// megabyte would otherwise be paid for with a megabyte of blanks in every row.
const WIDEST_CELL: usize = 200;

/// Names are not shortened further than this, however narrow the screen is.
const NARROWEST_NAME: usize = 16;

/// Rows of cells in aligned columns.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Align>,
    /// The column whose cells are shortened where the table would be wider than the screen.
    elastic: Option<usize>,
    rows: Vec<Vec<(Style, String)>>,
}

impl Table {
    pub(crate) fn new(columns: &[Align]) -> Table {
        Table { columns: columns.to_vec(), elastic: None, rows: Vec::new() }
    }

    /// The same table with a column of names, which are shortened where the table would be wider than a screen.
    pub(crate) fn elastic(self, column: usize) -> Table {
        Table { elastic: Some(column), ..self }
    }

    /// A row of column headings.
    pub(crate) fn heading<const N: usize>(&mut self, cells: [&str; N]) {
        self.rows.push(cells.iter().map(|&cell| (DIM, cell.to_owned())).collect());
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into_iter().map(|cell| (Style::new(), cell)).collect());
    }

    pub(crate) fn styled_row<const N: usize>(&mut self, cells: [(Style, String); N]) {
        self.rows.push(cells.into());
    }

    /// The table as wide as it likes, or on a screen as it fits there.
    pub(crate) fn render_on(mut self, screen: Screen) -> String {
        if let Some(column) = self.elastic.filter(|_| screen.is_watched) {
            let widths = self.widths();
            let own = widths.get(column).copied().unwrap_or_default();
            let others = widths.iter().sum::<usize>() - own + 2 * widths.len().saturating_sub(1);
            let room = screen.columns.saturating_sub(others).max(NARROWEST_NAME);
            for (_, cell) in self.rows.iter_mut().filter_map(|row| row.get_mut(column)) {
                *cell = elided(cell, room);
            }
        }
        self.render()
    }

    /// The width of each column, in characters.
    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|(_, cell)| cell.chars().count()).filter(|&chars| chars <= WIDEST_CELL).max().unwrap_or(0)
        };
        (0..self.columns.len()).map(width).collect()
    }

    /// The table, each line with a line break, two blanks between columns, none at the end of a line.
    pub(crate) fn render(&self) -> String {
        let widths = self.widths();
        let mut out = String::new();
        for row in &self.rows {
            let last = row.iter().rposition(|(_, cell)| !cell.is_empty()).map_or(0, |last| last + 1);
            for (column, (style, cell)) in row.iter().enumerate().take(last) {
                let pad = " ".repeat(widths.get(column).map_or(0, |width| width.saturating_sub(cell.chars().count())));
                let cell = styled(*style, cell);
                let gap = if column == 0 { "" } else { "  " };
                let _ = match self.columns.get(column) {
                    Some(Align::Right) => write!(out, "{gap}{pad}{cell}"),
                    _ if column + 1 == last => write!(out, "{gap}{cell}"),
                    _ => write!(out, "{gap}{cell}{pad}"),
                };
            }
            out.push('\n');
        }
        out
    }
}

#[allow(clippy::cast_precision_loss)] // what a person reads has three digits
pub(crate) fn as_f64(number: u64) -> f64 {
    number as f64
}

/// Lines under a heading; the JSON has those that are too many for a screen.
pub(crate) fn left_out(tensors: u64) -> String {
    match tensors {
        0 => String::new(),
        _ => format!("{} left out: cannot be loaded, and named above\n", plural(tensors, "tensor")),
    }
}

pub(crate) fn section(heading: &str, lines: Vec<String>) -> String {
    const MOST: usize = 20;
    if lines.is_empty() {
        return String::new();
    }
    let mut out = format!("\n{heading}\n");
    for line in lines.iter().take(MOST) {
        let _ = writeln!(out, "  {}", escape(line));
    }
    if let Some(more) = lines.len().checked_sub(MOST).filter(|more| *more > 0) {
        let _ = writeln!(out, "  and {} more (--json lists all)", count(more as u64));
    }
    out
}

/// Which tensor of scales each quantised weight was multiplied by.
pub(crate) fn scales<T: Display>(scales: &BTreeMap<T, T>) -> String {
    section("multiplied by scales", scales.iter().map(|(weight, scales)| format!("{weight} by {scales}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_name_their_unit_and_round_up_to_the_next() {
        assert_eq!((decimal(0).as_str(), decimal(999).as_str()), ("0 B", "999 B"));
        assert_eq!(decimal(999_999), "1.00 MB");
        assert_eq!(decimal(140_000_000_000), "140 GB");
        assert_eq!((binary(1 << 30).as_str(), binary(4 << 20).as_str(), binary(0).as_str()), ("1 GiB", "4 MiB", "0 B"));
        assert_eq!(binary((1 << 30) + 1), "1.00 GiB");
        assert_eq!(binary(1023), "1023 B");
        assert_eq!(decimal(u64::MAX), "18.4 EB");
        assert_eq!(both(4_340_000_000), "4.34 GB (4.04 GiB)");
    }

    #[test]
    fn times_and_rates_have_three_digits() {
        assert_eq!(seconds(11.6667), "11.7 s");
        assert_eq!(seconds(0.0032), "3.20 ms");
        assert_eq!(seconds(0.000_5), "500 µs");
        assert_eq!(seconds(0.0), "0 s");
        assert_eq!(seconds(233.3), "233 s (3 min 53 s)");
        assert_eq!(seconds(3599.4), "3599 s (59 min 59 s)");
        assert_eq!(seconds(3599.6), "3600 s (1 h 0 min)");
        assert_eq!(seconds(11_690.0), "11690 s (3 h 15 min)");
        assert_eq!(rate(12e9), "12.0 GB/s");
        assert_eq!(rate(0.55e9), "550 MB/s");
    }

    #[test]
    fn counts() {
        assert_eq!((count(0).as_str(), count(999).as_str(), count(1000).as_str()), ("0", "999", "1,000"));
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(large(70_000_000_000), "70.0 billion");
        assert_eq!((plural(1, "shard").as_str(), plural(2, "shard").as_str()), ("1 shard", "2 shards"));
    }

    #[test]
    fn names_from_files_cannot_command_a_terminal() {
        assert_eq!(escape("a\x1b[31mb\u{202e}c\n"), "a\\u{1b}[31mb\\u{202e}c\\n");
        assert_eq!(escape("Ärger.weight"), "Ärger.weight");
        assert_eq!(escape_lines("a\n\x07"), "a\n\\u{7}");
    }

    #[test]
    fn bars_are_never_empty_for_something() {
        assert_eq!(bar(0.0, 10), "");
        assert_eq!(bar(0.0001, 10), "▏");
        assert_eq!(bar(0.5, 10), "█████");
        assert_eq!(bar(f64::NAN, 10), "");
        assert_eq!(bar(7.0, 3), "███");
    }

    #[test]
    fn columns_are_aligned_without_trailing_blanks() {
        let mut table = Table::new(&[Align::Left, Align::Right, Align::Left]);
        table.row(["a".into(), "1".into(), "x".into()]);
        table.row(["bbb".into(), "100".into(), String::new()]);
        let plain = anstream::adapter::strip_str(&table.render()).to_string();
        assert_eq!(plain, "a      1  x\nbbb  100\n");
    }

    #[test]
    fn a_table_fits_a_screen_by_shorter_names_and_a_pipe_gets_them_whole() {
        let table = || {
            let mut table = Table::new(&[Align::Left, Align::Right]).elastic(0);
            table.row(["model.layers.0.post_attention_layernorm.weight".into(), "8.19 kB".into()]);
            table.row(["short".into(), "1 B".into()]);
            table
        };
        let screen = Screen { columns: 40, is_watched: true };
        let plain = |screen| anstream::adapter::strip_str(&table().render_on(screen)).to_string();
        assert!(plain(screen).lines().all(|line| line.chars().count() == 40), "{}", plain(screen));
        assert!(plain(screen).contains('…') && plain(screen).contains("norm.weight"));
        assert!(
            plain(Screen { is_watched: false, ..screen }).contains("model.layers.0.post_attention_layernorm.weight")
        );
    }

    #[test]
    fn a_name_of_a_megabyte_does_not_widen_the_other_rows() {
        let mut table = Table::new(&[Align::Left, Align::Right]);
        table.row(["n".repeat(1 << 20), "1".into()]);
        (0..1000).for_each(|_| table.row(["short".into(), "1".into()]));
        let plain = anstream::adapter::strip_str(&table.render()).to_string();
        assert!(plain.len() < 2 << 20 && plain.ends_with("short  1\n"), "{} bytes", plain.len());
    }
}
