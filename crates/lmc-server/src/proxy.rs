//! `lmc proxy`: one engine computes a prompt, and another engine answers it.
//!
//! A client speaks the OpenAI-compatible protocol to the proxy. The proxy sends the prompt to a
//! prefill engine, with one token to generate, and then the client's own request to a decode engine,
//! which finds the prompt's KV cache through the servers (`lmc serve`) of both engines. A failed prefill
//! costs only time: the decode engine then computes the prompt itself.

mod body;
mod clip;
mod counters;
mod engines;
mod fields;
mod warm;

use std::future::poll_fn;
use std::hash::{BuildHasher as _, RandomState};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use axum::Router;
use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use lmc_vllm_adapter::Sources;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use self::body::{Begun, HadAtEnd, Relayed};
use self::counters::{Prefill, ProxyCounters};
use self::engines::{Chosen, Engine, EngineUrl, Engines, InFlight};
use self::warm::PromptBlocks;
use crate::config::{LogFormat, check_level};
use crate::http::connections::{self, Bounds};
use crate::http::guard::{Guard, check_site};
use crate::http_client::http_client;
use crate::signals::Signals;
use crate::{limits, log, metrics};

pub(crate) const HELP: &str = "\
Each engine has an `lmc serve` on its host, and these servers are peers of each other (--p2p-listen,
--p2p-peer). docs/pd.md describes the whole set-up.

Examples:
  lmc proxy --prefill http://a:8000 --decode http://b:8000
  lmc proxy --prefill http://a:8000 --prefill-peer a:7700 --decode http://b:8000
  lmc proxy --prefill http://a:8000 --decode http://b:8000 --decode-peer b:7700
  lmc proxy --prefill http://a1:8000 --prefill http://a2:8000 --decode http://b:8000 --listen 0.0.0.0:9000";

/// Bytes of a client's request.
const MAX_BODY: usize = 64 << 20;
/// Memory for all requests that the proxy reads or holds at a time, in KiB.
const MEMORY_KIB: usize = 1 << 20;
/// Bytes of a prefill engine's answer, which is not used.
const MAX_PREFILL_ANSWER: usize = 16 << 20;
/// Longest time for a client to send its whole request, and the next part of it.
const BODY_DEADLINE: Duration = Duration::from_secs(60);
const PART_DEADLINE: Duration = Duration::from_secs(10);
/// Longest time for a client to read what was sent to it.
const UNREAD_DEADLINE: Duration = Duration::from_secs(60);
/// Clients at a time, and the files that each may use: its connection, and connections to both engines.
const MAX_CONNECTIONS: usize = 4096;
const FILES_OF_CLIENT: usize = 4;
/// Shortest time that prefills have after the last answer.
const STOP_PREFILLS: Duration = Duration::from_secs(5);
/// Longest time that a stop waits for answers under way.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Headers that concern one connection, or that each connection sets itself.
const OF_CONNECTION: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::HOST,
];

// A doc comment here would become the text of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// An engine that computes prompts, as http://HOST:PORT; repeatable.
    #[arg(long, value_name = "URL", required = true)]
    prefill: Vec<EngineUrl>,
    /// Name (--p2p-name) or address (--p2p-listen) of a prefill engine's server, as the decode engines'
    /// servers know it: one for each --prefill, in the same order. Requests then go to both engines at
    /// the same time, and the decode engine's server reads the prompt while it is computed.
    #[arg(long, value_name = "NAME", value_parser = peer_name)]
    prefill_peer: Vec<String>,
    /// An engine that answers, as http://HOST:PORT; repeatable.
    #[arg(long, value_name = "URL", required = true)]
    decode: Vec<EngineUrl>,
    /// Name or address of a decode engine's server, as the prefill engines' servers know it: one for each
    /// --decode, in the same order. The prefill engine's server then pushes each chunk of a prompt to it
    /// while the next chunk is computed.
    #[arg(long, value_name = "NAME", value_parser = peer_name)]
    decode_peer: Vec<String>,
    /// Address that clients connect to.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9000")]
    listen: SocketAddr,
    /// A prompt with fewer bytes, as the client writes it, goes to a decode engine only. So does a prompt of
    /// which that engine lacks fewer bytes than this, or less than an eighth, as far as its requests of the
    /// last minutes show. 0 turns both off.
    #[arg(long, value_name = "BYTES", default_value_t = 2048)]
    min_prompt: usize,
    /// Longest time for a prefill engine, in seconds; after that the decode engine computes the prompt.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    prefill_timeout_seconds: u64,
    /// Longest time without a byte from a decode engine, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86400))]
    idle_timeout_seconds: u64,
    /// Level of the log, as for `lmc serve`.
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = check_level)]
    log_level: String,
}

