//! Calls of names that are data and would nonetheless do harm: for their arguments, or because they call something else.
//!
//! Arguments are judged as they stand in the pickle. Nothing is called, and nothing is made of the sizes that are named.

use std::collections::{HashMap, HashSet};

use crate::pickle::{Arena, Call, Id, Value, globals};
use crate::{nested, numpy};

/// Items or bytes that one call may make of a few bytes of pickle.
const MOST_ITEMS: u128 = 1 << 26;
/// Calls that name what they call, inside each other.
const MAX_WRAPPERS: usize = 8;

/// Protocols 0 and 1 name it as the base of a class; made itself it is nothing that is known.
const OBJECT: &str = "calls builtins.object, which is no data";
const ENCODING: &str = "an encoding other than Latin-1";
const CALLED: &str = "the result of a call is called";
const HIDDEN: &str = "a call of something that is not named where it is called";
const FORGED: &str =
    "a state that NumPy would not write for this element type, or fields: programs could take its data for addresses";
const SIZE: &str =
    "a few bytes that Python would make more than 67,108,864 items of, or a number of items that is not known";

const APPENDED: &str =
    "items are appended to the result of a call that makes no list: its own `append` would be called";
const SET: &str = "items are set on the result of a call that makes no dictionary";
const CHANGED: &str = "an argument or a state that is changed after the call that took it: Python has used it as it was, others read it as it is";
const TWICE: &str = "a state is given twice";
const METHOD: &str = "a state that replaces a method which an unpickler would call";

/// Methods that an unpickler, or what it makes, looks up on objects and calls.
const METHODS: &[&str] = &["append", "extend", "add", "update", "keys", "items", "get", "detach", "tolist"];

/// Lists and tuples within the arguments of a call, its own among them, that it may look into.
const MOST_LEVELS: u8 = 4;
/// Longer lists are looked through once, whoever shares them.
const SHORT_LIST: usize = 8;

/// What is wrong with calls. States and lists that many of them share are looked at once.
pub(crate) struct Judge<'a> {
    arena: &'a Arena,
    states: HashSet<Id>,
    /// When long lists changed for the last time, by how many levels count.
    changed: HashMap<(Id, u8), u32>,
}

impl<'a> Judge<'a> {
    pub(crate) fn new(arena: &'a Arena) -> Judge<'a> {
        Judge { arena, states: HashSet::new(), changed: HashMap::new() }
    }

    /// The rule that a call breaks, and what is wrong with it, if something is.
    pub(crate) fn objection(&mut self, call: &Call) -> Option<(&'static str, &'static str)> {
        match named(self.arena, call.function) {
            Some(("builtins", "object")) => Some(("global-not-allowed", OBJECT)),
            _ if numpy::is_forged(self.arena, call) => Some(("numpy-dtype", FORGED)),
            _ if call.is_rebuilt => Some(("build-target", TWICE)),
            name => {
                let denied =
                    denied(self.arena, call).map(|what| ("argument-denied", what)).or_else(|| filled(name, call));
                let denied = denied.or_else(|| self.state(name, call).map(|what| ("argument-denied", what)));
                denied.or_else(|| self.is_changed(call).then_some(("argument-changed", CHANGED)))
            }
        }
    }

    /// Whether what a call was given is another one when the pickle ends.
    fn is_changed(&mut self, call: &Call) -> bool {
        self.changed(call.arguments, MOST_LEVELS) > call.offset
            || call.state.is_some_and(|state| self.changed(state, 2) > call.state_offset)
    }

    /// Whether one of these arguments is another one when the pickle ends than it was for a call at that offset.
    pub(crate) fn any_changed(&mut self, arguments: &[Id], offset: u32) -> bool {
        arguments.iter().any(|argument| self.changed(*argument, MOST_LEVELS - 1) > offset)
    }

    /// Where in the pickle a value is changed for the last time, down to so many levels of lists and tuples.
    fn changed(&mut self, id: Id, levels: u8) -> u32 {
        let arena = self.arena;
        let last = |at: Option<u32>, all: &[u32]| at.and_then(|at| all.get(at as usize).copied()).unwrap_or(0);
        let own = match arena.get(id) {
            Value::List(list) | Value::Set(list) => last(Some(list), &arena.lists_changed),
            Value::Dict(dict) => last(Some(dict), &arena.dicts_changed),
            // Who is given what a call makes may copy what lies in it.
            Value::Call(_) => arena
                .as_call(id)
                .map_or(0, |call| last(call.list, &arena.lists_changed).max(last(call.dict, &arena.dicts_changed))),
            _ => 0,
        };
        let items = arena.as_sequence(id).filter(|_| levels > 1).unwrap_or_default();
        if items.len() > SHORT_LIST
            && let Some(known) = self.changed.get(&(id, levels))
        {
            return *known;
        }
        let latest = items.iter().fold(own, |latest, item| latest.max(self.changed(*item, levels - 1)));
        if items.len() > SHORT_LIST {
            self.changed.insert((id, levels), latest);
        }
        latest
    }

    fn state(&mut self, name: Option<(&str, &str)>, call: &Call) -> Option<&'static str> {
        let given = match name {
            Some((_, "_rebuild_from_type_v2" | "_rebuild_parameter_with_state")) => {
                self.arena.as_sequence(call.arguments).and_then(|given| given.get(3).copied())
            }
            _ => None,
        };
        let states = call.state.into_iter().chain(given);
        self.replaces_method(states.collect()).then_some(METHOD)
    }

