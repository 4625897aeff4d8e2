//! Behaviour of the service when events come in an order that connections seldom have.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::conformance::{Gated, Operation};
use lmc_backend::{Backend, MemoryBackend};
use lmc_engine::{EngineConfig, EngineContext, EngineHost, TenantId};
use lmc_key::{ChunkHasher, HashAlgorithm, Salt, SpaceId};
use lmc_memory::ArenaConfig;
use lmc_memory::cuda::Gpus;

mod gpu;
mod notices;

use super::jobs::Lane;
use super::*;
use crate::peer::ClientSocket;
use crate::protocol::{
    CacheKey, CpuShm, EngineDrivenContext, EngineGroup, KvDescriptor, RegisterKvCache, Reply,
    Request, TensorMeta, UnknownFields,
};

const CHUNK: u64 = 16;
const BLOCKS: u64 = 8;
/// Elements of a token.
const SIZE: u64 = 4;
const BLOCK_BYTES: u64 = CHUNK * SIZE * 4;
const MODEL: &str = "test/model";

fn service(change: impl FnOnce(&mut ServiceConfig)) -> Service {
    service_over(Vec::new(), change)
}

fn service_over(lower: Vec<Arc<dyn Backend>>, change: impl FnOnce(&mut ServiceConfig)) -> Service {
    let arena = ArenaConfig::anonymous(1 << 20).build().expect("an arena");
    let hasher = ChunkHasher::new(HashAlgorithm::Blake3, CHUNK as u32).expect("a chunk size");
    let mut config = ServiceConfig::new(hasher);
    change(&mut config);
    let engine = EngineConfig::default()
        .start(EngineContext::new(Arc::new(arena), EngineHost::default()).with_tiers(lower));
    let service = config.start(engine.expect("an engine")).expect("threads");
    for number in 0..16 {
        service.connected(client(number), peer(own_uid()));
    }
    service
}

fn peer(uid: u32) -> ClientSocket {
    ClientSocket {
        uid: Some(uid),
        ..ClientSocket::default()
    }
}

fn own_uid() -> u32 {
    fs::metadata("/proc/self").expect("proc").uid()
}

fn client(number: u64) -> ClientId {
    ClientId::new(number)
}

/// A worker whose memory the server maps: one layer of MLA, a block to a chunk.
struct Memory {
    path: PathBuf,
    file: File,
}

