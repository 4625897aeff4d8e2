//! Notices to proxies: a request's chunks are stored, or the request has failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use axum::body::Body;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use lmc_vllm_adapter::{Notice, Service};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};
use tracing::{info, warn};
use zeromq::{PushSocket, Socket, SocketSend};

use crate::config::NoticeTarget;
use crate::http_client::{http_client, post_json};

/// Time for which sending a notice is tried.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time of one message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before the next try: the first pause, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Limit on the notices that wait for one proxy.
const MAX_QUEUED: usize = 4096;
/// Limit on the notices that are being sent to one proxy.
const MAX_UNDER_WAY: usize = 16;
/// Shortest time between two reads of notices, so that chunks that follow each other are read together.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// Limit on the ranks of a request for which a proxy gets a message each.
const MAX_RANKS: u32 = 1024;
/// Time that proxies have to take the last notices of a server that stops.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);

/// A notice, and the deadline for sending it.
type Queued = (Arc<Notice>, Instant);

/// Sends the notices of a server to its proxies. Once `stopped` turns true, sends the last notices and ends.
pub(crate) async fn send(
    service: Service,
    targets: Vec<NoticeTarget>,
    mut stopped: watch::Receiver<bool>,
) {
    let proxies = Proxies::start(&service, targets);
    if proxies.queues.is_empty() {
        return;
    }
    loop {
        let began = Instant::now();
        let (notices, again) = service.take_notices(began);
        let pause = LOOK_PAUSE.max(began.elapsed());
        proxies.queue(notices);
        let again = async {
            match again {
                Some(again) => sleep_until(again.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = service.notices_changed() => {}
            () = again => {}
            _ = stopped.wait_for(|&stop| stop) => break,
        }
        sleep(pause).await;
    }
    let (notices, _) = service.take_notices(Instant::now());
    proxies.queue(notices);
    proxies.queue(service.take_last_notices());
    proxies.end().await;
}

/// The proxies of a server, each with its queue and its task.
struct Proxies {
    service: Service,
    queues: Vec<mpsc::Sender<Queued>>,
    tasks: JoinSet<()>,
}

impl Proxies {
    fn start(service: &Service, targets: Vec<NoticeTarget>) -> Self {
        let mut this = Self {
            service: service.clone(),
            queues: Vec::new(),
            tasks: JoinSet::new(),
        };
        for target in targets {
            let (queue, queued) = mpsc::channel(MAX_QUEUED);
            this.queues.push(queue);
            this.tasks
                .spawn(serve(Proxy::new(target), queued, service.clone()));
        }
        this
    }

    /// Queues notices for each proxy. A notice for a full queue is lost.
    fn queue(&self, notices: Vec<Notice>) {
        let until = Instant::now() + NOTICE_TIMEOUT;
        for notice in notices.into_iter().map(Arc::new) {
            for queue in &self.queues {
                if queue.try_send((Arc::clone(&notice), until)).is_err() {
                    self.service.count_lost_notice();
                }
            }
        }
    }

    /// Waits for a short time until the proxies have taken the queued notices.
    async fn end(mut self) {
        self.queues.clear();
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        if timeout(LAST_TIMEOUT, ended).await.is_err() {
            warn!(
                "not all proxies of --pd-notify took their last notices in time; these notices are lost"
            );
        }
    }
}

/// Sends one proxy its notices, several at a time.
async fn serve(proxy: Proxy, mut queued: mpsc::Receiver<Queued>, service: Service) {
    let proxy = Arc::new(proxy);
    let mut under_way = JoinSet::new();
    loop {
        tokio::select! {
            Some((notice, until)) = queued.recv(), if under_way.len() < MAX_UNDER_WAY => {
                let proxy = Arc::clone(&proxy);
                under_way.spawn(async move { proxy.send(&notice, until).await });
            }
            Some(sent) = under_way.join_next() => {
                if !sent.unwrap_or(false) {
                    service.count_lost_notice();
                }
            }
            else => return,
        }
    }
}

/// A proxy that is sent notices.
struct Proxy {
    target: NoticeTarget,
    client: Client<HttpConnector, Body>,
    /// True after the proxy failed to take a notice.
    is_failing: AtomicBool,
}

impl Proxy {
    fn new(target: NoticeTarget) -> Self {
        Self {
            target,
            client: http_client(),
            is_failing: AtomicBool::new(false),
        }
    }

    /// Sends the messages of a notice. Repeats each message until the proxy has taken it or the time is
    /// over. Returns true if the proxy has taken all messages.
    async fn send(&self, notice: &Notice, until: Instant) -> bool {
        // Messages that the proxy has taken.
        let mut taken = 0;
        let mut pause = PAUSE.0;
        while Instant::now() < until {
            match self.send_from(notice, &mut taken).await {
                // The proxy would refuse the message again.
                Ok(false) => return false,
                Ok(true) => {
                    if self.is_failing.swap(false, Ordering::Relaxed) {
                        info!(proxy = %self.target, "the proxy takes notices again");
                    }
                    return true;
                }
                Err(error) => {
                    if !self.is_failing.swap(true, Ordering::Relaxed) {
                        let error = format!("{error:#}");
                        warn!(
                            proxy = %self.target,
                            error,
                            "a proxy does not take notices; each is tried for 30 s and then lost: check whether \
                             the proxy runs, and whether --pd-notify has its address"
                        );
                    }
                }
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE.1);
        }
        false
    }

    /// Sends the messages that the proxy has not taken yet. Returns false if it refuses a message.
    async fn send_from(&self, notice: &Notice, taken: &mut usize) -> Result<bool> {
        let late = || anyhow!("no answer within {} s", MESSAGE_TIMEOUT.as_secs());
        match &self.target {
            NoticeTarget::Http(url) => {
                for body in posts(notice).skip(*taken) {
                    let sent = timeout(MESSAGE_TIMEOUT, post_json(&self.client, url, &body)).await;
                    let (status, _) = sent.map_err(|_| late())??;
                    let may_change = matches!(status.as_u16(), 408 | 429);
                    if status.is_client_error() && !may_change {
                        return Ok(false);
                    }
                    ensure!(status.is_success(), "the proxy answers HTTP {status}");
                    *taken += 1;
                }
            }
            NoticeTarget::Zmq(at) => {
                // A connection for each notice: an older connection may have lost its other end, and with
                // it messages.
                let mut socket = PushSocket::new();
                let at = format!("tcp://{at}");
                let connected = timeout(MESSAGE_TIMEOUT, socket.connect(&at)).await;
                connected.map_err(|_| late())??;
                for message in messages(notice).skip(*taken) {
                    let sent = timeout(MESSAGE_TIMEOUT, socket.send(message.into())).await;
                    sent.map_err(|_| late())??;
                    *taken += 1;
                }
            }
        }
        Ok(true)
    }
}

/// Returns the bodies to post: one for each rank, as LMCache's connector posts it; for a failure only one.
fn posts(notice: &Notice) -> impl Iterator<Item = Value> {
    let event = match notice.is_stored {
        true => "request_store_finished",
        false => "request_store_failed",
    };
    (0..copies(notice)).map(move |kv_rank| {
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
    })
}

/// Returns the ZeroMQ messages, in MessagePack: LMCache's `ProxyNotif` for each rank; for a failure only
/// one message.
fn messages(notice: &Notice) -> impl Iterator<Item = Vec<u8>> {
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
    std::iter::repeat_n(message, copies(notice) as usize)
}

/// Returns the number of messages of a notice: a success takes one for each rank, because a proxy may
/// count the messages; a failure takes one.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_message_and_a_failure_has_one() {
        let mut notice = Notice::default();
        (notice.request_id, notice.world_size) = ("a".to_owned(), 3);
        notice.is_stored = true;
        let ranks: Vec<u64> = posts(&notice)
            .filter_map(|post| post["kv_rank"].as_u64())
            .collect();
        assert_eq!(ranks, [0, 1, 2]);
        let stored = b"\x82\xa4type\xaaProxyNotif\xa6req_id\xa1a";
        assert_eq!(messages(&notice).collect::<Vec<_>>(), [&stored[..]; 3]);
        notice.is_stored = false;
        let events: Vec<Value> = posts(&notice).map(|post| post["event"].clone()).collect();
        assert_eq!(events, ["request_store_failed"]);
        let failed = b"\x82\xa4type\xb0ProxyNotifFailed\xa6req_id\xa1a";
        assert_eq!(messages(&notice).collect::<Vec<_>>(), [&failed[..]]);
        notice.world_size = u32::MAX;
        notice.is_stored = true;
        assert_eq!(posts(&notice).count(), MAX_RANKS as usize);
    }
}
