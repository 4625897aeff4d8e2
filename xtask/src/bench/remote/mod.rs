//! `cargo xtask bench remote`: the tier of shared stores beside the bare way to the same stores.

mod race;
mod tools;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use super::link::Link;
use super::rounds::{Rounds, shown};
use super::server::{Baseline, Kind, Programs, Server, listens};
use super::{conditions, json_of, page};
use crate::{packages, ports, remote};

const SECTION: &str = "bench remote";
const JSON: &str = "docs/benchmarks/remote.json";
/// Bytes of the values of one cell.
const BYTES: u64 = 256 << 20;
pub(super) const LENS: [(&str, u64); 3] =
    [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("4 MiB", 4 << 20)];
pub(super) const STORES: [&str; 3] = ["Redis", "files", "S3"];
const FIGURES: [&str; 6] = [
    "put_gb_per_s",
    "get_gb_per_s",
    "get_one_us",
    "locate_us",
    "put_busy",
    "get_busy",
];
/// lmc with values that expire, so that each get asks for the time that is left, too.
const EXPIRING: &str = "lmc, --remote-ttl";
const TTL: &str = "86400";
/// Delay of the slow link in each direction: a round trip takes twice that.
const DELAY: Duration = Duration::from_millis(1);
const SLOW_LINK: &str = "Redis behind a round trip of 2 ms, 64 values of 64 KiB";
/// The row of what engines feel of a store that stalls.
const STALLED: &str = "hits in memory";
const WITHOUT: &str = "without a store";
const STALLING: &str = "with a stalled store";
const NARROW: &str = "with a store behind 100 Mbit/s";
/// 100 Mbit/s, in bytes.
const NARROW_RATE: u64 = 12_500_000;
/// Runs of each in a round.
const STALLS: usize = 3;
const LOAD: &str =
    "--workload lookup,retrieve --tokens 2048 --clients 2 --duration 3 --force --json";
/// Runs a command beside `s3s-fs` in a network of their own, in which every segment is acknowledged
/// at once: this server leaves Nagle's algorithm on, and would wait 40 ms before the last segment of
/// a value. The server and its bucket have names there. Arguments: folder, folder of the program,
/// the command.
const S3: &str = r#"
ip link set lo up
ip route replace local 127.0.0.1 dev lo table local quickack 1
mkdir -p "$0/bucket"
echo "127.0.0.1 localhost lmc.test bucket.lmc.test" >"$0/hosts"
mount --bind "$0/hosts" /etc/hosts
"$1/s3s-fs" --host 127.0.0.1 --port 8014 --domain lmc.test:8014 --access-key key --secret-key secret "$0" >/dev/null 2>&1 &
server=$!
trap 'kill $server' EXIT
until (exec 3<>/dev/tcp/127.0.0.1/8014) 2>/dev/null; do kill -0 $server; sleep 0.05; done
shift
"$@"
"#;

/// Measures the tier of shared stores beside the bare clients; writes docs/benchmarks.md.
#[derive(Debug, clap::Args)]
pub(crate) struct RemoteArgs {
    /// Rounds; figures are medians of them
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Folder of a file system for the store of files
    #[arg(long, value_name = "PATH", default_value = "target")]
    dir: PathBuf,
    /// Measure LMCache's adapters and Mooncake Store with the same chunks instead, which are fetched
    /// from PyPI
    #[arg(long)]
    race: bool,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

/// A server that ends with this.
struct Redis {
    child: Child,
    port: u16,
}

impl Redis {
    fn start(folder: &Path) -> Result<Self> {
        let port = ports::free()?;
        let mut command = Command::new("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1"]);
        command
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(folder);
        let child = command
            .stdout(Stdio::null())
            .spawn()
            .context("redis-server")?;
        let mut this = Self { child, port };
        let deadline = Instant::now() + Duration::from_secs(10);
        listens(&mut this.child, port, deadline).context("redis-server")?;
        Ok(this)
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        crate::shown::end(&mut self.child);
    }
}

/// Programs and a folder that all measurements need.
pub(super) struct Rig {
    /// The example `remote_speed`.
    speed: PathBuf,
    /// Folder of the programs of S3.
    s3: PathBuf,
    /// A folder on the file system that is measured.
    folder: PathBuf,
}

