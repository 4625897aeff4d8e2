//! The HTTP side: health, metrics, status, and what LMCache's own tools ask.

mod lmcache;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use lmc_vllm_adapter::{Client, Reply, Request, Service};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::config::Loaded;
use crate::metrics;

/// Bodies are a few numbers.
const MAX_BODY: usize = 64 << 10;
/// How long the protocol's own socket may take to answer before the server counts as stuck.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// What the handlers share.
#[derive(Debug)]
pub struct Http {
    service: Service,
    /// Where engines connect; the health check does too.
    engines: SocketAddr,
    config: serde_json::Value,
    policy: &'static str,
}

impl Http {
    /// For a service whose engines connect to `engines`.
    pub fn new(service: Service, engines: SocketAddr, loaded: &Loaded) -> Self {
        let entries = loaded.entries.iter().map(|entry| {
            let value = json!({"value": entry.raw.to_string(), "source": entry.source.to_string()});
            (entry.info.key(), value)
        });
        Self {
            service,
            engines,
            config: serde_json::Value::Object(entries.collect()),
            policy: loaded.config.eviction_policy.name(),
        }
    }
}

type Shared = State<Arc<Http>>;

/// Answers until `stopped` turns true.
pub async fn serve(socket: TcpListener, http: Http, mut stopped: watch::Receiver<bool>) {
    let stop = async move {
        // An error means that the sender is gone, which ends the server as well.
        let _ = stopped.wait_for(|&stop| stop).await;
    };
    let served = axum::serve(socket, router(Arc::new(http))).with_graceful_shutdown(stop).await;
    if let Err(error) = served {
        tracing::error!(%error, "the HTTP side ended");
    }
}

fn router(http: Arc<Http>) -> Router {
    Router::new()
        .route("/healthz", get(health))
        .route("/metrics", get(metrics_page))
        .merge(lmcache::routes())
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(http)
}

/// Asks the protocol's own socket, as an engine would.
async fn probe(http: &Http) -> Result<(), String> {
    let mut address = http.engines;
    if address.ip().is_unspecified() {
        address.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
    }
    let asked = tokio::task::spawn_blocking(move || {
        let mut client = Client::connect(address, PROBE_DEADLINE)?;
        client.ask(&Request::Noop)
    });
    match asked.await {
        Ok(Ok(Reply::Text(_))) => Ok(()),
        Ok(Ok(other)) => Err(format!("the protocol's socket answered {other:?}")),
        Ok(Err(error)) => Err(format!("the protocol's socket does not answer: {error}")),
        Err(error) => Err(format!("the check failed: {error}")),
    }
}

async fn health(State(http): Shared) -> Response {
    match probe(&http).await {
        Ok(()) => Json(json!({"status": "ok"})).into_response(),
        Err(reason) => {
            let body = Json(json!({"status": "stuck", "reason": reason}));
            (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
        }
    }
}

async fn metrics_page(State(http): Shared) -> Response {
    let text = metrics::page(&http.service.status(Instant::now()));
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}
