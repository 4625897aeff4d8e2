//! A server in the test process, and clients and workers for it.

#[cfg(feature = "adapters")]
pub(crate) mod engine;

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::Backend;
use lmc_engine::{EngineConfig, EngineContext, EngineHost};
use lmc_key::{ChunkHasher, HashAlgorithm};
use lmc_memory::ArenaConfig;
use lmc_vllm_adapter::{
    CacheKey, Client, EngineDrivenContext, Reply, Request, Service, ServiceConfig, ServiceStatus,
    SlotDescriptor, UnknownFields, ZmqConfig,
};
use tokio::sync::watch;

/// Tokens per chunk in these tests.
pub(crate) const CHUNK: usize = 16;
pub(crate) const LAYERS: u32 = 2;
pub(crate) const HIDDEN: u32 = 8;
/// Bytes per chunk: `[2, LAYERS, CHUNK, HIDDEN]` in float32.
pub(crate) const CHUNK_BYTES: usize = 2 * LAYERS as usize * CHUNK * HIDDEN as usize * 4;
pub(crate) const MODEL: &str = "test/llama";
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Server {
    pub(crate) service: Service,
    pub(crate) address: SocketAddr,
    pub(crate) shm_name: String,
    pub(crate) pool_bytes: u64,
    stop: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn shared_arena(bytes: usize) -> ArenaConfig {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    ArenaConfig::shared(format!("lmc_test_{}_{number}", std::process::id()), bytes)
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(1 << 20, |_| {}, |_| {})
    }

    pub(crate) fn with(
        pool_bytes: usize,
        service: impl FnOnce(&mut ServiceConfig),
        zmq: impl FnOnce(&mut ZmqConfig),
    ) -> Self {
        Self::with_tiers(Vec::new(), pool_bytes, service, zmq)
    }

    /// Starts a server with lower tiers.
    pub(crate) fn with_tiers(
        lower: Vec<Arc<dyn Backend>>,
        pool_bytes: usize,
        service: impl FnOnce(&mut ServiceConfig),
        zmq: impl FnOnce(&mut ZmqConfig),
    ) -> Self {
        let engine = EngineConfig::default();
        Self::with_engine(engine, lower, pool_bytes, service, zmq)
    }

    /// A server whose engine has these limits.
    pub(crate) fn with_engine(
        engine: EngineConfig,
        lower: Vec<Arc<dyn Backend>>,
        pool_bytes: usize,
        service: impl FnOnce(&mut ServiceConfig),
        zmq: impl FnOnce(&mut ZmqConfig),
    ) -> Self {
        let (arena, host) = (shared_arena(pool_bytes), EngineHost::default());
        Self::with_arena(arena, engine, (host, lower), service, zmq)
    }

    /// A server with a pool of 1 MiB, whose engine has this host.
    pub(crate) fn with_host(host: EngineHost, lower: Vec<Arc<dyn Backend>>) -> Self {
        let (arena, engine) = (shared_arena(1 << 20), EngineConfig::default());
        Self::with_arena(arena, engine, (host, lower), |_| {}, |_| {})
    }

    /// A server whose pool has no name and is sealed, at a Unix socket.
    pub(crate) fn sealed(socket: &Path) -> Self {
        let arena = ArenaConfig::sealed(1 << 20);
        let zmq = |zmq: &mut ZmqConfig| zmq.ipc_path = Some(socket.to_owned());
        Self::with_arena(
            arena,
            EngineConfig::default(),
            Default::default(),
            |_| {},
            zmq,
        )
    }

    fn with_arena(
        arena: ArenaConfig,
        engine: EngineConfig,
        (host, lower): (EngineHost, Vec<Arc<dyn Backend>>),
        service: impl FnOnce(&mut ServiceConfig),
        zmq: impl FnOnce(&mut ZmqConfig),
    ) -> Self {
        let arena = arena.build().expect("an arena");
        let shm_name = arena
            .shared_name()
            .map_or(String::new(), |name| name.to_string());
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, CHUNK as u32).expect("a chunk size");
        let mut config = ServiceConfig::new(hasher);
        // Tests of the grace time set their own.
        config.slot_grace = Duration::from_millis(200);
        service(&mut config);
        let context = EngineContext::new(Arc::new(arena), host).with_tiers(lower);
        let engine = engine.start(context).expect("an engine");
        let service = config.start(engine).expect("threads");
        let mut config = ZmqConfig {
            port: 0,
            ..ZmqConfig::default()
        };
        zmq(&mut config);
        let (stop, stopped) = watch::channel(false);
        let (ready, address) = std::sync::mpsc::channel();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let for_server = service.clone();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async move {
                let server = config.bind(for_server).await.expect("a port");
                ready.send(server.local_addr()).expect("the test waits");
                server.run(stopped).await;
            });
        });
        let address = address.recv_timeout(TIMEOUT).expect("the server starts");
        let pool_bytes = service.engine().pool_bytes();
        Self {
            service,
            address,
            shm_name,
            pool_bytes,
            stop,
            thread: Some(thread),
        }
    }

    /// Runs the periodic work: releases slots of ended connections and expires sessions.
    pub(crate) fn tick(&self) {
        self.service.tick(Instant::now());
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(self.address, TIMEOUT).expect("a connection")
    }

    pub(crate) fn status(&self) -> ServiceStatus {
        self.service.status(Instant::now())
    }

    /// Maps the pool as a worker does.
    pub(crate) fn pool(&self) -> Pool {
        Pool::open(&self.shm_name)
    }

    /// Waits until a condition of the status is true.
    pub(crate) fn eventually(&self, what: &str, condition: impl Fn(&ServiceStatus) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !condition(&self.status()) {
            assert!(
                Instant::now() < deadline,
                "timeout: {what}\n{:#?}",
                self.status()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until no lease, reserved slot, session or transfer is left.
    pub(crate) fn assert_idle(&self) {
        self.eventually("nothing is leased or reserved", |status| {
            self.tick();
            status.sessions.sessions == 0
                && status.transfers.stores == 0
                && status.transfers.retrieves == 0
                && status.usage.leases == 0
                && status.usage.reserved_slots == 0
                && status.usage.quarantined_slots == 0
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Another thread may keep the engine alive past the end of the process.
        self.service.engine().arena().unlink();
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.expect("the server did not panic");
            }
        }
    }
}

/// Requests that must be answered.
pub(crate) trait Answer {
    fn answer(&mut self, request: &Request) -> Reply;
}

impl Answer for Client {
    fn answer(&mut self, request: &Request) -> Reply {
        self.ask(request).expect("an answer")
    }
}

/// The shared pool, accessed as by a worker.
pub(crate) struct Pool {
    file: File,
    /// The server recognises a worker process by its mapping of the pool.
    _mapping: memmap2::MmapRaw,
}

impl Pool {
    pub(crate) fn open(name: &str) -> Self {
        let path = format!("/dev/shm/{name}");
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .expect("a pool");
        Self::of(file)
    }

    /// Maps the pool from its descriptor.
    pub(crate) fn of(file: File) -> Self {
        let mapping = memmap2::MmapRaw::map_raw(&file).expect("the pool can be mapped");
        Self {
            file,
            _mapping: mapping,
        }
    }

    pub(crate) fn write(&self, slot: &SlotDescriptor, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        assert_eq!(slot.length as usize, bytes.len());
        self.file
            .write_all_at(bytes, slot.offset)
            .expect("inside the pool");
    }

    pub(crate) fn read(&self, slot: &SlotDescriptor) -> Vec<u8> {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; slot.length as usize];
        self.file
            .read_exact_at(&mut bytes, slot.offset)
            .expect("inside the pool");
        bytes
    }
}

/// Returns the expected bytes of a chunk, derived from its tokens and a seed.
pub(crate) fn chunk_bytes(tokens: &[u32], chunk: usize, seed: u32) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32 ^ seed.wrapping_mul(0x85eb_ca6b);
    for &token in &tokens[..(chunk + 1) * CHUNK] {
        state = (state ^ token).wrapping_mul(0x01000193).rotate_left(7);
    }
    (0..CHUNK_BYTES)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        })
        .collect()
}

