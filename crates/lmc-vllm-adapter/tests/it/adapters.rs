//! The engine's side against a real server: what one engine stores, another loads byte for byte, and
//! a server that is gone costs misses only.

use std::collections::HashSet;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common::engine::{
    BLOCK, BLOCKS, Engine, HEAD, HEADS, LAYER, PATIENT, TIMEOUT, blocks, content, described,
    endpoint, engine, group_at, hashes, layers, op, succeeds_forked, tokens, until,
};
use crate::common::{CHUNK, Server, Worker, lookup, prompt};
use lmc_backend::MemoryBackend;
use lmc_engine::InUse;
use lmc_key::ChunkHash;
use lmc_testkit::{Folder, free_port};
use lmc_vllm_adapter::adapters::{
    AdapterError, Endpoint, EngineDescription, Finished, LayerGroup, LayerTensor, LoadStoreOp,
    LogLine, Prompt, SchedulerAdapter, Timeouts, WorkerAdapter,
};
use lmc_vllm_adapter::{CacheKey, OperationCounts, Reply, Request, RequestConfigs, ZmqConfig};
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

#[test]
fn what_one_engine_stores_another_loads_byte_for_byte() {
    let server = Server::start();
    for (hash_mode, prompt) in [(true, hashes(1, 4)), (false, tokens(1, 4))] {
        let identity = format!("hash mode {hash_mode}");
        let mut first = Engine::start(&server, &identity, hash_mode);
        assert_eq!(first.scheduler.server().hash_mode, hash_mode);
        assert_eq!(first.lookup("a", &prompt), 0);
        first.store("a", 7, &prompt, 0..4, 0);
        first.scheduler.end_session("a");
        let mut second = Engine::start(&server, &identity, hash_mode);
        assert_eq!(second.lookup("b", &prompt), 4 * CHUNK as u64);
        assert!(second.load("b", &prompt, 0..4, 5));
        assert!(
            second.content(7, &blocks(4, 5), 0, true),
            "the bytes that were stored"
        );
        second.scheduler.end_session("b");
        let stats = second.worker.stats();
        assert_eq!((stats.retrieved_chunks, stats.retrieves_failed), (4, 0));
    }
    server.assert_idle();
}

/// Chunks that engines with another hash mode have stored were misses like any others.
#[test]
fn an_engine_that_names_chunks_in_another_way_than_the_others_is_named() {
    let server = Server::start();
    let missed = || {
        let counts = server.status().counts;
        let chunk = CHUNK as u64;
        (
            counts.missed_other_settings / chunk,
            counts.missed_never_stored / chunk,
        )
    };
    let mut by_tokens = Engine::start(&server, "tokens", false);
    by_tokens.store("a", 1, &tokens(1, 4), 0..4, 0);
    let mut by_hash = Engine::start(&server, "hashes", true);
    assert_eq!(by_hash.lookup("b", &hashes(1, 4)), 0);
    assert_eq!(missed(), (0, 4), "the chunks have no other naming yet");
    by_hash.store("b", 1, &hashes(1, 4), 0..4, 0);
    by_tokens.lookup("c", &tokens(9, 4));
    assert_eq!(missed(), (0, 8), "its own naming has chunks");
    server.service.engine().clear_dram(InUse::Remove);
    by_tokens.store("d", 2, &tokens(2, 4), 0..4, 0);
    assert_eq!(by_hash.lookup("e", &hashes(3, 4)), 0);
    assert_eq!(missed(), (4, 8));
}

/// A step of a prefill engine waits for that before it answers.
#[test]
fn a_store_is_known_to_the_server_once_its_slots_are_reserved() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let ids = ["a".to_owned()];
    assert!(
        engine.worker.wait_until_reserved(&ids, Duration::ZERO),
        "it has no store"
    );
    for round in 0..20 {
        let prompt = hashes(round, 2);
        let op = op("a", &prompt, 0..2, 0);
        engine.content(1, &op.block_ids[0].clone(), 0, false);
        let before = server.status().operations;
        engine.worker.submit_store_request(op);
        assert!(engine.worker.wait_until_reserved(&ids, TIMEOUT));
        let asked = |operations: &[OperationCounts]| {
            let of = |one: &&OperationCounts| one.operation == "prepare_store";
            operations
                .iter()
                .find(of)
                .map_or(0, |one| one.latency.count())
        };
        assert_eq!(asked(&server.status().operations), asked(&before) + 1);
    }
    engine.finished(&["a"]);
    // Without a server nothing is waited for.
    drop(server);
    until(|| (!engine.worker.server().is_healthy).then_some(()));
    engine
        .worker
        .submit_store_request(op("b", &hashes(1, 2), 0..2, 0));
    assert!(
        engine
            .worker
            .wait_until_reserved(&["b".to_owned()], TIMEOUT)
    );
}

