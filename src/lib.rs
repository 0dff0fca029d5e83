//! Loads model weights (safetensors, PyTorch) from storage into host or GPU memory as fast as the hardware allows, safely, and reports
//! what the limit was.
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
//! # Overview
//!
//! | to | use |
//! |---|---|
//! | load a checkpoint | [`load::load`] |
//! | follow a load, stop it, cast floats, choose the device | [`load::Options`] |
//! | look at a checkpoint without reading tensors | [`Checkpoint::open`](checkpoint::Checkpoint::open) |
//! | choose tensors, slices, a tensor-parallel rank | [`checkpoint::Selection`] |
//! | require the names, shapes and types of a model | [`checkpoint::strict`] |
//! | see what a load would do | [`load::Loader::prepare`], [`plan::LoadPlan`] |
//! | load repeatedly with warm threads and buffers | [`load::Loader`] |
//! | use a tensor before the load ends | [`load::Loader::start`] |
//! | write tensors as safetensors, atomically | [`save::save`], [`save::Saving`] |
//! | convert a checkpoint: reshard, cast, rename | [`save::convert`] |
//! | list what unpickling a PyTorch file would run | [`checkpoint::torch::audit`] |
//! | borrow tensors from a mapping instead of owning them | [`Checkpoint::map`](checkpoint::Checkpoint::map), [`view`] |
//!
//! # Data path
//!
//! [`checkpoint`] reads the headers and records where each tensor's bytes are. [`plan`] places the tensors in one arena and
//! chooses a route for each read: `O_DIRECT` for cold bytes, the page cache for warm ones, in place if the host can address the
//! device's memory. [`load`](mod@load) executes the plan: one loop between a queue of reads and a stream of uploads, which own the
//! buffers while they use them. A load returns tensors only if every byte is the file's and the file has not changed since its
//! header was read.
//!
//! # What it never does
//!
//! Execute code from a file, open anything outside a checkpoint's folder (except links of the Hugging Face cache), raise a signal
//! because a file shrank, panic on input, read environment variables, print.

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
