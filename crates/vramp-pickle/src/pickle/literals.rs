//! Opcodes that push a plain value: numbers, text, bytes.
//!
//! Text that lies in the pickle as it is meant is a range of it; only what must be decoded is kept beside it.

use super::input::Read;
use super::machine::Machine;
use super::text::{self, Number};
use super::{MAX_INTEGER_BYTES, Span, Value};
use crate::finding::Severity;

/// Wider integers than this are no honest writer's.
const ODD_INTEGER_BYTES: usize = 256;

/// Decoded text that is kept, in bytes, and as much again for names.
const MAX_DECODED: usize = 64 << 20;
const LONGEST_DECODED_NAME: usize = 4 << 10;

impl Machine<'_> {
    pub(super) fn integer(&mut self, opcode: u8) -> Read<()> {
        let number = match opcode {
            b'J' => i64::from(self.input.i32()?),
            b'K' => i64::from(self.input.u8()?),
            b'M' => i64::from(self.input.u16()?),
            b'I' | b'L' => return self.decimal(opcode),
            _ => return self.long(opcode),
        };
        self.push(Value::Int(number));
        Ok(())
    }

    fn long(&mut self, opcode: u8) -> Read<()> {
        let len = if opcode == 0x8a { i64::from(self.input.u8()?) } else { i64::from(self.input.i32()?) };
        let Ok(len) = u64::try_from(len) else {
            return Err(self.input.broken("number-range", format!("an integer of {len} bytes")));
        };
        let span = self.input.span(len)?;
        let taken = self.slice(span);
        let (small, len) = (text::small(taken), taken.len());
        if small.is_none() && len > MAX_INTEGER_BYTES {
            self.note_wide(if len > ODD_INTEGER_BYTES { Severity::Suspicious } else { Severity::Notice });
        }
        self.push(small.map_or(Value::Big(span), Value::Int));
        Ok(())
    }

    fn note_wide(&mut self, severity: Severity) {
        let what = format!("an integer of more than {} bits", MAX_INTEGER_BYTES * 8);
        let fault = self.input.broken("integer-limit", what);
        self.input.note(super::Broken { severity, ..fault });
    }

    fn decimal(&mut self, opcode: u8) -> Read<()> {
        let line = self.input.line()?;
        let number = match (opcode, self.slice(line)) {
            (b'I', truth @ (b"01" | b"00")) => {
                let truth = truth == b"01";
                self.push_truth(truth);
                return Ok(());
            }
            (b'L', [digits @ .., b'L']) => text::integer(digits, MAX_INTEGER_BYTES),
            (_, digits) => text::integer(digits, MAX_INTEGER_BYTES),
        };
        match number {
            Number::Small(number) => self.push(Value::Int(number)),
            Number::Big(bytes) => {
                let span = self.keep(&bytes);
                self.push(Value::Big(span));
            }
            Number::TooWide => {
                self.note_wide(Severity::Suspicious);
                self.push_unknown();
            }
            Number::Odd => {
                self.note("number-range", "an integer that readers take for different numbers, or for none");
                self.push_unknown();
            }
            Number::Nothing => return Err(self.input.broken("number-range", "an integer that is none")),
        }
        Ok(())
    }

    pub(super) fn float(&mut self, opcode: u8) -> Read<()> {
        let number = if opcode == b'G' {
            f64::from_be_bytes(self.input.array()?)
        } else {
            let line = self.input.line()?;
            let number = text::float(self.slice(line));
            number.ok_or_else(|| self.input.broken("number-range", "a number that is none"))?
        };
        self.push(Value::Float(number));
        Ok(())
    }

    pub(super) fn unicode(&mut self, opcode: u8) -> Read<()> {
        let len = match opcode {
            b'V' => return self.escaped(),
            b'X' => u64::from(self.input.u32()?),
            0x8c => u64::from(self.input.u8()?),
            _ => self.input.u64()?,
        };
        let span = self.input.span(len)?;
        if std::str::from_utf8(self.slice(span)).is_ok() {
            self.push(Value::Text(span));
            return Ok(());
        }
        self.note("text-encoding", "text that is not UTF-8");
        let text = if self.may_decode(span) { text::without_surrogates(self.slice(span)) } else { None };
        let span = text.map_or(Value::Bytes(span), |text| Value::Text(self.keep(text.as_bytes())));
        self.push(span);
        Ok(())
    }

    fn escaped(&mut self) -> Read<()> {
        let line = self.input.line()?;
        if self.slice(line).iter().all(|byte| byte.is_ascii() && *byte != b'\\') {
            self.push(Value::Text(line));
            return Ok(());
        }
        if !self.may_decode(line) {
            self.push_unknown();
            return Ok(());
        }
        let Some((text, lossy)) = text::raw_unicode(self.slice(line)) else {
            return Err(self.input.broken("text-encoding", "an escape in a text that stands for no character"));
        };
        if lossy {
            self.note("text-encoding", "text with half a character (a lone surrogate)");
        }
        let span = self.keep(text.as_bytes());
        self.push(Value::Text(span));
        Ok(())
    }

    pub(super) fn byte_string(&mut self, opcode: u8) -> Read<()> {
        let len = match opcode {
            b'B' => u64::from(self.input.u32()?),
            b'C' => u64::from(self.input.u8()?),
            _ => self.input.u64()?,
        };
        let span = self.input.span_through(len)?;
        self.push(Value::Bytes(span));
        Ok(())
    }

    /// Strings of Python 2: text where they are UTF-8, bytes otherwise.
    pub(super) fn old_string(&mut self, opcode: u8) -> Read<()> {
        let span = match opcode {
            b'S' => {
                let line = self.input.line()?;
                if !self.may_decode(line) {
                    self.push_unknown();
                    return Ok(());
                }
                let Some(inner) = text::unquote(self.slice(line)) else {
                    return Err(self.input.broken("text-encoding", "a string that is not quoted, or escapes nothing"));
                };
                self.keep(&inner)
            }
            b'T' => {
                let len = self.input.i32()?;
                let negative = || self.input.broken("number-range", format!("a string of {len} bytes"));
                let len = u64::try_from(len).map_err(|_| negative())?;
                self.input.span(len)?
            }
            _ => {
                let len = self.input.u8()?;
                self.input.span(len.into())?
            }
        };
        let is_text = std::str::from_utf8(self.slice(span)).is_ok();
        self.push(if is_text { Value::Text(span) } else { Value::Bytes(span) });
        Ok(())
    }

    /// The bytes of a span: of the pickle, or of what was decoded.
    pub(super) fn slice(&self, span: Span) -> &[u8] {
        super::of_span(self.bytes, &self.extra, span)
    }

    /// Bytes as the text that they are to an unpickler that was told to take strings of Python 2 for Latin-1.
    pub(super) fn latin1(&mut self, span: Span) -> Option<Span> {
        let fits = self.may_decode(span);
        let text: String = self.slice(span).iter().filter(|_| fits).map(|byte| char::from(*byte)).collect();
        fits.then(|| self.keep(text.as_bytes()))
    }

    /// Whether there is room for the text of a span once it is decoded: it may become twice as long. Names still fit where long
    /// texts do not.
    fn may_decode(&mut self, span: Span) -> bool {
        let most = if span.len as usize > LONGEST_DECODED_NAME { MAX_DECODED } else { 2 * MAX_DECODED };
        let fits = self.extra.len() + 2 * span.len as usize <= most;
        if !fits {
            self.note_limit("bytes of text that must be decoded", MAX_DECODED);
        }
        fits
    }

    /// Keeps decoded bytes.
    fn keep(&mut self, bytes: &[u8]) -> Span {
        let start = u32::try_from(self.bytes.len() + self.extra.len()).unwrap_or(u32::MAX);
        self.extra.extend_from_slice(bytes);
        Span { start, len: u32::try_from(bytes.len()).unwrap_or(0) }
    }
}
