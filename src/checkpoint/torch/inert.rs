//! What of a pickle a load uses, and what only lies there: an object that is passed over cannot condemn the file, whatever it does
//! to itself.
//!
//! Unknown objects are inert where they are passed over, and everything outside the key that was asked for. The same faults
//! in what is used are refused, and so is, everywhere, what is known to run code. An audit lists all of it.

use super::calls::Judge;
use super::dense::{Rebuilt, rebuilt};
use super::numpy;
use super::objects::{Objects, is_container};
use super::pickled::{Pickled, of_broken, of_objection};
use super::sharded;
use crate::checkpoint::finding::{Finding, Severity};
use crate::checkpoint::pickle::{Danger, Id, Sight, Walk, globals, walk, walk_within};

/// Findings that are kept.
const MOST_FINDINGS: usize = 1000;

/// Rules that an object breaks by what it is or does to itself.
const OF_OBJECTS: &[&str] = &[
    "global-not-allowed",
    "append-target",
    "setitem-target",
    "argument-denied",
    "argument-changed",
    "build-target",
    "numpy-dtype",
    "cycle",
    "depth-limit",
    "resource-limit",
    "dict-key",
    "duplicate-key",
];

/// What is used of a pickle.
pub(super) struct Used {
    walk: Walk,
    /// Whether unknown objects are passed over.
    skips: bool,
}

/// Whether a finding may be one about an object that is not used.
pub(super) fn may_be_inert(finding: &Finding) -> bool {
    finding.severity != Severity::Dangerous && OF_OBJECTS.contains(&finding.rule)
}

impl Used {
    /// What is used of a pickle below `root`, where unknown objects are passed over or not.
    pub(super) fn of(objects: &Objects, root: Id, skips: bool) -> Used {
        let walk = match skips {
            true => walk_within(objects.arena, root, |id| objects.sight(id)),
            false => walk(objects.arena, root),
        };
        Used { walk, skips }
    }

    /// Whether it can be followed without end.
    pub(super) fn is_whole(&self) -> bool {
        self.walk.broken.is_none()
    }

    /// Whether the value is used.
    pub(super) fn reaches(&self, id: Id) -> bool {
        self.walk.reaches(id)
    }

    /// Those findings about objects that count: of what is used, and of what the object does not hold at all.
    pub(super) fn findings(&self, pickled: &Pickled) -> Vec<Finding> {
        let arena = &pickled.ran.arena;
        let mut found: Vec<Finding> = self.walk.broken.iter().map(of_broken).collect();
        let mut judge = Judge::new(arena);
        for call in &arena.calls {
            let counts = self.walk.enters(call.id) || !pickled.walk.reaches(call.id);
            if let Some(objection) = counts.then(|| judge.objection(call)).flatten() {
                found.push(of_objection(pickled, call, objection));
            }
            if found.len() >= MOST_FINDINGS {
                break;
            }
        }
        if !self.skips {
            let counts = |id: &Id| self.walk.reaches(*id) || !pickled.walk.reaches(*id);
            found.extend(pickled.unknown_names(counts));
        }
        found.retain(|finding| !(self.skips && finding.rule == "global-not-allowed"));
        found.iter_mut().for_each(|finding| pickled.place(finding));
        found
    }
}

impl Objects<'_> {
    /// How far a load looks into the result of a call.
    fn sight(&self, id: Id) -> Sight {
        let arena = self.arena;
        let Some(call) = arena.as_call(id) else { return Sight::Open };
        if self.modules.contains(&id) {
            return self.module(id).map_or(Sight::Closed, |module| Sight::Parts(module.parts));
        }
        // Of a tensor that is cut over ranks, the parts that this file has.
        if let Some(cut) = self.rank.and_then(|rank| sharded::cut(arena, id, rank)) {
            return cut
                .map_or(Sight::Closed, |cut| Sight::Parts(cut.parts.into_iter().map(|(part, _)| part).collect()));
        }
        let Some((module, name)) = self.class(call) else { return Sight::Closed };
        let arguments = arena.as_tuple(call.arguments).unwrap_or_default();
        let is_function = arena.as_global(call.function).is_some_and(|named| named.1 == name);
        let first = |count: usize| {
            let parts = arguments.iter().take(count).copied();
            Sight::Parts(std::iter::once(call.function).chain(parts).collect())
        };
        match rebuilt(module, name).filter(|_| is_function) {
            // Without the hooks.
            Some(Rebuilt::Dense(_)) => {
                let parts = arguments.iter().enumerate().filter(|(at, _)| *at != 5).map(|(_, id)| *id);
                Sight::Parts(std::iter::once(call.function).chain(parts).collect())
            }
            // Without attributes.
            Some(Rebuilt::Wrapped) => first(1),
            Some(Rebuilt::Typed) => first(3),
            Some(Rebuilt::Other(_)) => Sight::Closed,
            None if numpy::is_numpy(module, name) || (module, name) == ("numpy", "dtype") => Sight::Closed,
            None if is_container(module, name) && name != "Namespace" && call.state.is_some() => {
                // Its attributes are no part of it.
                let parts = (0..).map_while(|index| arena.child(id, index)).enumerate();
                Sight::Parts(parts.filter(|(at, _)| *at != 2).map(|(_, id)| id).collect())
            }
            None if is_container(module, name) => Sight::Open,
            None => match globals::danger(module, name) {
                Danger::Allowed if (module, name) != ("builtins", "object") => Sight::Open,
                _ => Sight::Closed,
            },
        }
    }
}
