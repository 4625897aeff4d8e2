//! `lmc quota`: the bytes that a tenant may hold.

use std::fmt::Write;

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::Server;
use super::http::Call;
use crate::config::{GIB, human_bytes, parse_bytes};
use crate::stdout::{out, outln};

/// Note on the lifetime of a quota that is set over HTTP.
pub(super) const LASTS: &str =
    "over restarts, until --quota or --quota-file changes the quota of the salt";
/// Note on the lifetime of such a quota at a server without a state folder.
const LASTS_NOT: &str = "only until the server stops: it has no state folder (--state-dir)";

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Lists every quota and its use
    List(Server),
    /// Shows one quota and its use; the exit code is 1 if none is set
    Get(Tenant),
    /// Sets a quota
    Set {
        #[command(flatten)]
        tenant: Tenant,
        /// The quota, such as 20GiB; a bare number is GiB.
        size: String,
    },
    /// Removes a quota; the exit code is 1 if none is set
    Delete(Tenant),
}

// A doc comment here would become the text of each command.
#[derive(Debug, Args)]
pub(crate) struct Tenant {
    /// The tenant's cache_salt; _default means no salt.
    salt: String,
    #[command(flatten)]
    server: Server,
}

pub(super) fn run(verb: &Verb) -> Result<()> {
    let path = |tenant: &Tenant| format!("/quota/{}", tenant.salt);
    let (server, salt, call) = match verb {
        Verb::List(server) => (server, "", Call::get("/quota")),
        Verb::Get(tenant) => (&tenant.server, &*tenant.salt, Call::get(&path(tenant))),
        Verb::Delete(tenant) => {
            let call = Call::new("DELETE", &path(tenant), None);
            (&tenant.server, &*tenant.salt, call)
        }
        Verb::Set { tenant, size } => {
            let bytes = parse_bytes(size, GIB).map_err(|error| anyhow!("{size}: {error}"))?;
            let body = json!({"limit_gb": bytes as f64 / GIB as f64});
            let call = Call::new("PUT", &path(tenant), Some(body));
            (&tenant.server, &*tenant.salt, call)
        }
    };
    let answer = call.send(&server.address.url)?;
    if server.json {
        outln!("{}", serde_json::to_string_pretty(&answer)?);
    }
    if answer["exists"] == false || answer["status"] == "not_found" {
        bail!("no quota is set for {salt}");
    }
    if server.json {
        return Ok(());
    }
    match verb {
        Verb::List(_) => out!("{}", table(&answer["users"])),
        Verb::Get(_) => outln!("{salt}: {} of {}", used(&answer), limit(&answer)),
        Verb::Set { .. } => {
            let lasts = if answer["kept"] == true {
                LASTS
            } else {
                LASTS_NOT
            };
            outln!("quota of {salt}: {}; it lasts {lasts}", limit(&answer));
        }
        Verb::Delete(_) => outln!("quota of {salt} removed"),
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
