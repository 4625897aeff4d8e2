//! `cargo xtask bench`.

mod ceiling;
mod conditions;
mod disk;
mod figures;
mod link;
mod metrics;
mod p2p;
mod page;
mod remote;
mod rounds;
mod serve;
mod server;
mod transfer;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Benchmarks beside the peers and the local ceilings.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum BenchAction {
    Serve(serve::ServeArgs),
    Disk(disk::DiskArgs),
    Transfer(transfer::TransferArgs),
    P2p(p2p::P2pArgs),
    Remote(remote::RemoteArgs),
    /// Measures a directory of chunks by itself: bytes of an entry, look-ups, 1,000 members
    Directory,
}

pub(crate) fn run(action: &BenchAction) -> Result<bool> {
    match action {
        BenchAction::Serve(args) => serve::run(args),
        BenchAction::Disk(args) => disk::run(args),
        BenchAction::Transfer(args) => transfer::run(args),
        BenchAction::P2p(args) => p2p::run(args),
        BenchAction::Remote(args) => remote::run(args),
        BenchAction::Directory => directory(),
    }
}

fn directory() -> Result<bool> {
    let release = crate::build_release("--package lmc-backend-p2p --example directory_scale")?;
    let program = release.join("examples/directory_scale");
    let ran = Command::new(&program).status();
    let ran = ran.with_context(|| format!("cannot run {}", program.display()))?;
    Ok(ran.success())
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
