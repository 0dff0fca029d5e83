//! The storages that a pickle declares by persistent ids: key, type and size of each, and which tensors lie over it.
//!
//! It reads no byte of one, and compares what the pickle says of the same storage in several places.

use std::collections::{BTreeMap, HashMap};

use crate::declared::Declared;
use crate::finding::Finding;
use crate::finding::{Checked, MOST_FINDINGS, fault};
use crate::kinds;
use crate::objects::Objects;
use crate::pickle::{Id, Value};
use vramp_text::{Listed, quoted};

impl Objects<'_> {
    /// Reads every storage that the pickle declares and that counts, also one that no tensor has.
    pub(crate) fn declare(&mut self, counts: impl Fn(Id) -> bool) {
        let mut by_key: HashMap<String, Declared> = HashMap::new();
        for at in 0..self.arena.values.len() {
            let id = Id::try_from(at).unwrap_or(Id::MAX);
            let Value::Persistent(inner) = self.arena.get(id) else { continue };
            // The class of a module, as old PyTorch writes it, is no storage.
            if !counts(id) || self.arena.as_global(id).is_some() {
                continue;
            }
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

    /// The storages by their keys, each with the tensors over it.
    pub(crate) fn storages_by_key(&self) -> BTreeMap<&str, (&Declared, Listed)> {
        let by_key = |declared| -> (&str, (&Declared, Listed)) { (declared_key(declared), (declared, Listed::new())) };
        let mut all: BTreeMap<&str, (&Declared, Listed)> = self.storages.values().map(by_key).collect();
        for found in &self.tensors {
            let key = self.storages.get(&found.dense.storage).map(declared_key);
            if let Some((_, names)) = key.and_then(|key| all.get_mut(key)) {
                names.push(|| quoted(&found.name));
            }
        }
        all
    }
}

fn declared_key(declared: &Declared) -> &str {
    &declared.key
}
