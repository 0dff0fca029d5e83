//! What the values of a pickle mean to PyTorch: storages, tensors over them, and containers with names that lead to those.
//!
//! It reads no byte of a storage and opens nothing. Every number of a tensor is checked against its storage before anyone uses it;
//! what is not a plain dense tensor is set aside by name, and the rest is not lost. Nothing recurses without a bound.

use std::collections::HashMap;

use super::kinds::{self, Kind};
use crate::checkpoint::finding::{Finding, Severity};
use crate::checkpoint::pickle::{Arena, Danger, Id, Value, globals};

/// Dimensions of a tensor, as PyTorch limits them.
const MAX_RANK: usize = 64;
/// Wrappers around one tensor that are looked through.
const MAX_WRAPPERS: usize = 8;
/// Steps of paths that are followed, shared parts counted each time.
const MAX_PATHS: usize = 1 << 20;
/// Bytes of all names together: long keys above many tensors multiply.
const MAX_NAME_BYTES: usize = 128 << 20;
/// Findings that are kept.
const MOST_FINDINGS: usize = 1000;

/// A storage as the pickle declares it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Declared {
    pub(crate) key: String,
    pub(crate) kind: Kind,
    /// Elements.
    pub(crate) count: u64,
    /// A part of the storage that is meant: first element and number of elements.
    pub(crate) view: Option<(u64, u64)>,
}

impl Declared {
    /// Bytes of the whole storage.
    pub(crate) fn bytes(&self) -> u64 {
        self.count.saturating_mul(self.kind.bytes)
    }
}

/// A dense tensor: numbers of elements, unless they say bytes.
#[derive(Debug, Clone)]
pub(crate) struct Dense {
    /// The value that is its storage.
    pub(crate) storage: Id,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    pub(crate) offset: u64,
    pub(crate) conj: bool,
    pub(crate) neg: bool,
}

/// What a value is.
enum Meaning {
    Dense(Box<Dense>),
    /// Named and not converted; whether a person should be told without asking.
    Aside {
        why: String,
        tell: bool,
    },
    /// Something to look into.
    Container,
    /// Plain data.
    Plain,
}

/// A tensor and how its object leads to it.
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) typed: String,
    pub(crate) dense: Dense,
}

/// Something that was passed over.
pub(crate) struct Aside {
    pub(crate) name: String,
    pub(crate) why: String,
    pub(crate) tell: bool,
}

/// The objects of one pickle.
pub(crate) struct Objects<'a> {
    pub(crate) arena: &'a Arena,
    pub(crate) storages: HashMap<Id, Declared>,
    pub(crate) tensors: Vec<Found>,
    pub(crate) aside: Vec<Aside>,
    pub(crate) findings: Vec<Finding>,
    paths: Vec<(u32, Key)>,
}

/// One step of the way to a value.
#[derive(Clone, Copy)]
enum Key {
    Root,
    At(usize),
    Of(Id),
}

type Checked<T> = Result<T, Finding>;

fn fault<T>(rule: &'static str, what: impl Into<String>) -> Checked<T> {
    Err(Finding::malformed(rule, what))
}

