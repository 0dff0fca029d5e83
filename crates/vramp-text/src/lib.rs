//! Words that vramp's crates share: lists of problems with an end, quoted names, counted things.
//!
//! [`lookalike`] says what a file is by its first bytes. Nothing here reads a file or prints.

#![forbid(unsafe_code)]

use std::fmt;

pub mod lookalike;

/// Problems of one kind: the first few in words, and how many there are.
///
/// However hostile the input, it keeps a bounded number of texts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listed {
    shown: Vec<String>,
    total: usize,
    tensor: Option<String>,
}

impl Listed {
    /// Problems that are kept in words; the others are only counted.
    pub const SHOWN: usize = 20;

    /// An empty list.
    pub fn new() -> Listed {
        Listed::default()
    }

    /// Adds a problem.
    pub fn push(&mut self, problem: impl FnOnce() -> String) {
        self.total += 1;
        self.tensor = None;
        if self.shown.len() < Self::SHOWN {
            self.shown.push(problem());
        }
    }

    /// Adds a problem that is about one tensor.
    pub fn push_tensor(&mut self, tensor: &str, problem: impl FnOnce() -> String) {
        self.push(problem);
        self.tensor = (self.total == 1).then(|| tensor.to_owned());
    }

    /// How many problems there are, shown or not.
    pub fn len(&self) -> usize {
        self.total
    }

    /// Whether there is no problem.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// The tensor concerned, where there is exactly one problem and it is about one.
    pub fn tensor(&self) -> Option<&str> {
        self.tensor.as_deref()
    }

    /// The fault that `kind` makes of the problems, or nothing where there are none.
    ///
    /// # Errors
    /// That fault.
    pub fn into_fault<F>(self, kind: impl FnOnce(Listed) -> F) -> Result<(), F> {
        if self.is_empty() { Ok(()) } else { Err(kind(self)) }
    }
}

impl<S: Into<String>> FromIterator<S> for Listed {
    fn from_iter<I: IntoIterator<Item = S>>(problems: I) -> Listed {
        let mut listed = Listed::new();
        problems.into_iter().for_each(|problem| listed.push(|| problem.into()));
        listed
    }
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.shown.iter().enumerate() {
            write!(f, "{}{problem}", if at == 0 { "" } else { "; " })?;
        }
        match self.total - self.shown.len() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// A name in quotes, with control characters escaped, cut where it is absurdly long.
pub fn quoted(name: &str) -> String {
    const LONGEST: usize = 300;
    match name.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}… ({} bytes)", &name[..end], name.len()),
        None => format!("{name:?}"),
    }
}

/// `1 file`, `2 files`.
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_a_few_words_and_counts_the_rest() {
        let listed: Listed = (0..Listed::SHOWN + 5).map(|n| format!("p{n}")).collect();
        assert!(listed.to_string().ends_with("p19; and 5 more"), "{listed}");
    }

    #[test]
    fn quoted_names_show_control_characters_and_have_an_end() {
        assert_eq!(quoted("a\u{1b}[31m"), r#""a\u{1b}[31m""#);
        assert!(quoted(&"é".repeat(5000)).len() < 700);
    }
}
