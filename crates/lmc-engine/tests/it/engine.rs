//! Behaviour that callers of [`CacheEngine`] rely on, over a real pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lmc_backend::{Backend, Host, HostChunk, Usage};
use lmc_engine::{
    CacheEngine, Change, ChunkEvent, Cleared, DRAM, EngineConfig, EngineContext, EngineHost,
    EventSink, InUse, Inserted, Leases, LookupRequest, OwnerId, PolicyKind, Rank, StoreRequest,
    StoreStart, StoreTicket, TenantId,
};
use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use lmc_memory::ArenaConfig;
use lmc_testkit::until;
use parking_lot::Mutex;

/// Bytes of a chunk: a slot of the pool, so that counting chunks counts memory.
const CHUNK: usize = 4096;
const WRITER: OwnerId = OwnerId(1);
const READER: OwnerId = OwnerId(2);

/// An engine with memory for `chunks` chunks. Nothing is evicted before the memory is full.
fn engine(chunks: usize) -> CacheEngine {
    engine_with(chunks, |_| {})
}

fn engine_with(chunks: usize, change: impl FnOnce(&mut EngineConfig)) -> CacheEngine {
    let mut config = config();
    change(&mut config);
    with(config, chunks, Vec::new())
}

fn config() -> EngineConfig {
    let mut config = EngineConfig::default();
    config.shards = Some(2);
    config.high_watermark = 1.0;
    config.low_watermark = 1.0;
    config
}

fn with(config: EngineConfig, chunks: usize, tiers: Vec<Arc<dyn Backend>>) -> CacheEngine {
    let arena = Arc::new(
        ArenaConfig::anonymous(chunks * CHUNK)
            .build()
            .expect("memory"),
    );
    config
        .start(EngineContext::new(arena, EngineHost::default()).with_tiers(tiers))
        .expect("the settings are right")
}

fn key(number: u64) -> ChunkKey {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    hash[8..16].copy_from_slice(&number.to_le_bytes());
    ChunkKey {
        space: SpaceId::new([1; 16]),
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new(hash),
    }
}

fn keys(numbers: std::ops::Range<u64>) -> Vec<ChunkKey> {
    numbers.map(key).collect()
}

/// Chunks of one prompt, each after the one before.
fn prompt(numbers: std::ops::Range<u64>) -> Vec<StoreRequest> {
    let first = numbers.start;
    let request = |number: u64| StoreRequest {
        key: key(number),
        parent: (number > first).then(|| key(number - 1)),
        tenant: TenantId::default(),
        len: CHUNK as u64,
    };
    numbers.map(request).collect()
}

fn clear(engine: &CacheEngine, in_use: InUse) -> Cleared {
    engine.clear(in_use).expect("a test clears a few times")
}

fn fill(ticket: &mut StoreTicket) {
    let byte = ticket.key().hash.as_bytes()[8];
    ticket.bytes_mut().fill(byte);
}

/// The chunks of these that may be written.
fn reserved(engine: &CacheEngine, requests: &[StoreRequest]) -> Vec<StoreTicket> {
    let reserved = engine
        .store(WRITER, engine.clears_id(), requests)
        .into_iter();
    let ticket = |reservation| match reservation {
        StoreStart::Reserved(ticket) => Some(ticket),
        _ => None,
    };
    reserved.filter_map(ticket).collect()
}

/// Writes what is missing; how many chunks that were.
fn write(engine: &CacheEngine, requests: &[StoreRequest]) -> usize {
    let mut tickets = reserved(engine, requests);
    tickets.iter_mut().for_each(fill);
    let inserted = engine.commit(tickets);
    inserted.iter().filter(|i| **i == Inserted::New).count()
}

/// Looks up a prompt of one rank.
fn lookup(engine: &CacheEngine, owner: OwnerId, keys: &[ChunkKey]) -> Leases {
    let hashes = keys.iter().map(|key| key.hash).collect();
    let space = SpaceId::new([1; 16]);
    let ranks = vec![Rank {
        space,
        kv_rank: 0,
        chunk_bytes: None,
    }];
    let found = engine.lookup(LookupRequest::new(owner, hashes, ranks));
    let found = found.try_found().expect("there is only DRAM");
    let none = || {
        engine
            .acquire(owner, engine.clears_id(), &[])
            .expect("no keys are always there")
    };
    found.into_leases().unwrap_or_else(none)
}

