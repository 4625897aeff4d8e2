//! `cargo xtask bench`.

mod ceiling;
mod conditions;
mod disk;
mod figures;
mod metrics;
mod page;
mod serve;
mod server;
mod transfer;

use anyhow::{Result, bail, ensure};

pub(crate) fn run(args: &[String]) -> Result<bool> {
    match args.split_first() {
        Some((name, rest)) if name == "serve" => serve::run(rest),
        Some((name, rest)) if name == "disk" => disk::run(rest),
        Some((name, rest)) if name == "transfer" => transfer::run(rest),
        _ => bail!("expected `cargo xtask bench serve`, `disk` or `transfer`, found {args:?}"),
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
