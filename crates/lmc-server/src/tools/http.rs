//! One request to a server's HTTP side.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Default address of the HTTP side.
pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:8080";
const DEADLINE: Duration = Duration::from_secs(10);

/// One request to the server.
pub(crate) struct Call {
    method: &'static str,
    path: String,
    body: Option<Value>,
}

impl Call {
    pub(crate) fn new(method: &'static str, path: &str, body: Option<Value>) -> Self {
        Self {
            method,
            path: path.to_owned(),
            body,
        }
    }

    pub(crate) fn get(path: &str) -> Self {
        Self::new("GET", path, None)
    }

    /// Sends it to the server at `url`; a URL without a scheme means http.
    pub(crate) fn send(&self, url: &str) -> Result<Value> {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(DEADLINE))
            .http_status_as_error(false)
            // Servers are on this host or in its network; variables name a proxy for what is not.
            .proxy(None)
            .build()
            .into();
        let scheme = if url.contains("://") { "" } else { "http://" };
        let target = format!("{scheme}{}{}", url.trim_end_matches('/'), self.path);
        let sent = match (self.method, &self.body) {
            ("DELETE", _) => agent.delete(&target).call(),
            ("PUT", Some(body)) => agent.put(&target).send_json(body),
            ("POST", Some(body)) => agent.post(&target).send_json(body),
            _ => agent.get(&target).call(),
        };
        let mut answer = sent.with_context(|| {
            format!(
                "no server answers at {url}: is `lmc serve` running, and is --url its HTTP address?"
            )
        })?;
        let body: Value = answer
            .body_mut()
            .read_json()
            .context("the answer is no JSON")?;
        if !answer.status().is_success() {
            let text = body["error"].as_str().unwrap_or("no reason given");
            bail!("the server refused: {text}");
        }
        Ok(body)
    }
}
