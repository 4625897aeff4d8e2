//! The leases, slots and lookups of one engine do not starve another engine.

use std::time::{Duration, Instant};

use crate::common::{
    Answer as _, CHUNK, CHUNK_BYTES, LAYERS, MODEL, Server, Worker, end_session, lookup, prompt,
    resident_bytes,
};
use lmc_testkit::rounds;
use lmc_vllm_adapter::{CacheKey, ClientError, EngineDrivenContext, Reply, Request, UnknownFields};

/// Chunks per prompt in these tests.
const PROMPT: usize = 32;

/// A scheduler looks up prompts that fill the pool and keeps its leases. A store of another engine
/// got no slot for 300 s.
#[test]
fn a_scheduler_that_leases_all_it_can_leaves_another_engine_its_share() {
    let server = Server::start();
    // Each chunk takes a page.
    let slots = server.pool_bytes as usize / CHUNK_BYTES.next_multiple_of(4096);
    let mut greedy = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let mut hits = 0;
    for number in 0..slots / PROMPT {
        let tokens = prompt(number as u32 + 10, PROMPT * CHUNK);
        let key = greedy.key(&format!("greedy {number}"), &tokens, 0..PROMPT);
        greedy.store(&key);
        hits += lookup(&mut scheduler, &key) as usize;
    }
    assert!(hits <= slots / 4 * 3, "{hits} of {slots} chunks");
    assert!(
        hits >= slots / 2,
        "alone it has most of the pool: {hits} of {slots}"
    );

    let mut modest = Worker::register(&server, 2);
    let mut its_scheduler = server.client();
    let tokens = prompt(1, 8 * CHUNK);
    let key = modest.key("modest", &tokens, 0..8);
    assert_eq!(modest.store(&key), 8);
    assert_eq!(lookup(&mut its_scheduler, &key), 8, "within its share");
    assert!(modest.retrieve(&key));
    // The first has far more than its share of two.
    let more = greedy.key("more", &prompt(2, 4 * CHUNK), 0..4);
    assert_eq!(greedy.store(&more), 4);
    assert_eq!(lookup(&mut scheduler, &more), 0);
    // Chunks that are leased already may be leased again.
    let again = CacheKey {
        request_id: "again".to_owned(),
        ..greedy.key("", &prompt(10, PROMPT * CHUNK), 0..PROMPT)
    };
    assert_eq!(lookup(&mut scheduler, &again), PROMPT as u64);
    assert!(server.status().counts.over_limit > 0);

    for number in 0..slots / PROMPT {
        end_session(&mut scheduler, &format!("greedy {number}"));
    }
    assert_eq!(lookup(&mut scheduler, &more), 4);
    for request in ["more", "again"] {
        end_session(&mut scheduler, request);
    }
    end_session(&mut its_scheduler, "modest");
    server.assert_idle();
}

/// A worker prepares as many stores as it can and commits none. Stores of other engines got no slot
/// while it was connected.
#[test]
fn a_worker_that_commits_nothing_leaves_another_engine_its_share() {
    let server = Server::start();
    let slots = server.pool_bytes as usize / CHUNK_BYTES.next_multiple_of(4096);
    let mut modest = Worker::register(&server, 2);
    let of_modest = modest.key("modest", &prompt(1, 8 * CHUNK), 0..8);
    assert_eq!(modest.store(&of_modest), 8);
    let mut greedy = Worker::register(&server, 1);
    let mut taken = 0;
    for number in 0..2 * slots / PROMPT {
        let tokens = prompt(number as u32 + 10, PROMPT * CHUNK);
        let key = greedy.key(&format!("store {number}"), &tokens, 0..PROMPT);
        taken += greedy.prepare_store(&key).0.len();
    }
    assert!(
        (slots / 2..=slots / 4 * 3).contains(&taken),
        "alone it has most of the pool: {taken} of {slots}"
    );
    let again = modest.key("again", &prompt(2, 8 * CHUNK), 0..8);
    assert_eq!(modest.store(&again), 8, "within its share");
    assert!(modest.retrieve(&again));
    assert!(server.status().counts.over_limit > 0);
}

/// A worker that requested more than its share while others held most of the pool got no slot.
#[test]
fn a_store_larger_than_the_share_gets_the_share() {
    let server = Server::start();
    let slots = server.pool_bytes as usize / CHUNK_BYTES.next_multiple_of(4096);
    let mut holders: Vec<Worker> = (1..4).map(|id| Worker::register(&server, id)).collect();
    for (number, worker) in holders.iter_mut().enumerate() {
        let each = slots * 11 / 64;
        let key = worker.key("hold", &prompt(number as u32 + 10, each * CHUNK), 0..each);
        assert_eq!(worker.prepare_store(&key).0.len(), each);
    }
    let mut modest = Worker::register(&server, 9);
    let share = slots * 3 / 16;
    let key = modest.key("m", &prompt(1, 2 * share * CHUNK), 0..2 * share);
    assert_eq!(modest.prepare_store(&key).0.len(), share);
}

