//! The worker's side: moves chunks between the engine's blocks and the server's pool.
//!
//! The engine's thread only queues what is to be moved, for the threads of [`Mover`].

use std::collections::HashSet;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::cuda::{CudaError, Gpu, Gpus, Registration};
use lmc_memory::{CopyPool, MappedSegment, Planes, SharedName};
use parking_lot::{Condvar, Mutex};

use crate::adapters::common::{Common, Server, ServerState};
use crate::adapters::link::{Link, OwnThread, SessionId, Setup};
use crate::adapters::log::Level;
use crate::adapters::mover::Mover;
use crate::adapters::prompt::tail_request_id;
use crate::adapters::tensors::Described;
use crate::adapters::work::{Direction, Work};
use crate::adapters::{
    AdapterError, Endpoint, EngineDescription, KvLayers, LogLine, Prompt, Timeouts,
};
use crate::protocol::{
    CacheKey, EngineDrivenContext, EngineRecord, Reply, Request, RequestConfigs, UnknownFields,
};

/// One transfer between blocks of the engine and chunks of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadStoreOp {
    /// Id of the request.
    pub request_id: String,
    /// The prompt up to the end of the range, at least.
    pub prompt: Prompt,
    /// The range in tokens: whole chunks, or the blocks of a [`Prompt::Tail`].
    pub tokens: Range<usize>,
    /// The blocks of the range in each group of layers, in the order in which the groups are
    /// registered.
    pub block_ids: Vec<Vec<u32>>,
    /// Tokens at the start of the range whose blocks a retrieve must not write.
    pub skip_first_n_tokens: usize,
    /// Name of the tenant.
    pub cache_salt: String,
    /// Settings of the request.
    pub configs: RequestConfigs,
    /// Number by which [`WorkerAdapter::take_ended_stores`] names this store. `None`: it is not
    /// named there.
    pub store_number: Option<u64>,
}

/// A store that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedStore {
    /// Number of the store.
    pub number: u64,
    /// Chunks that this store has added to the server, counted from the first of its range.
    pub chunks: Vec<u64>,
}

/// Requests whose transfers have ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Finished {
    /// Requests that the engine has named finished and that have no store left.
    pub stores: HashSet<String>,
    /// Requests whose retrieves have all ended, well or not.
    pub retrieves: HashSet<String>,
    /// The part of `retrieves` that lacks chunks.
    pub failed: HashSet<String>,
}

/// Figures of a [`WorkerAdapter`] since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStats {
    /// Chunks written into the pool and committed.
    pub stored_chunks: u64,
    /// Payload bytes of those chunks.
    pub stored_bytes: u64,
    /// Stores that ended without a commit.
    pub stores_failed: u64,
    /// Chunks read from the pool.
    pub retrieved_chunks: u64,
    /// Payload bytes of those chunks.
    pub retrieved_bytes: u64,
    /// Retrieves that ended without all their chunks.
    pub retrieves_failed: u64,
    /// Time in which bytes were copied, in nanoseconds.
    pub copy_nanos: u64,
    /// Connections to the server that were lost.
    pub connections_lost: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) stored_chunks: AtomicU64,
    pub(crate) stored_bytes: AtomicU64,
    pub(crate) stores_failed: AtomicU64,
    pub(crate) retrieved_chunks: AtomicU64,
    pub(crate) retrieved_bytes: AtomicU64,
    pub(crate) retrieves_failed: AtomicU64,
    pub(crate) copy_nanos: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// A stream of an engine's work on a GPU.
#[derive(Debug, Clone, Copy)]
pub struct EngineStream(u64);

impl EngineStream {
    /// Takes a `CUstream` of this process by its address; 0 is the default stream.
    ///
    /// # Safety
    /// It is a stream of the primary context of the GPU whose memory is registered, and stays one
    /// during the calls that it is given to.
    pub unsafe fn new(stream: u64) -> Self {
        Self(stream)
    }
}

/// The layout of the engine's memory in the two kinds of chunks.
#[derive(Debug, Clone)]
pub(crate) struct Layouts {
    /// Whole chunks, of the server's size.
    chunk: Arc<Described>,
    /// Chunks of one block, for tails.
    block: Arc<Described>,
}

