//! Admission of connections: a share for each user, and idle ones are closed for new ones.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::service::{ClientId, Service};

/// Least time between two looks for connections that may be closed.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);

/// The permit of one open connection.
#[derive(Debug)]
pub(super) struct Permit {
    client: ClientId,
    uid: Option<u32>,
    began: Instant,
    has_sent_request: AtomicBool,
    /// Milliseconds from `began` to its last request.
    last_request: AtomicU64,
    is_streaming: AtomicBool,
    close: Notify,
}

impl Permit {
    pub(super) fn client(&self) -> ClientId {
        self.client
    }

    /// Notes a request.
    pub(super) fn record_request(&self, now: Instant) {
        let millis = now.saturating_duration_since(self.began).as_millis();
        self.last_request.store(millis as u64, Ordering::Relaxed);
        self.has_sent_request.store(true, Ordering::Relaxed);
    }

    /// Returns true once it has sent a request.
    pub(super) fn has_sent_request(&self) -> bool {
        self.has_sent_request.load(Ordering::Relaxed)
    }

    /// Notes whether it reads event streams.
    pub(super) fn set_streaming(&self, streaming: bool) {
        self.is_streaming.store(streaming, Ordering::Relaxed);
    }

    fn is_streaming(&self) -> bool {
        self.is_streaming.load(Ordering::Relaxed)
    }

    /// Time of its last request, or of its start if it has sent none.
    fn idle_since(&self) -> Instant {
        self.began + Duration::from_millis(self.last_request.load(Ordering::Relaxed))
    }

    /// Waits until the connection is to be closed for another one.
    pub(super) async fn close_requested(&self) {
        self.close.notified().await;
    }
}

/// All seats. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Admission(Arc<Mutex<Permits>>);

#[derive(Debug)]
struct Permits {
    max: usize,
    granted: HashMap<ClientId, Arc<Permit>>,
    /// Connections that may be closed, the longest idle first, with the time of their last request.
    idle: VecDeque<(Arc<Permit>, Instant)>,
    scanned_at: Option<Instant>,
}

impl Admission {
    pub(super) fn new(max: usize) -> Self {
        Self(Arc::new(Mutex::new(Permits {
            max,
            granted: HashMap::new(),
            idle: VecDeque::new(),
            scanned_at: None,
        })))
    }

    /// A permit for a connection; `None` when all are taken, or all of its user's share, by
    /// connections that own something. Closes an idle one where that helps.
    pub(super) fn admit(
        &self,
        service: &Service,
        client: ClientId,
        uid: Option<u32>,
        now: Instant,
    ) -> Option<Arc<Permit>> {
        let mut permits = self.0.lock();
        let full = permits.granted.len() >= permits.max;
        // Connections whose user the kernel does not show count as those of one user.
        let of_user = permits.granted.values().filter(|permit| permit.uid == uid);
        let own = (of_user.count() >= permits.user_limit()).then_some(uid);
        if (full || own.is_some()) && !permits.close_idle(service, own, now) {
            return None;
        }
        let permit = Arc::new(Permit {
            client,
            uid,
            began: now,
            has_sent_request: AtomicBool::new(false),
            last_request: AtomicU64::new(0),
            is_streaming: AtomicBool::new(false),
            close: Notify::new(),
        });
        permits.granted.insert(client, Arc::clone(&permit));
        Some(permit)
    }

    /// A connection is over.
    pub(super) fn release(&self, client: ClientId) {
        self.0.lock().granted.remove(&client);
    }
}

impl Permits {
    /// Connections that one user may have: a quarter is for others.
    fn user_limit(&self) -> usize {
        self.max - self.max / 4
    }

    /// Closes the connection that has been idle for longest, of one user's or of all. Returns true
    /// if there was one.
    fn close_idle(&mut self, service: &Service, of: Option<Option<u32>>, now: Instant) -> bool {
        let recently = |scan: Instant| now.saturating_duration_since(scan) < SCAN_INTERVAL;
        if self.idle.is_empty() && !self.scanned_at.is_some_and(recently) {
            self.scanned_at = Some(now);
            let owners = service.owners();
            let idle = self
                .granted
                .values()
                .filter(|permit| !owners.contains(&permit.client));
            let mut idle: Vec<_> = idle
                .map(|permit| (Arc::clone(permit), permit.idle_since()))
                .collect();
            idle.sort_by_key(|(_, since)| *since);
            self.idle = idle.into();
        }
        let of_user = |permit: &Permit| of.is_none_or(|uid| permit.uid == uid);
        while let Some(at) = self.idle.iter().position(|(permit, _)| of_user(permit)) {
            let Some((permit, since)) = self.idle.remove(at) else {
                break;
            };
            // One that has asked for something since may own something by now.
            let idle = permit.idle_since() == since && !permit.is_streaming();
            if idle && self.granted.remove(&permit.client).is_some() {
                permit.close.notify_one();
                return true;
            }
        }
        false
    }
}