/// The lookups of an engine lost a quarter of the pool while its own worker had a store in
/// progress.
#[test]
fn an_engine_does_not_share_with_its_own_worker() {
    let server = Server::start();
    let slots = server.pool_bytes as usize / CHUNK_BYTES.next_multiple_of(4096);
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    let key = worker.key("w", &prompt(999, CHUNK), 0..1);
    assert_eq!(worker.prepare_store(&key).0.len(), 1);
    let mut hits = 0;
    for number in 0..slots / PROMPT {
        let tokens = prompt(number as u32 + 10, PROMPT * CHUNK);
        let key = worker.key(&format!("{number}"), &tokens, 0..PROMPT);
        worker.store(&key);
        hits += lookup(&mut scheduler, &key) as usize;
    }
    assert!(hits > slots / 2, "{hits} of {slots}");
}

/// A worker prepares retrieves and ends none.
#[test]
fn a_worker_that_ends_no_retrieve_leaves_another_engine_its_share() {
    let server = Server::start();
    let slots = server.pool_bytes as usize / CHUNK_BYTES.next_multiple_of(4096);
    let mut greedy = Worker::register(&server, 1);
    let mut taken = 0;
    for number in 0..slots / PROMPT {
        let tokens = prompt(number as u32 + 10, PROMPT * CHUNK);
        let key = greedy.key(&format!("{number}"), &tokens, 0..PROMPT);
        greedy.store(&key);
        taken += greedy.prepare_retrieve(&key).map_or(0, |slots| slots.len());
    }
    assert!(taken <= slots / 4 * 3, "{taken} of {slots}");
    let mut modest = Worker::register(&server, 2);
    let mut scheduler = server.client();
    let key = modest.key("modest", &prompt(1, 8 * CHUNK), 0..8);
    assert_eq!(modest.store(&key), 8);
    assert_eq!(lookup(&mut scheduler, &key), 8);
    assert!(modest.retrieve(&key));
}

/// One lookup of a long prompt for the greatest number of ranks took 24 GB, because the keys of all
/// chunks were created for each rank.
#[test]
fn a_lookup_of_every_rank_takes_little_memory() {
    let ranks = rounds(1024, 4096) as u32;
    let server = Server::with(32 << 20, |_| {}, |_| {});
    let mut worker = Worker::register_on(server.client(), 1, 0, ranks, "float32");
    let tokens = prompt(1, CHUNK << 15);
    for rank in 0..ranks {
        let key = CacheKey {
            worker_id: Some(rank),
            ..worker.key("store", &tokens[..CHUNK], 0..1)
        };
        assert_eq!(worker.store(&key), 1);
    }
    let key = CacheKey {
        end: tokens.len() as u64,
        token_ids: tokens.clone(),
        ..worker.key("lookup", &tokens[..CHUNK], 0..1)
    };
    let before = resident_bytes();
    assert_eq!(lookup(&mut server.client(), &key), 1);
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 256 << 20, "{grown} bytes");
}

/// A lookup of many ranks under a model with many workers visited every worker for every rank,
/// while all other requests waited.
#[test]
fn a_lookup_costs_little_however_many_workers_and_ranks_there_are() {
    const WORKERS: u64 = 400;
    const RANKS: u32 = 4096;
    let server = Server::start();
    let mut client = server.client();
    let register = |instance_id, world_size| {
        Request::RegisterEngineDriven(EngineDrivenContext {
            instance_id,
            model_name: MODEL.to_owned(),
            world_size,
            block_size: 4,
            num_layers: LAYERS,
            hidden_dim_size: 8,
            dtype: "float32".to_owned(),
            use_mla: false,
            num_physical_slots: Some(CHUNK as u32),
            record: None,
            unknown: UnknownFields::default(),
        })
    };
    let key = |world_size, worker_id| CacheKey {
        model_name: MODEL.to_owned(),
        world_size,
        worker_id,
        token_ids: prompt(1, CHUNK),
        end: CHUNK as u64,
        request_id: "r".to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    };
    for instance_id in 0..WORKERS {
        let reply = client.answer(&register(instance_id, RANKS));
        assert!(matches!(reply, Reply::Registered { .. }), "{reply:?}");
        // The retrieve names the rank of the worker.
        let retrieve = Request::PrepareRetrieve {
            key: key(RANKS, Some(instance_id as u32)),
            instance_id,
        };
        let reply = client.answer(&retrieve);
        assert_eq!(reply, Reply::RetrieveSlots(None));
    }
    let asked = Instant::now();
    for _ in 0..200 {
        assert_eq!(lookup(&mut client, &key(RANKS, None)), 0);
        assert_eq!(
            lookup(&mut client, &key(RANKS - 1, None)),
            0,
            "no such worker"
        );
    }
    let took = asked.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
    // A world size above the limit is refused in every request.
    for request in [
        register(0, RANKS + 1),
        Request::Lookup(key(RANKS + 1, None)),
    ] {
        let refused = client.ask(&request);
        assert!(
            matches!(refused, Err(ClientError::Refused { .. })),
            "{refused:?}"
        );
    }
}
