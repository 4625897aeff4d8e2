//! Outcomes of transfers.

use lmc_memory::{ReservedSlot, WrittenSlot};

use crate::TransferError;

/// The outcome of sending or writing.
#[derive(Debug)]
#[must_use]
pub struct Sent {
    /// Number of leading objects that are in the peer's memory, whole.
    pub done: usize,
    /// The reason why objects are missing; `None` if all arrived.
    pub error: Option<TransferError>,
    /// True if nothing of this transfer is under way any more.
    ///
    /// If `false`, its bytes may still arrive in the peer's memory: under a lease until the peer
    /// revokes it, in an open arena at any time. The peer must not use that memory for anything
    /// else meanwhile.
    pub idle: bool,
}

impl Sent {
    /// Returns the outcome of a transfer that is done.
    pub fn all(done: usize) -> Self {
        Self {
            done,
            error: None,
            idle: true,
        }
    }

    /// Returns the outcome of a transfer that was never begun.
    pub fn failed(error: TransferError) -> Self {
        Self {
            done: 0,
            error: Some(error),
            idle: true,
        }
    }

    /// Returns how many objects were sent, if all were.
    ///
    /// # Errors The reason why not all objects were sent.
    pub fn into_result(self) -> Result<usize, TransferError> {
        self.error.map_or(Ok(self.done), Err)
    }
}

/// The state of a slot that was to be filled.
#[derive(Debug)]
pub enum Slot {
    /// The slot holds the peer's object.
    Written(WrittenSlot),
    /// The slot does not hold the object, and nothing writes to it any more. Its bytes are
    /// undefined.
    Idle(ReservedSlot),
    /// Something may still write to the slot. The channel keeps it, and returns it to its pool
    /// when that is over.
    Quarantined,
}

/// The outcome of receiving or reading: one for each slot, in order.
#[derive(Debug)]
#[must_use]
pub struct Filled {
    /// The slots.
    pub slots: Vec<Slot>,
    /// The reason why slots are not written. Also `None` when a sender had fewer objects than there are
    /// slots.
    pub error: Option<TransferError>,
    /// The plane by which all of the bytes came; sockets where some did.
    pub by: DataPlane,
}

/// The path of the bytes of a session's one-sided reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DataPlane {
    /// The session's own streams.
    #[default]
    Sockets,
    /// NIXL, where both sides have it and have registered their memory.
    Nixl,
}

impl DataPlane {
    /// Returns its name, for logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sockets => "sockets",
            Self::Nixl => "nixl",
        }
    }
}

impl Filled {
    /// Returns the outcome of a transfer that was never begun.
    pub fn untouched(slots: Vec<ReservedSlot>, error: TransferError) -> Self {
        Self {
            slots: slots.into_iter().map(Slot::Idle).collect(),
            error: Some(error),
            by: DataPlane::Sockets,
        }
    }

    /// Returns the outcome of a transfer of nothing.
    pub(crate) fn nothing() -> Self {
        Self {
            slots: Vec::new(),
            error: None,
            by: DataPlane::Sockets,
        }
    }

    /// Returns the number of leading slots that are written.
    pub fn done(&self) -> usize {
        let written = |slot: &&Slot| matches!(slot, Slot::Written(_));
        self.slots.iter().take_while(written).count()
    }

    /// Returns the written slots, if there was no error.
    ///
    /// # Errors
    /// The reason why slots are not written.
    pub fn into_result(self) -> Result<Vec<WrittenSlot>, TransferError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let written = |slot| match slot {
            Slot::Written(slot) => Some(slot),
            Slot::Idle(_) | Slot::Quarantined => None,
        };
        Ok(self.slots.into_iter().map_while(written).collect())
    }
}
