//! Handles: opaque numbers that say what they are of, and whether they are of an earlier life of the double.
//!
//! No handle is given out twice in a process, so that one kept too long is noticed and never hits another object.

/// What a handle is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Stream = 5,
    Event = 6,
    Module = 7,
    Function = 8,
    Context = 9,
    Pool = 10,
}

/// What a number turns out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// A handle of this life; whether it is alive is another question.
    Number(u64),
    /// A handle of an earlier life.
    Stale,
    /// No handle of this sort.
    Foreign,
}

/// Gives handles out.
#[derive(Debug, Clone)]
pub(crate) struct Handles {
    next: u64,
    first: u64,
}

impl Default for Handles {
    fn default() -> Handles {
        Handles { next: 1, first: 1 }
    }
}

impl Handles {
    /// A number that was never given out.
    pub(crate) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The same, for a new life.
    pub(crate) fn reborn(&self) -> Handles {
        Handles { next: self.next, first: self.next }
    }

    /// The pointer that a program gets.
    pub(crate) fn pointer<T>(sort: Sort, number: u64) -> *mut T {
        (((sort as u64) << 40) | (number << 4)) as *mut T
    }

    /// The number behind a program's pointer.
    pub(crate) fn number<T>(&self, sort: Sort, pointer: *mut T) -> Seen {
        let value = pointer as u64;
        let number = (value & ((1 << 40) - 1)) >> 4;
        match value >> 40 == sort as u64 && value & 15 == 0 && number < self.next {
            false => Seen::Foreign,
            true if number < self.first => Seen::Stale,
            true => Seen::Number(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_knows_its_sort_and_its_life() {
        let mut handles = Handles::default();
        let number = handles.fresh();
        let pointer: *mut u8 = Handles::pointer(Sort::Event, number);
        assert_eq!(handles.number(Sort::Event, pointer), Seen::Number(number));
        assert_eq!(handles.number(Sort::Stream, pointer), Seen::Foreign);
        assert_eq!(handles.number(Sort::Event, pointer.wrapping_add(16)), Seen::Foreign);
        assert_eq!(handles.reborn().number(Sort::Event, pointer), Seen::Stale);
    }
}