pub(crate) fn prompt(seed: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32)
        .map(|i| (i * 7 + 1).wrapping_mul(seed * 2 + 1) % 50_000)
        .collect()
}

/// The registration of a worker that copies by itself.
pub(crate) fn registration(instance_id: u64, dtype: &str, world_size: u32) -> EngineDrivenContext {
    let size = match dtype {
        "float32" => 4,
        "uint8" => 1,
        _ => 2,
    };
    EngineDrivenContext {
        instance_id,
        model_name: MODEL.to_owned(),
        world_size,
        block_size: 4,
        num_layers: LAYERS,
        hidden_dim_size: HIDDEN * 4 / size,
        dtype: dtype.to_owned(),
        use_mla: false,
        num_physical_slots: Some(CHUNK as u32),
        record: None,
        unknown: UnknownFields::default(),
    }
}

/// A worker that copies by itself from and to the shared pool.
pub(crate) struct Worker {
    pub(crate) client: Client,
    pub(crate) instance_id: u64,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) pool: Pool,
    pub(crate) dtype: &'static str,
}

impl Worker {
    pub(crate) fn register(server: &Server, instance_id: u64) -> Self {
        Self::register_rank(server, instance_id, 0, 1, "float32")
    }

    pub(crate) fn register_rank(
        server: &Server,
        instance_id: u64,
        rank: u32,
        world_size: u32,
        dtype: &'static str,
    ) -> Self {
        Self::register_on(server.client(), instance_id, rank, world_size, dtype)
    }

