//! What an operation in a stream does, as data.
//!
//! Built by the entry points, carried by `stream`, done by `execute`.

use std::ffi::c_void;

use crate::footprint::Footprint;
use crate::kernel::Run;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    HostToDevice,
    DeviceToHost,
    WithinDevice,
}

/// Rows of bytes to move. One row is a plain copy.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) direction: Direction,
    pub(crate) source: u64,
    pub(crate) source_pitch: u64,
    pub(crate) target: u64,
    pub(crate) target_pitch: u64,
    pub(crate) width: u64,
    pub(crate) rows: u64,
    /// What the pinned source held when the copy was queued.
    pub(crate) snapshot: Option<Vec<u8>>,
    /// Spoil one bit.
    pub(crate) flip: bool,
}

/// Bytes to set: `pattern` over and over.
#[derive(Debug)]
pub(crate) struct Fill {
    pub(crate) target: u64,
    pub(crate) bytes: u64,
    pub(crate) pattern: [u8; 4],
}

/// A function of the program to call.
#[derive(Debug)]
pub(crate) struct HostCall {
    pub(crate) function: unsafe extern "C" fn(*mut c_void),
    pub(crate) argument: usize,
}

/// The work of one operation.
pub(crate) enum Work {
    Copy(Box<Copy>),
    Fill(Fill),
    Kernel(Box<Run>),
    Host(HostCall),
    /// Give an allocation back.
    Free(u64),
    /// Note the time in an event, if it still is at this recording.
    Stamp {
        event: u64,
        generation: u64,
    },
    Nothing,
}

impl Work {
    /// Whether a device could fail at it.
    pub(crate) fn can_fail(&self) -> bool {
        matches!(self, Work::Copy(_) | Work::Fill(_) | Work::Kernel(_))
    }
}

impl Copy {
    /// Whether both sides end before the address space does.
    pub(crate) fn fits(&self) -> bool {
        let side = |start: u64, pitch: u64| pitch.checked_mul(self.rows).and_then(|bytes| start.checked_add(bytes));
        let sides = [side(self.source, self.source_pitch), side(self.target, self.target_pitch)];
        sides.iter().all(Option::is_some) && self.width.checked_mul(self.rows).is_some()
    }

    /// Number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.width * self.rows
    }

    pub(crate) fn source_footprint(&self) -> Footprint {
        Footprint::rows(self.source, self.width, self.source_pitch, self.rows)
    }

    pub(crate) fn target_footprint(&self) -> Footprint {
        Footprint::rows(self.target, self.width, self.target_pitch, self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_without_gaps_are_one_range() {
        let copy = Copy {
            direction: Direction::WithinDevice,
            source: 100,
            source_pitch: 8,
            target: 200,
            target_pitch: 16,
            width: 8,
            rows: 3,
            snapshot: None,
            flip: false,
        };
        assert_eq!(copy.bytes(), 24);
        assert_eq!(copy.source_footprint().ranges().collect::<Vec<_>>(), vec![100..124]);
        assert_eq!(copy.target_footprint().bounds(), 200..240);
    }
}
