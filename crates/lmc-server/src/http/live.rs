//! The page at `/`, and its data: the state every two seconds, the last hour, the tenants, and the hit
//! ratios of other cache sizes.

use std::cmp::Reverse;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::sse::{Event, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use futures_util::stream::unfold;
use lmc_engine::{HistogramSnapshot, TenantId};
use lmc_vllm_adapter::ServiceStatus;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::guard::ConnectionUser;
use super::{Http, HttpState, STOPPING, lmcache, refusal};
use crate::salts;

/// Time between two states of a stream.
const LIVE_EVERY: Duration = Duration::from_secs(2);
/// Longest life of a stream, less than that of a connection. The page then opens another stream.
const STREAM_LIFE: Duration = Duration::from_secs(240);
/// States from one sample of the history to the next, and the number of samples: one hour, with its start.
const SAMPLE_TICKS: u64 = 5;
const SAMPLES: usize = 361;
/// Samples of durations: the oldest is a minute old, or up to a sample more.
const MINUTE_SAMPLES: usize = 7;
/// Most tenants that an answer lists.
const MAX_TENANTS: usize = 50;
/// Streams at a time.
pub(super) const MAX_STREAMS: usize = 16;

/// Content security policy: the page uses only itself and this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

pub(super) fn routes() -> Router<Arc<Http>> {
    Router::new()
        .route("/", get(page))
        .route("/live", get(live))
        .route("/history", get(history))
        .route("/tenants", get(tenants))
        .route("/advise", get(advise))
}

/// Answers browsers with the page, and other clients as LMCache's server does.
async fn page(headers: HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).into_iter();
    let mut accepted = accepted.filter_map(|accepted| accepted.to_str().ok());
    if !accepted.any(|accepted| accepted.contains("text/html")) {
        let root = json!({"status": "ok", "service": "lmc", "page": "open this address in a browser; /status and /metrics are for programs"});
        return ([(header::VARY, "accept")], Json(root)).into_response();
    }
    let headers = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::VARY, "accept"),
        (HeaderName::from_static("x-frame-options"), "DENY"),
    ];
    (headers, Html(include_str!("page.html"))).into_response()
}

/// Sends each state until the client leaves, the server stops, or the life of the stream is over.
async fn live(State(http): HttpState) -> Response {
    if http.is_stopping() {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, STOPPING);
    }
    let Ok(seat) = Arc::clone(&http.streams).try_acquire_owned() else {
        let text = format!("{MAX_STREAMS} pages are already open: close one");
        return refusal(StatusCode::SERVICE_UNAVAILABLE, text);
    };
    let end = tokio::time::Instant::now() + STREAM_LIFE;
    let states = unfold(
        (http.states.subscribe(), seat),
        move |(mut states, seat)| async move {
            let changed = tokio::time::timeout_at(end, states.changed()).await;
            changed.ok()?.ok()?;
            let state = states.borrow_and_update().clone()?;
            let event = match &*state {
                Ok(state) => Event::default().json_data(state),
                Err(reason) => Event::default().event("fault").json_data(reason),
            };
            Some((event, (states, seat)))
        },
    );
    Sse::new(states).into_response()
}

/// The last state that was read for pages; `None` before the first state and after the last.
pub(super) type LastState = watch::Sender<Option<Arc<Result<Value, String>>>>;

