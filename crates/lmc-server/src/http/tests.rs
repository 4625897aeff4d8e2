//! The HTTP side of a server in this process, asked over a real socket.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use lmc_engine::{EngineConfig, EngineContext, EngineHost};
use lmc_key::{ChunkHasher, HashAlgorithm};
use lmc_memory::ArenaConfig;
use lmc_testkit::DEADLINE;
use lmc_vllm_adapter::{Client, Service, ServiceConfig, ZmqConfig};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::MAX_CONNECTIONS;
use super::{Http, serve};
use crate::config::{Raw, ServeConfig};
use crate::reload::Reload;
use crate::salts::SaltDigests;

struct Server {
    http: SocketAddr,
    engines: SocketAddr,
    service: Service,
    stop: watch::Sender<bool>,
    /// Says that the server stops, and answers people until then.
    stopping: watch::Sender<bool>,
    /// A channel of its own, so that a test can end the engines' side alone.
    stop_engines: watch::Sender<bool>,
    runtime: Option<Runtime>,
}

impl Server {
    fn start() -> Self {
        let flag = |name: &str, value: &str| (name.to_owned(), Raw::Text(value.to_owned()));
        let given = [
            flag("eviction-policy", "arc"),
            flag("port", "0"),
            flag("state-dir", "none"),
            flag("http-allowed-host", "lmc,lmc.cache.svc"),
        ];
        let loaded = ServeConfig::load(given, [], None).expect("a good configuration");
        let arena = ArenaConfig::anonymous(1 << 20).build().expect("an arena");
        let engine = EngineConfig::default()
            .start(EngineContext::new(arena.into(), EngineHost::default()))
            .expect("an engine");
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 256).expect("a hasher");
        let service = ServiceConfig::new(hasher).start(engine).expect("a service");
        let (stop, stopped) = watch::channel(false);
        let (stopping, is_stopping) = watch::channel(false);
        let (stop_engines, engines_stopped) = watch::channel(false);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let (http, engines) = runtime.block_on(async {
            let config = ZmqConfig {
                port: 0,
                ..ZmqConfig::default()
            };
            let server = config.bind(service.clone()).await.expect("a port");
            let engines = server.local_addr();
            tokio::spawn(server.run(engines_stopped));
            let socket = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = socket.local_addr().expect("an address");
            let digests = SaltDigests::new(None).expect("random bytes");
            let (again, of) = (loaded.clone(), service.clone());
            let reload = Reload::new(loaded, move || Ok(again.clone()), of, digests);
            let reload = Arc::new(reload.expect("quotas"));
            let mut http = Http::new(service.clone(), engines, reload);
            http.stopping = Some(is_stopping);
            tokio::spawn(serve(socket, http, stopped));
            (address, engines)
        });
        Self {
            http,
            engines,
            service,
            stop,
            stopping,
            stop_engines,
            runtime: Some(runtime),
        }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let answer = self.raw(&[head.as_bytes(), body.as_bytes()].concat());
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        (code.expect("a status code"), body.to_owned())
    }

    fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.http).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        stream.write_all(bytes).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// Code of the answer to a request with these header lines and this body.
    fn code(&self, line: &str, headers: &[&str], body: &str) -> u16 {
        let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        let head = format!(
            "{line} HTTP/1.1\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        let answer = self.raw(&[head.as_bytes(), body.as_bytes()].concat());
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
        code.unwrap_or_else(|| panic!("no status code: {answer}"))
    }

    /// Code and JSON.
    fn json(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let (code, body) = self.ask(method, path, body);
        (
            code,
            serde_json::from_str(&body).unwrap_or_else(|_| panic!("no JSON: {body}")),
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        self.stop_engines.send_replace(true);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

/// Asks, and compares the code and some fields of the answer.
fn check(server: &Server, ask: (&str, &str, &str), code: u16, fields: &[(&str, Value)]) {
    let (found, body) = server.json(ask.0, ask.1, ask.2);
    assert_eq!(found, code, "{ask:?}: {body}");
    for (pointer, want) in fields {
        assert_eq!(
            body.pointer(pointer),
            Some(want),
            "{ask:?} at {pointer}: {body}"
        );
    }
}

#[test]
fn a_browser_gets_the_page_and_states_until_the_server_stops() {
    let server = Server::start();
    let asks = |path: &str| {
        format!(
            "GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/html,*/*\r\nconnection: close\r\n\r\n"
        )
    };
    let page = server.raw(asks("/").as_bytes());
    let (head, body) = page.split_once("\r\n\r\n").expect("a head and a body");
    assert!(
        head.contains("content-type: text/html") && head.contains("default-src 'none'"),
        "{head}"
    );
    assert!(body.starts_with("<!doctype html>"), "{body}");
    // It works without any other host; the name of a vocabulary is none.
    let body = body.replace("http://www.w3.org/2000/svg", "");
    assert!(
        !body.contains("http://") && !body.contains("https://"),
        "it names another host"
    );

    let mut stream = TcpStream::connect(server.http).expect("a connection");
    stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    stream
        .write_all(asks("/live").as_bytes())
        .expect("a request");
    let mut read = String::new();
    let mut bytes = [0; 1 << 16];
    while !read.contains("\"chunk_size\"") {
        let len = stream.read(&mut bytes).expect("a state");
        assert!(len > 0, "the stream has ended: {read}");
        read += &String::from_utf8_lossy(&bytes[..len]);
    }
    assert!(
        read.contains("content-type: text/event-stream") && read.contains("data: {"),
        "{read}"
    );
    server.stopping.send_replace(true);
    stream
        .read_to_string(&mut read)
        .expect("the end of the stream");

    let (code, advice) = server.json("GET", "/advise", "");
    assert_eq!((code, &advice["followed"]), (200, &0.into()));
    assert!(server.json("GET", "/history", "").1["samples"].is_array());
}

#[test]
fn a_server_at_work_says_so_on_every_path() {
    let server = Server::start();
    check(
        &server,
        ("GET", "/healthz", ""),
        200,
        &[("/status", "ok".into())],
    );
    check(
        &server,
        ("GET", "/healthcheck", ""),
        200,
        &[("/status", "healthy".into())],
    );
    check(&server, ("GET", "/", ""), 200, &[("/status", "ok".into())]);
    check(
        &server,
        ("GET", "/status", ""),
        200,
        &[
            ("/is_healthy", true.into()),
            ("/chunk_size", 256.into()),
            ("/active_sessions", 0.into()),
            (
                "/storage_manager/l1_manager/memory_total_bytes",
                (1 << 20).into(),
            ),
            ("/storage_manager/l1_manager/memory_used_bytes", 0.into()),
            (
                "/storage_manager/eviction_controller/eviction_policy",
                "ARC".into(),
            ),
            ("/lmc/usage/pool_bytes", (1 << 20).into()),
            ("/lmc/sessions/sessions", 0.into()),
        ],
    );
    check(
        &server,
        ("GET", "/config", ""),
        200,
        &[
            ("/mp/chunk_size", 256.into()),
            (
                "/storage_manager/eviction_config/eviction_policy",
                "ARC".into(),
            ),
            ("/lmc/eviction_policy/value", "arc".into()),
            (
                "/lmc/eviction_policy/source",
                "flag --eviction-policy".into(),
            ),
            ("/lmc/chunk_size/source", "default".into()),
        ],
    );
    let (code, page) = server.ask("GET", "/metrics", "");
    assert_eq!(code, 200);
    assert!(page.contains("\nlmc_pool_bytes 1048576\n"), "{page}");
    assert!(
        page.contains("lmc_operation_seconds_count{operation=\"noop\"}"),
        "{page}"
    );
}

/// LMCache's health check says "healthy" when its protocol side has died; this one must not.
#[test]
fn a_server_whose_engines_are_not_served_is_not_healthy() {
    let server = Server::start();
    check(&server, ("GET", "/healthz", ""), 200, &[]);
    server.stop_engines.send_replace(true);
    let gone = || Client::connect(server.engines, DEADLINE).is_err();
    lmc_testkit::until("the engines' side is gone", gone);
    check(
        &server,
        ("GET", "/healthz", ""),
        503,
        &[("/status", "stuck".into())],
    );
    check(
        &server,
        ("GET", "/healthcheck", ""),
        503,
        &[("/status", "unhealthy".into())],
    );
    check(
        &server,
        ("GET", "/status", ""),
        200,
        &[("/is_healthy", false.into())],
    );
}

#[test]
fn quotas_live_and_die() {
    let server = Server::start();
    let get = ("GET", "/quota/team-a", "");
    check(
        &server,
        get,
        200,
        &[("/exists", false.into()), ("/limit_gb", 0.0.into())],
    );
    assert!(
        server
            .service
            .known_tenant(&"team-a".parse().expect("a salt"))
            .is_none(),
        "asking must not make a tenant"
    );
    check(
        &server,
        ("PUT", "/quota/team-a", "{\"limit_gb\": 1.5}"),
        200,
        &[
            ("/status", "ok".into()),
            ("/limit_gb", 1.5.into()),
            ("/cache_salt", "team-a".into()),
        ],
    );
    check(
        &server,
        get,
        200,
        &[("/exists", true.into()), ("/limit_gb", 1.5.into())],
    );
    check(
        &server,
        ("PUT", "/quota/_default", "{\"limit_gb\": 0}"),
        200,
        &[("/cache_salt", "_default".into())],
    );
    check(
        &server,
        ("GET", "/quota", ""),
        200,
        &[
            ("/users/team-a/limit_gb", 1.5.into()),
            ("/users/team-a/current_usage_gb", 0.0.into()),
            ("/users/_default/limit_gb", 0.0.into()),
        ],
    );
    check(
        &server,
        ("DELETE", "/quota/team-a", ""),
        200,
        &[("/status", "removed".into())],
    );
    check(
        &server,
        ("DELETE", "/quota/team-a", ""),
        200,
        &[("/status", "not_found".into())],
    );
    check(&server, get, 200, &[("/exists", false.into())]);
}

#[test]
fn clearing_takes_lmcaches_bodies() {
    let server = Server::start();
    for body in [
        "",
        "{}",
        "{\"tier\": \"l1\"}",
        "{\"tier\": \"l1\", \"force\": true}",
    ] {
        check(
            &server,
            ("POST", "/cache/clear", body),
            200,
            &[("/status", "ok".into()), ("/cleared/tier", "l1".into())],
        );
    }
}

/// Slow: 1,024 salts, each in a request of its own.
#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    let server = Server::start();
    let refuses = |ask: (&str, &str, &str), code: u16, why: &str| {
        let (found, body) = server.json(ask.0, ask.1, ask.2);
        assert_eq!(found, code, "{ask:?}: {body}");
        for field in ["error", "detail"] {
            let text = body[field].as_str().unwrap_or_default();
            assert!(text.contains(why), "{ask:?}: {text:?} lacks {why:?}");
        }
    };
    refuses(("GET", "/nothing", ""), 404, "/healthz");
    refuses(("POST", "/status", ""), 405, "POST");
    refuses(("POST", "/cache/clear", "{\"tier\": \"l2\"}"), 400, "l1");
    refuses(("POST", "/cache/clear", "{\"force\": 1}"), 400, "force");
    refuses(("POST", "/cache/clear", "[]"), 400, "JSON object");
    refuses(("POST", "/cache/clear", "{"), 400, "JSON object");
    refuses(("PUT", "/quota/a", "{\"limit_gb\": -1}"), 400, "negative");
    refuses(("PUT", "/quota/a", "{\"limit_gb\": \"1\"}"), 400, "NUMBER");
    refuses(("PUT", "/quota/a", "not json"), 400, "JSON");
    for salt in 0..1024 {
        let path = format!("/quota/salt-{salt}");
        let (code, answer) = server.ask("PUT", &path, "{\"limit_gb\": 0}");
        assert_eq!(code, 200, "{answer}");
    }
    refuses(("PUT", "/quota/a", "{\"limit_gb\": 0}"), 400, "1024 salts");
    let (code, _) = server.ask("PUT", "/quota/salt-7", "{\"limit_gb\": 1}");
    assert_eq!(code, 200, "one that has a quota may have another");
    refuses(("GET", "/cache/objects", ""), 503, "L2");
    refuses(
        ("GET", "/cache/objects?tier=l1", ""),
        400,
        "'l1' not supported",
    );
    refuses(
        (
            "DELETE",
            "/cache/objects",
            "{\"tier\": \"l1\", \"keys\": []}",
        ),
        501,
        "/cache/clear",
    );
    let sums = "/cache/checksums";
    refuses(("POST", sums, "[]"), 400, "JSON object");
    refuses(("POST", sums, "{\"chunk_size\": 16}"), 400, "block_ids");
    refuses(("POST", sums, "{\"block_ids\": [1]}"), 400, "chunk_size");
    refuses(
        (
            "POST",
            sums,
            "{\"block_ids\": [1], \"chunk_size\": 1, \"instance_id\": 7}",
        ),
        404,
        "7",
    );
    let long = format!("/quota/{}", "x".repeat(1000));
    refuses(("GET", &long, ""), 400, "");
}

#[test]
fn bodies_and_heads_are_bounded() {
    let server = Server::start();
    let (code, _) = server.ask("PUT", "/quota/a", &" ".repeat(super::MAX_BODY + 1));
    assert_eq!(code, 413);
    let head = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(64 << 10));
    let answer = server.raw(head.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    check(&server, ("GET", "/healthz", ""), 200, &[]);
}

/// Connections whose requests never end.
fn half_open(server: &Server, count: usize) -> Vec<TcpStream> {
    let open = |_| {
        let mut stream = TcpStream::connect(server.http).expect("a connection");
        let timeout = Some(DEADLINE);
        stream.set_read_timeout(timeout).expect("a timeout");
        let head = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n";
        stream
            .write_all(head.as_bytes())
            .expect("half of a request");
        stream
    };
    (0..count).map(open).collect()
}

/// Until 8bf0141 as many half requests as there may be connections kept `/healthz` from being
/// answered for 25 seconds, and a supervisor would have ended the server.
#[test]
fn half_requests_do_not_keep_others_out() {
    let server = Server::start();
    let mut half = half_open(&server, MAX_CONNECTIONS);
    // It is accepted after them.
    check(&server, ("GET", "/healthz", ""), 200, &[]);
    // A reset is as good as an end.
    let ended = half[0].read(&mut [0; 64]);
    assert_eq!(ended.unwrap_or(0), 0, "the first made way");
    // The same after a whole request.
    let idle = (0..MAX_CONNECTIONS).map(|_| {
        let mut stream = half_open(&server, 1).remove(0);
        stream.write_all(b"\r\n").expect("the end of a head");
        let answered = stream.read(&mut [0; 64]).expect("an answer");
        assert!(answered > 0, "connection closed");
        stream.write_all(b"GET /version").expect("half of another");
        stream
    });
    let _idle: Vec<_> = idle.collect();
    check(&server, ("GET", "/healthz", ""), 200, &[]);
}

/// Until f2c35f9 any page that was opened on the server's host could empty the cache, cut
/// quotas to nothing and, with a name that it let point to 127.0.0.1, read `/status`. These are the
/// requests that Chromium and Firefox send for such pages.
#[test]
fn pages_of_other_sites_change_nothing_and_learn_nothing() {
    let server = Server::start();
    let quota = "{\"limit_gb\": 1.5}";
    check(&server, ("PUT", "/quota/a", quota), 200, &[]);
    let port = server.http.port();
    let own = format!("Host: 127.0.0.1:{port}");
    let rebound = format!("Host: evil.example:{port}");
    let (text, json) = (
        "Content-Type: text/plain;charset=UTF-8",
        "Content-Type: application/json",
    );
    let (evil, null) = ("Origin: http://evil.example", "Origin: null");
    let cross = "Sec-Fetch-Site: cross-site";
    let clear = "POST /cache/clear";
    let force = "{\"force\": true}";
    let refused = |line: &str, headers: &[&str], body: &str, code: u16| {
        let found = server.code(line, headers, body);
        assert_eq!(found, code, "{line} with {headers:?}");
    };
    // fetch() with mode no-cors, a form, a sandboxed frame, an older browser.
    refused(clear, &[&own, text, evil, cross], force, 403);
    let form = "Content-Type: application/x-www-form-urlencoded";
    refused(clear, &[&own, form, null, cross], "a=1", 403);
    refused(clear, &[&own, evil], "", 403);
    refused(clear, &[&own, text], force, 415);
    refused(clear, &[&own], "", 415);
    refused("PUT /quota/a", &[&own, text], quota, 415);
    // Another port of this host, such as a notebook's.
    let neighbour = "Origin: http://127.0.0.1:8888";
    refused(
        clear,
        &[&own, json, neighbour, "Sec-Fetch-Site: same-site"],
        force,
        403,
    );
    refused(clear, &[&own, json, neighbour], force, 403);
    // The preflight of a request with JSON, or of a DELETE, and what would follow.
    let asks = "Access-Control-Request-Method: DELETE";
    refused("OPTIONS /quota/a", &[&own, evil, asks, cross], "", 403);
    refused("DELETE /quota/a", &[&own, evil, cross], "", 403);
    // An image, a script, a frame.
    refused(
        "GET /status",
        &[&own, cross, "Sec-Fetch-Mode: no-cors"],
        "",
        403,
    );
    // A name of the page's own that was made to point here: same-origin to the browser.
    let same = format!("Origin: http://evil.example:{port}");
    let same = [&rebound, json, same.as_str(), "Sec-Fetch-Site: same-origin"];
    refused(clear, &same, force, 403);
    refused("PUT /quota/a", &same, "{\"limit_gb\": 0}", 403);
    for path in [
        "/", "/status", "/peers", "/config", "/quota", "/metrics", "/healthz", "/nothing",
    ] {
        refused(&format!("GET {path}"), &[&rebound], "", 403);
        refused(&format!("GET {path}"), &[&own, &rebound], "", 403);
        refused(&format!("GET http://evil.example{path}"), &[&own], "", 403);
    }
    check(
        &server,
        ("GET", "/quota/a", ""),
        200,
        &[("/limit_gb", 1.5.into())],
    );
}

#[test]
fn tools_scrapers_and_the_servers_own_pages_pass() {
    let server = Server::start();
    let port = server.http.port();
    let address = format!("Host: 127.0.0.1:{port}");
    let json = "Content-Type: application/json";
    let passes = |line: &str, headers: &[&str], body: &str| {
        let found = server.code(line, headers, body);
        assert_eq!(found, 200, "{line} with {headers:?}");
    };
    // LMCache's tools, which speak with Python's urllib.
    let urllib = [
        "Accept-Encoding: identity",
        "User-Agent: Python-urllib/3.11",
        &address,
    ];
    passes("GET /status", &urllib, "");
    passes("GET /healthcheck", &urllib, "");
    passes("DELETE /quota/a", &urllib, "");
    let urllib = [urllib.as_slice(), &[json]].concat();
    passes("POST /cache/clear", &urllib, "{\"tier\": \"l1\"}");
    passes("PUT /quota/a", &urllib, "{\"limit_gb\": 1}");
    // A probe that speaks HTTP/1.0, Prometheus by the name of a Service, and by IPv6.
    assert!(
        server
            .raw(b"GET /healthz HTTP/1.0\r\n\r\n")
            .starts_with("HTTP/1.0 200")
    );
    for host in [
        "Host: lmc.cache.svc:8080",
        "Host: LMC",
        "Host: [::1]:8080",
        "Host: localhost",
    ] {
        passes("GET /metrics", &[host], "");
    }
    // A person who types the address, and a page that this server itself might have served.
    passes("GET /status", &[&address, "Sec-Fetch-Site: none"], "");
    let own = format!("Origin: http://127.0.0.1:{port}");
    let own = [
        &address,
        own.as_str(),
        "Sec-Fetch-Site: same-origin",
        "Content-Type: application/json; charset=utf-8",
    ];
    passes("POST /cache/clear", &own, "{}");
}

/// Prometheus takes gzip, and a page of metrics was 47 KB at every scrape.
#[test]
fn answers_are_compressed_for_those_who_take_it() {
    let server = Server::start();
    let length = |accepts: &str| {
        let ask = format!(
            "GET /metrics HTTP/1.1\r\nhost: localhost\r\n{accepts}connection: close\r\n\r\n"
        );
        let mut stream = TcpStream::connect(server.http).expect("a connection");
        stream.write_all(ask.as_bytes()).expect("a request");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        let head = String::from_utf8_lossy(&answer).to_ascii_lowercase();
        let head = head.split("\r\n\r\n").next().expect("a head").to_owned();
        (head.contains("content-encoding: gzip"), answer.len())
    };
    let (compressed, plain) = length("");
    assert!(!compressed);
    assert!(!length("accept-encoding: identity\r\n").0);
    let (compressed, small) = length("accept-encoding: gzip\r\n");
    assert!(compressed && small * 4 < plain, "{small} of {plain}");
}

#[test]
fn a_server_that_stops_is_alive_and_not_ready() {
    let server = Server::start();
    for path in ["/livez", "/readyz", "/healthz"] {
        assert_eq!(server.ask("GET", path, "").0, 200, "{path}");
    }
    server.stopping.send_replace(true);
    for path in ["/readyz", "/healthz"] {
        let (code, answer) = server.json("GET", path, "");
        assert_eq!(
            (code, &answer["status"]),
            (503, &"stopping".into()),
            "{path}"
        );
    }
    assert_eq!(server.ask("GET", "/healthcheck", "").0, 503);
    let (code, status) = server.json("GET", "/status", "");
    assert_eq!((code, &status["status"]), (200, &"stopping".into()));
    for path in ["/livez", "/metrics"] {
        assert_eq!(server.ask("GET", path, "").0, 200, "{path}");
    }
    assert_eq!(server.ask("POST", "/cache/clear", "{}").0, 503);
}
