//! The fuzz targets on a stable toolchain: `… --example fuzz -- TARGET SECONDS [SEED]`.

#[path = "../../../fuzz/mutator/mod.rs"]
mod mutator;

use lmc_vllm_adapter::fuzzing;

fn main() {
    mutator::main(&[
        ("zmtp", fuzzing::zmtp),
        ("request", fuzzing::request),
        ("service", fuzzing::service),
    ]);
}
