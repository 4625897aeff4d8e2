//! The HTTP side: health, metrics, status, and the paths that LMCache's own tools ask.

pub(crate) mod access;
pub(crate) mod connections;
mod deletion;
pub(crate) mod guard;
mod live;
mod lmcache;
mod peers;
mod probe;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Extension, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use lmc_backend_p2p::P2pBackend;
use lmc_backend_p2p::directory::DirectoryHost;
use lmc_backend_remote::RemoteTier;
use lmc_key::Salt;
use lmc_vllm_adapter::{Service, ServiceStatus};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tower_http::compression::CompressionLayer;

use crate::config::policy_name;
use crate::drain::Drain;
use crate::metrics;
use crate::reload::{Reload, SettingChanges};
use crate::text::error_text;
use access::LiveAccess;
use connections::Bounds;
use guard::{ConnectionUser, Guard};
pub(crate) use probe::Probe;

/// Limit on a request's body: bodies are a few numbers, or LMCache's list of at most 10,000 keys.
const MAX_BODY: usize = 4 << 20;
/// Connections at a time.
const MAX_CONNECTIONS: usize = 128;
/// Longest life of a connection; a client that wants more connects again.
const LIFE: Duration = Duration::from_secs(300);
/// Longest time to end a connection: to finish the answer under way, and for the client to read it.
const END_DEADLINE: Duration = Duration::from_secs(12);
/// Longest time from a request's head to its answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

/// Reason why a stopping server serves no engine and changes nothing.
const STOPPING: &str = "the server is stopping";
/// Reason why a drained server is not ready.
const DRAINING: &str = "the server is being drained (lmc drain): it stores no more chunks";

/// State that the handlers share.
#[derive(Debug)]
pub struct Http {
    service: Service,
    guard: Guard,
    access: LiveAccess,
    probe: Probe,
    /// The settings in effect.
    reload: Arc<Reload>,
    /// The tier of peers, if the server has one.
    pub(crate) peers: Option<Arc<P2pBackend>>,
    copy: peers::LastCopy,
    /// The tiers of shared stores, in their order.
    pub(crate) stores: Vec<Arc<RemoteTier>>,
    deletion: deletion::LastDeletion,
    /// Lets one request at a time read an engine's memory.
    inspections: Arc<Semaphore>,
    policy: &'static str,
    watermark: f64,
    ratio: f64,
    /// The directory that this server hosts.
    pub(crate) directory: Option<Arc<DirectoryHost>>,
    /// True once the server stops; it answers HTTP requests until its tiers are closed.
    pub(crate) stopping: Option<watch::Receiver<bool>>,
    /// Socket on which only the metrics are served, if there is one.
    pub(crate) metrics_socket: Option<TcpListener>,
    changes: Changes,
    drain: Drain,
    history: live::History,
    states: live::LastState,
    /// Limits the streams to pages.
    streams: Arc<Semaphore>,
}

/// Requests that change something; a stop waits for them. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Changes(Arc<Semaphore>);

impl Changes {
    fn new() -> Self {
        Self(Arc::new(Semaphore::new(MAX_CONNECTIONS)))
    }

    /// Waits until the requests under way are answered. Later requests are refused.
    pub(crate) async fn end(&self) {
        let all = u32::try_from(MAX_CONNECTIONS).expect("a small number");
        // An error means that this was called before.
        let _all = self.0.acquire_many(all).await;
        self.0.close();
    }
}

impl Http {
    /// Creates the HTTP side of a service whose engines connect to `engines`.
    pub fn new(service: Service, engines: SocketAddr, reload: Arc<Reload>) -> Self {
        let loaded = reload.loaded();
        Self {
            guard: Guard::new(),
            access: reload.access().clone(),
            probe: Probe::new(service.clone(), engines),
            drain: Drain::new(service.clone()),
            history: live::History::default(),
            states: live::LastState::default(),
            streams: Arc::new(Semaphore::new(live::MAX_STREAMS)),
            reload,
            service,
            peers: None,
            copy: peers::LastCopy::default(),
            stores: Vec::new(),
            deletion: deletion::LastDeletion::default(),
            inspections: Arc::new(Semaphore::new(1)),
            policy: policy_name(loaded.config.eviction_policy),
            watermark: loaded.config.eviction_watermark,
            ratio: loaded.config.eviction_ratio,
            directory: None,
            stopping: None,
            metrics_socket: None,
            changes: Changes::new(),
        }
    }