    /// Looks through dictionaries, tuples (members, slots) and what calls make dictionaries of: others, lists of pairs.
    fn replaces_method(&mut self, mut open: Vec<Id>) -> bool {
        let arena = self.arena;
        while let Some(id) = open.pop() {
            if !self.states.insert(id) {
                continue;
            }
            let pairs = arena.as_dict(id).unwrap_or_default().iter().copied();
            let items = arena.as_sequence(id).unwrap_or_default().iter();
            let listed = items.filter_map(|item| match arena.as_sequence(*item) {
                Some([key, value]) => Some((*key, *value)),
                _ => None,
            });
            if pairs.chain(listed).any(|(key, value)| is_method(arena, key, value)) {
                return true;
            }
            open.extend(arena.as_tuple(id).unwrap_or_default());
            open.extend(arena.as_call(id).map(|call| call.arguments));
        }
        false
    }
}

fn named(arena: &Arena, id: Id) -> Option<(&str, &str)> {
    arena.as_global(id).map(|(module, name)| (globals::modern(module), name))
}

/// Items that are put into what is not known to hold them.
fn filled(name: Option<(&str, &str)>, call: &Call) -> Option<(&'static str, &'static str)> {
    let list = matches!(name, Some(("collections", "deque") | ("builtins", "list" | "set" | "bytearray")));
    let dict = matches!(name, Some(("collections", "OrderedDict" | "Counter" | "defaultdict") | ("builtins", "dict")));
    match (call.list, call.dict) {
        (Some(_), _) if !list => Some(("append-target", APPENDED)),
        (_, Some(_)) if !dict && !list => Some(("setitem-target", SET)),
        _ => None,
    }
}

fn is_method(arena: &Arena, key: Id, value: Id) -> bool {
    let callable = matches!(arena.get(value), Value::Global(_) | Value::Call(_) | Value::Unknown);
    arena.as_text(key).is_some_and(|key| key.starts_with("__") || (callable && METHODS.contains(&key)))
}

