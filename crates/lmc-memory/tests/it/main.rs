//! Tests of the public API of the crate, in one program.

mod sealed;
mod shm_full;
mod stale_segment;