impl Layouts {
    fn describe(
        layers: &KvLayers,
        chunk_size: u32,
        gpu: Option<&Arc<Gpu>>,
    ) -> Result<Self, AdapterError> {
        let describe = |tokens| layers.describe(tokens, gpu).map(Arc::new);
        Ok(Self {
            chunk: describe(chunk_size)?,
            block: describe(layers.tokens_per_block())?,
        })
    }

    /// Returns the layout of the chunks that a prompt's name is of.
    pub(crate) fn of(&self, prompt: &Prompt) -> &Described {
        match prompt.is_tail() {
            true => &self.block,
            false => &self.chunk,
        }
    }
}

/// The engine's memory, once it is registered.
#[derive(Debug)]
struct Registered {
    layers: KvLayers,
    layouts: Layouts,
    chunk_size: u32,
}

/// The pool of the connected server.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    pub(crate) session: SessionId,
    pub(crate) memory: Arc<MappedSegment>,
    pub(crate) layouts: Layouts,
    pub(crate) server: Server,
    /// Keeps the memory registered with the driver, where the engine's lies on a GPU.
    _registration: Option<Arc<Registration>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) common: Arc<Common>,
    /// Ids under which the server knows this worker: of whole chunks, and of single blocks.
    pub(crate) instance_ids: [u64; 2],
    /// True if the next ping is about the second id.
    pings_second: AtomicBool,
    pub(crate) kv_rank: u32,
    registered: Mutex<Option<Registered>>,
    gpus: Gpus,
    /// The GPU that the engine's memory lies on. Locked for moments only.
    gpu: Mutex<Option<Arc<Gpu>>>,
    pub(crate) pool: Mutex<Option<Pool>>,
    /// True if the next connection is to map the pool by its name: the last one brought no descriptor.
    by_name: AtomicBool,
    pub(crate) work: Mutex<Work>,
    pub(crate) changed: Condvar,
    pub(crate) counters: Counters,
}

pub(crate) struct WorkerSetup(Arc<Shared>);

impl Setup for WorkerSetup {
    fn next(
        &self,
        session: SessionId,
        replies: &[Reply],
        descriptor: &mut Option<OwnedFd>,
    ) -> Result<Option<Request>, String> {
        let shared = &self.0;
        if replies.len() <= 2
            && let Some(request) = shared.common.next_setup(replies)?
        {
            return Ok(Some(request));
        }
        let server = shared.common.server().ok_or("no answer to the setup")?;
        let mut registered = shared.registered.lock();
        let Some(registered) = &mut *registered else {
            return Ok(None);
        };
        let gpu = shared.gpu.lock().clone();
        if registered.chunk_size != server.chunk_size {
            // Registered while no server was there.
            let layouts = Layouts::describe(&registered.layers, server.chunk_size, gpu.as_ref());
            registered.layouts = layouts.map_err(|error| error.to_string())?;
            registered.chunk_size = server.chunk_size;
        }
        let layouts = &registered.layouts;
        let registration = match replies.get(2..).unwrap_or_default() {
            [] if server.pool_descriptor && !shared.by_name.swap(false, Ordering::Relaxed) => {
                return Ok(Some(Request::PoolDescriptor));
            }
            // On this connection the server takes the other end, which is a proxy's, for the process
            // that copies.
            [Reply::Int(_)] if descriptor.is_none() => {
                shared.by_name.store(true, Ordering::Relaxed);
                return Err("no descriptor of its pool has arrived, as through a proxy".to_owned());
            }
            // The descriptor is kept until the registration is answered.
            [] | [Reply::Int(_)] => {
                return Ok(Some(shared.registration(server, &layouts.chunk, None)));
            }
            [Reply::Registered { .. }] | [Reply::Int(_), Reply::Registered { .. }]
                if server.tails =>
            {
                let unit = Some(shared.common.engine.block_size);
                return Ok(Some(shared.registration(server, &layouts.block, unit)));
            }
            [.., last] => last,
        };
        let Reply::Registered {
            shm_name,
            pool_size,
        } = registration
        else {
            return Err(format!(
                "unexpected answer to the registration: {registration:?}"
            ));
        };
        let memory = Arc::new(map_pool(shm_name, *pool_size, descriptor.take())?);
        let registration = gpu.map(|gpu| shared.register(&gpu, &memory));
        if registration.is_none() {
            // A registration enters them as well.
            enter_pages(&memory);
        }
        *shared.pool.lock() = Some(Pool {
            session,
            memory,
            layouts: layouts.clone(),
            server,
            _registration: registration,
        });
        Ok(None)
    }

