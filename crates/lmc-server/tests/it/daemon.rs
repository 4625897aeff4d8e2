//! The real binary: start, stop, kill, start again, and two at a time.

use std::path::Path;
use std::time::Duration;

use lmc_testkit::{free_port, in_lab, until, with_own_shm};
use lmc_vllm_adapter::{CacheKey, Client, Operation, Reply, Request};

use crate::common::{Server, lmc, registration, segment};

#[test]
fn it_listens_at_once_and_stops_clean_on_sigterm() {
    let mut server = Server::start(&["--shutdown-timeout-seconds", "600"]);
    assert!(server.line("pool: 16.0 MiB").contains("in shared memory"));
    assert!(server.get("/healthz").starts_with("HTTP/1.1 200"));
    let mut client = server.client();
    let answer = client.ask(&Request::Noop).expect("an answer");
    assert_eq!(answer, Reply::Text("OK".to_owned()));
    assert!(segment(server.port).is_some());
    // An open connection of an engine must not hold the stop up.
    server.signal(libc::SIGTERM);
    assert_eq!(server.process.wait().code(), Some(0));
    server.line("stopping after SIGTERM");
    assert!(
        segment(server.port).is_none(),
        "the pool outlived its server"
    );
    drop(client);
}

#[test]
fn a_killed_server_leaves_nothing_in_the_way_of_the_next() {
    with_own_shm(
        "size=64m",
        a_killed_server_leaves_nothing_in_the_way_of_the_next,
        || {
            let (port, http) = (free_port().to_string(), free_port().to_string());
            let flags = ["--port", &port, "--http-port", &http];
            let mut first = Server::start(&flags);
            first.process.kill();
            let port = first.port;
            assert!(segment(port).is_some(), "no process could have removed it");
            let second = Server::start(&flags);
            let line = second.line("reclaimed");
            assert!(line.contains(&format!("pid {}", first.id())), "{line}");
            assert!(second.get("/healthz").starts_with("HTTP/1.1 200"));
            second.terminate_by(libc::SIGINT);
            assert!(segment(port).is_none());
        },
    );
}

