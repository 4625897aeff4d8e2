//! Usage and counters of an engine.

use lmc_backend_local::{LocalStats, LocalUsage, TenantId, TenantUsage};
use serde::Serialize;

use crate::clears::ClearLog;
use crate::histogram::{DistributionSnapshot, HistogramSnapshot};

/// Current usage of the DRAM tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EngineUsage {
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of the pool in use: chunks, reservations, and removed chunks that are still leased.
    pub used_bytes: u64,
    /// Longest contiguous range of free bytes.
    pub largest_free_bytes: u64,
    /// Chunks that can be found.
    pub chunks: u64,
    /// Payload bytes of the chunks that can be found.
    pub chunk_bytes: u64,
    /// Leases that exist now.
    pub leases: u64,
    /// Slots that are reserved and not committed.
    pub reserved_slots: u64,
    /// Chunks pinned.
    pub pinned: u64,
    /// Slots that something may still be writing to after a failure.
    pub quarantined_slots: u64,
    /// Bytes of the pool that the system has no memory for.
    pub withheld_bytes: u64,
    /// Bytes for which the system has already provided memory.
    pub prefaulted_bytes: u64,
}

impl EngineUsage {
    pub(crate) fn new(local: &LocalUsage, pool_bytes: u64, prefaulted_bytes: u64) -> Self {
        Self {
            pool_bytes,
            used_bytes: local.pool.used,
            largest_free_bytes: local.pool.largest_free,
            chunks: local.chunks,
            chunk_bytes: local.bytes,
            leases: local.leases,
            reserved_slots: local.writing,
            pinned: local.pinned,
            quarantined_slots: local.pool.quarantined_slots,
            withheld_bytes: local.pool.withheld_bytes,
            prefaulted_bytes,
        }
    }
}

/// Counters of the DRAM tier since the engine was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EngineStats {
    /// Chunks found by lookups.
    pub hits: u64,
    /// Chunks looked up and not found.
    pub misses: u64,
    /// Chunks that became findable.
    pub inserted: u64,
    /// Payload bytes of the chunks that became findable.
    pub inserted_bytes: u64,
    /// Chunks evicted to free memory for others.
    pub evicted_room: u64,
    /// Chunks evicted because their tenant was over its quota.
    pub evicted_quota: u64,
    /// Chunks evicted above the high watermark.
    pub evicted_watermark: u64,
    /// Bytes of evicted chunks.
    pub evicted_bytes: u64,
    /// Chunks removed by key.
    pub removed: u64,
    /// Chunks removed by a clear.
    pub cleared: u64,
    /// Reservations that found no free memory.
    pub no_memory: u64,
    /// Reservations refused by a quota.
    pub over_quota: u64,
    /// Writes refused because the key was being written by another caller.
    pub busy: u64,
    /// Chunks merged from those of several ranks.
    pub merged: u64,
    /// Checks of the watermarks.
    pub watermark_checks: u64,
    /// Checks of the watermarks that evicted chunks.
    pub watermark_evictions: u64,
    /// Lookups that continued in lower tiers, without lookups for peers.
    pub lower_lookups: u64,
    /// Chunks that lookups asked lower tiers for, in all ranks.
    pub lower_lookup_chunks: u64,
    /// Clears requested of this engine.
    pub clears_here: u64,
    /// Clears that this engine carried out because another process had.
    pub clears_elsewhere: u64,
    /// Clears after which chunks are now stored and found, including those from before the start.
    pub clears_known: u64,
}

impl EngineStats {
    pub(crate) fn new(local: LocalStats, log: &ClearLog) -> Self {
        let (clears_here, clears_elsewhere) = log.totals();
        Self {
            hits: local.hits,
            misses: local.misses,
            inserted: local.inserted,
            inserted_bytes: local.inserted_bytes,
            evicted_room: local.evicted_capacity,
            evicted_quota: local.evicted_quota,
            evicted_watermark: local.evicted_watermark,
            evicted_bytes: local.evicted_bytes,
            removed: local.removed,
            cleared: local.cleared,
            no_memory: local.reserve_no_space,
            over_quota: local.reserve_quota,
            busy: local.busy,
            merged: 0,
            watermark_checks: 0,
            watermark_evictions: 0,
            lower_lookups: 0,
            lower_lookup_chunks: 0,
            clears_here,
            clears_elsewhere,
            clears_known: log.clears().total(),
        }
    }
}

/// Times that an engine has measured since it was made.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct EngineTimes {
    /// Ages of the chunks that were evicted from DRAM, in seconds since they were stored there.
    pub evicted_age_seconds: DistributionSnapshot,
    /// Numbers of lookups and retrieves that found each chunk before it was evicted from DRAM, up to 255
    /// each.
    pub evicted_uses: DistributionSnapshot,
    /// Times from a lookup to its outcome if lower tiers were asked or read, without lookups that may wait
    /// for a peer to compute, and without lookups for peers.
    pub promotion: HistogramSnapshot,
    /// Times from the start of reading a prompt from lower tiers until its first chunk is in DRAM, for each
    /// rank.
    pub first_chunk: HistogramSnapshot,
}

/// Usage and quota of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TenantStatus {
    /// Number that identifies the tenant.
    pub tenant: u32,
    /// Bytes of the tenant's chunks.
    pub bytes: u64,
    /// Bytes of the tenant's reservations that are not committed.
    pub writing: u64,
    /// Bytes that the tenant may use; none means that it shares the memory outside all quotas.
    pub quota: Option<u64>,
}

impl TenantStatus {
    pub(crate) fn new(tenant: TenantId, usage: TenantUsage) -> Self {
        Self {
            tenant: tenant.0,
            bytes: usage.bytes,
            writing: usage.writing,
            quota: usage.quota,
        }
    }
}

/// State of one tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierHealth {
    /// Name of the tier.
    pub tier: String,
    /// Fault of the tier with its remedy; `None` if there is no fault.
    pub fault: Option<String>,
}
