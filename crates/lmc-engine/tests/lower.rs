//! Tiers below DRAM: what goes down, what comes up, and what a bad tier does to neither.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{Faults, Faulty, Gated, Rng, check_value, fill_value, test_key};
use lmc_backend::{Backend, MemoryBackend};
use lmc_engine::{
    CacheEngine, CopyDown, EngineConfig, Inserted, Leases, LowerStatus, OwnerId, Reservation,
    TenantId, WriteRequest, WriteTicket,
};
use lmc_key::ChunkKey;
use lmc_memory::ArenaConfig;

const CHUNK: u64 = 4096;
const NOBODY: TenantId = TenantId(0);
const PATIENCE: Duration = Duration::from_secs(20);

/// A map behind a gate.
fn gated() -> Arc<Gated<MemoryBackend>> {
    Arc::new(Gated::new(MemoryBackend::default()))
}

fn engine_with(
    chunks: u64,
    lower: Arc<dyn Backend>,
    change: impl FnOnce(&mut EngineConfig),
) -> CacheEngine {
    let mut config = EngineConfig::default();
    config.shards = Some(2);
    config.high_watermark = 1.0;
    config.low_watermark = 1.0;
    config.copy_queue_bytes = Some(chunks * CHUNK);
    change(&mut config);
    let arena = ArenaConfig::anonymous((chunks * CHUNK) as usize).build();
    let arena = Arc::new(arena.expect("memory"));
    CacheEngine::with_tiers(config, arena, vec![lower]).expect("a valid configuration")
}

fn engine(chunks: u64, lower: Arc<dyn Backend>) -> CacheEngine {
    engine_with(chunks, lower, |_| {})
}

fn keys(numbers: Range<u64>) -> Vec<ChunkKey> {
    numbers.map(test_key).collect()
}