/// Number of leading chunks that are present.
fn leading(engine: &CacheEngine, keys: &[ChunkKey]) -> usize {
    lookup(engine, OwnerId(99), keys).len()
}

fn assert_idle(engine: &CacheEngine) {
    let usage = engine.usage();
    assert_eq!((usage.leases, usage.reserved_slots), (0, 0));
    assert_eq!(usage.used_bytes, usage.chunk_bytes, "no slot is lost");
}

#[test]
fn written_chunks_are_found_by_everybody_with_their_bytes() {
    let engine = engine(16);
    assert_eq!(write(&engine, &prompt(0..5)), 5);
    assert_eq!(write(&engine, &prompt(0..5)), 0, "nothing is written twice");
    let found = lookup(&engine, READER, &keys(0..8));
    assert_eq!(found.len(), 5, "the leading ones");
    for (index, number) in (0..5).enumerate() {
        let slot = found.get(index).expect("it was found");
        assert!(slot.bytes().iter().all(|&byte| byte == number));
    }
    assert_eq!(engine.usage().leases, 5);
    drop(found);
    assert_eq!(leading(&engine, &keys(0..8)), 5);
    assert!(
        engine
            .acquire(READER, engine.clears_id(), &keys(3..5))
            .is_some()
    );
    assert!(
        engine
            .acquire(READER, engine.clears_id(), &keys(4..6))
            .is_none()
    );
    assert_idle(&engine);
}

#[test]
fn a_hole_ends_a_prefix_and_an_acquisition_is_all_or_nothing() {
    let engine = engine(16);
    write(&engine, &prompt(0..2));
    write(&engine, &prompt(3..5));
    assert_eq!(lookup(&engine, READER, &keys(0..5)).len(), 2);
    assert!(
        engine
            .acquire(READER, engine.clears_id(), &keys(0..5))
            .is_none()
    );
    assert_idle(&engine);
    let held = engine
        .acquire(READER, engine.clears_id(), &keys(3..5))
        .expect("both are there");
    assert_eq!(held.len(), 2);
    drop(held);
    assert_idle(&engine);
}

#[test]
fn a_chunk_is_reserved_once_and_not_found_before_it_is_committed() {
    let engine = engine(16);
    let requests = prompt(0..2);
    let first = engine.store(WRITER, engine.clears_id(), &requests);
    let second = engine.store(READER, engine.clears_id(), &requests);
    assert!(second.iter().all(|r| matches!(r, StoreStart::Busy)));
    assert_eq!(leading(&engine, &keys(0..2)), 0);
    let mut tickets: Vec<_> = first
        .into_iter()
        .map(|reservation| match reservation {
            StoreStart::Reserved(ticket) => ticket,
            other => panic!("{other:?}"),
        })
        .collect();
    let last = tickets.pop().expect("two were reserved");
    tickets.iter_mut().for_each(fill);
    assert_eq!(engine.commit(tickets), [Inserted::New]);
    assert_eq!(leading(&engine, &keys(0..2)), 1);
    // What is given back unwritten is free again, and was never there.
    drop(last);
    assert_eq!(leading(&engine, &keys(0..2)), 1);
    assert_idle(&engine);
    let again = engine.store(READER, engine.clears_id(), &requests);
    assert!(matches!(
        again[..],
        [StoreStart::Present, StoreStart::Reserved(_)]
    ));
}

#[test]
fn a_full_pool_evicts_chunks_without_a_lease_and_else_reports_no_memory() {
    let engine = engine(8);
    write(&engine, &prompt(0..8));
    let held = lookup(&engine, READER, &keys(0..6));
    // Two chunks may go, the prompt's tail; the third finds no memory.
    assert_eq!(write(&engine, &prompt(100..103)), 2);
    assert_eq!(engine.stats().no_memory, 1);
    assert_eq!(leading(&engine, &keys(0..8)), 6, "what is leased stays");
    for (index, number) in (0..6).enumerate() {
        let slot = held.get(index).expect("it is held");
        assert!(slot.bytes().iter().all(|&byte| byte == number));
    }
    drop(held);
    assert_eq!(write(&engine, &prompt(200..208)), 8);
    assert_idle(&engine);
}

#[test]
fn the_tail_of_a_prompt_goes_before_its_head() {
    let engine = engine(8);
    write(&engine, &prompt(0..8));
    write(&engine, &prompt(100..103));
    assert_eq!(leading(&engine, &keys(0..8)), 5);
}

