//! `cargo xtask test-nixl`: NIXL channels, and daemons that read over them, on the real library.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use crate::built::Built;
use crate::scripts::{self, NotToBeHad};
use crate::shown;

const SCRIPT: &str = "xtask/python/nixl.sh";

/// Installs what crates with the feature `nixl` are built with.
///
/// # Errors
/// [`NotToBeHad`] where that is impossible.
pub(crate) fn build_tools() -> Result<()> {
    scripts::set_up(SCRIPT, &["tools"]).map(drop)
}

/// Returns the flag of cargo with which the lab compiles the workspace: all features, or none where
/// the machine cannot get what the feature `nixl` is built with.
pub(crate) fn features() -> Result<&'static str> {
    match build_tools() {
        Ok(()) => Ok("--all-features"),
        Err(why) if why.is::<NotToBeHad>() => Ok(""),
        Err(fault) => Err(fault),
    }
}

/// The environment with NIXL's library, made where it is not here yet.
pub(crate) fn environment() -> Result<PathBuf> {
    scripts::set_up(SCRIPT, &[]).map(PathBuf::from)
}

/// NIXL's library, fetched where it is not here yet.
pub(crate) fn library() -> Result<PathBuf> {
    Ok(environment()?.join("libnixl_capi.so"))
}

/// The folder of Python packages with NIXL, fetched where it is not here yet.
pub(crate) fn packages() -> Result<PathBuf> {
    Ok(environment()?.join("lib/python3.11/site-packages"))
}

/// Time for the tests of one program.
const LIMIT: Duration = Duration::from_secs(900);

/// Tests with NIXL: crate, target and the names of the tests.
const TESTS: [[&str; 3]; 3] = [
    ["lmc-transfer", "lib", "nixl::"],
    ["lmc-transfer", "it", "nixl::"],
    ["lmc-server", "it", "nixl_peers::"],
];

/// Variables that UCX and NIXL read when a test program loads them; see `NixlConfig::open`.
const VARIABLES: [(&str, &str); 6] = [
    ("UCX_TLS", "tcp"),
    ("UCX_NET_DEVICES", "lo"),
    ("UCX_MODULES", "^efa"),
    ("UCX_LOG_FILE", "stderr"),
    ("UCX_LOG_LEVEL", "error"),
    ("NIXL_LOG_LEVEL", "ERROR"),
];

/// Runs the tests of channels and of peers with NIXL. Whether all passed, or could not be run here; with
/// `--require`, only the former.
pub(crate) fn run(required: bool) -> Result<bool> {
    let folder = match build_tools().and_then(|()| environment()) {
        Ok(folder) => folder,
        Err(why) if why.is::<NotToBeHad>() => {
            println!("SKIPPED NIXL: {why:#}");
            println!("0 passed, 0 failed, 1 skipped");
            return Ok(!required);
        }
        Err(fault) => return Err(fault),
    };
    let built = Built::workspace()?;
    let mut passed = true;
    for [package, target, names] in TESTS {
        let mut tests = built.tests(package, target)?;
        tests
            .args([names, "--show-output"])
            .env("LMC_NIXL_LIBRARY", folder.join("libnixl_capi.so"))
            .envs(VARIABLES);
        match shown::output(&mut tests, LIMIT) {
            Ok(said) => {
                print!("{said}");
                shown::passed(&said)?;
            }
            Err(error) => {
                println!("{error:#}");
                passed = false;
            }
        }
    }
    Ok(passed)
}