impl Memory {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lmcache_kv_unit_{}_{number}", std::process::id());
        let path = PathBuf::from("/dev/shm").join(name);
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        let file = options.open(&path).expect("memory in /dev/shm");
        file.set_len(BLOCKS * BLOCK_BYTES).expect("memory");
        Self { path, file }
    }

    fn fill(&self, byte: u8) {
        let all = vec![byte; (BLOCKS * BLOCK_BYTES) as usize];
        self.file.write_all_at(&all, 0).expect("its own memory");
    }

    fn block(&self, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        let read = self.file.read_exact_at(&mut bytes, block * BLOCK_BYTES);
        read.expect("its own memory");
        bytes
    }

    fn registration(&self) -> RegisterKvCache {
        let name = self.path.file_name().expect("a name").to_string_lossy();
        RegisterKvCache {
            instance_id: 1,
            kv_caches: vec![KvDescriptor::CpuShm(CpuShm {
                shm_name: format!("/{name}"),
                nbytes: BLOCKS * BLOCK_BYTES,
                tensor: TensorMeta {
                    dtype: "float32".to_owned(),
                    shape: vec![BLOCKS, CHUNK, SIZE],
                    stride: vec![CHUNK * SIZE, SIZE, 1],
                    storage_offset: 0,
                },
            })],
            model_name: MODEL.to_owned(),
            world_size: 1,
            engine_type: "vllm".to_owned(),
            kv_layout: None,
            unknown_hints: UnknownFields::default(),
            groups: vec![EngineGroup {
                layer_indices: vec![0],
                tokens_per_block: CHUNK as u32,
                sw_size_tokens: -1,
                ..EngineGroup::default()
            }],
        }
    }

    fn register(&self, service: &Service) {
        let request = Request::RegisterKvCache(Box::new(self.registration()));
        assert_eq!(reply(service, 1, request), Reply::None);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn key(request: &str, chunks: u64) -> CacheKey {
    CacheKey {
        model_name: MODEL.to_owned(),
        world_size: 1,
        worker_id: Some(0),
        token_ids: (0..(chunks * CHUNK) as u32).collect(),
        end: chunks * CHUNK,
        request_id: request.to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    }
}

fn reply(service: &Service, from: u64, request: Request) -> Reply {
    match service.handle(client(from), request, Instant::now()) {
        RequestOutcome::Reply(reply) => reply,
        RequestOutcome::Job(job) => job.run(),
        RequestOutcome::WhenIdle(entrance) => {
            let (sender, ended) = std::sync::mpsc::channel();
            entrance.when_idle(Box::new(move || sender.send(()).expect("it is awaited")));
            ended.try_recv().expect("no copy is under way");
            Reply::None
        }
        RequestOutcome::Wait(_) | RequestOutcome::Stream(_) => panic!("answered later"),
    }
}

fn store(memory_of: u64) -> Request {
    Request::Store {
        key: key("a", 2),
        instance_id: memory_of,
        block_ids: vec![vec![3, 4]],
        event: Vec::new(),
    }
}

fn retrieve(memory_of: u64) -> Request {
    Request::Retrieve {
        key: key("a", 2),
        instance_id: memory_of,
        block_ids: vec![vec![5, 6]],
        event: Vec::new(),
        skip_first_n_tokens: 0,
    }
}

fn job(service: &Service, request: Request, asked: Instant) -> Job {
    match service.handle(client(1), request, asked) {
        RequestOutcome::Job(job) => job,
        _ => panic!("a copy is a job"),
    }
}

fn found(service: &Service, from: u64, request: &str, chunks: u64) -> Reply {
    let lookup = CacheKey {
        worker_id: None,
        ..key(request, chunks)
    };
    let request_id = request.to_owned();
    assert_eq!(reply(service, from, Request::Lookup(lookup)), Reply::None);
    reply(service, from, Request::QueryPrefetchStatus { request_id })
}

#[test]
fn a_copy_that_waited_while_its_worker_unregistered_is_not_made() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.fill(7);
    memory.register(&service);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    let now = Instant::now();
    for register_again in [false, true] {
        let queued = [
            job(&service, retrieve(1), now),
            job(&service, store(1), now),
        ];
        let unregister = Request::Unregister {
            instance_id: 1,
            engine_driven: false,
        };
        match register_again {
            true => memory.register(&service),
            false => assert_eq!(reply(&service, 1, unregister), Reply::None),
        }
        memory.fill(9);
        for job in queued {
            assert_eq!(job.run(), Reply::Transferred(false));
        }
        assert!(memory.block(5).iter().all(|&byte| byte == 9));
        memory.register(&service);
    }
    assert_eq!(service.status(now).counts.copies_too_late, 4);
    assert_eq!(reply(&service, 1, retrieve(1)), Reply::Transferred(true));
    assert!(memory.block(5).iter().all(|&byte| byte == 7));
}

#[test]
fn a_copy_that_waited_too_long_is_not_made() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    let long_ago = Instant::now() - Duration::from_secs(6);
    let late = job(&service, store(1), long_ago).run();
    assert_eq!(late, Reply::Transferred(false));
    assert_eq!(found(&service, 1, "b", 2), Reply::Int(0));
    let recently = Instant::now() - Duration::from_millis(100);
    let in_time = job(&service, store(1), recently).run();
    assert_eq!(in_time, Reply::Transferred(true));
    assert_eq!(found(&service, 1, "b", 2), Reply::Int(2));
}

#[test]
fn signs_of_life_of_unknown_workers_do_not_pile_up() {
    let service = service(|config| config.max_instances = 4);
    for instance_id in 0..100 {
        let ping = || Request::Ping {
            instance_id: Some(instance_id),
        };
        assert_eq!(reply(&service, 1, ping()), Reply::Bool(false));
        assert_eq!(reply(&service, 1, ping()), Reply::Bool(true));
    }
    assert!(service.0.registry.workers.lock().refused.len() <= 4);
}

