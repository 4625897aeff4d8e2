//! The tier: its shards, and the operations that span several shards.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use lmc_key::ChunkKey;
use lmc_memory::Pool;

use crate::class::{Class, Tenants};
use crate::owner::Owners;
use crate::shard::{Shard, Taken};
use crate::slab::EntryRef;
use crate::stats::LocalCounters;
use crate::sync::Mutex;
use crate::{
    LocalConfig, LocalConfigError, LocalSink, LocalStats, LocalUsage, OwnerId, PolicyKind, Removal,
};
use crate::{RemovedEvent, TenantId};

mod batch;
mod evict;
#[cfg(test)]
mod interleavings;
mod lease;
mod read;
mod write;

#[cfg(test)]
mod tests;

pub use evict::{Maintained, ReserveError};
pub use lease::{Lease, Leases};
pub use read::{Clear, Cleared, ListedChunk};
pub use write::{InFlight, Inserted, MarkId, Write, WriteGrant, WriteStart};

use batch::KeysByShard;

/// The DRAM tier. Clones refer to the same tier.
///
/// No call waits: each takes a few locks, all of which are held for microseconds. Two rare operations hold a
/// shard for longer: the growth of its table, about 10 ms with a million chunks in one shard, and a change of
/// quotas.
#[derive(Clone)]
pub struct LocalTier(Arc<Inner>);

pub(crate) struct Inner {
    pool: Pool,
    policy: PolicyKind,
    shards: Box<[Mutex<Shard>]>,
    shared: Arc<Class>,
    tenants: Tenants,
    /// Leases by owner, and the bytes of their chunks, counted once for each lease.
    leases: Owners,
    /// Bytes of leased or pinned chunks in each shard, each chunk counted once.
    held: Arc<[AtomicU64]>,
    /// Keys that each owner is writing.
    writes: Owners,
    /// Counter of uses: a batch takes as many numbers as it has keys, the highest for the head of the prefix.
    clock: AtomicU64,
    /// Current time, from which the ages of chunks are computed.
    seconds: AtomicU32,
    reservations: AtomicU64,
    counters: LocalCounters,
    events: Option<Arc<dyn LocalSink>>,
    /// Used bytes of the pool at which watermark eviction starts, and at which it stops.
    watermarks: (u64, u64),
    draining: AtomicBool,
}

impl fmt::Debug for LocalTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        f.debug_struct("LocalTier")
            .field("policy", &inner.policy)
            .field("shards", &inner.shards.len())
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

impl LocalConfig {
    /// Makes the tier. Chunks may fill the whole pool. Events about stored and removed chunks go to `events`.
    ///
    /// # Errors
    /// [`LocalConfigError`] names the value that is out of range.
    pub fn build(
        self,
        pool: Pool,
        events: Option<Arc<dyn LocalSink>>,
    ) -> Result<LocalTier, LocalConfigError> {
        let found = self.shards;
        if !found.is_power_of_two() || found > 128 {
            return Err(LocalConfigError::Shards { found });
        }
        let Self { high, low, .. } = self;
        if !(0.0 < low && low <= high && high <= 1.0) {
            return Err(LocalConfigError::Watermarks { high, low });
        }
        Ok(LocalTier::new(self, pool, events))
    }
}

impl LocalTier {
    fn new(config: LocalConfig, pool: Pool, events: Option<Arc<dyn LocalSink>>) -> Self {
        let shared = Arc::new(Class::new(config.shards));
        let capacity = pool.usage().capacity;
        let share = capacity / config.shards as u64;
        let align = pool.align();
        let held: Arc<[AtomicU64]> = (0..config.shards).map(|_| AtomicU64::new(0)).collect();
        let shard = |id| {
            let (shared, held) = (Arc::clone(&shared), Arc::clone(&held));
            Mutex::new(Shard::new(id, config.policy, (share, align), shared, held))
        };
        let part = |part: f64| (capacity as f64 * part) as u64;
        Self(Arc::new(Inner {
            shards: (0..config.shards).map(shard).collect(),
            policy: config.policy,
            shared,
            tenants: Tenants::new(config.shards),
            leases: Owners::default(),
            held,
            writes: Owners::default(),
            clock: AtomicU64::new(1),
            seconds: AtomicU32::new(0),
            reservations: AtomicU64::new(0),
            counters: LocalCounters::default(),
            events,
            watermarks: (part(config.high), part(config.low)),
            draining: AtomicBool::new(false),
            pool,
        }))
    }

    /// Returns the pool with the tier's chunks.
    pub fn pool(&self) -> &Pool {
        &self.0.pool
    }

    /// Returns the eviction policy.
    pub fn policy(&self) -> PolicyKind {
        self.0.policy
    }

    /// Sets the time, in seconds since any fixed instant, from which the ages of chunks are computed. The
    /// tier has no clock of its own. A time before the last one is ignored.
    pub fn set_seconds(&self, seconds: u32) {
        self.0.seconds.fetch_max(seconds, Ordering::Relaxed);
    }

    /// Returns the counters since the tier was made.
    pub fn stats(&self) -> LocalStats {
        self.0.counters.snapshot()
    }

    /// Returns the current usage. Locks each shard briefly, one after the other, so the numbers are of
    /// slightly different instants.
    pub fn usage(&self) -> LocalUsage {
        let inner = &self.0;
        let (mut chunks, mut pinned) = (0, 0);
        for shard in &inner.shards {
            let shard = shard.lock();
            chunks += shard.len() as u64;
            pinned += shard.pinned();
        }
        let with_quota = inner.tenants.with_quota();
        let promised: u64 = with_quota.iter().map(|tenant| tenant.class().bytes()).sum();
        LocalUsage {
            chunks,
            bytes: inner.shared.bytes() + promised,
            leases: inner.leases.total(),
            writing: inner.writes.total(),
            pinned,
            pool: inner.pool.usage(),
        }
    }

