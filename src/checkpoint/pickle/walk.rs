//! What the result of a pickle reaches: without recursion, each value once, cycles and excess found on the way.

use std::collections::HashSet;

use super::{Arena, Broken, Call, Id, MAX_DEPTH, MAX_EXPANDED, Value};

/// What was found on the way.
#[derive(Debug, Default)]
pub struct Walk {
    /// For each value of the arena: whether the result holds it.
    reached: Vec<bool>,
    /// Why the result cannot be used.
    pub broken: Option<Broken>,
}

impl Walk {
    /// Whether the result holds the value.
    pub fn reaches(&self, id: Id) -> bool {
        self.reached.get(id as usize).copied().unwrap_or(false)
    }
}

/// Walks from `root` on.
pub fn walk(arena: &Arena, root: Id) -> Walk {
    let mut walker = Walker {
        arena,
        reached: vec![false; arena.values.len()],
        finished: vec![false; arena.values.len()],
        expanded: vec![0; arena.values.len()],
    };
    let broken = walker.run(root).err().or_else(|| walker.check_keys().err());
    Walk { reached: walker.reached, broken }
}

struct Walker<'a> {
    arena: &'a Arena,
    reached: Vec<bool>,
    finished: Vec<bool>,
    /// Values below each, shared ones counted each time.
    expanded: Vec<u64>,
}

impl Walker<'_> {
    fn run(&mut self, root: Id) -> Result<(), Broken> {
        let mut path = vec![(root, 0)];
        mark(&mut self.reached, root);
        let mut trouble = None;
        while let Some((id, next)) = path.last_mut() {
            let Some(child) = self.arena.child(*id, *next) else {
                self.finish(*id);
                path.pop();
                continue;
            };
            *next += 1;
            let is_new = !is(&self.reached, child);
            if !is_new && !is(&self.finished, child) {
                trouble.get_or_insert_with(|| self.broken("cycle", child, "a value that contains itself"));
            } else if is_new && path.len() >= MAX_DEPTH {
                trouble.get_or_insert_with(|| {
                    self.broken("depth-limit", child, "more than 1000 values inside each other")
                });
                // Everything below is marked nonetheless, so that what an audit says is true.
                self.flood(child);
            } else if is_new {
                mark(&mut self.reached, child);
                path.push((child, 0));
            }
        }
        let expanded = self.expanded.get(root as usize).copied().unwrap_or(0);
        if trouble.is_none() && expanded > MAX_EXPANDED {
            let what = "values that share parts: written out they would be more than 67,108,864";
            trouble = Some(self.broken("resource-limit", root, what));
        }
        trouble.map_or(Ok(()), Err)
    }

    fn finish(&mut self, id: Id) {
        mark(&mut self.finished, id);
        let mut sum = 1u64;
        let mut next = 0;
        while let Some(child) = self.arena.child(id, next) {
            sum = sum.saturating_add(self.expanded.get(child as usize).copied().unwrap_or(0));
            next += 1;
        }
        if let Some(expanded) = self.expanded.get_mut(id as usize) {
            *expanded = sum;
        }
    }

    fn flood(&mut self, from: Id) {
        let mut open = vec![from];
        while let Some(id) = open.pop() {
            if is(&self.reached, id) {
                continue;
            }
            mark(&mut self.reached, id);
            mark(&mut self.finished, id);
            let mut next = 0;
            while let Some(child) = self.arena.child(id, next) {
                open.push(child);
                next += 1;
            }
        }
    }

    fn broken(&self, rule: &'static str, id: Id, what: &str) -> Broken {
        let offset = self.arena.as_call(id).map_or(0, |call| call.offset);
        Broken { rule, suspicious: true, offset: offset.into(), what: what.into() }
    }

    /// No key twice, and only keys that Python could hash, in the dictionaries that the result holds.
    fn check_keys(&self) -> Result<(), Broken> {
        let mut seen = HashSet::new();
        for (at, value) in self.arena.values.iter().enumerate() {
            let id = Id::try_from(at).unwrap_or(Id::MAX);
            let has_keys = matches!(value, Value::Dict(_) | Value::Call(_)) && is(&self.reached, id);
            if !has_keys {
                continue;
            }
            seen.clear();
            for (key, _) in self.arena.as_dict(id).unwrap_or_default() {
                let damage = |rule, what: String| Broken { rule, suspicious: false, offset: 0, what };
                let hashed = self.arena.hashable(*key);
                let hashed = hashed.ok_or_else(|| damage("dict-key", "a key that cannot be one".into()))?;
                if !seen.insert(hashed) {
                    let key = self.arena.preview(*key);
                    return Err(damage("duplicate-key", format!("the key {key} stands twice in one dictionary")));
                }
            }
        }
        Ok(())
    }
}