#[test]
fn two_requests_of_one_name_each_have_their_own_hits() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    assert_eq!(found(&service, 2, "r", 2), Reply::Int(2));
    assert_eq!(found(&service, 3, "r", 1), Reply::Int(1));
    let ask = || Request::QueryPrefetchStatus {
        request_id: "r".to_owned(),
    };
    assert_eq!(reply(&service, 2, ask()), Reply::Int(2));
    assert_eq!(service.engine().leases(), 3);
    let end = || Request::EndSession {
        request_id: "r".to_owned(),
    };
    reply(&service, 2, end());
    assert_eq!(reply(&service, 2, ask()), Reply::Int(0));
    assert_eq!(reply(&service, 3, ask()), Reply::Int(1));
    service.client_gone(client(3), Instant::now());
    assert_eq!(service.engine().leases(), 0);
    assert_eq!(service.status(Instant::now()).sessions.sessions, 0);
}

#[test]
fn lookups_hold_no_more_than_they_may() {
    let service = service(|config| config.max_lookup_leases = 8);
    let memory = Memory::new();
    memory.register(&service);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    for request in ["a", "b"] {
        assert_eq!(found(&service, 1, request, 2), Reply::Int(2));
    }
    // Half are taken, and all of them by this one.
    assert_eq!(found(&service, 1, "c", 2), Reply::Int(0));
    assert_eq!(found(&service, 2, "c", 2), Reply::Int(2));
    assert_eq!(found(&service, 3, "c", 2), Reply::Int(2));
    assert_eq!(found(&service, 4, "c", 2), Reply::Int(0), "all are taken");
    // Not even the hits of an earlier lookup, of other tokens perhaps.
    assert_eq!(found(&service, 1, "b", 2), Reply::Int(0));
    assert_eq!(found(&service, 4, "c", 2), Reply::Int(2));
    assert_eq!(service.status(Instant::now()).counts.over_limit, 3);
}

#[test]
fn no_process_takes_over_the_number_of_a_connected_worker() {
    let service = service(|_| {});
    let register = |hidden_dim_size| {
        Request::RegisterEngineDriven(EngineDrivenContext {
            instance_id: 1,
            model_name: MODEL.to_owned(),
            world_size: 1,
            block_size: 4,
            num_layers: 1,
            hidden_dim_size,
            dtype: "float32".to_owned(),
            use_mla: true,
            num_physical_slots: Some(CHUNK as u32),
            record: None,
            unknown: UnknownFields::default(),
        })
    };
    let registered = |from, hidden| {
        let instance = instance::Instance::engine_driven(
            match &register(hidden) {
                Request::RegisterEngineDriven(context) => context,
                _ => unreachable!("made above"),
            },
            client(from),
            CHUNK as u32,
            Instant::now(),
        );
        service.0.registry.add_instance(1, instance, Reply::None)
    };
    assert_eq!(registered(1, 4), Reply::None);
    assert_eq!(registered(1, 4), Reply::None, "it describes itself again");
    for hidden in [4, 8] {
        let Reply::Error(text) = registered(2, hidden) else {
            panic!("the first is connected");
        };
        assert!(text.contains("instance_id 1"), "{text}");
    }
    service.client_gone(client(1), Instant::now());
    assert_eq!(registered(2, 8), Reply::None);
}

#[test]
fn layers_in_another_order_are_another_layout_and_none_comes_twice() {
    let memory = Memory::new();
    let layout = |layers: &[u32], change: &dyn Fn(&mut RegisterKvCache)| {
        let mut registration = memory.registration();
        registration.kv_caches = vec![registration.kv_caches[0].clone(); 3];
        registration.groups[0].layer_indices = layers.to_vec();
        change(&mut registration);
        let now = Instant::now();
        let gpus = Gpus::new(Arc::new(ArenaConfig::anonymous(4096).build().unwrap()));
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, CHUNK as u32).unwrap();
        let (user, config) = (Some(0), ServiceConfig::new(hasher));
        instance::Instance::server_driven(&registration, client(1), user, &gpus, &config, now)
            .map(|instance| instance.fingerprint)
    };
    let plain = layout(&[0, 1, 2], &|_| {}).expect("three layers");
    let turned = layout(&[2, 1, 0], &|_| {}).expect("three layers");
    let others = layout(&[0, 1], &|_| {}).expect("two layers");
    assert!(plain != turned && plain != others);
    let whole = layout(&[], &|registration| registration.groups.clear());
    assert_eq!(whole.expect("all layers"), plain);
    let twice = layout(&[0, 1, 1], &|_| {}).expect_err("a layer comes twice");
    assert!(twice.to_string().contains("twice"), "{twice}");

    // Bytes of fp8 pages are not distinguished by token, so their length counts.
    let pages = |tokens: u64| {
        let bytes = |registration: &mut RegisterKvCache| {
            for tensor in &mut registration.kv_caches {
                let KvDescriptor::CpuShm(shm) = tensor else {
                    unreachable!("made above")
                };
                shm.tensor.dtype = "uint8".to_owned();
                shm.tensor.shape = vec![BLOCKS, tokens, 12];
                shm.tensor.stride = vec![tokens * 12, 12, 1];
            }
            registration.groups[0].tokens_per_block = tokens as u32;
        };
        layout(&[0, 1, 2], &bytes).expect("pages of bytes")
    };
    assert!(pages(4) != pages(8));
}

