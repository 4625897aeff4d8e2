//! `cargo xtask test-nixl`: NIXL channels, and daemons that read over them, on the real library.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::scripts::{self, NotToBeHad};

const SCRIPT: &str = "xtask/python/nixl.sh";

/// Installs what crates with the feature `nixl` are built with.
///
/// # Errors
/// [`NotToBeHad`] where that is impossible.
pub(crate) fn build_tools() -> Result<()> {
    scripts::set_up(SCRIPT, &["tools"]).map(drop)
}

/// The environment with NIXL's library, made where it is not here yet.
fn environment() -> Result<PathBuf> {
    scripts::set_up(SCRIPT, &[]).map(PathBuf::from)
}

/// NIXL's library, fetched where it is not here yet.
pub(crate) fn library() -> Result<PathBuf> {
    Ok(environment()?.join("libnixl_capi.so"))
}

/// The tests with NIXL.
const TESTS: [&str; 2] = [
    "cargo test --locked --package lmc-transfer --features nixl,conformance --no-fail-fast -- \
     --show-output",
    "cargo test --locked --package lmc-server --features nixl --test it --no-fail-fast -- \
     nixl_peers:: --show-output",
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
    let library = folder.join("libnixl_capi.so");
    let python = folder.join("bin/python");
    let mut passed = true;
    for line in TESTS {
        println!(
            "LMC_NIXL_LIBRARY={} LMC_NIXL_PYTHON={} {line}",
            library.display(),
            python.display(),
        );
        let mut words = line.split_whitespace();
        let status = Command::new(words.next().context("a command has a name")?)
            .args(words)
            .env("LMC_NIXL_LIBRARY", &library)
            .env("LMC_NIXL_PYTHON", &python)
            .stdin(Stdio::null())
            .status()
            .context("cannot run cargo")?;
        passed &= status.success();
    }
    Ok(passed)
}
