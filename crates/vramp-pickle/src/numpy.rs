//! NumPy's arrays and scalars as a pickle describes them: element type, shape, and whether there are as many bytes as these say.
//!
//! They are data beside the weights: a damaged one is a finding, a good one is named with type and shape, and none is converted. It
//! knows the three functions that make them and no other; nothing of NumPy is ever called.

use std::collections::HashSet;

use crate::finding::Finding;
use crate::finding::{Checked, fault};
use crate::objects::Objects;
use crate::pickle::{Arena, Call, Id, Value};

/// The rule that a damaged array breaks.
pub(crate) const RULE: &str = "numpy-array";

/// Keys of more bytes are named by their beginning.
const MOST_KEY_BYTES: u32 = 1 << 12;

/// What NumPy calls types of numbers, what safetensors does or would, and bytes of an element.
const NUMBERS: &[(&str, &str, u64)] = &[
    ("b1", "BOOL", 1),
    ("i1", "I8", 1),
    ("i2", "I16", 2),
    ("i4", "I32", 4),
    ("i8", "I64", 8),
    ("u1", "U8", 1),
    ("u2", "U16", 2),
    ("u4", "U32", 4),
    ("u8", "U64", 8),
    ("f2", "F16", 2),
    ("f4", "F32", 4),
    ("f8", "F64", 8),
    ("c8", "C64", 8),
    ("c16", "C128", 16),
];

/// What a call makes.
pub(crate) struct Made {
    pub(crate) words: String,
    /// What its elements are, and its dimensions, where it is an array of numbers.
    pub(crate) numbers: Option<(bool, usize)>,
}

impl Made {
    fn plain(words: String) -> Made {
        Made { words, numbers: None }
    }

    /// Whether it could be weights beside tensors, and whether it is so by itself: a matrix of floats.
    pub(crate) fn is_like_weights(&self) -> (bool, bool) {
        match self.numbers {
            Some((is_float, rank)) => (rank > 0, is_float && rank > 1),
            None => (false, false),
        }
    }
}

/// An element type.
struct Element {
    name: String,
    /// Bytes of a number; nothing of what is no number.
    bytes: Option<u64>,
    /// Whether an array of them is a list of values of the pickle.
    is_object: bool,
    big_endian: bool,
}

/// What NumPy writes in the state of a plain element type.
struct Layout {
    /// Bytes of an element and their alignment; -1 where the type says it.
    size: [i64; 2],
    flags: &'static [i64],
}

/// That of a type by its name: a kind and its bytes, or characters.
fn layout(text: &str) -> Option<Layout> {
    let text = text.trim_start_matches(['<', '>', '=', '|']);
    let kind = text.chars().next()?;
    let count: u32 = text.get(kind.len_utf8()..)?.parse().ok()?;
    let (size, flags): (_, &[i64]) = match kind {
        'S' | 'V' => ([count.into(), 1], &[0]),
        'U' => ([i64::from(count) * 4, 4], &[0, 8]),
        'O' => ([-1; 2], &[63]),
        'b' | 'i' | 'u' | 'f' | 'c' | 'M' | 'm' => ([-1; 2], &[0]),
        _ => return None,
    };
    Some(Layout { size, flags })
}

/// Whether an element type is given a state that NumPy would not write for it. It takes the state's word for what is an address and
/// how large an element is. Fields, and arrays in each element, count as such: what they hold is not looked into.
pub(crate) fn is_forged(arena: &Arena, call: &Call) -> bool {
    let (Some(("numpy" | "ndarray", "dtype")), Some(state)) = (arena.as_global(call.function), call.state) else {
        return false;
    };
    let text = arena.as_tuple(call.arguments).and_then(|all| arena.as_text(*all.first()?));
    let (Some(layout), Some(state)) = (text.and_then(layout), arena.as_tuple(state)) else { return true };
    // Version 4 adds what else is known of it: the unit of a date.
    let [version, _, base, names, fields, size, alignment, flags, rest @ ..] = state else { return true };
    let is_known = matches!((arena.as_int(*version), rest), (Some(3), []) | (Some(4), [_]));
    let is_plain = [base, names, fields].iter().all(|part| arena.get(**part) == Value::None);
    let size = [size, alignment].map(|number| arena.as_int(*number));
    let flags = arena.as_int(*flags);
    !is_known || !is_plain || size != layout.size.map(Some) || flags.is_none_or(|flags| !layout.flags.contains(&flags))
}