#[test]
fn a_clear_that_waits_for_a_slow_tier_holds_up_no_copy() {
    let tier = Arc::new(Gated::new(MemoryBackend::default()));
    let service = service_over(vec![Arc::clone(&tier) as _], |config| {
        config.transfer_threads = 1;
    });
    let memory = Memory::new();
    memory.register(&service);
    tier.hold(Operation::Clear);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    let deadline = lmc_testkit::soon();
    let (sender, answers) = std::sync::mpsc::channel();
    let run = |request: Request| {
        let (job, sender) = (job(&service, request, Instant::now()), sender.clone());
        let lane = job.lane;
        let work = move || sender.send((lane, job.run())).expect("the test waits");
        service.run_job(client(1), lane, Box::new(work));
    };
    // More than there are threads that copy.
    run(Request::Clear { force: true });
    run(Request::Clear { force: true });
    while service.engine().clears_id() == lmc_key::ClearsId::NONE {
        assert!(Instant::now() < deadline, "the clear never begins");
        std::thread::yield_now();
    }
    // It began after the clear.
    found(&service, 1, "a", 2);
    run(store(1));
    let next = || answers.recv_timeout(lmc_testkit::DEADLINE);
    assert_eq!(next(), Ok((Lane::Store, Reply::Transferred(true))));
    tier.open();
    for _ in 0..2 {
        assert_eq!(next(), Ok((Lane::Clear, Reply::None)));
    }
}

fn clear(service: &Service) {
    reply(service, 9, Request::Clear { force: true });
}

#[test]
fn a_store_that_was_asked_for_before_a_clear_is_not_found_after_it() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.fill(7);
    memory.register(&service);
    // It waits for a thread that copies.
    let queued = job(&service, store(1), Instant::now());
    clear(&service);
    queued.run();
    assert_eq!(found(&service, 2, "b", 2), Reply::Int(0), "old weights");
}

/// Registers a worker that copies by itself.
fn register_engine_driven(service: &Service) {
    let context = EngineDrivenContext {
        instance_id: 1,
        model_name: MODEL.to_owned(),
        world_size: 1,
        block_size: 4,
        num_layers: 1,
        hidden_dim_size: 4,
        dtype: "float32".to_owned(),
        use_mla: true,
        num_physical_slots: Some(CHUNK as u32),
        record: None,
        unknown: UnknownFields::default(),
    };
    let now = Instant::now();
    let instance = instance::Instance::engine_driven(&context, client(1), CHUNK as u32, now);
    let added = service.0.registry.add_instance(1, instance, Reply::None);
    assert_eq!(added, Reply::None);
}

/// Takes slots for the two chunks of a request.
fn prepare_store(service: &Service, request: &str) {
    let prepare = Request::PrepareStore {
        key: key(request, 2),
        instance_id: 1,
    };
    let Reply::StoreSlots { slots, .. } = reply(service, 1, prepare) else {
        panic!("no slots")
    };
    assert_eq!(slots.len(), 2);
}

fn commit_store(service: &Service, request: &str) {
    let commit = Request::CommitStore {
        key: key(request, 2),
        instance_id: 1,
        pickled: 0,
    };
    reply(service, 1, commit);
}

