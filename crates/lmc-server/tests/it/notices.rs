//! Notices that `--pd-notify` sends to proxies.

use std::thread;

use lmc_testkit::{DEADLINE, free_port, until};
use lmc_vllm_adapter::RequestConfigs;
use serde_json::{Value, json};
use zeromq::{PullSocket, Socket, SocketRecv};

use crate::common::Server;
use crate::common::played::{Asked, HttpServer, url};
use crate::common::prompt::{CHUNKS, Prompt, await_hits, end, look_up, register};

const PATH: &str = "/api/v1/telemetry";

fn start(targets: &str) -> Server {
    Server::start(&["--l1-size-gb", "64MiB", "--pd-notify", targets])
}

/// Returns a notice as LMCache's connector posts it.
fn event(name: &str, request: &str) -> Value {
    json!({
        "event": name,
        "request_ids_set": [request],
        "model_name": "model",
        "world_size": 1,
        "kv_rank": 0,
    })
}

fn next(proxy: &HttpServer) -> (Value, Asked) {
    let asked = proxy.next();
    assert_eq!(asked.line, format!("POST {PATH} HTTP/1.1"));
    assert_eq!(asked.header("content-type"), Some("application/json"));
    (asked.json(), asked)
}

#[test]
fn a_proxy_is_sent_whether_a_request_is_stored_or_has_failed() {
    let proxy = HttpServer::start();
    let server = start(&format!("{}{PATH}", proxy.url()));
    let mut client = server.client();
    let shm_name = register(&mut client);
    let prompt = Prompt::default();
    prompt.begin_lookup(&mut client, "one");
    assert_eq!(await_hits(&mut client, "one"), 0);
    assert!(proxy.has_none());
    prompt.store(&mut client, &shm_name);
    // A notice that is lost is sent again.
    let (notice, asked) = next(&proxy);
    assert_eq!(notice, event("request_store_finished", "one"));
    drop(asked);
    next(&proxy).1.answer(503, "");
    server.line("a proxy does not take notices");
    let (notice, asked) = next(&proxy);
    assert_eq!(notice, event("request_store_finished", "one"));
    asked.answer(200, "{}");
    server.line("the proxy takes notices again");
    end(&mut client, "one");
    // One that the proxy does not want is not sent again.
    prompt.begin_lookup(&mut client, "other");
    let (notice, asked) = next(&proxy);
    assert_eq!(notice, event("request_store_finished", "other"));
    asked.answer(404, "");
    until("it is lost", || {
        server.metric("lmc_pd_notices_lost_total") == 1.0
    });
    // Its engine computes nothing.
    Prompt(7).begin_lookup(&mut client, "two");
    end(&mut client, "two");
    let (notice, asked) = next(&proxy);
    assert_eq!(notice, event("request_store_failed", "two"));
    asked.answer(200, "{}");
    let series = |outcome: &str| format!("lmc_pd_notices_total{{outcome=\"{outcome}\"}}");
    for (outcome, notices) in [("stored", 2.0), ("failed", 1.0)] {
        assert_eq!(server.metric(&series(outcome)), notices, "{outcome}");
    }
    assert_eq!(server.metric("lmc_pd_notices_lost_total"), 1.0);
    // The server stops before its engine has stored.
    Prompt(8).begin_lookup(&mut client, "three");
    let stopping = thread::spawn(move || server.terminate());
    let (notice, asked) = next(&proxy);
    assert_eq!(notice, event("request_store_failed", "three"));
    asked.answer(200, "{}");
    stopping.join().expect("it stops");
    assert!(proxy.has_none());
}

/// A proxy that has failed holds up neither engines nor other proxies.
#[test]
fn each_proxy_has_its_own_notices() {
    let (there, gone, zmq) = (HttpServer::start(), free_port(), free_port());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut socket = PullSocket::new();
    let at = format!("tcp://127.0.0.1:{zmq}");
    runtime.block_on(socket.bind(&at)).expect("a free port");
    let server = start(&format!("{}{PATH}, {}{PATH}, {at}", url(gone), there.url()));
    let mut client = server.client();
    let shm_name = register(&mut client);
    let mut configs = RequestConfigs::default();
    configs.awaited = "pair".to_owned();
    look_up(&mut client, "one", configs).expect("an answer");
    Prompt::default().store(&mut client, &shm_name);
    let (notice, asked) = next(&there);
    assert_eq!(notice["pd_id"], "pair");
    asked.answer(200, "{}");
    let mut received = || {
        let message = runtime.block_on(async {
            let message = tokio::time::timeout(DEADLINE, socket.recv()).await;
            message.expect("in time").expect("a message")
        });
        message.into_vec().concat()
    };
    // What `msgspec.msgpack.encode(ProxyNotif(req_id=..))` gives.
    assert_eq!(received(), b"\x82\xa4type\xaaProxyNotif\xa6req_id\xa4pair");
    // Found as it is.
    let long = "x".repeat(40);
    Prompt::default().begin_lookup(&mut client, &long);
    assert_eq!(await_hits(&mut client, &long), CHUNKS as u64);
    let end = [&b"\xa6req_id\xdb\0\0\0\x28"[..], long.as_bytes()].concat();
    assert!(received().ends_with(&end));
    let (_, asked) = next(&there);
    asked.answer(200, "{}");
    // It takes them once it is there.
    let late = HttpServer::at(gone);
    let mut requests: Vec<Value> = (0..2)
        .map(|_| {
            let (notice, asked) = next(&late);
            asked.answer(200, "{}");
            notice["request_ids_set"][0].clone()
        })
        .collect();
    requests.sort_by_key(Value::to_string);
    assert_eq!(requests, ["one", &long[..]]);
    until("all are passed on", || {
        server.metric("lmc_pd_notices_total{outcome=\"stored\"}") == 2.0
    });
    assert_eq!(server.metric("lmc_pd_notices_lost_total"), 0.0);
}

#[test]
fn a_proxys_address_that_cannot_be_is_refused_with_an_example() {
    for wrong in [
        "https://a:1/",
        "http://a/",
        "a:1",
        "tcp://a",
        "http://u@a:1/",
    ] {
        let refused = crate::common::lmc()
            .args(["serve", "--pd-notify", wrong])
            .output()
            .expect("the program");
        assert!(!refused.status.success(), "{wrong}");
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(text.contains("tcp://HOST:PORT"), "{wrong}: {text}");
    }
}