impl<'a> Objects<'a> {
    pub(crate) fn new(arena: &'a Arena) -> Objects<'a> {
        let (storages, paths) = (HashMap::new(), vec![(0, Key::Root)]);
        Objects { arena, storages, tensors: Vec::new(), aside: Vec::new(), findings: Vec::new(), paths }
    }

    // ---- storages

    /// Reads every storage that the pickle declares, also one that no tensor has.
    pub(crate) fn declare(&mut self) {
        let mut by_key: HashMap<String, Declared> = HashMap::new();
        for at in 0..self.arena.values.len() {
            let id = Id::try_from(at).unwrap_or(Id::MAX);
            let Value::Persistent(inner) = self.arena.get(id) else { continue };
            if self.findings.len() >= MOST_FINDINGS {
                return;
            }
            match self.declared(inner) {
                Ok(storage) => {
                    let first = by_key.entry(storage.key.clone()).or_insert_with(|| storage.clone());
                    if first.kind != storage.kind {
                        let (key, one, other) = (&storage.key, first.kind.name, storage.kind.name);
                        self.findings.push(Finding::malformed(
                            "storage-dtype",
                            format!("storage {key:?} is of {one} and of {other}"),
                        ));
                    } else if first.count != storage.count {
                        let (key, one, other) = (&storage.key, first.count, storage.count);
                        self.findings.push(Finding::malformed(
                            "storage-size",
                            format!("storage {key:?} has {one} and {other} elements"),
                        ));
                    }
                    self.storages.insert(id, storage);
                }
                Err(finding) => self.findings.push(finding),
            }
        }
    }

    fn declared(&self, inner: Id) -> Checked<Declared> {
        let arena = self.arena;
        let fields = arena.as_tuple(inner).unwrap_or_default();
        let ([word, class, key, place, count] | [word, class, key, place, count, _]) = fields else {
            return fault("persistent-id", format!("a persistent id that is no storage: {}", arena.preview(inner)));
        };
        if arena.as_text(*word) != Some("storage") || arena.as_text(*place).is_none() {
            return fault("persistent-id", format!("a persistent id that is no storage: {}", arena.preview(inner)));
        }
        let Some(key) =
            arena.as_text(*key).map(str::to_owned).or_else(|| arena.as_int(*key).map(|key| key.to_string()))
        else {
            return fault("persistent-id", "the key of a storage is no text");
        };
        if key.is_empty() || key.contains(['/', '\\', '\0']) || key.contains("..") {
            return fault("record-name", format!("{key:?} cannot be the key of a storage"));
        }
        let kind = arena.as_global(*class).and_then(|(module, name)| kinds::of_storage(module, name));
        let Some(kind) = kind else {
            return fault(
                "dtype-unknown",
                format!("storage {key:?} is of {}, which is no storage", arena.preview(*class)),
            );
        };
        let count = self.number(*count, "the size of a storage")?;
        if count.checked_mul(kind.bytes).is_none() {
            return fault("overflow", format!("storage {key:?} of {count} elements"));
        }
        let view = fields.get(5).map_or(Ok(None), |view| self.view(*view, count))?;
        Ok(Declared { key, kind, count, view })
    }

    /// The part of a storage that a legacy file's storage is, where it is one.
    fn view(&self, view: Id, count: u64) -> Checked<Option<(u64, u64)>> {
        if self.arena.get(view) == Value::None {
            return Ok(None);
        }
        let Some([_, offset, len]) = self.arena.as_tuple(view) else {
            return fault("persistent-id", "the view of a storage is no key, offset and size");
        };
        let (offset, len) = (self.number(*offset, "the offset of a view")?, self.number(*len, "the size of a view")?);
        match offset.checked_add(len) {
            Some(end) if end <= count => Ok(Some((offset, len))),
            _ => fault("bounds", format!("a view of {len} elements from {offset} on, of a storage of {count}")),
        }
    }

    fn number(&self, id: Id, what: &str) -> Checked<u64> {
        match self.arena.get(id) {
            Value::Int(number) => {
                u64::try_from(number).or_else(|_| fault("number-range", format!("{what} is {number}")))
            }
            Value::Big(_) => fault("number-range", format!("{what} has more than 64 bits")),
            _ => fault("argument-type", format!("{what} is {}", self.arena.preview(id))),
        }
    }

    fn numbers(&self, id: Id, what: &str) -> Checked<Vec<u64>> {
        let inner = match self.arena.as_call(id).map(|call| (self.arena.as_global(call.function), call.arguments)) {
            Some((Some(("torch", "Size")), arguments)) => {
                self.arena.as_tuple(arguments).and_then(|inner| inner.first().copied())
            }
            _ => Some(id),
        };
        let Some(items) = inner.and_then(|inner| self.arena.as_sequence(inner)) else {
            return fault("argument-type", format!("{what} is {}", self.arena.preview(id)));
        };
        if items.len() > MAX_RANK {
            return fault("rank-limit", format!("{what} has {} dimensions, {MAX_RANK} are the most", items.len()));
        }
        items.iter().map(|item| self.number(*item, what)).collect()
    }

    // ---- tensors

    fn meaning(&self, id: Id, wrappers: usize) -> Checked<Meaning> {
        match self.arena.get(id) {
            Value::Dict(_) | Value::List(_) | Value::Tuple(_) | Value::Set(_) | Value::FrozenSet(_) => {
                Ok(Meaning::Container)
            }
            Value::Persistent(_) => Ok(Meaning::Aside { why: "a storage without a tensor".into(), tell: true }),
            Value::Call(_) => {
                let Some(call) = self.arena.as_call(id) else { return Ok(Meaning::Plain) };
                let meaning = self.called(call.function, call.arguments, wrappers)?;
                match (&meaning, call.list.or(call.dict), call.state) {
                    (Meaning::Dense(_), Some(_), _) => fault("setitem-target", "items are set on a tensor"),
                    (Meaning::Dense(_), _, Some(_)) => fault("build-target", "a tensor is given a state afterwards"),
                    _ => Ok(meaning),
                }
            }
            _ => Ok(Meaning::Plain),
        }
    }

    fn called(&self, function: Id, arguments: Id, wrappers: usize) -> Checked<Meaning> {
        let Some((module, name)) = self.arena.as_global(function) else { return Ok(unknown("the result of a call")) };
        let Some(arguments) = self.arena.as_tuple(arguments) else {
            return fault("argument-type", format!("the arguments of {module}.{name} are no tuple"));
        };
        let aside = |why: &str| Ok(Meaning::Aside { why: why.to_owned(), tell: true });
        match (globals::modern(module), name) {
            ("torch._utils", "_rebuild_tensor") => self.dense(arguments, Form::V1),
            ("torch._utils", "_rebuild_tensor_v2") => self.dense(arguments, Form::V2),
            ("torch._utils", "_rebuild_tensor_v3") => self.dense(arguments, Form::V3),
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
                self.wrapped(arguments, wrappers)
            }
            ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor") => self.wrapped(arguments, wrappers),
            ("torch._tensor" | "torch.tensor", "_rebuild_from_type_v2" | "_rebuild_from_type") => {
                self.typed(arguments, wrappers)
            }
            ("torch._utils", "_rebuild_qtensor") => aside("a quantised tensor"),
            ("torch._utils", "_rebuild_sparse_tensor" | "_rebuild_sparse_csr_tensor") => aside("a sparse tensor"),
            ("torch._utils", "_rebuild_meta_tensor_no_storage") => aside("a meta tensor: it has a shape and no data"),
            ("torch._utils", "_rebuild_nested_tensor") => aside("a nested tensor"),
            ("torch._utils", "_rebuild_wrapper_subclass") => aside("a tensor of a wrapper subclass"),
            ("torch._utils", "_rebuild_device_tensor_from_numpy" | "_rebuild_xla_tensor") => {
                aside("a tensor that a device wrote by way of NumPy")
            }
            ("torch.nn.parameter", "Parameter" | "Buffer") if !arguments.is_empty() => {
                self.wrapped(arguments, wrappers)
            }
            (module, "DTensor") if module.starts_with("torch.") => aside("a distributed tensor (DTensor)"),
            ("collections", _) | ("argparse", "Namespace") => Ok(Meaning::Container),
            ("builtins", "set" | "frozenset" | "list" | "tuple" | "dict") => Ok(Meaning::Container),
            (module, "_reconstruct" | "_frombuffer") if module.starts_with("numpy") => {
                Ok(Meaning::Aside { why: "a NumPy array, no tensor".into(), tell: false })
            }
            (module, name) => match globals::danger(module, name) {
                Danger::Allowed => Ok(Meaning::Plain),
                _ => Ok(unknown(&format!("{module}.{name}"))),
            },
        }
    }

