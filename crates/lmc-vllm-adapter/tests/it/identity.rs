//! Chunks are not shared between KV caches of the same shape and different element formats.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{
    Answer as _, CHUNK, HIDDEN, LAYERS, MODEL, Server, Worker, end_session, lookup, prompt,
    registration,
};
use lmc_backend::MemoryBackend;
use lmc_backend::conformance::Gated;
use lmc_engine::{ChunkEvent, EventSink, Host as _, InUse};
use lmc_key::SpaceId;
use lmc_vllm_adapter::{
    CacheKey, Client, ConfigValue, EngineDrivenContext, Reply, Request, UnknownFields,
};

/// `--kv-cache-dtype fp8_e4m3`, `fp8_e5m2`, `nvfp4` and others, as vLLM registers them.
const OPAQUE: &str = "uint8";

fn register(server: &Server, instance_id: u64) -> Worker {
    Worker::register_rank(server, instance_id, 0, 1, OPAQUE)
}

fn unregister(worker: &mut Worker) {
    let unregister = Request::Unregister {
        instance_id: worker.instance_id,
        engine_driven: true,
    };
    let reply = worker.client.ask(&unregister);
    assert_eq!(reply.expect("an answer"), Reply::None);
}

/// Retrieves a range without a check of its bytes, and returns true on a hit.
fn finds(worker: &mut Worker, key: &CacheKey) -> bool {
    let found = worker.prepare_retrieve(key).is_some();
    let commit = Request::CommitRetrieve {
        key: key.clone(),
        instance_id: worker.instance_id,
    };
    let committed = worker.client.answer(&commit);
    assert_eq!(committed, Reply::Bool(found));
    found
}

/// Looks up a prompt from a new scheduler and returns the number of leading chunks.
fn hits(server: &Server, key: &CacheKey, request: &str) -> u64 {
    let mut scheduler = server.client();
    let key = CacheKey {
        request_id: request.to_owned(),
        ..key.clone()
    };
    let hits = lookup(&mut scheduler, &key);
    end_session(&mut scheduler, request);
    hits
}

fn ping(client: &mut Client, instance_id: u64) -> Reply {
    let instance_id = Some(instance_id);
    client.ask(&Request::Ping { instance_id }).expect("answer")
}

fn warnings(server: &Server) -> u64 {
    server.status().counts.opaque_layouts_shared
}

/// Counts the reports of new spaces.
#[derive(Debug, Default)]
struct Reports(AtomicUsize);

