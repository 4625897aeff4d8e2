//! An engine as the server sees it: a scheduler and its tensor-parallel workers.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lmc_vllm_adapter::{
    CacheKey, Client, CpuShm, EngineDrivenContext, EngineGroup, KvDescriptor, RegisterKvCache,
    Reply, Request, SlotDescriptor, TensorMeta, UnknownFields,
};

use super::args::{EngineArgs, Mode};
use super::mapped::Mapped;
use super::prompt::{Prompt, fill, piece_seed, wrong_bytes};
use super::wire::Encoded;

/// Parameters that all engines of a run share.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) args: EngineArgs,
    /// Tokens of the longest prompt.
    pub(crate) longest: usize,
    /// Name of the model; new to the server, so that no chunks are cached.
    pub(crate) model: String,
    pub(crate) chunk_tokens: usize,
}

/// Time and bytes of one store or retrieve.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moved {
    /// Time from the first request to the last answer, with the copies, but without creating and checking
    /// the bytes.
    pub(crate) took: Duration,
    /// Time of the round trips only.
    pub(crate) control: Duration,
    pub(crate) bytes: u64,
    pub(crate) chunks: u64,
    pub(crate) verified: u64,
    pub(crate) wrong: u64,
}

/// Outcome of one prompt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Served {
    /// Leading chunks that were found.
    pub(crate) found: u64,
    pub(crate) lookup: Duration,
    /// `None` if no chunks were found, or they were gone before the retrieve.
    pub(crate) retrieved: Option<Moved>,
    pub(crate) stored: Moved,
}

/// One worker: a connection, an id and the memory that chunks are copied from and to.
#[derive(Debug)]
struct Worker {
    client: Client,
    rank: u32,
    instance_id: u64,
    /// The server's pool if this worker copies, or its own paged memory if the server copies.
    memory: Mapped,
}

/// A scheduler and its workers.
#[derive(Debug)]
pub(crate) struct Engine {
    plan: Arc<Plan>,
    scheduler: Client,
    workers: Vec<Worker>,
    id: u64,
    scratch: Vec<u8>,
}

impl Plan {
    /// Asks the server for the tokens of a chunk.
    pub(crate) fn new(args: EngineArgs, model: String, longest: usize) -> Result<Self> {
        let mut plan = Self {
            args,
            longest,
            model,
            chunk_tokens: 0,
        };
        let reply = plan.connect()?.ask(&Request::GetChunkSize)?;
        let Reply::Int(chunk_tokens @ 1..=0x10_0000) = reply else {
            bail!("the server names an invalid chunk size: {reply:?}");
        };
        plan.chunk_tokens = chunk_tokens as usize;
        Ok(plan)
    }

    pub(crate) fn connect(&self) -> Result<Client> {
        let target = &self.args.url;
        Client::connect((target.host.as_str(), target.port), self.args.timeout).with_context(|| {
            format!(
                "no server for engines at tcp://{}:{}",
                target.host, target.port
            )
        })
    }

    pub(crate) fn key(&self, prompt: &Prompt, rank: Option<u32>, request_id: &str) -> CacheKey {
        CacheKey {
            model_name: self.model.clone(),
            world_size: self.args.tp,
            worker_id: rank,
            token_ids: prompt.tokens.clone(),
            end: (prompt.chunks() * self.chunk_tokens) as u64,
            request_id: request_id.to_owned(),
            num_kv_readers: 1,
            ..CacheKey::default()
        }
    }

    fn chunk_bytes(&self) -> usize {
        self.args.chunk_bytes(self.chunk_tokens)
    }

    fn block_bytes_in_layer(&self) -> usize {
        self.chunk_bytes() / self.args.layers as usize * self.args.block_size as usize
            / self.chunk_tokens
    }

    fn blocks_of_chunk(&self) -> usize {
        self.chunk_tokens / self.args.block_size as usize
    }

    /// Returns the blocks of paged memory for the longest prompt, and block 0, which means no block.
    fn paged_blocks(&self) -> usize {
        1 + self.longest / self.chunk_tokens * self.blocks_of_chunk()
    }
}

