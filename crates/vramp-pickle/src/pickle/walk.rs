//! What the result of a pickle reaches: without recursion, each value once, cycles and excess found on the way.

use std::collections::{HashMap, HashSet};

use super::reached::Walk;
use super::{Arena, Broken, Call, Id, MAX_DEPTH, MAX_EXPANDED, Value, keys};
use crate::finding::Severity;

/// How far a walk looks into a value.
pub(crate) enum Sight {
    /// At everything in it.
    Open,
    /// At these of its parts.
    Parts(Vec<Id>),
    /// At nothing in it.
    Closed,
}

/// Walks from `root` on.
pub fn walk(arena: &Arena, root: Id) -> Walk {
    walk_within(arena, root, |_| Sight::Open)
}

/// Walks from `root` on, into each call only as far as `sight` says.
pub(crate) fn walk_within(arena: &Arena, root: Id, sight: impl Fn(Id) -> Sight) -> Walk {
    let mut walker = Walker {
        arena,
        sight: &sight,
        parts: HashMap::new(),
        closed: HashSet::new(),
        reached: vec![false; arena.values.len()],
        finished: vec![false; arena.values.len()],
        expanded: vec![0; arena.values.len()],
    };
    let broken = walker.run(root).err();
    let walk = Walk { reached: walker.reached, closed: walker.closed, broken };
    let broken = walk.broken.clone().or_else(|| keys::check(arena, &walk).err());
    Walk { broken, ..walk }
}

struct Walker<'a> {
    arena: &'a Arena,
    sight: &'a dyn Fn(Id) -> Sight,
    /// The parts of those values that are not looked at as a whole.
    parts: HashMap<Id, Vec<Id>>,
    closed: HashSet<Id>,
    reached: Vec<bool>,
    finished: Vec<bool>,
    /// Values below each, shared ones counted each time.
    expanded: Vec<u64>,
}

impl Walker<'_> {
    fn run(&mut self, root: Id) -> Result<(), Broken> {
        let mut path = vec![(root, 0)];
        self.reach(root);
        let mut trouble = None;
        while let Some((id, next)) = path.last_mut() {
            let Some(child) = child(self.arena, &self.parts, *id, *next) else {
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
                self.reach(child);
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

    fn reach(&mut self, id: Id) {
        mark(&mut self.reached, id);
        if !matches!(self.arena.get(id), Value::Call(_)) {
            return;
        }
        match (self.sight)(id) {
            Sight::Open => {}
            Sight::Parts(parts) => drop(self.parts.insert(id, parts)),
            Sight::Closed => {
                self.parts.insert(id, Vec::new());
                self.closed.insert(id);
            }
        }
    }

    fn finish(&mut self, id: Id) {
        mark(&mut self.finished, id);
        let mut sum = 1u64;
        let mut next = 0;
        while let Some(child) = child(self.arena, &self.parts, id, next) {
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
            self.reach(id);
            mark(&mut self.finished, id);
            let mut next = 0;
            while let Some(child) = child(self.arena, &self.parts, id, next) {
                open.push(child);
                next += 1;
            }
        }
    }

    fn broken(&self, rule: &'static str, id: Id, what: &str) -> Broken {
        Broken { rule, severity: Severity::Suspicious, offset: self.arena.offset(id), what: what.into() }
    }
}

fn child(arena: &Arena, parts: &HashMap<Id, Vec<Id>>, id: Id, index: usize) -> Option<Id> {
    match parts.get(&id) {
        Some(parts) => parts.get(index).copied(),
        None => arena.child(id, index),
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
}

fn half(pairs: &[(Id, Id)], index: usize) -> Option<Id> {
    pairs.get(index / 2).map(|(key, value)| if index.is_multiple_of(2) { *key } else { *value })
}
