//! What is odd, forbidden or damaged in a file that could hold code: plain data that a load refuses by and an audit prints.
//!
//! It reads nothing and prints nothing. The readers of `torch/` make findings; whoever asked decides what they mean.

use std::borrow::Cow;
use std::fmt;

use serde::Serialize;

/// How much a finding weighs, from what is merely worth knowing on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Severity {
    /// Worth knowing; nothing is refused for it.
    Notice,
    /// Damaged, or against the rules of its format.
    Malformed,
    /// Not what an honest writer of weights makes.
    Suspicious,
    /// Names something that is known to run code.
    Dangerous,
}

impl Severity {
    /// Whether a load refuses the file for it.
    pub fn blocks(self) -> bool {
        self > Severity::Notice
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The stable name of the rule, as `duplicate-entry`.
    pub rule: &'static str,
    /// How much it weighs.
    pub severity: Severity,
    /// What was found, in words.
    pub what: String,
    /// The member of the archive, where it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
    /// Where in a pickle it is, where it is about a place in one.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub spot: Option<Box<Spot>>,
}

/// A place in a pickle, and what stands there.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Spot {
    /// Offset in bytes within the member, or the file where there are none; `None` where it is about no one place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<u64>,
    /// The opcode there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opcode: Option<&'static str>,
    /// The global that is named, as `module.name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global: Option<String>,
    /// The arguments of the call, in a few words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// Whether the result holds the value; if not, it was made and thrown away.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reached: Option<bool>,
}

impl Finding {
    /// A finding about the file as a whole.
    pub fn new(rule: &'static str, severity: Severity, what: impl Into<String>) -> Finding {
        Finding { rule, severity, what: shortened(what.into(), MOST_CHARS), member: None, spot: None }
    }

    /// Something worth knowing.
    pub fn notice(rule: &'static str, what: impl Into<String>) -> Finding {
        Finding::new(rule, Severity::Notice, what)
    }

    /// Damage.
    pub fn malformed(rule: &'static str, what: impl Into<String>) -> Finding {
        Finding::new(rule, Severity::Malformed, what)
    }

    /// What no honest writer makes.
    pub fn suspicious(rule: &'static str, what: impl Into<String>) -> Finding {
        Finding::new(rule, Severity::Suspicious, what)
    }

    /// The same finding, about one member of the archive.
    #[must_use]
    pub fn within(self, member: &str) -> Finding {
        Finding { member: Some(name(member)), ..self }
    }

    /// The same finding, about a place in a pickle.
    #[must_use]
    pub fn at(self, spot: Spot) -> Finding {
        Finding { spot: Some(Box::new(spot)), ..self }
    }
}

/// Characters of what a finding says, and of a name in it: one long name in a thousand findings must not fill the memory.
const MOST_CHARS: usize = 1000;
const MOST_NAME_CHARS: usize = 300;

/// A name from a file, cut where it is absurdly long.
pub(crate) fn name(name: &str) -> String {
    shortened(name, MOST_NAME_CHARS)
}

fn shortened<'a>(text: impl Into<Cow<'a, str>>, most: usize) -> String {
    let text = text.into();
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}… ({} bytes)", text.get(..end).unwrap_or_default(), text.len()),
        None => text.into_owned(),
    }
}

/// Text from a file with its control characters, and those that reorder text, as escapes; all others as they are, so that what is
/// escaped already is not escaped twice.
fn shown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let reorders =
            matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        if reorders || c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(member) = &self.member {
            write!(f, "{}: ", shown(member))?;
        }
        write!(f, "{} ({}", shown(&self.what), self.rule)?;
        let position = self.spot.as_ref().and_then(|spot| spot.position);
        position.map_or(Ok(()), |position| write!(f, ", byte {position}"))?;
        f.write_str(")")
    }
}

pub(crate) type Checked<T> = Result<T, Finding>;

pub(crate) fn fault<T>(rule: &'static str, what: impl Into<String>) -> Checked<T> {
    Err(Finding::malformed(rule, what))
}

/// Findings that are kept.
pub(crate) const MOST_FINDINGS: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_once_and_cut() {
        let finding = Finding::notice("rule", format!("{:?} and a\\b\u{1b}[1m\u{202e}", "x\n\"")).within("m\u{7}\\");
        assert_eq!(finding.to_string(), r#"m\u{7}\: "x\n\"" and a\b\u{1b}[1m\u{202e} (rule)"#);
        let long = Finding::notice("rule", "é".repeat(1 << 20)).within(&"m".repeat(1 << 20));
        assert!(long.to_string().len() < 3000 && long.to_string().contains("… (2097152 bytes)"));
    }
}
