//! Refuses requests that a browser sends for a page of another site.
//!
//! Listening on loopback is no boundary for browsers: every page that a user of this host opens
//! can send requests to it. Three rules keep such pages out:
//!
//! - A foreign `Host` is refused: a page whose own name was made to resolve to this host (DNS
//!   rebinding) is same-origin to its browser.
//! - A cross-site request is refused: the browser marks it in `Origin` or `Sec-Fetch-Site`.
//! - A body must be `application/json`: no page can send JSON to another site without a CORS
//!   preflight, which is never granted here.
//!
//! Loopback is no boundary for the users of this host either. A request that changes something is
//! refused unless the user of its connection is trusted (`--trusted-users`). Untrusted users see
//! digests of salts.

use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::http::header::{CONTENT_TYPE, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use lmc_vllm_adapter::{Trust, Untrusted};
use tracing::warn;

use super::access::{Access, Token};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Shortest time between two warnings about refused requests.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// Trust in the user at the other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionUser(pub(super) Result<Trust, Untrusted>);

impl ConnectionUser {
    /// Returns true for users that may change the server and see salts in clear.
    pub(super) fn is_trusted(self) -> bool {
        self.0 == Ok(Trust::User)
    }
}

/// Checks requests, and limits the warnings about refused requests.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Remedy if another host name is wanted.
    advice: &'static str,
    warned: Mutex<Option<Instant>>,
}

impl Guard {
    pub(super) fn new() -> Self {
        Self::with_advice("add it with --http-allowed-host")
    }

    /// Creates a guard whose refusals of host names end with this advice.
    pub(crate) fn with_advice(advice: &'static str) -> Self {
        Self {
            advice,
            warned: Mutex::new(None),
        }
    }

    /// Checks that no page of another site can have sent a request to a server that requests may name by
    /// address or as localhost only. Returns the code and the reason of a refusal.
    pub(crate) fn check_page<B>(&self, request: &Request<B>) -> Result<(), (StatusCode, String)> {
        self.check_host(request, &[])?;
        check_site(request.headers())
    }

    /// Checks a request of a connection's user. Returns the user that the request counts for, or the
    /// code and the reason of the refusal. If `access` has a token, only trusted users of this host need
    /// no token; a request with the token counts as a trusted user's.
    pub(super) fn check<B>(
        &self,
        request: &Request<B>,
        user: ConnectionUser,
        access: &Access,
    ) -> Result<ConnectionUser, (StatusCode, String)> {
        let checked = self.check_host(request, &access.host_names).and_then(|()| {
            check_site(request.headers())?;
            let user = check_token(request, user, access.token.as_ref())?;
            check_user(request.method(), user)?;
            check_content_type(request.method(), request.headers())?;
            Ok(user)
        });
        if let Err((_, reason)) = &checked
            && self.may_warn()
        {
            warn!("HTTP request refused: {reason}");
        }
        checked
    }

    fn check_host<B>(
        &self,
        request: &Request<B>,
        names: &[String],
    ) -> Result<(), (StatusCode, String)> {
        // A request line may name a host, too; its name then counts.
        let of_line = request.uri().authority().map(|named| named.as_str());
        let headers = request.headers().get_all(HOST).into_iter();
        let of_headers = headers.map(|host| host.to_str().unwrap_or("\u{fffd}"));
        // Without any host it is HTTP/1.0, which no browser speaks.
        for host in of_line.into_iter().chain(of_headers) {
            if !is_ours(host, names) {
                let name = without_port(host);
                let advice = self.advice;
                let reason = format!(
                    "the host name {name:?} is not served here: use an IP address, or {advice}"
                );
                return Err((StatusCode::FORBIDDEN, reason));
            }
        }
        Ok(())
    }

    fn may_warn(&self) -> bool {
        let Ok(mut warned) = self.warned.lock() else {
            return false;
        };
        let due = warned.is_none_or(|at| at.elapsed() >= WARN_EVERY);
        if due {
            *warned = Some(Instant::now());
        }
        due
    }
}

/// Returns true for addresses, localhost, and these names in lower case.
fn is_ours(host: &str, names: &[String]) -> bool {
    let name = without_port(host).to_ascii_lowercase();
    let bare = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    // An attacker cannot make an address resolve to another address.
    bare.unwrap_or(&name).parse::<IpAddr>().is_ok() || name == "localhost" || names.contains(&name)
}

