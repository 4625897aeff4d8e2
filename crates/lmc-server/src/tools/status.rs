//! The table of `lmc status`.

use std::fmt::Write;

use serde_json::Value;

use super::format::{bytes, duration, list, number, percent, text, took};
use super::http::HttpUrl;

/// Returns the state of the server, derived from the word of /healthz.
pub(super) fn health(answer: &Value) -> String {
    match answer["status"].as_str() {
        Some("ok") => "healthy".to_owned(),
        Some("degraded") => "DEGRADED".to_owned(),
        Some("draining") => "draining (lmc drain): it stores no more chunks".to_owned(),
        _ => format!("NOT ANSWERING ENGINES: {}", text(&answer["reason"])),
    }
}

pub(super) fn table(url: &HttpUrl, answer: &Value) -> String {
    let status = &answer["lmc"];
    let (usage, counts, engine) = (&status["usage"], &status["counts"], &status["engine"]);
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name:<12} {value}");
    };
    let health = health(answer);
    let up = duration(number(&status["uptime_seconds"]));
    line("server", format!("{url}, {health}, up {up}"));
    line(
        "chunks",
        format!(
            "{} of {} tokens ({}), hashed with {}",
            usage["chunks"],
            status["chunk_size"],
            bytes(&usage["chunk_bytes"]),
            text(&status["hash_algorithm"])
        ),
    );
    if let Some(identity) = status["identity"].as_str().filter(|text| !text.is_empty()) {
        line("identity", format!("{identity:?}"));
    }
    line(
        "pool",
        format!(
            "{} of {} in use ({}), {} prefaulted, evicted by {}",
            bytes(&usage["used_bytes"]),
            bytes(&usage["pool_bytes"]),
            percent(number(&usage["used_bytes"]), number(&usage["pool_bytes"])),
            bytes(&usage["prefaulted_bytes"]),
            text(&answer["storage_manager"]["eviction_controller"]["eviction_policy"])
        ),
    );
    // Without lower tiers, memory has found everything.
    let by_tier = match list(&status["lower"]) {
        [] => String::new(),
        _ => format!(" ({})", found_by_tier(status)),
    };
    line(
        "hits",
        format!(
            "{} of the tokens looked up were retrieved by engines, {} were found{}; {}",
            percent(
                number(&counts["retrieved_tokens"]),
                number(&counts["lookup_tokens"])
            ),
            percent(
                number(&counts["hit_tokens"]),
                number(&counts["lookup_tokens"])
            ),
            by_tier,
            counted(&counts["lookups"], "lookup")
        ),
    );
    if let Some(missed) = missed(status) {
        line("missed", missed);
    }
    if number(&counts["lookup_tail_tokens"]) > 0.0 {
        line(
            "tails",
            format!(
                "{} tokens were after the last whole chunk of a prompt; lmc's own connector retrieved {}",
                counts["lookup_tail_tokens"], counts["retrieved_tokens_tail"]
            ),
        );
    }
    for tier in status["lower"].as_array().into_iter().flatten() {
        let capacity = match number(&tier["capacity"]) {
            0.0 => String::new(),
            _ => format!(" of {}", bytes(&tier["capacity"])),
        };
        line(
            &text(&tier["tier"]),
            format!(
                "{} chunks ({}{capacity}), {} written, {} read, {} queued",
                tier["chunks"],
                bytes(&tier["bytes"]),
                bytes(&tier["written_bytes"]),
                bytes(&tier["promoted_bytes"]),
                bytes(&tier["queued_bytes"]),
            ),
        );
        let lost = [
            "write_dropped",
            "write_declined",
            "write_failed",
            "promote_missed",
            "promote_failed",
        ];
        if lost.iter().any(|why| number(&tier[*why]) > 0.0) {
            line(
                "",
                format!(
                    "writes: {} dropped (queue full), {} declined, {} failed; reads: {} missed, \
                     {} failed (chunks)",
                    tier["write_dropped"],
                    tier["write_declined"],
                    tier["write_failed"],
                    tier["promote_missed"],
                    tier["promote_failed"],
                ),
            );
        }
    }
    for tier in status["tiers"].as_array().into_iter().flatten() {
        if let Some(fault) = tier["fault"].as_str() {
            line("fault", format!("{}: {fault}", text(&tier["tier"])));
        }
    }
    let evicted: f64 = ["evicted_room", "evicted_quota", "evicted_watermark"]
        .iter()
        .map(|why| number(&engine[*why]))
        .sum();
    line(
        "moved",
        format!(
            "{} stored, {} retrieved, {} evicted in {evicted} chunks",
            bytes(&counts["stored_bytes"]),
            bytes(&counts["retrieved_bytes"]),
            bytes(&engine["evicted_bytes"])
        ),
    );
    line(
        "held",
        format!(
            "{} sessions, {} leases, {} pins, {} reserved slots, {} quarantined slots",
            status["sessions"]["sessions"],
            usage["leases"],
            usage["pinned"],
            usage["reserved_slots"],
            usage["quarantined_slots"]
        ),
    );
    line(
        "under way",
        format!(
            "{} stores and {} retrieves prepared, {} of them overdue",
            status["transfers"]["stores"],
            status["transfers"]["retrieves"],
            status["transfers"]["overdue"]
        ),
    );
    let refused: f64 = [
        "stores_failed",
        "chunks_no_room",
        "registrations_refused",
        "over_limit",
    ]
    .iter()
    .map(|why| number(&counts[*why]))
    .sum();
    if refused > 0.0 {
        line(
            "refused",
            format!(
                "{} stores, {} chunks without memory, {} registrations, {} requests over a limit",
                counts["stores_failed"],
                counts["chunks_no_room"],
                counts["registrations_refused"],
                counts["over_limit"]
            ),
        );
    }
    if number(&status["log_lines_dropped"]) > 0.0 {
        let dropped = &status["log_lines_dropped"];
        line(
            "log",
            format!("{dropped} lines dropped: stderr is closed, or not read fast enough"),
        );
    }
    workers(&mut out, &status["instances"]);
    operations(&mut out, &status["operations"]);
    out
}

