//! Reservation of memory, and the eviction of chunks for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lmc_memory::ReservedSlot;
use thiserror::Error;

use super::{Inner, LocalTier};
use crate::Removal;
use crate::class::{Class, Tenant};
use crate::shard::EvictionStep;

/// Most chunks that one reservation may evict. Chunks of one size need one eviction; the limit is for a large
/// chunk among many small ones.
const EVICTIONS_PER_RESERVE: u32 = 1024;
/// Steps without an eviction after which an attempt ends. Each step sets up to 256 chunks aside that are
/// leased, pinned or parents, and no chunk is set aside twice for the same reason.
const STEPS_PER_EVICTION: u32 = 1024;

/// A reservation that was refused. Nothing is held, and a later attempt may succeed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The chunk has no bytes.
    #[error("a chunk of 0 bytes cannot be stored")]
    Empty,
    /// The chunk is larger than the pool.
    #[error("a chunk of {len} bytes does not fit into a pool of {max}: make the pool larger")]
    TooLarge {
        /// Bytes of the chunk.
        len: u64,
        /// Bytes of the pool.
        max: u64,
    },
    /// The tenant would exceed its quota, and none of its own chunks may be evicted.
    #[error(
        "tenant {tenant} uses {used} of its quota of {quota} bytes and has nothing that may be \
         evicted for {len} more: its chunks are leased or pinned, or the quota is too small"
    )]
    Quota {
        /// Tenant whose quota it is.
        tenant: u32,
        /// Bytes of the chunk.
        len: u64,
        /// Bytes that the tenant uses, reservations included.
        used: u64,
        /// Quota of the tenant, in bytes.
        quota: u64,
    },
    /// No free space, and no chunk that may be evicted: all memory is leased, pinned, promised to other
    /// tenants, or in pieces that are too small.
    #[error(
        "no space for {len} bytes after evicting {evicted} chunks: the rest is leased, pinned, \
         promised to other tenants, or in pieces too small"
    )]
    NoSpace {
        /// Bytes of the chunk.
        len: u64,
        /// Number of chunks that were evicted without success.
        evicted: u32,
    },
}

/// Result of a call of [`LocalTier::maintain`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Maintained {
    /// Chunks evicted.
    pub evicted: u64,
    /// Bytes of the evicted chunks.
    pub bytes: u64,
    /// True if the call reached its limit before the low watermark: call again.
    pub more: bool,
}

/// The tenant to evict from; `None` stands for all tenants without a quota.
type Victim = Option<Arc<Tenant>>;

impl LocalTier {
    /// Evicts chunks, at most `max`, if the pool is filled above the high watermark, until it is filled to
    /// the low watermark. A thread of its own should call this regularly, so that reservations find free
    /// memory without evicting.
    ///
    /// Evicts first from the tenant with the highest ratio of usage to fair share.
    pub fn maintain(&self, max: usize) -> Maintained {
        self.maintain_besides(max, 0)
    }

    /// As [`LocalTier::maintain`], where `leaving` bytes of the pool belong to chunks that were already
    /// evicted and are being copied: this memory becomes free without another eviction.
    pub fn maintain_besides(&self, max: usize, leaving: u64) -> Maintained {
        let inner = &self.0;
        let (high, low) = inner.watermarks;
        let mut done = Maintained::default();
        let used = inner.pool.usage().used.saturating_sub(leaving);
        // An earlier call stopped at its limit and left the pool between the watermarks.
        if used <= low || (used <= high && !inner.draining.load(Ordering::Relaxed)) {
            inner.draining.store(false, Ordering::Relaxed);
            return done;
        }
        let mut excess = used - low;
        while excess > 0 {
            if done.evicted as usize == max {
                done.more = true;
                break;
            }
            let victims = inner.by_greed().into_iter().map(|(victim, _)| victim);
            let Some(bytes) = inner.evict_first(victims, Removal::Watermark) else {
                break;
            };
            done.evicted += 1;
            done.bytes += bytes;
            excess = excess.saturating_sub(bytes.next_multiple_of(inner.pool.align()));
        }
        inner.draining.store(done.more, Ordering::Relaxed);
        done
    }
}