impl Rig {
    fn new(dir: &Path) -> Result<Self> {
        packages::install("redis-benchmark", "redis-tools")?;
        let built = crate::build_release(
            "--package lmc-backend-remote --example remote_speed --features conformance,redis,s3",
        )?;
        Self::of(dir, &built.join("examples/remote_speed"))
    }

    /// Returns a rig that measures with this build of the example.
    pub(super) fn of(dir: &Path, speed: &Path) -> Result<Self> {
        packages::install("redis-server", "redis-server")?;
        let s3 = remote::s3_servers()?;
        fs::create_dir_all("target/bench")?;
        let folder = dir.join("lmc-bench-remote");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        Ok(Self {
            speed: fs::canonicalize(speed)?,
            s3,
            folder: fs::canonicalize(&folder)?,
        })
    }

    fn files(&self) -> String {
        format!("file://{}", self.folder.display())
    }

    /// Returns a command that runs a program beside the server of S3.
    fn beside_s3(&self, program: &Path) -> Command {
        let mut command = Command::new("unshare");
        let user = (!packages::is_root()).then_some("--map-root-user");
        command.args(["--net", "--mount"]).args(user);
        command.args(["bash", "-euc", S3]);
        command.args([&self.folder, &self.s3, program]);
        command.env("AWS_ENDPOINT_URL", "http://lmc.test:8014");
        command.env("AWS_ACCESS_KEY_ID", "key");
        command.env("AWS_SECRET_ACCESS_KEY", "secret");
        command
    }

    /// Measures with another build of the example from now on.
    pub(super) fn measure_with(&mut self, speed: PathBuf) {
        self.speed = speed;
    }

    /// Measures lmc over an empty store with a name of [`STORES`].
    pub(super) fn measure_in(&self, store: &str, len: u64) -> Result<Vec<(&'static str, f64)>> {
        match store {
            "Redis" => self.measure("lmc", &Redis::start(&self.folder)?.url(), len),
            "files" => self.measure("lmc", &self.files(), len),
            _ => self.measure("lmc", "s3://bucket/lmc", len),
        }
    }

