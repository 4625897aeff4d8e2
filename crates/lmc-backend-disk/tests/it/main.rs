//! Tests of the public API of the crate, in one program.

mod folders;
mod golden;
mod sets;
mod tier;
mod watch;
