//! Counters and usage of the tier.

use std::sync::atomic::{AtomicU64, Ordering};

use lmc_memory::PoolUsage;

use crate::Removal;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a tier since it was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct LocalStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct LocalCounters {
            $(pub(crate) $name: Counter,)*
        }

        impl LocalCounters {
            pub(crate) fn snapshot(&self) -> LocalStats {
                LocalStats { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Keys found by lookups and leases.
    hits,
    /// Keys looked up and not found; in a prefix, all keys from the first missing one on.
    misses,
    /// Chunks that became findable.
    inserted,
    /// Bytes of chunks that became findable.
    inserted_bytes,
    /// Chunks that were already present when they were inserted.
    duplicates,
    /// Chunks evicted to free memory for another.
    evicted_capacity,
    /// Chunks evicted because their tenant was over its quota.
    evicted_quota,
    /// Chunks evicted because the pool was above the high watermark.
    evicted_watermark,
    /// Bytes of evicted chunks, whatever the cause.
    evicted_bytes,
    /// Evicted chunks that had resident children, because no other chunk could be evicted.
    evicted_parents,
    /// Chunks removed by key.
    removed,
    /// Chunks removed by a clear.
    cleared,
    /// Reservations granted.
    reserved,
    /// Reservations that failed for lack of space.
    reserve_no_space,
    /// Reservations refused by the tenant's quota.
    reserve_quota,
    /// Writes refused because the key was being written by another reservation.
    busy,
    /// Leases granted.
    leased,
    /// Leases released.
    released,
}

/// A monotonic counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        if n > 0 {
            self.0.fetch_add(n, Ordering::Relaxed);
        }
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl LocalCounters {
    pub(crate) fn count_removal(&self, cause: Removal, bytes: u64) {
        let counter = match cause {
            Removal::Capacity => &self.evicted_capacity,
            Removal::Quota => &self.evicted_quota,
            Removal::Watermark => &self.evicted_watermark,
            Removal::Removed => &self.removed,
            Removal::Cleared => &self.cleared,
        };
        counter.add(1);
        if matches!(
            cause,
            Removal::Capacity | Removal::Quota | Removal::Watermark
        ) {
            self.evicted_bytes.add(bytes);
        }
    }
}

impl LocalStats {
    /// Returns the number of chunks evicted, whatever the cause.
    pub fn evicted(&self) -> u64 {
        self.evicted_capacity + self.evicted_quota + self.evicted_watermark
    }
}

/// Usage of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalUsage {
    /// Chunks that can be found.
    pub chunks: u64,
    /// Bytes of chunks that can be found.
    pub bytes: u64,
    /// Leases that exist now.
    pub leases: u64,
    /// Keys being written.
    pub writing: u64,
    /// Chunks pinned.
    pub pinned: u64,
    /// Usage of the pool: chunks, reservations, and removed chunks that are still leased.
    pub pool: PoolUsage,
}
