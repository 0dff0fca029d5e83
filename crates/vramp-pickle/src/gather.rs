//! All tensors below a value, with their names, and what is passed over on the way. Nothing recurses.

use std::collections::HashSet;

use crate::aside::{IN_OBJECT, Lost, NOTHING};
use crate::finding::Finding;
use crate::finding::{Checked, MOST_FINDINGS, fault};
use crate::forms::Dense;
use crate::meaning::Wrappers;
use crate::numpy;
use crate::objects::{CutFound, Found, Key, MAX_NAME_BYTES, MAX_PATHS, Meaning, Objects};
use crate::pickle::{Id, Value};
use crate::sharded::{self, Cut};

impl Objects<'_> {
    /// Gathers the tensors below `root`, with their names.
    pub(crate) fn gather(&mut self, root: Id) {
        let mut open = vec![(root, 0u32)];
        while let Some((id, path)) = open.pop() {
            if self.findings.len() >= MOST_FINDINGS {
                return;
            }
            if let Some(cut) = self.rank.and_then(|rank| sharded::cut(self.arena, id, rank)) {
                self.take_cut(cut, path);
                continue;
            }
            let mut wrappers = Wrappers::default();
            match self.meaning(id, &mut wrappers) {
                Ok(Meaning::Container) => self.enter(id, path, &mut open),
                Ok(Meaning::Dense(dense)) => {
                    let (name, typed) = self.names(path);
                    self.name_bytes += name.len() + typed.len();
                    self.note_state_dict(path);
                    self.tensors.push(Found { name, typed, dense: *dense });
                }
                Ok(Meaning::Module) => self.enter_module(id, path, &mut open),
                Ok(Meaning::Aside { why, tell, what }) => self.put_aside(id, path, why, tell, what),
                Ok(Meaning::Plain) => {
                    let call = self.arena.as_call(id).and_then(|call| self.class(call));
                    if let Some(((module, name), inside)) = call.and_then(|call| Some((call, self.inside(id)?))) {
                        let (why, lost) = (format!("a {module}.{name} with {}", inside.words()), inside.tensors);
                        self.set_aside(path, why, true, Lost::load(lost, IN_OBJECT));
                    }
                }
                Err(finding) => {
                    let kind = if finding.rule == numpy::RULE { "array" } else { "tensor" };
                    let what = format!("{kind} {:?}: {}", self.names(path).0, finding.what);
                    self.findings.push(Finding { what, ..finding });
                }
            }
            for beside in wrappers.beside {
                self.leave(beside, path, "a tensor");
            }
            if self.is_full() {
                let what = format!(
                    "its containers share their parts, or have long keys: more than {MAX_PATHS} paths through its object, {} names \
                     for the {} things that it makes, or {MAX_NAME_BYTES} bytes of names",
                    self.most_names(),
                    self.arena.calls.len()
                );
                return self.findings.push(Finding::suspicious("resource-limit", what));
            }
        }
        self.find_weights();
    }

    /// Takes this rank's parts of a tensor that is cut. They are found under its name, numbered from the second on.
    fn take_cut(&mut self, cut: Checked<Cut>, path: u32) {
        let (name, typed) = self.names(path);
        let taken = cut.and_then(|cut| {
            let mut parts = Vec::with_capacity(cut.parts.len());
            for (at, (id, (start, shape))) in cut.parts.iter().enumerate() {
                let Meaning::Dense(dense) = self.meaning(*id, &mut Wrappers::default())? else {
                    return fault(
                        "shard-placement",
                        "this rank's part is no dense tensor that safetensors has a type for",
                    );
                };
                // An empty part may have lost the sizes of its other dimensions.
                let is_empty = dense.elements() == 0 && shape.contains(&0);
                if dense.shape != *shape && !is_empty {
                    let found = &dense.shape;
                    return fault(
                        "shard-placement",
                        format!("this rank's part is {found:?}, not {shape:?} at {start:?}"),
                    );
                }
                let name = if at == 0 { name.clone() } else { format!("{name} (part {at})") };
                let dense = Dense { strides: contiguous(shape, &dense), shape: shape.clone(), ..*dense };
                parts.push(Found { name, typed: typed.clone(), dense });
            }
            Ok((cut, parts))
        });
        match taken {
            Ok((cut, parts)) => {
                self.name_bytes += parts.iter().map(|part| part.name.len() + part.typed.len()).sum::<usize>();
                let names = parts.iter().map(|part| part.name.clone()).collect();
                self.tensors.extend(parts);
                self.cut.push(CutFound { name, cut, parts: names });
            }
            Err(finding) => {
                let what = format!("tensor {name:?}: {}", finding.what);
                self.findings.push(Finding { what, ..finding });
            }
        }
    }

    /// Puts what the state dict of a module holds on the list. What PyTorch leaves out of it is listed.
    fn enter_module(&mut self, id: Id, path: u32, open: &mut Vec<(Id, u32)>) {
        let Some(module) = self.module(id) else { return };
        for (key, value) in module.entries {
            let step = self.step(path, Key::Of(key));
            open.push((value, step));
        }
        for (key, _) in module.left_out {
            let step = self.step(path, Key::Of(key));
            self.set_aside(step, "a buffer that state_dict() leaves out".to_owned(), false, NOTHING);
        }
    }

    /// Puts what a container holds on the list, last first, so that it is met in order.
    fn enter(&mut self, id: Id, path: u32, open: &mut Vec<(Id, u32)>) {
        let begin = open.len();
        let members = self.members(id);
        for (key, value) in members.entries() {
            if may_hold(self.arena.get(value)) {
                let step = self.step(path, key);
                open.push((value, step));
            }
        }
        open.get_mut(begin..).unwrap_or_default().reverse();
        let keys: Vec<Id> = members.pairs.iter().map(|(key, _)| *key).filter(|key| self.below.holds(*key)).collect();
        if !keys.is_empty() {
            let count = self.below.count(&keys, &HashSet::new());
            let why = format!("a dictionary with {} among its keys", count.words());
            self.set_aside(path, why, true, Lost::load(count.tensors, IN_OBJECT));
        }
        for beside in members.beside {
            self.leave(beside, path, "a container");
        }
    }
}

/// The strides of a part; those of an empty one say nothing.
fn contiguous(shape: &[u64], dense: &Dense) -> Vec<u64> {
    if shape.len() == dense.strides.len() { dense.strides.clone() } else { vec![1; shape.len()] }
}

/// Whether there can be anything in it.
fn may_hold(value: Value) -> bool {
    let is_plain = matches!(value, Value::None | Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_));
    !is_plain && !matches!(value, Value::Text(_) | Value::Bytes(_) | Value::Global(_))
}
