//! `cargo xtask test-nixl`: NIXL channels on the real library.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

const SCRIPT: &str = "xtask/python/nixl.sh";
/// Status of the script where something cannot be had on this machine.
const NOT_TO_BE_HAD: i32 = 75;

/// What is missing cannot be had on this machine; any other error is a fault.
#[derive(Debug)]
pub(crate) struct NotToBeHad(pub(crate) &'static str);

impl fmt::Display for NotToBeHad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for NotToBeHad {}

/// What was asked of the script.
enum Got {
    Ready(String),
    NotToBeHad,
}

fn script(args: &[&str]) -> Result<Got> {
    let done = Command::new("bash")
        .arg(SCRIPT)
        .args(args)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run bash")?;
    if done.status.code() == Some(NOT_TO_BE_HAD) {
        return Ok(Got::NotToBeHad);
    }
    if !done.status.success() {
        bail!("{SCRIPT} failed: see above");
    }
    let said = String::from_utf8(done.stdout)?;
    let folder = said.lines().last().unwrap_or_default();
    Ok(Got::Ready(folder.to_owned()))
}

/// Sees to it that crates with the feature `nixl` can be built.
pub(crate) fn build_tools() -> Result<()> {
    match script(&["tools"])? {
        Got::Ready(_) => Ok(()),
        Got::NotToBeHad => bail!(NotToBeHad(
            "the feature `nixl` of lmc-transfer is built with g++ and libclang, which are not \
             here and cannot be installed: see above"
        )),
    }
}

/// NIXL's library, fetched where it is not here yet.
pub(crate) fn library() -> Result<PathBuf> {
    match script(&[])? {
        Got::Ready(folder) => Ok(Path::new(&folder).join("libnixl_capi.so")),
        Got::NotToBeHad => {
            bail!(NotToBeHad(
                "PyPI (nixl-cu12==1.5.1) cannot be reached from here"
            ))
        }
    }
}

/// Runs the tests of lmc-transfer with NIXL. Whether all passed, or could not be run here; with
/// `--require`, only the former.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    let required = match args {
        [] => false,
        [flag] if flag == "--require" => true,
        _ => bail!("test-nixl takes --require or nothing"),
    };
    let got = (script(&["tools"])?, script(&[])?);
    let (Got::Ready(_), Got::Ready(folder)) = got else {
        println!(
            "SKIPPED: NIXL library not found: PyPI (nixl-cu12==1.5.1) or the packages to build \
             with cannot be reached from here"
        );
        println!("0 passed, 0 failed, 1 skipped");
        return Ok(!required);
    };
    let line = "cargo test --package lmc-transfer --features nixl,conformance --no-fail-fast \
                -- --show-output";
    let library = Path::new(&folder).join("libnixl_capi.so");
    let python = Path::new(&folder).join("bin/python");
    let typed: Vec<&str> = line.split_whitespace().collect();
    println!(
        "LMC_NIXL_LIBRARY={} LMC_NIXL_PYTHON={} {}",
        library.display(),
        python.display(),
        typed.join(" ")
    );
    let status = Command::new(typed[0])
        .args(&typed[1..])
        .env("LMC_NIXL_LIBRARY", &library)
        .env("LMC_NIXL_PYTHON", &python)
        .stdin(Stdio::null())
        .status()
        .context("cannot run cargo")?;
    Ok(status.success())
}
