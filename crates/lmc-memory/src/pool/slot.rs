//! Slots, typed by state: *reserved → written → sealed*, and *quarantined*.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::{Inner, slot_bytes};
use crate::{Arena, checksum};

/// An owner of a slot. The last one gives it back.
#[derive(Debug)]
pub(super) struct Handle {
    /// Counted once for all owners of the slot: threads that clone slots would else all write to
    /// the one counter of the pool.
    pool: ManuallyDrop<Arc<Inner>>,
    node: u32,
    /// Counted in units of the pool's alignment.
    unit: u32,
    /// Exact bytes, as asked for.
    len: u64,
}

impl Handle {
    /// The first owner of a slot.
    pub(super) fn new(pool: &Arc<Inner>, node: u32, unit: u32, len: u64) -> Self {
        // No other thread knows the node yet; the mutex that hands it on orders this store.
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

    /// Relaxed everywhere: all owners that write a sum write the same one, and a slot gets its
    /// next content only after its last owner is gone.
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
        // Relaxed: the cloner is an owner already, as in `Arc`.
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
            // Every read by another owner happened before its own decrement.
            fence(Ordering::Acquire);
            self.pool.give(self.node);
            // SAFETY: no owner is left that could use the slot's count of the pool, and this one
            // does not use it again.
            unsafe { ManuallyDrop::drop(&mut self.pool) };
        }
    }
}

/// A slot with one writer. Returns to the pool on drop.
///
/// The slot holds the previous content of its memory: bytes of another chunk. Only
/// [`ReservedSlot::written`] and [`WrittenSlot::seal`] make it readable to others.
#[derive(Debug)]
pub struct ReservedSlot(pub(super) Handle);

/// A slot whose bytes are complete and still have one owner, to be summed and sealed.
/// Returns to the pool on drop.
#[derive(Debug)]
pub struct WrittenSlot(Handle);

/// A slot that is read and never written. Clones share it; the last one returns it to the pool.
///
/// 24 bytes, so that an index can hold millions; cloning allocates nothing.
#[derive(Clone, Debug)]
pub struct SealedSlot(Handle);

/// A slot that a device or another process may still be writing to after a timeout.
///
/// It goes back to the pool only by [`QuarantinedSlot::release_proven_quiet`]. Dropping it
/// leaks it on purpose, together with the arena under it: memory that is lost is better than
/// memory that changes under its next owner. Either way it stays in
/// [`crate::PoolUsage::quarantined_bytes`] until released.
#[derive(Debug)]
#[must_use = "dropping it leaks the slot for good"]
pub struct QuarantinedSlot(ManuallyDrop<Handle>);

macro_rules! position {
    ($($name:ident),*) => {$(
        impl $name {
            /// Bytes from the start of the arena.
            pub fn offset(&self) -> u64 {
                self.0.offset()
            }

            /// Bytes of the slot, exactly as asked for; never 0.
            #[allow(clippy::len_without_is_empty, reason = "a slot is never empty")]
            pub fn len(&self) -> u64 {
                self.0.len
            }

            /// The arena that it lies in.
            pub fn arena(&self) -> &Arc<Arena> {
                &self.0.pool.arena
            }

            /// Bytes that are taken for the slot: its length and the padding up to the next
            /// multiple of [`crate::Pool::align`], which belong to this slot alone.
            pub fn padded_len(&self) -> u64 {
                self.0.len.next_multiple_of(1 << self.0.pool.align_bits)
            }
        }
    )*};
}
position!(ReservedSlot, WrittenSlot, SealedSlot, QuarantinedSlot);

impl ReservedSlot {
    /// The bytes, to be written in this process.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let start = slot_bytes::ptr(&self.0.pool.arena, self.0.offset(), self.0.len);
        // SAFETY: a reserved slot is the only owner of its range and is borrowed mutably.
        unsafe { slot_bytes::exclusive(start, self.0.len) }
    }

    /// First byte, for writers that are handed an address.
    ///
    /// The address is good for [`ReservedSlot::padded_len`] bytes while the slot is in the state
    /// *reserved* or *quarantined*.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        slot_bytes::ptr(&self.0.pool.arena, self.0.offset(), self.0.len).as_ptr()
    }

    /// Declares that all bytes have been written, by this process or another.
    pub fn written(self) -> WrittenSlot {
        WrittenSlot(self.0)
    }

    /// Declares that a device or another process may still write to the slot.
    pub fn quarantine(self) -> QuarantinedSlot {
        quarantine(self.0)
    }
}

impl WrittenSlot {
    /// The bytes, to be summed before they are sealed.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: a written slot is the only owner of its range and gives no way to write.
        unsafe { slot_bytes::shared(&self.0.pool.arena, self.0.offset(), self.0.len) }
    }

    /// Returns the [`checksum`](crate::checksum()) of the bytes. The first call for a chunk computes
    /// it, on the caller's thread; it is kept until the slot has other bytes.
    pub fn checksum(&self) -> u64 {
        self.0.checksum(self.bytes())
    }

    /// Returns the checksum if it was computed or noted before.
    pub fn known_checksum(&self) -> Option<u64> {
        self.0.known_checksum()
    }

    /// Gives the bytes up: the slot may be written again.
    pub fn into_reserved(self) -> ReservedSlot {
        self.0.pool.forget_sum(self.0.node);
        ReservedSlot(self.0)
    }

    /// Notes the [`checksum`](crate::checksum()) of the bytes, where that is known: they were
    /// compared with it.
    #[must_use = "the slot is what is returned"]
    pub fn with_checksum(self, sum: u64) -> Self {
        self.0.note_checksum(sum);
        self
    }

    /// Makes the slot readable by many.
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
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: sealed slots are never written, and this owner keeps the range taken.
        unsafe { slot_bytes::shared(&self.0.pool.arena, self.0.offset(), self.0.len) }
    }

    /// Returns the [`checksum`](crate::checksum()) of the bytes. The first call for a chunk computes
    /// it, on the caller's thread; it is kept until the slot has other bytes.
    pub fn checksum(&self) -> u64 {
        self.0.checksum(self.bytes())
    }

    /// Returns the checksum if it was computed or noted before.
    pub fn known_checksum(&self) -> Option<u64> {
        self.0.known_checksum()
    }

    /// Notes the [`checksum`](crate::checksum()) of the bytes, where it was computed elsewhere.
    pub fn note_checksum(&self, sum: u64) {
        self.0.note_checksum(sum);
    }

    /// First byte, for devices that are handed an address. It may be read for
    /// [`SealedSlot::padded_len`] bytes while a clone of the slot is kept.
    pub fn as_ptr(&self) -> *const u8 {
        slot_bytes::ptr(&self.0.pool.arena, self.0.offset(), self.0.len).as_ptr()
    }

    /// Number of owners that share the slot at this instant, this one included.
    pub fn owners(&self) -> u32 {
        self.0.pool.counts.at(self.0.node).load(Ordering::Relaxed)
    }
}

fn quarantine(handle: Handle) -> QuarantinedSlot {
    handle.pool.quarantined(handle.node, true);
    QuarantinedSlot(ManuallyDrop::new(handle))
}

impl QuarantinedSlot {
    /// Returns the slot to the pool: the caller has proof that nothing writes to it any more, such as
    /// a completion from the device or the end of the process that held the address.
    pub fn release_proven_quiet(self) {
        let handle = ManuallyDrop::into_inner(self.0);
        handle.pool.quarantined(handle.node, false);
    }
}
