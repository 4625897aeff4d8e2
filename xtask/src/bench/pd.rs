//! `cargo xtask bench pd`: time to the first token where one engine computes a prompt and another
//! answers it.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;
use super::figures::{all_rounds, median, median_of_rounds};
use super::link::Link;
use crate::ports;

const BENCH: &str = "bench pd";
const JSON: &str = "docs/benchmarks/pd.json";
const SCRIPT: &str = "xtask/python/pd_bench.py";
/// The script's ways to a first token, each with what it is.
pub(super) const WAYS: [(&str, &str); 6] = [
    (
        "prefill engine",
        "the prefill engine alone, which computes the prompt",
    ),
    (
        "decode engine, cold",
        "the decode engine alone, which computes the prompt",
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
];

/// Measures the time to the first token of a prompt that one engine computes and another answers;
/// writes docs/benchmarks.md
#[derive(Debug, clap::Args)]
pub(crate) struct PdArgs {
    /// Rounds, in each of which every way has its turn
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Rate of the link between the two servers, in millions of bits a second
    #[arg(long, value_name = "MBIT", default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..))]
    rate: u64,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &PdArgs) -> Result<bool> {
    let listen = ports::free()?;
    let link = Link::to(listen, Duration::ZERO, Some(options.rate * 1_000_000 / 8))?;
    let engines = Engines::measure(
        SCRIPT,
        &[
            format!("--rounds={}", options.rounds),
            format!("--listen={listen}"),
            format!("--link={}", link.port),
        ],
    )?;
    let section = section(&engines.measured, options, &engines.conditions)?;
    engines.publish(BENCH, JSON, &section, options.dry_run)
}

/// Returns a row for each of these ways that a script has measured: its time to the first token, with
/// those of the fastest and the slowest round, also beyond that of the last prefill engine before it, and
/// the tokens that were not computed.
pub(super) fn rows<'a>(
    measured: &Value,
    ways: impl IntoIterator<Item = &'a (&'a str, &'a str)>,
) -> Result<String> {
    let (mut text, mut prefill) = (String::new(), 0.0);
    for (way, what) in ways {
        let all = all_rounds(measured, &[way, "seconds"])?;
        let seconds = median(&all);
        if way.ends_with("prefill engine") {
            prefill = seconds;
        }
        writeln!(
            text,
            "| {what} | {:.0} ms ({:.0} to {:.0}) | {:+.0} ms | {:.0} |",
            seconds * 1e3,
            all.iter().copied().fold(f64::INFINITY, f64::min) * 1e3,
            all.iter().copied().fold(0.0, f64::max) * 1e3,
            (seconds - prefill) * 1e3,
            median_of_rounds(measured, &[way, "cached_tokens"])?,
        )?;
    }
    Ok(text)
}

fn section(
    measured: &Value,
    options: &PdArgs,
    conditions: &[(&'static str, String)],
) -> Result<String> {
    let rows = rows(measured, &WAYS).context(SCRIPT)?;
    Ok(format!(
        "## Prefill on one engine, decode on another\n\n\
         `cargo xtask bench pd --rounds {0}`: medians of {0} rounds; a prompt of {1} tokens that is new each \
         time, which an engine computes in eight steps; two engines ({2} thread each, the model of the tests, \
         lmc's own connector, vLLM's own prefix cache off), each with a core and a server of its own, and \
         between the servers a link of {4} Mbit/s (a relay on this host). \
         All figures are in [pd.json](benchmarks/pd.json).\n\n{3}\n\
         | | first token (of all rounds) | beyond the prefill engine alone | tokens from the cache |\n|---|--:|--:|--:|\n{rows}",
        options.rounds,
        measured["tokens"],
        measured["threads"].as_str().unwrap_or_default(),
        conditions::lines(conditions),
        options.rate,
    ))
}
