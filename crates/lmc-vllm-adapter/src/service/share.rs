//! Limits on the part of the pool that leases and stores under way keep from eviction.
//!
//! A leased chunk cannot be evicted, nor a slot that a worker may be writing to. So lookups and
//! retrieves that would lease more than their connection's share get fewer hits, and stores beyond
//! it get fewer slots. An eighth of the pool is left to connections that hold less than their
//! share.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lmc_engine::{LeaseLimit, OwnerId};

use crate::service::ClientId;
use crate::service::context::Context;
use crate::service::stats::add;

/// Marks owners that are connections; workers have numbers without it.
const CONNECTION: u64 = 1 << 62;

impl ClientId {
    /// Returns the owner of the leases of this connection's lookups.
    pub(super) fn owner(self) -> OwnerId {
        OwnerId(CONNECTION | self.0)
    }
}

/// Bytes that cannot be evicted, at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    /// Bytes of the pool.
    pub(super) pool: u64,
    /// Bytes that all connections hold: leased chunks, each counted once, and slots that workers
    /// write to.
    pub(super) all: u64,
    /// Bytes that one connection holds, each chunk counted for each lease.
    pub(super) own: u64,
    /// Number of connections that hold anything in the same way, including this one.
    pub(super) holders: u64,
}

impl Held {
    /// Returns the bytes of the pool that one connection may hold whatever the others do.
    fn share(self) -> u64 {
        (self.pool / 4 * 3 / self.holders.max(1)).max(self.pool / 16)
    }

    /// Returns how many more bytes this connection may hold.
    pub(super) fn more(self) -> u64 {
        let within_share = self.share().saturating_sub(self.own);
        let left = (self.pool / 8 * 7).saturating_sub(self.all);
        let beyond = (self.pool / 2).saturating_sub(self.all);
        within_share.min(left).max(beyond)
    }
}

impl Context {
    /// Returns the bytes that all connections hold.
    pub(super) fn held_bytes(&self) -> u64 {
        self.engine.held_bytes() + self.store_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes that all connections hold, and a connection's share by its lookups.
    fn held_by_lookups(&self, client: ClientId) -> Held {
        let engine = &self.engine;
        let others = engine.lease_owners().into_iter().filter(|(owner, _)| {
            // Numbers above these owners are the engine's own.
            owner.0 & CONNECTION != 0 && owner.0 < CONNECTION << 1 && *owner != client.owner()
        });
        Held {
            pool: engine.pool_bytes(),
            all: self.held_bytes(),
            own: engine.lease_bytes_of(client.owner()),
            holders: others.count() as u64 + 1,
        }
    }
}

/// Returns the limit on the bytes that a connection's lookups keep from eviction.
pub(super) fn share_of(context: &Arc<Context>, client: ClientId) -> Arc<dyn LeaseLimit> {
    Arc::new(ShareOf {
        context: Arc::clone(context),
        client,
    })
}

/// The limit on the bytes that one connection's lookups keep from eviction.
struct ShareOf {
    context: Arc<Context>,
    client: ClientId,
}

impl LeaseLimit for ShareOf {
    fn allowed(&self, leased: u64, more: u64) -> u64 {
        let context = &self.context;
        let wanted = leased + more;
        if context.held_bytes() + more <= context.engine.pool_bytes() / 2 {
            return wanted;
        }
        let mut held = context.held_by_lookups(self.client);
        held.all = held.all.saturating_sub(leased);
        held.own = held.own.saturating_sub(leased);
        let allowed = held.more();
        if allowed < wanted {
            add(&context.stats.service.over_limit, 1);
        }
        allowed.min(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_below_its_share_gets_the_rest_of_it() {
        let more = |all, own, holders| {
            let pool = 1600;
            let held = Held {
                pool,
                all,
                own,
                holders,
            };
            held.more()
        };
        assert_eq!((more(0, 0, 1), more(1100, 1100, 1)), (1200, 100));
        assert_eq!(more(1200, 0, 1), 200, "what others hold in another way");
        assert_eq!(more(900, 0, 1000), 100, "at least a sixteenth");
        // Four hold more than half: the share is 300.
        assert_eq!(
            (more(900, 0, 4), more(900, 250, 4), more(900, 300, 4)),
            (300, 50, 0)
        );
        assert_eq!(more(1300, 0, 4), 100, "up to seven eighths");
        assert_eq!(more(500, 400, 4), 300, "up to half of the pool");
    }
}
