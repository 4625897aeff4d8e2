//! `cargo xtask bench`.

mod adapter;
mod before;
mod ceiling;
pub(crate) mod conditions;
mod disk;
mod engines;
mod examples;
mod figures;
mod link;
mod metrics;
mod p2p;
mod page;
mod pd;
mod pd_nixl;
mod pd_tail;
mod remote;
mod rounds;
mod serve;
mod server;
mod transfer;
mod ttft;
mod vllm;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::examples::ExampleArgs;

/// Benchmarks beside the peers and the local ceilings.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum BenchAction {
    Serve(serve::ServeArgs),
    Before(before::BeforeArgs),
    Disk(disk::DiskArgs),
    Transfer(transfer::TransferArgs),
    P2p(p2p::P2pArgs),
    Remote(remote::RemoteArgs),
    Adapter(adapter::AdapterArgs),
    Vllm(vllm::VllmArgs),
    Ttft(ttft::TtftArgs),
    Pd(pd::PdArgs),
    PdNixl(pd_nixl::PdNixlArgs),
    PdTail(pd_tail::PdTailArgs),
    Gpu(crate::gpu::FiguresArgs),
    /// Measures a directory of chunks by itself: bytes of an entry, look-ups, 1,000 members
    Directory(ExampleArgs),
    /// Measures the hashing of prompts, beside the bare hash functions
    Hash(ExampleArgs),
    /// Measures gather and scatter beside plain copies on the same cores
    Copy(ExampleArgs),
    /// Measures the time until a pool is usable, and until it is prefaulted
    Prefault(ExampleArgs),
    /// Measures lookups in the index, and its bytes for each chunk
    Index(ExampleArgs),
    /// Measures lookups in a sound tier beside tiers that are slow or hang
    Tiers(ExampleArgs),
    /// Measures how long a prompt takes to come from a shared store into memory
    StoreHit(ExampleArgs),
}

pub(crate) fn run(action: &BenchAction) -> Result<bool> {
    match action {
        BenchAction::Serve(args) => serve::run(args),
        BenchAction::Before(args) => before::run(args),
        BenchAction::Disk(args) => disk::run(args),
        BenchAction::Transfer(args) => transfer::run(args),
        BenchAction::P2p(args) => p2p::run(args),
        BenchAction::Remote(args) => remote::run(args),
        BenchAction::Adapter(args) => adapter::run(args),
        BenchAction::Vllm(args) => vllm::run(args),
        BenchAction::Ttft(args) => ttft::run(args),
        BenchAction::Pd(args) => pd::run(args),
        BenchAction::PdNixl(args) => pd_nixl::run(args),
        BenchAction::PdTail(args) => pd_tail::run(args),
        BenchAction::Gpu(args) => crate::gpu::figures(args),
        BenchAction::Directory(args) => examples::run("lmc-backend-p2p", "directory_scale", args),
        BenchAction::Hash(args) => examples::run("lmc-key", "hash_speed", args),
        BenchAction::Copy(args) => examples::run("lmc-memory", "copy_speed", args),
        BenchAction::Prefault(args) => examples::run("lmc-memory", "prefault_speed", args),
        BenchAction::Index(args) => examples::run("lmc-backend-local", "index_speed", args),
        BenchAction::Tiers(args) => examples::run("lmc-engine", "tiers_beside", args),
        BenchAction::StoreHit(args) => examples::run("lmc --all-features", "store_hit", args),
    }
}

/// Refuses numbers with which nothing would be measured.
fn check_amounts(rounds: usize, seconds: f64, least: f64) -> Result<()> {
    ensure!(rounds > 0, "--rounds takes a number above 0");
    ensure!(
        seconds.is_finite() && seconds >= least,
        "--seconds takes a number of at least {least}"
    );
    Ok(())
}

/// Runs a program and reads the last line of its output as JSON.
fn json_of(command: &mut Command) -> Result<Value> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{command:?}: {}{}",
        text,
        String::from_utf8_lossy(&output.stderr)
    );
    let last = text.trim().lines().last().unwrap_or_default();
    serde_json::from_str(last).with_context(|| format!("{command:?} printed {text}"))
}
