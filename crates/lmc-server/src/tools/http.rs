//! One request to a server's HTTP side.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use tokio_rustls::rustls::crypto::ring;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::config::mask_password_of;
use crate::http::access::{certificates, token_of};

/// Default address of the HTTP side.
pub(crate) const DEFAULT_URL: &str = "http://127.0.0.1:8080";
/// Timeout of a request: a clear waits for its state file and for tiers for up to 16 s.
const DEADLINE: Duration = Duration::from_secs(20);

/// Variable that names the file with the server's token, as for the server itself.
const TOKEN_FILE: &str = "LMC_HTTP_TOKEN_FILE";
/// Variable that names a file with certificates to trust in place of the system's.
const CA_FILE: &str = "LMC_CA_FILE";

/// Returns the file that a variable names.
fn file_of(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable)?;
    (!path.is_empty() && !path.eq_ignore_ascii_case("none")).then(|| path.into())
}

fn tls() -> Result<TlsConfig> {
    let certificates = match file_of(CA_FILE) {
        Some(path) => certificates(&path).context(CA_FILE)?,
        None => rustls_native_certs::load_native_certs().certs,
    };
    let certificates: Vec<Certificate<'static>> = (certificates.iter())
        .map(|der| Certificate::from_der(der).to_owned())
        .collect();
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&certificates))
        .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
        .build())
}

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

    /// Sends the request to the server at `url`; a URL without a scheme means http.
    pub(crate) fn send(&self, url: &HttpUrl) -> Result<Value> {
        let HttpUrl(address) = url;
        let address = address.trim_end_matches('/');
        let scheme = if address.contains("://") {
            ""
        } else {
            "http://"
        };
        let target = format!("{scheme}{address}{}", self.path);
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(DEADLINE))
            .http_status_as_error(false)
            // Servers are on this host or in its network; the proxy variables are for other networks.
            .proxy(None);
        let config = match target.starts_with("https://") {
            true => config.tls_config(tls()?),
            false => config,
        };
        let agent: ureq::Agent = config.build().into();
        let mut request = ureq::http::Request::builder()
            .method(self.method)
            .uri(&target);
        if let Some(path) = file_of(TOKEN_FILE) {
            let token = token_of(&path).context(TOKEN_FILE)?;
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let sent = match &self.body {
            Some(body) => {
                let request = request.header("content-type", "application/json");
                let body = serde_json::to_vec(body)?;
                request.body(body).map(|request| agent.run(request))
            }
            None => request.body(()).map(|request| agent.run(request)),
        };
        let sent = sent.with_context(|| format!("{url} is not a valid URL of a server"))?;
        // An error of the library may repeat the URL.
        let sent = sent.map_err(|error| {
            let shown = mask_password_of(address);
            anyhow!("{}", error.to_string().replace(address, &shown))
        });
        let mut answer = sent.with_context(|| {
            format!(
                "no server answers at {url}: check that `lmc serve` runs and that --url is its HTTP address"
            )
        })?;
        let body: Value = answer.body_mut().read_json().context(
            "the answer is not JSON: check that --url is the HTTP address of `lmc serve`",
        )?;
        if !answer.status().is_success() {
            let text = body["error"].as_str().unwrap_or("no reason given");
            bail!("the server refused: {text}");
        }
        Ok(body)
    }
}
