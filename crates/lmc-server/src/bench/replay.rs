//! `lmc replay`: plays the requests of a trace against a server, as engines would send them.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{ArgMatches, Args, Command, FromArgMatches as _};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::args::EngineArgs;
use super::engine::{Engine, Plan, Served};
use super::footprint::Footprint;
use super::own_model;
use super::prompt::{Prompt, Random, mix};
use super::stats::{Samples, Summary};
use super::tiers::{TierShares, TierTokens};
use crate::bars;
use crate::config::human_bytes;
use crate::stdout::{out, outln};
use crate::tools::format::duration;
use crate::trace::{self, TimeUnit, Trace, TraceRequest};

pub(crate) fn command() -> Command {
    // The texts come last: the arguments would bring the doc comment of their type along.
    Arguments::augment_args(Command::new("replay"))
        .about("Plays a trace of requests against a server, with real bytes, and reports hits and latencies")
        .after_help(help())
}

fn help() -> String {
    format!(
        "Examples:\n  \
         lmc replay conversation_trace.jsonl                       as fast as the server answers\n  \
         lmc replay conversation_trace.jsonl --speed 1             at the times of the trace\n  \
         lmc replay conversation_trace.jsonl --layers 36 --hidden 1024 --clients 16\n\n\
         Each request is looked up, the chunks found are retrieved, and the others are stored, with real\n\
         bytes, each of which is checked. Nothing is computed. The line `by tier` is the server's own count, so\n\
         it includes other engines. Unless --force is given, the server must be empty, and is cleared afterwards. `lmc sim` computes in seconds what other sizes and policies would\n\
         find. The exit code is 1 if a byte is wrong or a request fails.\n\n{}",
        trace::FORMAT
    )
}

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
struct Arguments {
    /// The trace file.
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    #[command(flatten)]
    engine: EngineArgs,
    /// Speed of the trace's clock: 1 plays at the times of the trace, 10 ten times as fast. By default each
    /// client starts its next request at once.
    #[arg(long, value_name = "FACTOR")]
    speed: Option<f64>,
    /// Requests that are under way at the same time.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,
    /// Number of requests to play, from the start of the trace; by default all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Tokens of a block of the trace; by default derived from its prompts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    block_tokens: Option<u64>,
    /// Unit of the times of the trace.
    #[arg(long, value_name = "UNIT", value_enum, default_value_t = TimeUnit::Ms)]
    time_unit: TimeUnit,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Measurements of the requests of one client, or of all clients.
#[derive(Debug, Default)]
struct Tally {
    counts: Counts,
    lookup: Samples,
    retrieve: Samples,
    store: Samples,
    errors: Vec<String>,
}

#[derive(Debug, Default)]
struct Counts {
    requests: u64,
    tokens: u64,
    chunks: u64,
    found: u64,
    retrieved_bytes: u64,
    stored_bytes: u64,
    wrong_bytes: u64,
    /// Retrieves whose chunks were found and then gone.
    lost: u64,
    /// Longest delay of a request after its time in the trace.
    late: Duration,
}

impl Tally {
    fn add(&mut self, prompt: &Prompt, served: &Served) {
        let counts = &mut self.counts;
        counts.requests += 1;
        counts.tokens += prompt.tokens.len() as u64;
        counts.chunks += prompt.chunks() as u64;
        counts.found += served.found;
        if prompt.chunks() > 0 {
            self.lookup.push(served.lookup);
        }
        if let Some(moved) = &served.retrieved {
            self.retrieve.push(moved.took);
            counts.retrieved_bytes += moved.bytes;
            counts.wrong_bytes += moved.wrong;
        }
        counts.lost += u64::from(served.retrieved.is_none() && served.found > 0);
        if served.stored.chunks > 0 {
            self.store.push(served.stored.took);
            counts.stored_bytes += served.stored.bytes;
        }
    }