fn is(flags: &[bool], id: Id) -> bool {
    flags.get(id as usize).copied().unwrap_or(true)
}

fn mark(flags: &mut [bool], id: Id) {
    if let Some(flag) = flags.get_mut(id as usize) {
        *flag = true;
    }
}

impl Arena {
    /// The value number `index` directly inside another.
    pub(crate) fn child(&self, id: Id, index: usize) -> Option<Id> {
        match self.get(id) {
            Value::Tuple(span) | Value::FrozenSet(span) => self.items(span).get(index).copied(),
            Value::List(list) | Value::Set(list) => self.list(list).get(index).copied(),
            Value::Dict(dict) => half(self.dict(dict), index),
            Value::Persistent(inner) => (index == 0).then_some(inner),
            Value::Call(call) => self.calls.get(call as usize).and_then(|call| self.child_of_call(call, index)),
            _ => None,
        }
    }

    fn child_of_call(&self, call: &Call, index: usize) -> Option<Id> {
        let list = call.list.map_or(&[][..], |list| self.list(list));
        let dict = call.dict.map_or(&[][..], |dict| self.dict(dict));
        let state = usize::from(call.state.is_some());
        match index {
            0 => Some(call.function),
            1 => Some(call.arguments),
            2 if state == 1 => call.state,
            index => {
                let index = index - 2 - state;
                list.get(index).copied().or_else(|| half(dict, index.checked_sub(list.len())?))
            }
        }
    }

    /// A key so that equal keys are equal; `None` for what Python cannot hash.
    fn hashable(&self, key: Id) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        let mut open = vec![key];
        while let Some(id) = open.pop() {
            if out.len() > 1 << 16 {
                return None;
            }
            match self.get(id) {
                Value::Text(span) => entry(&mut out, b't', self.bytes(span)),
                Value::Bytes(span) => entry(&mut out, b'b', self.bytes(span)),
                Value::Big(span) => entry(&mut out, b'i', self.bytes(span)),
                Value::Bool(truth) => entry(&mut out, b'i', &i64::from(truth).to_le_bytes()),
                Value::Int(number) => entry(&mut out, b'i', &number.to_le_bytes()),
                Value::Float(number) => entry(&mut out, b'f', &number.to_bits().to_le_bytes()),
                Value::None => entry(&mut out, b'n', &[]),
                Value::Tuple(span) | Value::FrozenSet(span) => {
                    entry(&mut out, b'(', &span.len.to_le_bytes());
                    open.extend_from_slice(self.items(span));
                }
                // Equal only if the same: what they would be is not known.
                Value::Global(_) | Value::Call(_) | Value::Persistent(_) => entry(&mut out, b'o', &id.to_le_bytes()),
                Value::List(_) | Value::Set(_) | Value::Dict(_) => return None,
            }
        }
        Some(out)
    }
}

fn half(pairs: &[(Id, Id)], index: usize) -> Option<Id> {
    pairs.get(index / 2).map(|(key, value)| if index.is_multiple_of(2) { *key } else { *value })
}

fn entry(out: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}