#[derive(Debug)]
struct Proxy {
    client: Client<HttpConnector, Body>,
    prefill: Engines,
    decode: Arc<Engines>,
    min_prompt: usize,
    /// Seed of the hashes of prompts, random for each process.
    seed: u64,
    prefill_timeout: Duration,
    idle_timeout: Duration,
    /// Memory for requests, in KiB.
    memory: Arc<Semaphore>,
    /// Copies of one request that exist at the same time.
    copies: usize,
    /// Prefills under way, which may outlive the answers to their clients.
    prefills: TaskTracker,
    counters: ProxyCounters,
    /// Checks the host names of requests; `None` if the proxy listens for other hosts, which may know it by
    /// any name.
    guard: Option<Guard>,
}

/// Status and text of an answer that the proxy gives itself.
type Refusal = (StatusCode, String);

/// A client's request, as both engines get it.
struct ClientRequest {
    path: &'static str,
    headers: HeaderMap,
    body: Bytes,
    prompt: Arc<PromptBlocks>,
    /// Memory for the request, if it has a body.
    memory: Option<Arc<OwnedSemaphorePermit>>,
}

/// Result of the first step of a request.
enum Legs {
    /// The prefill has ended. The next step is the request to a decode engine, which may be chosen already.
    Prefill(Prefill, Option<Chosen>),
    /// A decode engine has begun to answer.
    Answer(Response),
}

fn peer_name(text: &str) -> Result<String, String> {
    match Sources::parse(text) {
        Sources::Named(names) if names.len() == 1 => Ok(names[0].clone()),
        Sources::Named(_) => Err("expected the name of one server".to_owned()),
        Sources::Malformed(_) => Err("expected a name or address without white space".to_owned()),
    }
}

/// A prefill under way. Dropping this ends the prefill, unless it is to continue.
struct Prefilling {
    task: JoinHandle<Prefill>,
    goes_on: bool,
}

impl Prefilling {
    async fn end(&mut self) -> Prefill {
        // The task fails if the proxy stops.
        (&mut self.task).await.unwrap_or(Prefill::Failed)
    }

    /// Lets the prefill continue to its end.
    fn go_on(mut self) {
        self.goes_on = true;
    }
}

