//! An estimate of the hit ratio that other cache sizes would have, from a sample of the chunks that prompts
//! look up.
//!
//! An LRU cache finds a chunk if it can hold all chunks that were used since that chunk's last use. A sample
//! of the chunks, chosen by hash, is kept in the order of use. The bytes used after a chunk, divided by the
//! sample's share of all chunks, are the cache size that finds it (SHARDS, Waldspurger et al., FAST '15).
//!
//! All uses are counted. If the sample has more or fewer uses than its share, it has or lacks a chunk that is
//! used often. A cache of any size finds such chunks, so the difference counts as found (SHARDS-adj).

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use lmc_key::{ChunkHash, FoldState, SpaceId};
use parking_lot::Mutex;
use serde::Serialize;

/// Most chunks in the sample. With more chunks in total, the sample is a smaller share of them.
const FOLLOWED: usize = 2048;
/// Slots in the order of use, which is compacted when all slots are used.
const SLOTS: usize = 4 * FOLLOWED;
/// Smallest cache size in the curve. `SIZES` is the number of sizes, four for each doubling.
const LEAST_BYTES: f64 = (1 << 20) as f64;
const SIZES: usize = 120;
/// Cache sizes of one doubling, relative to the first.
const QUARTERS: [f64; 4] = [
    1.0,
    1.189_207_115_002_721,
    std::f64::consts::SQRT_2,
    1.681_792_830_507_429,
];
/// Uses of sampled chunks after which all counts are halved, so that recent uses have more weight.
const FORGET_AFTER: u64 = 1 << 20;
/// Most spaces whose number of KV ranks is remembered.
const SPACES: usize = 64;

/// Estimated hit ratio by cache size.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DemandCurve {
    /// Uses of sampled chunks that the estimate is based on; with few of them it is unreliable.
    pub followed: u64,
    /// Pairs `(bytes, ratio)` in ascending order: for an LRU cache of this size, the fraction of looked-up
    /// chunks that it would have found.
    pub points: Vec<(u64, f64)>,
}

impl DemandCurve {
    /// Returns the hit ratio of a cache of this size; `None` if nothing was looked up.
    pub fn hit_ratio(&self, bytes: u64) -> Option<f64> {
        let after = self.points.partition_point(|(size, _)| *size <= bytes);
        let (before, next) = (
            self.points.get(after.checked_sub(1)?)?,
            self.points.get(after),
        );
        let Some(next) = next else {
            return Some(before.1);
        };
        let share = (bytes - before.0) as f64 / (next.0 - before.0) as f64;
        Some(before.1 + share * (next.1 - before.1))
    }
}

/// Estimates the demand from a sample of the chunks that prompts look up.
pub(crate) struct Demand {
    /// Chunks with a tag below this limit are in the sample.
    limit: AtomicU64,
    /// Uses of all chunks that are not in [`Sample::asked`] yet.
    uses: AtomicU64,
    seed: u64,
    sample: Mutex<Sample>,
}

impl fmt::Debug for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Demand").finish_non_exhaustive()
    }
}

