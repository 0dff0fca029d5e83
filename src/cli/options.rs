//! What was meant: arguments that several commands share, as the library's options.
//!
//! The only file that reads where the Hugging Face cache lies.

use std::env;
use std::path::PathBuf;

use vramp::checkpoint::{OpenOptions, Selection, TensorParallel};

use super::args::{NameArgs, OpenHow, SelectionArgs};

/// How to open a checkpoint.
pub(crate) fn open(args: &OpenHow) -> OpenOptions {
    OpenOptions {
        max_header_bytes: args.max_header_bytes,
        variant: args.variant.clone(),
        hub_cache: hub_cache(),
        key: args.key.clone(),
        skip_unknown: args.skip_unknown,
    }
}

/// What to take of it.
pub(crate) fn selection(args: &SelectionArgs) -> Selection {
    let dims = || args.tp_dim.iter().map(|cut| (cut.glob.clone(), cut.dim)).collect();
    Selection {
        include: args.include.clone(),
        exclude: args.exclude.clone(),
        slices: args.slice.clone(),
        tensor_parallel: args.tp.map(|tp| TensorParallel { rank: tp.rank, world: tp.world, dims: dims() }),
        ..names(&args.names)
    }
}

/// Everything, under the names that are wanted.
pub(crate) fn names(args: &NameArgs) -> Selection {
    Selection { strip_prefix: args.strip_prefix.clone(), ties: args.tied.clone(), ..Selection::default() }
}

/// Whether everything is selected, as it is stored.
pub(crate) fn selects_all(args: &SelectionArgs) -> bool {
    let SelectionArgs { include, exclude, slice, tp, tp_dim, names: NameArgs { strip_prefix, tied } } = args;
    include.is_empty()
        && exclude.is_empty()
        && slice.is_empty()
        && tp.is_none()
        && tp_dim.is_empty()
        && strip_prefix.is_empty()
        && tied.is_empty()
}

/// The Hugging Face cache, where the hub's own tools look for it.
fn hub_cache() -> Option<PathBuf> {
    let path = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| path("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| path("HOME").map(|home| home.join(".cache/huggingface/hub")))
}
