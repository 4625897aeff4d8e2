//! What is checked before a byte moves, the same for every channel.

use std::sync::Arc;

use lmc_memory::{Arena, ReservedSlot, SealedSlot, WrittenSlot};

use crate::{Index, MAX_BATCH, TransferError};

mod sealed {
    pub trait Sealed {}
    impl Sealed for lmc_memory::ReservedSlot {}
    impl Sealed for lmc_memory::WrittenSlot {}
    impl Sealed for lmc_memory::SealedSlot {}
}

/// A slot, in whatever state, by its place.
pub trait InArena: sealed::Sealed {
    /// The arena that it lies in.
    fn arena(&self) -> &Arc<Arena>;
    /// Bytes from the arena's start.
    fn offset(&self) -> u64;
    /// Bytes of the slot.
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

/// Under which indices a peer names these slots.
pub(crate) fn indices(
    arena: &Arc<Arena>,
    unit: u64,
    slots: &[&dyn InArena],
) -> Result<Vec<Index>, TransferError> {
    let index = |(place, slot): (usize, &&dyn InArena)| {
        if !Arc::ptr_eq(slot.arena(), arena) {
            return Err(TransferError::NotRegistered { place });
        }
        match slot.offset().is_multiple_of(unit) {
            true => Ok(Index(slot.offset() / unit)),
            false => Err(TransferError::Unaligned { place, unit }),
        }
    };
    slots.iter().enumerate().map(index).collect()
}

/// Slots of a batch: not too many, and all of the registered arena.
pub(crate) fn slots<S: InArena>(arena: &Arc<Arena>, slots: &[S]) -> Result<(), TransferError> {
    let objects = slots.len();
    if objects > MAX_BATCH {
        return Err(TransferError::TooMany { objects });
    }
    match slots
        .iter()
        .position(|slot| !Arc::ptr_eq(slot.arena(), arena))
    {
        Some(place) => Err(TransferError::NotRegistered { place }),
        None => Ok(()),
    }
}

/// Where objects of these lengths lie in a peer's arena: byte offsets.
pub(crate) fn places(
    lens: impl ExactSizeIterator<Item = u64>,
    indices: &[Index],
    unit: u64,
    arena: u64,
) -> Result<Vec<u64>, TransferError> {
    let objects = lens.len();
    if objects != indices.len() {
        let indices = indices.len();
        return Err(TransferError::Indices { objects, indices });
    }
    let place = |(place, (len, &index)): (usize, (u64, &Index))| {
        let offset = index.0.checked_mul(unit);
        let inside = |offset: &u64| offset.checked_add(len).is_some_and(|end| end <= arena);
        offset.filter(inside).ok_or(TransferError::OutOfRange {
            place,
            index,
            len,
            arena,
        })
    };
    lens.zip(indices).enumerate().map(place).collect()
}
