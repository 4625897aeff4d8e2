//! Spans that `--otlp-endpoint` sends to a collector: OpenTelemetry's protocol over HTTP, in JSON.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use axum::body::Body;
use axum::http::Uri;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use lmc_vllm_adapter::{Copied, Service, Span, SpanStep};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_128;

use crate::http_client::{http_client, post_json};

/// Limit on the spans that wait for the collector; as many again may be being sent.
pub(crate) const MAX_QUEUED: usize = 8192;
/// Limit on the spans of one message.
const MAX_BATCH: usize = 512;
/// Time for which spans are collected and then sent together.
const BATCH_PAUSE: Duration = Duration::from_secs(1);
/// Time for which sending the collected spans is tried.
const BATCH_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time of one message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before the next try.
const TRY_PAUSE: Duration = Duration::from_secs(1);
/// Time that the collector has to take the last spans of a server that stops.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);
/// Kind of a span that answers another process, as OpenTelemetry numbers them.
const KIND_SERVER: u8 = 2;
/// Code of a step that failed.
const STATUS_ERROR: u8 = 2;

/// Sends the spans of a server to a collector, if there is one. Once `stopped` turns true, sends the last
/// spans and ends.
pub(crate) async fn send(
    service: Service,
    collector: Option<Uri>,
    mut stopped: watch::Receiver<bool>,
) {
    let Some(url) = collector else {
        return;
    };
    let mut collector = Collector::new(url, service);
    loop {
        let round = async {
            collector.service.spans_changed().await;
            sleep(BATCH_PAUSE).await;
            collector.waiting.extend(collector.service.take_spans());
            collector.send(Instant::now() + BATCH_TIMEOUT).await;
            collector.give_up();
        };
        tokio::select! {
            () = round => {}
            _ = stopped.wait_for(|&stop| stop) => break,
        }
    }
    collector.waiting.extend(collector.service.take_spans());
    let until = Instant::now() + LAST_TIMEOUT;
    let _ = timeout(LAST_TIMEOUT, collector.send(until)).await;
    if !collector.waiting.is_empty() {
        warn!(
            "the collector of --otlp-endpoint did not take the last spans in time; they are lost"
        );
    }
    collector.give_up();
}

/// A collector of spans.
struct Collector {
    url: Uri,
    client: Client<HttpConnector, Body>,
    service: Service,
    /// The spans that the collector has not taken yet.
    waiting: Vec<Span>,
    /// Number of the first waiting span, counted since the start.
    first: u64,
    /// Turns numbers into ids that no other process uses.
    ids: RandomState,
    /// True after the collector failed to take a message.
    is_failing: bool,
}

impl Collector {
    fn new(url: Uri, service: Service) -> Self {
        Self {
            url,
            client: http_client(),
            service,
            waiting: Vec::new(),
            first: 0,
            ids: RandomState::new(),
            is_failing: false,
        }
    }

    /// Sends the waiting spans. Repeats each message until the collector has taken it or the time is over.
    async fn send(&mut self, until: Instant) {
        while !self.waiting.is_empty() && Instant::now() < until {
            let batch = self.waiting.len().min(MAX_BATCH);
            let message = self.message(&self.waiting[..batch]);
            let sent = post_json(&self.client, &self.url, &message);
            let late = || anyhow!("no answer within {} s", MESSAGE_TIMEOUT.as_secs());
            let sent = timeout(MESSAGE_TIMEOUT, sent).await;
            let may_change = match sent.unwrap_or_else(|_| Err(late())) {
                Ok((status, answer)) if status.is_success() => {
                    if std::mem::take(&mut self.is_failing) {
                        info!(collector = %self.url, "the collector takes spans again");
                    }
                    self.service.count_lost_spans(rejected(&answer));
                    self.taken(batch);
                    continue;
                }
                Ok((status, _)) => {
                    self.failed(&anyhow!("the collector answers HTTP {status}"));
                    matches!(status.as_u16(), 408 | 429 | 502..=504)
                }
                Err(error) => {
                    self.failed(&error);
                    true
                }
            };
            if may_change {
                sleep(TRY_PAUSE).await;
            } else {
                self.service.count_lost_spans(batch);
                self.taken(batch);
            }
        }
    }

    /// Drops the waiting spans and counts them as lost.
    fn give_up(&mut self) {
        self.service.count_lost_spans(self.waiting.len());
        self.taken(self.waiting.len());
    }

