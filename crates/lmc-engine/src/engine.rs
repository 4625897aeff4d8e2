//! The engine.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use lmc_backend_local::{
    Clear, EventSink, Inserted, Leases, LocalConfig, LocalTier, OwnerId, TenantId, WriteStart,
};
use lmc_key::ChunkKey;
use lmc_memory::{Arena, Pool, PoolConfig, SharedName};
use parking_lot::{Condvar, Mutex};
use serde::Serialize;

use crate::config::{EngineConfig, EngineError};
use crate::events::Relay;
use crate::status::{EngineStats, EngineUsage, TenantStatus};
use crate::write::{Reservation, WriteRequest, WriteTicket};

/// Chunks evicted in one go above the high watermark, so that others get their turn in between.
const EVICT_AT_ONCE: usize = 256;

/// How one tier is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierHealth {
    /// Name of the tier.
    pub tier: &'static str,
    /// What is wrong with it, and what to do about it; none when all is well.
    pub fault: Option<String>,
}

/// A KV cache over tiers of memory.
///
/// A handle: clones share one engine. Safe to use from any number of threads.
#[derive(Clone, Debug)]
pub struct CacheEngine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tier: LocalTier,
    relay: Arc<Relay>,
    stop: Arc<Stop>,
}

/// Ends the maintenance thread.
#[derive(Debug, Default)]
struct Stop {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Drop for Inner {
    fn drop(&mut self) {
        *self.stop.stopped.lock() = true;
        self.stop.wake.notify_all();
    }
}

impl CacheEngine {
    /// Makes an engine whose DRAM tier is this arena.
    ///
    /// # Errors
    /// [`EngineError`] says which setting cannot be.
    pub fn new(config: EngineConfig, arena: Arc<Arena>) -> Result<Self, EngineError> {
        let pool = Pool::new(arena, PoolConfig::default().with_align(config.align))?;
        let relay = Arc::new(Relay::default());
        let mut local = LocalConfig::new(pool)
            .with_policy(config.policy)
            .with_watermarks(config.high_watermark, config.low_watermark)
            .with_events(Arc::clone(&relay) as Arc<dyn EventSink>);
        if let Some(shards) = config.shards {
            local = local.with_shards(shards);
        }
        let stop = Arc::new(Stop::default());
        let inner = Arc::new(Inner {
            tier: local.build()?,
            relay,
            stop: Arc::clone(&stop),
        });
        let weak = Arc::downgrade(&inner);
        thread::Builder::new()
            .name("lmc-evict".to_owned())
            .spawn(move || maintain(&weak, &stop, config.maintain_every))?;
        Ok(Self(inner))
    }

    /// Who is told of chunks that come and go. Only the first listener is taken; false for any
    /// other.
    pub fn set_events(&self, listener: Arc<dyn EventSink>) -> bool {
        self.0.relay.set(listener)
    }

    /// Leases the leading chunks of a prompt that are there. They stay until the leases go.
    pub fn lookup(&self, owner: OwnerId, keys: &[ChunkKey]) -> Leases {
        self.0.tier.lease_leading(owner, keys)
    }

    /// Leases all of these chunks, or none.
    pub fn acquire(&self, owner: OwnerId, keys: &[ChunkKey]) -> Option<Leases> {
        let leases = self.lookup(owner, keys);
        (leases.len() == keys.len()).then_some(leases)
    }

    /// Gives leases back; the same as dropping them.
    pub fn release(&self, leases: Leases) {
        drop(leases);
    }

    /// How many leading chunks are there, without holding them.
    pub fn leading(&self, keys: &[ChunkKey]) -> usize {
        self.0.tier.lookup_leading(keys)
    }

    /// Bytes of each chunk that is there.
    pub fn contains(&self, keys: &[ChunkKey]) -> Vec<Option<u64>> {
        self.0.tier.contains(keys)
    }

