//! One connect to a peer at a time.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use crate::PeerId;

type Locks = Mutex<HashMap<PeerId, Arc<tokio::sync::Mutex<()>>>>;

/// Serializes the connects of a channel to each peer.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectOnce(Arc<Locks>);

/// The right to connect to a peer, until dropped.
#[derive(Debug)]
pub(crate) struct ConnectPermit {
    // Dropped first: it holds a clone of the lock, which the entry counts.
    _guard: OwnedMutexGuard<()>,
    _entry: Entry,
}

#[derive(Debug)]
struct Entry {
    locks: Arc<Locks>,
    peer: PeerId,
    lock: Arc<tokio::sync::Mutex<()>>,
}

impl ConnectOnce {
    /// Waits until no other call connects to the peer.
    pub(crate) async fn acquire(&self, peer: &PeerId) -> ConnectPermit {
        let lock = Arc::clone(self.0.lock().entry(peer.clone()).or_default());
        let entry = Entry {
            locks: Arc::clone(&self.0),
            peer: peer.clone(),
            lock,
        };
        let guard = Arc::clone(&entry.lock).lock_owned().await;
        ConnectPermit {
            _guard: guard,
            _entry: entry,
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.0.lock().len()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut locks = self.locks.lock();
        // The table's reference and this one.
        if Arc::strong_count(&self.lock) == 2 {
            locks.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;
    use crate::block_on;

    #[test]
    fn permits_of_one_peer_follow_each_other_and_leave_nothing() {
        let once = ConnectOnce::default();
        let (a, b): (PeerId, PeerId) = ("a".parse().expect("id"), "b".parse().expect("id"));
        let first = block_on(once.acquire(&a));
        drop(block_on(once.acquire(&b)));
        assert_eq!(once.len(), 1);
        {
            let mut second = pin!(once.acquire(&a));
            let mut context = Context::from_waker(Waker::noop());
            assert!(second.as_mut().poll(&mut context).is_pending());
            drop(first);
            assert!(second.as_mut().poll(&mut context).is_ready());
        }
        assert_eq!(once.len(), 0);
    }
}
