//! `cargo xtask test-vllm`, `test-scheduler` and `test-cli`: real clients of the protocol against the
//! server.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::built::Built;
use crate::scripts::{self, NotToBeHad};

/// The folder of the Python environment, made when it is not there.
///
/// # Errors
/// [`NotToBeHad`] where it cannot be made on this machine.
pub(crate) fn environment() -> Result<String> {
    scripts::set_up("xtask/python/setup.sh", &[])
}

/// Builds the server as users run it.
pub(crate) fn build_server() -> Result<PathBuf> {
    Ok(crate::build_release("--package lmc-server")?.join("lmc"))
}

/// Arguments of a script of checks, which its own --help lists.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct ScriptArgs {
    /// Passed on to the script
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARG"
    )]
    args: Vec<String>,
}

/// Runs the scenarios of xtask/python/scenarios.py with what the wheel installs. Whether all of
/// them passed.
pub(crate) fn run(args: &ScriptArgs) -> Result<bool> {
    with_package("xtask/python/scenarios.py", args)
}

/// Runs vLLM's own schedulers with lmc's connector and a worker without a model. Whether all of its
/// checks passed.
pub(crate) fn run_scheduler(args: &ScriptArgs) -> Result<bool> {
    with_package("xtask/python/scheduler.py", args)
}

/// Runs a script of checks with the package and the server that the wheel installs.
fn with_package(script: &str, args: &ScriptArgs) -> Result<bool> {
    let package = match crate::wheel::installed() {
        Ok(folder) => folder,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped(script, &why)),
        Err(fault) => return Err(fault),
    };
    let own = ["--package".to_owned(), package.display().to_string()];
    let args = [&own[..], &args.args].concat();
    checks(script, &package.join("bin/lmc"), &args)
}

/// Runs the tests of the Python package that need no vLLM, with the native module and a server as
/// they are built for tests. Whether all passed.
pub(crate) fn run_python() -> Result<bool> {
    Built::workspace()?;
    let folder = crate::target()?.join("debug");
    let mut tests = Command::new("python3");
    tests.args(["-m", "unittest", "discover", "-s", ".", "-t", "."]);
    tests.env("LMC_NATIVE", folder.join("lib_native.so"));
    tests.env("LMC_PROGRAM", folder.join("lmc"));
    let status = tests.current_dir("python").stdin(Stdio::null()).status();
    let passed = status.context("cannot run python3")?.success();
    Ok(passed && check_types()?)
}

/// Checks the types of the Python package; vLLM and PyTorch are not there, and not looked at. Whether
/// they agree.
fn check_types() -> Result<bool> {
    let environment = match scripts::set_up("xtask/python/types.sh", &[]) {
        Ok(folder) => PathBuf::from(folder),
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("types", &why)),
        Err(fault) => return Err(fault),
    };
    let mut checker = Command::new(environment.join("bin/mypy"));
    checker.args(["--no-incremental", "lmc"]);
    let status = checker.current_dir("python").stdin(Stdio::null()).status();
    let agree = status.context("cannot run mypy")?.success();
    let counts = if agree {
        "1 passed, 0 failed"
    } else {
        "0 passed, 1 failed"
    };
    println!("{counts}, 0 skipped");
    Ok(agree)
}

/// Version of vLLM after the one that the connector is tested with.
const NEXT_VLLM: &str = "0.33.0";

/// Arguments of `cargo xtask test-interface`.
#[derive(Debug, clap::Args)]
pub(crate) struct InterfaceArgs {
    /// Version of vLLM to compare with
    #[arg(default_value = NEXT_VLLM, value_name = "VERSION")]
    version: String,
}

/// Compares what the connector uses of vLLM with another version of it. Whether nothing differs.
pub(crate) fn run_interface(args: &InterfaceArgs) -> Result<bool> {
    let mut check = Command::new("python3");
    check.args(["xtask/python/interface_check.py", &args.version]);
    let status = check.stdin(Stdio::null()).status();
    Ok(status.context("cannot run python3")?.success())
}

/// Runs LMCache's own command-line tools against the server. Whether all did what they should.
pub(crate) fn run_cli(args: &ScriptArgs) -> Result<bool> {
    checks("xtask/python/cli_check.py", &build_server()?, &args.args)
}

/// Runs a script of checks against a server, in the Python environment.
fn checks(script: &str, server: &Path, args: &[String]) -> Result<bool> {
    let folder = match environment() {
        Ok(folder) => folder,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped(script, &why)),
        Err(fault) => return Err(fault),
    };
    let python = format!("{folder}/bin/python");
    println!(
        "{python} {script} --server-bin {} {}",
        server.display(),
        args.join(" ")
    );
    let status = Command::new(&python)
        .arg(script)
        .arg("--server-bin")
        .arg(server)
        .args(args)
        .stdin(Stdio::null())
        .status()
        .context("cannot run the environment's python")?;
    Ok(status.success())
}
