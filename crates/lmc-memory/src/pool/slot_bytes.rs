//! Turns slots into slices: the only code that does.
//!
//! Invariant: the allocator hands out ranges that lie inside the arena and do not overlap, and
//! a handle's range goes back only when its last owner goes. Other *processes* that map a
//! shared arena do is outside of Rust's rules: they get offsets of reserved slots to write and
//! of sealed ones to read, and the protocol above keeps them to it. An arena that is lost
//! ([`Arena::is_lost`]) reads as zeroes from then on, also in slices that exist already; a copy
//! out of one checks for that afterwards.

use std::ptr::NonNull;
use std::slice;

use crate::Arena;

/// First byte of the slot.
pub(super) fn ptr(arena: &Arena, offset: u64, len: u64) -> NonNull<u8> {
    let end = offset
        .checked_add(len)
        .expect("the allocator hands out ranges inside the arena");
    assert!(
        end <= arena.len() as u64,
        "the allocator hands out ranges inside the arena"
    );
    // SAFETY: the sum was just checked to stay inside the arena's one mapping.
    unsafe { arena.base_ptr().add(offset as usize) }
}

/// Returns the bytes of a slot that is not written.
///
/// # Safety
/// The caller owns the range (a written or sealed slot), keeps it for as long as the slice
/// lives, and nothing in this process writes to it meanwhile.
pub(super) unsafe fn shared(arena: &Arena, offset: u64, len: u64) -> &[u8] {
    // SAFETY: in bounds by `ptr`, mapped for the arena's life, and zero-filled or written, so
    // initialised; not written meanwhile by the caller's promise.
    unsafe { slice::from_raw_parts(ptr(arena, offset, len).as_ptr(), len as usize) }
}

/// The bytes of a slot that only the caller touches; `start` is from [`ptr`].
///
/// # Safety
/// The caller owns the range alone (a reserved slot borrowed mutably) for `'a`.
pub(super) unsafe fn exclusive<'a>(start: NonNull<u8>, len: u64) -> &'a mut [u8] {
    // SAFETY: as for `shared`; nothing else in this process has the range.
    unsafe { slice::from_raw_parts_mut(start.as_ptr(), len as usize) }
}
