//! `cargo xtask bench pd-tail`: what the end of a prompt costs a decode engine, by chunk size.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;
use super::figures::median_of_rounds;

const BENCH: &str = "bench pd-tail";
const JSON: &str = "docs/benchmarks/pd-tail.json";
const SCRIPT: &str = "xtask/python/pd_tail_bench.py";

/// Measures what the end of a prompt costs a decode engine, by chunk size; writes docs/benchmarks.md
#[derive(Debug, clap::Args)]
pub(crate) struct PdTailArgs {
    /// Prompts for each chunk size, whose lengths lie evenly in a chunk of 256 tokens
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    rounds: u32,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &PdTailArgs) -> Result<bool> {
    let engines = Engines::measure(SCRIPT, &[format!("--rounds={}", options.rounds)])?;
    let section = section(&engines.measured, options, &engines.conditions)?;
    engines.publish(BENCH, JSON, &section, options.dry_run)
}

/// Returns the median over all prompts of a figure of a way.
fn figure(way: &Value, name: &str) -> Result<f64> {
    median_of_rounds(way, &[name]).context(SCRIPT)
}

fn section(
    measured: &Value,
    options: &PdTailArgs,
    conditions: &[(&'static str, String)],
) -> Result<String> {
    let mut text = format!(
        "## The end of a prompt, by chunk size\n\n\
         `cargo xtask bench pd-tail --rounds {0}`: medians of {0} prompts for each row. Each prompt is new \
         and has {1} tokens and up to {2} more, evenly spread. One engine computes a prompt, then another engine \
         answers it, each with a server of its own on this host ({3} thread each, the model of the tests, blocks of {4} \
         tokens, vLLM's own prefix cache off). \
         All figures are in [pd-tail.json](benchmarks/pd-tail.json).\n\n{5}\n\
         | connector | chunk | prefill | first token after it | tokens that the decode engine computes |\n\
         |---|--:|--:|--:|--:|\n",
        options.rounds,
        measured["length"],
        measured["spread"],
        measured["threads"].as_str().unwrap_or_default(),
        measured["block"],
        conditions::lines(conditions),
    );
    for way in measured["ways"].as_array().into_iter().flatten() {
        let connector = match way["connector"].as_str() {
            Some("lmc") => "lmc's own",
            _ => "LMCache's",
        };
        writeln!(
            text,
            "| {connector} | {} | {:.0} ms | {:.1} ms | {:.0} |",
            way["chunk"],
            figure(way, "prefill")? * 1e3,
            figure(way, "seconds")? * 1e3,
            figure(way, "computed")?,
        )?;
    }
    Ok(text)
}
