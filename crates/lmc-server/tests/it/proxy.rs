//! `lmc proxy` between a client and engines that these tests play.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use lmc_testkit::{DEADLINE, Process, free_port, until};
use serde_json::{Value, json};

use crate::common::played::{Asked, HttpServer, url};
use crate::common::{ask, lmc};

struct Proxy {
    process: Process,
    port: u16,
}

impl Proxy {
    fn start(prefill: &[&str], decode: &[&str], flags: &[&str]) -> Self {
        let port = free_port();
        let mut command = lmc();
        command.args(["proxy", "--listen", &format!("127.0.0.1:{port}")]);
        for url in prefill {
            command.args(["--prefill", url]);
        }
        for url in decode {
            command.args(["--decode", url]);
        }
        let process = Process::spawn(command.args(flags));
        process.line("listening for clients");
        Self { process, port }
    }

    /// Sends a request and returns its connection.
    fn post(&self, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        let length = body.len();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .expect("a request");
        stream
    }

    fn metric(&self, line: &str) -> f64 {
        let (_, page) = ask(self.port, "GET", "/metrics", "");
        let found = page.lines().find_map(|found| found.strip_prefix(line));
        found
            .and_then(|value| value.trim().parse().ok())
            .expect("a metric")
    }
}

/// Starts a prefill engine, a decode engine and a proxy for both.
fn pair() -> (HttpServer, HttpServer, Proxy) {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &[]);
    (prefill, decode, proxy)
}

fn rest(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// Returns a request with a prompt that no engine has had.
fn long_prompt() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let prompt = format!(
        "{} {}",
        NEXT.fetch_add(1, Ordering::Relaxed),
        "word ".repeat(1000)
    );
    json!({"model": "m", "prompt": prompt, "max_tokens": 50, "stream": true}).to_string()
}

const PATH: &str = "/v1/completions";

/// Each turn once went through a prefill engine, which computed or read all turns before it.
#[test]
fn the_next_turn_of_a_conversation_goes_to_the_engine_that_had_the_others() {
    let prefill = HttpServer::start();
    let decode = [HttpServer::start(), HttpServer::start()];
    let urls = decode.each_ref().map(HttpServer::url);
    let urls = urls.each_ref().map(|url| &url[..]);
    let proxy = Proxy::start(&[&prefill.url()], &urls, &[]);
    let path = "/v1/chat/completions";
    let say = |role: &str, words: usize| json!({"role": role, "content": "word ".repeat(words)});
    let first = [say("user", 2000)];
    let second = [&first[..], &[say("assistant", 100), say("user", 20)]].concat();
    let third = [&second[..], &[say("assistant", 400), say("user", 600)]].concat();
    let ask = |messages: &[Value], salt: &str| {
        let body = json!({"messages": messages, "cache_salt": salt});
        proxy.post(path, "", &body.to_string())
    };
    let answer = |client, engine: &HttpServer| {
        engine.next().answer(200, "answered");
        assert!(rest(client).ends_with("answered"));
    };
    // One that breaks off, and one that fails, have nothing.
    for _ in 0..2 {
        let client = ask(&first, "a");
        prefill.next().answer(200, "{}");
        let mut asked = decode[0].next();
        asked.begin();
        drop(asked);
        rest(client);
        let client = ask(&first, "a");
        prefill.next().answer(200, "{}");
        decode[1].next().answer(400, "no");
        rest(client);
    }
    let client = ask(&first, "a");
    prefill.next().answer(200, "{}");
    answer(client, &decode[0]);
    for _ in 0..3 {
        answer(ask(&second, "a"), &decode[0]);
    }
    assert!(prefill.has_none());
    // The engine lacks a third.
    let client = ask(&third, "a");
    prefill.next().answer(200, "{}");
    answer(client, &decode[0]);
    // None has anything of another tenant's.
    let client = ask(&second, "b");
    prefill.next().answer(200, "{}");
    answer(client, &decode[0]);
    let outcome =
        |name: &str| proxy.metric(&format!("lmc_proxy_requests_total{{prefill=\"{name}\"}}"));
    assert_eq!([outcome("warm"), outcome("done")], [3.0, 7.0]);
}

