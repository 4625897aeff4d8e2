//! Spans that `--otlp-endpoint` sends to a collector.

use std::collections::HashSet;
use std::thread;

use lmc_testkit::until;
use lmc_vllm_adapter::{ConfigValue, Reply, Request, RequestConfigs};
use serde_json::Value;

use crate::common::Server;
use crate::common::played::{Asked, HttpServer};
use crate::common::prompt::{self, CHUNK, CHUNKS, Prompt, WORKER, await_hits, end, register};

/// Parent of a request's spans, without the flag that says whether its caller records the trace.
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7";

fn start(collector: &HttpServer) -> Server {
    Server::start(&["--l1-size-gb", "64MiB", "--otlp-endpoint", &collector.url()])
}

fn configs(parent: &str) -> RequestConfigs {
    let mut configs = RequestConfigs::default();
    configs.set("lmcache.traceparent", ConfigValue::Text(parent.to_owned()));
    configs
}

/// Returns the spans of the next message.
fn next(collector: &HttpServer) -> (Vec<Value>, Asked) {
    let asked = collector.next();
    assert_eq!(asked.line, "POST /v1/traces HTTP/1.1");
    assert_eq!(asked.header("content-type"), Some("application/json"));
    let message = asked.json();
    let of_server = &message["resourceSpans"][0];
    assert_eq!(attribute(&of_server["resource"], "service.name"), "lmc");
    let spans = &of_server["scopeSpans"][0]["spans"];
    (spans.as_array().expect("a list").clone(), asked)
}

/// Returns this many spans, which the collector has taken.
fn taken(collector: &HttpServer, count: usize) -> Vec<Value> {
    let mut spans: Vec<Value> = Vec::new();
    while spans.len() < count {
        let (more, asked) = next(collector);
        asked.answer(200, "{}");
        for span in more {
            // A message that is answered late is sent again.
            if !spans.iter().any(|known| known["spanId"] == span["spanId"]) {
                spans.push(span);
            }
        }
    }
    assert_eq!(spans.len(), count, "{spans:?}");
    spans
}

/// Returns the value of an attribute; an empty text where it is missing.
fn attribute<'a>(of: &'a Value, key: &str) -> &'a str {
    let attributes = of["attributes"].as_array().expect("a list");
    let found = attributes.iter().find(|one| one["key"] == key);
    let value = found.map(|one| &one["value"]);
    let text = value.and_then(|value| value["stringValue"].as_str().or(value["intValue"].as_str()));
    text.unwrap_or_default()
}

fn request(span: &Value) -> &str {
    attribute(span, "gen_ai.request.id")
}

fn nanos(span: &Value, field: &str) -> u128 {
    let text = span[field].as_str().expect("a text");
    text.parse().expect("a number")
}

