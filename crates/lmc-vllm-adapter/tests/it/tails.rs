//! Tails: the blocks after a prompt's last whole chunk, each a chunk by itself.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::engine::{
    BLOCK, BLOCKS, Engine, HEAD, HEADS, LAYERS, endpoint, engine, finished_loads, hash_of, until,
};
use crate::common::{CHUNK, Server};
use lmc_backend::MemoryBackend;
use lmc_engine::InUse;
use lmc_vllm_adapter::RequestConfigs;
use lmc_vllm_adapter::adapters::{EngineDescription, LoadStoreOp, Prompt};

const PER_CHUNK: usize = CHUNK / BLOCK;

/// A prompt of whole blocks.
fn named(seed: u8, blocks: usize) -> Prompt {
    Prompt::Blocks((0..blocks).map(|block| hash_of(seed, block)).collect())
}

/// A transfer of blocks of a prompt: of whole chunks, or of a tail.
fn op(request: &str, seed: u8, blocks: Range<usize>, at: u32) -> LoadStoreOp {
    let is_tail = !blocks.end.is_multiple_of(PER_CHUNK);
    let prompt = match is_tail {
        true => Prompt::Tail(blocks.clone().map(|block| hash_of(seed, block)).collect()),
        false => named(seed, blocks.end),
    };
    LoadStoreOp {
        request_id: request.to_owned(),
        prompt,
        tokens: blocks.start * BLOCK..blocks.end * BLOCK,
        block_ids: vec![(blocks.map(|block| (at + 3 * block as u32) % BLOCKS as u32)).collect()],
        skip_first_n_tokens: 0,
        cache_salt: String::new(),
        configs: RequestConfigs::default(),
        store_number: None,
    }
}

/// Stores the first blocks of a prompt: whole chunks, and the tail after them.
fn store(engine: &mut Engine, request: &str, seed: u8, blocks: usize) {
    let whole = blocks / PER_CHUNK * PER_CHUNK;
    for range in [0..whole, whole..blocks] {
        if !range.is_empty() {
            let op = op(request, seed, range.clone(), 7);
            engine.content(u32::from(seed), &op.block_ids[0], range.start, false);
            engine.worker.submit_store_request(op);
        }
    }
    let finished = engine.finished(&[request]);
    assert!(finished.stores.contains(request));
}

/// Loads blocks of a prompt, and returns true if their bytes are those that were stored.
fn load(engine: &mut Engine, request: &str, seed: u8, blocks: Range<usize>) -> bool {
    let whole = blocks.end / PER_CHUNK * PER_CHUNK;
    let ranges = [blocks.start..whole, whole..blocks.end];
    let ranges = ranges.into_iter().filter(|range| !range.is_empty());
    let ops: Vec<_> = ranges.map(|range| op(request, seed, range, 2)).collect();
    (engine.worker).batched_submit_retrieve_requests(ops.clone(), None);
    finished_loads(engine, request);
    let failed = engine.worker.get_block_ids_with_load_errors();
    let is_same = ops.iter().all(|op| {
        let first = op.tokens.start / BLOCK;
        engine.content(u32::from(seed), &op.block_ids[0], first, true)
    });
    failed.is_empty() && is_same
}

fn found(engine: &Engine, request: &str, prompt: &Prompt) -> usize {
    let found = engine.lookup(request, prompt) as usize;
    assert_eq!(found % BLOCK, 0);
    found / BLOCK
}

/// Blocks that a lookup finds of a prompt whose first `stored` blocks were stored, if it has `asked`.
fn findable(stored: usize, asked: usize) -> usize {
    let whole = |blocks: usize| blocks / PER_CHUNK * PER_CHUNK;
    match (whole(stored), whole(asked)) {
        // The blocks of a whole chunk are not found one by one.
        (has, wants) if wants < has => wants,
        // A tail is looked for after a whole chunk, and in prompts that have none.
        (0, 1..) => 0,
        _ => stored.min(asked),
    }
}

#[test]
fn blocks_after_the_last_whole_chunk_are_found_and_loaded() {
    let server = Server::start();
    let (mut chunks, mut tails) = (0, 0);
    // Prompts without a whole chunk, with a tail after some, and without a tail.
    for (seed, stored) in [(1, 2), (2, 11), (3, 8)] {
        let mut first = Engine::start(&server, "i", true);
        store(&mut first, "a", seed, stored);
        let mut second = Engine::start(&server, "i", true);
        // Longer prompts than that which was stored, shorter ones, and the same.
        for asked in [stored, stored + 1, stored + 9, stored - 1] {
            let wanted = findable(stored, asked);
            let request = format!("{asked}");
            assert_eq!(found(&second, &request, &named(seed, asked)), wanted);
            if wanted > 0 {
                assert!(load(&mut second, &request, seed, 0..wanted));
            }
            second.scheduler.end_session(&request);
            chunks += wanted / PER_CHUNK * CHUNK;
            tails += wanted % PER_CHUNK * BLOCK;
        }
    }
    server.assert_idle();
    let counts = server.status().counts;
    let whole = [counts.hit_tokens, counts.retrieved_tokens];
    let of_tails = [counts.hit_tokens_tail, counts.retrieved_tokens_tail];
    assert_eq!(whole, [chunks as u64; 2]);
    assert_eq!(of_tails, [tails as u64; 2]);
    assert!(counts.retrieved_tokens <= counts.lookup_tokens);
    assert!(chunks > 0 && tails > 0);
}

