//! Benchmarks that are examples of one crate: they print their tables, and write nothing.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Context, Result};

/// Arguments of an example, which its head lists.
#[derive(Debug, clap::Args)]
pub(crate) struct ExampleArgs {
    /// Arguments of the program, as the first lines of its source list them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Builds an example as users do, and runs it. Returns true if it ends well.
pub(crate) fn run(package: &str, example: &str, args: &ExampleArgs) -> Result<bool> {
    let flags = format!("--package {package} --example {example}");
    let program = crate::build_release(&flags)?.join("examples").join(example);
    let ran = Command::new(&program).args(&args.args).status();
    let ran = ran.with_context(|| format!("cannot run {}", program.display()))?;
    Ok(ran.success())
}
