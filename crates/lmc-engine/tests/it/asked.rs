//! Tiers that have to be asked, clears elsewhere, ranks, origins, and the limits of promotion.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{
    Delayed, Gated, Operation, block_on, check_value, fill_value, test_hash,
};
use lmc_backend::{
    Answers, Backend, BackendError, BoxFuture, Clears, Handle, LoadItem, Loaded, LocateHint,
    Located, MemoryBackend, Sharing, StartId, StoreItem, Stored, WriteBackend, ready,
};
use lmc_engine::{
    Admission, CacheEngine, EngineConfig, EngineContext, EngineHost, Found, Host, HostSpace, InUse,
    LeaseLimit, LookupRequest, LowerStatus, LowerTier, OwnerId, PolicyKind, Rank, SpaceBook,
    StoreRequest, StoreStart, TenantId, TierPolicy, WritePolicy,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use lmc_testkit::{DEADLINE, soon, until};
use tokio::runtime::{self, Builder};
use tokio::task::yield_now;

mod assumed;
mod isolation;
mod late;
mod misses;
mod policies;
mod pushed;
mod source_waits;
mod waiting;

const CHUNK: u64 = 4096;
const SPACE: SpaceId = SpaceId::new([7; 16]);
const OTHER: SpaceId = SpaceId::new([8; 16]);

fn key(space: SpaceId, kv_rank: u16, number: u64) -> ChunkKey {
    ChunkKey {
        space,
        kv_rank,
        group: 0,
        hash: test_hash(number),
    }
}

fn keys(numbers: Range<u64>) -> Vec<ChunkKey> {
    numbers.map(|number| key(SPACE, 0, number)).collect()
}

fn engine_with(
    chunks: u64,
    tiers: Vec<Arc<dyn Backend>>,
    change: impl FnOnce(&mut EngineConfig, &mut TierPolicy),
) -> CacheEngine {
    engine_on(None, chunks, tiers, change)
}

/// An engine whose tasks run on this runtime.
fn engine_on(
    runtime: Option<&runtime::Handle>,
    chunks: u64,
    tiers: Vec<Arc<dyn Backend>>,
    change: impl FnOnce(&mut EngineConfig, &mut TierPolicy),
) -> CacheEngine {
    let mut config = EngineConfig::default();
    config.shards = Some(2);
    (config.high_watermark, config.low_watermark) = (1.0, 1.0);
    let mut policy = TierPolicy::default();
    policy.write_queue_bytes = Some(chunks * CHUNK);
    // The machine may be busy.
    policy.locate_timeout = DEADLINE;
    change(&mut config, &mut policy);
    let arena = ArenaConfig::anonymous((chunks * CHUNK) as usize).build();
    let tiers = tiers
        .into_iter()
        .map(|tier| LowerTier::new(tier, policy.clone()));
    let arena = Arc::new(arena.expect("memory"));
    let mut context = EngineContext::new(arena, EngineHost::default()).with_tiers(tiers);
    context.runtime = runtime.cloned();
    config.start(context).expect("an engine")
}

fn engine(chunks: u64, tiers: Vec<Arc<dyn Backend>>) -> CacheEngine {
    engine_with(chunks, tiers, |_, _| {})
}

/// Stores chunks of one rank; returns how many were new.
fn write(engine: &CacheEngine, space: SpaceId, kv_rank: u16, numbers: Range<u64>) -> usize {
    let request = |number: u64| StoreRequest {
        key: key(space, kv_rank, number),
        parent: None,
        tenant: TenantId::default(),
        len: CHUNK,
    };
    let requests: Vec<_> = numbers.map(request).collect();
    let mut tickets = Vec::new();
    for start in engine.store(OwnerId(1), engine.clears_id(), &requests) {
        if let StoreStart::Reserved(mut ticket) = start {
            // Without the clears in its name.
            let key = ChunkKey {
                space,
                ..ticket.key()
            };
            fill_value(&key, ticket.bytes_mut());
            tickets.push(ticket);
        }
    }
    engine.commit(tickets).len()
}

/// Puts chunks of the first rank into a tier as another process would.
fn put(tier: &dyn WriteBackend, space: SpaceId, numbers: Range<u64>) {
    put_rank(tier, space, 0, numbers);
}

fn put_rank(tier: &dyn WriteBackend, space: SpaceId, kv_rank: u16, numbers: Range<u64>) {
    let arena = ArenaConfig::anonymous(1 << 20).build().expect("memory");
    let pool = Pool::new(Arc::new(arena), PoolConfig::default()).expect("a pool");
    for number in numbers {
        let key = key(space, kv_rank, number);
        let mut slot = pool.reserve(CHUNK).expect("an empty pool");
        fill_value(&key, slot.bytes_mut());
        let item = StoreItem::new(key, slot.written().seal());
        let stored = tier.store(vec![item], soon());
        let stored = block_on(lmc_backend::in_order(stored, 1));
        assert!(
            matches!(stored[..], [Some(Ok(Stored::Written))]),
            "{stored:?}"
        );
    }
}

fn request(ranks: &[Rank], numbers: Range<u64>) -> LookupRequest {
    LookupRequest::new(OwnerId(2), numbers.map(test_hash).collect(), ranks.to_vec())
}

const RANK: Rank = Rank {
    space: SPACE,
    kv_rank: 0,
    chunk_bytes: None,
};

/// Looks up one rank, and checks every byte that is found.
fn found(engine: &CacheEngine, numbers: Range<u64>) -> Found {
    let found = engine
        .lookup(request(&[RANK], numbers.clone()))
        .wait_blocking();
    let leases = found.ranks.first().map(|rank| &rank.leases);
    for (slot, key) in leases.iter().flat_map(|l| l.iter()).zip(keys(numbers)) {
        check_value(&key, slot.bytes()).expect("the bytes that were stored");
    }
    found
}

fn status(engine: &CacheEngine, tier: usize) -> LowerStatus {
    engine.lower_status().swap_remove(tier)
}

fn settle(engine: &CacheEngine) {
    until("writes end", || {
        let status = engine.lower_status();
        status.iter().all(|tier| tier.queued_bytes == 0)
    });
}

fn assert_idle(engine: &CacheEngine) {
    settle(engine);
    // A read that was given up gives its slots and leases back a moment later.
    until("nothing is held", || {
        let usage = engine.usage();
        (usage.leases, usage.reserved_slots) == (0, 0)
    });
    let usage = engine.usage();
    assert_eq!(usage.used_bytes, usage.chunk_bytes, "no slot is lost");
}

/// A shared tier that says "pending" a number of times before it tells what it has, and may lie
/// about lengths.
#[derive(Debug)]
struct Scripted {
    inner: MemoryBackend,
    pending: AtomicUsize,
    asked: AtomicU64,
    longer_by: u64,
    cost: Duration,
    /// Sources that lookups were advised to ask first.
    hinted: Mutex<Vec<String>>,
    at_once: usize,
    /// Keys of each question.
    questions: Mutex<Vec<usize>>,
    /// First key that is absent while those before it are pending.
    later: Option<ChunkKey>,
}

impl Scripted {
    fn new() -> Self {
        Self {
            inner: MemoryBackend::shared(),
            pending: AtomicUsize::new(0),
            asked: AtomicU64::new(0),
            longer_by: 0,
            cost: Duration::ZERO,
            hinted: Mutex::default(),
            at_once: 1,
            questions: Mutex::default(),
            later: None,
        }
    }
}

impl Backend for Scripted {
    lmc_backend::forward!(inner: load clear clears usage health close);

    fn name(&self) -> &str {
        "scripted"
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn sharing(&self) -> Sharing {
        Sharing::Shared
    }

    fn asks_at_once(&self) -> usize {
        self.at_once
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        self.questions.lock().expect("no panic").push(keys.len());
        self.asked.fetch_add(keys.len() as u64, Ordering::Relaxed);
        let mut hinted = self.hinted.lock().expect("no test panics with it");
        hinted.extend(hint.sources.iter().cloned());
        let take = |left: usize| left.checked_sub(1);
        let order = Ordering::Relaxed;
        let is_pending = self.pending.fetch_update(order, order, take).is_ok();
        Box::pin(async move {
            let mut located = self.inner.locate(keys, hint, deadline).await;
            let later = keys.iter().position(|key| Some(*key) == self.later);
            for (index, one) in located.iter_mut().enumerate() {
                match one {
                    Ok(one) if is_pending => {
                        *one = match later.is_some_and(|later| index >= later) {
                            true => Located::Absent,
                            false => Located::Pending,
                        }
                    }
                    Ok(Located::Present(location)) => {
                        location.len += self.longer_by;
                        location.cost = self.cost;
                    }
                    _ => {}
                }
            }
            located
        })
    }
}

impl WriteBackend for Scripted {
    lmc_backend::forward!(inner: store remove list);
}

#[test]
fn a_tier_that_has_to_be_asked_is_awaited_and_its_chunks_are_found() {
    let tier = Delayed::slow(MemoryBackend::shared(), Duration::from_millis(50));
    put(tier.inner(), SPACE, 0..8);
    let tier = Arc::new(Gated::new(tier));
    let engine = engine(64, vec![tier.clone()]);
    tier.shut();
    let lookup = engine.lookup(request(&[RANK], 0..12));
    let lookup = lookup.try_found().expect_err("nothing is read yet");
    tier.open();
    let found = lookup.wait_blocking();
    assert_eq!((found.hits, found.resident), (8, 0));
    drop(found);
    assert_eq!(self::found(&engine, 0..12).resident, 8, "in DRAM now");
    assert_eq!(status(&engine, 0).promoted, 8);
    assert_idle(&engine);
}

#[test]
fn the_advice_of_a_lookup_reaches_the_tiers_that_are_asked() {
    let tier = Arc::new(Scripted::new());
    put(&*tier, SPACE, 0..4);
    let engine = engine(64, vec![Arc::clone(&tier) as _]);
    let hint = LocateHint::default().with_sources(Arc::new(["host-b".to_owned()]));
    let found = engine.lookup(request(&[RANK], 0..4).with_hint(hint));
    assert_eq!(found.wait_blocking().hits, 4);
    // The first chunk, and then the others.
    let hinted = tier.hinted.lock().expect("no test panics with it");
    assert_eq!(*hinted, ["host-b", "host-b"]);
}

#[test]
fn chunks_of_several_tiers_make_one_prefix() {
    // DRAM has 0 and 5, the disk 1 to 3 and 6, the remote store all.
    let (disk, remote) = (
        Arc::new(MemoryBackend::default()),
        Arc::new(Scripted::new()),
    );
    put(&*disk, SPACE, 1..4);
    put(&*disk, SPACE, 6..7);
    put(&*remote, SPACE, 0..10);
    let engine = engine(64, vec![disk, Arc::clone(&remote) as _]);
    write(&engine, SPACE, 0, 0..1);
    write(&engine, SPACE, 0, 5..6);
    let found = found(&engine, 0..12);
    assert_eq!((found.hits, found.resident), (10, 1));
    assert_eq!(
        (status(&engine, 0).promoted, status(&engine, 1).promoted),
        (4, 4)
    );
    // Chunk 4 first, then those after it that nothing here has.
    assert_eq!(remote.asked.load(Ordering::Relaxed), 1 + 5);
}

#[test]
fn a_prompt_that_no_tier_has_is_asked_for_by_its_first_chunk_only() {
    let tier = Arc::new(Scripted::new());
    let engine = engine(64, vec![Arc::clone(&tier) as _]);
    assert_eq!(found(&engine, 0..200).hits, 0);
    assert_eq!(tier.asked.load(Ordering::Relaxed), 1);
}

#[test]
fn a_tier_that_answers_too_late_costs_a_miss_and_no_more() {
    // A lookup that waited for it would not end within the runner's limit.
    let late = Delayed::late(MemoryBackend::shared(), 10 * DEADLINE);
    put(late.inner(), SPACE, 0..4);
    let here = MemoryBackend::default();
    put(&here, SPACE, 0..2);
    let engine = engine_with(64, vec![Arc::new(here), Arc::new(late)], |_, policy| {
        policy.locate_timeout = Duration::from_millis(10);
    });
    assert_eq!(found(&engine, 0..4).hits, 2, "what the other tier has");
    assert_eq!(status(&engine, 1).locate_failed, 1);
    assert_idle(&engine);
}

/// An order to copy chunks to a peer once copied none where a busy machine took longer than the 5 ms
/// that a prompt waits.
#[test]
fn where_no_prompt_waits_a_slow_tier_may_take_longer_than_its_timeout() {
    let slow = Delayed::slow(MemoryBackend::shared(), Duration::from_millis(50));
    put(slow.inner(), SPACE, 0..4);
    let engine = engine_with(64, vec![Arc::new(slow)], |_, policy| {
        policy.locate_timeout = Duration::from_millis(10);
    });
    assert_eq!(found(&engine, 0..4).hits, 0);
    let hint = LocateHint::default().with_timeout(DEADLINE);
    let keys = keys(0..4);
    let runtime = runtime::Runtime::new().expect("a runtime");
    runtime.block_on(engine.host().promote(&keys, hint));
    assert_eq!(engine.usage().chunks, 4);
    assert_idle(&engine);
}

/// Such a lookup once never ended, where the chunk was read after another tier had failed.
#[test]
fn a_tier_that_claims_a_chunk_beyond_the_pool_has_none() {
    let tier = |longer_by| {
        let tier = Scripted {
            longer_by,
            ..Scripted::new()
        };
        put(&tier, SPACE, 0..4);
        Arc::new(tier)
    };
    let inner = MemoryBackend::shared();
    put(&inner, SPACE, 0..4);
    let failing = Arc::new(Handing { inner, fails: true });
    let engine = engine(64, vec![failing, tier(1 << 40)]);
    assert_eq!(found(&engine, 0..4).hits, 0);
    assert!(status(&engine, 1).promote_missed >= 1);
    let sound = engine_with(64, vec![tier(1 << 40), tier(0)], |_, _| {});
    assert_eq!(found(&sound, 0..4).hits, 4, "the next tier has them");
    assert_idle(&engine);
}

#[test]
fn a_tier_that_lies_about_a_length_costs_a_miss_and_no_byte() {
    let tier = Scripted {
        longer_by: 1,
        ..Scripted::new()
    };
    put(&tier, SPACE, 0..4);
    let engine = engine(64, vec![Arc::new(tier)]);
    assert_eq!(found(&engine, 0..4).hits, 0);
    assert_eq!(status(&engine, 0).promote_failed, 4);
    assert_idle(&engine);
}

/// Chunks that a peer gave with another length than their space's, and with digests that matched,
/// were once committed and then failed at each retrieve.
#[test]
fn a_chunk_of_another_length_than_its_space_has_is_a_counted_miss_in_every_tier() {
    let rank = |chunk_bytes| Rank {
        chunk_bytes: Some(chunk_bytes),
        ..RANK
    };
    for tier in [MemoryBackend::shared(), MemoryBackend::default()] {
        put(&tier, SPACE, 0..4);
        let engine = engine(64, vec![Arc::new(tier)]);
        let hits = |chunk_bytes| {
            let lookup = engine.lookup(request(&[rank(chunk_bytes)], 0..4));
            lookup.wait_blocking().hits
        };
        assert_eq!(hits(CHUNK / 2), 0);
        assert!(status(&engine, 0).promote_missed > 0);
        assert_eq!(status(&engine, 0).promoted, 0, "nothing is read");
        assert_eq!(hits(CHUNK), 4);
        // What came to DRAM while no length was known gives way to what engines store.
        assert_eq!(hits(CHUNK / 2), 0);
        let stored = write(&engine, SPACE, 0, 0..4);
        assert_eq!(stored, 1, "the first was removed");
        assert_eq!(hits(CHUNK), 4);
        assert_idle(&engine);
    }
}

fn cleared_elsewhere() -> Arc<Clears> {
    let mut clears = Clears::default();
    let start = StartId::random().expect("random numbers");
    clears.count(start).expect("one process");
    Arc::new(clears)
}

#[test]
fn a_clear_that_another_process_passes_on_through_a_tier_empties_all_of_this_one() {
    let (disk, remote) = (
        Arc::new(MemoryBackend::default()),
        Arc::new(MemoryBackend::shared()),
    );
    let engine = engine(8, vec![disk.clone(), remote.clone()]);
    assert_eq!(write(&engine, SPACE, 0, 0..2), 2);
    assert_eq!(write(&engine, OTHER, 0, 0..2), 2);
    settle(&engine);
    let before = engine.clears_id();
    let elsewhere = cleared_elsewhere();
    block_on(remote.clear(Arc::clone(&elsewhere), soon())).expect("noted");
    until("DRAM is empty", || engine.usage().chunks == 0);
    assert_eq!(engine.clears_id(), elsewhere.id());
    until("the disk has noted it", || disk.clears() == elsewhere);
    assert_eq!(disk.usage().expect("open").chunks, 0);
    assert_eq!(found(&engine, 0..2).hits, 0);
    let late = engine.store(OwnerId(1), before, &[]);
    assert!(late.is_empty());
    assert_eq!(write(&engine, SPACE, 0, 0..2), 2);
    assert_eq!(found(&engine, 0..2).hits, 2);
    drop(engine);
    // The next process knows it from its disk.
    put(&*remote, SPACE, 10..12);
    let engine = self::engine(64, vec![disk, remote]);
    assert_eq!(engine.clears_id(), elsewhere.id());
    assert_eq!(found(&engine, 10..12).hits, 0);
}

/// A clear elsewhere once waited until every tier had noted it.
#[test]
fn no_lookup_waits_for_a_tier_to_note_a_clear() {
    let hangs = Arc::new(Gated::new(MemoryBackend::default()));
    let shared = Arc::new(Gated::new(MemoryBackend::shared()));
    let engine = engine(64, vec![Arc::clone(&hangs) as _, Arc::clone(&shared) as _]);
    let noted = || [&hangs, &shared].map(|tier| tier.ended(Operation::Clear));
    // The start passes clears on, too.
    until("the start is over", || noted() == [1, 1]);
    hangs.hold(Operation::Clear);
    block_on(shared.clear(cleared_elsewhere(), soon())).expect("noted");
    // DRAM is emptied before the clear is passed on.
    until("it is passed on", || noted() == [1, 3]);
    write(&engine, SPACE, 0, 0..4);
    assert_eq!(found(&engine, 0..4).hits, 4);
    assert_eq!(noted(), [1, 3], "the tier has not noted it");
    hangs.open();
    assert_idle(&engine);
}

#[test]
fn a_chunk_that_is_being_written_is_waited_for_until_the_timeout() {
    let tier = Arc::new(Scripted::new());
    put(&*tier, SPACE, 0..4);
    let engine = engine_with(64, vec![Arc::clone(&tier) as _], |config, _| {
        config.pending_timeout = DEADLINE;
    });
    tier.pending.store(5, Ordering::Relaxed);
    assert_eq!(found(&engine, 0..4).hits, 4);
    let engine = engine_with(64, vec![Arc::clone(&tier) as _], |config, _| {
        config.pending_timeout = Duration::from_millis(20);
    });
    tier.pending.store(usize::MAX, Ordering::Relaxed);
    assert_eq!(found(&engine, 0..4).hits, 0, "it never came");
}

/// A prefill that goes on once had only those chunks found that were being written when it was asked
/// about.
#[test]
fn what_an_engine_begins_to_write_while_a_lookup_waits_is_found_too() {
    let tier = Scripted {
        at_once: 64,
        later: Some(key(SPACE, 0, 2)),
        ..Scripted::new()
    };
    put(&tier, SPACE, 0..6);
    tier.pending.store(1, Ordering::Relaxed);
    let tier = Arc::new(tier);
    let engine = engine_with(64, vec![Arc::clone(&tier) as _], |config, _| {
        config.pending_timeout = DEADLINE;
    });
    assert_eq!(found(&engine, 0..6).hits, 6);
    assert_eq!(*tier.questions.lock().expect("no panic"), [6, 2, 4]);
    assert_idle(&engine);
}

#[test]
fn a_first_question_names_as_many_chunks_as_each_tier_allows() {
    let asking = |at_once| {
        let tier = Scripted {
            at_once,
            ..Scripted::new()
        };
        Arc::new(tier)
    };
    let questions =
        |tier: &Scripted| std::mem::take(&mut *tier.questions.lock().expect("no panic"));
    let tier = asking(8);
    put(&*tier, SPACE, 0..20);
    // Some of them lie on a drive too, and are not asked for.
    let drive = Arc::new(MemoryBackend::default());
    put(&*drive, SPACE, 3..5);
    let engine = engine(64, vec![drive, Arc::clone(&tier) as _]);
    assert_eq!(found(&engine, 100..200).hits, 0);
    assert_eq!(questions(&tier), [8], "no tier has it");
    assert_eq!(found(&engine, 0..20).hits, 20);
    assert_eq!(questions(&tier), [6, 12]);
    assert_eq!(found(&engine, 0..24).hits, 20);
    assert_eq!(questions(&tier), [4], "the first are in DRAM");
    assert_idle(&engine);
    let (tier, other) = (asking(8), asking(1));
    put(&*tier, SPACE, 0..20);
    let engine = self::engine(64, vec![Arc::clone(&tier) as _, Arc::clone(&other) as _]);
    assert_eq!(found(&engine, 0..20).hits, 20);
    assert_eq!(questions(&tier), [8, 12], "whatever the other allows");
    assert_eq!(found(&engine, 100..120).hits, 0);
    assert_eq!(
        (questions(&tier), questions(&other).pop()),
        (vec![8], Some(1))
    );
    assert_idle(&engine);
}

/// A tier that loads only what comes with the handle that it gave.
#[derive(Debug)]
struct Handing {
    inner: MemoryBackend,
    fails: bool,
}

impl Backend for Handing {
    lmc_backend::forward!(inner: clear clears usage health close);

    fn name(&self) -> &str {
        "handing"
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn sharing(&self) -> Sharing {
        Sharing::Shared
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(async move {
            let mut located = self.inner.locate(keys, hint, deadline).await;
            for (key, one) in keys.iter().zip(&mut located) {
                if let Ok(Located::Present(location)) = one {
                    location.handle = Some(Handle::new((*key, self.fails)));
                }
            }
            located
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        for item in &items {
            let handle = item.handle.as_ref().and_then(Handle::get);
            assert_eq!(handle, Some(&(item.key, self.fails)));
        }
        match self.fails {
            false => self.inner.load(items, deadline),
            true => {
                let missed = items.into_iter().map(|item| Loaded::Miss(item.slot));
                ready(missed.collect::<Vec<_>>())
            }
        }
    }
}

impl WriteBackend for Handing {
    lmc_backend::forward!(inner: store remove list);
}

#[test]
fn a_load_brings_the_handle_of_its_tier_also_after_another_failed() {
    let tier = |fails| {
        let inner = MemoryBackend::shared();
        put(&inner, SPACE, 0..12);
        Arc::new(Handing { inner, fails })
    };
    let engine = engine(64, vec![tier(true), tier(false)]);
    assert_eq!(found(&engine, 0..12).hits, 12);
    assert_eq!(status(&engine, 1).promoted, 12);
    assert_idle(&engine);
}

#[test]
fn a_clear_deletes_nothing_in_a_shared_tier_and_its_older_chunks_are_absent() {
    let tier = Arc::new(MemoryBackend::shared());
    let engine = engine(64, vec![Arc::clone(&tier) as _]);
    write(&engine, SPACE, 0, 0..4);
    settle(&engine);
    let cleared = engine.clear(InUse::Remove).expect("a few clears");
    assert!(
        cleared.unconfirmed.is_empty() && (cleared.dram, cleared.lower) == (4, 0),
        "{cleared:?}"
    );
    assert_eq!(tier.usage().expect("open").chunks, 4, "they are there");
    assert_eq!(found(&engine, 0..4).hits, 0, "and are not found");
    assert_eq!(status(&engine, 0).promote_missed, 0, "nor read");
    // Stored again, they lie beside the older ones.
    assert_eq!(write(&engine, SPACE, 0, 0..2), 2);
    settle(&engine);
    engine.clear_dram(InUse::Remove);
    assert_eq!(found(&engine, 0..4).hits, 2);
    assert_idle(&engine);
}

#[test]
fn a_write_begun_before_a_clear_elsewhere_is_not_found_after_it() {
    let remote = Arc::new(MemoryBackend::shared());
    let engine = engine(64, vec![Arc::clone(&remote) as _]);
    let wanted = StoreRequest {
        key: key(SPACE, 0, 0),
        parent: None,
        tenant: TenantId::default(),
        len: CHUNK,
    };
    let before = engine.clears_id();
    let Some(StoreStart::Reserved(ticket)) = engine.store(OwnerId(1), before, &[wanted]).pop()
    else {
        panic!("an empty pool");
    };
    block_on(remote.clear(cleared_elsewhere(), soon())).expect("noted");
    until("it is learned", || engine.clears_id() != before);
    let late = engine.store(OwnerId(1), before, &[wanted]);
    assert!(matches!(late[..], [StoreStart::Cleared]), "{late:?}");
    assert_eq!(engine.commit(vec![ticket]), [lmc_engine::Inserted::Cleared]);
    assert_eq!(found(&engine, 0..1).hits, 0);
}

#[test]
fn ranks_are_joined_and_a_rank_without_a_chunk_ends_the_prefix() {
    let tier = Arc::new(Scripted::new());
    let engine = engine(64, vec![Arc::clone(&tier) as _]);
    let rank = |kv_rank| Rank {
        space: SPACE,
        kv_rank,
        chunk_bytes: None,
    };
    write(&engine, SPACE, 0, 0..6);
    write(&engine, SPACE, 1, 0..4);
    settle(&engine);
    let found = engine
        .lookup(request(&[rank(0), rank(1)], 0..8))
        .wait_blocking();
    assert_eq!((found.hits, found.resident, found.ranks.len()), (4, 4, 2));
    assert!(found.ranks.iter().all(|rank| rank.leases.len() == 4));
    drop(found);
    // One rank comes from the tier, the other from DRAM.
    engine.clear_dram(InUse::Remove);
    write(&engine, SPACE, 0, 0..6);
    let found = engine
        .lookup(request(&[rank(0), rank(1)], 0..8))
        .wait_blocking();
    assert_eq!((found.hits, found.resident), (4, 0));
    drop(found);
    let none = engine
        .lookup(request(&[rank(0), rank(7)], 0..8))
        .wait_blocking();
    assert_eq!(none.hits, 0);
    drop(none);
    assert_idle(&engine);
}

#[test]
fn a_chunk_is_never_written_to_the_tier_that_it_came_from() {
    let (first, second) = (
        Arc::new(Gated::new(MemoryBackend::default())),
        Arc::new(Gated::new(MemoryBackend::default())),
    );
    put(&*first, SPACE, 0..4);
    let tiers: Vec<Arc<dyn Backend>> = vec![Arc::clone(&first) as _, Arc::clone(&second) as _];
    let engine = engine_with(64, tiers, |_, policy| {
        policy.admit = Admission::Reused(1);
    });
    let before = first.stores();
    assert_eq!(found(&engine, 0..4).hits, 4);
    assert_eq!(found(&engine, 0..4).resident, 4);
    settle(&engine);
    assert_eq!(first.stores(), before, "it has them");
    assert_eq!(
        second.stores(),
        4,
        "the other tier is offered what is found"
    );
    assert_idle(&engine);
}

#[test]
fn chunks_that_are_recomputed_faster_are_not_read() {
    let slow = || Scripted {
        cost: Duration::from_millis(10),
        ..Scripted::new()
    };
    for (recompute, hits) in [(1, 0), (100, 8)] {
        let tier = slow();
        put(&tier, SPACE, 0..8);
        let engine = engine_with(64, vec![Arc::new(tier)], |config, _| {
            config.recompute_time = Some(Duration::from_millis(recompute));
        });
        assert_eq!(found(&engine, 0..8).hits, hits, "{recompute} ms a chunk");
        let status = status(&engine, 0);
        assert_eq!(
            (status.promoted, status.promote_skipped),
            (hits as u64, 8 - hits as u64)
        );
    }
}

#[test]
fn reads_in_flight_hold_at_most_a_quarter_of_the_pool() {
    let tier = Arc::new(Gated::new(MemoryBackend::default()));
    put(&*tier, SPACE, 0..64);
    let engine = engine_with(64, vec![Arc::clone(&tier) as _], |config, _| {
        // More than is ever granted.
        config.promotion_bytes = Some(64 * CHUNK);
    });
    tier.shut();
    let lookups: Vec<_> = (0..4)
        .map(|n| engine.lookup(request(&[RANK], n * 16..n * 16 + 16)))
        .collect();
    until("reads begin", || tier.loads() > 0);
    thread::sleep(Duration::from_millis(50));
    let reserved = engine.usage().reserved_slots;
    assert!((1..=16).contains(&reserved), "{reserved} of 64 slots");
    tier.open();
    for lookup in lookups {
        assert_eq!(lookup.wait_blocking().hits, 16);
    }
    assert_idle(&engine);
}

/// Chunks that were in DRAM when a prompt was located, and on a drive when it was read, once took
/// memory without a bound.
#[test]
fn chunks_that_change_their_tier_are_read_with_permits_of_the_tier_that_they_are_read_from() {
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime");
    // All tasks have gone as far as they can then.
    let run = || {
        runtime.block_on(async {
            for _ in 0..100 {
                yield_now().await
            }
        })
    };
    let drive = Arc::new(Gated::new(MemoryBackend::default()));
    let store = Arc::new(Gated::new(MemoryBackend::shared()));
    put(&*drive, SPACE, 1..16);
    put(&*store, SPACE, 0..1);
    put(&*store, SPACE, 100..112);
    let tiers = vec![Arc::clone(&drive) as _, Arc::clone(&store) as _];
    let engine = engine_on(Some(runtime.handle()), 64, tiers, |config, policy| {
        config.promotion_timeout = 10 * DEADLINE;
        policy.write = WritePolicy::Back;
    });
    write(&engine, SPACE, 0, 1..16);
    drive.shut();
    store.shut();
    let waiting = engine.lookup(request(&[RANK], 100..112));
    run();
    let lookup = engine.lookup(request(&[RANK], 0..16));
    run();
    // The store's share, and what is common; the other prompt waits for it.
    assert_eq!((store.loads(), drive.loads()), (12, 0));
    assert_eq!(engine.clear_dram(InUse::Keep), 15);
    drop(waiting);
    store.open();
    run();
    assert_eq!((store.loads(), drive.loads()), (13, 4));
    drive.open();
    assert_eq!(runtime.block_on(lookup.wait()).hits, 16);
    assert_eq!(status(&engine, 0).promoted, 15);
    assert_idle(&engine);
}

#[test]
fn a_promoted_chunk_counts_as_used_once() {
    for policy in [PolicyKind::S3Fifo, PolicyKind::Arc] {
        let disk = Arc::new(MemoryBackend::default());
        put(&*disk, SPACE, 0..200);
        let engine = engine_with(20, vec![disk], |config, _| config.policy = policy);
        let hot = 1000..1004;
        write(&engine, SPACE, 0, hot.clone());
        for _ in 0..3 {
            assert_eq!(found(&engine, hot.clone()).resident, 4);
        }
        // A scan of the disk, each chunk once.
        for number in 0..200 {
            assert_eq!(found(&engine, number..number + 1).hits, 1);
        }
        let there = engine.acquire(OwnerId(9), engine.clears_id(), &keys(hot));
        assert!(
            there.is_some(),
            "{policy}: the scan pushed out what is used often"
        );
    }
}

/// Allows nothing beyond a number of bytes.
struct AtMost(u64);

impl LeaseLimit for AtMost {
    fn allowed(&self, leased: u64, more: u64) -> u64 {
        (leased + more).min(self.0)
    }
}

#[test]
fn a_lookup_keeps_no_more_than_its_caller_allows() {
    let tier = Arc::new(MemoryBackend::shared());
    put(&*tier, SPACE, 4..16);
    let engine = engine(64, vec![tier]);
    write(&engine, SPACE, 0, 0..4);
    for (allowed, hits) in [(2, 2), (4, 4), (10, 10), (100, 16)] {
        let limit = Arc::new(AtMost(allowed * CHUNK));
        let lookup = engine.lookup(request(&[RANK], 0..16).with_limit(limit));
        assert_eq!(
            lookup.wait_blocking().hits,
            hits,
            "{allowed} chunks allowed"
        );
        engine.clear_dram(InUse::Keep);
        write(&engine, SPACE, 0, 0..4);
    }
    assert_idle(&engine);
}

#[test]
fn promotions_count_against_the_tenants_quota() {
    let disk = Arc::new(MemoryBackend::default());
    put(&*disk, SPACE, 0..8);
    let engine = engine(64, vec![disk]);
    let tenant = TenantId(3);
    engine.set_quota(tenant, Some(4 * CHUNK));
    let lookup = engine.lookup(request(&[RANK], 0..8).with_tenant(tenant));
    assert_eq!(lookup.wait_blocking().hits, 4);
    assert_eq!(engine.tenant(tenant).bytes, 4 * CHUNK);
}

#[test]
fn an_engine_runs_on_the_runtime_that_it_is_given() {
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_time()
        .build()
        .expect("a runtime");
    let disk = Arc::new(MemoryBackend::default());
    put(&*disk, SPACE, 0..4);
    let engine = engine_on(Some(runtime.handle()), 64, vec![disk], |_, _| {});
    let lookup = engine.lookup(request(&[RANK], 0..4));
    assert_eq!(runtime.block_on(lookup.wait()).hits, 4);
    write(&engine, SPACE, 0, 10..12);
    settle(&engine);
    assert!(engine.close(soon()).is_complete());
    drop(engine);
    // Nothing of the engine is left on the runtime.
    until("its tasks end", || runtime.metrics().num_alive_tasks() == 0);
}

#[test]
fn chunks_stored_by_one_engine_are_found_by_another_through_a_shared_tier() {
    let tier = Arc::new(MemoryBackend::shared());
    let (a, b) = (
        engine(64, vec![Arc::clone(&tier) as _]),
        engine(64, vec![Arc::clone(&tier) as _]),
    );
    write(&a, SPACE, 0, 0..4);
    settle(&a);
    assert_eq!(found(&b, 0..4).hits, 4);
    a.clear(InUse::Remove).expect("a few clears");
    write(&a, SPACE, 0, 4..8);
    settle(&a);
    until("b has learned of it", || b.clears_id() == a.clears_id());
    assert_eq!(found(&b, 4..8).hits, 4);
    assert_eq!(found(&b, 0..4).hits, 0, "cleared by the other");
}

/// The name in a peer's order was named once more by a daemon that had not named it before.
#[test]
fn what_a_peer_orders_is_promoted_after_a_clear_too() {
    let disk = Arc::new(MemoryBackend::default());
    let engine = engine(64, vec![Arc::clone(&disk) as _]);
    engine.clear(InUse::Remove).expect("a few clears");
    let name = SPACE.after(engine.clears_id());
    until("the disk has noted it", || {
        disk.clears() == engine.clear_log().clears()
    });
    put(&*disk, name, 0..4);
    let keys: Vec<ChunkKey> = (0..4).map(|number| key(name, 0, number)).collect();
    let runtime = runtime::Runtime::new().expect("a runtime");
    let hint = LocateHint::default();
    runtime.block_on(engine.host().promote(&keys, hint));
    assert_eq!(engine.usage().chunks, 4);
}

#[test]
fn runs_of_prompts_in_dram_are_listed_heads_first_within_a_limit() {
    let engine = engine(64, Vec::new());
    let store = |space, prompt: u64, parent: Option<u64>, numbers: Range<u64>| {
        let mut parent = parent.map(|number| key(space, 0, number));
        for number in numbers {
            let key = key(space, 0, prompt * 100 + number);
            let request = StoreRequest {
                key,
                parent,
                tenant: TenantId::default(),
                len: CHUNK,
            };
            let Some(StoreStart::Reserved(ticket)) = engine
                .store(OwnerId(1), engine.clears_id(), &[request])
                .pop()
            else {
                panic!("there is memory");
            };
            engine.commit(vec![ticket]);
            parent = Some(key);
        }
    };
    store(SPACE, 1, None, 0..4);
    store(SPACE, 2, None, 0..2);
    // Branches off the first prompt after two chunks.
    store(SPACE, 3, Some(101), 0..2);
    store(OTHER, 4, None, 0..1);
    let listed = |limit: u64| {
        let runs = engine.dram_runs(limit * CHUNK, |key| key.space == SPACE);
        assert!(runs.iter().flatten().all(|(_, len)| *len == CHUNK));
        let mut lens: Vec<usize> = runs.iter().map(Vec::len).collect();
        lens.sort_unstable();
        (runs, lens)
    };
    let (runs, lens) = listed(64);
    assert_eq!(lens.iter().sum::<usize>(), 8);
    // The branch is a run of its own, or the rest of the prompt is.
    assert_eq!(lens, [2, 2, 4]);
    let prompts = runs.iter().filter(|run| run.len() == 2 || run.len() == 4);
    assert_eq!(prompts.count(), 3);
    let (runs, lens) = listed(2);
    assert_eq!(lens, [1, 1], "both heads: {runs:?}");
    assert_eq!(listed(0).1, [0; 0]);
}