/// Refuses requests that the browser marks as coming from another site, or from another port of this host.
pub(crate) fn check_site(headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
    let site = headers.get_all(SEC_FETCH_SITE).into_iter();
    let foreign_site = site
        .filter(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
        .map(|site| format!("Sec-Fetch-Site is {site:?}"))
        .next();
    let host = headers.get(HOST).map(HeaderValue::as_bytes);
    let origin = headers.get_all(ORIGIN).into_iter();
    let foreign_origin = origin
        .filter(|origin| host.is_none() || after_scheme(origin) != host)
        .map(|origin| format!("Origin is {origin:?}"))
        .next();
    match foreign_site.or(foreign_origin) {
        None => Ok(()),
        Some(found) => {
            let reason = format!("requests from pages of other sites are refused: {found}");
            Err((StatusCode::FORBIDDEN, reason))
        }
    }
}

/// Paths that need no token. Three of them only say whether engines are served, and cluster probes send
/// no token. The page asks its reader for the token.
const OPEN: [&str; 4] = ["/", "/healthz", "/livez", "/readyz"];

/// Refuses requests without the token, except requests of trusted users of this host.
fn check_token<B>(
    request: &Request<B>,
    user: ConnectionUser,
    token: Option<&Token>,
) -> Result<ConnectionUser, (StatusCode, String)> {
    let Some(token) = token else {
        return Ok(user);
    };
    let is_open = request.method().is_safe() && OPEN.contains(&request.uri().path());
    match user {
        _ if user.is_trusted() => Ok(user),
        _ if token.is_in(request.headers()) => Ok(ConnectionUser(Ok(Trust::User))),
        _ if is_open => Ok(user),
        _ => {
            let reason = "this server requires a token (--http-token-file): send it as \
                          Authorization: Bearer TOKEN; the lmc tools read the file that \
                          LMC_HTTP_TOKEN_FILE names";
            Err((StatusCode::UNAUTHORIZED, reason.to_owned()))
        }
    }
}

/// Refuses changes by users that are not trusted. Such users may read, for monitoring.
fn check_user(method: &Method, user: ConnectionUser) -> Result<(), (StatusCode, String)> {
    match user.0 {
        Err(untrusted) if !matches!(*method, Method::GET | Method::HEAD) => {
            Err((StatusCode::FORBIDDEN, untrusted.to_string()))
        }
        _ => Ok(()),
    }
}

fn after_scheme(origin: &HeaderValue) -> Option<&[u8]> {
    let origin = origin.as_bytes();
    let http = origin.strip_prefix(b"http://");
    http.or_else(|| origin.strip_prefix(b"https://"))
}

/// Requires JSON in requests that change something. Pages of other sites can send three types of
/// body without a preflight, but not JSON. DELETE has no body, and always needs a preflight.
fn check_content_type(method: &Method, headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
    if !matches!(*method, Method::POST | Method::PUT | Method::PATCH) {
        return Ok(());
    }
    let found = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let essence = found.and_then(|found| found.split(|&byte| byte == b';').next());
    match essence {
        Some(essence)
            if essence
                .trim_ascii()
                .eq_ignore_ascii_case(b"application/json") =>
        {
            Ok(())
        }
        _ => {
            let reason = format!("{method} requires the header Content-Type: application/json");
            Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, reason))
        }
    }
}

/// Returns the name or address in `name:port`, `[address]:port`, or either without a port.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit())
                && (name.ends_with(']') || !name.contains(':')) =>
        {
            name
        }
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeConfig;

    fn access() -> Access {
        let mut config = ServeConfig::load([], [], None).expect("valid").config;
        config.http_host = "Node-7".to_owned();
        config.http_allowed_hosts = vec!["lmc.cache.svc".to_owned()];
        let mut access = Access::read(&config).expect("no files");
        access.token = Some(Token::new("0123456789abcdef"));
        access
    }

    /// Returns the code of a refusal, or 0, and whether the request counts as a trusted user's.
    fn checked(user: Result<Trust, Untrusted>, line: &str, shown: Option<&str>) -> (u16, bool) {
        let (method, path) = line.split_once(' ').expect("a method and a path");
        let mut request = Request::builder().method(method).uri(path);
        request = request.header(CONTENT_TYPE, "application/json");
        if let Some(shown) = shown {
            request = request.header("authorization", format!("Bearer {shown}"));
        }
        let request = request.body(()).expect("a request");
        let user = ConnectionUser(user);
        match Guard::new().check(&request, user, &access()) {
            Ok(ConnectionUser(user)) => (0, user == Ok(Trust::User)),
            Err((code, _)) => (code.as_u16(), false),
        }
    }

    /// Without a token, only the network kept other hosts from clearing the cache of a server in a cluster.
    #[test]
    fn with_a_token_requests_from_elsewhere_must_carry_it() {
        let elsewhere = [
            Ok(Trust::Unknown),
            Err(Untrusted::User(7)),
            Err(Untrusted::Closed),
        ];
        for line in [
            "GET /status",
            "GET /metrics",
            "POST /cache/clear",
            "DELETE /quota/a",
            "POST /livez",
        ] {
            assert_eq!(checked(Ok(Trust::User), line, None), (0, true), "{line}");
            for user in elsewhere {
                assert_eq!(checked(user, line, None).0, 401, "{line}");
                assert_eq!(
                    checked(user, line, Some("0123456789abcdee")).0,
                    401,
                    "{line}"
                );
                assert_eq!(
                    checked(user, line, Some("0123456789abcdef")),
                    (0, true),
                    "{line}"
                );
            }
        }
        for line in ["GET /livez", "HEAD /readyz", "GET /healthz?x"] {
            for user in elsewhere {
                assert_eq!(checked(user, line, None), (0, false), "{line}");
            }
        }
    }

    #[test]
    fn addresses_and_names_that_were_configured_are_ours() {
        let names = access().host_names;
        for host in [
            "127.0.0.1",
            "127.0.0.1:8080",
            "10.2.0.7:80",
            "[::1]:8080",
            "[::1]",
            "localhost",
            "LOCALHOST:8080",
            "node-7:8080",
            "lmc.cache.svc",
        ] {
            assert!(is_ours(host, &names), "{host}");
        }
        for host in [
            "",
            ":8080",
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example:127.0.0.1",
            "[::1].evil.example",
            "node-7.evil.example",
            "localhost:x",
            "127.0.0.1@evil.example",
        ] {
            assert!(!is_ours(host, &names), "{host}");
        }
    }
}
