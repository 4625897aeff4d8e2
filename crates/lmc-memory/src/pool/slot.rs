//! Slots, typed by state: *reserved → written → sealed*, and *quarantined*.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::{Inner, slot_bytes};
use crate::{Arena, checksum};

/// An owner of a slot. The last owner returns the slot to the pool.
#[derive(Debug)]
pub(super) struct Handle {
    /// Counted once for all owners of the slot: otherwise all threads that clone slots would write to the
    /// pool's one counter.
    pool: ManuallyDrop<Arc<Inner>>,
    node: u32,
    /// Offset of the slot, in units of the pool's alignment.
    unit: u32,
    /// Exact length in bytes, as requested.
    len: u64,
}

impl Handle {
    /// Makes the first owner of a slot.
    pub(super) fn new(pool: &Arc<Inner>, node: u32, unit: u32, len: u64) -> Self {
        // No other thread knows the node yet; the mutex by which it is passed on orders this store.
        pool.counts.at(node).store(1, Ordering::Relaxed);
        Self {
            pool: ManuallyDrop::new(Arc::clone(pool)),
            node,
            unit,
            len,
        }
    }

    fn offset(&self) -> u64 {
        u64::from(self.unit) << self.pool.align_bits
    }

    /// Relaxed ordering everywhere: all owners that write a sum write the same value, and a slot gets new
    /// content only after its last owner is gone.
    fn known_checksum(&self) -> Option<u64> {
        let sum = self.pool.sums.get(self.node)?.load(Ordering::Relaxed);
        (sum != 0).then_some(sum)
    }

    fn checksum(&self, bytes: &[u8]) -> u64 {
        if let Some(sum) = self.known_checksum() {
            return sum;
        }
        let sum = checksum(bytes);
        self.note_checksum(sum);
        sum
    }

    fn note_checksum(&self, sum: u64) {
        self.pool.sums.at(self.node).store(sum, Ordering::Relaxed);
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        // Relaxed: the cloning thread is an owner already, as in `Arc`.
        let owners = self
            .pool
            .counts
            .at(self.node)
            .fetch_add(1, Ordering::Relaxed);
        assert!(owners < u32::MAX / 2, "a slot has too many owners");
        // SAFETY: the slot's count of the pool is given back by its last owner, and the new owner
        // is one since the line above.
        let pool = unsafe { std::ptr::read(&raw const self.pool) };
        Self {
            pool,
            node: self.node,
            unit: self.unit,
            len: self.len,
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self
            .pool
            .counts
            .at(self.node)
            .fetch_sub(1, Ordering::Release)
            == 1
        {
            // Every read of another owner happened before that owner's decrement.
            fence(Ordering::Acquire);
            self.pool.give(self.node);
            // SAFETY: no owner is left that could use the slot's count of the pool, and this one
            // does not use it again.
            unsafe { ManuallyDrop::drop(&mut self.pool) };
        }
    }
}

/// A slot with one writer. Dropping it returns it to the pool.
///
/// The slot has the previous content of its memory: bytes of another chunk. Only [`ReservedSlot::written`]
/// and [`WrittenSlot::seal`] make it readable for others.
#[derive(Debug)]
pub struct ReservedSlot(pub(super) Handle);

/// A slot whose bytes are complete, with one owner that can compute the checksum and seal it. Dropping it
/// returns it to the pool.
#[derive(Debug)]
pub struct WrittenSlot(Handle);

/// A slot that is only read. Clones share the slot; dropping the last one returns it to the pool.
///
/// 24 bytes, so that an index can hold millions; cloning allocates nothing.
#[derive(Clone, Debug)]
pub struct SealedSlot(Handle);

/// A slot that a device or another process may still be writing to after a timeout.
///
/// Only [`QuarantinedSlot::release_proven_quiet`] returns it to the pool. Dropping it leaks it on purpose,
/// together with its arena: lost memory is better than memory that changes under its next owner. In either
/// case it is part of [`crate::PoolUsage::quarantined_bytes`] until released.
#[derive(Debug)]
#[must_use = "dropping it leaks the slot for good"]
pub struct QuarantinedSlot(ManuallyDrop<Handle>);

macro_rules! position {
    ($($name:ident),*) => {$(
        impl $name {
            /// Returns the offset of the slot in the arena, in bytes.
            pub fn offset(&self) -> u64 {
                self.0.offset()
            }

            /// Returns the exact bytes of the slot, as requested; never 0.
            #[allow(clippy::len_without_is_empty, reason = "a slot is never empty")]
            pub fn len(&self) -> u64 {
                self.0.len
            }

            /// Returns the arena of the slot.
            pub fn arena(&self) -> &Arc<Arena> {
                &self.0.pool.arena
            }

            /// Returns the bytes taken for the slot: its length and the padding up to the next multiple of
            /// [`crate::Pool::align`], which belongs to this slot alone.
            pub fn padded_len(&self) -> u64 {
                self.0.len.next_multiple_of(1 << self.0.pool.align_bits)
            }
        }
    )*};
}
position!(ReservedSlot, WrittenSlot, SealedSlot, QuarantinedSlot);

impl ReservedSlot {
    /// Returns the bytes, to be written in this process.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let start = slot_bytes::ptr(&self.0.pool.arena, self.0.offset(), self.0.len);
        // SAFETY: a reserved slot is the only owner of its range and is borrowed mutably.
        unsafe { slot_bytes::exclusive(start, self.0.len) }
    }

