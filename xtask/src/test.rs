//! `cargo xtask test`: what a newcomer runs, and what CI runs.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::steps::{Step, Steps};

/// The steps in the order in which they run: quick ones first.
fn steps(nextest: bool) -> Vec<Step> {
    let tests = if nextest {
        "cargo nextest run --workspace --profile xtask"
    } else {
        // What a test prints is shown, because that is where it says why it was skipped.
        "cargo test --workspace --all-targets --no-fail-fast -- --show-output"
    };
    vec![
        Step::new("format", "cargo fmt --all --check"),
        Step::new("tidy", "cargo xtask tidy"),
        Step::new(
            "clippy",
            "cargo clippy --workspace --all-targets --all-features -- -D warnings",
        ),
        Step::new("docs", "cargo doc --workspace --no-deps").with("RUSTDOCFLAGS", "-Dwarnings"),
        Step::new("tests", tests),
        Step::new(
            "doc-examples",
            "cargo test --workspace --doc --no-fail-fast",
        ),
        Step::new("nixl", "cargo xtask test-nixl"),
        Step::new("fuzz", "cargo xtask fuzz --seconds 5"),
        Step::new("crash-loop", "cargo xtask crash-loop --rounds 12"),
        Step::new("multinode", "cargo xtask test-multinode"),
        // Its namespaces are those of the step before.
        Step::new(
            "rdma",
            "cargo xtask test-rdma --level best --level tcp --level cma",
        ),
        Step::new("vllm", "cargo xtask test-vllm"),
        Step::new("cli", "cargo xtask test-cli"),
    ]
}

pub(crate) fn run(args: &[String]) -> Result<bool> {
    let nextest = succeeds("cargo", &["nextest", "--version"]);
    let mut steps = steps(nextest);
    let names: Vec<&str> = steps.iter().map(|step| step.name).collect();
    let mut wanted = Vec::new();
    for arg in args {
        match arg.as_str() {
            "--list" => {
                for step in &steps {
                    println!("{:<14} {}", step.name, step.typed());
                }
                return Ok(true);
            }
            name if names.contains(&name) => wanted.push(name),
            other => bail!(
                "unknown step {other:?}, expected one of {}",
                names.join(", ")
            ),
        }
    }
    if !wanted.is_empty() {
        steps.retain(|step| wanted.contains(&step.name));
    }
    set_up()?;
    let mut done = Steps::default();
    if !nextest {
        done.note("tests ran under cargo test; `cargo install --locked cargo-nextest` is quicker");
    }
    let count = steps.len();
    for (index, step) in steps.into_iter().enumerate() {
        done.run(step, index + 1, count);
    }
    Ok(done.finish())
}

/// Installs what the steps need and a fresh toolchain lacks. The Python environment is made by
/// the step that needs it.
fn set_up() -> Result<()> {
    for (component, probe) in [("rustfmt", "fmt"), ("clippy", "clippy")] {
        if succeeds("cargo", &[probe, "--version"]) {
            continue;
        }
        println!("==> set up: rustup component add {component}");
        let status = Command::new("rustup")
            .args(["component", "add", component])
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cargo {probe} is missing and rustup cannot be run"))?;
        if !status.success() {
            bail!("rustup could not add {component}; add it by hand and try again");
        }
    }
    // Lints look at every feature.
    crate::nixl::build_tools()
}

/// Whether a command can be run and ends well; what it prints is dropped.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    let run = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    run.is_ok_and(|out| out.status.success())
}
