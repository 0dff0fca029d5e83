//! A software double of the CUDA driver (`libcuda.so`), for tests. Not a GPU, and no model of one's speed.

pub mod ptx;
