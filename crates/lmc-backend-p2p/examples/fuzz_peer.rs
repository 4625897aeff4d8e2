//! The fuzz target on a stable toolchain: `… --example fuzz_peer -- peer SECONDS [SEED]`.

#[path = "../../../fuzz/mutator/mod.rs"]
mod mutator;

use lmc_backend_p2p::fuzzing;

fn main() {
    mutator::main(&[("peer", fuzzing::peer)]);
}
