//! `cargo xtask test-remote`: the tier of shared stores over real servers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::built::Built;
use crate::outcomes::Outcomes;
use crate::{packages, scripts, shown};

/// Time for the tests of one kind of store.
const LIMIT: Duration = Duration::from_secs(900);

pub(crate) fn run() -> Result<bool> {
    let built = Built::workspace()?;
    let mut outcomes = Outcomes::default();
    println!("\n==> mounts");
    match file_systems() {
        Ok(()) => outcomes.ran("mounts", mounts(&built)),
        Err(why) => outcomes.skip("mounts", &why),
    }
    println!("\n==> redis");
    let had = packages::install("redis-server", "redis-server")
        .and_then(|()| packages::install("redis-cli", "redis-tools"))
        .and_then(|()| packages::install("openssl", "openssl"));
    match had {
        Ok(()) => outcomes.ran("redis", all_tests(&built, "redis", None)),
        Err(why) => outcomes.skip("redis", &why),
    }
    println!("\n==> s3");
    match s3_servers() {
        Ok(bin) => outcomes.ran("s3", all_tests(&built, "s3", Some(&bin))),
        Err(why) => outcomes.skip("s3", &why),
    }
    Ok(outcomes.finish())
}

/// Checks that file systems can be mounted that are full, or served by a program.
fn file_systems() -> Result<()> {
    ensure!(
        packages::is_root(),
        "file systems are mounted by root alone"
    );
    ensure!(Path::new("/dev/fuse").exists(), "there is no /dev/fuse");
    packages::install("sshfs", "sshfs")?;
    packages::install("/usr/lib/openssh/sftp-server", "openssh-sftp-server")?;
    packages::install("mkfs.ext4", "e2fsprogs")
}

/// Runs the tests that mount file systems, which no other process sees.
fn mounts(built: &Built) -> Result<String> {
    let mut tests = Command::new("unshare");
    tests
        .arg("--mount")
        .arg(built.program("lmc-backend-remote", "it")?)
        .args(["mounts::", "--ignored"]);
    let passed = shown::passed(&shown::output(&mut tests, LIMIT)?)?;
    Ok(format!(
        "{passed} cases over file systems that were mounted"
    ))
}

/// Runs the tests of the tier and of the commands over one kind of store.
fn all_tests(built: &Built, kind: &str, programs: Option<&Path>) -> Result<String> {
    let tier = built.tests("lmc-backend-remote", "it")?;
    let tier = tests(tier, &format!("{kind}::"), programs)?;
    let program = built.tests("lmc-server", "it")?;
    let program = tests(program, kind, programs)?;
    Ok(format!(
        "{tier} cases of the tier, and {program} of the program"
    ))
}

/// Returns the folder of the programs `s3s-fs` and `moto_server`.
pub(crate) fn s3_servers() -> Result<PathBuf> {
    Ok(PathBuf::from(scripts::set_up("xtask/python/s3.sh", &[])?).join("bin"))
}

/// Runs tests that need a server, and returns how many passed. The server's program may be in a
/// folder.
fn tests(mut tests: Command, names: &str, programs: Option<&Path>) -> Result<u32> {
    if let Some(programs) = programs {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::env::split_paths(&paths);
        let paths = std::env::join_paths([programs.to_owned()].into_iter().chain(paths));
        tests.env("PATH", paths.context("PATH")?);
    }
    tests.args(["--ignored", names]);
    shown::passed(&shown::output(&mut tests, LIMIT)?)
}
