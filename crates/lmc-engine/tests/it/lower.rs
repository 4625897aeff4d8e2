//! Tiers below DRAM: the chunks that are written and promoted, and tiers that fail.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{
    Faults, Faulty, Gated, Operation, Rng, block_on, check_value, fill_value, test_hash,
};
use lmc_backend::{Backend, MemoryBackend};
use lmc_engine::{
    Admission, CacheEngine, Cleared, EngineConfig, EngineContext, EngineHost, Host, InUse,
    Inserted, Leases, Lookup, LookupRequest, LowerStatus, LowerTier, OwnerId, Rank, StoreRequest,
    StoreStart, StoreTicket, TenantId, TierPolicy, WritePolicy,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::ArenaConfig;
use lmc_testkit::{DEADLINE, rounds, soon, until};

const CHUNK: u64 = 4096;
const TENANT: TenantId = TenantId(0);

/// A map behind a gate.
fn gated() -> Arc<Gated<MemoryBackend>> {
    Arc::new(Gated::new(MemoryBackend::default()))
}

fn engine_with(
    chunks: u64,
    lower: Arc<dyn Backend>,
    change: impl FnOnce(&mut EngineConfig, &mut TierPolicy),
) -> CacheEngine {
    let mut config = EngineConfig::default();
    config.shards = Some(2);
    config.high_watermark = 1.0;
    config.low_watermark = 1.0;
    let mut policy = TierPolicy::default();
    policy.write_queue_bytes = Some(chunks * CHUNK);
    change(&mut config, &mut policy);
    let arena = ArenaConfig::anonymous((chunks * CHUNK) as usize).build();
    let arena = Arc::new(arena.expect("memory"));
    let lower = LowerTier::new(lower, policy);
    config
        .start(EngineContext::new(arena, EngineHost::default()).with_tiers([lower]))
        .expect("a valid configuration")
}

fn engine(chunks: u64, lower: Arc<dyn Backend>) -> CacheEngine {
    engine_with(chunks, lower, |_, _| {})
}

const SPACE: SpaceId = SpaceId::new([7; 16]);

/// The key of a number, of rank 0.
fn key(number: u64) -> ChunkKey {
    ChunkKey {
        space: SPACE,
        kv_rank: 0,
        group: 0,
        hash: test_hash(number),
    }
}

fn keys(numbers: Range<u64>) -> Vec<ChunkKey> {
    numbers.map(key).collect()
}

/// A key without the clears in its name.
fn in_space(key: ChunkKey) -> ChunkKey {
    ChunkKey {
        space: SPACE,
        ..key
    }
}

fn clear(engine: &CacheEngine, in_use: InUse) -> Cleared {
    engine.clear(in_use).expect("a test clears a few times")
}

/// The chunks of one prompt.
fn requests(numbers: Range<u64>) -> Vec<StoreRequest> {
    let first = numbers.start;
    let request = |n: u64| StoreRequest {
        key: key(n),
        parent: (n > first).then(|| key(n - 1)),
        tenant: TENANT,
        len: CHUNK,
    };
    numbers.map(request).collect()
}

/// Begins to store the chunks of one prompt.
fn reserve(engine: &CacheEngine, numbers: Range<u64>) -> Vec<StoreTicket> {
    let requests = requests(numbers);
    let mut tickets = Vec::new();
    for reservation in engine.store(OwnerId(1), engine.clears_id(), &requests) {
        if let StoreStart::Reserved(mut ticket) = reservation {
            fill_value(&in_space(ticket.key()), ticket.bytes_mut());
            tickets.push(ticket);
        }
    }
    tickets
}

/// Stores the chunks of one prompt; how many were new.
fn write(engine: &CacheEngine, numbers: Range<u64>) -> usize {
    let inserted = engine.commit(reserve(engine, numbers));
    inserted.iter().filter(|i| **i == Inserted::New).count()
}

/// Begins to look a prompt up.
fn lookup(engine: &CacheEngine, owner: u64, keys: &[ChunkKey]) -> Lookup {
    let hashes = keys.iter().map(|key| key.hash).collect();
    let rank = Rank {
        space: SPACE,
        kv_rank: 0,
        chunk_bytes: None,
    };
    engine.lookup(LookupRequest::new(OwnerId(owner), hashes, vec![rank]))
}

/// Looks a prompt up on a thread of its own, and sends the leases of its leading chunks.
fn fetch(engine: &CacheEngine, owner: u64, keys: Vec<ChunkKey>) -> mpsc::Receiver<Leases> {
    let (sender, receiver) = mpsc::channel();
    let lookup = lookup(engine, owner, &keys);
    let none = engine
        .acquire(OwnerId(owner), engine.clears_id(), &[])
        .expect("no keys are there");
    thread::spawn(move || {
        let found = lookup.wait_blocking().into_leases();
        // The receiver may have given up.
        let _ = sender.send(found.unwrap_or(none));
    });
    receiver
}

fn fetched(engine: &CacheEngine, numbers: Range<u64>) -> Leases {
    let keys = keys(numbers);
    let leases = fetch(engine, 2, keys.clone());
    let leases = leases.recv_timeout(DEADLINE).expect("in time");
    for (slot, key) in leases.iter().zip(&keys) {
        check_value(key, slot.bytes()).expect("the bytes that were stored");
    }
    leases
}

/// Number of leading chunks in DRAM.
fn leading(engine: &CacheEngine, keys: &[ChunkKey]) -> usize {
    let there = |len: &usize| {
        engine
            .acquire(OwnerId(99), engine.clears_id(), &keys[..*len])
            .is_some()
    };
    (0..=keys.len()).rev().find(there).unwrap_or(0)
}

fn status(engine: &CacheEngine) -> LowerStatus {
    engine.lower_status().remove(0)
}

/// All that was committed so far is down.
fn settle(engine: &CacheEngine) {
    until("the tier has the copies", || {
        status(engine).queued_bytes == 0
    });
}

fn assert_idle(engine: &CacheEngine) {
    settle(engine);
    // A read that was cancelled gives its slots back on its own thread.
    until("every lease and slot is given back", || {
        let usage = engine.usage();
        (usage.leases, usage.reserved_slots) == (0, 0) && usage.used_bytes == usage.chunk_bytes
    });
}

#[test]
fn what_left_dram_comes_up_again_with_its_bytes() {
    let engine = engine(64, Arc::new(MemoryBackend::default()));
    assert_eq!(write(&engine, 0..10), 10);
    settle(&engine);
    assert_eq!((status(&engine).chunks, status(&engine).written), (10, 10));
    assert_eq!(engine.clear_dram(InUse::Remove), 10);
    assert_eq!(leading(&engine, &keys(0..12)), 0);

    assert_eq!(fetched(&engine, 0..12).len(), 10);
    assert_eq!(leading(&engine, &keys(0..12)), 10, "it is in DRAM now");
    let status = status(&engine);
    assert_eq!((status.promoted, status.promoted_bytes), (10, 10 * CHUNK));
    assert_eq!(status.written, 10, "what was promoted is not written again");
    assert_idle(&engine);
}

/// Returns all keys that the engine lists, some at a time.
fn listed(engine: &CacheEngine, at_once: usize) -> Vec<ChunkKey> {
    let (mut all, mut from) = (Vec::new(), Some(0));
    while let Some(at) = from {
        let (keys, next) = block_on(engine.host().list(at, at_once));
        assert!(keys.len() <= at_once);
        all.extend(keys);
        from = next;
    }
    all
}

#[test]
fn what_is_in_dram_and_in_lower_tiers_is_listed() {
    let engine = engine(64, Arc::new(MemoryBackend::default()));
    write(&engine, 0..12);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    write(&engine, 20..30);
    settle(&engine);
    for at_once in [1, 3, 7, 1000] {
        let listed = listed(&engine, at_once);
        assert_eq!(listed.len(), 10 + 22, "DRAM, then the lower tier");
        let there = |key: &ChunkKey| listed.contains(key);
        assert!(keys(0..12).iter().chain(&keys(20..30)).all(there));
    }
    clear(&engine, InUse::Remove);
    assert_eq!(listed(&engine, 5), []);
}

#[test]
fn a_prompt_that_is_half_in_dram_is_put_together() {
    let engine = engine(64, Arc::new(MemoryBackend::default()));
    write(&engine, 0..12);
    settle(&engine);
    // The head stays, a piece of the middle too.
    engine.pin(&keys(0..3));
    engine.pin(&keys(6..8));
    engine.clear_dram(InUse::Keep);
    assert_eq!(fetched(&engine, 0..12).len(), 12);
    assert_eq!(status(&engine).promoted, 7);
}

#[test]
fn two_who_ask_for_the_same_read_it_once() {
    let tier = Arc::new(Gated::new(MemoryBackend::shared()));
    // A quarter of the pool is for reads: both may read at a time.
    let engine = engine(128, Arc::clone(&tier) as _);
    write(&engine, 0..16);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    tier.shut();
    let first = fetch(&engine, 2, keys(0..16));
    until("the first reads", || tier.loads() == 16);
    let asked = tier.ended(Operation::Locate);
    let second = fetch(&engine, 3, keys(0..16));
    // The first chunk, and then the others.
    until("the second has found them", || {
        tier.ended(Operation::Locate) == asked + 2
    });
    // Longer than the 50 ms that a prompt waits for a worker that writes: no event shows that a
    // prompt goes on waiting.
    thread::sleep(Duration::from_millis(75));
    tier.open();
    for waits in [first, second] {
        assert_eq!(waits.recv_timeout(DEADLINE).expect("in time").len(), 16);
    }
    assert_eq!(tier.loads(), 16);
    assert_idle(&engine);
}

/// A worker prepared a store and did not commit: its process stopped, or its gather failed. The
/// chunks lie in a lower tier all the same. Every prompt used to wait for the worker until the
/// deadline, and then missed.
#[test]
fn an_uncommitted_store_delays_a_fetch_by_a_moment() {
    let tier = gated();
    let engine = engine_with(64, Arc::clone(&tier) as _, |config, _| {
        // A prompt that waited for it would not be answered within the test's deadline.
        config.promotion_timeout = 10 * DEADLINE;
    });
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    let uncommitted = reserve(&engine, 0..8);
    assert_eq!(uncommitted.len(), 8);
    let both = [2, 3].map(|owner| fetch(&engine, owner, keys(0..8)));
    for waits in both {
        assert_eq!(waits.recv_timeout(DEADLINE).expect("in time").len(), 8);
    }
    assert_eq!(tier.loads(), 8, "one reads for both");
    assert_eq!(engine.commit(uncommitted), [Inserted::Present; 8]);
    assert_eq!(fetched(&engine, 0..8).len(), 8);
    assert_idle(&engine);
}

#[test]
fn a_cancelled_fetch_ends_and_another_one_of_the_same_chunks_goes_on() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    tier.shut();
    let first = lookup(&engine, 2, &keys(0..8));
    until("the first reads", || tier.loads() == 8);
    let second = fetch(&engine, 3, keys(0..8));
    drop(first);
    tier.open();
    assert_eq!(second.recv_timeout(DEADLINE).expect("in time").len(), 8);
    assert_idle(&engine);
}

