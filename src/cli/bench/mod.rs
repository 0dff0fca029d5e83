//! `vramp bench`: measures each stage of a load here, predicts T, loads cold and warm, compares, says what to change, draws.
//!
//! The library measures; this folder turns what was typed into its options and what it found into text, JSON, CSV and HTML.

#![allow(dead_code)]

mod advice;
mod csv;
mod html;
#[cfg(test)]
mod sample;
mod text;
mod words;
