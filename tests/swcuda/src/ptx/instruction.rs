//! Instructions as they are executed: every operand is the place of a register, every choice is made. `decode` makes them.

#[derive(Debug)]
pub(super) struct Instruction {
    /// The predicate that must be true, or false if the flag is set.
    pub(super) guard: Option<(u32, bool)>,
    pub(super) operation: Operation,
    /// Index of the statement it came from.
    pub(super) statement: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Unsigned,
    Signed,
    Bits,
    Float,
    Predicate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Type {
    pub(super) kind: Kind,
    pub(super) bits: u32,
}

impl Type {
    /// `u32`, `f64`, `pred`, …, without the dot.
    pub(super) fn parse(text: &str) -> Option<Type> {
        if text == "pred" {
            return Some(Type { kind: Kind::Predicate, bits: 1 });
        }
        let kind = match text.chars().next()? {
            'u' => Kind::Unsigned,
            's' => Kind::Signed,
            'b' => Kind::Bits,
            'f' => Kind::Float,
            _ => return None,
        };
        let bits = ["8", "16", "32", "64"].contains(&&text[1..]).then(|| text[1..].parse().ok())??;
        Some(Type { kind, bits })
    }

    pub(super) fn bytes(self) -> usize {
        self.bits as usize / 8
    }

    /// The bits that a value of this type has.
    pub(super) fn mask(self) -> u64 {
        mask(self.bits)
    }

    pub(super) fn is_signed(self) -> bool {
        self.kind == Kind::Signed
    }

    pub(super) fn is_integer(self) -> bool {
        matches!(self.kind, Kind::Unsigned | Kind::Signed | Kind::Bits)
    }
}

/// The lowest `bits` bits, 1 to 64.
pub(super) fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// A register plus an offset that may wrap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    pub(super) base: u32,
    pub(super) offset: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    /// Device memory: `.global`, and generic addresses, which are the same here.
    Global,
    Shared,
}

/// Up to four registers, of a vector or of parts of one register.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    all: [u32; 4],
    len: u8,
}

impl Places {
    pub(super) fn new(places: &[u32]) -> Result<Places, String> {
        let (len, mut all) = (places.len(), [0; 4]);
        if ![1, 2, 4].contains(&len) {
            return Err(format!("a vector of {len}"));
        }
        all[..len].copy_from_slice(places);
        Ok(Places { all, len: len as u8 })
    }

    pub(super) fn as_slice(&self) -> &[u32] {
        &self.all[..usize::from(self.len)]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Subtract,
    Multiply,
    MultiplyHigh,
    Divide,
    Remainder,
    Minimum,
    Maximum,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unary {
    Not,
    Negate,
    Absolute,
    CountOnes,
    CountLeadingZeros,
    ReverseBits,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FloatBinary {
    Add,
    Subtract,
    Multiply,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Shuffle {
    pub(super) mode: ShuffleMode,
    pub(super) target: u32,
    /// Whether the source lane was in range.
    pub(super) in_range: Option<u32>,
    pub(super) value: u32,
    pub(super) lane: u32,
    pub(super) clamp: u32,
    pub(super) members: u32,
}

/// What an instruction does. Places: `d` target, `a`, `b`, `c` sources.
#[derive(Debug)]
pub(super) enum Operation {
    Parameter {
        ty: Type,
        target: Places,
        offset: usize,
    },
    Load {
        space: Space,
        ty: Type,
        target: Places,
        address: Address,
    },
    Store {
        space: Space,
        ty: Type,
        source: Places,
        address: Address,
    },
    AtomicAdd {
        ty: Type,
        d: Option<u32>,
        address: Address,
        a: u32,
    },
    Move {
        ty: Type,
        d: u32,
        a: u32,
    },
    /// A register into equal parts, the lowest first.
    Split {
        ty: Type,
        parts: Places,
        a: u32,
    },
    Join {
        ty: Type,
        d: u32,
        parts: Places,
    },
    Unary {
        what: Unary,
        ty: Type,
        d: u32,
        a: u32,
    },
    Binary {
        what: Binary,
        ty: Type,
        d: u32,
        a: u32,
        b: u32,
    },
    /// F32 to F64.
    Widen {
        d: u32,
        a: u32,
    },
    Float {
        what: FloatBinary,
        bits: u32,
        d: u32,
        a: u32,
        b: u32,
    },
    MultiplyAdd {
        ty: Type,
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    /// The product has twice the bits of its factors.
    MultiplyWide {
        ty: Type,
        d: u32,
        a: u32,
        b: u32,
        c: Option<u32>,
    },
    FunnelShift {
        left: bool,
        clamp: bool,
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    ExtractBits {
        ty: Type,
        d: u32,
        a: u32,
        position: u32,
        len: u32,
    },
    InsertBits {
        ty: Type,
        d: u32,
        a: u32,
        b: u32,
        position: u32,
        len: u32,
    },
    Permute {
        d: u32,
        a: u32,
        b: u32,
        selector: u32,
    },
    Logic3 {
        d: u32,
        a: u32,
        b: u32,
        c: u32,
        table: u32,
    },
    Select {
        ty: Type,
        d: u32,
        a: u32,
        b: u32,
        predicate: u32,
    },
    Compare {
        what: Comparison,
        ty: Type,
        d: u32,
        a: u32,
        b: u32,
    },
    Convert {
        to: Type,
        from: Type,
        d: u32,
        a: u32,
    },
    Branch {
        target: u32,
    },
    Exit,
    Barrier,
    Shuffle(Shuffle),
    /// A fence: one thread runs at a time and its writes are seen at once.
    Nothing,
}