#[test]
fn a_prompt_of_which_nothing_is_there_costs_one_lookup() {
    let server = Server::start();
    let engine = Engine::start(&server, "i", true);
    let lookups = || {
        let operations = server.status().operations.into_iter();
        let mut lookups = operations.filter(|operation| operation.operation == "lookup");
        lookups.next().map_or(0, |lookups| lookups.latency.count())
    };
    assert_eq!(found(&engine, "a", &named(1, 7)), 0);
    assert_eq!(lookups(), 1);
    engine.scheduler.end_session("a");
    server.assert_idle();
}

#[test]
fn tokens_of_chunks_and_tail_are_named_by_their_tiers() {
    let lower = Arc::new(MemoryBackend::default());
    let server = Server::with_tiers(vec![lower], 1 << 20, |_| {}, |_| {});
    let mut engine = Engine::start(&server, "i", true);
    let tiers = |engine: &Engine, request: &str, blocks: usize| {
        let configs = RequestConfigs::default();
        let scheduler = &engine.scheduler;
        scheduler.maybe_submit_lookup_request(request, &named(1, blocks), "", &configs);
        let found = until(|| scheduler.check_lookup_result(request));
        assert_eq!(found, (blocks * BLOCK) as u64);
        scheduler.lookup_tiers(request)
    };
    let from = |tier: &str, blocks: usize| (tier.to_owned(), (blocks * BLOCK) as u64);
    store(&mut engine, "a", 1, 7);
    server.eventually("all copies are written", |status| {
        status.lower[0].queued_bytes == 0
    });
    server.service.engine().clear_dram(InUse::Remove);
    assert_eq!(tiers(&engine, "b", 4), [from("memory", 4)]);
    assert_eq!(tiers(&engine, "c", 6), [from("dram", 4), from("memory", 2)]);
    assert!(load(&mut engine, "c", 1, 0..6));
    assert_eq!(
        tiers(&engine, "d", 7),
        [from("dram", 4), from("dram", 2), from("memory", 1)]
    );
    for request in ["b", "c", "d"] {
        engine.scheduler.end_session(request);
    }
    server.assert_idle();
}

/// Each of a worker's registrations would end by itself if nothing were heard of it.
#[test]
fn an_idle_worker_keeps_its_chunks_and_its_tails() {
    const GRACE: Duration = Duration::from_secs(600);
    let server = Server::with(
        1 << 20,
        |config| (config.registration_grace, config.reap_timeout) = (GRACE, 100 * GRACE),
        |_| {},
    );
    let mut engine = Engine::start(&server, "i", true);
    store(&mut engine, "a", 1, 7);
    // The scheduler pings as well.
    server.eventually("the worker has pinged four times", |status| {
        status.counts.pings >= 8
    });
    assert_eq!(server.status().instances.len(), 1, "a worker is shown once");
    server.service.tick(Instant::now() + 2 * GRACE);
    assert_eq!(found(&engine, "b", &named(1, 7)), 7);
    assert!(load(&mut engine, "b", 1, 0..7));
}

#[test]
fn a_tail_ends_where_another_prompt_goes_on_otherwise() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    store(&mut engine, "a", 1, 7);
    // Blocks 0 to 4 are the same.
    let hashes = (0..9).map(|block| hash_of(if block < 5 { 1 } else { 9 }, block));
    let prompt = Prompt::Blocks(hashes.collect());
    assert_eq!(found(&engine, "b", &prompt), 5);
    assert!(load(&mut engine, "b", 1, 0..5));
    engine.scheduler.end_session("b");
    server.assert_idle();
}

#[test]
fn a_whole_chunk_is_found_instead_of_an_older_tail() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    store(&mut engine, "a", 1, 7);
    store(&mut engine, "b", 1, 12);
    assert_eq!(found(&engine, "c", &named(1, 13)), 12);
    assert!(load(&mut engine, "c", 1, 0..12));
    engine.scheduler.end_session("c");
    server.assert_idle();
}

