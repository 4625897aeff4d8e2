//! What the service does when things happen in an order that connections seldom have.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::conformance::Gated;
use lmc_backend::{Backend, MemoryBackend};
use lmc_engine::{CacheEngine, EngineConfig};
use lmc_key::{ChunkHasher, HashAlgorithm};
use lmc_memory::ArenaConfig;

use super::job::Lane;
use super::*;
use crate::protocol::{
    CacheKey, CpuShm, EngineDrivenContext, EngineGroup, KvDescriptor, RegisterKvCache, Reply,
    Request, TensorMeta,
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
    let engine = CacheEngine::with_tiers(EngineConfig::default(), Arc::new(arena), lower);
    Service::new(config, engine.expect("an engine")).expect("threads")
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
        let file = options.open(&path).expect("room in /dev/shm");
        file.set_len(BLOCKS * BLOCK_BYTES).expect("room");
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
        start: 0,
        end: chunks * CHUNK,
        request_id: request.to_owned(),
        cache_salt: String::new(),
        num_kv_readers: 1,
    }
}

fn reply(service: &Service, from: u64, request: Request) -> Reply {
    match service.handle(client(from), request, Instant::now()) {
        Outcome::Reply(reply) => reply,
        Outcome::Job(job) => job.run(),
        Outcome::Quiet(entrance) => {
            let (told, quiet) = std::sync::mpsc::channel();
            entrance.when_quiet(Box::new(move || told.send(()).expect("it is awaited")));
            quiet.try_recv().expect("no copy is under way");
            Reply::None
        }
        Outcome::Wait(_) | Outcome::Stream(_) => panic!("answered later"),
    }
}

fn store(memory_of: u64) -> Request {
    Request::Store {
        key: key("a", 2),
        instance_id: memory_of,
        block_ids: vec![vec![3, 4]],
    }
}

fn retrieve(memory_of: u64) -> Request {
    Request::Retrieve {
        key: key("a", 2),
        instance_id: memory_of,
        block_ids: vec![vec![5, 6]],
        skip_first_n_tokens: 0,
    }
}

fn job(service: &Service, request: Request, asked: Instant) -> Job {
    match service.handle(client(1), request, asked) {
        Outcome::Job(job) => job,
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
    let recently = Instant::now() - Duration::from_secs(2);
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
    assert!(service.shared.state.lock().told_to_register.len() <= 4);
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
    service.client_gone(client(3), ConnectionEnd::Gone, Instant::now());
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
fn nobody_takes_over_the_number_of_a_connected_worker() {
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
        service.add_instance(1, instance, Reply::None)
    };
    assert_eq!(registered(1, 4), Reply::None);
    assert_eq!(registered(1, 4), Reply::None, "it describes itself again");
    for hidden in [4, 8] {
        let Reply::Error(text) = registered(2, hidden) else {
            panic!("the first is connected");
        };
        assert!(text.contains("instance_id 1"), "{text}");
    }
    service.client_gone(client(1), ConnectionEnd::Gone, Instant::now());
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
        instance::Instance::server_driven(&registration, client(1), CHUNK as u32, now)
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

    // Bytes of fp8 pages are not told apart by token, so their length counts.
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
    tier.shut();
    assert_eq!(reply(&service, 1, store(1)), Reply::Transferred(true));
    let deadline = Instant::now() + Duration::from_secs(5);
    while tier.stores() < 2 {
        assert!(Instant::now() < deadline, "the copy never begins");
        std::thread::yield_now();
    }
    let (told, answers) = std::sync::mpsc::channel();
    let run = |request: Request| {
        let (job, told) = (job(&service, request, Instant::now()), told.clone());
        let lane = job.lane;
        let work = move || told.send((lane, job.run())).expect("somebody waits");
        service.run_job(lane, Box::new(work));
    };
    // More than there are threads that copy.
    run(Request::Clear { force: true });
    run(Request::Clear { force: true });
    run(store(1));
    let next = || answers.recv_timeout(Duration::from_secs(5));
    assert_eq!(next(), Ok((Lane::Copy, Reply::Transferred(true))));
    tier.open();
    for _ in 0..2 {
        assert_eq!(next(), Ok((Lane::Clear, Reply::None)));
    }
}