#[test]
fn tokens_that_are_found_are_named_by_their_tiers() {
    let lower = Arc::new(MemoryBackend::default());
    let server = Server::with_tiers(vec![lower], 1 << 20, |_| {}, |_| {});
    let mut engine = Engine::start(&server, "i", true);
    let tiers = |engine: &Engine, request: &str, chunks: usize| {
        let configs = RequestConfigs::default();
        let scheduler = &engine.scheduler;
        scheduler.maybe_submit_lookup_request(request, &hashes(9, chunks), "", &configs);
        let found = until(|| scheduler.check_lookup_result(request));
        assert_eq!(found, (chunks * CHUNK) as u64);
        let tiers = scheduler.lookup_tiers(request);
        scheduler.end_session(request);
        tiers
    };
    let from = |tier: &str, chunks: usize| (tier.to_owned(), (chunks * CHUNK) as u64);
    assert_eq!(tiers(&engine, "a", 0), []);
    engine.store("b", 9, &hashes(9, 4), 0..4, 0);
    assert_eq!(tiers(&engine, "b", 4), [from("dram", 4)]);
    server.eventually("all copies are written", |status| {
        status.lower[0].queued_bytes == 0
    });
    server.service.engine().clear_dram(InUse::Remove);
    assert_eq!(tiers(&engine, "c", 2), [from("memory", 2)]);
    assert_eq!(tiers(&engine, "d", 4), [from("dram", 2), from("memory", 2)]);
    assert_eq!(engine.scheduler.lookup_tiers("d"), [], "it has ended");
}

/// As an engine that sleeps in the middle of a load would unmap its memory.
#[test]
fn memory_that_is_taken_out_of_use_is_touched_no_more() {
    const WIDE: usize = 4096;
    const CHUNKS: usize = BLOCKS * BLOCK / CHUNK;
    let server = Server::with(64 << 20, |_| {}, |_| {});
    let worker = WorkerAdapter::start_with(endpoint(&server), engine("i", true), 0, 1, PATIENT);
    let worker = worker.expect("a worker");
    let shape = [2, BLOCKS, HEADS, BLOCK, WIDE];
    let len = shape.iter().product();
    let memory: Vec<AtomicU32> = (0..len).map(|_| AtomicU32::new(1)).collect();
    let tensor = LayerTensor {
        data: memory.as_ptr().addr(),
        shape: shape.map(|axis| axis as u64).to_vec(),
        strides: (1..=shape.len())
            .map(|axis| shape[axis..].iter().product::<usize>() as u64)
            .collect(),
        dtype: "float32".to_owned(),
    };
    let group = LayerGroup {
        tensors: vec![tensor],
        window: None,
    };
    let layers = described(vec![group]);
    worker.register_kv_caches(layers).expect("a known layout");
    let prompt = hashes(1, CHUNKS);
    worker.submit_store_request(op("a", &prompt, 0..CHUNKS, 0));
    until(|| {
        let finished = worker.get_finished(["a".to_owned()]);
        finished.stores.contains("a").then_some(())
    });
    assert_eq!(worker.stats().stored_chunks, CHUNKS as u64);
    memory
        .iter()
        .for_each(|element| element.store(0, Ordering::Relaxed));
    worker.submit_retrieve_request(op("b", &prompt, 0..CHUNKS, 0));
    let loaded = || (memory.iter()).filter(|element| element.load(Ordering::Relaxed) == 1);
    let deadline = Instant::now() + TIMEOUT;
    while memory[0].load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < deadline, "nothing was loaded");
    }
    worker.unregister_kv_caches();
    let before = loaded().count();
    until(|| {
        worker
            .get_finished([])
            .retrieves
            .contains("b")
            .then_some(())
    });
    assert_eq!(loaded().count(), before);
    worker.shutdown();
}