impl Worker {
    fn register(plan: &Plan, rank: u32) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let instance_id = u64::from(std::process::id()) << 20 | number;
        let mut client = plan.connect()?;
        let memory = match plan.args.mode {
            Mode::EngineDriven => register_engine_driven(plan, &mut client, instance_id)?,
            Mode::LmcacheDriven => register_paged(plan, &mut client, instance_id)?,
        };
        Ok(Self {
            client,
            rank,
            instance_id,
            memory,
        })
    }
}

fn register_engine_driven(plan: &Plan, client: &mut Client, instance_id: u64) -> Result<Mapped> {
    let args = &plan.args;
    let reply = client.ask(&Request::RegisterEngineDriven(EngineDrivenContext {
        instance_id,
        model_name: plan.model.clone(),
        world_size: args.tp,
        block_size: args.block_size,
        num_layers: args.layers,
        hidden_dim_size: args.hidden,
        dtype: args.dtype.name().to_owned(),
        use_mla: false,
        num_physical_slots: Some(plan.chunk_tokens as u32),
        record: None,
        unknown: UnknownFields::default(),
    }))?;
    let Reply::Registered {
        shm_name,
        pool_size,
    } = reply
    else {
        bail!("unexpected answer to a registration: {reply:?}");
    };
    ensure!(
        !shm_name.is_empty(),
        "the server has no shared pool: use --mode lmcache_driven"
    );
    Mapped::open(&shm_name, pool_size)
}

fn register_paged(plan: &Plan, client: &mut Client, instance_id: u64) -> Result<Mapped> {
    let args = &plan.args;
    let blocks = plan.paged_blocks();
    let layer_bytes = blocks * plan.block_bytes_in_layer();
    let nbytes = layer_bytes * args.layers as usize;
    let name = format!("lmc_bench_kv_{instance_id}");
    let memory = Mapped::create(&name, nbytes)?;
    // `[blocks, heads, tokens, 2 * size]`, as in vLLM's CPU attention.
    let heads = if args.hidden.is_multiple_of(64) {
        args.hidden / 64
    } else {
        1
    };
    let shape = [
        blocks as u64,
        u64::from(heads),
        u64::from(args.block_size),
        2 * u64::from(args.hidden / heads),
    ];
    let elements: u64 = shape.iter().product();
    let kv_caches = (0..u64::from(args.layers)).map(|layer| {
        KvDescriptor::CpuShm(CpuShm {
            shm_name: format!("/{name}"),
            nbytes: nbytes as u64,
            tensor: TensorMeta {
                dtype: args.dtype.name().to_owned(),
                shape: shape.to_vec(),
                stride: vec![
                    shape[1] * shape[2] * shape[3],
                    shape[2] * shape[3],
                    shape[3],
                    1,
                ],
                storage_offset: layer * elements,
            },
        })
    });
    client.ask(&Request::RegisterKvCache(Box::new(RegisterKvCache {
        instance_id,
        kv_caches: kv_caches.collect(),
        model_name: plan.model.clone(),
        world_size: args.tp,
        engine_type: "vllm".to_owned(),
        kv_layout: Some("HND".to_owned()),
        unknown_hints: UnknownFields::default(),
        groups: vec![EngineGroup {
            layer_indices: (0..args.layers).collect(),
            tokens_per_block: args.block_size,
            sw_size_tokens: -1,
            ..EngineGroup::default()
        }],
    })))?;
    Ok(memory)
}