#[test]
fn pins_outlive_eviction_and_the_emptying_of_dram_until_each_is_taken_back() {
    let engine = engine(4);
    write(&engine, &prompt(0..2));
    assert_eq!(engine.pin(&keys(0..3)), [true, true, false]);
    assert_eq!(engine.pin(&keys(0..1)), [true]);
    for round in 1..4 {
        write(&engine, &prompt(100 * round..100 * round + 4));
    }
    assert_eq!(leading(&engine, &keys(0..2)), 2);
    assert!(engine.clear_dram(InUse::Keep) > 0);
    assert_eq!(leading(&engine, &keys(0..2)), 2);
    assert_eq!(engine.unpin(&keys(0..2)), [true, true]);
    assert_eq!(
        engine.clear_dram(InUse::Keep),
        1,
        "the first is pinned once more"
    );
    assert_eq!(engine.unpin(&keys(0..1)), [true]);
    assert_eq!(engine.unpin(&keys(0..1)), [false]);
    assert_eq!(engine.clear_dram(InUse::Keep), 1);
    write(&engine, &prompt(0..2));
    engine.pin(&keys(0..2));
    assert_eq!(clear(&engine, InUse::Keep).dram, 2, "a clear ends pins");
    assert_idle(&engine);
}

#[test]
fn what_is_removed_while_it_is_read_stays_readable_and_is_not_found() {
    let engine = engine(4);
    write(&engine, &prompt(0..4));
    let held = lookup(&engine, READER, &keys(0..4));
    assert_eq!(engine.remove(&keys(2..6)).found, [true, true, false, false]);
    assert_eq!(leading(&engine, &keys(0..4)), 2);
    assert_eq!(
        clear(&engine, InUse::Remove).dram,
        2,
        "by force, what is leased goes too"
    );
    assert_eq!(leading(&engine, &keys(0..4)), 0);
    // Its memory is not given to others while it is read.
    assert_eq!(write(&engine, &prompt(100..104)), 0);
    let slot = held.get(3).expect("it is held");
    assert!(slot.bytes().iter().all(|&byte| byte == 3));
    drop(held);
    assert_eq!(write(&engine, &prompt(100..104)), 4);
    assert_idle(&engine);
}

#[test]
fn a_tenant_with_a_quota_displaces_only_itself() {
    let engine = engine(8);
    let tenant = TenantId(7);
    engine.set_quota(tenant, Some(2 * CHUNK as u64));
    write(&engine, &prompt(0..4));
    let of_tenant = |numbers| {
        let mut requests = prompt(numbers);
        requests
            .iter_mut()
            .for_each(|request| request.tenant = tenant);
        requests
    };
    write(&engine, &of_tenant(100..102));
    write(&engine, &of_tenant(200..202));
    assert_eq!(leading(&engine, &keys(200..202)), 2);
    assert_eq!(leading(&engine, &keys(100..102)), 0);
    assert_eq!(leading(&engine, &keys(0..4)), 4);
    let seen = engine.tenants();
    let seen = seen.iter().find(|status| status.tenant == 7);
    let seen = seen.expect("it has a quota");
    assert_eq!((seen.bytes, seen.quota), (8192, Some(8192)));
}

/// A change of a chunk in DRAM, as a listener heard it: the kind, the key, and the space if it has one.
type InDram = (Change, ChunkKey, Option<SpaceId>);

#[derive(Debug, Default)]
struct Heard(Mutex<Vec<InDram>>);

impl EventSink for Heard {
    fn changed(&self, event: &ChunkEvent<'_>) {
        assert_eq!(event.tier, DRAM);
        let heard = (event.change, *event.key, event.space);
        self.0.lock().push(heard);
    }
}

impl Heard {
    /// Hears of an engine's chunks from now on.
    fn of(engine: &CacheEngine) -> Arc<Self> {
        let heard = Arc::<Self>::default();
        engine.host().events().listen(Arc::clone(&heard) as _);
        heard
    }

    /// Returns what was heard since the last call, in the order of the keys.
    fn take(&self) -> Vec<InDram> {
        let mut events = std::mem::take(&mut *self.0.lock());
        events.sort_by_key(|(_, key, _)| *key);
        events
    }
}

