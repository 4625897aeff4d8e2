//! `cargo xtask bench adapter`: the price of a connector for vLLM, on this machine's CPU.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde_json::Value;

use super::conditions;
use super::engines::Engines;

const BENCH: &str = "bench adapter";
const JSON: &str = "docs/benchmarks/adapter.json";
const SCRIPT: &str = "xtask/python/connector_bench.py";

/// Measures vLLM without a connector, with the stock one and with lmc's own; writes docs/benchmarks.md.
#[derive(Debug, clap::Args)]
pub(crate) struct AdapterArgs {
    /// Rounds, in each of which every engine has its turn
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Threads of each engine's computation
    #[arg(long, value_name = "N", default_value_t = 2)]
    threads: u32,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &AdapterArgs) -> Result<bool> {
    let args = [
        format!("--rounds={}", options.rounds),
        format!("--threads={}", options.threads),
    ];
    let engines = Engines::measure(SCRIPT, &args)?;
    let section = section(&engines.measured, &engines.conditions)?;
    engines.publish(BENCH, JSON, &section, options.dry_run)
}

/// Returns the number at a path of names.
fn at(value: &Value, path: &str) -> Result<f64> {
    let found = value.pointer(path).and_then(Value::as_f64);
    found.with_context(|| format!("{SCRIPT} printed no {path}"))
}

