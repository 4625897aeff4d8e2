//! Arguments and results of a tier's operations.

use lmc_key::ChunkKey;
use lmc_memory::{ReservedSlot, SealedSlot, WrittenSlot};

#[cfg(doc)]
use crate::Location;
use crate::{BackendError, Handle};

/// A chunk to load, and the slot to load it into.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadItem {
    /// Key of the chunk.
    pub key: ChunkKey,
    /// Slot that the bytes are read into. It is as long as the chunk.
    pub slot: ReservedSlot,
    /// Handle that the tier returned when it located the chunk ([`Location::handle`]). It may be outdated;
    /// `None` if this tier has not located the chunk.
    pub handle: Option<Handle>,
}

impl LoadItem {
    /// Makes an item that loads a chunk into `slot`.
    pub fn new(key: ChunkKey, slot: ReservedSlot) -> Self {
        Self {
            key,
            slot,
            handle: None,
        }
    }

    /// Sets the handle that the tier returned. Default: none.
    #[must_use]
    pub fn with_handle(mut self, handle: Option<Handle>) -> Self {
        self.handle = handle;
        self
    }
}

/// Outcome of one load.
#[derive(Debug)]
pub enum Loaded {
    /// The slot holds the verified chunk.
    Hit(WrittenSlot),
    /// The tier does not have the chunk, or no longer trusts its stored bytes.
    Miss(ReservedSlot),
    /// The tier could not answer.
    Failed {
        /// Reason of the failure.
        error: BackendError,
        /// The slot, or its quarantine.
        slot: FailedSlot,
    },
}

impl Loaded {
    /// Returns the written slot of a hit.
    pub fn hit(self) -> Option<WrittenSlot> {
        match self {
            Self::Hit(slot) => Some(slot),
            Self::Miss(_) | Self::Failed { .. } => None,
        }
    }
}

/// The slot of a failed load.
#[derive(Debug)]
pub enum FailedSlot {
    /// Nothing writes to the slot: it may be used again.
    Released(ReservedSlot),
    /// Something may still write to the slot. The tier keeps it in quarantine, and returns it to
    /// its pool when there is proof that nothing does.
    Quarantined,
}

/// A chunk to store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreItem {
    /// Key of the chunk.
    pub key: ChunkKey,
    /// Key of the chunk before this one in its prompt, for tiers that evict the tail before the head.
    pub parent: Option<ChunkKey>,
    /// Slot with the chunk's bytes. Owning the slot keeps the bytes in memory and unchanged.
    pub slot: SealedSlot,
}

impl StoreItem {
    /// Makes an item for a chunk that begins a prompt, or whose parent is not known.
    pub fn new(key: ChunkKey, slot: SealedSlot) -> Self {
        Self {
            key,
            parent: None,
            slot,
        }
    }

    /// Sets the key of the chunk before this one. Default: none.
    #[must_use]
    pub fn with_parent(mut self, parent: ChunkKey) -> Self {
        self.parent = Some(parent);
        self
    }
}

/// Outcome of a store that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stored {
    /// The chunk is present now.
    Written,
    /// The chunk was already present; nothing was written.
    Present,
    /// The tier declined the chunk, by its admission rule or because its queue is full.
    Declined,
}

/// Outcome of a tier's [`clear`](crate::Backend::clear).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleared {
    /// Chunks that were removed.
    pub removed: u64,
    /// True if the tier has noted the map durably, so that it survives a restart of this process.
    pub is_durable: bool,
    /// Names of the peers or stores that the tier passes clears on to, and that have not confirmed these
    /// clears yet.
    pub unconfirmed: Vec<String>,
}

impl Cleared {
    /// Makes the result of a clear that removed `removed` chunks and is not durable.
    pub fn new(removed: u64) -> Self {
        Self {
            removed,
            ..Self::default()
        }
    }

    /// Marks the clear as durable. Default: it is not.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.is_durable = true;
        self
    }

    /// Sets the names of the peers or stores that have not confirmed the clears. Default: none.
    #[must_use]
    pub fn with_unconfirmed(mut self, unconfirmed: Vec<String>) -> Self {
        self.unconfirmed = unconfirmed;
        self
    }
}

/// A position in a tier's listing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor(u128);

impl Cursor {
    /// The start of the listing.
    pub const START: Self = Self(0);

    /// Makes a cursor from a tier's own number of a position; the number has a meaning for that tier only.
    pub fn from_raw(raw: u128) -> Self {
        Self(raw)
    }

    /// Returns the number given to [`Cursor::from_raw`].
    pub fn raw(self) -> u128 {
        self.0
    }
}

/// One chunk of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Key of the chunk.
    pub key: ChunkKey,
    /// Payload bytes of the chunk.
    pub len: u64,
}

impl Listed {
    /// Makes an entry for a chunk of `len` bytes.
    pub fn new(key: ChunkKey, len: u64) -> Self {
        Self { key, len }
    }
}

/// A part of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The chunks, at most as many as the caller asked for. An empty page is not the end of the listing.
    pub items: Vec<Listed>,
    /// Position of the next page; `None` at the end.
    pub next: Option<Cursor>,
}

/// Content of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Number of chunks.
    pub chunks: u64,
    /// Payload bytes of the chunks.
    pub bytes: u64,
    /// Payload bytes that the tier may hold; `None` if there is no limit or the limit is unknown.
    pub capacity: Option<u64>,
}

impl Usage {
    /// Makes the usage of `chunks` chunks with `bytes` payload bytes in total, without a limit.
    pub fn new(chunks: u64, bytes: u64) -> Self {
        Self {
            chunks,
            bytes,
            capacity: None,
        }
    }

    /// Sets the limit in bytes. Default: none.
    pub fn with_capacity(mut self, capacity: u64) -> Self {
        self.capacity = Some(capacity);
        self
    }
}

/// State of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// The tier works.
    Ready,
    /// The tier works, but with a fault.
    Degraded {
        /// Text for an operator: the fault, and the remedy.
        reason: String,
    },
    /// The tier does not work.
    Down {
        /// Text for an operator: the fault, and the remedy.
        reason: String,
    },
}
