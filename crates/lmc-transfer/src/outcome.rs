//! What became of a transfer.

use lmc_memory::{ReservedSlot, WrittenSlot};

use crate::TransferError;

/// A place in an arena, counted in units of [`crate::TransferChannel::unit`] bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Index(pub u64);

/// The outcome of sending or writing.
#[derive(Debug)]
#[must_use]
pub struct Sent {
    /// Leading objects that are in the peer's memory, whole.
    pub done: usize,
    /// Why not all are.
    pub error: Option<TransferError>,
}

impl Sent {
    /// All of them are there.
    pub fn all(done: usize) -> Self {
        Self { done, error: None }
    }

    /// None is known to be there.
    pub fn failed(error: TransferError) -> Self {
        let error = Some(error);
        Self { done: 0, error }
    }

    /// How many, where all are there.
    ///
    /// # Errors
    /// Why not all are.
    pub fn into_result(self) -> Result<usize, TransferError> {
        self.error.map_or(Ok(self.done), Err)
    }
}

/// What became of a slot that was to be filled.
#[derive(Debug)]
pub enum Slot {
    /// It holds the peer's object.
    Written(WrittenSlot),
    /// It does not, and nothing writes to it any more. Its bytes are anything.
    Quiet(ReservedSlot),
    /// Something may still write to it. The channel keeps it and gives it back to its pool when
    /// that is over.
    Quarantined,
}

/// The outcome of receiving or reading: one for each slot, in order.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    /// The slots.
    pub slots: Vec<Slot>,
    /// Why not all are written. Also none when a sender had fewer objects than there are slots.
    pub error: Option<TransferError>,
}

impl Filled {
    /// None was begun.
    pub fn untouched(slots: Vec<ReservedSlot>, error: TransferError) -> Self {
        Self {
            slots: slots.into_iter().map(Slot::Quiet).collect(),
            error: Some(error),
        }
    }

    /// Leading slots that are written.
    pub fn done(&self) -> usize {
        let written = |slot: &&Slot| matches!(slot, Slot::Written(_));
        self.slots.iter().take_while(written).count()
    }

    /// The written slots, where all went well.
    ///
    /// # Errors
    /// Why not.
    pub fn into_result(self) -> Result<Vec<WrittenSlot>, TransferError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let written = |slot| match slot {
            Slot::Written(slot) => Some(slot),
            Slot::Quiet(_) | Slot::Quarantined => None,
        };
        Ok(self.slots.into_iter().map_while(written).collect())
    }
}
