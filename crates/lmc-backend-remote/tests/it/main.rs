//! Tests of the public API of the crate, in one program.

mod common;
mod mounts;
mod posix;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "s3")]
mod s3;
mod tier;
