//! `lmc peers`: the state of the peers, and copies to a peer.

use std::fmt::Write;
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::http::Call;
use super::{Server, progress_bar};
use crate::config::parse_bytes;
use crate::stdout::{out, outln};

use super::format::{bytes, duration, list, number, percent, text};

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Each peer has one line, with the chunks in its memory, and the chunks that were read from it (verified)
and leased to it since it connected. The lines below name its last failure, counts of failures so far, and
the models of which the two sides share no chunks, with the fields that differ. Then follow the connected
directories: whether each is asked, and how many chunks it knows. Last come peers and directories that are
not connected or have disconnected, each with the reason. docs/p2p.md says what to do in each case.";

/// Time between two checks of a copy's progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) server: Server,
    #[command(subcommand)]
    pub(super) verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Makes a peer read the chunks that this server has in memory, the first chunks of prompts first
    Copy(Order),
}

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Order {
    /// The peer's name, address or id, as `lmc peers` shows them.
    name: String,
    /// Only chunks of this model.
    #[arg(long)]
    model: Option<String>,
    /// Only chunks of the space whose id begins with this text (`lmc peers --json` shows the ids).
    #[arg(long, value_name = "ID")]
    space: Option<String>,
    /// Limit on the payload bytes, such as 20GiB; a bare number is bytes. Default: a quarter of the
    /// peer's memory.
    #[arg(long, value_name = "SIZE")]
    limit: Option<String>,
    #[command(flatten)]
    server: Server,
}

/// Orders a copy, and waits for its end.
pub(super) fn copy(order: &Order) -> Result<()> {
    let mut body = json!({"peer": order.name});
    if let Some(limit) = &order.limit {
        let bytes = parse_bytes(limit, 1).map_err(|error| anyhow!("--limit {limit}: {error}"))?;
        body["limit"] = bytes.into();
    }
    for (field, value) in [("model", &order.model), ("space", &order.space)] {
        if let Some(value) = value {
            body[field] = value.as_str().into();
        }
    }
    let url = &order.server.address.url;
    let mut copy = Call::new("POST", "/peers/copy", Some(body)).send(url)?;
    let bar = progress_bar(copy["chunks"].as_u64().unwrap_or(0), "copying");
    while copy["state"] == "copying" {
        thread::sleep(LOOK_EVERY);
        copy = Call::get("/peers/copy").send(url)?;
        bar.set_position(copy["ordered"].as_u64().unwrap_or(0));
    }
    bar.finish_and_clear();
    if order.server.json {
        outln!("{}", serde_json::to_string_pretty(&copy)?);
    } else {
        out!("{}", copied(&copy));
    }
    if let Some(reason) = copy["reason"].as_str() {
        bail!("the copy ended early: {}", text(&reason.into()));
    }
    Ok(())
}

/// Formats the result of a copy as a sentence.
fn copied(copy: &Value) -> String {
    let (copied, chunks) = (number(&copy["copied"]), number(&copy["chunks"]));
    let peer = text(&copy["peer"]);
    let mut out = format!(
        "{peer} now has {copied} of {chunks} chunks ({}) in memory\n",
        bytes(&copy["bytes"])
    );
    if copied < chunks && copy["reason"].is_null() {
        out += "the other chunks were evicted here meanwhile, or did not fit into the peer's memory or the limits of leases\n";
    }
    out
}

/// Counters of failures, in the order in which they are shown.
const FAULTS: [&str; 7] = [
    "missed",
    "busy",
    "corrupt",
    "lapsed",
    "failed",
    "malformed",
    "refused",
];

/// Columns of the table of peers.
const COLUMNS: [&str; 9] = [
    "peer",
    "address",
    "connected",
    "over",
    "round trip",
    "load",
    "holds",
    "read",
    "served",
];

