//! `cargo xtask bench disk`: the disk tier beside fio on the same file system, its start, and
//! LMCache's own disk adapters with the same chunks.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::figures::median;
use super::rounds::{Rounds, shown};
use super::{check_amounts, conditions, json_of, page};
use crate::{packages, vllm};

const SECTION: &str = "bench disk";
const JSON: &str = "docs/benchmarks/disk.json";
/// Package that LMCache's `raw_block` adapter uses for I/O.
const RAW_BLOCK: &str = "lmcache_rust_raw_block_io==0.5.7rc2";
/// Name of our tier without io_uring.
const THREADS: &str = "lmc, threads";
const RAW_BLOCK_FOLDER: &str = "target/bench-raw-block";
/// Gives a program huge pages for its buffers, as ours has them: a drive takes what lies in those
/// in fewer pieces.
const HUGE_PAGES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
/// The benchmark's own folder in the one that was named; all in it is removed.
const OWN_FOLDER: &str = "lmc-bench-disk";
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Measures the disk tier beside fio and LMCache's adapters; writes docs/benchmarks.md.
#[derive(Debug, clap::Args)]
pub(crate) struct DiskArgs {
    /// Rounds; figures are medians of them
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Seconds of each cell
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    seconds: f64,
    /// Folder on the drive to use
    #[arg(long, value_name = "PATH", default_value = "target")]
    dir: PathBuf,
    /// Measure a few cells, in under a minute; writes nothing
    #[arg(long)]
    quick: bool,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(super) struct Asked {
    rounds: usize,
    seconds: f64,
    pub(super) folder: PathBuf,
    chunks: Vec<u64>,
    depths: Vec<u64>,
    bytes: u64,
    counts: Vec<u64>,
    dry: bool,
}

impl Asked {
    fn of(args: &DiskArgs) -> Result<Self> {
        let mut asked = Self {
            rounds: args.rounds,
            seconds: args.seconds,
            folder: args.dir.join(OWN_FOLDER),
            chunks: vec![256 * KIB, MIB, 4 * MIB, 16 * MIB],
            depths: vec![1, 8, 64],
            bytes: 1 << 30,
            counts: vec![1_000, 10_000, 100_000],
            dry: args.dry_run || args.quick,
        };
        if args.quick {
            (asked.rounds, asked.seconds, asked.bytes) = (1, 1.0, 256 << 20);
            asked.chunks = vec![MIB];
            asked.depths = vec![1, 8];
            asked.counts = vec![1_000, 10_000];
        }
        check_amounts(asked.rounds, asked.seconds, 0.001)?;
        Ok(asked)
    }

    /// Returns what `bench before` measures.
    pub(super) fn without_peers(seconds: f64, dir: &Path) -> Result<Self> {
        Self::of(&DiskArgs {
            rounds: 1,
            seconds,
            dir: dir.to_owned(),
            quick: false,
            dry_run: true,
        })
    }

    /// Returns what is measured: an operation, the bytes of a chunk, and the operations at a time.
    pub(super) fn cells(&self) -> Vec<(&'static str, u64, u64)> {
        let all = OPERATIONS.iter().flat_map(|&what| {
            let chunks = self.chunks.iter();
            chunks
                .flat_map(move |&chunk| self.depths.iter().map(move |&depth| (what, chunk, depth)))
        });
        all.collect()
    }

