//! Slots, typed by state.

/// A slot with one writer. Returns to the pool on drop.
#[derive(Debug)]
pub struct ReservedSlot(Handle);
/// A slot whose bytes are complete. Returns to the pool on drop.
#[derive(Debug)]
pub struct WrittenSlot(Handle);
/// A slot that many read and none writes; clones share it, the last one returns it.
#[derive(Clone, Debug)]
pub struct SealedSlot(Handle);
/// A slot that something outside may still be writing to.
#[derive(Debug)]
pub struct QuarantinedSlot(Handle);

#[derive(Clone, Debug)]
struct Handle {
    offset: u64,
    len: u64,
}

macro_rules! common {
    ($name:ident) => {
        impl $name {
            /// Bytes from the start of the arena.
            pub fn offset(&self) -> u64 {
                self.0.offset
            }

            /// Bytes of the slot, as asked for.
            #[allow(clippy::len_without_is_empty, reason = "a slot is never empty")]
            pub fn len(&self) -> u64 {
                self.0.len
            }
        }
    };
}
common!(ReservedSlot);
common!(WrittenSlot);
common!(SealedSlot);
common!(QuarantinedSlot);

impl ReservedSlot {
    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        unimplemented!()
    }

    /// First byte, for writers that are handed an address.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        unimplemented!()
    }

    /// Says that all bytes are in place.
    pub fn written(self) -> WrittenSlot {
        WrittenSlot(self.0)
    }

    /// Says that something outside may still write to the slot.
    pub fn quarantine(self) -> QuarantinedSlot {
        QuarantinedSlot(self.0)
    }
}

impl WrittenSlot {
    /// The bytes, to be summed.
    pub fn bytes(&self) -> &[u8] {
        unimplemented!()
    }

    /// Makes the slot readable by many.
    pub fn seal(self) -> SealedSlot {
        SealedSlot(self.0)
    }

    /// Says that something outside may still write to the slot.
    pub fn quarantine(self) -> QuarantinedSlot {
        QuarantinedSlot(self.0)
    }
}

impl SealedSlot {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        unimplemented!()
    }
}

impl QuarantinedSlot {
    /// Gives the slot back: the caller has proof that nothing writes to it any more.
    pub fn release_proven_quiet(self) {
        unimplemented!()
    }
}
