//! State that the threads of a worker's adapter share, and the setup of a connection, which makes
//! the pool.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::cuda::{CudaError, Gpu, Gpus, Registration};
use lmc_memory::{MappedSegment, Planes, SharedName};
use parking_lot::{Condvar, Mutex};

use crate::adapters::common::{Common, Server};
use crate::adapters::link::{SessionId, Setup};
use crate::adapters::log::Level;
use crate::adapters::prompt::tail_request_id;
use crate::adapters::tensors::Described;
use crate::adapters::work::{Direction, Work};
use crate::adapters::{AdapterError, KvLayers, LoadStoreOp, Prompt};
use crate::protocol::{CacheKey, EngineDrivenContext, EngineRecord, Reply, Request, UnknownFields};

#[derive(Debug, Default)]
pub(crate) struct WorkerCounters {
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

/// The layout of the engine's memory in the two kinds of chunks.
#[derive(Debug, Clone)]
pub(crate) struct Layouts {
    /// Whole chunks, of the server's size.
    chunk: Arc<Described>,
    /// Chunks of one block, for tails.
    block: Arc<Described>,
}

impl Layouts {
    pub(crate) fn describe(
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

    /// Returns the layout of the chunks that a prompt's name stands for.
    pub(crate) fn of(&self, prompt: &Prompt) -> &Described {
        match prompt.is_tail() {
            true => &self.block,
            false => &self.chunk,
        }
    }
}

/// The engine's memory, once it is registered.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) layers: KvLayers,
    pub(crate) layouts: Layouts,
    pub(crate) chunk_size: u32,
}

/// The pool of the connected server.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    pub(crate) session: SessionId,
    pub(crate) memory: Arc<MappedSegment>,
    pub(crate) layouts: Layouts,
    pub(crate) server: Server,
    /// Keeps the pool's memory registered with the driver, if the engine's memory lies on a GPU.
    _registration: Option<Arc<Registration>>,
}

#[derive(Debug)]
pub(crate) struct WorkerState {
    pub(crate) common: Arc<Common>,
    /// Ids under which the server knows this worker: the first for whole chunks, the second for single blocks.
    pub(crate) instance_ids: [u64; 2],
    /// True if the next ping is about the second id.
    pub(crate) pings_second: AtomicBool,
    pub(crate) kv_rank: u32,
    pub(crate) registered: Mutex<Option<Registered>>,
    pub(crate) gpus: Gpus,
    /// The GPU that the engine's memory lies on. Locked for short times only.
    pub(crate) gpu: Mutex<Option<Arc<Gpu>>>,
    pub(crate) pool: Mutex<Option<Pool>>,
    /// True if the next connection maps the pool by its name, because the last one brought no
    /// descriptor.
    pub(crate) by_name: AtomicBool,
    pub(crate) work: Mutex<Work>,
    pub(crate) changed: Condvar,
    pub(crate) counters: WorkerCounters,
}

pub(crate) struct WorkerSetup(pub(crate) Arc<WorkerState>);

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
            // The memory was registered while no server was connected.
            let layouts = Layouts::describe(&registered.layers, server.chunk_size, gpu.as_ref());
            registered.layouts = layouts.map_err(|error| error.to_string())?;
            registered.chunk_size = server.chunk_size;
        }
        let layouts = &registered.layouts;
        let registration = match replies.get(2..).unwrap_or_default() {
            [] if server.pool_descriptor && !shared.by_name.swap(false, Ordering::Relaxed) => {
                return Ok(Some(Request::PoolDescriptor));
            }
            // On this connection the server would take the other end, which is a proxy, for the
            // process that copies.
            [Reply::Int(_)] if descriptor.is_none() => {
                shared.by_name.store(true, Ordering::Relaxed);
                return Err(
                    "the descriptor of its pool did not arrive, probably because of a proxy"
                        .to_owned(),
                );
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
            // A registration enters the pages as well.
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
        // A mover that is about to wait holds the lock.
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

/// Enters the pages of the pool into the page table of this process as soon as the server has them.
/// Otherwise each copy to a new slot stops at each of the slot's pages.
///
/// Threads of the engine that map memory wait while a piece is entered. So this thread has the
/// engine's own priority: a thread of low priority would wait for a core in the middle of a piece,
/// for seconds on a busy machine. It rests between two pieces instead.
fn enter_pages(memory: &Arc<MappedSegment>) {
    const PART: u64 = 8 << 20;
    /// Bytes that are entered at a time.
    const PIECE: usize = 256 << 10;
    /// Rest after a piece, as a multiple of the piece's time: the thread uses a fifth of a core.
    const REST: u32 = 4;
    const LONGEST_REST: Duration = Duration::from_millis(10);
    const AGAIN: Duration = Duration::from_secs(1);
    /// Most passes in a row that find nothing new: the server gets its pages as they are used, or
    /// has gone.
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
    // Entering pages only saves time, so a failure is ignored.
    let _ = thread::Builder::new()
        .name("lmc-pages".to_owned())
        .spawn(run);
}

impl WorkerState {
    /// Returns the registration of chunks; `unit` are their tokens, if not the server's chunk size.
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
                "the pool cannot be registered with the GPU's driver, so copies run at a fifth of \
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
            // The id under which the scheduler has looked up the tail.
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

    /// Returns the worker's id for the chunks that a prompt's name stands for.
    pub(crate) fn instance_id(&self, prompt: &Prompt) -> u64 {
        self.instance_ids[usize::from(prompt.is_tail())]
    }

    /// Returns the pool of the present connection.
    pub(crate) fn pool(&self, session: SessionId) -> Option<Pool> {
        let pool = self.pool.lock().clone();
        pool.filter(|pool| session != 0 && pool.session == session)
    }
}
