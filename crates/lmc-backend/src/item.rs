//! What goes into a tier's operations and what comes out.

use lmc_key::ChunkKey;
use lmc_memory::{ReservedSlot, SealedSlot, WrittenSlot};

use crate::BackendError;

/// A chunk to load, and the slot it shall go into.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadItem {
    /// Which chunk.
    pub key: ChunkKey,
    /// Where its bytes go; as long as the chunk.
    pub slot: ReservedSlot,
}

impl LoadItem {
    /// A chunk to load into `slot`.
    pub fn new(key: ChunkKey, slot: ReservedSlot) -> Self {
        Self { key, slot }
    }
}

/// What became of one load.
#[derive(Debug)]
pub enum Loaded {
    /// The slot holds the chunk, verified.
    Hit(WrittenSlot),
    /// The tier does not have the chunk, or no longer in a state it trusts.
    Miss(ReservedSlot),
    /// The tier could not say.
    Failed {
        /// Why.
        error: BackendError,
        /// Where the slot is.
        slot: FailedSlot,
    },
}

impl Loaded {
    /// The written slot of a hit.
    pub fn hit(self) -> Option<WrittenSlot> {
        match self {
            Self::Hit(slot) => Some(slot),
            Self::Miss(_) | Self::Failed { .. } => None,
        }
    }
}

/// Where the slot of a failed load is.
#[derive(Debug)]
pub enum FailedSlot {
    /// Nothing writes to it: it may be used again.
    Quiet(ReservedSlot),
    /// Something may still write to it. The tier keeps it in quarantine and returns it to the
    /// pool when there is proof that it is quiet.
    Quarantined,
}

/// A chunk to store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreItem {
    /// Which chunk.
    pub key: ChunkKey,
    /// The chunk before it in its prompt, for tiers that evict the tail before the head.
    pub parent: Option<ChunkKey>,
    /// Its bytes. Owning it keeps them in place and unchanged.
    pub slot: SealedSlot,
}

impl StoreItem {
    /// A chunk that begins a prompt, or whose parent is not known.
    pub fn new(key: ChunkKey, slot: SealedSlot) -> Self {
        Self {
            key,
            parent: None,
            slot,
        }
    }

    /// Names the chunk before it. Default: none.
    pub fn with_parent(mut self, parent: ChunkKey) -> Self {
        self.parent = Some(parent);
        self
    }
}

/// What became of a store that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stored {
    /// The chunk is there now.
    Written,
    /// It was there before; nothing was written.
    Present,
    /// The tier chose not to keep it, by its admission rule or because its queue is full.
    Declined,
}

/// A place in a tier's listing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor(u128);

impl Cursor {
    /// The start of the listing.
    pub const START: Self = Self(0);

    /// A place as the tier numbers it; only that tier knows what it means.
    pub fn from_raw(raw: u128) -> Self {
        Self(raw)
    }

    /// The number given by [`Cursor::from_raw`].
    pub fn raw(self) -> u128 {
        self.0
    }
}

/// One chunk of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Which chunk.
    pub key: ChunkKey,
    /// Its bytes.
    pub len: u64,
}

impl Listed {
    /// A chunk of `len` bytes.
    pub fn new(key: ChunkKey, len: u64) -> Self {
        Self { key, len }
    }
}

/// A part of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The chunks; at most as many as were asked for, and none does not mean the end.
    pub items: Vec<Listed>,
    /// Where to go on; `None` at the end.
    pub next: Option<Cursor>,
}

/// What a tier holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Chunks.
    pub chunks: u64,
    /// Bytes of chunks.
    pub bytes: u64,
    /// Bytes of chunks that it may hold; `None` where there is no limit or none is known.
    pub capacity: Option<u64>,
}

impl Usage {
    /// `chunks` chunks of `bytes` bytes together, no limit.
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

/// How a tier is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// All is well.
    Ready,
    /// It works, but not as it should.
    Degraded {
        /// What is wrong, for a person.
        reason: String,
    },
    /// It does not work.
    Down {
        /// What is wrong, for a person.
        reason: String,
    },
}
