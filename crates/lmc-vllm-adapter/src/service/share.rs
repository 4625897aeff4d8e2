//! Limits on the part of the pool that leases and stores under way keep from eviction.
//!
//! A chunk that is leased cannot be evicted, nor a slot that a worker may be writing to. So
//! lookups and retrieves that would lease more than their connection's share are answered with
//! fewer hits, stores beyond it with fewer slots, and an eighth of the pool is left to a connection
//! that holds less than its share.

use std::collections::HashSet;

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

/// Bytes that cannot be evicted, at one moment.
#[derive(Debug, Clone, Copy)]
struct Held {
    /// Bytes of the pool.
    pool: u64,
    /// Bytes that all hold: leased chunks, each counted once, and slots that workers write to.
    all: u64,
    /// Bytes that one connection holds, each chunk counted for each lease.
    own: u64,
    /// Connections that hold anything, this one included.
    holders: u64,
}

impl Held {
    /// Bytes up to which all together may hold, with more for this connection.
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
    /// Bytes that all hold.
    fn held_bytes(&self) -> u64 {
        let written = self.shared.state.lock().transfers.store_bytes();
        self.shared.engine.local().held_bytes() + written
    }

    /// Bytes that all and one connection hold.
    fn held_with(&self, client: ClientId) -> Held {
        let local = self.shared.engine.local();
        let connections = local.lease_owners().into_iter().filter_map(|(owner, _)| {
            // The engine's own numbers are above all of these.
            let is_connection = owner.0 & CONNECTION != 0 && owner.0 < CONNECTION << 1;
            is_connection.then_some(ClientId(owner.0 & !CONNECTION))
        });
        let mut holders: HashSet<ClientId> = connections.collect();
        holders.insert(client);
        let state = self.shared.state.lock();
        holders.extend(state.transfers.clients());
        Held {
            pool: self.shared.engine.pool_bytes(),
            all: local.held_bytes() + state.transfers.store_bytes(),
            own: local.lease_bytes_of(client.owner()) + state.transfers.bytes_of(client),
            holders: holders.len() as u64,
        }
    }

    /// The number of leading chunks, at most `reach`, that a lookup may hold. Cuts off what
    /// nothing else leases, from the tail on.
    pub(super) fn within_share(
        &self,
        client: ClientId,
        found: &mut [Found],
        reach: usize,
    ) -> usize {
        let engine = &self.shared.engine;
        let (pool, local) = (engine.pool_bytes(), engine.local());
        let below = |found: &[Found]| found.iter().map(|f| f.below.bytes()).sum::<u64>();
        if self.held_bytes() + below(found) <= pool / 2 {
            return reach;
        }
        for found in &mut *found {
            found.leases.truncate(reach);
            found.below.truncate(reach - found.leases.len());
        }
        let below = below(found);
        let mut held = self.held_with(client);
        held.own += below;
        let align = local.pool().align();
        let taken = |found: &Found| -> u64 {
            let slots = found.leases.iter();
            slots.map(|slot| slot.len().next_multiple_of(align)).sum()
        };
        let fresh: u64 = found.iter().map(|found| found.leases.fresh_bytes()).sum();
        let over = (held.all + below).saturating_sub(held.limit());
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

    /// Returns true for leases that a worker may not take: they would keep from eviction what is
    /// beyond its connection's share.
    pub(super) fn leases_too_much(&self, client: ClientId, leases: &Leases) -> bool {
        let fresh = leases.fresh_bytes();
        if fresh == 0 || self.held_bytes() <= self.shared.engine.pool_bytes() / 2 {
            return false;
        }
        let mut held = self.held_with(client);
        held.own += fresh;
        match held.holders {
            1 => held.all > held.pool / 8 * 7,
            _ => held.all > held.limit(),
        }
    }

    /// The number of chunks of `chunk_bytes`, at most `wanted`, that a connection may begin to
    /// write.
    pub(super) fn writable(&self, client: ClientId, chunk_bytes: u64, wanted: usize) -> usize {
        let align = self.shared.engine.local().pool().align();
        let chunk = chunk_bytes.next_multiple_of(align).max(1);
        let more = chunk.saturating_mul(wanted as u64);
        if self.held_bytes() + more <= self.shared.engine.pool_bytes() / 2 {
            return wanted;
        }
        let mut held = self.held_with(client);
        let within = held.limit().saturating_sub(held.all).min(more);
        // What goes beyond its share counts as such.
        held.own += within;
        let within = held.limit().saturating_sub(held.all).min(within);
        usize::try_from(within / chunk).unwrap_or(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_connection_may_hold_most_of_the_pool_and_several_their_shares() {
        let limit = |own, holders| {
            let (pool, all) = (1600, 0);
            let held = Held {
                pool,
                all,
                own,
                holders,
            };
            held.limit()
        };
        assert_eq!(limit(5000, 1), 1200, "no other connection asks for any");
        // Three quarters are shared out among two.
        assert_eq!((limit(600, 2), limit(601, 2)), (1400, 800));
        // However many there are, one may hold a sixteenth.
        assert_eq!((limit(100, 1000), limit(101, 1000)), (1400, 800));
    }
}
