//! `cargo xtask test`: what a newcomer runs, and what CI runs.

use std::process::{Command, Stdio};

use anyhow::{Result, bail, ensure};

use crate::scripts::NotToBeHad;
use crate::steps::{Step, Steps};
use crate::{nixl, toolchain};

/// Parts of the machine that decide which steps run.
struct Has {
    nextest: bool,
    /// True if the tools that build the feature `nixl` are installed.
    nixl_tools: bool,
    /// A toolchain whose warnings are errors.
    denies_warnings: bool,
}

/// The steps in the order in which they run: quick ones first.
fn steps(has: &Has) -> Vec<Step> {
    let tests = if has.nextest {
        "cargo nextest run --locked --workspace --profile xtask"
    } else {
        // What a test prints is shown, because that is where it says why it was skipped.
        "cargo test --locked --workspace --all-targets --no-fail-fast -- --show-output"
    };
    let clippy = match (has.nixl_tools, has.denies_warnings) {
        (true, true) => {
            "cargo clippy --locked --workspace --all-targets --all-features -- -D warnings"
        }
        (true, false) => "cargo clippy --locked --workspace --all-targets --all-features",
        (false, true) => "cargo clippy --locked --workspace --all-targets -- -D warnings",
        (false, false) => "cargo clippy --locked --workspace --all-targets",
    };
    let docs = Step::new("docs", "cargo doc --locked --workspace --no-deps");
    vec![
        Step::new("format", "cargo fmt --all --check"),
        Step::new("tidy", "cargo xtask tidy"),
        Step::new("clippy", clippy),
        match has.denies_warnings {
            true => docs.with("RUSTDOCFLAGS", "-Dwarnings"),
            false => docs,
        },
        Step::new("build", "cargo xtask test-build"),
        Step::new("tests", tests),
        Step::new(
            "doc-examples",
            "cargo test --locked --workspace --doc --no-fail-fast",
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
    let mut has = Has {
        nextest: succeeds("cargo", &["nextest", "--version"]),
        nixl_tools: true,
        denies_warnings: toolchain::denies_warnings(),
    };
    let mut wanted = Vec::new();
    let known = steps(&has);
    let names: Vec<&str> = known.iter().map(|step| step.name).collect();
    for arg in args {
        match arg.as_str() {
            "--list" => {
                for step in &known {
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
    let mut done = Steps::default();
    // The Python environment is made by the step that needs it.
    if let Err(why) = nixl::build_tools() {
        ensure!(why.is::<NotToBeHad>(), "{why:#}");
        has.nixl_tools = false;
        done.note(&format!("clippy looked at default features only: {why:#}"));
    }
    if !has.nextest {
        done.note("tests ran under cargo test; `cargo install --locked cargo-nextest` is quicker");
    }
    if !has.denies_warnings {
        done.note(&toolchain::note());
    }
    let mut steps = steps(&has);
    if !wanted.is_empty() {
        steps.retain(|step| wanted.contains(&step.name));
    }
    let count = steps.len();
    for (index, step) in steps.into_iter().enumerate() {
        match lacks(step.name) {
            Some(why) => done.skip(step, &why),
            None => done.run(step, index + 1, count),
        }
    }
    Ok(done.finish())
}

/// Returns the reason why a step cannot run. A component that a fresh toolchain lacks is added.
fn lacks(step: &str) -> Option<String> {
    let (component, probe) = match step {
        "format" => ("rustfmt", "fmt"),
        "clippy" => ("clippy", "clippy"),
        _ => return None,
    };
    let why = || format!("no {component}: `rustup component add {component}`, then try again");
    (!toolchain::has_component(component, probe)).then(why)
}

/// Whether a command can be run and ends well; what it prints is dropped.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    let run = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    run.is_ok_and(|out| out.status.success())
}
