//! Events about chunks that are stored and removed.

use std::fmt;

use lmc_key::ChunkKey;
use lmc_memory::SealedSlot;

use crate::TenantId;
use crate::origin::Origin;

/// A chunk that can be found from now on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StoredEvent<'a> {
    /// Key of the chunk.
    pub key: &'a ChunkKey,
    /// Key of the chunk before this one in its prompt, if the writer named one.
    pub parent: Option<&'a ChunkKey>,
    /// Tenant of the chunk.
    pub tenant: TenantId,
    /// Origin of the chunk.
    pub origin: Origin,
    /// Slot with the chunk's bytes.
    pub slot: &'a SealedSlot,
}

/// A chunk that cannot be found any more.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RemovedEvent<'a> {
    /// Key of the chunk.
    pub key: &'a ChunkKey,
    /// Tenant of the chunk.
    pub tenant: TenantId,
    /// Cause of the removal.
    pub cause: Removal,
    /// Origin of the chunk.
    pub origin: Origin,
    /// Seconds since the chunk was stored here, by [`LocalTier::set_seconds`](crate::LocalTier::set_seconds).
    pub age_seconds: u32,
    /// Number of lookups and retrieves that found the chunk, up to 255.
    pub uses: u8,
    /// Slot with the chunk's bytes. A clone keeps the memory reserved, so that an evicted chunk can be
    /// written to a lower tier.
    pub slot: &'a SealedSlot,
}

/// Cause of a chunk's removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Removal {
    /// Evicted to free memory for another chunk.
    Capacity,
    /// Evicted because its tenant was over its quota.
    Quota,
    /// Evicted because the pool was filled above the high watermark.
    Watermark,
    /// [`crate::LocalTier::remove`] was called for the chunk.
    Removed,
    /// [`crate::LocalTier::clear`] was called.
    Cleared,
}

/// Receives an event for every chunk that is stored or removed, with its bytes.
///
/// Called under the lock of the chunk's shard, so that the events of one key come in the order in which they
/// happened. An implementation must be quick, and must not call the tier.
pub trait LocalSink: fmt::Debug + Send + Sync {
    /// A chunk can be found from now on.
    fn on_stored(&self, event: StoredEvent<'_>);

    /// A chunk cannot be found any more.
    fn on_removed(&self, event: RemovedEvent<'_>);

    /// [`Clear::Unleased`](crate::Clear::Unleased) has left a chunk in memory because it is leased.
    /// [`Self::on_removed`] follows when the chunk is removed. Default: does nothing.
    fn on_left(&self, _event: RemovedEvent<'_>) {}
}
