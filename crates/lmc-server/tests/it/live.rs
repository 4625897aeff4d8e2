//! The data of the page at `/` and of `lmc top`: `/history`, `/status` and `/tenants`.

use lmc_testkit::{Folder, until};
use serde_json::Value;

use crate::common::prompt::{CHUNKS, Prompt, register};
use crate::common::{Server, ask, drive_flags};

/// Tokens of each prompt.
const TOKENS: u64 = (CHUNKS * 256) as u64;

fn json(server: &Server, path: &str) -> Value {
    let (code, answer) = ask(server.http, "GET", path, "");
    assert_eq!(code, 200, "{path}: {answer}");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    serde_json::from_str(body).expect("JSON")
}

#[test]
fn hits_are_counted_by_tier_misses_by_reason_and_durations_by_minute() {
    let drive = Folder::temporary();
    let disk = drive_flags(&drive, "512MiB");
    let server = Server::start(&[&disk[..], &["--request-log", "all"]].concat());
    let mut client = server.client();
    let shm_name = register(&mut client);
    Prompt(1).store(&mut client, &shm_name);
    until("all chunks are on disk", || {
        server.metric("lmc_tier_chunks{tier=\"disk\"}") == CHUNKS as f64
    });
    let (code, answer) = ask(server.http, "POST", "/cache/clear", "{\"tier\": \"l1\"}");
    assert_eq!(code, 200, "{answer}");
    for (prompt, hits) in [(1, CHUNKS), (1, CHUNKS), (2, 0)] {
        let request = format!("{prompt}-{hits}-{}", server.metric("lmc_retrieves_total"));
        assert_eq!(
            Prompt(prompt).retrieve(&mut client, &shm_name, &request),
            hits as u64
        );
    }

    let bytes = CHUNKS * 32768;
    server.line(&format!(
        "store request=\"store\" model=\"model\" rank=0 chunks={CHUNKS} bytes={bytes} ms="
    ));
    server.line(&format!(
        "retrieve request=\"1-{CHUNKS}-0\" model=\"model\" rank=0 chunks={CHUNKS} bytes={bytes} ms="
    ));
    server.line(&format!(
        "memory=0 lower={TOKENS} read_from=\"disk:{TOKENS}\" missed=0"
    ));

    let status = json(&server, "/status");
    let (tier, counts) = (&status["lmc"]["lower"][0], &status["lmc"]["counts"]);
    assert_eq!(
        (&tier["tier"], &tier["hit_tokens"]),
        (&"disk".into(), &TOKENS.into())
    );
    assert_eq!(counts["hit_tokens_dram"], TOKENS);
    assert_eq!(counts["hit_tokens_lower"], TOKENS);
    let of_metric = server.metric("lmc_tier_hit_tokens_total{tier=\"disk\"}");
    assert_eq!(of_metric, TOKENS as f64);
    assert_eq!(tier["read_time"]["count"], CHUNKS);
    assert_eq!(tier["read_time"]["last_minute"]["count"], CHUNKS);
    assert!(
        tier["write_time"]["p99_seconds"].as_f64() > Some(0.0),
        "{tier}"
    );
    let operations = status["lmc"]["operations"].as_array().expect("a list");
    let lookup = operations.iter().find(|one| one["operation"] == "lookup");
    let lookup = lookup.expect("lookups");
    assert_eq!(
        lookup["last_minute"]["count"], lookup["answered"],
        "{lookup}"
    );

    until("a sample has the figures", || {
        let history = json(&server, "/history");
        let last = history["samples"]
            .as_array()
            .and_then(|samples| samples.last());
        last.is_some_and(|last| {
            last["found_dram_tokens"] == TOKENS
                && last["tiers"][0]["found_tokens"] == TOKENS
                && last["missed_tokens"]["never_stored"] == TOKENS
        })
    });
}

#[test]
fn the_largest_tenants_are_listed_with_the_digests_of_the_metrics() {
    let server = Server::start(&["--quota", "marked-51=1GiB,marked-unused=2GiB"]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    assert_eq!(json(&server, "/tenants")["tenants"][0]["bytes"], 0);
    for number in 0..52 {
        let salt = format!("marked-{number}");
        Prompt(number).store_salted(&mut client, &shm_name, &salt);
    }
    // `marked-51` becomes the largest tenant.
    Prompt(52).store_salted(&mut client, &shm_name, "marked-51");
    let answer = json(&server, "/tenants");
    let tenants = answer["tenants"].as_array().expect("a list");
    let bytes = |tenant: &Value| tenant["bytes"].as_u64().expect("a number");
    // A tenant with a quota and without chunks is listed too.
    assert_eq!((tenants.len(), &answer["more"]), (51, &2.into()));
    assert_eq!(tenants[50]["tenant"], "marked-unused");
    assert_eq!(tenants[0]["tenant"], "marked-51");
    assert_eq!(tenants[0]["quota_bytes"], 1u64 << 30);
    assert_eq!(tenants[1]["quota_bytes"], Value::Null);
    assert_eq!(bytes(&tenants[0]), 2 * bytes(&tenants[1]));
    assert_eq!(answer["more_bytes"], 2 * bytes(&tenants[1]));
    let name = tenants[1]["digest"].as_str().expect("a digest");
    let metrics = server.get("/metrics");
    assert!(
        metrics.contains(&format!("tenant=\"{name}\"")),
        "{name}: {metrics}"
    );
}