#[test]
fn engines_of_other_identities_and_stock_clients_find_nothing() {
    let server = Server::start();
    let mut ours = Engine::start(&server, "bfloat16", false);
    let prompt = tokens(2, 3);
    ours.store("a", 1, &prompt, 0..3, 0);
    assert_eq!(ours.lookup("b", &prompt), 3 * CHUNK as u64);
    let other = Engine::start(&server, "fp8", false);
    assert_eq!(other.lookup("c", &prompt), 0);
    let Prompt::Tokens(tokens) = &prompt else {
        unreachable!("made above")
    };
    let stock = CacheKey {
        model_name: "test/llama".to_owned(),
        world_size: 1,
        token_ids: tokens.to_vec(),
        end: 3 * CHUNK as u64,
        request_id: "d".to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    };
    assert_eq!(lookup(&mut server.client(), &stock), 0);
    // Tenants of one engine are apart, too.
    assert_eq!(ours.lookup_of("e", &prompt, "tenant"), 0);
}

#[test]
fn a_range_of_a_prompt_and_its_skipped_blocks_are_loaded() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let prompt = hashes(3, 4);
    engine.store("a", 3, &prompt, 0..2, 0);
    engine.store("b", 3, &prompt, 2..4, 1);
    assert_eq!(engine.lookup("c", &prompt), 4 * CHUNK as u64);
    // The engine's own prefix cache has the first block and a half.
    let mut load = op("c", &prompt, 1..4, 30);
    load.skip_first_n_tokens = BLOCK + BLOCK / 2;
    let skipped = &blocks(3, 30)[..2];
    engine.content(99, skipped, 0, false);
    engine.worker.submit_retrieve_request(load);
    assert_eq!(engine.finished(&[]).retrieves.len(), 1);
    let first = CHUNK / BLOCK;
    assert!(
        engine.content(99, skipped, 0, true),
        "blocks in use stay as they are"
    );
    assert!(engine.content(3, &blocks(3, 30)[2..], first + 2, true));
}

#[test]
fn a_request_is_reported_once_when_it_is_named_and_its_stores_have_ended() {
    let server = Server::start();
    let engine = Engine::start(&server, "i", true);
    let prompt = hashes(4, 2);
    engine
        .worker
        .submit_store_request(op("a", &prompt, 0..1, 0));
    engine
        .worker
        .submit_store_request(op("a", &prompt, 1..2, 9));
    assert!(engine.worker.wait_for_stores(&["a".to_owned()], TIMEOUT));
    assert!(!engine.worker.has_stores("a"));
    // It is not reported before the engine names it, and requests without stores never are.
    assert_eq!(
        engine.worker.get_finished(["b".to_owned()]),
        Finished::default()
    );
    let finished = engine.finished(&["a"]);
    assert_eq!(finished.stores, HashSet::from(["a".to_owned()]));
    assert_eq!(
        engine.worker.get_finished(["a".to_owned()]),
        Finished::default()
    );
    assert_eq!(engine.worker.stats().stored_chunks, 2);
}

/// A server that takes long to answer: the engine gets its blocks back by its deadline, and what
/// was dropped is never written.
#[test]
fn blocks_come_back_by_the_deadline_whatever_the_server_does() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let many: Vec<LoadStoreOp> = (0..64)
        .map(|seed| op("a", &hashes(seed, 4), 0..4, u32::from(seed)))
        .collect();
    engine.worker.batched_submit_store_requests(many, None);
    engine
        .worker
        .wait_for_stores(&["a".to_owned()], Duration::ZERO);
    assert!(!engine.worker.has_stores("a"));
    assert_eq!(engine.finished(&["a"]).stores.len(), 1);
    // Stores of "a" that had begun may have been committed, and between them they have every name
    // that `hashes` makes.
    let name = |chunk| ChunkHash::new(std::array::from_fn(|at| chunk + at as u8));
    let prompt = Prompt::Chunks([1, 2].map(name).into());
    engine.store("b", 1, &prompt, 0..2, 0);
    assert!(
        engine.load("c", &prompt, 0..2, 20),
        "later stores are carried out"
    );
    assert!(engine.content(1, &blocks(2, 20), 0, true));
    server.assert_idle();
}

