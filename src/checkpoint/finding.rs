//! What is odd, forbidden or damaged in a file that could hold code: plain data that a load refuses by and an audit prints.
//!
//! It reads nothing and prints nothing. The readers of `torch/` make findings; whoever asked decides what they mean.

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
    /// Offset in bytes within the pickle.
    pub position: u64,
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
        Finding { rule, severity, what: what.into(), member: None, spot: None }
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
        Finding { member: Some(member.to_owned()), ..self }
    }

    /// The same finding, about a place in a pickle.
    #[must_use]
    pub fn at(self, spot: Spot) -> Finding {
        Finding { spot: Some(Box::new(spot)), ..self }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(member) = &self.member {
            write!(f, "{}: ", member.escape_debug())?;
        }
        write!(f, "{} ({}", self.what.escape_debug().to_string().replace("\\\"", "\"").replace("\\'", "'"), self.rule)?;
        self.spot.as_ref().map_or(Ok(()), |spot| write!(f, ", byte {}", spot.position))?;
        f.write_str(")")
    }
}
