//! `cargo xtask fuzz`: libFuzzer where nightly and cargo-fuzz are there, else a mutator of our
//! own over the same functions.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::test::succeeds;

const TARGETS: [&str; 4] = ["zmtp", "request", "service", "transfer"];
/// Longest input in bytes; the seeds and the findings so far are far below.
const MAX_LEN: u32 = 4096;

/// Runs the fuzz targets under libFuzzer, or a seeded mutator where that is not at hand.
#[derive(Debug, clap::Args)]
pub(crate) struct FuzzArgs {
    /// Targets to run; all of them unless some are named
    #[arg(value_name = "TARGET", value_parser = TARGETS)]
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, value_name = "N", default_value_t = 30)]
    seconds: u32,
    /// Use the seeded mutator, even where libFuzzer is at hand
    #[arg(long)]
    stable: bool,
    /// Repeat the run that printed this seed; libFuzzer keeps what it found in fuzz/artifacts
    #[arg(long, value_name = "N", requires = "stable")]
    seed: Option<u64>,
}

impl FuzzArgs {
    fn targets(&self) -> Vec<&str> {
        match self.targets.is_empty() {
            true => TARGETS.to_vec(),
            false => self.targets.iter().map(String::as_str).collect(),
        }
    }
}

pub(crate) fn run(asked: &FuzzArgs) -> Result<bool> {
    let unguided = match asked.stable {
        true => Some("as asked".to_owned()),
        false => no_libfuzzer(),
    };
    if let Some(why) = &unguided {
        println!(
            "note: xtask: fuzz targets ran under a seeded mutator without coverage guidance: {why}"
        );
    }
    let (mut passed, mut failed) = (0, 0);
    for target in asked.targets() {
        let mut command = if unguided.is_none() {
            libfuzzer(target, asked.seconds)?
        } else {
            mutator(target, asked)
        };
        println!("fuzz {target} for {} s", asked.seconds);
        let status = command
            .stdin(Stdio::null())
            .status()
            .context("cannot run cargo")?;
        if status.success() {
            passed += 1;
        } else {
            failed += 1;
        }
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    Ok(failed == 0)
}

/// Returns the reason why the targets cannot run under libFuzzer. A nightly toolchain is whatever was newest when it
/// was installed, so one that cannot build the targets counts as none.
fn no_libfuzzer() -> Option<String> {
    if !succeeds("cargo", &["+nightly", "fuzz", "--version"]) {
        return Some("a nightly toolchain or cargo-fuzz is missing".to_owned());
    }
    // cargo-fuzz has no --locked, and would write a new lock file.
    let fetch = ["fetch", "--locked", "--manifest-path", "fuzz/Cargo.toml"];
    if !succeeds("cargo", &fetch) {
        let again = fetch.join(" ");
        return Some(format!(
            "`cargo {again}` fails: crates.io, or fuzz/Cargo.lock is out of date"
        ));
    }
    let build = ["+nightly", "fuzz", "build", "--fuzz-dir", "fuzz"];
    let built = succeeds("cargo", &build);
    (!built).then(|| format!("`cargo {}` fails", build.join(" ")))
}

/// Coverage-guided, with the address sanitizer.
fn libfuzzer(target: &str, seconds: u32) -> Result<Command> {
    let corpus = format!("fuzz/corpus/{target}");
    std::fs::create_dir_all(&corpus).with_context(|| format!("cannot make {corpus}"))?;
    let mut command = Command::new("cargo");
    command
        .args(["+nightly", "fuzz", "run", "--fuzz-dir", "fuzz", target])
        .args([&corpus, &format!("fuzz/seeds/{target}"), "--"])
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={MAX_LEN}"))
        .args(["-timeout=10", "-print_final_stats=1", "-verbosity=0"]);
    Ok(command)
}

/// The example of the crate that the target belongs to.
fn mutator(target: &str, asked: &FuzzArgs) -> Command {
    let (package, example) = match target {
        "transfer" => ("lmc-transfer", "fuzz_transfer"),
        _ => ("lmc-vllm-adapter", "fuzz"),
    };
    let mut command = Command::new("cargo");
    command
        .args(["run", "--release", "--locked", "--package", package])
        .args(["--features", "fuzzing", "--example", example, "--", target])
        .arg(asked.seconds.to_string())
        .args(asked.seed.map(|seed| seed.to_string()));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_has_its_entry_point_and_seeds() {
        for target in TARGETS {
            let entry = crate::root().join(format!("fuzz/fuzz_targets/{target}.rs"));
            assert!(entry.exists(), "{} is missing", entry.display());
            let seeds = crate::root().join(format!("fuzz/seeds/{target}"));
            let count = std::fs::read_dir(&seeds).map_or(0, Iterator::count);
            assert!(count > 0, "{} holds no seed", seeds.display());
        }
    }

    #[test]
    fn arguments_are_checked() {
        let parse = crate::parse_action;
        for line in ["fuzz", "fuzz service --seconds 7 --stable --seed 3"] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for wrong in ["zmpt", "--seconds", "--seconds x", "--seed 3"] {
            assert!(parse(&format!("fuzz {wrong}")).is_err(), "{wrong}");
        }
    }
}
