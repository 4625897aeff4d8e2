//! Runs any order of any operations from several clients, in both transfer modes, on a service.
//! The bytes of each chunk are derived from the key that they are stored under.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lmc_backend::{Backend, MemoryBackend};
use lmc_engine::{EngineConfig, EngineContext, EngineHost, InUse};
use lmc_key::{ChunkHasher, HashAlgorithm};
use lmc_memory::ArenaConfig;
use parking_lot::Mutex;

use crate::peer::{ClientSocket, Life, Witness};
use crate::protocol::{
    BlockAllocation, CacheKey, CpuShm, EngineDrivenContext, EngineGroup, KvDescriptor,
    RegisterKvCache, Reply, Request, SlotDescriptor, TensorMeta, UnknownFields,
};
use crate::service::{
    ClientId, Job, NextBatch, RequestOutcome, Service, ServiceConfig, Subscription,
};

const CHUNK: usize = 4;
/// Bytes of a chunk: two planes, one layer, four tokens, two elements of eight bits.
const CHUNK_BYTES: usize = 16;
const CLIENTS: u64 = 4;
const INSTANCES: u64 = 4;
const PROMPT: usize = 16;
const MODELS: [&str; 2] = ["m", "n"];
const DTYPES: [&str; 2] = ["int8", "uint8"];
const SALTS: [&str; 2] = ["", "s"];
/// KV ranks of each engine.
const WORLD_SIZE: u32 = 2;
/// Number of stored ranges that are kept, to be read again.
const RANGES: usize = 4;
/// Timeout of waits for the lower tier, which completes within microseconds.
const TIER_TIMEOUT: Duration = Duration::from_secs(20);

/// Blocks of an engine's KV memory, `[2, blocks, tokens, heads, size]` with one layer and one head.
const BLOCKS: usize = 16;
const BLOCK: usize = 2;
const HIDDEN: usize = 2;
const BLOCK_BYTES: usize = BLOCK * HIDDEN;
const PLANE_BYTES: usize = BLOCKS * BLOCK_BYTES;

/// Service and pool that all runs of one process share, because a service is slow to create.
struct SharedService {
    service: Service,
    /// The pool, as an engine-driven worker maps it.
    pool: File,
}

fn shared() -> &'static Mutex<SharedService> {
    static SHARED: OnceLock<Mutex<SharedService>> = OnceLock::new();
    SHARED.get_or_init(|| {
        let name = format!("lmc_fuzz_{}", std::process::id());
        // Eight slots, so that every run evicts chunks.
        let arena = ArenaConfig::shared(&name, 8 * 4096)
            .build()
            .expect("an arena");
        let path = format!("/dev/shm/{name}");
        let pool = File::options().read(true).write(true).open(&path);
        let pool = pool.expect("the pool has a name");
        // A static is never dropped, so the files are removed now.
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_file(path + ".lmc-owner");
        let lower: Arc<dyn Backend> = Arc::new(MemoryBackend::default());
        let config = EngineConfig::default();
        let engine = config.start(
            EngineContext::new(Arc::new(arena), EngineHost::default()).with_tiers(vec![lower]),
        );
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, CHUNK as u32).expect("a chunk size");
        let config = ServiceConfig {
            max_sessions: 6,
            max_instances: 6,
            max_transfers: 3,
            transfer_threads: 1,
            copy_threads: 0,
            kv_event_log_size: 16,
            ..ServiceConfig::new(hasher)
        };
        let service = config.start(engine.expect("an engine")).expect("threads");
        Mutex::new(SharedService { service, pool })
    })
}

/// Service and shared memory of one run, as its clients see them.
struct Environment<'a> {
    service: &'a Service,
    pool: &'a File,
    /// Segment of the server-driven workers; it is removed at the end of the run.
    engine: File,
    engine_name: String,
}

impl<'a> Environment<'a> {
    fn new(shared: &'a SharedService) -> Self {
        let engine_name = format!("lmc_fuzz_kv_{}", std::process::id());
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let engine = options.open(format!("/dev/shm/{engine_name}"));
        let engine = engine.expect("a segment in /dev/shm");
        engine
            .set_len(2 * PLANE_BYTES as u64)
            .expect("space in /dev/shm");
        Self {
            service: &shared.service,
            pool: &shared.pool,
            engine,
            engine_name,
        }
    }
}