#[test]
fn a_prompt_is_computed_by_one_engine_and_answered_by_another() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let trace = ["--log-level", "trace"];
    let proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &trace);
    // Spaces that no encoder would make.
    let body = long_prompt().replace(',', " ,  ");
    let headers = "authorization: Bearer secret\r\nx-other: 1\r\nproxy-authorization: hop\r\n";
    let client = proxy.post(PATH, headers, &body);
    let first = prefill.next();
    assert_eq!(first.line, "POST /v1/completions HTTP/1.1");
    let asked = first.json();
    assert_eq!(
        (&asked["max_tokens"], &asked["stream"]),
        (&json!(1), &json!(false))
    );
    let id = first.header("x-request-id").expect("an id").to_owned();
    assert_eq!(id.len(), 32);
    assert_eq!(first.header("authorization"), Some("Bearer secret"));
    assert!(decode.has_none(), "the prompt is not computed yet");
    first.answer(200, "{}");
    let second = decode.next();
    assert_eq!(second.body, body.as_bytes(), "the client's own bytes");
    assert_eq!(second.header("x-request-id"), Some(&id[..]));
    assert_eq!(second.header("authorization"), Some("Bearer secret"));
    assert_eq!(second.header("x-other"), Some("1"));
    assert_eq!(second.header("proxy-authorization"), None);
    assert_eq!(
        second.header("host"),
        Some(&format!("127.0.0.1:{}", decode.port)[..])
    );
    second.answer(200, "answered");
    let answer = rest(client);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        answer.contains("x-engine: yes") && answer.ends_with("answered"),
        "{answer}"
    );
    // An id of the client's stays as it is.
    let client = proxy.post(PATH, "x-request-id: mine\r\n", &long_prompt());
    let first = prefill.next();
    assert_eq!(first.header("x-request-id"), Some("mine"));
    // What the prefill engine refuses, the decode engine refuses in its own words.
    first.answer(400, "not this");
    let second = decode.next();
    assert_eq!(second.header("x-request-id"), Some("mine"));
    second.answer(404, "nor that");
    let answer = rest(client);
    assert!(
        answer.starts_with("HTTP/1.1 404") && answer.ends_with("nor that"),
        "{answer}"
    );
    assert_eq!(
        proxy.metric("lmc_proxy_requests_total{prefill=\"done\"}"),
        1.0
    );
    assert_eq!(
        proxy.metric("lmc_proxy_requests_total{prefill=\"refused\"}"),
        1.0
    );
    let log = proxy.process.log().join("\n");
    assert!(!log.contains("secret") && !log.contains("word"), "{log}");
}

#[test]
fn an_answer_is_passed_on_as_it_comes() {
    let (prefill, decode, proxy) = pair();
    let mut client = proxy.post(PATH, "", &long_prompt());
    prefill.next().answer(200, "{}");
    let mut streamed = decode.next();
    streamed.begin();
    for part in ["data: one\n\n", "data: two\n\n"] {
        streamed.part(part);
        let mut seen = Vec::new();
        let mut byte = [0];
        // Before the engine sends more.
        while !seen.ends_with(part.as_bytes()) {
            client.read_exact(&mut byte).expect("more of it");
            seen.push(byte[0]);
        }
    }
    assert_eq!(proxy.metric(&in_flight("decode", &decode)), 1.0);
    streamed.send("0\r\n\r\n");
    assert_eq!(rest(client), "\r\n0\r\n\r\n");
    until("the request is over", || {
        proxy.metric(&in_flight("decode", &decode)) == 0.0
    });
}

fn in_flight(role: &str, engine: &HttpServer) -> String {
    let url = engine.url();
    format!("lmc_proxy_engine_in_flight{{role=\"{role}\",engine=\"{url}\"}}")
}

#[test]
fn an_answer_that_breaks_off_does_not_look_whole() {
    let (prefill, decode, proxy) = pair();
    let client = proxy.post(PATH, "", &long_prompt());
    prefill.next().answer(200, "{}");
    let mut streamed = decode.next();
    streamed.begin();
    streamed.part("data: one\n\n");
    drop(streamed);
    let answer = rest(client);
    assert!(
        answer.contains("data: one") && !answer.ends_with("0\r\n\r\n"),
        "{answer:?}"
    );
}

