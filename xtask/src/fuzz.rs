//! `cargo xtask fuzz`: libFuzzer where nightly and cargo-fuzz are there, else a mutator of our own.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

const TARGETS: [&str; 3] = ["zmtp", "request", "service"];

pub(crate) fn run(args: &[String]) -> Result<bool> {
    let (mut seconds, mut targets) = (30, Vec::new());
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--seconds" => {
                let value = args.next().context("--seconds takes a number")?;
                seconds = value.parse().context("--seconds takes a number")?;
            }
            target if TARGETS.contains(&target) => targets.push(target.to_owned()),
            other => bail!(
                "unknown target {other:?}, expected one of {}",
                TARGETS.join(", ")
            ),
        }
    }
    if targets.is_empty() {
        targets = TARGETS.map(str::to_owned).to_vec();
    }
    let coverage_guided = has(&["+nightly", "fuzz", "--version"]);
    if !coverage_guided {
        println!(
            "cargo-fuzz or a nightly toolchain is missing: running a seeded mutator over the \
             same targets on stable (no coverage guidance)"
        );
    }
    let mut ok = true;
    for target in targets {
        let status = if coverage_guided {
            let time = format!("-max_total_time={seconds}");
            let corpus = format!("fuzz/seeds/{target}");
            Command::new("cargo")
                .args(["+nightly", "fuzz", "run", "--fuzz-dir", "fuzz", &target])
                .args([
                    &format!("fuzz/corpus/{target}"),
                    &corpus,
                    "--",
                    &time,
                    "-max_len=4096",
                ])
                .stdin(Stdio::null())
                .status()
        } else {
            Command::new("cargo")
                .args([
                    "run",
                    "--quiet",
                    "--release",
                    "--package",
                    "lmc-vllm-adapter",
                ])
                .args(["--features", "fuzzing", "--example", "fuzz", "--", &target])
                .arg(seconds_text(seconds))
                .stdin(Stdio::null())
                .status()
        };
        ok &= status.context("cannot run cargo")?.success();
    }
    Ok(ok)
}

fn seconds_text(seconds: u64) -> String {
    seconds.to_string()
}

fn has(args: &[&str]) -> bool {
    Command::new("cargo")
        .args(args)
        .output()
        .is_ok_and(|out| out.status.success())
}