#[test]
fn a_stalled_tier_is_a_miss_after_the_deadline() {
    let tier = gated();
    let engine = engine_with(64, Arc::clone(&tier) as _, |config, _| {
        config.promotion_timeout = Duration::from_millis(300);
    });
    write(&engine, 0..8);
    settle(&engine);
    engine.pin(&keys(0..2));
    engine.clear_dram(InUse::Keep);
    tier.shut();
    assert_eq!(fetched(&engine, 0..8).len(), 2, "what DRAM has");
    assert_eq!(status(&engine).promote_failed, 6);
    let health = engine.health();
    assert_eq!((health[0].tier.as_str(), &health[0].fault), ("dram", &None));
    assert_eq!(health[1].fault.as_deref(), Some("the gate is shut"));
    tier.open();
    until("and a hit when it is over", || {
        fetched(&engine, 0..8).len() == 8
    });
    engine.unpin(&keys(0..2));
    assert_idle(&engine);
}

/// A peer that does not wait once had local chunks evicted for what it could not get.
#[test]
fn nothing_is_promoted_for_a_peer_after_its_deadline() {
    let engine = engine(8, Arc::new(MemoryBackend::default()));
    write(&engine, 0..8);
    settle(&engine);
    write(&engine, 8..16);
    settle(&engine);
    assert_eq!(leading(&engine, &keys(8..16)), 8);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let runtime = runtime.expect("a runtime");
    let lease = |deadline| runtime.block_on(engine.host().lease(&keys(0..2), deadline));
    assert!(lease(Instant::now()).iter().all(Option::is_none));
    assert_eq!(leading(&engine, &keys(8..16)), 8, "nothing was evicted");
    assert!(lease(Instant::now() + DEADLINE).iter().any(Option::is_some));
    assert_idle(&engine);
}

