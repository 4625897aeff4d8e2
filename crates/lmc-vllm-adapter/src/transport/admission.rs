//! Admission of connections: limits their number in total and per user, and closes idle connections
//! to admit new ones.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::service::{ClientId, Service};

/// Shortest time between two scans for connections that may be closed.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);

/// Permit of one open connection, with the time of its last request.
#[derive(Debug)]
pub(super) struct Permit {
    client: ClientId,
    uid: Option<u32>,
    began: Instant,
    has_sent_request: AtomicBool,
    /// Milliseconds from `began` to the last request.
    last_request: AtomicU64,
    is_streaming: AtomicBool,
    close: Notify,
}

impl Permit {
    pub(super) fn client(&self) -> ClientId {
        self.client
    }

    /// Records the time of a request.
    pub(super) fn record_request(&self, now: Instant) {
        let millis = now.saturating_duration_since(self.began).as_millis();
        self.last_request.store(millis as u64, Ordering::Relaxed);
        self.has_sent_request.store(true, Ordering::Relaxed);
    }

    /// Returns true if the connection has sent a request.
    pub(super) fn has_sent_request(&self) -> bool {
        self.has_sent_request.load(Ordering::Relaxed)
    }

    /// Sets whether the connection has event streams.
    pub(super) fn set_streaming(&self, streaming: bool) {
        self.is_streaming.store(streaming, Ordering::Relaxed);
    }

    fn is_streaming(&self) -> bool {
        self.is_streaming.load(Ordering::Relaxed)
    }

    /// Returns the time of the last request, or of the start if there was none.
    fn idle_since(&self) -> Instant {
        self.began + Duration::from_millis(self.last_request.load(Ordering::Relaxed))
    }

    /// Waits until the connection must close to admit another one.
    pub(super) async fn close_requested(&self) {
        self.close.notified().await;
    }
}

/// Permits of all open connections. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Admission(Arc<Mutex<Permits>>);

#[derive(Debug)]
struct Permits {
    max: usize,
    granted: HashMap<ClientId, Arc<Permit>>,
    /// Idle connections of the last scan, the longest idle first, with the time of their last
    /// request.
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

    /// Returns a permit for a connection, and closes an idle connection for it if necessary.
    /// Returns `None` if the limit in total or of its user is reached and no connection is idle.
    pub(super) fn admit(
        &self,
        service: &Service,
        client: ClientId,
        uid: Option<u32>,
        now: Instant,
    ) -> Option<Arc<Permit>> {
        let mut permits = self.0.lock();
        let full = permits.granted.len() >= permits.max;
        // All connections whose user is unknown count as those of one user.
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

    /// Returns the permit of a connection that has ended.
    pub(super) fn release(&self, client: ClientId) {
        self.0.lock().granted.remove(&client);
    }
}

impl Permits {
    /// Returns the number of connections that one user may have; a quarter is left for others.
    fn user_limit(&self) -> usize {
        self.max - self.max / 4
    }

    /// Closes the connection that has been idle for longest, of one user or of all users. Returns
    /// false if no connection is idle.
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
            // A connection that has sent a request since the scan may own something by now.
            let idle = permit.idle_since() == since && !permit.is_streaming();
            if idle && self.granted.remove(&permit.client).is_some() {
                permit.close.notify_one();
                return true;
            }
        }
        false
    }
}
