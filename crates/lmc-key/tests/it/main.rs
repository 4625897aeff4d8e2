//! Tests of the public API of the crate, in one program.

mod properties;
mod vectors;