/// A chunk that was in use once outlived a clear as one of after it, for peers and for lower tiers.
#[test]
fn what_a_clear_leaves_in_dram_goes_to_no_peer_and_no_tier() {
    let engine = engine_with(64, Arc::new(MemoryBackend::default()), |_, policy| {
        policy.write = WritePolicy::Back;
    });
    write(&engine, 0..2);
    let before = engine.clears_id();
    let held = engine.acquire(OwnerId(7), before, &keys(0..1));
    let held = held.expect("it is there");
    let cleared = clear(&engine, InUse::Keep);
    assert_eq!((cleared.dram, cleared.leased), (1, 1), "{cleared:?}");
    assert!(engine.acquire(OwnerId(7), before, &keys(0..1)).is_some());
    assert_eq!(leading(&engine, &keys(0..1)), 0);
    let late = engine.store(OwnerId(7), before, &requests(20..21));
    assert!(matches!(late[..], [StoreStart::Cleared]), "{late:?}");
    assert_eq!(write(&engine, 0..2), 2, "computed after the clear");
    assert_eq!(engine.usage().chunks, 3);
    drop(held);
    until("the memory is given back", || engine.usage().chunks == 2);
    assert!(engine.acquire(OwnerId(7), before, &keys(0..1)).is_none());
    let held = engine.acquire(OwnerId(7), engine.clears_id(), &keys(0..2));
    assert_eq!(clear(&engine, InUse::Keep).leased, 2);
    assert!(engine.close(Instant::now() + DEADLINE).is_complete());
    assert_eq!(status(&engine).written, 0);
    drop(held);
}