/// Begins to store the chunks of one prompt.
fn reserve(engine: &CacheEngine, numbers: Range<u64>) -> Vec<WriteTicket> {
    let first = numbers.start;
    let request = |n: u64| WriteRequest {
        key: test_key(n),
        parent: (n > first).then(|| test_key(n - 1)),
        tenant: NOBODY,
        len: CHUNK,
    };
    let requests: Vec<_> = numbers.map(request).collect();
    let mut tickets = Vec::new();
    for reservation in engine.reserve(OwnerId(1), &requests) {
        if let Reservation::Reserved(mut ticket) = reservation {
            let key = ticket.key();
            fill_value(&key, ticket.bytes_mut());
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

/// What a request does: looks up, and waits for what comes up.
fn fetch(engine: &CacheEngine, owner: u64, keys: Vec<ChunkKey>) -> mpsc::Receiver<Leases> {
    let held = engine.lookup(OwnerId(owner), &keys);
    let below = engine.below(&keys[held.len()..]);
    let (sender, receiver) = mpsc::channel();
    engine.fetch(NOBODY, keys, held, below, move |leases| {
        sender.send(leases).expect("the receiver waits");
    });
    receiver
}

fn fetched(engine: &CacheEngine, numbers: Range<u64>) -> Leases {
    let keys = keys(numbers);
    let leases = fetch(engine, 2, keys.clone());
    let leases = leases.recv_timeout(PATIENCE).expect("in time");
    for (slot, key) in leases.iter().zip(&keys) {
        check_value(key, slot.bytes()).expect("the bytes that were stored");
    }
    leases
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn status(engine: &CacheEngine) -> LowerStatus {
    engine.lower().remove(0)
}

/// All that was committed so far is down.
fn settle(engine: &CacheEngine) {
    until("copies go down", || status(engine).queued_bytes == 0);
}

fn assert_idle(engine: &CacheEngine) {
    settle(engine);
    let usage = engine.usage();
    assert_eq!((usage.leases, usage.reserved_slots), (0, 0));
    assert_eq!(usage.used_bytes, usage.chunk_bytes, "no slot is lost");
}

#[test]
fn what_left_dram_comes_up_again_with_its_bytes() {
    let engine = engine(64, Arc::new(MemoryBackend::default()));
    assert_eq!(write(&engine, 0..10), 10);
    settle(&engine);
    assert_eq!((status(&engine).chunks, status(&engine).copied), (10, 10));
    assert_eq!(engine.clear_dram(true), 10);
    assert_eq!(engine.leading(&keys(0..12)), 0);
    assert_eq!(engine.below(&keys(0..12)).len(), 10);

    assert_eq!(fetched(&engine, 0..12).len(), 10);
    assert_eq!(engine.leading(&keys(0..12)), 10, "it is in DRAM now");
    let status = status(&engine);
    assert_eq!((status.fetched, status.fetched_bytes), (10, 10 * CHUNK));
    assert_eq!(status.copied, 10, "what came up is not copied down again");
    assert_idle(&engine);
}

#[test]
fn a_prompt_that_is_half_in_dram_is_put_together() {
    let engine = engine(64, Arc::new(MemoryBackend::default()));
    write(&engine, 0..12);
    settle(&engine);
    // The head stays, a piece of the middle too.
    engine.pin(&keys(0..3));
    engine.pin(&keys(6..8));
    engine.clear_dram(false);
    assert_eq!(fetched(&engine, 0..12).len(), 12);
    assert_eq!(status(&engine).fetched, 7);
}

#[test]
fn two_who_ask_for_the_same_read_it_once() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..16);
    settle(&engine);
    engine.clear_dram(true);
    tier.shut();
    let first = fetch(&engine, 2, keys(0..16));
    until("the first reads", || tier.loads() == 16);
    let second = fetch(&engine, 3, keys(0..16));
    // Longer than a fetch waits for a worker that writes.
    thread::sleep(Duration::from_millis(150));
    tier.open();
    for waits in [first, second] {
        assert_eq!(waits.recv_timeout(PATIENCE).expect("in time").len(), 16);
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
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(true);
    let uncommitted = reserve(&engine, 0..8);
    assert_eq!(uncommitted.len(), 8);
    let asked = Instant::now();
    let both = [2, 3].map(|owner| fetch(&engine, owner, keys(0..8)));
    for waits in both {
        assert_eq!(waits.recv_timeout(PATIENCE).expect("in time").len(), 8);
    }
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "{:?}",
        asked.elapsed()
    );
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
    engine.clear_dram(true);
    tier.shut();
    let held = engine.lookup(OwnerId(2), &keys(0..8));
    let below = engine.below(&keys(0..8));
    let (sender, done) = mpsc::channel();
    let first = engine.fetch(NOBODY, keys(0..8), held, below, move |leases| {
        sender.send(leases).expect("the receiver waits");
    });
    until("the first reads", || tier.loads() == 8);
    let second = fetch(&engine, 3, keys(0..8));
    first.cancel();
    let ended = done.recv_timeout(PATIENCE);
    assert!(matches!(ended, Err(mpsc::RecvTimeoutError::Disconnected)));
    tier.open();
    assert_eq!(second.recv_timeout(PATIENCE).expect("in time").len(), 8);
    first.cancel();
    assert_idle(&engine);
}

#[test]
fn a_stalled_tier_is_a_miss_after_the_deadline() {
    let tier = gated();
    let engine = engine_with(64, Arc::clone(&tier) as _, |config| {
        config.fetch_deadline = Duration::from_millis(50);
    });
    write(&engine, 0..8);
    settle(&engine);
    engine.pin(&keys(0..2));
    engine.clear_dram(false);
    tier.shut();
    assert_eq!(fetched(&engine, 0..8).len(), 2, "what DRAM has");
    assert_eq!(status(&engine).fetch_failed, 6);
    let health = engine.health();
    assert_eq!((health[0].tier.as_str(), &health[0].fault), ("dram", &None));
    assert_eq!(health[1].fault.as_deref(), Some("the gate is shut"));
    tier.open();
    assert_eq!(fetched(&engine, 0..8).len(), 8, "and a hit when it is over");
    engine.unpin(&keys(0..2));
    assert_idle(&engine);
}

#[test]
fn a_full_queue_drops_copies_and_never_a_store() {
    let tier = gated();
    let engine = engine_with(64, Arc::clone(&tier) as _, |config| {
        config.copy_queue_bytes = Some(8 * CHUNK);
    });
    tier.shut();
    assert_eq!(write(&engine, 0..20), 20);
    assert_eq!(engine.leading(&keys(0..20)), 20);
    assert_eq!(status(&engine).dropped, 12);
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
    assert_eq!(engine.below(&keys(0..32)).len(), 32);
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
    engine.clear_dram(true);
    // Four are being read and four being copied when all is forgotten.
    tier.shut();
    let rising = fetch(&engine, 2, keys(0..4));
    until("they are read", || tier.loads() == 4);
    write(&engine, 20..24);
    let open = {
        let tier = Arc::clone(&tier);
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            tier.open();
        })
    };
    let cleared = engine.clear(true);
    open.join().expect("it only waits");
    assert_eq!(cleared.dram, 4);
    assert!(cleared.complete && cleared.below >= 8, "{cleared:?}");
    assert_eq!(rising.recv_timeout(PATIENCE).expect("in time").len(), 0);
    settle(&engine);
    assert_eq!(engine.leading(&keys(0..8)), 0);
    assert!(engine.below(&keys(0..8)).is_empty() && engine.below(&keys(20..24)).is_empty());
    assert_idle(&engine);
}

