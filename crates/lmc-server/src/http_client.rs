//! The HTTP client of the proxy, of notices and of spans.

use std::time::Duration;

use anyhow::Result;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Request, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;

/// Time after which an idle connection to an engine is closed. vLLM closes idle connections after 5 s,
/// and a request that is sent at that moment fails.
const POOL_IDLE: Duration = Duration::from_secs(2);
/// Longest time to connect to an engine.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// Limit on the bytes of an answer to a POST.
const MAX_ANSWER: usize = 64 << 10;

/// Returns a client for engines, and for other servers that close idle connections.
pub(crate) fn http_client() -> Client<HttpConnector, Body> {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT_DEADLINE));
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .build(connector)
}

/// Posts JSON. Returns the status of the answer, and its body if the answer is a short success.
pub(crate) async fn post_json(
    client: &Client<HttpConnector, Body>,
    url: &Uri,
    body: &Value,
) -> Result<(StatusCode, Bytes)> {
    let request = Request::post(url.clone())
        .header(CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string()))?;
    let answer = client.request(request).await?;
    let status = answer.status();
    if !status.is_success() {
        return Ok((status, Bytes::new()));
    }
    // The body is read so that the connection can be used again.
    let body = to_bytes(Body::new(answer.into_body()), MAX_ANSWER).await;
    Ok((status, body.unwrap_or_default()))
}
