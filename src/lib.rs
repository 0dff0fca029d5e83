//! vramp.
pub mod checkpoint;
pub mod device;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod estimate;
pub mod extent;
mod fault;
pub mod host;
pub mod load;
pub mod os;
pub mod plan;
pub mod report;
pub mod source;
pub mod staging;
pub mod tensor;

pub use error::{Error, Fault, Result};

#[cfg(any(test, feature = "testing"))]
pub mod testing;
