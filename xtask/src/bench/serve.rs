//! `cargo xtask bench serve`: lmc and LMCache's server under the same load, in turn.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::figures::{Figures, Unit};
use super::server::{Baseline, Kind, Programs, Server};
use super::{ceiling, conditions, metrics};

const JSON: &str = "docs/benchmarks/serve.json";

const CLEAR_DEADLINE: Duration = Duration::from_secs(30);

const START: &str = "start until it listens, pool of 2 GiB";
const IN_SERVER: &str = "lookup of 131,072 tokens, inside the server, p50";
const TINY: &str = "--layers 1 --hidden 8 --prompts 2";

/// Flags of `lmc bench`, one call each; both servers get the same ones in the same order.
const LOADS: &[&str] = &[
    // What a cached chunk costs beside its bytes: first, since memory that was freed is used again.
    "--workload store --tokens 32768 --count 100 --warmup 0",
    "--workload noop --clients 1,32",
    "--workload lookup,lookup-cold --tokens 2048,32768,131072",
    "--workload lookup --tokens 2048,32768 --clients 32",
];

/// Layers and elements of a token, whose chunks of 256 tokens have 256 KiB, 2 MiB and 16 MiB; and
/// operations of each client, so that a slow server completes some too.
const SIZES: &[(&str, &str, &str)] = &[("2", "128", "80"), ("16", "128", "30"), ("32", "512", "8")];

