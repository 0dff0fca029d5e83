//! What one value of a pickle means: a tensor, a container, a module, plain data, or something that is set aside.

use crate::finding::{Checked, fault};
use crate::forms::{Other, Rebuilt, SUBCLASS, rebuilt, subclass};
use crate::objects::{Meaning, Objects, What};
use crate::pickle::{Call, Danger, Id, Value, globals};
use crate::{nested, numpy};

/// Wrappers around one tensor that are looked through.
const MAX_WRAPPERS: usize = 8;

/// What is looked through on the way to a tensor: how many wrappers, and what they hold beside it.
#[derive(Default)]
pub(crate) struct Wrappers {
    count: usize,
    pub(crate) beside: Vec<Id>,
}

pub(crate) fn is_container(module: &str, name: &str) -> bool {
    match module {
        "collections" => true,
        "argparse" => name == "Namespace",
        "builtins" => matches!(name, "set" | "frozenset" | "list" | "tuple" | "dict"),
        _ => false,
    }
}

impl<'a> Objects<'a> {
    pub(crate) fn meaning(&self, id: Id, wrappers: &mut Wrappers) -> Checked<Meaning> {
        match self.arena.get(id) {
            Value::Dict(_) | Value::List(_) | Value::Tuple(_) | Value::Set(_) | Value::FrozenSet(_) => {
                Ok(Meaning::Container)
            }
            Value::Persistent(_) => {
                Ok(Meaning::other(Other { word: "bare storage", why: "a storage without a tensor" }))
            }
            Value::Call(_) => {
                let Some(call) = self.arena.as_call(id) else { return Ok(Meaning::Plain) };
                let meaning = match self.class(call) {
                    _ if self.modules.contains(&id) => return Ok(Meaning::Module),
                    Some((module, name)) if numpy::is_numpy(module, name) => {
                        let made = self.array(name, call)?;
                        let (is_like_weights, is_matrix) = made.is_like_weights();
                        let what = What::Array { is_like_weights, is_matrix };
                        return Ok(Meaning::Aside { why: made.words, tell: name != "scalar", what });
                    }
                    Some(("builtins", "getattr")) => {
                        let named = nested::named(self.arena, call).map(|(module, name, _)| format!("{module}.{name}"));
                        return Ok(Meaning::unknown(named.as_deref().unwrap_or("builtins.getattr")));
                    }
                    _ => self.called(call.function, call.arguments, wrappers)?,
                };
                match (&meaning, call.list.or(call.dict), call.state) {
                    (Meaning::Dense(_), Some(_), _) => fault("setitem-target", "items are set on a tensor"),
                    (Meaning::Dense(_), _, Some(_)) => fault("build-target", "a tensor is given a state afterwards"),
                    _ => Ok(meaning),
                }
            }
            _ => Ok(Meaning::Plain),
        }
    }

    fn called(&self, function: Id, arguments: Id, wrappers: &mut Wrappers) -> Checked<Meaning> {
        let Some((module, name)) = self.class_of(function, arguments) else {
            let class = nested::path(self.arena, function).map(|(module, name)| format!("{module}.{name}"));
            return Ok(Meaning::unknown(class.as_deref().unwrap_or("the result of a call")));
        };
        let Some(arguments) = self.arena.as_tuple(arguments) else {
            return fault("argument-type", format!("the arguments of {module}.{name} are no tuple"));
        };
        let is_function = self.arena.as_global(function).is_some_and(|named| named.1 == name);
        match rebuilt(module, name).filter(|_| is_function) {
            Some(Rebuilt::Dense(form)) => {
                // Hooks, and what later generations added: no tensor should be there, and none is to be lost.
                wrappers.beside.extend(arguments.iter().skip(5));
                self.dense(arguments, form)
            }
            Some(Rebuilt::Wrapped) if !arguments.is_empty() || name.starts_with("_rebuild") => {
                self.wrapped(arguments, wrappers)
            }
            Some(Rebuilt::Typed) => self.typed(arguments, wrappers),
            Some(Rebuilt::Other(other)) => Ok(Meaning::other(other)),
            _ if is_container(module, name) => Ok(Meaning::Container),
            _ => match globals::danger(module, name) {
                Danger::Allowed if (module, name) != ("builtins", "object") => Ok(Meaning::Plain),
                _ => Ok(Meaning::unknown(&format!("{module}.{name}"))),
            },
        }
    }

    /// The class or function that is called. Protocols 0 and 1 make an object by way of `copyreg._reconstructor(class, …)`.
    fn class_of(&self, function: Id, arguments: Id) -> Option<(&'a str, &'a str)> {
        let (module, name) = self.arena.as_global(function)?;
        let class = match (globals::modern(module), name) {
            ("copyreg", "_reconstructor") => self.arena.as_global(*self.arena.as_tuple(arguments)?.first()?)?,
            _ => (module, name),
        };
        Some((globals::modern(class.0), class.1))
    }

    pub(crate) fn class(&self, call: &Call) -> Option<(&'a str, &'a str)> {
        self.class_of(call.function, call.arguments)
    }

    fn wrapped(&self, arguments: &[Id], wrappers: &mut Wrappers) -> Checked<Meaning> {
        let Some((inner, beside)) = arguments.split_first().filter(|_| wrappers.count < MAX_WRAPPERS) else {
            return fault("argument-shape", "a wrapper around no tensor");
        };
        wrappers.count += 1;
        wrappers.beside.extend(beside);
        match self.meaning(*inner, wrappers)? {
            Meaning::Container | Meaning::Plain | Meaning::Module => {
                fault("argument-type", format!("a parameter of {}, which is no tensor", self.arena.preview(*inner)))
            }
            meaning => Ok(meaning),
        }
    }

    /// `_rebuild_from_type_v2(function, type, arguments, state)`.
    fn typed(&self, arguments: &[Id], wrappers: &mut Wrappers) -> Checked<Meaning> {
        let [function, class, inner, state] = arguments else {
            return fault("argument-shape", format!("_rebuild_from_type_v2 has {} arguments", arguments.len()));
        };
        if wrappers.count >= MAX_WRAPPERS {
            return fault("argument-shape", "too many wrappers around a tensor");
        }
        wrappers.count += 1;
        let Some((module, name)) = self.arena.as_global(*class) else {
            return fault("argument-type", "the type of a tensor is no class");
        };
        match subclass(module, name) {
            None => {
                wrappers.beside.push(*state);
                self.called(*function, *inner, wrappers)
            }
            Some(other) if other == SUBCLASS => {
                let why = format!("{} {module}.{name}", other.why);
                Ok(Meaning::Aside { why, tell: true, what: What::Tensor(other.word) })
            }
            Some(other) => Ok(Meaning::other(other)),
        }
    }
}
