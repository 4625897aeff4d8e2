//! `lmc bench`: a load generator that speaks the protocol as engines do, so it races any server
//! that speaks it.

mod args;
mod drive;
mod engine;
mod footprint;
mod mapped;
pub(crate) mod prompt;
pub(crate) mod replay;
mod report;
mod stats;
mod tiers;
mod wire;

use std::fs;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use indicatif::ProgressBar;

use self::args::BenchArgs;
use self::drive::{Case, Counts};
use self::engine::Plan;
use self::footprint::Footprint;
use self::report::{Row, Snapshots};
use crate::bars;
use crate::occupant;
use crate::process;
use crate::text::error_text;

const LONG_ABOUT: &str = "\
Sends lookups, stores and retrieves to a server, as vLLM's LMCacheMPConnector does. It works with any
server of that protocol, also with LMCache's own.

Every byte that is read is compared with the byte that was stored; the time for this is not measured.
The exit code is 1 if a byte is wrong or a request fails.

A server that holds chunks or serves engines is refused unless --force is given: the load slows these
engines and may evict these chunks. The chunks of each run have their own model name. A server that was
empty is cleared after the run, with its disk tier.";

const EXAMPLES: &str = "\
Examples:
  lmc bench                                                        a mixed load, one client
  lmc bench --workload noop,lookup --tokens 2048,131072 --clients 1,32
  lmc bench --workload store,retrieve --layers 32 --hidden 1024 --mode lmcache_driven
  lmc bench --workload mixed --mix lookup=0.5,store=0.2,retrieve=0.3 --tp 2 --json";

pub(crate) fn command() -> Command {
    // The texts come last: the arguments would bring the doc comment of their type along.
    BenchArgs::augment_args(Command::new("bench"))
        .about("Puts load on a server, measures it, and checks every byte that it returns")
        .long_about(LONG_ABOUT)
        .after_help(EXAMPLES)
}

/// Runs the command. The exit code is 0 on success, 1 if a byte was wrong or a request failed, 2 for wrong
/// flags.
pub(crate) fn run(matches: &ArgMatches) -> ExitCode {
    let args = BenchArgs::from_arg_matches(matches).map_err(|error| error.to_string());
    let args = args.and_then(|args| args.check().map(|()| args));
    let args = match args {
        Ok(args) => args,
        Err(error) => {
            eprintln!("lmc bench: {error}");
            return ExitCode::from(2);
        }
    };
    match measure(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("lmc bench: {}", error_text(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs every combination and prints the results. Returns true if all runs succeeded.
fn measure(args: BenchArgs) -> Result<bool> {
    let model = args.model.clone().unwrap_or_else(|| own_model("bench"));
    let longest = args.tokens.iter().max().copied().unwrap_or(0);
    let plan = Arc::new(Plan::new(args.engine.clone(), model, longest)?);
    let footprint = Footprint::before(&plan.args)?;
    let port = plan.args.url.port;
    let mut stored = 0;
    let server = args
        .server_pid
        .or_else(|| Some(occupant::of_port(port)?.pid()));
    let mut rows: Vec<Row> = Vec::new();
    let mut errors = Vec::new();
    for case in cases(&args) {
        let measured = one(&plan, case, server);
        let (more, counts) = measured.inspect_err(|_| footprint.clear(port, stored))?;
        stored += counts.stored_bytes;
        let failed = counts.errors;
        if more.is_empty() && failed.is_empty() {
            errors.push(format!(
                "{} with {} tokens and {} client(s): no operation was completed",
                case.workload, case.tokens, case.clients
            ));
        }
        rows.extend(more);
        errors.extend(failed);
    }
    footprint.clear(port, stored);
    let wrong = rows.iter().any(|row| row.run.wrong_bytes > 0);
    let passed = errors.is_empty() && !wrong;
    if let Some(path) = &args.csv {
        fs::write(path, report::csv(&rows))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let text = if args.json {
        let value = report::json(&args, plan.chunk_tokens, &rows, &errors, passed);
        serde_json::to_string_pretty(&value)? + "\n"
    } else {
        report::table(&args, plan.chunk_tokens, &rows)
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    for error in errors.iter().take(10) {
        eprintln!("lmc bench: {error}");
    }
    if wrong {
        eprintln!("lmc bench: the server returned wrong bytes");
    }
    Ok(passed)
}

/// Returns a model name that no earlier run used.
fn own_model(command: &str) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default().as_millis();
    format!("lmc-{command}-{}-{since}", std::process::id())
}

fn cases(args: &BenchArgs) -> Vec<Case<'_>> {
    let mut cases = Vec::new();
    for &workload in &args.workload {
        for (index, &tokens) in args.tokens.iter().enumerate() {
            if workload == args::Workload::Noop && index > 0 {
                continue;
            }
            for &clients in &args.clients {
                cases.push(Case {
                    args,
                    workload,
                    tokens,
                    clients,
                    number: cases.len() as u64,
                });
            }
        }
    }
    cases
}

/// Runs one combination. Returns its rows and its counts.
fn one(plan: &Arc<Plan>, case: Case<'_>, server: Option<u32>) -> Result<(Vec<Row>, Counts)> {
    let usage = || server.and_then(process::usage);
    let own = || process::usage(std::process::id());
    let mut shots = Snapshots {
        server_before: usage(),
        ..Snapshots::default()
    };
    let mut moment = 0;
    let bar = progress(case);
    let outcome = drive::run(
        plan,
        case,
        || {
            shots.server[moment] = usage();
            shots.own[moment] = own();
            moment = 1;
            bar.reset_elapsed();
        },
        |clock| {
            bar.set_position(match case.args.count {
                Some(_) => clock.completed(),
                None => bar.elapsed().as_millis() as u64,
            });
            bar.set_message(format!("{} done", clock.completed()));
        },
    );
    bar.finish_and_clear();
    let (tally, took) = outcome?;
    shots.server_after = usage();
    let counts = tally.counts.clone();
    let rows = report::rows(case, tally, took.as_secs_f64(), &shots);
    Ok((rows, counts))
}

/// Returns a bar, which is shown only on a terminal.
fn progress(case: Case<'_>) -> ProgressBar {
    let length = match case.args.count {
        Some(count) => count * case.clients as u64,
        None => (case.args.duration * 1000.0) as u64,
    };
    let style = bars::style("{prefix:<32} [{bar:30}] {msg}").progress_chars("=> ");
    let bar = ProgressBar::new(length).with_style(style);
    bar.set_prefix(format!(
        "{} {} tokens, {} client(s)",
        case.workload, case.tokens, case.clients
    ));
    bar.set_message("preparing");
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