#[test]
fn nothing_comes_up_while_all_is_being_forgotten() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(true);
    // A copy under way keeps the clear from emptying the tier for a while.
    tier.shut();
    write(&engine, 20..24);
    until("they are copied", || tier.stores() == 12);
    let clearing = {
        let engine = engine.clone();
        thread::spawn(move || engine.clear(true))
    };
    until("the clear has begun", || {
        engine.below(&keys(0..8)).is_empty()
    });
    let rising = fetch(&engine, 2, keys(0..8));
    tier.open();
    assert_eq!(rising.recv_timeout(PATIENCE).expect("in time").len(), 0);
    assert!(clearing.join().expect("it only waits").complete);
    assert_eq!(engine.leading(&keys(0..8)), 0);
    assert_idle(&engine);
}

#[test]
fn a_write_begun_before_a_clear_is_found_in_no_tier_after_it() {
    for copy_down in [CopyDown::OnCommit, CopyDown::OnEviction] {
        let lower = Arc::new(MemoryBackend::default());
        let engine = engine_with(64, lower, |config| config.copy_down = copy_down);
        let begun = reserve(&engine, 0..4);
        engine.clear(false);
        assert_eq!(engine.commit(begun), [Inserted::Cleared; 4]);
        settle(&engine);
        assert_eq!(engine.leading(&keys(0..4)), 0);
        assert!(engine.below(&keys(0..4)).is_empty());
        assert_eq!(write(&engine, 0..4), 4, "a write begun after it is");
        assert_eq!(engine.leading(&keys(0..4)), 4);
        assert_idle(&engine);
    }
}

#[test]
fn removing_forgets_a_chunk_in_every_tier() {
    let engine = engine(64, Arc::new(MemoryBackend::default()));
    write(&engine, 0..4);
    settle(&engine);
    assert_eq!(engine.remove(&keys(1..2)).found, [true]);
    engine.clear_dram(true);
    assert_eq!(engine.below(&keys(0..4)).len(), 1);
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
            thread::sleep(Duration::from_millis(50));
            tier.open();
        })
    };
    assert_eq!(engine.remove(&keys(0..1)).found, [true]);
    open.join().expect("it only waits");
    settle(&engine);
    assert!(engine.below(&keys(0..1)).is_empty());
    assert_idle(&engine);
}

#[test]
fn written_back_is_what_the_watermark_evicts() {
    let engine = engine_with(32, Arc::new(MemoryBackend::default()), |config| {
        config.copy_down = CopyDown::OnEviction;
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
    let write_back = |config: &mut EngineConfig| {
        config.copy_down = CopyDown::OnEviction;
        // Room for two at a time.
        config.copy_queue_bytes = Some(2 * CHUNK);
    };
    let engine = engine_with(32, Arc::new(MemoryBackend::default()), write_back);
    write(&engine, 0..24);
    let held = engine.lookup(OwnerId(2), &keys(0..4));
    let failed = engine.close(Instant::now() + Duration::from_secs(20));
    assert!(failed.is_empty(), "{failed:?}");
    drop(held);
    let status = status(&engine);
    assert_eq!((status.copied, status.dropped), (24, 0));
    // A tier that takes nothing does not keep a close beyond its deadline.
    let tier = gated();
    let engine = engine_with(32, Arc::clone(&tier) as _, write_back);
    write(&engine, 0..24);
    tier.shut();
    let begun = Instant::now();
    let failed = engine.close(begun + Duration::from_millis(100));
    assert!(begun.elapsed() < Duration::from_secs(10));
    tier.open();
    let told = failed.iter().find(|(what, _)| what == "memory");
    let (_, why) = told.expect("what was left behind is told");
    assert!(
        why.starts_with("24 chunks were not written for want of time"),
        "{why}"
    );
}

#[test]
fn a_slow_tier_makes_memory_give_up_no_more_than_it_must() {
    let tier = gated();
    let engine = engine_with(32, Arc::clone(&tier) as _, |config| {
        config.copy_down = CopyDown::OnEviction;
        config.high_watermark = 0.75;
        config.low_watermark = 0.5;
        config.maintain_every = Duration::from_millis(1);
    });
    tier.shut();
    write(&engine, 0..30);
    until("some are on their way down", || tier.stores() > 0);
    thread::sleep(Duration::from_millis(50));
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
    let engine = engine_with(32, Arc::clone(&tier) as _, |config| {
        config.copy_down = CopyDown::OnCommitAndHit;
        config.copy_queue_bytes = Some(2 * CHUNK);
    });
    tier.shut();
    write(&engine, 0..8);
    tier.open();
    settle(&engine);
    assert_eq!((status(&engine).chunks, status(&engine).dropped), (2, 6));
    for n in 0..8 {
        drop(engine.lookup(OwnerId(2), &keys(n..n + 1)));
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
                _ => drop(engine.clear_dram(true)),
            }
        }
        assert_idle(&engine);
    }
}

