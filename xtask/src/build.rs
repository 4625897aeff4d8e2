//! `cargo xtask test-build`: what a newcomer builds, without a warning.
//!
//! Cargo has no stable setting that denies warnings, and `RUSTFLAGS` would build everything a
//! second time. Cargo repeats the warnings of what it built earlier, so its output is read.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::toolchain;

/// Every crate as a program gets it that embeds it: without the features that our tests turn on.
const CRATES: &str = "cargo check --workspace --locked";

pub(crate) fn run() -> Result<bool> {
    let readme = std::fs::read_to_string("README.md").context("README.md")?;
    let mut lines = builds(&readme);
    ensure!(!lines.is_empty(), "README.md has no `cargo run`");
    lines.push(CRATES.to_owned());
    let (mut passed, mut failed) = (0, 0);
    let denies_warnings = toolchain::denies_warnings();
    for line in lines {
        println!("$ {line}");
        let (built, warnings) = build(&line)?;
        if built && (warnings == 0 || !denies_warnings) {
            passed += 1;
        } else {
            failed += 1;
            println!("FAILED {line}: built: {built}, warnings: {warnings}");
        }
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    Ok(failed == 0)
}

/// The commands that build what a page's `cargo run` lines run.
fn builds(page: &str) -> Vec<String> {
    let commands = page.match_indices("cargo run ").map(|(at, start)| {
        let rest = &page[at + start.len()..];
        rest.split(['`', '#', '\n']).next().unwrap_or_default()
    });
    let build = |command: &str| {
        let flags = command.split_whitespace().take_while(|word| *word != "--");
        let flags: Vec<&str> = flags.collect();
        format!("cargo build --locked {}", flags.join(" "))
    };
    commands.map(build).collect()
}

/// Runs a build and shows its output. Whether it succeeded, and how many warnings it had.
fn build(line: &str) -> Result<(bool, usize)> {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().context("an empty command")?);
    command.args(words).env("CARGO_TERM_COLOR", "never");
    let mut child = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run cargo")?;
    let output = child.stderr.take().context("a piped output")?;
    let mut warnings = 0;
    for said in BufReader::new(output).lines() {
        let said = said?;
        warnings += usize::from(is_warning(&said));
        println!("{said}");
    }
    Ok((child.wait()?.success(), warnings))
}

fn is_warning(line: &str) -> bool {
    // A registry that answers late is no fault of the tree.
    line.starts_with("warning") && !line.starts_with("warning: spurious network error")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_taken_from_the_page() {
        let page = "```\ncargo run --release -- serve   # listens\n```\n\
                    `cargo run -p lmc-engine --example embed` runs a cache\n`cargo xtask test`";
        let wanted = [
            "cargo build --locked --release",
            "cargo build --locked -p lmc-engine --example embed",
        ];
        assert_eq!(builds(page), wanted);
    }

    /// The release build warned of unused code, and of two examples of one name, while CI built
    /// with all features and looked at the compiler's lints only.
    #[test]
    fn warnings_of_cargo_and_of_the_compiler_are_counted() {
        for (line, wanted) in [
            ("warning: output filename collision.", true),
            ("warning: function `thread_waker` is never used", true),
            ("warning: spurious network error (3 tries remaining)", false),
            ("   Compiling lmc-transfer v0.1.0", false),
        ] {
            assert_eq!(is_warning(line), wanted, "{line}");
        }
    }
}
