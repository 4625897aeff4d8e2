//! `cargo xtask bench`.

mod ceiling;
mod conditions;
mod disk;
mod figures;
mod metrics;
mod page;
mod serve;
mod server;

use anyhow::{Result, bail};

pub(crate) fn run(args: &[String]) -> Result<bool> {
    match args.split_first() {
        Some((name, rest)) if name == "serve" => serve::run(rest),
        Some((name, rest)) if name == "disk" => disk::run(rest),
        _ => bail!("expected `cargo xtask bench serve` or `bench disk`, found {args:?}"),
    }
}