#[test]
fn without_a_server_requests_are_misses_at_once_and_it_is_used_when_it_is_there() {
    let port = free_port();
    let endpoint: Endpoint = format!("tcp://127.0.0.1:{port}")
        .parse()
        .expect("an address");
    let start = || Server::with(1 << 20, |_| {}, |zmq| zmq.port = port);
    let server = start();
    let mut engine = Engine::at(&endpoint, engine("i", true));
    let prompt = hashes(5, 2);
    engine.store("a", 1, &prompt, 0..2, 0);
    drop(server);
    until(|| {
        (!engine.scheduler.server().is_healthy && !engine.worker.server().is_healthy).then_some(())
    });
    engine.scheduler.take_log();
    engine.worker.take_log();
    assert_eq!(engine.lookup("b", &prompt), 0);
    assert!(
        !engine.load("b", &prompt, 0..2, 0),
        "the load is reported as failed"
    );
    engine
        .worker
        .submit_store_request(op("c", &prompt, 0..2, 0));
    assert_eq!(engine.finished(&["c"]).stores.len(), 1);
    // That no server is connected is the link's to log, once; a request that had waited in vain
    // would be logged as failed.
    let mut log = engine.scheduler.take_log();
    log.extend(engine.worker.take_log());
    let waited = |line: &LogLine| line.text.contains("failed for request");
    assert!(
        !log.iter().any(waited),
        "nothing waits for a server that is gone: {log:?}"
    );
    let _server = start();
    until(|| {
        (engine.scheduler.server().is_healthy && engine.worker.server().is_healthy).then_some(())
    });
    assert_eq!(engine.lookup("d", &prompt), 0, "a new server has nothing");
    engine.store("d", 1, &prompt, 0..2, 0);
    assert_eq!(engine.lookup("e", &prompt), 2 * CHUNK as u64);
    assert!(engine.load("e", &prompt, 0..2, 20));
    assert!(engine.content(1, &blocks(2, 20), 0, true));
    assert!(engine.worker.stats().connections_lost > 0);
}

fn ipc(path: &Path) -> Endpoint {
    format!("ipc://{}", path.display())
        .parse()
        .expect("an address")
}

/// Timeouts of an engine that waits in vain.
const IMPATIENT: Timeouts = Timeouts {
    start: Duration::from_millis(200),
    answer: TIMEOUT,
    ping: TIMEOUT,
};

/// Waits for a line of the log.
fn logs(worker: &WorkerAdapter, expected: &str) {
    let mut log = Vec::new();
    lmc_testkit::until(expected, || {
        log.extend(worker.take_log());
        log.iter().any(|line| line.text.contains(expected))
    });
}

/// Stores by one engine and loads by another, over one socket.
fn stores_and_loads(socket: &Path, seed: u8) {
    let prompt = hashes(seed, 4);
    let mut first = Engine::at(&ipc(socket), engine("i", true));
    first.store("a", 7, &prompt, 0..4, 0);
    let mut second = Engine::at(&ipc(socket), engine("i", true));
    assert_eq!(second.lookup("b", &prompt), 4 * CHUNK as u64);
    assert!(second.load("b", &prompt, 0..4, 5));
    assert!(second.content(7, &blocks(4, 5), 0, true));
}

/// Two containers that share the socket's folder and no `/dev/shm`.
#[test]
fn a_sealed_pool_is_used_over_the_unix_socket_alone() {
    let folder = Folder::temporary();
    let socket = folder.join("lmc.sock");
    let server = Server::sealed(&socket);
    stores_and_loads(&socket, 1);
    // It has no name by which others could map it.
    let worker = WorkerAdapter::start_with(endpoint(&server), engine("i", true), 0, 1, IMPATIENT);
    let worker = worker.expect("threads");
    let mut memory = vec![0.0; LAYER];
    worker
        .register_kv_caches(layers(std::slice::from_mut(&mut memory)))
        .expect("a known layout");
    logs(&worker, "--ipc-path");
    assert!(!worker.server().is_healthy);
    worker.shutdown();
    let stock = Request::RegisterEngineDriven(crate::common::registration(9, "float32", 1));
    let refused = server.client().call(&stock).expect("an answer");
    assert!(matches!(refused, Reply::Error(_)), "{refused:?}");
    server.assert_idle();
}

