//! The alert rules and boards, by Prometheus' own tool on pages of real servers: each alert fires for
//! the fault that it is for, and no other one does. `cargo xtask test-alerts` runs these tests.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use lmc_testkit::{Folder, free_port, until};
use lmc_vllm_adapter::{CacheKey, Client, ClientError, Request};
use serde_json::{Value, json};

use crate::common::page::{Sample, parse};
use crate::common::prompt::{
    CHUNKS, Prompt, await_hits, key, register, register_wide, retrieve, store,
    worker as registration,
};
use crate::common::relay::Relay;
use crate::common::{Server, ask, drive_flags};
use crate::monitoring::{RULES, board, queries};

/// The samples of a server at one moment; `None` while the server does not answer.
type Scrape = Option<Vec<Sample>>;

/// Returns the page of a server.
fn scrape(server: &Server) -> Scrape {
    let answer = server.get("/metrics");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let page = parse(body).unwrap_or_else(|why| panic!("{why}"));
    Some(
        page.into_values()
            .flat_map(|family| family.samples)
            .collect(),
    )
}

/// Returns a command that runs Prometheus' tool.
fn promtool() -> Command {
    let tool = std::env::var_os("LMC_PROMTOOL");
    Command::new(tool.expect("LMC_PROMTOOL names promtool: cargo xtask test-alerts does"))
}

/// Runs Prometheus' tool with this input, and asserts that it succeeds.
fn run(mut command: Command, input: &str) {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = piped.stderr(Stdio::piped()).spawn().expect("promtool");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("it reads");
    drop(stdin);
    let done = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {said}");
}

/// Returns the series of what was scraped, each for a number of minutes, in promtool's notation.
fn series(history: &[(&Scrape, usize)]) -> Vec<Value> {
    let mut series: BTreeMap<String, Vec<Option<f64>>> = BTreeMap::new();
    let target = "job=\"lmc\",instance=\"host:8080\"";
    for (at, (scrape, _)) in history.iter().enumerate() {
        let mut note = |name: String, value: f64| {
            let values = series.entry(name).or_default();
            values.resize(at, None);
            values.push(Some(value));
        };
        note(
            format!("up{{{target}}}"),
            f64::from(u8::from(scrape.is_some())),
        );
        for sample in scrape.iter().flatten() {
            let labels = sample.labels.iter();
            let labels: String = labels
                .map(|(name, value)| format!(",{name}={value:?}"))
                .collect();
            note(format!("{}{{{target}{labels}}}", sample.name), sample.value);
        }
    }
    let in_notation = |(name, mut values): (String, Vec<Option<f64>>)| {
        values.resize(history.len(), None);
        let parts = values
            .iter()
            .zip(history)
            .map(|(value, (_, minutes))| match value {
                Some(value) => format!("{value}+0x{}", minutes - 1),
                None => format!("_x{minutes}"),
            });
        json!({"series": name, "values": parts.collect::<Vec<_>>().join(" ")})
    };
    series.into_iter().map(in_notation).collect()
}

/// Evaluates expressions after what was scraped, each for a number of minutes, under the rules.
fn evaluate(history: &[(&Scrape, usize)], expressions: Vec<Value>) {
    let minutes: usize = history.iter().map(|(_, minutes)| minutes).sum();
    let at = format!("{}m", minutes - 1);
    let with_time = |mut test: Value| {
        test["eval_time"] = at.clone().into();
        test
    };
    let expressions: Vec<Value> = expressions.into_iter().map(with_time).collect();
    let test = json!({
        "rule_files": [RULES],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": series(history),
            "promql_expr_test": expressions,
        }],
    });
    let folder = Folder::temporary();
    let file = folder.join("test.yml");
    fs::write(&file, test.to_string()).expect("space");
    let mut command = promtool();
    command.args(["test", "rules"]).arg(&file);
    run(command, "");
}

