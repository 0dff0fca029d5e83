//! Tensors below values that are not entered: whether there are any, and how many. So nothing is passed over in silence.
//!
//! It looks at calls of PyTorch's functions and at nothing else of them. What a sparse tensor is made of does not count beside it.

use std::collections::HashSet;

use super::dense::{Rebuilt, rebuilt};
use crate::checkpoint::pickle::{Arena, Id, globals};

/// Values that are met at most to count: beyond that the number is left out.
const MOST_STEPS: usize = 1 << 20;

/// What is known so far of the values of an arena.
pub(super) struct Below<'a> {
    arena: &'a Arena,
    /// For each value: whether a tensor is in it, as far as that is known. Made when it is first asked for.
    known: Vec<Option<bool>>,
    steps_left: usize,
}

impl<'a> Below<'a> {
    pub(super) fn new(arena: &'a Arena) -> Below<'a> {
        Below { arena, known: Vec::new(), steps_left: MOST_STEPS }
    }

    /// Whether the value is a tensor or holds one.
    pub(super) fn holds(&mut self, id: Id) -> bool {
        self.known.resize(self.arena.values.len(), None);
        let mut path = vec![(id, 0)];
        while let Some((at, next)) = path.last_mut() {
            if self.known(*at) == Some(true) || is_tensor(made(self.arena, *at)) {
                path.iter().for_each(|(above, _)| self.note(*above, true));
                return true;
            }
            // As long as nothing is found, so that what is shared is entered once.
            self.note(*at, false);
            match self.arena.child(*at, *next) {
                Some(child) => {
                    *next += 1;
                    if self.known(child) != Some(false) {
                        path.push((child, 0));
                    }
                }
                None => drop(path.pop()),
            }
        }
        false
    }

    fn known(&self, id: Id) -> Option<bool> {
        self.known.get(id as usize).copied().flatten()
    }

    fn note(&mut self, id: Id, holds: bool) {
        if let Some(known) = self.known.get_mut(id as usize) {
            *known = Some(holds);
        }
    }

    /// How many tensors are in these values, in words.
    pub(super) fn counted(&mut self, ids: &[Id]) -> String {
        let (mut seen, mut open, mut tensors) = (HashSet::new(), ids.to_vec(), 0u64);
        while let Some(id) = open.pop() {
            let Some(left) = self.steps_left.checked_sub(1) else { return "many tensors".to_owned() };
            self.steps_left = left;
            if !self.holds(id) || !seen.insert(id) {
                continue;
            }
            let rebuilt = made(self.arena, id);
            tensors += u64::from(is_tensor(rebuilt));
            if !matches!(rebuilt, Some(Rebuilt::Other(_))) {
                open.extend((0..).map_while(|index| self.arena.child(id, index)));
            }
        }
        if tensors == 1 { "1 tensor".to_owned() } else { format!("{tensors} tensors") }
    }
}

fn made(arena: &Arena, id: Id) -> Option<Rebuilt> {
    let (module, name) = arena.as_global(arena.as_call(id)?.function)?;
    rebuilt(globals::modern(module), name)
}

/// A wrapper is none of its own: it holds one.
fn is_tensor(made: Option<Rebuilt>) -> bool {
    matches!(made, Some(Rebuilt::Dense(_) | Rebuilt::Typed | Rebuilt::Other(_)))
}
