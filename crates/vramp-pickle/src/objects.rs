//! What the values of a pickle mean to PyTorch: containers with names that lead to tensors over storages.
//!
//! It reads no byte of a storage and opens nothing. `storages` says what is declared, `dense` what a call makes, `numpy` which of them
//! are arrays, `module` what a whole module holds, `below` whether something that is not entered holds tensors, `aside` what that
//! loses: each tensor of the object is found, or is set aside by name. Nothing recurses
//! without a bound.

use std::collections::{HashMap, HashSet};

use crate::aside::{Aside, IN_OBJECT, Lost, NOTHING};
use crate::contained::Below;
use crate::dense::{Dense, Other, Rebuilt, SUBCLASS, rebuilt, subclass};
use crate::finding::Finding;
use crate::pickle::{Arena, Call, Danger, Id, Value, globals};
use crate::sharded::{self, Cut};
use crate::storages::Declared;
use crate::{nested, numpy};

/// Wrappers around one tensor that are looked through.
const MAX_WRAPPERS: usize = 8;
/// Steps of paths that are followed, shared parts counted each time.
const MAX_PATHS: usize = 1 << 20;
/// Names beyond a multiple of what the pickle makes, and that multiple: what is shared has a name for each path to it.
const MOST_NAMES: usize = 1 << 16;
const MOST_SHARED: usize = 8;
/// Bytes of all names together: long keys above many tensors multiply.
const MAX_NAME_BYTES: usize = 128 << 20;
/// Findings that are kept.
pub(crate) const MOST_FINDINGS: usize = 1000;

/// What a value is.
pub(crate) enum Meaning {
    Dense(Box<Dense>),
    /// Named and not converted.
    Aside {
        why: String,
        /// Whether a person should be told without asking.
        tell: bool,
        what: What,
    },
    /// A module that is read as its state dict.
    Module,
    /// Something to look into.
    Container,
    /// Plain data.
    Plain,
}

/// What is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// A tensor, by the word for its kind.
    Tensor(&'static str),
    /// A tensor of a type that safetensors lacks.
    Type,
    /// NumPy's: weights or not, as its place and its type say.
    Array { is_like_weights: bool, is_matrix: bool },
    /// Something with tensors in it that are no parts of what it is.
    Opaque,
}

impl Meaning {
    /// A tensor that is not converted.
    fn other(other: Other) -> Meaning {
        Meaning::Aside { why: other.why.to_owned(), tell: true, what: What::Tensor(other.word) }
    }

    fn unknown(what: &str) -> Meaning {
        Meaning::Aside { why: format!("{UNKNOWN}: {what}"), tell: true, what: What::Opaque }
    }
}

/// A tensor and how its object leads to it.
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) typed: String,
    pub(crate) dense: Dense,
}

/// A tensor that is cut over ranks.
#[derive(Debug, Clone)]
pub struct CutFound {
    /// Its name.
    pub name: String,
    /// How it is cut.
    pub cut: Cut,
    /// The names under which its parts are among the tensors found.
    pub parts: Vec<String>,
}

/// The objects of one pickle.
pub(crate) struct Objects<'a> {
    pub(crate) arena: &'a Arena,
    /// The rank whose file it is, where those of all ranks are put together: tensors that are cut are then taken apart into `cut`.
    pub(crate) rank: Option<u64>,
    pub(crate) cut: Vec<CutFound>,
    pub(crate) storages: HashMap<Id, Declared>,
    pub(crate) tensors: Vec<Found>,
    pub(crate) aside: Vec<Aside>,
    pub(crate) findings: Vec<Finding>,
    pub(crate) paths: Vec<(u32, Key)>,
    pub(crate) name_bytes: usize,
    pub(crate) below: Below<'a>,
    /// The modules that are read as state dicts.
    pub(crate) modules: HashSet<Id>,
    /// Containers with tensors under texts: state dicts, as far as one can say.
    pub(crate) state_dicts: HashSet<u32>,
}

/// One step of the way to a value.
#[derive(Clone, Copy)]
pub(crate) enum Key {
    Root,
    At(usize),
    Of(Id),
}

/// What a container holds.
#[derive(Default)]
pub(crate) struct Members {
    items: Vec<Id>,
    pub(crate) pairs: Vec<(Id, Id)>,
    /// Its state, and arguments that are neither: not entered.
    beside: Vec<Id>,
}

/// What the object itself is called, and how the reason of an unknown object begins.
pub(crate) const ROOT: &str = "the object itself";
pub(crate) const UNKNOWN: &str = "an unknown object";

/// What is looked through on the way to a tensor: how many wrappers, and what they hold beside it.
#[derive(Default)]
pub(crate) struct Wrappers {
    count: usize,
    pub(crate) beside: Vec<Id>,
}

pub(crate) type Checked<T> = Result<T, Finding>;

pub(crate) fn fault<T>(rule: &'static str, what: impl Into<String>) -> Checked<T> {
    Err(Finding::malformed(rule, what))
}

