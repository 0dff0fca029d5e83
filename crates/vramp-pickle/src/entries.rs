//! What a container holds: items, pairs, and what is beside them. It enters nothing.

use crate::objects::{Key, Objects};
use crate::pickle::{Arena, Id, Value};

/// What a container holds.
#[derive(Default)]
pub(crate) struct Members {
    pub(crate) items: Vec<Id>,
    pub(crate) pairs: Vec<(Id, Id)>,
    /// Its state, and arguments that are neither: not entered.
    pub(crate) beside: Vec<Id>,
}

impl Objects<'_> {
    /// What a container holds, or what a call would make of its arguments and of what is added afterwards.
    pub(crate) fn members(&self, id: Id) -> Members {
        let (arena, mut members) = (self.arena, Members::default());
        let Some(call) = arena.as_call(id) else {
            members.take(arena, id, false);
            return members;
        };
        let class = self.class(call);
        // Python 2 writes `OrderedDict([[key, value], …])`.
        let of_pairs = matches!(class, Some(("collections", "OrderedDict" | "defaultdict") | ("builtins", "dict")));
        for argument in arena.as_tuple(call.arguments).unwrap_or_default() {
            if !members.take(arena, *argument, of_pairs) {
                members.beside.push(*argument);
            }
        }
        members.items.extend(call.list.map_or(&[][..], |list| arena.list(list)));
        if let (Some(("collections", "deque")), Some([_, most])) = (class, arena.as_tuple(call.arguments)) {
            // It keeps so many, the last ones.
            let most = arena.as_int(*most).and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            members.items.drain(..members.items.len().saturating_sub(most));
        }
        members.pairs.extend(call.dict.map_or(&[][..], |dict| arena.dict(dict)));
        match call.state.map(|state| (state, self.attributes(state))) {
            Some((_, Some(attributes))) if class == Some(("argparse", "Namespace")) => members.pairs.extend(attributes),
            Some((state, _)) => members.beside.push(state),
            None => {}
        }
        members
    }

    /// The attributes that a state sets: a dictionary, or that and one of slots.
    pub(crate) fn attributes(&self, state: Id) -> Option<Vec<(Id, Id)>> {
        let dicts = match self.arena.get(state) {
            Value::Tuple(span) => self.arena.items(span).to_vec(),
            _ => vec![state],
        };
        let mut attributes = Vec::new();
        for dict in dicts {
            match self.arena.get(dict) {
                Value::Dict(dict) => attributes.extend_from_slice(self.arena.dict(dict)),
                Value::None => {}
                _ => return None,
            }
        }
        Some(attributes)
    }
}

impl Members {
    /// The items that are texts.
    pub(crate) fn texts(self, arena: &Arena) -> impl Iterator<Item = &str> {
        self.items.into_iter().filter_map(|item| arena.as_text(item))
    }

    /// Takes in what a plain container holds; whether it is one. A list of pairs is a dictionary where one is made of it.
    fn take(&mut self, arena: &Arena, id: Id, of_pairs: bool) -> bool {
        let items = match arena.get(id) {
            Value::Dict(dict) => {
                self.pairs.extend_from_slice(arena.dict(dict));
                return true;
            }
            Value::List(list) | Value::Set(list) => arena.list(list),
            Value::Tuple(span) | Value::FrozenSet(span) => arena.items(span),
            _ => return false,
        };
        let pair = |item: &Id| match arena.as_sequence(*item)? {
            [key, value] => Some((*key, *value)),
            _ => None,
        };
        match items.iter().map(pair).collect::<Option<Vec<_>>>().filter(|_| of_pairs) {
            Some(pairs) => self.pairs.extend(pairs),
            None => self.items.extend_from_slice(items),
        }
        true
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (Key, Id)> {
        let items = self.items.iter().enumerate().map(|(at, item)| (Key::At(at), *item));
        items.chain(self.pairs.iter().map(|(key, value)| (Key::Of(*key), *value)))
    }
}
