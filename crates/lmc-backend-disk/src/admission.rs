//! Which chunks are worth a drive's wear.

use std::sync::atomic::{AtomicU32, Ordering};

use lmc_key::ChunkKey;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Admits what was offered before: a chunk that comes once and never again is not written.
///
/// Remembers the latest offers by 32 bits each in a table where a later one replaces
/// an earlier one; a collision admits a chunk too early, which costs a write and no more.
#[derive(Debug)]
pub(crate) struct Admission {
    offers: Box<[AtomicU32]>,
}

/// Offers that are remembered: 1 MiB of them.
const OFFERS: usize = 1 << 18;

impl Default for Admission {
    fn default() -> Self {
        Self {
            offers: std::iter::repeat_with(AtomicU32::default)
                .take(OFFERS)
                .collect(),
        }
    }
}

impl Admission {
    /// Returns true if the chunk was offered before, and remembers this offer.
    pub(crate) fn admit(&self, key: &ChunkKey) -> bool {
        let hash = xxh3_64_with_seed(&key.to_bytes(), 0);
        // 0 stands for nothing.
        let mark = (hash >> 32) as u32 | 1;
        let slot = &self.offers[hash as usize % OFFERS];
        slot.swap(mark, Ordering::Relaxed) == mark
    }
}
