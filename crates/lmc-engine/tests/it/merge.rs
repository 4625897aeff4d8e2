//! Chunks of an engine with two ranks, merged into chunks of an engine with one rank.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use lmc_backend::conformance::{Gated, Operation, fill_value, test_hash};
use lmc_backend::{Backend, MemoryBackend};
use lmc_engine::{
    CacheEngine, EngineConfig, EngineContext, EngineHost, Found, InUse, LeaseLimit, Lookup,
    LookupRequest, LowerTier, Merge, OwnerId, Rank, StoreRequest, StoreStart, TenantId, TierPolicy,
    TierRun, WritePolicy,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::ArenaConfig;
use lmc_testkit::until;

/// Bytes of a merged chunk, and of the part of each rank, of which `RUN` bytes lie together.
const CHUNK: u64 = 4096;
const PART: u64 = CHUNK / 2;
const RUN: u64 = 64;

const WHOLE: Rank = Rank {
    space: SpaceId::new([1; 16]),
    kv_rank: 0,
    chunk_bytes: Some(CHUNK),
};

fn part(kv_rank: u16) -> Rank {
    Rank {
        space: SpaceId::new([2; 16]),
        kv_rank,
        chunk_bytes: Some(PART),
    }
}

fn engine(chunks: u64, lower: &Arc<MemoryBackend>) -> CacheEngine {
    engine_on(chunks, Arc::clone(lower) as _)
}

fn engine_on(chunks: u64, lower: Arc<dyn Backend>) -> CacheEngine {
    let mut config = EngineConfig::default();
    config.shards = Some(1);
    config.high_watermark = 1.0;
    config.low_watermark = 1.0;
    let mut policy = TierPolicy::default();
    policy.write = WritePolicy::Through;
    policy.write_queue_bytes = Some(chunks * CHUNK);
    let arena = ArenaConfig::anonymous((chunks * CHUNK) as usize).build();
    let lower = LowerTier::new(lower, policy);
    config
        .start(
            EngineContext::new(Arc::new(arena.expect("memory")), EngineHost::default())
                .with_tiers([lower]),
        )
        .expect("an engine")
}

fn bytes(key: &ChunkKey, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill_value(key, &mut bytes);
    bytes
}

/// The chunk that the parts of a number make.
fn merged(number: u64) -> Vec<u8> {
    merged_of([part(0), part(1)], number)
}

fn merged_of(ranks: [Rank; 2], number: u64) -> Vec<u8> {
    let parts = ranks.map(|rank| bytes(&rank.key(test_hash(number)), PART));
    let mut whole = Vec::new();
    for at in (0..PART as usize).step_by(RUN as usize) {
        for part in &parts {
            whole.extend_from_slice(&part[at..at + RUN as usize]);
        }
    }
    whole
}

fn store(engine: &CacheEngine, rank: Rank, numbers: Range<u64>) {
    let len = rank.chunk_bytes.expect("a length");
    for number in numbers {
        let key = rank.key(test_hash(number));
        let request = StoreRequest {
            key,
            parent: None,
            tenant: TenantId(0),
            len,
        };
        let start = engine
            .store(OwnerId(1), engine.clears_id(), &[request])
            .pop();
        let Some(StoreStart::Reserved(mut ticket)) = start else {
            panic!("{start:?}");
        };
        ticket.bytes_mut().copy_from_slice(&bytes(&key, len));
        engine.commit(vec![ticket]);
    }
}

/// A tier with the parts of these chunks.
fn tier_with(parts: [Range<u64>; 2]) -> Arc<MemoryBackend> {
    let tier = Arc::new(MemoryBackend::shared());
    let writer = engine(64, &tier);
    let mut all = 0;
    for (rank, numbers) in parts.into_iter().enumerate() {
        all += numbers.end - numbers.start;
        store(&writer, part(rank as u16), numbers);
    }
    until("all parts are in the tier", || {
        writer.lower_status()[0].written == all
    });
    tier
}

fn merge(keep: bool) -> Merge {
    Merge {
        ranks: vec![part(0), part(1)],
        run_bytes: RUN,
        keep,
    }
}

fn begin(engine: &CacheEngine, numbers: Range<u64>, merge: Merge) -> Lookup {
    let hashes = numbers.map(test_hash).collect();
    let request = LookupRequest::new(OwnerId(2), hashes, vec![WHOLE]);
    engine.lookup(request.with_merges(vec![vec![merge]]))
}

fn find(engine: &CacheEngine, numbers: Range<u64>) -> Found {
    begin(engine, numbers, merge(false)).wait_blocking()
}

/// Checks the bytes of the chunks that were found, of which the first `own` were stored whole.
fn check(found: &Found, own: u64, hits: u64) {
    assert_eq!(found.hits as u64, hits);
    let leases = &found.ranks[0].leases;
    assert_eq!(leases.len() as u64, hits);
    for (number, slot) in (0..).zip(leases.iter()) {
        let expected = match number < own {
            true => bytes(&WHOLE.key(test_hash(number)), CHUNK),
            false => merged(number),
        };
        assert_eq!(slot.bytes(), expected, "chunk {number}");
    }
}

fn are_in_dram(engine: &CacheEngine, rank: Rank, numbers: Range<u64>) -> Vec<bool> {
    let keys: Vec<ChunkKey> = numbers.map(|n| rank.key(test_hash(n))).collect();
    engine.are_in_dram(engine.clears_id(), &keys)
}

fn run(tier: Option<usize>, chunks: usize) -> TierRun {
    TierRun { tier, chunks }
}

#[test]
fn parts_in_a_tier_make_whole_chunks() {
    let engine = engine(32, &tier_with([0..6, 0..6]));
    let found = find(&engine, 0..8);
    check(&found, 0, 6);
    assert_eq!(found.resident, 0);
    assert_eq!(found.runs(), [run(Some(0), 6)]);
    for rank in [0, 1] {
        assert_eq!(are_in_dram(&engine, part(rank), 0..6), [false; 6]);
    }
    // From now on they are there without their parts.
    let rank = LookupRequest::new(OwnerId(2), (0..6).map(test_hash).collect(), vec![WHOLE]);
    let again = engine.lookup(rank).try_found().expect("all in DRAM");
    check(&again, 0, 6);
    drop((found, again));
    assert_eq!(engine.leases(), 0);
}

#[test]
fn a_chunk_counts_if_every_rank_has_its_part() {
    let engine = engine(32, &tier_with([0..6, 0..3]));
    let found = find(&engine, 0..6);
    check(&found, 0, 3);
    let missing = found.missing.as_ref().expect("there are three more");
    assert_eq!((missing.rank, missing.hash), (WHOLE, test_hash(3)));
    drop(found);
    assert_eq!(engine.leases(), 0);
}

#[test]
fn whole_chunks_are_taken_before_parts() {
    let engine = engine(32, &tier_with([0..6, 0..6]));
    store(&engine, WHOLE, 0..2);
    let found = find(&engine, 0..6);
    check(&found, 2, 6);
    assert!(found.missing.is_none());
    assert_eq!(found.resident, 2);
    assert_eq!(found.runs(), [run(None, 2), run(Some(0), 4)]);
}

#[test]
fn parts_of_engines_of_this_host_stay() {
    let tier = Arc::new(MemoryBackend::shared());
    let engine = engine(32, &tier);
    for rank in [0, 1] {
        store(&engine, part(rank), 0..4);
    }
    let found = begin(&engine, 0..4, merge(true)).wait_blocking();
    check(&found, 0, 4);
    assert_eq!((found.resident, found.runs()), (4, vec![run(None, 4)]));
    for rank in [0, 1] {
        assert_eq!(are_in_dram(&engine, part(rank), 0..4), [true; 4]);
    }
}

#[test]
fn parts_of_another_length_are_misses() {
    let engine = engine(32, &tier_with([0..4, 0..4]));
    let of_length = |len| {
        let mut merge = merge(false);
        for rank in &mut merge.ranks {
            rank.chunk_bytes = Some(len);
        }
        merge
    };
    check(
        &begin(&engine, 0..4, of_length(PART / 2)).wait_blocking(),
        0,
        0,
    );
    // Nor are they merged in runs that do not fit.
    let runs = Merge {
        run_bytes: 48,
        ..merge(false)
    };
    check(&begin(&engine, 0..4, runs).wait_blocking(), 0, 0);
    assert_eq!(engine.leases(), 0);
    check(&find(&engine, 0..4), 0, 4);
}

#[test]
fn nothing_from_before_a_clear_is_merged() {
    let engine = engine(32, &tier_with([0..4, 0..4]));
    engine.clear(InUse::Remove).expect("a clear");
    check(&find(&engine, 0..4), 0, 0);
    for rank in [0, 1] {
        store(&engine, part(rank), 0..2);
    }
    check(&find(&engine, 0..4), 0, 2);
}

#[test]
fn a_pool_that_is_too_small_gives_what_fits() {
    let tier = tier_with([0..12, 0..12]);
    let small = engine(4, &tier);
    let found = find(&small, 0..12);
    assert!((1..4).contains(&found.hits), "{}", found.hits);
    check(&found, 0, found.hits as u64);
    drop(found);
    assert_eq!(small.leases(), 0);
}

#[test]
fn lookups_of_one_prompt_at_once_all_find_it() {
    let engine = engine(64, &tier_with([0..8, 0..8]));
    let lookups: Vec<Lookup> = (0..6).map(|_| begin(&engine, 0..8, merge(false))).collect();
    let wait = |lookup: Lookup| thread::spawn(move || lookup.wait_blocking());
    let waiting: Vec<_> = lookups.into_iter().map(wait).collect();
    for found in waiting {
        let found = found.join().expect("no panic");
        check(&found, 0, 8);
    }
    check(&find(&engine, 0..8), 0, 8);
    assert_eq!(engine.leases(), 0);
    assert_eq!(engine.stats().merged, 8, "each is merged once");
}

#[test]
fn a_lookup_that_is_dropped_holds_nothing() {
    let engine = engine(64, &tier_with([0..32, 0..32]));
    for _ in 0..20 {
        drop(begin(&engine, 0..32, merge(false)));
    }
    until("all leases are given back", || engine.leases() == 0);
}

#[test]
fn a_clear_while_the_parts_are_read_leaves_nothing() {
    let tier = Arc::new(Gated::new(MemoryBackend::shared()));
    let writer = engine_on(64, Arc::clone(&tier) as _);
    for rank in [0, 1] {
        store(&writer, part(rank), 0..4);
    }
    until("all parts are in the tier", || {
        writer.lower_status()[0].written == 8
    });
    let engine = engine_on(32, Arc::clone(&tier) as _);
    tier.hold(Operation::Load);
    let lookup = begin(&engine, 0..4, merge(false));
    until("a part is being read", || tier.loads() > 0);
    let clearing = {
        let engine = engine.clone();
        thread::spawn(move || engine.clear(InUse::Remove).expect("a clear"))
    };
    until("the clear is under way", || {
        engine.clears_id() != lookup.clears()
    });
    tier.release(Operation::Load);
    clearing.join().expect("no panic");
    check(&lookup.wait_blocking(), 0, 0);
    assert_eq!(are_in_dram(&engine, WHOLE, 0..4), [false; 4]);
    assert_eq!(engine.stats().merged, 0);
}

#[test]
fn two_ranks_of_a_prompt_are_merged_of_two_each() {
    let tier = Arc::new(MemoryBackend::shared());
    let writer = engine(64, &tier);
    for rank in 0..4 {
        store(&writer, part(rank), 0..3);
    }
    until("all parts are in the tier", || {
        writer.lower_status()[0].written == 12
    });
    let engine = engine(64, &tier);
    let whole = [0, 1].map(|kv_rank| Rank { kv_rank, ..WHOLE });
    let merges = [0, 1].map(|rank| Merge {
        ranks: vec![part(2 * rank), part(2 * rank + 1)],
        ..merge(false)
    });
    let hashes = (0..3).map(test_hash).collect();
    let request = LookupRequest::new(OwnerId(2), hashes, whole.to_vec());
    let found = engine.lookup(request.with_merges(vec![merges.to_vec()]));
    let found = found.wait_blocking();
    assert_eq!(found.hits, 3);
    for (rank, found) in found.ranks.iter().enumerate() {
        for (number, slot) in (0..).zip(found.leases.iter()) {
            let parts = [0, 1].map(|n| part(2 * rank as u16 + n));
            assert_eq!(slot.bytes(), merged_of(parts, number), "rank {rank}");
        }
    }
}

#[test]
fn a_merge_that_names_too_few_ranks_is_none() {
    let engine = engine(32, &tier_with([0..4, 0..4]));
    let one = Merge {
        ranks: vec![part(0)],
        ..merge(false)
    };
    check(&begin(&engine, 0..4, one).wait_blocking(), 0, 0);
    let hashes = (0..4).map(test_hash).collect();
    let request = LookupRequest::new(OwnerId(2), hashes, vec![WHOLE]);
    let none = engine.lookup(request.with_merges(vec![vec![]]));
    check(&none.wait_blocking(), 0, 0);
    assert_eq!((engine.leases(), engine.stats().merged), (0, 0));
}

#[test]
fn a_limit_of_leases_holds_for_merged_chunks() {
    #[derive(Debug)]
    struct Two;
    impl LeaseLimit for Two {
        fn allowed(&self, leased: u64, more: u64) -> u64 {
            (leased + more).min(2 * CHUNK)
        }
    }
    let engine = engine(32, &tier_with([0..6, 0..6]));
    let look_up = || {
        let hashes = (0..8).map(test_hash).collect();
        let request = LookupRequest::new(OwnerId(2), hashes, vec![WHOLE]);
        let request = request.with_limit(Arc::new(Two));
        let lookup = engine.lookup(request.with_merges(vec![vec![merge(false)]]));
        lookup.wait_blocking()
    };
    check(&look_up(), 0, 2);
    check(&find(&engine, 0..6), 0, 6);
    // The others are in DRAM by now, and leased no more for that.
    check(&look_up(), 0, 2);
}
