//! `lmc drain`: takes a server out of service, and waits until its tiers have the chunks in memory.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::Server;
use super::format::{bytes, number};
use super::http::Call;
use crate::bars;
use crate::config::parse_duration;
use crate::stdout::outln;

/// Text after the help of the command.
pub(super) const HELP: &str = "\
The server then refuses stores of engines and pushes of peers, /readyz answers 503, and the chunks in
memory are written to tiers with --disk-write back (or --remote-write back). Lookups and reads
continue, so engines and peers lose no chunks until the server stops. The stop is a second step:
systemctl stop lmc, or SIGTERM.

Exit code 1: some chunks were not written within --timeout, or a tier did not take them. The drain
continues.

Examples:
  lmc drain && systemctl stop lmc
  lmc drain --timeout 30s     wait for at most 30 s
  lmc drain --cancel          chunks are stored again";

/// Time between two checks of the progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Longest wait, such as 90s or 10m.
    #[arg(long, value_name = "TIME", default_value = "10m")]
    timeout: String,
    /// Return at once. A later `lmc drain` waits, and shows the progress.
    #[arg(long, conflicts_with = "timeout")]
    no_wait: bool,
    /// Take the server back into service: it stores chunks again.
    #[arg(long, conflicts_with_all = ["timeout", "no_wait"])]
    cancel: bool,
    #[command(flatten)]
    server: Server,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let url = &arguments.server.address.url;
    if arguments.cancel {
        let answer = Call::new("DELETE", "/drain", None).send(url)?;
        show(arguments, &answer, "the server stores chunks again")?;
        return Ok(ExitCode::SUCCESS);
    }
    let timeout = &arguments.timeout;
    let limit = parse_duration(timeout).map_err(|error| anyhow!("--timeout {timeout}: {error}"))?;
    let deadline = Instant::now().checked_add(limit);
    let mut answer = Call::new("POST", "/drain", Some(json!({}))).send(url)?;
    if arguments.no_wait {
        show(arguments, &answer, &left(&answer))?;
        return Ok(ExitCode::SUCCESS);
    }
    let unwritten = |answer: &Value| answer["unwritten_bytes"].as_u64().unwrap_or(0);
    let bar = progress_bar(unwritten(&answer));
    while answer["state"] == "draining" && deadline.is_none_or(|end| Instant::now() < end) {
        thread::sleep(LOOK_EVERY);
        match Call::get("/drain").send(url) {
            Ok(now) => answer = now,
            // The server's writes may delay an answer for a moment.
            Err(error) if deadline.is_some_and(|end| Instant::now() >= end) => return Err(error),
            Err(_) => continue,
        }
        let left = unwritten(&answer);
        bar.set_length(bar.length().unwrap_or(0).max(left));
        bar.set_position(bar.length().unwrap_or(0) - left);
    }
    bar.finish_and_clear();
    let (text, code) = result(&answer, timeout);
    show(arguments, &answer, &text)?;
    Ok(code)
}

fn show(arguments: &Arguments, answer: &Value, text: &str) -> Result<()> {
    match arguments.server.json {
        true => outln!("{}", serde_json::to_string_pretty(answer)?),
        false => outln!("{text}"),
    }
    Ok(())
}

/// Returns the result of the wait as a sentence, and the exit code.
fn result(answer: &Value, timeout: &str) -> (String, ExitCode) {
    let failed = number(&answer["failed_chunks"]);
    match answer["state"].as_str() {
        Some("drained") if failed > 0.0 => (
            format!("drained, but tiers did not take {failed} chunks: see `lmc status`"),
            ExitCode::FAILURE,
        ),
        Some("drained") if answer["tiers"] == 0 => (
            "drained: no more chunks are stored. This server has no tier below memory, so its chunks are \
             lost when it stops"
                .to_owned(),
            ExitCode::SUCCESS,
        ),
        Some("drained") => (
            format!(
                "drained: the tiers have all chunks that they take; {} connections are open, and are \
                 answered until the server stops",
                answer["connections"]
            ),
            ExitCode::SUCCESS,
        ),
        Some("serving") => (
            "the drain was cancelled meanwhile".to_owned(),
            ExitCode::FAILURE,
        ),
        _ => (
            format!("not drained within {timeout}: {}", left(answer)),
            ExitCode::FAILURE,
        ),
    }
}

fn left(answer: &Value) -> String {
    format!(
        "{} are to be written, {} chunks are being stored; `lmc drain` waits again, `lmc drain --cancel` ends the drain",
        bytes(&answer["unwritten_bytes"]),
        answer["storing_chunks"]
    )
}

fn progress_bar(length: u64) -> ProgressBar {
    let style = bars::style(
        "writing {wide_bar} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
    );
    ProgressBar::new(length).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_draws_and_each_end_has_its_sentence() {
        progress_bar(1 << 30).set_position(1 << 20);
        let answer = |state: &str, failed: u64, tiers: u64| {
            json!({
                "state": state, "failed_chunks": failed, "tiers": tiers, "connections": 2,
                "unwritten_bytes": 3 << 20, "storing_chunks": 1,
            })
        };
        for (answer, part, fails) in [
            (answer("drained", 0, 1), "2 connections", false),
            (answer("drained", 0, 0), "no tier", false),
            (answer("drained", 7, 1), "7 chunks", true),
            (answer("serving", 0, 1), "cancelled", true),
            (answer("draining", 0, 1), "within 9s: 3.00 MiB", true),
        ] {
            let (text, code) = result(&answer, "9s");
            assert!(text.contains(part), "{text}");
            assert_eq!(code == ExitCode::FAILURE, fails, "{text}");
        }
    }
}
