//! Classes within classes, and members of enumerations, as pickles of the protocols 0 to 3 name them: `getattr(Class, "Nested")`.
//!
//! `builtins.getattr` can reach anything, and is known to run code. Called with a class that is not known to do so, and with a plain
//! name that stands in the pickle, it is the name `Class.Nested` and no more. Nothing is resolved.

use std::collections::HashSet;

use crate::pickle::{Arena, Call, Danger, Id, Value, globals};

/// Names within each other.
const MOST_LEVELS: usize = 8;

/// Module and dotted name of what a value names: a global, or a plain `getattr` of one.
pub(crate) fn path(arena: &Arena, id: Id) -> Option<(&str, String)> {
    let (mut parts, mut at) = (Vec::new(), id);
    loop {
        if let Some((module, name)) = arena.as_global(at) {
            parts.push(name);
            parts.reverse();
            return Some((module, parts.join(".")));
        }
        let call = arena.as_call(at).filter(|call| parts.len() < MOST_LEVELS && is_getattr(arena, call.function))?;
        let [base, name] = arena.as_tuple(call.arguments)? else { return None };
        parts.push(arena.as_text(*name).filter(|name| is_plain(name))?);
        at = *base;
    }
}

/// The name that a call of `getattr` means, where it is one that is not known to run code.
pub(crate) fn named<'a>(arena: &'a Arena, call: &Call) -> Option<(&'a str, String, Danger)> {
    if call.list.or(call.dict).or(call.state).is_some() || !is_getattr(arena, call.function) {
        return None;
    }
    let (module, name) = path(arena, call.id)?;
    let danger = globals::danger_of_path(module, &name);
    (danger != Danger::Dangerous).then_some((module, name, danger))
}

/// The globals `getattr` that are called and used for nothing else than such names.
pub(crate) fn only_names(arena: &Arena) -> HashSet<Id> {
    let is_it = |id: &Id| matches!(arena.get(*id), Value::Global(_)) && is_getattr(arena, *id);
    let all: HashSet<Id> = arena.globals.iter().map(|global| global.id).filter(is_it).collect();
    if all.is_empty() {
        return all;
    }
    let calls = || arena.calls.iter();
    let mut names: HashSet<Id> = calls().map(|call| call.function).filter(|function| all.contains(function)).collect();
    let misused = calls().filter(|call| names.contains(&call.function) && named(arena, call).is_none());
    let mut other: HashSet<Id> = misused.map(|call| call.function).collect();
    let passed = arena.values.iter().filter_map(|value| match value {
        Value::Persistent(inner) => Some(*inner),
        _ => None,
    });
    let passed = passed.chain(calls().flat_map(|call| call.state.into_iter().chain([call.arguments])));
    let passed = passed.chain(arena.items.iter().copied()).chain(arena.lists.iter().flatten().copied());
    other.extend(passed.chain(arena.dicts.iter().flatten().flat_map(|(key, value)| [*key, *value])));
    names.retain(|id| !other.contains(id));
    names
}

fn is_getattr(arena: &Arena, id: Id) -> bool {
    arena.as_global(id).is_some_and(|(module, name)| (globals::modern(module), name) == ("builtins", "getattr"))
}

/// A name as Python would write it after a dot, none with a meaning of its own.
fn is_plain(name: &str) -> bool {
    let mut letters = name.chars();
    let first = letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_');
    first && !name.starts_with("__") && name.len() <= 200 && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A `torch.Size`, or a tuple or list of numbers.
pub(crate) fn numbers(arena: &Arena, id: Id) -> Option<Vec<u64>> {
    let inner = match arena.as_call(id) {
        Some(call) if class(arena, id) == "Size" => *arena.as_tuple(call.arguments)?.first()?,
        _ => id,
    };
    arena.as_sequence(inner)?.iter().map(|item| u64::try_from(arena.as_int(*item)?).ok()).collect()
}

pub(crate) fn class(arena: &Arena, object: Id) -> &str {
    let function = arena.as_call(object).map(|call| call.function);
    function.and_then(|function| arena.as_global(function)).map_or("", |(_, name)| name)
}
