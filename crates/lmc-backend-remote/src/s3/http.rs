//! The HTTP layer under `object_store`, with hyper: limited answers, errors without secrets, the store's
//! clock.

use std::error::Error;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_RANGE, DATE};
use hyper::{HeaderMap, Method, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as TcpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use tokio_rustls::rustls::ClientConfig;

use crate::clock::StoreClock;
use crate::s3::S3Config;
use crate::store::StoreError;
use crate::tls;

/// Timeout of a connect. An instance's metadata service answers at once or does not exist.
const CONNECT: Duration = Duration::from_secs(1);
/// Time for which an idle connection is kept: less than S3 keeps it.
const IDLE: Duration = Duration::from_secs(15);
/// Pause before the kernel checks whether a silent connection is still alive.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Most bytes of an answer that is not an object: a page of a listing has at most 1,000 keys.
const MAX_ANSWER: usize = 8 << 20;
/// Most bytes of an error answer that are read.
const MAX_ERROR: usize = 64 << 10;
/// Host of the metadata service of an instance.
const METADATA: &str = "169.254.169.254";

/// Makes HTTP clients for `object_store`.
#[derive(Clone)]
pub struct Connector {
    tls: ClientConfig,
    clock: Arc<Clock>,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}

impl Connector {
    /// Makes a connector for these settings. For HTTPS it trusts the system's certificates, or those in
    /// `SSL_CERT_FILE`.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if HTTPS is needed and there are no certificates.
    pub fn new(config: &S3Config) -> Result<Self, StoreError> {
        Ok(Self {
            tls: tls::config(!config.access.is_plain_http())?,
            clock: Arc::default(),
        })
    }

    pub(super) fn clock(&self) -> &Arc<Clock> {
        &self.clock
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = TcpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT));
        tcp.set_keepalive(Some(KEEPALIVE));
        let connector = HttpsConnectorBuilder::new().with_tls_config(self.tls.clone());
        let connector = connector.https_or_http().enable_http1();
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new());
        builder.pool_idle_timeout(IDLE);
        Ok(HttpClient::new(Service {
            client: builder.build(connector.wrap_connector(tcp)),
            clock: Arc::clone(&self.clock),
        }))
    }
}

#[derive(Debug)]
struct Service {
    client: Client<HttpsConnector<TcpConnector>, HttpRequestBody>,
    clock: Arc<Clock>,
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Service {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> Answer<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.send(request))
    }
}

impl Service {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (method, uri) = (request.method().clone(), request.uri().clone());
        let response = self.client.request(request).await;
        let response = response.map_err(|error| unreached(&uri, &error))?;
        let (parts, body) = response.into_parts();
        self.clock.note(&parts.headers);
        let status = parts.status;
        if status.is_success() {
            if !has_sound_range(&parts.headers) {
                return Err(HttpError::new(HttpErrorKind::Decode, Refused::garbled()));
            }
            // The answer to a query is not an object: it is collected before it is parsed.
            let body = match uri.query() {
                None => HttpResponseBody::new(body.map_err(|error| lost(&error))),
                Some(_) => HttpResponseBody::new(
                    Limited::new(body, MAX_ANSWER).map_err(|error| lost(&*error)),
                ),
            };
            return Ok(HttpResponse::from_parts(parts, body));
        }
        let refused = Refused::read(status, body).await;
        // `object_store` interprets these itself.
        let is_known = match status {
            StatusCode::NOT_FOUND => refused.code != "NoSuchBucket",
            StatusCode::PRECONDITION_FAILED | StatusCode::NOT_MODIFIED => true,
            StatusCode::CONFLICT => method == Method::PUT,
            _ => false,
        };
        match is_known {
            true => Ok(HttpResponse::from_parts(parts, String::new().into())),
            false => Err(HttpError::new(refused.kind(), refused)),
        }
    }
}

/// Returns false if the range is of an object that is impossibly large.
fn has_sound_range(headers: &HeaderMap) -> bool {
    let Some(range) = headers.get(CONTENT_RANGE) else {
        return true;
    };
    let numbers = range.to_str().unwrap_or_default();
    let mut numbers = numbers.split(|c: char| !c.is_ascii_digit());
    numbers.all(|number| number.len() < 16)
}

/// Returns the error of a request without an answer. The request is sent again: lmc's requests do no harm if
/// they take effect twice.
fn unreached(uri: &Uri, error: &hyper_util::client::legacy::Error) -> HttpError {
    let reason = cause(error);
    if uri.host() == Some(METADATA) {
        let reason = format!(
            "no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and this host has no metadata service: {reason}"
        );
        return HttpError::new(HttpErrorKind::Unknown, io::Error::other(reason));
    }
    let kind = match error.is_connect() {
        true => HttpErrorKind::Connect,
        false => HttpErrorKind::Request,
    };
    HttpError::new(kind, io::Error::other(reason))
}

