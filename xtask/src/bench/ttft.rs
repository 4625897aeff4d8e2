//! `cargo xtask bench ttft`: the first token by where a prompt's KV cache is, and a chart of it.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;
use super::figures::{all_rounds, median, range};

const BENCH: &str = "bench ttft";
const JSON: &str = "docs/benchmarks/ttft.json";
const CHART: &str = "docs/pictures/ttft.svg";
const SCRIPT: &str = "xtask/python/ttft_bench.py";
/// Sources of the script, each with the name of its row. The first row is the base of all ratios.
const SOURCES: [(&str, &str); 8] = [
    ("computed", "computed, no connector"),
    ("prefix", "vLLM's own prefix cache"),
    ("lmcache", "LMCache's connector and server, memory"),
    ("uncached", "lmc, nothing cached"),
    ("memory", "lmc, memory"),
    ("disk", "lmc, a drive"),
    ("peer", "lmc, a peer's memory"),
    ("redis", "lmc, Redis"),
];

/// Measures the time to the first token of a prompt that is computed, or cached in memory, on a
/// drive, at a peer and in Redis; writes docs/benchmarks.md and docs/pictures/ttft.svg.
#[derive(Debug, clap::Args)]
pub(crate) struct TtftArgs {
    /// Rounds, in each of which every source has its turn
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

/// A row of the table, and a bar of the chart. Times are in milliseconds.
#[derive(Debug)]
struct Bar {
    name: &'static str,
    median: f64,
    least: f64,
    most: f64,
}

pub(crate) fn run(options: &TtftArgs) -> Result<bool> {
    let engines = Engines::measure(SCRIPT, &[format!("--rounds={}", options.rounds)])?;
    let bars = bars(&engines.measured)?;
    let section = section(&engines.measured, &bars, options, &engines.conditions)?;
    if !options.dry_run {
        fs::write(CHART, chart(&bars, &engines.measured["tokens"])).context(CHART)?;
    }
    engines.publish(BENCH, JSON, &section, options.dry_run)
}

fn bars(measured: &Value) -> Result<Vec<Bar>> {
    let mut bars = Vec::new();
    for (source, name) in SOURCES {
        let all = all_rounds(measured, &[source]).context(SCRIPT)?;
        let (least, most) = range(&all);
        bars.push(Bar {
            name,
            median: median(&all),
            least,
            most,
        });
    }
    Ok(bars)
}

fn section(
    measured: &Value,
    bars: &[Bar],
    options: &TtftArgs,
    conditions: &[(&'static str, String)],
) -> Result<String> {
    let mut text = format!(
        "## The first token, by where a prompt's KV cache is\n\n\
         `cargo xtask bench ttft --rounds {0}`: medians of {0} rounds. Each round measures every \
         source, in an order that rotates, with a new prompt of {1} tokens. {2} of \
         these are cached, except in the two rows that compute the prompt. All engines ({3} \
         threads each) and servers share the cores of this host. Directly before each measured \
         prompt its engine computes another prompt, and pauses for half a second. vLLM's own prefix \
         cache is off, except in its row. \
         All figures are in [ttft.json](benchmarks/ttft.json).\n\n{4}\n",
        options.rounds,
        measured["tokens"],
        measured["cached_tokens"],
        measured["threads"].as_str().unwrap_or_default(),
        conditions::lines(conditions),
    );
    writeln!(
        text,
        "The model of the tests is tiny: 4 layers of width 128 with 2 KiB of KV cache for each \
         token in float32, 4 MiB for the prompt. Llama 3 8B has 128 KiB for each token in \
         bfloat16. Computing a prompt and loading it both cost far more there, and their ratio \
         differs. The time is that of `LLM.generate` with one token of answer, in the engine's \
         process, without HTTP and tokenizer. The peer and Redis are on loopback: these figures \
         contain no network. Chunks on the drive were written seconds before they are read \
         ({}). The row \"lmc, nothing cached\" is measured with the engine of \"lmc, memory\", \
         whose server asks the peer for such a prompt. LMCache missed {} prompts that its server \
         had stored; other prompts were measured instead.\n",
        measured["disk_io"].as_str().unwrap_or("unknown I/O"),
        measured["lmcache_retries"],
    )?;
    text += "| | median | least to most | of computing it |\n|---|--:|--:|--:|\n";
    let computed = bars.first().context(SCRIPT)?.median;
    for bar in bars {
        writeln!(
            text,
            "| {} | {:.1} ms | {:.1} to {:.1} ms | {:.2}× |",
            bar.name,
            bar.median,
            bar.least,
            bar.most,
            bar.median / computed
        )?;
    }
    text += "\n![The medians as bars](pictures/ttft.svg)\n";
    Ok(text)
}

/// Draws the medians as bars, for light and dark pages.
fn chart(bars: &[Bar], tokens: &Value) -> String {
    const ROW: usize = 30;
    const LEFT: f64 = 280.0;
    const WIDTH: f64 = 330.0;
    let longest = bars.iter().map(|bar| bar.median).fold(1.0, f64::max);
    let height = 40 + ROW * bars.len();
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 700 {height}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\" font-size=\"14\">\n\
         <title>Time to the first token, prompts of {tokens} tokens, a tiny model</title>\n\
         <style>text {{ fill: #1f2328 }} .lmc {{ fill: #0b7285 }} .other {{ fill: #868e96 }} \
         @media (prefers-color-scheme: dark) \
         {{ text {{ fill: #e6edf3 }} .lmc {{ fill: #3bc9db }} }}</style>\n\
         <text x=\"0\" y=\"18\" font-weight=\"600\">\
         Time to the first token, prompts of {tokens} tokens, a tiny model (median)</text>\n"
    );
    for (row, bar) in bars.iter().enumerate() {
        let y = 40 + ROW * row;
        let long = (WIDTH * bar.median / longest).max(1.0);
        let class = match bar.name.starts_with("lmc") {
            true => "lmc",
            false => "other",
        };
        let _ = writeln!(
            text,
            "<text x=\"0\" y=\"{}\">{}</text>\
             <rect class=\"{class}\" x=\"{LEFT}\" y=\"{y}\" width=\"{long:.1}\" \
             height=\"20\" rx=\"3\"/>\
             <text x=\"{:.1}\" y=\"{}\">{:.1} ms</text>",
            y + 15,
            bar.name,
            LEFT + long + 8.0,
            y + 15,
            bar.median
        );
    }
    text + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_longest_bar_is_whole_and_each_has_its_time() {
        let bar = |name, median| Bar {
            name,
            median,
            least: median,
            most: median,
        };
        let bars = [bar("computed", 200.0), bar("lmc, memory", 10.0)];
        let text = chart(&bars, &json!(2049));
        assert!(
            text.contains("class=\"other\" x=\"280\" y=\"40\" width=\"330.0\""),
            "{text}"
        );
        assert!(
            text.contains("class=\"lmc\" x=\"280\" y=\"70\" width=\"16.5\""),
            "{text}"
        );
        assert!(text.contains("10.0 ms") && text.ends_with("</svg>\n"));
    }
}