pub(super) fn table(answer: &Value) -> String {
    let mut out = String::new();
    let hosted = &answer["hosted_directory"];
    if !hosted.is_null() {
        out += &hosts(hosted);
    }
    if answer["id"].is_null() {
        return out;
    }
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "this side    {} ({}), {}, protocol {} to {}",
        text(&answer["name"]),
        text(&answer["id"]),
        text(&answer["address"]),
        answer["versions"][0],
        answer["versions"][1],
    );
    let _ = writeln!(
        out,
        "lent         {} leases of {}, at most {}",
        answer["leases"],
        bytes(&answer["leased_bytes"]),
        bytes(&answer["leasable_bytes"]),
    );
    for space in list(&answer["spaces"]) {
        let _ = writeln!(out, "space        {}", describe(space));
    }
    let all = list(&answer["peers"]).iter();
    let (directories, peers): (Vec<&Value>, Vec<&Value>) =
        all.partition(|peer| !peer["directory"].is_null());
    if peers.is_empty() {
        let _ = writeln!(out, "\nno peer is connected");
    } else {
        let _ = writeln!(out);
        connected(&mut out, &peers);
    }
    if !directories.is_empty() {
        let _ = writeln!(out, "\ndirectories");
    }
    for peer in directories {
        directory(&mut out, peer, list(&answer["named"]));
    }
    absent(&mut out, answer);
    out
}

/// Formats the line for the directory that the server hosts.
fn hosts(hosted: &Value) -> String {
    let counters = &hosted["counters"];
    format!(
        "directory    {} members, {} of at most {} entries in {}; {} questions answered, {} with a holder\n",
        hosted["members"],
        hosted["entries"],
        hosted["limit"],
        bytes(&hosted["bytes"]),
        counters["asked"],
        counters["found"],
    )
}

/// Writes the lines for a connected directory.
fn directory(out: &mut String, peer: &Value, named: &[Value]) {
    let its = &peer["directory"];
    let at = named.iter().find(|named| named["id"] == peer["id"]);
    let at = at.map_or_else(|| text(&peer["id"]), |named| text(&named["name"]));
    let known = match (its["is_behind"].as_bool(), its["limit"].as_u64()) {
        (_, Some(limit)) => format!(
            "does not keep all {} chunks: its limit is {limit}",
            its["chunks"]
        ),
        (Some(true), None) => format!("{} chunks are being announced to it", its["chunks"]),
        _ => format!("knows {} chunks of this side", its["chunks"]),
    };
    let asked = match its["is_asked"] == true {
        true => "asked",
        false => "not asked now",
    };
    let _ = writeln!(
        out,
        "  {} at {at}: {asked}, {known}; {} questions answered, {} with a holder, {} not answered in time",
        or_dash(&peer["name"]),
        its["answered"],
        its["found"],
        its["failed"],
    );
    for note in notes(peer) {
        let _ = writeln!(out, "    {note}");
    }
}

/// Returns the text of a value that may be missing.
fn or_dash(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| "-".to_owned(), |_| text(value))
}

fn describe(space: &Value) -> String {
    let short = |value: &Value| text(value).chars().take(8).collect::<String>();
    let mut shown = format!(
        "{} (world size {}, {}, layout {}",
        text(&space["model"]),
        space["world_size"],
        text(&space["dtype"]),
        short(&space["layout"]),
    );
    for (name, value) in [("identity", &space["identity"]), ("salt", &space["salt"])] {
        if value.as_str().is_some_and(|text| !text.is_empty()) {
            let value = if name == "salt" {
                short(value)
            } else {
                text(value)
            };
            let _ = write!(shown, ", {name} {value}");
        }
    }
    shown + ")"
}