/// One pool serves both: stock clients map it by its name, the adapters by its descriptor.
#[test]
fn a_pool_with_a_name_is_passed_by_its_descriptor_beside_stock_clients() {
    let folder = Folder::temporary();
    let socket = folder.join("lmc.sock");
    let listening = socket.clone();
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.ipc_path = Some(listening));
    let mut stock = Worker::register(&server, 1);
    let key = stock.key("stock", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(stock.store(&key), 2);
    // From now on the name leads nowhere.
    server.service.engine().arena().unlink();
    stores_and_loads(&socket, 2);
    assert!(stock.retrieve(&key), "byte for byte");
    drop(stock);
    server.assert_idle();
}

/// Forwards bytes; to the worker with these descriptors in place of the server's.
fn proxy(at: PathBuf, to: PathBuf, with: Vec<OwnedFd>) {
    let with: Arc<[OwnedFd]> = with.into();
    let listener = UnixListener::bind(at).expect("a path");
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let near = near.expect("a connection");
            let far = UnixStream::connect(&to).expect("the server listens");
            let none: Arc<[OwnedFd]> = Arc::new([]);
            for (from, to, with) in [(&near, &far, &none), (&far, &near, &with)] {
                let (mut from, to, with) = (
                    from.try_clone().expect("a handle"),
                    to.try_clone().expect("a handle"),
                    Arc::clone(with),
                );
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(read @ 1..) = from.read(&mut bytes) {
                        let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(64))];
                        let mut control = SendAncillaryBuffer::new(&mut space);
                        let descriptors: Vec<_> = with.iter().map(AsFd::as_fd).collect();
                        if !descriptors.is_empty() {
                            control.push(SendAncillaryMessage::ScmRights(&descriptors));
                        }
                        let part = [IoSlice::new(&bytes[..read])];
                        if sendmsg(&to, &part, &mut control, SendFlags::NOSIGNAL) != Ok(read) {
                            return;
                        }
                    }
                });
            }
        }
    });
}

#[test]
fn where_no_descriptor_arrives_the_name_is_used_or_the_server_is_not() {
    let folder = Folder::temporary();
    let socket = folder.join("lmc.sock");
    let through = folder.join("proxy.sock");
    proxy(through.clone(), socket.clone(), Vec::new());
    {
        let _sealed = Server::sealed(&socket);
        let engine = Engine::with(&ipc(&through), engine("i", true), IMPATIENT);
        logs(&engine.worker, "the descriptor of its pool did not arrive");
        assert!(!engine.worker.server().is_healthy);
    }
    let named = |zmq: &mut ZmqConfig| zmq.ipc_path = Some(socket.clone());
    let server = Server::with(1 << 20, |_| {}, named);
    let engine = Engine::at(&ipc(&through), engine("i", true));
    assert!(engine.worker.server().is_healthy);
    // The death of the proxy is not to be taken for the worker's.
    let status = server.status();
    assert_eq!(status.instances.len(), 1);
    assert!(status.instances.iter().all(|worker| worker.pids.is_empty()));
    drop(engine);
    stores_and_loads(&through, 3);
}

/// Memory that could be cut short, memory of another size, and a device instead of memory.
#[test]
fn a_descriptor_that_is_not_the_pools_is_not_mapped() {
    let memory = |len: u64, seals: SealFlags| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(c"lmc-test-wrong", flags).expect("memory"));
        file.set_len(len).expect("memory");
        fcntl_add_seals(&file, seals).expect("it may be sealed");
        OwnedFd::from(file)
    };
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let null = || OwnedFd::from(File::open("/dev/null").expect("a device"));
    let wrong: [(Vec<OwnedFd>, &str); 4] = [
        (vec![memory(1 << 20, SealFlags::empty())], "not sealed"),
        (vec![memory(4096, sealed)], "4096 bytes"),
        (vec![null()], "not of shared memory"),
        ((0..64).map(|_| null()).collect(), "not of shared memory"),
    ];
    let check = |with: Vec<OwnedFd>, expected: &str| {
        let folder = Folder::temporary();
        let (socket, through) = (folder.join("lmc.sock"), folder.join("proxy.sock"));
        let _server = Server::sealed(&socket);
        proxy(through.clone(), socket, with);
        let engine = Engine::with(&ipc(&through), engine("i", true), IMPATIENT);
        logs(&engine.worker, expected);
        assert!(!engine.worker.server().is_healthy);
    };
    // Each waits for a server that it can use.
    std::thread::scope(|scope| {
        for (with, expected) in wrong {
            scope.spawn(move || check(with, expected));
        }
    });
}

