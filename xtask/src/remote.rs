//! `cargo xtask test-remote`: the tier of shared stores over real servers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::outcomes::Outcomes;
use crate::{packages, scripts, shown};

/// Time for the tests of one kind of store, with their build.
const LIMIT: Duration = Duration::from_secs(1800);

/// The tests of the tier, and of the program's commands.
const TIER: [&str; 2] = ["--package=lmc-backend-remote", "--all-features"];
const COMMANDS: [&str; 2] = ["--package=lmc-server", "--test=remote_tools"];

pub(crate) fn run() -> Result<bool> {
    let mut outcomes = Outcomes::default();
    println!("\n==> redis");
    let had = packages::install("redis-server", "redis-server")
        .and_then(|()| packages::install("redis-cli", "redis-tools"))
        .and_then(|()| packages::install("openssl", "openssl"));
    match had {
        Ok(()) => outcomes.ran("redis", all_tests("redis", None)),
        Err(why) => outcomes.skip("redis", &why),
    }
    println!("\n==> s3");
    match s3_servers() {
        Ok(bin) => outcomes.ran("s3", all_tests("s3", Some(&bin))),
        Err(why) => outcomes.skip("s3", &why),
    }
    Ok(outcomes.finish())
}

/// Runs the tests of the tier and of the commands over one kind of store.
fn all_tests(kind: &str, programs: Option<&Path>) -> Result<String> {
    let file = format!("--test={kind}");
    let tier = tests(&[TIER[0], TIER[1], &file, "--", "--ignored"], programs)?;
    let commands = tests(
        &[COMMANDS[0], COMMANDS[1], "--", "--ignored", kind],
        programs,
    )?;
    Ok(format!("{tier} cases, and {commands} of `lmc remote`"))
}

/// Returns the folder of the programs `s3s-fs` and `moto_server`.
pub(crate) fn s3_servers() -> Result<PathBuf> {
    Ok(PathBuf::from(scripts::set_up("xtask/python/s3.sh", &[])?).join("bin"))
}

/// Runs tests that need a server, and returns how many passed. The server's program may be in a
/// folder.
fn tests(selected: &[&str], programs: Option<&Path>) -> Result<u32> {
    let mut tests = Command::new("cargo");
    if let Some(programs) = programs {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::env::split_paths(&paths);
        let paths = std::env::join_paths([programs.to_owned()].into_iter().chain(paths));
        tests.env("PATH", paths.context("PATH")?);
    }
    tests.args(["test", "--locked"]).args(selected);
    shown::passed(&shown::output(&mut tests, LIMIT)?)
}
