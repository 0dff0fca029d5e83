//! What the values of a pickle mean to PyTorch: containers with names that lead to tensors over storages.
//!
//! It reads no byte of a storage and opens nothing. `storages` says what is declared, `dense` what a call makes, `numpy` which of them
//! are arrays, `module` what a whole module holds, `below` whether something that is not entered holds tensors, `aside` what that
//! loses: each tensor of the object is found, or is set aside by name. Nothing recurses
//! without a bound.

use std::collections::{HashMap, HashSet};

use crate::aside::{Aside, ROOT, UNKNOWN};
use crate::contained::Below;
use crate::declared::Declared;
use crate::finding::Finding;
use crate::forms::{Dense, Other};
use crate::pickle::{Arena, Id, Value};
use crate::sharded::Cut;

/// Steps of paths that are followed, shared parts counted each time.
pub(crate) const MAX_PATHS: usize = 1 << 20;
/// Names beyond a multiple of what the pickle makes, and that multiple: what is shared has a name for each path to it.
const MOST_NAMES: usize = 1 << 16;
const MOST_SHARED: usize = 8;
/// Bytes of all names together: long keys above many tensors multiply.
pub(crate) const MAX_NAME_BYTES: usize = 128 << 20;

/// What a value is.
pub(crate) enum Meaning {
    Dense(Box<Dense>),
    /// Named and not converted.
    Aside {
        why: String,
        /// Whether it is a warning.
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
    pub(crate) fn other(other: Other) -> Meaning {
        Meaning::Aside { why: other.why.to_owned(), tell: true, what: What::Tensor(other.word) }
    }

    pub(crate) fn unknown(what: &str) -> Meaning {
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

    pub(crate) fn is_full(&self) -> bool {
        let names = self.tensors.len() + self.aside.len();
        self.paths.len() > MAX_PATHS || self.name_bytes > MAX_NAME_BYTES || names > self.most_names()
    }

    pub(crate) fn most_names(&self) -> usize {
        self.arena.calls.len().saturating_mul(MOST_SHARED).saturating_add(MOST_NAMES)
    }

    pub(crate) fn step(&mut self, path: u32, key: Key) -> u32 {
        self.paths.push((path, key));
        u32::try_from(self.paths.len() - 1).unwrap_or(u32::MAX)
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

    pub(crate) fn part(&self, key: Key) -> String {
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
