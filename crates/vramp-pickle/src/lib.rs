//! PyTorch's files read as data: pickles, archives of `torch.save`, and an audit of what they would run. Nothing is ever executed.
//!
//! [`recognise`] says what a file is by its content. [`zip`] and `legacy` find the members, [`pickle`] runs the pickles as data,
//! `objects` says what they mean, `assemble` where each tensor's bytes lie; [`read`] does all of this and gives plain data, or
//! refuses. [`audit`] lists everything that is odd. Bytes come through the port [`bytes::Bytes`].

#![forbid(unsafe_code)]

mod archive;
mod aside;
mod assemble;
pub mod audit;
pub mod bytes;
mod calls;
mod concat;
mod contained;
pub mod dcp;
mod declared;
mod dense;
mod entries;
pub mod finding;
mod forms;
mod gather;
mod inert;
mod kinds;
mod legacy;
mod meaning;
mod members;
mod module;
mod nested;
mod numpy;
mod objects;
pub mod pickle;
mod pickled;
pub mod read;
pub mod recipe;
mod recognise;
mod set_aside;
mod sharded;
mod storages;
pub mod sums;
mod tar;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod zip;

pub use aside::{Aside, Loss, WHOLE_MODEL};
pub use assemble::{Assembled, Tensor};
pub use objects::CutFound;
pub use recognise::{BEGINNING, Kind, hidden_archive, hides_archive, is_safetensors, recognise};
pub use sharded::{Bounds, Cut, Layout, Placement};

/// The README's examples compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
