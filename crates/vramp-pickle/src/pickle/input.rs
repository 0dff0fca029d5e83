//! The bytes of a pickle, read opcode by opcode: lengths are compared with what is there, frames are watched.
//!
//! Python's two unpicklers differ: one ignores the ends of frames, the other takes a last line without its end. What only one of
//! them refuses is noted, and reading goes on. It allocates nothing for the bytes and knows no opcode's meaning.

use super::{Broken, Span};
use crate::finding::Severity;

/// Where the machine is in the bytes.
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    /// Bytes that there are in all; these are the first of them.
    pub(super) whole: u64,
    pub(super) at: usize,
    /// Where the opcode began that is being read.
    pub(super) opcode_at: usize,
    /// One past the last byte of the frame, where the pickle has one open.
    frame_end: Option<usize>,
    /// What is wrong, the first of each kind.
    pub(super) faults: Vec<Broken>,
    /// Whether to read as Python's unpickler in C reads a file: what of a frame is left where a value crosses its end is lost.
    skips: bool,
    /// One past the last byte that such an unpickler has read ahead.
    ahead: usize,
    /// Bytes that there would have to be at least, where they ended too early.
    pub(super) wants: u64,
}

/// What the readers return: an error where no unpickler goes on.
pub(super) type Read<T> = Result<T, Broken>;

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8], whole: u64, skips: bool) -> Input<'a> {
        Input { bytes, whole, at: 0, opcode_at: 0, frame_end: None, faults: Vec::new(), skips, ahead: 0, wants: 0 }
    }

    /// A fault at the opcode that is being read.
    pub(super) fn broken(&self, rule: &'static str, what: impl Into<String>) -> Broken {
        Broken { rule, severity: Severity::Malformed, offset: Some(self.opcode_at as u64), what: what.into() }
    }

    /// The same, of a kind that no honest writer makes.
    pub(super) fn hostile(&self, rule: &'static str, what: impl Into<String>) -> Broken {
        Broken { severity: Severity::Suspicious, ..self.broken(rule, what) }
    }

    /// Remembers what is wrong, and goes on.
    pub(super) fn note(&mut self, fault: Broken) {
        if !self.knows(fault.rule, fault.severity) {
            self.faults.push(fault);
        }
    }

    /// Whether a fault of the kind is noted already: some are met with every opcode, and not worth their words again.
    pub(super) fn knows(&self, rule: &str, severity: Severity) -> bool {
        self.faults.iter().any(|noted| noted.rule == rule && noted.severity >= severity)
    }

    /// The next opcode.
    pub(super) fn opcode(&mut self) -> Read<u8> {
        self.opcode_at = self.at;
        if self.frame_end == Some(self.at) {
            self.frame_end = None;
        }
        match self.bytes.get(self.at) {
            None => {
                self.wants = self.bytes.len() as u64 + 1;
                Err(self.broken("truncated", "the pickle ends without STOP"))
            }
            Some(&opcode) => {
                self.at += 1;
                Ok(opcode)
            }
        }
    }

    /// The next `len` bytes, of whichever length the file states.
    pub(super) fn take(&mut self, len: u64) -> Read<&'a [u8]> {
        self.at = self.start_of(len);
        self.take_through(len)
    }

    /// The same where no unpickler loses bytes.
    pub(super) fn take_through(&mut self, len: u64) -> Read<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        let fits = usize::try_from(len).ok().filter(|&len| len <= left);
        let Some(len) = fits else {
            self.wants = (self.at as u64).saturating_add(len);
            let left = self.whole.saturating_sub(self.at as u64);
            return Err(self.broken("truncated", format!("{len} bytes are announced, {left} are left")));
        };
        let end = self.at + len;
        if let Some(frame) = self.frame_end.filter(|frame| end > *frame) {
            self.frame_end = None;
            self.note(self.hostile("frame", format!("an opcode crosses the frame's end at {frame}")));
        }
        let taken = self.bytes.get(self.at..end).unwrap_or_default();
        self.at = end;
        self.ahead = self.ahead.max(end);
        Ok(taken)
    }

    /// Where the next `len` bytes are read.
    fn start_of(&self, len: u64) -> usize {
        let within = (self.at as u64).saturating_add(len) <= self.ahead as u64;
        if self.skips && !within { self.ahead.max(self.at) } else { self.at }
    }

    /// The same, as a span.
    pub(super) fn span(&mut self, len: u64) -> Read<Span> {
        self.at = self.start_of(len);
        self.span_through(len)
    }

    /// The same where no unpickler loses bytes.
    pub(super) fn span_through(&mut self, len: u64) -> Read<Span> {
        let start = self.at;
        let taken = self.take_through(len)?;
        // Pickles are at most 512 MiB long.
        Ok(Span { start: u32::try_from(start).unwrap_or(u32::MAX), len: u32::try_from(taken.len()).unwrap_or(0) })
    }

    /// A fixed number of bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let taken = self.take(N as u64)?;
        taken.try_into().map_err(|_| self.broken("truncated", "the pickle ends too early"))
    }

    pub(super) fn u8(&mut self) -> Read<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(super) fn u16(&mut self) -> Read<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Read<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn i32(&mut self) -> Read<i32> {
        Ok(i32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Read<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// The rest of the line, without its end. One of Python's readers takes whatever byte is the file's last for that end.
    pub(super) fn line(&mut self) -> Read<Span> {
        let buffered = self.bytes.get(self.at..self.ahead).unwrap_or_default();
        if self.skips && !buffered.contains(&b'\n') {
            self.at = self.ahead.max(self.at);
        }
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let end = rest.iter().position(|&byte| byte == b'\n');
        if end.is_none() {
            self.note(self.broken("truncated", "a line has no end"));
        }
        let span = self.span_through(end.unwrap_or(rest.len().saturating_sub(1)) as u64)?;
        self.take_through(rest.len().min(1) as u64)?;
        Ok(span)
    }

    /// Ends the pickle. An unpickler that has read ahead takes what is left of the frame with it.
    pub(super) fn stop(&mut self) {
        if let Some(end) = self.frame_end.filter(|end| *end > self.at && *end as u64 <= self.whole) {
            self.note(self.hostile("frame", format!("the pickle ends within its frame, which ends at {end}")));
        }
        self.at = if self.skips { self.ahead.max(self.at) } else { self.at };
    }

    /// Opens a frame of `len` bytes.
    pub(super) fn frame(&mut self, len: u64) {
        if self.frame_end.is_some_and(|end| end != self.at) {
            self.note(self.hostile("frame", "a frame begins within another"));
        }
        let left = self.whole.saturating_sub(self.at as u64);
        if len > left {
            self.note(self.hostile("frame", format!("a frame of {len} bytes, {left} are left")));
        }
        self.at = self.start_of(len);
        self.frame_end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        if self.skips {
            self.ahead = self.ahead.max(self.frame_end.unwrap_or(usize::MAX)).min(self.bytes.len());
        }
    }
}