    /// Returns the first byte, for writers that need an address.
    ///
    /// The address is valid for [`ReservedSlot::padded_len`] bytes while the slot is in the state *reserved*
    /// or *quarantined*.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        slot_bytes::ptr(&self.0.pool.arena, self.0.offset(), self.0.len).as_ptr()
    }

    /// Declares that this or another process has written all bytes.
    pub fn written(self) -> WrittenSlot {
        WrittenSlot(self.0)
    }

    /// Declares that a device or another process may still write to the slot.
    pub fn quarantine(self) -> QuarantinedSlot {
        quarantine(self.0)
    }
}

impl WrittenSlot {
    /// Returns the bytes, for a checksum before the slot is sealed.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: a written slot is the only owner of its range and gives no way to write.
        unsafe { slot_bytes::shared(&self.0.pool.arena, self.0.offset(), self.0.len) }
    }

    /// Returns the [`checksum`](crate::checksum()) of the bytes. The first call for a chunk computes it on
    /// the caller's thread; it is cached until the slot's bytes change.
    pub fn checksum(&self) -> u64 {
        self.0.checksum(self.bytes())
    }

    /// Returns the checksum if it was computed or set before.
    pub fn known_checksum(&self) -> Option<u64> {
        self.0.known_checksum()
    }

    /// Discards the bytes: the slot may be written again.
    pub fn into_reserved(self) -> ReservedSlot {
        self.0.pool.forget_sum(self.0.node);
        ReservedSlot(self.0)
    }

    /// Sets the [`checksum`](crate::checksum()) of the bytes, if the caller knows it: the bytes were compared
    /// with it.
    #[must_use = "the slot is what is returned"]
    pub fn with_checksum(self, sum: u64) -> Self {
        self.0.note_checksum(sum);
        self
    }

    /// Makes the slot readable by many owners.
    pub fn seal(self) -> SealedSlot {
        SealedSlot(self.0)
    }

    /// Declares that a device or another process may still write to the slot.
    pub fn quarantine(self) -> QuarantinedSlot {
        quarantine(self.0)
    }
}

impl AsRef<[u8]> for SealedSlot {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl SealedSlot {
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: sealed slots are never written, and this owner keeps the range taken.
        unsafe { slot_bytes::shared(&self.0.pool.arena, self.0.offset(), self.0.len) }
    }

    /// Returns the [`checksum`](crate::checksum()) of the bytes. The first call for a chunk computes it on
    /// the caller's thread; it is cached until the slot's bytes change.
    pub fn checksum(&self) -> u64 {
        self.0.checksum(self.bytes())
    }

    /// Returns the checksum if it was computed or set before.
    pub fn known_checksum(&self) -> Option<u64> {
        self.0.known_checksum()
    }

    /// Sets the [`checksum`](crate::checksum()) of the bytes, if it was computed elsewhere.
    pub fn note_checksum(&self, sum: u64) {
        self.0.note_checksum(sum);
    }

    /// Returns the first byte, for devices that need an address. [`SealedSlot::padded_len`] bytes may be read
    /// there while a clone of the slot exists.
    pub fn as_ptr(&self) -> *const u8 {
        slot_bytes::ptr(&self.0.pool.arena, self.0.offset(), self.0.len).as_ptr()
    }

    /// Returns the number of owners that share the slot at this instant, this one included.
    pub fn owners(&self) -> u32 {
        self.0.pool.counts.at(self.0.node).load(Ordering::Relaxed)
    }
}

fn quarantine(handle: Handle) -> QuarantinedSlot {
    handle.pool.quarantined(handle.node, true);
    QuarantinedSlot(ManuallyDrop::new(handle))
}

impl QuarantinedSlot {
    /// Returns the slot to the pool. The caller must have proof that nothing writes to it any more, such as a
    /// completion from the device or the end of the process that had the address.
    pub fn release_proven_quiet(self) {
        let handle = ManuallyDrop::into_inner(self.0);
        handle.pool.quarantined(handle.node, false);
    }
}
