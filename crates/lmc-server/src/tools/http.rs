//! One request to a server's HTTP side.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use crate::config::mask_password_of;

/// Default address of the HTTP side.
pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:8080";
/// A clear waits for its state file and for tiers, at most 16 s.
const DEADLINE: Duration = Duration::from_secs(20);

/// Address of a server's HTTP side, shown without a password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct HttpUrl(String);

impl FromStr for HttpUrl {
    type Err = Infallible;

    fn from_str(url: &str) -> Result<Self, Infallible> {
        Ok(Self(url.to_owned()))
    }
}

impl From<String> for HttpUrl {
    fn from(url: String) -> Self {
        Self(url)
    }
}

impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&mask_password_of(&self.0))
    }
}

impl fmt::Debug for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpUrl({self})")
    }
}

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
    pub(crate) fn send(&self, url: &HttpUrl) -> Result<Value> {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(DEADLINE))
            .http_status_as_error(false)
            // Servers are on this host or in its network; variables name a proxy for what is not.
            .proxy(None)
            .build()
            .into();
        let HttpUrl(address) = url;
        let address = address.trim_end_matches('/');
        let scheme = if address.contains("://") {
            ""
        } else {
            "http://"
        };
        let target = format!("{scheme}{address}{}", self.path);
        let sent = match (self.method, &self.body) {
            ("DELETE", _) => agent.delete(&target).call(),
            ("PUT", Some(body)) => agent.put(&target).send_json(body),
            ("POST", Some(body)) => agent.post(&target).send_json(body),
            _ => agent.get(&target).call(),
        };
        // An error of the library may repeat the URL.
        let sent = sent.map_err(|error| {
            let shown = mask_password_of(address);
            anyhow!("{}", error.to_string().replace(address, &shown))
        });
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
