//! `cargo xtask bench remote`: the tier of shared stores beside the bare way to the same stores.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use super::link::Link;
use super::rounds::{Rounds, shown};
use super::server::{Kind, Peer, Programs, Server, listens};
use super::{conditions, json_of, page};
use crate::{packages, ports, remote};

const SECTION: &str = "bench remote";
const JSON: &str = "docs/benchmarks/remote.json";
/// Bytes of the values of one cell.
const BYTES: u64 = 256 << 20;
const LENS: [(&str, u64); 3] = [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("4 MiB", 4 << 20)];
const FIGURES: [&str; 4] = ["put_gb_per_s", "get_gb_per_s", "get_one_us", "locate_us"];
const SERVER: &str = "redis-benchmark";
/// Delay of the slow link in each direction: a round trip takes twice that.
const DELAY: Duration = Duration::from_millis(1);
const SLOW_LINK: &str = "Redis behind a round trip of 2 ms, 64 values of 64 KiB";
/// The row of what engines feel of a store that stalls.
const STALLED: &str = "hits in memory";
const LOAD: &str =
    "--workload lookup,retrieve --tokens 2048 --clients 2 --duration 3 --force --json";
/// Runs a command beside `s3s-fs` in a network of their own, in which every segment is acknowledged
/// at once: this server leaves Nagle's algorithm on, and would wait 40 ms before the last segment of
/// a value. Arguments: folder, folder of the program, the command.
const S3: &str = r#"
ip link set lo up
ip route replace local 127.0.0.1 dev lo table local quickack 1
mkdir -p "$0/bucket"
"$1/s3s-fs" --host 127.0.0.1 --port 8014 --access-key key --secret-key secret "$0" >/dev/null 2>&1 &
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
}

impl Drop for Redis {
    fn drop(&mut self) {
        crate::shown::end(&mut self.child);
    }
}

pub(crate) fn run(args: &RemoteArgs) -> Result<bool> {
    super::check_amounts(args.rounds, 1.0, 1.0)?;
    packages::install("redis-server", "redis-server")?;
    packages::install("redis-benchmark", "redis-tools")?;
    let s3 = remote::s3_servers()?;
    let built = crate::build_release(
        "--package lmc-backend-remote --example remote_speed --features conformance,redis,s3",
    )?;
    let speed = built.join("examples/remote_speed");
    let lmc = crate::vllm::build_server()?.to_string_lossy().into_owned();
    let peer = Peer::Earlier(lmc.clone());
    let programs = Programs { lmc, peer };
    fs::create_dir_all("target/bench")?;
    let folder = args.dir.join("lmc-bench-remote");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let folder = fs::canonicalize(&folder)?;
    let conditions = conditions::machine();
    let mut cells = Rounds::default();
    for round in 1..=args.rounds {
        for (name, len) in LENS {
            println!("round {round} of {}: {name}", args.rounds);
            let redis = Redis::start(&folder)?;
            let url = format!("redis://127.0.0.1:{}", redis.port);
            for who in ["lmc", "bare"] {
                let row = format!("Redis, {name}");
                cells.add(&row, who, &measure(Command::new(&speed), who, &url, len)?);
            }
            cells.add(&format!("Redis, {name}"), SERVER, &server(redis.port, len)?);
            drop(redis);
            let url = format!("file://{}", folder.display());
            for who in ["lmc", "bare"] {
                let row = format!("files, {name}");
                cells.add(&row, who, &measure(Command::new(&speed), who, &url, len)?);
                empty(&folder)?;
            }
            for who in ["lmc", "bare"] {
                let row = format!("S3, {name}");
                let mut command = Command::new("unshare");
                let user = (!packages::is_root()).then_some("--map-root-user");
                command.arg("--net").args(user).args(["bash", "-euc", S3]);
                command.args([&folder, &s3, &speed]);
                command.env("AWS_ENDPOINT_URL", "http://127.0.0.1:8014");
                command.env("AWS_ACCESS_KEY_ID", "key");
                command.env("AWS_SECRET_ACCESS_KEY", "secret");
                cells.add(&row, who, &measure(command, who, "s3://bucket/lmc", len)?);
                empty(&folder)?;
            }
        }
    }
    for round in 1..=args.rounds {
        println!(
            "round {round} of {}: a slow link, a stalled store",
            args.rounds
        );
        let redis = Redis::start(&folder)?;
        let link = Link::to(redis.port, DELAY)?;
        let url = format!("redis://127.0.0.1:{}", link.port);
        let mut command = Command::new(&speed);
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
        for (who, stalls) in [("without a store", false), ("with a stalled store", true)] {
            let flags = ["--remote", &url, "--log-level", "warn"];
            let flags = if stalls { &flags[..] } else { &[] };
            let log = "target/bench/remote.log";
            let server = Server::start_with(Kind::Lmc, &programs, log, flags)?;
            if stalls {
                link.stall();
            }
            cells.add(STALLED, who, &latencies(&programs.lmc, server.port)?);
            server.stop()?;
        }
    }
    let _ = fs::remove_dir_all(&folder);
    let text = text(&conditions, &cells);
    println!("{text}");
    if !args.dry_run {
        page::write(SECTION, &text)?;
        let value = json!({"conditions": conditions::json(&conditions), "cells": cells.json()});
        fs::write(JSON, serde_json::to_string_pretty(&value)? + "\n")?;
    }
    Ok(true)
}