#[test]
fn a_chunk_size_that_is_no_multiple_of_the_block_size_is_an_error_that_names_both() {
    let server = Server::start();
    let wrong = EngineDescription {
        block_size: 5,
        ..engine("i", true)
    };
    let refused = SchedulerAdapter::start(endpoint(&server), wrong).map(drop);
    assert!(
        matches!(
            refused,
            Err(AdapterError::ChunkSize { chunk_size, block_size: 5 }) if chunk_size == CHUNK as u32
        ),
        "{refused:?}"
    );
}

#[test]
fn blocks_that_the_engine_does_not_have_fail_the_retrieve_and_nothing_else() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let prompt = hashes(6, 2);
    engine.store("a", 1, &prompt, 0..2, 0);
    let mut wrong = op("b", &prompt, 0..2, 0);
    wrong.block_ids[0][3] = BLOCKS as u32;
    engine.worker.submit_retrieve_request(wrong.clone());
    assert_eq!(engine.finished(&[]).retrieves.len(), 1);
    let failed = engine.worker.get_block_ids_with_load_errors();
    assert_eq!(failed, wrong.block_ids[0].iter().copied().collect());
    assert!(engine.load("c", &prompt, 0..2, 20));
    server.assert_idle();
}

/// Refusals and failed copies are in the log with their reason, and not once for each request.
#[test]
fn failures_are_logged_with_their_reason_and_not_in_floods() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let prompt = hashes(8, 2);
    engine.store("a", 1, &prompt, 0..2, 0);
    engine.worker.take_log();
    let lines = |engine: &Engine, part: &str| {
        let log = engine.worker.take_log();
        let found = log.iter().filter(|line| line.text.contains(part)).count();
        assert!(found == log.len(), "{log:?}");
        found
    };
    // The server names what is wrong with the salt.
    let begun = Instant::now();
    for request in ["b\n", "c", "d"] {
        let mut refused = op(request, &prompt, 0..2, 0);
        refused.cache_salt = "a@b".to_owned();
        engine.worker.submit_store_request(refused);
        assert_eq!(engine.finished(&[request]).stores.len(), 1);
    }
    let log = engine.worker.take_log();
    let most = 1 + begun.elapsed().as_secs() as usize;
    assert!(
        (1..=most).contains(&log.len()),
        "one line a second: {log:?}"
    );
    let line = &log[0];
    for part in [
        "store failed for request b\\n",
        "the server refused",
        "cache_salt",
    ] {
        assert!(line.text.contains(part), "{part}: {line:?}");
    }
    // No lookup has leased these chunks.
    assert!(!engine.load("e", &hashes(9, 2), 0..2, 20));
    assert_eq!(lines(&engine, "load failed for request e"), 1);
    let mut wrong = op("f", &hashes(11, 2), 0..2, 0);
    wrong.block_ids[0][3] = BLOCKS as u32;
    engine.worker.submit_store_request(wrong.clone());
    engine.finished(&["f"]);
    wrong.request_id = "g".to_owned();
    wrong.prompt = prompt.clone();
    engine.lookup("g", &prompt);
    engine.worker.submit_retrieve_request(wrong);
    engine.finished(&[]);
    engine.scheduler.end_session("g");
    // One of a store and one of a load.
    assert_eq!(lines(&engine, "the copy failed"), 2);
    server.assert_idle();
}

/// Two groups of layers, of which the second looks back 8 tokens only: blocks before are not kept.
struct Windowed {
    engine: Engine,
}

impl Windowed {
    /// A window of two blocks.
    const WINDOW: u32 = 2 * BLOCK as u32;

    fn start(server: &Server, window: Option<u32>) -> Self {
        let mut engine = Engine::start(server, "windows", true);
        let groups = engine.memory.split_at_mut(2);
        let groups = [(groups.0, None), (groups.1, window)].map(|(memory, window)| LayerGroup {
            window,
            ..group_at(memory.iter_mut().map(|layer| layer.as_mut_ptr().addr()))
        });
        (engine.worker)
            .register_kv_caches(described(groups.into()))
            .expect("known layouts");
        Self { engine }
    }

