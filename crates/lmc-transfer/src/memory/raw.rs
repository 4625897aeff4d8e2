//! Copies between a slot and another arena: the only module where addresses meet.
//!
//! The other arena's bytes are not borrowed, as with a device. A lease pins what is read or
//! written; where the arena is open, that is for the embedder to see to.

use std::ptr::{self, NonNull};

use lmc_memory::{Arena, ReservedSlot, SealedSlot};

/// The first of `len` bytes of an arena.
fn at(arena: &Arena, offset: u64, len: usize) -> NonNull<u8> {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let inside = offset
        .checked_add(len)
        .is_some_and(|end| end <= arena.len());
    assert!(inside, "ranges are checked before a copy begins");
    // SAFETY: just checked to lie inside the arena's one mapping.
    unsafe { arena.base_ptr().add(offset) }
}

/// Copies `len` bytes of an object, from its byte `start` on, to an offset.
pub(super) fn write(object: &SealedSlot, start: usize, arena: &Arena, offset: u64, len: usize) {
    assert!(start + len <= object.len() as usize, "within the object");
    let (from, to) = (object.as_ptr(), at(arena, offset, len));
    // SAFETY: both ranges were just checked, and their owners are borrowed for the call, but none
    // of the bytes; `copy` allows them to overlap, where a channel is connected to itself and
    // names its own object.
    unsafe { ptr::copy(from.add(start), to.as_ptr(), len) }
}

/// Copies `len` bytes from an offset into a slot, from its byte `start` on.
pub(super) fn read(arena: &Arena, offset: u64, slot: &mut ReservedSlot, start: usize, len: usize) {
    assert!(start + len <= slot.len() as usize, "within the slot");
    let (from, to) = (at(arena, offset, len), slot.as_mut_ptr());
    // SAFETY: as above.
    unsafe { ptr::copy(from.as_ptr(), to.add(start), len) }
}
