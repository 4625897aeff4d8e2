//! `cargo xtask test-vllm` and `test-cli`: real clients of the protocol against the server.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

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

/// Runs the scenarios of xtask/python/scenarios.py. Whether all of them passed.
pub(crate) fn run(args: &ScriptArgs) -> Result<bool> {
    checks("xtask/python/scenarios.py", &args.args)
}

/// Runs LMCache's own command-line tools against the server. Whether all did what they should.
pub(crate) fn run_cli(args: &ScriptArgs) -> Result<bool> {
    checks("xtask/python/cli_check.py", &args.args)
}

/// Runs a script of checks against the server, in the Python environment.
fn checks(script: &str, args: &[String]) -> Result<bool> {
    let server = build_server()?;
    let folder = match environment() {
        Ok(folder) => folder,
        Err(why) if why.is::<NotToBeHad>() => {
            println!("SKIPPED {script}: {why:#}");
            println!("0 passed, 0 failed, 1 skipped");
            return Ok(true);
        }
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
        .arg(&server)
        .args(args)
        .stdin(Stdio::null())
        .status()
        .context("cannot run the environment's python")?;
    Ok(status.success())
}
