//! Lines of a report that fit a terminal of 80 columns: a name, and a value that goes on below itself. Pure text.

use std::borrow::Cow;

/// Columns of a report. Fixed, so that a report looks alike on a terminal, in a file and in a bug report.
pub(crate) const COLUMNS: usize = 80;

/// Columns of the names at the left.
const NAMES: usize = 12;

/// `name        value`, the value wrapped between words.
pub(crate) fn line(name: &str, value: &str) -> String {
    let blanks = " ".repeat(NAMES.saturating_sub(visible(name)));
    let indent = " ".repeat(NAMES);
    let value = wrapped(value, COLUMNS - NAMES).join(&format!("\n{indent}"));
    format!("{name}{blanks}{value}\n")
}

/// What stays on the line of the number before it.
const UNITS: [&str; 16] =
    ["s", "ms", "µs", "B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "kB/s", "MB/s", "GB/s", "%", "times"];

/// The words of a text, a number and its unit as one.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let bare = word.trim_end_matches([',', '.', ';', ':', ')', ']']);
        match words.last_mut() {
            Some(number) if UNITS.contains(&bare) && number.ends_with(|c: char| c.is_ascii_digit()) => {
                number.push(' ');
                number.push_str(word);
            }
            _ => words.push(word.to_owned()),
        }
    }
    words
}

/// Text in lines of at most `columns`, as far as its words allow it.
pub(crate) fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut taken = 0;
    for word in words(text) {
        let width = visible(&word);
        match lines.last_mut() {
            Some(line) if taken + 1 + width <= columns => {
                line.push(' ');
                line.push_str(&word);
                taken += 1 + width;
            }
            _ => {
                lines.push(word);
                taken = width;
            }
        }
    }
    if lines.is_empty() {
        lines.push(String::new());
    }
    lines
}

/// A text of at most `columns` characters; what is left out is marked.
pub(crate) fn shortened(text: &str, columns: usize) -> Cow<'_, str> {
    if text.chars().count() <= columns {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().take(columns.saturating_sub(1)).chain(['…']).collect())
}

/// Characters that are seen: those of colour codes are not.
fn visible(text: &str) -> usize {
    let mut inside = false;
    let is_seen = |c: char| {
        if inside {
            inside = c != 'm';
            return false;
        }
        inside = c == '\x1b';
        !inside
    };
    text.chars().map(is_seen).filter(|seen| *seen).count()
}

#[cfg(test)]
mod tests {
    use super::super::text::{self, GOOD};
    use super::*;

    #[test]
    fn values_go_on_below_themselves_and_colours_take_no_room() {
        let said = line("advice", &"word ".repeat(30));
        assert!(said.lines().count() == 3 && said.lines().all(|line| line.chars().count() <= COLUMNS), "{said}");
        assert!(said.lines().skip(1).all(|line| line.starts_with("            word")), "{said}");
        let coloured = text::styled(GOOD, "94 %");
        assert_eq!(visible(&coloured), 4);
        assert_eq!(line("limit", ""), "limit       \n");
        let long = "x".repeat(100);
        assert_eq!(wrapped(&format!("a {long} b"), 20), ["a", &long, "b"]);
        assert_eq!(wrapped("it took 5.96 ms, or 7 GB/s", 12), ["it took", "5.96 ms, or", "7 GB/s"]);
        assert_eq!((shortened("abcdef", 4), shortened("abcd", 4)), ("abc…".into(), "abcd".into()));
    }
}
