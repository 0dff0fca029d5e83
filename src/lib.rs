//! vramp loads model weights from storage into memory as fast as the hardware allows, safely, and says what the limit was.
//!
//! ```
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! # let header = r#"{"embed.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
//! # let values: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
//! # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &values].concat())?;
//! use vramp::{Options, load};
//!
//! let loaded = load(&path, &Options::default())?; // a file, a folder, an index, a Hugging Face snapshot
//! let weight = loaded.tensor("embed.weight")?;
//! assert_eq!((weight.shape(), weight.as_slice::<f32>()?), (&[2, 2][..], &[1.0, 2.0, 3.0, 4.0][..]));
//!
//! let report = &loaded.report; // where the time went; T = S/B only with limits that `bench` measured before
//! println!("{:.2} GB/s, most of the time {:?}", report.gb_per_s, report.main_stage.stage);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The map
//!
//! | to | use |
//! |---|---|
//! | load and be done | [`load::load`] |
//! | follow a load, stop it, cast floats, choose the device | [`load::Options`] |
//! | look at a checkpoint without reading tensors | [`Checkpoint::open`](checkpoint::Checkpoint::open) |
//! | choose tensors, slices, a tensor-parallel rank | [`checkpoint::Selection`] |
//! | demand exactly the names, shapes and types of a model | [`checkpoint::strict`] |
//! | see what a load would do | [`load::Loader::prepare`], [`plan::LoadPlan`] |
//! | load again and again with warm threads and buffers | [`load::Loader`] |
//! | use a tensor before the load is over | [`load::Loader::start`] |
//! | write tensors as safetensors, atomically | [`save::save`], [`save::Saving`] |
//! | write a checkpoint anew: resharded, cast, renamed | [`save::convert`] |
//! | know what a PyTorch file would run | [`checkpoint::torch::audit`] |
//! | borrow tensors from a mapping instead of owning them | [`Checkpoint::map`](checkpoint::Checkpoint::map), [`view`] |
//!
//! # The way of a byte
//!
//! `checkpoint` reads the heads of the files and knows where each tensor's bytes lie. [`plan`] lays the tensors out in one
//! arena and decides the reads: past the page cache (`O_DIRECT`) for what is cold, through it for what is warm, in place
//! where the device's memory is the host's. [`load`](mod@load) carries the plan out: one loop between a queue of reads and a stream of
//! uploads, which own the buffers while they work on them. Nothing is handed out unless every byte is the file's, and the file
//! is still what it was when its head was read.
//!
//! # What it never does
//!
//! Execute anything from a file, open anything outside a checkpoint's folder (links of the Hugging Face cache apart), raise a
//! signal because a file shrank, panic on what it reads, read environment variables, print.

#[macro_use]
mod setters;

pub mod checkpoint;
pub mod device;
pub mod digest;
pub mod dtype;
pub mod durable;
pub mod error;
mod fault;
pub mod load;
pub mod plan;
pub mod report;
pub mod save;
pub mod storage;
pub mod tensor;
pub mod view;

// For vramp's own packages and tests. They change without notice; what users need of them is exported elsewhere.
#[doc(hidden)]
pub mod convert;
#[doc(hidden)]
pub mod extent;
#[doc(hidden)]
pub mod fallback;
#[doc(hidden)]
pub mod memory;
#[doc(hidden)]
pub mod os;
#[doc(hidden)]
pub mod setting;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("vramp supports 64-bit little-endian Linux only");

pub use half;

pub use checkpoint::{Checkpoint, OpenOptions, Selection, TensorInfo};
pub use convert::Float;
#[cfg(feature = "cuda")]
pub use device::CudaDevice;
pub use device::{CpuDevice, Device};
pub use dtype::Dtype;
pub use error::{Error, ErrorKind, Fault, Result};
pub use load::{Cancel, Convert, Loaded, Loader, Options, Prepared, load};
pub use report::Report;
pub use save::{SaveOptions, save};
pub use setting::Setting;
pub use storage::Storage;
pub use tensor::{RawTensor, Tensor};

/// The README's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
