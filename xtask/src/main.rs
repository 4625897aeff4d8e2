//! Every developer action of lmc, in plain Rust: `cargo xtask --help`.

mod bench;
mod fuzz;
mod steps;
mod tidy;
mod vllm;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Result, bail};

use crate::steps::Steps;

const HELP: &str = "\
Every developer action of lmc.

  cargo xtask test                 all there is to check; sets up what it needs, says what it does
  cargo xtask ci                   the same (CI runs `cargo xtask test`)
  cargo xtask tidy                 layering, file sizes, links, invariants
  cargo xtask test-vllm [ARGS]     real vLLM on CPU against `lmc serve`
      --only NAME...               some scenarios only
      --peer lmcache               the same scenarios against LMCache's own server
  cargo xtask fuzz [TARGET] [--seconds N]
                                   zmtp, request or service; all of them unless one is named
  cargo xtask bench serve [ARGS]   lmc against LMCache's server; writes docs/benchmarks.md
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    std::env::set_current_dir(root()).expect("the workspace's folder exists");
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<bool> {
    let Some((command, rest)) = args.split_first() else {
        print!("{HELP}");
        return Ok(true);
    };
    match command.as_str() {
        "test" | "ci" => Ok(test()),
        "tidy" => tidy::run(),
        "test-vllm" => vllm::run(rest),
        "fuzz" => fuzz::run(rest),
        "bench" => bench::run(rest),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(true)
        }
        other => bail!("unknown command {other:?}; `cargo xtask --help` lists them"),
    }
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent()
        .expect("xtask lies in the workspace")
        .to_owned()
}

fn test() -> bool {
    let mut steps = Steps::new();
    steps.run("format", "cargo fmt --all --check", |c| c);
    steps.run(
        "clippy",
        "cargo clippy --workspace --all-targets -- -D warnings",
        |c| c,
    );
    steps.run("docs", "cargo doc --workspace --no-deps --quiet", |c| {
        c.env("RUSTDOCFLAGS", "-D warnings")
    });
    let nextest = Command::new("cargo")
        .args(["nextest", "--version"])
        .output();
    if nextest.is_ok_and(|out| out.status.success()) {
        let quiet = "--status-level slow --final-status-level fail --hide-progress-bar";
        steps.run(
            "tests",
            &format!("cargo nextest run --workspace {quiet}"),
            |c| c,
        );
    } else {
        steps.run("tests", "cargo test --workspace --all-targets", |c| c);
    }
    steps.run(
        "doc examples",
        "cargo test --workspace --doc --quiet",
        |c| c,
    );
    steps.run("fuzz, 15 s", "cargo xtask fuzz --seconds 5", |c| c);
    steps.run("vllm", "cargo xtask test-vllm", |c| c);
    steps.finish()
}