#[test]
fn the_steps_of_a_request_are_spans_of_its_callers_trace_or_of_one_of_its_own() {
    let collector = HttpServer::start();
    let server = start(&collector);
    let mut client = server.client();
    let shm_name = register(&mut client);
    let prompt = Prompt::default();
    let traced = || configs(&format!("{PARENT}-01"));
    let asked = prompt.look_up(&mut client, "one", traced());
    asked.expect("an answer");
    assert_eq!(await_hits(&mut client, "one"), 0);
    end(&mut client, "one");
    prompt.store_with(&mut client, &shm_name, traced());
    // Its caller does not record it.
    let asked = prompt.look_up(&mut client, "unrecorded", configs(&format!("{PARENT}-00")));
    asked.expect("an answer");
    end(&mut client, "unrecorded");
    assert_eq!(
        prompt.retrieve(&mut client, &shm_name, "two"),
        CHUNKS as u64
    );
    let spans = taken(&collector, 4);
    let steps: Vec<_> = (spans.iter())
        .map(|span| (span["name"].as_str().expect("a name"), request(span)))
        .collect();
    let wanted = [
        ("lmc.lookup", "one"),
        ("lmc.store", "store"),
        ("lmc.lookup", "two"),
        ("lmc.retrieve", "two"),
    ];
    assert_eq!(steps, wanted);
    let parts: Vec<&str> = PARENT.split('-').collect();
    for span in &spans[..2] {
        assert_eq!(span["traceId"], parts[1]);
        assert_eq!(span["parentSpanId"], parts[2]);
    }
    assert_ne!(spans[2]["traceId"], parts[1]);
    assert_eq!(spans[2]["traceId"], spans[3]["traceId"]);
    assert_eq!(spans[2]["parentSpanId"], Value::Null);
    let ids: HashSet<&str> = (spans.iter())
        .map(|span| span["spanId"].as_str().expect("an id"))
        .collect();
    assert_eq!(ids.len(), spans.len());
    assert!(ids.iter().all(|id| id.len() == 16));
    let tokens = (CHUNK * CHUNKS).to_string();
    assert_eq!(attribute(&spans[0], "lmc.tokens"), tokens);
    assert_eq!(attribute(&spans[0], "lmc.miss.reason"), "never_stored");
    assert_eq!(attribute(&spans[2], "lmc.tokens.memory"), tokens);
    assert_eq!(attribute(&spans[2], "lmc.miss.reason"), "");
    for copied in [&spans[1], &spans[3]] {
        assert_eq!(attribute(copied, "lmc.chunks"), CHUNKS.to_string());
        assert_eq!(attribute(copied, "gen_ai.request.model"), "model");
    }
    for span in &spans {
        assert_eq!(span["status"], Value::Null);
        assert!(nanos(span, "startTimeUnixNano") <= nanos(span, "endTimeUnixNano"));
    }
    assert_eq!(server.metric("lmc_spans_lost_total"), 0.0);
    // The last ones are sent when the server stops.
    prompt.begin_lookup(&mut client, "last");
    let stopping = thread::spawn(move || server.terminate());
    assert_eq!(request(&taken(&collector, 1)[0]), "last");
    stopping.join().expect("it stops");
}

#[test]
fn a_store_and_a_retrieve_that_fail_are_spans_with_an_error() {
    let collector = HttpServer::start();
    let server = start(&collector);
    let mut client = server.client();
    let shm_name = register(&mut client);
    let key = prompt::key("failing");
    let prepare = Request::PrepareRetrieve {
        key: key.clone(),
        instance_id: WORKER,
    };
    let reply = client.ask(&prepare).expect("an answer");
    assert_eq!(reply, Reply::RetrieveSlots(None));
    Prompt::default().prepare_store(&mut client, &shm_name);
    let abandon = Request::AbandonStore {
        key: prompt::key("store"),
        instance_id: WORKER,
    };
    assert_eq!(client.ask(&abandon).expect("an answer"), Reply::Bool(true));
    let spans = taken(&collector, 2);
    for (span, step) in spans.iter().zip(["lmc.retrieve", "lmc.store"]) {
        assert_eq!(span["name"], step);
        assert_eq!(span["status"]["code"], 2, "{span}");
        assert_eq!(attribute(span, "lmc.chunks"), "0");
    }
}

/// Engines notice nothing of a collector that fails.
#[test]
fn a_collector_that_fails_is_tried_again_and_costs_spans_only() {
    let collector = HttpServer::start();
    let server = start(&collector);
    let mut client = server.client();
    let prompt = Prompt::default();
    register(&mut client);
    let mut look_up = |request| {
        prompt.begin_lookup(&mut client, request);
        assert_eq!(await_hits(&mut client, request), 0);
        end(&mut client, request);
    };
    look_up("one");
    let (first, asked) = next(&collector);
    asked.answer(503, "");
    server.line("the collector does not take spans");
    look_up("two");
    let (again, asked) = next(&collector);
    assert_eq!(again, first);
    // It would refuse them again.
    asked.answer(400, "");
    until("they are lost", || {
        server.metric("lmc_spans_lost_total") == 1.0
    });
    let spans = taken(&collector, 1);
    assert_eq!(request(&spans[0]), "two");
    server.line("the collector takes spans again");
}
