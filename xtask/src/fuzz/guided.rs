//! The fuzz targets under libFuzzer, which keeps each input that reaches code that no other does.
//!
//! The targets are built as `cargo fuzz build --sanitizer none` builds them. All of its options are
//! stable (`-C`), so that neither a nightly toolchain nor cargo-fuzz is needed.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::MAX_LEN;
use crate::packages;
use crate::test::succeeds;

/// Options with which a build counts the edges that a run takes and shows the operands of
/// comparisons; an overflow or a failed `debug_assert!` ends the run.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 -Cdebug-assertions";

/// The target with a rule that is easily broken where coverage is followed, and never elsewhere.
const PLANTED: &str = "planted";
/// Seconds within which libFuzzer breaks the planted rule; it takes about one.
const PLANTED_SECONDS: u32 = 60;

/// The targets, built for libFuzzer.
pub(super) struct Fuzzer {
    folder: PathBuf,
}

/// Builds the targets. The inner error says what this machine lacks.
///
/// # Errors
/// When a target does not compile.
pub(super) fn build(address_sanitizer: bool) -> Result<Result<Fuzzer, String>> {
    if !["c++", "g++", "clang++"].into_iter().any(packages::found) {
        return Ok(Err(
            "no C++ compiler builds libFuzzer (Debian: g++)".to_owned()
        ));
    }
    let toolchain = match address_sanitizer {
        true => Some("+nightly"),
        false => None,
    };
    let version = Command::new("rustc").args(toolchain).arg("-vV").output();
    let version = version.context("cannot run rustc")?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let Some(host) = version.lines().find_map(|line| line.strip_prefix("host: ")) else {
        return Ok(Err(
            "no nightly toolchain: `rustup install nightly`".to_owned()
        ));
    };
    let fetch = ["fetch", "--locked", "--manifest-path", "fuzz/Cargo.toml"];
    if !succeeds("cargo", &fetch) {
        let again = fetch.join(" ");
        return Ok(Err(format!(
            "`cargo {again}` fails: crates.io cannot be reached, or fuzz/Cargo.lock is out of date"
        )));
    }
    let (into, sanitizer) = match address_sanitizer {
        true => ("fuzz/target/address", " -Zsanitizer=address"),
        false => ("fuzz/target", ""),
    };
    println!("build the fuzz targets with coverage");
    let built = Command::new("cargo")
        .args(toolchain)
        .args(["build", "--quiet", "--release", "--locked"])
        .args(["--manifest-path", "fuzz/Cargo.toml"])
        // With a target named, build scripts and macros are built without these options.
        .args(["--target", host, "--target-dir", into])
        .env("RUSTFLAGS", format!("{COVERAGE}{sanitizer}"))
        .stdin(Stdio::null())
        .status()
        .context("cannot run cargo")?;
    ensure!(built.success(), "the fuzz targets do not compile");
    let folder = Path::new(into).join(host).join("release");
    Ok(Ok(Fuzzer { folder }))
}

impl Fuzzer {
    /// Runs targets, each for some seconds, after a check that coverage is followed.
    pub(super) fn run(&self, targets: &[&str], seconds: u32) -> Result<bool> {
        let guided = self.breaks_the_planted_rule()?;
        if !guided {
            println!(
                "the planted rule was not broken within {PLANTED_SECONDS} s: coverage is not followed"
            );
        }
        let (mut passed, mut failed) = (u32::from(guided), u32::from(!guided));
        for target in targets {
            println!("fuzz {target} for {seconds} s, following coverage");
            match self.fuzz(target, seconds)? {
                true => passed += 1,
                false => failed += 1,
            }
        }
        println!("{passed} passed, {failed} failed, 0 skipped");
        Ok(failed == 0)
    }

