//! A map from hash to slab index, with one cache line for each probe.
//!
//! A general hash table stores control bytes and values apart, which costs two cache misses for a lookup in a
//! large index. It also doubles when it grows, which leaves it half empty. This table has all data of a
//! bucket in one cache line, and is allocated at its expected final size.

/// Slots of a bucket.
const SLOTS: usize = 12;
const EMPTY: u8 = 0;

/// A bucket: one cache line.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Bucket {
    indices: [u32; SLOTS],
    /// Number of entries of this bucket that are in later buckets, because this bucket was full.
    displaced: u16,
    /// Distance in buckets to the farthest of these entries: a probe ends there. 0 if there are none.
    reach: u16,
    /// Eight bits of each entry's hash, never 0; 0 for an empty slot.
    tags: [u8; SLOTS],
}

impl Bucket {
    const NEW: Self = Self {
        indices: [0; SLOTS],
        displaced: 0,
        reach: 0,
        tags: [EMPTY; SLOTS],
    };

    /// Returns the slots with this tag, one bit for each. Exact: an empty slot never has the tag.
    #[inline]
    fn candidates(&self, tag: u8) -> u16 {
        // Sixteen, because compilers turn a comparison of 16 bytes into one instruction.
        let mut tags = [EMPTY; 16];
        tags[..SLOTS].copy_from_slice(&self.tags);
        let bit = |mask, (slot, &other): (usize, &u8)| mask | u16::from(other == tag) << slot;
        tags.iter().enumerate().fold(0, bit)
    }

    fn empty_slot(&self) -> Option<usize> {
        self.tags.iter().position(|&tag| tag == EMPTY)
    }
}

/// A set of slab indices, found by hash. Equal hashes are fine; the caller compares keys.
#[derive(Debug, Default)]
pub(crate) struct Table {
    buckets: Vec<Bucket>,
    len: usize,
}

/// Returns the tag, the top 8 bits of the hash. The low 32 bits choose the bucket, bits between choose the
/// shard.
#[inline]
fn tag(hash: u64) -> u8 {
    ((hash >> 56) as u8).max(1)
}

impl Table {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash & 0xffff_ffff) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, bucket: usize) -> usize {
        match bucket + 1 {
            end if end == self.buckets.len() => 0,
            next => next,
        }
    }

    /// Returns the bucket and slot of the index for which `same` holds.
    #[inline]
    fn locate(&self, hash: u64, mut same: impl FnMut(u32) -> bool) -> Option<(usize, usize)> {
        let (mut at, tag) = (self.home(hash), tag(hash));
        let mut further = self.buckets.get(at)?.reach;
        loop {
            let bucket = &self.buckets[at];
            let mut candidates = bucket.candidates(tag);
            while candidates != 0 {
                let slot = candidates.trailing_zeros() as usize;
                if same(bucket.indices[slot]) {
                    return Some((at, slot));
                }
                candidates &= candidates - 1;
            }
            further = further.checked_sub(1)?;
            at = self.after(at);
        }
    }

    /// Returns the index with this hash for which `same` holds.
    #[inline]
    pub(crate) fn find(&self, hash: u64, same: impl FnMut(u32) -> bool) -> Option<u32> {
        let (at, slot) = self.locate(hash, same)?;
        Some(self.buckets[at].indices[slot])
    }

    /// Returns an index that may have this hash, without reading its key.
    #[inline]
    pub(crate) fn glance(&self, hash: u64) -> Option<u32> {
        let bucket = self.buckets.get(self.home(hash))?;
        let candidates = bucket.candidates(tag(hash));
        let slot = candidates.trailing_zeros() as usize;
        (candidates != 0).then(|| bucket.indices[slot])
    }

    /// Returns true if the next insert needs [`Table::rebuild`] first.
    pub(crate) fn is_full(&self) -> bool {
        // At four fifths, about one entry in five is outside its bucket, most of these in the next bucket.
        (self.len + 1) * 5 > self.buckets.len() * SLOTS * 4
    }

    /// Grows to at least `capacity` entries, or to an eighth more than the current number, and fills the
    /// table with `all`, its current entries.
    pub(crate) fn rebuild(&mut self, capacity: usize, all: impl Iterator<Item = (u64, u32)>) {
        let capacity = capacity.max(self.len + self.len / 8);
        // The old table is freed first; the caller's lock keeps readers out.
        self.buckets = Vec::new();
        self.buckets
            .resize(capacity * 5 / (4 * SLOTS) + 1, Bucket::NEW);
        self.len = 0;
        for (hash, index) in all {
            self.insert(hash, index);
        }
    }

    /// Adds an index that is not present. The table must not be full.
    pub(crate) fn insert(&mut self, hash: u64, index: u32) {
        let home = self.home(hash);
        let (mut at, mut distance) = (home, 0);
        let slot = loop {
            if let Some(slot) = self.buckets[at].empty_slot() {
                break slot;
            }
            (at, distance) = (self.after(at), distance + 1);
        };
        let bucket = &mut self.buckets[at];
        bucket.tags[slot] = tag(hash);
        bucket.indices[slot] = index;
        if distance > 0 {
            let home = &mut self.buckets[home];
            home.displaced += 1;
            home.reach = home.reach.max(distance);
        }
        self.len += 1;
    }

    /// Removes an index that is present.
    pub(crate) fn remove(&mut self, hash: u64, index: u32) {
        let found = self.locate(hash, |other| other == index);
        let (at, slot) = found.expect("every occupied index is in the table");
        self.buckets[at].tags[slot] = EMPTY;
        let home = self.home(hash);
        if at != home {
            let home = &mut self.buckets[home];
            home.displaced -= 1;
            if home.displaced == 0 {
                home.reach = 0;
            }
        }
        self.len -= 1;
    }
}