#[test]
fn what_a_clear_kept_from_being_found_is_not_announced() {
    let service = service(|_| {});
    register_engine_driven(&service);
    prepare_store(&service, "a");
    clear(&service);
    commit_store(&service, "a");
    assert_eq!(found(&service, 1, "b", 2), Reply::Int(0));
    // A router that follows the events.
    let events = &service.0.context.events;
    let mut subscription = events.subscribe(client(7), 77, MODEL.to_owned(), 0, 100);
    let NextBatch::Batch(batch) = events.next(&mut subscription) else {
        panic!("no batch")
    };
    let mut there = std::collections::BTreeSet::new();
    for event in batch.events {
        match event.kind {
            crate::protocol::KvEventKind::Stored => there.insert(event.hash),
            crate::protocol::KvEventKind::Removed => there.remove(&event.hash),
        };
    }
    assert_eq!(there.len(), 0, "chunks that a router believes to be here");
}

#[test]
fn two_workers_of_one_number_and_layout_keep_their_memory_apart() {
    // SGLang's worker takes its pid for its number, and every container has a pid 1.
    let service = service(|_| {});
    let (first, second) = (Memory::new(), Memory::new());
    first.fill(7);
    second.fill(9);
    first.register(&service);
    let request = Request::RegisterKvCache(Box::new(second.registration()));
    let _ = reply(&service, 2, request);
    // The first goes on: it was sent nothing.
    let stored = reply(&service, 1, store(1));
    second.fill(0);
    let retrieved = reply(&service, 1, retrieve(1));
    let theirs = second.block(5);
    assert!(
        theirs.iter().all(|&byte| byte == 0),
        "{stored:?}, {retrieved:?}: what the first retrieved lies in the memory of the second"
    );
    if stored == Reply::Transferred(true) && retrieved == Reply::Transferred(true) {
        assert!(first.block(5).iter().all(|&byte| byte == 7), "wrong bytes");
    }
}

#[test]
fn a_connection_that_was_closed_leaves_no_binding() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    for scheduler in 10..20 {
        found(&service, scheduler, &format!("r{scheduler}"), 2);
        service.client_gone(client(scheduler), Instant::now());
        let mut late = store(1);
        if let Request::Store { key, .. } = &mut late {
            key.request_id = format!("r{scheduler}");
        }
        reply(&service, 1, late);
    }
    service.tick(Instant::now() + Duration::from_secs(3600));
    assert_eq!(service.status(Instant::now()).sessions.sessions, 0);
    assert_eq!(service.0.registry.workers.lock().bindings.len(), 0);
}

#[test]
fn sessions_that_no_connection_can_reach_any_more_hold_nothing() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    assert_eq!(found(&service, 2, "r", 2), Reply::Int(2));
    // Its connection breaks a rule; ZeroMQ connects it again, under another number.
    service.client_gone(client(2), Instant::now());
    let end = Request::EndSession {
        request_id: "r".to_owned(),
    };
    reply(&service, 3, end);
    let status = service.status(Instant::now());
    assert_eq!(
        (status.sessions.sessions, service.engine().leases()),
        (0, 0)
    );
}

#[test]
fn one_client_does_not_take_the_lookups_of_all_others() {
    let service = service(|config| {
        config.max_lookup_leases = 4;
        config.max_sessions = 4;
    });
    let memory = Memory::new();
    memory.register(&service);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    for request in ["a", "b", "c", "d"] {
        found(&service, 66, request, 2);
    }
    assert_eq!(found(&service, 2, "theirs", 2), Reply::Int(2));
}