/// Asserts that exactly these alerts fire after what was scraped, each for a number of minutes.
fn fires(history: &[(&Scrape, usize)], alerts: &[&str]) {
    let sample = |alert: &&str| json!({"labels": format!("{{alertname={alert:?}}}"), "value": 1});
    let samples: Vec<Value> = alerts.iter().map(sample).collect();
    let expression = "count by (alertname) (ALERTS{alertstate=\"firing\"} > bool 0)";
    let expression = json!({"expr": expression, "exp_samples": samples});
    evaluate(history, vec![expression]);
}

/// Asserts that these alerts fire a while after a server changed from the one page to the other.
fn fires_after(before: &Scrape, after: &Scrape, alerts: &[&str]) {
    fires(&[(before, 60), (after, 8)], alerts);
}

/// Asserts that these alerts fire when a server has stayed so for long.
fn fires_while(now: &Scrape, alerts: &[&str]) {
    fires(&[(now, 60)], alerts);
}

fn worker(server: &Server) -> (Client, String) {
    let mut client = server.client();
    let shm_name = register(&mut client);
    (client, shm_name)
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn the_rules_and_the_page_are_as_prometheus_wants_them() {
    let mut command = promtool();
    command.args(["check", "rules", "--lint=all", "--lint-fatal", RULES]);
    run(command, "");
    let folder = Folder::temporary();
    let server = Server::start(&drive_flags(&folder, "512MiB"));
    let (mut client, shm_name) = worker(&server);
    store(&mut client, &shm_name);
    let answer = server.get("/metrics");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let mut command = promtool();
    command.args(["check", "metrics"]);
    run(command, body);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn no_alert_fires_on_a_server_that_is_well() {
    let folder = Folder::temporary();
    let server = Server::start(&drive_flags(&folder, "512MiB"));
    let new = scrape(&server);
    let (mut client, shm_name) = worker(&server);
    store(&mut client, &shm_name);
    retrieve(&mut client, &shm_name, "request");
    let used = scrape(&server);
    fires(&[(&new, 600), (&used, 1440)], &[]);
    fires(&[(&used, 600), (&used, 1440)], &[]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_killed_server_is_down_and_one_that_came_back_was_restarted() {
    let server = Server::start(&[]);
    until("it is older than the next will be", || {
        server.metric("lmc_uptime_seconds") > 5.0
    });
    let before = scrape(&server);
    drop(server);
    fires_after(&before, &None, &["LmcDown"]);
    let again = Server::start(&[]);
    let after = scrape(&again);
    fires_after(&before, &after, &["LmcRestarted"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn an_engine_that_ends_without_a_goodbye_is_lost() {
    let server = Server::start(&["--worker-orphan-grace-seconds", "0"]);
    let (client, _) = worker(&server);
    let before = scrape(&server);
    drop(client);
    until("it is removed", || {
        server.metric("lmc_workers_reaped_total") > 0.0
    });
    fires_after(&before, &scrape(&server), &["LmcEngineLost"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn an_engine_whose_chunks_are_larger_than_the_pool_is_refused() {
    let server = Server::start(&["--l1-size-gb", "2MiB"]);
    let mut client = server.client();
    let before = scrape(&server);
    let wide = registration(1024, "float32");
    let refused = client.ask(&Request::RegisterEngineDriven(wide));
    assert!(
        matches!(refused, Err(ClientError::Refused { .. })),
        "{refused:?}"
    );
    fires_after(&before, &scrape(&server), &["LmcRegistrationRefused"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_drive_whose_files_go_fails_and_is_down() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let server = Server::start(&drive_flags(&folder, "512MiB"));
    let (mut client, shm_name) = worker(&server);
    store(&mut client, &shm_name);
    until("all chunks are on disk", || {
        server.metric("lmc_tier_chunks{tier=\"disk\"}") == CHUNKS as f64
    });
    let before = scrape(&server);
    for file in fs::read_dir(folder.text()).expect("a folder") {
        let path = file.expect("a file").path();
        fs::remove_file(path).expect("it is there");
    }
    until("the drive is taken out", || {
        server.metric("lmc_tier_faulty{tier=\"disk\"}") > 0.0
    });
    fires_after(
        &before,
        &scrape(&server),
        &["LmcDiskFailing", "LmcTierDown"],
    );
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_drive_that_fills_is_nearly_full() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let disk = drive_flags(&folder, "64MiB");
    let flags = [&disk[..], &["--l1-size-gb", "64MiB"]].concat();
    let server = Server::start(&flags);
    let mut client = server.client();
    let shm_name = register_wide(&mut client, 128);
    let is_full = || {
        let of = |name: &str| server.metric(&format!("{name}{{tier=\"disk\"}}"));
        of("lmc_tier_bytes") > 0.9 * of("lmc_tier_capacity_bytes")
    };
    let mut prompts = (0..).map(Prompt);
    until("the drive is full", || {
        let prompt = prompts.next().expect("there are many");
        prompt.store(&mut client, &shm_name);
        until("it is written", || {
            server.metric("lmc_tier_queued_bytes{tier=\"disk\"}") == 0.0
        });
        is_full()
    });
    fires_while(&scrape(&server), &["LmcDiskNearlyFull"]);
}

/// Starts a server that listens for peers at `port`, with more flags.
fn start_peer(port: u16, more: &[&str]) -> Server {
    let listen = format!("127.0.0.1:{port}");
    let flags = ["--l1-size-gb", "64MiB", "--p2p-listen", &listen];
    Server::start(&[&flags[..], more].concat())
}

/// Waits until a server has this number of peers.
fn until_connected(server: &Server, peers: f64) {
    until("the peers are as expected", || {
        server.metric("lmc_peers_connected") == peers
    });
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_peer_that_is_killed_is_lost_and_one_that_stops_fails() {
    let port = free_port();
    let mut other = start_peer(port, &[]);
    let peer = format!("127.0.0.1:{port}");
    let server = start_peer(free_port(), &["--p2p-peer", &peer]);
    until_connected(&server, 1.0);
    let (mut client, shm_name) = worker(&server);
    let before = scrape(&server);
    other.process.stop();
    let mut requests = 0;
    until("questions fail", || {
        requests += 1;
        retrieve(&mut client, &shm_name, &format!("request-{requests}"));
        server.metric("lmc_tier_lookups_failed_total{tier=\"peers\"}") > 12.0
    });
    let failing = scrape(&server);
    fires_after(&before, &failing, &["LmcTierFailing"]);
    // The same failures are few among a hundred times as many lookups.
    let mut busy = failing.clone();
    let lookups = |sample: &&mut Sample| sample.name == "lmcache_mp_lookups_requests_total";
    (busy.iter_mut().flatten().filter(lookups)).for_each(|sample| sample.value += 2_000.0);
    fires_after(&before, &busy, &[]);
    other.process.kill();
    until_connected(&server, 0.0);
    fires_while(&scrape(&server), &["LmcPeerLost", "LmcTierDown"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_peer_behind_a_narrow_link_is_a_slow_tier() {
    let port = free_port();
    let relay = Relay::start(port);
    let path = format!("127.0.0.1:{}", relay.port);
    let other = start_peer(port, &["--p2p-advertise", &path]);
    // The machine may be busy.
    let flags = ["--p2p-peer", &path, "--p2p-locate-timeout", "10s"];
    let server = start_peer(free_port(), &flags);
    until_connected(&server, 1.0);
    let (mut client, shm_name) = worker(&other);
    store(&mut client, &shm_name);
    let (mut client, shm_name) = worker(&server);
    let before = scrape(&server);
    // A prompt has 192 KiB.
    relay.limit(120_000);
    let mut requests = 0;
    until("the peer's chunks are found", || {
        requests += 1;
        let request = format!("request-{requests}");
        retrieve(&mut client, &shm_name, &request) == CHUNKS as u64
    });
    fires_after(&before, &scrape(&server), &["LmcTierSlow"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn chunks_that_no_queue_can_take_are_dropped() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    // A queue of 8 MiB, and chunks of 9 MiB.
    let flags = [
        &drive_flags(&folder, "512MiB")[..],
        &["--l1-size-gb", "64MiB"],
    ]
    .concat();
    let server = Server::start(&flags);
    let mut client = server.client();
    let shm_name = register_wide(&mut client, 2304);
    let before = scrape(&server);
    // Of the memory, a worker has enough for five.
    Prompt(1).store_stamped(7, &mut client, &shm_name, "request");
    until("they are dropped", || {
        server.metric("lmc_tier_copies_dropped_total{tier=\"disk\"}") > 0.0
    });
    fires_after(&before, &scrape(&server), &["LmcWritesDropped"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn stores_that_are_not_committed_are_stuck() {
    let server = Server::start(&["--l1-write-ttl-seconds", "0.1"]);
    let (mut client, shm_name) = worker(&server);
    Prompt(1).prepare_store(&mut client, &shm_name);
    until("it is overdue", || {
        server.metric("lmc_overdue_transfers") > 0.0
    });
    fires_while(&scrape(&server), &["LmcTransfersStuck"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_server_that_stays_drained_was_forgotten() {
    let server = Server::start(&[]);
    assert_eq!(ask(server.http, "POST", "/drain", "{}").0, 200);
    fires(&[(&scrape(&server), 20)], &[]);
    fires_while(&scrape(&server), &["LmcDrainForgotten"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn lookups_that_are_neither_read_nor_ended_hold_leases() {
    let server = Server::start(&["--l1-read-ttl-seconds", "0.1"]);
    let (mut client, shm_name) = worker(&server);
    store(&mut client, &shm_name);
    let before = scrape(&server);
    Prompt::default().begin_lookup(&mut client, "request");
    until("the leases are ended", || {
        server.metric("lmc_lookup_leases_expired_total") > 0.0
    });
    fires_after(&before, &scrape(&server), &["LmcLeasesStuck"]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_hit_ratio_that_falls_is_seen() {
    let server = Server::start(&[]);
    let (mut client, shm_name) = worker(&server);
    store(&mut client, &shm_name);
    let new = scrape(&server);
    for request in 0..30 {
        retrieve(&mut client, &shm_name, &format!("hit-{request}"));
    }
    let good = scrape(&server);
    let mut few = None;
    for request in 0..30 {
        if request == 15 {
            few = scrape(&server);
        }
        let mut lookup = CacheKey {
            worker_id: None,
            ..key(&format!("miss-{request}"))
        };
        lookup.token_ids.iter_mut().for_each(|token| *token += 1);
        let id = lookup.request_id.clone();
        client.ask(&Request::Lookup(lookup)).expect("an answer");
        assert_eq!(await_hits(&mut client, &id), 0);
    }
    let bad = scrape(&server);
    fires(
        &[(&new, 360), (&good, 1080), (&bad, 20)],
        &["LmcHitRatioFell"],
    );
    fires(&[(&new, 360), (&good, 1080)], &[]);
    fires(&[(&new, 360), (&good, 1080), (&few, 20)], &[]);
}

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn a_pool_that_is_too_small_evicts_young_chunks() {
    let server = Server::start(&["--l1-size-gb", "2MiB"]);
    let (mut client, shm_name) = worker(&server);
    let before = scrape(&server);
    for number in 0..40 {
        Prompt(number).store(&mut client, &shm_name);
    }
    until("chunks are evicted", || {
        server.metric("lmc_evicted_bytes_total") > 0.0
    });
    fires_after(&before, &scrape(&server), &["LmcEvictsYoungChunks"]);
}

/// Parts of the names that LMCache's board asks for and this server does not have: blocks of engines, the
/// event bus, histograms of throughput, phases of copies, counts of submitted operations, gaps
/// between uses, and failures of reads from memory.
const UNANSWERED: [&str; 9] = [
    "lmcache_mp_l0_",
    "lmcache_mp_event_bus_",
    "_throughput_",
    "lmcache_mp_transfer_phase_",
    "lmcache_mp_num_submitted_",
    "reuse_gap",
    "idle_before_evict",
    "lmcache_mp_l1_read_failure_",
    "lmcache_blend_",
];

#[test]
#[ignore = "needs promtool and LMCache's board: cargo xtask test-alerts"]
fn lmcache_s_board_shows_most_of_its_queries() {
    let file = std::env::var("LMC_LMCACHE_BOARD");
    let file = file.expect("LMC_LMCACHE_BOARD names the file: cargo xtask test-alerts does");
    let theirs = queries(&board(&file));
    let theirs: Vec<String> = theirs
        .into_iter()
        .filter(|query| query.contains("lmcache_mp"))
        // Shows 0 whatever the server has.
        .map(|query| query.replace(" or vector(0)", ""))
        .collect();
    assert_eq!(theirs.len(), 55, "another board");
    let answered = |query: &&String| UNANSWERED.iter().all(|name| !query.contains(name));
    let count = theirs.iter().filter(answered).count();
    // docs/alerts.md names this number.
    assert_eq!(count, 33);
    println!(
        "{count} of {} queries of LMCache's board have data",
        theirs.len()
    );
    let (before, after) = a_server_in_use();
    let expression = |query: &String| {
        let has_data = u8::from(answered(&query));
        let query = query.replace("$__rate_interval", "5m");
        json!({
            "expr": format!("(count(({query}) >= 0) > bool 0) or vector(0)"),
            "exp_samples": [{"labels": "{}", "value": has_data}],
        })
    };
    evaluate(
        &[(&before, 60), (&after, 3)],
        theirs.iter().map(expression).collect(),
    );
}

/// Names in the queries of our board that have no data of [`a_server_in_use`]: its restarts, copies by the
/// server, and peers.
const EMPTY_IN_USE: [&str; 4] = [
    "resets(lmc_uptime_seconds",
    "lmc_gather_",
    "lmc_scatter_",
    "lmc_peers_",
];

#[test]
#[ignore = "needs promtool: cargo xtask test-alerts"]
fn our_board_shows_data_of_a_server_in_use() {
    let (before, after) = a_server_in_use();
    let ours = queries(&board(crate::monitoring::BOARD));
    let expression = |query: &String| {
        let is_empty = EMPTY_IN_USE.iter().any(|name| query.contains(name));
        let query = query
            .replace("$__rate_interval", "5m")
            .replace("$instance", ".*");
        json!({
            "expr": format!("(count(({query}) >= 0) > bool 0) or vector(0)"),
            "exp_samples": [{"labels": "{}", "value": u8::from(!is_empty)}],
        })
    };
    evaluate(
        &[(&before, 60), (&after, 3)],
        ours.iter().map(expression).collect(),
    );
}

/// Returns pages of a server before and after it stored, evicted, read from its drive and returned
/// chunks.
fn a_server_in_use() -> (Scrape, Scrape) {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let flags = [
        &drive_flags(&folder, "512MiB")[..],
        &["--l1-size-gb", "2MiB"],
    ]
    .concat();
    let server = Server::start(&flags);
    let (mut client, shm_name) = worker(&server);
    let until_on_disk = || {
        until("it is on disk", || {
            server.metric("lmc_tier_queued_bytes{tier=\"disk\"}") == 0.0
        });
    };
    // A rate needs series with values before and after.
    Prompt(100).store(&mut client, &shm_name);
    Prompt(100).retrieve(&mut client, &shm_name, "warm");
    until_on_disk();
    let before = scrape(&server);
    for number in 0..20 {
        Prompt(number).store(&mut client, &shm_name);
        until_on_disk();
    }
    let body = "{\"tier\": \"l1\", \"force\": true}";
    let (code, answer) = ask(server.http, "POST", "/cache/clear", body);
    assert_eq!(code, 200, "{answer}");
    assert_eq!(retrieve(&mut client, &shm_name, "cold"), CHUNKS as u64);
    (before, scrape(&server))
}
