//! `cargo xtask fuzz`: libFuzzer where nightly and cargo-fuzz are there, else a mutator of our
//! own over the same functions.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::test::succeeds;

const TARGETS: [&str; 4] = ["zmtp", "request", "service", "transfer"];
/// Longest input in bytes; the seeds and the findings so far are far below.
const MAX_LEN: u32 = 4096;

/// What was asked for on the command line.
struct Asked {
    targets: Vec<String>,
    seconds: u32,
    stable: bool,
    seed: Option<u64>,
}

impl Asked {
    fn parse(args: &[String]) -> Result<Self> {
        let mut asked = Self {
            targets: Vec::new(),
            seconds: 30,
            stable: false,
            seed: None,
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--seconds" => asked.seconds = number(arg, args.next())?,
                "--seed" => asked.seed = Some(number(arg, args.next())?),
                "--stable" => asked.stable = true,
                target if TARGETS.contains(&target) => asked.targets.push(target.to_owned()),
                other => bail!(
                    "unknown target {other:?}, expected some of {}",
                    TARGETS.join(", ")
                ),
            }
        }
        if asked.seed.is_some() && !asked.stable {
            bail!("--seed goes with --stable; libFuzzer keeps what it found in fuzz/artifacts");
        }
        if asked.targets.is_empty() {
            asked.targets = TARGETS.map(str::to_owned).to_vec();
        }
        Ok(asked)
    }
}

fn number<T: std::str::FromStr>(flag: &str, value: Option<&String>) -> Result<T> {
    let value = value.and_then(|value| value.parse().ok());
    value.with_context(|| format!("{flag} takes a number"))
}

pub(crate) fn run(args: &[String]) -> Result<bool> {
    let asked = Asked::parse(args)?;
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
    for target in &asked.targets {
        let mut command = if unguided.is_none() {
            libfuzzer(target, asked.seconds)?
        } else {
            mutator(target, &asked)
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
fn mutator(target: &str, asked: &Asked) -> Command {
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
        let parse = |line: &str| {
            let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            Asked::parse(&args)
        };
        let asked = parse("service --seconds 7 --stable --seed 3").expect("all are known");
        assert_eq!((asked.seconds, asked.seed), (7, Some(3)));
        assert_eq!(asked.targets, ["service"]);
        assert_eq!(parse("").expect("nothing is asked for").targets, TARGETS);
        for wrong in ["zmpt", "--seconds", "--seconds x", "--seed 3"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
