//! Paths and JSON of LMCache's MP server, as far as its own command-line tools ask for them:
//! `lmcache ping kvcache`, `describe kvcache`, `kvcache clear`, `quota …`.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use lmc_engine::TenantStatus;
use lmc_key::Salt;
use serde_json::{Map, Value, json};

use super::{Http, Shared, probe};
use crate::daemon::DEFAULT_SALT;

const GIB: f64 = (1u64 << 30) as f64;

pub(super) fn routes() -> Router<Arc<Http>> {
    Router::new()
        .route("/", get(async || Json(json!({"status": "ok", "service": "lmc"}))))
        .route("/healthcheck", get(health))
        .route("/status", get(status))
        .route("/config", get(async |State(http): Shared| Json(http.config.clone())))
        .route("/version", get(async || Json(json!({"version": env!("CARGO_PKG_VERSION")}))))
        .route("/cache/clear", post(clear))
        .route("/quota", get(quotas))
        .route("/quota/{salt}", get(quota).put(set_quota).delete(delete_quota))
}

fn refused(text: impl Into<String>) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({"error": text.into()}))).into_response()
}

async fn health(State(http): Shared) -> Response {
    match probe(&http).await {
        Ok(()) => Json(json!({"status": "healthy"})).into_response(),
        Err(reason) => {
            let body = Json(json!({"status": "unhealthy", "reason": reason}));
            (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
        }
    }
}

/// LMCache's fields where its tools look for them, and everything of ours under `lmc`.
async fn status(State(http): Shared) -> Response {
    let healthy = probe(&http).await.is_ok();
    let status = http.service.status(Instant::now());
    let mut contexts = Map::new();
    for instance in &status.instances {
        let context = json!({
            "model_name": instance.model,
            "world_size": instance.world_size,
            "kv_cache_layout": {
                "chunk_shape": instance.shape,
                "dtype": instance.dtype,
                "cache_size_per_token": instance.chunk_bytes / u64::from(status.chunk_size),
            },
        });
        contexts.insert(instance.instance_id.to_string(), context);
    }
    let usage = &status.usage;
    let share = usage.used_bytes as f64 / (usage.pool_bytes as f64).max(1.0);
    Json(json!({
        "is_healthy": healthy,
        "engine_type": "lmc",
        "chunk_size": status.chunk_size,
        "hash_algorithm": status.hash_algorithm,
        "active_sessions": status.sessions.sessions,
        "active_prefetch_jobs": 0,
        "storage_manager": {
            "l1_manager": {
                "memory_total_bytes": usage.pool_bytes,
                "memory_used_bytes": usage.used_bytes,
                "memory_usage_ratio": share,
                "total_object_count": usage.chunks,
            },
            "eviction_controller": {"eviction_policy": http.policy},
            "l2_adapters": [],
        },
        "cache_context_meta": contexts,
        "lmc": status,
    }))
    .into_response()
}

/// A body is optional; of its fields `tier` must be `l1` and `force` a boolean where given.
async fn clear(State(http): Shared, body: Bytes) -> Response {
    let asked: Value = if body.is_empty() {
        json!({})
    } else {
        match serde_json::from_slice(&body) {
            Ok(Value::Object(asked)) => Value::Object(asked),
            _ => return refused("expected a JSON object, such as {\"tier\": \"l1\"}"),
        }
    };
    if asked.get("tier").is_some_and(|tier| tier != "l1") {
        return refused("expected tier l1: there is no other yet");
    }
    let force = match asked.get("force") {
        None => false,
        Some(Value::Bool(force)) => *force,
        Some(_) => return refused("expected force to be true or false"),
    };
    let chunks = http.service.engine().clear(force);
    Json(json!({"status": "ok", "cleared": {"tier": "l1", "chunks": chunks}})).into_response()
}

fn parse_salt(path: &str) -> Result<Salt, Response> {
    let salt = if path == DEFAULT_SALT { "" } else { path };
    salt.parse::<Salt>().map_err(|error| refused(error.to_string()))
}

fn shown(salt: &Salt) -> &str {
    if salt.is_empty() { DEFAULT_SALT } else { salt.as_str() }
}

fn tenant(http: &Http, salt: &Salt) -> Option<TenantStatus> {
    let id = http.service.tenant(salt);
    http.service.engine().tenants().into_iter().find(|tenant| tenant.tenant == id.0)
}

async fn quota(State(http): Shared, Path(salt): Path<String>) -> Response {
    let salt = match parse_salt(&salt) {
        Ok(salt) => salt,
        Err(response) => return response,
    };
    let tenant = tenant(&http, &salt);
    let limit = tenant.and_then(|tenant| tenant.quota);
    Json(json!({
        "cache_salt": shown(&salt),
        "limit_gb": limit.unwrap_or(0) as f64 / GIB,
        "current_usage_gb": tenant.map_or(0, |tenant| tenant.bytes) as f64 / GIB,
        "exists": limit.is_some(),
    }))
    .into_response()
}

async fn set_quota(State(http): Shared, Path(salt): Path<String>, body: Bytes) -> Response {
    let salt = match parse_salt(&salt) {
        Ok(salt) => salt,
        Err(response) => return response,
    };
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let limit = body.get("limit_gb").and_then(Value::as_f64);
    let Some(limit) = limit.filter(|limit| limit.is_finite() && *limit >= 0.0) else {
        return refused("expected {\"limit_gb\": NUMBER} with a number that is not negative");
    };
    let bytes = (limit * GIB) as u64;
    http.service.engine().set_quota(http.service.tenant(&salt), Some(bytes));
    let body = json!({"cache_salt": shown(&salt), "limit_gb": limit, "status": "ok"});
    Json(body).into_response()
}

async fn delete_quota(State(http): Shared, Path(salt): Path<String>) -> Response {
    let salt = match parse_salt(&salt) {
        Ok(salt) => salt,
        Err(response) => return response,
    };
    let had = tenant(&http, &salt).is_some_and(|tenant| tenant.quota.is_some());
    http.service.engine().set_quota(http.service.tenant(&salt), None);
    let status = if had { "removed" } else { "not_found" };
    Json(json!({"cache_salt": shown(&salt), "status": status})).into_response()
}

async fn quotas(State(http): Shared) -> Response {
    let tenants = http.service.engine().tenants();
    let mut salts = http.service.tenants();
    salts.push((DEFAULT_SALT.to_owned(), Default::default()));
    let mut users = Map::new();
    for (salt, id) in salts {
        let known = tenants.iter().find(|tenant| tenant.tenant == id.0);
        if let Some((tenant, quota)) = known.and_then(|t| Some((t, t.quota?))) {
            let entry = json!({
                "limit_gb": quota as f64 / GIB,
                "current_usage_gb": tenant.bytes as f64 / GIB,
            });
            users.insert(salt, entry);
        }
    }
    Json(json!({"users": users})).into_response()
}
