//! Tests of the public API of the crate, in one program.

mod messages;
mod owner;