impl Drop for Environment<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(format!("/dev/shm/{}", self.engine_name));
    }
}

/// Returns the byte that fills a chunk; it differs for each key.
fn value(dtype: usize, key: &CacheKey, chunk: usize) -> u8 {
    let model = usize::from(key.model_name == MODELS[1]);
    let salt = usize::from(key.cache_salt == SALTS[1]);
    let rank = key.worker_id.unwrap_or(0) as usize;
    // The first chunk is common to all prompts; later tokens differ.
    let prompt = (key.token_ids[CHUNK] as usize - CHUNK) / 100;
    let content = match chunk {
        0 => 0,
        _ => 1 + (chunk - 1) * 4 + prompt,
    };
    ((((model * 2 + salt) * 2 + dtype) * 2 + rank) * 13 + content + 1) as u8
}

impl Environment<'_> {
    /// Waits until other threads make a condition true.
    fn wait_until(&self, what: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < TIER_TIMEOUT, "timeout: {what}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits until all committed chunks are copied to the lower tier.
    fn wait_for_copies(&self) {
        let queued = || self.service.engine().lower_status()[0].queued_bytes;
        self.wait_until("copies to the lower tier", || queued() == 0);
    }

    /// Waits until the chunks that a lookup found in the lower tier are promoted.
    fn wait_for_promotion(&self, client: ClientId, request_id: &str, now: Instant) {
        let pending = || {
            let request_id = request_id.to_owned();
            let ask = Request::QueryPrefetchStatus { request_id };
            let answer = self.service.handle(client, ask, now);
            matches!(answer, RequestOutcome::Reply(Reply::None))
        };
        self.wait_until("promotion", || !pending());
    }

    fn fill_slot(&self, slot: &SlotDescriptor, byte: u8) {
        let filled = self.pool.write_all_at(&[byte; CHUNK_BYTES], slot.offset);
        filled.expect("a slot lies in the pool");
    }

    fn check_slot(&self, slot: &SlotDescriptor, byte: u8) {
        let mut found = [0; CHUNK_BYTES];
        let read = self.pool.read_exact_at(&mut found, slot.offset);
        read.expect("a slot lies in the pool");
        assert_eq!(found, [byte; CHUNK_BYTES], "a slot holds another chunk");
    }

    fn fill_block(&self, block: u32, byte: u8) {
        for plane in 0..2 {
            let at = plane * PLANE_BYTES + block as usize * BLOCK_BYTES;
            let filled = self.engine.write_all_at(&[byte; BLOCK_BYTES], at as u64);
            filled.expect("a block lies in the segment");
        }
    }

    fn check_block(&self, block: u32, byte: u8) {
        for plane in 0..2 {
            let at = plane * PLANE_BYTES + block as usize * BLOCK_BYTES;
            let mut found = [0; BLOCK_BYTES];
            let read = self.engine.read_exact_at(&mut found, at as u64);
            read.expect("a block lies in the segment");
            assert_eq!(
                found, [byte; BLOCK_BYTES],
                "block {block} holds another chunk"
            );
        }
    }

    fn registration(&self, instance_id: u64, model: usize, dtype: usize) -> RegisterKvCache {
        let (block, size) = (BLOCK as u64, HIDDEN as u64);
        let shape = vec![2, BLOCKS as u64, block, 1, size];
        let stride = vec![PLANE_BYTES as u64, block * size, size, size, 1];
        RegisterKvCache {
            instance_id,
            kv_caches: vec![KvDescriptor::CpuShm(CpuShm {
                shm_name: format!("/{}", self.engine_name),
                nbytes: 2 * PLANE_BYTES as u64,
                tensor: TensorMeta {
                    dtype: DTYPES[dtype].to_owned(),
                    shape,
                    stride,
                    storage_offset: 0,
                },
            })],
            model_name: MODELS[model].to_owned(),
            world_size: WORLD_SIZE,
            engine_type: "vllm".to_owned(),
            kv_layout: Some("NHD".to_owned()),
            unknown_hints: UnknownFields::default(),
            groups: vec![EngineGroup {
                layer_indices: vec![0],
                tokens_per_block: BLOCK as u32,
                sw_size_tokens: -1,
                ..EngineGroup::default()
            }],
        }
    }
}