    /// Registers over a given connection, which may lead through a proxy.
    pub(crate) fn register_on(
        client: Client,
        instance_id: u64,
        rank: u32,
        world_size: u32,
        dtype: &'static str,
    ) -> Self {
        Self::register_with(client, instance_id, rank, world_size, dtype, Pool::open)
    }

    /// Registers over a Unix socket, over which the server passes the pool's descriptor.
    pub(crate) fn register_passed(mut client: Client, instance_id: u64) -> Self {
        let size = client.answer(&Request::PoolDescriptor);
        let file = File::from(client.take_descriptor().expect("it comes with the reply"));
        let len = file.metadata().expect("it is open").len();
        assert_eq!(size, Reply::Int(len));
        Self::register_with(client, instance_id, 0, 1, "float32", |_| Pool::of(file))
    }

    /// Registers as the one rank of an engine of float32.
    pub(crate) fn register_as(client: Client, context: EngineDrivenContext) -> Self {
        Self::register_context(client, context, 0, "float32", Pool::open)
    }

    fn register_with(
        client: Client,
        instance_id: u64,
        rank: u32,
        world_size: u32,
        dtype: &'static str,
        pool: impl FnOnce(&str) -> Pool,
    ) -> Self {
        let context = registration(instance_id, dtype, world_size);
        Self::register_context(client, context, rank, dtype, pool)
    }

    fn register_context(
        mut client: Client,
        context: EngineDrivenContext,
        rank: u32,
        dtype: &'static str,
        pool: impl FnOnce(&str) -> Pool,
    ) -> Self {
        let (instance_id, world_size) = (context.instance_id, context.world_size);
        let reply = client.ask(&Request::RegisterEngineDriven(context));
        let reply = reply.expect("registered");
        let Reply::Registered { shm_name, .. } = reply else {
            panic!("unexpected {reply:?}");
        };
        Self {
            client,
            instance_id,
            rank,
            world_size,
            pool: pool(&shm_name),
            dtype,
        }
    }

    pub(crate) fn key(
        &self,
        request: &str,
        tokens: &[u32],
        chunks: std::ops::Range<usize>,
    ) -> CacheKey {
        CacheKey {
            model_name: MODEL.to_owned(),
            world_size: self.world_size,
            worker_id: Some(self.rank),
            token_ids: tokens.to_vec(),
            start: (chunks.start * CHUNK) as u64,
            end: (chunks.end * CHUNK) as u64,
            request_id: request.to_owned(),
            num_kv_readers: 1,
            ..CacheKey::default()
        }
    }

    pub(crate) fn prepare_store(&mut self, key: &CacheKey) -> (Vec<SlotDescriptor>, Vec<u64>) {
        let instance_id = self.instance_id;
        let request = Request::PrepareStore {
            key: key.clone(),
            instance_id,
        };
        match self.client.answer(&request) {
            Reply::StoreSlots {
                slots,
                chunk_indices,
            } => (slots, chunk_indices),
            other => panic!("unexpected {other:?}"),
        }
    }

    /// Writes the expected bytes of the chunks of a prepared store.
    pub(crate) fn fill(&self, key: &CacheKey, slots: &[SlotDescriptor], indices: &[u64]) {
        for (slot, &index) in slots.iter().zip(indices) {
            let chunk = key.start as usize / CHUNK + index as usize;
            let bytes = chunk_bytes(&key.token_ids, chunk, self.seed(key));
            self.pool.write(slot, &bytes);
        }
    }

