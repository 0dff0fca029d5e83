//! The tensors of a checkpoint as lines of a listing, each with its place and bytes. It reads no tensor and prints nothing.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use serde::Serialize;
use vramp::checkpoint::{Checkpoint, Selected, Shard, Slice, TensorData, TensorInfo};
use vramp::dtype::element_count;

use super::text;

/// One line of the listing.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Listed {
    #[serde(skip)]
    pub(crate) name: Arc<str>,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) shard: u32,
    offset: u64,
    pub(crate) bytes: u64,
    /// Whether the same bytes are listed under another name before: they count once.
    #[serde(skip)]
    pub(crate) is_again: bool,
    /// Further pieces of a tensor that is cut over several places.
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<usize>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct OfType {
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
}

/// `4 files`. What is made of a file is not another file.
pub(crate) fn counted_files(shards: &[Shard]) -> String {
    let paths: HashSet<_> = shards.iter().map(|shard| &shard.path).collect();
    text::plural(paths.len() as u64, "file")
}

/// The name of each shard's file. Tensors that are unpacked or rearranged on loading are a shard of their own of the same file.
pub(crate) fn file_names(shards: &[Shard]) -> Vec<String> {
    let name = |shard: &Shard| {
        let name = shard.path.file_name().unwrap_or(shard.path.as_os_str()).to_string_lossy().into_owned();
        let made = if shard.derived.is_some() { " (rearranged)" } else { "" };
        format!("{}{made}", text::escape(&name))
    };
    shards.iter().map(name).collect()
}

/// Bytes that are listed already, by the tensor and the part of it.
type Seen<'a> = HashSet<(&'a TensorData, Option<&'a Slice>)>;

fn listed<'a>(info: &'a TensorInfo, chosen: (&Arc<str>, &[usize], Option<&'a Slice>), seen: &mut Seen<'a>) -> Listed {
    let (name, shape, slice) = chosen;
    let (offset, parts) = match &info.data {
        TensorData::Whole(extent) => (extent.offset, None),
        TensorData::Parts(parts) => (parts.first().map_or(0, |part| part.extent.offset), Some(parts.len())),
    };
    Listed {
        name: Arc::clone(name),
        dtype: info.dtype.to_string(),
        shape: shape.to_vec(),
        shard: info.shard(),
        offset,
        is_again: !seen.insert((&info.data, slice)),
        bytes: if *shape == info.shape[..] { info.bytes() } else { info.dtype.tensor_bytes(shape).unwrap_or(0) },
        parts,
    }
}

pub(crate) fn list_all(checkpoint: &Checkpoint) -> Vec<Listed> {
    let mut seen = Seen::new();
    checkpoint.tensors().iter().map(|info| listed(info, (&info.name, &info.shape, None), &mut seen)).collect()
}

pub(crate) fn list_selected(checkpoint: &Checkpoint, selected: &[Selected]) -> Vec<Listed> {
    let (mut list, mut seen) = (Vec::with_capacity(selected.len()), Seen::new());
    for chosen in selected {
        if let Some(info) = checkpoint.tensors().get(chosen.tensor) {
            let names = std::iter::once(&chosen.name).chain(&chosen.aliases);
            list.extend(names.map(|name| listed(info, (name, &chosen.shape, chosen.slice.as_ref()), &mut seen)));
        }
    }
    list.sort_by(|a: &Listed, b| a.name.cmp(&b.name));
    list
}

pub(crate) fn by_type(listed: &[Listed]) -> BTreeMap<&str, OfType> {
    let mut types: BTreeMap<&str, OfType> = BTreeMap::new();
    for tensor in listed {
        let of_type = types.entry(&tensor.dtype).or_default();
        of_type.tensors += 1;
        of_type.bytes = of_type.bytes.saturating_add(if tensor.is_again { 0 } else { tensor.bytes });
    }
    types
}

pub(crate) fn total_bytes(listed: &[Listed]) -> u64 {
    distinct(listed).fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
}

pub(crate) fn parameters(listed: &[Listed]) -> u64 {
    distinct(listed).fold(0, |sum, tensor| sum.saturating_add(element_count(&tensor.shape)))
}

pub(crate) fn distinct(listed: &[Listed]) -> impl Iterator<Item = &Listed> {
    listed.iter().filter(|tensor| !tensor.is_again)
}
