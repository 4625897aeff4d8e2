//! `cargo xtask check`, the gate, and `cargo xtask test`, the gate and the lab: what a newcomer
//! runs, and what CI runs.

use std::process::{Command, Stdio};

use anyhow::{Result, bail, ensure};

use crate::scripts::NotToBeHad;
use crate::steps::{Step, Steps};
use crate::{nixl, packages, toolchain};

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

/// Parts of the machine that decide which steps run.
struct Has {
    nextest: bool,
    deny: bool,
    /// True if the tools that build the feature `nixl` are installed.
    nixl_tools: bool,
    /// True for a toolchain whose warnings are errors.
    denies_warnings: bool,
}

impl Has {
    fn find() -> Self {
        Self {
            nextest: succeeds("cargo", &["nextest", "--version"]),
            deny: succeeds("cargo", &["deny", "--version"]),
            nixl_tools: packages::found("g++") && succeeds("sh", &["-c", LIBCLANG]),
            denies_warnings: toolchain::denies_warnings(),
        }
    }
}

/// Lists the libraries that bindgen can read C++ with.
const LIBCLANG: &str = "ls $LIBCLANG_PATH /usr/lib/llvm-*/lib/libclang*.so* \
                        /usr/lib/*/libclang*.so* /usr/lib64/libclang*.so* 2>/dev/null | grep -q clang";

/// The gate: needs no network once the crates are fetched, no rights, and a few minutes.
fn gate(has: &Has) -> Vec<Step> {
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
    let docs = match has.nixl_tools {
        true => "cargo doc --locked --workspace --no-deps --all-features",
        false => "cargo doc --locked --workspace --no-deps",
    };
    let default_features = match has.denies_warnings {
        true => "cargo clippy --locked --workspace --all-targets -- -D warnings",
        false => "cargo clippy --locked --workspace --all-targets",
    };
    let docs = Step::new("docs", docs);
    vec![
        Step::new("format", "cargo fmt --all --check"),
        Step::new("tidy", "cargo xtask tidy"),
        Step::new("deny", "cargo deny --locked check bans licenses sources"),
        Step::new("clippy", clippy),
        Step::new("features", default_features),
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
fn lab() -> Vec<Step> {
    vec![
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
    ]
}

/// Runs the gate.
pub(crate) fn check(args: &StepArgs) -> Result<bool> {
    let has = Has::find();
    run_steps(gate(&has), args, &has, Steps::default())
}

/// Runs the gate and the lab.
pub(crate) fn run(args: &StepArgs) -> Result<bool> {
    let mut has = Has::find();
    let mut done = Steps::default();
    if !args.list {
        // The Python environment is made by the step that needs it.
        has.nixl_tools = match nixl::build_tools() {
            Ok(()) => true,
            Err(why) => {
                ensure!(why.is::<NotToBeHad>(), "{why:#}");
                done.note(&format!("{why:#}"));
                false
            }
        };
    }
    let mut steps = gate(&has);
    steps.extend(lab());
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
    if !has.nixl_tools {
        done.note(
            "clippy and docs looked at default features only: the feature nixl needs g++ and \
             libclang (Debian: g++ libclang-dev), which `cargo xtask test` installs",
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
        "clippy" | "features" => ("clippy", "clippy"),
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
