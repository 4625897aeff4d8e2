//! `cargo xtask bench pd-nixl`: a hand-over on one host, beside vLLM's NixlConnector.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;
use super::figures::median_of_rounds;

const BENCH: &str = "bench pd-nixl";
const JSON: &str = "docs/benchmarks/pd-nixl.json";
const SCRIPT: &str = "xtask/python/pd_nixl_bench.py";
/// The script's ways to a first token, each with what it is.
const WAYS: [(&str, &str); 10] = [
    (
        "prefill engine",
        "the prefill engine alone, which computes the prompt",
    ),
    (
        "decode engine, warm",
        "the decode engine alone, whose server has the prompt in memory",
    ),
    (
        "one after the other",
        "`lmc proxy`: the prefill engine, then the decode engine",
    ),
    (
        "both at once",
        "`lmc proxy --prefill-peer`: both engines at once",
    ),
    (
        "pushed",
        "`lmc proxy --decode-peer`: the prefill engine, whose server pushes, then the decode engine",
    ),
    (
        "NixlConnector, prefill engine",
        "the prefill engine of the next row alone",
    ),
    (
        "NixlConnector",
        "`NixlConnector`, behind vLLM's `toy_proxy_server.py`",
    ),
    (
        "both connectors, prefill engine",
        "the prefill engine of the next two rows alone",
    ),
    (
        "both connectors",
        "`MultiConnector` of `NixlConnector` and LMCache's with lmc, behind the same proxy",
    ),
    (
        "both connectors, again",
        "the same, a prompt that came before: lmc has it at the prefill engine",
    ),
];

/// Measures a hand-over on one host beside vLLM's NixlConnector; writes docs/benchmarks.md
#[derive(Debug, clap::Args)]
pub(crate) struct PdNixlArgs {
    /// Rounds, in each of which every way has its turn
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &PdNixlArgs) -> Result<bool> {
    let nixl = crate::nixl::packages()?;
    let engines = Engines::measure(
        SCRIPT,
        &[
            format!("--rounds={}", options.rounds),
            format!("--nixl={}", nixl.display()),
        ],
    )?;
    let section = section(&engines.measured, options, &engines.conditions)?;
    engines.publish(BENCH, JSON, &section, options.dry_run)
}

/// Returns the median over all rounds of a figure of a way.
fn figure(measured: &Value, way: &str, name: &str) -> Result<f64> {
    median_of_rounds(measured, &[way, name]).context(SCRIPT)
}

fn section(
    measured: &Value,
    options: &PdNixlArgs,
    conditions: &[(&'static str, String)],
) -> Result<String> {
    let mut prefill = 0.0;
    let mut text = format!(
        "## A hand-over on one host, beside NixlConnector\n\n\
         `cargo xtask bench pd-nixl --rounds {0}`: medians of {0} rounds; a prompt of {1} tokens that is new \
         each time, which an engine computes in eight steps; pairs of engines ({2} thread each, the \
         model of the tests, vLLM's own prefix cache off), one pair after the other: with lmc's own connector, \
         a server and a core for each engine, with `NixlConnector`, and with both. \
         All figures are in [pd-nixl.json](benchmarks/pd-nixl.json).\n\n{3}\n\
         | | first token | beyond the prefill engine alone | tokens from elsewhere |\n|---|--:|--:|--:|\n",
        options.rounds,
        measured["tokens"],
        measured["threads"].as_str().unwrap_or_default(),
        conditions::lines(conditions),
    );
    for (way, what) in WAYS {
        let seconds = figure(measured, way, "seconds")?;
        if way.ends_with("prefill engine") {
            prefill = seconds;
        }
        writeln!(
            text,
            "| {what} | {:.0} ms | {:+.0} ms | {:.0} |",
            seconds * 1e3,
            (seconds - prefill) * 1e3,
            figure(measured, way, "cached_tokens")?,
        )?;
    }
    Ok(text)
}
