//! Commands that talk to a server or look into its folder: `lmc status`, `lmc clear`, `lmc quota`,
//! `lmc disk`.

mod disk;
pub(crate) mod http;
mod quota;
mod status;

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::{Value, json};

use self::http::{Call, DEFAULT_URL};

pub(crate) fn commands() -> Vec<Command> {
    let url = || {
        Arg::new("url")
            .long("url")
            .value_name("URL")
            .env("LMC_URL")
            .default_value(DEFAULT_URL)
            .help("The server's HTTP address (--http-host, --http-port).")
    };
    let json = || {
        Arg::new("json")
            .long("json")
            .action(ArgAction::SetTrue)
            .help("Print JSON, as the server answers.")
    };
    vec![
        Command::new("status")
            .about("Shows a server's hits, memory, disk, workers and latencies")
            .args([url(), json()]),
        Command::new("clear")
            .about("Empties the cache of a server, in memory and on disk")
            .args([url(), json()])
            .arg(
                Arg::new("force")
                    .long("force")
                    .action(ArgAction::SetTrue)
                    .help("Also clear chunks that engines are reading or writing at this moment."),
            ),
        disk::command(),
        quota::command(url, json),
    ]
}

pub(crate) fn run(name: &str, matches: &ArgMatches) -> Result<()> {
    let (call, matches) = match name {
        "status" => (Call::get("/status"), matches),
        "disk" => return disk::run(matches),
        "clear" => {
            let body = json!({"tier": "all", "force": matches.get_flag("force")});
            (Call::new("POST", "/cache/clear", Some(body)), matches)
        }
        "quota" => return quota::run(matches),
        other => bail!("unknown command {other}"),
    };
    let url = matches.get_one::<String>("url").expect("it has a default");
    let answer = call.send(url)?;
    if matches.get_flag("json") {
        println!("{}", serde_json::to_string_pretty(&answer)?);
    } else if name == "status" {
        print!("{}", status::table(url, &answer));
    } else {
        println!("{}", cleared(&answer["cleared"]));
    }
    Ok(())
}

/// Formats the result of `lmc clear` as a sentence.
fn cleared(answer: &Value) -> String {
    let count = |name: &str| answer[name].as_u64().unwrap_or(0);
    let memory = format!("cleared {} chunks in memory", count("chunks"));
    match answer["tier"].as_str() {
        Some("all") => format!("{memory} and {} in the tiers below", count("chunks_below")),
        _ => memory,
    }
}
