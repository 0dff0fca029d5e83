//! All integration tests in one binary: one module a subject.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

mod casts;
mod change;
mod circles;
mod cuda;
mod device;
mod files;
mod gpu_direct;
mod kernels;
mod layers;
mod load;
mod options;
mod plan;
mod quantised;
mod readme;
mod storage;
mod torch;
mod trace;
mod view;