    /// Returns the requests that a stop waits for.
    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Returns true once the server stops.
    fn is_stopping(&self) -> bool {
        self.stopping
            .as_ref()
            .is_some_and(|stopping| *stopping.borrow())
    }

    /// Returns the probe, which asks the engines' side as engines do.
    pub(crate) fn probe(&self) -> &Probe {
        &self.probe
    }
}

type HttpState = State<Arc<Http>>;

/// Answers until `stopped` turns true.
pub async fn serve(socket: TcpListener, mut http: Http, stopped: watch::Receiver<bool>) {
    let access = http.access.clone();
    let metrics_socket = http.metrics_socket.take();
    let http = Arc::new(http);
    tokio::spawn(live::keep(Arc::clone(&http), stopped.clone()));
    let bounds = Bounds {
        connections: MAX_CONNECTIONS,
        life: Some(LIFE),
        end: END_DEADLINE,
        unread: None,
    };
    let answer = |socket, router| {
        let (access, stopped) = (Some(access.clone()), stopped.clone());
        connections::serve(socket, router, access, stopped, bounds)
    };
    let metrics = async {
        if let Some(socket) = metrics_socket {
            answer(socket, metrics_router(Arc::clone(&http))).await;
        }
    };
    tokio::join!(metrics, answer(socket, router(Arc::clone(&http))));
}

fn router(http: Arc<Http>) -> Router {
    let routes = Router::new()
        .route("/healthz", get(health))
        .route("/livez", get(alive))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_page))
        .route("/reload", post(reload))
        .route(
            "/drain",
            get(drained).post(begin_drain).delete(cancel_drain),
        )
        .merge(live::routes())
        .merge(peers::routes())
        .merge(lmcache::routes())
        .fallback(unknown_path);
    with_rules(routes, http)
}

/// Returns the router of the socket on which only the metrics are served.
fn metrics_router(http: Arc<Http>) -> Router {
    let routes = Router::new()
        .route("/metrics", get(metrics_page))
        .fallback(only_metrics);
    with_rules(routes, http)
}

/// Adds what holds for every path of a socket: limits, deadlines and the guard.
fn with_rules(routes: Router<Arc<Http>>, http: Arc<Http>) -> Router {
    routes
        .method_not_allowed_fallback(unknown_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(CompressionLayer::new())
        .layer(middleware::from_fn(within_deadline))
        .layer(middleware::from_fn_with_state(Arc::clone(&http), guarded))
        .with_state(http)
}

/// Returns a refusal with the reason in both fields in which LMCache's tools look for it.
fn refusal(code: StatusCode, text: impl Into<String>) -> Response {
    let text = text.into();
    (code, Json(json!({"error": text, "detail": text}))).into_response()
}

/// Returns the state of work that an operator ordered, and the reason if it failed. While `end` is
/// `None`, the work goes on and the state is `doing`.
fn state_of<'a>(
    end: &'a Option<Result<(), String>>,
    doing: &'static str,
) -> (&'static str, Option<&'a str>) {
    match end {
        None => (doing, None),
        Some(Ok(())) => ("done", None),
        Some(Err(reason)) => ("failed", Some(reason)),
    }
}

/// Refuses requests of other sites' pages and changes by other users, before any work is done for them.
async fn guarded(
    State(http): HttpState,
    Extension(user): Extension<ConnectionUser>,
    mut request: Request,
    next: Next,
) -> Response {
    let access = http.access.now();
    match http.guard.check(&request, user, &access) {
        Ok(user) => drop(request.extensions_mut().insert(user)),
        Err((code, reason)) => {
            let mut refused = refusal(code, reason);
            if code == StatusCode::UNAUTHORIZED {
                let scheme = HeaderValue::from_static("Bearer");
                refused
                    .headers_mut()
                    .insert(header::WWW_AUTHENTICATE, scheme);
            }
            return refused;
        }
    }
    if request.method().is_safe() {
        return next.run(request).await;
    }
    // Checked twice: a stop that has begun takes all permits, and this request would wait for them.
    let refused = || refusal(StatusCode::SERVICE_UNAVAILABLE, STOPPING);
    if http.is_stopping() {
        return refused();
    }
    match http.changes.0.acquire().await {
        Ok(_permit) if !http.is_stopping() => next.run(request).await,
        _ => refused(),
    }
}

async fn within_deadline(request: Request, next: Next) -> Response {
    match tokio::time::timeout(ANSWER_DEADLINE, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let text = format!("no answer within {} s", ANSWER_DEADLINE.as_secs());
            refusal(StatusCode::GATEWAY_TIMEOUT, text)
        }
    }
}