impl EventSink for Reports {
    fn changed(&self, _event: &ChunkEvent<'_>) {}

    fn host_changed(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn the_space_of_a_worker_is_live_and_reported_before_its_first_request() {
    let server = Server::start();
    let reports = Arc::<Reports>::default();
    let events = server.service.engine().host().events().clone();
    events.listen(Arc::clone(&reports) as _);
    let _worker = register(&server, 1);
    assert_eq!(server.service.spaces().len(), 1);
    assert_eq!(reports.0.load(Ordering::Relaxed), 1);
}

/// `float16` and `bfloat16` have elements of one size, so only the name distinguishes them.
#[test]
fn float16_and_bfloat16_never_share_bytes() {
    let server = Server::start();
    let mut half = Worker::register_rank(&server, 1, 0, 1, "float16");
    let tokens = prompt(1, 3 * CHUNK);
    let key = half.key("a", &tokens, 0..3);
    assert_eq!(half.store(&key), 3);
    let mut brain = Worker::register_rank(&server, 2, 0, 1, "bfloat16");
    assert!(!finds(&mut brain, &key), "float16 bytes for bfloat16");
    assert_eq!(hits(&server, &key, "both"), 0);
    assert_eq!(brain.store(&key), 3);
    assert!(half.retrieve(&half.key("b", &tokens, 0..3)));
    assert!(brain.retrieve(&brain.key("c", &tokens, 0..3)));
}

/// A restart, and a second engine beside the first.
#[test]
fn equal_engines_share_chunks_one_after_the_other_and_at_once() {
    let server = Server::start();
    let tokens = prompt(8, 3 * CHUNK);
    let mut first = Worker::register(&server, 1);
    let key = first.key("a", &tokens, 0..3);
    assert_eq!(first.store(&key), 3);
    let mut beside = Worker::register(&server, 2);
    assert!(beside.retrieve(&beside.key("b", &tokens, 0..3)));
    for worker in [&mut first, &mut beside] {
        unregister(worker);
    }
    let mut after = Worker::register(&server, 3);
    assert!(after.retrieve(&after.key("c", &tokens, 0..3)));
    assert_eq!(hits(&server, &key, "d"), 3);
}

/// A later client may say by a new field what its bytes mean.
#[test]
fn a_field_that_is_not_known_keeps_chunks_apart_and_is_named() {
    let server = Server::start();
    let tokens = prompt(9, 2 * CHUNK);
    let mut plain = Worker::register(&server, 1);
    let key = plain.key("a", &tokens, 0..2);
    assert_eq!(plain.store(&key), 2);
    let with = |instance_id, value| {
        let mut context = registration(instance_id, "float32", 1);
        context.unknown = UnknownFields::of([("kv_order", ConfigValue::Int(value))]);
        Worker::register_as(server.client(), context)
    };
    let mut first = with(2, 1);
    let named = server.status().instances;
    let named = named.iter().find(|worker| worker.instance_id == 2);
    assert_eq!(
        named.expect("it has registered").unknown_fields,
        ["kv_order"]
    );
    assert!(!finds(&mut first, &key), "the field counts");
    assert_eq!(first.store(&key), 2);
    let mut other = with(3, 2);
    assert!(!finds(&mut other, &key), "its value counts");
    let mut equal = with(4, 1);
    assert!(finds(&mut equal, &key), "equal fields are one layout");
}

/// vLLM is restarted with `fp8_e5m2` instead of `fp8_e4m3`: the layout on the wire is the same, but
/// the earlier chunks have another format.
#[test]
fn chunks_of_an_unknown_format_end_with_their_last_worker() {
    let server = Server::start();
    let mut first = register(&server, 1);
    let tokens = prompt(2, 3 * CHUNK);
    let key = first.key("a", &tokens, 0..3);
    assert_eq!(first.store(&key), 3);
    assert!(first.retrieve(&key));
    unregister(&mut first);
    server.eventually("the memory is released", |status| status.usage.chunks == 0);
    for instance_id in [2, 1] {
        let mut next = register(&server, instance_id);
        assert_eq!(hits(&server, &key, "next"), 0);
        assert!(!finds(&mut next, &key));
        assert_eq!(next.store(&key), 3, "no chunk is cached");
        assert!(next.retrieve(&key));
        unregister(&mut next);
    }
    assert_eq!(warnings(&server), 0);
}

/// A worker that sends no ping for too long is removed, and its chunks with it.
#[test]
fn chunks_of_an_unknown_format_end_when_a_silent_worker_is_removed() {
    let grace = Duration::from_secs(7200);
    let server = Server::with(1 << 20, |config| config.registration_grace = grace, |_| {});
    let mut first = register(&server, 1);
    let key = first.key("a", &prompt(3, 2 * CHUNK), 0..2);
    first.store(&key);
    server.service.tick(Instant::now() + grace);
    assert!(server.status().instances.is_empty());
    let mut again = register(&server, 1);
    assert!(!finds(&mut again, &key));
    assert_eq!(hits(&server, &key, "b"), 0);
}

/// A killed process is removed after 30 s. The next process of its engine may register before.
#[test]
fn a_worker_whose_connection_was_cut_keeps_its_chunks_and_shares_with_no_other() {
    let server = Server::start();
    let mut first = register(&server, 1);
    let tokens = prompt(4, 2 * CHUNK);
    let key = first.key("a", &tokens, 0..2);
    first.store(&key);
    first.client = server.client();
    server.eventually("the cut is noticed", |status| {
        status.instances.iter().any(|worker| !worker.connected)
    });
    let mut next = register(&server, 2);
    assert!(!finds(&mut next, &key), "chunks of another process");
    assert_eq!(hits(&server, &key, "b"), 0);
    // The first worker is alive and has a new connection.
    assert_eq!(ping(&mut first.client, 1), Reply::Bool(true));
    assert!(first.retrieve(&first.key("c", &tokens, 0..2)));
    assert_eq!(next.store(&key), 2);
    assert_eq!(warnings(&server), 0, "they share nothing");
}

/// The ranks of an engine register one after another, and each may register again.
#[test]
fn ranks_of_one_engine_share_a_generation() {
    let server = Server::start();
    let rank = |id, rank| Worker::register_rank(&server, id, rank, 2, OPAQUE);
    let mut workers = [rank(10, 0), rank(11, 1)];
    let tokens = prompt(5, 3 * CHUNK);
    for worker in &mut workers {
        let key = worker.key("a", &tokens, 0..3);
        assert_eq!(worker.store(&key), 3);
    }
    let key = workers[0].key("b", &tokens, 0..3);
    assert_eq!(hits(&server, &key, "b"), 3);
    // One rank unregisters and registers again while the other stays.
    unregister(&mut workers[0]);
    workers[0] = rank(10, 0);
    for worker in &mut workers {
        let key = worker.key("c", &tokens, 0..3);
        assert!(worker.retrieve(&key));
    }
    assert_eq!(hits(&server, &key, "d"), 3);
    assert_eq!(warnings(&server), 0);
}

/// Covers chunks that left DRAM, and chunks in promotion or demotion when the worker unregisters.
#[test]
fn chunks_of_an_unknown_format_end_in_every_tier() {
    let tier = Arc::new(Gated::new(MemoryBackend::default()));
    let lower = vec![Arc::clone(&tier) as _];
    let server = Server::with_tiers(lower, 1 << 20, |_| {}, |_| {});
    let copied = |chunks| {
        server.eventually("copies are in the lower tier", |status| {
            status.lower[0].written == chunks && status.lower[0].queued_bytes == 0
        });
    };
    let mut first = register(&server, 1);
    let tokens = prompt(6, 3 * CHUNK);
    let key = first.key("a", &tokens, 0..3);
    assert_eq!(first.store(&key), 3);
    copied(3);
    server.service.engine().clear_dram(InUse::Remove);
    assert_eq!(hits(&server, &key, "below"), 3, "they are promoted");
    server.service.engine().clear_dram(InUse::Remove);
    // One prompt is being promoted ...
    tier.shut();
    let mut scheduler = server.client();
    let promoting = CacheKey {
        worker_id: None,
        request_id: "promoting".to_owned(),
        ..key.clone()
    };
    let reply = scheduler.ask(&Request::Lookup(promoting));
    assert_eq!(reply.expect("an answer"), Reply::None);
    // ... and another is being written to the lower tier.
    let more = first.key("more", &prompt(7, 2 * CHUNK), 0..2);
    assert_eq!(first.store(&more), 2);
    unregister(&mut first);
    let mut next = register(&server, 2);
    tier.open();
    for key in [&key, &more] {
        assert_eq!(hits(&server, key, "next"), 0);
        assert!(!finds(&mut next, key));
    }
    end_session(&mut scheduler, "promoting");
    for key in [&key, &more] {
        assert!(next.store(key) > 0);
        assert!(next.retrieve(key));
    }
    end_session(&mut scheduler, "a");
    server.assert_idle();
}

/// A space that no engine has named here may be a generation of another server.
#[test]
fn only_spaces_that_engines_have_named_and_can_name_again_are_lasting() {
    for (dtype, can_be_named_again) in [("bfloat16", true), (OPAQUE, false)] {
        let server = Server::start();
        let is_lasting = server.service.lasting_spaces();
        let mut worker = Worker::register_rank(&server, 1, 0, 1, dtype);
        let key = worker.key("a", &prompt(6, CHUNK), 0..1);
        assert_eq!(worker.store(&key), 1);
        let spaces = server.service.spaces();
        let space = spaces.iter().find(|space| space.chunks == 1);
        let space = space.expect("that of the chunk");
        assert_eq!(is_lasting(space.id), can_be_named_again);
        assert!(!is_lasting(SpaceId::new([7; 16])));
    }
}

/// With `--identity`, which names the format of the engines' KV caches, the chunks are kept.
#[test]
fn an_identity_keeps_chunks_of_an_unknown_format() {
    let with = |identity: &'static str| {
        let identity = identity.parse().expect("an identity");
        Server::with(1 << 20, |config| config.identity = identity, |_| {})
    };
    let server = with("fp8_e4m3");
    let mut first = register(&server, 1);
    let tokens = prompt(8, 3 * CHUNK);
    let key = first.key("a", &tokens, 0..3);
    first.store(&key);
    unregister(&mut first);
    let mut next = register(&server, 2);
    assert_eq!(hits(&server, &key, "b"), 3);
    assert!(next.retrieve(&key));
    let _another = register(&server, 3);
    assert_eq!(warnings(&server), 0, "the identity names the format");
}

/// Two engines, one of which may have been started with another `--kv-cache-dtype`.
#[test]
fn two_engines_of_one_unknown_format_are_warned_about_once() {
    let server = Server::start();
    let mut first = register(&server, 1);
    assert_eq!(warnings(&server), 0);
    let mut second = register(&server, 2);
    assert_eq!(warnings(&server), 1);
    let key = first.key("a", &prompt(9, 2 * CHUNK), 0..2);
    first.store(&key);
    assert!(second.retrieve(&key), "engines of one format do share");
    assert_eq!(warnings(&server), 1);
    unregister(&mut second);
    let _third = register(&server, 3);
    assert_eq!(warnings(&server), 2, "another engine, another warning");
    // With known formats there is nothing to warn about.
    let _brain = Worker::register_rank(&server, 4, 0, 1, "bfloat16");
    let _brain = Worker::register_rank(&server, 5, 0, 1, "bfloat16");
    assert_eq!(warnings(&server), 2);
}

/// Two engines of two ranks each register one worker each. Two workers of one rank reveal them.
#[test]
fn two_workers_of_one_rank_reveal_two_engines() {
    let server = Server::start();
    let rank = |id| Worker::register_rank(&server, id, 0, 2, OPAQUE);
    let (mut first, mut second) = (rank(1), rank(2));
    assert_eq!(warnings(&server), 0, "they may be ranks 0 and 1");
    let key = first.key("a", &prompt(10, 2 * CHUNK), 0..2);
    first.store(&key);
    assert_eq!(warnings(&server), 0);
    assert!(second.retrieve(&key));
    assert_eq!(warnings(&server), 1);
}

/// Tensor-parallel ranks of an MLA model have one KV cache: they register with a world size of 1
/// and are all KV rank 0; each request carries the number of workers that read the rank.
#[test]
fn mla_readers_of_one_engine_do_not_count_as_two_engines() {
    let server = Server::start();
    let register = |id| {
        let context = EngineDrivenContext {
            instance_id: id,
            model_name: MODEL.to_owned(),
            world_size: 1,
            block_size: 4,
            num_layers: 2 * LAYERS,
            hidden_dim_size: 4 * HIDDEN,
            dtype: OPAQUE.to_owned(),
            use_mla: true,
            num_physical_slots: Some(CHUNK as u32),
            record: None,
            unknown: UnknownFields::default(),
        };
        let mut client = server.client();
        let reply = client.ask(&Request::RegisterEngineDriven(context));
        assert!(matches!(reply, Ok(Reply::Registered { .. })), "{reply:?}");
        Worker {
            client,
            instance_id: id,
            rank: 0,
            world_size: 1,
            pool: server.pool(),
            dtype: OPAQUE,
        }
    };
    let key = |worker: &Worker| CacheKey {
        num_kv_readers: 2,
        ..worker.key("a", &prompt(11, 2 * CHUNK), 0..2)
    };
    let mut readers = [register(1), register(2)];
    let wanted = key(&readers[0]);
    assert_eq!(readers[0].store(&wanted), 2);
    for reader in &mut readers {
        assert!(reader.retrieve(&wanted));
    }
    assert_eq!(warnings(&server), 0);
    let mut stranger = register(3);
    assert!(stranger.retrieve(&wanted));
    assert_eq!(warnings(&server), 1, "two readers, three workers");
}

/// A scheduler stays connected while its worker is removed and registers again. With another
/// engine's layout registered too, its lookups must still count its own worker's chunks.
#[test]
fn a_scheduler_follows_its_worker_into_the_next_generation() {
    let server = Server::start();
    let _other = Worker::register_rank(&server, 1, 0, 1, "bfloat16");
    let mut scheduler = server.client();
    for round in 0..2 {
        let mut worker = register(&server, 2);
        let key = |request: &str, seed| worker.key(request, &prompt(seed, 2 * CHUNK), 0..2);
        let (first, second) = (format!("first {round}"), format!("second {round}"));
        let (bind, ask) = (key(&first, 30 + round), key(&second, 30 + round));
        assert_eq!(lookup(&mut scheduler, &bind), 0);
        assert_eq!(worker.store(&bind), 2);
        end_session(&mut scheduler, &first);
        assert_eq!(lookup(&mut scheduler, &ask), 2, "round {round}");
        end_session(&mut scheduler, &second);
        unregister(&mut worker);
    }
}
