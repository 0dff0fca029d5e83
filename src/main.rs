//! The program `vramp`.
fn main() {}
