//! `cargo xtask bench pd-nixl`: a hand-over on one host, beside vLLM's NixlConnector.

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;
use super::pd;

const BENCH: &str = "bench pd-nixl";
const JSON: &str = "docs/benchmarks/pd-nixl.json";
const SCRIPT: &str = "xtask/python/pd_nixl_bench.py";
/// The way of `bench pd` that is not measured here.
const NOT_HERE: &str = "decode engine, cold";
/// The script's further ways to a first token, each with what it is.
const WAYS: [(&str, &str); 5] = [
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

fn section(
    measured: &Value,
    options: &PdNixlArgs,
    conditions: &[(&'static str, String)],
) -> Result<String> {
    let own = pd::WAYS.iter().filter(|(way, _)| *way != NOT_HERE);
    let rows = pd::rows(measured, own.chain(&WAYS)).context(SCRIPT)?;
    Ok(format!(
        "## A hand-over on one host, beside NixlConnector\n\n\
         `cargo xtask bench pd-nixl --rounds {0}`: medians of {0} rounds. Each prompt is new and has {1} \
         tokens, which an engine computes in eight steps. Pairs of engines ({2} thread each, the model of the \
         tests, vLLM's own prefix cache off) are measured one after the other: with lmc's own connector (a server \
         and a core for each engine), with `NixlConnector`, and with both. NIXL's threads use the one core of \
         each engine, so the rows with NIXL vary and say little about machines with more cores. \
         All figures are in [pd-nixl.json](benchmarks/pd-nixl.json).\n\n{3}\n\
         | | first token (of all rounds) | beyond the prefill engine alone | tokens from elsewhere |\n|---|--:|--:|--:|\n{rows}",
        options.rounds,
        measured["tokens"],
        measured["threads"].as_str().unwrap_or_default(),
        conditions::lines(conditions),
    ))
}