    /// Bytes that the run needs at a time: fio's file, the tier beside it, and some to spare.
    fn bytes_needed(&self) -> u64 {
        4 * self.bytes + (2 << 30)
    }
}

const OPERATIONS: [&str; 3] = ["write", "read", "mixed"];
/// Names of the figures of a cell.
const SPEED: &str = "gb_per_s";
const CPU: &str = "cpu_s_per_gb";

/// Speed and cost of one run.
type Moved = [(&'static str, f64); 2];

fn moved(bytes: f64, seconds: f64, cpu: f64) -> Moved {
    [(SPEED, bytes / seconds / 1e9), (CPU, cpu / (bytes / 1e9))]
}

/// Shows the median over rounds of one speed as a share of another.
fn share(cells: &Rounds, cell: &str, who: &str, of: &str) -> String {
    let ratio = cells.between(cell, [who, of], SPEED, |a, b| a / b);
    shown(ratio, |ratio| format!("{:.0} %", ratio * 100.0))
}

pub(crate) fn run(args: &DiskArgs) -> Result<bool> {
    let asked = Asked::of(args)?;
    packages::install("fio", "fio")?;
    let built = crate::build_release(
        "--package lmc-backend-disk --example disk_speed --package lmc-server --example dram_beside_disk",
    )?;
    let speed = built.join("examples/disk_speed");
    let _ = fs::remove_dir_all(&asked.folder);
    fs::create_dir_all(&asked.folder)
        .with_context(|| format!("{} cannot be made", asked.folder.display()))?;
    let file_system = FileSystem::of(&asked.folder)?;
    if let Err(refusal) = file_system.fits(asked.bytes_needed()) {
        let _ = fs::remove_dir_all(&asked.folder);
        return Err(refusal);
    }
    let environment = vllm::environment()?;
    let mut conditions = conditions::list(&format!("{environment}/bin/lmcache"));
    conditions.push(("file system", file_system.kind));
    let python = format!("{environment}/bin/python");
    set_up_raw_block(&python)?;
    let (mut cells, mut dram) = (Rounds::default(), Vec::new());
    for round in 1..=asked.rounds {
        println!("round {round} of {}", asked.rounds);
        beside_fio(&asked, round, &speed, &mut cells)?;
        peers(&asked, round, &speed, &python, &mut cells)?;
        dram.push(beside_dram(&asked, &speed)?);
    }
    let starts = starts(&asked, &speed)?;
    let _ = fs::remove_dir_all(&asked.folder);
    let text = text(&asked, &conditions, &cells, &dram, &starts);
    println!("{text}");
    if !asked.dry {
        let figures = as_json(&conditions, &cells, &dram, &starts);
        page::write(SECTION, &text, JSON, &figures)?;
    }
    Ok(true)
}

/// File system of the benchmark's folder.
struct FileSystem {
    kind: String,
    free: u64,
}

impl FileSystem {
    fn of(folder: &Path) -> Result<Self> {
        let mut command = Command::new("stat");
        command.args(["--file-system", "--format=%a %S %T"]);
        let output = command.arg(folder).output().context("stat")?;
        Self::parse(&String::from_utf8_lossy(&output.stdout))
            .with_context(|| format!("{command:?} printed {output:?}"))
    }

    /// Free blocks, bytes of each, and the type: `10351616 4096 ext2/ext3`.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let blocks: u64 = words.next()?.parse().ok()?;
        let block: u64 = words.next()?.parse().ok()?;
        Some(Self {
            kind: words.next()?.to_owned(),
            free: blocks.checked_mul(block)?,
        })
    }

    fn fits(&self, needed: u64) -> Result<()> {
        ensure!(
            !["tmpfs", "ramfs"].contains(&self.kind.as_str()),
            "the folder lies in memory ({}), expected one on a drive: name it with --dir",
            self.kind
        );
        ensure!(
            self.free >= needed,
            "expected {needed} free bytes, found {}: free some, or name another folder with --dir",
            self.free
        );
        Ok(())
    }
}

/// Without it LMCache's `raw_block` adapter does not start.
fn set_up_raw_block(python: &str) -> Result<()> {
    if Path::new(RAW_BLOCK_FOLDER).exists() {
        return Ok(());
    }
    println!("==> set up: pip install {RAW_BLOCK}, in {RAW_BLOCK_FOLDER}");
    // Under its name only when it is whole.
    let half_done = format!("{RAW_BLOCK_FOLDER}.new");
    let _ = fs::remove_dir_all(&half_done);
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "-q", "--no-deps", "--target"]);
    let installed = command.args([&half_done, RAW_BLOCK]).status()?;
    ensure!(
        installed.success(),
        "pip could not install {RAW_BLOCK}: see above"
    );
    fs::rename(&half_done, RAW_BLOCK_FOLDER)?;
    Ok(())
}

