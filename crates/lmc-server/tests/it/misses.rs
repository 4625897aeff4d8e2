//! The reasons of what lookups miss, as an operator of the real server sees them: in `/metrics`, in
//! `lmc status`, and in the line that the log has for each request.

use std::os::unix::fs::FileExt;

use lmc_testkit::{Folder, free_port, until};
use lmc_vllm_adapter::{CacheKey, Client, Reply, Request};

use crate::common::prompt::{
    CHUNKS, Prompt, await_hits, end, key, register, register_as, retrieve, store,
};
use crate::common::{Server, ask, drive_flags, lmc};

/// Tokens of each prompt.
const TOKENS: f64 = (CHUNKS * 256) as f64;
/// A false line of the log, and a command to a terminal.
const FORGED: &str = "\n2026-01-01T00:00:00.000000Z  WARN FORGED \u{1b}[2J\u{9b}2J";
/// False fields of a line.
const FIELDS: &str = "\" reason=\"evicted\" missed=7 ";

/// Starts a server whose log has a line for each request.
fn start(flags: &[&str]) -> Server {
    let all = ["--request-log", "all"];
    Server::start(&[&all[..], flags].concat())
}

fn missed(server: &Server, reason: &str) -> f64 {
    server.metric(&format!(
        "lmc_lookup_missed_tokens_total{{reason=\"{reason}\"}}"
    ))
}

/// Looks up, and returns the number of chunks that are found.
fn look_up(client: &mut Client, key: &CacheKey) -> u64 {
    let lookup = CacheKey {
        worker_id: None,
        ..key.clone()
    };
    let reply = client.ask(&Request::Lookup(lookup)).expect("an answer");
    assert_eq!(reply, Reply::None);
    let hits = await_hits(client, &key.request_id);
    end(client, &key.request_id);
    hits
}

/// Looks up, and checks that all is missed for this reason, in the metric and in the log. Returns the
/// line of the log.
fn misses(server: &Server, client: &mut Client, key: &CacheKey, reason: (&str, &str)) -> String {
    let (reason, certainty) = reason;
    let before = missed(server, reason);
    assert_eq!(look_up(client, key), 0, "{reason}");
    assert_eq!(missed(server, reason) - before, TOKENS, "{reason}");
    let line = server.line(&format!("request={:?} ", key.request_id));
    for part in [
        format!("reason=\"{reason}\""),
        format!("certainty=\"{certainty}\""),
        format!("missed={TOKENS} "),
    ] {
        assert!(line.contains(&part), "{line} lacks {part}");
    }
    line
}

/// Returns the key of another prompt than the one that is stored.
fn new_key(request: &str) -> CacheKey {
    let mut key = key(request);
    key.token_ids.iter_mut().for_each(|token| *token += 1);
    key
}

fn clear_memory(server: &Server) {
    let body = "{\"tier\": \"l1\", \"force\": true}";
    let (code, answer) = ask(server.http, "POST", "/cache/clear", body);
    assert_eq!(code, 200, "{answer}");
}

fn status(server: &Server) -> String {
    let url = format!("http://127.0.0.1:{}", server.http);
    let status = lmc().args(["status", "--url", &url]).output();
    let status = status.expect("the binary runs");
    assert!(status.status.success(), "{status:?}");
    String::from_utf8(status.stdout).expect("text")
}

