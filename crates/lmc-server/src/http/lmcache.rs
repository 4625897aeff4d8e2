//! Paths and JSON of LMCache's MP server, so that its command-line tools and scripts built on it
//! continue to work: `lmcache ping kvcache`, `describe kvcache`, `kvcache clear`, `quota …`.
//!
//! Requests for L2 objects (listing, deleting and prefetching) are answered as LMCache answers without
//! L2 adapters.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::{Extension, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use lmc_engine::{HistogramSnapshot, InUse, TenantId, TenantStatus};
use lmc_key::Salt;
use lmc_vllm_adapter::{InspectError, InstanceStatus, OperationCounts, Service, ServiceStatus};
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::guard::ConnectionUser;
use super::live::{Durations, quantile};
use super::{Http, HttpState, deletion, refusal};
use crate::config::{Entry, Loaded, SegmentName, TierSettings, policy_name};
use crate::salts;

const GIB: f64 = (1u64 << 30) as f64;
/// Limit on the salts with a quota. Each eviction reads all quotas.
const MAX_QUOTAS: usize = 1024;
const UNDER_WAY: &str =
    "a deletion in the shared stores is under way: GET /cache/clear/shared shows its progress";
const CLEAR_FAILED: &str = "the clear failed: see the log";
const NO_L2: &str = "no L2 adapters configured: lmc's tiers below memory are set with --disk, and /status lists them";

pub(super) fn routes() -> Router<Arc<Http>> {
    Router::new()
        .route("/healthcheck", get(health))
        .route("/status", get(status))
        .route("/config", get(settings))
        .route(
            "/config/adapters",
            get(async || Json(json!({"adapters": []}))),
        )
        .route("/version", get(async || Json(env!("CARGO_PKG_VERSION"))))
        .route(
            "/lmc_version",
            get(async || Json(env!("CARGO_PKG_VERSION"))),
        )
        .route("/cache/clear", post(clear))
        .route("/cache/clear/shared", get(deletion::status))
        .route("/cache/objects", get(list_objects).delete(delete_objects))
        .route("/cache/checksums", post(checksums))
        .route(
            "/cache/prefetches",
            post(async || refusal(StatusCode::SERVICE_UNAVAILABLE, NO_L2)),
        )
        .route("/quota", get(quotas))
        .route(
            "/quota/{salt}",
            get(quota).put(set_quota).delete(delete_quota),
        )
}

fn refused(text: impl Into<String>) -> Response {
    refusal(StatusCode::BAD_REQUEST, text)
}