    fn up(&self) {
        // A mover that is about to wait has the lock.
        drop(self.0.work.lock());
        self.0.changed.notify_all();
    }

    fn ping(&self) -> Request {
        let shared = &self.0;
        let registered = shared.registered.lock().is_some();
        let tails = shared.common.server().is_some_and(|server| server.tails);
        let second = shared.pings_second.fetch_xor(true, Ordering::Relaxed) && tails;
        Request::Ping {
            instance_id: registered.then_some(shared.instance_ids[usize::from(second)]),
        }
    }
}

/// Maps the pool by the descriptor that the server passed, or by its name.
fn map_pool(
    shm_name: &str,
    pool_size: u64,
    descriptor: Option<OwnedFd>,
) -> Result<MappedSegment, String> {
    let named = || SharedName::new(shm_name).map_err(|error| error.to_string());
    let Some(descriptor) = descriptor else {
        return MappedSegment::open_pool(&named()?, pool_size).map_err(|error| {
            format!(
                "{error}: engine and server must run on one host, and share /dev/shm or the folder \
                 of the server's Unix socket (--ipc-path)"
            )
        });
    };
    let name = match shm_name {
        "" => None,
        _ => Some(named()?),
    };
    let memory = MappedSegment::of_descriptor(descriptor, name.as_ref(), pool_size);
    memory.map_err(|error| error.to_string())
}

/// Enters the pages of the pool into the page table of this process, as the server gets them.
/// Without it each copy to a new slot stops at each of its pages.
///
/// Threads of the engine that map memory wait while a piece is entered. So the thread has the
/// engine's own priority, since one that gives way to all others waits for a core in the middle of
/// a piece, for seconds on a busy machine. It rests between two pieces instead.
fn enter_pages(memory: &Arc<MappedSegment>) {
    const PART: u64 = 8 << 20;
    /// Bytes that are entered at a time.
    const PIECE: usize = 256 << 10;
    /// Rest after a piece, in times that it took: the thread uses a fifth of a core.
    const REST: u32 = 4;
    const LONGEST_REST: Duration = Duration::from_millis(10);
    const AGAIN: Duration = Duration::from_secs(1);
    /// Passes in a row that find nothing new: the server gets its pages as they are used, or has gone.
    const IN_VAIN: u32 = 10;

    let (len, memory) = (memory.len(), Arc::downgrade(memory));
    let run = move || {
        let enter = |start: u64| {
            let end = len.min(start + PART);
            (start..end).step_by(PIECE).all(|start| {
                let (piece, began) = (start..end.min(start + PIECE as u64), Instant::now());
                let entered = memory.upgrade().map(|memory| memory.enter_pages(piece));
                thread::sleep((began.elapsed() * REST).min(LONGEST_REST));
                matches!(entered, Some(Ok(true)))
            })
        };
        let mut left: Vec<u64> = (0..len).step_by(PART as usize).collect();
        let mut in_vain = 0;
        loop {
            let before = left.len();
            left.retain(|&start| !enter(start));
            in_vain = if left.len() == before { in_vain + 1 } else { 0 };
            if left.is_empty() || in_vain == IN_VAIN || memory.strong_count() == 0 {
                return;
            }
            thread::sleep(AGAIN);
        }
    };
    // It only saves time.
    let _ = thread::Builder::new()
        .name("lmc-pages".to_owned())
        .spawn(run);
}