impl<'a> Objects<'a> {
    pub(crate) fn new(arena: &'a Arena) -> Objects<'a> {
        Objects {
            arena,
            rank: None,
            cut: Vec::new(),
            storages: HashMap::new(),
            tensors: Vec::new(),
            aside: Vec::new(),
            findings: Vec::new(),
            paths: vec![(0, Key::Root)],
            name_bytes: 0,
            below: Below::new(arena),
            modules: HashSet::new(),
            state_dicts: HashSet::new(),
        }
    }

    // ---- what a value is

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

    // ---- names

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

    pub(crate) fn is_full(&self) -> bool {
        let names = self.tensors.len() + self.aside.len();
        self.paths.len() > MAX_PATHS || self.name_bytes > MAX_NAME_BYTES || names > self.most_names()
    }

    fn most_names(&self) -> usize {
        self.arena.calls.len().saturating_mul(MOST_SHARED).saturating_add(MOST_NAMES)
    }

    pub(crate) fn step(&mut self, path: u32, key: Key) -> u32 {
        self.paths.push((path, key));
        u32::try_from(self.paths.len() - 1).unwrap_or(u32::MAX)
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

    /// The joined name and the typed path of a value.
    pub(crate) fn names(&self, path: u32) -> (String, String) {
        let mut keys = Vec::new();
        let mut at = path;
        while let Some((up, key)) = self.paths.get(at as usize).filter(|_| at != 0) {
            keys.push(*key);
            at = *up;
        }
        keys.reverse();
        if keys.is_empty() {
            return ("tensor".into(), ROOT.into());
        }
        let (mut name, mut typed) = (String::new(), String::new());
        for key in &keys {
            if name.len() > MAX_NAME_BYTES {
                break; // it is refused for its length
            }
            let dot = if typed.is_empty() { "" } else { "." };
            name += &format!("{dot}{}", self.part(*key));
            typed += &match key {
                Key::Root => String::new(),
                Key::At(at) => format!("[{at}]"),
                Key::Of(id) => format!("[{}]", self.arena.preview(*id)),
            };
        }
        (name, typed)
    }

    fn part(&self, key: Key) -> String {
        match key {
            Key::Root => String::new(),
            Key::At(at) => at.to_string(),
            Key::Of(id) => match self.arena.as_text(id) {
                Some(text) => text.to_owned(),
                None => self.plain_key(id).unwrap_or_else(|| self.arena.in_full(id)),
            },
        }
    }

    /// The values that a joined key path leads to, into the state dicts of modules too if asked: none, one, or several where it is
    /// ambiguous.
    pub(crate) fn find(&self, root: Id, key: &str, into_modules: bool) -> Vec<Id> {
        let (mut open, mut found) = (vec![(root, key)], Vec::new());
        while let Some((id, rest)) = open.pop() {
            let entries = match into_modules.then(|| self.module(id)).flatten() {
                Some(module) => module.entries.into_iter().map(|(key, value)| (Key::Of(key), value)).collect(),
                None => self.members(id).entries().collect::<Vec<_>>(),
            };
            for (key, value) in entries {
                let Some(after) = rest.strip_prefix(self.part(key).as_str()) else { continue };
                match after.strip_prefix('.') {
                    _ if after.is_empty() => found.push(value),
                    Some(after) if open.len() < 1000 => open.push((value, after)),
                    _ => {}
                }
            }
        }
        found
    }

    /// The keys of the object that a person may want to choose by.
    pub(crate) fn top_keys(&self, root: Id) -> Vec<String> {
        let holds = |value: &Id| matches!(self.arena.get(*value), Value::Dict(_) | Value::Call(_) | Value::List(_));
        let pairs = self.members(root).pairs.into_iter();
        pairs.filter(|(_, value)| holds(value)).take(20).map(|(key, _)| self.part(Key::Of(key))).collect()
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

    fn entries(&self) -> impl Iterator<Item = (Key, Id)> {
        let items = self.items.iter().enumerate().map(|(at, item)| (Key::At(at), *item));
        items.chain(self.pairs.iter().map(|(key, value)| (Key::Of(*key), *value)))
    }
}

/// The strides of a part; those of an empty one say nothing.
fn contiguous(shape: &[u64], dense: &Dense) -> Vec<u64> {
    if shape.len() == dense.strides.len() { dense.strides.clone() } else { vec![1; shape.len()] }
}

pub(crate) fn is_container(module: &str, name: &str) -> bool {
    match module {
        "collections" => true,
        "argparse" => name == "Namespace",
        "builtins" => matches!(name, "set" | "frozenset" | "list" | "tuple" | "dict"),
        _ => false,
    }
}

/// Whether there can be anything in it.
fn may_hold(value: Value) -> bool {
    let is_plain = matches!(value, Value::None | Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_));
    !is_plain && !matches!(value, Value::Text(_) | Value::Bytes(_) | Value::Global(_))
}
