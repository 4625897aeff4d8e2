//! The page `/metrics` of the real server: its format, and what its histograms count.

use std::net::TcpListener;

use lmc_testkit::{Folder, free_port, until};
use lmc_vllm_adapter::{CacheKey, Client, Reply, Request};

use crate::common::page::{Page, parse};
use crate::common::prompt::{CHUNK, CHUNKS, Prompt, await_hits, key, register, retrieve, store};
use crate::common::{Server, ask, drive_flags};

/// Returns the page of a server, read strictly.
fn page(server: &Server) -> Page {
    let answer = server.get("/metrics");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    parse(body).unwrap_or_else(|why| panic!("{why}"))
}

/// Starts a server with a drive in this folder.
fn start(folder: &Folder, flags: &[&str]) -> Server {
    let mut all = drive_flags(folder, "512MiB").to_vec();
    // The machine may be busy.
    all.extend(["--disk-read-timeout-seconds", "60"]);
    all.extend(flags);
    Server::start(&all)
}

/// Returns the count of a histogram, by its name and its labels.
fn counted(server: &Server, name: &str, labels: &str) -> f64 {
    server.metric(&format!("{name}_count{labels}"))
}

#[test]
fn the_page_is_in_prometheus_strict_format() {
    let folder = Folder::temporary();
    let directory = ["--p2p-directory-listen", "127.0.0.1:0"];
    let server = start(&folder, &directory);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    let page = page(&server);
    let info = &page["lmc_build_info"].samples[0];
    assert_eq!(info.labels["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(info.labels["lmcache"], lmc_vllm_adapter::LMCACHE_RELEASE);
    assert_eq!(
        info.labels["disk_format"],
        lmc_backend_disk::FORMAT_VERSION.to_string()
    );
    assert!(info.labels["rustc"].starts_with("1."), "{info:?}");
    assert_eq!(info.value, 1.0);
    let of_process = |name: &str| page[&format!("process_{name}")].samples[0].value;
    assert!(of_process("cpu_seconds_total") >= 0.0);
    // The pool of 16 MiB is touched in the background, so only the program is sure to be there.
    assert!(of_process("resident_memory_bytes") > 1e6);
    assert!((3.0..=of_process("max_fds")).contains(&of_process("open_fds")));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.expect("a later time").as_secs_f64();
    assert!((-2.0..3600.0).contains(&(now - of_process("start_time_seconds"))));
    let has = |family: &str, what: &str| {
        let samples = &page[family].samples;
        samples.iter().any(|sample| sample.labels["what"] == what)
    };
    assert!(has("lmc_tier_event_bytes_total", "written"));
    assert!(has("lmc_tier_events_total", "written"));
    assert!(!has("lmc_tier_events_total", "written_bytes"));
}

/// LMCache's operator passes `--prometheus-port`, and scrapes the metrics there from outside the pod.
#[test]
fn a_port_answers_metrics_and_nothing_else_unless_it_is_disabled() {
    let port = free_port();
    let number = port.to_string();
    let flags = ["--host", "127.0.0.1", "--prometheus-port", &number];
    let server = Server::start(&flags);
    let (code, answer) = ask(port, "GET", "/metrics", "");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let page = parse(body).unwrap_or_else(|why| panic!("{why}"));
    assert!(code == 200 && page.contains_key("lmc_chunks"), "{answer}");
    for (line, expected) in [
        ("GET /", 404),
        ("GET /status", 404),
        ("GET /healthz", 404),
        ("GET /config", 404),
        ("POST /cache/clear", 404),
        ("POST /drain", 404),
        ("POST /metrics", 405),
    ] {
        let (method, path) = line.split_once(' ').expect("a method and a path");
        let (code, answer) = ask(port, method, path, "{}");
        assert_eq!(code, expected, "{line}: {answer}");
    }
    server.terminate();
    // The port is taken, and not needed.
    let _taken = TcpListener::bind(("127.0.0.1", port)).expect("the server has left it");
    let off = Server::start(&[&flags[..], &["--disable-prometheus"]].concat());
    off.terminate();
}

#[test]
fn reads_and_writes_of_a_drive_are_timed() {
    let folder = Folder::temporary();
    let server = start(&folder, &[]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    let disk = "{tier=\"disk\"}";
    until("all chunks are on disk", || {
        counted(&server, "lmc_tier_copy_seconds", disk) == CHUNKS as f64
    });
    assert_eq!(counted(&server, "lmc_promotion_seconds", ""), 0.0);
    let body = "{\"tier\": \"l1\", \"force\": true}";
    let (code, answer) = ask(server.http, "POST", "/cache/clear", body);
    assert_eq!(code, 200, "{answer}");
    let hits = retrieve(&mut client, &shm_name, "again");
    assert_eq!(hits, CHUNKS as u64);
    let fetched = counted(&server, "lmc_tier_fetch_seconds", disk);
    assert_eq!(fetched, CHUNKS as f64);
    for name in ["lmc_promotion_seconds", "lmc_promotion_first_chunk_seconds"] {
        assert_eq!(counted(&server, name, ""), 1.0, "{name}");
        assert!(server.metric(&format!("{name}_sum")) > 0.0, "{name}");
    }
    // From memory: no tier is asked.
    retrieve(&mut client, &shm_name, "once more");
    assert_eq!(counted(&server, "lmc_promotion_seconds", ""), 1.0);
}

/// A server of 64 chunks, and an engine that has stored a prompt of six and used it.
fn small() -> (Server, Client, String) {
    let server = Server::start(&["--l1-size-gb", "2MiB"]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    retrieve(&mut client, &shm_name, "a use");
    (server, client, shm_name)
}

/// Stores more prompts than a small server holds.
fn fill(client: &mut Client, shm_name: &str) {
    for number in 1..40 {
        Prompt(number).store(client, shm_name);
    }
}

#[test]
fn chunks_that_are_evicted_leave_their_age_and_their_uses() {
    let (server, mut client, shm_name) = small();
    fill(&mut client, &shm_name);
    // Of one page: eviction goes on between two.
    let uses = |page: &Page, bound: &str| {
        let mut samples = page["lmc_evicted_chunk_uses"].samples.iter();
        let sample = samples.find(|one| one.labels.get("le").is_some_and(|le| le == bound));
        sample.expect("the bucket").value
    };
    until("the prompt that was used is evicted", || {
        let page = page(&server);
        uses(&page, "+Inf") - uses(&page, "0") == CHUNKS as f64
    });
    let page = page(&server);
    // One lookup and one retrieve each.
    assert_eq!(uses(&page, "2") - uses(&page, "1"), CHUNKS as f64);
    let count = |family: &str, name: &str| {
        let samples = &page[family].samples;
        let sample = samples.iter().find(|sample| sample.name == name);
        sample.expect("the series").value
    };
    let sum = count("lmc_evicted_chunk_uses", "lmc_evicted_chunk_uses_sum");
    assert_eq!(sum, 2.0 * CHUNKS as f64);
    let evicted = count(
        "lmcache_mp_l1_evicted_chunks_total",
        "lmcache_mp_l1_evicted_chunks_total",
    );
    let age = "lmcache_mp_l1_chunk_lifetime_seconds";
    assert!(count(age, &format!("{age}_count")) >= evicted.min(CHUNKS as f64));
}

#[test]
fn tenants_are_counted_apart_under_digests_and_the_rest_together() {
    let server = Server::start(&["--metrics-tenants", "2"]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    for (number, salt) in [
        (0, "first-secret"),
        (1, "second-secret"),
        (2, "third-secret"),
    ] {
        Prompt(number).store_salted(&mut client, &shm_name, salt);
    }
    let again = CacheKey {
        worker_id: None,
        cache_salt: "first-secret".to_owned(),
        ..key("again")
    };
    let reply = client.ask(&Request::Lookup(again)).expect("an answer");
    assert_eq!(reply, Reply::None);
    assert_eq!(await_hits(&mut client, "again"), CHUNKS as u64);
    let unknown = CacheKey {
        worker_id: None,
        model_name: "of \"no\" engine".to_owned(),
        ..key("unknown")
    };
    client.ask(&Request::Lookup(unknown)).expect("an answer");
    let answer = server.get("/metrics");
    assert!(!answer.contains("secret"), "{answer}");
    let page = page(&server);
    let of = |family: &str| {
        let samples = page[family].samples.iter();
        samples
            .map(|sample| {
                (
                    &*sample.labels["model"],
                    &*sample.labels["tenant"],
                    sample.value,
                )
            })
            .collect::<Vec<_>>()
    };
    let tokens = (CHUNKS * CHUNK) as f64;
    let [other, first, second] = of("lmc_tenant_lookup_tokens_total")[..] else {
        panic!("{page:?}");
    };
    assert_eq!(other, ("other", "other", tokens));
    assert_eq!((first.0, first.2), ("model", tokens));
    assert_eq!((second.0, second.2), ("model", 0.0));
    assert!(first.1 != second.1 && first.1.len() == 12, "{first:?}");
    let values = |family: &str| of(family).iter().map(|one| one.2).collect::<Vec<_>>();
    assert_eq!(values("lmc_tenant_hit_tokens_total"), [0.0, tokens, 0.0]);
    let bytes = server.metric("lmc_stored_bytes_total") / 3.0;
    // The third has none of its own.
    for family in ["lmc_tenant_stored_bytes_total", "lmc_tenant_bytes"] {
        assert_eq!(values(family), [bytes; 3], "{family}");
    }
    let off = Server::start(&["--metrics-tenants", "0"]);
    assert!(!off.get("/metrics").contains("lmc_tenant"));
}

#[test]
fn chunks_that_are_evicted_and_retrieved_count_for_their_tenant() {
    let (server, mut client, shm_name) = small();
    let labels = "{model=\"model\",tenant=\"_default\"}";
    let of = |name: &str| server.metric(&format!("lmc_tenant_{name}{labels}"));
    assert_eq!(of("retrieved_tokens_total"), (CHUNKS * CHUNK) as f64);
    fill(&mut client, &shm_name);
    // Eviction goes on for a while, and each count is of its own moment.
    until(
        "the tenant has the chunks of all, and lost those of all",
        || {
            let evicted = server.metric("lmc_evicted_bytes_total");
            evicted > 0.0
                && of("evicted_bytes_total") == evicted
                && of("bytes") == server.metric("lmc_chunk_bytes")
        },
    );
}
