//! Ordering of the writes and removals of one key.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use lmc_key::{ChunkKey, FoldState};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The keys that are being written or removed. A write whose caller is gone continues to its end or its
/// deadline, and later operations on the same key wait for it. In a store that hangs, a write that was late
/// may still take effect after that.
#[derive(Debug, Default)]
pub(super) struct Claims {
    claimed: Mutex<HashSet<ChunkKey, FoldState>>,
    ended: Notify,
}

/// The right to write or remove a key, until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    key: ChunkKey,
    claims: Arc<Claims>,
}

impl Claims {
    /// Removes from `items` those whose key is free, and claims and returns them; waits while there are none.
    /// The keys of `items` must be different. Returns nothing once the deadline has passed.
    ///
    /// The caller must not hold claims of its own.
    pub(super) async fn take<I>(
        self: &Arc<Self>,
        items: &mut Vec<I>,
        key: impl Fn(&I) -> ChunkKey,
        deadline: Instant,
    ) -> Vec<(Claim, I)> {
        loop {
            let ended = self.ended.notified();
            let mut free = Vec::new();
            for item in std::mem::take(items) {
                match self.claim(key(&item)) {
                    Some(claim) => free.push((claim, item)),
                    None => items.push(item),
                }
            }
            if !free.is_empty() || items.is_empty() {
                return free;
            }
            if tokio::time::timeout_at(deadline.into(), ended)
                .await
                .is_err()
            {
                return Vec::new();
            }
        }
    }

    fn claim(self: &Arc<Self>, key: ChunkKey) -> Option<Claim> {
        let claims = Arc::clone(self);
        let is_free = self.claimed.lock().insert(key);
        is_free.then_some(Claim { key, claims })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.claimed.lock().remove(&self.key);
        self.claims.ended.notify_waiters();
    }
}
