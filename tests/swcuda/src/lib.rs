//! A software double of the CUDA driver (`libcuda.so`), for tests. Not a GPU, and no model of one's speed.
//!
//! It exports the driver's API over host memory: streams that really are asynchronous, and checks of order, life and
//! bounds that hardware does not make. The cdylib is the double; the rlib is the way by which tests load it and talk to
//! it ([`Double`]). How a call goes through the files:
//!
//! - `api` has the entry points, `entry` what they all begin with: counts, faults, the current context, sticky errors.
//! - `memory` and `pinned` know what is allocated, `copy` and `kernel` check work and hand it to `stream`.
//! - `stream` decides when an operation runs, `execute` does it, `engine` says how long it takes; with the modelled clock
//!   `timeline` says when it is over.
//! - `clock`, `footprint` and `written` find races and reads of what nobody wrote; `report` is how that is said.
//! - `control` is the other way in, for tests: reset, faults, figures. `client` is its far end.
//! - `ptx` runs kernels.
//!
//! What it cannot show: speed, the timing of real DMA, what a driver compiles. No number from it is a GPU's.
#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

mod address;
#[allow(clippy::undocumented_unsafe_blocks)] // Every block there rests on the safety section of its entry point.
mod api;
mod client;
mod clock;
mod config;
mod context;
mod control;
mod copy;
mod device;
mod engine;
mod entry;
mod error;
mod event;
mod execute;
mod faults;
mod footprint;
mod handle;
mod kernel;
mod lifetime;
mod memory;
mod pinned;
pub mod ptx;
mod report;
mod state;
mod stats;
mod stream;
mod timeline;
mod work;
mod written;

pub use client::{Double, HostClock};
pub use config::{Config, Order, Schedule};
pub use faults::Fault;
pub use stats::{DeviceStats, EngineStats, Live, Stats};
