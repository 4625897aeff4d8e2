//! `lmc bench` against a real server: what it reports, and what makes it fail.

use std::os::unix::fs::FileExt;
use std::process::{Command, Output, Stdio};

use lmc_testkit::{Folder, until};
use serde_json::{Value, json};

use crate::common::{Server, segment};

fn start() -> Server {
    Server::start(&["--l1-size-gb", "64MiB", "--chunk-size", "32"])
}

fn bench(server: &Server, args: &[&str]) -> Command {
    let mut command = crate::common::lmc();
    command
        .args([
            "bench",
            "--url",
            &format!("tcp://127.0.0.1:{}", server.port),
        ])
        .args(["--http-url", &format!("127.0.0.1:{}", server.http)])
        .args(["--layers", "2", "--hidden", "64", "--warmup", "0", "--json"])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn report(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"))
}

#[test]
fn every_workload_is_measured_and_every_byte_is_right() {
    let server = start();
    for mode in ["engine_driven", "lmcache_driven"] {
        let args = [
            "--workload",
            "noop,lookup,lookup-cold,store,retrieve",
            "--tokens",
            "100",
            "--clients",
            "1,5",
            "--count",
            "6",
            "--tp",
            "2",
            "--shared-prefix",
            "0.5",
            "--mode",
            mode,
        ];
        let output = bench(&server, &args).output().expect("it runs");
        let report = report(&output);
        assert_eq!(output.status.code(), Some(0), "{mode}: {report:#}");
        assert_eq!(report["passed"], true);
        assert_eq!(report["chunk_tokens"], 32);
        assert_eq!(report["chunk_bytes"], 2 * 2 * 64 * 2 * 32);
        let rows = report["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), 10, "{report:#}");
        for row in rows {
            let clients = row["clients"].as_u64().expect("a number");
            assert_eq!(row["ops"], 6 * clients, "{row:#}");
            assert_eq!(row["wrong_bytes"], 0);
            assert_eq!(row["errors"], 0);
            assert_eq!(row["misses"], 0, "{row:#}");
            let time = |name: &str| row["latency_seconds"][name].as_f64().expect("seconds");
            assert!(time("p50") > 0.0 && time("p50") <= time("p99"));
            assert!(time("p99") <= time("max"));
        }
        let retrieve = rows.iter().rfind(|row| row["operation"] == "retrieve");
        let retrieve = retrieve.expect("a row");
        // 5 clients, 6 retrieves each, 3 chunks of each of 2 workers.
        let bytes = 5 * 6 * 3 * 2 * 16384;
        assert_eq!(retrieve["bytes"], bytes, "{retrieve:#}");
        let verified = retrieve["verified_bytes"].as_u64().expect("a number");
        // What was read before the clock ran was checked as well.
        assert!(verified >= bytes, "{retrieve:#}");
    }
}

#[test]
fn a_run_under_the_name_of_an_earlier_one_finds_what_that_left() {
    let server = start();
    let stored = |model: &str| {
        let args = [
            "--workload",
            "retrieve",
            "--tokens",
            "64",
            "--count",
            "4",
            "--force",
        ];
        let mut run = bench(&server, &args);
        let output = run.args(["--model", model]).output().expect("it runs");
        assert_eq!(output.status.code(), Some(0), "{:#}", report(&output));
        server.metric("lmc_stored_chunks_total")
    };
    // Four prompts of two chunks.
    assert_eq!(stored("m"), 8.0);
    assert_eq!(stored("m"), 8.0);
    assert_eq!(stored("n"), 16.0);
}

#[test]
fn a_mix_is_measured_kind_by_kind_and_written_as_csv() {
    let server = start();
    let path = std::env::temp_dir().join(format!("lmc-bench-{}.csv", server.port));
    let file = path.to_str().expect("a path");
    let args = ["--tokens", "64", "--count", "60", "--csv", file];
    let output = bench(&server, &args).output().expect("it runs");
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    let rows = report["rows"].as_array().expect("rows");
    let kinds: Vec<_> = rows.iter().map(|row| row["operation"].clone()).collect();
    assert_eq!(kinds, ["lookup", "store", "retrieve"]);
    let ops: u64 = rows.iter().filter_map(|row| row["ops"].as_u64()).sum();
    assert_eq!(ops, 60);
    let csv = std::fs::read_to_string(&path).expect("the file");
    std::fs::remove_file(&path).expect("it is there");
    assert_eq!(csv.lines().count(), 4, "{csv}");
    assert!(csv.starts_with("workload,operation,tokens"));
}

/// A server that returns other bytes than were stored fails the bench: the test flips bytes all over its pool while retrieves are running.
#[test]
fn a_wrong_byte_makes_exit_code_1() {
    let server = start();
    let args = [
        "--workload",
        "retrieve",
        "--tokens",
        "64",
        "--duration",
        "0.5",
    ];
    let pool = std::fs::File::options()
        .read(true)
        .write(true)
        .open(segment(server.port).expect("the pool's name"))
        .expect("the pool");
    let run = || {
        let mut child = bench(&server, &args).spawn().expect("it runs");
        until("the bench ends", || {
            // Chunks have 16 KiB, so every one of the first 4 MiB gets its wrong byte. Retrieves
            // copy nothing into the pool, so the bytes stay wrong.
            for offset in (0..4 << 20).step_by(16384) {
                pool.write_all_at(&[0x5A; 3], offset + 100).expect("inside");
            }
            child.try_wait().expect("a child").is_some()
        });
        child.wait_with_output().expect("it ended")
    };
    let mut output = run();
    // A busy machine may have flipped no byte while retrieves ran.
    until("a byte was wrong", || {
        let is_seen = !output.status.success();
        if !is_seen {
            output = run();
        }
        is_seen
    });
    let report = report(&output);
    assert_eq!(output.status.code(), Some(1), "{report:#}");
    assert_eq!(report["passed"], false);
    assert!(report["rows"][0]["wrong_bytes"].as_u64() > Some(0));
    assert_eq!(
        report["errors"],
        Value::Array(Vec::new()),
        "no request failed"
    );
}

#[test]
fn no_server_and_wrong_flags_have_their_own_codes() {
    let server = start();
    let code = |args: &[&str]| {
        let output = bench(&server, args).output().expect("it runs");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (exit, text) = code(&["--tokens", "0"]);
    assert_eq!(exit, Some(2), "{text}");
    assert!(text.contains("--tokens: expected"), "{text}");
    let (exit, text) = code(&["--workload", "lookup", "--tokens", "31"]);
    assert_eq!(exit, Some(1), "{text}");
    assert!(text.contains("chunk of 32 tokens"), "{text}");
    let (exit, text) = code(&["--block-size", "5"]);
    assert_eq!(exit, Some(1), "{text}");
    assert!(text.contains("divisor"), "{text}");
    let refused = Command::new(env!("CARGO_BIN_EXE_lmc"))
        .args(["bench", "--url", "tcp://127.0.0.1:1"])
        .output()
        .expect("it runs");
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains("no server for engines"), "{text}");
}

/// A default run of `lmc bench` once sent its load to whatever listened on the production port,
/// evicted chunks there, and left its own behind. It now refuses a server that is in use, and
/// leaves one that was empty as it was.
#[test]
fn a_server_in_use_is_refused_and_an_empty_one_is_left_empty() {
    let server = start();
    let run = |args: &[&str]| {
        let args = [
            args,
            &["--workload", "store", "--tokens", "64", "--count", "3"],
        ]
        .concat();
        let output = bench(&server, &args).output().expect("it runs");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let chunks = || {
        let url = format!("http://127.0.0.1:{}/status", server.http);
        let mut answer = ureq::get(&url).call().expect("an answer");
        let status: Value = answer.body_mut().read_json().expect("JSON");
        status["lmc"]["usage"]["chunks"].as_u64().expect("a number")
    };
    let (code, errors) = run(&[]);
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(chunks(), 0, "the run is cleared: {errors}");
    let (code, errors) = run(&["--force"]);
    assert_eq!(code, Some(0), "{errors}");
    let held = chunks();
    assert!(held >= 6, "nothing is cleared with --force: {errors}");
    let (code, errors) = run(&[]);
    assert_eq!(code, Some(1), "a server with chunks is refused: {errors}");
    assert_eq!(chunks(), held, "and nothing was stored: {errors}");
    // What cannot be seen may be in use. Another server's HTTP side says nothing about this one.
    let other = start();
    for url in [
        "127.0.0.1:1".to_owned(),
        format!("127.0.0.1:{}", other.http),
    ] {
        let mut bench = Command::new(env!("CARGO_BIN_EXE_lmc"));
        bench.args([
            "bench",
            "--url",
            &format!("tcp://127.0.0.1:{}", server.port),
        ]);
        let output = bench.args(["--count", "1", "--http-url", &url]).output();
        assert_eq!(output.expect("it runs").status.code(), Some(1), "{url}");
    }
    assert_eq!(chunks(), held);
}

/// `lmc --help` described `bench` by the name of a Rust type.
#[test]
fn the_overview_says_what_bench_does() {
    let output = Command::new(env!("CARGO_BIN_EXE_lmc"))
        .arg("--help")
        .output();
    let help = output.expect("the binary runs").stdout;
    let help = String::from_utf8_lossy(&help).into_owned();
    let bench = help
        .lines()
        .find(|line| line.trim_start().starts_with("bench "));
    assert!(!bench.expect("a line").contains('`'), "{help}");
}

/// Conversations that go on by turns, and prompts that come once; blocks of 64 tokens, two chunks each.
fn write_trace(folder: &Folder) -> String {
    let requests = (0..90_u64).map(|turn| {
        let blocks: Vec<u64> = match turn % 3 {
            0 => (0..4).map(|block| 10_000 + turn * 4 + block).collect(),
            talk => (0..2 + turn / 20).map(|block| talk * 500 + block).collect(),
        };
        let request = json!({
            "timestamp": turn * 10,
            "input_length": blocks.len() * 64,
            "output_length": 1,
            "hash_ids": blocks,
        });
        request.to_string() + "\n"
    });
    let path = folder.join("trace.jsonl");
    std::fs::write(&path, requests.collect::<String>()).expect("a temporary folder");
    path.to_str().expect("a path").to_owned()
}

/// A server with memory for all of it finds what `lmc sim` says that a cache without limit finds.
#[test]
fn a_trace_is_played_and_the_server_finds_what_the_simulation_says() {
    let server = start();
    let folder = Folder::temporary();
    let trace = write_trace(&folder);
    let simulated = crate::common::lmc()
        .args(["sim", &trace, "--json"])
        .output();
    let simulated = report(&simulated.expect("it runs"));
    assert_eq!(simulated[0]["block_tokens"], 64, "{simulated:#}");
    let ceiling = simulated[0]["no_limit"].as_f64().expect("a share");
    assert!(ceiling > 0.3, "{simulated:#}");
    for mode in ["engine_driven", "lmcache_driven"] {
        let mut replay = crate::common::lmc();
        replay
            .args(["replay", &trace, "--clients", "1", "--tp", "2", "--json"])
            .args(["--url", &format!("tcp://127.0.0.1:{}", server.port)])
            .args(["--http-url", &format!("127.0.0.1:{}", server.http)])
            .args(["--layers", "2", "--hidden", "64", "--mode", mode]);
        let output = replay.output().expect("it runs");
        let played = report(&output);
        assert_eq!(output.status.code(), Some(0), "{mode}: {played:#}");
        assert_eq!(played["requests"], 90);
        assert_eq!(played["wrong_bytes"], 0);
        let found = played["found"].as_f64().expect("a share");
        assert!((found - ceiling).abs() < 1e-9, "{mode}: {found} {ceiling}");
        // There is no tier but memory.
        let tiers = played["found_by_tier"].as_object().expect("shares");
        assert!(
            tiers.len() == 1 && is_near(&tiers["dram"], found),
            "{played:#}"
        );
        // Found chunks of both workers were read and checked.
        let chunks = played["found_chunks"].as_u64().expect("a number");
        assert_eq!(played["retrieved_bytes"], chunks * 2 * 16384, "{played:#}");
        let all = played["chunks"].as_u64().expect("a number");
        assert_eq!(played["stored_bytes"], (all - chunks) * 2 * 16384);
    }
    // It leaves an empty server as it was.
    assert_eq!(server.metric("lmc_chunks"), 0.0);
}

fn is_near(share: &Value, expected: f64) -> bool {
    (share.as_f64().expect("a share") - expected).abs() < 1e-9
}

#[test]
fn a_replay_says_which_tier_had_the_chunks() {
    let drive = Folder::temporary();
    let mut flags = crate::common::drive_flags(&drive, "512MiB").to_vec();
    flags.extend(["--l1-size-gb", "2MiB", "--chunk-size", "32"]);
    // The machine may be busy.
    flags.extend(["--disk-read-timeout-seconds", "60"]);
    let server = Server::start(&flags);
    let folder = Folder::temporary();
    // Forty prompts of 128 KiB, twice in turn: each is evicted from memory before it comes again.
    let requests = (0..80_u64).map(|turn| {
        let blocks: Vec<u64> = (0..4).map(|block| turn % 40 * 4 + block).collect();
        let request = json!({"timestamp": turn, "input_length": 256, "hash_ids": blocks});
        request.to_string() + "\n"
    });
    let trace = folder.join("trace.jsonl");
    std::fs::write(&trace, requests.collect::<String>()).expect("a temporary folder");
    let mut replay = crate::common::lmc();
    replay
        .arg("replay")
        .arg(&trace)
        .args(["--clients", "1", "--json", "--time-unit", "s"])
        .args(["--url", &format!("tcp://127.0.0.1:{}", server.port)])
        .args(["--http-url", &format!("127.0.0.1:{}", server.http)])
        .args(["--layers", "2", "--hidden", "64"]);
    let output = replay.output().expect("it runs");
    let played = report(&output);
    assert_eq!(output.status.code(), Some(0), "{played:#}");
    let share = |tier: &str| played["found_by_tier"][tier].as_f64().expect("a share");
    assert!(share("disk") > 0.0, "{played:#}");
    let both = share("dram") + share("disk");
    assert!(is_near(&played["found"], both), "{played:#}");
}

#[test]
fn the_simulation_shows_sizes_in_bytes_and_names_a_bad_trace() {
    let folder = Folder::temporary();
    let trace = write_trace(&folder);
    let mut sim = crate::common::lmc();
    sim.args(["sim", &trace, "--token-size", "1KiB", "--size", "1MiB"]);
    let output = sim.output().expect("it runs");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    for expected in [
        "blocks of 64 tokens",
        "1024 tokens (1.00 MiB)",
        "LRU",
        "best",
    ] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    std::fs::write(folder.join("bad"), "{\"input_length\": 7}").expect("a file");
    let bad = folder.join("bad");
    let output = crate::common::lmc().arg("sim").arg(&bad).output();
    let output = output.expect("it runs");
    let shown = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && shown.contains("line 1"),
        "{shown}"
    );
}
