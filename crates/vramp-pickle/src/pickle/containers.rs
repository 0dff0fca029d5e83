//! Opcodes that make and fill tuples, lists, sets and dictionaries.
//!
//! What Python would do to something else than a list or a dictionary is not known, and noted.

use super::input::Read;
use super::machine::{EMPTY, Machine};
use super::{Id, Span, Value};

impl Machine<'_> {
    pub(super) fn tuple(&mut self, opcode: u8) -> Read<()> {
        let items = match opcode {
            b't' => self.pop_mark()?,
            fixed => self.pop_many(usize::from(fixed - 0x84))?,
        };
        let id = self.add_tuple(&items);
        self.push_id(id);
        Ok(())
    }

    fn pop_many(&mut self, count: usize) -> Read<Vec<Id>> {
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.pop()?);
        }
        items.reverse();
        Ok(items)
    }

    pub(super) fn add_tuple(&mut self, items: &[Id]) -> Id {
        if items.is_empty() {
            return EMPTY;
        }
        let span = self.store(items);
        self.add(Value::Tuple(span))
    }

    fn store(&mut self, items: &[Id]) -> Span {
        if !self.count(items.len()) {
            return Span::default();
        }
        let start = u32::try_from(self.arena.items.len()).unwrap_or(u32::MAX);
        self.arena.items.extend_from_slice(items);
        Span { start, len: u32::try_from(items.len()).unwrap_or(0) }
    }

    pub(super) fn frozen_set(&mut self) -> Read<()> {
        let items = self.pop_mark()?;
        let span = self.store(&items);
        self.push(Value::FrozenSet(span));
        Ok(())
    }

    pub(super) fn new_list(&mut self, opcode: u8, kind: fn(u32) -> Value) -> Read<()> {
        let items = if opcode == b'l' { self.pop_mark()? } else { Vec::new() };
        let list = self.add_list();
        self.extend(list, items);
        self.push(list.map_or(Value::Unknown, kind));
        Ok(())
    }

    fn add_list(&mut self) -> Option<u32> {
        if !self.has_room() {
            return None;
        }
        self.arena.lists.push(Vec::new());
        self.arena.lists_changed.push(0);
        u32::try_from(self.arena.lists.len() - 1).ok()
    }

    fn add_dict(&mut self) -> Option<u32> {
        if !self.has_room() {
            return None;
        }
        self.arena.dicts.push(Vec::new());
        self.arena.dicts_changed.push(0);
        u32::try_from(self.arena.dicts.len() - 1).ok()
    }

    fn extend(&mut self, list: Option<u32>, items: Vec<Id>) {
        let (fits, now, arena) = (self.count(items.len()), self.offset(), &mut self.arena);
        let list = list.map_or(usize::MAX, |list| list as usize);
        if let (Some(list), Some(changed)) = (arena.lists.get_mut(list), arena.lists_changed.get_mut(list))
            && !items.is_empty()
        {
            *changed = now;
            list.extend(items.into_iter().filter(|_| fits));
        }
    }

    fn extend_pairs(&mut self, dict: Option<u32>, pairs: Vec<(Id, Id)>) {
        let (fits, now, arena) = (self.count(pairs.len() * 2), self.offset(), &mut self.arena);
        let dict = dict.map_or(usize::MAX, |dict| dict as usize);
        if let (Some(dict), Some(changed)) = (arena.dicts.get_mut(dict), arena.dicts_changed.get_mut(dict))
            && !pairs.is_empty()
        {
            *changed = now;
            dict.extend(pairs.into_iter().filter(|_| fits));
        }
    }

    pub(super) fn new_dict(&mut self, opcode: u8) -> Read<()> {
        let pairs = if opcode == b'd' { self.pop_pairs()? } else { Vec::new() };
        let dict = self.add_dict();
        self.extend_pairs(dict, pairs);
        self.push(dict.map_or(Value::Unknown, Value::Dict));
        Ok(())
    }

    fn pop_pairs(&mut self) -> Read<Vec<(Id, Id)>> {
        let items = self.pop_mark()?;
        let (pairs, rest) = items.as_chunks::<2>();
        match rest {
            [] => Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect()),
            _ => Err(self.input.broken("stack-shape", format!("{} values where pairs must be", items.len()))),
        }
    }

    pub(super) fn append(&mut self, opcode: u8) -> Read<()> {
        let items = if opcode == b'a' { vec![self.pop()?] } else { self.pop_mark()? };
        let target = self.top()?;
        match (self.arena.get(target), opcode) {
            (Value::Set(list), 0x90) | (Value::List(list), b'a' | b'e') => self.extend(Some(list), items),
            (Value::Call(call), _) => {
                let list = self.list_of_call(call);
                self.extend(list, items);
            }
            (Value::Unknown, _) => {}
            (Value::Global(_), _) => {
                self.note_hostile("append-target", "items are appended to a name: it would change what the name means");
            }
            _ => self.note("append-target", "items are appended to what is no list"),
        }
        Ok(())
    }

    pub(super) fn set_items(&mut self, opcode: u8) -> Read<()> {
        let pairs = match opcode {
            b'u' => self.pop_pairs()?,
            _ => {
                let (value, key) = (self.pop()?, self.pop()?);
                vec![(key, value)]
            }
        };
        let target = self.top()?;
        match self.arena.get(target) {
            Value::Dict(dict) => self.extend_pairs(Some(dict), pairs),
            Value::Call(call) => {
                let dict = self.dict_of_call(call);
                self.extend_pairs(dict, pairs);
            }
            Value::Unknown => {}
            Value::Global(_) => {
                self.note_hostile("setitem-target", "items are set on a name: it would change what the name means");
            }
            _ => self.note("setitem-target", "items are set on what is no dictionary"),
        }
        Ok(())
    }

    fn list_of_call(&mut self, call: u32) -> Option<u32> {
        if let Some(list) = self.arena.calls.get(call as usize)?.list {
            return Some(list);
        }
        let list = self.add_list();
        self.arena.calls.get_mut(call as usize)?.list = list;
        list
    }

    fn dict_of_call(&mut self, call: u32) -> Option<u32> {
        if let Some(dict) = self.arena.calls.get(call as usize)?.dict {
            return Some(dict);
        }
        let dict = self.add_dict();
        self.arena.calls.get_mut(call as usize)?.dict = dict;
        dict
    }
}
