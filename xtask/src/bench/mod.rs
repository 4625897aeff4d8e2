//! `cargo xtask bench`.

mod ceiling;
mod conditions;
mod figures;
mod metrics;
mod serve;
mod server;

use anyhow::{Result, bail};

pub(crate) fn run(args: &[String]) -> Result<bool> {
    match args.split_first() {
        Some((name, rest)) if name == "serve" => serve::run(rest),
        _ => bail!("expected `cargo xtask bench serve`, found {args:?}"),
    }
}