#[test]
fn short_prompts_go_to_a_decode_engine_alone() {
    let (prefill, decode, proxy) = pair();
    let body = r#"{"prompt": "short"}"#;
    let client = proxy.post(PATH, "", body);
    let asked = decode.next();
    assert_eq!(asked.body, body.as_bytes());
    asked.answer(200, "answered");
    assert!(rest(client).ends_with("answered"));
    assert!(prefill.has_none());
    assert_eq!(
        proxy.metric("lmc_proxy_requests_total{prefill=\"short\"}"),
        1.0
    );
}

/// Clients could name peers to push to or to wait for.
#[test]
fn entries_of_clients_for_servers_reach_no_engine() {
    let (prefill, decode, proxy) = pair();
    let hints = r#""kv_transfer_params": {"lmcache.pd.to": "victim", "lmcache.tag.a": 1}"#;
    let long = long_prompt();
    let bodies = [
        format!("{{{hints}, \"prompt\": \"short\"}}"),
        format!("{{{hints}, {}", &long[1..]),
    ];
    for (body, is_long) in bodies.iter().zip([false, true]) {
        let client = proxy.post(PATH, "", body);
        let kept = json!({"lmcache.tag.a": 1});
        if is_long {
            let asked = prefill.next();
            assert_eq!(asked.json()["kv_transfer_params"], kept);
            asked.answer(200, "{}");
        }
        let asked = decode.next();
        assert_eq!(asked.json()["kv_transfer_params"], kept);
        asked.answer(200, "answered");
        assert!(rest(client).ends_with("answered"));
    }
    // An engine may understand more than the proxy does.
    for body in [
        "no JSON",
        r#"{"a": NaN, "kv_transfer_params": {"lmcache.pd.to": "victim"}}"#,
    ] {
        let answer = rest(proxy.post(PATH, "", body));
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    assert!(prefill.has_none() && decode.has_none());
}

/// Slow: a prefill has a whole second at least, and one is late.
#[test]
fn without_a_prefill_the_decode_engine_answers_all_the_same() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let asked = |proxy: &Proxy| proxy.post(PATH, "", &long_prompt());
    let answered = |proxy: &Proxy, client: TcpStream, what: &str| {
        decode.next().answer(200, "answered");
        assert!(rest(client).ends_with("answered"), "{what}");
        let line = format!("lmc_proxy_requests_total{{prefill=\"{what}\"}}");
        assert_eq!(proxy.metric(&line), 1.0, "{what}");
    };
    let proxy = Proxy::start(&[&url(free_port())], &[&decode.url()], &[]);
    answered(&proxy, asked(&proxy), "failed");
    let timeout = ["--prefill-timeout-seconds", "1"];
    let proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &timeout);
    let client = asked(&proxy);
    let held = prefill.next();
    answered(&proxy, client, "late");
    held.wait_for_end();
    let proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &[]);
    let client = asked(&proxy);
    prefill.next().answer(503, "no memory");
    answered(&proxy, client, "failed");
    // Another one computes what the first fails.
    let other = HttpServer::start();
    let proxy = Proxy::start(&[&url(free_port()), &other.url()], &[&decode.url()], &[]);
    let client = asked(&proxy);
    other.next().answer(200, "{}");
    answered(&proxy, client, "done");
}

#[test]
fn a_client_that_leaves_ends_both_legs() {
    let (prefill, decode, proxy) = pair();
    let client = proxy.post(PATH, "", &long_prompt());
    let asked = prefill.next();
    drop(client);
    asked.wait_for_end();
    assert!(decode.has_none(), "no client waits for an answer");
    // The decode engine computes and has not begun to answer, or it has.
    for has_begun in [false, true] {
        let client = proxy.post(PATH, "", &long_prompt());
        prefill.next().answer(200, "{}");
        let mut asked = decode.next();
        if has_begun {
            asked.begin();
            asked.part("data: one\n\n");
        }
        drop(client);
        asked.wait_for_end();
    }
    for (role, engine) in [("prefill", &prefill), ("decode", &decode)] {
        until("nothing is under way", || {
            proxy.metric(&in_flight(role, engine)) == 0.0
        });
    }
}

