//! A pickle read as data: a machine that knows every opcode and executes nothing.
//!
//! What Python would call is kept as a [`Call`] with its arguments; a class is a name ([`Global`]). Values lie in one
//! [`Arena`] and are meant by number, so that sharing costs nothing, cycles can be seen, and dropping does not recurse. Every
//! global and call that was ever pushed stays listed, also when it was popped again. It never looks a class up, never allocates
//! on the word of a length, and opens nothing. `machine` runs, `walk` finds what the result reaches, `keys` compares keys,
//! `globals` grades names, `preview` puts values in words.

mod containers;
pub(crate) mod globals;
mod input;
mod keys;
mod literals;
mod machine;
mod preview;
mod reached;
#[cfg(test)]
mod tests;
mod text;
mod walk;

pub use globals::Danger;
pub use machine::{run, run_skipping};
pub use reached::Walk;
pub use walk::walk;
pub(crate) use walk::{Sight, walk_within};

use crate::finding::Severity;

/// The longest pickle that is read, in bytes.
pub const MAX_PICKLE_BYTES: u64 = 512 << 20;
/// Values, memo entries and containers that one pickle may make: bytes bound them too, but not tightly enough.
pub(crate) const MAX_VALUES: usize = 8 << 20;
pub(crate) const MAX_MEMO: usize = 4 << 20;
pub(crate) const MAX_CONTAINERS: usize = 4 << 20;
pub(crate) const MAX_ITEMS: usize = 32 << 20;
pub(crate) const MAX_STACK: usize = 4 << 20;
/// Names that are kept; above it only those that are known to run code are, and as many again.
pub(crate) const MAX_GLOBALS: usize = 1 << 20;
/// Containers inside each other that are followed.
pub const MAX_DEPTH: usize = 1000;
/// Values that a walk meets when shared ones count each time.
pub(crate) const MAX_EXPANDED: u64 = 64 << 20;
/// The widest integer that is no finding, in bytes.
pub(crate) const MAX_INTEGER_BYTES: usize = 128;

/// The number of a value in its [`Arena`].
pub type Id = u32;

/// A range of the arena's text or items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Span {
    pub(crate) start: u32,
    pub(crate) len: u32,
}

/// One value. Containers and calls lie beside it in the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer of up to 64 bits.
    Int(i64),
    /// A wider one, two's complement, little-endian.
    Big(Span),
    /// A floating-point number.
    Float(f64),
    /// Text, UTF-8.
    Text(Span),
    /// Bytes, also those of a `bytearray`.
    Bytes(Span),
    /// A tuple, by its items.
    Tuple(Span),
    /// A frozen set, by its items.
    FrozenSet(Span),
    /// A list.
    List(u32),
    /// A set.
    Set(u32),
    /// A dictionary.
    Dict(u32),
    /// The name of something that Python would import.
    Global(u32),
    /// What a loader must resolve itself: a storage.
    Persistent(Id),
    /// Something that Python would call.
    Call(u32),
    /// What only running the pickle would tell. Where there is one the pickle is refused.
    Unknown,
}

/// A name that Python would import.
#[derive(Debug, Clone, Copy)]
pub struct Global {
    pub(crate) module: Span,
    pub(crate) name: Span,
    /// Offset in bytes of the opcode.
    pub(crate) offset: u32,
    /// The opcode.
    pub(crate) opcode: &'static str,
    /// The value that means it.
    pub(crate) id: Id,
}

/// Something that Python would call, and what it would then do with the result.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub(crate) function: Id,
    pub(crate) arguments: Id,
    /// The state that `BUILD` would give it.
    pub(crate) state: Option<Id>,
    /// Offset in bytes of that opcode.
    pub(crate) state_offset: u32,
    /// Whether it is given a state more than once.
    pub(crate) is_rebuilt: bool,
    /// Items that would be appended, and pairs that would be set.
    pub(crate) list: Option<u32>,
    pub(crate) dict: Option<u32>,
    pub(crate) offset: u32,
    pub(crate) opcode: &'static str,
    pub(crate) id: Id,
}

/// What is wrong with a pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The stable name of the rule.
    pub rule: &'static str,
    /// Suspicious where only someone who means harm writes so; otherwise it is damage, or merely odd.
    pub severity: Severity,
    /// Offset in bytes of the opcode, where it is about one.
    pub offset: Option<u64>,
    /// What is wrong, in words.
    pub what: String,
}

impl Broken {
    /// Whether there is no result because of it.
    pub fn blocks(&self) -> bool {
        self.severity.blocks()
    }
}

/// The offset of values that no opcode made.
pub(crate) const NO_OFFSET: u32 = u32::MAX;

