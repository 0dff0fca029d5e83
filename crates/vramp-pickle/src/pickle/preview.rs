//! Values as Python would write them: in a few words, for messages, or in full, for names. Bounded in depth and length, so that no
//! value can make a long message.

use std::fmt::Write as _;

use super::{Arena, Id, MAX_INTEGER_BYTES, Value, text};

/// How much of a value is written.
struct Most {
    chars: usize,
    /// Characters of one text in it; bytes are counted where they are not written.
    text_chars: usize,
    items: usize,
    depth: usize,
    bytes: bool,
}

const PREVIEW: Most = Most { chars: 120, text_chars: 40, items: 8, depth: 4, bytes: false };
const NAME: Most = Most { chars: 1 << 12, text_chars: 1 << 12, items: 1 << 12, depth: 64, bytes: true };

impl Arena {
    /// A value in a few words, as Python would write it.
    pub fn preview(&self, id: Id) -> String {
        self.written(id, &PREVIEW)
    }

    /// A value in full, as far as a name can be that long.
    pub(crate) fn in_full(&self, id: Id) -> String {
        self.written(id, &NAME)
    }

    fn written(&self, id: Id, most: &Most) -> String {
        let mut out = String::new();
        self.write(id, most, most.depth, &mut out);
        match out.char_indices().nth(most.chars) {
            Some((end, _)) => format!("{}…", &out[..end]),
            None => out,
        }
    }

    fn write(&self, id: Id, most: &Most, depth: usize, out: &mut String) {
        if depth == 0 || out.len() > most.chars * 4 {
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
                let text: String = self.text(span).chars().take(most.text_chars).collect();
                let _ = write!(out, "{text:?}");
            }
            Value::Bytes(span) if most.bytes => {
                let bytes = self.bytes(span);
                let _ = write!(out, "b\"{}\"", bytes.get(..most.text_chars).unwrap_or(bytes).escape_ascii());
            }
            Value::Bytes(span) => _ = write!(out, "{} bytes", span.len),
            Value::Tuple(span) | Value::FrozenSet(span) => {
                self.write_all(self.items(span), ['(', ')'], most, depth, out)
            }
            Value::List(list) | Value::Set(list) => self.write_all(self.list(list), ['[', ']'], most, depth, out),
            Value::Dict(dict) => _ = write!(out, "{{{} entries}}", self.dict(dict).len()),
            Value::Unknown => out.push('?'),
            Value::Global(_) => {
                let (module, name) = self.as_global(id).unwrap_or_default();
                out.extend(module.chars().take(most.chars));
                out.push('.');
                out.extend(name.chars().take(most.chars));
            }
            Value::Persistent(inner) => self.write(inner, most, depth - 1, out),
            Value::Call(_) => {
                if let Some(call) = self.as_call(id) {
                    self.write(call.function, most, depth - 1, out);
                    self.write(call.arguments, most, depth - 1, out);
                }
            }
        }
    }

    fn write_all(&self, items: &[Id], [open, close]: [char; 2], most: &Most, depth: usize, out: &mut String) {
        out.push(open);
        for (at, item) in items.iter().take(most.items).enumerate() {
            if out.len() > most.chars * 4 {
                break;
            }
            if at > 0 {
                out.push_str(", ");
            }
            self.write(*item, most, depth - 1, out);
        }
        if items.len() > most.items {
            out.push_str(", …");
        }
        out.push(close);
    }
}
