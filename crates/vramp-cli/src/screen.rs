//! How wide the output may be, and the folding of lines that are wider.
//!
//! A terminal has its own width, COLUMNS stands in for one, and anything else (a file, a pipe) gets 80 columns. Names and
//! lines are shortened or folded for a screen only: what goes to a file or a pipe keeps them whole, for `grep`.

use std::io::IsTerminal;
use std::os::fd::AsFd;

/// Columns where nothing says how many there are.
const USUAL: usize = 80;

/// Narrower screens are treated as if they had this many columns.
const NARROWEST: usize = 40;

/// Prose is no wider than this, however wide the screen is.
const WIDEST_PROSE: usize = 100;

/// Where text goes, by its width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Screen {
    /// Columns.
    pub(crate) columns: usize,
    /// Whether a person looks at it: names may be shortened and lines folded.
    pub(crate) is_watched: bool,
}

impl Screen {
    /// That of standard output.
    pub(crate) fn stdout() -> Screen {
        Screen::of(&std::io::stdout())
    }

    /// That of standard error.
    pub(crate) fn stderr() -> Screen {
        Screen::of(&std::io::stderr())
    }

    fn of(stream: &(impl AsFd + IsTerminal)) -> Screen {
        let told = || std::env::var("COLUMNS").ok()?.parse().ok();
        let own = terminal_size::terminal_size_of(stream).map(|(width, _)| usize::from(width.0));
        let columns = own.or_else(told).filter(|&columns| columns > 0);
        Screen {
            columns: columns.unwrap_or(USUAL).max(NARROWEST),
            is_watched: columns.is_some() || stream.is_terminal(),
        }
    }

    /// `prose` in lines that fit, each but the first behind `indent` blanks.
    pub(crate) fn wrapped(self, prose: &str, indent: usize) -> String {
        folded_line(prose, self.columns.min(WIDEST_PROSE), indent)
    }

    /// `text` with lines that do not fit folded at blanks; as it is where nobody looks.
    pub(crate) fn folded(self, text: &str) -> String {
        if !self.is_watched {
            return text.to_owned();
        }
        let fold = |line: &str| {
            let indent = line.chars().take_while(|c| *c == ' ').count();
            folded_line(line, self.columns, indent + 2)
        };
        text.split('\n').map(fold).collect::<Vec<_>>().join("\n")
    }
}

/// One line as several, broken at blanks, each but the first behind `indent` blanks. A word that is too long stays whole.
fn folded_line(line: &str, columns: usize, indent: usize) -> String {
    if visible(line) <= columns {
        return line.to_owned();
    }
    let indent = indent.min(columns / 2);
    let (mut out, mut at) = (String::with_capacity(line.len() + 16), 0);
    let mut first = true;
    for (blanks, word) in words(line) {
        let width = visible(word);
        if first || at + blanks + width <= columns {
            out.extend(std::iter::repeat_n(' ', blanks));
            at += blanks + width;
        } else {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            at = indent + width;
        }
        out.push_str(word);
        first = false;
    }
    out
}

/// The words of a line, each with the number of blanks before it.
fn words(line: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut blanks = 0;
    line.split(' ').enumerate().filter_map(move |(at, word)| {
        blanks += usize::from(at > 0);
        (!word.is_empty()).then(|| (std::mem::take(&mut blanks), word))
    })
}

/// Characters that a terminal shows: colour codes take no room.
fn visible(text: &str) -> usize {
    let (mut count, mut in_code) = (0, false);
    for c in text.chars() {
        match (in_code, c) {
            (false, '\x1b') => in_code = true,
            (false, _) => count += 1,
            (true, 'a'..='z' | 'A'..='Z') => in_code = false,
            (true, _) => {}
        }
    }
    count
}

/// `text` in at most `width` characters: what does not fit is taken out of the middle.
pub(crate) fn elided(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let (head, tail) = (kept / 2, kept - kept / 2); // the end of a name tells more than its beginning
    let start: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(count - tail).collect();
    format!("{start}…{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const WATCHED: Screen = Screen { columns: 40, is_watched: true };

    #[test]
    fn no_line_is_wider_than_the_screen_and_no_word_is_lost() {
        let prose = "one copy leaves the store; hosts pass it on in 2 trees of as many branches, 6 hops at most";
        let wrapped = WATCHED.wrapped(prose, 4);
        assert!(wrapped.lines().count() > 1 && wrapped.lines().all(|line| line.chars().count() <= 40), "{wrapped}");
        assert!(
            wrapped.lines().skip(1).all(|line| line.starts_with("    ") && !line.starts_with("     ")),
            "{wrapped}"
        );
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&wrapped), words(prose));
    }

    #[test]
    fn columns_stay_aligned_where_they_fit_and_colours_take_no_room() {
        let row = format!("a      b     \x1b[1m{}\x1b[0m", "c".repeat(27));
        assert_eq!(WATCHED.folded(&row), row);
        let folded = WATCHED.folded(&format!("  warning: {} tail\nshort", "w".repeat(60)));
        assert_eq!(folded, format!("  warning:\n    {}\n    tail\nshort", "w".repeat(60)));
        let unwatched = Screen { is_watched: false, ..WATCHED };
        assert_eq!(unwatched.folded(&"x y ".repeat(40)), "x y ".repeat(40));
    }

    #[test]
    fn the_middle_of_a_name_goes_first() {
        assert_eq!(elided("model.layers.0.weight", 12), "model…weight");
        assert_eq!(elided("short", 5), "short");
        assert_eq!(elided("ÄÖÜäöü", 3).chars().count(), 3);
    }
}