impl Inner {
    /// Reserves memory for a chunk of a tenant, and evicts chunks if necessary. Never waits, and does a
    /// limited amount of work: it fails at once when all chunks are leased or pinned.
    pub(super) fn reserve(
        &self,
        len: u64,
        tenant: &Arc<Tenant>,
    ) -> Result<ReservedSlot, ReserveError> {
        if len == 0 {
            return Err(ReserveError::Empty);
        }
        self.fit_quota(len, tenant)?;
        if let Some(slot) = self.pool.reserve(len) {
            self.counters.reserved.add(1);
            return Ok(slot);
        }
        let max = self.pool.usage().capacity;
        if len > max {
            return Err(ReserveError::TooLarge { len, max });
        }
        for evicted in 0..EVICTIONS_PER_RESERVE {
            if self
                .evict_first(self.victims(tenant), Removal::Capacity)
                .is_none()
            {
                self.counters.reserve_no_space.add(1);
                return Err(ReserveError::NoSpace { len, evicted });
            }
            if let Some(slot) = self.pool.reserve(len) {
                self.counters.reserved.add(1);
                return Ok(slot);
            }
        }
        self.counters.reserve_no_space.add(1);
        let evicted = EVICTIONS_PER_RESERVE;
        Err(ReserveError::NoSpace { len, evicted })
    }

    /// Evicts a tenant's own chunks until `len` more bytes are within its quota.
    pub(super) fn fit_quota(&self, len: u64, tenant: &Arc<Tenant>) -> Result<(), ReserveError> {
        let Some(quota) = tenant.quota() else {
            return Ok(());
        };
        loop {
            let usage = tenant.usage();
            let used = usage.bytes + usage.writing;
            if len <= quota.saturating_sub(used) {
                return Ok(());
            }
            let own = Some(Arc::clone(tenant));
            if len > quota || self.evict_one(&own, Removal::Quota).is_none() {
                self.counters.reserve_quota.add(1);
                let tenant = tenant.id.0;
                return Err(ReserveError::Quota {
                    tenant,
                    len,
                    used,
                    quota,
                });
            }
        }
    }

    /// Returns the tenants to evict from on behalf of a tenant, in this order: tenants above their fair
    /// share, the tenant itself, the tenants without a quota.
    fn victims(&self, tenant: &Arc<Tenant>) -> Vec<Victim> {
        let by_greed = self.by_greed().into_iter();
        let mut victims: Vec<Victim> = by_greed
            .filter(|(_, greed)| *greed > 1.0)
            .map(|(victim, _)| victim)
            .collect();
        if tenant.quota().is_some() {
            victims.push(Some(Arc::clone(tenant)));
        }
        victims.push(None);
        victims
    }

    /// Returns the size classes in use and the shared class, ordered by used bytes divided by fair share,
    /// largest ratio first.
    fn by_greed(&self) -> Vec<(Victim, f64)> {
        let with_quota = self.tenants.with_quota();
        if with_quota.is_empty() {
            return vec![(None, 0.0)];
        }
        let promised: u64 = with_quota
            .iter()
            .filter_map(|tenant| tenant.quota())
            .fold(0, u64::saturating_add);
        let rest = self.pool.usage().capacity.saturating_sub(promised);
        let greed = |used: u64, due: u64| match used {
            0 => 0.0,
            used => used as f64 / due as f64,
        };
        let mut classes = vec![(None, greed(self.shared.bytes(), rest))];
        for tenant in with_quota.iter() {
            let used = tenant.class().bytes();
            // Every quota costs time at each eviction, but a tenant without chunks can be skipped.
            if used > 0 {
                let greed = greed(used, tenant.quota().unwrap_or(rest));
                classes.push((Some(Arc::clone(tenant)), greed));
            }
        }
        classes.sort_by(|a, b| b.1.total_cmp(&a.1));
        classes
    }

    /// Evicts one chunk from the first class that has a candidate.
    fn evict_first(
        &self,
        victims: impl IntoIterator<Item = Victim>,
        cause: Removal,
    ) -> Option<u64> {
        victims
            .into_iter()
            .find_map(|victim| self.evict_one(&victim, cause))
    }

    /// Evicts the oldest chunk of a class, or a parent if no other chunk is left, and returns its bytes.
    ///
    /// The oldest chunk is found by the ages that the shards publish, which is exact for LRU: the index is
    /// divided into shards for locking, and age is compared across shards.
    fn evict_one(&self, victim: &Victim, cause: Removal) -> Option<u64> {
        let (class, id): (&Class, _) = match victim {
            None => (&self.shared, None),
            Some(tenant) => (tenant.class(), Some(tenant.id)),
        };
        for _ in 0..STEPS_PER_EVICTION {
            let queued = class.coldest();
            let at = queued.or_else(|| class.coldest_parent())?;
            let mut shard = self.shards[at].lock();
            let step = match queued {
                Some(_) => shard.evict(id),
                None => shard.evict_parent(id),
            };
            if let EvictionStep::Evicted(taken) = &step {
                self.account(taken, cause);
                self.counters
                    .evicted_parents
                    .add(u64::from(queued.is_none()));
            }
            shard.publish();
            drop(shard);
            if let EvictionStep::Evicted(taken) = step {
                let bytes = taken.slot.len();
                self.free_removed(taken);
                return Some(bytes);
            }
        }
        None
    }
}
