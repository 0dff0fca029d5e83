//! Text from files and the system as it may stand in HTML. It never lets a tag, an attribute or a control character through.

use super::super::super::text;

/// Text as it may stand between tags and in attributes, control characters shown.
pub(super) fn escaped(raw: &str) -> String {
    let mut out = String::with_capacity(raw.len());
    for c in text::escape(raw).chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}
