//! Several files, each already a checkpoint, as one: for files that are no safetensors, whose heads `merge` does not know.
//!
//! It opens nothing. The same rules hold as for safetensors: an index decides tensor by tensor, and no two files may share a
//! tensor.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::index::Index;
use super::{Checkpoint, TensorData, TensorInfo};
use crate::error::{Error, Result};
use crate::extent::ShardIndex;
use crate::fault::{Fault, Listed, counted, quoted};

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
        };
        let (tensors, names) = (BTreeMap::new(), Vec::new());
        let [twice, stale, unlisted] = [(); 3].map(|()| Listed::new());
        Join { index: None, whole, tensors, names, twice, stale, unlisted }
    }

    fn add(&mut self, at: usize, part: Checkpoint) {
        let name = quoted(&part.path.file_name().unwrap_or(part.path.as_os_str()).to_string_lossy());
        let shift = ShardIndex::try_from(self.whole.shards.len()).unwrap_or(ShardIndex::MAX);
        self.whole.warnings.extend(part.warnings.iter().map(|warning| format!("{name}: {warning}")));
        self.whole.shards.extend(part.shards);
        self.whole.skipped.extend(part.skipped);
        self.whole.shared.extend(part.shared);
        for (key, value) in part.metadata {
            self.whole.metadata.entry(key).or_insert(value);
        }
        for tensor in part.tensors {
            if self.index.is_some_and(|index| !index.tensors().contains_key(&tensor.name)) {
                self.unlisted.push(|| quoted(&tensor.name));
            } else if let Some((other, _)) = self.tensors.get(&tensor.name) {
                let other = self.names.get(*other).cloned().unwrap_or_default();
                self.twice
                    .push_tensor(&tensor.name, || format!("{} is in {other} and in {name}", quoted(&tensor.name)));
            } else {
                self.tensors.insert(Arc::clone(&tensor.name), (at, shifted(tensor, shift)));
            }
        }
        self.names.push(name);
    }

    fn finish(mut self) -> Result<Checkpoint, Fault> {
        for (name, file) in self.index.iter().flat_map(|index| index.tensors()) {
            let found = self.tensors.get(name).map(|(at, _)| *at);
            if found != Some(*file) {
                let said = self.names.get(*file).cloned().unwrap_or_default();
                let found = found.and_then(|at| self.names.get(at)).map_or(String::new(), |at| format!(" but in {at}"));
                self.stale.push_tensor(name, || format!("{} is not in {said}{found}", quoted(name)));
            }
        }
        self.stale.into_fault(Fault::Stale)?;
        self.twice.into_fault(Fault::TwoFiles)?;
        if !self.unlisted.is_empty() {
            let (count, unlisted) = (counted(self.unlisted.len(), "tensor"), &self.unlisted);
            let warning = format!("left alone because the index does not name them: {count}: {unlisted}");
            self.whole.warnings.push(warning);
        }
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
