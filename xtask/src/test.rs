//! `cargo xtask check`, the gate, and `cargo xtask test`, the gate and the lab: what a newcomer
//! runs, and what CI runs.

use std::process::{Command, Stdio};

use anyhow::{Result, bail, ensure};

use crate::scripts::NotToBeHad;
use crate::steps::{Step, Steps};
use crate::{nixl, toolchain};

/// Steps of a run.
#[derive(Debug, clap::Args)]
pub(crate) struct StepArgs {
    /// Steps to run; all of them unless some are named
    #[arg(value_name = "STEP")]
    steps: Vec<String>,
    /// List the steps and their commands, without running them
    #[arg(long)]
    list: bool,
}

/// Parts of the machine that decide how the steps of the gate run.
struct Has {
    nextest: bool,
    deny: bool,
    /// True for a toolchain whose warnings are errors.
    denies_warnings: bool,
}

impl Has {
    fn find() -> Self {
        Self {
            nextest: succeeds("cargo", &["nextest", "--version"]),
            deny: succeeds("cargo", &["deny", "--version"]),
            denies_warnings: toolchain::denies_warnings(),
        }
    }
}

/// The gate: needs no network once the crates are fetched, no rights, and a few minutes.
fn gate(has: &Has) -> Vec<Step> {
    let tests = if has.nextest {
        "cargo nextest run --locked --workspace --profile xtask"
    } else {
        // What a test prints is shown, because that is where it says why it was skipped.
        "cargo test --locked --workspace --all-targets --no-fail-fast -- --show-output"
    };
    let clippy = match has.denies_warnings {
        true => "cargo clippy --locked --workspace --all-targets -- -D warnings",
        false => "cargo clippy --locked --workspace --all-targets",
    };
    let docs = Step::new("docs", "cargo doc --locked --workspace --no-deps");
    vec![
        Step::new("format", "cargo fmt --all --check"),
        Step::new("tidy", "cargo xtask tidy"),
        Step::new("deny", "cargo deny --locked check bans licenses sources"),
        Step::new("clippy", clippy),
        Step::new("alone", "cargo xtask test-features"),
        match has.denies_warnings {
            true => docs.with("RUSTDOCFLAGS", "-Dwarnings"),
            false => docs,
        },
        Step::new("tests", tests),
        Step::new(
            "doc-examples",
            "cargo test --locked --workspace --doc --no-fail-fast",
        ),
    ]
}

/// The lab: real peers and servers, other hosts, crashes. Fetches and installs what it needs.
/// `nixl_tools` is true if the tools that build the feature `nixl` are installed.
fn lab(nixl_tools: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    if nixl_tools {
        let clippy =
            "cargo clippy --locked --workspace --all-targets --all-features -- -D warnings";
        let docs = "cargo doc --locked --workspace --no-deps --all-features";
        steps.push(Step::new("clippy-all", clippy));
        steps.push(Step::new("docs-all", docs).with("RUSTDOCFLAGS", "-Dwarnings"));
    }
    steps.extend([
        Step::new("build", "cargo xtask test-build"),
        Step::new("nixl", "cargo xtask test-nixl"),
        Step::new("fuzz", "cargo xtask fuzz --seconds 20"),
        Step::new("crash-loop", "cargo xtask crash-loop --rounds 12"),
        Step::new("multinode", "cargo xtask test-multinode"),
        // Its namespaces are those of the step before.
        Step::new(
            "rdma",
            "cargo xtask test-rdma --level best --level tcp --level cma",
        ),
        Step::new("remote", "cargo xtask test-remote"),
        Step::new("python", "cargo xtask test-python"),
        Step::new("interface", "cargo xtask test-interface"),
        Step::new("wheel", "cargo xtask wheel"),
        Step::new("vllm", "cargo xtask test-vllm"),
        Step::new("cli", "cargo xtask test-cli"),
    ]);
    steps
}

/// Runs the gate.
pub(crate) fn check(args: &StepArgs) -> Result<bool> {
    let has = Has::find();
    run_steps(gate(&has), args, &has, Steps::default())
}

/// Runs the gate and the lab.
pub(crate) fn run(args: &StepArgs) -> Result<bool> {
    let has = Has::find();
    let mut done = Steps::default();
    let mut nixl_tools = true;
    if !args.list {
        // The Python environment is made by the step that needs it.
        if let Err(why) = nixl::build_tools() {
            ensure!(why.is::<NotToBeHad>(), "{why:#}");
            done.note(&format!("{why:#}"));
            nixl_tools = false;
        }
    }
    let mut steps = gate(&has);
    steps.extend(lab(nixl_tools));
    run_steps(steps, args, &has, done)
}

fn run_steps(mut steps: Vec<Step>, args: &StepArgs, has: &Has, mut done: Steps) -> Result<bool> {
    if args.list {
        for step in &steps {
            println!("{:<14} {}", step.name, step.typed());
        }
        return Ok(true);
    }
    let names: Vec<&str> = steps.iter().map(|step| step.name).collect();
    if let Some(unknown) = args
        .steps
        .iter()
        .find(|step| !names.contains(&step.as_str()))
    {
        bail!(
            "unknown step {unknown:?}, expected one of {}",
            names.join(", ")
        );
    }
    if !has.nextest {
        done.note("tests ran under cargo test; `cargo install --locked cargo-nextest` is quicker");
    }
    if !has.denies_warnings {
        done.note(&toolchain::note());
    }
    if !args.steps.is_empty() {
        steps.retain(|step| args.steps.iter().any(|wanted| wanted == step.name));
    }
    let count = steps.len();
    for (index, step) in steps.into_iter().enumerate() {
        match lacks(step.name, has) {
            Some(why) => done.skip(step, &why),
            None => done.run(step, index + 1, count),
        }
    }
    Ok(done.finish())
}

/// Returns the reason why a step cannot run. A component that a fresh toolchain lacks is added.
fn lacks(step: &str, has: &Has) -> Option<String> {
    let (component, probe) = match step {
        "deny" if !has.deny => {
            return Some(
                "no cargo-deny: `cargo install --locked cargo-deny`, then try again".to_owned(),
            );
        }
        "format" => ("rustfmt", "fmt"),
        "clippy" | "clippy-all" => ("clippy", "clippy"),
        _ => return None,
    };
    let why = || format!("no {component}: `rustup component add {component}`, then try again");
    (!toolchain::has_component(component, probe)).then(why)
}

/// Returns true if a command can be run and succeeds; its output is dropped.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    let run = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    run.is_ok_and(|out| out.status.success())
}
