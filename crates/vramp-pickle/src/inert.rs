//! What of a pickle a load uses, and what only lies there: an object that is passed over cannot condemn the file, whatever it does
//! to itself.
//!
//! Unknown objects are inert where they are passed over, and everything outside the key that was asked for. The same faults
//! in what is used are refused, and so is, everywhere, what is known to run code. An audit lists all of it.

use crate::calls::Judge;
use crate::finding::{Finding, Severity};
use crate::forms::{Rebuilt, rebuilt};
use crate::meaning::is_container;
use crate::numpy;
use crate::objects::Objects;
use crate::pickle::{Call, Danger, Id, Sight, Walk, globals, walk, walk_within};
use crate::pickled::{Pickled, of_broken, of_objection};
use crate::sharded;

/// Findings that are kept.
const MOST_FINDINGS: usize = 1000;

/// Rules that an object breaks by what it is or does to itself.
const OF_OBJECTS: &[&str] =
    &["global-not-allowed", "append-target", "setitem-target", "argument-denied", "build-target", "numpy-dtype"];

/// Rules about what is followed, whatever has to be right.
const OF_FOLLOWED: &[&str] = &["cycle", "depth-limit", "resource-limit", "dict-key", "duplicate-key", CHANGED];
const CHANGED: &str = "argument-changed";

/// What is used of a pickle.
pub(crate) struct Used {
    /// What a load looks into.
    followed: Walk,
    /// Everything below the key, where only that has to be right and unknown objects are not passed over.
    below_key: Option<Walk>,
    /// Whether unknown objects are passed over.
    skips: bool,
}

/// The findings about a pickle that count whatever is used of it: all but those about what is followed, and, where only a part of it
/// has to be right, those about objects.
pub(crate) fn of_the_whole(pickled: &Pickled, is_part: bool) -> Vec<Finding> {
    let is_run = pickled.ran.result.is_some();
    let depends = |finding: &&Finding| {
        finding.severity != Severity::Dangerous
            && (OF_FOLLOWED.contains(&finding.rule) || is_part && OF_OBJECTS.contains(&finding.rule))
    };
    pickled.findings.iter().filter(|finding| !(is_run && depends(finding))).cloned().collect()
}

impl Used {
    /// What is used of a pickle below `root`, which is what a key names or the whole object; unknown objects are passed over or not.
    pub(crate) fn of(objects: &Objects, root: Id, is_key: bool, skips: bool) -> Used {
        let followed = walk_within(objects.arena, root, |id| objects.sight(id));
        let below_key = (is_key && !skips).then(|| walk(objects.arena, root));
        Used { followed, below_key, skips }
    }

    /// What has to be right, unless that is everything.
    fn demanded(&self) -> Option<&Walk> {
        if self.skips { Some(&self.followed) } else { self.below_key.as_ref() }
    }

    /// Whether it can be followed without end.
    pub(crate) fn is_whole(&self) -> bool {
        self.followed.broken.is_none()
    }

    /// Whether the value has to be right.
    pub(crate) fn reaches(&self, id: Id) -> bool {
        self.demanded().is_none_or(|walk| walk.reaches(id))
    }

    /// Those findings about objects that count: of what is used, and of what the object does not hold at all.
    pub(crate) fn findings(&self, objects: &Objects, pickled: &Pickled) -> Vec<Finding> {
        let mut found: Vec<Finding> = self.followed.broken.iter().map(of_broken).collect();
        found.extend(self.of_calls(objects, pickled));
        if let Some(demanded) = self.demanded().filter(|_| !self.skips) {
            let counts = |id: &Id| demanded.reaches(*id) || !pickled.walk.reaches(*id);
            found.extend(pickled.unknown_names(counts));
        }
        found.iter_mut().for_each(|finding| pickled.place(finding));
        found
    }

    fn of_calls(&self, objects: &Objects, pickled: &Pickled) -> Vec<Finding> {
        let arena = &pickled.ran.arena;
        let (mut found, mut judge) = (Vec::new(), Judge::new(arena));
        for call in &arena.calls {
            let is_held = pickled.walk.reaches(call.id);
            if found.len() >= MOST_FINDINGS {
                break;
            }
            if is_held && self.demanded().is_some_and(|demanded| !demanded.enters(call.id)) {
                continue;
            }
            let Some(objection) = judge.objection(call) else { continue };
            let counts = match objection.0 {
                CHANGED => {
                    !is_held || objects.used_parts(call).is_none_or(|parts| judge.any_changed(&parts, call.offset))
                }
                "global-not-allowed" => !self.skips && self.below_key.is_some(),
                // Of the whole all of them have been told.
                _ => self.demanded().is_some(),
            };
            if counts {
                found.push(of_objection(pickled, call, objection));
            }
        }
        found
    }
}

impl Objects<'_> {
    /// What a tensor is made of, without what hangs on it.
    fn used_parts(&self, call: &Call) -> Option<Vec<Id>> {
        let (module, name) = self.class(call)?;
        rebuilt(module, name)?;
        match self.sight(call.id) {
            Sight::Parts(parts) => Some(parts),
            Sight::Open => None,
            Sight::Closed => Some(Vec::new()),
        }
    }

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
