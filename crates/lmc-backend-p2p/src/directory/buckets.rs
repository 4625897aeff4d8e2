//! Fingerprints of chunks, and a table of fingerprints with 8 bytes per entry. No I/O and no clock.

use lmc_key::ChunkKey;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes of a fingerprint on the wire.
pub(super) const FINGERPRINT_BYTES: usize = 6;

/// 48 bits of a chunk's key, by which a directory identifies the chunk.
///
/// If two keys have the same fingerprint, the cost is a `locate` that finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// Returns the fingerprint of a key. The function is part of the peer protocol.
    pub fn of(key: &ChunkKey) -> Self {
        Self(xxh3_64(&key.to_bytes()) >> 16)
    }

    /// Returns the bytes of the fingerprint on the wire.
    pub fn to_bytes(self) -> [u8; FINGERPRINT_BYTES] {
        let [a, b, c, d, e, f, ..] = self.0.to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// Reads the bytes of [`Self::to_bytes`].
    pub fn from_bytes([a, b, c, d, e, f]: [u8; FINGERPRINT_BYTES]) -> Self {
        Self(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }
}

/// Count and combined hash of a set of fingerprints: two sets with the same digest are equal, except with a
/// probability of 1 in 2^48.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SetDigest {
    /// Number of fingerprints.
    pub count: u64,
    /// Hashes of the entries, combined by exclusive or.
    pub xor: u64,
}

impl SetDigest {
    pub(crate) fn add(&mut self, fingerprint: Fingerprint) {
        self.count += 1;
        self.xor ^= fingerprint.0;
    }

    pub(crate) fn remove(&mut self, fingerprint: Fingerprint) {
        self.count -= 1;
        self.xor ^= fingerprint.0;
    }
}

/// Average number of entries in a bucket: the scan of a bucket takes about as long as the cache misses to
/// reach it.
const BUCKET: usize = 64;
/// Most buckets that are merged at once.
const MERGES: usize = 1024;

/// Pairs of a fingerprint and a 16-bit tag, 8 bytes each, in buckets that are scanned.
///
/// The table grows and shrinks by one bucket at a time (linear hashing), so that no operation copies it and
/// little unused memory is allocated. A fingerprint with many tags only makes its own bucket longer. The
/// bucket of a fingerprint depends on a random seed of this process, so that no member can fill one bucket on
/// purpose.
#[derive(Debug)]
pub(crate) struct Buckets {
    seed: u64,
    /// The buckets; there is at least one.
    buckets: Vec<Vec<u64>>,
    len: usize,
    /// Number of entries for which the buckets have memory.
    capacity: usize,
}

fn entry(fingerprint: Fingerprint, tag: u16) -> u64 {
    fingerprint.0 << 16 | u64::from(tag)
}

fn fingerprint_of(entry: u64) -> Fingerprint {
    Fingerprint(entry >> 16)
}

fn tag_of(entry: u64) -> u16 {
    entry as u16
}

