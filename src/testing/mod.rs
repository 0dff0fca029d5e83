//! Fakes and conformance suites for the ports, for tests of this crate and of crates that implement the ports.
//!
//! Feature `testing`; never part of the program. Fakes fail, shuffle and delay on purpose; suites are plain functions that
//! panic with what is wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test's way to speak

mod device;

pub use device::{LazyDevice, device_conformance};