    fn wrapped(&self, arguments: &[Id], wrappers: usize) -> Checked<Meaning> {
        let Some(inner) = arguments.first().filter(|_| wrappers < MAX_WRAPPERS) else {
            return fault("argument-shape", "a wrapper around no tensor");
        };
        match self.meaning(*inner, wrappers + 1)? {
            Meaning::Container | Meaning::Plain => {
                fault("argument-type", format!("a parameter of {}, which is no tensor", self.arena.preview(*inner)))
            }
            meaning => Ok(meaning),
        }
    }

    /// `_rebuild_from_type_v2(function, type, arguments, state)`.
    fn typed(&self, arguments: &[Id], wrappers: usize) -> Checked<Meaning> {
        let [function, class, inner, _] = arguments else {
            return fault("argument-shape", format!("_rebuild_from_type_v2 has {} arguments", arguments.len()));
        };
        if wrappers >= MAX_WRAPPERS {
            return fault("argument-shape", "too many wrappers around a tensor");
        }
        match self.arena.as_global(*class) {
            Some(("torch" | "torch._tensor", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer")) => {
                self.called(*function, *inner, wrappers + 1)
            }
            Some((module, name)) => {
                Ok(Meaning::Aside { why: format!("a tensor of the subclass {module}.{name}"), tell: true })
            }
            None => fault("argument-type", "the type of a tensor is no class"),
        }
    }

    fn dense(&self, arguments: &[Id], form: Form) -> Checked<Meaning> {
        let (least, most) = form.arguments();
        if arguments.len() < least || arguments.len() > most {
            let count = arguments.len();
            return fault(
                "argument-shape",
                format!("a tensor is rebuilt from {count} arguments; {least} to {most} are known"),
            );
        }
        let [storage, offset, size, stride, ..] = arguments else {
            return fault("argument-shape", "too few arguments");
        };
        if !matches!(self.arena.get(*storage), Value::Persistent(_)) {
            return fault(
                "argument-type",
                format!("a tensor over {}, which is no storage", self.arena.preview(*storage)),
            );
        }
        // A storage that is wrong has a finding of its own.
        let Some(declared) = self.storages.get(storage) else { return Ok(Meaning::Plain) };
        let kind = match form {
            Form::V3 => {
                let class = arguments.get(6).and_then(|class| self.arena.as_global(*class));
                match class.and_then(|(module, name)| kinds::of_dtype(module, name)) {
                    Some(kind) => kind,
                    None => return fault("dtype-unknown", "a tensor of an unknown element type"),
                }
            }
            _ if declared.kind.is_untyped() => return fault("argument-type", "a tensor without an element type"),
            _ => declared.kind.clone(),
        };
        let offset = self.number(*offset, "the offset of a tensor")?;
        let shape = self.numbers(*size, "the shape of a tensor")?;
        let strides = self.numbers(*stride, "the strides of a tensor")?;
        let (conj, neg) = self.lazy_bits(arguments.get(least))?;
        let dense = Dense { storage: *storage, kind, shape, strides, offset, conj, neg };
        dense.check(declared)?;
        Ok(match dense.kind.dtype {
            None => {
                Meaning::Aside { why: format!("a tensor of {}, which safetensors lacks", dense.kind.name), tell: true }
            }
            Some(_) => Meaning::Dense(Box::new(dense)),
        })
    }

    fn lazy_bits(&self, metadata: Option<&Id>) -> Checked<(bool, bool)> {
        let Some(metadata) = metadata.filter(|id| self.arena.get(**id) != Value::None) else {
            return Ok((false, false));
        };
        if self.arena.as_dict(*metadata).is_none() {
            return fault("argument-type", "the metadata of a tensor are no dictionary");
        }
        let bit = |name| match self.arena.member(*metadata, name).map(|id| self.arena.get(id)) {
            None => Ok(false),
            Some(Value::Bool(bit)) => Ok(bit),
            Some(_) => fault("argument-type", format!("the {name} bit of a tensor is no truth value")),
        };
        Ok((bit("conj")?, bit("neg")?))
    }

    // ---- names

    /// Gathers the tensors below `root`, with their names.
    pub(crate) fn gather(&mut self, root: Id) {
        let mut open = vec![(root, 0u32)];
        let mut name_bytes = 0;
        while let Some((id, path)) = open.pop() {
            if self.paths.len() > MAX_PATHS || name_bytes > MAX_NAME_BYTES {
                let what =
                    format!("more than {MAX_PATHS} paths through its object, or {MAX_NAME_BYTES} bytes of names");
                return self.findings.push(Finding::suspicious("resource-limit", what));
            }
            if self.findings.len() >= MOST_FINDINGS {
                return;
            }
            match self.meaning(id, 0) {
                Ok(Meaning::Container) => self.enter(id, path, &mut open),
                Ok(Meaning::Dense(dense)) => {
                    let (name, typed) = self.names(path);
                    name_bytes += name.len() + typed.len();
                    self.tensors.push(Found { name, typed, dense: *dense });
                }
                Ok(Meaning::Aside { why, tell }) => {
                    let (name, _) = self.names(path);
                    self.aside.push(Aside { name, why, tell });
                }
                Ok(Meaning::Plain) => {}
                Err(finding) => {
                    let (name, _) = self.names(path);
                    let what = format!("tensor {name:?}: {}", finding.what);
                    self.findings.push(Finding { what, ..finding });
                }
            }
        }
    }

    /// Puts what a container holds on the list, last first, so that it is met in order.
    fn enter(&mut self, id: Id, path: u32, open: &mut Vec<(Id, u32)>) {
        let begin = open.len();
        let mut items: Vec<(Key, Id)> = Vec::new();
        if let Some(sequence) = self.sequence(id) {
            items.extend(sequence.iter().enumerate().map(|(at, item)| (Key::At(at), *item)));
        }
        items.extend(self.pairs(id).map(|(key, value)| (Key::Of(key), value)));
        for (key, value) in items {
            let holds = !matches!(
                self.arena.get(value),
                Value::None
                    | Value::Bool(_)
                    | Value::Int(_)
                    | Value::Big(_)
                    | Value::Float(_)
                    | Value::Text(_)
                    | Value::Bytes(_)
                    | Value::Global(_)
            );
            if holds {
                self.paths.push((path, key));
                open.push((value, u32::try_from(self.paths.len() - 1).unwrap_or(u32::MAX)));
            }
        }
        open.get_mut(begin..).unwrap_or_default().reverse();
    }

    /// The pairs that a call would make a dictionary of: Python 2 writes `OrderedDict([[key, value], …])`.
    fn listed_pairs(&self, id: Id) -> Option<Vec<(Id, Id)>> {
        let call = self.arena.as_call(id)?;
        let class = self.arena.as_global(call.function)?;
        let makes_dict =
            matches!((globals::modern(class.0), class.1), ("collections", "OrderedDict") | ("builtins", "dict"));
        let listed = self.arena.as_tuple(call.arguments)?.first().filter(|_| makes_dict)?;
        let pair = |item: &Id| match self.arena.as_sequence(*item)? {
            [key, value] => Some((*key, *value)),
            _ => None,
        };
        self.arena.as_sequence(*listed)?.iter().map(pair).collect()
    }

    /// The items of a list, a tuple, a set, or of what a call would make of one.
    fn sequence(&self, id: Id) -> Option<&'a [Id]> {
        let arena = self.arena;
        if self.listed_pairs(id).is_some() {
            return None;
        }
        match arena.get(id) {
            Value::List(list) | Value::Set(list) => Some(arena.list(list)),
            Value::Tuple(span) | Value::FrozenSet(span) => Some(arena.items(span)),
            Value::Call(_) => {
                let call = arena.as_call(id)?;
                let inner = arena.as_tuple(call.arguments)?.first().copied();
                let listed = call.list.map(|list| arena.list(list));
                listed.or_else(|| inner.and_then(|inner| arena.as_sequence(inner)))
            }
            _ => None,
        }
    }

