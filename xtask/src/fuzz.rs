//! `cargo xtask fuzz`: libFuzzer where a C++ compiler is installed, else a mutator of our own over
//! the same functions.

mod guided;

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

const TARGETS: [&str; 5] = ["zmtp", "request", "service", "transfer", "peer"];
/// Longest input in bytes; the seeds and the findings so far are far below.
const MAX_LEN: u32 = 4096;

/// Runs the fuzz targets under libFuzzer, or a seeded mutator where that cannot be built.
#[derive(Debug, clap::Args)]
pub(crate) struct FuzzArgs {
    /// Targets to run; all of them unless some are named
    #[arg(value_name = "TARGET", value_parser = TARGETS)]
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, value_name = "N", default_value_t = 30)]
    seconds: u32,
    /// Build with the address sanitizer, which needs a nightly toolchain
    #[arg(long)]
    address_sanitizer: bool,
    /// Run nothing; replace the found seeds by the fewest that reach what seeds and corpus reach
    #[arg(long)]
    minimize: bool,
    /// Use the seeded mutator, which follows no coverage, even where libFuzzer can be built
    #[arg(long, conflicts_with_all = ["address_sanitizer", "minimize"])]
    mutator: bool,
    /// Repeat the run of the mutator that printed this seed; libFuzzer keeps what it found in
    /// fuzz/artifacts
    #[arg(long, value_name = "N", requires = "mutator")]
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
    let targets = asked.targets();
    if !asked.mutator {
        match guided::build(asked.address_sanitizer)? {
            Ok(fuzzer) if asked.minimize => return fuzzer.minimize(&targets),
            Ok(fuzzer) => return fuzzer.run(&targets, asked.seconds),
            Err(why) => {
                println!("SKIPPED fuzzing that follows coverage: {why}");
                println!("0 passed, 0 failed, 1 skipped");
            }
        }
    }
    let (mut passed, mut failed) = (0, 0);
    for target in targets {
        println!(
            "fuzz {target} for {} s, by the seeded mutator",
            asked.seconds
        );
        let status = mutator(target, asked)
            .stdin(Stdio::null())
            .status()
            .context("cannot run cargo")?;
        match status.success() {
            true => passed += 1,
            false => failed += 1,
        }
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    Ok(failed == 0)
}

/// The example of the crate that the target belongs to.
fn mutator(target: &str, asked: &FuzzArgs) -> Command {
    let (package, example) = match target {
        "transfer" => ("lmc-transfer", "fuzz_transfer"),
        "peer" => ("lmc-backend-p2p", "fuzz_peer"),
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
        for line in [
            "fuzz",
            "fuzz service --seconds 7 --mutator --seed 3",
            "fuzz --minimize zmtp",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for wrong in [
            "zmpt",
            "--seconds",
            "--seconds x",
            "--seed 3",
            "--mutator --minimize",
        ] {
            assert!(parse(&format!("fuzz {wrong}")).is_err(), "{wrong}");
        }
    }
}