#[test]
fn ranks_that_all_look_up_are_bound_to_their_layout() {
    // SGLang's MP connector: each rank has a connection of its own, looks up, stores and
    // retrieves on it, all under one request's name.
    let service = service(|_| {});
    let memory = Memory::new();
    let mut registration = memory.registration();
    registration.world_size = 2;
    for rank in 0..2 {
        registration.instance_id = 1 + rank;
        let request = Request::RegisterKvCache(Box::new(registration.clone()));
        assert_eq!(reply(&service, 1 + rank, request), Reply::None);
    }
    // Another engine of the model, of another layout.
    let mut other = registration.clone();
    for tensor in &mut other.kv_caches {
        let KvDescriptor::CpuShm(shm) = tensor else {
            unreachable!("made above")
        };
        shm.tensor.dtype = "int32".to_owned();
    }
    for rank in 0..2 {
        other.instance_id = 11 + rank;
        let request = Request::RegisterKvCache(Box::new(other.clone()));
        assert_eq!(reply(&service, 11 + rank, request), Reply::None);
    }
    let of = |request: &str, rank: u64| CacheKey {
        world_size: 2,
        worker_id: Some(rank as u32),
        ..key(request, 2)
    };
    let hits = |request: &str, client: u64| {
        let lookup = CacheKey {
            worker_id: None,
            ..of(request, 0)
        };
        assert_eq!(
            reply(&service, client, Request::Lookup(lookup)),
            Reply::None
        );
        let request_id = request.to_owned();
        reply(
            &service,
            client,
            Request::QueryPrefetchStatus { request_id },
        )
    };
    for rank in 0..2 {
        assert_eq!(hits("a", 1 + rank), Reply::Int(0));
    }
    for rank in 0..2 {
        let store = Request::Store {
            key: of("a", rank),
            instance_id: 1 + rank,
            block_ids: vec![vec![3, 4]],
            event: Vec::new(),
        };
        assert_eq!(reply(&service, 1 + rank, store), Reply::Transferred(true));
    }
    for rank in 0..2 {
        assert_eq!(hits("b", 1 + rank), Reply::Int(2));
    }
}

#[test]
fn a_rank_that_is_away_for_a_moment_still_counts() {
    let service = service(|_| {});
    let memory = Memory::new();
    let register = |instance_id: u64, dtype: &str| {
        let mut registration = memory.registration();
        registration.world_size = 2;
        registration.instance_id = instance_id;
        for tensor in &mut registration.kv_caches {
            let KvDescriptor::CpuShm(shm) = tensor else {
                unreachable!("made above")
            };
            shm.tensor.dtype = dtype.to_owned();
        }
        let request = Request::RegisterKvCache(Box::new(registration));
        assert_eq!(reply(&service, instance_id, request), Reply::None);
    };
    // Two engines of two ranks each; one connection a worker.
    for instance_id in [1, 2] {
        register(instance_id, "float32");
    }
    for instance_id in [11, 12] {
        register(instance_id, "int32");
    }
    let of = |request: &str, rank: u32| CacheKey {
        world_size: 2,
        worker_id: Some(rank),
        ..key(request, 2)
    };
    let copy = |instance_id: u64, rank: u32, stores: bool| {
        let (key, block_ids) = (of("w", rank), vec![vec![3, 4]]);
        let request = match stores {
            true => Request::Store {
                key,
                instance_id,
                block_ids,
                event: Vec::new(),
            },
            false => Request::Retrieve {
                key,
                instance_id,
                block_ids,
                event: Vec::new(),
                skip_first_n_tokens: 0,
            },
        };
        reply(&service, instance_id, request)
    };
    let hits = |request: &str| {
        let lookup = CacheKey {
            worker_id: None,
            ..of(request, 0)
        };
        assert_eq!(reply(&service, 50, Request::Lookup(lookup)), Reply::None);
        let request_id = request.to_owned();
        reply(&service, 50, Request::QueryPrefetchStatus { request_id })
    };
    // The first engine's rank 1 has nothing of it (it was evicted, say), all others have.
    assert_eq!(copy(2, 1, false), Reply::Transferred(false));
    for (instance_id, rank) in [(1, 0), (11, 0), (12, 1)] {
        assert_eq!(copy(instance_id, rank, true), Reply::Transferred(true));
    }
    assert_eq!(
        hits("before"),
        Reply::Int(0),
        "rank 1 of the first engine lacks it"
    );
    // Its socket connects again.
    service.client_gone(client(2), Instant::now());
    let promised = hits("meanwhile");
    reply(
        &service,
        3,
        Request::Ping {
            instance_id: Some(2),
        },
    );
    let got = copy(2, 1, false);
    assert!(
        promised == Reply::Int(0) || got == Reply::Transferred(true),
        "promised {promised:?}, got {got:?}"
    );
}

#[test]
fn a_retrieve_whose_worker_is_answered_meanwhile_is_made() {
    // A stock worker gives up after a sign of life that was not answered for 10 s, and not
    // before mq_timeout (300 s) otherwise; a failed retrieve ends the request by default.
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    let asked = Instant::now() - Duration::from_secs(6);
    let queued = job(&service, retrieve(1), asked);
    let ping = Request::Ping {
        instance_id: Some(1),
    };
    assert_eq!(reply(&service, 1, ping), Reply::Bool(true));
    assert_eq!(queued.run(), Reply::Transferred(true));
}

