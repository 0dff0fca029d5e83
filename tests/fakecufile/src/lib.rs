//! A double of NVIDIA's cuFile (`libcufile.so.0`), for tests: it reads the file that it was told of and puts the bytes into the
//! memory of the software driver (`swcuda`) by that one's `swcuda_dma_write`. No GPUDirect Storage, and no model of its speed.
//!
//! `calls` has NVIDIA's functions, `state` what is planned and what is counted, `client` what tests hold. It prints nothing.

mod calls;
mod client;
mod driver;
mod state;

pub use client::Fake;
pub use state::{Counters, Plan, ReadFault};