#[test]
fn an_engine_without_tails_shares_whole_chunks_with_one_that_has_them() {
    let server = Server::start();
    let without = EngineDescription {
        tails: false,
        ..engine("i", true)
    };
    let mut with = Engine::start(&server, "i", true);
    let mut without = Engine::at(&endpoint(&server), without);
    assert_eq!(
        [
            with.scheduler.server().tails,
            without.scheduler.server().tails
        ],
        [true, false]
    );
    store(&mut with, "a", 1, 7);
    assert_eq!(found(&without, "b", &named(1, 7)), 4);
    assert!(load(&mut without, "b", 1, 0..4));
    without.scheduler.end_session("b");
    store(&mut without, "c", 2, 4);
    assert_eq!(found(&with, "d", &named(2, 7)), 4);
    with.scheduler.end_session("d");
    server.assert_idle();
}

#[test]
fn a_tail_of_another_tenant_or_identity_is_not_found() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    store(&mut engine, "a", 1, 3);
    let other = Engine::start(&server, "other", true);
    assert_eq!(found(&other, "b", &named(1, 3)), 0);
    assert_eq!(engine.lookup_of("c", &named(1, 3), "tenant"), 0);
    assert_eq!(found(&engine, "d", &named(1, 3)), 3);
    for (engine, request) in [(&other, "b"), (&engine, "c"), (&engine, "d")] {
        engine.scheduler.end_session(request);
    }
    server.assert_idle();
}

#[test]
fn a_tail_that_was_cleared_is_not_found() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    store(&mut engine, "a", 1, 7);
    assert_eq!(found(&engine, "b", &named(1, 7)), 7);
    assert!(engine.scheduler.reset_cache());
    assert!(load(&mut engine, "b", 1, 0..7), "it was found before");
    engine.scheduler.end_session("b");
    assert_eq!(found(&engine, "c", &named(1, 7)), 0);
    engine.scheduler.end_session("c");
    server.assert_idle();
}

/// A store follows the clears that its request was looked up after, with whole chunks and without.
#[test]
fn a_tail_is_stored_after_a_clear_and_not_of_a_request_from_before() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    for (seed, blocks) in [(1, 3), (2, 7)] {
        let prompt = named(seed, blocks);
        let before = format!("before {seed}");
        let after = format!("after {seed}");
        assert_eq!(found(&engine, &before, &prompt), 0);
        engine.scheduler.end_session(&before);
        assert!(engine.scheduler.reset_cache());
        store(&mut engine, &before, seed, blocks);
        assert_eq!(found(&engine, &after, &prompt), 0, "{blocks} blocks");
        store(&mut engine, &after, seed, blocks);
        assert_eq!(found(&engine, "again", &prompt), blocks);
        assert!(load(&mut engine, "again", seed, 0..blocks));
        for request in [&after[..], "again"] {
            engine.scheduler.end_session(request);
        }
    }
    server.assert_idle();
}

/// A request may end while its chunks, or its tail, are being looked up.
#[test]
fn nothing_is_kept_for_a_request_that_ended_in_its_lookup() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    store(&mut engine, "a", 1, 7);
    let ends_after = |round: u32, spins: u32| {
        let (request, configs) = (format!("{round}"), RequestConfigs::default());
        (engine.scheduler).maybe_submit_lookup_request(&request, &named(1, 7), "", &configs);
        (0..spins).for_each(|_| std::hint::spin_loop());
        let is_known = engine.scheduler.check_lookup_result(&request).is_some();
        engine.scheduler.end_session(&request);
        is_known
    };
    // Ends at every moment, until the last requests know their result.
    let mut spins = 0;
    let mut known = 0;
    for round in 0.. {
        known += u32::from(ends_after(round, spins));
        spins += 1 + spins / 64;
        if known > 20 {
            break;
        }
    }
    server.assert_idle();
    assert!(server.status().counts.hit_tokens_tail > 0);
}

#[test]
fn blocks_are_announced_to_no_subscriber_of_chunks() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let depth = || server.status().events.depth;
    store(&mut engine, "a", 1, 3);
    assert_eq!((server.status().usage.chunks, depth()), (3, 0));
    assert!(engine.scheduler.reset_cache());
    assert_eq!((server.status().usage.chunks, depth()), (0, 0));
    // After a clear only what was looked up since is stored.
    assert_eq!(found(&engine, "b", &named(2, PER_CHUNK + 1)), 0);
    store(&mut engine, "b", 2, PER_CHUNK + 1);
    assert_eq!((server.status().usage.chunks, depth()), (2, 1));
}

#[test]
fn a_block_takes_the_memory_of_a_block() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    store(&mut engine, "a", 1, 3);
    let block = 2 * LAYERS * HEADS * BLOCK * HEAD * size_of::<f32>();
    let status = server.status();
    assert_eq!(status.counts.stored_bytes, 3 * block as u64);
    assert_eq!(status.usage.chunks, 3);
}
