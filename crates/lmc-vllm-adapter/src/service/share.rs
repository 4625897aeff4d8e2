//! Limits on the part of the pool that leases keep from eviction.
//!
//! A chunk that is leased cannot be evicted. So lookups that would lease more than
//! their connection's share are answered with fewer hits, and stores of all engines always find
//! an eighth of the pool that no lookup can keep.

use lmc_engine::{Leases, OwnerId};

use crate::service::ClientId;
use crate::service::handle::Service;
use crate::service::lookup::Found;
use crate::service::stats::add;

/// Marks owners that are connections; workers have numbers without it.
const CONNECTION: u64 = 1 << 62;

impl ClientId {
    /// Owner of the leases of this connection's lookups.
    pub(super) fn owner(self) -> OwnerId {
        OwnerId(CONNECTION | self.0)
    }
}

/// Bytes that leases keep from eviction, at one moment.
#[derive(Debug, Clone, Copy)]
struct Held {
    /// Bytes of the pool.
    pool: u64,
    /// Bytes that one connection leases, each chunk counted for each lease.
    own: u64,
    /// Connections that lease anything.
    holders: u64,
}

impl Held {
    /// Bytes up to which all leases together may keep chunks from eviction, with one lease more of
    /// this connection.
    fn limit(self) -> u64 {
        let most = self.pool / 4 * 3;
        if self.holders <= 1 {
            return most;
        }
        let share = (most / self.holders).max(self.pool / 16);
        match self.own <= share {
            true => self.pool / 8 * 7,
            false => self.pool / 2,
        }
    }
}

impl Service {
    /// The number of leading chunks, at most `reach`, that a lookup may hold. Cuts off what
    /// nothing else leases, from the tail on.
    pub(super) fn within_share(&self, owner: OwnerId, found: &mut [Found], reach: usize) -> usize {
        let engine = &self.shared.engine;
        let (pool, local) = (engine.pool_bytes(), engine.local());
        let below = |found: &[Found]| found.iter().map(|f| f.below.bytes()).sum::<u64>();
        if local.held_bytes() + below(found) <= pool / 2 {
            return reach;
        }
        for found in &mut *found {
            found.leases.truncate(reach);
            found.below.truncate(reach - found.leases.len());
        }
        let is_connection = |(owner, _): &(OwnerId, u64)| {
            // The engine's own numbers are above all of these.
            owner.0 & CONNECTION != 0 && owner.0 < CONNECTION << 1
        };
        let below = below(found);
        let held = Held {
            pool,
            own: local.lease_bytes_of(owner) + below,
            holders: local
                .lease_owners()
                .iter()
                .filter(|o| is_connection(o))
                .count() as u64,
        };
        let align = local.pool().align();
        let taken = |found: &Found| -> u64 {
            let slots = found.leases.iter();
            slots.map(|slot| slot.len().next_multiple_of(align)).sum()
        };
        let fresh: u64 = found.iter().map(|found| found.leases.fresh_bytes()).sum();
        let over = (local.held_bytes() + below).saturating_sub(held.limit());
        let over = over.min(fresh + below);
        if over == 0 {
            return reach;
        }
        add(&self.shared.stats.service.over_limit, 1);
        // Of all ranks.
        let bytes = found.iter().map(taken).sum::<u64>() + below;
        let chunk = bytes.div_ceil(reach.max(1) as u64).max(1);
        reach.saturating_sub(over.div_ceil(chunk) as usize)
    }

    /// Returns true if a worker must not lease these: leases would exceed what they may keep from
    /// eviction.
    pub(super) fn leases_too_much(&self, leases: &Leases) -> bool {
        let engine = &self.shared.engine;
        leases.fresh_bytes() > 0 && engine.local().held_bytes() > engine.pool_bytes() / 8 * 7
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_connection_may_hold_most_of_the_pool_and_several_their_shares() {
        let limit = |own, holders| {
            let pool = 1600;
            Held { pool, own, holders }.limit()
        };
        assert_eq!(limit(5000, 1), 1200, "no other connection asks for any");
        // Three quarters are shared out among two.
        assert_eq!((limit(600, 2), limit(601, 2)), (1400, 800));
        // However many there are, one may hold a sixteenth.
        assert_eq!((limit(100, 1000), limit(101, 1000)), (1400, 800));
    }
}