async fn health(State(http): HttpState) -> Response {
    match super::served(&http).await {
        Ok(_) => Json(json!({"status": "healthy"})).into_response(),
        Err((_, reason)) => {
            let body = json!({"status": "unhealthy", "reason": reason, "error": reason});
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}

/// Returns the settings in effect, with salts in clear for trusted users only.
async fn settings(State(http): HttpState, Extension(user): Extension<ConnectionUser>) -> Response {
    let loaded = http.reload.loaded();
    let shown = match user.is_trusted() {
        true => config(&http.service, &loaded, str::to_owned),
        false => config(&http.service, &loaded, |text| {
            let salt = salts::parse(text).unwrap_or_default();
            http.reload.digests().of(&salt).to_string()
        }),
    };
    Json(shown).into_response()
}

/// Returns the settings in LMCache's structure, and all of lmc's settings with their origin under `lmc`.
fn config(service: &Service, loaded: &Loaded, shown_salt: impl Fn(&str) -> String) -> Value {
    let config = &loaded.config;
    let shown = |entries: &[Entry]| {
        Map::from_iter(entries.iter().map(|entry| {
            let value = entry.shown(&shown_salt);
            let value = json!({"value": value, "source": entry.source.to_string()});
            (entry.info.key(), value)
        }))
    };
    let further: Vec<_> = loaded
        .further_remotes
        .iter()
        .map(|store| shown(store))
        .collect();
    let shm_name = match (&config.shm_name, service.engine().shared_name()) {
        (SegmentName::None, _) | (_, None) => Value::String(String::new()),
        (_, Some(name)) => Value::String(name.to_string()),
    };
    json!({
        "mp": {
            "transport": "zmq",
            "host": config.host,
            "port": config.port,
            "chunk_size": config.chunk_size,
            "max_workers": config.max_workers,
            "hash_algorithm": service.config().hasher.algorithm().name(),
            "engine_type": "default",
            "supported_transfer_mode": config.transfer_mode.name(),
            "shm_name": shm_name,
            "null_block_id": config.null_block_id.map_or(-1, i64::from),
            "session_ttl_seconds": config.session_ttl.as_secs_f64(),
            "worker_reap_timeout_seconds": config.reap_timeout.as_secs_f64(),
            "worker_registration_grace_seconds": config.registration_grace.as_secs_f64(),
            "kv_event_log_size": config.kv_event_log_size,
        },
        "storage_manager": {
            "l1_manager_config": {
                "memory_config": {
                    "size_in_bytes": service.engine().pool_bytes(),
                    "align_bytes": config.align_bytes,
                    "use_lazy": false,
                },
                "write_ttl_seconds": config.write_ttl.as_secs_f64(),
                "read_ttl_seconds": config.read_ttl.as_secs_f64(),
            },
            "eviction_config": {
                "eviction_policy": policy_name(config.eviction_policy),
                "trigger_watermark": config.eviction_watermark,
                "eviction_ratio": config.eviction_ratio,
            },
            "l2_adapter_config": {"adapters": []},
        },
        "http": {"http_host": config.http_host, "http_port": config.http_port},
        "lmc": shown(&loaded.entries),
        "lmc_further_remotes": further,
        "lmc_tiers": config.tiers.iter().map(TierSettings::name).collect::<Vec<_>>(),
    })
}

/// Answers with LMCache's fields where its tools look for them, and with lmc's own fields under `lmc`;
/// with `full=1` also with every bucket of the durations.
async fn status(State(http): HttpState, Query(asked): Query<Map<String, Value>>) -> Response {
    let full = asked.get("full").is_some_and(|full| full == "1");
    match state(&http, full).await {
        Ok(state) => Json(state).into_response(),
        Err(reason) => refusal(StatusCode::SERVICE_UNAVAILABLE, reason),
    }
}

/// Returns the state; with `full` also the histograms of operations.
///
/// # Errors
/// The reason why the state is not known.
async fn state(http: &Http, full: bool) -> Result<Value, String> {
    let (fault, status) = match super::served(http).await {
        Ok(status) => (None, status),
        Err(fault) => (Some(fault), http.probe.status().await?),
    };
    Ok(state_of(http, fault, &status, full))
}

/// Returns the seconds since 1970.
pub(super) fn seconds_since_1970() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// Returns the state of a server with this status; with `full` also the histograms of operations. `fault`
/// is the word and the reason if engines are not served.
pub(super) fn state_of(
    http: &Http,
    fault: Option<(&'static str, String)>,
    status: &ServiceStatus,
    full: bool,
) -> Value {
    let mut answer = lmcache_status(http, fault.is_none(), status);
    let (word, reason) = fault.unzip();
    answer["status"] = word.unwrap_or_else(|| super::condition(status)).into();
    answer["reason"] = reason.into();
    answer["lmc"] = json!(status);
    answer["lmc"]["time"] = seconds_since_1970().into();
    answer["lmc"]["operations"] = operations(status, full);
    let durations = Durations::of(status);
    http.history.add_durations(&mut answer["lmc"], &durations);
    answer["lmc"]["log_lines_dropped"] = crate::log::dropped_lines().into();
    answer
}

/// Returns the number and duration of each operation's requests.
fn operations(status: &ServiceStatus, full: bool) -> Value {
    let operation = |counts: &OperationCounts| {
        let latency = &counts.latency;
        let mut operation = json!({
            "operation": counts.operation,
            "answered": latency.count(),
            "refused": counts.refused,
            "sum_seconds": latency.sum_seconds,
            "p50_seconds": quantile(latency, 0.5),
            "p99_seconds": quantile(latency, 0.99),
        });
        if full {
            let bucket = |(index, count): (usize, &u64)| json!({"below_seconds": HistogramSnapshot::upper_bound(index), "count": count});
            operation["buckets"] = latency.buckets.iter().enumerate().map(bucket).collect();
        }
        operation
    };
    status.operations.iter().map(operation).collect()
}

fn lmcache_status(http: &Http, healthy: bool, status: &ServiceStatus) -> Value {
    let usage = &status.usage;
    let config = http.service.config();
    let (mut contexts, mut ids) = (Map::new(), [Vec::new(), Vec::new()]);
    for instance in &status.instances {
        let context = context(instance, status.chunk_size);
        contexts.insert(instance.instance_id.to_string(), context);
        // Text: an id may be above 2^53, which JavaScript and jq round.
        let id = instance.instance_id.to_string();
        ids[usize::from(instance.mode == "engine_driven")].push(id);
    }
    let l1 = json!({
        "is_healthy": healthy,
        "total_object_count": usage.chunks,
        "write_locked_count": usage.reserved_slots,
        "read_locked_count": usage.leases,
        "memory_used_bytes": usage.used_bytes,
        "memory_total_bytes": usage.pool_bytes,
        "memory_configured_bytes": usage.pool_bytes,
        "capacity_bytes_by_backend": {"dram": usage.pool_bytes},
        "memory_usage_ratio": usage.used_bytes as f64 / (usage.pool_bytes as f64).max(1.0),
        "write_ttl_seconds": config.transfer_deadline.as_secs_f64(),
        "read_ttl_seconds": config.lookup_lease.as_secs_f64(),
    });
    let eviction = json!({
        "is_healthy": healthy,
        "eviction_policy": http.policy,
        "trigger_watermark": http.watermark,
        "eviction_ratio": http.ratio,
    });
    json!({
        "is_healthy": healthy,
        "engine_type": "lmc",
        "chunk_size": status.chunk_size,
        "hash_algorithm": status.hash_algorithm,
        "active_sessions": status.sessions.sessions,
        "active_prefetch_jobs": status.sessions.promoting,
        "storage_manager": {
            "is_healthy": healthy,
            "l1_manager": l1,
            // The tool reads the first name, LMCache's server writes the second.
            "eviction_controller": eviction,
            "l1_eviction_controller": eviction,
            "l2_adapters": [],
            "num_l2_adapters": 0,
            "l1_capacity_bytes_by_backend": {"dram": usage.pool_bytes},
        },
        "registered_gpu_ids": ids[0],
        "registered_non_cuda_instance_ids": ids[1],
        "cache_context_meta": contexts,
        "worker_liveness": {
            "enabled": !config.reap_timeout.is_zero(),
            "reap_timeout_seconds": config.reap_timeout.as_secs_f64(),
            "registration_grace_seconds": config.registration_grace.as_secs_f64(),
            "tracked_instances": status.instances.len(),
        },
        "kv_events": {
            "enabled": status.events.enabled,
            "incarnation": status.events.incarnation.to_string(),
            "log_depth": status.events.depth,
            "log_capacity": status.events.capacity,
            "next_seq": status.events.next_seq,
            "subscribers": status.events.subscribers,
        },
    })
}

/// A worker as `lmcache describe kvcache` shows it.
fn context(instance: &InstanceStatus, chunk_size: u32) -> Value {
    // [2, layers, tokens, hidden], or [layers, tokens, hidden] if K and V are one plane.
    let layers = match instance.shape.as_slice() {
        [layers, _, _] | [_, layers, ..] => *layers,
        _ => 0,
    };
    let mut group = json!({
        "kernel_group_idx": 0,
        "object_group_idx": 0,
        "num_layers": layers,
        "dtype": instance.dtype,
        "engine_kv_shape": format!("{:?}", instance.shape),
    });
    // The tool shows the fields that are there.
    if let Some(mla) = instance.mla {
        group["is_mla"] = mla.into();
    }
    json!({
        "model_name": instance.model,
        "world_size": instance.world_size,
        "kv_cache_layout": {
            "num_layers": layers,
            "cache_size_per_token": instance.chunk_bytes / u64::from(chunk_size.max(1)),
            "kernel_groups": [group],
        },
    })
}

/// Clears the cache. The body is optional, and so are its fields: `tier` is `l1` or `all`; `force` and
/// `shared` are booleans. With `shared`, chunks in shared stores are deleted in the background.
async fn clear(State(http): HttpState, body: Bytes) -> Response {
    let asked: Value = if body.is_empty() {
        json!({})
    } else {
        match serde_json::from_slice(&body) {
            Ok(Value::Object(asked)) => Value::Object(asked),
            _ => return refused("expected a JSON object, such as {\"tier\": \"l1\"}"),
        }
    };
    let dram_only = match asked.get("tier").map(Value::as_str) {
        None | Some(Some("all")) => false,
        Some(Some("l1")) => true,
        _ => return refused("expected tier l1 (memory), or all"),
    };
    let is_asked = |name: &str| match asked.get(name) {
        None => Ok(false),
        Some(Value::Bool(asked)) => Ok(*asked),
        Some(_) => Err(format!("expected {name} to be true or false")),
    };
    let (force, shared) = match (is_asked("force"), is_asked("shared")) {
        (Ok(force), Ok(shared)) => (force, shared),
        (Err(reason), _) | (_, Err(reason)) => return refused(reason),
    };
    if shared && dram_only {
        return refused("shared requires tier all");
    }
    if shared && http.stores.is_empty() {
        return refused("this server has no shared store: start it with --remote URL");
    }
    if shared && http.deletion.is_under_way() {
        return refusal(StatusCode::CONFLICT, UNDER_WAY);
    }
    let (engine, in_use) = (http.service.engine().clone(), InUse::of_force(force));
    if dram_only {
        let Ok(chunks) = tokio::task::spawn_blocking(move || engine.clear_dram(in_use)).await
        else {
            return refusal(StatusCode::INTERNAL_SERVER_ERROR, CLEAR_FAILED);
        };
        tracing::info!(chunks, force, "memory emptied over HTTP");
        let cleared = json!({"tier": "l1", "chunks": chunks, "chunks_below": 0});
        return Json(json!({"status": "ok", "cleared": cleared})).into_response();
    }
    let cleared = match tokio::task::spawn_blocking(move || engine.clear(in_use)).await {
        Ok(Ok(cleared)) => cleared,
        Ok(Err(error)) => {
            let text = format!("nothing was cleared: {error}");
            return refusal(StatusCode::SERVICE_UNAVAILABLE, &text);
        }
        Err(_) => return refusal(StatusCode::INTERNAL_SERVER_ERROR, CLEAR_FAILED),
    };
    tracing::info!(
        chunks = cleared.dram,
        leased = cleared.leased,
        chunks_below = cleared.lower,
        durable = ?cleared.durable,
        unconfirmed = ?cleared.unconfirmed,
        force,
        "cache cleared over HTTP"
    );
    if shared && !http.deletion.start(&http.stores) {
        return refusal(StatusCode::CONFLICT, UNDER_WAY);
    }
    let tier = match http.service.engine().has_lower_tiers() {
        true => "all",
        false => "l1",
    };
    let mut answer = json!({
        "status": "ok",
        "cleared": {
            "tier": tier,
            "chunks": cleared.dram,
            "chunks_leased": cleared.leased,
            "chunks_below": cleared.lower,
            "complete": cleared.is_complete(),
            "durable": cleared.durable,
            "unconfirmed": cleared.unconfirmed,
        },
    });
    if shared {
        answer["stores"] = http.deletion.to_json();
    }
    Json(answer).into_response()
}

async fn list_objects(Query(asked): Query<Map<String, Value>>) -> Response {
    match asked.get("tier").and_then(Value::as_str).unwrap_or("l2") {
        "l2" => refusal(StatusCode::SERVICE_UNAVAILABLE, NO_L2),
        tier => refused(format!("tier '{tier}' not supported; only 'l2'")),
    }
}

async fn delete_objects(body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    match body.get("tier").and_then(Value::as_str).unwrap_or("l2") {
        "l2" => refusal(StatusCode::SERVICE_UNAVAILABLE, NO_L2),
        _ => refusal(
            StatusCode::NOT_IMPLEMENTED,
            "lmc does not delete single chunks over HTTP yet; POST /cache/clear empties the pool",
        ),
    }
}

/// Checksums of a worker's own blocks, which `lmcache bench server` compares before and after.
/// LMCache answers with MD5; lmc uses XXH3-128, which has the same length and is faster.
async fn checksums(State(http): HttpState, body: Bytes) -> Response {
    let asked: Value = match serde_json::from_slice(&body) {
        Ok(asked @ Value::Object(_)) => asked,
        _ => return refused("expected a JSON object with instance_id, block_ids and chunk_size"),
    };
    let ids = asked["block_ids"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let ids: Option<Vec<u32>> = ids
        .iter()
        .map(|id| u32::try_from(id.as_u64()?).ok())
        .collect();
    let Some(ids) = ids.filter(|ids| !ids.is_empty()) else {
        return refused("block_ids is required: a list of block ids");
    };
    let Some(per_chunk) = asked["chunk_size"].as_u64().filter(|blocks| *blocks > 0) else {
        return refused("chunk_size must be positive: it is the number of blocks in a chunk");
    };
    if asked["layerwise"] == true {
        return refusal(
            StatusCode::NOT_IMPLEMENTED,
            "layerwise checksums are not supported",
        );
    }
    // LMCache's tool sends a number; `/status` shows text.
    let id = &asked["instance_id"];
    let of_text = || id.as_str()?.parse().ok();
    let instance = id.as_u64().or_else(of_text).unwrap_or(0);
    // One request at a time: it copies gigabytes, and the engines' copies have priority.
    let Ok(permit) = Arc::clone(&http.inspections).try_acquire_owned() else {
        let text = "another request for checksums is under way: ask again when it has ended";
        return refusal(StatusCode::TOO_MANY_REQUESTS, text);
    };
    let service = http.service.clone();
    // Dropped with this handler, also when the client is gone or the deadline has passed.
    let (waits, gone) = oneshot::channel::<()>();
    let found = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        service.inspect_blocks(instance, &ids, per_chunk, |chunk| {
            let sum = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(chunk));
            (!waits.is_closed()).then_some(sum)
        })
    });
    let _gone = gone;
    match found.await {
        Ok(Ok(sums)) => Json(json!({
            "status": "success",
            "chunk_size": per_chunk,
            "num_chunks": sums.len(),
            "chunk_checksums": sums,
            "layerwise": false,
        }))
        .into_response(),
        Ok(Err(error)) => {
            let code = match error {
                InspectError::Unknown(_) => StatusCode::NOT_FOUND,
                InspectError::NotMapped(_) => StatusCode::NOT_IMPLEMENTED,
                _ => StatusCode::BAD_REQUEST,
            };
            refusal(code, error.to_string())
        }
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// Returns the usage and quota of a tenant that is already known. A question must not add a tenant:
/// otherwise any client could fill the table.
fn tenant(http: &Http, salt: &Salt) -> Option<TenantStatus> {
    let id = http.service.known_tenant(salt)?;
    Some(http.service.engine().tenant(id))
}

/// Answers trusted users only: an answer would confirm a guessed salt.
async fn quota(
    State(http): HttpState,
    Extension(user): Extension<ConnectionUser>,
    Path(salt): Path<String>,
) -> Response {
    if let Err(untrusted) = user.0 {
        return refusal(StatusCode::FORBIDDEN, untrusted.to_string());
    }
    let salt = match salts::parse(&salt) {
        Ok(salt) => salt,
        Err(error) => return refused(error.to_string()),
    };
    let tenant = tenant(&http, &salt);
    let limit = tenant.and_then(|tenant| tenant.quota);
    Json(json!({
        "cache_salt": salts::in_clear(&salt),
        "limit_gb": limit.unwrap_or(0) as f64 / GIB,
        "current_usage_gb": tenant.map_or(0, |tenant| tenant.bytes) as f64 / GIB,
        "exists": limit.is_some(),
    }))
    .into_response()
}

async fn set_quota(State(http): HttpState, Path(salt): Path<String>, body: Bytes) -> Response {
    let salt = match salts::parse(&salt) {
        Ok(salt) => salt,
        Err(error) => return refused(error.to_string()),
    };
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return refused("expected a JSON body, such as {\"limit_gb\": 20}");
    };
    let limit = body.get("limit_gb").and_then(Value::as_f64);
    let Some(limit) = limit.filter(|limit| limit.is_finite() && *limit >= 0.0) else {
        return refused("expected {\"limit_gb\": NUMBER} with a number that is not negative");
    };
    let bytes = (limit * GIB) as u64;
    let known = tenant(&http, &salt).is_some_and(|tenant| tenant.quota.is_some());
    if !known && count_quotas(&http) >= MAX_QUOTAS {
        return refused(format!(
            "{MAX_QUOTAS} salts have a quota, which is the limit: remove a quota with \
             DELETE /quota/SALT"
        ));
    }
    let is_kept = change_quota(&http, &salt, Some(bytes)).await;
    tracing::info!(salt = %http.reload.digests().of(&salt), bytes, is_kept, "quota set over HTTP");
    Json(json!({
        "cache_salt": salts::in_clear(&salt),
        "limit_gb": limit,
        "status": "ok",
        "kept": is_kept,
    }))
    .into_response()
}

fn count_quotas(http: &Http) -> usize {
    let tenants = http.service.engine().tenants();
    tenants
        .iter()
        .filter(|tenant| tenant.quota.is_some())
        .count()
}

/// Changes a quota on a thread that may block: the change walks the index, and is written to a file.
/// Returns true if the change lasts over a restart.
async fn change_quota(http: &Http, salt: &Salt, quota: Option<u64>) -> bool {
    let (reload, salt) = (Arc::clone(&http.reload), salt.clone());
    let changed = tokio::task::spawn_blocking(move || reload.set_quota(&salt, quota));
    // It fails only by a panic, which prints its own message.
    changed.await.unwrap_or(false)
}

async fn delete_quota(State(http): HttpState, Path(salt): Path<String>) -> Response {
    let salt = match salts::parse(&salt) {
        Ok(salt) => salt,
        Err(error) => return refused(error.to_string()),
    };
    let had = tenant(&http, &salt).is_some_and(|tenant| tenant.quota.is_some());
    if had {
        change_quota(&http, &salt, None).await;
        tracing::info!(salt = %http.reload.digests().of(&salt), "quota removed over HTTP");
    }
    let status = if had { "removed" } else { "not_found" };
    Json(json!({"cache_salt": salts::in_clear(&salt), "status": status})).into_response()
}

async fn quotas(State(http): HttpState, Extension(user): Extension<ConnectionUser>) -> Response {
    let tenants = http.service.engine().tenants();
    let limited: Vec<(TenantId, u64, u64)> = tenants
        .iter()
        .filter_map(|one| Some((TenantId(one.tenant), one.bytes, one.quota?)))
        .collect();
    let salts = http
        .service
        .salts_of(&limited.iter().map(|(id, ..)| *id).collect());
    let mut users = Map::new();
    for (id, used, quota) in limited {
        if let Some(salt) = salts.get(&id) {
            let entry = json!({
                "limit_gb": quota as f64 / GIB,
                "current_usage_gb": used as f64 / GIB,
            });
            let name = match user.is_trusted() {
                true => salts::in_clear(salt).to_owned(),
                false => http.reload.digests().of(salt).to_string(),
            };
            users.insert(name, entry);
        }
    }
    Json(json!({"users": users})).into_response()
}