#[test]
fn every_listener_hears_of_all_that_comes_and_goes() {
    let engine = engine(4);
    let (first, second) = (Heard::of(&engine), Heard::of(&engine));
    write(&engine, &prompt(0..4));
    write(&engine, &prompt(100..101));
    engine.remove(&keys(0..1));
    clear(&engine, InUse::Keep);
    let heard = std::mem::take(&mut *first.0.lock());
    assert_eq!(*second.0.lock(), heard);
    let mut there: Vec<ChunkKey> = Vec::new();
    for &(change, key, space) in &heard {
        assert_eq!(space, Some(key.space), "before a clear, names are spaces");
        if change.is_arrival() {
            there.push(key);
        } else {
            let at = there.iter().position(|&known| known == key);
            there.remove(at.expect("only what was stored is removed"));
        }
    }
    assert!(there.is_empty());
    let count = |kind| heard.iter().filter(|(change, ..)| *change == kind).count();
    let kinds = [
        Change::Stored,
        Change::Evicted,
        Change::Removed,
        Change::Cleared,
    ]
    .map(count);
    assert_eq!((kinds, heard.len()), ([5, 1, 1, 3], 10));
}

#[test]
fn chunks_after_a_clear_are_reported_by_their_names_with_their_space() {
    let engine = engine(4);
    let heard = Heard::of(&engine);
    clear(&engine, InUse::Remove);
    write(&engine, &prompt(0..1));
    let named = ChunkKey {
        space: key(0).space.after(engine.clears_id()),
        ..key(0)
    };
    assert_eq!(heard.take(), [(Change::Stored, named, Some(key(0).space))]);
    assert_eq!(
        engine.host().states(&[named, key(0)]),
        [IN_DRAM, HostChunk::Absent]
    );
}

const IN_DRAM: HostChunk = HostChunk::Memory { len: CHUNK as u64 };

/// True once any chunk may have come.
#[derive(Debug, Default)]
struct Begun(AtomicBool);