#[test]
fn what_memory_never_had_had_and_evicted_and_had_and_cleared() {
    // Of 64 chunks, of which a prompt has six.
    let server = start(&["--l1-size-gb", "2MiB"]);
    let mut client = server.client();
    let unregistered = ("unregistered", "exact");
    misses(&server, &mut client, &key("before"), unregistered);
    let shm_name = register(&mut client);
    let never = ("never_stored", "probably");
    misses(&server, &mut client, &key("first"), never);
    store(&mut client, &shm_name);
    let mut with_tail = key("with a tail");
    with_tail.token_ids.extend([1, 2, 3]);
    assert_eq!(look_up(&mut client, &with_tail), CHUNKS as u64);
    assert_eq!(server.metric("lmc_lookup_tail_tokens_total"), 3.0);
    let line = server.line("request=\"with a tail\" ");
    assert!(
        line.contains("tail=3") && !line.contains("reason"),
        "{line}"
    );
    clear_memory(&server);
    misses(
        &server,
        &mut client,
        &key("second"),
        ("cleared", "probably"),
    );
    for number in 1..20 {
        Prompt(number).store(&mut client, &shm_name);
    }
    let evicted = ("evicted", "probably");
    store(&mut client, &shm_name);
    for number in 20..40 {
        Prompt(number).store(&mut client, &shm_name);
    }
    misses(&server, &mut client, &key("third"), evicted);
    let shown = status(&server);
    for part in [
        "probably never stored",
        "probably evicted",
        "3 tokens were after the last whole chunk",
    ] {
        assert!(shown.contains(part), "{shown} lacks {part}");
    }
    let counts: serde_json::Value = {
        let (_, answer) = ask(server.http, "GET", "/status", "");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        serde_json::from_str(body).expect("JSON")
    };
    assert_eq!(counts["lmc"]["counts"]["missed_evicted"], TOKENS);
    let requested = server.metric("lmcache_mp_lookup_requested_tokens_total");
    let found = server.metric("lmcache_mp_lookup_hit_tokens_total");
    let page = server.get("/metrics");
    let of = |line: &str| {
        let series = line.strip_prefix("lmc_lookup_missed_tokens_total{")?;
        series.split_once(' ')?.1.parse::<f64>().ok()
    };
    let sum: f64 = page.lines().filter_map(of).sum();
    assert_eq!(sum, requested - found);
}

#[test]
fn an_engine_with_another_layout_is_named_with_the_fields_that_differ() {
    let server = start(&[]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    register_as(&mut client, 8, "float16");
    let reason = ("other_space", "exact");
    let line = misses(&server, &mut client, &key("other"), reason);
    assert!(line.contains("differs=\"layout,dtype\""), "{line}");
    let shown = status(&server);
    assert!(
        shown.contains("probably in another space (last: other layout, dtype)"),
        "{shown}"
    );
}

#[test]
fn leases_that_a_lookup_may_not_take_are_a_limit() {
    let server = start(&["--l1-size-gb", "2MiB"]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    let mut found = 0;
    // None of the requests ends.
    let prompts = 10;
    for number in 0..prompts {
        Prompt(number).store(&mut client, &shm_name);
        let request = format!("held-{number}");
        Prompt(number).begin_lookup(&mut client, &request);
        found += await_hits(&mut client, &request);
    }
    let all = u64::from(prompts) * CHUNKS as u64;
    assert!(found < all);
    assert_eq!(missed(&server, "limit"), (all - found) as f64 * 256.0);
    let line = server.line("reason=\"limit\" certainty=\"exact\"");
    assert!(line.contains("request=\"held-"), "{line}");
}

#[test]
fn a_store_that_cannot_be_reached_is_down() {
    let folder = Folder::temporary();
    let url = format!("file://{}", folder.join("missing").display());
    let server = start(&["--remote", &url]);
    let mut client = server.client();
    register(&mut client);
    let down = ("tier_down", "probably");
    let line = misses(&server, &mut client, &key("request"), down);
    assert!(line.contains("tier=\"remote\""), "{line}");
}

#[test]
fn a_peer_that_does_not_answer_is_late() {
    let port = free_port();
    let first = Server::start(&["--p2p-listen", &format!("127.0.0.1:{port}")]);
    let mut client = first.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    let (listen, peer) = (
        format!("127.0.0.1:{}", free_port()),
        format!("127.0.0.1:{port}"),
    );
    let second = start(&[
        "--p2p-listen",
        &listen,
        "--p2p-peer",
        &peer,
        "--p2p-locate-timeout",
        "500ms",
    ]);
    let mut client = second.client();
    let shm_name = register(&mut client);
    let mut request = 0;
    until("the peer's chunks are found", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("before-{request}")) == CHUNKS as u64
    });
    first.stop();
    let late = ("tier_late", "probably");
    let line = misses(&second, &mut client, &new_key("request"), late);
    assert!(line.contains("tier=\"peers\""), "{line}");
}