impl Engine {
    /// Connects a scheduler and registers all workers.
    pub(crate) fn start(plan: &Arc<Plan>) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let args = &plan.args;
        ensure!(
            plan.chunk_tokens.is_multiple_of(args.block_size as usize),
            "--block-size: expected a divisor of the server's chunk of {} tokens, found {}",
            plan.chunk_tokens,
            args.block_size
        );
        let workers = (0..args.tp).map(|rank| Worker::register(plan, rank));
        Ok(Self {
            plan: Arc::clone(plan),
            scheduler: plan.connect()?,
            workers: workers.collect::<Result<_>>()?,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            scratch: vec![0; plan.chunk_bytes()],
        })
    }

    /// Ends the registrations.
    pub(crate) fn stop(mut self) -> Result<()> {
        let engine_driven = self.plan.args.mode == Mode::EngineDriven;
        for worker in &mut self.workers {
            worker.client.ask(&Request::Unregister {
                instance_id: worker.instance_id,
                engine_driven,
            })?;
        }
        Ok(())
    }

    /// Returns a request id that no request of any run had before: after a clear, a server takes a reused
    /// id for the earlier request.
    fn request_id(&self) -> String {
        static RUN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one("run"));
        static REQUESTS: AtomicU64 = AtomicU64::new(0);
        let number = REQUESTS.fetch_add(1, Ordering::Relaxed);
        format!("bench-{:016x}-{}-{number}", *RUN, self.id)
    }

    fn end(&mut self, request_id: String) -> Result<()> {
        self.scheduler.ask(&Request::EndSession { request_id })?;
        Ok(())
    }

    /// Looks up a prompt and ends the request. Returns the number of chunks and the time until it was known.
    pub(crate) fn lookup(&mut self, prompt: &Prompt) -> Result<(u64, Duration)> {
        let request = self.request_id();
        let found = self.look_up(prompt, &request)?;
        self.end(request)?;
        Ok(found)
    }

    fn look_up(&mut self, prompt: &Prompt, request: &str) -> Result<(u64, Duration)> {
        let lookup = Encoded::new(&Request::Lookup(self.plan.key(prompt, None, request)));
        let query = Encoded::new(&Request::QueryPrefetchStatus {
            request_id: request.to_owned(),
        });
        let started = Instant::now();
        lookup.ask(&mut self.scheduler)?;
        loop {
            query.send(&mut self.scheduler)?;
            if let Some(chunks) = query.receive_hits(&mut self.scheduler)? {
                return Ok((chunks, started.elapsed()));
            }
            ensure!(
                started.elapsed() < self.plan.args.timeout,
                "the lookup was not answered within {:?}",
                self.plan.args.timeout
            );
        }
    }

    /// Stores a prompt as all workers.
    pub(crate) fn store(&mut self, prompt: &Prompt) -> Result<Moved> {
        let request = self.request_id();
        // As engines do: without a lookup, a server does not know when the request began.
        self.look_up(prompt, &request)?;
        let moved = self.store_from(prompt, 0, &request)?;
        self.end(request)?;
        Ok(moved)
    }

    /// Retrieves a whole prompt as all workers; `None` if some of its chunks are no longer cached.
    pub(crate) fn retrieve(&mut self, prompt: &Prompt) -> Result<Option<Moved>> {
        let request = self.request_id();
        let (found, _) = self.look_up(prompt, &request)?;
        let moved = if found < prompt.chunks() as u64 {
            None
        } else {
            self.retrieve_all(prompt, &request)?
        };
        self.end(request)?;
        Ok(moved)
    }

    /// Serves a prompt as an engine does: looks it up, retrieves the chunks found, and stores the others.
    pub(crate) fn serve(&mut self, prompt: &Prompt) -> Result<Served> {
        let mut served = Served::default();
        if prompt.chunks() == 0 {
            return Ok(served);
        }
        let request = self.request_id();
        (served.found, served.lookup) = self.look_up(prompt, &request)?;
        let found = usize::try_from(served.found).unwrap_or(usize::MAX);
        ensure!(
            found <= prompt.chunks(),
            "the server found {found} chunks of a prompt that has {}",
            prompt.chunks()
        );
        if found > 0 {
            let leading = prompt.leading(found, self.plan.chunk_tokens);
            served.retrieved = self.retrieve_all(&leading, &request)?;
        }
        if found < prompt.chunks() {
            served.stored = self.store_from(prompt, found, &request)?;
        }
        self.end(request)?;
        Ok(served)
    }

    /// Stores the chunks from index `first` on; the mode decides which side copies.
    fn store_from(&mut self, prompt: &Prompt, first: usize, request: &str) -> Result<Moved> {
        match self.plan.args.mode {
            // The server names the chunks that it lacks.
            Mode::EngineDriven => self.store_by_worker(prompt, request),
            Mode::LmcacheDriven => self.store_by_server(prompt, first, request),
        }
    }

    /// Retrieves every chunk; the mode decides which side copies. `None` if some chunks are gone.
    fn retrieve_all(&mut self, prompt: &Prompt, request: &str) -> Result<Option<Moved>> {
        match self.plan.args.mode {
            Mode::EngineDriven => self.retrieve_by_worker(prompt, request),
            Mode::LmcacheDriven => self.retrieve_by_server(prompt, request),
        }
    }

    /// Sends one request of each worker together. Returns the answers and the time.
    fn all(
        &mut self,
        prompt: &Prompt,
        request: &str,
        make: impl Fn(CacheKey, u64) -> Request,
    ) -> Result<(Vec<Reply>, Duration)> {
        let plan = &self.plan;
        let encoded: Vec<Encoded> = self
            .workers
            .iter()
            .map(|worker| {
                let key = plan.key(prompt, Some(worker.rank), request);
                Encoded::new(&make(key, worker.instance_id))
            })
            .collect();
        let started = Instant::now();
        for (worker, request) in self.workers.iter_mut().zip(&encoded) {
            request.send(&mut worker.client)?;
        }
        let replies = self
            .workers
            .iter_mut()
            .zip(&encoded)
            .map(|(worker, request)| request.receive(&mut worker.client));
        let replies = replies.collect::<Result<_>>()?;
        Ok((replies, started.elapsed()))
    }

    fn store_by_worker(&mut self, prompt: &Prompt, request: &str) -> Result<Moved> {
        let mut moved = Moved::default();
        let (replies, took) = self.all(prompt, request, |key, instance_id| {
            Request::PrepareStore { key, instance_id }
        })?;
        moved.control += took;
        let mut copies = Duration::ZERO;
        let mut any = false;
        for (worker, reply) in self.workers.iter().zip(replies) {
            let Reply::StoreSlots {
                slots,
                chunk_indices,
            } = reply
            else {
                bail!("unexpected answer to prepare_store: {reply:?}");
            };
            for (slot, index) in slots.iter().zip(chunk_indices) {
                let seed = prompt.seeds.get(index as usize);
                let seed = *seed.context("the server named a chunk that was not requested")?;
                check_length(slot, self.scratch.len())?;
                fill(piece_seed(seed, worker.rank, 0), &mut self.scratch);
                let started = Instant::now();
                worker.memory.write(slot.offset, &self.scratch)?;
                copies += started.elapsed();
                moved.bytes += slot.length;
                moved.chunks += 1;
                any = true;
            }
        }
        if any {
            let (replies, took) =
                self.all(prompt, request, |key, instance_id| Request::CommitStore {
                    key,
                    instance_id,
                    pickled: 0,
                })?;
            moved.control += took;
            for reply in replies {
                ensure!(reply == Reply::Bool(true), "a store failed: {reply:?}");
            }
        }
        moved.took = moved.control + copies;
        Ok(moved)
    }

    fn retrieve_by_worker(&mut self, prompt: &Prompt, request: &str) -> Result<Option<Moved>> {
        let mut moved = Moved::default();
        let (replies, took) = self.all(prompt, request, |key, instance_id| {
            Request::PrepareRetrieve { key, instance_id }
        })?;
        moved.control += took;
        let mut copies = Duration::ZERO;
        let mut missed = false;
        for (worker, reply) in self.workers.iter().zip(replies) {
            let Reply::RetrieveSlots(slots) = reply else {
                bail!("unexpected answer to prepare_retrieve: {reply:?}");
            };
            let Some(slots) = slots else {
                missed = true;
                continue;
            };
            ensure!(
                slots.len() == prompt.chunks(),
                "expected {} chunks from the server, found {}",
                prompt.chunks(),
                slots.len()
            );
            for (slot, &seed) in slots.iter().zip(&prompt.seeds) {
                check_length(slot, self.scratch.len())?;
                let started = Instant::now();
                worker.memory.read(slot.offset, &mut self.scratch)?;
                copies += started.elapsed();
                if self.plan.args.verify {
                    moved.verified += slot.length;
                    moved.wrong += wrong_bytes(piece_seed(seed, worker.rank, 0), &self.scratch);
                }
                moved.bytes += slot.length;
                moved.chunks += 1;
            }
        }
        let (_, took) = self.all(prompt, request, |key, instance_id| {
            Request::CommitRetrieve { key, instance_id }
        })?;
        moved.control += took;
        moved.took = moved.control + copies;
        Ok((!missed).then_some(moved))
    }

    fn block_ids(&self, prompt: &Prompt) -> Vec<Vec<u32>> {
        let blocks = prompt.chunks() * self.plan.blocks_of_chunk();
        vec![(1..=blocks as u32).collect()]
    }

    /// Calls `each` with the offset and the seed of each block of a prompt in paged memory.
    fn each_block(
        plan: &Plan,
        prompt: &Prompt,
        rank: u32,
        mut each: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let per_chunk = plan.blocks_of_chunk();
        let bytes = plan.block_bytes_in_layer();
        for layer in 0..plan.args.layers as usize {
            for (chunk, &seed) in prompt.seeds.iter().enumerate() {
                for block in 0..per_chunk {
                    let index = layer * plan.paged_blocks() + 1 + chunk * per_chunk + block;
                    let part = (layer * per_chunk + block) as u64;
                    each((index * bytes) as u64, piece_seed(seed, rank, part))?;
                }
            }
        }
        Ok(())
    }

    /// Stores the chunks from index `first` on; the server copies.
    fn store_by_server(&mut self, prompt: &Prompt, first: usize, request: &str) -> Result<Moved> {
        let plan = Arc::clone(&self.plan);
        let mut block = vec![0; plan.block_bytes_in_layer()];
        for worker in &self.workers {
            Self::each_block(&plan, prompt, worker.rank, |offset, seed| {
                fill(seed, &mut block);
                worker.memory.write(offset, &block)
            })?;
        }
        let block_ids: Vec<Vec<u32>> = (self.block_ids(prompt).into_iter())
            .map(|ids| ids[first * plan.blocks_of_chunk()..].to_vec())
            .collect();
        let chunks = prompt.chunks() - first;
        let moved = self.by_server(prompt, chunks, request, |key, instance_id| Request::Store {
            key: CacheKey {
                start: (first * plan.chunk_tokens) as u64,
                ..key
            },
            instance_id,
            block_ids: block_ids.clone(),
            event: Vec::new(),
        })?;
        moved.context("a store failed")
    }

    fn retrieve_by_server(&mut self, prompt: &Prompt, request: &str) -> Result<Option<Moved>> {
        let plan = Arc::clone(&self.plan);
        let mut block = vec![0xEE; plan.block_bytes_in_layer()];
        if plan.args.verify {
            // Bytes of an earlier request must not pass for bytes of this one.
            for worker in &self.workers {
                Self::each_block(&plan, prompt, worker.rank, |offset, _| {
                    worker.memory.write(offset, &block)
                })?;
            }
        }
        let block_ids = self.block_ids(prompt);
        let chunks = prompt.chunks();
        let moved = self.by_server(prompt, chunks, request, |key, instance_id| {
            Request::Retrieve {
                key,
                instance_id,
                block_ids: block_ids.clone(),
                event: Vec::new(),
                skip_first_n_tokens: 0,
            }
        })?;
        let Some(mut moved) = moved else {
            return Ok(None);
        };
        if plan.args.verify {
            for worker in &self.workers {
                Self::each_block(&plan, prompt, worker.rank, |offset, seed| {
                    worker.memory.read(offset, &mut block)?;
                    moved.verified += block.len() as u64;
                    moved.wrong += wrong_bytes(seed, &block);
                    Ok(())
                })?;
            }
        }
        Ok(Some(moved))
    }

    /// Lets the server copy `chunks` chunks for each worker; `None` if a copy was not made.
    fn by_server(
        &mut self,
        prompt: &Prompt,
        chunks: usize,
        request: &str,
        make: impl Fn(CacheKey, u64) -> Request,
    ) -> Result<Option<Moved>> {
        let (replies, took) = self.all(prompt, request, make)?;
        let chunks = (chunks * self.workers.len()) as u64;
        let all = replies
            .iter()
            .all(|reply| *reply == Reply::Transferred(true));
        Ok(all.then_some(Moved {
            took,
            control: took,
            bytes: chunks * self.plan.chunk_bytes() as u64,
            chunks,
            ..Moved::default()
        }))
    }
}

fn check_length(slot: &SlotDescriptor, expected: usize) -> Result<()> {
    ensure!(
        slot.length == expected as u64,
        "expected slots of {expected} bytes, found {}",
        slot.length
    );
    Ok(())
}