#[test]
fn another_decode_engine_takes_what_one_cannot() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let absent = url(free_port());
    let proxy = Proxy::start(&[&prefill.url()], &[&absent, &decode.url()], &[]);
    let client = proxy.post(PATH, "", r#"{"prompt": "short"}"#);
    decode.next().answer(200, "answered");
    assert!(rest(client).ends_with("answered"));
    assert_eq!(ask(proxy.port, "GET", "/health", "").0, 200);
    let alone = Proxy::start(&[&prefill.url()], &[&absent], &[]);
    let (code, answer) = ask(alone.port, "POST", PATH, r#"{"prompt": "short"}"#);
    assert_eq!(code, 502, "{answer}");
    assert!(
        answer.contains("\"error\"") && answer.contains(&absent),
        "{answer}"
    );
    assert_eq!(ask(alone.port, "GET", "/health", "").0, 503);
}

#[test]
fn an_engine_that_answers_with_errors_is_asked_after_others() {
    let (prefill, other) = (HttpServer::start(), HttpServer::start());
    let (first, second) = (HttpServer::start(), HttpServer::start());
    let (prefills, decodes) = ([prefill.url(), other.url()], [first.url(), second.url()]);
    let proxy = Proxy::start(
        &[&prefills[0], &prefills[1]],
        &[&decodes[0], &decodes[1]],
        &[],
    );
    let client = proxy.post(PATH, "", &long_prompt());
    prefill.next().answer(404, "no such model");
    other.next().answer(200, "{}");
    // Its answer is the client's all the same.
    first.next().answer(500, "broken");
    assert!(rest(client).starts_with("HTTP/1.1 500"));
    for _ in 0..2 {
        let client = proxy.post(PATH, "", &long_prompt());
        other.next().answer(200, "{}");
        second.next().answer(200, "answered");
        assert!(rest(client).ends_with("answered"));
    }
    assert!(prefill.has_none() && first.has_none());
}

#[test]
fn api_keys_are_in_no_log_and_no_error() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let mut proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &["--log-level=trace"]);
    let mut answers = Vec::new();
    for breaks_off in [false, true] {
        let client = proxy.post(PATH, "authorization: Bearer secret\r\n", &long_prompt());
        prefill.next().answer(500, "broken");
        let asked = decode.next();
        assert_eq!(asked.header("authorization"), Some("Bearer secret"));
        if breaks_off {
            drop(asked);
        } else {
            asked.answer(401, "no");
        }
        answers.push(rest(client));
    }
    let refused = "authorization: Bearer secret\r\n";
    answers.push(rest(proxy.post(PATH, refused, "{")));
    proxy.process.signal(libc::SIGTERM);
    assert!(proxy.process.wait().success());
    proxy.process.line("an engine failed");
    let log = proxy.process.log().join("\n");
    assert!(!log.contains("secret"), "{log}");
    let starts = ["HTTP/1.1 401", "HTTP/1.1 502", "HTTP/1.1 400"];
    for (answer, start) in answers.iter().zip(starts) {
        assert!(answer.starts_with(start), "{answer}");
        assert!(!answer.contains("secret"), "{answer}");
    }
}

#[test]
fn a_request_that_an_engine_has_read_is_sent_to_no_other() {
    let (prefill, first, second) = (
        HttpServer::start(),
        HttpServer::start(),
        HttpServer::start(),
    );
    let decodes = [first.url(), second.url()];
    let proxy = Proxy::start(&[&prefill.url()], &[&decodes[0], &decodes[1]], &[]);
    let client = proxy.post(PATH, "", r#"{"prompt": "short"}"#);
    drop(first.next());
    let answer = rest(client);
    assert!(
        answer.starts_with("HTTP/1.1 502") && answer.contains(&first.url()),
        "{answer}"
    );
    assert!(second.has_none());
}

#[test]
fn requests_of_unknown_length_are_read_to_their_end_or_refused() {
    let (_prefill, decode, proxy) = pair();
    let sent = |body: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", proxy.port)).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        write!(
            stream,
            "POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n{body}"
        )
        .expect("sent");
        stream
    };
    // More at a time than there would be memory for, if each counted as the longest.
    let clients: Vec<TcpStream> = (0..20).map(|_| sent("2\r\n{}\r\n0\r\n\r\n")).collect();
    let asked: Vec<Asked> = clients.iter().map(|_| decode.next()).collect();
    for asked in asked {
        assert_eq!(
            (asked.body.as_slice(), asked.header("transfer-encoding")),
            (&b"{}"[..], None)
        );
        asked.answer(200, "answered");
    }
    assert!(
        clients
            .into_iter()
            .all(|client| rest(client).ends_with("answered"))
    );
    let answer = rest(sent("no chunk\r\n"));
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(decode.has_none());
}

