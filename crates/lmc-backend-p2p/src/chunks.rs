//! The chunks of this daemon, as the tier needs them from above.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use lmc_backend::{BoxFuture, Clears, TooManyClears, Usage};
use lmc_key::ChunkKey;
use lmc_memory::SealedSlot;
use lmc_transfer::PeerId;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::message::{ChunkState, SpaceNote};

/// The chunks of this daemon, which it lends to peers.
///
/// Nothing here asks peers in turn: what a peer is answered comes from this daemon's memory and
/// disks, so that two daemons that ask each other end at once.
pub trait Chunks: Send + Sync + 'static {
    /// Returns the state of each chunk. [`ChunkState::Writing`] only for chunks that an engine of
    /// this host writes. Never waits.
    fn states(&self, keys: &[ChunkKey]) -> Vec<ChunkState>;

    /// Keeps chunks in memory and unchanged until what is returned is dropped: one answer for each
    /// key. Chunks on disk are promoted first, if that is done by `promote_until`. Sums none.
    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        promote_until: Instant,
    ) -> BoxFuture<'a, Vec<Option<LeasedChunk>>>;

    /// Computes the checksums of chunks that have none yet, off the runtime's threads where that
    /// takes long. They stay with the slots.
    fn sum(&self, slots: Vec<SealedSlot>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            for slot in slots {
                slot.checksum();
            }
        })
    }

    /// Returns some of the chunks that can be leased, and where to go on; `None` at the end. Begins
    /// at 0. A chunk that is there all the time is listed.
    fn list(&self, from: u128, limit: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)>;

    /// Reads chunks of one prompt from a peer into memory, as a lookup of this host's engines would
    /// and within the same bounds. Ends when that is done.
    fn fetch<'a>(&'a self, keys: &'a [ChunkKey], from: &'a PeerId) -> BoxFuture<'a, ()>;

    /// Returns the clears that this daemon has carried out. It is complete from the first call on,
    /// which comes before the first message to a peer, and contains all that it contained before.
    /// The digest is computed again for each other [`Arc`]. Never waits.
    fn clears(&self) -> Arc<Clears>;

    /// Returns false while a restart of this daemon may not find all clears that it has carried out.
    /// Never waits.
    fn clears_are_noted(&self) -> bool;

    /// Takes in clears that were made elsewhere, and notes them durably, if that can be done
    /// ([`Self::clears_are_noted`]); tries that again with those that are known. From the end on
    /// [`Self::clears`] contains them, and chunks from before are not found. The future may be
    /// dropped at any point; the clears may or may not be taken in then.
    ///
    /// # Errors
    /// [`TooManyClears`]; nothing is taken in then.
    fn learn(&self, clears: Clears) -> BoxFuture<'_, Result<(), TooManyClears>>;

    /// Returns the live spaces for people, the most important first: those that engines of this
    /// host use or have chunks in.
    fn spaces(&self) -> Vec<SpaceNote>;

    /// Returns what is in memory, and the bytes that may be.
    fn usage(&self) -> Usage;
}

/// A chunk that stays in memory as it is.
pub struct LeasedChunk {
    /// The bytes.
    pub slot: SealedSlot,
    /// [`lmc_memory::checksum`] of the bytes, as they were when the chunk was committed or first
    /// copied; `None` for that of the slot.
    pub checksum: Option<u64>,
    /// Keeps the chunk from eviction.
    pub lease: Box<dyn Any + Send>,
}

impl LeasedChunk {
    /// Returns the digest of the chunk if its checksum is known.
    pub(crate) fn known_digest(&self, key: &ChunkKey) -> Option<u64> {
        let sum = self.checksum.or_else(|| self.slot.known_checksum())?;
        Some(chunk_digest(key, sum))
    }

    /// Returns the digest of the chunk.
    pub(crate) fn digest(&self, key: &ChunkKey) -> u64 {
        let sum = self.checksum.unwrap_or_else(|| self.slot.checksum());
        chunk_digest(key, sum)
    }

    /// Returns the slots of chunks whose checksum is not known.
    pub(crate) fn unsummed<'a>(chunks: impl Iterator<Item = &'a Self>) -> Vec<SealedSlot> {
        let unknown = chunks
            .filter(|chunk| chunk.checksum.is_none() && chunk.slot.known_checksum().is_none());
        unknown.map(|chunk| chunk.slot.clone()).collect()
    }
}

impl fmt::Debug for LeasedChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeasedChunk")
            .field("slot", &self.slot)
            .field("checksum", &self.checksum)
            .finish_non_exhaustive()
    }
}

/// Returns what a peer compares after a read: the checksum of a chunk's bytes, mixed with its key,
/// so that the right bytes of another chunk do not pass.
pub fn chunk_digest(key: &ChunkKey, checksum: u64) -> u64 {
    xxh3_64_with_seed(&key.to_bytes(), checksum)
}