fn section(measured: &Value, conditions: &[(&'static str, String)]) -> Result<String> {
    let mut text = format!(
        "## A connector's price for vLLM\n\n\
         `cargo xtask bench adapter`: {} rounds over {} starts of four engines, in turn, with the \
         model of the tests ({} threads each), and one `lmc serve` on the same cores. \
         All figures are in [adapter.json](benchmarks/adapter.json).\n\n{}\n",
        measured["rounds"],
        measured["starts"],
        measured["threads"].as_str().unwrap_or_default(),
        conditions::lines(conditions),
    );
    text += "| | none | vLLM's prefix cache | stock | lmc | lmc of stock |\n|---|--:|--:|--:|--:|--:|\n";
    let rows: [(&str, &str, &str, usize); 3] = [
        (
            "12 prompts of 1,024 tokens never seen, 16 tokens each",
            "never_seen_seconds",
            "s",
            3,
        ),
        ("first token of 2,048 tokens, cold", "cold_ms", "ms", 1),
        ("first token of 2,048 tokens, warm", "warm_ms", "ms", 1),
    ];
    for (name, row, unit, digits) in rows {
        let value = |kind: &str| at(measured, &format!("/{row}/{kind}"));
        let [none, prefix] = ["none", "prefix"].map(|kind| {
            value(kind).map_or("–".to_owned(), |one| format!("{one:.digits$} {unit}"))
        });
        let (stock, lmc) = (value("stock")?, value("lmc")?);
        writeln!(
            text,
            "| {name} | {none} | {prefix} | {stock:.digits$} {unit} | {lmc:.digits$} {unit} | {:.2}× |",
            lmc / stock
        )?;
    }
    for (name, row, unit) in [
        (
            "scheduler's side, each step in which 256 requests decode",
            "/scheduler/KIND/decode",
            "µs",
        ),
        (
            "scheduler's side, all else for each request of 512 tokens, which is looked up and stored",
            "/scheduler/KIND/cold",
            "µs",
        ),
        (
            "the same, which is looked up and loaded",
            "/scheduler/KIND/warm",
            "µs",
        ),
        (
            "import of the connector, after vLLM's own modules",
            "/import_ms/KIND",
            "ms",
        ),
        (
            "installed size with dependencies that vLLM lacks",
            "/installed_mib/KIND",
            "MiB",
        ),
    ] {
        let value = |kind: &str| at(measured, &row.replace("KIND", kind));
        let (stock, lmc) = (value("stock")?, value("lmc")?);
        let ratio = lmc / stock;
        writeln!(
            text,
            "| {name} | – | – | {stock:.0} {unit} | {lmc:.0} {unit} | {ratio:.2}× |"
        )?;
    }
    text += &price(measured)?;
    text += &copies(measured)?;
    Ok(text)
}

/// Writes what prompts cost that were never seen, beside what they may cost.
fn price(measured: &Value) -> Result<String> {
    let cores = &measured["cores"];
    let mut text = format!(
        "\nPrice of prompts never seen, compared with no connector in the same round. The aim is an \
         upper end below 2 % plus the time that memcpy takes for the bytes that a batch stores, or below \
         the upper end of a second engine without a connector, which differs by chance alone. The interval \
         is resampled from the starts and the rounds of each start. The engines compute with {} threads, which may run on \
         cores {} in all four.\n\n\
         | | median | 95 % interval | allowed | upper end is | median of each start |\n\
         |---|--:|--:|--:|---|---|\n",
        cores["threads"], cores["bound"][0],
    );
    for (kind, name) in [
        ("again", "no connector, again"),
        ("stock", "stock"),
        ("lmc", "lmc"),
    ] {
        let percent = |path: &str| -> Result<f64> {
            Ok(100.0 * (at(measured, &format!("/price/{kind}/{path}"))? - 1.0))
        };
        let is_below = measured["price"][kind]["is_below"] == true;
        let starts = measured["price"][kind]["starts"].as_array();
        let starts = starts.with_context(|| format!("{SCRIPT} printed no starts"))?;
        let starts: Vec<String> = starts
            .iter()
            .filter_map(Value::as_f64)
            .map(|start| format!("{:+.1} %", 100.0 * (start - 1.0)))
            .collect();
        writeln!(
            text,
            "| {name} | {:+.1} % | {:+.1} to {:+.1} % | {:+.1} % | {} | {} |",
            percent("ratio/0")?,
            percent("ratio/1")?,
            percent("ratio/2")?,
            percent("allowed")?,
            if is_below { "below" } else { "**above**" },
            starts.join(", "),
        )?;
    }
    Ok(text)
}

/// Writes the speed of workers' copies, beside engines and alone.
fn copies(measured: &Value) -> Result<String> {
    let mut text = format!(
        "\nCopies of workers, in GB/s of the time spent copying. memcpy on one core moves {:.1} GB/s while \
         the engines are idle. The stock worker copies on the thread of the engine's steps, lmc's worker \
         on a thread of its own.\n\n\
         | beside the engine | stock | lmc | lmc's thread ran, and waited for a core |\n\
         |---|--:|--:|--:|\n",
        at(measured, "/memcpy_gb_s")?
    );
    for (name, which) in [
        ("store, of prompts never seen", "store"),
        ("retrieve, of 256 prompts at once", "retrieve"),
    ] {
        let value = |path: &str| at(measured, &format!("/copies/{which}/{path}"));
        writeln!(
            text,
            "| {name} | {:.1} | {:.1} | {:.3} s, {:.3} s |",
            value("stock/gb_s")?,
            value("lmc/gb_s")?,
            value("lmc/ran")?,
            value("lmc/waited")?,
        )?;
    }
    text += "\nlmc's worker alone, with a server and no engine: 512 MiB in requests of 1,024 tokens; the \
             figures in brackets count from the first submission until the last request is reported. The first \
             store follows the registration, while the pool's pages are still being entered into \
             the worker's page table.\n\n\
             | KV cache | memcpy | first store | later stores | first retrieve | later retrieves |\n\
             |---|--:|--:|--:|--:|--:|\n";
    let shapes = measured["idle"].as_object();
    for shape in shapes
        .with_context(|| format!("{SCRIPT} printed no idle"))?
        .keys()
    {
        let value = |path: &str| at(&measured["idle"][shape], path);
        let memcpy = value("/memcpy")?;
        let cell = |of: &str| -> Result<String> {
            let (copy, whole) = (
                value(&format!("{of}/copy"))?,
                value(&format!("{of}/whole"))?,
            );
            let share = 100.0 * copy / memcpy;
            Ok(format!("{copy:.1}, {share:.0} % ({whole:.1})"))
        };
        writeln!(
            text,
            "| {shape} | {memcpy:.1} | {} | {} | {} | {} |",
            cell("/first/store")?,
            cell("/later/store")?,
            cell("/first/retrieve")?,
            cell("/later/retrieve")?,
        )?;
    }
    Ok(text)
}