#[test]
fn a_full_queue_drops_copies_and_never_a_store() {
    let tier = gated();
    let engine = engine_with(64, Arc::clone(&tier) as _, |_, policy| {
        policy.write_queue_bytes = Some(8 * CHUNK);
    });
    tier.shut();
    assert_eq!(write(&engine, 0..20), 20);
    assert_eq!(leading(&engine, &keys(0..20)), 20);
    assert_eq!(status(&engine).write_dropped, 12);
    assert_eq!(status(&engine).queued_bytes, 8 * CHUNK);
    tier.open();
    settle(&engine);
    assert_eq!(status(&engine).chunks, 8);
}

#[test]
fn a_pool_too_small_for_a_prompt_gives_its_head() {
    let engine = engine(16, Arc::new(MemoryBackend::default()));
    for part in 0..4 {
        write(&engine, part * 8..part * 8 + 8);
        settle(&engine);
    }
    assert_eq!(status(&engine).chunks, 32);
    let leases = fetched(&engine, 0..32);
    assert_eq!(leases.len(), 16, "as many as the pool holds");
    drop(leases);
    assert_idle(&engine);
}

#[test]
fn clearing_forgets_what_is_above_below_and_on_its_way() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    // Four are being read and four being copied when all is forgotten.
    tier.shut();
    let promoting = fetch(&engine, 2, keys(0..4));
    until("they are read", || tier.loads() == 4);
    write(&engine, 20..24);
    let open = {
        let (engine, tier) = (engine.clone(), Arc::clone(&tier));
        thread::spawn(move || {
            until("the tier is cleared", || status(&engine).chunks == 0);
            tier.open();
        })
    };
    let cleared = clear(&engine, InUse::Remove);
    open.join().expect("it only waits");
    assert_eq!(cleared.dram, 4);
    assert!(
        cleared.unconfirmed.is_empty() && cleared.lower >= 8,
        "{cleared:?}"
    );
    assert_eq!(promoting.recv_timeout(DEADLINE).expect("in time").len(), 0);
    settle(&engine);
    assert_eq!(leading(&engine, &keys(0..8)), 0);
    assert_eq!(
        fetched(&engine, 0..8).len() + fetched(&engine, 20..24).len(),
        0
    );
    assert_idle(&engine);
}

