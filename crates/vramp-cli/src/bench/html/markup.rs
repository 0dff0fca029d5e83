//! Small pieces of HTML: text made harmless, tables in boxes of their own, legends. Every cell and every label is escaped here.

use super::canvas::Ink;
use super::escape::escaped;

/// A table. A heading that begins with `#` is that of a column of numbers.
pub(super) fn table<const N: usize>(caption: &str, headings: [&str; N], rows: &[[String; N]]) -> String {
    let class = |heading: &str| if heading.starts_with('#') { " class=\"n\"" } else { "" };
    let caption = escaped(caption);
    let mut out = format!(
        "<p class=\"hint\">{caption}</p><div class=\"scroll\" role=\"region\" aria-label=\"{caption}\" tabindex=\"0\">\
         <table aria-label=\"{caption}\"><thead><tr>"
    );
    for heading in headings {
        out.push_str(&format!("<th scope=\"col\"{}>{}</th>", class(heading), escaped(heading.trim_start_matches('#'))));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (column, (cell, heading)) in row.iter().zip(headings).enumerate() {
            let (tag, scope) = if column == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
            out.push_str(&format!("<{tag}{scope}{}>{}</{tag}>", class(heading), escaped(cell)));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// How a mark looks, for a legend.
#[derive(Clone, Copy)]
pub(super) enum Mark {
    Block,
    Line,
    Dashes,
    Dot,
}

/// What the marks of a chart mean.
pub(super) fn legend(entries: &[(Mark, Ink, String)]) -> String {
    let mut out = String::from("<ul class=\"legend\">");
    for (mark, ink, meaning) in entries {
        let class = match mark {
            Mark::Block => "block",
            Mark::Line => "line",
            Mark::Dashes => "dashes",
            Mark::Dot => "dot",
        };
        let name = ink.name();
        out.push_str(&format!("<li><i class=\"{class}\" style=\"--c:var(--{name})\"></i>{}</li>", escaped(meaning)));
    }
    out.push_str("</ul>\n");
    out
}

/// A paragraph.
pub(super) fn paragraph(class: &str, said: &str) -> String {
    format!("<p class=\"{class}\">{}</p>\n", escaped(said))
}

/// Something that is shown when asked for.
pub(super) fn folded(summary: &str, inner: &str) -> String {
    format!("<details><summary>{}</summary>{inner}</details>\n", escaped(summary))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_a_file_becomes_markup() {
        let said = table("a & b", ["name", "#bytes"], &[["<b onclick='x'>\x1b".to_owned(), "1".to_owned()]]);
        assert!(
            said.contains("<th scope=\"row\">&lt;b onclick=&#39;x&#39;&gt;\\u{1b}</th><td class=\"n\">1</td>"),
            "{said}"
        );
        assert!(said.contains("aria-label=\"a &amp; b\"") && said.contains("<th scope=\"col\" class=\"n\">bytes</th>"));
        assert!(legend(&[(Mark::Dot, Ink::Read, "<i>".to_owned())]).contains("var(--read)\"></i>&lt;i&gt;</li>"));
    }
}