impl Buckets {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            buckets: vec![Vec::new()],
            len: 0,
            capacity: 0,
        }
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of buckets.
    pub(crate) fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// Returns the bytes that are allocated.
    pub(crate) fn allocated(&self) -> usize {
        self.capacity * size_of::<u64>() + self.buckets.capacity() * size_of::<Vec<u64>>()
    }

    fn number_of(&self, fingerprint: Fingerprint) -> usize {
        let hash = xxh3_64_with_seed(&fingerprint.0.to_le_bytes(), self.seed) as usize;
        let half = self.half();
        let number = hash & (2 * half - 1);
        match number < self.buckets.len() {
            true => number,
            false => number - half,
        }
    }

    /// Returns the largest power of two that is at most the number of buckets.
    fn half(&self) -> usize {
        1 << self.buckets.len().ilog2()
    }

    /// Returns the tags of a fingerprint, starting at a position that `turn` decides.
    pub(crate) fn tags(&self, fingerprint: Fingerprint, turn: u64) -> impl Iterator<Item = u16> {
        let bucket = &self.buckets[self.number_of(fingerprint)];
        let first = (turn % bucket.len().max(1) as u64) as usize;
        let (end, begin) = bucket.split_at(first);
        let entries = begin.iter().chain(end);
        let of_it = entries.filter(move |entry| fingerprint_of(**entry) == fingerprint);
        of_it.map(|entry| tag_of(*entry))
    }

    /// Loads the buckets of some fingerprints into the cache. These reads wait for memory together, while
    /// separate look-ups would wait one after the other.
    pub(crate) fn touch(&self, fingerprints: &[Fingerprint]) {
        const LINE: usize = 64 / size_of::<u64>();
        let mut sum = 0;
        for &fingerprint in fingerprints {
            let bucket = &self.buckets[self.number_of(fingerprint)];
            sum ^= bucket
                .iter()
                .step_by(LINE)
                .fold(0, |sum, entry| sum ^ entry);
        }
        std::hint::black_box(sum);
    }

    /// Adds an entry. Returns false if it exists already.
    pub(crate) fn insert(&mut self, fingerprint: Fingerprint, tag: u16) -> bool {
        let (number, entry) = (self.number_of(fingerprint), entry(fingerprint, tag));
        if self.buckets[number].contains(&entry) {
            return false;
        }
        self.push(number, entry);
        self.grow();
        true
    }

    /// Sets the only tag of a fingerprint. Returns the previous tag.
    pub(crate) fn set(&mut self, fingerprint: Fingerprint, tag: u16) -> Option<u16> {
        let number = self.number_of(fingerprint);
        let mut entries = self.buckets[number].iter_mut();
        let known = entries.find(|entry| fingerprint_of(**entry) == fingerprint);
        let Some(known) = known else {
            self.push(number, entry(fingerprint, tag));
            self.grow();
            return None;
        };
        let before = tag_of(*known);
        *known = entry(fingerprint, tag);
        Some(before)
    }

    /// Removes an entry. Returns false if it did not exist.
    pub(crate) fn remove(&mut self, fingerprint: Fingerprint, tag: u16) -> bool {
        let (number, entry) = (self.number_of(fingerprint), entry(fingerprint, tag));
        let position = self.buckets[number].iter().position(|one| *one == entry);
        let Some(position) = position else {
            return false;
        };
        self.buckets[number].swap_remove(position);
        self.len -= 1;
        self.fit(number);
        true
    }

    /// Removes the entries of a bucket for which `keep` returns false.
    pub(crate) fn retain(&mut self, number: usize, mut keep: impl FnMut(Fingerprint, u16) -> bool) {
        let bucket = &mut self.buckets[number];
        let before = bucket.len();
        bucket.retain(|&entry| keep(fingerprint_of(entry), tag_of(entry)));
        self.len -= before - bucket.len();
        self.fit(number);
    }

    /// Returns the entries of a bucket. While only [`Self::insert`], [`Self::set`] and [`Self::remove`] are
    /// called, a visit of all buckets in order sees every entry that stays.
    pub(crate) fn entries(&self, number: usize) -> impl Iterator<Item = (Fingerprint, u16)> {
        let bucket = self.buckets.get(number).into_iter().flatten();
        bucket.map(|&entry| (fingerprint_of(entry), tag_of(entry)))
    }

    fn push(&mut self, number: usize, entry: u64) {
        let bucket = &mut self.buckets[number];
        if bucket.len() == bucket.capacity() {
            let before = bucket.capacity();
            bucket.reserve_exact(4.max(before / 8));
            self.capacity += bucket.capacity() - before;
        }
        bucket.push(entry);
        self.len += 1;
    }

    /// Releases unused memory of a bucket.
    fn fit(&mut self, number: usize) {
        let bucket = &mut self.buckets[number];
        let (len, before) = (bucket.len(), bucket.capacity());
        if before > len + len / 4 + 8 {
            bucket.shrink_to(len + len / 8);
            self.capacity -= before - bucket.capacity();
        }
    }

    /// Splits a bucket if there are too few buckets.
    fn grow(&mut self) {
        let count = self.buckets.len();
        if self.len <= count * BUCKET {
            return;
        }
        if count == self.buckets.capacity() {
            self.buckets.reserve_exact(4.max(count / 8));
        }
        let split = count - self.half();
        self.buckets.push(Vec::new());
        let entries = std::mem::take(&mut self.buckets[split]);
        self.capacity -= entries.capacity();
        self.len -= entries.len();
        for entry in entries {
            self.push(self.number_of(fingerprint_of(entry)), entry);
        }
    }

    /// Merges some buckets if there are too many. Must not be called while the buckets are visited in order.
    pub(crate) fn shrink(&mut self) {
        for _ in 0..MERGES {
            if self.buckets.len() == 1 || self.len >= self.buckets.len() * (BUCKET / 4) {
                break;
            }
            let last = self.buckets.pop().expect("there are two or more");
            self.capacity -= last.capacity();
            self.len -= last.len();
            for entry in last {
                self.push(self.number_of(fingerprint_of(entry)), entry);
            }
        }
        let count = self.buckets.len();
        if self.buckets.capacity() > count + count / 4 + 8 {
            self.buckets.shrink_to(count + count / 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lmc_backend::conformance::Rng;
    use lmc_key::{ChunkHash, SpaceId};

    use super::*;

    #[test]
    fn the_fingerprint_of_a_key_is_part_of_the_protocol() {
        let key = ChunkKey {
            space: SpaceId::new([9; 16]),
            kv_rank: 1,
            group: 2,
            hash: ChunkHash::new([3; 32]),
        };
        let found = Fingerprint::of(&key);
        assert_eq!(Fingerprint::from_bytes(found.to_bytes()), found);
        assert_eq!(found.to_bytes(), [16, 142, 35, 99, 127, 140]);
    }

    #[test]
    fn entries_are_those_of_a_model_while_the_table_grows_and_shrinks() {
        let mut rng = Rng::new(1);
        let mut table = Buckets::new(7);
        let mut model: BTreeSet<(Fingerprint, u16)> = BTreeSet::new();
        for round in 0..60_000u64 {
            // Grows, then shrinks to almost nothing, twice.
            let adds = (round / 15_000).is_multiple_of(2);
            let one = (Fingerprint(rng.below(3000)), rng.below(4) as u16);
            match rng.below(8) < if adds { 6 } else { 1 } {
                true => assert_eq!(table.insert(one.0, one.1), model.insert(one)),
                false => assert_eq!(table.remove(one.0, one.1), model.remove(&one)),
            }
            if round.is_multiple_of(100) {
                table.shrink();
            }
            assert_eq!(table.len(), model.len());
            let tags: BTreeSet<u16> = table.tags(one.0, rng.next_u64()).collect();
            let expected = (0..4).filter(|tag| model.contains(&(one.0, *tag)));
            assert_eq!(tags, expected.collect());
        }
        let all = (0..table.buckets()).flat_map(|number| table.entries(number));
        assert_eq!(all.collect::<BTreeSet<_>>(), model);
        assert!(table.buckets() > 1, "it has grown");
        (0..table.buckets()).for_each(|number| table.retain(number, |_, _| false));
        table.shrink();
        assert_eq!((table.buckets(), table.capacity), (1, 0));
    }

    #[test]
    fn visits_in_order_see_every_entry_that_stays() {
        let mut rng = Rng::new(3);
        let mut table = Buckets::new(7);
        let stays: Vec<Fingerprint> = (0..2000).map(Fingerprint).collect();
        for &one in &stays {
            table.set(one, 1);
        }
        let (mut seen, mut next) = (BTreeSet::new(), 0);
        while next < table.buckets() {
            seen.extend(table.entries(next).map(|(fingerprint, _)| fingerprint));
            next += 1;
            for _ in 0..40 {
                table.set(Fingerprint(2000 + rng.below(4000)), 2);
                table.remove(Fingerprint(2000 + rng.below(4000)), 2);
            }
        }
        assert!(stays.iter().all(|one| seen.contains(one)));
    }

    #[test]
    fn an_entry_takes_at_most_24_bytes_from_a_thousand_on() {
        let mut rng = Rng::new(5);
        let mut table = Buckets::new(9);
        let mut all = Vec::new();
        while all.len() < 200_000 {
            let one = Fingerprint(rng.next_u64() >> 16);
            if table.insert(one, 3) {
                all.push(one);
            }
            let (len, bytes) = (table.len(), table.allocated());
            assert!(len < 1000 || bytes <= 16 * len, "{bytes} bytes for {len}");
        }
        while all.len() > 1000 {
            let one = all.swap_remove(rng.below(all.len() as u64) as usize);
            assert!(table.remove(one, 3));
            table.shrink();
            let (len, bytes) = (table.len(), table.allocated());
            assert!(bytes <= 24 * len, "{bytes} bytes for {len}");
        }
    }
}