    /// Measures lmc or the bare client over a store, with 256 MiB of values of this length.
    fn measure(&self, who: &str, url: &str, len: u64) -> Result<Vec<(&'static str, f64)>> {
        let mut command = match url.starts_with("s3:") {
            true => self.beside_s3(&self.speed),
            false => Command::new(&self.speed),
        };
        let name = if who == EXPIRING { "lmc" } else { who };
        command.args([name, url, &len.to_string(), &(BYTES / len).to_string()]);
        command.args((who == EXPIRING).then_some(TTL));
        let found = json_of(&mut command)?;
        let figure =
            |name: &'static str| Some((name, found[name].as_f64().filter(|&it| it > 0.0)?));
        empty(&self.folder)?;
        Ok(FIGURES.into_iter().filter_map(figure).collect())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

pub(crate) fn run(args: &RemoteArgs) -> Result<bool> {
    super::check_amounts(args.rounds, 1.0, 1.0)?;
    let rig = Rig::new(&args.dir)?;
    if args.race {
        return race::run(args, &rig);
    }
    let lmc = crate::vllm::build_server()?.to_string_lossy().into_owned();
    let baseline = Baseline::Earlier(lmc.clone());
    let programs = Programs { lmc, baseline };
    let conditions = conditions::machine();
    let mut cells = Rounds::default();
    for round in 1..=args.rounds {
        for (name, len) in LENS {
            println!("round {round} of {}: {name}", args.rounds);
            let row = format!("Redis, {name}");
            let mut racers = ["lmc", "bare", EXPIRING];
            // Each is first in turn.
            racers.rotate_left(round % 3);
            for who in racers {
                let redis = Redis::start(&rig.folder)?;
                cells.add(&row, who, &rig.measure(who, &redis.url(), len)?);
            }
            let redis = Redis::start(&rig.folder)?;
            cells.add(
                &row,
                tools::REDIS,
                &tools::redis_benchmark(redis.port, len)?,
            );
            drop(redis);
            for (store, url) in [("files", &*rig.files()), ("S3", "s3://bucket/lmc")] {
                let mut racers = ["lmc", "bare"];
                racers.rotate_left(round % 2);
                for who in racers {
                    let row = format!("{store}, {name}");
                    cells.add(&row, who, &rig.measure(who, url, len)?);
                }
            }
            let (files, s3) = (format!("files, {name}"), format!("S3, {name}"));
            cells.add(&files, tools::CP, &tools::cp(&rig.folder, len, BYTES)?);
            cells.add(&files, tools::DD, &tools::dd(&rig.folder, len, BYTES)?);
            cells.add(&s3, tools::S3, &tools::boto3(&rig, len)?);
        }
    }
    for round in 1..=args.rounds {
        println!(
            "round {round} of {}: a slow link, a stalled store",
            args.rounds
        );
        let redis = Redis::start(&rig.folder)?;
        let link = Link::to(redis.port, DELAY, None)?;
        let url = format!("redis://127.0.0.1:{}", link.port);
        let mut command = Command::new(&rig.speed);
        command.args(["lmc", &url, "65536", "64"]);
        let found = json_of(&mut command)?;
        let figure = |name: &str| found[name].as_f64().context("a figure of remote_speed");
        let batch = 64.0 * 65_536.0 / (figure("get_gb_per_s")? * 1e9);
        let singly = 64.0 * figure("get_one_us")? / 1e6;
        cells.add(
            SLOW_LINK,
            "lmc",
            &[("batch_s", batch), ("singly_s", singly)],
        );
        // The p99 of one run is far from that of the next: more of them, each first in turn.
        for turn in 0..STALLS {
            let mut cases = [WITHOUT, STALLING, NARROW];
            cases.rotate_left(turn % 3);
            for who in cases {
                // What an earlier run has stored would not be written again.
                let redis = Redis::start(&rig.folder)?;
                let rate = (who == NARROW).then_some(NARROW_RATE);
                let link = Link::to(redis.port, DELAY, rate)?;
                let url = format!("redis://127.0.0.1:{}", link.port);
                let flags = ["--remote", &url, "--log-level", "warn"];
                let flags = if who == WITHOUT { &[] } else { &flags[..] };
                let log = "target/bench/remote.log";
                let server = Server::start_with(Kind::Lmc, &programs, log, flags)?;
                if who == STALLING {
                    link.stall();
                }
                cells.add(STALLED, who, &latencies(&programs.lmc, server.port)?);
                server.stop()?;
            }
        }
    }
    let text = text(&conditions, &cells);
    publish(args, (SECTION, JSON), &text, &conditions, &cells)?;
    Ok(true)
}

/// Prints a section of the page, and writes it and its figures.
fn publish(
    args: &RemoteArgs,
    (section, json): (&str, &str),
    text: &str,
    conditions: &[(&'static str, String)],
    cells: &Rounds,
) -> Result<()> {
    println!("{text}");
    if !args.dry_run {
        let value = json!({"conditions": conditions::json(conditions), "cells": cells.json()});
        page::write(section, text, json, &value)?;
    }
    Ok(())
}

/// Removes all that is in a folder.
fn empty(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        let path = entry.path();
        let removed = match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(&path),
            false => fs::remove_file(&path),
        };
        // What is left would be found by the next to be measured.
        removed.with_context(|| format!("{} cannot be removed", path.display()))?;
    }
    Ok(())
}

/// The p99 of lookups and retrieves whose chunks are all in memory.
fn latencies(lmc: &str, port: u16) -> Result<Vec<(&'static str, f64)>> {
    let mut command = Command::new(lmc);
    command.args(["bench", "--url", &format!("tcp://127.0.0.1:{port}")]);
    let output = command
        .args(LOAD.split(' '))
        .output()
        .context("lmc bench")?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let rows = report["rows"].as_array().context("rows of lmc bench")?;
    let p99 = |operation: &str| {
        let row = rows.iter().find(|row| row["operation"] == operation)?;
        row.pointer("/latency_seconds/p99")?.as_f64()
    };
    let figures = ["lookup", "retrieve"].map(|name| Some((name, p99(name)?)));
    Ok(figures.into_iter().flatten().collect())
}

fn text(conditions: &[(&'static str, String)], cells: &Rounds) -> String {
    let mut text = "## Shared stores beside the bare way to them\n\n\
        `cargo xtask bench remote`: 256 MiB of values of one length, written and read over loopback or on the file system of `target`. \
        *bare* is the crate `redis` on as many connections, with the value copied into the slot; for files it is four threads that write, rename and read. lmc and *bare* write and read files without the page cache. \
        For S3, *bare* is the crate `object_store` over the same client with 32 requests at a time, as lmc has, and the value copied into the slot; the server is `s3s-fs` 0.14.1 on the same cores, which sets the pace. lmc asks for the header before a put that follows no lookup; in S3 that is one more request for each value. \
        lmc also computes and compares the checksums of all values. \
        *tool* is a common tool of the store: `redis-benchmark` with 4 connections, which sends one buffer again and again and discards what it reads; \
        `cp -r` of as many files from memory followed by `sync -f`, and back with none of their pages in memory, through the page cache and one file after the other; \
        `boto3` with 32 threads and its default settings, with which it computes checksums of written values. \
        *busy* is the share of all cores' time in which anything ran, the server included, while lmc wrote and read; *one* is the time of a single value; *heads* is the time of the headers of all values, at most 512.\n\n"
        .to_owned();
    text.push_str(&conditions::lines(conditions));
    text.push_str("\n| store | tool | put, lmc | of bare | of tool | busy | get, lmc | of bare | of tool | busy | one, lmc | one, bare | heads |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
    let [put, get, one, heads, put_busy, get_busy] = FIGURES;
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let share = |row: &str, who, of, what| {
        let share = cells.between(row, [who, of], what, |a, b| a / b);
        shown(share, percent)
    };
    for row in cells.rows() {
        if [SLOW_LINK, STALLED].contains(&row) {
            continue;
        }
        let speed = |what| shown(cells.median(row, "lmc", what), |it| format!("{it:.2} GB/s"));
        let busy = |what| shown(cells.median(row, "lmc", what), percent);
        let micros = |who, what| shown(cells.median(row, who, what), |it| format!("{it:.0} µs"));
        let tool = tools::of(row);
        let _ = writeln!(
            text,
            "| {row} | {tool} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            speed(put),
            share(row, "lmc", "bare", put),
            share(row, "lmc", tool, put),
            busy(put_busy),
            speed(get),
            share(row, "lmc", "bare", get),
            share(row, "lmc", tool, get),
            busy(get_busy),
            micros("lmc", one),
            micros("bare", one),
            micros("lmc", heads),
        );
    }
    let direct = LENS.map(|(name, _)| {
        let speed = |what| {
            let median = cells.median(&format!("files, {name}"), tools::DD, what);
            shown(median, |it| format!("{it:.2}"))
        };
        format!("{} and {} GB/s in blocks of {name}", speed(put), speed(get))
    });
    let _ = writeln!(
        text,
        "\n`dd` of one file on the same file system, without the page cache and one block after the other, writes and reads {}.",
        direct.join(", ")
    );
    let expiring = LENS.map(|(name, _)| {
        let row = format!("Redis, {name}");
        format!("{} for {name}", share(&row, EXPIRING, "lmc", get))
    });
    let _ = writeln!(
        text,
        "\nWith `--remote-ttl` each get of Redis also asks how long the value lives (`PTTL`, in the same request). Its speed compared with gets without `PTTL`: {}.",
        expiring.join(", ")
    );
    let millis = |row, who, what| {
        let median = cells.median(row, who, what);
        shown(median, |it| format!("{:.2} ms", it * 1e3))
    };
    let _ = writeln!(
        text,
        "\n{SLOW_LINK} (a relay on this host delays each direction by 1 ms): {} in one batch, {} one after the other.\n",
        millis(SLOW_LINK, "lmc", "batch_s"),
        millis(SLOW_LINK, "lmc", "singly_s"),
    );
    for what in ["lookup", "retrieve"] {
        let ratio = |who| {
            let ratio = cells.between(STALLED, [who, WITHOUT], what, |a, b| a / b);
            shown(ratio, |ratio| format!("{ratio:.2}"))
        };
        let _ = writeln!(
            text,
            "p99 of a {what} of 2,048 tokens in memory, 2 clients: {} without a store; {} while the store of `--remote` does not answer ({} times as long; the median of the pairs' ratios); {} while chunks are written to it over a link of 100 Mbit/s ({}).\n",
            millis(STALLED, WITHOUT, what),
            millis(STALLED, STALLING, what),
            ratio(STALLING),
            millis(STALLED, NARROW, what),
            ratio(NARROW),
        );
    }
    text
}
