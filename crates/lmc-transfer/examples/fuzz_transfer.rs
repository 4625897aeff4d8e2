//! The fuzz target on a stable toolchain: `… --example fuzz_transfer -- transfer SECONDS [SEED]`.

#[path = "../../../fuzz/mutator/mod.rs"]
mod mutator;

use lmc_transfer::fuzzing;

fn main() {
    mutator::main(&[("transfer", fuzzing::transfer_frame)]);
}