#[test]
fn nothing_comes_up_while_all_is_being_forgotten() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    // Writes that are under way, and a read.
    tier.shut();
    write(&engine, 20..24);
    until("they are written", || tier.stores() == 12);
    let promoting = fetch(&engine, 2, keys(0..8));
    until("they are read", || tier.loads() == 8);
    let cleared = clear(&engine, InUse::Remove);
    assert!(
        cleared.unconfirmed.is_empty() && cleared.lower == 8,
        "{cleared:?}"
    );
    let after = fetch(&engine, 3, keys(0..8));
    assert_eq!(after.recv_timeout(DEADLINE).expect("in time").len(), 0);
    tier.open();
    assert_eq!(promoting.recv_timeout(DEADLINE).expect("in time").len(), 0);
    settle(&engine);
    assert_eq!(leading(&engine, &keys(0..8)), 0);
    assert_eq!(fetched(&engine, 20..24).len(), 0);
    assert_idle(&engine);
}

#[test]
fn a_write_begun_before_a_clear_is_found_in_no_tier_after_it() {
    for write_policy in [WritePolicy::Through, WritePolicy::Back] {
        let lower = Arc::new(MemoryBackend::default());
        let engine = engine_with(64, lower, |_, policy| policy.write = write_policy);
        let begun = reserve(&engine, 0..4);
        clear(&engine, InUse::Keep);
        assert_eq!(engine.commit(begun), [Inserted::Cleared; 4]);
        settle(&engine);
        assert_eq!(leading(&engine, &keys(0..4)), 0);
        assert_eq!(fetched(&engine, 0..4).len(), 0);
        assert_eq!(write(&engine, 0..4), 4, "a write begun after it is");
        assert_eq!(leading(&engine, &keys(0..4)), 4);
        assert_idle(&engine);
    }
}

#[test]
fn removing_forgets_a_chunk_in_every_tier() {
    let engine = engine(64, Arc::new(MemoryBackend::default()));
    write(&engine, 0..4);
    settle(&engine);
    assert_eq!(engine.remove(&keys(1..2)).found, [true]);
    engine.clear_dram(InUse::Remove);
    assert_eq!(fetched(&engine, 0..4).len(), 1);
    assert_eq!(engine.remove(&keys(3..5)).found, [true, false]);
}

#[test]
fn a_removed_chunk_does_not_come_back_from_a_copy_on_its_way() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    tier.shut();
    write(&engine, 0..1);
    until("the copy is under way", || tier.stores() == 1);
    let open = {
        let tier = Arc::clone(&tier);
        thread::spawn(move || {
            until("the tier has removed what it has", || {
                tier.ended(Operation::Remove) == 1
            });
            tier.open();
        })
    };
    assert_eq!(engine.remove(&keys(0..1)).found, [true]);
    open.join().expect("it only waits");
    settle(&engine);
    assert_eq!(fetched(&engine, 0..1).len(), 0);
    assert_idle(&engine);
}

#[test]
fn written_back_is_what_the_watermark_evicts() {
    let engine = engine_with(32, Arc::new(MemoryBackend::default()), |config, policy| {
        policy.write = WritePolicy::Back;
        config.high_watermark = 0.75;
        config.low_watermark = 0.5;
        config.maintain_every = Duration::from_millis(1);
    });
    write(&engine, 0..16);
    settle(&engine);
    assert_eq!(status(&engine).chunks, 0, "nothing had to go");
    write(&engine, 16..30);
    until("it is evicted", || engine.usage().chunks == 16);
    settle(&engine);
    assert_eq!(status(&engine).chunks, 14);
    assert_eq!(fetched(&engine, 0..16).len(), 16);
}

#[test]
fn what_is_written_back_goes_down_at_a_close_too() {
    let write_back = |_: &mut EngineConfig, policy: &mut TierPolicy| {
        policy.write = WritePolicy::Back;
        // Memory for two at a time.
        policy.write_queue_bytes = Some(2 * CHUNK);
    };
    let engine = engine_with(32, Arc::new(MemoryBackend::default()), write_back);
    write(&engine, 0..24);
    let held = lookup(&engine, 2, &keys(0..4)).wait_blocking();
    let closed = engine.close(soon());
    assert!(closed.is_complete(), "{closed:?}");
    drop(held);
    let status = status(&engine);
    assert_eq!((status.written, status.write_dropped), (24, 0));
    // A tier that takes nothing does not keep a close beyond its deadline.
    let tier = gated();
    let engine = engine_with(32, Arc::clone(&tier) as _, write_back);
    write(&engine, 0..24);
    tier.shut();
    let closed = engine.close(Instant::now() + Duration::from_millis(100));
    tier.open();
    assert_eq!(closed.late, 24, "{closed:?}");
}

