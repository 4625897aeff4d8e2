//! `cargo xtask bench remote --race`: LMCache's adapters over the same stores, and Mooncake Store.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::super::conditions;
use super::super::rounds::{Rounds, shown};
use super::super::transfer::Player;
use super::{BYTES, FIGURES, LENS, Redis, RemoteArgs, Rig, publish};
use crate::{scripts, vllm};

const SECTION: &str = "bench remote race";
const JSON: &str = "docs/benchmarks/remote-race.json";
const LMCACHE: &str = "LMCache";
const MOONCAKE: &str = "mooncake";
/// Values of one submission of LMCache's benchmark, of which all are under way.
const KEYS: u64 = 32;
/// Measured rounds of LMCache's benchmark, after one to warm up.
const TURNS: &str = "3";
/// Values of one read of Mooncake: it fails with 4,096 of 64 KiB.
const MOONCAKE_BATCH: u64 = 64;
/// Seconds that Mooncake has for the values of one length.
const SECONDS: f64 = 60.0;

pub(super) fn run(args: &RemoteArgs, rig: &Rig) -> Result<bool> {
    let lmcache = format!("{}/bin/lmcache", vllm::environment()?);
    let mooncake = scripts::set_up("xtask/python/mooncake.sh", &[])?;
    let conditions = conditions::list(&lmcache);
    let lmcache = Path::new(&lmcache);
    let mut cells = Rounds::default();
    for round in 1..=args.rounds {
        for (name, len) in LENS {
            println!("round {round} of {}: {name}", args.rounds);
            for store in ["Redis", "files", "S3"] {
                let row = format!("{store}, {name}");
                let mut racers = ["lmc", LMCACHE];
                // Each is first in turn.
                racers.rotate_left(round % 2);
                for who in racers {
                    let redis = Redis::start(&rig.folder)?;
                    let url = match store {
                        "Redis" => redis.url(),
                        "files" => rig.files(),
                        _ => "s3://bucket/lmc".to_owned(),
                    };
                    if who == "lmc" {
                        cells.add(&row, who, &rig.measure(who, &url, len)?);
                        continue;
                    }
                    match adapter(rig, lmcache, store, redis.port, len) {
                        Ok(figures) => cells.add(&row, who, &figures),
                        Err(error) => println!("no figure of this round: {error:#}"),
                    }
                }
            }
            let mut command = Command::new(format!("{mooncake}/bin/python"));
            command.args(["xtask/python/mooncake_peer.py", "drive"]);
            let mut player = Player::run(command, MOONCAKE)?;
            let prompts = BYTES / (MOONCAKE_BATCH * len);
            let line = format!("prefixes {MOONCAKE_BATCH} {len} {prompts} 3");
            let found = player.ask(&line, SECONDS)?;
            let seconds = found[MOONCAKE]["seconds"].as_array();
            let seconds = seconds.context("seconds of Mooncake")?.iter();
            for seconds in seconds.filter_map(Value::as_f64) {
                let speed = (MOONCAKE_BATCH * len) as f64 / seconds / 1e9;
                cells.add(&format!("Redis, {name}"), MOONCAKE, &[(FIGURES[1], speed)]);
            }
        }
    }
    let text = text(&conditions, &cells);
    publish(args, (SECTION, JSON), &text, &conditions, &cells)?;
    Ok(true)
}