fn named(bytes: u64) -> String {
    match bytes {
        bytes if bytes < MIB => format!("{} KiB", bytes / KIB),
        bytes => format!("{} MiB", bytes / MIB),
    }
}

/// Returns the name of a cell.
pub(super) fn cell_name((what, chunk, depth): (&str, u64, u64)) -> String {
    format!("{what}, {}, depth {depth}", named(chunk))
}

pub(super) fn ours(
    asked: &Asked,
    speed: &Path,
    (what, chunk, depth): (&str, u64, u64),
    how: &[&str],
) -> Result<Moved> {
    let mut command = Command::new(speed);
    command.arg("run").arg(asked.folder.join("tier")).arg(what);
    let numbers = [
        chunk.to_string(),
        depth.to_string(),
        asked.bytes.to_string(),
    ];
    command.args(numbers).arg(asked.seconds.to_string());
    let found = json_of(command.args(how))?;
    let number = |name: &str| found[name].as_f64().with_context(|| name.to_owned());
    Ok(moved(
        number("bytes")?,
        number("seconds")?,
        number("cpu_seconds")?,
    ))
}

/// fio with the same operations. `synced` makes writes as durable as ours: every so many of them
/// are followed by an fdatasync, as our writes share one.
fn fio(asked: &Asked, what: &str, chunk: u64, depth: u64, synced: bool) -> Result<Moved> {
    let rw = match what {
        "write" => "write",
        // Reads of `randread` have buffers that were never touched: the kernel would clear their
        // pages within the time.
        _ => "randrw",
    };
    let file = asked.folder.join("fio");
    let mut command = Command::new("fio");
    command
        .env(HUGE_PAGES.0, HUGE_PAGES.1)
        .arg("--name=lmc")
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--rw={rw}"))
        .arg(format!("--bs={chunk}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--size={}", 2 * asked.bytes))
        // It cuts the fraction off a number of seconds.
        .arg(format!("--runtime={}ms", (asked.seconds * 1e3) as u64))
        .args([
            "--ioengine=io_uring",
            "--direct=1",
            "--time_based=0",
            "--output-format=json",
        ])
        .args(["--refill_buffers=0", "--randrepeat=0", "--thread"]);
    if what == "read" {
        command.arg("--rwmixread=100");
    } else {
        command.arg(match synced {
            true => format!("--fdatasync={depth}"),
            false => "--end_fsync=0".to_owned(),
        });
    }
    if what == "write" {
        // Into a file that is there and not written to, as our segments are.
        let _ = fs::remove_file(&file);
        command.arg("--fallocate=posix");
    }
    let output = command.output().context("fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "fio: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let begin = text.find('{').context("fio printed no JSON")?;
    let found: Value = serde_json::from_str(&text[begin..])?;
    let job = &found["jobs"][0];
    let sum = |name: &str| {
        let of = |way: &str| job[way][name].as_f64().unwrap_or(0.0);
        (of("read"), of("write"))
    };
    let (read, written) = sum("io_bytes");
    let (read_ms, write_ms) = sum("runtime");
    let seconds = read_ms.max(write_ms) / 1e3;
    let cpu = |name: &str| job[name].as_f64().unwrap_or(0.0) / 100.0 * seconds;
    Ok(moved(
        read + written,
        seconds,
        cpu("usr_cpu") + cpu("sys_cpu"),
    ))
}

/// Writes the whole of fio's file. A write cell ends when its time is up, and reads of blocks
/// that were never written do not reach the drive.
fn fill_fio(asked: &Asked) -> Result<()> {
    let file = asked.folder.join("fio");
    let filled = Command::new("fio")
        .args(["--name=fill", "--rw=write", "--bs=4m", "--iodepth=8"])
        .args(["--ioengine=io_uring", "--direct=1", "--output-format=json"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={}", 2 * asked.bytes))
        .output()
        .context("fio")?;
    ensure!(
        filled.status.success(),
        "fio: {}",
        String::from_utf8_lossy(&filled.stderr)
    );
    Ok(())
}

fn beside_fio(asked: &Asked, round: usize, speed: &Path, cells: &mut Rounds) -> Result<()> {
    let mut is_filled = false;
    for (what, chunk, depth) in asked.cells() {
        if what == "read" && !is_filled {
            fill_fio(asked)?;
            is_filled = true;
        }
        let cell = cell_name((what, chunk, depth));
        let ours = |how: &[&str]| ours(asked, speed, (what, chunk, depth), how);
        let mut racers = vec!["lmc", "fio"];
        if what != "read" {
            racers.push("fio, synced");
        }
        // A drive is not as fast after writes as before them: everybody is first in turn.
        let first = round % racers.len();
        racers.rotate_left(first);
        if (chunk, depth) == (MIB, 8) {
            // Where a container forbids io_uring; beside ours, on either side of it.
            let lmc = racers.iter().position(|&racer| racer == "lmc");
            racers.insert(lmc.unwrap_or(0) + round % 2, THREADS);
        }
        for racer in racers {
            let moved = match racer {
                "lmc" => ours(&[])?,
                THREADS => ours(&["threads"])?,
                other => fio(asked, what, chunk, depth, other != "fio")?,
            };
            cells.add(&cell, racer, &moved);
        }
        println!("{cell}: {}", row(cells, &cell));
    }
    let _ = fs::remove_file(asked.folder.join("fio"));
    Ok(())
}

/// LMCache's adapters for files and for a raw device (a file here), with as many of the same
/// chunks, so many at a time; all loaded once more, outside the time, and compared.
fn peers(
    asked: &Asked,
    round: usize,
    speed: &Path,
    python: &str,
    cells: &mut Rounds,
) -> Result<()> {
    let depth = 8;
    for &chunk in asked.chunks.iter().filter(|&&chunk| chunk >= MIB) {
        let count = (asked.bytes / chunk).max(1);
        let numbers = [chunk, count, depth].map(|number| number.to_string());
        let mut racers = ["lmc", "fs", "raw_block"];
        // As beside fio: everybody is first in turn.
        racers.rotate_left(round % 3);
        for racer in racers {
            let folder = asked.folder.join(racer);
            if racer == "lmc" {
                let mut race = Command::new(speed);
                let found = json_of(race.arg("race").arg(&folder).args(&numbers))?;
                take_race(cells, "lmc", chunk, depth, &found)?;
                continue;
            }
            let mut command = Command::new(python);
            command.arg("xtask/python/disk_peer.py").arg(racer);
            command.env("PYTHONPATH", RAW_BLOCK_FOLDER);
            command.env(HUGE_PAGES.0, HUGE_PAGES.1);
            match json_of(command.arg(&folder).args(&numbers)) {
                Ok(found) => {
                    take_race(cells, &format!("LMCache {racer}"), chunk, depth, &found)?;
                }
                Err(error) => println!("LMCache's {racer} did not run: {error:#}"),
            }
            let _ = fs::remove_dir_all(&folder);
        }
    }
    Ok(())
}

fn take_race(cells: &mut Rounds, who: &str, chunk: u64, depth: u64, found: &Value) -> Result<()> {
    for what in ["write", "read"] {
        let of = |name: &str| {
            let number = found[what][name].as_f64();
            number.with_context(|| format!("{who} printed no {name} of its {what}"))
        };
        let moved = moved(of("bytes")?, of("seconds")?, of("cpu_seconds")?);
        let cell = format!("race: {what}, {}, {depth} at a time", named(chunk));
        cells.add(&cell, who, &moved);
    }
    Ok(())
}

/// Lookups in memory while the disk below is idle, and while it is saturated.
fn beside_dram(asked: &Asked, speed: &Path) -> Result<Value> {
    let mut command = Command::new(speed.with_file_name("dram_beside_disk"));
    command.arg(asked.folder.join("dram"));
    json_of(command.arg(asked.seconds.max(2.0).to_string()))
}

/// Seconds to open a folder of so many chunks, after a stop and after a kill.
struct Start {
    chunks: u64,
    stopped: f64,
    killed: f64,
}

fn starts(asked: &Asked, speed: &Path) -> Result<Vec<Start>> {
    let folder = asked.folder.join("start");
    let open = |kill: bool, count: u64| -> Result<f64> {
        let mut fill = Command::new(speed);
        fill.arg("fill")
            .arg(&folder)
            .args([count.to_string(), "4096".to_owned()]);
        if kill {
            fill.arg("kill");
        }
        // Ends by SIGKILL where that was asked for.
        let filled = fill.output()?;
        ensure!(
            filled.status.success() != kill,
            "{}",
            String::from_utf8_lossy(&filled.stderr)
        );
        let mut open = Command::new(speed);
        let found = json_of(open.arg("open").arg(&folder))?;
        ensure!(
            found["chunks"] == count,
            "{found}: {count} chunks were stored"
        );
        found["seconds"].as_f64().context("seconds")
    };
    let start = |&count: &u64| {
        let (stopped, killed) = (open(false, count)?, open(true, count)?);
        println!(
            "start with {count} chunks: {stopped:.4} s after a stop, {killed:.4} s after a kill"
        );
        Ok(Start {
            chunks: count,
            stopped,
            killed,
        })
    };
    asked.counts.iter().map(start).collect()
}

fn row(cells: &Rounds, cell: &str) -> String {
    let mut text = String::new();
    for who in cells.measured(cell) {
        let of = |what| cells.median(cell, who, what).unwrap_or(f64::NAN);
        let _ = write!(
            text,
            "{who} {:.2} GB/s, {:.3} CPU s/GB; ",
            of(SPEED),
            of(CPU)
        );
    }
    text
}

fn text(
    asked: &Asked,
    conditions: &[(&str, String)],
    cells: &Rounds,
    dram: &[Value],
    starts: &[Start],
) -> String {
    let mut text = format!(
        "## Disk tier beside fio and LMCache's adapters\n\n`cargo xtask bench disk`: medians of {} \
         round(s) of {} s a cell, ours and fio in turn, on one file system; shares are medians of each round's share, \
         since the drive's speed changes between rounds; all figures are in \
         [disk.json](benchmarks/disk.json).\n\n",
        asked.rounds, asked.seconds
    );
    text.push_str(&conditions::lines(conditions));
    text.push_str(
        "\nA write of ours counts when it is durable (its bytes and its index entry are synced), a \
         read when its checksum is verified.\n\
         fio runs io_uring with direct I/O and the same block size and depth; \"synced\" adds an fdatasync after \
         each DEPTH writes, because DEPTH writes of ours share one sync. All memory is on transparent huge pages: \
         ours as with `--l1-use-hugepages=auto`, that of fio and LMCache by `GLIBC_TUNABLES`.\n\n\
         | what | lmc | of fio | of fio, synced | fio | fio, synced | CPU s/GB lmc | CPU s/GB fio |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for cell in cells.rows() {
        if cell.starts_with("race") {
            continue;
        }
        let speed = |who: &str| shown(cells.median(cell, who, SPEED), |v| format!("{v:.2} GB/s"));
        let cpu = |who: &str| shown(cells.median(cell, who, CPU), |v| format!("{v:.3}"));
        let share = |who: &str| share(cells, cell, "lmc", who);
        let _ = writeln!(
            text,
            "| {cell} | {} | {} | {} | {} | {} | {} | {} |",
            speed("lmc"),
            share("fio"),
            share("fio, synced"),
            speed("fio"),
            speed("fio, synced"),
            cpu("lmc"),
            cpu("fio"),
        );
    }
    text.push_str("\n| without io_uring, on threads | lmc | of that with it | CPU s/GB |\n|---|---|---|---|\n");
    for cell in cells.rows() {
        let of = |what| cells.median(cell, THREADS, what);
        if let (Some(speed), Some(cpu)) = (of(SPEED), of(CPU)) {
            let share = share(cells, cell, THREADS, "lmc");
            let _ = writeln!(text, "| {cell} | {speed:.2} GB/s | {share} | {cpu:.3} |");
        }
    }
    text.push_str(
        "\nlmc and both adapters store and load the same number of chunks; every byte was compared, outside the \
         timed part.\n\
         lmc's acknowledged writes are durable, and it computes a checksum of every byte both ways; LMCache's \
         adapters do neither.\n",
    );
    text.push_str("\n| race | lmc | LMCache `fs` | LMCache `raw_block` |\n|---|---|---|---|\n");
    for cell in cells.rows() {
        let Some(name) = cell.strip_prefix("race: ") else {
            continue;
        };
        let speed = |who: &str| {
            shown(cells.median(cell, who, SPEED), |value| match who {
                "lmc" => format!("{value:.2} GB/s"),
                _ => format!(
                    "{value:.2} GB/s: ours has {}",
                    share(cells, cell, "lmc", who)
                ),
            })
        };
        let (fs, raw) = (speed("LMCache fs"), speed("LMCache raw_block"));
        let _ = writeln!(text, "| {name} | {} | {fs} | {raw} |", speed("lmc"));
    }
    let of_dram = |name: &str| {
        let values = dram.iter().filter_map(|round| round[name].as_f64());
        median(&values.collect::<Vec<_>>())
    };
    let micros = |name: &str| of_dram(name) * 1e6;
    let _ = writeln!(
        text,
        "\n| lookup of 256 chunks in memory | p50 | p99 |\n|---|---|---|\n\
         | the disk idle | {:.1} µs | {:.1} µs |\n\
         | {:.2} GB/s promoted from it | {:.1} µs | {:.1} µs |",
        micros("idle_p50"),
        micros("idle_p99"),
        of_dram("gb_per_s"),
        micros("busy_p50"),
        micros("busy_p99"),
    );
    text.push_str(
        "\n| start with | after a stop | after a kill | for a million, by the larger |\n|---|---|---|---|\n",
    );
    for Start {
        chunks,
        stopped,
        killed,
    } in starts
    {
        let million = stopped.max(*killed) / *chunks as f64 * 1e6;
        let _ = writeln!(
            text,
            "| {chunks} chunks | {:.1} ms | {:.1} ms | {million:.2} s |",
            stopped * 1e3,
            killed * 1e3
        );
    }
    text
}

fn as_json(
    conditions: &[(&str, String)],
    cells: &Rounds,
    dram: &[Value],
    starts: &[Start],
) -> Value {
    let conditions: BTreeMap<_, _> = conditions.iter().cloned().collect();
    let starts: Vec<Value> = starts
        .iter()
        .map(|s| json!({"chunks": s.chunks, "stopped_s": s.stopped, "killed_s": s.killed}))
        .collect();
    json!({"conditions": conditions, "cells": cells.json(), "dram": dram, "starts": starts})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> DiskArgs {
        DiskArgs {
            rounds: 3,
            seconds: 2.0,
            dir: "target".into(),
            quick: false,
            dry_run: false,
        }
    }

    #[test]
    fn a_named_folder_is_not_the_one_that_is_removed() {
        for parent in ["/data", ".", "target"] {
            let dir = parent.into();
            let folder = Asked::of(&DiskArgs { dir, ..args() })
                .expect("valid")
                .folder;
            assert_eq!(folder.parent(), Some(Path::new(parent)));
        }
    }

    #[test]
    fn amounts_that_measure_nothing_are_refused() {
        for (rounds, seconds) in [(0, 1.0), (1, 0.0), (1, f64::NAN)] {
            let wrong = DiskArgs {
                rounds,
                seconds,
                ..args()
            };
            assert!(Asked::of(&wrong).is_err(), "{wrong:?}");
        }
        assert!(Asked::of(&args()).is_ok());
    }

    #[test]
    fn memory_and_full_drives_are_refused() {
        let check = |text: &str, needed| {
            let file_system = FileSystem::parse(text).expect("three words");
            file_system.fits(needed).is_ok()
        };
        assert!(check("100 4096 ext2/ext3", 409_600));
        assert!(!check("100 4096 ext2/ext3", 409_601));
        assert!(!check("100 4096 tmpfs", 1));
        assert!(FileSystem::parse("").is_none());
    }
}
