//! Admission of connections: a share for each user, and idle ones are closed for new ones.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::service::{ClientId, Service};

/// Least time between two looks for connections that may be closed.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The seat of one open connection.
#[derive(Debug)]
pub(super) struct Seat {
    client: ClientId,
    uid: Option<u32>,
    began: Instant,
    has_spoken: AtomicBool,
    /// Milliseconds from `began` to its last request.
    spoke: AtomicU64,
    is_streaming: AtomicBool,
    leave: Notify,
}

impl Seat {
    pub(super) fn client(&self) -> ClientId {
        self.client
    }

    /// Notes a request.
    pub(super) fn spoke(&self, now: Instant) {
        let millis = now.saturating_duration_since(self.began).as_millis();
        self.spoke.store(millis as u64, Ordering::Relaxed);
        self.has_spoken.store(true, Ordering::Relaxed);
    }

    /// Returns true once it has sent a request.
    pub(super) fn has_spoken(&self) -> bool {
        self.has_spoken.load(Ordering::Relaxed)
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
        self.began + Duration::from_millis(self.spoke.load(Ordering::Relaxed))
    }

    /// Waits until the connection is to be closed for another one.
    pub(super) async fn must_go(&self) {
        self.leave.notified().await;
    }
}

/// All seats. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Admission(Arc<Mutex<Seats>>);

#[derive(Debug)]
struct Seats {
    max: usize,
    taken: HashMap<ClientId, Arc<Seat>>,
    /// Connections that may be closed, the longest idle first, with the time of their last request.
    idle: VecDeque<(Arc<Seat>, Instant)>,
    looked: Option<Instant>,
}

impl Admission {
    pub(super) fn new(max: usize) -> Self {
        Self(Arc::new(Mutex::new(Seats {
            max,
            taken: HashMap::new(),
            idle: VecDeque::new(),
            looked: None,
        })))
    }

    /// A seat for a connection; `None` when all are taken, or all of its user's share, by
    /// connections that own something. Closes an idle one where that helps.
    pub(super) fn admit(
        &self,
        service: &Service,
        client: ClientId,
        uid: Option<u32>,
        now: Instant,
    ) -> Option<Arc<Seat>> {
        let mut seats = self.0.lock();
        let full = seats.taken.len() >= seats.max;
        // Connections whose user the kernel does not show count as those of one user.
        let taken = seats.taken.values().filter(|seat| seat.uid == uid);
        let own = (taken.count() >= seats.share()).then_some(uid);
        if (full || own.is_some()) && !seats.close_idle(service, own, now) {
            return None;
        }
        let seat = Arc::new(Seat {
            client,
            uid,
            began: now,
            has_spoken: AtomicBool::new(false),
            spoke: AtomicU64::new(0),
            is_streaming: AtomicBool::new(false),
            leave: Notify::new(),
        });
        seats.taken.insert(client, Arc::clone(&seat));
        Some(seat)
    }

    /// A connection is over.
    pub(super) fn left(&self, client: ClientId) {
        self.0.lock().taken.remove(&client);
    }
}

impl Seats {
    /// Connections that one user may have: a quarter is for others.
    fn share(&self) -> usize {
        self.max - self.max / 4
    }

    /// Closes the connection that has been idle for longest, of one user's or of all. Returns true
    /// if there was one.
    fn close_idle(&mut self, service: &Service, of: Option<Option<u32>>, now: Instant) -> bool {
        let recently = |looked: Instant| now.saturating_duration_since(looked) < LOOK_EVERY;
        if self.idle.is_empty() && !self.looked.is_some_and(recently) {
            self.looked = Some(now);
            let owners = service.owners();
            let idle = self
                .taken
                .values()
                .filter(|seat| !owners.contains(&seat.client));
            let mut idle: Vec<_> = idle
                .map(|seat| (Arc::clone(seat), seat.idle_since()))
                .collect();
            idle.sort_by_key(|(_, since)| *since);
            self.idle = idle.into();
        }
        let of_user = |seat: &Seat| of.is_none_or(|uid| seat.uid == uid);
        while let Some(at) = self.idle.iter().position(|(seat, _)| of_user(seat)) {
            let Some((seat, since)) = self.idle.remove(at) else {
                break;
            };
            // One that has asked for something since may own something by now.
            let idle = seat.idle_since() == since && !seat.is_streaming();
            if idle && self.taken.remove(&seat.client).is_some() {
                seat.leave.notify_one();
                return true;
            }
        }
        false
    }
}