impl Drop for Prefilling {
    fn drop(&mut self) {
        if !self.goes_on {
            self.task.abort();
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    log::to_stderr(&arguments.log_level, LogFormat::Text)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("lmc-proxy")
        .enable_all()
        .build()?;
    let ended = runtime.block_on(serve(arguments));
    runtime.shutdown_background();
    log::flush();
    ended.map(|()| ExitCode::SUCCESS)
}

async fn serve(arguments: &Arguments) -> Result<()> {
    let Arguments {
        prefill,
        prefill_peer,
        decode,
        decode_peer,
        ..
    } = arguments;
    for (role, engines, peers) in [
        ("prefill", prefill.len(), prefill_peer.len()),
        ("decode", decode.len(), decode_peer.len()),
    ] {
        ensure!(
            peers == 0 || peers == engines,
            "expected one --{role}-peer for each --{role}, or none: found {peers} for {engines}"
        );
    }
    let mut signals = Signals::new()?;
    let socket = TcpListener::bind(arguments.listen).await;
    let socket = socket.with_context(|| format!("cannot listen on {}", arguments.listen))?;
    let proxy = Arc::new(Proxy::new(arguments));
    info!(
        "listening for clients on http://{}: prompts to {}, answers from {}",
        socket.local_addr()?,
        proxy.prefill,
        proxy.decode
    );
    let (stop, stopped) = watch::channel(false);
    let bounds = Bounds {
        connections: MAX_CONNECTIONS.min(limits::open_files() / FILES_OF_CLIENT),
        life: None,
        end: STOP_DEADLINE,
        unread: Some(UNREAD_DEADLINE),
    };
    let prefills = proxy.prefills.clone();
    let serving = connections::serve(socket, router(proxy), None, stopped, bounds);
    let serving = tokio::spawn(serving);
    let name = signals.first().await;
    info!(
        "stopping after {name}: no new requests are taken, requests under way have {} s",
        STOP_DEADLINE.as_secs()
    );
    stop.send_replace(true);
    let until = tokio::time::Instant::now() + STOP_DEADLINE;
    let ended = async {
        let _ = serving.await;
        prefills.close();
        let until = until.max(tokio::time::Instant::now() + STOP_PREFILLS);
        if tokio::time::timeout_at(until, prefills.wait())
            .await
            .is_err()
        {
            warn!(prefills = prefills.len(), "prefills under way are aborted");
        }
    };
    tokio::select! {
        () = ended => {}
        name = signals.second() => warn!("stopping at once after {name}: requests under way are aborted"),
    }
    Ok(())
}

fn router(proxy: Arc<Proxy>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/healthz", get(health))
        .route("/metrics", get(metrics_page))
        .fallback(unknown_path)
        .layer(middleware::from_fn_with_state(Arc::clone(&proxy), guarded))
        .with_state(proxy)
}

/// Refuses requests of other sites' pages.
async fn guarded(State(proxy): ProxyState, request: Request, next: Next) -> Response {
    let checked = match &proxy.guard {
        Some(guard) => guard.check_page(&request),
        None => check_site(request.headers()),
    };
    match checked {
        Ok(()) => next.run(request).await,
        Err((code, reason)) => refusal(code, reason),
    }
}

/// Returns an error in the form that OpenAI's clients read.
fn refusal(code: StatusCode, text: impl Into<String>) -> Response {
    let error = json!({"message": text.into(), "type": "proxy_error", "code": code.as_u16()});
    (code, axum::Json(json!({"error": error}))).into_response()
}

type ProxyState = State<Arc<Proxy>>;

async fn completions(State(proxy): ProxyState, request: Request) -> Response {
    proxy.answer("/v1/completions", request).await
}

async fn chat(State(proxy): ProxyState, request: Request) -> Response {
    proxy.answer("/v1/chat/completions", request).await
}

async fn models(State(proxy): ProxyState, request: Request) -> Response {
    let asked = ClientRequest {
        path: "/v1/models",
        headers: forwarded(request.headers()),
        body: Bytes::new(),
        prompt: Arc::default(),
        memory: None,
    };
    proxy.decode(&Method::GET, &asked, Bytes::new(), None).await
}

async fn health(State(proxy): ProxyState) -> Response {
    match proxy.decode.any_is_up(Instant::now()) {
        true => "ok\n".into_response(),
        false => refusal(StatusCode::SERVICE_UNAVAILABLE, "no decode engine answers"),
    }
}

async fn metrics_page(State(proxy): ProxyState) -> Response {
    let text = counters::page(&proxy.counters, &proxy.prefill, &proxy.decode);
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}

async fn unknown_path(uri: Uri) -> Response {
    let text = format!(
        "{} is not served by this proxy; the paths are /v1/completions, /v1/chat/completions, \
         /v1/models, /health and /metrics",
        uri.path()
    );
    refusal(StatusCode::NOT_FOUND, text)
}

/// Removes the headers that concern one connection.
fn strip(headers: &mut HeaderMap) {
    let named = headers.get_all(header::CONNECTION).into_iter();
    let named: Vec<String> = named
        .filter_map(|names| names.to_str().ok())
        .flat_map(|names| names.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    // With a transfer encoding, the content length is not the number of bytes sent.
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    for name in &OF_CONNECTION {
        headers.remove(name);
    }
    for name in &named {
        headers.remove(name);
    }
}

/// Returns a client's headers for engines, without the headers of its connection. Both engines get the
/// same request id.
fn forwarded(client: &HeaderMap) -> HeaderMap {
    let mut headers = client.clone();
    strip(&mut headers);
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::EXPECT);
    if !headers.contains_key(REQUEST_ID) {
        // Without random bytes the engines make ids of their own.
        let id = random_id().and_then(|id| HeaderValue::from_str(&id).ok());
        headers.extend(id.map(|id| (REQUEST_ID, id)));
    }
    headers
}

fn random_id() -> Option<String> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).ok()?;
    Some(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Proxy {
    fn new(arguments: &Arguments) -> Self {
        Self {
            client: http_client(),
            prefill: Engines::new(&arguments.prefill, &arguments.prefill_peer),
            decode: Arc::new(Engines::new(&arguments.decode, &arguments.decode_peer)),
            min_prompt: arguments.min_prompt,
            seed: RandomState::new().hash_one(()),
            prefill_timeout: Duration::from_secs(arguments.prefill_timeout_seconds),
            idle_timeout: Duration::from_secs(arguments.idle_timeout_seconds),
            memory: Arc::new(Semaphore::new(MEMORY_KIB)),
            prefills: TaskTracker::new(),
            // The client's copy, a clipped one, one for each engine, and one while they are made.
            copies: match (&arguments.prefill_peer[..], &arguments.decode_peer[..]) {
                ([], []) => 3,
                ([], _) => 4,
                _ => 5,
            },
            counters: ProxyCounters::default(),
            guard: (arguments.listen.ip().is_loopback())
                .then(|| Guard::with_advice("use --listen with an address other than loopback")),
        }
    }

    /// Carries out both legs of a request. When the client leaves, this future is dropped, which ends both
    /// legs.
    async fn answer(self: Arc<Self>, path: &'static str, request: Request) -> Response {
        let (head, body) = request.into_parts();
        // A page of another site cannot send this type without a CORS preflight, which is not granted.
        let kind = head.headers.get(header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if !kind.eq_ignore_ascii_case("application/json") {
            let text = "the content type must be application/json";
            return refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, text);
        }
        let read = tokio::time::timeout(BODY_DEADLINE, self.read(body)).await;
        // The memory is released when the decode engine has begun to answer and no prefill is under way.
        let (body, memory) = match read.unwrap_or_else(|_| Err(late())) {
            Ok((body, memory)) => (body, Arc::new(memory)),
            Err((code, text)) => return refusal(code, text),
        };
        let body = match clip::without_hints(&body) {
            Ok(changed) => changed.map_or(body, Bytes::from),
            Err(error) => {
                let text = format!("the request is not a valid JSON object: {error}");
                return refusal(StatusCode::BAD_REQUEST, text);
            }
        };
        let asked = ClientRequest {
            path,
            headers: forwarded(&head.headers),
            prompt: Arc::new(clip::blocks(path, &body, self.seed)),
            body,
            memory: Some(memory),
        };
        let (prefill, chosen) = match clip::clip(asked.path, &asked.body, self.min_prompt) {
            Ok(clipped) => match self.prefill(&asked, clipped.into()).await {
                Legs::Prefill(prefill, chosen) => (prefill, chosen),
                Legs::Answer(answer) => return answer,
            },
            Err(why) => (why, None),
        };
        if prefill != Prefill::Done {
            self.counters.count(prefill);
        }
        self.decode(&Method::POST, &asked, asked.body.clone(), chosen)
            .await
    }

    /// Reads a request, and acquires memory for it as it arrives.
    async fn read(&self, mut body: Body) -> Result<(Bytes, OwnedSemaphorePermit), Refusal> {
        let mut memory = self.take_memory(1)?;
        if body.size_hint().lower() > MAX_BODY as u64 {
            return Err(too_large());
        }
        let (mut whole, mut kib) = (Vec::new(), 1);
        loop {
            let part = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
            let part = match tokio::time::timeout(PART_DEADLINE, part).await {
                Ok(Some(Ok(part))) => part,
                Ok(Some(Err(error))) => {
                    return Err((StatusCode::BAD_REQUEST, error.to_string()));
                }
                Ok(None) => return Ok((whole.into(), memory)),
                Err(_) => return Err(late()),
            };
            let Ok(data) = part.into_data() else {
                continue;
            };
            if whole.len() + data.len() > MAX_BODY {
                return Err(too_large());
            }
            whole.extend_from_slice(&data);
            let needed = (self.copies * whole.len()).div_ceil(1 << 10).max(kib);
            memory.merge(self.take_memory(needed - kib)?);
            kib = needed;
        }
    }

    fn take_memory(&self, kib: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let taken = Arc::clone(&self.memory).try_acquire_many_owned(kib as u32);
        taken.map_err(|_| {
            let text = "the requests under way use all memory of the proxy: ask again later";
            (StatusCode::SERVICE_UNAVAILABLE, text.to_owned())
        })
    }

    /// Lets a prefill engine compute the prompt, unless a decode engine had nearly all of it. If the server
    /// of the prefill engine is known, a decode engine begins at the same time; that leg is ended if the
    /// prefill fails or is refused before the decode engine begins to answer.
    async fn prefill(self: &Arc<Self>, asked: &ClientRequest, clipped: Bytes) -> Legs {
        let now = Instant::now();
        let warm = self.decode.choose_warm(&asked.prompt, self.min_prompt, now);
        if warm.is_some() {
            return Legs::Prefill(Prefill::Warm, warm);
        }
        let deadline = tokio::time::Instant::now() + self.prefill_timeout;
        for engine in self.prefill.order(&asked.prompt, Instant::now()) {
            let chosen = self.decode.choose(&asked.prompt, Instant::now());
            let to = chosen.as_ref().and_then(Chosen::peer);
            let (body, decode) = self.bodies(&engine, to, asked, &clipped, deadline);
            let mut prefilling = self.begin_prefill(&engine, asked, body, deadline);
            match decode {
                None => match prefilling.end().await {
                    Prefill::Failed => {}
                    prefill => return Legs::Prefill(prefill, chosen),
                },
                Some(body) => {
                    let decoded = async {
                        let answer = self.decode(&Method::POST, asked, body, chosen).await;
                        let (head, body) = answer.into_parts();
                        (head, Begun::wait(body).await)
                    };
                    let mut decoded = pin!(decoded);
                    let ended = tokio::select! {
                        biased;
                        decoded = &mut decoded => Err(decoded),
                        prefill = prefilling.end() => Ok(prefill),
                    };
                    let (head, body) = match ended {
                        Ok(prefill @ (Prefill::Done | Prefill::Late)) => {
                            // The decode engine's server has waited for the same time.
                            if prefill == Prefill::Late {
                                self.counters.count(prefill);
                            }
                            decoded.await
                        }
                        Ok(Prefill::Failed) => continue,
                        Ok(prefill) => return Legs::Prefill(prefill, None),
                        Err(decoded) => decoded,
                    };
                    // The prefill ends soon, and an abort may kill an engine with LMCache's connector.
                    prefilling.go_on();
                    return Legs::Answer(Response::from_parts(head, Body::new(body)));
                }
            }
        }
        Legs::Prefill(Prefill::Failed, None)
    }

    /// Returns the body for a prefill engine, whose server pushes to the peer `to`, and the body for a decode
    /// engine that gets the request at the same time; `None` if the decode engine gets it afterwards.
    fn bodies(
        &self,
        engine: &Engine,
        to: Option<&str>,
        asked: &ClientRequest,
        clipped: &Bytes,
        deadline: tokio::time::Instant,
    ) -> (Bytes, Option<Bytes>) {
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        // A new id, because clients may use their id for several requests.
        let id = random_id();
        let wait = engine
            .peer()
            .zip(id.as_deref())
            .map(|(peer, id)| clip::SourceWait {
                id,
                peer,
                wait_ms: left.as_millis() as u64,
            });
        let bodies = match (to, &wait) {
            (None, None) => None,
            _ => clip::PairHints { to, wait }.bodies(clipped, &asked.body),
        };
        match bodies {
            Some((prefill, decode)) => (prefill.into(), decode.map(Bytes::from)),
            None => (clipped.clone(), None),
        }
    }

    /// Starts a prefill at one engine.
    fn begin_prefill(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        asked: &ClientRequest,
        body: Bytes,
        deadline: tokio::time::Instant,
    ) -> Prefilling {
        let (this, engine) = (Arc::clone(self), Arc::clone(engine));
        let (path, headers) = (asked.path, asked.headers.clone());
        let (memory, prompt) = (asked.memory.clone(), Arc::clone(&asked.prompt));
        let task = self.prefills.spawn(async move {
            let _memory = memory;
            let began = Instant::now();
            let computed = this.compute(&engine, path, &headers, body);
            match tokio::time::timeout_at(deadline, computed).await {
                Ok(Ok(true)) => {
                    this.counters.count_done(began.elapsed());
                    this.prefill.note_had(&engine, &prompt, Instant::now());
                    Prefill::Done
                }
                // The decode engine answers with the reason.
                Ok(Ok(false)) => Prefill::Refused,
                Ok(Err(error)) => {
                    this.failed("prefill", &engine, &error);
                    Prefill::Failed
                }
                Err(_) => {
                    let seconds = this.prefill_timeout.as_secs();
                    let error = anyhow!("no answer within {seconds} s");
                    this.failed("prefill", &engine, &error);
                    Prefill::Late
                }
            }
        });
        Prefilling {
            task,
            goes_on: false,
        }
    }

    /// Lets one engine compute a prompt. Returns false if the engine refuses the request.
    async fn compute(
        &self,
        engine: &Arc<Engine>,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<bool> {
        let _in_flight = engine.begin();
        let request = engine.request(&Method::POST, path, headers, body)?;
        let answer = self.client.request(request).await?;
        let status = answer.status();
        // At the end of the answer the prompt is computed.
        axum::body::to_bytes(Body::new(answer.into_body()), MAX_PREFILL_ANSWER).await?;
        // These answers are about the engine: another engine may know the model or the key.
        let is_of_engine =
            status.is_server_error() || matches!(status.as_u16(), 401 | 403 | 404 | 429);
        ensure!(!is_of_engine, "the engine answered {status}");
        engine.note_answer();
        Ok(status.is_success())
    }

    /// Passes the client's request to a decode engine, and its answer back as it arrives. If an engine
    /// cannot be reached, the next one gets the request, but not after an engine that may have begun with it.
    async fn decode(
        &self,
        method: &Method,
        asked: &ClientRequest,
        body: Bytes,
        chosen: Option<Chosen>,
    ) -> Response {
        let mut text = "there is no decode engine".to_owned();
        let now = Instant::now();
        let order = match chosen {
            Some(chosen) => self.decode.order_after(chosen, now),
            None => self.decode.order(&asked.prompt, now),
        };
        for engine in order {
            let in_flight = engine.begin();
            let request = engine.request(method, asked.path, &asked.headers, body.clone());
            let request = match request {
                Ok(request) => request,
                Err(error) => return refusal(StatusCode::BAD_REQUEST, error.to_string()),
            };
            match tokio::time::timeout(self.idle_timeout, self.client.request(request)).await {
                Ok(Ok(answer)) => {
                    let status = answer.status();
                    match status.is_server_error() {
                        true => {
                            self.failed("decode", &engine, &anyhow!("the engine answered {status}"))
                        }
                        false => engine.note_answer(),
                    }
                    let had = status.is_success().then(|| HadAtEnd {
                        engines: Arc::clone(&self.decode),
                        engine,
                        prompt: Arc::clone(&asked.prompt),
                    });
                    return relayed(answer, in_flight, had, self.idle_timeout);
                }
                Ok(Err(error)) => {
                    let is_next = error.is_connect();
                    self.decode.forget_had(&engine);
                    self.failed("decode", &engine, &error.into());
                    if !is_next {
                        let text = format!("the decode engine {engine} broke off");
                        return refusal(StatusCode::BAD_GATEWAY, text);
                    }
                    text = format!("no decode engine answers; the last one asked was {engine}");
                }
                Err(_) => {
                    let seconds = self.idle_timeout.as_secs();
                    let error = anyhow!("no answer within {seconds} s");
                    self.failed("decode", &engine, &error);
                    let text = format!("the decode engine {engine} gave {error}");
                    return refusal(StatusCode::GATEWAY_TIMEOUT, text);
                }
            }
        }
        refusal(StatusCode::BAD_GATEWAY, text)
    }

    fn failed(&self, role: &'static str, engine: &Engine, error: &anyhow::Error) {
        // One log line for each change from working to failed.
        if engine.note_failure(Instant::now()) {
            let error = crate::text::error_text(error);
            warn!(role, %engine, error, "an engine failed; other engines are asked first for a while");
        }
    }
}

fn too_large() -> Refusal {
    let text = format!(
        "the request is too large: the limit is {} MiB",
        MAX_BODY >> 20
    );
    (StatusCode::PAYLOAD_TOO_LARGE, text)
}

fn late() -> Refusal {
    let text = format!(
        "the request did not arrive in time: a part must arrive every {} s, and all of it within {} s",
        PART_DEADLINE.as_secs(),
        BODY_DEADLINE.as_secs()
    );
    (StatusCode::REQUEST_TIMEOUT, text)
}

/// Passes an engine's answer on as it arrives.
fn relayed(
    answer: Response<hyper::body::Incoming>,
    in_flight: InFlight,
    had: Option<HadAtEnd>,
    idle: Duration,
) -> Response {
    let (mut head, body) = answer.into_parts();
    if head.status.is_informational() {
        let text = format!("the decode engine answered {}", head.status);
        return refusal(StatusCode::BAD_GATEWAY, text);
    }
    strip(&mut head.headers);
    Response::from_parts(head, Body::new(Relayed::new(body, in_flight, had, idle)))
}