    /// The pairs of a dictionary, of what a call would make of one, or of an object's attributes.
    fn pairs(&self, id: Id) -> impl Iterator<Item = (Id, Id)> + use<'a> {
        let arena = self.arena;
        let call = arena.as_call(id);
        let is_namespace =
            call.and_then(|call| arena.as_global(call.function)).is_some_and(|(_, name)| name == "Namespace");
        let state = call.and_then(|call| call.state).filter(|_| is_namespace).and_then(|state| arena.as_dict(state));
        let inner = call.and_then(|call| {
            arena.as_tuple(call.arguments)?.iter().find_map(|inner| match arena.get(*inner) {
                Value::Dict(dict) => Some(arena.dict(dict)),
                _ => None,
            })
        });
        let own = arena.as_dict(id).unwrap_or_default();
        let listed = self.listed_pairs(id).unwrap_or_default();
        listed.into_iter().chain(own.iter().chain(state.unwrap_or_default()).chain(inner.unwrap_or_default()).copied())
    }

    /// The joined name and the typed path of a value.
    fn names(&self, path: u32) -> (String, String) {
        let mut keys = Vec::new();
        let mut at = path;
        while let Some((up, key)) = self.paths.get(at as usize).filter(|_| at != 0) {
            keys.push(*key);
            at = *up;
        }
        keys.reverse();
        if keys.is_empty() {
            return ("tensor".into(), "the object itself".into());
        }
        let parts: Vec<String> = keys.iter().map(|key| self.part(*key)).collect();
        let typed = keys.iter().map(|key| match key {
            Key::Root => String::new(),
            Key::At(at) => format!("[{at}]"),
            Key::Of(id) => format!("[{}]", self.arena.preview(*id)),
        });
        (parts.join("."), typed.collect())
    }

    fn part(&self, key: Key) -> String {
        match key {
            Key::Root => String::new(),
            Key::At(at) => at.to_string(),
            Key::Of(id) => self.arena.as_text(id).map_or_else(|| self.arena.preview(id), str::to_owned),
        }
    }

    /// The values that a joined key path leads to: none, one, or several where it is ambiguous.
    pub(crate) fn find(&self, root: Id, key: &str) -> Vec<Id> {
        let (mut open, mut found) = (vec![(root, key)], Vec::new());
        while let Some((id, rest)) = open.pop() {
            let sequence = self.sequence(id).unwrap_or_default().iter().enumerate();
            let members = sequence.map(|(at, item)| (Key::At(at), *item));
            for (key, value) in members.chain(self.pairs(id).map(|(key, value)| (Key::Of(key), value))) {
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
        self.pairs(root).filter(|(_, value)| holds(value)).take(20).map(|(key, _)| self.part(Key::Of(key))).collect()
    }
}

fn unknown(what: &str) -> Meaning {
    Meaning::Aside { why: format!("an unknown object: {what}"), tell: true }
}

/// The generations of the function that makes a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    V1,
    V2,
    V3,
}