impl Demand {
    /// Makes an empty estimate. `seed` is random, so that no client can choose the sample.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            limit: AtomicU64::new(u64::MAX),
            uses: AtomicU64::new(0),
            seed,
            sample: Mutex::default(),
        }
    }

    /// Records that a prompt looks up chunks of a space, each with this many bytes in all KV ranks together.
    pub(crate) fn asked(&self, space: SpaceId, hashes: &[ChunkHash], bytes: u64, ranks: usize) {
        let mut sample = None;
        for hash in hashes {
            let tag = self.tag(space, hash);
            if tag >= self.limit.load(Ordering::Relaxed) {
                continue;
            }
            let sample = match &mut sample {
                Some(sample) => sample,
                none => {
                    // Held for microseconds. A prompt that was left out here would count as found.
                    let mut locked = self.sample.lock();
                    locked.note_ranks(space, ranks);
                    none.insert(locked)
                }
            };
            self.limit.store(sample.used(tag, bytes), Ordering::Relaxed);
        }
        self.uses.fetch_add(hashes.len() as u64, Ordering::Relaxed);
        if let Some(mut sample) = sample {
            sample.asked += self.uses.swap(0, Ordering::Relaxed) as f64;
            sample.forget();
        }
    }

    /// Records that a chunk of a space's first KV rank is stored, with this many bytes. Ignored if no prompt
    /// has looked up chunks of the space.
    pub(crate) fn stored(&self, space: SpaceId, hash: &ChunkHash, bytes: u64) {
        let tag = self.tag(space, hash);
        if tag < self.limit.load(Ordering::Relaxed)
            && let Some(mut sample) = self.sample.try_lock()
            && let Some(ranks) = sample.ranks.get(&space).copied()
        {
            let limit = sample.stored(tag, bytes.saturating_mul(ranks as u64));
            self.limit.store(limit, Ordering::Relaxed);
        }
    }

    pub(crate) fn curve(&self) -> DemandCurve {
        let mut sample = self.sample.lock();
        sample.asked += self.uses.swap(0, Ordering::Relaxed) as f64;
        sample.curve()
    }

    /// Returns uniformly distributed bits of a chunk's identity.
    fn tag(&self, space: SpaceId, hash: &ChunkHash) -> u64 {
        let first = |bytes: &[u8]| {
            bytes
                .first_chunk()
                .map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        let mut tag = first(hash.as_bytes()) ^ first(space.as_bytes()).rotate_left(32) ^ self.seed;
        // The finalizer of SplitMix64.
        tag = (tag ^ tag >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        tag = (tag ^ tag >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        tag ^ tag >> 31
    }
}

/// A chunk in the sample: its slot in the order of use, and its bytes.
#[derive(Debug, Clone, Copy)]
struct Followed {
    slot: usize,
    bytes: u64,
}

#[derive(Debug)]
struct Sample {
    limit: u64,
    /// The chunks by their tags, which are uniformly distributed and need no hashing.
    chunks: HashMap<u64, Followed, FoldState>,
    /// Bytes of the chunks by slot, as a Fenwick tree: the sum of any prefix takes logarithmic time.
    sums: Vec<u64>,
    bytes: u64,
    /// Slot of the next use.
    next: usize,
    /// Uses of all chunks.
    asked: f64,
    /// Uses of the followed chunks, scaled up to all chunks.
    estimated: f64,
    /// The part of `estimated` that a cache of each size, and no smaller one, would have found.
    found: Vec<f64>,
    followed: u64,
    until_forgetting: u64,
    ranks: HashMap<SpaceId, usize>,
}

impl Default for Sample {
    fn default() -> Self {
        Self {
            limit: u64::MAX,
            chunks: HashMap::default(),
            sums: vec![0; SLOTS + 1],
            bytes: 0,
            next: 0,
            asked: 0.0,
            estimated: 0.0,
            found: vec![0.0; SIZES],
            followed: 0,
            until_forgetting: FORGET_AFTER,
            ranks: HashMap::new(),
        }
    }
}

impl Sample {
    fn note_ranks(&mut self, space: SpaceId, ranks: usize) {
        if self.ranks.len() >= SPACES && !self.ranks.contains_key(&space) {
            self.ranks.clear();
        }
        self.ranks.insert(space, ranks);
    }

    /// Counts a use of a chunk. Returns the new limit for tags.
    fn used(&mut self, tag: u64, bytes: u64) -> u64 {
        if tag >= self.limit {
            return self.limit;
        }
        let scale = self.scale();
        self.estimated += scale;
        self.followed += 1;
        if let Some(known) = self.chunks.remove(&tag) {
            let after = self.bytes - self.sum_to(known.slot);
            let size = (after + bytes) as f64 * scale;
            if let Some(found) = self.found.get_mut(index_of(size)) {
                *found += scale;
            }
            self.bytes -= known.bytes;
            self.change(known.slot, |sum| *sum -= known.bytes);
        }
        self.until_forgetting = self.until_forgetting.saturating_sub(1);
        self.add(tag, bytes)
    }

    /// Halves the counts after many uses, so that the latest uses count for more.
    fn forget(&mut self) {
        if self.until_forgetting == 0 {
            self.until_forgetting = FORGET_AFTER;
            self.asked /= 2.0;
            self.estimated /= 2.0;
            self.found.iter_mut().for_each(|found| *found /= 2.0);
        }
    }

    /// Adds a chunk that no prompt has looked up yet.
    fn stored(&mut self, tag: u64, bytes: u64) -> u64 {
        match self.chunks.contains_key(&tag) {
            true => self.limit,
            false => self.add(tag, bytes),
        }
    }

    /// Returns the number of chunks that one sampled chunk stands for.
    fn scale(&self) -> f64 {
        u64::MAX as f64 / self.limit as f64
    }

    fn add(&mut self, tag: u64, bytes: u64) -> u64 {
        if self.chunks.len() >= FOLLOWED {
            self.limit /= 2;
            let limit = self.limit;
            self.chunks.retain(|tag, _| *tag < limit);
            self.close_up();
        }
        if self.next == SLOTS {
            self.close_up();
        }
        if tag < self.limit {
            let slot = self.next;
            self.next += 1;
            self.chunks.insert(tag, Followed { slot, bytes });
            self.bytes += bytes;
            self.change(slot, |sum| *sum += bytes);
        }
        self.limit
    }

    /// Moves the chunks to the first slots, in the same order.
    fn close_up(&mut self) {
        let mut chunks: Vec<&mut Followed> = self.chunks.values_mut().collect();
        chunks.sort_unstable_by_key(|chunk| chunk.slot);
        let mut sums = vec![0; SLOTS + 1];
        self.bytes = 0;
        self.next = chunks.len();
        for (slot, chunk) in chunks.into_iter().enumerate() {
            chunk.slot = slot;
            self.bytes += chunk.bytes;
            sums[slot + 1] = chunk.bytes;
        }
        for at in 1..=SLOTS {
            let above = at + lowest_bit(at);
            if above <= SLOTS {
                sums[above] += sums[at];
            }
        }
        self.sums = sums;
    }

    fn change(&mut self, slot: usize, change: impl Fn(&mut u64)) {
        let mut at = slot + 1;
        while at <= SLOTS {
            change(&mut self.sums[at]);
            at += lowest_bit(at);
        }
    }

    /// Returns the bytes of the chunks in slots up to and including `slot`.
    fn sum_to(&self, slot: usize) -> u64 {
        let (mut at, mut sum) = (slot + 1, 0);
        while at > 0 {
            sum += self.sums[at];
            at -= lowest_bit(at);
        }
        sum
    }

    fn curve(&self) -> DemandCurve {
        if self.estimated == 0.0 {
            return DemandCurve::default();
        }
        let mut found = self.asked - self.estimated;
        let mut points = vec![(0, 0.0)];
        for (index, more) in self.found.iter().enumerate() {
            found += more;
            points.push((size_of(index), (found / self.asked).clamp(0.0, 1.0)));
        }
        DemandCurve {
            followed: self.followed,
            points,
        }
    }
}

fn lowest_bit(at: usize) -> usize {
    at & at.wrapping_neg()
}

/// Returns the index of the smallest size that is not below `bytes`.
fn index_of(bytes: f64) -> usize {
    let ratio = bytes / LEAST_BYTES;
    if ratio <= 1.0 {
        return 0;
    }
    // Exponent and mantissa of the number.
    let bits = ratio.to_bits();
    let doublings = (bits >> 52) as usize - 1023;
    let rest = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    let quarters = QUARTERS.iter().filter(|&&quarter| rest > quarter).count();
    4 * doublings + quarters
}

fn size_of(index: usize) -> u64 {
    (LEAST_BYTES * (index as f64 / 4.0).exp2()) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use lmc_backend::conformance::{Rng, test_hash};

    use super::*;

    const SPACE: SpaceId = SpaceId::new([7; 16]);
    const CHUNK: u64 = 1 << 20;

    /// Hits of an LRU cache of some chunks.
    struct Lru {
        order: VecDeque<u64>,
        most: usize,
        hits: u64,
    }

    impl Lru {
        fn used(&mut self, number: u64) {
            match self.order.iter().position(|known| *known == number) {
                Some(at) => {
                    self.hits += 1;
                    self.order.remove(at);
                }
                None if self.order.len() == self.most => drop(self.order.pop_front()),
                None => {}
            }
            self.order.push_back(number);
        }
    }

    #[test]
    fn the_curve_is_that_of_lru_caches_of_each_size() {
        let demand = Demand::new(1);
        let mut caches = [16, 256, 1024].map(|most| Lru {
            order: VecDeque::new(),
            most,
            hits: 0,
        });
        let (mut rng, rounds) = (Rng::new(3), 30_000);
        for _ in 0..rounds {
            // Few chunks are asked for often, and many now and then.
            let number = rng.below(64) * rng.below(64) * rng.below(2);
            caches.iter_mut().for_each(|cache| cache.used(number));
            demand.asked(SPACE, &[test_hash(number)], CHUNK, 1);
        }
        let curve = demand.curve();
        assert_eq!(curve.followed, rounds);
        for Lru { most, hits, .. } in caches {
            let (expected, found) = (
                hits as f64 / rounds as f64,
                curve.hit_ratio(most as u64 * CHUNK),
            );
            let found = found.expect("chunks were asked for");
            assert!(
                (expected - found).abs() < 0.02,
                "{most}: {found}, not {expected}"
            );
        }
        assert!(curve.points.is_sorted());
    }

    #[test]
    fn sizes_have_the_index_of_the_next_that_is_distinguished() {
        assert_eq!(index_of(1.0), 0);
        for index in 0..SIZES {
            let size = size_of(index) as f64;
            let indices = [0.999, 1.001].map(|part| index_of(size * part));
            assert_eq!(indices, [index, index + 1], "{size}");
        }
    }

    /// Stack distances of all uses of an LRU cache, in chunks: no sample.
    struct Exact {
        /// Slot of the last use of each chunk, by its number.
        last: HashMap<u64, usize>,
        /// Slots that are the last use of a chunk, as a Fenwick tree.
        sums: Vec<u64>,
        next: usize,
        distances: Vec<u64>,
    }

    impl Exact {
        fn new(uses: usize) -> Self {
            Self {
                last: HashMap::new(),
                sums: vec![0; uses + 1],
                next: 0,
                distances: Vec::new(),
            }
        }

        fn change(&mut self, slot: usize, change: impl Fn(&mut u64)) {
            let mut at = slot + 1;
            while at < self.sums.len() {
                change(&mut self.sums[at]);
                at += lowest_bit(at);
            }
        }

        fn used(&mut self, number: u64) {
            if let Some(slot) = self.last.insert(number, self.next) {
                let (mut at, mut before) = (slot + 1, 0);
                while at > 0 {
                    before += self.sums[at];
                    at -= lowest_bit(at);
                }
                // The chunks that were used since, and this one.
                self.distances.push(self.last.len() as u64 - before + 1);
                self.change(slot, |sum| *sum -= 1);
            }
            self.change(self.next, |sum| *sum += 1);
            self.next += 1;
        }

        fn hit_ratio(&self, chunks: u64) -> f64 {
            let hits = self
                .distances
                .iter()
                .filter(|distance| **distance <= chunks);
            hits.count() as f64 / self.next as f64
        }
    }

    /// Few chunks are asked for often: whether the sample has one of them must not change the answer.
    #[test]
    fn the_curve_of_a_sample_is_right_where_few_chunks_are_asked_for_often() {
        const USES: usize = 200_000;
        const CHUNKS: u64 = 40_000;
        for seed in 0..8 {
            let (mut rng, mut exact) = (Rng::new(seed), Exact::new(USES));
            let demand = Demand::new(seed);
            for _ in 0..USES {
                // Zipf's law with exponent 1: the logarithm of the rank is even.
                let even = rng.below(1 << 32) as f64 / (1u64 << 32) as f64;
                let number = ((CHUNKS as f64).powf(even)) as u64;
                exact.used(number);
                demand.asked(SPACE, &[test_hash(number)], CHUNK, 1);
            }
            let curve = demand.curve();
            assert!(
                curve.followed < USES as u64 / 2,
                "a sample: {}",
                curve.followed
            );
            // A smaller cache has too few chunks of the sample.
            for chunks in [1024, 4096, 16_384] {
                let expected = exact.hit_ratio(chunks);
                let found = curve
                    .hit_ratio(chunks * CHUNK)
                    .expect("chunks were asked for");
                assert!(
                    (found - expected).abs() < 0.04,
                    "seed {seed}, {chunks} chunks: {found}, exactly {expected}"
                );
            }
        }
    }

    /// A sample of many more chunks than are followed stands for all of them.
    #[test]
    fn a_part_of_the_chunks_stands_for_all() {
        let demand = Demand::new(2);
        let chunks = 16 * FOLLOWED as u64;
        for _ in 0..3 {
            for number in 0..chunks {
                demand.asked(SPACE, &[test_hash(number)], CHUNK / 2, 2);
            }
        }
        let sample = demand.sample.lock();
        assert!(sample.chunks.len() <= FOLLOWED && sample.chunks.len() > FOLLOWED / 3);
        let all = chunks * CHUNK / 2;
        let curve = sample.curve();
        // Each is found when the cache has all of them, two times of three.
        let ratio = |bytes| curve.hit_ratio(bytes).expect("chunks were asked for");
        assert!(ratio(all / 2) < 0.02, "{}", ratio(all / 2));
        assert!(
            (ratio(all * 3 / 2) - 2.0 / 3.0).abs() < 0.05,
            "{}",
            ratio(all * 3 / 2)
        );
    }

    #[test]
    fn what_was_stored_is_found_when_it_is_first_asked_for() {
        let demand = Demand::new(3);
        demand.asked(SPACE, &[test_hash(0)], 4 * CHUNK, 4);
        demand.stored(SPACE, &test_hash(1), CHUNK);
        demand.stored(SPACE, &test_hash(0), CHUNK);
        demand.asked(SPACE, &[test_hash(0), test_hash(1)], 4 * CHUNK, 4);
        let curve = demand.curve();
        let ratio = |chunks: u64| {
            curve
                .hit_ratio(chunks * CHUNK)
                .expect("chunks were asked for")
        };
        assert!(
            ratio(4) < 0.01 && (ratio(8) - 2.0 / 3.0).abs() < 0.01,
            "{curve:?}"
        );
        assert_eq!(DemandCurve::default().hit_ratio(1), None);
    }
}