#[test]
fn pages_of_other_sites_reach_no_engine() {
    let (_prefill, decode, proxy) = pair();
    for headers in [
        "host: 127.0.0.1\r\nsec-fetch-site: cross-site\r\n",
        "host: 127.0.0.1\r\norigin: http://evil.example\r\n",
        "host: evil.example\r\n",
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", proxy.port)).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        write!(
            stream,
            "GET /v1/models HTTP/1.1\r\n{headers}connection: close\r\n\r\n"
        )
        .expect("sent");
        let answer = rest(stream);
        assert!(answer.starts_with("HTTP/1.1 403"), "{headers}: {answer}");
    }
    assert!(decode.has_none());
}

#[test]
fn what_is_no_request_for_engines_is_refused() {
    let (prefill, decode, proxy) = pair();
    assert_eq!(ask(proxy.port, "POST", "/reset_prefix_cache", "").0, 404);
    assert_eq!(ask(proxy.port, "GET", PATH, "").0, 405);
    let sent = |head: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", proxy.port)).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        let head =
            format!("POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{head}\r\n");
        stream.write_all(head.as_bytes()).expect("sent");
        rest(stream)
    };
    let answer = sent("content-type: text/plain\r\ncontent-length: 0\r\n");
    assert!(answer.starts_with("HTTP/1.1 415"), "{answer}");
    let answer = sent("content-type: application/json\r\ncontent-length: 67108865\r\n");
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(prefill.has_none() && decode.has_none());
    let client = thread::spawn(move || ask(proxy.port, "GET", "/v1/models", ""));
    let asked = decode.next();
    assert_eq!(asked.line, "GET /v1/models HTTP/1.1");
    asked.answer(200, "models");
    assert!(client.join().expect("an answer").1.ends_with("models"));
}

/// Slow: a connection without a request gets a second to end, and this one has one for longer.
#[test]
fn a_stop_lets_answers_under_way_end() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let mut proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &[]);
    let client = proxy.post(PATH, "", &long_prompt());
    prefill.next().answer(200, "{}");
    let mut streamed = decode.next();
    streamed.begin();
    streamed.part("data: one\n\n");
    proxy.process.signal(libc::SIGTERM);
    proxy.process.line("SIGTERM");
    thread::sleep(Duration::from_millis(1500));
    streamed.part("data: two\n\n");
    streamed.send("0\r\n\r\n");
    let answer = rest(client);
    assert!(
        answer.contains("data: two") && answer.ends_with("0\r\n\r\n"),
        "{answer:?}"
    );
    assert_eq!(proxy.process.wait().code(), Some(0));
}

/// Starts a proxy that knows the servers beside these prefill engines.
fn at_once(prefill: &[&HttpServer], decode: &HttpServer) -> Proxy {
    let urls: Vec<String> = prefill.iter().map(|engine| engine.url()).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let peers = ["--prefill-peer", "alpha", "--prefill-peer", "beta"];
    Proxy::start(&urls, &[&decode.url()], &peers[..2 * prefill.len()])
}

/// Starts a prefill engine whose server is known, a decode engine and a proxy for both.
fn pair_at_once() -> (HttpServer, HttpServer, Proxy) {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let proxy = at_once(&[&prefill], &decode);
    (prefill, decode, proxy)
}

fn outcomes(proxy: &Proxy, outcome: &str) -> f64 {
    proxy.metric(&format!(
        "lmc_proxy_requests_total{{prefill=\"{outcome}\"}}"
    ))
}

#[test]
fn both_engines_begin_at_once_where_the_server_beside_the_first_is_known() {
    let (prefill, decode, proxy) = pair_at_once();
    let client = proxy.post(PATH, "", &long_prompt());
    let (first, second) = (prefill.next(), decode.next());
    let id = first.header("x-request-id").expect("an id").to_owned();
    assert_eq!(second.header("x-request-id"), Some(&id[..]));
    let asked = second.json();
    let advice = &asked["kv_transfer_params"];
    assert_eq!(advice["lmcache.pd.source"], "alpha");
    let awaited = json!({"lmcache.pd.id": advice["lmcache.pd.id"]});
    assert_eq!(first.json()["kv_transfer_params"], awaited);
    assert_ne!(
        advice["lmcache.pd.id"], id,
        "a client may use its own twice"
    );
    let wait = advice["lmcache.pd.wait_ms"].as_u64().expect("a number");
    assert!((1..=60_000).contains(&wait), "{wait}");
    assert_eq!(asked["max_tokens"], 50, "the rest is the client's");
    first.answer(200, "{}");
    until("it is counted", || outcomes(&proxy, "done") == 1.0);
    second.answer(200, "answered");
    let answer = rest(client);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        answer.contains("x-engine: yes") && answer.ends_with("answered"),
        "{answer}"
    );
}

