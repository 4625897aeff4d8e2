//! `cargo xtask test-build`: what a newcomer builds, without a warning; `cargo xtask test-features`:
//! every library alone, with none of its features and with each.
//!
//! Cargo has no stable setting that denies warnings, and `RUSTFLAGS` would build everything a
//! second time. Cargo repeats the warnings of what it built earlier, so its output is read.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::toolchain;

/// Every crate as a program gets it that embeds it: without the features that our tests turn on.
const CRATES: &str = "cargo check --workspace --locked";

/// Features that build only with tools that a machine may lack.
const NEEDS_TOOLS: [&str; 1] = ["nixl"];

/// Builds each library alone. A build of the workspace gives a dependency the features that any
/// crate asks for, and so hides a feature that a crate needs and does not ask for.
pub(crate) fn run_features() -> Result<bool> {
    let mut lines = Vec::new();
    for entry in std::fs::read_dir("crates").context("crates")? {
        let folder = entry?.path();
        let manifest = folder.join("Cargo.toml");
        if !folder.join("src/lib.rs").exists() {
            continue;
        }
        let text = std::fs::read_to_string(&manifest);
        let text = text.with_context(|| manifest.display().to_string())?;
        let manifest: toml::Table = text.parse().context(manifest.display().to_string())?;
        lines.extend(alone(&manifest));
    }
    lines.sort();
    check(lines)
}

/// The commands that build a library with none of its features, and with each.
fn alone(manifest: &toml::Table) -> Vec<String> {
    let name = manifest["package"]["name"].as_str().unwrap_or_default();
    let base = format!("cargo check --locked -p {name} --lib --no-default-features");
    let features = manifest.get("features").and_then(|it| it.as_table());
    let features = features.into_iter().flat_map(|table| table.keys());
    let with = features
        .filter(|feature| !NEEDS_TOOLS.contains(&feature.as_str()))
        .map(|feature| format!("{base} --features {feature}"));
    std::iter::once(base.clone()).chain(with).collect()
}

pub(crate) fn run() -> Result<bool> {
    let readme = std::fs::read_to_string("README.md").context("README.md")?;
    let mut lines = builds(&readme);
    ensure!(!lines.is_empty(), "README.md has no `cargo run`");
    lines.push(CRATES.to_owned());
    check(lines)
}

/// Runs builds and counts those without a warning. Returns true if all are.
fn check(lines: Vec<String>) -> Result<bool> {
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

    #[test]
    fn a_library_is_built_with_none_of_its_features_and_with_each() {
        let manifest = "[package]\nname = \"a\"\n[features]\nnixl = []\nredis = []\n";
        let base = "cargo check --locked -p a --lib --no-default-features";
        assert_eq!(
            alone(&manifest.parse().expect("a manifest")),
            [base.to_owned(), format!("{base} --features redis")]
        );
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
