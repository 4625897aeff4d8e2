//! The full identity of stored bytes, for comparison, indexes and disk.

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};

use crate::{ChunkHash, SpaceId};

/// The full identity of a stored chunk: the meaning of its bytes, the rank that holds them, and their tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkKey {
    /// Model, layout, world size, salt and hash algorithm, combined with the clears before the chunk's
    /// computation ([`SpaceId::after`]).
    pub space: SpaceId,
    /// KV rank that holds this part of the chunk.
    pub kv_rank: u16,
    /// Object group: models with several kinds of KV cache have one object for each kind.
    pub group: u16,
    /// Hash of the chunk and everything before it.
    pub hash: ChunkHash,
}

impl ChunkKey {
    /// Length of [`to_bytes`](Self::to_bytes).
    pub const BYTES: usize = 16 + 2 + 2 + 32;

    /// Returns the fixed layout for disk and wire: space (16), rank (2, big-endian), group (2, big-endian),
    /// hash (32). The bytes compare in the same order as the keys.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(self.space.as_bytes());
        bytes[16..18].copy_from_slice(&self.kv_rank.to_be_bytes());
        bytes[18..20].copy_from_slice(&self.group.to_be_bytes());
        bytes[20..].copy_from_slice(self.hash.as_bytes());
        bytes
    }

    /// Reads the bytes of [`to_bytes`](Self::to_bytes). Any 52 bytes are a valid key.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            space: SpaceId::new(part(bytes, 0)),
            kv_rank: u16::from_be_bytes(part(bytes, 16)),
            group: u16::from_be_bytes(part(bytes, 18)),
            hash: ChunkHash::new(part(bytes, 20)),
        }
    }

    /// Returns all fields mixed into 64 uniformly distributed bits, in a few cycles. A shard and a table may
    /// both be chosen by it if they use different bits.
    ///
    /// Digests are uniform already; the mixing only has to separate keys that differ in nothing but rank,
    /// group or space. Stable across processes of one version, but not a file format.
    #[inline]
    pub fn fold(&self) -> u64 {
        let space = u64::from_le_bytes(part(self.space.as_bytes(), 0));
        let rank_and_group = u64::from(self.kv_rank) << 16 | u64::from(self.group);
        let mixed = self.hash.prefix_u64()
            ^ space.rotate_left(32)
            ^ rank_and_group.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let wide = u128::from(mixed ^ 0xa076_1d64_78bd_642f) * 0xe703_7ed1_a0b4_28db;
        wide as u64 ^ (wide >> 64) as u64
    }
}

#[inline]
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..]
        .first_chunk()
        .expect("callers stay within fixed arrays")
}

impl Hash for ChunkKey {
    /// Passes [`fold`](Self::fold), one `u64`, to the hasher.
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.fold());
    }
}

impl fmt::Display for ChunkKey {
    /// Shows the first bytes of each field, for logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (space, hash) = (self.space.to_string(), self.hash.to_string());
        write!(
            f,
            "{}:{}.{}:{}",
            &space[..8],
            self.kv_rank,
            self.group,
            &hash[..16]
        )
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ChunkKey({}:{}.{}:{})",
            self.space, self.kv_rank, self.group, self.hash
        )
    }
}

/// A [`BuildHasher`] for tables keyed by [`ChunkKey`]: passes [`ChunkKey::fold`] through.
#[derive(Clone, Copy, Debug, Default)]
pub struct FoldState;

/// The hasher of [`FoldState`].
#[derive(Clone, Copy, Debug, Default)]
pub struct FoldHasher(u64);

impl BuildHasher for FoldState {
    type Hasher = FoldHasher;

    #[inline]
    fn build_hasher(&self) -> FoldHasher {
        FoldHasher(0)
    }
}

impl Hasher for FoldHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.0 = self.0.rotate_left(29) ^ value;
    }

    /// Hashes other keys than [`ChunkKey`] too, but slowly.
    fn write(&mut self, bytes: &[u8]) {
        self.write_u64(xxhash_rust::xxh3::xxh3_64(bytes));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(seed: u8) -> ChunkKey {
        ChunkKey {
            space: SpaceId::new([seed; 16]),
            kv_rank: 0x0102,
            group: 0x0304,
            hash: ChunkHash::new(std::array::from_fn(|i| seed ^ i as u8)),
        }
    }

    #[test]
    fn bytes_have_a_fixed_layout() {
        assert_eq!(size_of::<ChunkKey>(), ChunkKey::BYTES);
        let key = key(7);
        let bytes = key.to_bytes();
        assert_eq!(bytes[..16], [7; 16]);
        assert_eq!(bytes[16..20], [1, 2, 3, 4]);
        assert_eq!(&bytes[20..], key.hash.as_bytes());
        assert_eq!(ChunkKey::from_bytes(&bytes), key);
    }

    #[test]
    fn bytes_compare_as_keys_do() {
        let rank = |kv_rank| ChunkKey { kv_rank, ..key(7) };
        let mut keys = [key(9), rank(256), rank(255), rank(1), key(3)];
        let mut bytes: Vec<_> = keys.iter().map(ChunkKey::to_bytes).collect();
        keys.sort();
        bytes.sort();
        assert_eq!(
            keys.iter().map(ChunkKey::to_bytes).collect::<Vec<_>>(),
            bytes
        );
    }

    #[test]
    fn fold_takes_every_field_and_spreads_both_ends() {
        // The worst case: one chunk hash over many ranks, groups and spaces.
        let mut low = HashSet::new();
        let mut high = HashSet::new();
        for seed in 0..16 {
            for kv_rank in 0..16 {
                for group in 0..16 {
                    let space = SpaceId::new([seed; 16]);
                    let fold = ChunkKey {
                        space,
                        kv_rank,
                        group,
                        ..key(7)
                    }
                    .fold();
                    low.insert(fold & 0xffff);
                    high.insert(fold >> 48);
                }
            }
        }
        // 4,096 keys thrown into 65,536 buckets fall into 3,971 of them on average.
        assert!(low.len() > 3_850, "{}", low.len());
        assert!(high.len() > 3_850, "{}", high.len());
    }

    #[test]
    fn tables_work_with_the_passing_hasher() {
        let mut table = HashSet::with_hasher(FoldState);
        assert!((0..=255).all(|seed| table.insert(key(seed))));
        assert!((0..=255).all(|seed| table.contains(&key(seed))));
        let mut other = HashSet::with_hasher(FoldState);
        assert!(other.insert("text") && other.contains("text") && !other.contains("tex"));
    }
}