    /// Reserves memory for chunks, one answer each, in order. Evicts what may go; never waits.
    /// A batch is best given in the order of the prompt: what is there of it counts as used.
    pub fn reserve(&self, owner: OwnerId, requests: &[WriteRequest]) -> Vec<Reservation> {
        let prompt: Vec<_> = requests.iter().map(|r| (r.key, r.parent)).collect();
        self.0.tier.touch(&prompt);
        let reserve = |request: &WriteRequest| {
            let WriteRequest {
                key,
                parent,
                tenant,
                len,
            } = *request;
            match self.0.tier.begin_write(owner, tenant, key, len) {
                Ok(WriteStart::Reserved(new)) => {
                    Reservation::Reserved(WriteTicket::new(new, parent))
                }
                Ok(WriteStart::Present) => Reservation::Present,
                Ok(WriteStart::Busy) => Reservation::Busy,
                Err(_) => Reservation::NoRoom,
            }
        };
        requests.iter().map(reserve).collect()
    }

    /// Makes written chunks findable, at once and for everybody. How many of them are new.
    ///
    /// # Panics
    /// When a ticket is another engine's.
    pub fn commit(&self, tickets: Vec<WriteTicket>) -> usize {
        let writes = tickets.into_iter().map(WriteTicket::written).collect();
        let inserted = self.0.tier.commit(writes);
        inserted
            .iter()
            .filter(|&&inserted| inserted == Inserted::New)
            .count()
    }

    /// Gives reservations back unwritten; the same as dropping them.
    pub fn abort(&self, tickets: Vec<WriteTicket>) {
        drop(tickets);
    }

    /// Keeps chunks until they are unpinned. Which of them are there.
    pub fn pin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        self.0.tier.pin(keys)
    }

    /// Ends pins, one for each call of [`Self::pin`]. Which of them were pinned.
    pub fn unpin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        self.0.tier.unpin(keys)
    }

    /// Forgets chunks. What is leased is unfindable at once and its memory comes back with the
    /// last lease. Which of them were there.
    pub fn remove(&self, keys: &[ChunkKey]) -> Vec<bool> {
        self.0.tier.remove(keys)
    }

    /// Forgets everything that nobody holds; with `force` also what is leased or pinned. How
    /// many chunks went.
    pub fn clear(&self, force: bool) -> u64 {
        self.0
            .tier
            .clear(if force { Clear::All } else { Clear::Idle })
    }

    /// Grants a tenant this many bytes of its own, or with none a share of what is left.
    pub fn set_quota(&self, tenant: TenantId, quota: Option<u64>) {
        self.0.tier.set_quota(tenant, quota);
    }

    /// What each tenant uses and may use. One that uses nothing and has no quota may be missing.
    pub fn tenants(&self) -> Vec<TenantStatus> {
        self.0
            .tier
            .tenants()
            .into_iter()
            .map(|(id, usage)| TenantStatus::new(id, usage))
            .collect()
    }

    /// The DRAM tier, for what this type does not offer.
    pub fn local(&self) -> &LocalTier {
        &self.0.tier
    }

    /// Name of the pool when it is shared memory.
    pub fn shared_name(&self) -> Option<&SharedName> {
        self.arena().shared_name()
    }

    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        self.arena().len() as u64
    }

    fn arena(&self) -> &Arena {
        self.0.tier.pool().arena()
    }

    /// How each tier is, fastest first.
    pub fn health(&self) -> Vec<TierHealth> {
        vec![TierHealth {
            tier: "dram",
            fault: self.0.tier.pool().fault(),
        }]
    }

    /// What is held at this moment.
    pub fn usage(&self) -> EngineUsage {
        let prefaulted = self.arena().prefault_progress().done;
        EngineUsage::new(&self.0.tier.usage(), self.pool_bytes(), prefaulted)
    }

    /// What was counted so far.
    pub fn stats(&self) -> EngineStats {
        self.0.tier.stats().into()
    }
}

/// Keeps the pool below its high watermark until the engine is gone.
fn maintain(engine: &Weak<Inner>, stop: &Stop, every: Duration) {
    loop {
        {
            let mut stopped = stop.stopped.lock();
            if !*stopped {
                stop.wake.wait_for(&mut stopped, every);
            }
            if *stopped {
                return;
            }
        }
        let Some(inner) = engine.upgrade() else {
            return;
        };
        inner.tier.pool().recover();
        while inner.tier.maintain(EVICT_AT_ONCE).more {
            thread::yield_now();
        }
    }
}