impl Shared {
    /// Returns the registration of chunks, which have `unit` tokens where not the server's.
    fn registration(&self, server: Server, described: &Described, unit: Option<u32>) -> Request {
        let engine = &self.common.engine;
        let chunk = &described.chunk;
        Request::RegisterEngineDriven(EngineDrivenContext {
            instance_id: self.instance_ids[usize::from(unit.is_some())],
            model_name: self.common.model(server).to_owned(),
            world_size: engine.world_size,
            block_size: engine.block_size,
            num_layers: chunk.layers(),
            hidden_dim_size: (chunk.row_bytes() / chunk.dtype().size() as u64) as u32,
            dtype: chunk.dtype().name().to_owned(),
            use_mla: chunk.planes() == Planes::Fused,
            num_physical_slots: Some(chunk.rows()),
            record: server.engine_keys.then(|| EngineRecord {
                identity: engine.identity.clone(),
                layout: described.layout.clone(),
                unit,
            }),
            unknown: UnknownFields::default(),
        })
    }

    /// Begins to register the pool with the driver of the engine's GPU.
    fn register(&self, gpu: &Gpu, memory: &Arc<MappedSegment>) -> Arc<Registration> {
        let log = Arc::clone(&self.common.log);
        let failed = move |error: CudaError| {
            let text = format!(
                "the pool cannot be registered with the GPU's driver, so it is copied at a fifth of \
                 the rate: {error}"
            );
            log.push(Level::Warning, text);
        };
        Arc::new(gpu.register(Arc::clone(memory), failed))
    }

    pub(crate) fn key(&self, server: Server, direction: Direction, op: &LoadStoreOp) -> CacheKey {
        let (range, salt) = (op.tokens.clone(), &op.cache_salt);
        let tail_id;
        let request_id = match direction {
            // The name under which the scheduler has looked it up.
            Direction::Retrieve if op.prompt.is_tail() && op.tokens.start > 0 => {
                tail_id = tail_request_id(&op.request_id);
                &tail_id
            }
            _ => &op.request_id,
        };
        let key = self
            .common
            .key(server, request_id, &op.prompt, range, salt, &op.configs);
        CacheKey {
            worker_id: Some(self.kv_rank),
            ..key
        }
    }

    /// Returns the id under which the server knows the chunks of a prompt's name.
    pub(crate) fn instance_id(&self, prompt: &Prompt) -> u64 {
        self.instance_ids[usize::from(prompt.is_tail())]
    }

    /// Returns the pool of the connection that is up.
    pub(crate) fn pool(&self, session: SessionId) -> Option<Pool> {
        let pool = self.pool.lock().clone();
        pool.filter(|pool| session != 0 && pool.session == session)
    }
}

/// Moves the chunks of an engine's worker, without ever waiting on its thread.
#[derive(Debug)]
pub struct WorkerAdapter {
    shared: Arc<Shared>,
    link: Arc<Link>,
    thread: OwnThread,
    /// Carries out retrieves where the memory lies on a GPU, whose link has two directions.
    loader: Mutex<Option<OwnThread>>,
}

impl WorkerAdapter {
    /// Connects to a server. Waits at most 5 s for it; without one, stores are dropped and
    /// retrieves fail until it is there. `copy_threads` threads copy, the adapter's own included.
    ///
    /// # Errors
    /// [`AdapterError`]: the server's chunks are not whole blocks of the engine, or no thread can be
    /// started.
    pub fn start(
        endpoint: Endpoint,
        engine: EngineDescription,
        kv_rank: u32,
        copy_threads: usize,
    ) -> Result<Self, AdapterError> {
        Self::start_with(endpoint, engine, kv_rank, copy_threads, Timeouts::default())
    }