/// Writes a table of columns as wide as their widest entry, with the notes of each row below it.
fn connected(out: &mut String, peers: &[&Value]) {
    let rows: Vec<[String; COLUMNS.len()]> = peers.iter().map(|peer| row(peer)).collect();
    let width = |column: usize| {
        let entries = rows.iter().map(|row| row[column].chars().count());
        entries.chain([COLUMNS[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    let mut line = |entries: Vec<&str>| {
        let cells = entries.iter().zip(&widths);
        let cells: Vec<String> = cells
            .map(|(entry, &width)| format!("{entry:<width$}"))
            .collect();
        let _ = writeln!(out, "{}", cells.join("  ").trim_end());
    };
    line(COLUMNS.to_vec());
    for (row, peer) in rows.iter().zip(peers) {
        line(row.iter().map(String::as_str).collect());
        for note in notes(peer) {
            line(vec![&format!("  {note}")]);
        }
    }
}

fn row(peer: &Value) -> [String; COLUMNS.len()] {
    let name = match peer["name"].as_str() {
        Some(_) => text(&peer["name"]),
        // Before the hello, only the id is known.
        None => text(&peer["id"]),
    };
    let counters = &peer["counters"];
    let moved = |chunks: &str, of: &str| {
        let (chunks, of) = (&counters[chunks], &counters[of]);
        format!("{} ({})", number(chunks), bytes(of))
    };
    let holds = match &peer["holds"] {
        Value::Null => "-".to_owned(),
        holds => format!("{} ({})", holds["chunks"], bytes(&holds["bytes"])),
    };
    let since = duration(number(&peer["connected_seconds"]));
    [
        name,
        or_dash(&peer["address"]),
        match peer["version"] {
            Value::Null => "NOT USED".to_owned(),
            _ => since,
        },
        or_dash(&peer["transport"]),
        peer["round_trip_seconds"]
            .as_f64()
            .map_or_else(|| "-".to_owned(), duration),
        percent(number(&peer["load"]), 1.0),
        holds,
        moved("read", "read_bytes"),
        moved("served", "served_bytes"),
    ]
}

/// Returns the lines below a peer.
fn notes(peer: &Value) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(failure) = failure(&peer["last_failure"]) {
        notes.push(match peer["version"] {
            Value::Null => format!("not used: {failure}"),
            _ => format!("last failure: {failure}"),
        });
    }
    if peer["draining"] == true {
        notes.push("being drained: it takes no chunks, and will be stopped".to_owned());
    }
    if let Some(pause) = peer["paused_seconds"].as_f64() {
        notes.push(format!(
            "not asked for {} because of failures",
            duration(pause)
        ));
    }
    if let Some(faults) = faults(&peer["counters"]) {
        notes.push(faults);
    }
    for mismatch in list(&peer["mismatches"]) {
        let differences = list(&mismatch["differences"]).iter().map(|one| {
            let (here, there) = (text(&one["here"]), text(&one["there"]));
            let quoted = |value: String| {
                if value.is_empty() {
                    "none".into()
                } else {
                    value
                }
            };
            format!(
                "{} (here {}, there {})",
                text(&one["field"]),
                quoted(here),
                quoted(there)
            )
        });
        notes.push(format!(
            "shares no chunks of {}, because these fields differ: {}",
            text(&mismatch["model"]),
            differences.collect::<Vec<_>>().join(", ")
        ));
    }
    notes
}

fn faults(counters: &Value) -> Option<String> {
    let counted = FAULTS
        .iter()
        .filter(|fault| number(&counters[**fault]) > 0.0);
    let counted = counted.map(|fault| format!("{} {fault}", counters[*fault]));
    let counted: Vec<String> = counted.collect();
    (!counted.is_empty()).then(|| format!("so far: {}", counted.join(", ")))
}

fn failure(failure: &Value) -> Option<String> {
    let reason = failure["reason"].as_str()?;
    let ago = duration(number(&failure["seconds_ago"]));
    Some(format!("{} ({ago} ago)", text(&reason.into())))
}

/// Writes the peers that are not connected, each with the reason.
fn absent(out: &mut String, answer: &Value) {
    let connected: Vec<&str> = list(&answer["peers"])
        .iter()
        .filter_map(|peer| peer["id"].as_str())
        .collect();
    let is_here = |peer: &Value| {
        let id = peer["id"].as_str();
        id.is_some_and(|id| connected.contains(&id)) || peer["itself"] == true
    };
    let mut lines = Vec::new();
    for peer in list(&answer["named"]).iter().filter(|peer| !is_here(peer)) {
        let name = match (text(&peer["name"]), peer["address"].as_str()) {
            (name, Some(address)) if name != address => {
                format!("{name} at {}", text(&address.into()))
            }
            (name, _) => name,
        };
        let reason = failure(&peer["failure"]);
        let reason = reason.unwrap_or_else(|| "connecting".to_owned());
        lines.push(format!("{name}: {reason}"));
    }
    for peer in list(&answer["gone"]) {
        let name = match peer["name"].as_str() {
            Some(_) => format!("{} at {}", text(&peer["name"]), or_dash(&peer["address"])),
            None => text(&peer["id"]),
        };
        let reason = failure(&peer["failure"]).unwrap_or_default();
        lines.push(format!("{name}: disconnected: {reason}"));
        lines.extend(faults(&peer["counters"]).map(|faults| format!("  {faults}")));
    }
    if !lines.is_empty() {
        let _ = writeln!(out, "\nnot connected");
    }
    for line in lines {
        let _ = writeln!(out, "  {line}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_table_shows_connected_peers_and_why_others_are_missing() {
        let counters = json!({"read": 3, "read_bytes": 3072, "served": 0, "served_bytes": 0,
            "missed": 0, "busy": 2, "failed": 1});
        let mut refused = json!({"id": "c-1", "name": null, "version": null, "counters": {}});
        refused["last_failure"] = json!({"seconds_ago": 1.0,
            "reason": "the chunk size differs: this side has 256 tokens, the peer 16"});
        let used = json!({"id": "b-1", "name": "b\u{1b}[2J", "address": "10.0.0.2:7700",
            "version": 1, "connected_seconds": 90.0, "transport": "sockets", "round_trip_seconds": 0.0002,
            "load": 0.5, "holds": {"chunks": 12, "bytes": 4096, "pool": 8192},
            "last_failure": {"reason": "no\nanswer", "seconds_ago": 7.0},
            "paused_seconds": 0.5, "counters": counters, "mismatches": [{"model": "m",
                "differences": [{"field": "dtype", "here": "bfloat16", "there": "half"}]}]});
        let directory = |id: &str, its: Value| json!({"id": id, "name": "d\u{1b}", "version": 1, "counters": {"failed": 1}, "directory": its});
        let first = directory(
            "d-1",
            json!({"is_asked": true, "answered": 8, "found": 5, "failed": 1,
            "chunks": 40, "is_behind": false, "limit": null}),
        );
        let second = directory(
            "d-2",
            json!({"is_asked": false, "answered": 0, "found": 0, "failed": 0,
            "chunks": 40, "is_behind": true, "limit": 10}),
        );
        let answer = json!({
            "hosted_directory": {"members": 3, "entries": 96, "limit": 128, "bytes": 1024,
                "counters": {"asked": 7, "found": 4}},
            "id": "a-1", "name": "a", "address": "10.0.0.1:7700", "versions": [1, 2],
            "leases": 2, "leased_bytes": 1024, "leasable_bytes": 4096,
            "spaces": [{"model": "m", "world_size": 2, "dtype": "bfloat16",
                "layout": "0123456789abcdef", "identity": "", "salt": "fedcba9876543210"}],
            "peers": [used, refused, first, second],
            "named": [
                {"name": "b:7700", "address": "10.0.0.2:7700", "id": "b-1", "itself": false},
                {"name": "me:7700", "address": "10.0.0.1:7700", "id": "a-1", "itself": true},
                {"name": "dir:7800", "address": "10.0.0.8:7800", "id": "d-1", "itself": false},
                {"name": "d:7700", "address": null, "id": null, "itself": false,
                 "failure": {"reason": "Name or service not known", "seconds_ago": 4.0}},
            ],
            "gone": [{"id": "e-1", "name": "e", "address": "10.0.0.5:7700", "counters": {"lapsed": 4},
                "failure": {"reason": "reset", "seconds_ago": 200.0}}],
        });
        let shown = table(&answer);
        for part in [
            "a (a-1), 10.0.0.1:7700, protocol 1 to 2",
            "2 leases of 1.00 KiB, at most 4.00 KiB",
            "m (world size 2, bfloat16, layout 01234567, salt fedcba98)",
            "b\\u001b[2J",
            "12 (4.00 KiB)",
            "3 (3.00 KiB)",
            "last failure: no\\nanswer (7 s ago)",
            "not asked for 500.0 ms",
            "so far: 2 busy, 1 failed",
            "shares no chunks of m, because these fields differ: dtype (here bfloat16, there half)",
            "90 s       sockets  200",
            "NOT USED",
            "not used: the chunk size differs: this side has 256 tokens, the peer 16 (1 s ago)",
            "d:7700: Name or service not known (4 s ago)",
            "e at 10.0.0.5:7700: disconnected: reset (3 min ago)",
            "so far: 4 lapsed",
            "3 members, 96 of at most 128 entries in 1.00 KiB; 7 questions answered, 4 with a holder",
            "d\\u001b at dir:7800: asked, knows 40 chunks of this side; 8 questions answered, 5 with a holder, 1 not",
            "at d-2: not asked now, does not keep all 40 chunks: its limit is 10;",
        ] {
            assert!(shown.contains(part), "{shown} lacks {part:?}");
        }
        assert!(
            !shown.contains("me:7700") && !shown.contains('\u{1b}'),
            "{shown}"
        );
        let alone = table(&json!({"id": "a-1", "peers": [], "named": [], "gone": []}));
        assert!(alone.contains("no peer is connected"), "{alone}");
        assert!(!alone.contains("not connected"), "{alone}");
        let host = table(&json!({"hosted_directory": {"members": 1, "counters": {}}}));
        assert!(host.starts_with("directory    1 members") && host.lines().count() == 1);
    }
}
