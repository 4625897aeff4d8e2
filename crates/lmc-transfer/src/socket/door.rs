//! Places for those who connect and are not yet known: so many, and for one address half of them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Handshakes under way at a time.
const MAX_HANDSHAKES: usize = 256;
/// Sockets at a time that are accepted and not yet known, with those that wait for their turn.
const MAX_ACCEPTED: usize = 2 * MAX_HANDSHAKES;

#[derive(Debug)]
pub(super) struct Door {
    accepted: Arc<Semaphore>,
    served: Arc<Semaphore>,
    sources: Mutex<HashMap<IpAddr, Source>>,
}

#[derive(Debug)]
struct Source {
    accepted: usize,
    served: Arc<Semaphore>,
}

impl Door {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            accepted: Arc::new(Semaphore::new(MAX_ACCEPTED)),
            served: Arc::new(Semaphore::new(MAX_HANDSHAKES)),
            sources: Mutex::default(),
        })
    }

    /// Waits until another may be accepted.
    pub(super) async fn wait(&self) -> OwnedSemaphorePermit {
        acquire(&self.accepted).await
    }

    /// A place in front of the door; none where others of its address have half of them.
    pub(super) fn accept(
        self: &Arc<Self>,
        accepted: OwnedSemaphorePermit,
        address: Option<IpAddr>,
    ) -> Option<Accepted> {
        let mut served = None;
        if let Some(address) = address {
            let mut sources = self.sources.lock();
            let source = sources.entry(address).or_insert_with(|| Source {
                accepted: 0,
                served: Arc::new(Semaphore::new(MAX_HANDSHAKES / 2)),
            });
            if source.accepted == MAX_ACCEPTED / 2 {
                return None;
            }
            source.accepted += 1;
            served = Some(Arc::clone(&source.served));
        }
        Some(Accepted {
            door: Arc::clone(self),
            address,
            served,
            _accepted: accepted,
        })
    }
}

async fn acquire(room: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    let permit = Arc::clone(room).acquire_owned().await;
    permit.expect("the semaphore is never closed")
}

/// A place in front of the door.
#[derive(Debug)]
pub(super) struct Accepted {
    door: Arc<Door>,
    address: Option<IpAddr>,
    /// Places for handshakes of its address.
    served: Option<Arc<Semaphore>>,
    _accepted: OwnedSemaphorePermit,
}

impl Accepted {
    /// Waits for its turn.
    pub(super) async fn turn(self) -> Place {
        let source = match &self.served {
            Some(served) => Some(acquire(served).await),
            None => None,
        };
        let all = acquire(&self.door.served).await;
        Place {
            _permits: (source, all),
            _accepted: self,
        }
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut sources = self.door.sources.lock();
        if let Entry::Occupied(mut source) = sources.entry(address) {
            source.get_mut().accepted -= 1;
            if source.get().accepted == 0 {
                source.remove();
            }
        }
    }
}

/// A place for a handshake.
#[derive(Debug)]
pub(super) struct Place {
    _permits: (Option<OwnedSemaphorePermit>, OwnedSemaphorePermit),
    _accepted: Accepted,
}
