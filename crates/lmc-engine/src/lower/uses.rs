//! Counters of chunk uses, for tiers that store chunks on reuse only.

use std::sync::atomic::{AtomicU32, Ordering};

use lmc_key::ChunkKey;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::policy::Admission;

/// Number of counters: 1 MiB in total.
const COUNTERS: usize = 1 << 18;
/// Highest count; the other bits of the 32-bit counter identify the chunk.
const COUNT: u32 = 31;

/// Counts uses of recent chunks, up to 31 each, in a table in which a later chunk replaces an earlier one. If
/// two chunks are mistaken for each other, the only effect is that a chunk is written too early.
#[derive(Debug)]
pub(super) struct Uses {
    counters: Box<[AtomicU32]>,
    /// Uses after which a chunk is admitted, its computation included.
    pub(super) least: u32,
}

impl Uses {
    /// Makes the counters for an admission policy; `None` if every chunk is admitted.
    pub(super) fn of_policy(admit: Admission) -> Option<Self> {
        let Admission::Reused(reuses) = admit else {
            return None;
        };
        let counters = std::iter::repeat_with(AtomicU32::default).take(COUNTERS);
        Some(Self {
            counters: counters.collect(),
            least: u32::from(reuses.min(Admission::MAX_REUSES)) + 1,
        })
    }

    /// Counts a use, and returns the number of uses including it.
    pub(super) fn add(&self, key: &ChunkKey) -> u32 {
        let (counter, name) = self.counter(key);
        let add = |value: u32| {
            let count = if value & !COUNT == name {
                value & COUNT
            } else {
                0
            };
            name | (count + 1).min(COUNT)
        };
        let before = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |v| Some(add(v)));
        add(before.unwrap_or_else(|value| value)) & COUNT
    }

    /// Returns the number of uses of a chunk.
    pub(super) fn of(&self, key: &ChunkKey) -> u32 {
        let (counter, name) = self.counter(key);
        let value = counter.load(Ordering::Relaxed);
        if value & !COUNT == name {
            value & COUNT
        } else {
            0
        }
    }

    /// Returns a chunk's counter, and the bits that identify the chunk in it.
    fn counter(&self, key: &ChunkKey) -> (&AtomicU32, u32) {
        let hash = xxh3_64_with_seed(&key.to_bytes(), 0);
        let name = (hash >> 32) as u32 & !COUNT;
        (&self.counters[hash as usize % COUNTERS], name)
    }
}

#[cfg(test)]
mod tests {
    use lmc_key::{ChunkHash, SpaceId};

    use super::*;

    #[test]
    fn uses_are_counted_for_each_chunk_beyond_the_most_that_admission_takes() {
        let key = |n: u8| ChunkKey {
            space: SpaceId::new([1; 16]),
            kv_rank: 0,
            group: 0,
            hash: ChunkHash::new([n; 32]),
        };
        let uses = Uses::of_policy(Admission::Reused(2)).expect("uses are counted");
        assert_eq!(uses.of(&key(1)), 0);
        let counts: Vec<u32> = (0..33).map(|_| uses.add(&key(1))).collect();
        assert_eq!(counts[..3], [1, 2, 3]);
        assert_eq!(counts[30..], [31, 31, 31]);
        assert_eq!((uses.of(&key(1)), uses.add(&key(2))), (31, 1));
        // A chunk reaches the count at which it is admitted once.
        let most = Uses::of_policy(Admission::Reused(Admission::MAX_REUSES));
        let least = most.expect("uses are counted").least as usize;
        assert_eq!(
            counts
                .iter()
                .filter(|&&count| count as usize == least)
                .count(),
            1
        );
    }
}
