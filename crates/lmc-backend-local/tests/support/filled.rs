//! A tier with many small chunks.

use std::sync::Arc;

use lmc_backend_local::{LocalConfig, LocalTier, OwnerId, PolicyKind, TenantId, WriteStart};
use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};

use crate::counting_alloc::live;

/// Chunks of a prompt of 131,072 tokens.
pub(crate) const PROMPT: u64 = 512;
const LEN: u64 = 64;
/// Chunks that are written at a time.
const BATCH: usize = 16;

/// A key like any other, quickly: the digest is taken to be uniform.
pub(crate) fn key(n: u64) -> ChunkKey {
    let mut hash = [0; 32];
    let mut word = n;
    for part in hash.chunks_exact_mut(8) {
        word = (word ^ (word >> 30)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        word = (word ^ (word >> 27)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        part.copy_from_slice(&word.to_le_bytes());
    }
    ChunkKey {
        space: SpaceId::new([7; 16]),
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new(hash),
    }
}

/// The keys of a prompt.
pub(crate) fn prompt(number: u64) -> Vec<ChunkKey> {
    (number * PROMPT..(number + 1) * PROMPT).map(key).collect()
}

/// A tier with `chunks` chunks in prompts of 512, and the heap bytes of its index for each chunk.
/// The pool's memory is mapped and never touched.
pub(crate) fn filled(policy: PolicyKind, chunks: u64) -> (LocalTier, f64) {
    let arena = ArenaConfig::anonymous((chunks * LEN) as usize)
        .build()
        .expect("memory");
    let config = PoolConfig::default().with_align(LEN as usize);
    let pool = Pool::new(Arc::new(arena), config).expect("a valid alignment");
    // The pool's own table of slots is not the index's cost: it is all there before.
    let slots = (0..chunks).map(|_| pool.reserve(LEN).expect("the pool has as many"));
    drop(slots.collect::<Vec<_>>());
    let before = live();
    // The default of a small host. Each shard wastes 16 entries on average, which only counts
    // where there are few chunks for a shard.
    let config = LocalConfig::default().with_policy(policy).with_shards(8);
    let tier = config.build(pool, None).expect("a valid configuration");
    for start in (0..chunks).step_by(PROMPT as usize) {
        let chunk = |n: u64| {
            let started = tier.begin_write(OwnerId(0), TenantId(0), key(n), LEN);
            let Ok(WriteStart::Reserved(grant)) = started else {
                panic!("chunk {n}: {started:?}");
            };
            grant.written((n > start).then(|| key(n - 1)))
        };
        let end = (start + PROMPT).min(chunks);
        // In small batches: the marks of writes that have begun are not the index's cost.
        for first in (start..end).step_by(BATCH) {
            let numbers = first..(first + BATCH as u64).min(end);
            tier.commit(numbers.map(chunk).collect());
        }
    }
    let cost = (live() - before) as f64 / chunks as f64;
    assert_eq!(tier.usage().chunks, chunks);
    (tier, cost)
}
