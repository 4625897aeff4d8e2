//! `cargo xtask lab`: what the gate has no time or no rights for, and its record, docs/lab.md.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};

use crate::bench::conditions;
use crate::steps::{self, CommandStep, Done, StepArgs, Steps};
use crate::{nixl, test, toolchain};

/// The page that names the last run of the whole lab.
const PAGE: &str = "docs/lab.md";

/// Run the lab: real peers and servers, other hosts, crashes; installs and fetches what it needs
///
/// A step that fails is run once more: what passes then is listed as unstable, and the step has
/// failed all the same. A run of all steps writes docs/lab.md.
#[derive(Debug, clap::Args)]
pub(crate) struct LabArgs {
    #[command(flatten)]
    steps: StepArgs,
}

/// Runs the lab.
pub(crate) fn run(args: &LabArgs) -> Result<bool> {
    let features = match args.steps.lists() {
        // A list installs nothing.
        true => "--all-features",
        false => nixl::features()?,
    };
    let chosen = args.steps.choose(lab(test::has_nextest(), features))?;
    if args.steps.lists() {
        steps::list(&chosen);
        return Ok(true);
    }
    let mut done = Steps::default();
    if !toolchain::denies_warnings() {
        done.note(&toolchain::note());
    }
    if features.is_empty() {
        done.note("no NIXL can be built here: clippy, docs and tests ran without the feature nixl");
    }
    let conditions = conditions::machine();
    done.run_all(chosen, true);
    let passed = done.finish();
    if args.steps.is_all() {
        let page = page(&conditions, done.done());
        fs::write(PAGE, page).context(PAGE)?;
        println!("{PAGE} is written: commit it with what it has tested");
    }
    Ok(passed)
}

/// The steps. The workspace is compiled once, with `features`, and once as users build it.
fn lab(nextest: bool, features: &str) -> Vec<CommandStep> {
    vec![
        CommandStep::new("deny", "cargo deny --locked check bans licenses sources")
            .needs("deny", "cargo install --locked cargo-deny"),
        test::clippy(features),
        test::docs(features),
        CommandStep::new("alone", "cargo xtask test-features"),
        test::tests(nextest, features).with(LAB, "1"),
        CommandStep::new("nixl", "cargo xtask test-nixl"),
        CommandStep::new("multinode", "cargo xtask test-multinode"),
        // Its namespaces are those of the step before.
        CommandStep::new(
            "rdma",
            "cargo xtask test-rdma --level best --level tcp --level cma",
        ),
        CommandStep::new("ptx", "cargo xtask ptx --check"),
        CommandStep::new("gpu", "cargo xtask test-gpu"),
        CommandStep::new("remote", "cargo xtask test-remote"),
        CommandStep::new("alerts", "cargo xtask test-alerts"),
        CommandStep::new("page", "cargo xtask test-page"),
        CommandStep::new("book", "cargo xtask book"),
        CommandStep::new("python", "cargo xtask test-python"),
        CommandStep::new("interface", "cargo xtask test-interface"),
        CommandStep::new("fuzz", "cargo xtask fuzz --seconds 20"),
        CommandStep::new("build", "cargo xtask test-build"),
        CommandStep::new("crash-loop", "cargo xtask crash-loop --rounds 12"),
        CommandStep::new("cli", "cargo xtask test-cli"),
        CommandStep::new("wheel", "cargo xtask wheel"),
        // Its program is that of the wheel.
        CommandStep::new("package", "cargo xtask package --check"),
        CommandStep::new("scheduler", "cargo xtask test-scheduler"),
        CommandStep::new("vllm", "cargo xtask test-vllm"),
    ]
}

/// Environment variable by which `lmc_testkit::in_lab` and `rounds` know the lab.
const LAB: &str = "LMC_TEST_LAB";

/// The record of a run.
fn page(conditions: &[(&str, String)], done: &[Done]) -> String {
    let mut page = String::from(
        "# The last run of the whole lab\n\n\
         `cargo xtask lab` writes this page; `lmc` is the commit that it tested. [CONTRIBUTING](../CONTRIBUTING.md)\n\
         says when to run it.\n\n",
    );
    page += &conditions::lines(conditions);
    page += "\n| Step | Passed | Failed | Skipped | Seconds |\n|---|---|---|---|---|\n";
    let mut seconds = 0;
    for it in done {
        let (counts, took) = (it.counts, it.took.as_secs());
        seconds += took;
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} | {took} |",
            it.step.name, counts.passed, counts.failed, counts.skipped
        );
    }
    let _ = writeln!(page, "\nAll steps together: {seconds} s.");
    let failed = done.iter().flat_map(|it| {
        let named = |kind: &'static str, tests: &[String]| {
            let line = |test: &String| format!("{kind} in `{}`: {test}", it.step.name);
            tests.iter().map(line).collect::<Vec<_>>()
        };
        let mut lines = named("failed", &it.failed);
        lines.extend(named("unstable", &it.unstable));
        if !it.ok && lines.is_empty() {
            lines.push(format!("failed: `{}`", it.step.typed()));
        }
        lines
    });
    section(&mut page, "What failed", &failed.collect::<Vec<_>>());
    let skipped = done.iter().flat_map(|it| {
        let reasons = steps::reasons(it.skipped.iter());
        reasons
            .into_iter()
            .map(|reason| format!("`{}`: {reason}", it.step.name))
    });
    section(&mut page, "What was skipped", &skipped.collect::<Vec<_>>());
    page
}

fn section(page: &mut String, title: &str, lines: &[String]) {
    let _ = write!(page, "\n## {title}\n\n");
    for line in lines {
        let _ = writeln!(page, "- {line}");
    }
    if lines.is_empty() {
        *page += "Nothing.\n";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_of_our_own_is_an_action() {
        for step in lab(true, "--all-features") {
            let typed = step.typed();
            if let Some(action) = typed.strip_prefix("cargo xtask ") {
                assert!(crate::parse_action(action).is_ok(), "{typed}");
            }
        }
    }

    #[test]
    fn the_record_names_what_failed_and_why_something_was_skipped() {
        let mut steps = Steps::default();
        steps.run(CommandStep::new("docs", "false"), "1 of 2", false);
        steps.skip(CommandStep::new("deny", "cargo deny"), "no cargo-deny");
        let page = page(&[("lmc", "abc".to_owned())], steps.done());
        for wanted in [
            "- lmc: abc\n",
            "| `docs` | 0 | 1 | 0 | 0 |\n",
            "## What failed\n\n- failed: `false`\n",
            "## What was skipped\n\n- `deny`: deny: no cargo-deny\n",
        ] {
            assert!(page.contains(wanted), "{wanted:?} is not in {page}");
        }
    }
}
