//! Slots of an arena, in any state, and the check of a batch of them.

use std::sync::Arc;

use lmc_memory::{Arena, ReservedSlot, SealedSlot, WrittenSlot};

use crate::{MAX_BATCH, TransferError};

mod sealed {
    pub trait Sealed {}
    impl Sealed for lmc_memory::ReservedSlot {}
    impl Sealed for lmc_memory::WrittenSlot {}
    impl Sealed for lmc_memory::SealedSlot {}
}

/// A slot in any state, as a range of its arena.
pub trait InArena: sealed::Sealed {
    /// Returns the arena that the slot lies in.
    fn arena(&self) -> &Arc<Arena>;
    /// Returns the bytes from the arena's start.
    fn offset(&self) -> u64;
    /// Returns the bytes of the slot.
    fn bytes(&self) -> u64;
}

macro_rules! in_arena {
    ($($slot:ty),*) => {$(
        impl InArena for $slot {
            fn arena(&self) -> &Arc<Arena> {
                <$slot>::arena(self)
            }

            fn offset(&self) -> u64 {
                <$slot>::offset(self)
            }

            fn bytes(&self) -> u64 {
                <$slot>::len(self)
            }
        }
    )*};
}
in_arena!(ReservedSlot, WrittenSlot, SealedSlot);

/// Slots of a batch: not too many, and all of the registered arena.
pub(crate) fn check_slots<S: InArena>(
    arena: &Arc<Arena>,
    slots: &[S],
) -> Result<(), TransferError> {
    let objects = slots.len();
    if objects > MAX_BATCH {
        return Err(TransferError::TooMany { objects });
    }
    match slots
        .iter()
        .position(|slot| !Arc::ptr_eq(slot.arena(), arena))
    {
        Some(object) => Err(TransferError::NotRegistered { object }),
        None => Ok(()),
    }
}
