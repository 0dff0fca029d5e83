//! A module that was pickled as a whole, `torch.save(model)`, read as its state dict: parameters, persistent buffers, sub-modules.
//!
//! The class of a module is code that is not in the file, and is never looked for: what counts is the state that PyTorch gives every
//! module, `_parameters`, `_buffers` and `_modules`. Everything else that hangs on it stays where it is.

use std::collections::HashSet;

use crate::objects::Objects;
use crate::pickle::{Danger, Id, Value, globals};

/// What the state dict of a module holds, in PyTorch's order.
pub(crate) struct Module {
    /// Names and values: tensors, and modules.
    pub(crate) entries: Vec<(Id, Id)>,
    /// Buffers that PyTorch leaves out.
    pub(crate) left_out: Vec<(Id, Id)>,
    /// The dictionaries that it was read from.
    pub(crate) parts: Vec<Id>,
    /// The modules in it.
    modules: Vec<Id>,
}

impl Objects<'_> {
    /// The module that a value is, if it is one.
    pub(crate) fn module(&self, id: Id) -> Option<Module> {
        let arena = self.arena;
        let call = arena.as_call(id)?;
        if self.class(call).is_some_and(|(module, name)| globals::danger(module, name) != Danger::Unknown) {
            return None;
        }
        let attributes = self.attributes(call.state?)?;
        let attribute = |name: &str| {
            let mut found =
                attributes.iter().filter(|(key, _)| arena.as_text(*key) == Some(name)).map(|(_, value)| *value);
            found.next().filter(|_| found.next().is_none())
        };
        let (parameters, modules) = (attribute("_parameters")?, attribute("_modules")?);
        let buffers = attribute("_buffers");
        let outside: HashSet<&str> = match attribute("_non_persistent_buffers_set") {
            Some(set) => self.members(set).texts(arena).collect(),
            None => HashSet::new(),
        };
        let pairs = |dict: Id| {
            let is_dict = arena.as_dict(dict).is_some();
            let present = |(_, value): &(Id, Id)| arena.get(*value) != Value::None;
            let pairs = if is_dict { self.members(dict).pairs } else { Vec::new() };
            is_dict.then(|| pairs.into_iter().filter(present).collect::<Vec<_>>())
        };
        let is_outside = |(key, _): &(Id, Id)| arena.as_text(*key).is_some_and(|key| outside.contains(key));
        let (left_out, kept) = match buffers {
            Some(buffers) => pairs(buffers)?.into_iter().partition(is_outside),
            None => (Vec::new(), Vec::new()),
        };
        let modules_in = pairs(modules)?;
        let parts = [Some(parameters), buffers, Some(modules)].into_iter().flatten().collect();
        let inner = modules_in.iter().map(|(_, module)| *module).collect();
        let entries = pairs(parameters)?.into_iter().chain(kept).chain(modules_in).collect();
        Some(Module { entries, left_out, parts, modules: inner })
    }

    /// Reads the object that was asked for as a module, if it is one, and all modules in it.
    pub(crate) fn open_module(&mut self, root: Id) {
        let mut open = vec![root];
        while let Some(id) = open.pop() {
            if let Some(module) = self.module(id)
                && self.modules.insert(id)
            {
                open.extend(module.modules);
            }
        }
    }
}
