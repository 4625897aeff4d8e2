//! Reservation of memory, and the eviction of chunks for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lmc_memory::ReservedSlot;
use thiserror::Error;

use super::{Inner, LocalTier};
use crate::Removal;
use crate::class::{Class, Tenant};
use crate::shard::Step;

/// Chunks that one reservation may evict. Chunks of one size need one eviction; the bound is for
/// a large chunk among many small ones.
const EVICTIONS_PER_RESERVE: u32 = 1024;
/// Steps without an eviction before an attempt is given up. Each sets up to 256 chunks aside that
/// are leased, pinned or have children, and none is set aside twice for the same reason.
const STEPS_PER_EVICTION: u32 = 1024;

/// A reservation that was not granted. Nothing is held, and asking again later may succeed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// A chunk has at least one byte.
    #[error("a chunk of 0 bytes cannot be stored")]
    Empty,
    /// Larger than the pool.
    #[error("a chunk of {len} bytes does not fit into a pool of {max}: make the pool larger")]
    TooLarge {
        /// Bytes asked for.
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
        /// Bytes asked for.
        len: u64,
        /// Bytes it uses, reservations included.
        used: u64,
        /// Bytes it may use.
        quota: u64,
    },
    /// Nothing free, and nothing that may be evicted: all is leased, pinned, promised to other
    /// tenants, or in pieces too small.
    #[error(
        "no space for {len} bytes after evicting {evicted} chunks: the rest is leased, pinned, \
         promised to other tenants, or in pieces too small"
    )]
    NoSpace {
        /// Bytes asked for.
        len: u64,
        /// Chunks that were evicted without success.
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
    /// True if the call ended at its bound before the low watermark was reached: call again.
    pub more: bool,
}

/// The tenant whose chunks to evict: `None` stands for all tenants without a quota.
type Victim = Option<Arc<Tenant>>;

impl LocalTier {
    /// Evicts at most `max` chunks when the pool is filled above the high watermark, until it is
    /// filled to the low one. To be called by a thread of its own every now and then, so that
    /// reservations find free memory without evicting themselves.
    ///
    /// The tenant that uses most of what it is entitled to gives first.
    pub fn maintain(&self, max: usize) -> Maintained {
        self.maintain_besides(max, 0)
    }

    /// As [`LocalTier::maintain`], where `leaving` bytes of the pool belong to chunks that were
    /// evicted and are only being copied: they come back without another eviction.
    pub fn maintain_besides(&self, max: usize, leaving: u64) -> Maintained {
        let inner = &self.0;
        let (high, low) = inner.watermarks;
        let mut done = Maintained::default();
        let used = inner.pool.usage().used.saturating_sub(leaving);
        // A call that stopped at its bound left the pool between the watermarks.
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
    /// Takes memory for a chunk of a tenant, evicting what must go for it. Never waits, and its
    /// work is bounded: when all chunks are leased or pinned it fails at once.
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

    /// Returns the tenants to evict from for a tenant, in this order: those with more than they are
    /// entitled to, the tenant itself, and the tenants without a quota.
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

    /// All classes that use anything by the part that they use of what they are entitled to, the
    /// greediest first, with the shared one in any case.
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
            // A quota costs a look at each eviction, and a tenant without chunks no more.
            if used > 0 {
                let greed = greed(used, tenant.quota().unwrap_or(rest));
                classes.push((Some(Arc::clone(tenant)), greed));
            }
        }
        classes.sort_by(|a, b| b.1.total_cmp(&a.1));
        classes
    }

    /// Evicts one chunk from the first class that has one to give.
    fn evict_first(
        &self,
        victims: impl IntoIterator<Item = Victim>,
        cause: Removal,
    ) -> Option<u64> {
        victims
            .into_iter()
            .find_map(|victim| self.evict_one(&victim, cause))
    }

    /// Evicts the oldest chunk of a class, or a parent where nothing else is left, and says how
    /// many bytes it had.
    ///
    /// The oldest is looked for among what the shards say of their old ends, which is exact for
    /// LRU: the index is cut into shards for its locks, not for its order of age.
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
            if let Step::Evicted(taken) = &step {
                self.account(taken, cause);
                self.counters
                    .evicted_parents
                    .add(u64::from(queued.is_none()));
            }
            shard.publish();
            drop(shard);
            if let Step::Evicted(taken) = step {
                let bytes = taken.slot.len();
                self.free_removed(taken);
                return Some(bytes);
            }
        }
        None
    }
}
