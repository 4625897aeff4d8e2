//! Notices to proxies: what became of the chunks of each request of this server's engines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use axum::body::{Body, to_bytes};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use lmc_vllm_adapter::{Notice, Service};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};
use tracing::{info, warn};
use zeromq::{PushSocket, Socket, SocketSend};

use crate::config::NoticeTarget;

/// Time for which a notice is tried.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time of one try.
const TRY_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before the next try, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Notices that wait for one proxy, at most.
const MAX_WAITING: usize = 4096;
/// Notices that one proxy is given at a time.
const AT_ONCE: usize = 16;
/// Time in which chunks that come one after the other are looked at together.
const TOGETHER: Duration = Duration::from_millis(1);
/// Ranks of a request that a proxy is told of one by one, at most.
const MAX_RANKS: u32 = 1024;
/// Bytes of a proxy's answer, which is not used.
const MAX_ANSWER: usize = 64 << 10;

/// A notice, and the end of the time for which it is tried.
type Waiting = (Arc<Notice>, Instant);

/// Passes notices on until `stopped` turns true.
pub(crate) async fn pass_on(
    service: Service,
    targets: Vec<NoticeTarget>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut proxies = JoinSet::new();
    let mut queues = Vec::new();
    for target in targets {
        let (queue, waiting) = mpsc::channel(MAX_WAITING);
        queues.push(queue);
        proxies.spawn(serve(Proxy::new(target), waiting, service.clone()));
    }
    loop {
        let now = Instant::now();
        let (notices, again) = service.take_notices(now);
        for notice in notices.into_iter().map(Arc::new) {
            for queue in &queues {
                let waiting = (Arc::clone(&notice), now + NOTICE_TIMEOUT);
                if queue.try_send(waiting).is_err() {
                    service.count_lost_notice();
                }
            }
        }
        let again = async {
            match again {
                Some(again) => sleep_until(again.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = service.notices_changed() => {}
            () = again => {}
            _ = stopped.wait_for(|&stop| stop) => return,
        }
        sleep(TOGETHER).await;
    }
}

/// Gives one proxy its notices, several at a time.
async fn serve(proxy: Proxy, mut waiting: mpsc::Receiver<Waiting>, service: Service) {
    let proxy = Arc::new(proxy);
    let mut under_way = JoinSet::new();
    loop {
        tokio::select! {
            Some((notice, until)) = waiting.recv(), if under_way.len() < AT_ONCE => {
                let proxy = Arc::clone(&proxy);
                under_way.spawn(async move { proxy.tell(&notice, until).await });
            }
            Some(told) = under_way.join_next() => {
                if !told.unwrap_or(false) {
                    service.count_lost_notice();
                }
            }
            else => return,
        }
    }
}

/// A proxy that is told of requests.
struct Proxy {
    target: NoticeTarget,
    client: Client<HttpConnector, Body>,
    /// True since it has failed to take a notice.
    is_failing: AtomicBool,
}

impl Proxy {
    fn new(target: NoticeTarget) -> Self {
        Self {
            target,
            client: Client::builder(TokioExecutor::new()).build_http(),
            is_failing: AtomicBool::new(false),
        }
    }

    /// Tells the proxy of a request, and again until it has taken that or the time is over. Returns true if
    /// it has taken it.
    async fn tell(&self, notice: &Notice, until: Instant) -> bool {
        let mut pause = PAUSE.0;
        while Instant::now() < until {
            let told = timeout(TRY_TIMEOUT, self.try_to_tell(notice)).await;
            match told.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within 5 s"))) {
                Ok(()) => {
                    if self.is_failing.swap(false, Ordering::Relaxed) {
                        info!(proxy = %self.target, "the proxy takes notices again");
                    }
                    return true;
                }
                Err(error) => {
                    if !self.is_failing.swap(true, Ordering::Relaxed) {
                        warn!(
                            proxy = %self.target,
                            error = format!("{error:#}"),
                            "a proxy does not take notices; each is tried for 30 s: look whether it \
                             runs, and whether --pd-notify has its address"
                        );
                    }
                }
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE.1);
        }
        false
    }

    async fn try_to_tell(&self, notice: &Notice) -> Result<()> {
        match &self.target {
            NoticeTarget::Http(url) => {
                for body in posts(notice) {
                    self.post(url, &body).await?;
                }
                Ok(())
            }
            NoticeTarget::Zmq(at) => {
                // A connection of its own for each: on one whose other end is gone, messages are lost.
                let mut socket = PushSocket::new();
                socket.connect(&format!("tcp://{at}")).await?;
                for message in messages(notice) {
                    socket.send(message.into()).await?;
                }
                Ok(())
            }
        }
    }

    async fn post(&self, url: &Uri, body: &Value) -> Result<()> {
        let request = Request::post(url.clone())
            .header(CONTENT_TYPE, "application/json")
            .body(Body::from(body.to_string()))?;
        let answer = self.client.request(request).await?;
        let status = answer.status();
        to_bytes(Body::new(answer.into_body()), MAX_ANSWER)
            .await
            .context("its answer")?;
        ensure!(status.is_success(), "it answers HTTP {status}");
        Ok(())
    }
}

/// Returns what is posted: as LMCache's connector does it.
fn posts(notice: &Notice) -> Vec<Value> {
    let event = match notice.is_stored {
        true => "request_store_finished",
        false => "request_store_failed",
    };
    let post = |kv_rank: u32| {
        let mut post = json!({
            "event": event,
            "request_ids_set": [notice.request_id],
            "model_name": notice.model_name,
            "world_size": notice.world_size,
            "kv_rank": kv_rank,
        });
        if !notice.pd_id.is_empty() {
            post["pd_id"] = Value::from(notice.pd_id.clone());
        }
        post
    };
    (0..copies(notice)).map(post).collect()
}

/// Returns what is sent over ZeroMQ: LMCache's `ProxyNotif`, in MessagePack.
fn messages(notice: &Notice) -> Vec<Vec<u8>> {
    let id = match notice.pd_id.is_empty() {
        true => &notice.request_id,
        false => &notice.pd_id,
    };
    let kind = match notice.is_stored {
        true => "ProxyNotif",
        false => "ProxyNotifFailed",
    };
    // A map of two entries.
    let mut message = vec![0x82];
    for text in ["type", kind, "req_id", id] {
        push_text(&mut message, text);
    }
    vec![message; copies(notice) as usize]
}

/// Returns how often a proxy is told: once for each rank, which it may count, and of a failure once.
fn copies(notice: &Notice) -> u32 {
    match notice.is_stored {
        true => notice.world_size.min(MAX_RANKS),
        false => 1,
    }
}

/// Appends a text in MessagePack.
fn push_text(message: &mut Vec<u8>, text: &str) {
    match text.len() {
        len @ 0..32 => message.push(0xa0 | len as u8),
        len => {
            message.push(0xdb);
            message.extend((len as u32).to_be_bytes());
        }
    }
    message.extend(text.as_bytes());
}