#[test]
fn one_request_does_not_give_back_what_another_of_its_name_holds() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    let mut other = memory.registration();
    other.instance_id = 2;
    let request = Request::RegisterKvCache(Box::new(other));
    assert_eq!(reply(&service, 2, request), Reply::None);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    // Both schedulers call their request "a".
    assert_eq!(found(&service, 21, "a", 2), Reply::Int(2));
    assert_eq!(found(&service, 22, "a", 2), Reply::Int(2));
    // That of the second is served and ends.
    assert_eq!(reply(&service, 2, retrieve(2)), Reply::Transferred(true));
    let request_id = "a".to_owned();
    reply(&service, 22, Request::EndSession { request_id });
    assert_eq!(
        service.engine().leases(),
        2,
        "the first still waits for its own"
    );
}

#[test]
fn an_engine_whose_layout_is_not_known_is_refused_where_the_server_would_copy() {
    // SGLang's MP connector on CPU: K and V of each layer are `[slots, heads, head size]`, a page
    // is one token, and no groups are named. 2 heads of 2 elements here.
    const TOKENS: u64 = BLOCKS * CHUNK;
    let (service, memory) = (service(|_| {}), Memory::new());
    let mut registration = memory.registration();
    registration.engine_type = "sglang".to_owned();
    registration.groups.clear();
    for tensor in &mut registration.kv_caches {
        let KvDescriptor::CpuShm(shm) = tensor else {
            unreachable!("made above")
        };
        shm.tensor.shape = vec![TOKENS, 2, 2];
        shm.tensor.stride = vec![4, 2, 1];
    }
    let request = Request::RegisterKvCache(Box::new(registration));
    let Reply::Error(text) = reply(&service, 1, request) else {
        panic!("its blocks are not those of vLLM");
    };
    assert!(
        text.contains("\"sglang\"") && text.contains("engine_driven"),
        "{text}"
    );
}

#[test]
fn a_copy_of_an_earlier_registration_ends_before_the_unregistration_is_acknowledged() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    let copying = service.0.registry.workers.lock().instances[&1]
        .gate
        .entrance()
        .enter(Instant::now(), Duration::from_secs(5));
    assert!(copying.is_some(), "a long copy is under way");
    memory.register(&service);
    let unregister = Request::Unregister {
        instance_id: 1,
        engine_driven: false,
    };
    let (sender, ended) = std::sync::mpsc::channel();
    match service.handle(client(1), unregister, Instant::now()) {
        RequestOutcome::WhenIdle(entrance) => {
            entrance.when_idle(Box::new(move || sender.send(()).expect("it is awaited")));
        }
        _ => sender.send(()).expect("it is awaited"),
    }
    assert!(ended.try_recv().is_err(), "it still writes");
    drop(copying);
}

#[test]
fn what_was_asked_for_while_the_server_stood_still_is_not_given() {
    let (service, memory) = (service(|_| {}), Memory::new());
    memory.register(&service);
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    let start = Instant::now();
    service.beat(start);
    let late = start + Duration::from_secs(6);
    let key = key("a", 2);
    let requests = [
        store(1),
        retrieve(1),
        Request::PrepareStore {
            key: key.clone(),
            instance_id: 1,
        },
        Request::PrepareRetrieve {
            key,
            instance_id: 1,
        },
    ];
    for request in requests {
        let declined = match service.handle(client(1), request.clone(), late) {
            RequestOutcome::Reply(Reply::Transferred(false) | Reply::RetrieveSlots(None)) => true,
            RequestOutcome::Reply(Reply::StoreSlots { slots, .. }) => slots.is_empty(),
            _ => false,
        };
        assert!(declined, "{request:?}");
    }
    assert_eq!(service.status(late).counts.copies_too_late, 4);
}

