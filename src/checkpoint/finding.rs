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
    /// Offset in bytes within the pickle, where it is about a place in one.
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
        let what = what.into();
        Finding {
            rule,
            severity,
            what,
            member: None,
            position: None,
            opcode: None,
            global: None,
            arguments: None,
            reached: None,
        }
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
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(member) = &self.member {
            write!(f, "{}: ", member.escape_debug())?;
        }
        write!(f, "{} ({}", self.what.escape_debug().to_string().replace("\\\"", "\"").replace("\\'", "'"), self.rule)?;
        self.position.map_or(Ok(()), |position| write!(f, ", byte {position}"))?;
        f.write_str(")")
    }
}
