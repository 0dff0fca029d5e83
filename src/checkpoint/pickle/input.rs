//! The bytes of a pickle, read opcode by opcode: lengths are compared with what is there, and frames are held to.
//!
//! It allocates nothing and knows no opcode's meaning.

use super::{Broken, Span};

/// Where the machine is in the bytes.
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    pub(super) at: usize,
    /// Where the opcode began that is being read.
    pub(super) opcode_at: usize,
    /// One past the last byte of the frame, where the pickle has one open.
    frame_end: Option<usize>,
}

/// What the readers return.
pub(super) type Read<T> = Result<T, Broken>;

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Input<'a> {
        Input { bytes, at, opcode_at: at, frame_end: None }
    }

    /// A fault at the opcode that is being read.
    pub(super) fn broken(&self, rule: &'static str, what: impl Into<String>) -> Broken {
        Broken { rule, suspicious: false, offset: self.opcode_at as u64, what: what.into() }
    }

    /// The same, of a kind that no honest writer makes.
    pub(super) fn hostile(&self, rule: &'static str, what: impl Into<String>) -> Broken {
        Broken { suspicious: true, ..self.broken(rule, what) }
    }

    /// The next opcode.
    pub(super) fn opcode(&mut self) -> Read<u8> {
        self.opcode_at = self.at;
        if self.frame_end == Some(self.at) {
            self.frame_end = None;
        }
        match self.bytes.get(self.at) {
            None => Err(self.broken("truncated", "the pickle ends without STOP")),
            Some(&opcode) => {
                self.at += 1;
                Ok(opcode)
            }
        }
    }

    /// The next `len` bytes, of whichever length the file states.
    pub(super) fn take(&mut self, len: u64) -> Read<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        let fits = usize::try_from(len).ok().filter(|&len| len <= left);
        let Some(len) = fits else {
            return Err(self.broken("truncated", format!("{len} bytes are announced, {left} are left")));
        };
        let end = self.at + len;
        self.demand_in_frame(end)?;
        let taken = self.bytes.get(self.at..end).unwrap_or_default();
        self.at = end;
        Ok(taken)
    }

    /// The same, as a span.
    pub(super) fn span(&mut self, len: u64) -> Read<Span> {
        let start = self.at;
        let taken = self.take(len)?;
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

    /// The rest of the line, without its end.
    pub(super) fn line(&mut self) -> Read<Span> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some(len) = rest.iter().position(|&byte| byte == b'\n') else {
            return Err(self.broken("truncated", "a line has no end"));
        };
        let span = self.span(len as u64)?;
        self.take(1)?;
        Ok(span)
    }

    /// Opens a frame of `len` bytes.
    pub(super) fn frame(&mut self, len: u64) -> Read<()> {
        if self.frame_end.is_some_and(|end| end != self.at) {
            return Err(self.hostile("frame", "a frame begins within another"));
        }
        let left = (self.bytes.len() - self.at) as u64;
        if len > left {
            return Err(self.hostile("frame", format!("a frame of {len} bytes, {left} are left")));
        }
        self.frame_end = usize::try_from(len).ok().map(|len| self.at + len);
        Ok(())
    }

    fn demand_in_frame(&self, end: usize) -> Read<()> {
        match self.frame_end {
            Some(frame) if end > frame => {
                Err(self.hostile("frame", format!("an opcode crosses the frame's end at {frame}")))
            }
            _ => Ok(()),
        }
    }
}
