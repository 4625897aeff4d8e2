//! Checks of indices before a byte moves, the same for every channel.

use std::sync::Arc;

use crate::in_arena::InArena;
use crate::lease::{Range, Region};
use crate::{ChannelConfig, Index, TransferError};

/// The indices of these slots in an open arena.
pub(crate) fn arena_indices(
    config: &ChannelConfig,
    incarnation: u64,
    slots: &[&dyn InArena],
) -> Result<Vec<Index>, TransferError> {
    if !config.open_arena {
        return Err(TransferError::NotOpen);
    }
    let unit = config.unit;
    let index = |(object, slot): (usize, &&dyn InArena)| {
        if !Arc::ptr_eq(slot.arena(), &config.arena) {
            return Err(TransferError::NotRegistered { object });
        }
        match slot.offset().is_multiple_of(unit) {
            true => Ok(Index::arena(incarnation, slot.offset() / unit)),
            false => Err(TransferError::Unaligned { object, unit }),
        }
    };
    slots.iter().enumerate().map(index).collect()
}

/// The memory of a peer, as far as this side knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerMemory {
    pub(crate) incarnation: u64,
    /// Bytes of its arena.
    pub(crate) arena: u64,
    pub(crate) unit: u64,
}

/// Returns the ranges of a peer's memory that objects of these lengths occupy at these indices.
pub(crate) fn ranges(
    lens: impl ExactSizeIterator<Item = u64>,
    indices: &[Index],
    peer: PeerMemory,
) -> Result<Vec<Range>, TransferError> {
    let objects = lens.len();
    if objects != indices.len() {
        let indices = indices.len();
        return Err(TransferError::Indices { objects, indices });
    }
    let range = |(object, (len, &index)): (usize, (u64, &Index))| {
        if index.incarnation != peer.incarnation {
            return Err(TransferError::Stale { object, index });
        }
        if index.lease != 0 {
            return Ok(Range {
                region: Region::Lease(index.lease),
                slot: index.slot,
                offset: 0,
                len,
            });
        }
        let offset = index.slot.checked_mul(peer.unit);
        let inside = |offset: &u64| offset.checked_add(len).is_some_and(|end| end <= peer.arena);
        let offset = offset.filter(inside).ok_or(TransferError::OutOfRange {
            object,
            index,
            len,
            arena: peer.arena,
        })?;
        Ok(Range {
            region: Region::Arena,
            slot: 0,
            offset,
            len,
        })
    };
    lens.zip(indices).enumerate().map(range).collect()
}
