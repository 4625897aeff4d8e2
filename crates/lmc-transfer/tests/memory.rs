//! The suite over channels of one process.

mod support;
use support::MemoryRig;

lmc_transfer::conformance!(MemoryRig::new());
