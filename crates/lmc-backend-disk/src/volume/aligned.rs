//! Heap memory that is aligned for direct I/O.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

use super::BLOCK;

/// A zeroed range of heap memory that begins and ends at a [`BLOCK`] boundary.
pub(crate) struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its memory alone, like a `Box<[u8]>`.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads, like a `Box<[u8]>`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Allocates at least `len` bytes, and at least one block.
    pub(crate) fn new(len: u64) -> Self {
        let len = len.max(1).next_multiple_of(BLOCK) as usize;
        let layout = Self::layout(len);
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            handle_alloc_error(layout);
        };
        Self { start, len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, BLOCK as usize).expect("a block is a power of two")
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout, and owned alone.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this length, zeroed or written since, owned by `self`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} aligned bytes", self.len)
    }
}
