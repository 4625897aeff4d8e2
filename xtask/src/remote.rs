//! `cargo xtask test-remote`: the tier of shared stores over real servers.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::outcomes::Outcomes;
use crate::{packages, shown};

/// Time for the tests of one kind of store, with their build.
const LIMIT: Duration = Duration::from_secs(1800);

pub(crate) fn run() -> Result<bool> {
    let mut outcomes = Outcomes::default();
    println!("\n==> redis");
    let had = packages::install("redis-server", "redis-server")
        .and_then(|()| packages::install("redis-cli", "redis-tools"))
        .and_then(|()| packages::install("openssl", "openssl"));
    match had {
        Ok(()) => outcomes.ran("redis", tests("redis")),
        Err(why) => outcomes.skip("redis", &why),
    }
    Ok(outcomes.finish())
}

/// Runs the tests that need a server, of one file.
fn tests(name: &str) -> Result<String> {
    let mut tests = Command::new("cargo");
    tests
        .args(["test", "--locked", "--package", "lmc-backend-remote"])
        .args(["--all-features", "--test", name, "--", "--ignored"]);
    let said = shown::output(&mut tests, LIMIT)?;
    let passed = shown::passed(&said)?;
    Ok(format!("{passed} cases"))
}
