//! Converts slots to slices. No other code does.
//!
//! Invariant: the allocator hands out ranges inside the arena that do not overlap, and a handle's range is
//! freed only when its last owner is gone. The actions of other *processes* that map a shared arena are
//! outside Rust's rules: they get offsets of reserved slots to write and of sealed slots to read, and the
//! protocol above binds them to that. A lost arena ([`Arena::is_lost`]) reads as zeroes from then on, even
//! through existing slices; a copy out of it checks for that afterwards.

use std::ptr::NonNull;
use std::slice;

use crate::Arena;

/// Returns the first byte of the slot.
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

/// Returns the bytes of a slot that nothing writes to.
///
/// # Safety
/// The caller owns the range (a written or sealed slot) for as long as the slice lives, and nothing in this
/// process writes to the range meanwhile.
pub(super) unsafe fn shared(arena: &Arena, offset: u64, len: u64) -> &[u8] {
    // SAFETY: in bounds by `ptr`, mapped for the arena's life, and zero-filled or written, so
    // initialised; not written meanwhile by the caller's promise.
    unsafe { slice::from_raw_parts(ptr(arena, offset, len).as_ptr(), len as usize) }
}

/// Returns the bytes of a slot that only the caller accesses; `start` is from [`ptr`].
///
/// # Safety
/// For `'a`, the caller is the only owner of the range (a reserved slot borrowed mutably).
pub(super) unsafe fn exclusive<'a>(start: NonNull<u8>, len: u64) -> &'a mut [u8] {
    // SAFETY: as for `shared`; nothing else in this process has the range.
    unsafe { slice::from_raw_parts_mut(start.as_ptr(), len as usize) }
}
