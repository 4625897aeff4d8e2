//! `cargo xtask bench vllm`: `vllm bench serve` without a connector, with the stock one and with ours.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;
use super::figures::median_of_rounds;

const BENCH: &str = "bench vllm";
const JSON: &str = "docs/benchmarks/vllm.json";
const SCRIPT: &str = "xtask/python/serve_bench.py";
/// Set-ups of the script, the first of which is the one that others are compared with.
const SETUPS: [&str; 4] = ["no connector", "stock, LMCache", "stock, lmc", "own, lmc"];
/// Loads of the script, by the names of vLLM's data sets.
const LOADS: [(&str, &str); 2] = [
    (
        "prefix_repetition",
        "8 prefixes of 2,048 tokens, 128 more for each request, 4 requests at a time",
    ),
    (
        "timed_trace",
        "the first requests of Mooncake's conversation trace that fit into the model's context \
         length, at their times",
    ),
];

/// Measures `vllm bench serve` without a connector, with the stock one and with lmc's own; writes
/// docs/benchmarks.md.
#[derive(Debug, clap::Args)]
pub(crate) struct VllmArgs {
    /// Rounds, in each of which every set-up has its turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Requests of each load
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..))]
    requests: u32,
    /// Trace of requests in Mooncake's format, a JSON object for each line, such as
    /// FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &VllmArgs) -> Result<bool> {
    let args = [
        format!("--trace={}", options.trace.display()),
        format!("--rounds={}", options.rounds),
        format!("--requests={}", options.requests),
    ];
    let engines = Engines::measure(SCRIPT, &args)?;
    let section = section(&engines.measured, options, &engines.conditions)?;
    engines.publish(BENCH, JSON, &section, options.dry_run)
}

/// Returns the median over all rounds of a figure of a set-up's load.
fn figure(measured: &Value, setup: &str, load: &str, name: &str) -> Result<f64> {
    median_of_rounds(measured, &[setup, load, name]).context(SCRIPT)
}

fn section(
    measured: &Value,
    options: &VllmArgs,
    conditions: &[(&'static str, String)],
) -> Result<String> {
    let mut text = format!(
        "## vLLM under load, with and without a connector\n\n\
         `cargo xtask bench vllm --trace FILE --rounds {0}`: {0} round{s} of {1} requests with answers of \
         16 tokens, medians of `vllm bench serve`'s figures; each set-up has an engine ({2} threads, the model of the tests, \
         vLLM's own prefix cache off) and a cache server of its own on the same cores, in turn. \
         All figures are in [vllm.json](benchmarks/vllm.json).\n\n{3}\n",
        options.rounds,
        options.requests,
        measured["threads"].as_str().unwrap_or_default(),
        conditions::lines(conditions),
        s = if options.rounds == 1 { "" } else { "s" },
    );
    for (load, what) in LOADS {
        writeln!(text, "`{load}`: {what}.\n")?;
        text += "| | time to first token, p50 | p99 | whole request, p50 | requests a second | tokens from the cache |\n";
        text += "|---|--:|--:|--:|--:|--:|\n";
        for setup in SETUPS {
            let of = |name: &str| figure(measured, setup, load, name);
            let against = |name: &str| -> Result<String> {
                let (own, none) = (of(name)?, figure(measured, SETUPS[0], load, name)?);
                Ok(format!("{own:.0} ms ({:.2}×)", own / none))
            };
            writeln!(
                text,
                "| {setup} | {} | {} | {} | {:.2} | {:.0} |",
                against("median_ttft_ms")?,
                against("p99_ttft_ms")?,
                against("median_e2el_ms")?,
                of("request_throughput")?,
                of("cached_tokens")?,
            )?;
        }
        text += "\n";
    }
    let trace = &measured["trace"];
    writeln!(
        text,
        "Of the trace's {} tokens, {} are in blocks that an earlier request had.",
        trace["tokens"], trace["repeated"]
    )?;
    Ok(text)
}