const _: () = assert!(size_of::<Bucket>() == 64, "a bucket is a cache line");

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lmc_testkit::rounds;
    use proptest::prelude::*;

    use super::*;

    /// Hashes with many equal homes and tags.
    fn hash(n: u32) -> u64 {
        u64::from(n % 7) << 29 | u64::from(n % 5) << 56
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(rounds(64, 256) as u32))]

        #[test]
        fn it_is_a_set(ops in prop::collection::vec((0..300_u32, any::<bool>()), 0..900)) {
            let mut table = Table::default();
            let mut model = BTreeMap::new();
            let last = ops.len().saturating_sub(1);
            for (step, (n, insert)) in ops.into_iter().enumerate() {
                if insert && !model.contains_key(&n) {
                    if table.is_full() {
                        table.rebuild(0, model.iter().map(|(&n, &hash)| (hash, n)));
                    }
                    table.insert(hash(n), n);
                    model.insert(n, hash(n));
                } else if !insert && model.remove(&n).is_some() {
                    table.remove(hash(n), n);
                }
                prop_assert_eq!(table.len(), model.len());
                // A look at everything takes longer than all else.
                let all = step == last || step % rounds(16, 1) == 0;
                for n in if all { 0..300 } else { n..n + 1 } {
                    let found = table.find(hash(n), |index| index == n);
                    prop_assert_eq!(found.is_some(), model.contains_key(&n));
                }
            }
        }
    }

    fn spread(n: u32) -> u64 {
        u64::from(n + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(17)
            ^ u64::from(n)
    }

    #[test]
    fn it_is_never_half_empty() {
        let mut table = Table::default();
        for n in 0..100_000_u32 {
            if table.is_full() {
                table.rebuild(0, (0..n).map(|n| (spread(n), n)));
            }
            table.insert(spread(n), n);
            let slots = table.buckets.len() * SLOTS;
            assert!(n < 1000 || table.len() * 10 > slots * 6, "{n} in {slots}");
        }
    }

    /// The first version of this table counted in each bucket what had passed it. With every
    /// chunk replaced a few times, all buckets had been passed by something, and a look for an
    /// absent key went round for ever: found by a replay that did not end.
    #[test]
    fn looks_stay_short_when_everything_was_replaced() {
        const LIVE: u32 = 20_000;
        let mut table = Table::default();
        for n in 0..LIVE * 20 {
            if table.is_full() {
                table.rebuild(0, (n.saturating_sub(LIVE)..n).map(|n| (spread(n), n)));
            }
            table.insert(spread(n), n);
            if let Some(old) = n.checked_sub(LIVE) {
                table.remove(spread(old), old);
            }
        }
        let reach: u32 = table
            .buckets
            .iter()
            .map(|bucket| u32::from(bucket.reach))
            .sum();
        let mean = f64::from(reach) / table.buckets.len() as f64;
        assert!(
            mean < 3.0,
            "a look for an absent key reads {mean:.1} buckets more"
        );
    }
}
