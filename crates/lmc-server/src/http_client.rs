//! The HTTP client of the proxy and of notices.

use std::time::Duration;

use axum::body::Body;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

/// Time after which a connection to an engine that is not used is closed. vLLM closes it after 5 s,
/// and a request that is sent at that moment fails.
const POOL_IDLE: Duration = Duration::from_secs(2);
/// Longest time to connect to an engine.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// Returns a client for engines, and for others that close idle connections as they do.
pub(crate) fn http_client() -> Client<HttpConnector, Body> {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT_DEADLINE));
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .build(connector)
}
