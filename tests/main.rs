//! All integration tests in one binary: one module a subject.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

mod audit;
mod casts;
mod change;
mod cli;
mod convert;
mod cuda;
mod device;
mod files;
mod folders;
mod gpu_direct;
mod kernels;
mod layers;
mod limits;
mod load;
mod options;
mod outputs;
mod plan;
mod quantised;
mod screen;
mod scripts;
mod system;
mod torch;
mod trace;
mod view;
