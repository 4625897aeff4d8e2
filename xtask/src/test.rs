//! `cargo xtask test`, the gate: what a newcomer runs, and what CI runs.

use std::num::NonZero;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use crate::steps::{self, CommandStep, StepArgs, Steps};
use crate::{repeat, slow, toolchain};

/// Run the gate: it takes minutes, and needs no privileges, and no network once crates are fetched
///
/// Nothing is installed, and nothing is touched outside of this folder and a temporary one. With
/// --repeat, --load or --only the tests alone are run.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    repeat: repeat::RepeatArgs,
}

/// Targets that hold tests. Examples and benches are compiled by clippy.
pub(crate) const TARGETS: &str = "--lib --bins --tests";

/// The steps. Their budgets are those of a fresh clone on two cores.
fn gate(nextest: bool) -> Vec<CommandStep> {
    vec![
        CommandStep::new("format", "cargo fmt --all --check")
            .needs("fmt", "rustup component add rustfmt")
            .within(5),
        CommandStep::new("tidy", "cargo xtask tidy").within(5),
        clippy("").within(100),
        // What ships: the tests turn on features of its libraries that it does without.
        CommandStep::new("default", "cargo check --locked --package lmc-server").within(40),
        docs("").within(25),
        tests(nextest, "").within(290),
        CommandStep::new(
            "doc-examples",
            "cargo test --locked --workspace --doc --no-fail-fast",
        )
        .within(15),
    ]
}

/// The lints of all code, with these flags of cargo.
pub(crate) fn clippy(flags: &str) -> CommandStep {
    let line = format!("cargo clippy --locked --workspace {flags} --all-targets");
    let step = match toolchain::denies_warnings() {
        true => CommandStep::new("clippy", format!("{line} -- -D warnings")),
        false => CommandStep::new("clippy", line),
    };
    step.needs("clippy", "rustup component add clippy")
}

/// The documentation of the workspace, with these flags of cargo.
pub(crate) fn docs(flags: &str) -> CommandStep {
    let line = format!("cargo doc --locked --workspace {flags} --no-deps");
    let step = CommandStep::new("docs", line);
    match toolchain::denies_warnings() {
        true => step.with("RUSTDOCFLAGS", "-Dwarnings"),
        false => step,
    }
}

/// The tests of the workspace, with these flags of cargo; twice as many at a time as there are
/// cores, because most of them wait.
pub(crate) fn tests(nextest: bool, flags: &str) -> CommandStep {
    let flags = format!("--locked --workspace {flags} {TARGETS}");
    let threads = 2 * std::thread::available_parallelism().map_or(1, NonZero::get);
    let line = match nextest {
        true => format!("cargo nextest run {flags} --profile xtask --test-threads {threads}"),
        // What a test prints is shown, because that is where it says why it was skipped.
        false => {
            format!("cargo test {flags} --no-fail-fast -- --show-output --test-threads {threads}")
        }
    };
    CommandStep::new("tests", line)
}

/// Returns true if nextest is installed, which is quicker and kills a test that hangs.
pub(crate) fn has_nextest() -> bool {
    succeeds("cargo", &["nextest", "--version"])
}

/// Runs the gate, or its tests again and again.
pub(crate) fn run(args: &TestArgs) -> Result<bool> {
    let nextest = has_nextest();
    if args.repeat.is_asked() {
        let only_tests = args.steps.is_all() && !args.steps.lists();
        ensure!(
            only_tests,
            "--repeat, --load and --only are of the tests alone: name no step"
        );
        return repeat::run(&args.repeat, nextest);
    }
    let chosen = args.steps.choose(gate(nextest))?;
    if args.steps.lists() {
        steps::list(&chosen);
        return Ok(true);
    }
    let mut done = Steps::default();
    if !nextest {
        done.note(
            "tests ran under cargo test; `cargo install --locked cargo-nextest` is quicker, ends a \
             test that hangs, and tells which are slow",
        );
    }
    if !toolchain::denies_warnings() {
        done.note(&toolchain::note());
    }
    done.run_all(chosen, false);
    let slow: Vec<_> = done.done().iter().flat_map(|done| &done.slow).collect();
    for test in slow::without_a_reason(&slow)? {
        done.note(&test);
    }
    Ok(done.finish())
}

/// Returns true if a command can be run and succeeds; its output is dropped.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    let run = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    run.is_ok_and(|out| out.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit of eight minutes.
    #[test]
    fn the_budgets_of_the_steps_are_eight_minutes() {
        let budgets = gate(true)
            .iter()
            .map(|step| step.budget().as_secs())
            .sum::<u64>();
        assert_eq!(budgets, 480);
    }

    #[test]
    fn arguments_are_checked() {
        let parse = crate::parse_action;
        for line in [
            "test",
            "test tidy docs",
            "test --repeat 20 --load 4 --only socket::",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for wrong in ["--repeat", "--repeat 0", "--load x", "--only"] {
            assert!(parse(&format!("test {wrong}")).is_err(), "{wrong}");
        }
    }
}
