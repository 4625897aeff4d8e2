//! Lookups and retrieves of chunks in lower tiers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{
    Answer as _, CHUNK, CHUNK_BYTES, MODEL, Server, Worker, end_session, lookup, prompt,
};
use lmc_backend::conformance::Gated;
use lmc_backend::{
    Backend, BackendError, BoxFuture, Clears, LocateHint, Located, MemoryBackend, StartId,
    WriteBackend,
};
use lmc_engine::{ClearLog, EngineConfig, EngineHost, InUse};
use lmc_key::ChunkKey;
use lmc_vllm_adapter::{
    CacheKey, Client, KvEvent, KvEventKind, Operation, Reply, Request, TierChunks,
};

type Tier = Arc<Gated<MemoryBackend>>;

fn server() -> (Server, Tier) {
    let tier: Tier = Arc::new(Gated::new(MemoryBackend::default()));
    let server = Server::with_tiers(vec![Arc::clone(&tier) as _], 1 << 20, |_| {}, |_| {});
    (server, tier)
}

/// Waits until all chunks are in the lower tier, and clears DRAM.
fn evict_to_lower_tier(server: &Server) {
    server.eventually("all copies are written", |status| {
        status.lower[0].queued_bytes == 0
    });
    server.service.engine().clear_dram(InUse::Remove);
}

fn key_for(key: &CacheKey, request: &str) -> CacheKey {
    CacheKey {
        request_id: request.to_owned(),
        worker_id: None,
        ..key.clone()
    }
}

/// Starts a lookup and does not wait for its promotion.
fn begin_lookup(client: &mut Client, key: &CacheKey) {
    let reply = client.ask(&Request::Lookup(key.clone()));
    assert_eq!(reply.expect("an answer"), Reply::None);
}

fn status(client: &mut Client, request: &str) -> Reply {
    let request_id = request.to_owned();
    let status = Request::QueryPrefetchStatus { request_id };
    client.answer(&status)
}

fn wait(request: &str, timeout: f64) -> Request {
    Request::WaitPrefetchStatus {
        request_id: request.to_owned(),
        timeout,
    }
}

