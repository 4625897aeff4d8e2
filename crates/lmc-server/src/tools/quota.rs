//! `lmc quota`: how many bytes a tenant may hold.

use std::fmt::Write;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgMatches, Command};
use serde_json::{Value, json};

use super::http::Call;
use crate::config::{GIB, human_bytes, parse_bytes};

/// Note on the lifetime of a quota that is set over HTTP.
const LASTS: &str = "until the server stops; `lmc serve --quota SALT=SIZE` sets it at every start";

pub(super) fn command(url: impl Fn() -> Arg, json: impl Fn() -> Arg) -> Command {
    let salt = || {
        Arg::new("salt")
            .required(true)
            .help("The tenant's cache_salt; _default for none.")
    };
    Command::new("quota")
        .about("Shows and sets how many bytes a tenant (cache_salt) may hold")
        .after_help(format!("A quota that is set here lasts {LASTS}."))
        .subcommand_required(true)
        .subcommands([
            Command::new("list")
                .about("Lists every quota and its use")
                .args([url(), json()]),
            Command::new("get")
                .about("Shows one quota and its use; exit code 1 when none is set")
                .args([salt(), url(), json()]),
            Command::new("set")
                .about("Sets a quota, until the server stops")
                .arg(salt())
                .arg(
                    Arg::new("size")
                        .required(true)
                        .help("Such as 20GiB; a bare number is GiB."),
                )
                .args([url(), json()]),
            Command::new("delete")
                .about("Removes a quota; exit code 1 when none is set")
                .args([salt(), url(), json()]),
        ])
}

pub(super) fn run(matches: &ArgMatches) -> Result<()> {
    let (verb, matches) = matches.subcommand().context("quota needs a verb")?;
    let salt = || matches.get_one::<String>("salt").expect("clap requires it");
    let path = || format!("/quota/{}", salt());
    let call = match verb {
        "list" => Call::get("/quota"),
        "get" => Call::get(&path()),
        "delete" => Call::new("DELETE", &path(), None),
        _ => {
            let size = matches.get_one::<String>("size").expect("clap requires it");
            let bytes = parse_bytes(size, GIB).map_err(|error| anyhow!("{size}: {error}"))?;
            let body = json!({"limit_gb": bytes as f64 / GIB as f64});
            Call::new("PUT", &path(), Some(body))
        }
    };
    let url = matches.get_one::<String>("url").expect("it has a default");
    let answer = call.send(url)?;
    if matches.get_flag("json") {
        println!("{}", serde_json::to_string_pretty(&answer)?);
    }
    let missing = answer["exists"] == false || answer["status"] == "not_found";
    if missing {
        bail!("no quota is set for {}", salt());
    }
    if matches.get_flag("json") {
        return Ok(());
    }
    match verb {
        "list" => print!("{}", table(&answer["users"])),
        "get" => println!("{}: {} of {}", salt(), used(&answer), limit(&answer)),
        "set" => println!("quota of {}: {}, {LASTS}", salt(), limit(&answer)),
        _ => println!("quota of {} removed", salt()),
    }
    Ok(())
}

fn gib(value: &Value) -> String {
    human_bytes((value.as_f64().unwrap_or(0.0) * GIB as f64).round() as u64)
}

fn used(quota: &Value) -> String {
    gib(&quota["current_usage_gb"])
}

fn limit(quota: &Value) -> String {
    gib(&quota["limit_gb"])
}

fn table(users: &Value) -> String {
    let users = users.as_object().filter(|users| !users.is_empty());
    let Some(users) = users else {
        return "no quotas\n".to_owned();
    };
    let mut out = format!("{:<28} {:>12} {:>12}\n", "tenant", "used", "quota");
    for (salt, quota) in users {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{salt:<28} {:>12} {:>12}", used(quota), limit(quota));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_listed_in_units_of_1024() {
        assert_eq!(table(&json!({})), "no quotas\n");
        let quota = json!({"limit_gb": 0.1953125, "current_usage_gb": 0.0});
        let text = table(&json!({"tenant-a": quota}));
        let row: Vec<&str> = text
            .lines()
            .nth(1)
            .expect("a row")
            .split_whitespace()
            .collect();
        assert_eq!(row, ["tenant-a", "0", "B", "200", "MiB"]);
    }
}
