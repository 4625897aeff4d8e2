//! `cargo xtask bench pd`: time to the first token where one engine computes a prompt and another
//! answers it.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;
use super::figures::{all_rounds, median, median_of_rounds, range};
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

/// Ways in which the decode engine gets a prompt whose prefill has ended long before.
const LATER: [(&str, &str); 4] = [
    ("warm", "its own server has the prompt"),
    ("pull", "pulled"),
    ("hint", "pulled with a hint"),
    ("push", "pushed before"),
];

/// Measures the time to the first token of a prompt that one engine computes and another answers;
/// writes docs/benchmarks.md
#[derive(Debug, clap::Args)]
pub(crate) struct PdArgs {
    /// Rounds over each link, in each of which every way has its turn
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Rates of the links between the two servers, in millions of bits a second; 0 for no limit
    #[arg(long, value_name = "MBIT", value_delimiter = ',', default_values_t = [40, 160, 0])]
    rate: Vec<u64>,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &PdArgs) -> Result<bool> {
    let (listen, bare) = (ports::free()?, ports::free()?);
    let mut args = vec![
        format!("--rounds={}", options.rounds),
        format!("--listen={listen}"),
        format!("--bare-listen={bare}"),
    ];
    for rate in &options.rate {
        let limit = (*rate > 0).then_some(rate * 1_000_000 / 8);
        let to = |port| Link::to(port, Duration::ZERO, limit);
        args.push(format!(
            "--link={rate}={}={}",
            to(listen)?.port,
            to(bare)?.port
        ));
    }
    let engines = Engines::measure(SCRIPT, &args)?;
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
    rows_with(measured, ways, |_| Ok(String::new()))
}

/// As [`rows`], with what `more` returns for a way between its last two cells.
fn rows_with<'a>(
    measured: &Value,
    ways: impl IntoIterator<Item = &'a (&'a str, &'a str)>,
    more: impl Fn(&str) -> Result<String>,
) -> Result<String> {
    let (mut text, mut prefill) = (String::new(), 0.0);
    for (way, what) in ways {
        let all = all_rounds(measured, &[way, "seconds"])?;
        let seconds = median(&all);
        if way.ends_with("prefill engine") {
            prefill = seconds;
        }
        let (least, most) = range(&all);
        writeln!(
            text,
            "| {what} | {:.0} ms ({:.0} to {:.0}) | {:+.0} ms |{} {:.0} |",
            seconds * 1e3,
            least * 1e3,
            most * 1e3,
            (seconds - prefill) * 1e3,
            more(way)?,
            median_of_rounds(measured, &[way, "cached_tokens"])?,
        )?;
    }
    Ok(text)
}

/// Returns the section of one link: its ways, what they gain, its throughput and its later ways.
fn link(measured: &Value) -> Result<String> {
    let seconds = |way| median_of_rounds(measured, &[way, "seconds"]);
    let mut text = match measured["rate"].as_u64() {
        Some(0) | None => "### No limit but this host's\n\n".to_owned(),
        Some(rate) => format!("### A link of {rate} Mbit/s\n\n"),
    };
    text += "| | first token (of all rounds) | beyond the prefill engine alone | after its last store | tokens from the cache |\n\
             |---|--:|--:|--:|--:|\n";
    let after_store = |way: &str| match all_rounds(measured, &[way, "stored"]) {
        Ok(stored) if way != "prefill engine" => {
            let all = all_rounds(measured, &[way, "seconds"])?;
            let after: Vec<f64> = all.iter().zip(stored).map(|(all, at)| all - at).collect();
            Ok(format!(" {:+.0} ms |", median(&after) * 1e3))
        }
        _ => Ok("  |".to_owned()),
    };
    text += &rows_with(measured, &WAYS, after_store).context(SCRIPT)?;
    let one = seconds("one after the other")?;
    let gained = |way| Ok::<_, anyhow::Error>((one - seconds(way)?) * 1e3);
    let (bytes, bare) = (
        median_of_rounds(measured, &["bare", "bytes"])?,
        seconds("bare")?,
    );
    let (warm, pulled) = (seconds("warm")?, seconds("pull")?);
    writeln!(
        text,
        "\nCompared with one engine after the other, both at once save {:.0} ms, and a push saves {:.0} ms.\n\n\
         In the next table the decode engine alone answers, while the prefill engine is idle and its server \
         has had the whole prompt for 0.3 s. The {:.1} MiB of a prompt pass the bare link in {:.1} ms \
         ({:.1} MB/s), and are pulled in {:.1} ms ({:.1} MB/s, {:.0} % of the bare link). The bound for a \
         pulled prompt, 110 % of the warm first token plus the time of the bare link, is {:.1} ms; the bound \
         for a prompt that was pushed before is {:.1} ms.\n",
        gained("both at once")?,
        gained("pushed")?,
        bytes / f64::from(1 << 20),
        bare * 1e3,
        bytes / bare / 1e6,
        (pulled - warm) * 1e3,
        bytes / (pulled - warm) / 1e6,
        bare / (pulled - warm) * 100.0,
        (1.1 * warm + bare) * 1e3,
        1.1 * warm * 1e3,
    )?;
    text += "| | first token (of all rounds) | beyond the warm one | tokens from the cache |\n|---|--:|--:|--:|\n";
    for (way, what) in LATER {
        let all = all_rounds(measured, &[way, "seconds"])?;
        let (least, most) = range(&all);
        writeln!(
            text,
            "| {what} | {:.1} ms ({:.1} to {:.1}) | {:+.1} ms | {:.0} |",
            median(&all) * 1e3,
            least * 1e3,
            most * 1e3,
            (median(&all) - warm) * 1e3,
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
    let mut links = String::new();
    for one in measured["links"].as_array().into_iter().flatten() {
        links = links + &link(one)? + "\n";
    }
    Ok(format!(
        "## Prefill on one engine, decode on another\n\n\
         `cargo xtask bench pd --rounds {0} --rate {5}`: medians of {0} rounds. Each prompt is new and has {1} \
         tokens, which an engine computes in eight steps. There are two engines ({2} thread each, the model of \
         the tests, lmc's own connector, vLLM's own prefix cache off), each with a core and a server of its own, \
         and a link between the servers (a relay on this host). The time of the last store is that of the \
         server's notice (`--pd-notify`), which comes a little after the store. All figures are in [pd.json](benchmarks/pd.json).\n\n{3}\n{4}",
        options.rounds,
        measured["tokens"],
        measured["threads"].as_str().unwrap_or_default(),
        conditions::lines(conditions),
        links.trim_end(),
        options
            .rate
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(","),
    ))
}
