//! Schedules the searches for the processes at the other end of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::process::{Holders, MappedFile};
use crate::service::{ClientId, Service};

/// Most searches of one connection. A worker maps the pool when it registers, so the first search,
/// after its first prepared transfer, finds it; the others find a worker that maps it later.
const SEARCHES: u32 = 4;
/// Time between the first and the second search; each later pause is ten times as long.
const PAUSE: Duration = Duration::from_secs(1);

/// The search for the processes at the other end of one connection.
#[derive(Debug)]
pub(super) struct Search {
    /// Inode of the other end's socket, and the pool; `None` if either is unknown.
    target: Option<(u64, MappedFile)>,
    begun: u32,
    next: Option<Instant>,
    found: Arc<AtomicBool>,
}

impl Search {
    pub(super) fn new(socket: Option<u64>, pool: Option<MappedFile>) -> Self {
        Self {
            target: socket.zip(pool),
            begun: 0,
            next: None,
            found: Arc::default(),
        }
    }

    /// Ends the search, because the processes are known by other means.
    pub(super) fn end(&self) {
        self.found.store(true, Ordering::Relaxed);
    }

    /// Starts a search on a blocking thread, unless the processes are known or the pause lasts.
    pub(super) fn begin_if_due(&mut self, service: &Service, client: ClientId, now: Instant) {
        let due = self.begun < SEARCHES && self.next.is_none_or(|next| now >= next);
        if !due || self.found.load(Ordering::Relaxed) {
            return;
        }
        let Some((socket, pool)) = self.target.clone() else {
            return;
        };
        self.next = Some(now + PAUSE * 10u32.pow(self.begun));
        self.begun += 1;
        let (service, found) = (service.clone(), Arc::clone(&self.found));
        tokio::task::spawn_blocking(move || {
            if let Some(holders) = Holders::find(socket, pool) {
                found.store(true, Ordering::Relaxed);
                service.set_witness(client, Arc::new(holders));
            }
        });
    }
}