impl Form {
    /// Arguments without the last, optional one, and with it.
    fn arguments(self) -> (usize, usize) {
        match self {
            Form::V1 => (4, 4),
            Form::V2 => (6, 7),
            Form::V3 => (7, 8),
        }
    }
}

impl Dense {
    /// Number of elements.
    pub(crate) fn elements(&self) -> u64 {
        if self.shape.contains(&0) { 0 } else { self.shape.iter().product() }
    }

    fn check(&self, storage: &Declared) -> Checked<()> {
        if self.shape.len() != self.strides.len() {
            let (dims, strides) = (self.shape.len(), self.strides.len());
            return fault("argument-shape", format!("{dims} dimensions and {strides} strides"));
        }
        let elements = self.shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
        let empty = self.shape.contains(&0);
        if !empty && elements.and_then(|elements| elements.checked_mul(self.kind.bytes)).is_none() {
            return fault("overflow", format!("its shape {:?} has more than 2^64 bytes", self.shape));
        }
        if empty {
            return Ok(());
        }
        let reach = |(dim, stride): (&u64, &u64)| (dim - 1).checked_mul(*stride);
        let last =
            self.shape.iter().zip(&self.strides).map(reach).try_fold(self.offset, |sum, reach| sum.checked_add(reach?));
        let end = last.and_then(|last| last.checked_add(1)?.checked_mul(self.kind.bytes));
        let has = storage.view.map_or(storage.count, |(_, count)| count).saturating_mul(storage.kind.bytes);
        match end {
            Some(end) if end <= has => Ok(()),
            Some(end) => fault("bounds", format!("it ends at byte {end} of a storage of {has}")),
            None => fault("overflow", "its last element lies beyond 64 bits"),
        }
    }