#[test]
fn an_engine_that_drains_takes_nothing_and_writes_back_what_it_holds() {
    let tier = gated();
    let engine = engine_with(32, Arc::clone(&tier) as _, |_, policy| {
        policy.write = WritePolicy::Back;
        policy.write_queue_bytes = Some(2 * CHUNK);
    });
    write(&engine, 0..12);
    let begun = reserve(&engine, 12..14);
    engine.write_back();
    assert_eq!(engine.unwritten_bytes(), 12 * CHUNK, "it does not drain");
    engine.begin_drain();
    let starts = engine.store(OwnerId(1), engine.clears_id(), &requests(20..22));
    assert!(
        starts
            .iter()
            .all(|start| matches!(start, StoreStart::Draining))
    );
    assert_eq!(engine.commit(begun).len(), 2, "it began before");
    assert_eq!(fetched(&engine, 0..14).len(), 14, "what is there is read");
    engine.write_back();
    until("all is written", || engine.unwritten_bytes() == 0);
    assert_eq!(
        (status(&engine).written, status(&engine).write_dropped),
        (14, 0)
    );
    engine.end_drain();
    assert_eq!(write(&engine, 20..22), 2);
    assert_eq!(engine.unwritten_bytes(), 16 * CHUNK);
    // A tier that takes nothing holds a drain up until it is cancelled.
    tier.shut();
    engine.begin_drain();
    let draining = engine.clone();
    let writer = thread::spawn(move || draining.write_back());
    until("it waits for the tier", || status(&engine).queued_bytes > 0);
    engine.end_drain();
    writer.join().expect("it ends");
    tier.open();
    settle(&engine);
}

#[test]
fn a_slow_tier_makes_memory_give_up_no_more_than_it_must() {
    let tier = gated();
    let engine = engine_with(32, Arc::clone(&tier) as _, |config, policy| {
        policy.write = WritePolicy::Back;
        config.high_watermark = 0.75;
        config.low_watermark = 0.5;
        config.maintain_every = Duration::from_millis(1);
    });
    tier.shut();
    write(&engine, 0..30);
    until("some are on their way down", || {
        tier.stores() > 0 && engine.usage().chunks <= 16
    });
    // Some twenty more checks of the watermarks, which no counter shows.
    thread::sleep(Duration::from_millis(20));
    assert_eq!(
        engine.usage().chunks,
        16,
        "the others keep their memory until they are down"
    );
    tier.open();
    settle(&engine);
    assert_eq!(status(&engine).chunks, 14);
}

#[test]
fn what_is_found_is_offered_again_where_a_tier_wants_it_twice() {
    let tier = gated();
    let engine = engine_with(32, Arc::clone(&tier) as _, |_, policy| {
        policy.admit = Admission::Reused(1);
        policy.write_queue_bytes = Some(2 * CHUNK);
    });
    write(&engine, 0..8);
    settle(&engine);
    assert_eq!((status(&engine).chunks, tier.stores()), (0, 0));
    let find = |number| drop(lookup(&engine, 2, &keys(number..number + 1)).wait_blocking());
    tier.shut();
    (0..8).for_each(find);
    tier.open();
    settle(&engine);
    assert_eq!(
        (status(&engine).chunks, status(&engine).write_dropped),
        (2, 6)
    );
    for number in 0..8 {
        find(number);
        settle(&engine);
    }
    assert_eq!(status(&engine).chunks, 8);
}

#[test]
fn a_tier_full_of_faults_costs_hits_and_nothing_else() {
    for seed in 0..8 {
        let tier = Faulty::new(MemoryBackend::default(), Faults::some(), seed);
        let engine = engine(24, Arc::new(tier));
        let mut rng = Rng::new(seed);
        for _ in 0..200 {
            let start = rng.below(6) * 8;
            let end = start + 1 + rng.below(8);
            match rng.below(8) {
                0..=3 => drop(write(&engine, start..end)),
                4..=6 => drop(fetched(&engine, start..end)),
                _ => drop(engine.clear_dram(InUse::Remove)),
            }
        }
        assert_idle(&engine);
    }
}

