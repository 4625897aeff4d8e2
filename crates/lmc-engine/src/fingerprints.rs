//! A table of fingerprints: remembers two bytes about each of many keys, in bounded memory and without a
//! lock.

use std::fmt;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Entries of one bucket: a bucket is one cache line.
const WAYS: usize = 8;
/// Low bits of an entry that hold the payload.
const PAYLOAD_BITS: u32 = 16;
/// Bytes of the pool for each entry. The number of entries is rounded up to a power of two, so a table takes
/// between 1/4096 and 1/2048 of the pool.
const BYTES_PER_ENTRY: u64 = 32 << 10;
/// Least number of entries (32 KiB), and most (4 MiB).
const ENTRIES: (u64, u64) = (1 << 12, 1 << 19);

/// A map from key fingerprints to payloads of two bytes.
///
/// An entry takes 8 bytes, of which 48 bits are the fingerprint: for a key that was never inserted, the table
/// returns a wrong answer with a probability of 8 in 2^48. An insertion into a full bucket replaces a random
/// entry. Of the latest keys, if there are an eighth as many as entries, about nine in ten are remembered; of
/// as many keys as entries, about 63 %. No lock is taken: of two concurrent insertions one may be lost. Only
/// the entries are written to.
pub struct FingerprintTable {
    entries: Box<[AtomicU64]>,
    /// Hasher with random keys, so that no client can choose the keys of one bucket.
    hasher: RandomState,
}

impl FingerprintTable {
    /// Makes an empty table for a pool of this size; the table has at most 4 MiB.
    pub fn new(pool_bytes: u64) -> Self {
        let entries = (pool_bytes / BYTES_PER_ENTRY).clamp(ENTRIES.0, ENTRIES.1);
        let entries = entries.next_power_of_two();
        Self {
            entries: (0..entries).map(|_| AtomicU64::new(0)).collect(),
            hasher: RandomState::new(),
        }
    }

    /// Returns the payload that was last inserted for a key, if it is still remembered.
    pub fn get(&self, key: impl Hash) -> Option<u16> {
        let hash = self.hasher.hash_one(key);
        let entries = self.bucket(hash).iter();
        let mut entries = entries.map(|entry| entry.load(Ordering::Relaxed));
        let found = entries.find(|entry| entry >> PAYLOAD_BITS == hash >> PAYLOAD_BITS);
        found.filter(|entry| *entry != 0).map(|entry| entry as u16)
    }

    /// Stores the payload of a key and replaces an earlier one.
    pub fn insert(&self, key: impl Hash, payload: u16) {
        let hash = self.hasher.hash_one(key);
        let bucket = self.bucket(hash);
        let read = |entry: &AtomicU64| entry.load(Ordering::Relaxed);
        let fingerprint = hash >> PAYLOAD_BITS;
        let known = bucket
            .iter()
            .position(|entry| read(entry) >> PAYLOAD_BITS == fingerprint);
        let free = || bucket.iter().position(|entry| read(entry) == 0);
        // Both fingerprints are hashes: the choice is as good as random, and needs no shared counter.
        let victim = || (fingerprint ^ read(&bucket[0]) >> PAYLOAD_BITS) as usize % WAYS;
        let index = known.or_else(free).unwrap_or_else(victim);
        let entry = fingerprint << PAYLOAD_BITS | u64::from(payload);
        bucket[index].store(entry, Ordering::Relaxed);
    }

    fn bucket(&self, hash: u64) -> &[AtomicU64] {
        let buckets = self.entries.len() / WAYS;
        let first = hash as usize % buckets * WAYS;
        &self.entries[first..first + WAYS]
    }
}

impl fmt::Debug for FingerprintTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.len();
        f.debug_struct("FingerprintTable")
            .field("entries", &entries)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_payload_of_a_key_counts() {
        let table = FingerprintTable::new(0);
        assert_eq!(table.get("key"), None);
        for payload in [0, 7, u16::MAX] {
            table.insert("key", payload);
            assert_eq!(table.get("key"), Some(payload));
        }
        assert_eq!(table.get("another"), None);
    }

    #[test]
    fn memory_is_bounded_and_what_is_recent_is_mostly_remembered() {
        let largest = FingerprintTable::new(u64::MAX);
        assert_eq!(largest.entries.len() as u64, ENTRIES.1);
        let table = FingerprintTable::new(0);
        let entries = table.entries.len() as u64;
        let inserted = 16 * entries;
        (0..inserted).for_each(|key| table.insert(key, 1));
        let remembered = |keys: std::ops::Range<u64>| {
            let is_known = |key: &u64| table.get(key).is_some();
            keys.filter(is_known).count() as u64
        };
        let recent = entries / 8;
        let known = remembered(inserted - recent..inserted);
        assert!(known * 10 >= recent * 8, "{known} of {recent}");
        let known = remembered(inserted - entries..inserted);
        let percent = known * 100 / entries;
        assert!((58..68).contains(&percent), "{known} of {entries}");
        // None of these was ever there.
        assert_eq!(remembered(inserted..2 * inserted), 0);
    }
}