/// Derives small decisions from the input.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        let Some((&byte, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        u64::from(byte) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    fn request_id(&mut self) -> String {
        format!("r{}", self.below(8))
    }

    fn commit_store(&mut self, instance_id: u64) -> Request {
        Request::CommitStore {
            key: self.key(),
            instance_id,
            pickled: usize::from(self.below(16) == 0),
        }
    }

    fn key(&mut self) -> CacheKey {
        let prompt = self.below(4) as u32;
        let chunks = self.below(5);
        let start = if self.below(8) == 0 {
            self.below(20)
        } else {
            0
        };
        CacheKey {
            model_name: MODELS[self.index(2)].to_owned(),
            world_size: WORLD_SIZE,
            worker_id: [Some(0), Some(0), Some(1), None][self.index(4)],
            // The first chunk is common to all prompts.
            token_ids: (0..PROMPT as u32)
                .map(|i| {
                    if i < CHUNK as u32 {
                        i
                    } else {
                        i + 100 * prompt
                    }
                })
                .collect(),
            start,
            end: chunks * CHUNK as u64,
            request_id: self.request_id(),
            cache_salt: SALTS[self.index(2)].to_owned(),
            num_kv_readers: self.below(3) as u32,
            ..CacheKey::default()
        }
    }

    /// Returns distinct block ids, some of which may be outside the engine's memory.
    fn block_ids(&mut self) -> Vec<u32> {
        let first = self.index(BLOCKS);
        let step = [1, 3, 5, 7][self.index(4)];
        let count = if self.below(8) == 0 { 3 } else { 8 };
        let mut ids: Vec<u32> = (0..count)
            .map(|i| ((first + i * step) % BLOCKS) as u32)
            .collect();
        if self.below(8) == 0 {
            ids[1] = BLOCKS as u32 + 7;
        }
        ids
    }
}

/// A server-driven copy that was requested and has not run.
struct PendingCopy {
    job: Job,
    key: CacheKey,
    dtype: usize,
    block_ids: Vec<u32>,
    /// Tokens to skip, for a retrieve; `None` for a store.
    skip: Option<usize>,
}

impl PendingCopy {
    /// Returns each block with its index in the list and the byte of its chunk.
    fn blocks(&self) -> Vec<(usize, u32, u8)> {
        let first = self.key.start as usize / CHUNK;
        let chunks = (self.key.end as usize / CHUNK).saturating_sub(first);
        let per_chunk = CHUNK / BLOCK;
        let inside = self.block_ids.iter().copied().enumerate();
        inside
            .take(chunks * per_chunk)
            .filter(|&(_, block)| (block as usize) < BLOCKS)
            .map(|(index, block)| {
                let byte = value(self.dtype, &self.key, first + index / per_chunk);
                (index, block, byte)
            })
            .collect()
    }

    fn run(self, environment: &Environment<'_>) {
        let blocks = self.blocks();
        for &(_, block, byte) in &blocks {
            let before = if self.skip.is_some() { 0 } else { byte };
            environment.fill_block(block, before);
        }
        let (skip, all_inside) = (
            self.skip,
            self.block_ids
                .iter()
                .all(|&block| (block as usize) < BLOCKS),
        );
        let reply = self.job.run();
        let Some(skip) = skip else { return };
        for (index, block, byte) in blocks {
            let skipped = block == 0 || index < skip / BLOCK;
            match reply {
                Reply::Transferred(true) if skipped => environment.check_block(block, 0),
                Reply::Transferred(true) => environment.check_block(block, byte),
                // A refused copy must not write any block.
                _ => environment.check_block(block, 0),
            }
        }
        if let Reply::Transferred(true) = reply {
            assert!(
                all_inside || self.key.end as usize <= CHUNK,
                "a block outside the memory was accepted"
            );
        }
    }
}

/// Slots of one transfer that a worker may still access, and the byte that fills each.
struct HeldSlots {
    client: ClientId,
    instance_id: u64,
    /// Key of the transfer, without the number of readers.
    key: CacheKey,
    store: bool,
    slots: Vec<(SlotDescriptor, u8)>,
}

/// A process whose state the run sets.
#[derive(Debug)]
struct Process(Life);

impl Witness for Process {
    fn life(&self) -> Life {
        self.0
    }

    fn pids(&self) -> Vec<u32> {
        Vec::new()
    }
}

/// A connection that has ended while its worker may still run.
struct EndedConnection {
    client: ClientId,
    at: Instant,
    life: Option<Life>,
}

