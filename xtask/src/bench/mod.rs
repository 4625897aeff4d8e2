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

use std::process::Command;

use anyhow::{Result, bail, ensure};

use crate::test::succeeds;

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

/// Sees to it that a program is there, by Debian's package of the same name.
fn set_up(program: &str) -> Result<()> {
    if succeeds(program, &["--version"]) {
        return Ok(());
    }
    let mut command = match is_root() {
        true => Command::new("apt-get"),
        false => {
            let mut command = Command::new("sudo");
            command.arg("apt-get");
            command
        }
    };
    println!("==> set up: apt-get install {program}");
    let installed = command.args(["install", "-y", "-q", program]);
    // iperf3 would ask whether it is to be a service.
    let installed = installed
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()?;
    ensure!(
        installed.success(),
        "{program} cannot be installed: install Debian's package {program}"
    );
    Ok(())
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout.starts_with(b"0"))
}