/// Reasons of misses: their names in [`ServiceCounts`](lmc_vllm_adapter::ServiceCounts), and in the output.
/// A counter adds up misses with a certain reason and misses with a probable reason.
const MISSES: &[(&str, &str)] = &[
    ("never_stored", "probably never stored"),
    ("evicted", "probably evicted"),
    ("cleared", "probably cleared"),
    ("removed", "probably removed"),
    ("other_space", "probably in another space"),
    (
        "other_settings",
        "probably stored under other settings of the server",
    ),
    ("unregistered", "no engine has registered the model"),
    ("tier_late", "tier probably late"),
    ("tier_down", "tier probably down"),
    ("tier_lost", "probably lost by a tier"),
    ("limit", "over a limit"),
    ("recompute", "faster to recompute"),
];

/// Returns the reasons why tokens were missed, the most frequent first, each as the share of the tokens
/// looked up and the name.
pub(super) fn reasons_missed(status: &Value) -> Vec<(String, String)> {
    let counts = &status["counts"];
    let of = |reason: &str| number(&counts[format!("missed_{reason}")]);
    let differs = status["other_space_differs"].as_array();
    let differs: Vec<String> = differs.into_iter().flatten().map(text).collect();
    let shown = |(reason, name): &(&str, &str)| match *reason {
        "other_space" if !differs.is_empty() => {
            format!("{name} (last: other {})", differs.join(", "))
        }
        _ => (*name).to_owned(),
    };
    let mut reasons: Vec<(f64, String)> = MISSES
        .iter()
        .map(|reason| (of(reason.0), shown(reason)))
        .filter(|(tokens, _)| *tokens > 0.0)
        .collect();
    reasons.sort_by(|one, other| other.0.total_cmp(&one.0));
    let share = |tokens| percent(tokens, number(&counts["lookup_tokens"]));
    reasons
        .into_iter()
        .map(|(tokens, name)| (share(tokens), name))
        .collect()
}