    pub(crate) fn seed(&self, key: &CacheKey) -> u32 {
        let salt: u32 = key.cache_salt.bytes().map(u32::from).sum();
        let dtype: u32 = self.dtype.bytes().map(u32::from).sum();
        self.rank * 31 + salt * 7 + dtype * 1009
    }

    pub(crate) fn commit_store(&mut self, key: &CacheKey) -> bool {
        let request = Request::CommitStore {
            key: key.clone(),
            instance_id: self.instance_id,
            pickled: 0,
        };
        self.client.answer(&request) == Reply::Bool(true)
    }

    /// Stores a range as an engine does, and returns the number of new chunks.
    pub(crate) fn store(&mut self, key: &CacheKey) -> usize {
        let (slots, indices) = self.prepare_store(key);
        if slots.is_empty() {
            return 0;
        }
        self.fill(key, &slots, &indices);
        assert!(self.commit_store(key));
        slots.len()
    }

    pub(crate) fn prepare_retrieve(&mut self, key: &CacheKey) -> Option<Vec<SlotDescriptor>> {
        let request = Request::PrepareRetrieve {
            key: key.clone(),
            instance_id: self.instance_id,
        };
        match self.client.answer(&request) {
            Reply::RetrieveSlots(slots) => slots,
            other => panic!("unexpected {other:?}"),
        }
    }

    /// Retrieves a range and checks every byte. Returns false on a miss.
    pub(crate) fn retrieve(&mut self, key: &CacheKey) -> bool {
        let instance_id = self.instance_id;
        let slots = self.prepare_retrieve(key);
        if let Some(slots) = &slots {
            for (index, slot) in slots.iter().enumerate() {
                let chunk = key.start as usize / CHUNK + index;
                let expected = chunk_bytes(&key.token_ids, chunk, self.seed(key));
                assert!(
                    self.pool.read(slot) == expected,
                    "wrong bytes in chunk {chunk}"
                );
                assert_eq!(slot.dtype, self.dtype);
            }
        }
        let request = Request::CommitRetrieve {
            key: key.clone(),
            instance_id,
        };
        let committed = self.client.answer(&request);
        assert_eq!(committed, Reply::Bool(slots.is_some()));
        slots.is_some()
    }
}

/// Looks up a prompt and returns the number of leading chunks that are cached.
pub(crate) fn lookup(client: &mut Client, key: &CacheKey) -> u64 {
    let key = CacheKey {
        worker_id: None,
        ..key.clone()
    };
    assert_eq!(client.answer(&Request::Lookup(key.clone())), Reply::None);
    let status = Request::QueryPrefetchStatus {
        request_id: key.request_id,
    };
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match client.answer(&status) {
            Reply::Int(chunks) => return chunks,
            // Chunks are being promoted from a lower tier.
            Reply::None => assert!(Instant::now() < deadline, "no result before the deadline"),
            other => panic!("unexpected {other:?}"),
        }
    }
}

pub(crate) fn end_session(client: &mut Client, request: &str) {
    let request_id = request.to_owned();
    client.answer(&Request::EndSession { request_id });
}

/// An engine's shared-memory segment.
pub(crate) struct Segment {
    file: File,
    path: String,
    pub(crate) len: usize,
}

/// Returns a name for a segment that no other test of any process has.
pub(crate) fn segment_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("lmcache_kv_{}_{next}", std::process::id())
}

impl Segment {
    pub(crate) fn new(name: &str, len: usize) -> Self {
        let path = format!("/dev/shm/{name}");
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path);
        let file = file.expect("a segment");
        file.set_len(len as u64).expect("space in /dev/shm");
        Self { file, path, len }
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        self.file
            .write_all_at(bytes, at as u64)
            .expect("inside the segment");
    }

    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file
            .read_exact_at(&mut bytes, at as u64)
            .expect("inside the segment");
        bytes
    }

    pub(crate) fn all_bytes_are(&self, byte: u8) -> bool {
        self.read(0, self.len).iter().all(|&b| b == byte)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns the resident memory of this process in bytes.
pub(crate) fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = status.split(' ').nth(1).expect("resident pages");
    pages.parse::<u64>().expect("a number") * 4096
}