/// Measures lmc and LMCache's server under the same load, in turn; writes docs/benchmarks.md.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Rounds; figures are medians of them
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each cell
    #[arg(long, value_name = "S", default_value = "1.5")]
    duration: String,
    /// LMCache's `lmcache`; fetched from PyPI unless given
    #[arg(long, value_name = "PROGRAM")]
    lmcache: Option<String>,
    /// Measure an earlier lmc instead of LMCache's server; writes nothing
    #[arg(long, value_name = "PROGRAM")]
    before: Option<String>,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &ServeArgs) -> Result<bool> {
    let lmc = crate::vllm::build_server()?.to_string_lossy().into_owned();
    let baseline = match (&options.before, &options.lmcache) {
        (Some(program), _) => Baseline::Earlier(program.clone()),
        (None, Some(program)) => Baseline::LmCache(program.clone()),
        (None, None) => Baseline::LmCache(format!("{}/bin/lmcache", crate::vllm::environment()?)),
    };
    let conditions = match &baseline {
        Baseline::LmCache(program) => conditions::list(program),
        Baseline::Earlier(_) => conditions::machine(),
    };
    for (what, value) in &conditions {
        eprintln!("{what}: {value}");
    }
    let programs = Programs { lmc, baseline };
    let mut figures = Figures::default();
    let mut all_well = true;
    for round in 1..=options.rounds {
        for kind in Kind::BOTH {
            eprintln!(
                "round {round} of {}: {}",
                options.rounds,
                programs.name(kind)
            );
            all_well &= measure(kind, &programs, options, &mut figures)?;
        }
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let ceilings = [
        (
            "memcpy, 1 core".to_owned(),
            Unit::GigabytesPerSecond,
            ceiling::memcpy(1),
        ),
        (
            format!("memcpy, {cores} cores"),
            Unit::GigabytesPerSecond,
            ceiling::memcpy(cores),
        ),
        (
            "bare TCP round trip, 30 bytes".to_owned(),
            Unit::Seconds,
            ceiling::echo(30)?,
        ),
        (
            "bare TCP round trip, 8 KiB (2,048 tokens)".to_owned(),
            Unit::Seconds,
            ceiling::echo(8 << 10)?,
        ),
        (
            "bare TCP round trip, 512 KiB (131,072 tokens)".to_owned(),
            Unit::Seconds,
            ceiling::echo(512 << 10)?,
        ),
    ];
    for (name, unit, value) in &ceilings {
        figures.add(Kind::Lmc, &format!("ceiling: {name}"), *unit, *value);
    }
    let text = page(
        &conditions,
        &figures,
        options.rounds,
        programs.baseline.name(),
    );
    println!("{text}");
    if !options.dry_run && options.before.is_none() {
        let value = json!({
            "conditions": conditions::json(&conditions),
            "rounds": options.rounds,
            "figures": figures.json(),
        });
        super::page::write("bench serve", &text, JSON, &value)?;
    }
    Ok(all_well)
}

/// One round with one server. Whether all bytes were right and no request failed.
fn measure(
    kind: Kind,
    programs: &Programs,
    options: &ServeArgs,
    figures: &mut Figures,
) -> Result<bool> {
    fs::create_dir_all("target/bench")?;
    let log = format!("target/bench/{}.log", programs.name(kind).replace(' ', "-"));
    let server = Server::start(kind, programs, &log)?;
    figures.add(kind, START, Unit::Seconds, server.start.as_secs_f64());
    let mut all_well = true;
    let mut load = |args: &str, figures: &mut Figures| -> Result<()> {
        clear(&server)?;
        let report = bench(programs, &server, options, args)?;
        for row in report["rows"].as_array().into_iter().flatten() {
            take(kind, &report, row, figures);
        }
        if report["passed"] != true {
            eprintln!("{} with {args}: {}", programs.name(kind), report["errors"]);
            all_well = false;
        }
        Ok(())
    };
    for args in LOADS {
        load(&format!("{args} {TINY}"), figures)?;
    }
    for mode in ["engine_driven", "lmcache_driven"] {
        for (layers, hidden, count) in SIZES {
            for clients in [1, 2] {
                let args = format!(
                    "--workload store,retrieve --mode {mode} --clients {clients} --tokens 1024 \
                     --prompts 2 --count {count} --layers {layers} --hidden {hidden}"
                );
                load(&args, figures)?;
            }
        }
    }
    if kind == Kind::Lmc {
        let before = metrics::lookups(server.http)?;
        load(
            &format!("--workload lookup --tokens 131072 {TINY}"),
            figures,
        )?;
        let after = metrics::lookups(server.http)?;
        if let Some(seconds) = after.median_since(&before) {
            figures.add(kind, IN_SERVER, Unit::Seconds, seconds);
        }
    }
    server.stop()?;
    Ok(all_well)
}

/// Empties the cache, so that no load finds the pool full of an earlier one's chunks: LMCache's
/// server drops stores then, until its eviction has caught up.
fn clear(server: &Server) -> Result<()> {
    // The tier that both know.
    let body = r#"{"tier":"l1","force":true}"#;
    let mut stream = TcpStream::connect(("127.0.0.1", server.http))?;
    stream.set_read_timeout(Some(CLEAR_DEADLINE))?;
    write!(
        stream,
        "POST /cache/clear HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .context("POST /cache/clear")?;
    let status = answer.lines().next().unwrap_or_default();
    ensure!(status.contains(" 200 "), "POST /cache/clear: {answer}");
    Ok(())
}

/// Runs the generator. Its report.
fn bench(programs: &Programs, server: &Server, options: &ServeArgs, args: &str) -> Result<Value> {
    let output = Command::new(&programs.lmc)
        .args(["bench", "--force", "--json", "--url"])
        .arg(format!("tcp://127.0.0.1:{}", server.port))
        .args(["--server-pid", &server.pid().to_string()])
        .args(["--duration", &options.duration])
        .args(args.split_whitespace())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .context("cannot run lmc bench")?;
    serde_json::from_slice(&output.stdout).with_context(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("lmc bench {args} printed no JSON: {errors}")
    })
}

/// Takes the figures out of a row.
fn take(kind: Kind, report: &Value, row: &Value, figures: &mut Figures) {
    let number = |path: &str| row.pointer(path).and_then(Value::as_f64);
    let text = |name: &str| row[name].as_str().unwrap_or_default();
    let count = |name: &str| row[name].as_u64().unwrap_or_default();
    let clients = match count("clients") {
        1 => "1 client".to_owned(),
        many => format!("{many} clients"),
    };
    let mut add = |name: String, unit, value: Option<f64>| {
        if let Some(value) = value {
            figures.add(kind, &name, unit, value);
        }
    };
    let tokens = grouped(count("tokens"));
    let p50 = number("/latency_seconds/p50");
    match (text("workload"), text("operation")) {
        ("noop", _) => {
            add(
                format!("noop, round trip p50, {clients}"),
                Unit::Seconds,
                p50,
            );
        }
        (workload @ ("lookup" | "lookup-cold"), _) => {
            let seen = if workload == "lookup" {
                "cached"
            } else {
                "never seen"
            };
            let what = format!("lookup of {tokens} tokens, {seen}");
            add(format!("{what}, p50, {clients}"), Unit::Seconds, p50);
            if workload == "lookup" {
                let rate = number("/ops_per_s");
                add(format!("{what}, rate, {clients}"), Unit::PerSecond, rate);
            }
        }
        // The load that counts chunks, not bytes a second.
        (_, "store") if count("tokens") == 32_768 => {
            let each = number("/server_growth_bytes_per_chunk");
            add(
                "memory for each cached chunk, beyond its bytes".to_owned(),
                Unit::Bytes,
                each,
            );
        }
        (_, operation) => {
            let kib = report["chunk_bytes"].as_u64().unwrap_or_default() >> 10;
            let mode = report["mode"].as_str().unwrap_or_default();
            let what = format!(
                "{operation}, {mode}, chunks of {} KiB, {clients}",
                grouped(kib)
            );
            let rate = number("/gb_per_s");
            add(what.clone(), Unit::GigabytesPerSecond, rate);
            let cost = number("/server_cpu_seconds_per_gb");
            add(
                format!("{what}: CPU of the server"),
                Unit::CpuSecondsPerGigabyte,
                cost,
            );
        }
    }
}

/// `131072` as `131,072`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn page(conditions: &[(&str, String)], figures: &Figures, rounds: u32, baseline: &str) -> String {
    let mut text = format!(
        "## lmc serve against {baseline}\n\n`cargo xtask bench serve`: medians of \
         {rounds} round(s), both servers in turn in each, with the same load from `lmc bench`; all \
         figures are in [serve.json](benchmarks/serve.json).\n\n"
    );
    text.push_str(&conditions::lines(conditions));
    let _ = writeln!(text, "\n{}", figures.markdown(baseline));
    text.push_str(
        "A lookup is timed from LOOKUP until QUERY_PREFETCH_STATUS has answered with the number of chunks.\n\
         GB/s are the bytes of completed operations divided by the time that clients spent in them, \
         summed over clients; in engine_driven mode the client's own copy is part of that time.\n\
         Every byte retrieved was compared with what was stored, outside the timed part.\n\
         Server and generator share the cores, so rates at 32 clients include the generator's work.\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_figures() {
        let report = json!({"mode": "engine_driven", "chunk_bytes": 2 << 20});
        let rows = [
            json!({"workload": "lookup", "operation": "lookup", "tokens": 131_072, "clients": 32,
                   "ops_per_s": 5.0, "latency_seconds": {"p50": 0.5}}),
            json!({"workload": "store", "operation": "store", "tokens": 1024, "clients": 1,
                   "gb_per_s": 3.0, "server_cpu_seconds_per_gb": null}),
        ];
        let mut figures = Figures::default();
        for row in &rows {
            take(Kind::Lmc, &report, row, &mut figures);
        }
        let at = |name: &str| figures.median(Kind::Lmc, name);
        assert_eq!(
            at("lookup of 131,072 tokens, cached, p50, 32 clients"),
            Some(0.5)
        );
        assert_eq!(
            at("lookup of 131,072 tokens, cached, rate, 32 clients"),
            Some(5.0)
        );
        let store = "store, engine_driven, chunks of 2,048 KiB, 1 client";
        assert_eq!(at(store), Some(3.0));
        assert_eq!(at(&format!("{store}: CPU of the server")), None);
    }

    #[test]
    fn options_are_checked() {
        assert!(crate::parse_action("bench serve --rounds 5 --dry-run").is_ok());
        for wrong in ["--rounds", "--rounds 0", "--round 1"] {
            assert!(crate::parse_action(&format!("bench serve {wrong}")).is_err());
        }
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(12), "12");
    }
}