/// All values of one pickle.
#[derive(Debug, Default)]
pub struct Arena {
    /// The pickle.
    pub(crate) bytes: Vec<u8>,
    /// Text that had to be decoded: it counts as standing behind the pickle.
    pub(crate) extra: Vec<u8>,
    pub(crate) values: Vec<Value>,
    /// Offset in bytes of the opcode that made each value.
    pub(crate) offsets: Vec<u32>,
    pub(crate) items: Vec<Id>,
    pub(crate) lists: Vec<Vec<Id>>,
    pub(crate) dicts: Vec<Vec<(Id, Id)>>,
    /// Offset in bytes of the last opcode that put something into each list and dictionary; 0 where none did.
    pub(crate) lists_changed: Vec<u32>,
    pub(crate) dicts_changed: Vec<u32>,
    pub(crate) globals: Vec<Global>,
    pub(crate) calls: Vec<Call>,
}

/// What running a pickle gave.
#[derive(Debug)]
pub struct Ran {
    /// Every value that was pushed.
    pub arena: Arena,
    /// The result, unless something is wrong.
    pub result: Option<Id>,
    /// One past its last byte.
    pub end: usize,
    /// Bytes that it would have at least, where it ended too early.
    pub wants: u64,
    /// Whether it was read to its STOP.
    pub stopped: bool,
    /// The protocol that it states; 0 where it states none.
    pub protocol: u8,
    /// What is wrong, the first of each kind.
    pub faults: Vec<Broken>,
}

fn of_span<'a>(bytes: &'a [u8], extra: &'a [u8], span: Span) -> &'a [u8] {
    let start = span.start as usize;
    let (bytes, start) = start.checked_sub(bytes.len()).map_or((bytes, start), |start| (extra, start));
    bytes.get(start..start.saturating_add(span.len as usize)).unwrap_or_default()
}

impl Arena {
    /// The value of that number.
    pub fn get(&self, id: Id) -> Value {
        self.values.get(id as usize).copied().unwrap_or(Value::None)
    }

    /// Offset in bytes of the opcode that made the value, where one did.
    pub fn offset(&self, id: Id) -> Option<u64> {
        self.offsets.get(id as usize).filter(|offset| **offset != NO_OFFSET).map(|offset| (*offset).into())
    }

    /// The bytes of a span.
    pub fn bytes(&self, span: Span) -> &[u8] {
        of_span(&self.bytes, &self.extra, span)
    }

    /// The text of a span: checked when it was pushed.
    pub fn text(&self, span: Span) -> &str {
        std::str::from_utf8(self.bytes(span)).unwrap_or_default()
    }

    /// A value as text.
    pub fn as_text(&self, id: Id) -> Option<&str> {
        match self.get(id) {
            Value::Text(span) => Some(self.text(span)),
            _ => None,
        }
    }

    /// A value as an integer.
    pub fn as_int(&self, id: Id) -> Option<i64> {
        match self.get(id) {
            Value::Int(number) => Some(number),
            _ => None,
        }
    }

    /// The items of a tuple.
    pub fn as_tuple(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Value::Tuple(span) => Some(self.items(span)),
            _ => None,
        }
    }

    /// The items of a tuple or a list.
    pub fn as_sequence(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Value::List(list) => Some(self.list(list)),
            _ => self.as_tuple(id),
        }
    }

    /// The pairs of a dictionary, or those that were set on a call's result.
    pub fn as_dict(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.get(id) {
            Value::Dict(dict) => Some(self.dict(dict)),
            Value::Call(_) => Some(self.as_call(id)?.dict.map_or(&[], |dict| self.dict(dict))),
            _ => None,
        }
    }

    /// A value as a call.
    pub fn as_call(&self, id: Id) -> Option<&Call> {
        match self.get(id) {
            Value::Call(call) => self.calls.get(call as usize),
            _ => None,
        }
    }

    /// A value as the name of a global. Old PyTorch writes the class of a module as `("module", class, file, source)`.
    pub fn as_global(&self, id: Id) -> Option<(&str, &str)> {
        let global = match self.get(id) {
            Value::Persistent(inner) => match self.as_tuple(inner)? {
                [word, class, ..] if self.as_text(*word) == Some("module") => *class,
                _ => return None,
            },
            _ => id,
        };
        match self.get(global) {
            Value::Global(at) => self.globals.get(at as usize).map(|global| self.names(global)),
            _ => None,
        }
    }

    /// Module and name.
    pub fn names(&self, global: &Global) -> (&str, &str) {
        (self.text(global.module), self.text(global.name))
    }

    pub(crate) fn items(&self, span: Span) -> &[Id] {
        let start = span.start as usize;
        self.items.get(start..start.saturating_add(span.len as usize)).unwrap_or_default()
    }

    pub(crate) fn list(&self, at: u32) -> &[Id] {
        self.lists.get(at as usize).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn dict(&self, at: u32) -> &[(Id, Id)] {
        self.dicts.get(at as usize).map_or(&[], Vec::as_slice)
    }

    /// The value of a text key in a dictionary.
    pub(crate) fn member(&self, dict: Id, key: &str) -> Option<Id> {
        self.as_dict(dict)?.iter().find(|(found, _)| self.as_text(*found) == Some(key)).map(|(_, value)| *value)
    }
}
