//! Commands beside a server: `lmc status`, `lmc clear`, `lmc quota`, `lmc disk`.

mod disk;
mod status;

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::{Value, json};

const DEFAULT_URL: &str = "http://127.0.0.1:8080";
const DEADLINE: Duration = Duration::from_secs(10);

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
    let salt = || {
        Arg::new("salt")
            .required(true)
            .help("The tenant's cache_salt; _default for none.")
    };
    vec![
        Command::new("status")
            .about("Shows what a server holds, for whom, and how fast it answers")
            .args([url(), json()]),
        Command::new("clear")
            .about("Empties the cache of a server, in memory and on disk")
            .args([url(), json()])
            .arg(
                Arg::new("force")
                    .long("force")
                    .action(ArgAction::SetTrue)
                    .help("Also forget what engines hold at this moment."),
            ),
        disk::command(),
        Command::new("quota")
            .about("Shows and sets how many bytes a tenant (cache_salt) may hold")
            .subcommand_required(true)
            .subcommands([
                Command::new("list")
                    .about("All quotas")
                    .args([url(), json()]),
                Command::new("get")
                    .about("One quota and its use")
                    .args([salt(), url(), json()]),
                Command::new("set")
                    .about("Sets a quota")
                    .arg(salt())
                    .arg(
                        Arg::new("size")
                            .required(true)
                            .help("Such as 20GiB; a bare number is GiB."),
                    )
                    .args([url(), json()]),
                Command::new("delete")
                    .about("Removes a quota")
                    .args([salt(), url(), json()]),
            ]),
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
        "quota" => {
            let (verb, matches) = matches.subcommand().context("quota needs a verb")?;
            let salt = || matches.get_one::<String>("salt").expect("clap requires it");
            let call = match verb {
                "list" => Call::get("/quota"),
                "get" => Call::get(&format!("/quota/{}", salt())),
                "delete" => Call::new("DELETE", &format!("/quota/{}", salt()), None),
                _ => {
                    let size = matches.get_one::<String>("size").expect("clap requires it");
                    let bytes = crate::config::parse_bytes(size, crate::config::GIB)
                        .map_err(|error| anyhow!("{size}: {error}"))?;
                    let limit = bytes as f64 / crate::config::GIB as f64;
                    let body = json!({"limit_gb": limit});
                    Call::new("PUT", &format!("/quota/{}", salt()), Some(body))
                }
            };
            (call, matches)
        }
        other => bail!("unknown command {other}"),
    };
    let url = matches.get_one::<String>("url").expect("it has a default");
    let answer = call.send(url)?;
    if matches.get_flag("json") {
        println!("{}", serde_json::to_string_pretty(&answer)?);
    } else if name == "status" {
        print!("{}", status::table(url, &answer));
    } else {
        print!("{}", plain(&answer, ""));
    }
    Ok(())
}

/// One line for each value, nested names joined by dots.
fn plain(value: &Value, name: &str) -> String {
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| {
                let dot = if name.is_empty() { "" } else { "." };
                plain(value, &format!("{name}{dot}{key}"))
            })
            .collect(),
        Value::String(text) => format!("{name}: {text}\n"),
        other => format!("{name}: {other}\n"),
    }
}

/// One request to the server.
struct Call {
    method: &'static str,
    path: String,
    body: Option<Value>,
}

impl Call {
    fn new(method: &'static str, path: &str, body: Option<Value>) -> Self {
        Self {
            method,
            path: path.to_owned(),
            body,
        }
    }

    fn get(path: &str) -> Self {
        Self::new("GET", path, None)
    }

    fn send(&self, url: &str) -> Result<Value> {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(DEADLINE))
            .http_status_as_error(false)
            .build()
            .into();
        let target = format!("{}{}", url.trim_end_matches('/'), self.path);
        let sent = match (self.method, &self.body) {
            ("DELETE", _) => agent.delete(&target).call(),
            ("PUT", Some(body)) => agent.put(&target).send_json(body),
            ("POST", Some(body)) => agent.post(&target).send_json(body),
            _ => agent.get(&target).call(),
        };
        let mut answer = sent.with_context(|| {
            format!(
                "no server answers at {url}: is `lmc serve` running, and is --url its HTTP address?"
            )
        })?;
        let body: Value = answer
            .body_mut()
            .read_json()
            .context("the answer is no JSON")?;
        if !answer.status().is_success() {
            let text = body["error"].as_str().unwrap_or("no reason given");
            bail!("the server refused: {text}");
        }
        Ok(body)
    }
}
