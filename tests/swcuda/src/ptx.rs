//! Runs PTX text on the CPU.