    /// Returns a transfer of two chunks. Of the second group the last two blocks are kept.
    fn op(request: &str, at: u32) -> LoadStoreOp {
        let mut op = op(request, &hashes(3, 2), 0..2, at);
        let mut kept = blocks(2, at + 1);
        let gone = kept.len() - 2;
        kept[..gone].fill(0);
        op.block_ids.push(kept);
        op
    }

    /// Writes the content of both groups' blocks, or compares it.
    fn content(&mut self, op: &LoadStoreOp, check: bool) -> bool {
        let (full, windowed) = self.engine.memory.split_at_mut(2);
        let kept = op.block_ids[1].len() - 2;
        content(full, 1, &op.block_ids[0], 0, check)
            & content(windowed, 2, &op.block_ids[1][kept..], kept, check)
    }
}

#[test]
fn layers_with_a_window_are_stored_and_loaded_with_the_blocks_that_are_kept() {
    let server = Server::start();
    let mut first = Windowed::start(&server, Some(Windowed::WINDOW));
    let stored = Windowed::op("a", 1);
    first.content(&stored, false);
    // Block 0 belongs to no request.
    first.engine.memory[2][..HEADS * BLOCK * HEAD].fill(-1.0);
    first.engine.worker.submit_store_request(stored);
    assert_eq!(first.engine.finished(&["a"]).stores.len(), 1);
    let mut second = Windowed::start(&server, Some(Windowed::WINDOW));
    assert_eq!(second.engine.lookup("b", &hashes(3, 2)), 2 * CHUNK as u64);
    let loaded = Windowed::op("b", 20);
    second.engine.worker.submit_retrieve_request(loaded.clone());
    let finished = second.engine.finished(&[]);
    assert_eq!((finished.retrieves.len(), finished.failed.len()), (1, 0));
    second.engine.scheduler.end_session("b");
    assert!(second.content(&loaded, true));
    assert!(
        second
            .engine
            .memory
            .iter()
            .all(|layer| !layer.contains(&-1.0))
    );
    let block_0 = &second.engine.memory[2][..HEADS * BLOCK * HEAD];
    assert!(
        block_0.iter().all(|&element| element == 0.0),
        "it is no block of the request"
    );
    server.assert_idle();
}

/// Stores that read only blocks that stay are not waited for, and not dropped.
#[test]
fn stores_of_blocks_that_stay_are_left_alone() {
    let server = Server::start();
    let engine = Engine::start(&server, "i", true);
    let prompt = hashes(4, 64);
    let stores = (0..64).map(|chunk| op("a", &prompt, chunk..chunk + 1, chunk as u32));
    engine
        .worker
        .batched_submit_store_requests(stores.collect(), None);
    let before = |chunks: usize| [("a".to_owned(), chunks * CHUNK)];
    assert!(
        engine
            .worker
            .wait_for_stores_before(&before(0), Duration::ZERO)
    );
    // The first are dropped, unless they have begun; the last two stay.
    engine
        .worker
        .wait_for_stores_before(&before(62), Duration::ZERO);
    assert!(engine.worker.wait_for_stores_before(&before(62), TIMEOUT));
    assert!(engine.worker.wait_for_stores(&["a".to_owned()], TIMEOUT));
    assert_eq!(engine.finished(&["a"]).stores.len(), 1);
    let stats = engine.worker.stats();
    assert_eq!(stats.stored_chunks + stats.stores_failed, 64);
    assert!(stats.stored_chunks >= 2, "{stats:?}");
}

#[test]
fn engines_with_other_windows_share_nothing() {
    let server = Server::start();
    let mut first = Windowed::start(&server, Some(Windowed::WINDOW));
    let stored = Windowed::op("a", 1);
    first.content(&stored, false);
    first.engine.worker.submit_store_request(stored);
    assert_eq!(first.engine.finished(&["a"]).stores.len(), 1);
    for (number, window) in [None, Some(2 * Windowed::WINDOW)].into_iter().enumerate() {
        let other = Windowed::start(&server, window);
        let request = format!("other {number}");
        other.engine.lookup(&request, &hashes(3, 2));
        let loaded = Windowed::op(&request, 20);
        other.engine.worker.submit_retrieve_request(loaded);
        let finished = other.engine.finished(&[]);
        // The worker's description counts, and it is the worker that asks for the bytes.
        assert_eq!(
            finished.failed,
            HashSet::from([request.clone()]),
            "{window:?}"
        );
        other.engine.scheduler.end_session(&request);
    }
}

