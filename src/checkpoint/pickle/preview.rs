//! Values in a few words, for messages. Bounded in depth and length, so that no value can make a long message.

use std::fmt::Write as _;

use super::{Arena, Id, MAX_INTEGER_BYTES, Value, text};

/// Characters of a preview, and of one text in it.
const MOST_CHARS: usize = 120;
const MOST_TEXT_CHARS: usize = 40;
const MOST_DEPTH: usize = 4;

impl Arena {
    /// A value in a few words, as Python would write it.
    pub fn preview(&self, id: Id) -> String {
        let mut out = String::new();
        self.write(id, MOST_DEPTH, &mut out);
        match out.char_indices().nth(MOST_CHARS) {
            Some((end, _)) => format!("{}…", &out[..end]),
            None => out,
        }
    }

    fn write(&self, id: Id, depth: usize, out: &mut String) {
        if depth == 0 || out.len() > MOST_CHARS * 4 {
            return out.push('…');
        }
        match self.get(id) {
            Value::None => out.push_str("None"),
            Value::Bool(true) => out.push_str("True"),
            Value::Bool(false) => out.push_str("False"),
            Value::Int(number) => _ = write!(out, "{number}"),
            Value::Big(span) if span.len as usize > MAX_INTEGER_BYTES => {
                let _ = write!(out, "an integer of {} bytes", span.len);
            }
            Value::Big(span) => out.push_str(&text::written(self.bytes(span))),
            Value::Float(number) => _ = write!(out, "{number:?}"),
            Value::Text(span) => {
                let text: String = self.text(span).chars().take(MOST_TEXT_CHARS).collect();
                let _ = write!(out, "{text:?}");
            }
            Value::Bytes(span) => _ = write!(out, "{} bytes", span.len),
            Value::Tuple(span) | Value::FrozenSet(span) => self.write_all(self.items(span), ['(', ')'], depth, out),
            Value::List(list) | Value::Set(list) => self.write_all(self.list(list), ['[', ']'], depth, out),
            Value::Dict(dict) => _ = write!(out, "{{{} entries}}", self.dict(dict).len()),
            Value::Unknown => out.push('?'),
            Value::Global(_) => {
                let (module, name) = self.as_global(id).unwrap_or_default();
                out.extend(module.chars().take(MOST_CHARS));
                out.push('.');
                out.extend(name.chars().take(MOST_CHARS));
            }
            Value::Persistent(inner) => self.write(inner, depth - 1, out),
            Value::Call(_) => {
                if let Some(call) = self.as_call(id) {
                    self.write(call.function, depth - 1, out);
                    self.write(call.arguments, depth - 1, out);
                }
            }
        }
    }

    fn write_all(&self, items: &[Id], [open, close]: [char; 2], depth: usize, out: &mut String) {
        out.push(open);
        for (at, item) in items.iter().take(8).enumerate() {
            if at > 0 {
                out.push_str(", ");
            }
            self.write(*item, depth - 1, out);
        }
        if items.len() > 8 {
            out.push_str(", …");
        }
        out.push(close);
    }
}
