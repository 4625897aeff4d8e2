//! Tests of the public API of the crate, in one program.

mod asked;
mod clears;
mod engine;
mod lower;
mod merge;