/// Returns the error of an answer that ended too early.
fn lost(error: &(dyn Error + 'static)) -> HttpError {
    HttpError::new(HttpErrorKind::Interrupted, io::Error::other(cause(error)))
}

/// Returns the text of the first cause.
pub(super) fn cause(error: &(dyn Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string().chars().take(200).collect()
}

/// An answer that is an error.
#[derive(Debug)]
pub(super) struct Refused {
    status: StatusCode,
    /// S3's code of the error, such as `SlowDown`. The error's message is dropped, because it repeats the
    /// request with the session's token.
    code: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.status.as_u16(), self.code)
    }
}

impl Error for Refused {}

impl Refused {
    async fn read(status: StatusCode, body: Incoming) -> Self {
        let body = Limited::new(body, MAX_ERROR).collect().await;
        let body = body.map(|body| body.to_bytes()).unwrap_or_default();
        let text = String::from_utf8_lossy(&body);
        let code = text.split_once("<Code>").map(|(_, rest)| rest);
        let code = code.and_then(|rest| rest.split_once("</Code>"));
        let code = code.map(|(code, _)| code).unwrap_or_default();
        let is_word = code.len() <= 64 && code.chars().all(|c| c.is_ascii_alphanumeric());
        let code = if is_word {
            code.to_owned()
        } else {
            String::new()
        };
        Self { status, code }
    }

    fn garbled() -> Self {
        Self {
            status: StatusCode::OK,
            code: "with an impossible range".to_owned(),
        }
    }

    /// Returns the kind, by which `object_store` decides whether to send the request again.
    fn kind(&self) -> HttpErrorKind {
        let is_passing = match self.status {
            StatusCode::NOT_IMPLEMENTED | StatusCode::INSUFFICIENT_STORAGE => false,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => true,
            status => status.is_server_error(),
        };
        match is_passing {
            true => HttpErrorKind::Request,
            false => HttpErrorKind::Unknown,
        }
    }

    /// Returns true for a range that begins at the end of the object.
    pub(super) fn is_past_end(&self) -> bool {
        self.status == StatusCode::RANGE_NOT_SATISFIABLE
    }

    /// Returns true if the store does not support a part of the request.
    pub(super) fn is_unknown(&self) -> bool {
        self.status == StatusCode::NOT_IMPLEMENTED || self.code == "NotImplemented"
    }

    /// Returns the error of an operation on an object of `len` bytes.
    pub(super) fn error(&self, len: u64) -> StoreError {
        let reason = format!("S3 answered {self}");
        match (self.status, self.code.as_str()) {
            (StatusCode::INSUFFICIENT_STORAGE, _) | (_, "QuotaExceeded") => {
                StoreError::Full { needed: len }
            }
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => StoreError::Denied { reason },
            (_, "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "ExpiredToken") => {
                StoreError::Denied { reason }
            }
            _ => StoreError::Unavailable { reason },
        }
    }
}

/// The store's clock, from the newest answer.
#[derive(Debug, Default)]
pub(super) struct Clock(StoreClock);

impl Clock {
    fn note(&self, headers: &HeaderMap) {
        let date = headers.get(DATE).and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
        if let Some(date) = date.and_then(|date| date.duration_since(UNIX_EPOCH).ok()) {
            self.0.set(date);
        }
    }

    /// Returns the clock's lead as [`StoreClock::ahead_ms`] does, accurate to a second.
    pub(super) fn ahead_ms(&self) -> Option<i64> {
        self.0.ahead_ms()
    }

    /// Returns the time since an instant of the store's clock, in seconds since 1970.
    pub(super) fn since(&self, seconds: i64) -> Option<Duration> {
        let seconds = u64::try_from(seconds).ok().filter(|&s| s > 0)?;
        self.0.since(Duration::from_secs(seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_by_the_clock_of_the_store() {
        let clock = Clock::default();
        assert_eq!(clock.since(1_000_000_000), None, "it has not answered yet");
        let mut headers = HeaderMap::new();
        headers.insert(DATE, "Sun, 09 Sep 2001 01:46:50 GMT".parse().expect("text"));
        clock.note(&headers);
        let age = clock.since(1_000_000_000).expect("a date");
        assert!((10..600).contains(&age.as_secs()), "{age:?}");
        assert_eq!(clock.since(0), None);
        assert_eq!(clock.since(i64::MAX), Some(Duration::ZERO));
        headers.insert(DATE, "yesterday".parse().expect("text"));
        clock.note(&headers);
        assert!(clock.since(1_000_000_000).is_some());
    }

    #[test]
    fn ranges_that_cannot_be_are_found_out() {
        let range = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, text.parse().expect("text"));
            has_sound_range(&headers)
        };
        assert!(range("bytes 0-255/4294967552") && range("bytes */0"));
        assert!(!range("bytes 0-18446744073709551615/18446744073709551615"));
    }
}
