//! Parts of a slot that several reads fill concurrently.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use lmc_memory::ReservedSlot;
use parking_lot::Mutex;

use super::BLOCK;

/// One part of a slot, and the only owner of its bytes. Begins and ends at a [`BLOCK`] boundary; the last
/// part includes the slot's padding up to one.
pub(crate) struct SlotPart {
    whole: Arc<Whole>,
    offset: u64,
    /// Length without padding.
    len: u64,
    padded: u64,
}

struct Whole {
    start: Start,
    /// `None` once a part was abandoned: the kernel may still write to the slot.
    slot: Mutex<Option<ReservedSlot>>,
}

/// Address of a slot's first byte.
#[derive(Clone, Copy)]
struct Start(NonNull<u8>);

// SAFETY: it is used through parts only, which have no byte in common.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

impl fmt::Debug for SlotPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of a slot at {}", self.len, self.offset)
    }
}

impl SlotPart {
    /// Splits a slot into parts. The slot must have memory for its bytes up to a whole [`BLOCK`], and at
    /// least `count` blocks.
    pub(crate) fn split(mut slot: ReservedSlot, count: u64) -> Vec<Self> {
        let (len, padded) = (slot.len(), slot.len().next_multiple_of(BLOCK));
        let each = padded / BLOCK / count * BLOCK;
        assert!(padded <= slot.padded_len() && each > 0, "space for parts");
        let start = NonNull::new(slot.as_mut_ptr()).expect("a slot has an address");
        let whole = Arc::new(Whole {
            start: Start(start),
            slot: Mutex::new(Some(slot)),
        });
        let part = |number: u64| {
            let offset = number * each;
            let is_last = number + 1 == count;
            Self {
                whole: Arc::clone(&whole),
                offset,
                len: if is_last { len - offset } else { each },
                padded: if is_last { padded - offset } else { each },
            }
        };
        (0..count).map(part).collect()
    }

    /// Makes one part of a whole slot.
    #[cfg(test)]
    pub(crate) fn whole(slot: ReservedSlot) -> Self {
        Self::split(slot, 1).remove(0)
    }

    /// Returns the bytes that may be written, including padding.
    pub(crate) fn capacity(&self) -> u64 {
        self.padded
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        // SAFETY: a part lies inside its slot, which lives as long as its parts.
        unsafe { self.whole.start.0.as_ptr().add(self.offset as usize) }
    }

    /// Returns the bytes, without padding.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: inside the slot, whose memory was zeroed when it was mapped; only the
        // owner of the part writes to these bytes, and the kernel is done with one that came back.
        unsafe {
            let start = self.whole.start.0.as_ptr().add(self.offset as usize);
            slice::from_raw_parts(start, self.len as usize)
        }
    }

    /// Returns the bytes, to be written.
    #[cfg(test)]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.as_mut_ptr();
        // SAFETY: as for `bytes`, and borrowed mutably.
        unsafe { slice::from_raw_parts_mut(start, self.len as usize) }
    }

    /// Returns the slot, if all of its parts are given.
    pub(crate) fn join(parts: impl IntoIterator<Item = Self>) -> Option<ReservedSlot> {
        let mut parts = parts.into_iter();
        let whole = Arc::clone(&parts.next()?.whole);
        parts.for_each(drop);
        Arc::into_inner(whole)?.slot.into_inner()
    }

    /// Abandons a part that the kernel may still write to: its slot stays in quarantine.
    pub(crate) fn abandon(self) {
        // The other parts must not release the slot, nor this one its address.
        let this = ManuallyDrop::new(self);
        if let Some(slot) = this.whole.slot.lock().take() {
            drop(slot.quarantine());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::pool;

    #[test]
    fn parts_make_the_slot_again() {
        let pool = pool();
        for (len, count) in [(3 * BLOCK, 3), (5 * BLOCK + 1, 4), (BLOCK - 1, 1)] {
            let slot = pool.reserve(len).unwrap();
            let mut parts = SlotPart::split(slot, count);
            let (lens, capacities): (u64, u64) = parts
                .iter()
                .map(|part| (part.bytes().len() as u64, part.capacity()))
                .fold((0, 0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
            assert_eq!((lens, capacities), (len, len.next_multiple_of(BLOCK)));
            for (number, part) in parts.iter_mut().enumerate() {
                part.bytes_mut().fill(number as u8 + 1);
            }
            let last = parts.pop().unwrap();
            let mut slot = SlotPart::join(parts.into_iter().chain([last])).unwrap();
            let bytes = slot.bytes_mut();
            assert!(bytes.is_sorted() && bytes[0] == 1 && bytes[bytes.len() - 1] == count as u8);
        }
        assert_eq!(pool.usage().slots, 0);
    }

    #[test]
    fn a_slot_is_free_only_when_all_its_parts_are() {
        let pool = pool();
        let mut parts = SlotPart::split(pool.reserve(3 * BLOCK).unwrap(), 3);
        let held = parts.pop();
        assert!(SlotPart::join(parts).is_none(), "one is missing");
        assert_eq!(pool.usage().slots, 1);
        drop(held);
        assert_eq!(pool.usage().slots, 0);
        let mut parts = SlotPart::split(pool.reserve(3 * BLOCK).unwrap(), 3);
        parts.pop().unwrap().abandon();
        assert!(SlotPart::join(parts).is_none());
        let usage = pool.usage();
        assert_eq!((usage.slots, usage.quarantined_slots), (1, 1));
    }
}
