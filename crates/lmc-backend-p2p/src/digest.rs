//! Digests by which a reader verifies the bytes of a chunk.

use lmc_backend::HostLease;
use lmc_key::ChunkKey;
use lmc_memory::SealedSlot;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Returns the digest that a peer compares after a read: the checksum of a chunk's bytes, mixed with its key,
/// so that the bytes of another chunk do not match.
pub fn chunk_digest(key: &ChunkKey, checksum: u64) -> u64 {
    xxh3_64_with_seed(&key.to_bytes(), checksum)
}

/// Returns the digest of a leased chunk.
pub(crate) fn digest(key: &ChunkKey, chunk: &HostLease) -> u64 {
    let sum = chunk.checksum.unwrap_or_else(|| chunk.slot.checksum());
    chunk_digest(key, sum)
}

/// Returns the digest of a leased chunk if its checksum is known.
pub(crate) fn known_digest(key: &ChunkKey, chunk: &HostLease) -> Option<u64> {
    let sum = chunk.checksum.or_else(|| chunk.slot.known_checksum())?;
    Some(chunk_digest(key, sum))
}

/// Returns the slots of chunks whose checksum is unknown.
pub(crate) fn unsummed<'a>(chunks: impl Iterator<Item = &'a HostLease>) -> Vec<SealedSlot> {
    let unknown =
        chunks.filter(|chunk| chunk.checksum.is_none() && chunk.slot.known_checksum().is_none());
    unknown.map(|chunk| chunk.slot.clone()).collect()
}
