//! vramp.
pub mod checkpoint;
pub mod device;
pub mod dtype;
pub mod error;
pub mod extent;
mod fault;
pub mod host;
pub mod source;
pub mod staging;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use error::{Error, Fault, Result};
