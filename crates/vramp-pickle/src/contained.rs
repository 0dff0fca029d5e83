//! Tensors below values that are not entered: whether there are any, and how many. So nothing is passed over in silence.
//!
//! It looks at calls of PyTorch's functions and at nothing else of them. What a sparse tensor is made of does not count beside it.
//! Objects that are not entered may hold themselves: what is known is known of a whole cycle at a time.

use std::collections::HashSet;

use crate::forms::{Rebuilt, rebuilt, subclass};
use crate::pickle::{Arena, Id, globals};

/// Values that are met at most to count: beyond that the number is left out.
const MOST_STEPS: usize = 1 << 20;

/// What is known so far of the values of an arena.
pub(crate) struct Below<'a> {
    arena: &'a Arena,
    /// For each value: whether a tensor is in it, as far as that is known. Made when it is first asked for.
    known: Vec<Option<bool>>,
    /// For each value that is being looked into: its number on the way, from 1 on.
    numbers: Vec<u32>,
    steps_left: usize,
}

/// A value that is being looked into.
struct Open {
    id: Id,
    next: usize,
    /// The first on the way that it leads back to.
    low: u32,
    holds: bool,
}

/// How many tensors there are.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Count {
    pub(crate) tensors: u64,
    /// There are more.
    is_cut: bool,
}

impl Count {
    /// The number in words.
    pub(crate) fn words(self) -> String {
        match self.tensors {
            _ if self.is_cut => "many tensors".to_owned(),
            1 => "1 tensor".to_owned(),
            tensors => format!("{tensors} tensors"),
        }
    }
}

impl<'a> Below<'a> {
    pub(crate) fn new(arena: &'a Arena) -> Below<'a> {
        Below { arena, known: Vec::new(), numbers: Vec::new(), steps_left: MOST_STEPS }
    }

    /// Whether the value is a tensor or holds one.
    pub(crate) fn holds(&mut self, id: Id) -> bool {
        self.known.resize(self.arena.values.len(), None);
        self.numbers.resize(self.arena.values.len(), 0);
        if let Some(known) = self.known(id) {
            return known;
        }
        // Strongly connected components: all of one hold a tensor if one of them does.
        let (mut way, mut waiting) = (Vec::new(), Vec::new());
        self.open(id, &mut way, &mut waiting);
        while let Some(open) = way.last_mut() {
            if let Some(child) = self.arena.child(open.id, open.next) {
                open.next += 1;
                match self.known(child) {
                    Some(holds) => open.holds |= holds,
                    None => match self.number(child) {
                        0 => self.open(child, &mut way, &mut waiting),
                        number => open.low = open.low.min(number),
                    },
                }
                continue;
            }
            let Some(done) = way.pop() else { break };
            let is_first = self.number(done.id) == done.low;
            if is_first {
                // Their component is whole; what is above it on the way is not in it.
                while let Some(member) = waiting.pop() {
                    self.note(member, done.holds);
                    if member == done.id {
                        break;
                    }
                }
            }
            if let Some(above) = way.last_mut() {
                above.holds |= done.holds;
                if !is_first {
                    above.low = above.low.min(done.low);
                }
            }
        }
        self.known(id).unwrap_or(false)
    }

    fn open(&mut self, id: Id, way: &mut Vec<Open>, waiting: &mut Vec<Id>) {
        waiting.push(id);
        let number = u32::try_from(waiting.len()).unwrap_or(u32::MAX);
        if let Some(slot) = self.numbers.get_mut(id as usize) {
            *slot = number;
        }
        way.push(Open { id, next: 0, low: number, holds: is_tensor(made(self.arena, id)) });
    }

    fn known(&self, id: Id) -> Option<bool> {
        self.known.get(id as usize).copied().flatten()
    }

    fn number(&self, id: Id) -> u32 {
        self.numbers.get(id as usize).copied().unwrap_or(0)
    }

    fn note(&mut self, id: Id, holds: bool) {
        if let Some(known) = self.known.get_mut(id as usize) {
            *known = Some(holds);
        }
    }

    /// How many tensors are in these values; those of `but` do not count.
    pub(crate) fn count(&mut self, ids: &[Id], but: &HashSet<Id>) -> Count {
        let (mut seen, mut open, mut tensors) = (HashSet::new(), ids.to_vec(), 0u64);
        while let Some(id) = open.pop() {
            let Some(left) = self.steps_left.checked_sub(1) else { return Count { tensors, is_cut: true } };
            self.steps_left = left;
            if !self.holds(id) || !seen.insert(id) {
                continue;
            }
            let rebuilt = made(self.arena, id);
            tensors += u64::from(is_tensor(rebuilt) && !but.contains(&id));
            if !matches!(rebuilt, Some(Rebuilt::Other(_))) {
                open.extend((0..).map_while(|index| self.arena.child(id, index)));
            }
        }
        Count { tensors, is_cut: false }
    }

    /// The same in words.
    pub(crate) fn counted(&mut self, ids: &[Id]) -> String {
        self.count(ids, &HashSet::new()).words()
    }
}

fn made(arena: &Arena, id: Id) -> Option<Rebuilt> {
    let call = arena.as_call(id)?;
    let (module, name) = arena.as_global(call.function)?;
    let rebuilt = rebuilt(globals::modern(module), name)?;
    // What an instance of a subclass is made of does not count beside it.
    let class = arena.as_tuple(call.arguments).and_then(|arguments| arena.as_global(*arguments.get(1)?));
    let subclass = class.filter(|_| rebuilt == Rebuilt::Typed).and_then(|(module, name)| subclass(module, name));
    Some(subclass.map_or(rebuilt, Rebuilt::Other))
}

/// A wrapper is none of its own: it holds one.
fn is_tensor(made: Option<Rebuilt>) -> bool {
    matches!(made, Some(Rebuilt::Dense(_) | Rebuilt::Typed | Rebuilt::Other(_)))
}