#[test]
fn an_engine_that_goes_leaves_no_one_waiting() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    settle(&engine);
    engine.clear_dram(true);
    tier.shut();
    let rising = fetch(&engine, 2, keys(0..8));
    until("they are read", || tier.loads() == 8);
    write(&engine, 20..24);
    let begun = Instant::now();
    let told = engine.close(begun + Duration::from_millis(50));
    let [(what, why)] = &told[..] else {
        panic!("{told:?}");
    };
    assert!(what == "memory" && why.starts_with("4 chunks were not written"));
    drop(engine);
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(rising.recv_timeout(PATIENCE).is_err(), "nobody will call");
}

#[test]
fn what_comes_up_while_it_is_removed_is_not_found_afterwards() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..1);
    settle(&engine);
    engine.clear_dram(true);
    // A copy under way, of something else, keeps the removal waiting.
    tier.shut();
    write(&engine, 20..21);
    until("the copy is under way", || tier.stores() == 2);
    let removing = {
        let engine = engine.clone();
        thread::spawn(move || engine.remove(&keys(0..1)))
    };
    thread::sleep(Duration::from_millis(100));
    let rising = fetch(&engine, 2, keys(0..1));
    thread::sleep(Duration::from_millis(100));
    tier.open();
    let came_up = rising.recv_timeout(PATIENCE).expect("in time").len();
    removing.join().expect("it only waits");
    assert_eq!(
        (engine.leading(&keys(0..1)), engine.below(&keys(0..1)).len()),
        (0, 0),
        "removed, and back in DRAM; {came_up} came up"
    );
}

#[test]
fn removing_one_chunk_costs_other_prompts_nothing() {
    let tier = gated();
    let engine = engine(64, Arc::clone(&tier) as _);
    write(&engine, 0..8);
    write(&engine, 20..21);
    settle(&engine);
    engine.clear_dram(true);
    tier.shut();
    let rising = fetch(&engine, 2, keys(0..8));
    until("it reads", || tier.loads() == 8);
    let removing = {
        let engine = engine.clone();
        thread::spawn(move || engine.remove(&keys(20..21)))
    };
    thread::sleep(Duration::from_millis(100));
    tier.open();
    assert!(removing.join().expect("it only waits").complete);
    assert_eq!(rising.recv_timeout(PATIENCE).expect("in time").len(), 8);
}

#[test]
fn everything_at_once_ends_and_serves_right_bytes() {
    for copy_down in [
        CopyDown::OnCommit,
        CopyDown::OnCommitAndHit,
        CopyDown::OnEviction,
    ] {
        let engine = engine_with(32, Arc::new(MemoryBackend::default()), |config| {
            config.copy_down = copy_down;
            config.high_watermark = 0.8;
            config.low_watermark = 0.5;
            config.maintain_every = Duration::from_millis(1);
            config.fetch_deadline = Duration::from_millis(200);
        });
        let (told, done) = mpsc::channel();
        for number in 0..6u64 {
            let (engine, told) = (engine.clone(), told.clone());
            thread::spawn(move || {
                let end = Instant::now() + Duration::from_secs(1);
                let mut round = number;
                while Instant::now() < end {
                    round += 7;
                    let first = (round * 5) % 60;
                    match number {
                        0 => drop(engine.clear(round % 2 == 0)),
                        1 => drop(engine.remove(&keys(first..first + 3))),
                        2 | 3 => drop(write(&engine, first..first + 6)),
                        _ => {
                            let keys = keys(first..first + 6);
                            let leases = fetch(&engine, number, keys.clone());
                            let leases = leases.recv_timeout(PATIENCE).expect("in time");
                            for (slot, key) in leases.iter().zip(&keys) {
                                check_value(key, slot.bytes()).expect("its bytes");
                            }
                        }
                    }
                }
                told.send(number).expect("the receiver waits");
            });
        }
        for _ in 0..6 {
            done.recv_timeout(PATIENCE).expect("no deadlock");
        }
        until("all at rest", || engine.usage().leases == 0);
        assert_idle(&engine);
    }
}