fn empty(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        // The next figures do not depend on it.
        let _ = fs::remove_dir_all(entry.path());
    }
    Ok(())
}

fn measure(
    mut command: Command,
    who: &str,
    url: &str,
    len: u64,
) -> Result<Vec<(&'static str, f64)>> {
    command.args([who, url, &len.to_string(), &(BYTES / len).to_string()]);
    let found = json_of(&mut command)?;
    let figure = |name: &'static str| Some((name, found[name].as_f64().filter(|&it| it > 0.0)?));
    Ok(FIGURES.into_iter().filter_map(figure).collect())
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

/// Redis's own benchmark with values of this length, which drops what it reads.
fn server(port: u16, len: u64) -> Result<Vec<(&'static str, f64)>> {
    let mut figures = Vec::new();
    for (test, name) in [("set", FIGURES[0]), ("get", FIGURES[1])] {
        let mut command = Command::new(SERVER);
        command.args(["-p", &port.to_string(), "-t", test, "-d", &len.to_string()]);
        let count = (BYTES / len).to_string();
        command.args(["-n", &count, "-r", &count, "-c", "4", "--csv"]);
        let output = command.output().context(SERVER)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let rate = text.lines().last().and_then(|line| line.split(',').nth(1));
        let rate = rate.and_then(|rate| rate.trim_matches('"').parse::<f64>().ok());
        let rate = rate.with_context(|| format!("{command:?} printed {text}"))?;
        figures.push((name, rate * len as f64 / 1e9));
    }
    Ok(figures)
}

fn text(conditions: &[(&'static str, String)], cells: &Rounds) -> String {
    let mut text = "## Shared stores beside the bare way to them\n\n\
        `cargo xtask bench remote`. 256 MiB of values of one length, written and read over loopback or on the file system of `target`. \
        *bare* is the crate `redis` on as many connections, with the value copied into the slot; for files four threads that write, rename and read. Files are written and read without the page cache by both. \
        For S3, *bare* is the crate `object_store` over the same client with 32 requests at a time, as lmc has, and the value copied into the slot; the server is `s3s-fs` 0.14.1 on the same cores, which sets the pace. A put that no lookup came before asks for the header first; in S3 that is one request more for each value. \
        lmc also makes and compares the checksums of all values. \
        *one* is the time of a single value; *heads* that of the headers of all values, at most 512.\n\n"
        .to_owned();
    text.push_str(&conditions::lines(conditions));
    text.push_str("\n| store | put, lmc | of bare | of redis-benchmark | get, lmc | of bare | of redis-benchmark | one, lmc | one, bare | heads |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
    for row in cells.rows() {
        if [SLOW_LINK, STALLED].contains(&row) {
            continue;
        }
        let speed = |what| shown(cells.median(row, "lmc", what), |it| format!("{it:.2} GB/s"));
        let share = |what, of| {
            shown(cells.between(row, ["lmc", of], what, |a, b| a / b), |it| {
                format!("{:.0} %", it * 100.0)
            })
        };
        let micros = |who, what| shown(cells.median(row, who, what), |it| format!("{it:.0} µs"));
        let [put, get, one, heads] = FIGURES;
        let _ = writeln!(
            text,
            "| {row} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            speed(put),
            share(put, "bare"),
            share(put, SERVER),
            speed(get),
            share(get, "bare"),
            share(get, SERVER),
            micros("lmc", one),
            micros("bare", one),
            micros("lmc", heads),
        );
    }
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
        let _ = writeln!(
            text,
            "p99 of a {what} of 2,048 tokens in memory, 2 clients: {} while the store of `--remote` answers nothing, {} without a store.\n",
            millis(STALLED, "with a stalled store", what),
            millis(STALLED, "without a store", what),
        );
    }
    text
}