#[test]
fn an_answer_that_begins_before_the_prefill_has_ended_is_passed_on_and_leaves_it_alone() {
    let (prefill, decode, proxy) = pair_at_once();
    let mut client = proxy.post(PATH, "", &long_prompt());
    let (first, mut second) = (prefill.next(), decode.next());
    second.begin();
    second.part("data: one\n\n");
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"data: one\n\n") {
        client.read_exact(&mut byte).expect("more of it");
        seen.push(byte[0]);
    }
    second.part("data: two\n\n");
    second.send("0\r\n\r\n");
    let answer = rest(client);
    assert!(
        answer.contains("data: two") && answer.ends_with("0\r\n\r\n"),
        "{answer}"
    );
    // An abort can end an engine with LMCache's connector.
    assert_eq!(proxy.metric(&in_flight("prefill", &prefill)), 1.0);
    first.answer(200, "{}");
    until("it is counted", || outcomes(&proxy, "done") == 1.0);
}

/// The proxy ended the prefill, of which an engine with LMCache's connector died.
#[test]
fn a_stop_waits_for_prefills_whose_answers_have_ended() {
    let (prefill, decode, mut proxy) = pair_at_once();
    let client = proxy.post(PATH, "", &long_prompt());
    let (mut first, second) = (prefill.next(), decode.next());
    second.answer(200, "answered");
    assert!(rest(client).ends_with("answered"));
    proxy.process.signal(libc::SIGTERM);
    proxy.process.line("SIGTERM");
    assert!(first.stays_open(Duration::from_millis(300)));
    first.answer(200, "{}");
    assert_eq!(proxy.process.wait().code(), Some(0));
}

#[test]
fn a_prefill_that_fails_takes_back_what_a_decode_engine_waits_for() {
    let (prefill, decode, proxy) = pair_at_once();
    for (status, outcome) in [(500, "failed"), (400, "refused")] {
        let body = long_prompt();
        let client = proxy.post(PATH, "", &body);
        let (first, mut second) = (prefill.next(), decode.next());
        // As vLLM does for a stream, long before its first token.
        second.begin();
        first.answer(status, "");
        second.wait_for_end();
        let alone = decode.next();
        assert_eq!(alone.body, body.as_bytes(), "the client's own bytes");
        alone.answer(200, "answered");
        let answer = rest(client);
        assert!(answer.ends_with("answered"), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
        assert_eq!(outcomes(&proxy, outcome), 1.0);
    }
}

#[test]
fn another_prefill_engine_is_waited_for_under_its_own_name() {
    let (alpha, beta, decode) = (
        HttpServer::start(),
        HttpServer::start(),
        HttpServer::start(),
    );
    let proxy = at_once(&[&alpha, &beta], &decode);
    let client = proxy.post(PATH, "", &long_prompt());
    let (first, second) = (alpha.next(), decode.next());
    first.answer(503, "");
    second.wait_for_end();
    let (first, second) = (beta.next(), decode.next());
    assert_eq!(
        second.json()["kv_transfer_params"]["lmcache.pd.source"],
        "beta"
    );
    first.answer(200, "{}");
    until("it is counted", || outcomes(&proxy, "done") == 1.0);
    second.answer(200, "answered");
    assert!(rest(client).ends_with("answered"));
    assert_eq!(outcomes(&proxy, "failed"), 0.0);
}

#[test]
fn a_client_that_leaves_ends_both_legs_at_once() {
    let (prefill, decode, proxy) = pair_at_once();
    let client = proxy.post(PATH, "", &long_prompt());
    let (first, second) = (prefill.next(), decode.next());
    drop(client);
    first.wait_for_end();
    second.wait_for_end();
}

#[test]
fn each_engine_of_a_role_has_a_server_or_none_has() {
    let url = url(free_port());
    for role in ["prefill", "decode"] {
        let flag = format!("--{role}-peer");
        let mut command = lmc();
        command.args(["proxy", "--prefill", &url, "--decode", &url]);
        let refused = command.args([&flag, "a", &flag, "b"]).output();
        let refused = refused.expect("the binary runs");
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success());
        let wanted = format!("one {flag} for each --{role}");
        assert!(text.contains(&wanted), "{text}");
    }
}

