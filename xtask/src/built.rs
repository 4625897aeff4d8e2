//! Programs that steps of the lab run, compiled once for all of them, in the profile of the gate.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{nixl, shown, test};

/// A program: its crate, and `lib` for the unit tests of a library, else the name of its target.
type Name = (String, String);

/// Programs that were compiled in one go.
pub(crate) struct Built {
    programs: Vec<(Name, PathBuf)>,
}

impl Built {
    /// Compiles the tests of the workspace, as the lab's own step of tests does, and the libraries and
    /// examples that steps use: Python loads a library that no test is linked with.
    pub(crate) fn workspace() -> Result<Self> {
        let crates = format!("--workspace {}", nixl::features()?);
        Self::of(
            &crates,
            test::TARGETS,
            "--lib --example two_sides --example crash",
        )
    }

    /// Compiles the two sides of a channel and the suite that every channel passes, and no more.
    pub(crate) fn channels(nixl: bool) -> Result<Self> {
        let crates = match nixl {
            true => "--package lmc-transfer --features nixl,conformance",
            false => "--package lmc-transfer --features conformance",
        };
        Self::of(crates, "--test it", "--example two_sides")
    }

    /// Compiles the tests of the driver for tests, of which a part is for any driver.
    pub(crate) fn of_driver() -> Result<Self> {
        Self::of("--package lmc-fake-cuda", "--test it", "--lib")
    }

    fn of(crates: &str, tests: &str, examples: &str) -> Result<Self> {
        // `cargo test` would make tests of examples.
        let mut programs = build(&format!("test --no-run --locked {crates} {tests}"))?;
        programs.extend(build(&format!("build --locked {crates} {examples}"))?);
        Ok(Self { programs })
    }

    /// Returns the path of a program.
    pub(crate) fn program(&self, package: &str, target: &str) -> Result<&Path> {
        let found = self
            .programs
            .iter()
            .find(|((of, name), _)| of == package && name == target);
        let (_, path) = found.with_context(|| format!("cargo built no {target} of {package}"))?;
        Ok(path)
    }

    /// Returns a command that runs tests as cargo would: in the folder of their crate.
    pub(crate) fn tests(&self, package: &str, target: &str) -> Result<Command> {
        let mut command = Command::new(self.program(package, target)?);
        command.current_dir(Path::new("crates").join(package));
        Ok(command)
    }
}

/// Runs cargo, and returns the programs that it names.
fn build(line: &str) -> Result<Vec<(Name, PathBuf)>> {
    let mut cargo = Command::new("cargo");
    cargo.args(line.split_whitespace());
    println!("$ {}", shown::typed(&cargo));
    cargo.arg("--message-format=json-render-diagnostics");
    let built = cargo.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let built = built.context("cannot run cargo")?;
    ensure!(built.status.success(), "it does not build: see above");
    let said = String::from_utf8(built.stdout)?;
    Ok(said.lines().filter_map(program).collect())
}

/// Reads a line that cargo printed: a program that it has built.
fn program(line: &str) -> Option<(Name, PathBuf)> {
    let line: Value = serde_json::from_str(line).ok()?;
    let path = PathBuf::from(line["executable"].as_str()?);
    let folder = Path::new(line["manifest_path"].as_str()?).parent()?;
    let package = folder.file_name()?.to_str()?.to_owned();
    let target = match (
        line["target"]["kind"][0].as_str()?,
        &line["profile"]["test"],
    ) {
        ("lib", _) => "lib",
        // The unit tests of a program have its name; they are of no step.
        ("bin", Value::Bool(true)) => return None,
        _ => line["target"]["name"].as_str()?,
    };
    Some(((package, target.to_owned()), path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_known_by_crate_and_target() {
        let line = |kind: &str, name: &str, test: bool| {
            let line = serde_json::json!({
                "manifest_path": "/w/crates/lmc-key/Cargo.toml",
                "target": {"kind": [kind], "name": name},
                "profile": {"test": test},
                "executable": "/w/target/debug/x",
            });
            program(&line.to_string()).map(|((_, target), _)| target)
        };
        assert_eq!(line("test", "it", true).as_deref(), Some("it"));
        assert_eq!(line("lib", "lmc_key", true).as_deref(), Some("lib"));
        assert_eq!(line("example", "crash", false).as_deref(), Some("crash"));
        assert_eq!(line("bin", "lmc", true), None);
        assert!(program("{\"reason\":\"build-finished\"}").is_none());
    }
}