/// Runs LMCache's benchmark of one of its adapters, with as many values of the same length.
fn adapter(
    rig: &Rig,
    lmcache: &Path,
    store: &str,
    redis: u16,
    len: u64,
) -> Result<Vec<(&'static str, f64)>> {
    let adapter = match store {
        "Redis" => json!({"type": "resp", "host": "127.0.0.1", "port": redis}),
        "files" => json!({"type": "fs", "base_path": rig.folder, "use_odirect": true}),
        _ => json!({
            "type": "s3", "s3_endpoint": "s3://bucket.lmc.test:8014", "s3_region": "us-east-1",
            "disable_tls": true, "s3_prefer_http2": false,
            "aws_access_key_id": "key", "aws_secret_access_key": "secret",
        }),
    };
    let mut command = match store {
        "S3" => rig.beside_s3(lmcache),
        _ => Command::new(lmcache),
    };
    let report = fs::canonicalize("target/bench")?.join("lmcache-l2.json");
    let _ = fs::remove_file(&report);
    let count = BYTES / len;
    command.args(["bench", "l2", "--l2-adapter", &adapter.to_string()]);
    command.args(["--num-keys", &KEYS.to_string()]);
    command.args(["--in-flight", &(count / KEYS).to_string()]);
    command.args(["--data-size-kb", &(len >> 10).to_string()]);
    command.args(["--rounds", TURNS, "--l1-align-bytes", "4096", "--quiet"]);
    command.args(["--format", "json", "--output"]).arg(&report);
    let output = command.output().context("lmcache")?;
    let said = || String::from_utf8_lossy(&output.stderr).into_owned();
    let found = fs::read_to_string(&report).with_context(said)?;
    let found: Value = serde_json::from_str(&found)?;
    super::empty(&rig.folder)?;
    let operations = found["metrics"].as_object().context("metrics")?.values();
    let mut figures = Vec::new();
    for (operation, figure) in [("Store", FIGURES[0]), ("Load", FIGURES[1])] {
        let of = |found: &&Value| found["operation"] == operation;
        let found = operations.clone().find(of).context(operation)?;
        ensure!(
            found["total_success"] == found["total_keys"],
            "LMCache over {store} failed: {found}"
        );
        let millis = found["duration_p50_ms"].as_f64().context("a time")?;
        figures.push((figure, BYTES as f64 / millis / 1e6));
    }
    Ok(figures)
}

fn text(conditions: &[(&'static str, String)], cells: &Rounds) -> String {
    let mut text = "## Shared stores beside LMCache's adapters and Mooncake Store\n\n\
        `cargo xtask bench remote --race`: the same 256 MiB of values of one length as above, in the same stores on this host, each empty before each run. \
        LMCache's own `lmcache bench l2` measures its adapters `resp` (8 threads), `fs` (with `O_DIRECT`) and `s3` (64 threads of awscrt), with 32 values in a submission and all submissions in flight: the median of 3 rounds after one to warm up. lmc has one round, which also opens its connections. \
        lmc asks for the headers before it writes, and computes and compares checksums; LMCache's adapters do neither. \
        Mooncake Store reads from the memory of another process on this host over TCP, by `batch_get_into` of 64 values; a put of the owner stays in its process, and is not compared.\n\n"
        .to_owned();
    text.push_str(&conditions::lines(conditions));
    text.push_str("\n| store | put, lmc | put, LMCache | lmc has | get, lmc | get, LMCache | lmc has |\n|---|--:|--:|--:|--:|--:|--:|\n");
    let speed = |row: &str, who, what| {
        let median = cells.median(row, who, what);
        shown(median, |it| format!("{it:.2} GB/s"))
    };
    let times = |it: f64| format!("{it:.1}×");
    for row in cells.rows() {
        let _ = write!(text, "| {row} |");
        for what in [FIGURES[0], FIGURES[1]] {
            let ratio = cells.between(row, ["lmc", LMCACHE], what, |a, b| a / b);
            let _ = write!(
                text,
                " {} | {} | {} |",
                speed(row, "lmc", what),
                speed(row, LMCACHE, what),
                shown(ratio, times),
            );
        }
        text.push('\n');
    }
    text.push_str("\n| get | Mooncake Store over TCP | lmc from a Redis has |\n|---|--:|--:|\n");
    for (name, _) in LENS {
        let row = format!("Redis, {name}");
        let of = |who| cells.median(&row, who, FIGURES[1]);
        let ratio = of("lmc")
            .zip(of(MOONCAKE))
            .map(|(lmc, theirs)| lmc / theirs);
        let (speed, ratio) = (speed(&row, MOONCAKE, FIGURES[1]), shown(ratio, times));
        let _ = writeln!(text, "| {name} | {speed} | {ratio} |");
    }
    text
}