    fn taken(&mut self, spans: usize) {
        self.waiting.drain(..spans);
        self.first += spans as u64;
    }

    fn failed(&mut self, error: &anyhow::Error) {
        if !std::mem::replace(&mut self.is_failing, true) {
            let error = format!("{error:#}");
            warn!(
                collector = %self.url,
                error,
                "the collector does not take spans: check whether it runs and takes OTLP over HTTP at this \
                 URL, usually at port 4318"
            );
        }
    }

    /// Returns the message with these spans, the first of the waiting ones, in OpenTelemetry's protocol.
    fn message(&self, spans: &[Span]) -> Value {
        let numbered = (self.first..).zip(spans);
        let spans = numbered.map(|(number, one)| span(one, self.ids.hash_one(number)));
        let spans: Vec<Value> = spans.collect();
        let version = env!("CARGO_PKG_VERSION");
        json!({"resourceSpans": [{
            "resource": {"attributes": [
                text("service.name", "lmc"),
                text("service.version", version),
            ]},
            "scopeSpans": [{"scope": {"name": "lmc", "version": version}, "spans": spans}],
        }]})
    }
}

/// Returns a span in OpenTelemetry's protocol. A span without a parent belongs to a trace of its request.
fn span(span: &Span, id: u64) -> Value {
    let trace = span.parent.map_or_else(
        || xxh3_128(span.request.as_bytes()),
        |parent| u128::from_be_bytes(parent.trace),
    );
    // Neither id may be all zero.
    let (trace, id) = (trace.max(1), id.max(1));
    let begun = span.ended.checked_sub(span.took).unwrap_or(UNIX_EPOCH);
    let mut attributes = vec![
        text("gen_ai.request.id", &span.request),
        text("gen_ai.request.model", &span.model),
    ];
    let mut has_failed = false;
    let name = match &span.step {
        SpanStep::Lookup {
            tokens,
            memory,
            lower,
            reason,
            is_certain,
            tier,
        } => {
            attributes.extend([
                number("lmc.tokens", *tokens),
                number("lmc.tokens.memory", *memory),
                number("lmc.tokens.lower", *lower),
            ]);
            if let Some(reason) = reason {
                let certainty = if *is_certain { "exact" } else { "probably" };
                attributes.extend([
                    text("lmc.miss.reason", reason),
                    text("lmc.miss.certainty", certainty),
                ]);
            }
            attributes.extend(tier.as_ref().map(|tier| text("lmc.miss.tier", tier)));
            "lmc.lookup"
        }
        SpanStep::Store(copied) => {
            has_failed = copied.has_failed;
            attributes.extend(copy(*copied));
            "lmc.store"
        }
        SpanStep::Retrieve(copied) => {
            has_failed = copied.has_failed;
            attributes.extend(copy(*copied));
            "lmc.retrieve"
        }
        _ => "lmc.step",
    };
    let mut value = json!({
        "traceId": format!("{trace:032x}"),
        "spanId": format!("{id:016x}"),
        "name": name,
        "kind": KIND_SERVER,
        "startTimeUnixNano": nanos(begun),
        "endTimeUnixNano": nanos(span.ended),
        "attributes": attributes,
    });
    if has_failed {
        value["status"] = json!({"code": STATUS_ERROR});
    }
    if let Some(parent) = span.parent {
        let parent = u64::from_be_bytes(parent.span);
        value["parentSpanId"] = Value::from(format!("{parent:016x}"));
    }
    value
}

/// Returns the number of spans of a message that the collector reports as rejected.
fn rejected(answer: &[u8]) -> usize {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let rejected = &answer["partialSuccess"]["rejectedSpans"];
    // OTLP writes numbers of 64 bits as text in JSON.
    let count = rejected.as_str().and_then(|text| text.parse().ok());
    let count = count.or(rejected.as_u64()).unwrap_or_default();
    usize::try_from(count).unwrap_or(MAX_BATCH).min(MAX_BATCH)
}

fn copy(copied: Copied) -> [Value; 3] {
    [
        number("lmc.kv_rank", copied.kv_rank.into()),
        number("lmc.chunks", copied.chunks),
        number("lmc.bytes", copied.bytes),
    ]
}

fn text(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

/// Returns an attribute. OTLP writes numbers of 64 bits as text in JSON.
fn number(key: &str, value: u64) -> Value {
    json!({"key": key, "value": {"intValue": value.to_string()}})
}

/// Returns a time as the text of its nanoseconds since 1970.
fn nanos(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos().to_string()
}