    fn command(&self, target: &str) -> Command {
        let mut command = Command::new(self.folder.join(target));
        command
            .arg(format!("-artifact_prefix=fuzz/artifacts/{target}/"))
            .arg(format!("-max_len={MAX_LEN}"))
            .stdin(Stdio::null());
        command
    }

    fn breaks_the_planted_rule(&self) -> Result<bool> {
        let folder = Path::new("fuzz/artifacts").join(PLANTED);
        fs::create_dir_all(&folder)?;
        let mut command = self.command(PLANTED);
        command.arg(format!("-max_total_time={PLANTED_SECONDS}"));
        let ended = command.output().context("cannot run the planted target")?;
        fs::remove_dir_all(&folder)?;
        Ok(!ended.status.success())
    }

    /// Runs one target. Prints the coverage of the first inputs and of all, and after a finding
    /// everything that libFuzzer said of it.
    fn fuzz(&self, target: &str, seconds: u32) -> Result<bool> {
        let corpus = format!("fuzz/corpus/{target}");
        fs::create_dir_all(&corpus)?;
        fs::create_dir_all(format!("fuzz/artifacts/{target}"))?;
        let mut command = self.command(target);
        command
            .args([&corpus, &format!("fuzz/seeds/{target}")])
            .arg(format!("-max_total_time={seconds}"))
            .arg("-timeout=10")
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot run the target")?;
        let said = child.stderr.take().context("its stderr is a pipe")?;
        let mut other = String::new();
        for line in BufReader::new(said).split(b'\n') {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            if line.contains("INITED") || line.contains("DONE") {
                println!("  {line}");
            } else if !line.starts_with('#') {
                other.push_str(&format!("  {line}\n"));
            }
        }
        let passed = child.wait()?.success();
        if !passed {
            print!("{other}");
        }
        Ok(passed)
    }

    /// Replaces the seeds that libFuzzer found by the fewest that reach every edge that seeds and
    /// corpus reach. Seeds with other names were written by hand and stay.
    pub(super) fn minimize(&self, targets: &[&str]) -> Result<bool> {
        for target in targets {
            let (seeds, corpus) = (
                format!("fuzz/seeds/{target}"),
                format!("fuzz/corpus/{target}"),
            );
            let merged = Path::new("fuzz/target/merged").join(target);
            if merged.exists() {
                fs::remove_dir_all(&merged)?;
            }
            for folder in [Path::new(&corpus), &merged] {
                fs::create_dir_all(folder)?;
            }
            let mut command = self.command(target);
            // How often an edge is taken does not count: that would be ten times as many.
            command.args(["-set_cover_merge=1", "-use_counters=0"]);
            command.arg(&merged).args([&seeds, &corpus]);
            let ended = command.output().context("cannot run the target")?;
            if !ended.status.success() {
                bail!("{target}: {}", String::from_utf8_lossy(&ended.stderr));
            }
            replace_found(Path::new(&seeds), &merged)?;
        }
        Ok(true)
    }
}

/// Replaces the files named `found_…` of one folder by those of another, whose names are hashes.
fn replace_found(seeds: &Path, merged: &Path) -> Result<()> {
    let mut by_hand = Vec::new();
    for entry in fs::read_dir(seeds)? {
        let entry = entry?;
        match entry.file_name().to_string_lossy().starts_with("found_") {
            true => fs::remove_file(entry.path())?,
            false => by_hand.push(fs::read(entry.path())?),
        }
    }
    let (mut count, mut bytes) = (0, 0);
    for entry in fs::read_dir(merged)? {
        let entry = entry?;
        let content = fs::read(entry.path())?;
        if by_hand.contains(&content) {
            continue;
        }
        let name = entry.file_name();
        let name = name.to_string_lossy();
        fs::write(
            seeds.join(format!("found_{}", &name[..10.min(name.len())])),
            &content,
        )?;
        count += 1;
        bytes += content.len();
    }
    println!("{}: {count} found seeds, {bytes} bytes", seeds.display());
    Ok(())
}