/// Finding 10 of the review: the server mapped any segment that it could open, so that a user
/// could read and write another user's memory through it.
#[test]
fn only_the_memory_of_the_connections_own_user_is_mapped() {
    let service = service(|_| {});
    let memory = Memory::new();
    let register = |from: u64| {
        let request = Request::RegisterKvCache(Box::new(memory.registration()));
        reply(&service, from, request)
    };
    service.connected(client(1), peer(own_uid() + 1));
    // The other user is root where the tests are not, who may name any memory.
    if own_uid() + 1 != 0 {
        assert!(matches!(register(1), Reply::Error(_)));
    }
    // A connection of which nothing is known, and one that is over.
    service.connected(client(2), ClientSocket::default());
    service.client_gone(client(3), Instant::now());
    for from in [2, 3] {
        assert!(matches!(register(from), Reply::Error(_)), "{from}");
    }
    assert!(service.status(Instant::now()).instances.is_empty());
    service.connected(client(4), peer(0));
    assert_eq!(register(4), Reply::None);
    if own_uid() == 0 {
        // Root's server maps a user's memory for that user, and for no other.
        std::os::unix::fs::chown(&memory.path, Some(65_534), None).expect("root may");
        service.connected(client(4), peer(65_534));
        assert_eq!(register(4), Reply::None);
        service.connected(client(4), peer(65_533));
        assert!(matches!(register(4), Reply::Error(_)));
    }
}

/// Finding 16 of the review: one registration took all of the process's guards.
#[test]
fn a_registration_maps_each_segment_once_and_not_too_many() {
    let service = service(|_| {});
    let memory = Memory::new();
    let links: Vec<Memory> = (0..1024).map(|_| Memory::new()).collect();
    let mut registration = memory.registration();
    let one = registration.kv_caches[0].clone();
    let KvDescriptor::CpuShm(one) = one else {
        panic!("it is shared memory");
    };
    let layers = |registration: &mut RegisterKvCache| {
        let count = registration.kv_caches.len() as u32;
        registration.groups[0].layer_indices = (0..count).collect();
        Request::RegisterKvCache(Box::new(registration.clone()))
    };
    // The same segment for every layer, its name spelled in two ways.
    for layer in 0..1500 {
        let mut shm = one.clone();
        if layer % 2 == 0 {
            shm.shm_name = shm.shm_name.trim_start_matches('/').to_owned();
        }
        registration.kv_caches.push(KvDescriptor::CpuShm(shm));
    }
    assert_eq!(reply(&service, 1, layers(&mut registration)), Reply::None);
    let mapped = fs::read_to_string("/proc/self/maps").expect("proc");
    let name = memory.path.to_str().expect("ASCII");
    assert_eq!(
        mapped.lines().filter(|line| line.ends_with(name)).count(),
        1
    );

    registration.kv_caches.truncate(1);
    for link in &links {
        let mut shm = one.clone();
        shm.shm_name = link
            .path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into();
        registration.kv_caches.push(KvDescriptor::CpuShm(shm));
    }
    let refused = reply(&service, 1, layers(&mut registration));
    assert!(matches!(refused, Reply::Error(_)), "{refused:?}");
    registration.kv_caches.pop();
    assert_eq!(reply(&service, 1, layers(&mut registration)), Reply::None);
}

#[test]
fn spaces_are_described_from_the_registration_on_and_have_their_tenants() {
    let service = service(|_| ());
    assert_eq!(service.spaces(), []);
    let memory = Memory::new();
    memory.register(&service);
    let salts = |service: &Service| {
        let spaces = service.spaces().into_iter();
        let salts = spaces.map(|space| space.description.salt.as_str().to_owned());
        salts.collect::<Vec<_>>()
    };
    // No request has named a tenant yet.
    assert_eq!(salts(&service), [""]);
    let lookup = CacheKey {
        cache_salt: "tenant".to_owned(),
        worker_id: None,
        ..key("request", 2)
    };
    assert_eq!(reply(&service, 1, Request::Lookup(lookup)), Reply::None);
    assert_eq!(salts(&service), ["tenant"]);
    let space = service.spaces().remove(0);
    assert_eq!((space.chunks, space.registered), (0, true));
    let salt: Salt = "tenant".parse().expect("a valid salt");
    let tenant = service.tenant(&salt);
    assert_ne!(tenant, TenantId::default());
    assert_eq!(service.tenant_of(space.id), tenant);
    assert_eq!(
        service.tenant_of(SpaceId::new([1; 16])),
        TenantId::default()
    );
}
