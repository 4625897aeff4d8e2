//! Leases: the right to read a chunk, released on drop.

use std::fmt;
use std::mem;
use std::sync::Arc;

use lmc_memory::SealedSlot;

use super::Inner;
use crate::OwnerId;
use crate::origin::Origin;
use crate::shard::Leased;

/// The right to read one chunk. While it exists, the chunk is not evicted and its memory is not reused.
/// Removing the chunk makes it unfindable but leaves the bytes to the lease. Dropping the lease releases it.
///
/// A lease has no deadline: its holder drops it when the owner ends or the owner's time is over.
pub struct Lease(Leases);

impl Lease {
    pub(crate) fn new(tier: &Arc<Inner>, owner: OwnerId, leased: Leased) -> Self {
        Self(Leases::new(tier, owner, vec![leased]))
    }

    /// Returns the chunk's slot.
    pub fn slot(&self) -> &SealedSlot {
        &self.0.items[0].slot
    }

    /// Returns the chunk's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.slot().bytes()
    }

    /// Returns the owner of the lease.
    pub fn owner(&self) -> OwnerId {
        self.0.owner
    }
}

impl From<Lease> for Leases {
    fn from(lease: Lease) -> Self {
        lease.0
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (owner, slot) = (self.0.owner, self.slot());
        write!(
            f,
            "Lease({owner:?}, {} bytes at {})",
            slot.len(),
            slot.offset()
        )
    }
}

/// Leases of one owner, in the order of the requested keys. Dropping them releases all with few locks, the
/// tail of the prefix first.
pub struct Leases {
    tier: Arc<Inner>,
    owner: OwnerId,
    items: Vec<Leased>,
    fresh: u64,
}

impl Leases {
    pub(crate) fn new(tier: &Arc<Inner>, owner: OwnerId, items: Vec<Leased>) -> Self {
        Self {
            tier: Arc::clone(tier),
            owner,
            items,
            fresh: 0,
        }
    }

    pub(crate) fn with_fresh(mut self, fresh: u64) -> Self {
        self.fresh = fresh;
        self
    }

    /// Bytes of the pool used by the chunks that nothing else held when
    /// [`LocalTier::lease_leading`](crate::LocalTier::lease_leading) leased them: the memory that these
    /// leases alone keep from eviction. After a split, the first part has the whole number.
    pub fn fresh_bytes(&self) -> u64 {
        self.fresh
    }

    /// Returns the owner of the leases.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Returns the number of leases.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns true if there are no leases.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Returns the slot of one chunk.
    pub fn get(&self, at: usize) -> Option<&SealedSlot> {
        self.items.get(at).map(|item| &item.slot)
    }

    /// Returns the slots of the chunks, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &SealedSlot> {
        self.items.iter().map(|item| &item.slot)
    }

    /// Returns the origins of the chunks, in order.
    pub fn origins(&self) -> impl ExactSizeIterator<Item = Origin> {
        self.items.iter().map(|item| item.origin)
    }

    /// Keeps the first `at` leases and returns the rest. Keeps all if there are fewer.
    #[must_use = "dropping the rest gives it back; say so with `truncate`"]
    pub fn split_off(&mut self, at: usize) -> Self {
        let rest = self.items.split_off(at.min(self.items.len()));
        Self::new(&self.tier, self.owner, rest)
    }

    /// Keeps the first `len` leases and releases the rest.
    pub fn truncate(&mut self, len: usize) {
        drop(self.split_off(len));
    }

    /// Appends the leases of another batch.
    ///
    /// # Errors
    /// Returns `other` if it belongs to another owner or another tier.
    pub fn append(&mut self, mut other: Self) -> Result<(), Self> {
        if other.owner != self.owner || !Arc::ptr_eq(&other.tier, &self.tier) {
            return Err(other);
        }
        self.items.append(&mut other.items);
        self.fresh += other.fresh;
        Ok(())
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        let items = mem::take(&mut self.items);
        if !items.is_empty() {
            self.tier.release(self.owner, items);
        }
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Leases({:?}, {} chunks)", self.owner, self.items.len())
    }
}
