//! What a checkpoint holds: its weight files, the tensors in them and where each byte of a tensor lies.
//!
//! Opening reads headers only, those of several files at a time. A [`Checkpoint`] is plain data; nothing here keeps a file
//! open or knows a device. `open` goes from a path to files, [`safetensors`] from a header to tensors, `merge` from files
//! to one checkpoint; [`selection`] says what to load of it, [`strict`] whether it is what a model needs.

mod cast_notes;
mod casts;
mod combine;
mod data;
mod dcp;
#[cfg_attr(not(feature = "torch"), path = "without_derived.rs")]
mod derived;
mod folder;
mod four_bit;
mod glob;
mod hub;
#[doc(hidden)]
pub mod index;
mod json;
mod losses;
mod merge;
mod nearest;
mod open;
mod options;
mod quantised;
#[cfg_attr(not(feature = "torch"), allow(dead_code))] // half of it is for `torch`
mod rank_files;
mod records;
mod runs;
pub mod safetensors;
#[doc(hidden)]
pub mod selection;
mod shard;
#[cfg_attr(not(feature = "torch"), allow(dead_code))] // nothing else passes anything over
mod skipped;
pub mod strict;
mod tensor_parallel;
#[cfg(test)]
mod tests;
#[cfg(feature = "torch")]
pub mod torch;
#[cfg(not(feature = "torch"))]
#[path = "without_torch.rs"]
mod torch;

pub use crate::extent::{Extent, ShardIndex, Strided};
pub(crate) use casts::scaled_names;
#[doc(hidden)]
pub use casts::{Casts, ConvertedTensor};
pub use data::{Checkpoint, Format, Part, Shard, TensorData, TensorInfo, Tie};
#[doc(hidden)]
pub use derived::Recipe;
pub(crate) use folder::{FolderChoice, choose_in_folder, pytorch_in_folder};
#[doc(hidden)]
pub use four_bit::ScaleSource;
pub(crate) use nearest::no_tensor;
pub use options::OpenOptions;
#[doc(hidden)]
pub use records::StaleRecords;
pub(crate) use runs::runs_within;
pub use selection::{Selected, Selection, Slice, SliceRequest, TensorParallel};
#[cfg(feature = "torch")]
pub(crate) use skipped::Loss;
pub use skipped::Skipped;
pub use torch::Sums;
#[cfg(feature = "torch")]
pub use vramp_pickle::finding::{Finding, Severity, Spot};
#[cfg(feature = "torch")]
#[doc(hidden)]
pub use vramp_pickle::pickle;
