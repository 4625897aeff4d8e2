//! The page at `/`, and what it shows: the state every two seconds, the last hour, and what other sizes
//! of the cache would give.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::sse::{Event, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::stream::unfold;
use lmc_vllm_adapter::ServiceStatus;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{Http, Probe, Shared, lmcache, refusal};

/// Time between two states of a stream.
const LIVE_EVERY: Duration = Duration::from_secs(2);
/// Time between two samples of the history, and their number: one hour and its start.
const SAMPLE_EVERY: Duration = Duration::from_secs(10);
const SAMPLES: usize = 361;
/// Streams at a time.
pub(super) const MAX_STREAMS: usize = 16;

/// The page uses nothing but itself and this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

pub(super) fn routes() -> Router<Arc<Http>> {
    Router::new()
        .route("/", get(page))
        .route("/live", get(live))
        .route("/history", get(history))
        .route("/advise", get(advise))
}

/// Answers browsers with the page, and others as LMCache's server does.
async fn page(headers: HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).into_iter();
    let mut accepted = accepted.filter_map(|accepted| accepted.to_str().ok());
    if !accepted.any(|accepted| accepted.contains("text/html")) {
        let root = json!({"status": "ok", "service": "lmc"});
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

/// Sends the state, as `/status` answers it, until the client leaves or the server stops.
async fn live(State(http): Shared) -> Response {
    let Ok(seat) = Arc::clone(&http.streams).try_acquire_owned() else {
        let text = format!("{MAX_STREAMS} pages are open already: close one");
        return refusal(StatusCode::SERVICE_UNAVAILABLE, text);
    };
    let stopping = http.stopping.clone();
    let states = unfold((http, seat, stopping, true), |state| async move {
        let (http, seat, mut stopping, is_first) = state;
        if !is_first {
            tokio::select! {
                () = tokio::time::sleep(LIVE_EVERY) => {}
                () = stopped(&mut stopping) => return None,
            }
        }
        let event = match lmcache::state(&http, false).await {
            Ok(state) => Event::default().json_data(state),
            Err(reason) => Event::default().event("fault").json_data(reason),
        };
        Some((event, (http, seat, stopping, false)))
    });
    Sse::new(states).into_response()
}

async fn stopped(stopping: &mut Option<watch::Receiver<bool>>) {
    match stopping {
        // An error means that the sender is gone, which ends the server as well.
        Some(stopping) => drop(stopping.wait_for(|&stop| stop).await),
        None => std::future::pending().await,
    }
}

/// The figures of the last hour.
#[derive(Debug, Default)]
pub(super) struct History(Mutex<VecDeque<Sample>>);

/// The figures of one moment, which are counted since the start where they can only grow.
#[derive(Debug, Clone, Serialize)]
struct Sample {
    /// Seconds since 1970.
    time: u64,
    asked_tokens: u64,
    found_dram_tokens: u64,
    found_lower_tokens: u64,
    /// Tokens that were not found, by the reason.
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
    bytes: u64,
    written_bytes: u64,
    promoted_bytes: u64,
}

impl Sample {
    fn of(status: &ServiceStatus) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let counts = &status.counts;
        let tiers = status.lower.iter().map(|tier| TierSample {
            tier: tier.tier.clone(),
            bytes: tier.bytes,
            written_bytes: tier.written_bytes,
            promoted_bytes: tier.promoted_bytes,
        });
        Self {
            time: time.unwrap_or_default().as_secs(),
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

/// Returns the counters of misses that are not zero, by their reasons.
fn missed(counts: &Value) -> Value {
    let counts = counts.as_object().into_iter().flatten();
    let missed = counts.filter_map(|(name, tokens)| {
        let reason = name.strip_prefix("missed_")?;
        (*tokens != 0).then(|| (reason.to_owned(), tokens.clone()))
    });
    Value::Object(missed.collect())
}

impl History {
    /// Takes samples until the server stops.
    pub(super) async fn keep(&self, probe: Probe, mut stopped: watch::Receiver<bool>) {
        let mut every = tokio::time::interval(SAMPLE_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = every.tick() => {}
                _ = stopped.wait_for(|&stop| stop) => return,
            }
            if let Ok(status) = probe.status().await {
                self.add(Sample::of(&status));
            }
        }
    }

    fn add(&self, sample: Sample) {
        let mut samples = self.0.lock();
        if samples.len() == SAMPLES {
            samples.pop_front();
        }
        samples.push_back(sample);
    }
}

async fn history(State(http): Shared) -> Response {
    let samples: Vec<Sample> = http.history.0.lock().iter().cloned().collect();
    Json(json!({"every_seconds": SAMPLE_EVERY.as_secs(), "samples": samples})).into_response()
}

/// Answers which hit ratio caches of other sizes would have given.
async fn advise(State(http): Shared) -> Response {
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
        (0..1000).for_each(|time| history.add(sample(time)));
        let samples = history.0.lock();
        assert_eq!(
            (samples.len(), samples[0].time),
            (SAMPLES, 1000 - SAMPLES as u64)
        );
        assert_eq!(samples[0].missed_tokens, json!({"evicted": 3}));
    }
}
