//! `lmc clear`, and its deletion in shared stores.

use std::fmt::Write;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::Server;
use super::format::text;
use super::http::Call;
use crate::stdout::{out, outln};

/// Text after the help of the command.
pub(super) const HELP: &str = "\
No chunk that was computed before is served again: not by this server, not by its peers, and not by any
server that shares its stores, also after restarts. Reset the engine's own prefix cache first.

Exit code 4: the server has cleared, but the clear would not last over a restart, or a peer or store has
not confirmed it; the output names which.

Examples:
  lmc clear             the chunks of this server are removed; chunks in shared stores become misses
  lmc clear --shared    the server also deletes the chunks in shared stores";

/// Exit code of a clear that was carried out, but is not durable or not confirmed by all.
const INCOMPLETE: u8 = 4;

/// Time between two checks of a deletion's progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Clears, and waits for the end of the deletion in the shared stores. Fails if the server ends meanwhile.
pub(super) fn shared(server: &Server, force: bool) -> Result<ExitCode> {
    let body = json!({"tier": "all", "force": force, "shared": true});
    let mut answer = Call::new("POST", "/cache/clear", Some(body)).send(&server.address.url)?;
    let bar = ProgressBar::new_spinner().with_message("deleting in the shared stores");
    while stores(&answer).any(|store| store["state"] == "deleting") {
        thread::sleep(LOOK_EVERY);
        answer["stores"] =
            Call::get("/cache/clear/shared").send(&server.address.url)?["stores"].take();
        bar.set_position(
            stores(&answer)
                .filter_map(|store| store["seen"].as_u64())
                .sum(),
        );
    }
    bar.finish_and_clear();
    match server.json {
        true => outln!("{}", serde_json::to_string_pretty(&answer)?),
        false => out!("{}\n{}", cleared(&answer["cleared"]), deleted(&answer)),
    }
    match stores(&answer)
        .filter(|store| store["state"] != "done")
        .count()
    {
        0 => Ok(exit_code(&answer["cleared"])),
        _ => bail!(
            "some chunks were not deleted: repeat `lmc clear --shared`, or use `lmc remote rm`"
        ),
    }
}

fn stores(answer: &Value) -> impl Iterator<Item = &Value> {
    answer["stores"].as_array().into_iter().flatten()
}

/// Formats the result in each store as a sentence.
fn deleted(answer: &Value) -> String {
    let mut out = String::new();
    for store in stores(answer) {
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "deleted {} of {} chunks in {}",
            store["deleted"],
            store["seen"],
            text(&store["store"])
        );
        if store["state"] != "done" {
            let _ = write!(out, ", and then failed: {}", text(&store["reason"]));
        }
        out.push('\n');
    }
    out
}

/// Returns the exit code of a clear.
pub(super) fn exit_code(cleared: &Value) -> ExitCode {
    match cleared["complete"].as_bool() {
        Some(false) => ExitCode::from(INCOMPLETE),
        _ => ExitCode::SUCCESS,
    }
}

/// Formats the result of `lmc clear` in sentences.
pub(super) fn cleared(answer: &Value) -> String {
    let count = |name: &str| answer[name].as_u64().unwrap_or(0);
    let names = |name: &str| -> Vec<String> {
        let names = answer[name].as_array().into_iter().flatten();
        names.map(text).collect()
    };
    let (chunks, below) = (count("chunks"), count("chunks_below"));
    let mut out = format!("cleared {chunks} chunks in memory");
    if answer["tier"] == "all" {
        // Writing to a string cannot fail.
        let _ = write!(out, " and {below} in the tiers below");
    }
    let leased = count("chunks_leased");
    if leased > 0 {
        let _ = write!(
            out,
            "\n{leased} more chunks stay in memory until the requests that read them now end"
        );
    }
    match &names("durable")[..] {
        [] => out.push_str(
            "\nNOT durable: the clear is lost at a restart unless a peer or store has recorded it; see --state-dir",
        ),
        durable => _ = write!(out, "\ndurable in {}", durable.join(", ")),
    }
    for other in names("unconfirmed") {
        let _ = write!(
            out,
            "\nNOT confirmed by {other}: it may serve its old chunks until it confirms"
        );
    }
    out
}