#[test]
fn an_engine_that_goes_leaves_no_one_waiting() {
    let tier = gated();
    let engine = engine_with(64, Arc::clone(&tier) as _, |config, _| {
        // A caller that waited for the tier would have no answer within the test's deadline.
        config.promotion_timeout = 10 * DEADLINE;
    });
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    tier.shut();
    let promoting = fetch(&engine, 2, keys(0..8));
    until("they are read", || tier.loads() == 8);
    write(&engine, 20..24);
    let closed = engine.close(Instant::now() + Duration::from_millis(50));
    assert_eq!((closed.late, closed.failed.len()), (4, 0), "{closed:?}");
    drop(engine);
    let found = promoting
        .recv_timeout(DEADLINE)
        .expect("it is answered at once");
    assert_eq!(found.len(), 0);
}

#[test]
fn what_comes_up_while_it_is_removed_is_not_found_afterwards() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..1);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    // A copy under way, of something else, keeps the removal waiting.
    tier.shut();
    write(&engine, 20..21);
    until("the copy is under way", || tier.stores() == 2);
    let removing = {
        let engine = engine.clone();
        thread::spawn(move || engine.remove(&keys(0..1)))
    };
    until("the removal waits for the copy", || {
        tier.ended(Operation::Remove) == 1
    });
    let promoting = fetch(&engine, 2, keys(0..1));
    let mut promoted = None;
    until("it is not found, or is read", || {
        promoted = promoting.try_recv().ok();
        promoted.is_some() || tier.loads() == 1
    });
    tier.open();
    let promoted = promoted.unwrap_or_else(|| promoting.recv_timeout(DEADLINE).expect("in time"));
    let promoted = promoted.len();
    removing.join().expect("it only waits");
    assert_eq!(
        (leading(&engine, &keys(0..1)), fetched(&engine, 0..1).len()),
        (0, 0),
        "removed, and back in DRAM; {promoted} were promoted"
    );
}

#[test]
fn removing_one_chunk_costs_other_prompts_nothing() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    write(&engine, 20..21);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    tier.shut();
    let promoting = fetch(&engine, 2, keys(0..8));
    until("it reads", || tier.loads() == 8);
    let removing = {
        let engine = engine.clone();
        thread::spawn(move || engine.remove(&keys(20..21)))
    };
    until("the tier has removed it", || {
        tier.ended(Operation::Remove) == 1
    });
    tier.open();
    assert!(removing.join().expect("it only waits").complete);
    assert_eq!(promoting.recv_timeout(DEADLINE).expect("in time").len(), 8);
}

#[test]
fn everything_at_once_ends_and_serves_right_bytes() {
    for (when, admit) in [
        (WritePolicy::Through, Admission::Always),
        (WritePolicy::Through, Admission::Reused(1)),
        (WritePolicy::Back, Admission::Always),
        (WritePolicy::Back, Admission::Reused(2)),
    ] {
        let engine = engine_with(32, Arc::new(MemoryBackend::default()), |config, policy| {
            (policy.write, policy.admit) = (when, admit);
            config.high_watermark = 0.8;
            config.low_watermark = 0.5;
            config.maintain_every = Duration::from_millis(1);
            config.promotion_timeout = Duration::from_millis(200);
        });
        let (sender, done) = mpsc::channel();
        for number in 0..6u64 {
            let (engine, sender) = (engine.clone(), sender.clone());
            thread::spawn(move || {
                let time = Duration::from_millis(rounds(200, 1000) as u64);
                let end = Instant::now() + time;
                let mut round = number;
                while Instant::now() < end {
                    round += 7;
                    let first = (round * 5) % 60;
                    match number {
                        0 => drop(clear(&engine, InUse::of_force(round % 2 == 0))),
                        1 => drop(engine.remove(&keys(first..first + 3))),
                        2 | 3 => drop(write(&engine, first..first + 6)),
                        _ => {
                            let keys = keys(first..first + 6);
                            let leases = fetch(&engine, number, keys.clone());
                            let leases = leases.recv_timeout(DEADLINE).expect("in time");
                            for (slot, key) in leases.iter().zip(&keys) {
                                check_value(key, slot.bytes()).expect("its bytes");
                            }
                        }
                    }
                }
                sender.send(number).expect("the receiver waits");
            });
        }
        for _ in 0..6 {
            done.recv_timeout(DEADLINE).expect("no deadlock");
        }
        until("all at rest", || engine.usage().leases == 0);
        assert_idle(&engine);
    }
}