#[test]
fn a_failed_load_of_several_groups_names_its_request_and_no_blocks() {
    let server = Server::start();
    let engine = Windowed::start(&server, Some(Windowed::WINDOW)).engine;
    let missing = op("a", &hashes(3, 2), 0..2, 20);
    for (request, groups) in [("none", 0), ("one", 1), ("two", 2), ("three", 3)] {
        let mut missing = missing.clone();
        missing.request_id = request.to_owned();
        missing.block_ids = vec![missing.block_ids[0].clone(); groups];
        engine.worker.submit_retrieve_request(missing);
        let finished = engine.finished(&[]);
        assert_eq!(finished.failed, HashSet::from([request.to_owned()]));
        assert_eq!(finished.failed, finished.retrieves);
    }
    // Only the op with one group says which blocks it would have filled.
    let failed = engine.worker.get_block_ids_with_load_errors();
    assert_eq!(failed.len(), 2 * CHUNK / BLOCK);
}

#[test]
fn groups_of_other_heads_or_types_are_refused() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let mut groups: Vec<LayerGroup> = (engine.memory.iter_mut())
        .map(|layer| group_at([layer.as_mut_ptr().addr()].into_iter()))
        .collect();
    let accepted = engine.worker.register_kv_caches(described(groups.clone()));
    assert!(accepted.is_ok(), "{accepted:?}");
    groups[1].tensors[0].dtype = "int32".to_owned();
    let refused = engine.worker.register_kv_caches(described(groups));
    let refused = refused.expect_err("two types").to_string();
    assert!(
        refused.contains("--disable-hybrid-kv-cache-manager"),
        "{refused}"
    );
    let refused = engine.worker.register_kv_caches(described(Vec::new()));
    assert!(refused.is_err());
}

#[test]
fn a_store_with_a_number_names_the_chunks_that_it_has_added() {
    let server = Server::start();
    let engine = Engine::start(&server, "i", true);
    let prompt = hashes(10, 4);
    let mut ended = Vec::new();
    for (number, chunks) in [(7, 1..3), (8, 0..4), (9, 0..4)] {
        let mut store = op("a", &prompt, chunks, 0);
        store.store_number = Some(number);
        engine.worker.submit_store_request(store);
        engine.finished(&["a"]);
        let stores = engine.worker.take_ended_stores().into_iter();
        ended.extend(stores.map(|store| (store.number, store.chunks)));
    }
    assert_eq!(ended, [(7, vec![0, 1]), (8, vec![0, 3]), (9, vec![])]);
    // Stores that are dropped end as well.
    let many: Vec<LoadStoreOp> = (0..64)
        .map(|seed| LoadStoreOp {
            store_number: Some(u64::from(seed)),
            ..op("b", &hashes(100 + seed, 4), 0..4, 0)
        })
        .collect();
    engine.worker.batched_submit_store_requests(many, None);
    engine
        .worker
        .wait_for_stores(&["b".to_owned()], Duration::ZERO);
    let mut numbers = HashSet::new();
    until(|| {
        let stores = engine.worker.take_ended_stores().into_iter();
        numbers.extend(stores.map(|store| store.number));
        (numbers.len() == 64).then_some(())
    });
    // Without a number nothing is kept for the engine.
    engine
        .worker
        .submit_store_request(op("c", &prompt, 0..4, 0));
    engine.finished(&["c"]);
    assert_eq!(engine.worker.take_ended_stores(), []);
}

/// The threads of the adapters are not in a process that was forked from the engine's.
#[test]
fn in_a_forked_process_lookups_are_misses_and_the_adapters_can_be_dropped() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let prompt = hashes(1, 2);
    engine.store("a", 1, &prompt, 0..2, 0);
    let mut engine = Some(engine);
    assert!(succeeds_forked(|| {
        let engine = engine.take().expect("the child's own");
        assert_eq!(engine.lookup("b", &prompt), 0);
        engine.scheduler.shutdown();
        engine.worker.shutdown();
    }));
    let mut engine = engine.expect("only the child has dropped it");
    assert_eq!(engine.lookup("c", &prompt), 2 * CHUNK as u64);
    assert!(engine.load("c", &prompt, 0..2, 20));
}