/// Formats the shares of missed tokens by reason; `None` if no tokens were missed.
fn missed(status: &Value) -> Option<String> {
    let reasons = reasons_missed(status).into_iter();
    let parts: Vec<String> = reasons
        .map(|(share, name)| format!("{share} {name}"))
        .collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Formats the shares of the tokens looked up that were found in memory and in each lower tier.
pub(super) fn found_by_tier(status: &Value) -> String {
    let counts = &status["counts"];
    let share = |tokens: &Value| percent(number(tokens), number(&counts["lookup_tokens"]));
    let lower = list(&status["lower"]).iter();
    let lower =
        lower.map(|tier| format!(", {} {}", text(&tier["tier"]), share(&tier["hit_tokens"])));
    let lower: String = lower.collect();
    format!("memory {}{lower}", share(&counts["hit_tokens_dram"]))
}

/// Formats a count with its noun: `1 lookup`, `2 lookups`.
fn counted(number: &Value, what: &str) -> String {
    match number.as_u64() {
        Some(1) => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    }
}

fn workers(out: &mut String, instances: &Value) {
    let instances = instances.as_array().map(Vec::as_slice).unwrap_or_default();
    if instances.is_empty() {
        let _ = writeln!(
            out,
            "\nno workers are registered; after a restart of the server, running engines come back within \
             half a minute"
        );
        return;
    }
    let _ = writeln!(
        out,
        "\n{:<20} {:<28} {:>5} {:<15} {:<32} {:>8} {:>8}",
        "worker", "model", "world", "mode", "chunk", "age", "silent"
    );
    for instance in instances {
        let dtype = text(&instance["dtype"]);
        let chunk = bytes(&instance["chunk_bytes"]);
        let shape = format!("{chunk}, {dtype} {}", instance["shape"]);
        let _ = writeln!(
            out,
            "{:<20} {:<28} {:>5} {:<15} {:<32} {:>8} {:>8}{}",
            text(&instance["instance_id"]),
            text(&instance["model"]),
            instance["world_size"].to_string(),
            text(&instance["mode"]),
            shape,
            duration(number(&instance["age_seconds"])),
            duration(number(&instance["silent_seconds"])),
            if instance["connected"] == true {
                ""
            } else {
                "  disconnected"
            }
        );
        if instance["gpu"].is_string() {
            let gpu = text(&instance["gpu"]);
            let open = bytes(&instance["gpu_bytes"]);
            let _ = writeln!(
                out,
                "  on {gpu}, {open} of its memory is open in the server"
            );
        }
        let unknown = instance["unknown_fields"].as_array();
        for field in unknown.into_iter().flatten() {
            let _ = writeln!(
                out,
                "  its registration has the field {}, which this version does not know: the worker \
                 shares chunks only with workers that send the same value",
                text(field)
            );
        }
    }
}

fn operations(out: &mut String, operations: &Value) {
    let used: Vec<&Value> = operations
        .as_array()
        .into_iter()
        .flatten()
        .filter(|o| number(&o["answered"]) > 0.0 || number(&o["refused"]) > 0.0)
        .collect();
    if used.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "\n{:<42} {:>9} {:>9} {:>9} {:>8}",
        "operation", "answered", "p50", "p99", "refused"
    );
    for operation in used {
        let _ = writeln!(
            out,
            "{:<42} {:>9} {:>9} {:>9} {:>8}",
            text(&operation["operation"]),
            operation["answered"].to_string(),
            took(&operation["p50_seconds"]),
            took(&operation["p99_seconds"]),
            operation["refused"].to_string()
        );
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn url() -> HttpUrl {
        "http://u:marked@127.0.0.1:8080".to_owned().into()
    }

    /// Until f2c35f9 the table showed "healthy" while `/healthz` answered "degraded", and did not show
    /// dropped copies.
    #[test]
    fn the_table_shows_faults_losses_and_whole_ids() {
        let lossy = json!({"tier": "disk", "chunks": 1600, "write_dropped": 752, "write_declined": 0,
            "write_failed": 4, "promote_missed": 0, "promote_failed": 9});
        let mut answer = json!({"status": "degraded", "is_healthy": true, "lmc": {
            "lower": [lossy],
            "tiers": [{"tier": "disk", "fault": "drive 0 cannot be written"}],
            "instances": [{"instance_id": "275782994765433869", "model": "m\n\u{1b}[2J",
                "gpu": "H200 19d8", "gpu_bytes": 3_u64 << 30}],
        }});
        let shown = table(&url(), &answer);
        for part in [
            "DEGRADED",
            "752 dropped",
            "4 failed; reads: 0 missed, 9 failed",
            "drive 0 cannot be written",
            "275782994765433869",
            "m\\n\\u001b[2J",
            "on H200 19d8, 3.00 GiB of its memory is open",
        ] {
            assert!(shown.contains(part), "{shown} lacks {part:?}");
        }
        answer["status"] = "ok".into();
        answer["lmc"]["lower"][0] = json!({"tier": "disk"});
        let shown = table(&url(), &answer);
        assert!(
            shown.contains("u:***@127.0.0.1:8080, healthy") && !shown.contains("dropped"),
            "{shown}"
        );
    }
}