    fn merge(&mut self, other: Self) {
        let (mine, its) = (&mut self.counts, other.counts);
        mine.requests += its.requests;
        mine.tokens += its.tokens;
        mine.chunks += its.chunks;
        mine.found += its.found;
        mine.retrieved_bytes += its.retrieved_bytes;
        mine.stored_bytes += its.stored_bytes;
        mine.wrong_bytes += its.wrong_bytes;
        mine.lost += its.lost;
        mine.late = mine.late.max(its.late);
        self.lookup.append(other.lookup);
        self.retrieve.append(other.retrieve);
        self.store.append(other.store);
        self.errors.extend(other.errors);
    }
}

/// Plays a trace; the exit code is 1 if a byte was wrong or a request failed.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let arguments = &Arguments::from_arg_matches(matches)?;
    ensure!(
        arguments
            .speed
            .is_none_or(|speed| speed.is_finite() && speed > 0.0),
        "--speed: expected a number above 0"
    );
    let block_tokens = arguments.block_tokens.map(|tokens| tokens as usize);
    let mut trace = Trace::read(&arguments.trace, block_tokens, arguments.time_unit)?;
    if let Some(requests) = arguments.requests {
        trace
            .requests
            .truncate(usize::try_from(requests).unwrap_or(usize::MAX));
    }
    let longest = trace.requests.iter().map(|request| request.tokens).max();
    let plan = Plan::new(
        arguments.engine.clone(),
        own_model("replay"),
        longest.unwrap_or(1),
    )?;
    let plan = Arc::new(plan);
    let footprint = Footprint::before(&plan.args)?;
    let before = TierTokens::of(footprint.url());
    let began = Instant::now();
    let played = play(&plan, arguments, &trace);
    let took = began.elapsed();
    let after = TierTokens::of(footprint.url());
    let tiers = before.and_then(|before| after?.shares_since(&before));
    let stored = played.as_ref().map_or(0, |tally| tally.counts.stored_bytes);
    footprint.clear(plan.args.url.port, stored);
    let tally = played?;
    let is_well = tally.errors.is_empty() && tally.counts.wrong_bytes == 0;
    for error in tally.errors.iter().take(10) {
        eprintln!("lmc replay: {error}");
    }
    if tally.counts.wrong_bytes > 0 {
        eprintln!("lmc replay: the server returned wrong bytes");
    }
    let report = Report::of(&plan, tally, took, tiers);
    match arguments.json {
        true => outln!("{}", serde_json::to_string_pretty(&report.json(is_well))?),
        false => out!("{}", report.text(arguments)),
    }
    Ok(match is_well {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn play(plan: &Arc<Plan>, arguments: &Arguments, trace: &Trace) -> Result<Tally> {
    let engines = (0..arguments.clients).map(|_| Engine::start(plan));
    let engines = engines.collect::<Result<Vec<_>>>()?;
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let bar = bar(trace.requests.len());
    let began = Instant::now();
    let total = thread::scope(|scope| {
        let client = |engine: Engine| {
            let (next, failed, bar) = (&next, &failed, &bar);
            let work = move || {
                let mut engine = engine;
                let mut tally = Tally::default();
                while let Some(request) = trace.requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if failed.load(Ordering::Relaxed) {
                        break;
                    }
                    if let Some(speed) = arguments.speed {
                        let due = Duration::try_from_secs_f64(request.at.as_secs_f64() / speed);
                        let due = due.ok().and_then(|due| began.checked_add(due));
                        let Some(due) = due else {
                            failed.store(true, Ordering::Relaxed);
                            tally
                                .errors
                                .push("--speed: a time of the trace is too far in the future; use a larger factor".to_owned());
                            break;
                        };
                        thread::sleep(due.saturating_duration_since(Instant::now()));
                        tally.counts.late = tally.counts.late.max(due.elapsed());
                    }
                    let prompt = prompt(request, trace.block_tokens, plan.chunk_tokens);
                    match engine.serve(&prompt) {
                        Ok(served) => tally.add(&prompt, &served),
                        Err(error) => {
                            failed.store(true, Ordering::Relaxed);
                            tally.errors.push(format!("{error:#}"));
                        }
                    }
                    bar.inc(1);
                }
                if let Err(error) = engine.stop() {
                    tally
                        .errors
                        .push(format!("unregistering failed: {error:#}"));
                }
                tally
            };
            let thread = thread::Builder::new().name("replay-client".to_owned());
            thread.spawn_scoped(scope, work)
        };
        let clients: Vec<_> = engines.into_iter().map(client).collect();
        let mut total = Tally::default();
        for client in clients {
            let client = client.inspect_err(|_| failed.store(true, Ordering::Relaxed));
            let client = client.context("cannot start a thread for each client")?;
            total.merge(client.join().expect("it does not panic"));
        }
        Ok(total)
    });
    bar.finish_and_clear();
    total
}

/// Returns the prompt of a request; the tokens of each block are derived from its id.
fn prompt(request: &TraceRequest, block_tokens: usize, chunk_tokens: usize) -> Prompt {
    let blocks = request.blocks.iter();
    let tokens = blocks.flat_map(|&id| {
        let mut random = Random::new(mix(id.wrapping_add(1)));
        (0..block_tokens).map(move |_| random.token())
    });
    Prompt::of(tokens.take(request.tokens).collect(), chunk_tokens)
}

fn bar(requests: usize) -> ProgressBar {
    let style = bars::style("{wide_bar} {pos} of {len} requests, {per_sec}, {eta} left");
    ProgressBar::new(requests as u64).with_style(style)
}

#[derive(Debug)]
struct Report {
    took: f64,
    chunk_tokens: u64,
    counts: Counts,
    /// Shares found in each tier; `None` if the server does not tell.
    tiers: Option<TierShares>,
    lookup: Summary,
    retrieve: Summary,
    store: Summary,
}

impl Report {
    fn of(plan: &Plan, tally: Tally, took: Duration, tiers: Option<TierShares>) -> Self {
        Self {
            took: took.as_secs_f64(),
            chunk_tokens: plan.chunk_tokens as u64,
            counts: tally.counts,
            tiers,
            lookup: tally.lookup.summary(),
            retrieve: tally.retrieve.summary(),
            store: tally.store.summary(),
        }
    }

    /// Returns the share of the prompts' whole chunks that was found.
    fn found(&self) -> f64 {
        match self.counts.chunks {
            0 => 0.0,
            chunks => self.counts.found as f64 / chunks as f64,
        }
    }

    fn text(&self, arguments: &Arguments) -> String {
        let Self { counts, took, .. } = self;
        let late = counts.late.as_secs_f64();
        let mut out = String::new();
        let mut line = |name: &str, text: String| {
            let _ = writeln!(out, "{name:<12} {text}");
        };
        line(
            "played",
            format!(
                "{} requests with {} tokens in {}, {} at the same time",
                counts.requests,
                counts.tokens,
                duration(*took),
                arguments.clients
            ),
        );
        line(
            "found",
            format!(
                "{:.1} % of the prompts' chunks of {} tokens",
                100.0 * self.found(),
                self.chunk_tokens
            ),
        );
        if let Some(tiers) = &self.tiers {
            line("by tier", tiers.text());
        }
        for (name, times, bytes) in [
            ("lookup", &self.lookup, None),
            ("retrieve", &self.retrieve, Some(counts.retrieved_bytes)),
            ("store", &self.store, Some(counts.stored_bytes)),
        ] {
            let moved = bytes.map_or_else(String::new, |bytes| {
                let rate = bytes as f64 / times.sum.max(f64::MIN_POSITIVE) / 1e9;
                format!(", {} at {rate:.2} GB/s each", human_bytes(bytes))
            });
            line(
                name,
                format!(
                    "{} times, p50 {}, p99 {}{moved}",
                    times.count,
                    duration(times.p50),
                    duration(times.p99)
                ),
            );
        }
        if counts.lost > 0 {
            line(
                "lost",
                format!(
                    "{} retrieves: chunks were gone after they had been found",
                    counts.lost
                ),
            );
        }
        if arguments.speed.is_some() && late > 0.01 {
            line(
                "late",
                format!("requests began up to {} after their time", duration(late)),
            );
        }
        line("wrong", format!("{} bytes", counts.wrong_bytes));
        out
    }

    fn json(&self, is_well: bool) -> Value {
        let Self { counts, .. } = self;
        let times = |times: &Summary| json!({"count": times.count, "p50": times.p50, "p90": times.p90, "p99": times.p99, "max": times.max});
        json!({
            "passed": is_well,
            "seconds": self.took,
            "chunk_tokens": self.chunk_tokens,
            "requests": counts.requests,
            "tokens": counts.tokens,
            "chunks": counts.chunks,
            "found_chunks": counts.found,
            "found": self.found(),
            "found_by_tier": self.tiers.as_ref().map(TierShares::json),
            "retrieved_bytes": counts.retrieved_bytes,
            "stored_bytes": counts.stored_bytes,
            "wrong_bytes": counts.wrong_bytes,
            "retrieves_lost": counts.lost,
            "late_seconds": counts.late.as_secs_f64(),
            "lookup_seconds": times(&self.lookup),
            "retrieve_seconds": times(&self.retrieve),
            "store_seconds": times(&self.store),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_with_equal_ids_have_equal_tokens() {
        let of = |blocks: &[u64], tokens| {
            let request = TraceRequest {
                at: Duration::ZERO,
                tokens,
                blocks: blocks.to_vec(),
            };
            prompt(&request, 64, 16)
        };
        let (one, two) = (of(&[1, 2, 3], 150), of(&[1, 2, 4], 192));
        assert_eq!((one.tokens.len(), two.tokens.len()), (150, 192));
        assert_eq!(one.tokens[..128], two.tokens[..128]);
        assert_ne!(one.tokens[128..150], two.tokens[128..150]);
        assert_eq!(one.chunks(), 9);
        assert_eq!(one.seeds[..8], two.seeds[..8]);
        assert_ne!(one.seeds[8], two.seeds[8]);
    }
}
