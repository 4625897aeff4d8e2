//! Commands that ask a server or inspect its folder: `lmc status`, `lmc peers`, `lmc advise`, `lmc clear`,
//! `lmc drain`, `lmc quota`, `lmc disk`, `lmc remote`; and `lmc start`, `lmc proxy`, `lmc plan`.

mod advise;
mod clear;
mod disk;
mod drain;
pub(crate) mod format;
pub(crate) mod http;
mod peers;
mod plan;
mod quota;
pub(crate) mod remote;
mod sim;
mod status;
mod top;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use self::http::{Call, DEFAULT_URL, HttpUrl};
use crate::stdout::{out, outln};
use crate::{bars, proxy, start};

const RELOAD_HELP: &str = "\
Flags and variables of the server stay as they were at its start; the files of --config and --quota-file \
are read again. --log-level, --request-log, --quota and --quota-file take effect at once. If a file has \
an error, nothing changes.

SIGHUP does the same, unless the server was started in a terminal.";

#[derive(Debug, Subcommand)]
pub(crate) enum Tool {
    /// Starts a server in the background, unless one runs
    #[command(after_help = start::HELP)]
    Start(start::Arguments),
    /// Lets one engine compute a prompt, and another engine answer it
    #[command(after_help = proxy::HELP)]
    Proxy(proxy::Arguments),
    /// Shows a server's hits, memory, disk, workers and latencies
    #[command(
        after_help = "The exit code is 1 if no server answers, or if the server does not answer engines."
    )]
    Status(Server),
    /// Shows a server's state in a terminal, and draws it again every two seconds
    #[command(after_help = top::HELP)]
    Top(Address),
    /// Shows a server's peers: connections, chunks, bytes read, and failures with their reasons
    #[command(after_help = peers::HELP)]
    Peers(peers::Arguments),
    /// Estimates the share of chunks that a larger or smaller cache would have found
    #[command(after_help = advise::HELP)]
    Advise(Server),
    /// Empties the cache of a server, in memory and on disk
    #[command(after_help = clear::HELP)]
    Clear {
        #[command(flatten)]
        server: Server,
        /// Also clear chunks that engines are reading or writing now.
        #[arg(long)]
        force: bool,
        /// Also delete the chunks in the server's shared stores (--remote), and wait until they are deleted.
        /// Without this flag they stay there as misses, until they are replaced or removed by age or size.
        #[arg(long)]
        shared: bool,
    },
    /// Takes a server out of service: it stores no more chunks, and writes to its tiers the chunks that they lack
    #[command(after_help = drain::HELP)]
    Drain(drain::Arguments),
    /// Computes the size of a model's KV cache, and how many prompts a cache of a given size holds
    #[command(after_help = plan::HELP)]
    Plan(plan::Arguments),
    /// Computes the share of a trace's prompts that each eviction policy would have found, by cache size
    #[command(after_help = sim::help())]
    Sim(sim::Arguments),
    /// Makes a server read its settings again, and lists changed settings that need a restart
    #[command(after_help = RELOAD_HELP)]
    Reload(Server),
    /// Inspects the folder of a disk tier, while no server uses it
    #[command(subcommand)]
    Disk(disk::Verb),
    /// Checks a shared store, shows what it holds, and removes chunks that are not needed
    #[command(subcommand, after_help = remote::HELP)]
    Remote(remote::Verb),
    /// Shows and sets the bytes that a tenant (cache_salt) may hold
    #[command(subcommand, after_help = format!("A quota that is set here lasts {}.", quota::LASTS))]
    Quota(quota::Verb),
}

// A doc comment here would become the text of each command.
#[derive(Debug, Args)]
pub(crate) struct Address {
    /// The server's HTTP address (--http-host, --http-port). The variable LMC_HTTP_TOKEN_FILE names the
    /// file with its token; LMC_CA_FILE names a file with certificates to trust for https in place of the
    /// system's.
    #[arg(
        long,
        value_name = "URL",
        env = "LMC_URL",
        hide_env_values = true,
        default_value = DEFAULT_URL
    )]
    url: HttpUrl,
}

// A doc comment here would become the text of each command.
#[derive(Debug, Args)]
pub(crate) struct Server {
    #[command(flatten)]
    address: Address,
    /// Print the server's answer as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(tool: &Tool) -> Result<ExitCode> {
    let (server, call) = match tool {
        Tool::Status(server) => (server, Call::get("/status")),
        Tool::Peers(arguments) => match &arguments.verb {
            Some(peers::Verb::Copy(order)) => return done(peers::copy(order)),
            None => (&arguments.server, Call::get("/peers")),
        },
        Tool::Advise(server) => (server, Call::get("/advise")),
        Tool::Clear {
            server,
            force,
            shared,
        } => {
            let body = match shared {
                false => json!({"tier": "all", "force": force}),
                true => return clear::shared(server, *force),
            };
            (server, Call::new("POST", "/cache/clear", Some(body)))
        }
        Tool::Reload(server) => (server, Call::new("POST", "/reload", Some(json!({})))),
        Tool::Drain(arguments) => return drain::run(arguments),
        Tool::Top(address) => return done(top::run(&address.url)),
        Tool::Start(arguments) => return start::run(arguments),
        Tool::Proxy(arguments) => return proxy::run(arguments),
        Tool::Plan(arguments) => return done(plan::run(arguments)),
        Tool::Sim(arguments) => return done(sim::run(arguments)),
        Tool::Disk(verb) => return done(disk::run(verb)),
        Tool::Remote(verb) => return done(remote::run(verb)),
        Tool::Quota(verb) => return done(quota::run(verb)),
    };
    let answer = call.send(&server.address.url)?;
    match tool {
        _ if server.json => outln!("{}", serde_json::to_string_pretty(&answer)?),
        Tool::Status(_) => out!("{}", status::table(&server.address.url, &answer)),
        Tool::Peers(_) => out!("{}", peers::table(&answer)),
        Tool::Advise(_) => out!("{}", advise::table(&answer)),
        Tool::Reload(_) => out!("{}", reloaded(&answer)),
        _ => outln!("{}", clear::cleared(&answer["cleared"])),
    }
    match tool {
        Tool::Status(_) if answer["status"] == "stuck" => Ok(ExitCode::FAILURE),
        _ => Ok(clear::exit_code(&answer["cleared"])),
    }
}

/// Formats the result of reading the settings again.
fn reloaded(answer: &Value) -> String {
    let names = |field: &str| {
        let names = answer[field].as_array().into_iter().flatten();
        names
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut text = match names("changed") {
        none if none.is_empty() => "nothing changed\n".to_owned(),
        changed => format!("changed: {changed}\n"),
    };
    match names("restart") {
        none if none.is_empty() => {}
        restart => text += &format!("a restart is needed for: {restart}\n"),
    }
    text
}

fn done(outcome: Result<()>) -> Result<ExitCode> {
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Returns a bar that counts chunks.
fn progress_bar(length: u64, what: &'static str) -> ProgressBar {
    let style = bars::style("{msg} {wide_bar} {pos}/{len} chunks, {per_sec}, {eta} left");
    ProgressBar::new(length)
        .with_style(style)
        .with_message(what)
}