/// Flags of a server with a drive.
fn on_disk<'a>(folder: &'a Folder, more: &[&'a str]) -> Vec<&'a str> {
    let disk = drive_flags(folder, "256MiB");
    // The machine may be busy.
    let timeout = ["--disk-read-timeout-seconds", "60"];
    [&disk[..], &timeout, more].concat()
}

/// Stores the prompt, and waits until all of it is on disk.
fn store_on_disk(server: &Server, client: &mut Client) {
    let shm_name = register(client);
    store(client, &shm_name);
    until("all chunks are on disk", || {
        server.metric("lmc_tier_chunks{tier=\"disk\"}") == CHUNKS as f64
    });
}

#[test]
fn chunks_that_are_recomputed_faster_than_they_are_read_are_no_failure() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let server = start(&on_disk(&folder, &["--recompute-rate", "1000000000"]));
    let mut client = server.client();
    store_on_disk(&server, &mut client);
    clear_memory(&server);
    let recompute = ("recompute", "exact");
    misses(&server, &mut client, &key("request"), recompute);
}

#[test]
fn a_damaged_chunk_is_lost_by_its_drive_and_chunks_of_other_settings_are_named() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let server = start(&on_disk(&folder, &[]));
    let mut client = server.client();
    store_on_disk(&server, &mut client);
    drop(client);
    server.terminate();
    // One byte in the middle of the first chunk.
    let segment = folder.join("segment-00000000");
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(segment);
    let file = file.expect("a segment");
    let mut byte = [0];
    file.read_exact_at(&mut byte, 4096 + 100).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], 4096 + 100)
        .expect("a byte");
    drop(file);
    let server = start(&on_disk(&folder, &[]));
    let mut client = server.client();
    register(&mut client);
    let hits = look_up(&mut client, &key("damaged"));
    assert!(hits < CHUNKS as u64);
    let rest = TOKENS - hits as f64 * 256.0;
    assert_eq!(missed(&server, "tier_lost"), rest);
    let line = server.line("request=\"damaged\" ");
    assert!(
        line.contains("certainty=\"probably\" tier=\"disk\""),
        "{line}"
    );
    // The drive has removed it.
    assert_eq!(look_up(&mut client, &key("again")), hits);
    assert_eq!(missed(&server, "removed"), rest);
    drop(client);
    server.terminate();
    let server = start(&on_disk(&folder, &["--chunk-size", "128"]));
    let mut client = server.client();
    register(&mut client);
    let other = ("other_settings", "probably");
    misses(&server, &mut client, &key("request"), other);
    let (code, answer) = ask(server.http, "POST", "/cache/clear", "{}");
    assert_eq!(code, 200, "{answer}");
    let never = ("never_stored", "probably");
    misses(&server, &mut client, &key("after a clear"), never);
}

#[test]
fn no_salt_and_no_forged_line_is_in_the_log_and_no_line_is_there_where_none_is_wanted() {
    for format in ["text", "json"] {
        let server = start(&["--log-format", format]);
        let mut client = server.client();
        register(&mut client);
        let hostile = CacheKey {
            cache_salt: "marked-salt".to_owned(),
            ..key(&format!("request{FIELDS}{FORGED}{}", "x".repeat(1000)))
        };
        assert_eq!(look_up(&mut client, &hostile), 0);
        let line = server.line("FORGED");
        assert!(!line.contains(char::is_control), "{line:?}");
        assert!(!line.contains(&"x".repeat(200)), "{line}");
        assert!(!line.contains(FIELDS), "{line}");
        assert!(line.contains(r#"\" reason=\"evicted\" missed=7"#), "{line}");
        if format == "json" {
            let event: serde_json::Value = serde_json::from_str(&line).expect("JSON");
            assert_eq!(event["reason"], "never_stored");
            assert_eq!(event["missed"], TOKENS);
        }
        for text in [
            server.log().join("\n"),
            server.get("/metrics"),
            server.get("/status"),
        ] {
            assert!(!text.contains("marked-salt"), "{text}");
        }
    }
    // The default is slow, which this request is not.
    for flags in [&["--request-log", "off"][..], &[]] {
        let mut server = Server::start(flags);
        let mut client = server.client();
        register(&mut client);
        assert_eq!(look_up(&mut client, &key("unseen")), 0);
        server.signal(libc::SIGTERM);
        assert!(server.process.wait().success());
        assert!(!server.log().join("\n").contains("unseen"), "{flags:?}");
    }
}