async fn unknown_path(uri: Uri) -> Response {
    let text = format!(
        "{} is not served here; the paths are / (for a browser), /healthz, /livez, /readyz, /metrics, /status, /peers, /config, \
         /reload, /drain, /live, /history, /tenants, /advise, /cache/clear, /quota and /healthcheck",
        uri.path()
    );
    refusal(StatusCode::NOT_FOUND, text)
}

async fn only_metrics(uri: Uri) -> Response {
    let text = format!(
        "{} is not served at the port of --prometheus-port, which serves /metrics only; ask --http-port",
        uri.path()
    );
    refusal(StatusCode::NOT_FOUND, text)
}

async fn unknown_method(method: Method, uri: Uri) -> Response {
    let text = format!("{} does not take {method}", uri.path());
    refusal(StatusCode::METHOD_NOT_ALLOWED, text)
}

/// Returns `ok`, `degraded` while a tier has a fault, or `draining` while no chunks are stored.
pub(crate) fn condition(status: &ServiceStatus) -> &'static str {
    match status.tiers.iter().any(|tier| tier.fault.is_some()) {
        _ if status.is_draining => "draining",
        true => "degraded",
        false => "ok",
    }
}

/// Reads the settings again.
async fn reload(State(http): HttpState) -> Response {
    let read = tokio::task::spawn_blocking(move || http.reload.now()).await;
    match read {
        Ok(Ok(SettingChanges { changed, restart })) => {
            Json(json!({"changed": changed, "restart": restart})).into_response()
        }
        Ok(Err(error)) => refusal(StatusCode::BAD_REQUEST, error_text(&error)),
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

async fn begin_drain(State(http): HttpState) -> Response {
    let drain = http.drain.clone();
    // It reads the state of the service, which may wait for locks.
    match tokio::task::spawn_blocking(move || drain.begin()).await {
        Ok(()) => drained(State(http)).await,
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

async fn cancel_drain(State(http): HttpState) -> Response {
    let drain = http.drain.clone();
    match tokio::task::spawn_blocking(move || drain.cancel()).await {
        Ok(()) => drained(State(http)).await,
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// Answers with the progress of a drain.
async fn drained(State(http): HttpState) -> Response {
    match http.probe.status().await {
        Ok(status) => Json(http.drain.state(&status)).into_response(),
        Err(reason) => refusal(StatusCode::SERVICE_UNAVAILABLE, reason),
    }
}

/// Answers whenever this process can.
async fn alive() -> Response {
    Json(json!({"status": "alive"})).into_response()
}

/// Answers 200 while engines are served and new engines may connect.
async fn ready(State(http): HttpState) -> Response {
    match served(&http).await {
        Ok(status) if status.is_draining => not_served(("draining", DRAINING.to_owned())),
        Ok(_) => Json(json!({"status": "ready"})).into_response(),
        Err(fault) => not_served(fault),
    }
}

/// Returns the state of a server that serves engines, or a word and a reason if it does not.
async fn served(http: &Http) -> Result<ServiceStatus, (&'static str, String)> {
    match http.is_stopping() {
        true => Err(("stopping", STOPPING.to_owned())),
        false => http.probe.run().await.map_err(|reason| ("stuck", reason)),
    }
}

fn not_served((status, reason): (&'static str, String)) -> Response {
    let body = json!({"status": status, "reason": reason, "error": reason});
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

async fn health(State(http): HttpState, Extension(user): Extension<ConnectionUser>) -> Response {
    match served(&http).await {
        Ok(status) => {
            let mut body = json!({"status": condition(&status)});
            // Faults name paths and addresses, and this path also answers requests without the token.
            if http.access.now().token.is_none() || user.is_trusted() {
                body["tiers"] = json!(status.tiers);
            }
            Json(body).into_response()
        }
        Err(fault) => not_served(fault),
    }
}

async fn metrics_page(State(http): HttpState) -> Response {
    match http.probe.status().await {
        Ok(status) => {
            let directory = http.directory.as_ref().map(|host| host.status());
            let tenant = |salt: &Salt| http.reload.digests().short(salt);
            let connections = http.peers.as_ref().map(|peers| peers.connections());
            let text = metrics::page(&status, tenant, connections, directory);
            ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
        }
        Err(reason) => refusal(StatusCode::SERVICE_UNAVAILABLE, reason),
    }
}
