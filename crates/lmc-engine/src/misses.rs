//! Reasons of misses: why a lookup ended before the end of its prompt.

use lmc_backend::BackendError;
use lmc_key::{ChunkHash, ClearsId};

use crate::request::Rank;

/// Reason why a lookup did not find the first chunk that it lacks. A new reason needs a name and a counter
/// wherever reasons are counted, so no `match` may have a wildcard arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissReason {
    /// Nothing is known about the chunk.
    NeverStored,
    /// A tier of this process evicted the chunk.
    Evicted,
    /// The chunk was computed before a clear.
    Cleared,
    /// The chunk was removed by its key, with its space, or because its bytes were damaged.
    Removed,
    /// A lower tier did not answer, or did not deliver the chunk, in time. Holds the index of the tier, if
    /// known.
    TierLate(Option<usize>),
    /// A lower tier failed, or was out of use. Holds the index of the tier; `None` for DRAM, if its memory
    /// was lost or the engine is being closed.
    TierDown(Option<usize>),
    /// A lower tier was said or assumed to have the chunk, but did not have it, or not as it was stored.
    /// Holds the index of the tier.
    TierLost(usize),
    /// The lookup was not allowed to keep more bytes from eviction, or there was no memory for the chunk.
    Limit,
    /// Reading the chunk takes longer than computing it.
    Recompute,
}

/// Reason of a miss, and its certainty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Miss {
    /// The reason.
    pub reason: MissReason,
    /// False if the reason is only probable: it was derived from a bounded memory, or from a tier that might
    /// have had the chunk.
    pub is_certain: bool,
}

impl Miss {
    /// Returns a certain reason.
    pub const fn certain(reason: MissReason) -> Self {
        Self {
            reason,
            is_certain: true,
        }
    }

    /// Returns a probable reason.
    pub const fn probable(reason: MissReason) -> Self {
        Self {
            reason,
            is_certain: false,
        }
    }

    /// Returns the reason for a lookup that a tier answered with an error: it may have had the chunk.
    pub(crate) fn of_question(error: &BackendError, tier: usize) -> Self {
        Self::probable(reason_of(error, tier))
    }

    /// Returns the reason for a chunk that a tier failed to read. If the length differs, the chunk may only
    /// have been assumed to be there.
    pub(crate) fn of_read(error: &BackendError, tier: usize) -> Self {
        match reason_of(error, tier) {
            lost @ MissReason::TierLost(_) => Self::probable(lost),
            reason => Self::certain(reason),
        }
    }
}

fn reason_of(error: &BackendError, tier: usize) -> MissReason {
    match error {
        BackendError::Deadline => MissReason::TierLate(Some(tier)),
        BackendError::Length { .. } => MissReason::TierLost(tier),
        _ => MissReason::TierDown(Some(tier)),
    }
}

/// The first chunk that a lookup did not find. [`crate::CacheEngine::miss`] returns the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Missing {
    /// The rank that lacks the chunk.
    pub rank: Rank,
    /// Hash of the chunk.
    pub hash: ChunkHash,
    pub(crate) clears: ClearsId,
    /// The reason, if the lookup itself knows it; `None` for a chunk that no tier has.
    pub(crate) known: Option<Miss>,
}

impl Missing {
    /// Makes a value for a chunk of which only the absence is known.
    pub(crate) fn new(rank: Rank, hash: ChunkHash, clears: ClearsId) -> Self {
        Self {
            rank,
            hash,
            clears,
            known: None,
        }
    }
}

/// The expected end of a lookup, as known while it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LookupEnd {
    clears: ClearsId,
    /// Number of leading chunks that may be found.
    at: usize,
    rank: Option<Rank>,
    known: Option<Miss>,
}

impl LookupEnd {
    /// Makes the end of a lookup that may find all its chunks.
    pub(crate) fn new(clears: ClearsId, chunks: usize) -> Self {
        Self {
            clears,
            at: chunks,
            rank: None,
            known: None,
        }
    }

    /// Returns the clears after which the chunks are looked up.
    pub(crate) fn clears(&self) -> ClearsId {
        self.clears
    }

    /// Records that a rank has no more than this number of leading chunks. The rank with the fewest chunks
    /// counts; of several, the first.
    pub(crate) fn lower(&mut self, at: usize, rank: Rank, known: Option<Miss>) {
        if at < self.at {
            *self = Self {
                at,
                rank: Some(rank),
                known,
                ..*self
            };
        }
    }

    /// Returns the first missing chunk after `hits` leading chunks were found.
    pub(crate) fn missing(&self, hashes: &[ChunkHash], hits: usize) -> Option<Box<Missing>> {
        Some(Box::new(Missing {
            hash: *hashes.get(hits)?,
            rank: self.rank?,
            clears: self.clears,
            known: self.known,
        }))
    }
}