#[test]
fn a_prompt_is_pushed_to_the_server_beside_the_engine_that_answers() {
    let (prefill, first, second) = (
        HttpServer::start(),
        HttpServer::start(),
        HttpServer::start(),
    );
    let decodes = [first.url(), second.url()];
    let flags = ["--decode-peer", "alpha", "--decode-peer", "beta"];
    let proxy = Proxy::start(&[&prefill.url()], &[&decodes[0], &decodes[1]], &flags);
    let body = long_prompt();
    let ask = || proxy.post(PATH, "", &body);
    let hints = |asked: &Asked| asked.json()["kv_transfer_params"].clone();
    // Both at once: the second goes to the other engine, though neither has a request yet.
    let (one, another) = (ask(), ask());
    let asked = [prefill.next(), prefill.next()];
    let mut named = [hints(&asked[0]), hints(&asked[1])];
    named.sort_by_key(ToString::to_string);
    let wanted = ["alpha", "beta"].map(|name| json!({"lmcache.pd.to": name}));
    assert_eq!(named, wanted);
    assert!(first.has_none() && second.has_none());
    asked.into_iter().for_each(|asked| asked.answer(200, "{}"));
    for engine in [&first, &second] {
        let asked = engine.next();
        assert_eq!(asked.body, body.as_bytes(), "the client's own bytes");
        asked.answer(200, "answered");
    }
    assert!(rest(one).ends_with("answered") && rest(another).ends_with("answered"));
}

#[test]
fn another_engine_answers_where_the_one_that_a_prompt_is_pushed_to_is_gone() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let decodes = [url(free_port()), decode.url()];
    let flags = ["--decode-peer", "alpha", "--decode-peer", "beta"];
    let proxy = Proxy::start(&[&prefill.url()], &[&decodes[0], &decodes[1]], &flags);
    // The one that has failed is not chosen again at once.
    for to in ["alpha", "beta"] {
        let client = proxy.post(PATH, "", &long_prompt());
        let asked = prefill.next();
        let hints = asked.json()["kv_transfer_params"].clone();
        assert_eq!(hints, json!({"lmcache.pd.to": to}));
        asked.answer(200, "{}");
        decode.next().answer(200, "answered");
        assert!(rest(client).ends_with("answered"));
    }
}

#[test]
fn a_prompt_is_pushed_to_a_server_that_waits_for_it() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let flags = ["--prefill-peer", "alpha", "--decode-peer", "beta"];
    let proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &flags);
    let client = proxy.post(PATH, "", &long_prompt());
    let (first, second) = (prefill.next(), decode.next());
    let (pushes, waits) = (first.json(), second.json());
    let (pushes, waits) = (&pushes["kv_transfer_params"], &waits["kv_transfer_params"]);
    let id = &waits["lmcache.pd.id"];
    assert_eq!(
        *pushes,
        json!({"lmcache.pd.id": id, "lmcache.pd.to": "beta"})
    );
    assert_eq!(waits["lmcache.pd.source"], "alpha");
    assert_eq!(waits["lmcache.pd.to"], json!(null));
    first.answer(200, "{}");
    second.answer(200, "answered");
    assert!(rest(client).ends_with("answered"));
}

/// Slow: a prefill has a whole second at least, and one is late.
#[test]
fn a_prefill_that_is_late_ends_no_answer_that_may_have_begun() {
    let (prefill, decode) = (HttpServer::start(), HttpServer::start());
    let flags = ["--prefill-peer", "alpha", "--prefill-timeout-seconds", "1"];
    let proxy = Proxy::start(&[&prefill.url()], &[&decode.url()], &flags);
    let client = proxy.post(PATH, "", &long_prompt());
    let (first, second) = (prefill.next(), decode.next());
    first.wait_for_end();
    until("it is counted", || outcomes(&proxy, "late") == 1.0);
    second.answer(200, "answered");
    assert!(rest(client).ends_with("answered"));
    assert!(decode.has_none());
}