    /// Connects to a server as [`Self::start`] does, with other timeouts.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(
        endpoint: Endpoint,
        engine: EngineDescription,
        kv_rank: u32,
        copy_threads: usize,
        timeouts: Timeouts,
    ) -> Result<Self, AdapterError> {
        let common = Arc::new(Common::new(engine, timeouts)?);
        if kv_rank >= common.engine.world_size {
            let text = format!(
                "kv_rank must be less than world_size {}, found {kv_rank}",
                common.engine.world_size
            );
            return Err(AdapterError::Invalid(text));
        }
        let mut ids = [0; 16];
        getrandom::fill(&mut ids).map_err(std::io::Error::from)?;
        let ids = u128::from_le_bytes(ids);
        let shared = Arc::new(Shared {
            common: Arc::clone(&common),
            // LMCache's server reads a signed number.
            instance_ids: [ids as u64, (ids >> 64) as u64].map(|id| id >> 1),
            pings_second: AtomicBool::new(false),
            kv_rank,
            registered: Mutex::default(),
            gpus: Gpus::without_pool(),
            gpu: Mutex::default(),
            pool: Mutex::default(),
            by_name: AtomicBool::new(false),
            work: Mutex::default(),
            changed: Condvar::new(),
            counters: Counters::default(),
        });
        let setup = Arc::new(WorkerSetup(Arc::clone(&shared)));
        let link = Arc::new(Link::start(
            endpoint,
            setup,
            Arc::clone(&common.log),
            timeouts.ping,
        )?);
        common.wait_for_server(&link)?;
        let mover = Mover {
            shared: Arc::clone(&shared),
            link: Arc::clone(&link),
            copies: CopyPool::new(copy_threads.saturating_sub(1))?,
            is_loader: false,
        };
        let thread = thread::Builder::new()
            .name("lmc-worker".to_owned())
            .spawn(move || mover.run())?;
        Ok(Self {
            shared,
            link,
            thread: OwnThread::new(thread),
            loader: Mutex::default(),
        })
    }

    /// Registers the paged KV cache, and waits at most 5 s for the server's
    /// answer. Without a server it is registered when there is one. Where it lies on a GPU, this takes
    /// 66 MiB there for copies.
    ///
    /// # Errors
    /// [`AdapterError::Invalid`] for tensors whose layout is not known, [`AdapterError::Gpu`] for a
    /// GPU that cannot be used.
    pub fn register_kv_caches(&self, layers: KvLayers) -> Result<(), AdapterError> {
        let shared = &self.shared;
        // Without a server any chunk size shows whether the layout is known.
        let chunk_size =
            (shared.common.server()).map_or(layers.tokens_per_block(), |s| s.chunk_size);
        let gpu = layers
            .gpu()
            .map(|uuid| shared.gpus.open(uuid))
            .transpose()?;
        let layouts = Layouts::describe(&layers, chunk_size, gpu.as_ref())?;
        if gpu.is_some() {
            self.start_loader()?;
        }
        *shared.gpu.lock() = gpu;
        *shared.registered.lock() = Some(Registered {
            layers,
            layouts,
            chunk_size,
        });
        self.link.reconnect();
        self.link
            .wait_until_up(shared.common.timeouts.start, || false);
        Ok(())
    }

    /// Takes the paged KV cache out of use, as before an engine sleeps. Once this has returned, its
    /// memory is not touched, and all GPU memory that the adapter took is freed. What is queued fails.
    /// Waits for copies under way, and for what the server still has to answer for as long as for any
    /// answer. Until the KV cache is registered again, stores are dropped and retrieves fail.
    pub fn unregister_kv_caches(&self) {
        if self.thread.is_forked() {
            return;
        }
        let shared = &self.shared;
        shared.work.lock().withdrawing = true;
        // The link's thread holds `registered` while it sets `pool`.
        *shared.registered.lock() = None;
        *shared.pool.lock() = None;
        *shared.gpu.lock() = None;
        let answered = Instant::now() + shared.common.timeouts.answer;
        let mut work = shared.work.lock();
        while work.is_busy() {
            if shared.changed.wait_until(&mut work, answered).timed_out() {
                break;
            }
        }
        drop(work);
        // The server gives back what it holds for the former connection.
        self.link.reconnect();
        let mut work = shared.work.lock();
        while work.carrying > 0 {
            shared.changed.wait(&mut work);
        }
        work.withdrawing = false;
        drop(work);
        shared.gpus.wait_until_given_back();
    }

    fn start_loader(&self) -> Result<(), AdapterError> {
        let mut loader = self.loader.lock();
        if loader.is_none() {
            let mover = Mover {
                shared: Arc::clone(&self.shared),
                link: Arc::clone(&self.link),
                copies: CopyPool::new(0)?,
                is_loader: true,
            };
            // From now on the other thread leaves retrieves to this one.
            self.shared.work.lock().has_loader = true;
            let thread = thread::Builder::new()
                .name("lmc-loader".to_owned())
                .spawn(move || mover.run())?;
            *loader = Some(OwnThread::new(thread));
        }
        Ok(())
    }

    /// Queues a store. Its blocks must keep their content until the request is reported by
    /// [`WorkerAdapter::get_finished`], or [`WorkerAdapter::wait_for_stores`] has returned.
    pub fn submit_store_request(&self, op: LoadStoreOp) {
        self.submit(Direction::Store, [op], None);
    }

    /// Queues a retrieve. Its blocks belong to the adapter until the request is reported by
    /// [`WorkerAdapter::get_finished`].
    pub fn submit_retrieve_request(&self, op: LoadStoreOp) {
        self.submit(Direction::Retrieve, [op], None);
    }

    /// Queues several stores, see [`WorkerAdapter::submit_store_request`]. Memory on a GPU is read
    /// when the work is done that `after` has been given so far; without a stream such stores fail.
    pub fn batched_submit_store_requests(
        &self,
        ops: Vec<LoadStoreOp>,
        after: Option<EngineStream>,
    ) {
        self.submit(Direction::Store, ops, after);
    }

    /// Queues several retrieves, see [`WorkerAdapter::submit_retrieve_request`]. Memory on a GPU is
    /// written when the work is done that `after` has been given so far; without a stream such
    /// retrieves fail.
    pub fn batched_submit_retrieve_requests(
        &self,
        ops: Vec<LoadStoreOp>,
        after: Option<EngineStream>,
    ) {
        self.submit(Direction::Retrieve, ops, after);
    }

    fn submit(
        &self,
        direction: Direction,
        ops: impl IntoIterator<Item = LoadStoreOp>,
        after: Option<EngineStream>,
    ) {
        // Nothing is carried out in a process that was forked, nor does the driver work there.
        let gpu = match self.thread.is_forked() {
            true => None,
            false => self.shared.gpu.lock().clone(),
        };
        let after = gpu.and_then(|gpu| {
            let EngineStream(stream) = after?;
            // SAFETY: `EngineStream::new` has the caller's promise.
            let mark = unsafe { gpu.mark(stream) };
            Some(mark.map(Arc::new))
        });
        let mut work = self.shared.work.lock();
        for op in ops {
            work.queue(direction, op, after.clone());
        }
        drop(work);
        self.shared.changed.notify_all();
    }

    /// Returns the requests whose transfers have ended. A request with stores is reported once, when
    /// the engine has named it finished, in this call or before; one with retrieves when they have
    /// ended.
    pub fn get_finished(&self, finished: impl IntoIterator<Item = String>) -> Finished {
        self.shared.work.lock().report(finished)
    }

    /// Returns the blocks that retrieves failed to fill since the last call, for engines with one
    /// group of layers: with several, [`Finished::failed`] alone says what failed. Called after
    /// [`WorkerAdapter::get_finished`], it returns those of each request that was reported, now or
    /// in an earlier call.
    pub fn get_block_ids_with_load_errors(&self) -> HashSet<u32> {
        std::mem::take(&mut self.shared.work.lock().failed_blocks)
    }

    /// Returns the stores with a number that have ended since the last call. Called after
    /// [`WorkerAdapter::get_finished`], it returns, now or in an earlier call, those of each request
    /// that was reported, but for stores that were dropped.
    pub fn take_ended_stores(&self) -> Vec<EndedStore> {
        std::mem::take(&mut self.shared.work.lock().ended)
    }

    /// Waits, at most for `time`, until the server has answered for the slots of all stores of these
    /// requests that are queued: from then on a lookup, also of another server's engine, learns that
    /// their chunks are being written. Returns false if the time is over.
    pub fn wait_until_reserved(&self, request_ids: &[String], time: Duration) -> bool {
        let shared = &self.shared;
        let deadline = Instant::now() + time;
        let mut work = shared.work.lock();
        while work.is_unreserved(request_ids) {
            if shared.changed.wait_until(&mut work, deadline).timed_out() {
                return !work.is_unreserved(request_ids);
            }
        }
        true
    }

    /// Returns true while a store of the request needs its blocks.
    pub fn has_stores(&self, request_id: &str) -> bool {
        self.shared.work.lock().has_stores(request_id, usize::MAX)
    }

    /// Waits until no store of these requests needs its blocks, so that their blocks may be written
    /// again. After `time`, what has not begun is dropped, and only the copy under way is waited
    /// for: it waits for no other process but for the GPU where blocks lie there, and its blocks must
    /// not change before it has ended. Returns true if nothing was dropped.
    pub fn wait_for_stores(&self, request_ids: &[String], time: Duration) -> bool {
        let all = request_ids.iter().map(|id| (&id[..], usize::MAX));
        self.wait_for_blocks(&all.collect::<Vec<_>>(), time)
    }

    /// Waits as [`WorkerAdapter::wait_for_stores`] does, for the stores of each request whose range
    /// begins before its token, and drops no others.
    pub fn wait_for_stores_before(&self, requests: &[(String, usize)], time: Duration) -> bool {
        let all = requests.iter().map(|(id, token)| (&id[..], *token));
        self.wait_for_blocks(&all.collect::<Vec<_>>(), time)
    }

    fn wait_for_blocks(&self, requests: &[(&str, usize)], time: Duration) -> bool {
        let shared = &self.shared;
        let deadline = Instant::now() + time;
        let mut work = shared.work.lock();
        let under_way =
            |work: &Work| (requests.iter()).any(|&(id, before)| work.has_stores(id, before));
        while under_way(&work) {
            if shared.changed.wait_until(&mut work, deadline).timed_out() {
                break;
            }
        }
        if !under_way(&work) {
            return true;
        }
        let dropped = requests
            .iter()
            .map(|&(id, before)| work.drop_stores(id, before))
            .sum::<usize>();
        add(&shared.counters.stores_failed, dropped as u64);
        // What is left is being copied.
        while under_way(&work) {
            shared.changed.wait(&mut work);
        }
        dropped == 0
    }

    /// Returns the state of the connection to the server.
    pub fn server(&self) -> ServerState {
        self.shared.common.state(&self.link)
    }

    /// Returns the lines for the engine's log since the last call.
    pub fn take_log(&self) -> Vec<LogLine> {
        self.shared.common.log.take()
    }

    /// Returns the figures since the start.
    pub fn stats(&self) -> WorkerStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        WorkerStats {
            stored_chunks: get(&counters.stored_chunks),
            stored_bytes: get(&counters.stored_bytes),
            stores_failed: get(&counters.stores_failed),
            retrieved_chunks: get(&counters.retrieved_chunks),
            retrieved_bytes: get(&counters.retrieved_bytes),
            retrieves_failed: get(&counters.retrieves_failed),
            copy_nanos: get(&counters.copy_nanos),
            connections_lost: self.link.lost(),
        }
    }

    /// Ends all threads. What was queued is dropped; the copy under way is waited for. The memory of
    /// the tensors is not touched afterwards.
    pub fn shutdown(&self) {
        if self.thread.is_forked() {
            return;
        }
        self.shared.work.lock().stopped = true;
        self.shared.changed.notify_all();
        // Answers that the thread waits for fail.
        self.link.stop();
        self.thread.join();
        if let Some(loader) = &*self.loader.lock() {
            loader.join();
        }
        {
            // What was queued holds marks of the GPU.
            let mut work = self.shared.work.lock();
            work.stores.clear();
            work.retrieves.clear();
        }
        *self.shared.pool.lock() = None;
        *self.shared.registered.lock() = None;
        *self.shared.gpu.lock() = None;
        self.shared.gpus.wait_until_given_back();
    }
}

impl Drop for WorkerAdapter {
    fn drop(&mut self) {
        self.shutdown();
    }
}
