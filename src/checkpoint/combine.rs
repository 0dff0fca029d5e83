//! Several files, each already a checkpoint, as one: for files that are no safetensors, whose heads `merge` does not know.
//!
//! It opens nothing. The same rules hold as for safetensors: an index decides tensor by tensor, and without one no two files may
//! share a tensor.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::index::Index;
use super::merge::{copies_left_alone, copy};
use super::{Checkpoint, TensorData, TensorInfo};
use crate::error::{Error, Result};
use crate::extent::ShardIndex;
use crate::fault::{Fault, Listed, counted, quoted};
use crate::storage::LocalStorage;

/// The files as one checkpoint. They are those of the index, in its order, where there is an index.
pub(crate) fn join(path: &Path, parts: Vec<Checkpoint>, index: Option<&Index>) -> Result<Checkpoint> {
    let mut parts = parts.into_iter();
    let Some(first) = parts.next() else { return Err(Error::malformed(path, Fault::Other("no weight file".into()))) };
    let mut join = Join { index, ..Join::new(path, &first) };
    for (at, part) in std::iter::once(first).chain(parts).enumerate() {
        join.add(at, part);
    }
    join.finish().map_err(|fault| Error::malformed(path, fault))
}

struct Join<'a> {
    index: Option<&'a Index>,
    whole: Checkpoint,
    /// Each tensor with the number of its file.
    tensors: BTreeMap<Arc<str>, (usize, TensorInfo)>,
    /// Tensors in files that the index does not name for them, with the numbers of those files.
    elsewhere: BTreeMap<Arc<str>, Vec<usize>>,
    names: Vec<String>,
    twice: Listed,
    stale: Listed,
    unlisted: Listed,
}

impl<'a> Join<'a> {
    fn new(path: &Path, first: &Checkpoint) -> Join<'a> {
        let whole = Checkpoint {
            path: path.to_owned(),
            shards: Vec::new(),
            tensors: Vec::new(),
            metadata: BTreeMap::new(),
            warnings: Vec::new(),
            format: first.format,
            skipped: Vec::new(),
            shared: Vec::new(),
            storage: Arc::new(LocalStorage),
        };
        let (tensors, elsewhere, names) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let [twice, stale, unlisted] = [(); 3].map(|()| Listed::new());
        Join { index: None, whole, tensors, elsewhere, names, twice, stale, unlisted }
    }

    fn add(&mut self, at: usize, part: Checkpoint) {
        let name = quoted(&part.path.file_name().unwrap_or(part.path.as_os_str()).to_string_lossy());
        let shift = ShardIndex::try_from(self.whole.shards.len()).unwrap_or(ShardIndex::MAX);
        self.whole.warnings.extend(part.warnings.iter().map(|warning| format!("{name}: {warning}")));
        self.whole.shards.extend(part.shards);
        self.whole.skipped.extend(part.skipped);
        for (key, value) in part.metadata {
            self.whole.metadata.entry(key).or_insert(value);
        }
        // A group counts the names whose tensors are taken from this file.
        let is_taken = |name: &Arc<str>| self.index.is_none_or(|index| index.tensors().get(name) == Some(&at));
        let taken = |group: Vec<Arc<str>>| group.into_iter().filter(is_taken).collect();
        self.whole.shared.extend(part.shared.into_iter().map(taken));
        for tensor in part.tensors {
            match self.index.map(|index| index.tensors().get(&tensor.name)) {
                Some(None) => self.unlisted.push(|| quoted(&tensor.name)),
                Some(Some(&file)) if file != at => {
                    self.elsewhere.entry(Arc::clone(&tensor.name)).or_default().push(at);
                }
                _ => self.take(at, &name, shifted(tensor, shift)),
            }
        }
        self.names.push(name);
    }

    fn take(&mut self, at: usize, file: &str, tensor: TensorInfo) {
        if let Some((other, _)) = self.tensors.get(&tensor.name) {
            let other = self.names.get(*other).cloned().unwrap_or_default();
            self.twice.push_tensor(&tensor.name, || format!("{} is in {other} and in {file}", quoted(&tensor.name)));
        } else {
            self.tensors.insert(Arc::clone(&tensor.name), (at, tensor));
        }
    }

    fn finish(mut self) -> Result<Checkpoint, Fault> {
        let mut copies = Listed::new();
        for (name, file) in self.index.iter().flat_map(|index| index.tensors()) {
            let file_name = |at: usize| self.names.get(at).cloned().unwrap_or_default();
            let elsewhere: Vec<String> =
                self.elsewhere.get(name).into_iter().flatten().map(|at| file_name(*at)).collect();
            match (self.tensors.contains_key(name), elsewhere.first()) {
                (true, None) => {}
                (true, Some(_)) => copies.push(|| copy(name, &file_name(*file), &elsewhere)),
                (false, found) => {
                    let found = found.map_or(String::new(), |found| format!(" but in {found}"));
                    self.stale.push_tensor(name, || format!("{} is not in {}{found}", quoted(name), file_name(*file)));
                }
            }
        }
        self.stale.into_fault(Fault::Stale)?;
        self.twice.into_fault(Fault::TwoFiles)?;
        if !self.unlisted.is_empty() {
            let (count, unlisted) = (counted(self.unlisted.len(), "tensor"), &self.unlisted);
            let warning = format!("left alone because the index does not name them: {count}: {unlisted}");
            self.whole.warnings.push(warning);
        }
        self.whole.warnings.extend(copies_left_alone(&copies));
        let kept = |name: &Arc<str>| self.tensors.contains_key(name);
        self.whole.shared.iter_mut().for_each(|group| group.retain(kept));
        self.whole.shared.retain(|group| group.len() > 1);
        self.whole.tensors = self.tensors.into_values().map(|(_, tensor)| tensor).collect();
        Ok(self.whole)
    }
}

/// The tensor, its shards counted from `by` on.
fn shifted(mut tensor: TensorInfo, by: ShardIndex) -> TensorInfo {
    match &mut tensor.data {
        TensorData::Whole(extent) => extent.shard = extent.shard.saturating_add(by),
        TensorData::Parts(parts) => {
            parts.iter_mut().for_each(|part| part.extent.shard = part.extent.shard.saturating_add(by));
        }
    }
    tensor
}