/// Reads the state while pages are open, once for all pages, and takes samples for the history, until the
/// server stops.
pub(super) async fn keep(http: Arc<Http>, mut stopped: watch::Receiver<bool>) {
    let probe = http.probe.alone();
    let mut stopping = http.stopping.clone().unwrap_or_else(|| stopped.clone());
    let mut every = tokio::time::interval(LIVE_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for tick in 0u64.. {
        tokio::select! {
            _ = every.tick() => {}
            // Errors mean that the senders are gone, which ends the server as well.
            _ = stopping.wait_for(|&stop| stop) => break,
            _ = stopped.wait_for(|&stop| stop) => break,
        }
        let is_sample = tick.is_multiple_of(SAMPLE_TICKS);
        let is_watched = http.states.receiver_count() > 0;
        if !is_sample && !is_watched {
            continue;
        }
        let status = probe.status().await;
        if let (true, Ok(status)) = (is_sample, &status) {
            http.history.add(Sample::of(status), Durations::of(status));
        }
        if is_watched {
            let state = status.map(|status| lmcache::state_of(&http, None, &status, false));
            http.states.send_replace(Some(Arc::new(state)));
        }
    }
    http.states.send_replace(None);
}

/// The figures of the last hour.
#[derive(Debug, Default)]
pub(super) struct History(Mutex<Samples>);

#[derive(Debug, Default)]
struct Samples {
    hour: VecDeque<Sample>,
    /// Durations of the last minute, which take more memory than a [`Sample`].
    minute: VecDeque<Arc<Durations>>,
}

/// The durations since the start, at one moment.
#[derive(Debug, Default)]
pub(super) struct Durations {
    operations: Vec<HistogramSnapshot>,
    reads: Vec<HistogramSnapshot>,
    writes: Vec<HistogramSnapshot>,
}

impl Durations {
    pub(super) fn of(status: &ServiceStatus) -> Self {
        let (operations, lower) = (status.operations.iter(), status.lower.iter());
        Self {
            operations: operations.map(|one| one.latency.clone()).collect(),
            reads: lower.clone().map(|tier| tier.read_time.clone()).collect(),
            writes: lower.map(|tier| tier.write_time.clone()).collect(),
        }
    }
}

/// The figures of one moment. Counters are since the start.
#[derive(Debug, Clone, Serialize)]
struct Sample {
    /// Seconds since 1970.
    time: u64,
    asked_tokens: u64,
    found_dram_tokens: u64,
    found_lower_tokens: u64,
    /// Tokens that were not found, by reason.
    missed_tokens: Value,
    used_bytes: u64,
    stored_bytes: u64,
    retrieved_bytes: u64,
    evicted_bytes: u64,
    tiers: Vec<TierSample>,
}

/// The figures of a lower tier.
#[derive(Debug, Clone, Serialize)]
struct TierSample {
    tier: String,
    found_tokens: u64,
    bytes: u64,
    written_bytes: u64,
    promoted_bytes: u64,
}

impl Sample {
    fn of(status: &ServiceStatus) -> Self {
        let counts = &status.counts;
        let tiers = status.lower.iter().map(|tier| TierSample {
            tier: tier.tier.clone(),
            found_tokens: tier.hit_tokens,
            bytes: tier.bytes,
            written_bytes: tier.written_bytes,
            promoted_bytes: tier.promoted_bytes,
        });
        Self {
            time: lmcache::seconds_since_1970(),
            asked_tokens: counts.lookup_tokens,
            found_dram_tokens: counts.hit_tokens_dram,
            found_lower_tokens: counts.hit_tokens_lower,
            missed_tokens: missed(&json!(counts)),
            used_bytes: status.usage.used_bytes,
            stored_bytes: counts.stored_bytes,
            retrieved_bytes: counts.retrieved_bytes,
            evicted_bytes: status.engine.evicted_bytes,
            tiers: tiers.collect(),
        }
    }
}

/// Returns the nonzero counters of misses, by reason.
fn missed(counts: &Value) -> Value {
    let counts = counts.as_object().into_iter().flatten();
    let missed = counts.filter_map(|(name, tokens)| {
        let reason = name.strip_prefix("missed_")?;
        (*tokens != 0).then(|| (reason.to_owned(), tokens.clone()))
    });
    Value::Object(missed.collect())
}

impl History {
    fn add(&self, sample: Sample, durations: Durations) {
        let Samples { hour, minute } = &mut *self.0.lock();
        if hour.len() == SAMPLES {
            hour.pop_front();
        }
        hour.push_back(sample);
        if minute.len() == MINUTE_SAMPLES {
            minute.pop_front();
        }
        minute.push_back(Arc::new(durations));
    }

    /// Returns the durations of a minute ago, or the first that were sampled since the start.
    fn minute_ago(&self) -> Arc<Durations> {
        let oldest = self.0.lock().minute.front().cloned();
        oldest.unwrap_or_default()
    }

    /// Adds the quantiles of durations to a state: of operations and lower tiers, since the start and in the
    /// last minute.
    pub(super) fn add_durations(&self, state: &mut Value, now: &Durations) {
        let before = self.minute_ago();
        let none = HistogramSnapshot::default();
        for (index, times) in now.operations.iter().enumerate() {
            let before = before.operations.get(index).unwrap_or(&none);
            state["operations"][index]["last_minute"] = quantiles(&times.since(before));
        }
        for (name, now, before) in [
            ("read_time", &now.reads, &before.reads),
            ("write_time", &now.writes, &before.writes),
        ] {
            for (index, times) in now.iter().enumerate() {
                let before = before.get(index).unwrap_or(&none);
                let mut shown = quantiles(times);
                shown["last_minute"] = quantiles(&times.since(before));
                state["lower"][index][name] = shown;
            }
        }
    }
}

/// Returns the number and the quantiles of durations.
fn quantiles(times: &HistogramSnapshot) -> Value {
    json!({
        "count": times.count(),
        "p50_seconds": quantile(times, 0.5),
        "p99_seconds": quantile(times, 0.99),
    })
}

/// Returns a quantile of durations in seconds; `None` if nothing was counted.
pub(super) fn quantile(times: &HistogramSnapshot, share: f64) -> Option<f64> {
    (times.count() > 0).then(|| times.quantile(share))
}

async fn history(State(http): HttpState) -> Response {
    let samples: Vec<Sample> = http.history.0.lock().hour.iter().cloned().collect();
    Json(json!({"every_seconds": SAMPLE_TICKS * LIVE_EVERY.as_secs(), "samples": samples}))
        .into_response()
}

/// Answers with the tenants that use the cache or have a quota, the largest first. Trusted users see their
/// salts, other users the digests that the metrics show.
async fn tenants(State(http): HttpState, Extension(user): Extension<ConnectionUser>) -> Response {
    let mut used = http.service.engine().tenants();
    used.retain(|tenant| tenant.bytes > 0 || tenant.quota.is_some());
    used.sort_by_key(|tenant| (Reverse(tenant.bytes), tenant.tenant));
    let further = used.split_off(used.len().min(MAX_TENANTS));
    let (limited, more): (Vec<_>, Vec<_>) = further
        .into_iter()
        .partition(|tenant| tenant.quota.is_some());
    used.extend(limited);
    let ids: HashSet<TenantId> = used.iter().map(|one| TenantId(one.tenant)).collect();
    let salts = http.service.salts_of(&ids);
    let digests = http.reload.digests();
    let shown = used.iter().map(|tenant| {
        let salt = salts.get(&TenantId(tenant.tenant));
        let name = match salt {
            // The tenant's number was removed because there were too many tenants; the tenant's chunks remain.
            None => "unknown".to_owned(),
            Some(salt) if user.is_trusted() => salts::in_clear(salt).to_owned(),
            Some(salt) => digests.short(salt),
        };
        json!({
            "tenant": name,
            "digest": salt.map(|salt| digests.short(salt)),
            "bytes": tenant.bytes,
            "quota_bytes": tenant.quota,
        })
    });
    Json(json!({
        "tenants": shown.collect::<Vec<_>>(),
        "more": more.len(),
        "more_bytes": more.iter().map(|tenant| tenant.bytes).sum::<u64>(),
    }))
    .into_response()
}

/// Answers with the hit ratios that caches of other sizes would have had.
async fn advise(State(http): HttpState) -> Response {
    let curve = http.service.engine().demand();
    let status = match http.probe.status().await {
        Ok(status) => status,
        Err(reason) => return refusal(StatusCode::SERVICE_UNAVAILABLE, reason),
    };
    let memory = status.usage.pool_bytes;
    let drives = status.lower.iter().filter(|tier| tier.tier == "disk");
    let drives: u64 = drives.filter_map(|tier| tier.capacity).sum();
    let more = |(what, bytes): (&str, u64)| json!({"what": what, "bytes": bytes, "hit_ratio": curve.hit_ratio(bytes)});
    let sizes = [
        ("memory", memory),
        ("memory and drives", memory.saturating_add(drives)),
        (
            "twice that",
            memory.saturating_add(drives).saturating_mul(2),
        ),
        (
            "four times that",
            memory.saturating_add(drives).saturating_mul(4),
        ),
    ];
    Json(json!({
        "followed": curve.followed,
        "memory_bytes": memory,
        "drive_bytes": drives,
        "sizes": sizes.map(more),
        "points": curve.points,
    }))
    .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_is_an_hour_long() {
        let history = History::default();
        let sample = |time| Sample {
            time,
            asked_tokens: 0,
            found_dram_tokens: 0,
            found_lower_tokens: 0,
            missed_tokens: missed(&json!({"missed_evicted": 3, "missed_limit": 0, "lookups": 7})),
            used_bytes: 0,
            stored_bytes: 0,
            retrieved_bytes: 0,
            evicted_bytes: 0,
            tiers: Vec::new(),
        };
        let durations = |count| Durations {
            operations: vec![HistogramSnapshot {
                buckets: vec![count],
                sum_seconds: 0.0,
            }],
            ..Durations::default()
        };
        assert!(history.minute_ago().operations.is_empty());
        (0..1000).for_each(|time| history.add(sample(time), durations(time)));
        assert_eq!(history.minute_ago().operations[0].buckets, [993]);
        let mut state = json!({"operations": [{"operation": "lookup"}]});
        history.add_durations(&mut state, &durations(1000));
        assert_eq!(state["operations"][0]["last_minute"]["count"], 1000 - 993);
        let samples = history.0.lock();
        let hour = &samples.hour;
        assert_eq!((hour.len(), hour[0].time), (SAMPLES, 1000 - SAMPLES as u64));
        assert_eq!(hour[0].missed_tokens, json!({"evicted": 3}));
    }
}