impl EventSink for Begun {
    fn changed(&self, _: &ChunkEvent<'_>) {}

    fn any_changed(&self, _: &str) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_host_has_no_chunks_without_its_engine_and_serves_one_engine() {
    let host = EngineHost::default();
    assert_eq!(host.states(&[key(0)]), [HostChunk::Absent]);
    assert_eq!(host.usage(), Usage::default());
    let start = || {
        let arena = ArenaConfig::anonymous(4 * CHUNK).build().expect("memory");
        config().start(EngineContext::new(Arc::new(arena), host.clone()))
    };
    let begun = Arc::new(Begun::default());
    host.events().listen(Arc::clone(&begun) as _);
    assert!(!begun.0.load(Ordering::Relaxed));
    let engine = start().expect("the host's first engine");
    assert!(begun.0.load(Ordering::Relaxed), "all is to be listed again");
    write(&engine, &prompt(0..1));
    assert_eq!(host.states(&[key(0)]), [IN_DRAM]);
    let second = start().expect_err("it has an engine");
    assert!(second.to_string().contains("another engine"), "{second}");
    assert_eq!(host.states(&[key(0)]), [IN_DRAM]);
    drop(engine);
    assert_eq!(host.states(&[key(0)]), [HostChunk::Absent]);
}

#[test]
fn what_a_clear_leaves_for_its_readers_is_reported_at_the_clear_and_without_a_space_at_its_end() {
    let engine = engine(4);
    let heard = Heard::of(&engine);
    let space = Some(key(0).space);
    write(&engine, &prompt(0..2));
    let clears = engine.clears_id();
    let held = lookup(&engine, READER, &keys(0..1));
    let stored = [0, 1].map(|n| (Change::Stored, key(n), space));
    assert_eq!(heard.take(), stored);
    let cleared = clear(&engine, InUse::Keep);
    assert_eq!((cleared.dram, cleared.leased), (1, 1));
    let cleared = [0, 1].map(|n| (Change::Cleared, key(n), space));
    assert_eq!(heard.take(), cleared);
    // The reader still finds it, and its end is none of the chunk that has its name now.
    let again = engine.acquire(READER, clears, &keys(0..1));
    assert!(again.is_some());
    assert_eq!(clear(&engine, InUse::Keep).leased, 1);
    write(&engine, &prompt(0..1));
    drop((held, again));
    until("its memory is free", || engine.usage().chunks == 1);
    let named = |clears| ChunkKey {
        space: key(0).space.after(clears),
        ..key(0)
    };
    let now = named(engine.clears_id());
    let mut found = heard.take();
    found.sort_by_key(|(.., space)| *space);
    let freed = (Change::Cleared, key(0), None);
    assert_eq!(found, [freed, (Change::Stored, now, space)]);
    clear(&engine, InUse::Keep);
    assert_eq!(heard.take(), [(Change::Cleared, now, space)]);
}

#[test]
fn above_the_watermark_chunks_go_by_themselves() {
    let mut config = EngineConfig::default();
    (config.high_watermark, config.low_watermark) = (0.75, 0.5);
    config.maintain_every = Duration::from_millis(1);
    let engine = with(config, 64, Vec::new());
    write(&engine, &prompt(0..48));
    assert_eq!(engine.usage().chunks, 48, "not above the watermark");
    // One more is. Eviction begins whenever it likes, and may take that one as well.
    write(&engine, &prompt(100..101));
    until("enough is evicted", || engine.usage().chunks <= 32);
    let left = leading(&engine, &keys(0..48));
    assert!(left >= 31, "the head is left: {left} chunks");
    assert_eq!(engine.stats().evicted_watermark, 17);
}

#[test]
fn leases_outlive_the_engine() {
    let engine = engine(4);
    write(&engine, &prompt(0..2));
    let held = lookup(&engine, READER, &keys(0..2));
    drop(engine);
    let slot = held.get(1).expect("it is held");
    assert!(slot.bytes().iter().all(|&byte| byte == 1));
}

/// Threads that write, read, pin, remove and clear the same few chunks in a pool that is too
/// small for them: no read ever sees another chunk's bytes, and in the end nothing is lost.
#[test]
fn many_threads_never_see_a_wrong_byte() {
    let engine = engine(24);
    thread::scope(|scope| {
        for worker in 0..4u64 {
            let engine = engine.clone();
            scope.spawn(move || {
                let mut state = worker + 1;
                for _ in 0..3000 {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let first = state % 6 * 10;
                    let numbers = first..first + 1 + (state >> 8) % 10;
                    match state >> 16 & 15 {
                        0..=5 => {
                            write(&engine, &prompt(numbers));
                        }
                        6..=12 => {
                            let owner = OwnerId(10 + worker);
                            let held = lookup(&engine, owner, &keys(numbers.clone()));
                            for (index, number) in numbers.enumerate() {
                                let Some(slot) = held.get(index) else { break };
                                let right = |&byte: &u8| byte == number as u8;
                                assert!(slot.bytes().iter().all(right));
                            }
                        }
                        13 => {
                            let wanted = keys(numbers);
                            let pinned = engine.pin(&wanted);
                            let mine = wanted.iter().zip(pinned);
                            let mine: Vec<_> = mine.filter(|p| p.1).map(|p| *p.0).collect();
                            engine.unpin(&mine);
                        }
                        14 => {
                            engine.remove(&keys(numbers));
                        }
                        _ => {
                            drop(clear(&engine, InUse::of_force(state >> 20 & 1 == 0)));
                        }
                    }
                }
            });
        }
    });
    assert_idle(&engine);
    clear(&engine, InUse::Remove);
    assert_eq!(engine.usage().used_bytes, 0);
}

/// Two sessions share a head: the one that found it being written commits its own chunks first.
#[test]
fn a_head_that_was_committed_after_its_tail_outlives_it() {
    for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Arc] {
        let engine = engine_with(8, |config| config.policy = policy);
        let head = reserved(&engine, &prompt(0..1));
        let tail = reserved(&engine, &prompt(0..4));
        assert_eq!(tail.len(), 3);
        engine.commit(tail);
        engine.commit(head);
        // The next turn of the conversation stores one more chunk.
        assert_eq!(write(&engine, &prompt(0..5)), 1);
        // One must go for another prompt.
        write(&engine, &prompt(100..104));
        assert_eq!(
            leading(&engine, &keys(0..5)),
            4,
            "{policy}: the last one went"
        );
    }
}

/// A turn that stores what is there already uses it all, the head as the last.
#[test]
fn what_is_stored_again_is_evicted_from_its_tail() {
    let engine = engine_with(8, |config| config.policy = PolicyKind::Lru);
    let mut loose = prompt(0..4);
    loose.iter_mut().for_each(|request| request.parent = None);
    write(&engine, &loose);
    write(&engine, &prompt(100..104));
    assert_eq!(write(&engine, &loose), 0);
    write(&engine, &prompt(200..206));
    assert_eq!(leading(&engine, &keys(0..4)), 2);
    assert_eq!(leading(&engine, &keys(100..104)), 0, "it was used before");
}
