//! The stores' own tools with the same values: `redis-benchmark`, `cp` and `dd`, boto3.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{BYTES, FIGURES, Rig, empty};
use crate::bench::json_of;

/// The tools, as the table names them.
pub(super) const REDIS: &str = "redis-benchmark";
pub(super) const CP: &str = "cp";
pub(super) const S3: &str = "boto3";
/// A ceiling of files that is no tool of a store.
pub(super) const DD: &str = "dd";

type Figures = Vec<(&'static str, f64)>;

/// Returns the tool of the store that a row is about.
pub(super) fn of(row: &str) -> &'static str {
    match row.split(',').next() {
        Some("Redis") => REDIS,
        Some("files") => CP,
        _ => S3,
    }
}

/// Redis's own benchmark with values of this length, which drops what it reads.
pub(super) fn redis_benchmark(port: u16, len: u64) -> Result<Figures> {
    let mut figures = Vec::new();
    for (test, name) in [("set", FIGURES[0]), ("get", FIGURES[1])] {
        let mut command = Command::new(REDIS);
        command.args(["-p", &port.to_string(), "-t", test, "-d", &len.to_string()]);
        let count = (BYTES / len).to_string();
        command.args(["-n", &count, "-r", &count, "-c", "4", "--csv"]);
        let output = command.output().context(REDIS)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let rate = text.lines().last().and_then(|line| line.split(',').nth(1));
        let rate = rate.and_then(|rate| rate.trim_matches('"').parse::<f64>().ok());
        let rate = rate.with_context(|| format!("{command:?} printed {text}"))?;
        figures.push((name, rate * len as f64 / 1e9));
    }
    Ok(figures)
}

/// boto3 with 32 threads, beside the server of S3.
pub(super) fn boto3(rig: &Rig, len: u64) -> Result<Figures> {
    let mut command = rig.beside_s3(&rig.s3.join("python"));
    command.args(["xtask/python/s3_bench.py", "bucket"]);
    command.args([len.to_string(), (BYTES / len).to_string()]);
    let found = json_of(&mut command)?;
    empty(&rig.folder)?;
    let figure = |name: &&'static str| {
        let speed = found[*name].as_f64();
        Ok((*name, speed.with_context(|| format!("boto3: no {name}"))?))
    };
    FIGURES[..2].iter().map(figure).collect()
}

/// A folder in memory that ends with this.
struct Memory(PathBuf);

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a program. Returns the GB/s at which it moved these bytes.
fn speed(program: &str, arguments: &[&str], bytes: u64) -> Result<f64> {
    let begun = Instant::now();
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| program.to_owned())?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {error}");
    Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
}

/// `cp` of as many files from memory into a folder, until the file system has them on its drive, and
/// back, with none of their pages in memory.
pub(super) fn cp(folder: &Path, len: u64, bytes: u64) -> Result<Figures> {
    let memory = Memory(format!("/dev/shm/lmc-bench-cp-{}", std::process::id()).into());
    let (from, back) = (memory.0.join("from"), memory.0.join("back"));
    fs::create_dir_all(&from)?;
    for n in 0..bytes / len {
        fs::write(from.join(n.to_string()), vec![n as u8 | 1; len as usize])?;
    }
    let [from, back, there] =
        [&from, &back, &folder.join("cp")].map(|path| path.to_string_lossy().into_owned());
    let write = r#"cp -r "$0" "$1" && sync -f "$1""#;
    let put = speed("sh", &["-c", write, &from, &there], bytes)?;
    let forget = "oflag=nocache conv=notrunc,fdatasync count=0 status=none".split(' ');
    let forget: Vec<&str> = [&*there, "-type", "f", "-exec", "dd", "of={}"]
        .into_iter()
        .chain(forget)
        .chain([";"])
        .collect();
    speed("find", &forget, bytes)?;
    let get = speed("cp", &["-r", &there, &back], bytes)?;
    fs::remove_dir_all(there)?;
    Ok(vec![(FIGURES[0], put), (FIGURES[1], get)])
}

/// `dd` of one file without the page cache, a block of this length after the other.
pub(super) fn dd(folder: &Path, len: u64, bytes: u64) -> Result<Figures> {
    let file = folder.join("dd");
    let [block, count] = [format!("bs={len}"), format!("count={}", bytes / len)];
    let [output, input] = ["of", "if"].map(|name| format!("{name}={}", file.display()));
    let write = ["if=/dev/zero", &output, &block, &count, "oflag=direct"];
    let put = speed("dd", &write, bytes)?;
    let read = [&*input, "of=/dev/null", &block, "iflag=direct"];
    let get = speed("dd", &read, bytes)?;
    fs::remove_file(file)?;
    Ok(vec![(FIGURES[0], put), (FIGURES[1], get)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// LMCache's adapter of files keeps its values beside each other: those of one length were
    /// found when the next length was measured, and read back too short.
    #[test]
    fn nothing_of_a_measurement_is_left_for_the_next() {
        let folder = std::env::temp_dir().join(format!("lmc-bench-empty-{}", std::process::id()));
        fs::create_dir_all(folder.join("v1/00")).expect("space");
        fs::write(folder.join("v1/00/value"), "x").expect("space");
        fs::write(folder.join("bench-model@0x0.data"), "x").expect("space");
        empty(&folder).expect("it is emptied");
        let left = fs::read_dir(&folder).expect("a folder").count();
        fs::remove_dir_all(&folder).expect("it is ours");
        assert_eq!(left, 0);
    }
}