/// Whether the function makes an array or a scalar.
pub(crate) fn is_numpy(module: &str, name: &str) -> bool {
    matches!(
        (module, name),
        ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct" | "scalar")
            | ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer")
    )
}

impl Objects<'_> {
    /// What the call of that function makes, in words.
    pub(crate) fn array(&self, name: &str, call: &Call) -> Checked<Made> {
        let arguments = self.arena.as_tuple(call.arguments).unwrap_or_default();
        if call.list.or(call.dict).is_some() {
            return damaged("items are set on a NumPy array");
        }
        match (name, arguments) {
            ("_reconstruct", [class, shape, _]) => match (self.arena.as_global(*class), call.state) {
                (Some(("numpy", "ndarray")), Some(state)) => self.of_state(state),
                // Without a state it is what it was made as.
                (Some(("numpy", "ndarray")), None) => {
                    let shape = self.numbers(*shape, "the shape of a NumPy array")?;
                    Ok(Made::plain(format!("a NumPy array of I8 {shape:?}")))
                }
                (Some((module, name)), _) => Ok(Made::plain(format!("a NumPy array of the class {module}.{name}"))),
                (None, _) => damaged("the class of a NumPy array is no class"),
            },
            ("_frombuffer", [bytes, dtype, shape, order]) => {
                let shape = self.numbers(*shape, "the shape of a NumPy array")?;
                let is_fortran = match self.arena.as_text(*order) {
                    Some("C") => false,
                    Some("F") => true,
                    _ => return damaged(format!("the order {} of a NumPy array", self.arena.preview(*order))),
                };
                self.checked(&shape, *dtype, is_fortran, *bytes)
            }
            // In memory its axes lie in another order: the shape there, and where each axis of the array is in it.
            ("_frombuffer", [bytes, dtype, shape, order, axes]) => {
                let shape = self.numbers(*shape, "the shape of a NumPy array")?;
                let axes = self.numbers(*axes, "the axes of a NumPy array")?;
                let dim = |axis: &u64| shape.get(usize::try_from(*axis).ok()?).copied();
                let turned: Option<Vec<u64>> = axes.iter().map(dim).collect();
                let is_whole = axes.len() == shape.len() && axes.iter().collect::<HashSet<_>>().len() == shape.len();
                match turned.filter(|_| is_whole && self.arena.as_text(*order) == Some("K")) {
                    Some(turned) => self.checked(&turned, *dtype, false, *bytes),
                    None => damaged(format!(
                        "the order {} and axes {axes:?} of a NumPy array of {} dimensions",
                        self.arena.preview(*order),
                        shape.len()
                    )),
                }
            }
            ("scalar", [dtype]) => Ok(Made::plain(format!("a NumPy scalar of {}", self.element(*dtype)?.name))),
            ("scalar", [dtype, bytes]) => {
                let element = self.element(*dtype)?;
                self.demand_bytes(&element, &[], *bytes)?;
                Ok(Made::plain(format!("a NumPy scalar of {}", element.name)))
            }
            _ => damaged(format!("numpy's {name} of {} arguments", arguments.len())),
        }
    }

    /// The state of an array: version (not in old files), shape, element type, order, bytes.
    fn of_state(&self, state: Id) -> Checked<Made> {
        let ([shape, dtype, order, bytes] | [_, shape, dtype, order, bytes]) =
            self.arena.as_tuple(state).unwrap_or_default()
        else {
            return damaged("the state of a NumPy array is no shape, type, order and bytes");
        };
        let is_fortran = match self.arena.get(*order) {
            Value::Bool(is_fortran) => is_fortran,
            Value::Int(number @ 0..=1) => number == 1,
            _ => return damaged(format!("the order {} of a NumPy array", self.arena.preview(*order))),
        };
        let shape = self.numbers(*shape, "the shape of a NumPy array")?;
        self.checked(&shape, *dtype, is_fortran, *bytes)
    }

    fn checked(&self, shape: &[u64], dtype: Id, is_fortran: bool, bytes: Id) -> Checked<Made> {
        let element = self.element(dtype)?;
        self.demand_bytes(&element, shape, bytes)?;
        let order = if is_fortran && shape.len() > 1 { ", column-major" } else { "" };
        let endian = if element.big_endian { ", big-endian" } else { "" };
        let is_float = element.name.starts_with(['F', 'C']);
        let words = format!("a NumPy array of {} {shape:?}{order}{endian}", element.name);
        Ok(Made { words, numbers: element.bytes.map(|_| (is_float, shape.len())) })
    }

    fn element(&self, dtype: Id) -> Checked<Element> {
        let arena = self.arena;
        let wrong = || damaged(format!("{} is no element type of NumPy", arena.preview(dtype)));
        let Some(call) = arena.as_call(dtype) else { return wrong() };
        let Some(("numpy" | "ndarray", "dtype")) = arena.as_global(call.function) else { return wrong() };
        let Some(text) = arena.as_tuple(call.arguments).and_then(|all| arena.as_text(*all.first()?)) else {
            return wrong();
        };
        // (version, byte order, base of a sub-array, names of fields, fields, …)
        let state = call.state.map_or(Some(&[][..]), |state| arena.as_tuple(state));
        let Some(state) = state else { return wrong() };
        let big_endian = match state.get(1).map(|order| arena.as_text(*order)) {
            None | Some(Some("<" | "|" | "=")) => false,
            Some(Some(">")) => true,
            Some(_) => return damaged("a NumPy array in an unknown byte order"),
        };
        let is_plain = state.iter().skip(2).take(3).all(|part| arena.get(*part) == Value::None);
        let text = text.trim_start_matches(['<', '>', '=', '|']);
        let number = NUMBERS.iter().find(|(numpy, ..)| *numpy == text).filter(|_| is_plain);
        Ok(match number {
            Some((_, name, bytes)) => Element {
                name: (*name).to_owned(),
                bytes: Some(*bytes),
                is_object: false,
                big_endian: big_endian && *bytes > 1,
            },
            None => Element { name: words(text), bytes: None, is_object: is_plain && is_object(text), big_endian },
        })
    }

    /// The name that a key gives which is a whole number of NumPy, or bytes: hexadecimal digits where these are not ASCII.
    pub(crate) fn plain_key(&self, id: Id) -> Option<String> {
        let arena = self.arena;
        if let Some(bytes) = bytes(arena, id) {
            let is_ascii = bytes.is_ascii();
            return Some(
                bytes
                    .iter()
                    .map(|byte| if is_ascii { char::from(*byte).into() } else { format!("{byte:02x}") })
                    .collect(),
            );
        }
        let call = arena.as_call(id)?;
        let ((module, "scalar"), [dtype, data]) = (arena.as_global(call.function)?, arena.as_tuple(call.arguments)?)
        else {
            return None;
        };
        let element = self.element(*dtype).ok().filter(|_| is_numpy(module, "scalar"))?;
        let mut bytes = bytes(arena, *data).filter(|bytes| element.bytes == Some(bytes.len() as u64))?;
        if element.big_endian {
            bytes.reverse();
        }
        let fill = match (element.name.chars().next()?, bytes.last()?) {
            ('I', 0x80..) => 0xff,
            ('I' | 'U', _) => 0,
            _ => return None,
        };
        bytes.resize(16, fill);
        Some(i128::from_le_bytes(bytes.try_into().ok()?).to_string())
    }

    /// There are as many bytes, or objects, as the shape says.
    fn demand_bytes(&self, element: &Element, shape: &[u64], data: Id) -> Checked<()> {
        let count = match shape.contains(&0) {
            true => Some(0),
            false => shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim)),
        };
        let name = &element.name;
        let (needed, found, unit) = match (element.bytes, self.arena.get(data)) {
            (Some(bytes), _) => {
                let needed = count.and_then(|count| count.checked_mul(bytes));
                (needed, lengths(self.arena, data), "bytes")
            }
            (None, Value::List(list)) if element.is_object => {
                (count, Some([self.arena.list(list).len() as u64; 2]), "objects")
            }
            (None, _) if element.is_object => {
                let what = format!("a NumPy array of objects over {}: addresses, not data", self.arena.preview(data));
                return Err(Finding::suspicious(RULE, what));
            }
            (None, _) => return Ok(()),
        };
        match (needed, found) {
            (Some(needed), Some(found)) if found.contains(&needed) => Ok(()),
            (Some(needed), Some([found, _])) => {
                damaged(format!("a NumPy array of {name} {shape:?} needs {needed} {unit} and has {found}"))
            }
            (None, _) => damaged(format!("a NumPy array of {name} {shape:?} has more than 2^64 bytes")),
            (_, None) => damaged(format!("the bytes of a NumPy array are {}", self.arena.preview(data))),
        }
    }
}

