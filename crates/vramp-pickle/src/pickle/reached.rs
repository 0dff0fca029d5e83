//! What a walk over the values of a pickle has reached: plain data.

use std::collections::HashSet;

use super::{Broken, Id};

/// What was found on the way.
#[derive(Debug, Default)]
pub struct Walk {
    /// For each value of the arena: whether the result holds it.
    pub(super) reached: Vec<bool>,
    /// Those that were met and not looked into.
    pub(super) closed: HashSet<Id>,
    /// Why the result cannot be used.
    pub broken: Option<Broken>,
}

impl Walk {
    /// Whether the result holds the value.
    pub fn reaches(&self, id: Id) -> bool {
        self.reached.get(id as usize).copied().unwrap_or(false)
    }

    /// Whether the walk looked into the value.
    pub fn enters(&self, id: Id) -> bool {
        self.reaches(id) && !self.closed.contains(&id)
    }
}