    /// Dimensions as (elements, bytes from one to the next), with those that are one run joined; empty for a scalar.
    pub(crate) fn dims(&self) -> Vec<(u64, u64)> {
        let mut dims: Vec<(u64, u64)> = Vec::new();
        for (dim, stride) in self.shape.iter().zip(&self.strides).filter(|(dim, _)| **dim != 1) {
            let stride = stride.saturating_mul(self.kind.bytes);
            match dims.last_mut() {
                Some(outer) if outer.1 == stride.saturating_mul(*dim) => {
                    *outer = (outer.0.saturating_mul(*dim), stride)
                }
                _ => dims.push((*dim, stride)),
            }
        }
        dims
    }

    /// Whether the elements lie row-major without a gap.
    pub(crate) fn is_contiguous(&self) -> bool {
        match self.dims().as_slice() {
            [] => true,
            [(_, stride)] => *stride == self.kind.bytes,
            _ => self.elements() == 0,
        }
    }
}

/// What a person is told of a set of findings.
pub(crate) fn blocks(finding: &Finding, skip_unknown: bool) -> bool {
    let passed_over = skip_unknown && finding.rule == "global-not-allowed" && finding.severity == Severity::Suspicious;
    let too_wide = finding.rule == "integer-limit";
    (finding.severity.blocks() || too_wide) && !passed_over
}