fn damaged<T>(what: impl Into<String>) -> Checked<T> {
    fault(RULE, what)
}

fn is_object(text: &str) -> bool {
    text.starts_with('O')
}

/// What is no number.
fn words(text: &str) -> String {
    match text.chars().next() {
        Some('O') => "objects".to_owned(),
        Some('S' | 'a') => "byte strings".to_owned(),
        Some('U') => "strings".to_owned(),
        Some('M') => "dates".to_owned(),
        Some('m') => "durations".to_owned(),
        Some('V') => "records".to_owned(),
        _ => format!("the type {text:?}"),
    }
}

/// How many bytes a value is. What Python 2 wrote as a string came to be text here: its bytes count then, or, where it was written
/// as Latin-1, its characters.
fn lengths(arena: &Arena, id: Id) -> Option<[u64; 2]> {
    match arena.get(id) {
        Value::Bytes(span) => Some([span.len.into(); 2]),
        Value::Text(span) => {
            let len = span.len.into();
            Some([latin1(arena.text(span)).unwrap_or(len), len])
        }
        Value::Call(_) => {
            let call = arena.as_call(id)?;
            let class = arena.as_global(call.function)?;
            match (class, arena.as_tuple(call.arguments)?) {
                (("builtins" | "__builtin__", "bytearray" | "bytes"), []) => Some([0; 2]),
                (("builtins" | "__builtin__", "bytearray" | "bytes"), [inner]) => match arena.get(*inner) {
                    Value::Bytes(span) => Some([span.len.into(); 2]),
                    _ => None,
                },
                (("builtins" | "__builtin__", "bytearray" | "bytes") | ("_codecs", "encode"), [text, _]) => {
                    Some([latin1(arena.as_text(*text)?)?; 2])
                }
                _ => None,
            }
        }
        _ => None,
    }
}

/// A short value as bytes, also as Python 3 writes them at protocol 2, and Python 2 at all.
fn bytes(arena: &Arena, id: Id) -> Option<Vec<u8>> {
    let text = match arena.get(id) {
        Value::Bytes(span) => return (span.len <= MOST_KEY_BYTES).then(|| arena.bytes(span).to_vec()),
        Value::Text(_) => id,
        _ => {
            let call = arena.as_call(id)?;
            let Some(("_codecs", "encode")) = arena.as_global(call.function) else { return None };
            *arena.as_tuple(call.arguments)?.first()?
        }
    };
    match arena.get(text) {
        Value::Text(span) if span.len <= 2 * MOST_KEY_BYTES => {
            arena.text(span).chars().map(|char| u8::try_from(char).ok()).collect()
        }
        _ => None,
    }
}

/// Bytes of a text as Latin-1; `None` where it has a character that Latin-1 lacks.
fn latin1(text: &str) -> Option<u64> {
    text.chars().try_fold(0u64, |count, char| u8::try_from(char).ok().map(|_| count + 1))
}