#[test]
fn a_prompt_that_left_dram_is_found_and_read_back_byte_for_byte() {
    let (server, _tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(1, 5 * CHUNK + 3);
    let key = worker.key("a", &tokens, 0..5);
    assert_eq!(lookup(&mut scheduler, &key), 0);
    assert_eq!(worker.store(&key), 5);
    end_session(&mut scheduler, "a");
    evict_to_lower_tier(&server);
    let key = CacheKey {
        request_id: "b".to_owned(),
        ..key
    };
    assert_eq!(lookup(&mut scheduler, &key), 5);
    assert!(worker.retrieve(&key));
    end_session(&mut scheduler, "b");
    server.assert_idle();
    let status = server.status();
    assert_eq!(status.lower[0].promoted_bytes, 5 * CHUNK_BYTES as u64);
    assert_eq!(status.counts.hit_tokens, 5 * CHUNK as u64);
}

/// Until f2c35f9 the metric of tokens found in DRAM counted all tokens found, so that disk hits
/// were reported as DRAM hits.
#[test]
fn hits_are_counted_for_the_tier_that_had_them() {
    let (server, _tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(1, 6 * CHUNK);
    let head = worker.key("a", &tokens, 0..2);
    let whole = worker.key("b", &tokens, 0..6);
    worker.store(&whole);
    evict_to_lower_tier(&server);
    let hits = |scheduler: &mut Client, key: &CacheKey| {
        let found = lookup(scheduler, key);
        end_session(scheduler, &key.request_id);
        let counts = server.status().counts;
        assert_eq!(
            counts.hit_tokens,
            counts.hit_tokens_dram + counts.hit_tokens_lower
        );
        let chunks = |tokens: u64| tokens / CHUNK as u64;
        (
            found,
            chunks(counts.hit_tokens_dram),
            chunks(counts.hit_tokens_lower),
        )
    };
    // From the lower tier, then from DRAM; then a prompt whose first two chunks are in DRAM.
    assert_eq!(hits(&mut scheduler, &head), (2, 0, 2));
    assert_eq!(hits(&mut scheduler, &head), (2, 2, 2));
    assert_eq!(hits(&mut scheduler, &whole), (6, 4, 6));
    assert_eq!(hits(&mut scheduler, &whole), (6, 10, 6));
}

#[test]
fn a_lookup_says_which_tiers_its_chunks_came_from() {
    let (server, tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(1, 6 * CHUNK);
    let head = worker.key("a", &tokens, 0..2);
    let whole = worker.key("b", &tokens, 0..6);
    worker.store(&whole);
    evict_to_lower_tier(&server);
    let wait = |request: &str| Request::WaitLookup {
        request_id: request.to_owned(),
        timeout: 20.0,
    };
    let found = |chunks, tiers: &[(&str, u64)]| Reply::Found {
        chunks,
        tiers: tiers
            .iter()
            .map(|&(tier, chunks)| TierChunks {
                tier: tier.to_owned(),
                chunks,
            })
            .collect(),
    };
    assert_eq!(
        scheduler.answer(&wait("a")),
        found(0, &[]),
        "never looked up"
    );
    begin_lookup(&mut scheduler, &head);
    assert_eq!(scheduler.answer(&wait("a")), found(2, &[("memory", 2)]));
    tier.shut();
    begin_lookup(&mut scheduler, &whole);
    let uid = scheduler.send(&wait("b")).expect("sent");
    assert_eq!(status(&mut scheduler, "b"), Reply::None);
    tier.open();
    let both = found(6, &[("dram", 2), ("memory", 4)]);
    let reply = scheduler.receive(uid, Operation::WaitLookup);
    assert_eq!(reply.expect("an answer"), both);
    assert_eq!(scheduler.answer(&wait("b")), both, "it is known by now");
    // The request ends while its client waits, and the time of a wait is over.
    let wait_for = |request: &str, timeout| Request::WaitLookup {
        request_id: request.to_owned(),
        timeout,
    };
    evict_to_lower_tier(&server);
    tier.shut();
    begin_lookup(&mut scheduler, &whole);
    let uid = scheduler.send(&wait_for("b", 20.0)).expect("sent");
    let late = scheduler.send(&wait_for("b", 0.001)).expect("sent");
    assert_eq!(status(&mut scheduler, "b"), Reply::None);
    server.service.tick(Instant::now() + Duration::from_secs(1));
    let reply = scheduler.receive(late, Operation::WaitLookup);
    assert_eq!(reply.expect("an answer"), Reply::None);
    end_session(&mut scheduler, "b");
    let reply = scheduler.receive(uid, Operation::WaitLookup);
    assert_eq!(reply.expect("an answer"), found(0, &[]));
    assert_eq!(scheduler.answer(&wait("b")), found(0, &[]), "it has ended");
    tier.open();
}

#[test]
fn during_a_promotion_the_status_is_pending_and_other_requests_are_served() {
    let (server, tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(2, 4 * CHUNK);
    let key = worker.key("a", &tokens, 0..4);
    worker.store(&key);
    evict_to_lower_tier(&server);
    tier.shut();
    begin_lookup(&mut scheduler, &key_for(&key, "slow"));
    for _ in 0..3 {
        assert_eq!(status(&mut scheduler, "slow"), Reply::None);
    }
    let other = worker.key("other", &prompt(3, 2 * CHUNK), 0..2);
    assert_eq!(worker.store(&other), 2);
    assert_eq!(lookup(&mut scheduler, &other), 2);
    end_session(&mut scheduler, "other");
    assert_eq!(status(&mut scheduler, "slow"), Reply::None);
    tier.open();
    let waited = scheduler.answer(&wait("slow", 10.0));
    assert_eq!(waited, Reply::Int(4));
    assert_eq!(status(&mut scheduler, "slow"), Reply::Int(4));
    end_session(&mut scheduler, "slow");
    server.assert_idle();
}

#[test]
fn a_waiting_request_is_answered_however_its_lookup_ends() {
    let (server, tier) = server();
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(4, 3 * CHUNK);
    let key = worker.key("a", &tokens, 0..3);
    worker.store(&key);
    evict_to_lower_tier(&server);
    tier.shut();
    let mut waiting = server.client();
    let mut other = server.client();
    begin_lookup(&mut waiting, &key_for(&key, "a"));
    let uid = waiting.send(&wait("a", 10.0)).expect("sent");
    // The wait blocks neither its own connection nor others, which do not share its request ids.
    assert_eq!(status(&mut other, "a"), Reply::Int(0));
    assert_eq!(status(&mut waiting, "a"), Reply::None);
    tier.open();
    let reply = waiting.receive(uid, Operation::WaitPrefetchStatus);
    assert_eq!(reply.expect("an answer"), Reply::Int(3));
    end_session(&mut waiting, "a");

    // The request ends while a client waits for its lookup.
    evict_to_lower_tier(&server);
    tier.shut();
    begin_lookup(&mut waiting, &key_for(&key, "b"));
    let uid = waiting.send(&wait("b", 10.0)).expect("sent");
    server.eventually("the tier reads the chunks", |_| tier.loads() == 6);
    end_session(&mut waiting, "b");
    let reply = waiting.receive(uid, Operation::WaitPrefetchStatus);
    assert_eq!(reply.expect("an answer"), Reply::Int(0));
    // The promotion ends by an abort, before the tier could complete it.
    server.eventually("the fetch ended", |status| status.usage.reserved_slots == 0);
    tier.open();
    assert_eq!(server.status().lower[0].promoted, 3, "no request needed it");

    // The wait's own timeout expires first.
    evict_to_lower_tier(&server);
    tier.shut();
    begin_lookup(&mut waiting, &key_for(&key, "c"));
    let uid = waiting.send(&wait("c", 0.001)).expect("sent");
    // This request is handled after the wait, on the same connection.
    assert_eq!(status(&mut waiting, "c"), Reply::None);
    server.service.tick(Instant::now() + Duration::from_secs(1));
    let reply = waiting.receive(uid, Operation::WaitPrefetchStatus);
    assert_eq!(reply.expect("an answer"), Reply::None);
    tier.open();
    let known = waiting.answer(&wait("unknown", f64::NAN));
    assert_eq!(known, Reply::Int(0));
    assert_eq!(waiting.answer(&wait("c", 10.0)), Reply::Int(3));
    end_session(&mut waiting, "c");
    server.assert_idle();
}

#[test]
fn a_lookup_whose_promotion_times_out_is_a_miss() {
    let tier: Tier = Arc::new(Gated::new(MemoryBackend::default()));
    let mut engine = EngineConfig::default();
    engine.promotion_timeout = Duration::from_millis(200);
    let tiers = vec![Arc::clone(&tier) as _];
    let server = Server::with_engine(engine, tiers, 1 << 20, |_| {}, |_| {});
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let key = worker.key("a", &prompt(10, 2 * CHUNK), 0..2);
    worker.store(&key);
    evict_to_lower_tier(&server);
    tier.shut();
    begin_lookup(&mut scheduler, &key_for(&key, "a"));
    let uid = scheduler.send(&wait("a", 600.0)).expect("sent");
    let reply = scheduler.receive(uid, Operation::WaitPrefetchStatus);
    assert_eq!(reply.expect("an answer"), Reply::Int(0));
    assert_eq!(status(&mut scheduler, "a"), Reply::Int(0));
    server.eventually("the fetch ended", |status| status.usage.reserved_slots == 0);
    tier.open();
    assert_eq!(server.status().lower[0].promoted, 0, "no request needed it");
    assert_eq!(
        status(&mut scheduler, "a"),
        Reply::Int(0),
        "the miss is final"
    );
    end_session(&mut scheduler, "a");
    server.assert_idle();
}

#[test]
fn a_chunk_counts_once_every_rank_is_promoted() {
    let (server, _tier) = server();
    let mut ranks: Vec<Worker> = (0..2)
        .map(|rank| Worker::register_rank(&server, u64::from(rank) + 1, rank, 2, "float32"))
        .collect();
    let tokens = prompt(5, 4 * CHUNK);
    for (rank, chunks) in [(0, 4), (1, 3)] {
        let key = ranks[rank].key("a", &tokens, 0..chunks);
        ranks[rank].store(&key);
    }
    evict_to_lower_tier(&server);
    let mut scheduler = server.client();
    let key = ranks[0].key("b", &tokens, 0..4);
    assert_eq!(lookup(&mut scheduler, &key), 3);
    for rank in &mut ranks {
        let key = rank.key("b", &tokens, 0..3);
        assert!(rank.retrieve(&key));
    }
    end_session(&mut scheduler, "b");
    server.assert_idle();
}

#[test]
fn a_later_lookup_of_a_request_replaces_one_that_is_promoting() {
    let (server, tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(6, 4 * CHUNK);
    let key = worker.key("a", &tokens, 0..4);
    worker.store(&key);
    evict_to_lower_tier(&server);
    tier.shut();
    begin_lookup(&mut scheduler, &key_for(&key, "again"));
    server.eventually("the tier reads the chunks", |_| tier.loads() == 4);
    let other = worker.key("x", &prompt(7, CHUNK), 0..1);
    worker.store(&other);
    begin_lookup(&mut scheduler, &key_for(&other, "again"));
    assert_eq!(status(&mut scheduler, "again"), Reply::Int(1));
    server.eventually("the first fetch ended", |status| {
        status.usage.reserved_slots == 0
    });
    tier.open();
    assert_eq!(server.status().lower[0].promoted, 0, "no request needed it");
    assert_eq!(status(&mut scheduler, "again"), Reply::Int(1));
    end_session(&mut scheduler, "again");
    server.assert_idle();
}

#[test]
fn a_clear_also_clears_lower_tiers() {
    let (server, _tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(8, 3 * CHUNK);
    let key = worker.key("a", &tokens, 0..3);
    worker.store(&key);
    evict_to_lower_tier(&server);
    let clear = scheduler.ask(&Request::Clear { force: false });
    assert_eq!(clear.expect("an answer"), Reply::None);
    assert_eq!(lookup(&mut scheduler, &key), 0);
    end_session(&mut scheduler, "a");
    server.assert_idle();
}

#[test]
fn promoted_chunks_are_reported_to_subscribers() {
    let (server, _tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(9, 2 * CHUNK);
    let key = worker.key("a", &tokens, 0..2);
    worker.store(&key);
    evict_to_lower_tier(&server);
    assert_eq!(lookup(&mut scheduler, &key), 2);
    end_session(&mut scheduler, "a");
    let events = events(&server);
    let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
    let (stored, removed) = (KvEventKind::Stored, KvEventKind::Removed);
    assert_eq!(kinds, [stored, stored, removed, removed, stored, stored]);
    assert_eq!(events[4].tokens[..], tokens[..CHUNK]);
}

/// Returns the events of a server so far.
fn events(server: &Server) -> Vec<KvEvent> {
    let mut router = server.client();
    let subscribe = Request::SubscribeKvEvents {
        instance_id: 9,
        model_name: MODEL.to_owned(),
        cursor: 0,
        max_events: 100,
    };
    let uid = router.send(&subscribe).expect("sent");
    let reply = router.receive(uid, Operation::SubscribeKvEvents);
    let Reply::Events(batch) = reply.expect("events") else {
        panic!("not a batch");
    };
    batch.events
}

/// A shared tier that hears of a clear while it is asked.
#[derive(Debug)]
struct Clearing {
    inner: MemoryBackend,
    log: ClearLog,
    heard: Clears,
}

impl Backend for Clearing {
    lmc_backend::forward!(inner: name sharing load clear clears usage health close);

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        let learned = self.log.learn(&self.heard, "a test");
        learned.expect("few clears");
        self.inner.locate(keys, hint, deadline)
    }
}

impl WriteBackend for Clearing {
    lmc_backend::forward!(inner: store remove list);
}

#[test]
fn what_is_promoted_for_a_request_of_before_a_clear_is_not_reported() {
    let log = ClearLog::default();
    let host = EngineHost::new(log.clone());
    let start = StartId::random().expect("random numbers");
    let tier = Arc::new(Clearing {
        inner: MemoryBackend::shared(),
        log,
        heard: Clears::from_entries([(start, 1)]).expect("one clear"),
    });
    let server = Server::with_host(host, vec![tier]);
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let tokens = prompt(9, 2 * CHUNK);
    let key = worker.key("a", &tokens, 0..2);
    worker.store(&key);
    evict_to_lower_tier(&server);
    assert_eq!(lookup(&mut scheduler, &key), 2, "it began before the clear");
    end_session(&mut scheduler, "a");
    server.service.engine().clear_dram(InUse::Remove);
    let (stored, removed) = (KvEventKind::Stored, KvEventKind::Removed);
    let kinds: Vec<_> = events(&server).iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [stored, stored, removed, removed]);
    server.assert_idle();
}

/// A worker prepares a store of a prompt that is in a lower tier, and never commits. Every lookup
/// of the prompt took 10 s and missed.
#[test]
fn an_uncommitted_store_does_not_hide_what_a_lower_tier_has() {
    let (server, _tier) = server();
    let mut worker = Worker::register(&server, 1);
    let mut silent = Worker::register(&server, 2);
    let mut scheduler = server.client();
    let tokens = prompt(1, 4 * CHUNK);
    let key = worker.key("a", &tokens, 0..4);
    assert_eq!(worker.store(&key), 4);
    evict_to_lower_tier(&server);
    let uncommitted = silent.key("b", &tokens, 0..4);
    assert_eq!(silent.prepare_store(&uncommitted).0.len(), 4);
    let key = CacheKey {
        request_id: "c".to_owned(),
        ..key
    };
    assert_eq!(lookup(&mut scheduler, &key), 4);
    assert!(worker.retrieve(&key));
    end_session(&mut scheduler, "c");
    // The late commit changes nothing: the chunks are cached, and its slots are released.
    silent.commit_store(&uncommitted);
    server.assert_idle();
}
