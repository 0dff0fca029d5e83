//! The program's integration tests in one binary: one module a subject.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

mod audit;
mod cli;
mod convert;
mod cuda;
mod folders;
mod limits;
mod outputs;
mod quantised;
mod screen;
mod scripts;
mod system;
mod torch;
mod trace;
