//! Fakes and makers of inputs for tests, of this crate and of crates that implement its ports. Never part of a release
//! build: feature `testing`.

pub mod hostile;