    /// Returns the number of leases that exist now.
    pub fn leases(&self) -> u64 {
        self.0.leases.total()
    }

    /// Returns the number of leases of an owner.
    pub fn leases_of(&self, owner: OwnerId) -> u64 {
        self.0.leases.of(owner).count
    }

    /// Returns the bytes of the pool used by the chunks that an owner leases, counted once for each lease.
    pub fn lease_bytes_of(&self, owner: OwnerId) -> u64 {
        self.0.leases.of(owner).bytes
    }

    /// Returns the bytes of the pool used by chunks that are leased or pinned and cannot be evicted, each
    /// chunk counted once.
    pub fn held_bytes(&self) -> u64 {
        let held = self.0.held.iter();
        held.map(|held| held.load(Ordering::Relaxed)).sum()
    }

    /// Returns the number of keys that an owner is writing.
    pub fn writes_of(&self, owner: OwnerId) -> u64 {
        self.0.writes.of(owner).count
    }

    /// Returns the owners of leases, with the number of leases of each, to find leaks.
    pub fn lease_owners(&self) -> Vec<(OwnerId, u64)> {
        self.0.leases.all()
    }

    /// Checks that counts, queues and tables agree.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        for shard in &self.0.shards {
            shard.lock().check();
        }
    }
}

impl Inner {
    #[inline]
    fn shard_of(&self, fold: u64) -> usize {
        // The table uses the low bits for the bucket and the top seven for the tag.
        (fold >> 40) as usize & (self.shards.len() - 1)
    }

    /// Returns the bytes of the pool that a chunk of `len` bytes takes.
    fn taken(&self, len: u64) -> u64 {
        len.next_multiple_of(self.pool.align())
    }

    /// Returns the tier's time in seconds.
    pub(super) fn seconds(&self) -> u32 {
        self.seconds.load(Ordering::Relaxed)
    }

    /// Returns the numbers of `n` uses; the caller gives the highest to the head.
    fn stamps(&self, n: usize) -> u64 {
        self.clock.fetch_add(n as u64, Ordering::Relaxed)
    }

    /// Counts an entry that was removed, and reports it to the sink. Called under the lock of its shard.
    fn account(&self, taken: &Taken, cause: Removal) {
        let bytes = taken.slot.len();
        self.counters.count_removal(cause, bytes);
        if let Some(tenant) = self.tenants.known(taken.tenant) {
            tenant.sub(bytes);
        }
        if let Some(events) = &self.events {
            events.on_removed(RemovedEvent {
                key: &taken.key,
                tenant: taken.tenant,
                cause,
                origin: taken.origin,
                age_seconds: self.seconds().saturating_sub(taken.life.inserted_at),
                uses: taken.life.uses,
                slot: &taken.slot,
            });
        }
    }

    /// Reports to the sink an entry that a clear has left. Called under the lock of its shard.
    fn report_left(&self, shard: &Shard, index: u32) {
        if let Some(events) = &self.events {
            let (entry, life) = (shard.entry(index), shard.life(index));
            events.on_left(RemovedEvent {
                key: shard.key(index),
                tenant: shard.tenant(index),
                cause: Removal::Cleared,
                origin: entry.origin(),
                age_seconds: self.seconds().saturating_sub(life.inserted_at),
                uses: life.uses,
                slot: &entry.slot,
            });
        }
    }

    /// Frees an entry that was removed, without any lock held: releases its memory, and subtracts it from its
    /// parent's count.
    fn free_removed(&self, taken: Taken) {
        let parent = taken.parent;
        drop(taken.slot);
        if parent != EntryRef::NONE {
            self.shards[parent.shard()].lock().drop_child(parent);
        }
    }

    fn batch(&self, keys: impl ExactSizeIterator<Item = ChunkKey>) -> KeysByShard {
        KeysByShard::new(keys, |fold| self.shard_of(fold), self.shards.len())
    }
}

/// Quotas and usage of tenants.
impl LocalTier {
    /// Returns the usage and the quota of a tenant.
    pub fn tenant_usage(&self, tenant: TenantId) -> crate::TenantUsage {
        let known = self.0.tenants.known(tenant);
        known.map(|tenant| tenant.usage()).unwrap_or_default()
    }

    /// Returns the usage and the quota of every tenant. Tenants without usage and quota may be missing.
    pub fn tenants(&self) -> Vec<(TenantId, crate::TenantUsage)> {
        let all = self.0.tenants.all();
        let mut all: Vec<_> = all
            .iter()
            .map(|tenant| (tenant.id, tenant.usage()))
            .collect();
        all.sort_by_key(|(id, _)| *id);
        all
    }

    /// Promises a tenant `quota` bytes of chunks, which no other tenant can evict, and which the tenant
    /// cannot exceed. `None` ends the promise: the tenant shares the memory that is not promised. Chunks
    /// above a new quota are evicted at the tenant's next reservation, or by [`LocalTier::maintain`].
    ///
    /// The sum of all quotas may exceed the pool. Then memory cannot honour every promise, and tenants evict
    /// their own chunks first. Walks the whole index, shard by shard, when a tenant gains or loses its quota.
    pub fn set_quota(&self, tenant: TenantId, quota: Option<u64>) {
        let inner = &self.0;
        let tenant = inner.tenants.set_quota(tenant, quota);
        for shard in &inner.shards {
            let mut shard = shard.lock();
            // Read again under the lock: of two concurrent calls, the later quota counts.
            match tenant.quota() {
                Some(_) => shard.split_off(tenant.id, Arc::clone(tenant.class())),
                None => shard.join(tenant.id),
            }
        }
    }
}
