//! Host memory: blocks of it, and the staging pool that is made of one.
//!
//! A block has one owner and a staging buffer one holder at a time. Nothing here reads a file or knows a device by name.

mod filled;
mod host;
pub mod staging;

pub use filled::Filled;
pub use host::*;