/// One run over the shared service.
struct Run<'a> {
    environment: &'a Environment<'a>,
    choices: Choices<'a>,
    now: Instant,
    /// Open connection of each client.
    clients: [ClientId; CLIENTS as usize],
    next_client: u64,
    /// Connections over Unix sockets that were not passed the pool yet.
    takers: HashSet<ClientId>,
    gone: Vec<EndedConnection>,
    held: Vec<HeldSlots>,
    /// Element type that each worker registered with.
    dtypes: [usize; INSTANCES as usize],
    /// Model that each worker registered with.
    models: [usize; INSTANCES as usize],
    /// Ranges that workers last prepared to store.
    ranges: VecDeque<CacheKey>,
    streams: Vec<Subscription>,
    copies: VecDeque<PendingCopy>,
}

/// Runs operations that the input selects, from several clients, on a service.
pub fn service(data: &[u8]) {
    let shared = shared().lock();
    let environment = Environment::new(&shared);
    let mut run = Run {
        environment: &environment,
        choices: Choices(data),
        now: Instant::now(),
        clients: [ClientId::new(0); CLIENTS as usize],
        next_client: 0,
        takers: HashSet::new(),
        gone: Vec::new(),
        held: Vec::new(),
        dtypes: [0; INSTANCES as usize],
        models: [0; INSTANCES as usize],
        ranges: VecDeque::new(),
        streams: Vec::new(),
        copies: VecDeque::new(),
    };
    (0..CLIENTS as usize).for_each(|peer| run.connect(peer));
    // Two engines of two ranks.
    for instance_id in 0..INSTANCES {
        let client = run.clients[instance_id as usize];
        let registration = registration(instance_id, 0, 0);
        run.ask(client, registration, instance_id, 0, 0);
    }
    while !run.choices.0.is_empty() {
        run.step();
        run.check_held();
        run.environment.wait_for_copies();
    }
    run.end();
}

/// Returns the registration of a worker that copies by itself.
fn registration(instance_id: u64, model: usize, dtype: usize) -> Request {
    Request::RegisterEngineDriven(EngineDrivenContext {
        instance_id,
        model_name: MODELS[model].to_owned(),
        world_size: WORLD_SIZE,
        block_size: CHUNK as u32,
        num_layers: 1,
        hidden_dim_size: HIDDEN as u32,
        dtype: DTYPES[dtype].to_owned(),
        use_mla: false,
        num_physical_slots: None,
        record: None,
        unknown: UnknownFields::default(),
    })
}

