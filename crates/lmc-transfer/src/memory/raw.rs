//! Bytes between a slot and a place in another arena: the only place where addresses meet.
//!
//! The other arena's bytes are not borrowed: as with a device, a lease of whoever embeds the
//! channel keeps a place that is read or written from being used otherwise meanwhile.

use std::ptr::{self, NonNull};

use lmc_memory::{Arena, ReservedSlot, SealedSlot};

/// The first of `len` bytes of an arena.
fn place(arena: &Arena, offset: u64, len: usize) -> NonNull<u8> {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let inside = offset
        .checked_add(len)
        .is_some_and(|end| end <= arena.len());
    assert!(inside, "places are checked before a copy begins");
    // SAFETY: just checked to lie inside the arena's one mapping.
    unsafe { arena.base_ptr().add(offset) }
}

/// Copies `len` bytes of an object, from its byte `at` on, to a place.
pub(super) fn write(object: &SealedSlot, at: usize, arena: &Arena, offset: u64, len: usize) {
    assert!(at + len <= object.len() as usize, "within the object");
    let (from, to) = (object.as_ptr(), place(arena, offset, len));
    // SAFETY: both ranges were just checked, and their owners are borrowed for the call, but none
    // of the bytes; `copy` allows them to overlap, where a channel is connected to itself and
    // names its own object.
    unsafe { ptr::copy(from.add(at), to.as_ptr(), len) }
}

/// Copies `len` bytes from a place into a slot, from its byte `at` on.
pub(super) fn read(arena: &Arena, offset: u64, slot: &mut ReservedSlot, at: usize, len: usize) {
    assert!(at + len <= slot.len() as usize, "within the slot");
    let (from, to) = (place(arena, offset, len), slot.as_mut_ptr());
    // SAFETY: as above.
    unsafe { ptr::copy(from.as_ptr(), to.add(at), len) }
}