fn denied(arena: &Arena, call: &Call) -> Option<&'static str> {
    let (mut function, mut arguments) = (call.function, call.arguments);
    if call.opcode == "NEWOBJ_EX" {
        arguments = arena.as_tuple(arguments).and_then(|both| both.first().copied()).unwrap_or(arguments);
    }
    for _ in 0..MAX_WRAPPERS {
        let Some((module, name)) = arena.as_global(function) else {
            let is_class = arena.as_call(function).is_some_and(|call| nested::named(arena, call).is_some());
            return (!is_class).then_some(CALLED);
        };
        let given = arena.as_sequence(arguments);
        (function, arguments) = match (globals::modern(module), name, given) {
            // They call their first argument with the third.
            ("torch._tensor" | "torch.tensor", "_rebuild_from_type_v2" | "_rebuild_from_type", given) => match given {
                Some([function, _, arguments, ..]) => (*function, *arguments),
                _ => return Some(HIDDEN),
            },
            // It makes its first argument by the second's `__new__` and the third.
            ("copyreg", "_reconstructor", Some([_, base, state])) => {
                return arena.as_global(*base).and_then(|base| too_large(arena, base, &[*state]));
            }
            ("_codecs", "encode", given) => return (!is_latin1(arena, given)).then_some(ENCODING),
            (module, name, given) => return too_large(arena, (module, name), given.unwrap_or_default()),
        };
    }
    Some(HIDDEN)
}

fn is_latin1(arena: &Arena, given: Option<&[Id]>) -> bool {
    let Some([text, encoding]) = given else { return false };
    arena.as_text(*text).is_some() && matches!(arena.as_text(*encoding), Some("latin1" | "latin-1"))
}

/// What would take memory without bound.
fn too_large(arena: &Arena, (module, name): (&str, &str), given: &[Id]) -> Option<&'static str> {
    let items = match (globals::modern(module), name) {
        ("builtins", "range" | "xrange") => range(arena, given),
        ("builtins", "bytes" | "bytearray") => given.first().map_or(Some(0), |first| length(arena, *first)),
        ("numpy", "ndarray") => product(arena, given.get(..1).unwrap_or_default()),
        (module, "_reconstruct") if module.starts_with("numpy") => product(arena, given.get(1..2).unwrap_or_default()),
        ("torch", name) if name.ends_with("Tensor") || name.ends_with("Storage") => product(arena, given),
        ("torch.storage" | "torch.cuda", _) => product(arena, given),
        _ => Some(0),
    };
    items.is_none_or(|items| items > MOST_ITEMS).then_some(SIZE)
}

/// Items of a range; `None` where that cannot be said.
fn range(arena: &Arena, given: &[Id]) -> Option<u128> {
    let numbers: Option<Vec<i128>> = given.iter().map(|id| arena.as_int(*id).map(i128::from)).collect();
    let (start, stop, step) = match numbers?.as_slice() {
        [stop] => (0, *stop, 1),
        [start, stop] => (*start, *stop, 1),
        [start, stop, step] => (*start, *stop, *step),
        _ => return Some(0),
    };
    let (way, step) = if step < 0 { (start - stop, step.unsigned_abs()) } else { (stop - start, step.unsigned_abs()) };
    Some(u128::try_from(way).unwrap_or(0).div_ceil(step.max(1)))
}

/// Bytes that a call of `bytes` makes of its argument beyond those that it is given.
fn length(arena: &Arena, argument: Id) -> Option<u128> {
    match arena.get(argument) {
        Value::Int(number) => Some(u128::try_from(number).unwrap_or(0)),
        Value::Big(_) | Value::Unknown | Value::Persistent(_) => None,
        Value::Call(_) => {
            let (module, name) = arena.as_global(arena.as_call(argument)?.function)?;
            let is_data = match globals::modern(module) {
                "_codecs" => name == "encode",
                "builtins" => {
                    matches!(name, "bytes" | "bytearray" | "list" | "tuple" | "set" | "frozenset" | "range" | "str")
                }
                _ => false,
            };
            is_data.then_some(0)
        }
        _ => Some(0),
    }
}

/// The product of whole numbers, and of those in sequences: a shape.
fn product(arena: &Arena, given: &[Id]) -> Option<u128> {
    let mut product = 1u128;
    for id in given {
        let numbers = arena.as_sequence(*id).unwrap_or(std::slice::from_ref(id));
        for number in numbers {
            product = match arena.get(*number) {
                Value::Int(number) => product.saturating_mul(u128::try_from(number).unwrap_or(0)),
                Value::Big(_) => return None,
                _ => product,
            };
        }
    }
    Some(product)
}
