//! Keys of dictionaries: which of them Python takes for the same, and which it could not hash.
//!
//! Equal keys get one number, bottom up, as in hash consing: nothing is copied and nothing recurses, however much keys share.

use std::collections::{HashMap, HashSet};

use super::reached::Walk;
use super::{Arena, Broken, Id, Value};
use crate::finding::Severity;

/// A key whose parts have their numbers already.
#[derive(PartialEq, Eq, Hash)]
enum Shape<'a> {
    None,
    Int(i64),
    Big(&'a [u8]),
    Float(u64),
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Tuple(Vec<Id>),
    FrozenSet(Vec<Id>),
    /// Equal only if the same: what it would be is not known.
    Object(Id),
}

/// No key twice, and only keys that Python could hash, in the dictionaries that the result holds.
pub(super) fn check(arena: &Arena, walk: &Walk) -> Result<(), Broken> {
    let all = || (0..arena.values.len()).filter_map(|at| Id::try_from(at).ok());
    let dicts = || all().filter(|id| walk.enters(*id)).filter_map(|id| arena.as_dict(id));
    let mut wanted = vec![false; arena.values.len()];
    dicts().flatten().for_each(|(key, _)| mark(&mut wanted, *key));
    // The items of a tuple were made before it.
    for id in all().rev() {
        if is(&wanted, id) {
            items(arena, id).unwrap_or_default().iter().for_each(|item| mark(&mut wanted, *item));
        }
    }
    let numbers = numbers(arena, &wanted);
    let mut seen = HashSet::new();
    for pairs in dicts() {
        seen.clear();
        for (key, _) in pairs {
            let damage = |rule, what| Broken { rule, severity: Severity::Malformed, offset: arena.offset(*key), what };
            let number = numbers.get(key).ok_or_else(|| damage("dict-key", "a key that cannot be one".into()))?;
            if !seen.insert(*number) {
                let what = format!("the key {} stands twice in one dictionary", arena.preview(*key));
                return Err(damage("duplicate-key", what));
            }
        }
    }
    Ok(())
}

/// For each value that is wanted, the first that Python takes for the same. What it cannot hash has none.
fn numbers(arena: &Arena, wanted: &[bool]) -> HashMap<Id, Id> {
    let (mut first, mut numbers) = (HashMap::new(), HashMap::new());
    for id in (0..wanted.len()).filter_map(|at| Id::try_from(at).ok()).filter(|id| is(wanted, *id)) {
        if let Some(shape) = shape(arena, id, &numbers) {
            numbers.insert(id, *first.entry(shape).or_insert(id));
        }
    }
    numbers
}

fn shape<'a>(arena: &'a Arena, id: Id, numbers: &HashMap<Id, Id>) -> Option<Shape<'a>> {
    let parts = || items(arena, id)?.iter().map(|item| numbers.get(item).copied()).collect::<Option<Vec<Id>>>();
    Some(match arena.get(id) {
        Value::None => Shape::None,
        Value::Bool(truth) => Shape::Int(truth.into()),
        Value::Int(number) => Shape::Int(number),
        Value::Big(span) => Shape::Big(without_fill(arena.bytes(span))),
        Value::Float(number) => of_float(number, id),
        Value::Text(span) => Shape::Text(arena.bytes(span)),
        Value::Bytes(span) => Shape::Bytes(arena.bytes(span)),
        Value::Tuple(_) => Shape::Tuple(parts()?),
        Value::FrozenSet(_) => {
            let mut parts = parts()?;
            parts.sort_unstable();
            parts.dedup();
            Shape::FrozenSet(parts)
        }
        Value::Global(_) | Value::Call(_) | Value::Persistent(_) | Value::Unknown => Shape::Object(id),
        Value::List(_) | Value::Set(_) | Value::Dict(_) => return None,
    })
}

/// Python takes a float for the integer that it is, if it is one. No NaN is another.
fn of_float(number: f64, id: Id) -> Shape<'static> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    #[allow(clippy::cast_possible_truncation)] // a whole number of at most 53 bits
    match number {
        _ if number.is_nan() => Shape::Object(id),
        _ if number.fract() == 0.0 && number.abs() <= EXACT => Shape::Int(number as i64),
        _ => Shape::Float(number.to_bits()),
    }
}

/// A number in two's complement without the bytes that only repeat its sign.
fn without_fill(mut bytes: &[u8]) -> &[u8] {
    while let [rest @ .., next, last] = bytes
        && (*last == 0 && *next < 0x80 || *last == 0xff && *next >= 0x80)
    {
        bytes = bytes.get(..=rest.len()).unwrap_or_default();
    }
    bytes
}

fn items(arena: &Arena, id: Id) -> Option<&[Id]> {
    match arena.get(id) {
        Value::Tuple(span) | Value::FrozenSet(span) => Some(arena.items(span)),
        _ => None,
    }
}

fn is(flags: &[bool], id: Id) -> bool {
    flags.get(id as usize).copied().unwrap_or(false)
}

fn mark(flags: &mut [bool], id: Id) {
    if let Some(flag) = flags.get_mut(id as usize) {
        *flag = true;
    }
}