#[test]
fn a_second_server_says_who_is_in_the_way() {
    let first = Server::start(&[]);
    let pid = first.id().to_string();
    let own = free_port().to_string();
    let check = |args: &[&str], parts: &[&str]| {
        let mut second = Server::spawn(args);
        let line = second.line("is held by");
        assert_eq!(second.process.wait().code(), Some(1));
        for part in parts.iter().chain(&[pid.as_str(), "serve"]) {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
    };
    let (port, http) = (first.port.to_string(), first.http.to_string());
    let segment = segment(first.port).expect("the pool's name");
    let segment = segment.file_name().and_then(|name| name.to_str());
    let segment = segment.expect("an ASCII name");
    check(&["--port", &port, "--http-port", &own], &[&port, "--port"]);
    check(
        &["--port", &own, "--http-port", &http],
        &[&http, "--http-port"],
    );
    check(
        &["--port", &own, "--http-port", "0", "--shm-name", segment],
        &["the pool", segment],
    );
    assert!(
        first.get("/healthz").starts_with("HTTP/1.1 200"),
        "the first server goes on"
    );
}

#[test]
fn two_servers_on_ports_of_the_systems_choice_do_not_meet() {
    let start = || Server::start(&["--port", "0", "--http-port", "0"]);
    let (one, two) = (start(), start());
    one.terminate();
    two.terminate();
}

#[test]
fn a_wrong_command_line_ends_with_its_reason_and_code_2() {
    let check = |args: &[&str], part: &str| {
        let mut server = Server::spawn(args);
        assert_eq!(server.process.wait().code(), Some(2), "{args:?}");
        server.line(part);
    };
    check(&["--prot", "1"], "'--port'");
    check(&["--port", "x"], "expected a port number");
    // Once the name of a module that logs nothing, so that the server said nothing either.
    check(&["--log-level", "inof"], "did you mean info?");
    check(&["--l2-adapter", "{}"], "--disk-size");
    check(&["--transport", "grpc"], "ZeroMQ only");
    check(&["--config", "/nowhere.toml"], "cannot be read");
    check(&["--eviction-policy", "IsolatedLRU"], "--quota");
}

#[test]
fn what_is_asked_for_and_cannot_be_had_ends_with_a_remedy() {
    let check = |args: &[&str], part: &str| {
        let mut server = Server::spawn(args);
        server.line(part);
        assert_eq!(server.process.wait().code(), Some(1), "{args:?}");
    };
    check(&["--l1-size-gb", "30TiB"], "make the pool smaller");
    check(&["--numa-node", "63"], "NUMA node 63");
}

#[test]
fn the_tools_ask_a_running_server() {
    let server = Server::start(&[]);
    let url = format!("http://127.0.0.1:{}", server.http);
    let run = |args: &[&str]| {
        let output = lmc()
            .args(args)
            .env("LMC_URL", &url)
            .output()
            .expect("the binary runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{args:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    };
    let table = run(&["status"]);
    for part in ["healthy", "16.0 MiB", "no workers are registered"] {
        assert!(table.contains(part), "{table} lacks {part:?}");
    }
    let status: serde_json::Value =
        serde_json::from_str(&run(&["status", "--json"])).expect("JSON");
    assert_eq!(status["lmc"]["usage"]["pool_bytes"], 16 << 20);
    assert!(run(&["clear"]).contains("cleared 0 chunks"));
    let printed = run(&["serve", "--print-config", "--chunk-size", "64"]);
    assert!(printed.contains("chunk_size = 64"), "{printed}");
    let refused = lmc()
        .args(["status", "--url", "http://127.0.0.1:1"])
        .output()
        .expect("the binary runs");
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("check that `lmc serve` runs"), "{text}");
}

/// Registers an engine of one layer `[blocks, tokens, size]` whose memory the server copies.
fn register_memory(client: &mut Client, shm_name: &str) {
    let name = format!("/{shm_name}");
    let registered = client.ask(&registration(1, "m", &name, ("float32", 4), [4, 256, 4]));
    assert_eq!(registered.expect("an answer"), Reply::None);
}

#[test]
fn a_server_that_stood_still_makes_no_copy_that_was_asked_for_before() {
    if !in_lab("a server stands still for 5 s") {
        return;
    }
    let server = Server::start(&[]);
    let mut client = server.client();
    let memory = format!("lmcache_kv_daemon_{}", std::process::id());
    let path = Path::new("/dev/shm").join(&memory);
    std::fs::write(&path, vec![1; 4 * 256 * 4 * 4]).expect("space in /dev/shm");
    register_memory(&mut client, &memory);
    let store = |request_id: &str| Request::Store {
        key: CacheKey {
            model_name: "m".to_owned(),
            world_size: 1,
            worker_id: Some(0),
            token_ids: (0..256).collect(),
            end: 256,
            request_id: request_id.to_owned(),
            num_kv_readers: 1,
            ..CacheKey::default()
        },
        instance_id: 1,
        block_ids: vec![vec![2]],
        event: Vec::new(),
    };
    server.stop();
    let uid = client.send(&store("before")).expect("sent");
    // Longer than the 5 s without a beat after which the server knows that it stood still. Time itself
    // is what is tested: the clock goes on while a process is stopped, and no setting shortens the 5 s,
    // which follow from the timeout of stock workers.
    std::thread::sleep(Duration::from_millis(5100));
    server.signal(libc::SIGCONT);
    let reply = client.receive(uid, Operation::Store).expect("an answer");
    assert_eq!(reply, Reply::Transferred(false));
    until("it goes on", || {
        client.ask(&store("after")).expect("an answer") == Reply::Transferred(true)
    });
    std::fs::remove_file(&path).expect("it is ours");
}