impl Run<'_> {
    /// Opens a connection for a client, over TCP or over a Unix socket; no two connections have the
    /// same id.
    fn connect(&mut self, peer: usize) {
        self.next_client += 1;
        let client = ClientId::new(self.next_client);
        let takes_descriptors = peer % 2 == 1;
        if takes_descriptors {
            self.takers.insert(client);
        }
        let process = std::fs::metadata("/proc/self").expect("proc");
        let own_user = ClientSocket {
            uid: Some(process.uid()),
            takes_descriptors,
            ..ClientSocket::default()
        };
        self.environment.service.connected(client, own_user);
        self.clients[peer] = client;
    }

    /// Ends a connection, whose process is unknown, running, stopped or dead.
    fn disconnect(&mut self, peer: usize, life: Option<Life>) {
        let client = self.clients[peer];
        let service = self.environment.service;
        if let Some(life) = life {
            service.set_witness(client, Arc::new(Process(life)));
        }
        service.client_gone(client, self.now);
        let at = self.now;
        self.gone.push(EndedConnection { client, at, life });
        self.connect(peer);
        service.release_ended(self.now);
        self.drop_released();
    }

    /// Checks that slots which workers may still access have kept their bytes, and writes them
    /// again as a worker that still copies would.
    fn check_held(&self) {
        for held in &self.held {
            for (slot, byte) in &held.slots {
                self.environment.check_slot(slot, *byte);
                if held.store {
                    self.environment.fill_slot(slot, *byte);
                }
            }
        }
    }

    /// Removes slots that may have been released, because the process is dead or the grace time
    /// ended.
    fn drop_released(&mut self) {
        let grace = self.environment.service.config().slot_grace;
        let now = self.now;
        let over = |gone: &EndedConnection| match gone.life {
            Some(Life::Dead) => true,
            Some(Life::Stopped) => false,
            Some(Life::Running) | None => now.saturating_duration_since(gone.at) >= grace,
        };
        let over: Vec<ClientId> = self
            .gone
            .extract_if(.., |g| over(g))
            .map(|g| g.client)
            .collect();
        self.held.retain(|held| !over.contains(&held.client));
    }

    /// Records the slots of a transfer; an empty list removes the transfer.
    fn hold(
        &mut self,
        client: ClientId,
        instance_id: u64,
        store: bool,
        key: &CacheKey,
        slots: Vec<(SlotDescriptor, u8)>,
    ) {
        let mut key = CacheKey {
            num_kv_readers: 0,
            ..key.clone()
        };
        // The tokens up to the end of the range identify the transfer.
        key.token_ids.truncate(key.end as usize);
        self.held.retain(|held| {
            (held.instance_id, held.store) != (instance_id, store) || held.key != key
        });
        if !slots.is_empty() {
            self.held.push(HeldSlots {
                client,
                instance_id,
                key,
                store,
                slots,
            });
        }
    }

    fn step(&mut self) {
        let service = self.environment.service;
        let choices = &mut self.choices;
        let instance_id = choices.below(INSTANCES);
        // Mostly requests that an engine would send, else any request from any client.
        let keeps_rules = choices.below(8) > 0;
        let peer = match keeps_rules {
            true => instance_id as usize,
            false => choices.index(CLIENTS as usize),
        };
        let client = self.clients[peer];
        let mut dtype = self.dtypes[instance_id as usize];
        let mut model = self.models[instance_id as usize];
        let mut request = match choices.below(25) {
            0 | 1 => {
                model = choices.index(2);
                dtype = choices.index(2);
                registration(instance_id, model, dtype)
            }
            2 => Request::Unregister {
                instance_id,
                engine_driven: true,
            },
            3 | 4 => Request::Lookup(choices.key()),
            5 => Request::QueryPrefetchStatus {
                request_id: choices.request_id(),
            },
            6 => Request::FreeLookupLocks(choices.key()),
            7 => Request::EndSession {
                request_id: choices.request_id(),
            },
            8 | 9 => Request::PrepareStore {
                key: choices.key(),
                instance_id,
            },
            10 => match choices.below(8) {
                0 | 1 => Request::AbandonStore {
                    key: choices.key(),
                    instance_id,
                },
                2 => Request::AbandonEarlier { instance_id },
                _ => choices.commit_store(instance_id),
            },
            11 => choices.commit_store(instance_id),
            12 | 13 => Request::PrepareRetrieve {
                key: choices.key(),
                instance_id,
            },
            14 => Request::CommitRetrieve {
                key: choices.key(),
                instance_id,
            },
            15 => Request::Clear {
                force: choices.below(2) == 0,
            },
            16 => Request::Ping {
                instance_id: Some(instance_id),
            },
            17 => Request::SubscribeKvEvents {
                instance_id,
                model_name: "m".to_owned(),
                cursor: choices.below(40),
                max_events: choices.index(4),
            },
            18 => {
                self.now += Duration::from_secs(choices.below(255) * 3);
                service.tick(self.now);
                return self.drop_released();
            }
            19 => {
                let lives = [
                    None,
                    Some(Life::Running),
                    Some(Life::Stopped),
                    Some(Life::Dead),
                ];
                let life = lives[choices.index(4)];
                return self.disconnect(peer, life);
            }
            20 => {
                model = choices.index(2);
                dtype = choices.index(2);
                let registration = self.environment.registration(instance_id, model, dtype);
                Request::RegisterKvCache(Box::new(registration))
            }
            21 => Request::Store {
                key: choices.key(),
                instance_id,
                block_ids: vec![choices.block_ids()],
                event: Vec::new(),
            },
            22 => Request::Retrieve {
                key: choices.key(),
                instance_id,
                block_ids: vec![choices.block_ids()],
                event: Vec::new(),
                skip_first_n_tokens: choices.below(6),
            },
            23 if choices.below(2) == 0 => Request::PoolDescriptor,
            23 => Request::ReportBlockAllocation {
                instance_id,
                model_name: "m".to_owned(),
                records: (0..choices.index(3))
                    .map(|record| BlockAllocation {
                        request_id: format!("r{record}"),
                        blocks: record,
                        tokens: record,
                    })
                    .collect(),
            },
            _ => {
                if let Some(copy) = self.copies.pop_front() {
                    copy.run(self.environment);
                }
                return;
            }
        };
        if keeps_rules {
            self.steer(&mut request, instance_id);
        }
        self.ask(client, request, instance_id, model, dtype);
    }

    /// Changes a request to one that the worker's engine would send: with its model and rank, for
    /// ranges that were stored, and with commits of prepared transfers.
    fn steer(&mut self, request: &mut Request, instance_id: u64) {
        let choice = self.choices.index(RANGES);
        let prepared = |store: bool| {
            let own = |held: &&HeldSlots| (held.instance_id, held.store) == (instance_id, store);
            self.held.iter().find(own).map(|held| held.key.clone())
        };
        let key = match request {
            Request::CommitStore { key, .. } | Request::AbandonStore { key, .. } => {
                prepared(true).into_iter().for_each(|known| *key = known);
                return;
            }
            Request::CommitRetrieve { key, .. } => {
                prepared(false).into_iter().for_each(|known| *key = known);
                return;
            }
            Request::Lookup(key)
            | Request::PrepareRetrieve { key, .. }
            | Request::Retrieve { key, .. } => {
                if let Some(known) = self.ranges.get(choice) {
                    let request_id = key.request_id.clone();
                    let num_kv_readers = key.num_kv_readers.max(1);
                    *key = CacheKey {
                        request_id,
                        num_kv_readers,
                        ..known.clone()
                    };
                }
                key
            }
            Request::PrepareStore { key, .. } | Request::Store { key, .. } => key,
            _ => return,
        };
        MODELS[self.models[instance_id as usize]].clone_into(&mut key.model_name);
        key.worker_id = Some(instance_id as u32 % WORLD_SIZE);
    }

    fn ask(
        &mut self,
        client: ClientId,
        request: Request,
        instance_id: u64,
        model: usize,
        dtype: usize,
    ) {
        let environment = self.environment;
        let registers = matches!(
            request,
            Request::RegisterEngineDriven(_) | Request::RegisterKvCache(_)
        );
        match (
            environment
                .service
                .handle(client, request.clone(), self.now),
            request,
        ) {
            (RequestOutcome::Reply(Reply::Registered { .. } | Reply::None), _) if registers => {
                self.dtypes[instance_id as usize] = dtype;
                self.models[instance_id as usize] = model;
            }
            (
                RequestOutcome::Reply(Reply::StoreSlots {
                    slots,
                    chunk_indices,
                }),
                Request::PrepareStore { key, .. },
            ) => {
                assert_eq!(slots.len(), chunk_indices.len());
                let mut held = Vec::new();
                for (slot, index) in slots.into_iter().zip(chunk_indices) {
                    assert_eq!(slot.length, CHUNK_BYTES as u64);
                    let chunk = key.start as usize / CHUNK + index as usize;
                    let byte = value(dtype, &key, chunk);
                    environment.fill_slot(&slot, byte);
                    held.push((slot, byte));
                }
                if !held.is_empty() {
                    self.hold(client, instance_id, true, &key, held);
                    self.ranges.push_front(key);
                    self.ranges.truncate(RANGES);
                }
            }
            (
                RequestOutcome::Reply(Reply::RetrieveSlots(Some(slots))),
                Request::PrepareRetrieve { key, .. },
            ) => {
                assert!(!slots.is_empty());
                let mut held = Vec::new();
                for (index, slot) in slots.into_iter().enumerate() {
                    let chunk = key.start as usize / CHUNK + index;
                    let byte = value(dtype, &key, chunk);
                    environment.check_slot(&slot, byte);
                    held.push((slot, byte));
                }
                self.hold(client, instance_id, false, &key, held);
            }
            (
                RequestOutcome::Reply(Reply::Bool(true)),
                Request::CommitStore { key, .. } | Request::AbandonStore { key, .. },
            ) => {
                self.hold(client, instance_id, true, &key, Vec::new());
            }
            (RequestOutcome::Reply(Reply::Bool(true)), Request::CommitRetrieve { key, .. }) => {
                self.hold(client, instance_id, false, &key, Vec::new());
            }
            (RequestOutcome::Reply(Reply::Int(1..)), Request::AbandonEarlier { .. }) => {
                let is_gone = |client| self.gone.iter().any(|gone| gone.client == client);
                self.held
                    .retain(|held| held.instance_id != instance_id || !is_gone(held.client));
            }
            (RequestOutcome::Reply(reply), Request::PoolDescriptor) => {
                let is_passed = self.takers.remove(&client);
                assert_eq!(matches!(reply, Reply::Int(_)), is_passed, "{reply:?}");
                if is_passed {
                    // As the transport does before it sends the reply.
                    let process = Arc::new(Process(Life::Running));
                    environment.service.set_witness(client, process);
                }
            }
            (RequestOutcome::Reply(_), Request::Lookup(key)) => {
                // Some runs continue while the chunks are promoted.
                if self.choices.below(4) > 0 {
                    environment.wait_for_promotion(client, &key.request_id, self.now);
                }
            }
            (RequestOutcome::Reply(_), _) => {}
            (RequestOutcome::Stream(stream), _) => self.streams.push(stream),
            // Copies run one after the other on this thread, so none is in progress.
            (RequestOutcome::WhenIdle(entrance), _) => {
                let (sender, receiver) = std::sync::mpsc::channel();
                entrance.when_idle(Box::new(move || {
                    sender.send(()).expect("the receiver is open")
                }));
                receiver.try_recv().expect("no copy is in progress");
            }
            (RequestOutcome::Wait(_), request) => panic!("unexpected wait for {request:?}"),
            (RequestOutcome::Job(job), Request::Clear { .. }) => {
                job.run();
            }
            (
                RequestOutcome::Job(job),
                Request::Store {
                    key, mut block_ids, ..
                },
            ) => self.copies.push_back(PendingCopy {
                job,
                key,
                dtype,
                block_ids: block_ids.swap_remove(0),
                skip: None,
            }),
            (
                RequestOutcome::Job(job),
                Request::Retrieve {
                    key,
                    mut block_ids,
                    skip_first_n_tokens,
                    ..
                },
            ) => self.copies.push_back(PendingCopy {
                job,
                key,
                dtype,
                block_ids: block_ids.swap_remove(0),
                skip: Some(skip_first_n_tokens as usize),
            }),
            (RequestOutcome::Job(_), request) => panic!("unexpected job for {request:?}"),
        }
        for stream in &mut self.streams {
            if let NextBatch::Batch(batch) = environment.service.next_batch(stream) {
                assert!(batch.events.len() <= 1024);
            }
        }
    }

    /// Ends all clients and checks that nothing is leased or reserved.
    fn end(mut self) {
        let service = self.environment.service;
        // A job that is dropped without a run must release its leases and slots too.
        let run = self.copies.len() / 2;
        for copy in self.copies.drain(..run) {
            copy.run(self.environment);
        }
        self.copies.clear();
        for instance_id in 0..INSTANCES {
            let leave = Request::Unregister {
                instance_id,
                engine_driven: true,
            };
            for client in self.clients {
                service.handle(client, leave.clone(), self.now);
            }
        }
        for peer in 0..CLIENTS as usize {
            let life = [None, Some(Life::Running), Some(Life::Dead)][peer % 3];
            self.disconnect(peer, life);
            self.check_held();
        }
        // Stopped processes die, and the grace time of the others ends.
        for gone in self.gone.drain(..) {
            if gone.life == Some(Life::Stopped) {
                service.set_witness(gone.client, Arc::new(Process(Life::Dead)));
            }
        }
        self.now += service.config().slot_grace;
        service.tick(self.now);
        for client in self.clients {
            service.client_gone(client, self.now);
        }
        // Promotions for requests that have ended are cancelled by themselves.
        let idle = || {
            let usage = service.status(self.now).usage;
            (usage.leases, usage.reserved_slots) == (0, 0)
        };
        self.environment
            .wait_until("release of leases and slots", idle);
        let status = service.status(self.now);
        assert_eq!(status.sessions.sessions, 0);
        assert_eq!(
            (status.transfers.stores, status.transfers.retrieves),
            (0, 0)
        );
        assert!(status.instances.is_empty());
        assert_eq!((status.usage.leases, status.usage.reserved_slots), (0, 0));
        drop(service.engine().clear(InUse::Remove));
        let used = || service.status(self.now).usage.used_bytes;
        self.environment
            .wait_until("release of all memory", || used() == 0);
    }
}
